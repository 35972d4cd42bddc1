"""Plain values of a heat map: arrays, axes and layers, checked and converted from what a caller passes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..core.errors import UsageError
from ..core.types import HeadIndex
from .colours import NAMES, UNCLEAR, Limits, Palette, Scale
from .layout import PrintOptions
from .page import label
from .shapes import Drawing
from .text import visible

MAX_SIDE = 1_000
MAX_CELLS = 250_000
"""More cells than this fit on no screen."""

MAX_LAYERS_CELLS = 4_000_000


@dataclass(frozen=True)
class MapLayer:
    """One map of a figure that holds several: a relation, a metric, a task.

    Attributes:
        name: What the map is called in its switch or above its panel.
        values: Numbers by row and column; NaN or None where there is none. Rows may differ in length.
        group: A second name, for a second switch (for instance the metric, where ``name`` is the relation).
        null: What each value would be by chance.
        interval: Lower and upper bounds of each value, at 95%.
        details: More numbers to show with each value, by name.
        marked: Cells to put a dot in; the figure's ``mark`` says what it means.
        unit: What the numbers are, if it differs from the figure's unit.
        scale: Its colours, if they are not chosen from the values; see :func:`name_layer`.
    """

    name: str
    values: Any
    group: str = ""
    null: Any = None
    interval: tuple[Any, Any] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    marked: Any = None
    unit: str | None = None
    scale: Scale | None = None


def name_layer(
    name: str, names: Sequence[Sequence[str | None]], *, unclear: str = "unclear", unit: str = "name", **rest: Any
) -> MapLayer:
    """A map of names: each has a colour and a place in the legend, the most frequent first.

    Args:
        name: What the map is called.
        names: The name of each cell by row and column, or None where there is no cell.
        unclear: The name of cells that have none; it is pale and last.
        unit: What the names are, written at the legend.
        **rest: Other fields of :class:`MapLayer`.
    """
    counts = Counter(entry for row in names for entry in row if entry is not None)
    kinds = sorted(counts.keys() - {unclear}, key=lambda kind: (-counts[kind], kind))
    colours = [NAMES[min(i, len(NAMES) - 1)] for i in range(len(kinds))]
    if unclear in counts:
        kinds, colours = [*kinds, unclear], [*colours, UNCLEAR]
    place = {kind: float(i) for i, kind in enumerate(kinds)}
    values = [[None if entry is None else place[entry] for entry in row] for row in names]
    legend = tuple((f"{label(kind)} ({counts[kind]:,})", colour) for kind, colour in zip(kinds, colours, strict=True))
    scale = Scale(0.0, max(0.0, len(kinds) - 1.0), unit=visible(unit), names=legend)
    return MapLayer(name, values, unit=unit, scale=scale, **rest)


@dataclass(frozen=True)
class Axis:
    """Rows or columns: what they are, how many, and their labels unless they are just counted from 0.

    ``empty`` says of rows without cells what they are.
    """

    name: str
    n: int
    labels: tuple[str, ...] | None = None
    empty: Mapping[int, str] = field(default_factory=dict)

    def label(self, index: int) -> str:
        """The label of one row or column."""
        return self.labels[index] if self.labels else str(index)


@dataclass(frozen=True)
class Layer:
    """A checked map and its scale."""

    name: str
    group: str
    values: np.ndarray
    scale: Scale
    null: np.ndarray | None = None
    interval: tuple[np.ndarray, np.ndarray] | None = None
    details: tuple[tuple[str, np.ndarray], ...] = ()
    marked: np.ndarray | None = None


@dataclass(frozen=True)
class Heat:
    """Everything a heat map shows, in plain values.

    ``item`` says how cells are named: ``"head"`` (``L23H4``), ``"pair"`` (row to column) or ``"component"``; ``mark``
    what a dot in a cell means; ``lower`` draws the first row at the bottom; ``pinned`` is the head pinned at first.
    """

    title: str
    rows: Axis
    columns: Axis
    layers: tuple[Layer, ...]
    item: str = "head"
    lengths: tuple[int, ...] | None = None
    panels: bool = False
    lower: bool = False
    switches: tuple[str, str] = ("map", "measure")
    numbers: bool = False
    drill: Mapping[str, Any] = field(default_factory=dict)
    pinned: HeadIndex | None = None
    mark: str = ""
    note: str = ""

    @cached_property
    def inside(self) -> np.ndarray:
        """Which cells there are; rows may be shorter than others."""
        return np.arange(self.columns.n) < np.array(self.lengths or [self.columns.n] * self.rows.n)[:, None]

    def place_of(self, row: int) -> int:
        """Where a row is drawn, counted from above."""
        return self.rows.n - 1 - row if self.lower else row

    def drawing(self, options: PrintOptions) -> Drawing:
        """All maps for print."""
        # That module draws what this one checks.
        from .maps import sheet

        return sheet(self, options)

    def cell_name(self, row: int, column: int) -> str:
        """Name of a cell."""
        if self.item == "head":
            return str(HeadIndex(row, column))
        if self.item == "pair":
            return f"{self.rows.label(row)} → {self.columns.label(column)}"
        return f"{self.rows.name} {self.rows.label(row)}, {self.columns.label(column)}"

    def highest(self, layer: Layer, n: int = 10) -> list[tuple[str, float]]:
        """The cells of a map with the largest values, largest first."""
        flat = np.where(np.isnan(layer.values), -np.inf, layer.values).ravel()
        order = np.argsort(-flat, kind="stable")[:n]
        width = self.columns.n
        return [(self.cell_name(*divmod(int(i), width)), float(flat[i])) for i in order if np.isfinite(flat[i])]


def as_array(values: Any, what: str) -> np.ndarray:
    """Numbers of a tensor, an array or lists."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    try:
        return np.asarray(values, dtype=float)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} must be numbers; {error}.") from error


def checked(values: Any, what: str) -> tuple[np.ndarray, tuple[int, ...] | None]:
    """A two-dimensional array and, if its rows differ in length, their lengths.

    Numbers are rounded to 32-bit floats, as on the page, so that all forms of a figure agree.
    """
    if not (isinstance(values, np.ndarray) or hasattr(values, "detach")):
        rows = [_row(row, what) for row in values]
        lengths = tuple(len(row) for row in rows)
        array = np.full((len(rows), max(lengths, default=0)), np.nan)
        for number, entries in enumerate(rows):
            array[number, : len(entries)] = entries
        ragged = lengths if len(set(lengths)) > 1 else None
    else:
        array, ragged = as_array(values, what), None
    with np.errstate(over="ignore"):
        array = array.astype(np.float32).astype(float)
    if array.ndim != 2 or not array.size:
        raise UsageError(f"{what} has shape {tuple(array.shape)}; a map needs rows and columns, at least one of each.")
    if np.isinf(array).any():
        row, column = map(int, np.argwhere(np.isinf(array))[0])
        raise UsageError(
            f"{what}[{row}, {column}] is infinite, which no colour can show. Put a finite number there, or NaN, "
            "which is drawn as missing."
        )
    if max(array.shape) > MAX_SIDE or array.size > MAX_CELLS:
        raise UsageError(
            f"{what} has {array.shape[0]:,} rows and {array.shape[1]:,} columns; a figure takes up to {MAX_SIDE:,} of "
            f"each and {MAX_CELLS:,} cells in all, beyond which nothing can be read. Choose some rows and columns, or "
            "save the result as .csv or .safetensors."
        )
    return array, ragged


def _row(row: Any, what: str) -> list[float]:
    if hasattr(row, "tolist"):
        row = row.tolist()
    if not isinstance(row, Sequence) or isinstance(row, str):
        raise UsageError(f"{what} must be a table of numbers: rows of numbers, but a row is {row!r}.")
    try:
        return [float("nan") if value is None else float(value) for value in row]
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} must be a table of numbers; {error}.") from error


def layers_of(values: Any) -> list[MapLayer]:
    """One array, arrays by name, or layers, as layers."""
    if isinstance(values, MapLayer):
        return [values]
    if isinstance(values, Mapping):
        return [MapLayer(str(name), array) for name, array in values.items()]
    if isinstance(values, Sequence) and values and all(isinstance(entry, MapLayer) for entry in values):
        return list(values)
    return [MapLayer("", values)]


def heat_of(
    values: Any,
    *,
    title: str,
    rows: str,
    columns: str,
    unit: str = "value",
    row_labels: Sequence[object] | None = None,
    column_labels: Sequence[object] | None = None,
    empty: Mapping[Any, object] | None = None,
    signed: bool | None = None,
    limits: Limits | None = None,
    percentile: float | int | None = None,
    palette: Palette = "amounts",
    **details: Any,
) -> Heat:
    """Check everything a user can get wrong and choose the colour scales: one per unit."""
    maps = layers_of(values)
    if not maps:
        raise UsageError("There is nothing to draw: give at least one map.")
    names = [(entry.name, entry.group) for entry in maps]
    if len(set(names)) < len(names):
        twice = next(name for name, group in names if names.count((name, group)) > 1)
        raise UsageError(f"Two maps are called {twice!r}; give each its own name.")
    arrays, lengths = zip(*(checked(entry.values, entry.name or "values") for entry in maps), strict=True)
    shape = arrays[0].shape
    for entry, array in zip(maps, arrays, strict=True):
        if array.shape != shape:
            raise UsageError(f"{entry.name!r} has shape {array.shape}, but the first map has {shape}; they must agree.")
    if sum(array.size for array in arrays) > MAX_LAYERS_CELLS:
        raise UsageError(
            f"{len(maps)} maps of {shape[0]:,} x {shape[1]:,} are too many for one page; draw some of them "
            "(a result has select())."
        )
    units = [visible(unit if entry.unit is None else entry.unit) for entry in maps]
    scales = {
        one: Scale.over(
            [array for array, other in zip(arrays, units, strict=True) if other == one],
            signed=signed,
            limits=limits,
            percentile=percentile,
            palette=palette,
            unit=one,
        )
        for one in dict.fromkeys(units)
    }
    short = {int(row): what for row, what in (empty or {}).items() if int(row) < shape[0]}
    without = {row: label(what) for row, what in short.items() if not isinstance(what, int)}
    ragged = next((entry for entry in lengths if entry), None)
    if short:
        own = dict(enumerate(ragged or [shape[1]] * shape[0]))
        own |= {row: what if isinstance(what, int) else 0 for row, what in short.items()}
        ragged = tuple(own.values()) if len(set(own.values())) > 1 else None
    return Heat(
        title=visible(title),
        rows=replace(_axis(rows, shape[0], row_labels), empty=without),
        columns=_axis(columns, shape[1], column_labels),
        lengths=ragged,
        layers=tuple(
            _layer(entry, array, entry.scale or scales[one])
            for entry, array, one in zip(maps, arrays, units, strict=True)
        ),
        **details,
    )


def _layer(entry: MapLayer, array: np.ndarray, scale: Scale) -> Layer:
    def like(values: Any, what: str) -> np.ndarray:
        other, _ = checked(values, what)
        if other.shape != array.shape:
            raise UsageError(f"{what} has shape {other.shape}, but its values have {array.shape}; they must agree.")
        return other

    null = None if entry.null is None else like(entry.null, f"null of {entry.name!r}")
    interval = None
    if entry.interval is not None:
        low, high = entry.interval
        interval = (like(low, f"interval of {entry.name!r}"), like(high, f"interval of {entry.name!r}"))
    details = tuple((str(name), like(values, str(name))) for name, values in entry.details.items())
    marked = None if entry.marked is None else like(entry.marked, f"marks of {entry.name!r}") > 0
    name = label(entry.name) if entry.name else ""
    return Layer(name, visible(entry.group), array, scale, null, interval, details, marked)


def _axis(name: str, n: int, labels: Sequence[object] | None) -> Axis:
    if labels is None:
        return Axis(name, n)
    if len(labels) != n:
        raise UsageError(f"{len(labels)} labels were given for {n} {name} entries; give one for each.")
    return Axis(name, n, tuple(map(label, labels)))


def drill_of(drill: Mapping[Any, Any] | None, shape: tuple[int, int]) -> dict[str, list[dict[str, Any]]]:
    """Lists to show for pinned heads: ``{head: {title: [row, ...]}}``, a row being text or a list of texts."""
    return {str(HeadIndex.of(head).check(*shape)): drill_lists(lists) for head, lists in (drill or {}).items()}


def drill_lists(lists: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Lists by title as visible text."""
    return [{"title": label(title), "rows": [_texts(row) for row in rows]} for title, rows in lists.items()]


def _texts(row: Any) -> list[str]:
    if isinstance(row, str) or not isinstance(row, Iterable):
        row = [row]
    return [f"{cell:.4g}" if isinstance(cell, float) else label(cell) for cell in row]
