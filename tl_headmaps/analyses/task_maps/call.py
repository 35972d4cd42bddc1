"""``task_maps``: which heads serve which cognitive function.

For prompts labelled with a function, every head's z is averaged over the tokens of the answer, a cross-validated probe
tells the functions apart, and each head gets the part of the probe's logits that is read from it (see
:mod:`..scorers.tasks`). Words can give a label away, so three things are done about it: baselines say what words and
formats tell alone, items are tested in a wording that was not trained on, and the main probe starts from what the
items' words tell: importance is what the heads know beyond that. The null is the same probe with labels exchanged among
items of equal words.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...capture.running.activations import DEFAULT_BUDGET, prepends_bos
from ...capture.running.answers import Question, encode_question
from ...capture.running.head_features import capture_head_features
from ...capture.weights import HeadWeights
from ...core.ambient import steady
from ...core.errors import UsageError
from ...core.progress import Progress
from ...core.types import HeadIndex, Model, Positions, check_choice, check_count
from ...data.tasks import TaskItem, Tasks, load_tasks
from ...scorers.probe import (
    WORD_PENALTY,
    BeyondWords,
    Cell,
    majority_predictions,
    majority_share,
    one_hot,
    recognised,
    word_products,
)
from ...scorers.statistics import clustered_interval, clusters_of, jackknife_half_width, permuted_within, q_values
from ...scorers.tasks import (
    PENALTY,
    Features,
    Probes,
    cells_of,
    content_folds,
    exchange_groups,
    fit_probes,
    head_importance,
    normalised,
    rank_correlations,
    wording_folds,
)
from .result import SIGNIFICANT, TaskMaps

_MOST_SHUFFLES = 10_000
"""Shuffles, at most: the probes of all of them are in memory at once, 6 GB of them for the bundled items."""

_PLAIN, _BEYOND = 0, 1
"""The first two fits: on heads alone, and beyond words. Shuffled ones follow."""


@steady
def task_maps(
    model: Model,
    tasks: Tasks | str | Path | None = None,
    *,
    positions: Positions = "answer",
    n_folds: int = 5,
    n_null: int = 499,
    seed: int = 0,
    prepend_bos: bool | None = None,
    budget: int = DEFAULT_BUDGET,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> TaskMaps:
    """Importance of every head for every function of labelled task items.

    Args:
        model: TransformerBridge or HookedTransformer with a tokenizer.
        tasks: The items, or a file for :meth:`Tasks.from_file`; the bundled items by default.
        positions: Where heads are read: ``"answer"``, averaged over its tokens, or ``"last"``, the token before it.
        n_folds: Parts for cross-validation; contents stay whole. Formats are put into as many groups at most, and held
            out too.
        n_null: How often labels are shuffled for the null. A head's p-value is at least ``1 / (1 + n_null)``, so with
            few shuffles no head of many can stand out.
        seed: Decides folds, shuffles and halves.
        prepend_bos: Begin each prompt with BOS; by default as the model does.
        budget: Bytes a batch of prompts may take.
        cache_dir: Where captured activations are saved for the next call; the cache folder by default.
        progress: Show progress bars on a terminal.

    Example:
        >>> from tl_headmaps import TaskItem, Tasks, load_default_model, task_maps
        >>> sums = [TaskItem(f"{n} + 1 =", str(n + 1), "math_calculation", content=str(n)) for n in range(10)]
        >>> cups = [TaskItem(f"{n} is", "red", "retrieval", f"Cup {n} is red.", content=str(n)) for n in range(10)]
        >>> tasks = Tasks((*sums, *cups))
        >>> maps = task_maps(load_default_model(), tasks, n_folds=3, n_null=19, cache_dir="cache", progress=False)
        >>> maps.functions, maps.probe_accuracy.tolist()
        (('retrieval', 'math_calculation'), [1.0, 1.0])
    """
    check_choice(positions, Positions, "positions")
    check_count("n_null", n_null, most=_MOST_SHUFFLES)
    chosen = resolve_tasks(tasks)
    design = _Design.of(chosen, n_folds, seed)
    weights = HeadWeights.from_model(model)
    weights.require_even_heads("task maps")
    prepend_bos = prepends_bos(model, prepend_bos)
    questions = [
        encode_question(model, item.prompt, (item.answer, *item.alternatives), prepend_bos) for item in chosen.items
    ]
    bars = partial(Progress, show=progress)
    with bars(total=len(questions), desc="activations", unit="item") as bar:
        captured = capture_head_features(
            model,
            [question.answered for question in questions],
            [_span(question, positions) for question in questions],
            parameters=weights.parameters_digest,
            cache_dir=cache_dir,
            budget=budget,
            progress=bar.update,
        )
    features = Features(lambda place: captured.layer(captured.layers[place]), len(captured.layers), weights.n_heads)
    with bars(total=features.n_layers, desc="probes", unit="layer") as bar:
        found = _probed(features, design, n_null=n_null, seed=seed, progress=bar.update)
    options = {"positions": positions, "n_folds": n_folds, "n_null": n_null, "prepend_bos": prepend_bos}
    provenance = weights.provenance(runs_model=True, options=options, data={chosen.name: chosen.digest}, seed=seed)
    return _result(weights, found, design, chosen, positions=positions, provenance=provenance)


def resolve_tasks(tasks: Tasks | str | Path | None) -> Tasks:
    """Items themselves, those of a file, or the bundled ones."""
    if tasks is None:
        return load_tasks()
    return tasks if isinstance(tasks, Tasks) else Tasks.from_file(tasks)


def _span(question: Question, positions: Positions) -> tuple[int, int]:
    end = len(question.prompt)
    return (end, len(question.answered)) if positions == "answer" else (end - 1, end)


@dataclass(frozen=True)
class _Design:
    """Who is held out with whom, and whose labels may be exchanged.

    Attributes:
        labels: Function of each item.
        n_classes: Number of functions.
        folds: Fold of contents of each item.
        wordings: Group of formats of each item; one group if formats are not held out.
        halves: Folds of two designs that share no content, -1 for the items of the other half; none with too few.
        groups: Items among which labels are exchanged.
        exchanged: What these groups are.
        words: Inner products of the items by their words.
    """

    labels: Int[Tensor, " item"]
    n_classes: int
    folds: Int[Tensor, " item"]
    wordings: Int[Tensor, " item"]
    halves: tuple[Int[Tensor, " item"], ...]
    groups: Int[Tensor, " item"]
    exchanged: tuple[str, ...]
    words: Float[Tensor, "item item"]

    @classmethod
    def of(cls, tasks: Tasks, n_folds: int, seed: int) -> "_Design":
        labels = torch.tensor([tasks.functions.index(item.function) for item in tasks.items])
        contents = [item.content for item in tasks.items]
        folds = content_folds(contents, labels, n_folds, seed, tasks.functions)
        n_classes = len(tasks.functions)
        wordings = wording_folds([item.format for item in tasks.items], labels, folds, n_classes)
        groups, exchanged = exchange_groups([item.matched for item in tasks.items], contents, labels, folds, wordings)
        halves = _halves(contents, labels, n_folds, seed, tasks.functions)
        words = word_products([_text(item) for item in tasks.items])
        return cls(labels, n_classes, folds, wordings, halves, groups, exchanged, words)

    @property
    def cells(self) -> list[Cell]:
        return cells_of(self.folds, self.wordings)


def _halves(
    contents: Sequence[str], labels: Int[Tensor, " item"], n_folds: int, seed: int, functions: Sequence[str]
) -> tuple[Int[Tensor, " item"], ...]:
    """Folds of two designs on disjoint halves of the contents; none where a half cannot be split in three."""
    names = list(dict.fromkeys(contents))
    order = np.random.default_rng(seed).permutation(len(names))
    halves = []
    for part in (order[: len(names) // 2], order[len(names) // 2 :]):
        own = {names[number] for number in part}
        inside = torch.tensor([content in own for content in contents])
        folds = torch.full_like(labels, -1)
        try:
            folds[inside] = content_folds(
                [content for content in contents if content in own],
                labels[inside],
                min(n_folds, len(part)),
                seed,
                functions,
            )
        except UsageError:
            return ()
        halves.append(folds)
    return tuple(halves)


def _text(item: TaskItem) -> str:
    return f"{item.prompt} {item.answer}"


@dataclass(frozen=True)
class _Found:
    """Importance of the plain probe, beyond words, without each fold, in two halves and with labels shuffled."""

    plain: Float[Tensor, "class layer head"]
    importance: Float[Tensor, "class layer head"]
    without: Float[Tensor, "fold class layer head"]
    halves: Float[Tensor, "half class layer head"]
    nulls: Float[Tensor, "null class layer head"]
    predicted: dict[str, Int[Tensor, " item"]]


def _probed(
    features: Features, design: _Design, *, n_null: int, seed: int, progress: Callable[[int], object]
) -> _Found:
    """All fits, with one factorisation for each cell and one pass over the layers for all of them."""
    labels, folds, n_classes = design.labels, design.folds, design.n_classes
    generator = np.random.default_rng(seed)
    items = torch.arange(len(labels))
    # A label moves together with what the words say of it: they know which functions are in a set, not whose it is.
    orders = torch.stack([items, *(permuted_within(design.groups, generator) for _ in range(n_null))])
    told = BeyondWords(design.words, labels, folds, n_classes)
    right = one_hot(labels, n_classes)
    shuffled = torch.cat([labels[None], labels[orders]])
    known = cells_of(folds, torch.zeros_like(folds))
    predicted = {"probe": torch.zeros_like(labels), "combined": torch.zeros_like(labels)}
    predicted["known_wording"] = recognised(features.products, labels, known, n_classes, PENALTY)
    probes: list[Probes] = []
    for tested, seen in design.cells:
        left = told.without(int(folds[tested[0]]))
        targets = torch.cat([right[None], left[orders]])
        probes.append(fit_probes(features.products, targets, shuffled, (tested, seen)))
        inner = features.products[tested][:, seen].float()
        plain, beyond = (inner @ probes[-1].weights[fit].T + probes[-1].bias[fit] for fit in (_PLAIN, _BEYOND))
        predicted["probe"][tested] = plain.argmax(1)
        predicted["combined"][tested] = ((right - left)[tested] + beyond).argmax(1)
    place, n_folds = len(shuffled), int(folds.max()) + 1
    for fold in range(n_folds):
        rest = torch.where(folds == fold, -1, folds)
        for tested, seen in cells_of(rest, design.wordings):
            left = told.without(fold, int(folds[tested[0]]))
            probes.append(fit_probes(features.products, left[None], labels[None], (tested, seen), place + fold))
    for half, own in enumerate(design.halves):
        told_half = BeyondWords(design.words, labels, own, n_classes)
        for tested, seen in cells_of(own, design.wordings):
            left = told_half.without(int(own[tested[0]]))
            at = place + n_folds + half
            probes.append(fit_probes(features.products, left[None], labels[None], (tested, seen), at))
    n_fits = place + n_folds + len(design.halves)
    every = head_importance(features, probes, n_fits, n_classes, progress)
    sizes = [1, 1, n_null, n_folds, len(design.halves)]
    plain, importance, nulls, without, halves = every.split(sizes)
    return _Found(plain[0], importance[0], without, halves, nulls, predicted)


def _result(weights: HeadWeights, found: _Found, design: _Design, tasks: Tasks, **details: Any) -> TaskMaps:
    labels, n_classes = design.labels, design.n_classes
    importance = found.importance
    p_value = (1 + (found.nulls >= importance).sum(0)) / (1 + len(found.nulls))
    q_value = q_values(p_value)
    heads = tuple(_standing_out(weights, *values) for values in zip(importance, q_value, strict=True))
    half_width = jackknife_half_width(found.without)
    predictions = found.predicted | _baselines(tasks, design)
    # Not counted in the other folds, which have fewest of a function where this one has most.
    accuracy = {"majority": majority_share(labels, n_classes)}
    accuracy |= {name: _by_function(values == labels, labels, n_classes) for name, values in predictions.items()}
    overall = {"majority": float(labels.bincount().max()) / len(labels)}
    overall |= {name: float((values == labels).float().mean()) for name, values in predictions.items()}
    clusters = clusters_of([[item.content] for item in tasks.items])
    bounds = [
        clustered_interval((found.predicted["probe"] == labels)[own], _renumbered(clusters[own]))
        for own in (labels == function for function in range(n_classes))
    ]
    halves = found.halves if len(found.halves) else torch.full((2, *importance.shape), torch.nan)
    stability = rank_correlations(*halves) if len(found.halves) else torch.full((n_classes,), torch.nan)
    maps: dict[str, Any] = {
        "importance": importance,
        "importance_normalised": normalised(importance),
        "interval_low": importance - half_width,
        "interval_high": importance + half_width,
        "importance_plain": found.plain,
        "importance_halves": halves,
        "null_mean": found.nulls.mean(0),
        "p_value": p_value,
        "q_value": q_value,
        "fold_importance": found.without,
    }
    return TaskMaps(
        functions=tasks.functions,
        n_items=tuple(tasks.counts.values()),
        null_max=found.nulls.amax((0, 2, 3)),
        probe_accuracy=accuracy["probe"],
        probe_low=torch.stack([low for low, _ in bounds]),
        probe_high=torch.stack([high for _, high in bounds]),
        combined_accuracy=accuracy["combined"],
        baseline_accuracy={
            name: tuple(values.tolist()) for name, values in accuracy.items() if name not in found.predicted
        },
        overall_accuracy=overall,
        wording_held_out=int(design.wordings.max()) > 0,
        exchanged=design.exchanged,
        standing_out=heads,
        overlap=_overlap(heads),
        correlation=torch.stack([rank_correlations(importance, values.expand_as(importance)) for values in importance]),
        stability=stability,
        folds=design.folds,
        **{name: weights.over_all_layers(values) for name, values in maps.items()} | details,
    )


def _renumbered(clusters: Int[Tensor, " item"]) -> Int[Tensor, " item"]:
    numbers: Tensor = clusters.unique(return_inverse=True)[1]
    return numbers


def _standing_out(
    weights: HeadWeights, importance: Float[Tensor, "with_heads head"], q_value: Float[Tensor, "with_heads head"]
) -> tuple[HeadIndex, ...]:
    """Heads that beat shuffled labels at a false discovery rate of 5%, most important first."""
    heads, q = weights.chosen_heads(), q_value.flatten().tolist()
    order = importance.flatten().argsort(descending=True, stable=True).tolist()
    return tuple(heads[place] for place in order if q[place] <= SIGNIFICANT)


def _overlap(heads: Sequence[Sequence[HeadIndex]]) -> Float[Tensor, "function function"]:
    sets = [set(chosen) for chosen in heads]
    return torch.tensor([[len(a & b) / max(1, len(a | b)) for b in sets] for a in sets])


def _by_function(right: Tensor, labels: Int[Tensor, " item"], n_classes: int) -> Float[Tensor, " class"]:
    return torch.stack([right[labels == function].float().mean() for function in range(n_classes)])


def _baselines(tasks: Tasks, design: _Design) -> dict[str, Int[Tensor, " item"]]:
    """What is predicted without heads, on the same cells."""
    labels, n_classes = design.labels, design.n_classes

    def from_words(products: Float[Tensor, "item item"]) -> Int[Tensor, " item"]:
        return recognised(products, labels, design.cells, n_classes, WORD_PENALTY)

    return {
        "format": majority_predictions([item.format for item in tasks.items], labels, design.folds, n_classes),
        "question": from_words(word_products([item.question for item in tasks.items])),
        "words": from_words(design.words),
        "word_pairs": from_words(word_products([_text(item) for item in tasks.items], 2)),
        "decisive": from_words(word_products([item.decisive for item in tasks.items])),
    }
