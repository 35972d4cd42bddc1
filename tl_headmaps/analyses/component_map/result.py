"""What each weight matrix of each layer contributes: maps of layers by components, and of layers by heads."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import HeadIndex
from ...renderers import heat
from ...renderers.figure import Figure
from ...renderers.grids import MapLayer
from ...renderers.text import table_text, visible
from ...results import Result, cells
from ...scorers.components import find_metric

_MAPS = ("values", "interval_low", "interval_high", "baseline")
_STRONGEST = 5
"""Heads of each component in the table of a head map."""


@dataclass(frozen=True, eq=False, repr=False)
class MeasuredComponents(Result):
    """What both maps hold: values, intervals and baseline of one shape; see :class:`ComponentMap`."""

    nullable: ClassVar[tuple[str, ...]] = _MAPS
    metric: str
    unit: str
    relative: bool
    n_batches: int
    n_tokens: int
    components: tuple[str, ...]
    values: Float[Tensor, "*cells"]
    interval_low: Float[Tensor, "*cells"] | None
    interval_high: Float[Tensor, "*cells"] | None
    baseline: Float[Tensor, "*cells"] | None
    provenance: Provenance

    @property
    def references(self) -> tuple[str, ...]:
        """Publications the metric is from."""
        return find_metric(self.metric).cites

    def index_of(self, component: str) -> int:
        """Position of a component on its axis."""
        if component not in self.components:
            raise UsageError(f"This map has no component {component!r}; it has {', '.join(self.components)}.")
        return self.components.index(component)

    def _record(self, index: tuple[int, ...], labels: dict[str, Any]) -> dict[str, Any]:
        """One cell with its labels."""
        maps = {"value": self.values, **{name: getattr(self, name) for name in _MAPS[1:]}}
        return labels | {name: float(values[index]) for name, values in maps.items() if values is not None}

    def _layer(self, name: str, at: "int | EllipsisType" = ...) -> MapLayer:
        """The whole map for a figure, or one component of it."""
        low, high, random = (
            None if values is None else values[at] for values in (self.interval_low, self.interval_high, self.baseline)
        )
        interval = None if low is None or high is None else (low, high)
        if self.relative:
            # Chance is 1 everywhere; what was divided by is worth a look.
            return MapLayer(name, self.values[at], interval=interval, details={"divided by": random})
        return MapLayer(name, self.values[at], interval=interval, null=random)

    @property
    def _bar_title(self) -> str:
        """What a value is, and what it would be by chance."""
        random = self._random
        return f"{self.unit}; random: {random}" if random and not self.relative else self.unit

    @property
    def _note(self) -> str:
        """What the map was made from."""
        parts = []
        if self.n_batches:
            parts.append(f"{self.n_tokens:,} tokens in {self.n_batches} batches.")
        if self.relative:
            parts.append(f"Divided by the values of random matrices or subspaces: {self._random}.")
        return " ".join(parts)

    @property
    def _random(self) -> str:
        known = [] if self.baseline is None else self.baseline[~self.baseline.isnan()].tolist()
        ends = dict.fromkeys(f"{end(known):.3g}" for end in (min, max)) if known else {}
        return " to ".join(ends)

    def _text(self, what: str, table: str, note: str) -> str:
        """A table under its title, with the colour bar in words below."""
        read = f", {self.n_tokens:,} tokens in {self.n_batches} batches" if self.n_batches else ""
        title = f"{what} of {visible(self.provenance.model)}: {self.metric}{read}"
        defined = self.values[~self.values.isnan()]
        parts = [self.unit]
        if len(defined):
            parts.append(f"from {_number(float(defined.min()))} to {_number(float(defined.max()))}")
        if self.baseline is not None:
            ascending = self.baseline[~self.baseline.isnan()].unique().tolist()
            known = list(dict.fromkeys(map(_number, ascending)))
            listed = ", ".join(known) if len(known) <= 6 else f"{known[0]} to {known[-1]}"
            parts.append(f"{'divided by' if self.relative else 'random:'} {listed}")
        return f"{title}\n\n{table}\n\n{'; '.join([*parts, note])}"


@dataclass(frozen=True, eq=False, repr=False)
class ComponentMap(MeasuredComponents):
    """One value per layer and component.

    Attributes:
        metric: Name of the metric.
        unit: What a value is, for the colour bar.
        relative: Whether values and intervals were divided by ``baseline``.
        n_batches: Batches of text averaged over, 0 if the weights alone were looked at.
        n_tokens: Tokens of text read.
        components: Column names, as ``attn.q``.
        values: The map; a value that is not defined is NaN.
        interval_low, interval_high: 95% t-interval over batches; None without text or with a single batch.
        baseline: What random matrices of the same shape give, or random subspaces; None where there is no such thing.

    Example:
        >>> from tl_headmaps import component_map, load_default_model
        >>> shares = component_map(load_default_model(), texts="Birds sometimes walk.", progress=False)
        >>> shares.components
        ('attn.q', 'attn.k', 'attn.v', 'attn.o', 'mlp.up', 'mlp.down', 'mlp.gate')
        >>> round(float(shares.values.sum()), 3), round(shares.at(8, "mlp.gate"), 3)
        (1.0, 0.007)
    """

    kind: ClassVar[str] = "component_map"
    json_axes: ClassVar[Mapping[str, str | None]] = {"layer": None, "component": "components"}
    values: Float[Tensor, "layer component"]

    def top(self, n: int = 5) -> list[tuple[tuple[int, str], float]]:
        """The ``n`` largest cells as ((layer, component), value); ties go to the lower layer."""
        defined = [
            ((labels["layer"], labels["component"]), float(self.values[index]))
            for index, labels in cells(self.axes, self.values)
        ]
        return sorted(defined, key=lambda cell: -cell[1])[:n]

    def at(self, layer: int, component: str) -> float:
        """One cell."""
        return float(self.values[layer, self.index_of(component)])

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per layer and component."""
        # Undefined cells have a row too: every layer has every component.
        for index, labels in cells(self.axes, self.values.nan_to_num()):
            yield self._record(index, labels)

    def figure(self) -> Figure:
        """Layers by components, each value with its interval and random baseline where there is one."""
        return heat.component_map(
            [self._layer(self.metric)],
            self.components,
            title=f"{self.metric.replace('_', ' ').capitalize()} of every matrix of {self.provenance.model}",
            unit=self._bar_title,
            note=self._note,
        )

    def __str__(self) -> str:
        """The map as a table, the largest cell of each column marked."""
        best = self.values.nan_to_num(nan=-math.inf).argmax(0).tolist()
        rows = [
            [layer, *(f"{'*' if best[j] == layer else ''}{_number(value)}" for j, value in enumerate(values))]
            for layer, values in enumerate(self.values.tolist())
        ]
        columns = [("layer", "right"), *((name, "right") for name in self.components)]
        return self._text("Component map", table_text(columns, rows), "* largest of the column")


@dataclass(frozen=True, eq=False, repr=False)
class HeadComponentMap(MeasuredComponents):
    """One value per attention component, layer and head: a :class:`ComponentMap` opened into its heads.

    ``attn.k`` and ``attn.v`` have one head per key/value head; where that is fewer than query heads, the cells left
    over are NaN.

    Attributes:
        components: The attention components, the first axis of every map.
        values: The maps.
        interval_low, interval_high: 95% t-interval over batches; None without text or with a single batch.
        baseline: What random matrices of the same shape give, or random subspaces; None where there is no such thing.
        metric, unit, relative, n_batches, n_tokens: As in :class:`ComponentMap`.

    Example:
        >>> from tl_headmaps import component_map, load_default_model
        >>> norms = component_map(load_default_model(), "frobenius", by_head=True, progress=False)
        >>> tuple(norms.of("attn.q").shape), tuple(norms.of("attn.k").shape)  # 9 query heads share 3 key heads
        ((30, 9), (30, 3))
        >>> norms.top(1, "attn.q")[0][0]
        ('attn.q', HeadIndex(layer=0, head=3))
    """

    kind: ClassVar[str] = "head_component_map"
    json_axes: ClassVar[Mapping[str, str | None]] = {"component": "components", "layer": None, "head": None}
    values: Float[Tensor, "component layer head"]

    def of(self, component: str) -> Float[Tensor, "layer head"]:
        """The map of one component, without the cells of heads it does not have."""
        values = self.values[self.index_of(component)]
        return values[:, ~values.isnan().all(0)]

    def top(self, n: int = 5, component: str | None = None) -> list[tuple[tuple[str, HeadIndex], float]]:
        """The ``n`` largest cells as ((component, head), value), of one component or all."""
        only = None if component is None else self.index_of(component)
        defined = [
            ((labels["component"], HeadIndex(labels["layer"], labels["head"])), float(self.values[index]))
            for index, labels in cells(self.axes, self.values)
            if only in (None, index[0])
        ]
        return sorted(defined, key=lambda cell: -cell[1])[:n]

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per component and head."""
        for index, labels in cells(self.axes, self.values):
            yield self._record(index, labels)

    def figure(self) -> Figure:
        """Layers by heads, one map for each attention matrix."""
        note = self._note
        if bool(self.values.isnan().all(1).any()):
            note += " Query heads share keys and values: attn.k and attn.v have one column for each key/value head."
        return heat.head_map(
            [self._layer(name, index) for index, name in enumerate(self.components)],
            title=f"{self.metric.replace('_', ' ').capitalize()} by head of {self.provenance.model}",
            unit=self._bar_title,
            switches=("component", "map"),
            empty=self.provenance.mixers,
            note=note.strip(),
        )

    def __str__(self) -> str:
        """The strongest heads of each component."""
        low, high, random = self.interval_low, self.interval_high, self.baseline
        rows = []
        for name in self.components:
            for place, ((_, head), value) in enumerate(self.top(_STRONGEST, name)):
                at = (self.index_of(name), head.layer, head.head)
                row: list[object] = [name if place == 0 else "", head, _number(value)]
                if low is not None and high is not None:
                    row.append(f"{_number(float(low[at]))}-{_number(float(high[at]))}")
                if random is not None:
                    row.append(_number(float(random[at])))
                rows.append(row)
        columns = [("component", "left"), ("head", "left"), ("value", "right")]
        columns += [("95%", "right")] * (low is not None)
        columns += [("divided by" if self.relative else "random", "right")] * (random is not None)
        note = "heads of attn.k and attn.v are key/value heads"
        return self._text("Component map by head", table_text(columns, rows), note)


def _number(value: float) -> str:
    """Three or four digits, however small."""
    return "-" if value != value else f"{value:.4f}" if 0.01 <= abs(value) < 1 else f"{value:.3g}"
