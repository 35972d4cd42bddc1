"""``TaskMaps.verify``: does a model get worse at a function without that function's heads?

The heads of each function are ablated (z set to zero at every position) and all functions' items asked again: an 8 x 8
matrix for the eight functions. Heads are chosen anew for every fold, by the probe that did not see its contents, so
each item is held out. As a control, as many other heads are ablated: drawn at random, the function's own excluded. Own
and random heads are compared on the same items; where the whole model is at chance, nothing can be said.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from ...capture.running.activations import DEFAULT_BUDGET
from ...capture.running.answers import answer_likelihoods, encode_question
from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...data.tasks import Tasks, with_alternatives
from ...scorers.statistics import paired_p_value, q_values, wilson_interval
from ..task_maps.result import TaskMaps
from .result import TaskVerification


def verify_tasks(
    model: Any,
    tasks: Tasks,
    maps: TaskMaps,
    *,
    folds: Int[Tensor, " item"],
    fold_importance: Float[Tensor, "fold function layer head"],
    n_items: int | None = 30,
    n_random: int = 3,
    max_heads: int = 10,
    prepend_bos: bool = False,
    seed: int = 0,
    budget: int = DEFAULT_BUDGET,
    progress: bool = True,
) -> TaskVerification:
    """Accuracy on every function's items after ablating every function's heads.

    Args:
        model: The model of the maps.
        tasks: Their items; those without alternatives get answers of similar items.
        maps: The maps.
        folds: Fold of each item.
        fold_importance: Importance on the training items of each fold.
        n_items: Items of each function that are asked, spread over the folds; None for all.
        n_random: Draws of random heads.
        max_heads: Heads ablated for a function: those above its elbow, but at least one and at most so many.
        prepend_bos: As for the maps.
        seed: Decides which items and random heads.
        budget: Bytes a batch may take.
        progress: Show a progress bar on a terminal.
    """
    for name, value in (("n_random", n_random), ("max_heads", max_heads), ("n_items", n_items)):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value} must be at least 1.")
    items = with_alternatives(tasks).items
    n_layers, n_heads = maps.importance.shape[1:]
    sizes = [min(max_heads, max(1, len(heads))) for heads in maps.above_elbow]
    if 2 * max(sizes) > n_layers * n_heads:
        raise UsageError(
            f"{max(sizes)} heads are to be ablated, but the model has {n_layers * n_heads}, too few for as many random "
            f"ones besides. Use max_heads={max(1, n_layers * n_heads // 2)} or less."
        )
    labels = torch.tensor([maps.functions.index(item.function) for item in items])
    generator = np.random.default_rng(seed)
    asked = _chosen(labels, folds, len(sizes), n_items, generator)
    own = _own_heads(fold_importance, sizes)
    masks = [torch.zeros(len(asked), n_layers, n_heads, dtype=torch.bool)]
    masks += [own[folds[asked], function] for function in range(len(sizes))]
    masks += [_random_heads(own, sizes, labels[asked], folds[asked], generator) for _ in range(n_random)]
    questions = [
        encode_question(model, items[i].prompt, (items[i].answer, *items[i].alternatives), prepend_bos)
        for i in asked.tolist()
    ]
    total = len(masks) * len(questions)
    with tqdm(total=total, desc="ablations", unit="question", disable=None if progress else True) as bar:
        likelihoods = answer_likelihoods(
            model, questions * len(masks), ablated=torch.cat(masks), budget=budget, progress=bar.update
        )
    right = torch.tensor([values[0] > max(values[1:]) for values in likelihoods]).view(len(masks), -1)
    options = maps.provenance.options | {"n_items": n_items, "n_random": n_random, "max_heads": max_heads}
    provenance = replace(maps.provenance, options=options, seed=seed)
    return _result(maps, right, labels[asked], sizes, [len(question.options) for question in questions], provenance)


def _chosen(
    labels: Tensor, folds: Tensor, n_classes: int, n_items: int | None, generator: np.random.Generator
) -> Int[Tensor, " asked"]:
    """Up to so many items of each function, taken from the folds in turns."""
    chosen = []
    for function in range(n_classes):
        rows = torch.from_numpy(generator.permutation((labels == function).nonzero().flatten().numpy()))
        turn = torch.zeros(len(rows), dtype=torch.long)
        for fold in folds.unique():
            of_fold = folds[rows] == fold
            turn[of_fold] = torch.arange(int(of_fold.sum()))
        chosen.append(rows[turn.argsort(stable=True)][:n_items])
    return torch.cat(chosen)


def _own_heads(
    importance: Float[Tensor, "fold function layer head"], sizes: list[int]
) -> Bool[Tensor, "fold function layer head"]:
    """The most important heads of each function, for each fold."""
    flat = importance.flatten(2)
    heads = torch.zeros_like(flat, dtype=torch.bool)
    for function, size in enumerate(sizes):
        order = flat[:, function].argsort(dim=-1, descending=True, stable=True)[:, :size]
        heads[:, function].scatter_(1, order, True)
    return heads.view(importance.shape)


def _random_heads(
    own: Bool[Tensor, "fold function layer head"],
    sizes: list[int],
    labels: Tensor,
    folds: Tensor,
    generator: np.random.Generator,
) -> Bool[Tensor, "item layer head"]:
    """For each item as many heads as its function has, none of them its function's own in its fold."""
    flat = own.flatten(2)
    drawn = torch.zeros_like(flat)
    for fold in range(flat.shape[0]):
        for function, size in enumerate(sizes):
            others = (~flat[fold, function]).nonzero().flatten().numpy()
            drawn[fold, function, torch.from_numpy(generator.choice(others, size, replace=False))] = True
    return drawn.view(own.shape)[folds, labels]


def _result(
    maps: TaskMaps,
    right: Bool[Tensor, "ablation item"],
    labels: Int[Tensor, " item"],
    sizes: list[int],
    n_options: list[int],
    provenance: Provenance,
) -> TaskVerification:
    n_functions = len(sizes)
    columns = [labels == function for function in range(n_functions)]
    counts = torch.tensor([int(column.sum()) for column in columns])
    shares = torch.stack([right[:, column].float().mean(1) for column in columns], dim=1)
    clean, accuracy, random = shares[0], shares[1 : n_functions + 1], shares[n_functions + 1 :].mean(0)
    chances = 1 / torch.tensor(n_options).float()
    intervals: dict[str, Any] = {}
    for name, values in (("clean", clean), ("accuracy", accuracy), ("random", random)):
        intervals[f"{name}_low"], intervals[f"{name}_high"] = wilson_interval(values, counts)
    p_values = torch.tensor(
        [
            paired_p_value(right[1 + function, column], right[n_functions + 1 :, column])
            for function, column in enumerate(columns)
        ]
    )
    return TaskVerification(
        functions=maps.functions,
        n_items=tuple(counts.tolist()),
        n_ablated=tuple(sizes),
        accuracy=accuracy,
        clean=clean,
        random=random,
        chance=torch.stack([chances[column].mean() for column in columns]),
        p_value=p_values,
        q_value=q_values(p_values),
        provenance=provenance,
        **intervals,
    )
