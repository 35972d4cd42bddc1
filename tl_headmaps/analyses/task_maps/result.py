"""Which heads serve which cognitive function, how sure that is, and what words alone would have told."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import HeadIndex
from ...data.tasks import FUNCTIONS
from ...renderers import heat
from ...renderers.charts import scatter
from ...renderers.figure import Figure
from ...renderers.grids import MapLayer
from ...renderers.text import table_text
from ...results import Result, cells, largest_heads

STABLE = 0.8
"""Rank correlation between two seeds above which a map counts as stable."""

_NAMED = 4
"""Heads of each function in the table."""

_LEGEND = (
    "probe: held-out items recognised from all heads; words: from the items' words; stability: rank correlation\n"
    "with a second seed; heads: above the elbow and above every head with shuffled labels, with their share of\n"
    "the importance that goes beyond words"
)
_MAPS = (
    "importance",
    "importance_normalised",
    "interval_low",
    "interval_high",
    "importance_plain",
    "importance_again",
    "null_mean",
)
_BY_FUNCTION = ("null_max", "probe_accuracy", "probe_low", "probe_high", "combined_accuracy", "stability")
_BETWEEN = ("overlap", "correlation")


@dataclass(frozen=True, eq=False, repr=False)
class TaskMaps(Result):
    """Importance of every head (last two axes) for every function (first axis); NaN in layers without heads.

    Attributes:
        functions: Names of the functions.
        n_items: Items of each.
        positions: Where heads were read: ``"answer"`` or ``"last"``.
        importance: What the probe reads from a head for the function, beyond what the items' words tell: mean over
            held-out items of gradient x activation.
        importance_normalised: Its positive part, scaled to sum to one over the heads.
        interval_low, interval_high: 95% bootstrap interval of ``importance`` over matched sets (or contents).
        importance_plain: The same for a probe that is not told what the words say, as published.
        importance_again: ``importance`` with the next seed.
        null_mean: Mean importance with labels shuffled.
        null_max: Largest importance of any head with labels shuffled.
        probe_accuracy: Share of a function's held-out items that the plain probe on all heads recognises.
        probe_low, probe_high: 95% Wilson interval of it.
        combined_accuracy: The same for words and heads together.
        baseline_accuracy: The same for what knows no heads: the most frequent function (majority, format), words of
            the question, of everything (words), and pairs of neighbouring words.
        overall_accuracy: All of these over all items.
        above_elbow: Heads of each function above the elbow of its sorted importances and above ``null_max``.
        overlap: Shared part of those heads between two functions (Jaccard).
        correlation: Rank correlation of two functions' importances.
        stability: Rank correlation of ``importance`` and ``importance_again``, function by function.
        folds: Fold of each item, in the order of the items.
        fold_importance: ``importance`` on the training items of each fold: what :func:`verify_tasks` chooses heads by,
            so that no item has a say in the heads that are ablated for it.

    Example:
        >>> from tl_headmaps import TaskItem, Tasks, load_default_model, task_maps
        >>> sums = [TaskItem(f"{n} + 1 =", str(n + 1), "math_calculation", content=str(n)) for n in range(10)]
        >>> cups = [TaskItem(f"{n} is", "red", "retrieval", f"Cup {n} is red.", content=str(n)) for n in range(10)]
        >>> tasks = Tasks((*sums, *cups))
        >>> maps = task_maps(load_default_model(), tasks, n_folds=3, n_null=1, cache_dir="cache", progress=False)
        >>> maps.n_items, maps.overall_accuracy["words"]  # such items give their function away by their words
        ((10, 10), 1.0)
        >>> maps.select("retrieval").functions, tuple(maps.importance.shape)
        (('retrieval',), (2, 30, 9))
    """

    kind: ClassVar[str] = "task_maps"
    methods: ClassVar[tuple[str, ...]] = ("ma2025cognitive", "wilson1927probable")
    json_axes: ClassVar[Mapping[str, str | None]] = {"function": "functions", "layer": None, "head": None}
    json_extra: ClassVar[tuple[str, ...]] = ("stable",)
    nullable: ClassVar[tuple[str, ...]] = (*_MAPS, "fold_importance")
    functions: tuple[str, ...]
    n_items: tuple[int, ...]
    positions: str
    importance: Float[Tensor, "function layer head"]
    importance_normalised: Float[Tensor, "function layer head"]
    interval_low: Float[Tensor, "function layer head"]
    interval_high: Float[Tensor, "function layer head"]
    importance_plain: Float[Tensor, "function layer head"]
    importance_again: Float[Tensor, "function layer head"]
    null_mean: Float[Tensor, "function layer head"]
    null_max: Float[Tensor, " function"]
    probe_accuracy: Float[Tensor, " function"]
    probe_low: Float[Tensor, " function"]
    probe_high: Float[Tensor, " function"]
    combined_accuracy: Float[Tensor, " function"]
    baseline_accuracy: Mapping[str, tuple[float, ...]]
    overall_accuracy: Mapping[str, float]
    above_elbow: tuple[tuple[HeadIndex, ...], ...]
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
        """Whether every function's map is nearly the same with another seed (rank correlation of at least 0.8)."""
        return bool((self.stability >= STABLE).all())

    def index_of(self, function: str) -> int:
        """Position of a function."""
        if function not in self.functions:
            raise UsageError(f"This result has no function {function!r}; it has {', '.join(self.functions)}.")
        return self.functions.index(function)

    def top(self, n: int = 5, function: str | None = None) -> list[tuple[HeadIndex, float]]:
        """The ``n`` most important heads of a function (or for any function, without one)."""
        maps = self.importance.amax(0) if function is None else self.importance[self.index_of(function)]
        return largest_heads(maps, n)

    def select(self, functions: str | Sequence[str]) -> "TaskMaps":
        """The maps of some functions; the probe was trained on all of them."""
        names = (functions,) if isinstance(functions, str) else tuple(functions)
        numbers = [self.index_of(name) for name in names]
        changes: dict[str, Any] = {name: getattr(self, name)[numbers] for name in (*_MAPS, *_BY_FUNCTION)}
        changes |= {name: getattr(self, name)[numbers][:, numbers] for name in _BETWEEN}
        changes |= {name: tuple(getattr(self, name)[i] for i in numbers) for name in ("n_items", "above_elbow")}
        baselines = {name: tuple(values[i] for i in numbers) for name, values in self.baseline_accuracy.items()}
        changes["fold_importance"] = self.fold_importance[:, numbers]
        return replace(self, functions=names, baseline_accuracy=baselines, **changes)

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per function and head."""
        chosen = [set(heads) for heads in self.above_elbow]
        for index, labels in cells(self.axes, self.importance):
            number, *head = index
            record = labels | {name: float(getattr(self, name)[index]) for name in _MAPS}
            yield record | {"above_elbow": HeadIndex(*head) in chosen[number]}

    def figure(self, *, stability: bool = False) -> Figure:
        """Every function's importance by layer and head, in panels with one colour bar.

        Args:
            stability: Show instead how the least stable map repeats with another seed.
        """
        if stability:
            return self._stability_figure()
        layers = [
            MapLayer(
                FUNCTIONS.get(function, function),
                self.importance_normalised[number],
                details={
                    "importance": self.importance[number],
                    "95% from": self.interval_low[number],
                    "95% to": self.interval_high[number],
                    "shuffled labels": self.null_mean[number],
                },
            )
            for number, function in enumerate(self.functions)
        ]
        overall = self.overall_accuracy
        note = (
            "Share of what a linear probe reads from each head beyond the items' words. All items: probe "
            f"{overall['probe']:.2f}, words {overall['words']:.2f}, most frequent function {overall['majority']:.2f}."
        )
        if not self.stable:
            note += f" Unstable: rank correlation with another seed below {STABLE}."
        return heat.panels(
            layers,
            title="Heads by cognitive function",
            unit="share of all importance",
            empty=self.provenance.mixers,
            note=note,
        )

    def _stability_figure(self) -> Figure:
        least = int(self.stability.argmin())
        name = FUNCTIONS.get(self.functions[least], self.functions[least])
        return scatter(
            self.importance[least],
            self.importance_again[least],
            title=f"{name}, the least stable of {len(self.functions)}: rank correlation {self.stability[least]:.2f}",
            x_name="importance with this seed",
            y_name="importance with another seed",
            diagonal=True,
        )

    def __str__(self) -> str:
        """A row per function: what the probe and the words know, and the heads above the elbow."""
        rows = []
        for number, function in enumerate(self.functions):
            heads = self.above_elbow[number]
            named = [
                f"{head} {self.importance_normalised[number, head.layer, head.head]:.3f}" for head in heads[:_NAMED]
            ]
            rows.append(
                [
                    function,
                    self.n_items[number],
                    f"{self.probe_accuracy[number]:.2f}",
                    f"{self.probe_low[number]:.2f}-{self.probe_high[number]:.2f}",
                    f"{self.baseline_accuracy['words'][number]:.2f}",
                    f"{self.stability[number]:.2f}{'' if self.stability[number] >= STABLE else ' unstable'}",
                    len(heads),
                    ", ".join(named) or "none",
                ]
            )
        overall = self.overall_accuracy
        titles = ["function", "items", "probe", "95%", "words", "stability", "heads", "most important"]
        columns = [(title, "left" if title in ("function", "most important") else "right") for title in titles]
        others = ", ".join(f"{name.replace('_', ' ')} {overall[name]:.2f}" for name in self.baseline_accuracy)
        known = f"probe {overall['probe']:.2f}, words and heads {overall['combined']:.2f}; without heads: {others}"
        notes = f"all items: {known}\n{_LEGEND}"
        if not self.stable:
            notes += f"\nUNSTABLE: with another seed a map changes (rank correlation below {STABLE}); give more items."
        where = "the answer" if self.positions == "answer" else "the last token"
        return f"Task maps, linear probe on z at {where}\n\n{table_text(columns, rows)}\n\n{notes}"
