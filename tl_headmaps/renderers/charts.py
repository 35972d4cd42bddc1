"""Curves with bands (ablation) and clouds of points (static against dynamic score).

>>> curve([0, 1, 2], [Line("relation heads", [0.9, 0.4, 0.1])], x_name="heads ablated", y_name="accuracy")
Figure('Curve', Chart, 1 KB)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.errors import UsageError
from ..core.types import HeadIndex
from .colours import Limits
from .figure import Figure
from .grids import drill_lists
from .page import escaped, figure_body, label, packed, table
from .text import visible

MAX_POINTS = 20_000
_LISTED = 30


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
    return _figure(
        Chart(
            title=visible(title),
            x_name=visible(x_name),
            y_name=visible(y_name),
            series=tuple(series),
            x_limits=_range([one.x for one in series]),
            y_limits=y_limits or _range(heights),
            lines=True,
            note=note,
        )
    )


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
    across, up = np.atleast_1d(_array(x, "x")), np.atleast_1d(_array(y, "y"))
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
    return _figure(
        Chart(
            title=visible(title),
            x_name=visible(x_name),
            y_name=visible(y_name),
            series=tuple(series),
            x_limits=_range([one.x for one in series]),
            y_limits=_range([one.y for one in series]),
            lines=False,
            diagonal=diagonal,
            drill={label(name): drill_lists(lists) for name, lists in (drill or {}).items()},
            note=note,
        )
    )


def _array(values: Any, what: str) -> np.ndarray:
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    try:
        return np.asarray(values, dtype=float)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} must be numbers; {error}.") from error


def _numbers(values: Any, what: str) -> np.ndarray:
    array = _array(values, what)
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
    body = figure_body("chart", chart.title, data=_page_data(chart), alternative=alternative, note=chart.note)
    return Figure(title=chart.title, body=body, needs=("chart",), text=text, data=chart)


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
        "x": {"name": chart.x_name, "limits": chart.x_limits, "counts": chart.counts},
        "y": {"name": chart.y_name, "limits": chart.y_limits},
        "lines": chart.lines,
        "diagonal": chart.diagonal,
        "series": series,
        "drill": chart.drill,
    }
