"""``verify_tasks``: does a model get worse at a function without that function's heads?

The heads of each function are ablated (z set to zero at every position) and all functions' items asked again: an 8 x 8
matrix for the eight functions. Heads are chosen anew for every fold, by the probe that did not see its contents, so
each item is held out. As a control, as many other heads are ablated: drawn at random, the function's own excluded. Own
and random heads are compared on the same items; where the whole model is at chance, nothing can be said.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from ..capture.running.activations import DEFAULT_BUDGET
from ..capture.running.answers import answer_likelihoods, encode_question
from ..capture.weights import HeadWeights
from ..core.ambient import steady
from ..core.errors import UsageError
from ..core.provenance import Provenance
from ..core.types import Model
from ..data.tasks import FUNCTIONS, Tasks, with_alternatives
from ..renderers import heat
from ..renderers.figure import Figure
from ..renderers.text import interval, table_text
from ..results import Result, cells
from ..scorers.statistics import paired_p_value, q_values, wilson_interval
from .task_maps.call import resolve_tasks
from .task_maps.result import TaskMaps

_MATRICES = ("accuracy", "accuracy_low", "accuracy_high")
_BY_FUNCTION = (
    "clean",
    "clean_low",
    "clean_high",
    "random",
    "random_low",
    "random_high",
    "chance",
    "p_value",
    "q_value",
)
SIGNIFICANT = 0.05
"""False discovery rate below which own heads differ from random ones."""

_COLUMNS = ("function", "items", "chance", "all heads", "heads", "own off", "others", "random off", "p", "verdict")
_LEGEND = (
    "share of held-out items whose right answer is likelier than the alternatives (95% interval): with all heads,\n"
    "with the function's own heads ablated, with those of another function (mean), with as many random heads,\n"
    "none of them its own; p: own against random on the same items, exact; verdict: without own heads, compared\n"
    "with random ones, at a false discovery rate of 5%; not testable: the interval with all heads reaches chance"
)


@dataclass(frozen=True, eq=False, repr=False)
class TaskVerification(Result):
    """Accuracy on the items of a function (columns) after ablating the heads of a function (rows).

    An item counts as right when the model finds the right answer likelier than every alternative. Its heads were chosen
    without it: by a probe that did not see its content. Intervals are 95% Wilson intervals over items.

    Attributes:
        functions: Names of the functions, for both axes.
        n_items: Items of each function that were asked.
        n_ablated: Heads ablated for each function.
        accuracy: After ablating the heads of the row's function, on the items of the column's.
        accuracy_low, accuracy_high: Its interval.
        clean: With all heads.
        clean_low, clean_high: Its interval.
        random: With as many other heads ablated, drawn at random from those that are not the function's own, on the
            function's own items; mean over several draws.
        random_low, random_high: Its interval.
        chance: Expected share of right answers when one of the alternatives is drawn.
        p_value: How likely own and random heads would differ this much on the function's own items if it did not matter
            which are ablated: exact, paired by items, two-sided (McNemar's test for a single random draw).
        q_value: The same after Benjamini-Hochberg over the functions.

    Example:
        >>> from tl_headmaps import TaskItem, Tasks, load_default_model, task_maps, verify_tasks
        >>> sums = [TaskItem(f"{n} + 1 =", str(n + 1), "math_calculation", "", ("0",), "", str(n)) for n in range(10)]
        >>> cups = [TaskItem(f"{n} is", "red", "retrieval", f"No {n} is red.", ("wet",), "", str(n)) for n in range(10)]
        >>> model, tasks = load_default_model(), Tasks((*sums, *cups))
        >>> maps = task_maps(model, tasks, n_folds=3, n_null=1, cache_dir="cache", progress=False)
        >>> verified = verify_tasks(model, maps, tasks, n_items=5, n_random=1, max_heads=2, progress=False)
        >>> verified.functions, verified.n_items, verified.chance.tolist()
        (('retrieval', 'math_calculation'), (5, 5), [0.5, 0.5])
        >>> float(verified.clean[0]), tuple(verified.accuracy.shape)
        (1.0, (2, 2))
    """

    kind: ClassVar[str] = "task_verification"
    methods: ClassVar[tuple[str, ...]] = ("ma2025cognitive", "wilson1927probable")
    json_axes: ClassVar[Mapping[str, str | None]] = {"ablated": "functions", "tested": "functions"}
    json_extra: ClassVar[tuple[str, ...]] = ("testable", "verdicts")
    functions: tuple[str, ...]
    n_items: tuple[int, ...]
    n_ablated: tuple[int, ...]
    accuracy: Float[Tensor, "function function"]
    accuracy_low: Float[Tensor, "function function"]
    accuracy_high: Float[Tensor, "function function"]
    clean: Float[Tensor, " function"]
    clean_low: Float[Tensor, " function"]
    clean_high: Float[Tensor, " function"]
    random: Float[Tensor, " function"]
    random_low: Float[Tensor, " function"]
    random_high: Float[Tensor, " function"]
    chance: Float[Tensor, " function"]
    p_value: Float[Tensor, " function"]
    q_value: Float[Tensor, " function"]
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "function function"]:
        """The accuracies after ablation."""
        return self.accuracy

    @property
    def own(self) -> Float[Tensor, " function"]:
        """Accuracy on each function's items without its own heads."""
        return self.accuracy.diagonal()

    @property
    def others(self) -> Float[Tensor, " function"]:
        """Accuracy on each function's items without the heads of another function, mean over those (NaN: no other)."""
        others = (self.accuracy.sum(0) - self.own) / max(1, len(self.functions) - 1)
        return others if len(self.functions) > 1 else torch.full_like(others, torch.nan)

    @property
    def testable(self) -> tuple[bool, ...]:
        """Whether the whole model answers a function's items better than chance; else there is nothing to lose."""
        return tuple((self.clean_low > self.chance).tolist())

    @property
    def verdicts(self) -> tuple[str, ...]:
        """For each function: ``not testable``, ``worse``, ``better`` or ``no difference`` without its own heads.

        Compared with random others, at a false discovery rate of 5%.
        """

        def verdict(number: int) -> str:
            if not self.testable[number]:
                return "not testable"
            if self.q_value[number] >= SIGNIFICANT:
                return "no difference"
            return "worse" if self.own[number] < self.random[number] else "better"

        return tuple(verdict(number) for number in range(len(self.functions)))

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per pair of functions."""
        for (row, column), labels in cells(self.axes, self.accuracy):
            record = {**labels, "n_ablated": self.n_ablated[row]}
            record |= {name: float(getattr(self, name)[row, column]) for name in _MATRICES}
            record |= {name: float(getattr(self, name)[column]) for name in _BY_FUNCTION}
            yield record | {"n_items": self.n_items[column], "verdict": self.verdicts[column]}

    def figure(self) -> Figure:
        """Rows: whose heads are ablated (first none, last random others); columns: whose items are asked."""
        names = [FUNCTIONS.get(function, function) for function in self.functions]
        # The mark comes first: the ends of long labels are cut.
        asked = [name if able else f"† {name}" for name, able in zip(names, self.testable, strict=True)]
        values, low, high = (
            torch.stack([getattr(self, f"clean{end}"), *getattr(self, f"accuracy{end}"), getattr(self, f"random{end}")])
            for end in ("", "_low", "_high")
        )
        chances = ", ".join(f"{value:.2f}" for value in sorted(set(self.chance.tolist())))
        return heat.token_grid(
            values,
            ["none", *names, "random others"],
            asked,
            title="Accuracy after ablating the heads of a function",
            unit="share of items right",
            rows="ablated",
            columns="tested",
            details={"95% from": low, "95% to": high},
            note=f"Chance: {chances}. {self._verdict_sentences(names)}",
        )

    def _verdict_sentences(self, names: list[str]) -> str:
        by_verdict: dict[str, list[str]] = {}
        for name, verdict in zip(names, self.verdicts, strict=True):
            by_verdict.setdefault(verdict, []).append(name)
        openings = {
            "worse": "Worse without own heads than without random ones (paired exact test, false discovery rate 5%)",
            "better": "Better without own heads than without random ones",
            "no difference": "No difference shown",
            "not testable": "† Not testable, the interval with all heads reaches chance",
        }
        return " ".join(
            f"{opening}: {', '.join(by_verdict[verdict])}."
            for verdict, opening in openings.items()
            if verdict in by_verdict
        )

    def __str__(self) -> str:
        """What each function loses with its own heads and with random ones, and the matrix of all functions."""

        def span(values: Tensor, low: Tensor, high: Tensor, *at: int) -> str:
            return f"{values[at]:.2f} ({interval(float(low[at]), float(high[at]))})"

        rows = [
            [
                function,
                self.n_items[i],
                f"{self.chance[i]:.2f}",
                span(self.clean, self.clean_low, self.clean_high, i),
                self.n_ablated[i],
                span(self.accuracy, self.accuracy_low, self.accuracy_high, i, i),
                f"{self.others[i]:.2f}" if len(self.functions) > 1 else "-",
                span(self.random, self.random_low, self.random_high, i),
                f"{self.p_value[i]:.2g}",
                self.verdicts[i],
            ]
            for i, function in enumerate(self.functions)
        ]
        columns = [(title, "left" if title in ("function", "verdict") else "right") for title in _COLUMNS]
        matrix = [
            [function, *(f"{value:.2f}" for value in values)]
            for function, values in zip(self.functions, self.accuracy.tolist(), strict=True)
        ]
        asked = [(function.split("_")[0], "right") for function in self.functions]
        n_testable = sum(self.testable)
        summary = f"{n_testable} of {len(self.functions)} functions are testable: the model answers them above chance"
        if n_testable < len(self.functions):
            summary += "; of the others nothing can be said"
        first, second = table_text(columns, rows), table_text([("ablated \\ asked", "left"), *asked], matrix)
        return f"Task maps verified by ablation\n\n{first}\n\n{second}\n\n{summary}\n{_LEGEND}"


def check_verification(**counts: int | None) -> None:
    """Refuse numbers of items, draws or heads below 1, before the long work whose result is verified."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UsageError(f"{name}={value} must be at least 1. Give a larger number, or leave it out.")


@steady
def verify_tasks(
    model: Model,
    maps: TaskMaps,
    tasks: Tasks | str | Path | None = None,
    *,
    n_items: int | None = 30,
    n_random: int = 3,
    max_heads: int = 10,
    prepend_bos: bool | None = None,
    seed: int | None = None,
    budget: int = DEFAULT_BUDGET,
    progress: bool = True,
) -> TaskVerification:
    """Ablate the heads of each function and see which functions the model gets worse at.

    Args:
        model: The model of the maps.
        maps: What :func:`task_maps` found, also loaded from a file or with some functions selected.
        tasks: The items of the maps, or their file; the bundled items by default. Those without alternatives get
            answers of similar items.
        n_items: Items of each function to ask, spread over the folds; None for all.
        n_random: Draws of random heads.
        max_heads: Heads to ablate for a function: those above its elbow, but at least one and at most this many.
        prepend_bos: Begin every prompt with the BOS token; by default as for the maps.
        seed: Decides which items are asked and which random heads are drawn; by default the seed of the maps.
        budget: Bytes a batch may take.
        progress: Show a progress bar on a terminal.

    Example:
        >>> from tl_headmaps import TaskItem, Tasks, load_default_model, task_maps, verify_tasks
        >>> sums = [TaskItem(f"{n} + 1 =", str(n + 1), "math_calculation", "", ("0",), "", str(n)) for n in range(10)]
        >>> cups = [TaskItem(f"{n} is", "red", "retrieval", f"No {n} is red.", ("wet",), "", str(n)) for n in range(10)]
        >>> model, tasks = load_default_model(), Tasks((*sums, *cups))
        >>> maps = task_maps(model, tasks, n_folds=3, n_null=1, cache_dir="cache", progress=False)
        >>> verified = verify_tasks(model, maps, tasks, n_items=5, n_random=1, max_heads=2, progress=False)
        >>> verified.n_items, verified.verdicts
        ((5, 5), ('no difference', 'not testable'))
    """
    check_verification(n_items=n_items, n_random=n_random, max_heads=max_heads)
    chosen = resolve_tasks(tasks)
    _require_same_items(maps, chosen)
    weights = HeadWeights.from_model(model)
    _require_same_model(maps, weights)
    weights.require_own_values("switching off a head")
    prepend_bos = bool(maps.provenance.options["prepend_bos"]) if prepend_bos is None else prepend_bos
    seed = int(maps.provenance.seed or 0) if seed is None else seed
    items = with_alternatives(chosen).items
    n_layers, n_heads = maps.importance.shape[1:]
    sizes = [min(max_heads, max(1, len(heads))) for heads in maps.above_elbow]
    if 2 * max(sizes) > weights.n_all_heads:
        raise UsageError(
            f"{max(sizes)} heads are to be ablated, but the model has {weights.n_all_heads}: too few to compare with "
            f"as many random others. Use max_heads={max(1, weights.n_all_heads // 2)} or less."
        )
    # Items of functions that were not selected are never asked.
    labels = torch.tensor([(*maps.functions, item.function).index(item.function) for item in items])
    folds = maps.folds
    generator = np.random.default_rng(seed)
    asked = _chosen(labels, folds, len(sizes), n_items, generator)
    own = _own_heads(maps.fold_importance, sizes)
    # Cells of layers without heads can be drawn as little as a function's own heads.
    taken = own | maps.fold_importance.isnan()
    # Every item is asked once per mask of ablated heads: none, each function's own (as its fold has them), random ones.
    # All masks of all items go through the model in one list, so that batches are full.
    masks = [torch.zeros(len(asked), n_layers, n_heads, dtype=torch.bool)]
    masks += [own[folds[asked], function] for function in range(len(sizes))]
    masks += [_random_heads(taken, sizes, labels[asked], folds[asked], generator) for _ in range(n_random)]
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
    options = {"n_items": n_items, "n_random": n_random, "max_heads": max_heads, "prepend_bos": prepend_bos}
    provenance = weights.provenance(options=maps.provenance.options | options, data=maps.provenance.data, seed=seed)
    return _result(maps, right, labels[asked], sizes, [len(question.options) for question in questions], provenance)


def _require_same_items(maps: TaskMaps, tasks: Tasks) -> None:
    if tasks.digest not in maps.provenance.data.values():
        made_from = ", ".join(name for name in maps.provenance.data if name != "parameters")
        raise UsageError(
            f"These maps were made from {made_from} ({len(maps.folds)} items), but {tasks.name} ({len(tasks)} items) "
            "is not the same list of items in the same order. Pass the items of the maps as tasks=."
        )


def _require_same_model(maps: TaskMaps, weights: HeadWeights) -> None:
    if weights.parameters_digest != maps.provenance.data.get("parameters"):
        raise UsageError(
            f"These maps were made from {maps.provenance.model!r}, and {weights.model_name!r} has other "
            "weights. Pass the model of the maps, loaded the same way, or make new maps with task_maps()."
        )


def _chosen(
    labels: Tensor, folds: Tensor, n_classes: int, n_items: int | None, generator: np.random.Generator
) -> Int[Tensor, " asked"]:
    """Up to ``n_items`` items of each function, taken from the folds in turns."""
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
    # Layers without heads are NaN, which would sort first.
    flat = importance.flatten(2).nan_to_num(nan=-torch.inf)
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
