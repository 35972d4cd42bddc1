"""Heat maps as shapes: maps with their axes, colour bars and legends, and the sheet that holds all of them in print.

A page has the same maps and bars, one drawing each: there they find their places with the width of the window.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..core.errors import UsageError
from .colours import Scale, text_on
from .grids import Axis, Heat, Layer
from .layout import (
    MARGIN,
    TICK,
    TITLE,
    Naming,
    PrintOptions,
    frame_height,
    framed,
    line_height,
    lines_of,
    shortened,
    width_of,
    written,
)
from .shapes import MIDDLE, Cells, Drawing, Group, Number, Path, Point, Rect, Shape, Text
from .text import sentence, significant, true_minus

STEPS = (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 50, 64, 100, 128, 200, 250, 500)
_MOST_ROWS = 12
_GAP = 10.0
"""Points between maps."""

_TALLEST = {True: 8.0, False: 9.0}
"""Most inches that maps take with their title and caption, in a column and on a page."""

_TALLEST_MAP = {True: 4.0, False: 5.5}
_TALLEST_OF_SEVERAL = 3.2
_SMALLEST_NUMBER = 0.64
"""How far numbers in cells may shrink, so that all fit."""

_MANY_LAYERS = 12
_LAYER_STEP = 4
"""Layers of a component map are counted in fours, if there are many."""

_BAR_SHADES = 128


def ticks_of(n: int, room: Number, need: Number, least: int = 1) -> list[int]:
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


@dataclass(frozen=True)
class Plot:
    """Where the parts of a map are; the upper left corner of its cells is at 0, 0.

    Attributes:
        heat: What is shown.
        cell: Width and height of a cell.
        size: Of letters.
    """

    heat: Heat
    cell: Point
    size: Number = TICK

    @property
    def width(self) -> float:
        """Of all cells."""
        return self.heat.columns.n * self.cell[0]

    @property
    def height(self) -> float:
        """Of all cells."""
        return self.heat.rows.n * self.cell[1]

    @property
    def left(self) -> float:
        """What labels and name of the rows take."""
        return _widest(self.heat.rows, self.size) + 2.2 * self.size

    @property
    def below(self) -> float:
        """What labels and name of the columns take."""
        tall = _most_lines(self.heat.columns) * line_height(self.size)
        return (_widest(self.heat.columns, self.size) if self.is_upright else tall) + 2.1 * self.size

    @property
    def beyond(self) -> float:
        """How far labels reach beyond the last column and above the first row."""
        wide = 0.0 if self.is_upright else _widest(self.heat.columns, self.size)
        return max(1.0, (wide - self.cell[0]) / 2, (self.size - self.cell[1]) / 2)

    @cached_property
    def is_upright(self) -> bool:
        """Whether labels of columns stand on end: side by side they would touch, and a missing name is missed."""
        room = self.cell[0] - 0.65 * self.size
        return self.heat.columns.labels is not None and _widest(self.heat.columns, self.size) > room

    def drawing(self, layers: Sequence[Layer], keys: Sequence[str]) -> Drawing:
        """A map alone, for a page: the first of several maps, and the others hidden."""
        x, y = self.left, self.beyond
        maps = [
            Group(self.layer(layer), x, y, key, hidden=number > 0)
            for number, (layer, key) in enumerate(zip(layers, keys, strict=True))
        ]
        size = self.left + self.width + self.beyond, self.beyond + self.height + self.below
        return Drawing([*maps, Group(self.axes(), x, y)], *size)

    def axes(self, *, at_left: bool = True, at_bottom: bool = True) -> list[Shape]:
        """The frame, ticks, and on the outer sides of a sheet labels and names."""
        size, (wide, tall), heat = self.size, self.cell, self.heat
        most = _most_lines(heat.columns) if self.is_upright else 0
        need = most * line_height(size) if self.is_upright else _widest(heat.columns, size) + 0.65 * size
        columns = [((i + 0.5) * wide, heat.columns.label(i)) for i in ticks_of(heat.columns.n, wide, need)]
        counted = heat.item == "component" and heat.rows.labels is None and heat.rows.n > _MANY_LAYERS
        need = _most_lines(heat.rows) * line_height(size)
        shown = ticks_of(heat.rows.n, tall, need, _LAYER_STEP if counted else 1)
        rows = [((heat.place_of(i) + 0.5) * tall, heat.rows.label(i)) for i in shown]
        marks = [((x, self.height), (x, self.height + 0.25 * size)) for x, _ in columns]
        marks += [((-0.25 * size, y), (0, y)) for y, _ in rows]
        shapes: list[Shape] = [Path(tuple(marks), "soft", 0.07 * size)]
        shapes.append(Rect(0, 0, self.width, self.height, stroke="soft", line=0.07 * size))
        for x, label in columns if at_bottom else ():
            shapes += self._column_label(x, label.split("\n"))
        for y, label in rows if at_left else ():
            lines = label.split("\n")
            first = y + MIDDLE * size - (len(lines) - 1) / 2 * line_height(size)
            shapes += [
                Text(-0.5 * size, first + number * line_height(size), text, size, "end")
                for number, text in enumerate(lines)
            ]
        if at_bottom:
            name = _axis_name(heat, heat.columns)
            shapes.append(Text(self.width / 2, self.height + self.below - 0.4 * size, name, size, "middle"))
        if at_left:
            name, x = _axis_name(heat, heat.rows), 1.2 * size - self.left
            shapes.append(Text(x, self.height / 2, name, size, "middle", upright=True))
        return shapes

    def _column_label(self, x: float, lines: Sequence[str]) -> list[Shape]:
        size, step = self.size, line_height(self.size)
        if not self.is_upright:
            top = self.height + 1.4 * size
            return [Text(x, top + number * step, text, size, "middle") for number, text in enumerate(lines)]
        first = x + MIDDLE * size - (len(lines) - 1) / 2 * step
        end = self.height + 0.5 * size
        return [Text(first + number * step, end, text, size, "end", upright=True) for number, text in enumerate(lines)]

    def layer(self, layer: Layer) -> list[Shape]:
        """The cells of a map: colours, hatching where values are missing, dots, numbers where they fit."""
        heat, (wide, tall) = self.heat, self.cell
        order = slice(None, None, -1) if heat.lower else slice(None)
        values = layer.values[order]
        shapes: list[Shape] = [Cells(0, 0, self.cell, layer.scale.pixels(values))]
        missing = (np.isnan(layer.values) & heat.inside)[order]
        if missing.any():
            shapes.append(Path(tuple(_hatching(missing, self.cell, self.size)), "soft", 0.08 * self.size, opacity=0.7))
        for row, what in heat.rows.empty.items():
            size = min(0.75 * self.size, 0.8 * tall, self.size * self.width / max(1.0, width_of(what, self.size)))
            y = (heat.place_of(row) + 0.5) * tall + MIDDLE * size
            shapes.append(Group([Text(self.width / 2, y, what, size, "middle", "soft")], key="empty"))
        if layer.marked is not None:
            radius = min(0.2 * self.size, 0.3 * min(self.cell))
            for row, column in np.argwhere(layer.marked[order] & np.isfinite(values)):
                # Beside the number, if there is one.
                x, y = (column + 0.5) * wide, (row + 0.5) * tall
                if heat.numbers:
                    x, y = (column + 1) * wide - 0.6 * self.size, row * tall + 0.6 * self.size
                ink = text_on(layer.scale.colour(float(values[row, column])))
                shapes.append(Rect(x - radius, y - radius, 2 * radius, 2 * radius, ink, radius=radius))
        return shapes + (self._numbers(values, layer.scale) if heat.numbers else [])

    def _numbers(self, values: np.ndarray, scale: Scale) -> list[Shape]:
        wide, tall = self.cell
        texts = {at: true_minus(significant(float(v))) for at, v in np.ndenumerate(values) if np.isfinite(v)}
        # All of one size: somewhat smaller, rather than some left out.
        widest = max((width_of(text, self.size) for text in texts.values()), default=1.0)
        size = self.size * max(_SMALLEST_NUMBER, min(1.0, wide / widest))
        return [
            Text(
                (column + 0.5) * wide,
                (row + 0.5) * tall + MIDDLE * size,
                text,
                size,
                "middle",
                text_on(scale.colour(float(values[row, column]))),
            )
            for (row, column), text in texts.items()
            if width_of(text, size) <= wide + 1e-6 and tall >= line_height(self.size) - 1e-6
        ]


def _widest(axis: Axis, size: Number) -> float:
    return max(width_of(text, size) for i in range(axis.n) for text in axis.label(i).split("\n"))


def _most_lines(axis: Axis) -> int:
    return max(axis.label(i).count("\n") + 1 for i in range(axis.n))


def _axis_name(heat: Heat, axis: Axis) -> str:
    """Panels are a figure of several axes, whose names begin with a capital."""
    return axis.name.capitalize() if heat.panels else axis.name


def _hatching(missing: np.ndarray, cell: Point, size: Number) -> list[tuple[Point, Point]]:
    """Slanted lines over cells, which meet those of the cells beside them."""
    lines: list[tuple[Point, Point]] = []
    apart = max(0.4 * size, min(cell) / 2)
    for row, column, n_rows, n_columns in _blocks(missing):
        left, top = column * cell[0], row * cell[1]
        right, bottom = left + n_columns * cell[0], top + n_rows * cell[1]
        for number in range(int((left + top) / apart) + 1, int((right + bottom) / apart - 1e-9) + 1):
            total = number * apart
            first = min(right, total - top)
            last = max(left, total - bottom)
            lines.append(((last, total - last), (first, total - first)))
    return lines


def _blocks(mask: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Rectangles of set cells: first row, first column, number of rows, number of columns.

    >>> _blocks(np.array([[True, True, False], [True, True, True]]))
    [(0, 0, 2, 2), (1, 2, 1, 1)]
    """
    left, blocks = mask.copy(), []
    for row, column in np.argwhere(mask).tolist():
        if not left[row, column]:
            continue
        gaps = np.flatnonzero(~left[row, column:])
        n_columns = int(gaps[0]) if gaps.size else mask.shape[1] - column
        full = left[row:, column : column + n_columns].all(axis=1)
        n_rows = int(np.argmin(full)) if not full.all() else mask.shape[0] - row
        left[row : row + n_rows, column : column + n_columns] = False
        blocks.append((row, column, n_rows, n_columns))
    return blocks


def scale_drawing(scale: Scale, length: Number, *, lying: bool = False, size: Number = TICK) -> Drawing:
    """A colour bar of a length, upright or lying, with its ticks and unit; or the legend of names."""
    if scale.names:
        titles = written(lines_of(scale.unit, length, size), 0, 0, size)
        step, top = 1.5 * size, len(titles) * line_height(size) + 0.4 * size
        shapes: list[Shape] = [*titles]
        for number, (name, colour) in enumerate(scale.names):
            shapes.append(Rect(0, top + number * step, size, size, colour))
            shapes.append(Text(1.5 * size, top + number * step + 0.86 * size, name, size))
        wide = max(width_of(text.text, size) for text in (*titles, Text(0, 0, ""))) if titles else 0.0
        wide = max(wide, max(1.5 * size + width_of(name, size) for name, _ in scale.names))
        return Drawing(shapes, wide, top + len(scale.names) * step)
    thick, units = 0.9 * size, lines_of(scale.unit, max(length, 60), size) if scale.unit else []
    shades = scale.pixels(np.linspace(scale.low, scale.high, _BAR_SHADES)[None])
    ticks = [(scale.position(value), label) for value, label in scale.ticks]
    step = line_height(size)
    if lying:
        edge = max(width_of(label, size) for _, label in ticks) / 2
        shapes = [Cells(edge, 0, (length / _BAR_SHADES, thick), shades, key="bar")]
        shapes += [Text(edge + at * length, thick + 1.2 * size, label, size, "middle") for at, label in ticks]
        shapes += written(units, edge + length / 2, thick + 1.4 * size, size, anchor="middle")
        return Drawing(shapes, length + 2 * edge, thick + 1.6 * size + len(units) * step)
    top, wide = 0.5 * size, max(width_of(label, size) for _, label in ticks)
    shapes = [Cells(0, top, (thick, length / _BAR_SHADES), shades.transpose(1, 0, 2)[::-1], key="bar")]
    for at, label in ticks:
        shapes.append(Text(thick + 0.4 * size, top + (1 - at) * length + MIDDLE * size, label, size))
    right = thick + 0.9 * size + wide
    for number, text in enumerate(units):
        x = right + size + number * step
        shapes.append(Text(x, top + length / 2, text, size, "middle", upright=True))
    return Drawing(shapes, right + len(units) * step + 0.3 * size, length + 2 * top)


def cell_size(heat: Heat, room: Number, tallest: Number) -> tuple[float, float]:
    """Width and height of a cell in print, in a map that is at most ``room`` wide and ``tallest`` tall."""
    columns, rows = heat.columns.n, heat.rows.n
    if heat.numbers:
        tall = max(20.0, _most_lines(heat.rows) * line_height(TICK))
        return min(room / columns, 50.0), min(tall, tallest / rows)
    if heat.item == "component":
        return min(room / columns, max(40.0, _widest(heat.columns, TICK) + 5)), min(11.0, tallest / rows)
    width = min(room / columns, 18.0)
    return width, min(width, tallest / rows)


@dataclass(frozen=True)
class _Plan:
    """How the maps of a sheet are arranged.

    Attributes:
        across, down: Maps beside and below each other.
        width: Of the whole sheet.
        plot: Sizes that all maps have.
        titles, above: Lines of the title of each map, and what these take.
        bar: What a colour bar beside maps takes.
        lying: The one bar that lies below all maps, where every bit of width counts.
    """

    across: int
    down: int
    width: float
    plot: Plot
    titles: Sequence[Sequence[str]]
    above: float
    bar: float
    lying: Drawing | None


def sheet(heat: Heat, options: PrintOptions) -> Drawing:
    """All maps of a figure (of its first group) for print; their outer axes alone have labels."""
    heat = _for_print(heat, options)
    frame = {"title": options.title_or(heat.title), "note": _caption(heat)}
    plan, scales = _plan(heat, options, frame), [layer.scale for layer in heat.layers]
    plot, one_scale = plan.plot, len(set(scales)) == 1
    step = (plot.width + _GAP + (0.0 if one_scale else plan.bar), plan.above + plot.height + _GAP)
    first = plot.left, plot.beyond + plan.above
    whole = Drawing([], plot.left + plan.across * step[0] - _GAP, plot.beyond + plan.down * step[1] - _GAP + plot.below)
    for number, (layer, lines) in enumerate(zip(heat.layers, plan.titles, strict=True)):
        x, y = first[0] + number % plan.across * step[0], first[1] + number // plan.across * step[1]
        top = y - 4 - len(lines) * line_height(TITLE)
        whole.add(*written(lines, x + plot.width / 2, top, TITLE, anchor="middle"))
        axes = plot.axes(at_left=number % plan.across == 0, at_bottom=number + plan.across >= len(heat.layers))
        whole.add(Group([*plot.layer(layer), *axes], x, y))
        if not one_scale:
            whole.add(scale_drawing(layer.scale, plot.height).at(x + plot.width + _GAP, y - 0.5 * TICK))
    if plan.lying is not None:
        middle = (plot.left + whole.width - plan.lying.width) / 2
        whole.add(plan.lying.at(middle, whole.height + MARGIN))
        whole.height += MARGIN + plan.lying.height
    elif one_scale:
        bar = scale_drawing(scales[0], max(plan.down * step[1] - _GAP - plan.above, 40.0))
        whole.add(bar.at(whole.width + _GAP, first[1] - 0.5 * TICK))
        whole.width, whole.height = whole.width + _GAP + bar.width, max(whole.height, first[1] + bar.height)
    whole.width += 0.0 if plan.bar else plot.beyond
    if options.height is not None:
        whole.height = max(whole.height, options.height - frame_height(plan.width, **frame))
    return framed(whole, **frame, width=plan.width)


def _for_print(heat: Heat, options: PrintOptions) -> Heat:
    """The first group of maps with their names in print, and labels in lines of a third of the width at most."""
    shown = [layer for layer in heat.layers if layer.group == heat.layers[0].group]
    others = [heat.rows.name, heat.columns.name, *dict.fromkeys(layer.scale.unit for layer in shown)]
    naming = Naming([layer.name for layer in shown], options.labels, others)

    def scale_of(scale: Scale) -> Scale:
        names = tuple((shortened(name, 0.4 * options.width), colour) for name, colour in scale.names)
        return replace(scale, unit=naming.other(scale.unit), names=names)

    def axis_of(axis: Axis) -> Axis:
        labels = axis.labels and tuple("\n".join(lines_of(text, options.width / 3)) for text in axis.labels)
        return replace(axis, name=naming.other(axis.name), labels=labels)

    layers = tuple(
        replace(layer, name=name, scale=scale_of(layer.scale)) for layer, name in zip(shown, naming.names, strict=True)
    )
    return replace(heat, layers=layers, rows=axis_of(heat.rows), columns=axis_of(heat.columns))


def _plan(heat: Heat, options: PrintOptions, frame: Mapping[str, str]) -> _Plan:
    scales, names = [layer.scale for layer in heat.layers], [layer.name for layer in heat.layers]
    one_scale, left = len(set(scales)) == 1, Plot(heat, (1, 1)).left
    most = 4 if not options.narrow else _across(heat, names, options.width - left - 14) if one_scale else 1
    across, down = _arranged(options, len(names), most)
    lies = options.narrow and one_scale and across > 1 and not scales[0].names
    bar = 0.0 if lies else max(scale_drawing(scale, 100).width for scale in scales) + _GAP
    outer = left + 2 * MARGIN + 6 + bar * (1 if one_scale else across)
    room = max((options.width - outer) / across - _GAP, 22.0)
    wide = options.width
    if not options.exact:
        # A small map needs no whole page, but its title and caption may.
        needed = outer + across * (cell_size(heat, room, tallest=7000.0)[0] * heat.columns.n + _GAP)
        wide = min(wide, max(needed, width_of(frame["title"], TITLE) + 14, 216.0 if frame["note"] else 144.0))
    several = len(names) > 1
    titles = [lines_of(name, room + _GAP / 2, TITLE) if name and several else [] for name in names]
    above = max(map(len, titles)) * line_height(TITLE) + 4 if several else 0.0
    lying = scale_drawing(scales[0], 0.5 * (wide - left), lying=True) if lies else None
    rest = (options.height or 72 * _TALLEST[options.narrow]) - frame_height(wide, **frame)
    rest -= Plot(heat, (0, 0)).beyond + Plot(heat, cell_size(heat, room, tallest=7000.0)).below
    rest -= lying.height + MARGIN if lying else 0.0
    tallest = (rest + _GAP) / down - above - _GAP
    if options.height is not None:
        cell = room / heat.columns.n, max(0.2, tallest / heat.rows.n)
    else:
        highest = 72 * (_TALLEST_OF_SEVERAL if several else _TALLEST_MAP[options.narrow])
        cell = cell_size(heat, room, max(min(tallest, highest), 22.0))
    return _Plan(across, down, wide, Plot(heat, cell), titles, above, bar, lying)


def _across(heat: Heat, names: Sequence[str], wide: Number) -> int:
    """How many maps stand beside each other in a column: what gives the largest cells without breaking words."""
    longest = max(width_of(word, TITLE) for name in names for word in re.split(r"[ \-/]", name))

    def smaller_side(across: int) -> float:
        room = wide / across - _GAP
        fits = across == 1 or (across <= len(names) and room + _GAP / 2 >= min(longest, 72.0))
        tall = 72 * ((_TALLEST[True] - 1.5) / -(-len(names) // across) - 0.3)
        return min(cell_size(heat, room, min(tall, 72 * _TALLEST_OF_SEVERAL))) if fits else 0.0

    return max(range(1, 5), key=lambda across: (smaller_side(across), across))


def _arranged(options: PrintOptions, n: int, most: int) -> tuple[int, int]:
    """Columns and rows of ``n`` maps: as asked for, else at most so many beside each other."""
    columns, rows = options.columns, options.rows
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


def _caption(heat: Heat) -> str:
    """The note, and what dots and hatching mean."""
    parts = [heat.note]
    if heat.mark and any(layer.marked is not None and layer.marked.any() for layer in heat.layers):
        parts.append(f"Dot: {heat.mark}.")
    if any(bool((np.isnan(layer.values) & heat.inside).any()) for layer in heat.layers):
        parts.append("Hatched: missing.")
    *first, last = [part for part in parts if part] or [""]
    # A score alone is no sentence.
    return " ".join([*map(sentence, first), last])
