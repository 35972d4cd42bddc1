"""Task maps and their verification: labels that mean nothing, halves of the contents, and random sets of heads."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from calibration.rows import Bench, Measured, row
from tl_headmaps import HeadIndex, TaskMaps, Tasks, load_tasks
from tl_headmaps.analyses.task_maps import _Design, _probed, _result
from tl_headmaps.analyses.verify_tasks import _matched, _own_heads
from tl_headmaps.analyses.verify_tasks import _result as _verified
from tl_headmaps.capture.running.activations import prepends_bos
from tl_headmaps.capture.running.answers import answer_likelihoods, encode_question
from tl_headmaps.capture.running.head_features import capture_head_features
from tl_headmaps.scorers.ablation import masks_of
from tl_headmaps.scorers.statistics import permuted_within
from tl_headmaps.scorers.tasks import Features

N_ITEMS = 30
"""Items of each function; the bundled ones are 150."""

FEW = ("knowledge_recall", "retrieval", "inference")
"""Functions of the quick slice, and where many maps are made: the work grows with the square of the items."""

N_NULL = 99
N_FOLDS = 5
T4, T8 = 2.7764451, 2.3060041
"""Student's 97.5% points: the interval of one half, and that of a difference of two."""


def items(few: bool) -> Tasks:
    return load_tasks(FEW).sample(24) if few else load_tasks().sample(N_ITEMS)


@cache
def captured(bench: Bench, few: bool) -> tuple[Tasks, torch.Tensor]:
    """Items of few functions or of all, and z of every head at their answers: [layer, item, head * d_head]."""
    tasks = items(few)
    bos = prepends_bos(bench.model, None)
    asked = [encode_question(bench.model, item.prompt, (item.answer, *item.alternatives), bos) for item in tasks.items]
    found = capture_head_features(
        bench.model,
        [question.answered for question in asked],
        [(len(question.prompt), len(question.answered)) for question in asked],
        parameters=bench.weights.parameters_digest,
    )
    return tasks, torch.stack([found.layer(layer) for layer in found.layers])


def maps_of(
    bench: Bench,
    places: list[int] | None = None,
    shuffle: np.random.Generator | None = None,
    n_null: int = 1,
    few: bool = False,
) -> TaskMaps:
    """Task maps of some of the items; with labels exchanged within matched sets, if a generator is given."""
    tasks, values = captured(bench, few or bench.quick)
    places = list(range(len(tasks))) if places is None else places
    chosen = replace(tasks, items=tuple(tasks.items[place] for place in places))
    design = _Design.of(chosen, N_FOLDS, bench.seed)
    if shuffle is not None:
        design = replace(design, labels=design.labels[permuted_within(design.groups, shuffle)])
    features = Features(lambda layer: values[layer, places], len(values), bench.weights.n_heads)
    seed = bench.seed if shuffle is None else int(shuffle.integers(1 << 30))
    found = _probed(features, design, n_null=n_null, seed=seed, progress=lambda n: None)
    provenance = bench.weights.provenance(options={"n_null": n_null}, seed=seed)
    return _result(bench.weights, found, design, chosen, positions="answer", provenance=provenance)


@row("task_maps", "p_value", "q_value", null="labels exchanged within matched sets")
def importance_p_values(bench: Bench) -> Measured:
    generator, n_null = bench.generator(), bench.count(N_NULL, 19)
    maps = (maps_of(bench, None, generator, n_null) for _ in range(bench.count(6, 2)))
    return Measured.of_p_values(torch.stack([one.p_value for one in maps]))


@row("task_maps", "standing_out", null="labels exchanged within matched sets, 499 shuffles, 3 functions")
def heads_standing_out(bench: Bench) -> Measured:
    """A map is wrong if any head stands out in it: with nothing to be found, that is the false discovery rate."""
    generator, n_null = bench.generator(), bench.count(499, 49)
    maps = (maps_of(bench, None, generator, n_null, few=True) for _ in range(bench.count(60, 2)))
    return Measured.of_verdicts([any(one.standing_out) for one in maps])


@cache
def on_halves(bench: Bench) -> list[tuple[TaskMaps, TaskMaps]]:
    """Maps of two halves that share no content, for several ways to halve the contents."""
    tasks, _ = captured(bench, bench.quick)
    contents = sorted({item.content for item in tasks.items})
    generator, pairs = bench.generator(), []
    for _ in range(bench.count(4, 1)):
        first = set(generator.permutation(contents)[: len(contents) // 2].tolist())
        sides: tuple[list[int], list[int]] = ([], [])
        for place, item in enumerate(tasks.items):
            sides[item.content not in first].append(place)
        pairs.append((maps_of(bench, sides[0]), maps_of(bench, sides[1])))
    return pairs


def differ_as_told(one: TaskMaps, other: TaskMaps) -> torch.Tensor:
    """Whether importances differ by no more than their intervals say of the difference."""
    errors = [(maps.interval_high - maps.importance) / T4 for maps in (one, other)]
    width = T8 * (errors[0].square() + errors[1].square()).sqrt()
    return (one.importance - other.importance).abs() <= width


@row("task_maps", "interval_low", "interval_high", null="the same head in two disjoint halves of the contents")
def importance_intervals(bench: Bench) -> Measured:
    return Measured.of_intervals(torch.stack([differ_as_told(*pair) for pair in on_halves(bench)]))


@row(
    "task_maps",
    "probe_low",
    "probe_high",
    null="the same function in two disjoint halves of the contents",
    why="All 32 differences are inside: too few to tell .98 from 1. The interval is over the tested contents "
    "alone; what a probe trained on others would get is not in it, as the docstring says.",
)
def accuracy_intervals(bench: Bench) -> Measured:
    covered = []
    for one, other in on_halves(bench):
        # Newcombe's interval of a difference, from the intervals of both shares.
        above = (one.probe_accuracy - one.probe_low).square() + (other.probe_high - other.probe_accuracy).square()
        below = (one.probe_high - one.probe_accuracy).square() + (other.probe_accuracy - other.probe_low).square()
        difference = one.probe_accuracy - other.probe_accuracy
        covered.append((difference <= above.sqrt()) & (-difference <= below.sqrt()))
    return Measured.of_intervals(torch.stack(covered))


@cache
def margins_without(bench: Bench) -> dict[int, torch.Tensor]:
    """Margins of some questions without each two heads of a layer [question, head, head], by layer.

    On the diagonal are the margins with all heads.
    """
    weights, n_heads, n_asked = bench.weights, bench.weights.n_heads, bench.count(N_FOLDS, 2)
    first, second = torch.triu_indices(n_heads, n_heads, 1)
    found = {}
    for layer, function in zip((20,) if bench.quick else (5, 12, 20, 27), itertools.cycle(FEW)):
        mine = [item for item in items(bench.quick).items if item.function == function]
        chosen = [mine[place] for place in bench.generator().permutation(len(mine))[:n_asked]]
        asked = [encode_question(bench.model, one.prompt, (one.answer, *one.alternatives), True) for one in chosen]
        pairs = (
            [HeadIndex(layer, head) for head in pair] for pair in zip(first.tolist(), second.tolist(), strict=True)
        )
        masks = masks_of([[], *pairs], weights.n_layers, n_heads)
        told = answer_likelihoods(
            bench.model, [question for question in asked for _ in masks], ablated=masks.repeat(n_asked, 1, 1)
        )
        margins = torch.tensor([values[0] - max(values[1:]) for values in told], dtype=torch.float64).view(n_asked, -1)
        found[layer] = margins[:, :1, None].repeat(1, n_heads, n_heads)
        found[layer][:, first, second] = found[layer][:, second, first] = margins[:, 1:]
    return found


def called_own(bench: Bench, margins: dict[int, torch.Tensor]) -> Measured:
    """Two random heads of a layer are own, in each fold; with margins by layer [fold, head, head].

    Importances are noise, most of it the same in all folds, so that folds share heads as they do in results. Every
    choice has draws of its own: with the same ones for all, the least of them would decide about the whole layer.
    """
    weights, generator, p_values = bench.weights, bench.generator(), []
    provenance = weights.provenance(seed=bench.seed)
    for layer, margin in margins.items():
        n_folds = len(margin)
        folds = torch.arange(n_folds)
        for _ in range(bench.count(1000, 500)):
            noise = torch.from_numpy(generator.normal(size=(1 + n_folds, weights.n_heads))).float()
            importance = torch.full((n_folds, 1, weights.n_layers, weights.n_heads), -torch.inf)
            importance[:, 0, layer] = noise[0] + noise[1:] / 2
            own = _own_heads(importance, [2])[:, 0]
            draws = _matched(own, weights.chosen_heads(), 19, int(generator.integers(1 << 30)))
            off = torch.cat([own[None], draws.masks])[:, :, layer].nonzero()[:, 2].view(-1, n_folds, 2)
            without = margin[folds, off[..., 0], off[..., 1]]
            verified = _verified(
                ("random",),
                torch.cat([margin[None, :, 0, 0], without]).unbind(1),
                torch.zeros_like(folds),
                folds,
                chances=torch.zeros(n_folds),
                n_ablated=(2,),
                n_random=(len(draws.masks),),
                n_moved=(draws.n_moved,),
                provenance=provenance,
            )
            p_values.append(float(verified.p_value))
    return Measured.of_p_values(p_values)


@row("verify_tasks", "p_value", "q_value", "verdicts", null="random heads called own in five folds, 19 sets")
def random_heads_called_own(bench: Bench) -> Measured:
    return called_own(bench, margins_without(bench))


@row(
    "verify_tasks",
    "p_value",
    "q_value",
    "verdicts",
    null="random heads called own in five folds that ask one question, 19 sets",
)
def random_heads_that_matter_alike(bench: Bench) -> Measured:
    """One question for all folds: whatever own heads do to it does not average out, so nor may what draws do."""
    return called_own(bench, {layer: one[:1].repeat(N_FOLDS, 1, 1) for layer, one in margins_without(bench).items()})
