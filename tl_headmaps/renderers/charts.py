"""Curves with bands (ablation) and clouds of points (static against dynamic score).

>>> curve([0, 1, 2], [Line("relation heads", [0.9, 0.4, 0.1])], x_name="heads ablated", y_name="accuracy")
Figure('Curve', Chart, 6 KB)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..core.errors import UsageError
from ..core.types import HeadIndex
from .colours import SERIES, Limits
from .figure import Figure
from .grids import as_array, drill_lists
from .layout import (
    MARGIN,
    TICK,
    Naming,
    PrintOptions,
    fitted,
    frame_height,
    framed,
    in_rows,
    inset,
    lines_of,
    stacked,
    width_of,
    written,
)
from .page import escaped, figure_body, label, packed, table
from .shapes import MIDDLE, Drawing, Group, Number, Path, Point, Rect, Shape, Text
from .shapes import line as straight
from .text import significant, true_minus, visible

MAX_POINTS = 20_000
_LISTED = 30
_DASHES: tuple[tuple[float, ...], ...] = ((), (4, 2), (1, 1.5), (5, 1.5, 1, 1.5))
_MARKERS: tuple[tuple[Point, ...], ...] = (
    (),
    ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
    ((0, -1.15), (1.1, 0.85), (-1.1, 0.85)),
    ((0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)),
    ((0, 1.15), (1.1, -0.85), (-1.1, -0.85)),
    ((0, -1.2), (1.05, -0.6), (1.05, 0.6), (0, 1.2), (-1.05, 0.6), (-1.05, -0.6)),
)
"""Dashes of lines in units of their width, and corners of markers for a radius of 1; the first is a disc."""


@dataclass(frozen=True)
class Line:
    """One curve, with a band if it has ``low`` and ``high``, at its own positions if it has ``x``."""

    name: str
    y: Any
    low: Any = None
    high: Any = None
    x: Any = None


@dataclass(frozen=True)
class Series:
    """Checked points of one colour."""

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    labels: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Chart:
    """Everything a curve or a cloud shows, in plain values."""

    title: str
    x_name: str
    y_name: str
    series: tuple[Series, ...]
    x_limits: Limits
    y_limits: Limits
    lines: bool
    diagonal: bool = False
    drill: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def counts(self) -> bool:
        """Whether x of a curve counts something, so that ticks between whole numbers mean nothing."""
        return self.lines and all(bool((one.x == np.round(one.x)).all()) for one in self.series)

    def drawing(self, options: PrintOptions) -> Drawing:
        """The chart for print."""
        options.refuse("columns")
        naming = Naming([one.name for one in self.series], options.labels, [self.x_name, self.y_name])
        named = replace(
            self,
            series=tuple(replace(one, name=name) for one, name in zip(self.series, naming.names, strict=True)),
            x_name=naming.other(self.x_name),
            y_name=naming.other(self.y_name),
        )
        title, wide = options.title_or(self.title), options.width - 2 * MARGIN
        tall = 0.62 * wide
        if options.height is not None:
            key = chart_drawing(named, wide, tall).height - tall
            tall = max(10 * TICK, options.height - frame_height(options.width, title=title, note=self.note) - key)
        return framed(chart_drawing(named, wide, tall), title=title, note=self.note, width=options.width)


def curve(
    x: Any,
    lines: Sequence[Line],
    *,
    title: str = "Curve",
    x_name: str = "x",
    y_name: str = "y",
    y_limits: Limits | None = None,
    note: str = "",
) -> Figure:
    """Curves over a common ``x``, with bands; for instance accuracy against the number of heads ablated.

    Args:
        x: Common positions; a line may have its own.
        lines: The curves, the most important first.
        title: What is shown.
        x_name: What x counts.
        y_name: What y measures.
        y_limits: Ends of the y axis; by default, the range of the values.
        note: A sentence under the figure.
    """
    if not lines:
        raise UsageError("There is nothing to draw: give at least one Line.")
    series = []
    for line in lines:
        own = _numbers(x if line.x is None else line.x, f"x of {line.name!r}")
        band = [
            None if values is None else _numbers(values, f"band of {line.name!r}") for values in (line.low, line.high)
        ]
        if (band[0] is None) != (band[1] is None):
            raise UsageError(f"The band of {line.name!r} has one edge only; give both low and high, or neither.")
        series.append(_series(line.name, own, _numbers(line.y, f"y of {line.name!r}"), band[0], band[1]))
    heights = [values for one in series for values in (one.y, one.low, one.high) if values is not None]
    names = visible(title), visible(x_name), visible(y_name)
    limits = _range([one.x for one in series]), y_limits or _range(heights)
    return _figure(Chart(*names, tuple(series), *limits, lines=True, note=note))


def scatter(
    x: Any,
    y: Any,
    *,
    names: Sequence[object] | None = None,
    groups: Sequence[object] | None = None,
    title: str = "Heads",
    x_name: str = "x",
    y_name: str = "y",
    diagonal: bool = False,
    drill: Mapping[Any, Any] | None = None,
    note: str = "",
) -> Figure:
    """One point per head, ``x`` against ``y``; click shows the head.

    Args:
        x: Values by layer and head, or a list.
        y: The same, in the other direction.
        names: Names of the points; by default heads, if the values are by layer and head.
        groups: A group for each point, shown by its colour.
        title: What is shown.
        x_name: What x measures.
        y_name: What y measures.
        diagonal: Draw the line on which both are equal.
        drill: Lists shown when a point is pinned, as for :func:`~tl_headmaps.renderers.head_map`.
        note: A sentence under the figure.
    """
    across, up = np.atleast_1d(as_array(x, "x")), np.atleast_1d(as_array(y, "y"))
    if across.shape != up.shape:
        raise UsageError(f"x has shape {across.shape}, but y has {up.shape}; they must agree.")
    if names is None:
        pairs = across.ndim == 2
        names = [str(HeadIndex(*map(int, at))) if pairs else f"point {at[0]}" for at in np.ndindex(across.shape)]
    across, up = across.ravel(), up.ravel()
    if len(names) != across.size or (groups is not None and len(groups) != across.size):
        raise UsageError(f"There are {across.size} points; give one name (and one group) for each.")
    shown = np.isfinite(across) & np.isfinite(up)
    hidden = int((~shown).sum())
    if hidden:
        note = f"{hidden:,} points without a finite value are not shown. {note}".strip()
    kinds = [""] * across.size if groups is None else [label(group) for group in groups]
    series = []
    for kind in dict.fromkeys(kinds):
        chosen = [i for i in np.flatnonzero(shown).tolist() if kinds[i] == kind]
        if chosen:
            labels = tuple(label(names[i]) for i in chosen)
            series.append(_series(kind, across[chosen], up[chosen], labels=labels))
    listed = {label(name): drill_lists(lists) for name, lists in (drill or {}).items()}
    names = visible(title), visible(x_name), visible(y_name)
    limits = _range([one.x for one in series]), _range([one.y for one in series])
    return _figure(Chart(*names, tuple(series), *limits, lines=False, diagonal=diagonal, drill=listed, note=note))


def _numbers(values: Any, what: str) -> np.ndarray:
    array = as_array(values, what)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise UsageError(
            f"{what} has shape {array.shape} and {int((~np.isfinite(array)).sum())} values that are not finite; "
            "a curve needs a list of finite numbers. Leave such points out."
        )
    return array


def _series(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    low: np.ndarray | None = None,
    high: np.ndarray | None = None,
    labels: tuple[str, ...] | None = None,
) -> Series:
    for values in (y, low, high):
        if values is not None and values.shape != x.shape:
            raise UsageError(f"{name!r} has {x.size} positions but {values.size} values; they must agree.")
    if x.size > MAX_POINTS:
        raise UsageError(f"{name!r} has {x.size:,} points; a figure takes up to {MAX_POINTS:,}. Choose some of them.")
    return Series(label(name) if name else "", x, y, low, high, labels)


def _range(arrays: Sequence[np.ndarray]) -> tuple[float, float]:
    """From zero if the values are amounts near it, with a little room around."""
    flat = np.concatenate(arrays) if arrays else np.zeros(1)
    low, high = float(flat.min()), float(flat.max())
    if 0 <= low < 0.5 * high:
        low = 0.0
    room = 0.04 * (high - low) or 0.5 * abs(high) or 1.0
    return low - (room if low else 0.02 * (high - low)), high + room


def _figure(chart: Chart) -> Figure:
    text = _words(chart)
    rows: list[list[object]] = [
        [one.labels[i] if one.labels else one.name, f"{one.x[i]:.4g}", f"{one.y[i]:.4g}"]
        for one in chart.series
        for i in _most_telling(chart, one)
    ]
    alternative = "".join(f"<p>{escaped(line)}</p>" for line in text.splitlines())
    alternative += table(["", chart.x_name, chart.y_name], rows[:_LISTED])
    body = figure_body(
        "chart",
        chart.title,
        data=_page_data(chart),
        drawing=fitted(lambda wide: chart_drawing(chart, wide, min(400.0, max(220.0, 0.56 * wide)), 11.0), chart.title),
        alternative=alternative,
        note=chart.note,
    )
    return Figure(title=chart.title, body=body, needs=("chart",), text=text, data=chart)


def chart_drawing(chart: Chart, width: Number, height: Number, size: Number = TICK) -> Drawing:
    """Axes with ticks, what is shown, and below what the lines are; ``height`` is without that."""
    ups = lines_of(chart.y_name, height - 5 * size, size)
    y_ticks = _ticks(chart.y_limits, max(3, height / (3.6 * size)))
    left = (len(ups) * 1.25 + 1.3) * size + max((width_of(said, size) for _, said in y_ticks), default=0.0)
    top, wide = 0.8 * size, width - left - 1.5 * size
    below = lines_of(chart.x_name, wide, size)
    tall = height - top - (len(below) * 1.25 + 2) * size
    x_ticks = _ticks(chart.x_limits, max(3, wide / (6 * size)), whole=chart.counts)
    place = _Place(chart, left, top, wide, tall)
    bottom = top + tall
    # The page's script finds the area by this rectangle.
    whole = Drawing([Group([Rect(left, top, wide, tall)], key="chart-area")], width, height)
    for value, said in y_ticks:
        y = place.y(value)
        whole.add(straight(left, y, left + wide, y, width=0.06 * size))
        whole.add(Text(left - 0.6 * size, y + MIDDLE * size, said, size, "end"))
    for value, said in x_ticks:
        x = place.x(value)
        whole.add(straight(x, bottom, x, bottom + 0.35 * size, stroke="soft", width=0.08 * size))
        whole.add(Text(x, bottom + 1.5 * size, said, size, "middle"))
    whole.add(straight(left, bottom, left + wide, bottom, stroke="soft", width=0.08 * size))
    whole.add(*written(below, left + wide / 2, bottom + 1.6 * size, size, anchor="middle", fill="soft"))
    for number, name in enumerate(ups):
        x = (1 + 1.25 * number) * size
        whole.add(Text(x, top + tall / 2, name, size, "middle", "soft", upright=True))
    if chart.diagonal:
        low, high = max(chart.x_limits[0], chart.y_limits[0]), min(chart.x_limits[1], chart.y_limits[1])
        ends = ((place.x(low), place.y(low)), (place.x(high), place.y(high)))
        whole.add(Path((ends,), "soft", 0.1 * size, dash=(0.4 * size, 0.3 * size)))
    for number, one in enumerate(chart.series):
        whole.add(*_series_shapes(chart, one, number, place, size))
    return stacked([whole, _key(chart, width, left, size)], gap=0.6 * size)


@dataclass(frozen=True)
class _Place:
    """Where values are on a chart."""

    chart: Chart
    left: Number
    top: Number
    width: Number
    height: Number

    def x(self, value: Number) -> float:
        low, high = self.chart.x_limits
        return self.left + (value - low) / (high - low) * self.width

    def y(self, value: Number) -> float:
        """Values beyond the limits are at the edge."""
        low, high = self.chart.y_limits
        return self.top + (1 - min(1.0, max(0.0, (value - low) / (high - low)))) * self.height

    def line(self, x: np.ndarray, y: np.ndarray) -> tuple[Point, ...]:
        return tuple((self.x(a), self.y(b)) for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _series_shapes(chart: Chart, one: Series, number: int, place: _Place, size: Number) -> Iterator[Shape]:
    ink = f"series{number % len(SERIES)}"
    if one.low is not None and one.high is not None:
        edge = place.line(one.x, one.low) + place.line(one.x, one.high)[::-1]
        yield Path((edge,), "none", fill=ink, opacity=0.18)
    if chart.lines:
        yield _stroke(place.line(one.x, one.y), number, size)
    yield _markers(place.line(one.x, one.y), number, 0.26 * size, 1.0 if chart.lines else 0.8)


def _stroke(points: tuple[Point, ...], number: int, size: Number) -> Path:
    width = 0.17 * size
    dash = tuple(part * width for part in _DASHES[number % len(_DASHES)])
    return Path((points,), f"series{number % len(SERIES)}", width, dash=dash)


def _markers(points: tuple[Point, ...], number: int, radius: Number, opacity: Number = 1.0) -> Path:
    """Points as discs or polygons: what tells groups apart where there are no colours."""
    ink, corners = f"series{number % len(SERIES)}", _MARKERS[number % len(_MARKERS)]
    if not corners:
        return Path(tuple(((x, y), (x + 0.01, y)) for x, y in points), ink, 2 * radius, round=True, opacity=opacity)
    outline = [(radius * dx, radius * dy) for dx, dy in corners]
    shapes = tuple(tuple((x + dx, y + dy) for dx, dy in outline) for x, y in points)
    return Path(shapes, "none", fill=ink, opacity=opacity)


def _key(chart: Chart, width: Number, left: Number, size: Number) -> Drawing:
    """What the lines or groups are."""
    keys = []
    for number, one in enumerate(chart.series if len(chart.series) > 1 else ()):
        key = Drawing([], 3.6 * size, 1.5 * size)
        if chart.lines:
            key.add(_stroke(((0.0, 0.8 * size), (2.8 * size, 0.8 * size)), number, size))
        key.add(_markers(((1.4 * size, 0.8 * size),), number, 0.3 * size))
        for text in written(lines_of(one.name, width - left - 5 * size, size), 3.4 * size, 0.0, size):
            key.add(text)
            key.width = max(key.width, 3.9 * size + width_of(text.text, size))
            key.height = max(key.height, text.y + 0.4 * size)
        keys.append(key)
    return inset(in_rows(keys, width - left, 0.5 * size), left)


def _ticks(limits: Limits, most: Number, *, whole: bool = False) -> list[tuple[float, str]]:
    """Round values on an axis, about as many as asked for, with their labels.

    >>> _ticks((0, 10.2), 5, whole=True)
    [(0.0, '0'), (5.0, '5'), (10.0, '10')]
    """
    low, high = limits
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(step for m in (1, 2, 5, 10) if (step := m * power) >= (high - low) / most * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(number * step, true_minus(significant(number * step, 4))) for number in range(first, last + 1)]


def _most_telling(chart: Chart, one: Series) -> list[int]:
    """All points of a curve; of a cloud, the highest."""
    return list(range(one.x.size)) if chart.lines else np.argsort(-one.y, kind="stable")[:_LISTED].tolist()


def _words(chart: Chart) -> str:
    lines = [f"{chart.title}: {chart.y_name} against {chart.x_name}."]
    for one in chart.series:
        if chart.lines:
            lines.append(
                f"{one.name}: from {one.y[0]:.4g} at {one.x[0]:.4g} to {one.y[-1]:.4g} at {one.x[-1]:.4g}, "
                f"lowest {one.y.min():.4g}, highest {one.y.max():.4g}."
            )
        else:
            best = ", ".join(f"{one.labels[i]} {one.y[i]:.4g}" for i in _most_telling(chart, one)[:3] if one.labels)
            lines.append(f"{one.name + ': ' if one.name else ''}{one.x.size:,} points, highest {best}.")
    return "\n".join(lines)


def _page_data(chart: Chart) -> dict[str, Any]:
    series = []
    for one in chart.series:
        entry: dict[str, Any] = {"name": one.name, "x": packed(one.x), "y": packed(one.y)}
        if one.low is not None and one.high is not None:
            entry |= {"low": packed(one.low), "high": packed(one.high)}
        if one.labels:
            entry["labels"] = one.labels
        series.append(entry)
    return {
        "x": {"name": chart.x_name, "limits": chart.x_limits},
        "y": {"name": chart.y_name, "limits": chart.y_limits},
        "lines": chart.lines,
        "series": series,
        "drill": chart.drill,
    }
