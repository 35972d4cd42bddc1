"""Figures for print, drawn by matplotlib from the same plain values with the same colours.

Same values, same bytes: no dates, fixed ids. Letters are embedded (PDF: TrueType; SVG: outlines).
"""

import textwrap
from dataclasses import replace
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

import numpy as np

from ..core.errors import UsageError
from ..core.files import replacing
from .charts import Chart
from .colours import SERIES, Scale, text_on
from .example import Example, ExampleMatrix, cell_text
from .flowchart import BOX, OFF, ON, Flow, layout, line_width, shortened
from .grids import Axis, Heat, Layer
from .listing import Listing
from .text import significant, true_minus
from .views import View

if TYPE_CHECKING:
    from .figure import Figure, Width

INCHES = {"column": 3.4, "page": 7.0}
_LETTER_INCHES, _LINE_INCHES = 0.065, 0.12
"""Width of a letter and height of a line, at the size of the ticks."""

_LINE = 0.18
_FORMULA_SIZE, _FORMULA_LINE = 6, 0.11
_STEPS = (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 50, 64, 100, 128, 200, 250, 500)
_MOST_ROWS = 12
_MOST_LINES = 90
_PRINT = {
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "axes.titlesize": 8,
    "axes.linewidth": 0.5,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "tl_headmaps",
    "hatch.linewidth": 0.4,
    "savefig.dpi": 200,
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


def save_static(figure: "Figure", path: Path, *, width: "Width") -> None:
    """Write a figure as .svg, .pdf or .png."""
    require_matplotlib()
    import warnings

    import matplotlib as mpl
    from matplotlib.figure import Figure as Sheet

    with mpl.rc_context(_PRINT), warnings.catch_warnings():
        # Letters that no installed font has are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        sheet = Sheet(figsize=(INCHES[width], 1.0), layout="constrained")
        draw(figure.data, sheet)
        suffix = path.suffix.lower()
        metadata = {".pdf": {"CreationDate": None, "Producer": None, "Creator": None}, ".svg": {"Date": None}}
        with replacing(path) as temporary:
            sheet.savefig(temporary, format=suffix[1:], metadata=metadata.get(suffix, {"Software": None}))


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


def _colour_map(layer: Layer) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("tl_headmaps", [f"#{c}" for c in layer.scale.colours], N=1025)
    return colours.with_extremes(bad="#ffffff00")


def _map_axes(axes: Any, heat: Heat, layer: Layer, cell: tuple[float, float]) -> Any:
    """One map on its axes, cells about this many inches: colours, hatching where values are missing, ticks."""
    from matplotlib.patches import Rectangle

    low, high = layer.scale.low, layer.scale.high
    if high <= low:
        low, high = low - 1, high + 1
    image = axes.imshow(
        np.ma.masked_invalid(layer.values),
        cmap=_colour_map(layer),
        vmin=low,
        vmax=high,
        aspect=cell[1] / cell[0],
        interpolation="nearest",
    )
    for row, column in np.argwhere(np.isnan(layer.values)):
        if not heat.lengths or column < heat.lengths[row]:
            axes.add_patch(
                Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, hatch="//////", edgecolor="0.6", linewidth=0)
            )
    for row, what in heat.rows.empty.items():
        axes.text((heat.columns.n - 1) / 2, row, what, ha="center", va="center", color="0.5", size=min(5, 60 * cell[1]))
    widest = _widest(heat.columns)
    upright = heat.columns.labels is not None and widest > cell[0]
    for axis, labels, room, need in (
        (axes.xaxis, heat.columns, cell[0], _LINE_INCHES if upright else widest + _LETTER_INCHES),
        (axes.yaxis, heat.rows, cell[1], _LINE_INCHES),
    ):
        step = next((step for step in _STEPS if step * room >= need), labels.n)
        shown = range(0, labels.n, step)
        axis.set_ticks(shown, [labels.label(i) for i in shown])
    if upright:
        axes.tick_params(axis="x", rotation=90)
    axes.tick_params(length=2)
    if heat.numbers:
        for (row, column), value in np.ndenumerate(layer.values):
            if np.isfinite(value):
                colour = text_on(layer.scale.colour(float(value)))
                axes.text(column, row, true_minus(significant(float(value))), ha="center", va="center", color=colour)
    return image


def _short(axis: Axis, wide: float) -> Axis:
    """Labels cut so that the map keeps two thirds of the width."""
    if axis.labels is None:
        return axis
    return replace(axis, labels=tuple(_cut(text, wide / 3) for text in axis.labels))


def _cut(text: str, room: float) -> str:
    if _inches(text) <= room:
        return text
    while text and _inches(text) > room - _LETTER_INCHES:
        text = text[:-1]
    return text + "…"


def _inches(text: str) -> float:
    """About how wide a text is at the size of the ticks, rather too wide than too narrow."""
    return sum(map(_letter_inches, text))


def _letter_inches(letter: str) -> float:
    if ord(letter) > 0xFFFF:
        return 0.16
    if letter in "MWmw@%—…" or east_asian_width(letter) in "WF":
        return 0.105
    return 0.08 if letter.isupper() else 0.066


def _widest(axis: Axis) -> float:
    return max(_inches(axis.label(i)) for i in range(axis.n))


def _cell_inches(heat: Heat, room: float) -> tuple[float, float]:
    """Width and height of a cell in a map that is at most ``room`` wide."""
    columns, rows = heat.columns.n, heat.rows.n
    if heat.numbers:
        return min(room / columns, 0.7), 0.28
    width = min(room / columns, 0.55 if heat.item == "component" else 0.25)
    return width, min(0.15 if heat.item == "component" else width, 5.5 / rows)


@draw.register
def _(data: Heat, sheet: Any) -> None:
    shown = [layer for layer in data.layers if layer.group == data.layers[0].group]
    wide = sheet.get_figwidth()
    data = replace(data, rows=_short(data.rows, wide), columns=_short(data.columns, wide))
    across = min(len(shown), 4 if wide > 5 else 2)
    down = -(-len(shown) // across)
    if down > _MOST_ROWS:
        raise UsageError(
            f"{len(shown)} maps do not fit on a printed page at this width; draw up to {_MOST_ROWS * across} of them "
            "(a result has select()), or write .html."
        )
    left = _widest(data.rows)
    cell = _cell_inches(data, max((wide - 0.9) / across - left - 0.25, 0.3))
    # A small map needs no whole page.
    needed = across * (cell[0] * data.columns.n + left + 0.45) + (1.0 if len(shown) == 1 else 0.9)
    sheet.set_figwidth(min(wide, max(needed, 0.06 * len(data.title) + 0.3, 2.0)))
    below = _widest(data.columns)
    below = below if data.columns.labels is not None and below > cell[0] else 0.12
    sheet.set_figheight(0.35 + down * (cell[1] * data.rows.n + below + 0.45))
    grid = sheet.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    used = list(grid.flat[: len(shown)])
    one_scale = len({layer.scale for layer in shown}) == 1
    for number, (axes, layer) in enumerate(zip(used, shown, strict=True)):
        image = _map_axes(axes, data, layer, cell)
        if len(shown) > 1:
            room = max(cell[0] * data.columns.n, 0.8) + 0.2
            axes.set_title(layer.name, fontsize=min(8.0, room * 72 / (0.6 * max(len(layer.name), 1))))
        if number + across >= len(shown):
            axes.set_xlabel(data.columns.name)
        if number % across == 0:
            axes.set_ylabel(data.rows.name)
        if not one_scale or number == len(shown) - 1:
            _colour_bar(sheet, image, layer.scale, used if one_scale else axes)
    sheet.suptitle(data.title, fontsize=8)


def _colour_bar(sheet: Any, image: Any, scale: Scale, axes: Any) -> None:
    ends = {(True, True): "both", (True, False): "min", (False, True): "max"}
    extend = ends.get((scale.below, scale.above), "neither")
    bar = sheet.colorbar(image, ax=axes, extend=extend, fraction=0.05, pad=0.02, aspect=25)
    bar.outline.set_linewidth(0.4)
    bar.ax.tick_params(length=2)
    bar.set_label(scale.unit)
    if scale.high <= scale.low:
        bar.set_ticks([scale.low])


@draw.register
def _(data: Chart, sheet: Any) -> None:
    sheet.set_figheight(0.62 * sheet.get_figwidth())
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
    axes.set(xlim=data.x_limits, ylim=data.y_limits, xlabel=data.x_name, ylabel=data.y_name, title=data.title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.3)
    if len(data.series) > 1:
        axes.legend(frameon=False)


@draw.register
def _(data: Flow, sheet: Any) -> None:
    """The page's own places, scaled to the width; a title above, the note below."""
    from matplotlib.patches import FancyBboxPatch, PathPatch, Rectangle
    from matplotlib.path import Path as Curve

    place = layout(data)
    # A small chart needs no whole page: 96 pixels of the screen are an inch at most.
    wide = min(sheet.get_figwidth(), max(place.width / 96, 2.4))
    inch = (wide - 0.2) / place.width
    size = min(7.0, 12 * inch * 72)
    note = textwrap.wrap(data.note, int((wide - 0.2) * 72 / (0.52 * 6.5))) if data.note else []
    title = textwrap.wrap(data.title, int((wide - 0.2) * 72 / (0.58 * 8)))
    above, below = 0.08 + 0.14 * len(title), 0.12 * len(note) + 0.1
    tall = place.height * inch + above + below
    sheet.set_layout_engine("none")
    sheet.set_size_inches(wide, tall)
    axes = sheet.add_axes((0.1 / wide, below / tall, 1 - 0.2 / wide, place.height * inch / tall))
    axes.set(xlim=(0, place.width), ylim=(place.height, 0))
    axes.axis("off")
    sheet.text(0.5, 1 - 0.06 / tall, "\n".join(title), ha="center", va="top", size=8)
    sheet.text(0.1 / wide, (below - 0.04) / tall, "\n".join(note), va="top", size=6.5, linespacing=1.25, color="0.35")

    def box(x: float, y: float, width: float, text: str, colour: str) -> None:
        high = BOX * place.row
        shape = FancyBboxPatch((x, y - high / 2), width, high, boxstyle="round,pad=0,rounding_size=4")
        shape.set(facecolor="white", edgecolor=colour, linewidth=0.8)
        axes.add_patch(shape)
        axes.text(x + width / 2, y, shortened(text), ha="center", va="center", size=size)

    for (_, links), y in zip(data.heads, place.head_at, strict=True):
        for tokens, share in links:
            for row in tokens:
                start, end, to = place.left + 2, place.token, place.middle(row)
                middle = (start + end) / 2
                curve = Curve([(start, y), (middle, y), (middle, to), (end, to)], [1, 4, 4, 4])
                colour = SERIES[data.colours[tokens]]
                drawn = PathPatch(curve, facecolor="none", edgecolor=colour, alpha=0.6)
                axes.add_patch(drawn)
                drawn.set_linewidth(line_width(share) * inch * 72)
    for (head, links), y in zip(data.heads, place.head_at, strict=True):
        box(2.0, y, place.left, head, SERIES[data.colours[links[0][0]]] if links else "0.6")
    for row, token in enumerate(data.tokens):
        number = data.token_colour(row)
        box(place.token, place.middle(row), place.right, token, "0.6" if number is None else SERIES[number])
    if data.matrix is None or data.scale is None:
        return
    for (row, column), value in np.ndenumerate(data.matrix):
        if not (data.is_causal and column > row):
            corner = (place.matrix + column * place.cell, place.top + row * place.row)
            cell = Rectangle(corner, place.cell, place.row, facecolor=data.cell_colour(float(value)))
            cell.set(edgecolor="white", linewidth=0.3)
            axes.add_patch(cell)
    bottom = place.top + place.row * len(data.tokens)
    for column, token in enumerate(data.tokens):
        at = (place.matrix + (column + 0.5) * place.cell, place.top - 5 if data.labels == "top" else bottom + 5)
        turned = {"rotation": 90} if place.upright else {}
        side = "bottom" if data.labels == "top" else "top"
        axes.text(*at, shortened(token), ha="center", va=side, size=size, **turned)
    _flow_legend(axes, data, data.scale, (place.matrix, place.height - 26), size)


def _flow_legend(axes: Any, data: Flow, scale: Scale, at: tuple[float, float], size: float) -> None:
    from matplotlib.patches import Rectangle

    x, y = at
    if data.is_binary:
        for left, colour, said in ((x, ON, "1"), (x + 40, OFF, f"0    {scale.unit}")):
            axes.add_patch(Rectangle((left, y), 14, 14, facecolor=colour))
            axes.text(left + 19, y + 7, said, va="center", size=size)
        return
    for number, colour in enumerate(scale.colours):
        axes.add_patch(Rectangle((x + 3 * number, y), 3.2, 12, facecolor=f"#{colour}"))
    said = f"{significant(scale.low)} to {significant(scale.high)} {scale.unit}"
    axes.text(x + 3 * len(scale.colours) + 8, y + 6, said, va="center", size=size)


@draw.register
def _(data: Example, sheet: Any) -> None:
    """Steps under each other: a line of text, its matrices in a row, its formula; all measured in inches."""
    wide = sheet.get_figwidth()
    # A letter is 0.6 of its size wide.
    letters = int((wide - 0.35) * 72 / (0.61 * _FORMULA_SIZE))
    formulas = [_wrapped(step.formula, letters) for step in data.steps]
    heights = []
    for step, lines in zip(data.steps, formulas, strict=True):
        rows = max((0.47 + _LINE * len(matrix.values) for matrix in step.matrices), default=0.0)
        heights.append(0.25 + rows + _FORMULA_LINE * len(lines) + 0.08)
    sheet.set_layout_engine("none")
    tall = sum(heights) + 0.4
    sheet.set_figheight(tall)
    sheet.text(0.5, 1 - 0.08 / tall, data.title, ha="center", va="top", size=8)
    top = tall - 0.35
    for number, (step, lines, height) in enumerate(zip(data.steps, formulas, heights, strict=True), 1):
        sheet.text(0.1 / wide, top / tall, f"{number}. {step.text}", va="top")
        left = 0.25
        for matrix in step.matrices:
            n_rows, n_columns = matrix.values.shape
            left += 0.1 if matrix.rows is None else 0.12 + 0.065 * max(len(str(name)) for name in matrix.rows)
            size = (min(0.45 * n_columns, max(wide - left - 0.1, 0.3)), _LINE * n_rows)
            bottom = top - 0.42 - size[1]
            axes = sheet.add_axes((left / wide, bottom / tall, size[0] / wide, size[1] / tall))
            _matrix_axes(axes, matrix, data.scale)
            left += size[0] + 0.2
        top -= height
        spacing = _FORMULA_LINE * 72 / _FORMULA_SIZE
        letters_of = {"family": "DejaVu Sans Mono", "size": _FORMULA_SIZE, "linespacing": spacing}
        sheet.text(0.25 / wide, (top + 0.08) / tall, "\n".join(lines), va="bottom", **letters_of)


def _wrapped(formula: str, letters: int) -> list[str]:
    """Lines of a formula; those too long continue on an indented line."""
    wrapper = textwrap.TextWrapper(letters, subsequent_indent=" " * 4, drop_whitespace=False, break_on_hyphens=False)
    return [part for line in formula.splitlines() for part in wrapper.wrap(line)]


def _matrix_axes(axes: Any, matrix: ExampleMatrix, scale: Scale) -> None:
    colours = [
        [scale.colour(float(value)) if np.isfinite(value) else "#ffffff" for value in row] for row in matrix.values
    ]
    channels = [[[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in row] for row in colours]
    axes.imshow(channels, aspect="auto")
    for (row, column), value in np.ndenumerate(matrix.values):
        axes.text(
            column,
            row,
            cell_text(float(value)),
            ha="center",
            va="center",
            size=6,
            color=text_on(colours[row][column]),
        )
    axes.set_xticks(range(matrix.values.shape[1]) if matrix.columns else [], matrix.columns or [])
    axes.set_yticks(range(matrix.values.shape[0]) if matrix.rows else [], matrix.rows or [])
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=6)
    axes.set_xlabel(matrix.name)
    for spine in axes.spines.values():
        spine.set_visible(False)


@draw.register
def _(data: View, sheet: Any) -> None:
    draw(data.printed, sheet)
