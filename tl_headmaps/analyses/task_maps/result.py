"""Which heads serve which cognitive function, how sure that is, and what words alone would have told."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import HeadIndex, Origin
from ...data.tasks import FUNCTIONS
from ...renderers import heat
from ...renderers.charts import scatter
from ...renderers.figure import Figure
from ...renderers.grids import MapLayer
from ...renderers.text import interval, significant, table_text, wrapped
from ...results import HeadMaps, cells
from .shape import MapShapes

STABLE = 0.8
"""Rank correlation between two halves of the contents above which a map counts as stable."""

SIGNIFICANT = 0.05
"""False discovery rate at which a head stands out."""

_NAMED = 4
"""Heads of each function in the table."""

_LEGEND = (
    "probe: held-out items recognised from all heads, 95% interval over contents; words: from the items' words;\n"
    "asked: from the words of the sentence that is asked about; stability: rank correlation of the maps from two\n"
    "disjoint halves of the contents, not of two seeds on the same items; heads: above shuffled labels at a false\n"
    "discovery rate of 5% over all functions and heads, with their share of the importance beyond the items' words"
)
_MAPS = (
    "importance",
    "importance_normalised",
    "interval_low",
    "interval_high",
    "importance_plain",
    "null_mean",
    "p_value",
    "q_value",
)
_BY_FOLD = ("importance_halves", "fold_importance")
_BY_FUNCTION = ("null_max", "probe_accuracy", "probe_low", "probe_high", "combined_accuracy", "stability")
_BETWEEN = ("overlap", "correlation")


@dataclass(frozen=True, eq=False, repr=False)
class TaskMaps(HeadMaps):
    """Importance of every head (last two axes) for every function (first axis); NaN in layers without heads.

    Attributes:
        functions: Names of the functions.
        n_items: Items of each.
        positions: Where heads were read: ``"answer"`` or ``"last"``.
        importance: What the probe reads from a head for the function, beyond what the items' words tell: mean over
            held-out items of gradient x activation. The words of the one sentence that is asked about tell the function
            too (``baseline_accuracy["decisive"]``), so a head may have fetched that sentence and done no more.
        importance_normalised: Its positive part, scaled to sum to one over the heads.
        interval_low, interval_high: 95% interval of ``importance`` over contents: jackknife over folds, the probe
            fitted again without each.
        importance_plain: The same for a probe that is not told what the words say, as published.
        importance_halves: ``importance`` from either half of the contents alone; NaN with too few contents.
        null_mean: Mean importance with labels shuffled.
        null_max: Largest importance of any head with labels shuffled.
        p_value: Rank of ``importance`` among the same head's importances with labels shuffled: the share that reaches
            it.
        q_value: The same after Benjamini-Hochberg over all functions and heads.
        probe_accuracy: Share of a function's held-out items that the plain probe on all heads recognises.
        probe_low, probe_high: 95% interval of it over the tested contents, counted as clusters; a probe that was
            trained on other contents differs by more.
        combined_accuracy: The same for words and heads together.
        baseline_accuracy: The same for what knows no heads: the most frequent function (majority, format), words of
            the question, of everything (words), pairs of neighbouring words, and words of the sentence of the context
            that is asked about (decisive).
        overall_accuracy: All of these over all items, and the plain probe's where it was trained on the same formats
            (known_wording).
        wording_held_out: Whether items were tested in formats that were not trained on; not, if there is only one.
        exchanged: Among which items labels were shuffled: ``matched sets``, ``contents`` or ``folds``.
        standing_out: Heads of each function with ``q_value`` of at most 0.05, most important first.
        overlap: Shared part of those heads between two functions (Jaccard).
        correlation: Rank correlation of two functions' importances.
        stability: Rank correlation of the two ``importance_halves``, function by function: maps of disjoint halves of
            the contents, so other items, and not other seeds on the same ones. NaN without halves.
        folds: Fold of each item, in the order of the items.
        fold_importance: ``importance`` without each fold: what :func:`verify_tasks` chooses heads by, so that no item
            has a say in the heads that are ablated for it.

    Example:
        >>> from tl_headmaps import TaskItem, Tasks, load_default_model, task_maps
        >>> sums = [TaskItem(f"{n} + 1 =", str(n + 1), "math_calculation", content=str(n)) for n in range(10)]
        >>> cups = [TaskItem(f"{n} is", "red", "retrieval", f"Cup {n} is red.", content=str(n)) for n in range(10)]
        >>> tasks = Tasks((*sums, *cups))
        >>> maps = task_maps(load_default_model(), tasks, n_folds=3, n_null=19, cache_dir="cache", progress=False)
        >>> maps.n_items, maps.overall_accuracy["words"]  # such items give their function away by their words
        ((10, 10), 1.0)
        >>> maps.select("retrieval").functions, tuple(maps.importance.shape)
        (('retrieval',), (2, 30, 9))
    """

    kind: ClassVar[str] = "task_maps"
    paper_columns: ClassVar[tuple[str, ...]] = (
        "function",
        "head",
        "importance_normalised",
        "importance",
        "interval_low",
        "interval_high",
        "null_mean",
        "q_value",
    )
    methods: ClassVar[tuple[str, ...]] = ("ma2025cognitive", "wilson1927probable", "benjamini1995controlling")
    json_axes: ClassVar[Mapping[str, str | None]] = {"function": "functions", "layer": None, "head": None}
    json_extra: ClassVar[tuple[str, ...]] = ("stable",)
    nullable: ClassVar[tuple[str, ...]] = (*_MAPS, *_BY_FOLD, "stability")
    labelled: ClassVar[str] = "functions"
    aligned: ClassVar[tuple[str, ...]] = ("n_items", "standing_out", "baseline_accuracy")
    functions: tuple[str, ...]
    n_items: tuple[int, ...]
    positions: str
    importance: Float[Tensor, "function layer head"]
    importance_normalised: Float[Tensor, "function layer head"]
    interval_low: Float[Tensor, "function layer head"]
    interval_high: Float[Tensor, "function layer head"]
    importance_plain: Float[Tensor, "function layer head"]
    importance_halves: Float[Tensor, "half function layer head"]
    null_mean: Float[Tensor, "function layer head"]
    null_max: Float[Tensor, " function"]
    p_value: Float[Tensor, "function layer head"]
    q_value: Float[Tensor, "function layer head"]
    probe_accuracy: Float[Tensor, " function"]
    probe_low: Float[Tensor, " function"]
    probe_high: Float[Tensor, " function"]
    combined_accuracy: Float[Tensor, " function"]
    baseline_accuracy: Mapping[str, tuple[float, ...]]
    overall_accuracy: Mapping[str, float]
    wording_held_out: bool
    exchanged: tuple[str, ...]
    standing_out: tuple[tuple[HeadIndex, ...], ...]
    overlap: Float[Tensor, "function function"]
    correlation: Float[Tensor, "function function"]
    stability: Float[Tensor, " function"]
    folds: Int[Tensor, " item"]
    fold_importance: Float[Tensor, "fold function layer head"]
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "function layer head"]:
        """The importances."""
        return self.importance

    @property
    def stable(self) -> bool:
        """Whether every function's map is nearly the same from other contents (rank correlation of at least 0.8)."""
        return bool((self.stability >= STABLE).all())

    def head_map(self, function: str | None = None) -> Float[Tensor, "layer head"]:
        """The importances for a function; without one, each head's largest for any."""
        return self.importance.amax(0) if function is None else self.importance[self.index_of(function)]

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per function and head."""
        chosen = [set(heads) for heads in self.standing_out]
        for index, labels in cells(self.axes, self.importance):
            number, *head = index
            record = labels | {name: float(getattr(self, name)[index]) for name in _MAPS}
            yield record | {"stands_out": HeadIndex(*head) in chosen[number]}

    def figure(self, *, stability: bool = False, origin: Origin = "upper") -> Figure:
        """Every function's importance by layer and head, in panels with one colour bar.

        The bar ends at the 99th percentile, so that one head does not take all colours. Each title says how many heads
        stand out from shuffled labels.

        Args:
            stability: Show instead how the least stable map repeats with other contents.
            origin: ``"lower"`` draws the first layer at the bottom.
        """
        if stability:
            return self._stability_figure()
        layers = [
            MapLayer(
                f"{FUNCTIONS.get(function, function)}: {_counted(len(self.standing_out[number]))}",
                self.importance_normalised[number],
                details={
                    "importance": self.importance[number],
                    "95% from": self.interval_low[number],
                    "95% to": self.interval_high[number],
                    "shuffled labels": self.null_mean[number],
                    "q": self.q_value[number],
                },
            )
            for number, function in enumerate(self.functions)
        ]
        return heat.panels(
            layers,
            title="Heads by cognitive function",
            unit="share of all importance",
            percentile=99,
            origin=origin,
            empty=self.provenance.short_rows,
            note="Share of what a linear probe reads from each head beyond the items' words. Behind a function's name: "
            f"how many heads stand out from shuffled labels at a false discovery rate of 5%. {self.claim}",
        )

    @property
    def claim(self) -> str:
        """What the probe shows, what words alone would have told, and what is left to be said of the heads."""
        overall = self.overall_accuracy
        tested = "contents and formats" if self.wording_held_out else "contents"
        parts = [
            f"Of items in {tested} it was not trained on, the probe recognises {overall['probe']:.0%}; the items' "
            f"words tell {overall['words']:.0%}, the words of the sentence that is asked about "
            f"{overall['decisive']:.0%}, the most frequent function {overall['majority']:.1%}."
        ]
        if overall["decisive"] >= overall["probe"]:
            parts.append(
                "So the heads know which sentence is asked about; that they carry out what it asks for, these maps "
                "cannot show."
            )
        if bool(self.stability.isnan().any()):
            parts.append("Too few contents to say whether the maps are stable.")
        elif not self.stable:
            parts.append(f"Unstable: maps from two halves of the contents have a rank correlation below {STABLE}.")
        return " ".join(parts)

    def shape(self, *, n_null: int = 999, seed: int = 0) -> "MapShapes":
        """Whether each map is focused, where over the layers it lies, and whether it has a diagonal or a corner.

        Args:
            n_null: How often heads are permuted within their layers.
            seed: Of the permutations.

        Example:
            >>> from tl_headmaps import TaskItem, Tasks, load_default_model, task_maps
            >>> sums = [TaskItem(f"{n} + 1 =", str(n + 1), "math_calculation", content=str(n)) for n in range(10)]
            >>> cups = [TaskItem(f"{n} is", "red", "retrieval", f"Cup {n} is red.", content=str(n)) for n in range(10)]
            >>> tasks = Tasks((*sums, *cups))
            >>> maps = task_maps(load_default_model(), tasks, n_folds=3, n_null=19, cache_dir="cache", progress=False)
            >>> shapes = maps.shape(n_null=99)
            >>> shapes.functions, bool((shapes.n_effective <= 270).all())
            (('retrieval', 'math_calculation'), True)
        """
        return MapShapes.of(self.functions, self.importance_normalised, n_null=n_null, seed=seed)

    def _stability_figure(self) -> Figure:
        if bool(self.stability.isnan().any()):
            raise UsageError(
                "These maps have no second half to be compared with: stability needs three contents in either half. "
                "Give items of six contents or more."
            )
        least = int(self.stability.argmin())
        name = FUNCTIONS.get(self.functions[least], self.functions[least])
        return scatter(
            self.importance_halves[0, least],
            self.importance_halves[1, least],
            title=f"{name}, the least stable of {len(self.functions)}: rank correlation {self.stability[least]:.2f}",
            x_name="importance in one half of the contents",
            y_name="importance in the other half",
            diagonal=True,
        )

    def __str__(self) -> str:
        """A row per function: what the probe and the words know, and the heads that stand out."""
        rows = []
        for number, function in enumerate(self.functions):
            heads, stability = self.standing_out[number], float(self.stability[number])
            named = [
                f"{head} {significant(float(self.importance_normalised[number, head.layer, head.head]), 2)}"
                for head in heads[:_NAMED]
            ]
            rows.append(
                [
                    function,
                    self.n_items[number],
                    f"{self.probe_accuracy[number]:.2f}",
                    interval(float(self.probe_low[number]), float(self.probe_high[number])),
                    f"{self.baseline_accuracy['words'][number]:.2f}",
                    f"{self.baseline_accuracy['decisive'][number]:.2f}",
                    "-" if math.isnan(stability) else f"{stability:.2f}",
                    len(heads),
                    ", ".join(named) or "none",
                ]
            )
        overall = self.overall_accuracy
        titles = ["function", "items", "probe", "95%", "words", "asked", "stability", "heads", "most important"]
        columns = [(title, "left" if title in ("function", "most important") else "right") for title in titles]
        others = ", ".join(f"{name.replace('_', ' ')} {overall[name]:.2f}" for name in self.baseline_accuracy)
        known = f"probe {overall['probe']:.2f}, words and heads {overall['combined']:.2f}"
        if self.wording_held_out:
            known += f", in formats it was trained on {overall['known_wording']:.2f}"
        smallest = 1 / (1 + int(self.provenance.options["n_null"]))
        null = f"labels were shuffled within {' and '.join(self.exchanged)}; smallest p possible {smallest:.2g}"
        notes = f"all items: {known}; without heads: {others}\n{_LEGEND}\n{null}\n{wrapped(self.claim)}"
        where = "the answer" if self.positions == "answer" else "the last token"
        return f"Task maps, linear probe on z at {where}\n\n{table_text(columns, rows)}\n\n{notes}"


def _counted(n: int) -> str:
    return f"{n} head{'' if n == 1 else 's'}" if n else "no head"
