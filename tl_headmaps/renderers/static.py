"""Figures for print, drawn by matplotlib from the same plain values with the same colours.

Same values, same bytes: no dates, fixed ids. Letters are embedded (PDF: TrueType; SVG: outlines).
"""

from dataclasses import dataclass, replace
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import UsageError
from ..core.files import replacing
from .charts import Chart
from .colours import SERIES
from .example import Example
from .flowchart import Flow
from .grids import Heat
from .listing import Beside, Listing
from .printed_example import draw_example
from .printed_flow import draw_flow
from .sheet_maps import draw_heat
from .sheets import INCHES, TICK_SIZE, TITLE_SIZE, frame, lines_of
from .sketch import Sketch, draw_sketch
from .views import View

if TYPE_CHECKING:
    from .figure import Figure, Width

_MOST_LINES = 90
_PRINT = {
    "font.family": "DejaVu Sans",
    "font.size": TICK_SIZE,
    "axes.titlesize": TITLE_SIZE,
    "axes.linewidth": 0.5,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "tl_headmaps",
    "hatch.linewidth": 0.4,
    "savefig.dpi": 200,
    # Letters are as wide on a screen as in print: rounded to whole pixels, a long line would not fit.
    "text.hinting": "none",
    # Tokens are text, never mathematics.
    "text.usetex": False,
    "text.parse_math": False,
}


def require_matplotlib() -> None:
    """Raise an error that says how to install matplotlib, if it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "Figures for print (.svg, .png, .pdf) are drawn by matplotlib, which is not installed. Run "
            "pip install 'tl-headmaps[figures]', or write .html instead."
        ) from error


def save_static(
    figure: "Figure",
    path: Path,
    *,
    width: "Width | float | int",
    height: float | int | None = None,
    title: str | None = None,
) -> None:
    """Write a figure as .svg, .pdf or .png, in inches, with a title of its own or (empty) none."""
    require_matplotlib()
    import warnings

    import matplotlib as mpl
    from matplotlib.figure import Figure as Sheet

    with mpl.rc_context(_PRINT), warnings.catch_warnings():
        # Letters that no installed font has are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        sheet = Sheet(figsize=(INCHES[width] if isinstance(width, str) else width, 1.0), layout="constrained")
        draw(figure.data if title is None else _titled(figure.data, title), sheet)
        if not isinstance(width, str):
            sheet.set_figwidth(width)
        if height is not None:
            _stretch(sheet, height)
        suffix = path.suffix.lower()
        metadata = {".pdf": {"CreationDate": None, "Producer": None, "Creator": None}, ".svg": {"Date": None}}
        with replacing(path) as temporary:
            sheet.savefig(temporary, format=suffix[1:], metadata=metadata.get(suffix, {"Software": None}))


def _titled(data: Any, title: str) -> Any:
    """The same values under another title; a listing has none."""
    if isinstance(data, View):
        return replace(data, printed=_titled(data.printed, title))
    return replace(data, title=title) if hasattr(data, "title") else data


def _stretch(sheet: Any, height: float | int) -> None:
    """Another height for a drawing that can be stretched."""
    if sheet.get_layout_engine() is None:
        raise UsageError(
            f"height={height} was given, but the height of this figure follows from its text. Leave height out, or "
            "choose another width."
        )
    sheet.set_figheight(height)
    for axes in sheet.axes:
        axes.set_aspect("auto")


@singledispatch
def draw(data: Any, sheet: Any) -> None:
    """Draw plain values on an empty sheet, whose height may be set."""
    raise UsageError(f"{type(data).__name__} has no form for print; save it as .html.")


@draw.register
def _(data: Listing, sheet: Any) -> None:
    lines = data.text.splitlines()
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"… and {len(lines) - _MOST_LINES:,} more lines"]
    # As large as the width allows: a letter is 0.6 of its size wide.
    size = min(7.0, (sheet.get_figwidth() - 0.2) * 72 / (0.61 * max(map(len, lines), default=1)))
    sheet.set_layout_engine("none")
    sheet.set_figheight(0.2 + size / 72 * 1.35 * len(lines))
    at = (0.1 / sheet.get_figwidth(), 1 - 0.1 / sheet.get_figheight())
    sheet.text(*at, "\n".join(lines), va="top", family="DejaVu Sans Mono", size=size, linespacing=1.2)


@draw.register
def _(data: Heat, sheet: Any) -> None:
    draw_heat(data, sheet)


@draw.register
def _(data: Chart, sheet: Any) -> None:
    wide = float(sheet.get_figwidth())
    tall = 0.62 * wide
    frame(sheet, tall, title=data.title, note=data.note)
    axes = sheet.subplots()
    for number, one in enumerate(data.series):
        colour = SERIES[number % len(SERIES)]
        if one.low is not None and one.high is not None:
            axes.fill_between(one.x, one.low, one.high, color=colour, alpha=0.18, linewidth=0)
        if data.lines:
            style = "-" if number == 0 else "--"
            axes.plot(one.x, one.y, style, color=colour, marker="o", markersize=2.5, linewidth=1.2, label=one.name)
        else:
            axes.scatter(one.x, one.y, s=6, color=colour, alpha=0.8, linewidths=0, label=one.name)
    if data.diagonal:
        ends = [max(data.x_limits[0], data.y_limits[0]), min(data.x_limits[1], data.y_limits[1])]
        axes.plot(ends, ends, "--", color="0.6", linewidth=0.7)
    axes.set(xlim=data.x_limits, ylim=data.y_limits)
    axes.set_xlabel("\n".join(lines_of(data.x_name, wide - 0.6)))
    axes.set_ylabel("\n".join(lines_of(data.y_name, tall - 0.4)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.3)
    if len(data.series) > 1:
        axes.legend(frameon=False)


@draw.register
def _(data: Flow, sheet: Any) -> None:
    draw_flow(data, sheet)


@draw.register
def _(data: Example, sheet: Any) -> None:
    draw_example(data, sheet)


@draw.register
def _(data: Beside, sheet: Any) -> None:
    from matplotlib.figure import Figure as Sheet

    wide = float(sheet.get_figwidth())
    several = sum(not isinstance(part, Listing) for part in data.parts) > 1
    rows: list[list[_Pane]] = []
    for part in data.parts:
        room = wide / 2 if several and wide > INCHES["column"] and not isinstance(part, Listing) else wide
        # Drawn once on a sheet of its own, to learn its size.
        alone = Sheet(figsize=(room, 1.0), layout="constrained")
        draw(part, alone)
        pane = _Pane(part, room, *map(float, alone.get_size_inches()))
        if rows and sum(other.needs for other in rows[-1]) + pane.needs <= wide:
            rows[-1].append(pane)
        else:
            rows.append([pane])
    heights = [max(pane.height for pane in row) for row in rows]
    frame(sheet, sum(heights), title=data.title)
    strips = sheet.subfigures(len(rows), 1, squeeze=False, height_ratios=heights, hspace=0)[:, 0]
    for row, strip in zip(rows, strips, strict=True):
        widths = [pane.needs for pane in row]
        places = strip.subfigures(1, len(row) + 1, width_ratios=[*widths, max(wide - sum(widths), 0.01)], wspace=0)
        for pane, place in zip(row, places, strict=False):
            pane.place = place
            draw(pane.part, pane)


@dataclass
class _Pane:
    """A part of a sheet that is drawn on as if it were a sheet of its own.

    Attributes:
        part: What is drawn.
        width: Its width at the time, first all there is.
        needs, height: Its size when it is drawn.
        place: The part of the sheet.
    """

    part: Any
    width: float
    needs: float
    height: float
    place: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.place, name)

    def get_figwidth(self) -> float:
        return self.width

    def get_figheight(self) -> float:
        return self.height

    def set_figwidth(self, width: float) -> None:
        self.width = width

    def set_figheight(self, height: float) -> None:
        self.height = height

    def set_layout_engine(self, *_: Any) -> None:
        """The layout is that of the whole sheet."""


@draw.register
def _(data: Sketch, sheet: Any) -> None:
    draw_sketch(data, sheet)


@draw.register
def _(data: View, sheet: Any) -> None:
    draw(data.printed, sheet)
