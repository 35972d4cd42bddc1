"""``task_maps``: which heads serve which cognitive function.

For prompts labelled with a function, every head's z is averaged over the tokens of the answer, a cross-validated probe
tells the functions apart, and each head gets the part of the probe's logits that is read from it (see
:mod:`..scorers.tasks`). Words can give a label away, so two things are done about it: baselines say what words and
formats tell alone, and the main probe starts from what the words tell: importance is what the heads know beyond that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from ...capture.running.activations import DEFAULT_BUDGET, prepends_bos
from ...capture.running.answers import Question, encode_question
from ...capture.running.head_features import HeadFeatures, capture_head_features
from ...capture.weights import HeadWeights
from ...core.ambient import steady
from ...core.errors import UsageError
from ...core.types import HeadIndex, Model, Positions, check_choice
from ...data.tasks import Tasks, load_tasks
from ...scorers.probe import calibrated, cross_logits, majority_predictions, word_counts
from ...scorers.statistics import wilson_interval
from ...scorers.tasks import (
    bootstrap_interval,
    content_folds,
    elbow,
    function_means,
    normalised,
    probe_fold,
    rank_correlations,
)
from .result import TaskMaps

_PLAIN, _BEYOND = 0, 1
"""The first two fits: on heads alone, and beyond words. Shuffled ones follow."""


@steady
def task_maps(
    model: Model,
    tasks: Tasks | str | Path | None = None,
    *,
    positions: Positions = "answer",
    n_folds: int = 5,
    n_null: int = 10,
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
        n_folds: Parts for cross-validation; contents stay whole.
        n_null: How often labels are shuffled for the null.
        seed: Decides folds, shuffles and bootstrap. A second seed is run to see whether the maps are stable.
        prepend_bos: Begin each prompt with BOS; by default as the model does.
        budget: Bytes a batch of prompts may take.
        cache_dir: Where captured activations are saved for the next call; the cache folder by default.
        progress: Show progress bars on a terminal.

    Example:
        >>> from tl_headmaps import TaskItem, Tasks, load_default_model, task_maps
        >>> sums = [TaskItem(f"{n} + 1 =", str(n + 1), "math_calculation", content=str(n)) for n in range(10)]
        >>> cups = [TaskItem(f"{n} is", "red", "retrieval", f"Cup {n} is red.", content=str(n)) for n in range(10)]
        >>> tasks = Tasks((*sums, *cups))
        >>> maps = task_maps(load_default_model(), tasks, n_folds=3, n_null=1, cache_dir="cache", progress=False)
        >>> maps.functions, maps.probe_accuracy.tolist()
        (('retrieval', 'math_calculation'), [1.0, 1.0])
    """
    check_choice(positions, Positions, "positions")
    if n_null < 1:
        raise UsageError(f"n_null={n_null} is too few: a map needs its null. Use 1 or more.")
    chosen = resolve_tasks(tasks)
    labels = torch.tensor([chosen.functions.index(item.function) for item in chosen.items])
    split = _split(chosen, labels, n_folds, seed)
    weights = HeadWeights.from_model(model)
    prepend_bos = prepends_bos(model, prepend_bos)
    questions = [
        encode_question(model, item.prompt, (item.answer, *item.alternatives), prepend_bos) for item in chosen.items
    ]
    with tqdm(total=len(questions), desc="activations", unit="item", disable=None if progress else True) as bar:
        captured = capture_head_features(
            model,
            [question.answered for question in questions],
            [_span(question, positions) for question in questions],
            parameters=weights.parameters_digest,
            cache_dir=cache_dir,
            budget=budget,
            progress=bar.update,
        )
    counts = word_counts([f"{item.prompt} {item.answer}" for item in chosen.items])
    probe = partial(_probed, captured, chosen, labels, counts, progress=progress)
    first = probe(split, n_null=n_null, seed=seed)
    second = probe(_split(chosen, labels, n_folds, seed + 1), n_null=0, seed=seed + 1)
    options = {"positions": positions, "n_folds": n_folds, "n_null": n_null, "prepend_bos": prepend_bos}
    provenance = weights.provenance(runs_model=True, options=options, data={chosen.name: chosen.digest}, seed=seed)
    return _result(weights, first, second, chosen, labels, positions=positions, provenance=provenance)


def resolve_tasks(tasks: Tasks | str | Path | None) -> Tasks:
    """Items themselves, those of a file, or the bundled ones."""
    if tasks is None:
        return load_tasks()
    return tasks if isinstance(tasks, Tasks) else Tasks.from_file(tasks)


def _split(tasks: Tasks, labels: Tensor, n_folds: int, seed: int) -> Int[Tensor, " item"]:
    return content_folds([item.content for item in tasks.items], labels, n_folds, seed, tasks.functions)


def _span(question: Question, positions: Positions) -> tuple[int, int]:
    end = len(question.prompt)
    return (end, len(question.answered)) if positions == "answer" else (end - 1, end)


@dataclass(frozen=True)
class _ProbeRun:
    """Probes of all folds with one seed: predictions, and the parts of logits read from each head."""

    seed: int
    folds: Int[Tensor, " item"]
    words: Float[Tensor, "fold item class"]
    parts: Float[Tensor, "fit item layer head"]
    predicted: Int[Tensor, "fit item"]
    shuffled: Int[Tensor, "null item"]
    by_fold: Float[Tensor, "fold class layer head"]


def _probed(
    captured: HeadFeatures,
    tasks: Tasks,
    labels: Int[Tensor, " item"],
    counts: Float[Tensor, "item word"],
    folds: Int[Tensor, " item"],
    *,
    n_null: int,
    seed: int,
    progress: bool,
) -> _ProbeRun:
    """Probes on heads alone, beyond words, and with labels (and what words say of them) shuffled within folds."""
    n_classes, n_folds = len(tasks.functions), int(folds.max()) + 1
    words = calibrated(cross_logits(counts, labels, folds, n_classes), labels, folds)
    orders = [torch.arange(len(labels))] * 2 + _shuffles(folds, n_null, seed)
    targets = torch.stack([labels[order] for order in orders])
    parts = torch.zeros(len(orders), len(labels), captured.n_layers, captured.n_heads)
    predicted = torch.zeros_like(targets)
    by_fold = []
    for fold in tqdm(range(n_folds), desc="probes", unit="fold", disable=None if progress else True):
        offsets = torch.stack([words[fold, order] for order in orders])
        offsets[_PLAIN] = 0
        tested = folds == fold
        probes = probe_fold(
            lambda place: captured.layer(captured.layers[place]),
            captured.n_layers,
            captured.n_heads,
            targets,
            tested,
            n_classes,
            offsets=offsets,
        )
        parts[:, tested] = probes.parts
        predicted[:, tested] = probes.logits.argmax(-1)
        by_fold.append(probes.train_parts)
    return _ProbeRun(seed, folds, words, parts, predicted, targets[2:], torch.stack(by_fold))


def _shuffles(folds: Int[Tensor, " item"], n: int, seed: int) -> list[Tensor]:
    """Orders that exchange items within their folds only, so that training and test labels stay apart."""
    generator = np.random.default_rng(seed)
    orders = []
    for _ in range(n):
        order = torch.arange(len(folds))
        for fold in range(int(folds.max()) + 1):
            rows = (folds == fold).nonzero().flatten()
            order[rows] = rows[torch.from_numpy(generator.permutation(len(rows)))]
        orders.append(order)
    return orders


def _result(
    weights: HeadWeights,
    first: _ProbeRun,
    second: _ProbeRun,
    tasks: Tasks,
    labels: Int[Tensor, " item"],
    **details: Any,
) -> TaskMaps:
    n_classes = len(tasks.functions)
    importance = function_means(first.parts[_BEYOND], labels, n_classes)
    clusters = [item.matched or item.content for item in tasks.items]
    low, high = bootstrap_interval(first.parts[_BEYOND], labels, clusters, n_classes, seed=first.seed)
    nulls = torch.stack(
        [function_means(parts, order, n_classes) for parts, order in zip(first.parts[2:], first.shuffled, strict=True)]
    )
    null_max = nulls.amax((0, 2, 3))
    limits = null_max.tolist()
    heads = tuple(_heads_above(weights, values, limit) for values, limit in zip(importance, limits, strict=True))
    predictions = {"probe": first.predicted[_PLAIN], "combined": first.predicted[_BEYOND]}
    predictions |= _baselines(tasks, labels, first)
    accuracy = {name: _by_function(predicted == labels, labels, n_classes) for name, predicted in predictions.items()}
    n_items = tuple(tasks.counts.values())
    probe_low, probe_high = wilson_interval(accuracy["probe"], torch.tensor(n_items))
    importance_again = function_means(second.parts[_BEYOND], labels, n_classes)
    maps: dict[str, Any] = {
        "importance": importance,
        "importance_normalised": normalised(importance),
        "interval_low": low,
        "interval_high": high,
        "importance_plain": function_means(first.parts[_PLAIN], labels, n_classes),
        "importance_again": importance_again,
        "null_mean": nulls.mean(0),
        "fold_importance": first.by_fold,
    }
    return TaskMaps(
        functions=tasks.functions,
        n_items=n_items,
        null_max=null_max,
        probe_accuracy=accuracy["probe"],
        probe_low=probe_low,
        probe_high=probe_high,
        combined_accuracy=accuracy["combined"],
        baseline_accuracy={
            name: tuple(values.tolist()) for name, values in accuracy.items() if name not in ("probe", "combined")
        },
        overall_accuracy={name: float((values == labels).float().mean()) for name, values in predictions.items()},
        above_elbow=heads,
        overlap=_overlap(heads),
        correlation=torch.stack([rank_correlations(importance, values.expand_as(importance)) for values in importance]),
        stability=rank_correlations(importance, importance_again),
        folds=first.folds,
        **{name: weights.over_all_layers(values) for name, values in maps.items()} | details,
    )


def _heads_above(
    weights: HeadWeights, importance: Float[Tensor, "with_heads head"], limit: float
) -> tuple[HeadIndex, ...]:
    """Heads above the elbow that no head reached with shuffled labels, most important first."""
    order = importance.flatten().argsort(descending=True, stable=True)[: elbow(importance.clamp_min(0))].tolist()
    heads = weights.chosen_heads()
    return tuple(heads[i] for i in order if float(importance.flatten()[i]) > limit)


def _overlap(heads: Sequence[Sequence[HeadIndex]]) -> Float[Tensor, "function function"]:
    sets = [set(chosen) for chosen in heads]
    return torch.tensor([[len(a & b) / max(1, len(a | b)) for b in sets] for a in sets])


def _by_function(right: Tensor, labels: Int[Tensor, " item"], n_classes: int) -> Float[Tensor, " class"]:
    return torch.stack([right[labels == function].float().mean() for function in range(n_classes)])


def _baselines(tasks: Tasks, labels: Int[Tensor, " item"], run: _ProbeRun) -> dict[str, Int[Tensor, " item"]]:
    """What is predicted without heads, on the same folds."""
    n_classes = len(tasks.functions)
    items = range(len(labels))

    def by_words(texts: Sequence[str], n_grams: int) -> Int[Tensor, " item"]:
        logits = cross_logits(word_counts(texts, n_grams), labels, run.folds, n_classes, inner=False)
        return logits[run.folds, items].argmax(-1)

    everything = [f"{item.prompt} {item.answer}" for item in tasks.items]
    return {
        "majority": majority_predictions([""] * len(labels), labels, run.folds, n_classes),
        "format": majority_predictions([item.format for item in tasks.items], labels, run.folds, n_classes),
        "question": by_words([item.question for item in tasks.items], 1),
        "words": run.words[run.folds, items].argmax(-1),
        "word_pairs": by_words(everything, 2),
    }
