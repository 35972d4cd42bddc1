"""What each weight matrix of each layer contributes: maps of layers by components, and of layers by heads."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import ATTENTION_COMPONENTS, HeadIndex
from ...renderers import heat
from ...renderers.figure import Figure
from ...renderers.grids import MapLayer
from ...renderers.text import interval, number, significant, table_text, true_minus, visible, wrapped
from ...results import HeadMaps, Result, cells
from ...scorers.components import attention_share, find_metric, thirds_of, trend_over_layers
from ...scorers.statistics import LEAST_UNITS, jackknife_half_width

_MAPS = ("values", "interval_low", "interval_high", "baseline")
_MARK = "95% interval includes 0"
_LEAST_LAYERS = 3
_SHOWN = 95
"""Percentile at which the colours of shares end: the first and last layers would take all of them."""

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
    n_documents: int
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
        marked = None if self.zeros is None else self.zeros[at]
        return MapLayer(name, self.values[at], interval=interval, null=random, marked=marked)

    @property
    def zeros(self) -> Bool[Tensor, "*cells"] | None:
        """Cells whose interval includes 0: that they contribute at all was not shown. None without intervals."""
        return None if self.interval_low is None else self.interval_low <= 0

    @property
    def _bar_title(self) -> str:
        """What a value is, and what it would be by chance."""
        random, metric = self._random, find_metric(self.metric)
        if metric.normalised:
            return f"share{self.unit.removeprefix(metric.unit).replace(' over ', ' of ')}"
        return f"{self.unit}; random: {random}" if random and not self.relative else self.unit

    @property
    def _note(self) -> str:
        """What the map was made from."""
        parts = []
        metric = find_metric(self.metric)
        if metric.normalised:
            parts.append(
                f"{self.metric.capitalize()}: {metric.unit.removeprefix('share of ')} over the entries of a matrix."
            )
        if self.n_documents:
            parts.append(f"{self._read}.{self._no_interval}")
        if self.relative:
            parts.append(f"Divided by the values of random matrices or subspaces: {self._random}.")
        return " ".join(parts)

    @property
    def _random(self) -> str:
        known = [] if self.baseline is None else self.baseline[~self.baseline.isnan()].tolist()
        ends = dict.fromkeys(f"{end(known):.3g}" for end in (min, max)) if known else {}
        return " to ".join(ends)

    @property
    def _read(self) -> str:
        return f"{self.n_tokens:,} tokens of {self.n_documents} document{'' if self.n_documents == 1 else 's'}"

    @property
    def _no_interval(self) -> str:
        if self.interval_low is not None:
            return ""
        return f" No intervals: they need {LEAST_UNITS} documents."

    def _text(self, what: str, table: str, note: str) -> str:
        """A table under its title, with the colour bar in words below."""
        read = f", {self._read}" if self.n_documents else ""
        title = f"{what} of {visible(self.provenance.model)}: {self.metric}{read}"
        defined = self.values[~self.values.isnan()]
        parts = [self.unit]
        if len(defined):
            parts.append(f"from {significant(float(defined.min()))} to {significant(float(defined.max()))}")
        if self.baseline is not None:
            ascending = self.baseline[~self.baseline.isnan()].unique().tolist()
            known = list(dict.fromkeys(map(significant, ascending)))
            listed = ", ".join(known) if len(known) <= 6 else f"{known[0]} to {known[-1]}"
            parts.append(f"{'divided by' if self.relative else 'random:'} {listed}")
        if self.zeros is not None and bool(self.zeros.any()):
            parts.append(f"({int(self.zeros.sum())} cells in brackets: the 95% interval includes 0)")
        below = "; ".join([*parts, note]) + (f".{self._no_interval}" if self.n_documents else "")
        return f"{title}\n\n{table}\n\n{below}"

    def _cell_text(self, index: tuple[int, ...]) -> str:
        """A value, in brackets if its interval includes 0."""
        text = significant(float(self.values[index]))
        return f"({text})" if self.zeros is not None and bool(self.zeros[index]) else text


@dataclass(frozen=True, eq=False, repr=False)
class ComponentMap(MeasuredComponents):
    """One value per layer and component.

    Attributes:
        metric: Name of the metric.
        unit: What a value is, for the colour bar.
        relative: Whether values and intervals were divided by ``baseline``.
        n_batches: Batches the text was read in, 0 if the weights alone were looked at.
        n_documents: Documents of the text.
        n_tokens: Tokens of text read.
        components: Column names, as ``attn.q``.
        values: The map; a value that is not defined is NaN.
        interval_low, interval_high: 95% interval over documents (jackknife); None with fewer than four, or no text.
        baseline: What random matrices of the same shape give, or random subspaces; None where there is no such thing.
        attention_without: What attention has of each layer without each document in turn, for :meth:`shift`.

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
    attention_without: Float[Tensor, "document layer"] | None = None

    def at(self, layer: int, component: str) -> float:
        """One cell."""
        return float(self.values[layer, self.index_of(component)])

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per layer and component."""
        # Undefined cells have a row too: every layer has every component.
        for index, labels in cells(self.axes, self.values.nan_to_num()):
            yield self._record(index, labels)

    @property
    def _has_shift(self) -> bool:
        both = set(self.components) - set(ATTENTION_COMPONENTS)
        return find_metric(self.metric).normalised and bool(both) and len(self.values) >= _LEAST_LAYERS

    def shift(self) -> "ComponentShift":
        """Does the weight move from attention to the MLP? Attention's share of its layer, over the depth of the model.

        Example:
            >>> from tl_headmaps import component_map, load_default_model
            >>> shares = component_map(load_default_model(), texts="Birds sometimes walk.", progress=False)
            >>> [round(share, 2) for share in shares.shift().thirds]
            [0.26, 0.26, 0.21]
        """
        if not self._has_shift:
            raise UsageError(
                f"A shift from attention to the MLP is seen in shares of both (sensitivity, contribution) over at "
                f"least {_LEAST_LAYERS} layers; this is {self.metric} of {', '.join(self.components)} in "
                f"{len(self.values)} layers. Map one of those metrics, and the whole model."
            )
        attention = torch.tensor([name in ATTENTION_COMPONENTS for name in self.components])
        thirds, slope = trend_over_layers(attention_share(self.values.double().T[..., None], attention))
        found = torch.cat([thirds, slope[None]])
        half = torch.full_like(found, math.nan)
        if self.attention_without is not None:
            without = trend_over_layers(self.attention_without.double())
            half = jackknife_half_width(torch.cat([without[0], without[1][:, None]], 1))
        # Shares end at 0 and 1; the slope, the last, does not.
        low, high = found - half, found + half
        low[:3], high[:3] = low[:3].clamp_min(0), high[:3].clamp_max(1)
        intervals = tuple(zip(low.tolist(), high.tolist(), strict=True))
        return ComponentShift(
            layers=tuple((part.start, part.stop - 1) for part in thirds_of(len(self.values))),
            thirds=tuple(thirds.tolist()),
            slope=float(slope),
            intervals=None if self.attention_without is None else intervals,
            n_documents=self.n_documents,
        )

    def figure(self) -> Figure:
        """Layers by components, each value with its interval and random baseline where there is one."""
        shares = find_metric(self.metric).normalised
        return heat.component_map(
            [self._layer(self.metric)],
            self.components,
            title=f"{self.metric.replace('_', ' ').capitalize()} of every matrix of {self.provenance.model}",
            unit=self._bar_title,
            percentile=_SHOWN if shares else None,
            palette="oranges",
            mark=_MARK,
            note=" ".join(part for part in (self._note, str(self.shift()) if self._has_shift else "") if part),
        )

    def __str__(self) -> str:
        """The map as a table, the largest cell of each column marked."""
        best = self.values.nan_to_num(nan=-math.inf).argmax(0).tolist()
        rows = [
            [layer, *(f"{'*' if best[j] == layer else ''}{self._cell_text((layer, j))}" for j in range(len(best)))]
            for layer in range(len(self.values))
        ]
        columns = [("layer", "right"), *((name, "right") for name in self.components)]
        text = self._text("Component map", table_text(columns, rows), "* largest of the column")
        return f"{text}\n\n{wrapped(str(self.shift()))}" if self._has_shift else text


@dataclass(frozen=True)
class ComponentShift:
    """Attention's share of its layer over the depth of a model.

    Attributes:
        layers: First and last layer of each third.
        thirds: Mean share in each of them.
        slope: Change from the first layer to the last, along the straight line of least squares.
        intervals: 95% intervals over documents of the three thirds and the slope; None with fewer than four documents.
        n_documents: Documents read.
    """

    layers: tuple[tuple[int, int], ...]
    thirds: tuple[float, ...]
    slope: float
    intervals: tuple[tuple[float, float], ...] | None
    n_documents: int

    @property
    def _unless(self) -> str:
        """What a straight line over the layers does not say."""
        first, middle, last = self.thirds
        if min(first, last) <= middle <= max(first, last):
            return ""
        return f", though no steady one: it is {'largest' if middle > first else 'smallest'} in between"

    def __str__(self) -> str:
        """In words, with what follows from the slope."""
        shown = [""] * 4 if self.intervals is None else [f" ({interval(*ends)})" for ends in self.intervals]
        parts = [
            f"{number(share)}{ends} in layers {first} to {last}"
            for share, ends, (first, last) in zip(self.thirds, shown[:3], self.layers, strict=True)
        ]
        text = f"Attention's share of its layer: {'; '.join(parts)}. "
        change = f"{'rises' if self.slope > 0 else 'falls'} by {number(abs(self.slope))}"
        if self.intervals is None:
            return f"{text}It {change} from the first layer to the last."
        low, high = self.intervals[3]
        if low <= 0 <= high:
            verdict = f"Over all layers its slope, {number(self.slope)} ({interval(low, high)}), shows no shift"
        else:
            ends = sorted((abs(low), abs(high)))
            towards = "from the MLP to attention" if self.slope > 0 else "from attention to the MLP"
            verdict = (
                f"It {change} ({interval(*ends)}) from the first layer to the last, a shift {towards}{self._unless}"
            )
        return true_minus(f"{text}{verdict} (95% over {self.n_documents} documents).")


@dataclass(frozen=True, eq=False, repr=False)
class HeadComponentMap(HeadMaps, MeasuredComponents):
    """One value per attention component, layer and head: a :class:`ComponentMap` opened into its heads.

    ``attn.k`` and ``attn.v`` have one head per key/value head; where that is fewer than query heads, the cells left
    over are NaN.

    Attributes:
        components: The attention components, the first axis of every map.
        values: The maps.
        interval_low, interval_high: 95% interval over documents (jackknife); None with fewer than four, or no text.
        baseline: What random matrices of the same shape give, or random subspaces; None where there is no such thing.
        metric, unit, relative, n_batches, n_documents, n_tokens: As in :class:`ComponentMap`.

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
    labelled: ClassVar[str] = "components"
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
            empty=self.provenance.short_rows,
            percentile=_SHOWN if find_metric(self.metric).normalised else None,
            palette="oranges",
            mark=_MARK,
            note=note.strip(),
        )

    def __str__(self) -> str:
        """The strongest heads of each component."""
        low, high, random = self.interval_low, self.interval_high, self.baseline
        rows = []
        for name in self.components:
            for place, ((_, head), _) in enumerate(self.top(_STRONGEST, name)):
                at = (self.index_of(name), head.layer, head.head)
                n_heads = int((~self.values[at[0]].isnan()).sum())
                title = f"{name}, best of {n_heads}" if place == 0 else ""
                row: list[object] = [title, head, self._cell_text(at)]
                if low is not None and high is not None:
                    row.append(f"{significant(float(low[at]))} to {significant(float(high[at]))}")
                if random is not None:
                    row.append(significant(float(random[at])))
                rows.append(row)
        columns = [("component", "left"), ("head", "left"), ("value", "right")]
        columns += [("95%", "right")] * (low is not None)
        columns += [("divided by" if self.relative else "random", "right")] * (random is not None)
        note = "heads of attn.k and attn.v are key/value heads"
        return self._text("Component map by head", table_text(columns, rows), note)
