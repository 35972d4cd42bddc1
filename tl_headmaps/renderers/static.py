"""Figures for print, drawn by matplotlib from the same plain values with the same colours.

Same values, same bytes: no dates, fixed ids. Letters are embedded (PDF: TrueType; SVG: outlines).
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import UsageError
from ..core.files import replacing
from .charts import Chart
from .colours import SERIES
from .grids import Heat, Layer
from .layout import PrintOptions
from .listing import Beside, Listing
from .shapes import _patches
from .sheet_maps import draw_heat, first_group, lay_out
from .sheets import INCHES, TICK_SIZE, TITLE_SIZE, frame, line_height, lines_of
from .text import in_words, visible
from .views import View

if TYPE_CHECKING:
    from .figure import Figure, Width
    from .layout import Labels

_MOST_LINES = 90
_MARKERS, _DASHES = "os^Dv*", ("-", "--", ":", "-.")
"""What tells lines and groups of points apart where there are no colours."""

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


@dataclass(frozen=True)
class Asked:
    """What a caller wants otherwise in print; see :meth:`Figure.save`."""

    width: "Width | float | int" = "page"
    height: float | int | None = None
    columns: int | None = None
    rows: int | None = None
    title: str | None = None
    labels: "Labels | None" = None


def save_static(figure: "Figure", path: Path, asked: Asked) -> None:
    """Write a figure as .svg, .pdf or .png; its title, and what it was made from, are the file's metadata."""
    # Half a second, which pages do without.
    import matplotlib as mpl
    from matplotlib.figure import Figure as Sheet

    width, height = asked.width, asked.height
    with mpl.rc_context(_PRINT), warnings.catch_warnings():
        # Letters that no installed font has are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        sheet = Sheet(figsize=(INCHES[width] if isinstance(width, str) else width, 1.0), layout="constrained")
        draw(as_asked(figure.data, asked), sheet)
        if not isinstance(width, str):
            sheet.set_figwidth(width)
        if height is not None:
            _stretch(sheet, height)
        suffix = path.suffix.lower()
        title, source = (_encodable(text) for text in (figure.title, figure.source))
        metadata = {
            ".pdf": {"CreationDate": None, "Producer": None, "Creator": None, "Title": title, "Subject": source},
            ".svg": {"Date": None, "Title": title, "Description": source or None},
            ".png": {"Software": None, "Title": title, "Description": source},
        }
        with replacing(path) as temporary:
            sheet.savefig(temporary, format=suffix[1:], metadata=metadata[suffix])


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def as_asked(data: Any, asked: Asked) -> Any:
    """The same values under another title, with names of maps and lines in words, or those asked for."""
    if isinstance(data, View):
        return replace(data, printed=as_asked(data.printed, asked))
    if asked.title is not None and hasattr(data, "title"):
        data = replace(data, title=_encodable(asked.title))
    arranged = (asked.columns, asked.rows)
    if arranged != (None, None):
        if not isinstance(data, Heat):
            raise UsageError(
                "columns= and rows= arrange the maps of a figure, and this one has no maps. Leave them out."
            )
        data = replace(data, arranged=arranged)
    if isinstance(data, Heat):
        shown = first_group(data)
        named = _Words([layer.name for layer in shown], asked.labels, _others_of(data, shown))
        layers = tuple(
            replace(layer, name=name, scale=replace(layer.scale, unit=named.other(layer.scale.unit)))
            for layer, name in zip(shown, named.names, strict=True)
        )
        rows, columns = (replace(axis, name=named.other(axis.name)) for axis in (data.rows, data.columns))
        return replace(data, layers=layers, rows=rows, columns=columns)
    if isinstance(data, Chart):
        named = _Words([one.name for one in data.series], asked.labels, [data.x_name, data.y_name])
        series = tuple(replace(one, name=name) for one, name in zip(data.series, named.names, strict=True))
        return replace(data, series=series, x_name=named.other(data.x_name), y_name=named.other(data.y_name))
    if asked.labels is not None:
        raise UsageError("labels= names the maps or lines of a figure, and this one has neither. Leave it out.")
    return data


def _others_of(heat: Heat, shown: list[Layer]) -> list[str]:
    return [heat.rows.name, heat.columns.name, *dict.fromkeys(layer.scale.unit for layer in shown)]


class _Words:
    """Names of maps or lines for readers, and what a caller calls axes and units."""

    def __init__(self, names: list[str], labels: "Labels | None", others: list[str]) -> None:
        self.mapping: dict[str, str] = {}
        if isinstance(labels, Mapping):
            self.mapping = {str(name): visible(str(label)) for name, label in labels.items()}
            unknown = [name for name in self.mapping if name not in (*names, *others)]
            if unknown:
                known = ", ".join(repr(name) for name in dict.fromkeys((*names, *others)) if name)
                raise UsageError(f"labels= has {unknown[0]!r:.80}, which this figure does not show. It shows {known}.")
        elif labels is not None:
            if isinstance(labels, str) or len(labels) != len(names):
                n = 1 if isinstance(labels, str) else len(labels)
                raise UsageError(
                    f"labels= has {n} name{'' if n == 1 else 's'} for {len(names)} maps or lines. "
                    "Give one for each, in their order, or a dictionary from the old names to the new."
                )
            self.names = [visible(str(label)) for label in labels]
            return
        self.names = [self.mapping.get(name, in_words(name)) for name in names]

    def other(self, name: str) -> str:
        return self.mapping.get(name, name)


def _stretch(sheet: Any, height: float | int) -> None:
    """Another height for a drawing that can be stretched."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Drawings that place everything themselves switch the layout off, which leaves another engine in its place.
    if not isinstance(sheet.get_layout_engine(), ConstrainedLayoutEngine):
        raise UsageError(
            f"height={height} was given, but the height of this figure follows from what it shows. Leave height out, "
            "or choose another width."
        )
    sheet.set_figheight(height)
    for axes in sheet.axes:
        axes.set_aspect("auto")


@singledispatch
def draw(data: Any, sheet: Any) -> None:
    """Draw plain values on an empty sheet, whose height may be set."""
    if not hasattr(data, "drawing"):
        raise UsageError(f"{type(data).__name__} has no form for print; save it as .html.")
    drawing = data.drawing(PrintOptions(72 * sheet.get_figwidth()))
    sheet.set_layout_engine("none")
    sheet.set_figwidth(drawing.width / 72)
    sheet.set_figheight(drawing.height / 72)
    axes = sheet.add_axes((0, 0, 1, 1), xlim=(0, drawing.width), ylim=(drawing.height, 0), aspect="equal", anchor="N")
    axes.axis("off")
    for patch in _patches(drawing.shapes, 1.0):
        axes.add_artist(patch)


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
    key = line_height(TICK_SIZE) * len(data.series) + 0.1 if len(data.series) > 1 else 0.0
    frame(sheet, tall + key, title=data.title, note=data.note)
    axes = sheet.subplots()
    for number, one in enumerate(data.series):
        colour = SERIES[number % len(SERIES)]
        if one.low is not None and one.high is not None:
            axes.fill_between(one.x, one.low, one.high, color=colour, alpha=0.18, linewidth=0)
        marker = _MARKERS[number % len(_MARKERS)]
        if data.lines:
            style = _DASHES[number % len(_DASHES)]
            axes.plot(one.x, one.y, style, color=colour, marker=marker, markersize=2.5, linewidth=1.2, label=one.name)
        else:
            axes.scatter(one.x, one.y, s=6, color=colour, marker=marker, alpha=0.8, linewidths=0, label=one.name)
    if data.diagonal:
        ends = [max(data.x_limits[0], data.y_limits[0]), min(data.x_limits[1], data.y_limits[1])]
        axes.plot(ends, ends, "--", color="0.6", linewidth=0.7)
    axes.set(xlim=data.x_limits, ylim=data.y_limits)
    if data.counts:
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("\n".join(lines_of(data.x_name, wide - 0.6)))
    axes.set_ylabel("\n".join(lines_of(data.y_name, tall - 0.4)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.3)
    if key:
        # Below the axis, where it covers nothing.
        from matplotlib.transforms import ScaledTranslation

        below = axes.transAxes + ScaledTranslation(0, -0.4, sheet.dpi_scale_trans)
        place = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": below}
        axes.legend(frameon=False, borderaxespad=0, labelspacing=0.2, **place)


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
    lay_out(sheet)


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

    def get_size_inches(self) -> tuple[float, float]:
        return self.width, self.height

    def set_figwidth(self, width: float) -> None:
        self.width = width

    def set_figheight(self, height: float) -> None:
        self.height = height

    def set_layout_engine(self, *_: Any) -> None:
        """The layout is that of the whole sheet."""

    def get_layout_engine(self) -> None:
        return None


@draw.register
def _(data: View, sheet: Any) -> None:
    draw(data.printed, sheet)
