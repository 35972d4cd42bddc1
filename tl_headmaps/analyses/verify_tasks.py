"""``verify_tasks``: does a model get worse at a function without that function's heads?

The heads of each function are ablated (z set to zero at every position) and all functions' items asked again: an 8 x 8
matrix for the eight functions. Heads are chosen anew for every fold, by maps made without its contents, so each item is
held out. The control are as many heads of the same layers, drawn many times, heads exchanged alike in all folds: the
p-value is the rank of the own heads among these draws. Items only say how sure an accuracy is: that one set of heads is
worse than another on the same items is no evidence, since any two sets differ. Where the whole model is at chance,
nothing can be said.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..capture.running.activations import DEFAULT_BUDGET
from ..capture.running.answers import answer_likelihoods, encode_question
from ..capture.weights import HeadWeights
from ..core.errors import UsageError
from ..core.options import Count, Draws, Seed, public
from ..core.provenance import Provenance
from ..core.types import HeadIndex, Model
from ..data.tasks import FUNCTIONS, Tasks, with_alternatives
from ..renderers import heat
from ..renderers.figure import Figure
from ..renderers.text import interval, table_text, wrapped
from ..results import Result, cells
from ..results.table import frozen_result
from ..scorers.ablation import masks_of
from ..scorers.statistics import clustered_interval, clusters_of, q_values, rank_p_value, relabelled_sets
from .study import Study
from .task_maps import SIGNIFICANT, TaskMaps, resolve_tasks

_LEGEND = (
    "share of held-out items whose right answer is likelier than the alternatives (95% interval over contents): with "
    "all heads, with the function's own heads ablated, with those of another function (mean), with as many other heads "
    "of the same layers (mean, and where 95% of the draws lie); p: rank of the own heads among the draws, by how much "
    "likelier the right answer is; verdict: at a false discovery rate of 5% over the functions that are testable; not "
    "testable: the interval with all heads reaches chance"
)


@frozen_result
class TaskVerification(Result):
    """Accuracy on the items of a function (columns) after ablating the heads of a function (rows).

    An item counts as right when the model finds the right answer likelier than every alternative. Its heads were chosen
    without it: by maps made without its content. Intervals are 95% intervals over items, contents counted as clusters.

    Attributes:
        functions: Names of the functions, for both axes.
        n_items: Items of each function that were asked.
        n_ablated: Heads ablated for each function.
        n_random: Sets of as many heads of the same layers, for each function.
        n_moved: Own heads whose layer had too few others, so that heads of neighbouring layers stand in for them.
        accuracy: After ablating the heads of the row's function, on the items of the column's.
        accuracy_low, accuracy_high: Its interval.
        clean: With all heads.
        clean_low, clean_high: Its interval.
        random: With other sets of as many heads of the same layers ablated, on the function's own items; mean over the
            draws.
        random_low, random_high: Where 95% of the draws lie.
        chance: Expected share of right answers when one of the alternatives is drawn.
        margin_clean, margin_own, margin_random: Log-likelihood of the right answer less that of the best alternative,
            mean over the function's items: with all heads, without its own, and without others (mean over the draws).
        p_value: Rank of the own heads among the draws by that margin: the share of sets, the own one counted, without
            which it is as small. At least ``1 / (1 + n_random)``.
        q_value: The same after Benjamini-Hochberg over the functions that are testable; NaN for others.

    Example:
        >>> from tl_headmaps import TaskItem, Tasks, load_default_model, task_maps, verify_tasks
        >>> sums = [TaskItem(f"{n} + 1 =", str(n + 1), "math_calculation", "", ("0",), "", str(n)) for n in range(10)]
        >>> cups = [TaskItem(f"{n} is", "red", "retrieval", f"No {n} is red.", ("wet",), "", str(n)) for n in range(10)]
        >>> model, tasks = load_default_model(), Tasks((*sums, *cups))
        >>> maps = task_maps(model, tasks, n_folds=3, n_null=19, cache_dir="cache", progress=False)
        >>> verified = verify_tasks(model, maps, tasks, n_items=5, n_random=3, max_heads=2, progress=False)
        >>> verified.functions, verified.n_items, verified.chance.tolist()
        (('retrieval', 'math_calculation'), (5, 5), [0.5, 0.5])
        >>> float(verified.clean[0]), tuple(verified.accuracy.shape)
        (1.0, (2, 2))
    """

    kind: ClassVar[str] = "task_verification"
    methods: ClassVar[tuple[str, ...]] = ("ma2025cognitive", "wilson1927probable", "benjamini1995controlling")
    json_axes: ClassVar[Mapping[str, str | None]] = {"ablated": "functions", "tested": "functions"}
    json_extra: ClassVar[tuple[str, ...]] = ("testable", "verdicts")
    nullable: ClassVar[tuple[str, ...]] = ("q_value",)
    functions: tuple[str, ...]
    n_items: tuple[int, ...]
    n_ablated: tuple[int, ...]
    n_random: tuple[int, ...]
    n_moved: tuple[int, ...]
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
    margin_clean: Float[Tensor, " function"]
    margin_own: Float[Tensor, " function"]
    margin_random: Float[Tensor, " function"]
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
        """For each function: ``not testable``, ``worse`` or ``no difference`` without its own heads.

        Compared with others of the same layers, at a false discovery rate of 5%.
        """
        return tuple(
            "not testable" if not able else "worse" if q <= SIGNIFICANT else "no difference"
            for able, q in zip(self.testable, self.q_value.tolist(), strict=True)
        )

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per pair of functions."""
        by_axes: dict[int, dict[str, Tensor]] = {1: {}, 2: {}}
        for name, values in self.to_torch().items():
            by_axes[values.ndim][name] = values
        for (row, column), labels in cells(self.axes, self.accuracy):
            record = {**labels, "n_ablated": self.n_ablated[row]}
            record |= {name: float(values[row, column]) for name, values in by_axes[2].items()}
            record |= {name: float(values[column]) for name, values in by_axes[1].items()}
            yield record | {"n_items": self.n_items[column], "verdict": self.verdicts[column]}

    def figure(self) -> Figure:
        """Rows: whose heads are ablated (first none, last random others); columns: whose items are asked."""
        names = [FUNCTIONS.get(function, function) for function in self.functions]
        # The mark comes first: the ends of long labels are cut.
        tested = [name if able else f"† {name}" for name, able in zip(names, self.testable, strict=True)]
        values, low, high = (
            torch.stack([getattr(self, f"clean{end}"), *getattr(self, f"accuracy{end}"), getattr(self, f"random{end}")])
            for end in ("", "_low", "_high")
        )
        chances = ", ".join(f"{value:.2f}" for value in sorted(set(self.chance.tolist())))
        return heat.token_grid(
            values,
            ["none", *names, "random others"],
            tested,
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
            "worse": "Worse without own heads than without others of the same layers (false discovery rate 5%)",
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

        def span(name: str, *at: int) -> str:
            value, low, high = (float(getattr(self, f"{name}{end}")[at]) for end in ("", "_low", "_high"))
            return f"{value:.2f} ({interval(low, high)})"

        titles = (
            "function",
            "items",
            "chance",
            "all heads",
            "heads",
            "own off",
            "others",
            "random off",
            "p",
            "verdict",
        )
        rows = [
            [
                function,
                self.n_items[i],
                f"{self.chance[i]:.2f}",
                span("clean", i),
                self.n_ablated[i],
                span("accuracy", i, i),
                f"{self.others[i]:.2f}" if len(self.functions) > 1 else "-",
                span("random", i),
                f"{self.p_value[i]:.2g}",
                self.verdicts[i],
            ]
            for i, function in enumerate(self.functions)
        ]
        columns = [(title, "left" if title in ("function", "verdict") else "right") for title in titles]
        matrix = [
            [function, *(f"{value:.2f}" for value in values)]
            for function, values in zip(self.functions, self.accuracy.tolist(), strict=True)
        ]
        tested = [("ablated \\ tested", "left"), *((name.split("_")[0], "right") for name in self.functions)]
        parts = [table_text(columns, rows), table_text(tested, matrix), *map(wrapped, (*self._notes(), _LEGEND))]
        return "\n\n".join(["Task maps verified by ablation", *parts])

    def _notes(self) -> list[str]:
        n_testable, n_drawn = sum(self.testable), min(self.n_random)
        notes = [f"{n_testable} of {len(self.functions)} functions are testable: the model answers them above chance"]
        if n_testable < len(self.functions):
            notes[0] += "; of the others nothing can be said"
        notes.append(f"{n_drawn} other sets of heads for each function: p is {1 / (1 + n_drawn):.2g} at least")
        if n_testable and n_testable / (1 + n_drawn) > SIGNIFICANT:
            notes[-1] += f", so one function alone of {n_testable} cannot get the verdict worse: raise n_random"
        if any(self.n_moved):
            notes.append(f"{sum(self.n_moved)} heads had too few others in their layer: neighbouring layers gave them")
        return [f"{note}." for note in notes]


@public
def verify_tasks(
    model: Model,
    maps: TaskMaps,
    tasks: Tasks | str | Path | None = None,
    *,
    n_items: Count | None = 10,
    n_random: Draws = 39,
    max_heads: Count = 10,
    prepend_bos: bool | None = None,
    seed: Seed | None = None,
    budget: int = DEFAULT_BUDGET,
    progress: bool = True,
) -> TaskVerification:
    """Ablate the heads of each function and see which functions the model gets worse at.

    Args:
        model: The model of the maps.
        maps: What :func:`task_maps` found, also loaded from a file or with some functions selected.
        tasks: The items of the maps, or their file; the bundled items by default. Those without alternatives get
            answers of similar items.
        n_items: Items of each function to ask, spread over the folds; None for all. More items make accuracies surer,
            more draws make p-values smaller; the time is their product.
        n_random: Other sets of as many heads of the same layers, for each function; all there are, if fewer.
        max_heads: Heads to ablate for a function: as many as stand out, but at least one and at most this many.
        prepend_bos: Begin each prompt with BOS; by default as for the maps.
        seed: Decides which items are asked and which random heads are drawn; by default the seed of the maps.

    Example:
        >>> from tl_headmaps import TaskItem, Tasks, load_default_model, task_maps, verify_tasks
        >>> sums = [TaskItem(f"{n} + 1 =", str(n + 1), "math_calculation", "", ("0",), "", str(n)) for n in range(10)]
        >>> cups = [TaskItem(f"{n} is", "red", "retrieval", f"No {n} is red.", ("wet",), "", str(n)) for n in range(10)]
        >>> model, tasks = load_default_model(), Tasks((*sums, *cups))
        >>> maps = task_maps(model, tasks, n_folds=3, n_null=19, cache_dir="cache", progress=False)
        >>> verified = verify_tasks(model, maps, tasks, n_items=5, n_random=3, max_heads=2, progress=False)
        >>> verified.n_items, verified.chance.tolist(), float(verified.clean[0]), tuple(verified.accuracy.shape)
        ((5, 5), [0.5, 0.5], 1.0, (2, 2))
        >>> verified.verdicts
        ('no difference', 'not testable')
    """
    chosen = resolve_tasks(tasks)
    _require_same_items(maps, chosen)
    of_maps = maps.provenance
    if prepend_bos is None:
        prepend_bos = bool(of_maps.options["prepend_bos"])
    study = Study(model, prepend_bos=prepend_bos, by_heads=False, progress=progress)
    weights = study.weights
    _require_same_model(maps, weights)
    weights.require_own_values("switching off a head")
    seed = int(of_maps.seed or 0) if seed is None else seed
    items = with_alternatives(chosen).items
    sizes = [min(max_heads, max(1, len(heads))) for heads in maps.standing_out]
    if 2 * max(sizes) > weights.n_all_heads:
        raise UsageError(
            f"{max(sizes)} heads are to be ablated, but the model has {weights.n_all_heads}: too few to compare with "
            f"as many random others. Use max_heads={max(1, weights.n_all_heads // 2)} or less."
        )
    # Items of functions that were not selected are never asked.
    labels = torch.tensor([(*maps.functions, item.function).index(item.function) for item in items])
    asked = _chosen(labels, maps.folds, len(sizes), n_items, np.random.default_rng(seed))
    own = _own_heads(maps.fold_importance, sizes)
    drawn = [_matched(own[:, function], weights.chosen_heads(), n_random, seed) for function in range(len(sizes))]
    # Every item is asked once per mask of ablated heads: none, each function's own (as its fold has them), and the
    # draws for its own function. All masks of all items go through the model in one list, so that batches are full.
    rows: list[int] = []
    masks: list[Tensor] = []
    for place, item in enumerate(asked.tolist()):
        fold, function = int(maps.folds[item]), int(labels[item])
        sets = torch.cat([torch.zeros_like(own[fold, :1]), own[fold], drawn[function].masks[:, fold]])
        rows += [place] * len(sets)
        masks.append(sets)
    questions = [
        encode_question(model, items[i].prompt, (items[i].answer, *items[i].alternatives), study.prepend_bos)
        for i in asked.tolist()
    ]
    with study.bar("ablations", "question", len(rows)) as bar:
        likelihoods = answer_likelihoods(
            model, [questions[row] for row in rows], ablated=torch.cat(masks), budget=budget, progress=bar.update
        )
    margins = torch.tensor([values[0] - max(values[1:]) for values in likelihoods], dtype=torch.float64)
    options = of_maps.options | {"n_items": n_items, "n_random": n_random, "max_heads": max_heads}
    study.data = dict(of_maps.data)
    return _result(
        maps.functions,
        margins.split([len(sets) for sets in masks]),
        labels[asked],
        clusters_of([[items[i].content] for i in asked.tolist()]),
        chances=1 / torch.tensor([len(question.options) for question in questions]).float(),
        n_ablated=tuple(sizes),
        n_random=tuple(len(draws.masks) for draws in drawn),
        n_moved=tuple(draws.n_moved for draws in drawn),
        provenance=study.provenance(seed=seed, **options),
    )


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


@dataclass(frozen=True)
class _Draws:
    """Sets like the own heads of a function, for each fold, and how many of these heads are of pooled layers."""

    masks: Bool[Tensor, "draw fold layer head"]
    n_moved: int


def _matched(own: Bool[Tensor, "fold layer head"], everything: Sequence[HeadIndex], n_random: int, seed: int) -> _Draws:
    """Sets of as many heads of the same layers, which overlap between folds as the own heads do.

    A margin is a mean over the items of all folds. Their own heads are nearly the same, so those of a draw must be too.
    """
    by_fold = [[HeadIndex(*head) for head in heads.nonzero().tolist()] for heads in own]
    renamed = relabelled_sets(by_fold, everything, n_random, seed=seed)
    masks = [masks_of(sets, *own.shape[1:]) for sets in renamed.sets]
    return _Draws(torch.stack(masks) if masks else own[None][:0], len(renamed.moved))


def _result(
    functions: tuple[str, ...],
    margins: Sequence[Float[Tensor, " ablation"]],
    labels: Int[Tensor, " item"],
    clusters: Int[Tensor, " item"],
    *,
    chances: Float[Tensor, " item"],
    **details: Any,
) -> TaskVerification:
    """The matrix, its controls and its ranks, from the margins of every item: whole, by function, by draw."""
    n_functions = len(functions)
    values: dict[str, list[Tensor]] = {}
    for function in range(n_functions):
        mine = (labels == function).nonzero().flatten().tolist()
        # [ablation, item]: none, the heads of each function, the draws.
        margin = torch.stack([margins[item] for item in mine], 1)
        right, groups = margin > 0, clusters[mine].unique(return_inverse=True)[1]
        low, high = clustered_interval(right[: n_functions + 1], groups)
        share, mean = right.float().mean(1), margin.mean(1)
        draws = share[n_functions + 1 :]
        ends = draws.quantile(torch.tensor([0.025, 0.975]))
        measures = {
            "clean": share[0],
            "clean_low": low[0],
            "clean_high": high[0],
            "accuracy": share[1 : n_functions + 1],
            "accuracy_low": low[1:],
            "accuracy_high": high[1:],
            "random": draws.mean(),
            "random_low": ends[0],
            "random_high": ends[1],
            "chance": chances[mine].mean(),
            "margin_clean": mean[0],
            "margin_own": mean[1 + function],
            "margin_random": mean[n_functions + 1 :].mean(),
            "p_value": torch.tensor(rank_p_value(float(mean[1 + function]), mean[n_functions + 1 :], "less")),
        }
        for name, value in measures.items():
            values.setdefault(name, []).append(value.float())
    # Ablated functions are rows, so the columns of the items stand side by side.
    stacked: dict[str, Any] = {name: torch.stack(columns, -1) for name, columns in values.items()}
    testable = stacked["clean_low"] > stacked["chance"]
    stacked["q_value"] = q_values(torch.where(testable, stacked["p_value"], torch.nan))
    n_items = tuple(labels.bincount(minlength=n_functions).tolist())
    return TaskVerification(functions=functions, n_items=n_items, **stacked, **details)
