"""What q, k, v, o, up, down and gate of every layer contribute, and the heads inside them."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import EllipsisType
from typing import Annotated, Any, ClassVar, Literal, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..capture.components.gradients import component_gradients
from ..capture.components.matrices import (
    CheckpointComponents,
    ComponentSource,
    ModelComponents,
    component_source,
    heads_of,
    n_parts,
)
from ..capture.loading import load_model
from ..capture.running.activations import encode_prompt, prepends_bos
from ..capture.running.text import TextBatches, token_batches
from ..capture.weights import HeadWeights
from ..core.errors import UsageError, WeightBasisError
from ..core.options import AtLeast, Count, Seed, public
from ..core.progress import Progress
from ..core.provenance import Provenance
from ..core.types import ATTENTION_COMPONENTS, WRITING_COMPONENTS, HeadIndex, Model
from ..data.texts import describe_source, read_texts
from ..renderers import heat
from ..renderers.figure import Figure
from ..renderers.grids import MapLayer
from ..renderers.text import interval, number, significant, table_text, true_minus, visible, wrapped
from ..results import HeadMaps, Result, cells
from ..results.table import ComparedMaps, frozen_result
from ..scorers.components import (
    Change,
    Estimate,
    Share,
    attention_share,
    find_metric,
    names_of,
    over_documents,
    random_baseline,
    thirds_of,
    trend_over_layers,
)
from ..scorers.spectra import WeightMatrix, parallel_map
from ..scorers.statistics import LEAST_UNITS, jackknife_half_width
from .sweep import LayerStep, sweep_layers

_SEQUENCE = 256
_SUBSPACE = 16
_MAPS = ("values", "interval_low", "interval_high", "baseline")
_MARK = "95% interval includes 0"
_LEAST_LAYERS = 3
_SHOWN = 95
"""Percentile at which the colours of shares end: the first and last layers would take all of them."""

_STRONGEST = 5
"""Heads of each component in the table of a head map."""

Cells = Float[Tensor, "component layer part"]
Key = tuple[int, int, int]
"""Component, layer and part of a cell, counted from 0."""


@frozen_result
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

    def compared_maps(self) -> ComparedMaps:
        """What a comparison of two such maps compares."""
        by_head = isinstance(self, HeadMaps)
        values, low, high = (
            None if maps is None else maps if by_head else maps[None]
            for maps in (self.values, self.interval_low, self.interval_high)
        )
        assert values is not None
        return ComparedMaps(
            over="component" if by_head else "metric",
            measure=self.unit,
            names=self.components if by_head else (self.metric,),
            values=values,
            ends=(low, high),
            columns=None if by_head else self.components,
            fixed={"metric": self.metric, "relative": self.relative},
        )

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
    def texts_read(self) -> str:
        """The text in words; empty where none was read."""
        documents = f"{self.n_documents} document{'' if self.n_documents == 1 else 's'}"
        return f"{self.n_tokens:,} tokens of {documents}" if self.n_documents else ""

    def notes(self) -> list[str]:
        """What values are, what they were made from, and what they would be by chance."""
        metric, notes = find_metric(self.metric), []
        if metric.normalised:
            what = metric.unit.removeprefix("share of ")
            notes.append(f"{self.metric.capitalize()}: {what} over the entries of a matrix.")
        if self.n_documents and self.interval_low is None:
            notes.append(f"No intervals: they need {LEAST_UNITS} documents.")
        if self.baseline is not None:
            known = list(dict.fromkeys(map(significant, self.baseline[~self.baseline.isnan()].unique().tolist())))
            listed = ", ".join(known) if len(known) <= 6 else f"{known[0]} to {known[-1]}"
            of = "Divided by the values of random" if self.relative else "Random"
            notes.append(f"{of} matrices or subspaces: {listed}.")
        if self.zeros is not None and bool(self.zeros.any()):
            notes.append(f"In {int(self.zeros.sum())} cells (in brackets) the 95% interval includes 0.")
        return notes

    def _figure_options(self, title: str) -> dict[str, Any]:
        """What figures of both maps have in common."""
        metric = find_metric(self.metric)
        of = self.unit.removeprefix(metric.unit).replace(" over ", " of ")
        read = [f"{self.texts_read}."] * bool(self.n_documents)
        return {
            "title": f"{self.metric.replace('_', ' ').capitalize()} {title} of {self.provenance.model}",
            "unit": f"share{of}" if metric.normalised else self.unit,
            "percentile": _SHOWN if metric.normalised else None,
            "palette": "oranges",
            "mark": _MARK,
            "note": " ".join([*self.notes(), *read]),
        }

    def _text(self, what: str, table: str, note: str) -> str:
        """A table under its title, with what its numbers are below."""
        read = f", {self.texts_read}" if self.n_documents else ""
        title = f"{what} of {visible(self.provenance.model)}: {self.metric}{read}"
        defined = self.values[~self.values.isnan()]
        ends = [significant(float(end)) for end in (defined.min(), defined.max())] if len(defined) else []
        unit = "; ".join([self.unit, *[f"from {' to '.join(ends)}"] * bool(ends), note])
        return "\n\n".join([title, table, wrapped(f"{unit}. {' '.join(self.notes())}".rstrip())])

    def _cell_text(self, index: tuple[int, ...]) -> str:
        """A value, in brackets if its interval includes 0."""
        text = significant(float(self.values[index]))
        return f"({text})" if self.zeros is not None and bool(self.zeros[index]) else text


@frozen_result
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
        measures = torch.cat([thirds, slope[None]])
        half = torch.full_like(measures, math.nan)
        if self.attention_without is not None:
            without = trend_over_layers(self.attention_without.double())
            half = jackknife_half_width(torch.cat([without[0], without[1][:, None]], 1))
        # Shares end at 0 and 1; the slope, the last, does not.
        low, high = measures - half, measures + half
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
        options = self._figure_options("of every matrix")
        if self._has_shift:
            options["note"] += f" {self.shift()}"
        return heat.component_map([self._layer(self.metric)], self.components, **options)

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


@frozen_result
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
        options = self._figure_options("by head")
        if bool(self.values.isnan().all(1).any()):
            options["note"] += (
                " Query heads share keys and values: attn.k and attn.v have one column for each key/value head."
            )
        layers = [self._layer(name, index) for index, name in enumerate(self.components)]
        return heat.head_map(layers, switches=("component", "map"), empty=self.provenance.short_rows, **options)

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


@overload
def component_map(
    model: Model | HeadWeights,
    metric: str = ...,
    texts: Any = ...,
    against: Any = ...,
    *,
    by_head: Literal[False] = ...,
    normalise: Share | None = ...,
    relative: bool = ...,
    k: Count | None = ...,
    column: str = ...,
    max_tokens: int = ...,
    prepend_bos: bool | None = ...,
    seed: Seed = ...,
    run_dir: str | Path | None = ...,
    progress: bool = ...,
) -> ComponentMap: ...
@overload
def component_map(
    model: Model | HeadWeights,
    metric: str = ...,
    texts: Any = ...,
    against: Any = ...,
    *,
    by_head: Literal[True],
    normalise: Share | None = ...,
    relative: bool = ...,
    k: Count | None = ...,
    column: str = ...,
    max_tokens: int = ...,
    prepend_bos: bool | None = ...,
    seed: Seed = ...,
    run_dir: str | Path | None = ...,
    progress: bool = ...,
) -> HeadComponentMap: ...
@public
def component_map(
    model: Model | HeadWeights,
    metric: str = "sensitivity",
    texts: Any = None,
    against: Any = None,
    *,
    by_head: bool = False,
    normalise: Share | None = None,
    relative: bool = False,
    k: Count | None = None,
    column: str = "text",
    max_tokens: Annotated[int, AtLeast(2)] = 8192,
    prepend_bos: bool | None = None,
    seed: Seed = 0,
    run_dir: str | Path | None = None,
    progress: bool = True,
) -> ComponentMap | HeadComponentMap:
    """One value for every weight matrix of every layer: rows layers, columns attn.q to mlp.gate.

    From text: ``sensitivity`` (first-order effect on the loss of removing entries, as shares of the map),
    ``contribution`` (of scaling the matrix as a whole), ``gradient_ratio``; with intervals over the documents of the
    text, if there are four. From the weights alone: ``frobenius``, ``spectral``, ``stable_rank``,
    ``effective_rank``, ``tail_exponent``. Between two models: ``relative_change``, ``changed_share``,
    ``subspace_overlap``.

    Args:
        model: A TransformerBridge or HookedTransformer, or HeadWeights for metrics that need no text: of a checkpoint
            all columns, of a model the four of attention (they keep no MLP but the first).
        metric: One of the names above.
        texts: For metrics from text: a string, a list of strings, a UTF-8 file with texts separated by blank lines, or
            a ``datasets.Dataset``; by default the bundled English sample.
        against: For metrics between two models: the other model, its weights, or its folder. Change is relative to it.
        by_head: Give a value to the q, k, v and o of every head instead (k and v: of every key/value head). The
            result is a HeadComponentMap. Shares are shares of that map, so heads compare with heads.
        normalise: What ``sensitivity`` and ``contribution`` are shares of: the ``"map"`` (default), or of their
            ``"layer"``, so that every row sums to 1.
        relative: Divide by the baseline: what random matrices of the same shape give (independent normal entries of
            variance 1 / inputs, mean of three), or random subspaces.
        k: Dimensions of the subspaces of ``subspace_overlap``; by default 16, or half of the smallest matrix.
        max_tokens: Read at most this many tokens.
        seed: Seed of the random matrices.
        run_dir: For metrics without text: finished layers are saved in this folder, so an interrupted run resumes.

    Example:
        >>> from tl_headmaps import component_map, load_default_model
        >>> norms = component_map(load_default_model(), "frobenius", progress=False)
        >>> [(layer, component, round(value)) for (layer, component), value in norms.top(2)]
        [(28, 'mlp.up', 206), (29, 'mlp.up', 203)]
        >>> heads = component_map(load_default_model(), "frobenius", by_head=True, progress=False)
        >>> [(component, str(head), round(value)) for (component, head), value in heads.top(2)]
        [('attn.k', 'L0H1', 90), ('attn.q', 'L0H3', 74)]
    """
    options = texts, against, normalise, relative, k, column, max_tokens, prepend_bos, seed, run_dir, progress
    measurement = _Measurement(model, metric, by_head, *options)
    fields = measurement.fields()
    if by_head:
        return HeadComponentMap(**fields)
    for name in _MAPS:
        fields[name] = None if fields[name] is None else fields[name][:, :, 0].T.contiguous()
    return ComponentMap(**fields, attention_without=measurement.attention_without)


@dataclass(frozen=True)
class _MeasureLayers:
    """Values of all matrices of a layer, with their shapes."""

    weights: HeadWeights
    keys: list[Key]
    measure: Callable[[Key], tuple[float, int, int]]

    def prepare(self) -> LayerStep:
        def step(layer: int) -> dict[str, Tensor]:
            rows = parallel_map(self.measure, [key for key in self.keys if key[1] == layer])
            return {"measured": torch.tensor(list(rows), dtype=torch.float64)}

        return step


@dataclass
class _Measurement:
    """One call: its options, checked, and the fields of its result."""

    model: Any
    name: str
    by_head: bool
    texts: Any
    against: Any
    normalise: Share | None
    relative: bool
    k: int | None
    column: str
    max_tokens: int
    prepend_bos: bool | None
    seed: int
    run_dir: str | Path | None
    progress: bool

    def __post_init__(self) -> None:
        self.metric = find_metric(self.name)
        self._check_options()
        self.source = component_source(self.model, attention_only=self.by_head)
        self.recorded: dict[str, Any] = {"metric": self.name, "relative": self.relative}
        if self.share is not None:
            self.recorded["normalise"] = self.share
        self.data: dict[str, str] = {}
        self.created: str | None = None
        self.n_batches = self.n_documents = self.n_tokens = 0
        self.attention_without: Float[Tensor, "document layer"] | None = None

    def _check_options(self) -> None:
        metric, between_two = self.metric, self.metric.kind == "change"
        refusals = (
            (
                between_two and self.against is None,
                "compares two models, and only one was given. Pass the other one, its weights or its folder as "
                "against=.",
            ),
            (
                not between_two and self.against is not None,
                f"looks at one model, but against= was given. Leave it out, or choose one of {names_of('change')}.",
            ),
            (
                not metric.needs_text and self.texts is not None,
                "reads the weights alone, but texts were given. Leave them out, or choose one of "
                f"{names_of('gradients')}.",
            ),
            (
                self.normalise is not None and not metric.normalised,
                f"is not a share of anything, but normalise={self.normalise!r} was given. Leave it out, or choose "
                "sensitivity or contribution.",
            ),
            (
                self.relative and not metric.has_baseline,
                "has no random baseline to be relative to. Leave relative out, or choose a metric of the weights alone "
                "or subspace_overlap.",
            ),
            (
                self.k is not None and metric.chance is None,
                f"compares no subspaces, but k={self.k} was given. Leave it out.",
            ),
            (
                metric.needs_text and self.run_dir is not None,
                "runs texts through the whole model, so it has no finished layers to keep: leave run_dir out, or "
                "choose a metric of the weights alone.",
            ),
        )
        for refused, why in refusals:
            if refused:
                raise UsageError(f"{metric.name} {why}")

    @property
    def share(self) -> Share | None:
        """What values are shares of."""
        return (self.normalise or "map") if self.metric.normalised else None

    def fields(self) -> dict[str, Any]:
        """Fields of the result; maps are [component, layer, part]."""
        estimate, baseline = self._measured()
        maps = {"values": estimate.values, "interval_low": estimate.low, "interval_high": estimate.high}
        if self.relative:
            assert baseline is not None
            maps = {name: None if cells is None else cells / baseline for name, cells in maps.items()}
        maps["baseline"] = baseline
        of = {None: "", "map": " over the map", "layer": " of its layer"}[self.share]
        unit = f"{self.metric.unit}{of}{', relative to random' if self.relative else ''}"
        provenance = self._provenance()
        return {
            "metric": self.metric.name,
            "unit": unit,
            "relative": self.relative,
            "n_batches": self.n_batches,
            "n_documents": self.n_documents,
            "n_tokens": self.n_tokens,
            "components": self.source.components,
            **{name: None if cells is None else _finite(cells) for name, cells in maps.items()},
            "provenance": provenance if self.created is None else replace(provenance, created=self.created),
        }

    def _provenance(self) -> Provenance:
        seed = self.seed if self.metric.kind == "weights" else None
        runs_model = self.metric.needs_text
        return self.source.provenance(runs_model=runs_model, options=self.recorded, data=self.data, seed=seed)

    def _measured(self) -> tuple[Estimate, Cells | None]:
        if self.metric.kind == "weights":
            return self._of_weights()
        if self.metric.kind == "change":
            return self._of_change()
        if not isinstance(self.source, ModelComponents):
            raise UsageError(
                f"{self.metric.name} runs a text through the model, but only weights were given. Pass the model "
                "itself, or choose a metric of the weights alone."
            )
        batches = self._batches(self.source)
        by_batch = component_gradients(
            self.source, batches, self.metric.measure, by_head=self.by_head, progress=self.progress
        )
        weights = torch.tensor([batch.n_targets for batch in batches.items], dtype=torch.float64, device="cpu")
        documents = torch.tensor(batches.units, device="cpu")
        estimate = over_documents(self._joined(by_batch), weights, documents, self.share)
        if self.share is not None and estimate.without_each is not None:
            attention = torch.tensor([name in ATTENTION_COMPONENTS for name in self.source.components], device="cpu")
            self.attention_without = attention_share(estimate.without_each, attention).float()
        return estimate, None

    def _keys(self) -> list[Key]:
        return [
            (index, layer, part)
            for layer in range(self.source.n_layers)
            for index, component in enumerate(self.source.components)
            if self.source.has(layer, component)
            for part in range(n_parts(self.source, component, layer) if self.by_head else 1)
        ]

    def _matrix(self, source: ComponentSource, key: Key) -> WeightMatrix:
        index, layer, part = key
        component = source.components[index]
        weight = heads_of(source, layer, component)[part] if self.by_head else source.matrix(layer, component)
        return WeightMatrix(weight, writes=component in WRITING_COMPONENTS)

    def _cells(self, values: dict[Key, float]) -> Cells:
        cells = torch.full(self._shape, torch.nan, dtype=torch.float64)
        for key, value in values.items():
            cells[key] = value
        return cells

    @property
    def _shape(self) -> tuple[int, int, int]:
        source = self.source
        return len(source.components), source.n_layers, source.n_heads if self.by_head else 1

    def _filled(self, measured: Callable[[WeightMatrix, Key], float]) -> tuple[Cells, dict[Key, tuple[int, int]]]:
        """Value and shape of every matrix."""
        keys = self._keys()

        def measure(key: Key) -> tuple[float, int, int]:
            matrix = self._matrix(self.source, key)
            return measured(matrix, key), *matrix.weight.shape

        if self.run_dir is None:
            measured_rows = parallel_map(measure, keys)
            bar = Progress(total=len(keys), desc=self.metric.name, unit="matrix", show=self.progress)
            rows = list(bar.over(measured_rows))
        else:
            swept = sweep_layers(
                _MeasureLayers(self.source.weights, keys, measure),
                range(self.source.n_layers),
                kind=(HeadComponentMap if self.by_head else ComponentMap).kind,
                provenance=self._provenance(),
                run_dir=self.run_dir,
                description=self.metric.name,
                progress=self.progress,
            )
            self.created = swept.provenance.created
            rows = [row for layer in range(self.source.n_layers) for row in swept.layers[layer]["measured"].tolist()]
        by_key = dict(zip(keys, rows, strict=True))
        cells = self._cells({key: row[0] for key, row in by_key.items()})
        return cells, {key: (int(row[1]), int(row[2])) for key, row in by_key.items()}

    def _of_weights(self) -> tuple[Estimate, Cells]:
        values, shapes = self._filled(lambda matrix, key: float(self.metric.measure(matrix)))
        distinct = sorted(set(shapes.values()))
        random = parallel_map(lambda shape: random_baseline(self.metric, *shape, self.seed), distinct)
        by_shape = dict(zip(distinct, random, strict=True))
        return Estimate(values), self._cells({key: by_shape[shape] for key, shape in shapes.items()})

    def _of_change(self) -> tuple[Estimate, Cells | None]:
        against = self.against
        if isinstance(against, str | Path):
            # Weights are compared with weights: nothing is built that was not before.
            on_disk = isinstance(self.source, CheckpointComponents)
            against = HeadWeights.from_checkpoint(against) if on_disk else load_model(str(against))
        other = component_source(against, attention_only=self.by_head)
        smallest = self._require_same_shapes(other)
        k = self._subspace(smallest)
        theirs = other.provenance()
        self._require_same_basis(theirs.basis)
        self.recorded |= {"against": theirs.model, "k": k}
        self.data["against"] = theirs.fingerprint
        self.data |= {f"against_{name}": digest for name, digest in theirs.data.items()}

        def change(new: WeightMatrix, key: Key) -> Change:
            old = self._matrix(other, key)
            return Change(new, WeightMatrix(old.weight.to(new.weight.device), old.writes), k)

        values, _ = self._filled(lambda new, key: float(self.metric.measure(change(new, key))))
        chance = self.metric.chance
        if chance is None:
            return Estimate(values), None
        by_chance = {key: chance(change(self._matrix(self.source, key), key)) for key in self._keys()}
        return Estimate(values), self._cells(by_chance)

    def _require_same_shapes(self, other: ComponentSource) -> int:
        """The smallest side of any matrix, if all are alike."""
        source = self.source
        for name in ("n_layers", "components", "n_heads", "n_kv_heads"):
            ours, theirs = getattr(source, name), getattr(other, name)
            if ours != theirs:
                raise UsageError(
                    f"The two models cannot be compared matrix by matrix: {name} is {ours} here and {theirs} in the "
                    "one compared with. Compare checkpoints of one architecture."
                )
        smallest: list[int] = []
        for layer in range(source.n_layers):
            for component in (name for name in source.components if source.has(layer, name)):
                ours, theirs = (tuple(one.matrix(layer, component).shape) for one in (source, other))
                if ours != theirs:
                    raise UsageError(
                        f"The two models cannot be compared: {component} of layer {layer} is {list(ours)} here and "
                        f"{list(theirs)} in the one compared with. Compare checkpoints of one architecture."
                    )
                smallest += heads_of(source, layer, component).shape[1:] if self.by_head else ours
        return min(smallest)

    def _require_same_basis(self, theirs: str) -> None:
        ours = self.source.provenance().basis
        if ours != theirs:
            raise WeightBasisError(
                f"The weights are {ours} here and {theirs} in the model compared with, so every matrix would differ by "
                "the processing alone. Load both the same way (both raw, or both processed)."
            )

    def _subspace(self, smallest: int) -> int:
        if self.k is None:
            return max(1, min(_SUBSPACE, smallest // 2))
        if self.k > smallest:
            raise UsageError(
                f"k={self.k} is impossible: the smallest matrix has {smallest} directions. Choose 1 to {smallest}."
            )
        return self.k

    def _batches(self, source: ModelComponents) -> TextBatches:
        model = source.model
        length = min(_SEQUENCE, int(model.cfg.n_ctx))
        prepend_bos = prepends_bos(model, self.prepend_bos)
        batches = token_batches(
            (
                text if isinstance(text, str) else tuple(encode_prompt(model, text))
                for text in read_texts(self.texts, self.column)
            ),
            source.weights.tokenizer,
            length=length,
            max_tokens=self.max_tokens,
            prepend_bos=prepend_bos,
            device=model.embed.W_E.device,
        )
        self.n_batches, self.n_documents, self.n_tokens = len(batches.items), batches.n_documents, batches.n_tokens
        self.recorded |= {
            "texts": describe_source(self.texts),
            "max_tokens": self.max_tokens,
            "sequence": length,
            "prepend_bos": prepend_bos,
        }
        self.data["tokens"] = batches.digest
        return batches

    def _joined(self, by_batch: dict[str, Tensor]) -> Float[Tensor, "batch component layer part"]:
        cells = torch.full((self.n_batches, *self._shape), torch.nan, dtype=torch.float64)
        for index, component in enumerate(self.source.components):
            values = by_batch[component]
            cells[:, index, :, : values.shape[-1]] = values
        return cells


def _finite(cells: Cells) -> Cells:
    """As stored: float32, NaN where a value is not defined."""
    return cells.where(cells.isfinite(), torch.nan).float()
