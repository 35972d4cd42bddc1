"""Heat maps in print: cells as vectors, one colour bar or legend, ticks and numbers only where they fit."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.errors import UsageError
from .colours import Scale, text_on
from .grids import Axis, Heat, Layer
from .sheets import LINE_INCHES, TALLEST, TICK_SIZE, TITLE_SIZE, frame, frame_height, inches_of, line_height, lines_of
from .text import sentence, significant, true_minus

STEPS = (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 50, 64, 100, 128, 200, 250, 500)
_LETTER_INCHES = 0.065
_MOST_ROWS = 12
_VECTOR_CELLS = 50_000
"""Larger figures are drawn as images: as vectors they would take megabytes and seconds to open."""

_LYING_INCHES = 0.5
"""Height of a colour bar below maps, with its numbers and its unit."""

_GAP = 0.14
"""Inches between maps."""

_TALLEST_OF_SEVERAL = 3.2
"""Height of a map in a figure of several."""

_SMALLEST_NUMBER = 4.5
"""Points of a number in a cell, at least."""

_MANY_LAYERS = 12
_LAYER_STEP = 4
"""Layers of a component map are counted in fours, if there are many."""


def ticks_of(n: int, room: float, need: float, least: int = 1) -> list[int]:
    """Every so many-th entry of an axis, and the last; ``room`` is what an entry has, ``need`` what a label takes.

    Example:
        >>> ticks_of(28, room=0.1, need=0.3)
        [0, 4, 8, 12, 16, 20, 24, 27]
    """
    step = next((step for step in STEPS if step >= least and step * room >= need), n)
    shown, last = list(range(0, n, step)), n - 1
    if shown[-1] != last:
        if (last - shown[-1]) * room < need:
            shown.pop()
        shown.append(last)
    return shown if shown[0] == 0 else [0]


def map_axes(axes: Any, heat: Heat, layer: Layer, cell: tuple[float, float]) -> Any:
    """One map on its axes, cells about this many inches: colours, hatching where values are missing, ticks, numbers."""
    from matplotlib.patches import Rectangle

    image = _cells(axes, heat, layer, cell)
    axes.set_aspect(cell[1] / cell[0])
    for row, column in np.argwhere(np.isnan(layer.values)):
        if not heat.lengths or column < heat.lengths[row]:
            axes.add_patch(
                Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, hatch="//////", edgecolor="0.6", linewidth=0)
            )
    for row, what in heat.rows.empty.items():
        axes.text((heat.columns.n - 1) / 2, row, what, ha="center", va="center", color="0.5", size=min(5, 60 * cell[1]))
    _ticks(axes, heat, cell)
    if layer.marked is not None:
        for row, column in np.argwhere(layer.marked & np.isfinite(layer.values)):
            colour = text_on(layer.scale.colour(float(layer.values[row, column])))
            # Beside the number, if there is one.
            x, y = (column + 0.5 - 0.06 / cell[0], row - 0.5 + 0.06 / cell[1]) if heat.numbers else (column, row)
            axes.plot(x, y, ".", color=colour, markersize=min(3.0, 22 * min(cell)), markeredgewidth=0)
    if heat.numbers:
        texts = {at: true_minus(significant(float(v))) for at, v in np.ndenumerate(layer.values) if np.isfinite(v)}
        # All of one size: somewhat smaller, rather than some left out.
        widest = max(map(inches_of, texts.values()), default=1.0)
        size = max(_SMALLEST_NUMBER, min(TICK_SIZE, TICK_SIZE * cell[0] / widest))
        for (row, column), text in texts.items():
            if inches_of(text, size) <= cell[0] + 1e-6 and cell[1] >= LINE_INCHES:
                colour = text_on(layer.scale.colour(float(layer.values[row, column])))
                axes.text(column, row, text, ha="center", va="center", color=colour, size=size)
    return image


def _cells(axes: Any, heat: Heat, layer: Layer, cell: tuple[float, float]) -> Any:
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap

    colours = [f"#{colour}" for colour in layer.scale.colours]
    low, high = layer.scale.low, layer.scale.high
    if layer.scale.names:
        table: Any = ListedColormap(colours)
        low, high = -0.5, len(colours) - 0.5
    else:
        table = LinearSegmentedColormap.from_list("tl_headmaps", colours, N=1025)
        low, high = (low, high) if high > low else (low - 1, high + 1)
    values, table = np.ma.masked_invalid(layer.values), table.with_extremes(bad="#ffffff00")
    rows, columns = layer.values.shape
    if layer.values.size * len(heat.layers) > _VECTOR_CELLS:
        origin: Any = "lower" if heat.lower else "upper"
        return axes.imshow(values, cmap=table, vmin=low, vmax=high, interpolation="nearest", origin=origin)
    edges = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
    # Edges of the cells' own colours, a tenth of a cell at most: without them, viewers show hairlines between cells.
    edge = min(0.5, 7.2 * min(cell))
    image = axes.pcolormesh(*edges, values, cmap=table, vmin=low, vmax=high, edgecolors="face", linewidth=edge)
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(-0.5, rows - 0.5) if heat.lower else (rows - 0.5, -0.5))
    return image


def _ticks(axes: Any, heat: Heat, cell: tuple[float, float]) -> None:
    upright = _is_upright(heat.columns, cell[0])
    widest = _widest(heat.columns)
    across = _most_lines(heat.columns) * LINE_INCHES if upright else widest + _LETTER_INCHES
    shown = ticks_of(heat.columns.n, cell[0], across)
    axes.xaxis.set_ticks(shown, [heat.columns.label(i) for i in shown])
    counted = heat.item == "component" and heat.rows.labels is None and heat.rows.n > _MANY_LAYERS
    shown = ticks_of(heat.rows.n, cell[1], _most_lines(heat.rows) * LINE_INCHES, _LAYER_STEP if counted else 1)
    axes.yaxis.set_ticks(shown, [heat.rows.label(i) for i in shown])
    if upright:
        axes.tick_params(axis="x", rotation=90)
    axes.tick_params(length=2)


def _is_upright(columns: Axis, room: float) -> bool:
    """Whether labels stand on end: side by side they would touch, and a name that is left out is missed."""
    return columns.labels is not None and _widest(columns) + _LETTER_INCHES > room


def _folded(axis: Axis, wide: float) -> Axis:
    """Labels in lines of at most a third of the width, so that the map keeps the rest."""
    if axis.labels is None:
        return axis
    return replace(axis, labels=tuple("\n".join(lines_of(text, wide / 3)) for text in axis.labels))


def _widest(axis: Axis) -> float:
    return max(inches_of(line) for i in range(axis.n) for line in axis.label(i).split("\n"))


def _most_lines(axis: Axis) -> int:
    return max(axis.label(i).count("\n") + 1 for i in range(axis.n))


def cell_inches(heat: Heat, room: float, tallest: float) -> tuple[float, float]:
    """Width and height of a cell in a map that is at most ``room`` wide and ``tallest`` tall."""
    columns, rows = heat.columns.n, heat.rows.n
    if heat.numbers:
        tall = max(0.28, _most_lines(heat.rows) * LINE_INCHES)
        return min(room / columns, 0.7), min(tall, tallest / rows)
    if heat.item == "component":
        return min(room / columns, max(0.55, _widest(heat.columns) + _LETTER_INCHES)), min(0.15, tallest / rows)
    width = min(room / columns, 0.25)
    return width, min(width, tallest / rows)


def draw_heat(heat: Heat, sheet: Any) -> None:
    """All maps of a figure (of its first group) on a sheet, whose height is set; their outer axes alone have labels."""
    shown = first_group(heat)
    wide = float(sheet.get_figwidth())
    narrow = wide <= 5
    heat = replace(heat, rows=_folded(heat.rows, wide), columns=_folded(heat.columns, wide))
    one_scale = len({layer.scale for layer in shown}) == 1
    left = _widest(heat.rows) + 0.25
    beside_each_other = 4 if not narrow else _across(heat, shown, wide - left - 0.2) if one_scale else 1
    across, down = _arranged(heat, len(shown), beside_each_other)
    # Where every bit of width counts, the one bar lies below the maps.
    lying = narrow and one_scale and across > 1 and not shown[0].scale.names
    beside = max(_bar_inches(layer.scale) for layer in shown)
    bars = 0.0 if lying else beside if one_scale else beside * across
    room = max((wide - bars - left - 0.2) / across - _GAP, 0.3)
    cell = cell_inches(heat, room, tallest=100.0)
    # A small map needs no whole page, but its title and caption may.
    needed = left + across * (cell[0] * heat.columns.n + _GAP) + bars + 0.2
    note = _caption(heat, shown)
    sheet.set_figwidth(min(wide, max(needed, inches_of(heat.title, TITLE_SIZE) + 0.2, 3.0 if note else 2.0)))
    below = _widest(heat.columns) if _is_upright(heat.columns, cell[0]) else LINE_INCHES
    below += LINE_INCHES + 0.2 + lying * _LYING_INCHES
    titles = [lines_of(layer.name, room + _GAP / 2, TITLE_SIZE) for layer in shown]
    above = max(map(len, titles)) * line_height(TITLE_SIZE) + 0.05 if len(shown) > 1 else 0.0
    left_over = TALLEST["column" if narrow else "page"] - frame_height(sheet, title=heat.title, note=note) - below
    most = _TALLEST_OF_SEVERAL if len(shown) > 1 else 4.0 if narrow else 5.5
    tallest = min(left_over / down - above - _GAP, most)
    cell = cell_inches(heat, room, max(tallest, 0.3))
    frame(sheet, below + down * (cell[1] * heat.rows.n + above + _GAP), title=heat.title, note=note)
    grid = sheet.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    used = list(grid.flat[: len(shown)])
    for number, (axes, layer) in enumerate(zip(used, shown, strict=True)):
        image = map_axes(axes, heat, layer, cell)
        if len(shown) > 1:
            axes.set_title("\n".join(titles[number]), fontsize=TITLE_SIZE)
        at_bottom, at_left = number + across >= len(shown), number % across == 0
        axes.tick_params(labelbottom=at_bottom, labelleft=at_left)
        if at_bottom:
            axes.set_xlabel(_axis_name(heat, heat.columns))
        if at_left:
            axes.set_ylabel(_axis_name(heat, heat.rows))
        if not one_scale or number == len(shown) - 1:
            height = cell[1] * heat.rows.n * (down if one_scale else 1)
            scale_beside(sheet, image, layer.scale, used if one_scale else axes, None if lying else height)
    lay_out(sheet)


def lay_out(sheet: Any) -> None:
    """Place all once more: maps of a fixed shape move when they find their size, and their titles need room again."""
    if (engine := sheet.get_layout_engine()) is not None:
        engine.execute(sheet)


def _across(heat: Heat, shown: Sequence[Layer], wide: float) -> int:
    """How many maps stand beside each other in a column: what gives the largest cells without breaking words."""
    longest = max(inches_of(word, TITLE_SIZE) for layer in shown for word in re.split(r"[ \-/]", layer.name))

    def smaller_side(across: int) -> float:
        room = wide / across - _GAP
        fits = across == 1 or (across <= len(shown) and room + _GAP / 2 >= min(longest, 1.0))
        tall = (TALLEST["column"] - 1.5) / -(-len(shown) // across) - 0.3
        return min(cell_inches(heat, room, min(tall, _TALLEST_OF_SEVERAL))) if fits else 0.0

    return max(range(1, 5), key=lambda across: (smaller_side(across), across))


def first_group(heat: Heat) -> list[Layer]:
    """The maps that are printed: all of the first group."""
    return [layer for layer in heat.layers if layer.group == heat.layers[0].group]


def _arranged(heat: Heat, n: int, most: int) -> tuple[int, int]:
    """Columns and rows of ``n`` maps: as asked for, else at most so many beside each other."""
    columns, rows = heat.arranged
    across = columns or (min(n, most) if rows is None else -(-n // rows))
    down = rows or -(-n // across)
    if across * down < n:
        raise UsageError(f"{n} maps do not fit into {across} x {down} places; give more columns= or rows=.")
    if down > _MOST_ROWS:
        raise UsageError(
            f"{n} maps do not fit on a printed page at this width; draw up to {_MOST_ROWS * across} of them "
            "(a result has select()), or write .html."
        )
    return min(across, n), -(-n // min(across, n))


def _axis_name(heat: Heat, axis: Axis) -> str:
    """Panels are a figure of several axes, whose names begin with a capital."""
    return axis.name.capitalize() if heat.panels else axis.name


def _caption(heat: Heat, shown: Sequence[Layer]) -> str:
    """The note, and what dots and hatching mean."""
    parts = [heat.note]
    if heat.mark and any(layer.marked is not None and layer.marked.any() for layer in shown):
        parts.append(f"Dot: {heat.mark}.")
    inside = np.arange(heat.columns.n) < np.array(heat.lengths or [heat.columns.n] * heat.rows.n)[:, None]
    if any(bool((np.isnan(layer.values) & inside).any()) for layer in shown):
        parts.append("Hatched: missing.")
    *first, last = [part for part in parts if part] or [""]
    # A score alone is no sentence.
    return " ".join([*map(sentence, first), last])


def _bar_inches(scale: Scale) -> float:
    """Width of a colour bar, or of a legend."""
    if scale.names:
        return 0.35 + max(inches_of(name) for name, _ in scale.names)
    return 0.45 + max(inches_of(label) for _, label in scale.ticks)


def scale_beside(sheet: Any, image: Any, scale: Scale, axes: Any, height: float | None) -> None:
    """The colour bar of maps, about so many inches tall or (None) lying below them, or their legend."""
    if scale.names:
        from matplotlib.patches import Patch

        handles = [Patch(color=colour, label=name) for name, colour in scale.names]
        sheet.legend(handles=handles, loc="outside right center", frameon=False, title=scale.unit, handlelength=0.9)
        return
    ends = {(True, True): "both", (True, False): "min", (False, True): "max"}
    extend = ends.get((scale.below, scale.above), "neither")
    place: dict[str, Any] = {"fraction": 0.05, "pad": 0.02, "aspect": 25}
    if height is None:
        inch = 1 / sheet.get_figheight()
        place = {"location": "bottom", "fraction": 0.1 * inch, "pad": max(0.02, 0.1 * inch), "aspect": 30}
    bar = sheet.colorbar(image, ax=axes, extend=extend, **place)
    bar.outline.set_linewidth(0.4)
    # matplotlib makes an image of a bar of many colours, which readers blur.
    bar.solids.set(rasterized=False, edgecolor="face")
    bar.ax.tick_params(length=2)
    bar.set_label("\n".join(lines_of(scale.unit, sheet.get_figwidth() - 0.4 if height is None else max(height, 0.8))))
    places, labels = zip(*scale.ticks, strict=True)
    bar.set_ticks(places, labels=labels)
    bar.minorticks_off()
