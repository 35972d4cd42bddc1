"""Drawings below and beside each other, and pictures that a phone shows in another arrangement.

>>> box = Drawing([], 30, 9)
>>> whole = stacked([in_rows([box, box, box], 70, 5), box], gap=5)
>>> whole.width, whole.height
(65, 37)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from .layout import MARGIN, TICK, PrintOptions, framed
from .shapes import Cells, Drawing, Group, Number, Path, Shape, Text

SIZE = 13.0
"""Letters on a page."""

WIDE, NARROW = 720.0, 340.0
"""Widths, on a page, of pictures that have one arrangement for screens and another for phones."""


def stacked(drawings: Sequence[Drawing], gap: Number = 0.0) -> Drawing:
    """Drawings below each other; those without height are left out."""
    whole = Drawing([], 0.0, -gap)
    for drawing in drawings:
        if drawing.height > 0:
            whole.add(drawing.at(0.0, whole.height + gap))
            whole.width, whole.height = max(whole.width, drawing.width), whole.height + gap + drawing.height
    return whole if whole.shapes else Drawing()


def in_rows(drawings: Sequence[Drawing], width: Number, gap: Number = 0.0) -> Drawing:
    """Drawings beside each other while they fit, then below."""
    rows: list[Drawing] = []
    for drawing in drawings:
        if not rows or rows[-1].width + gap + drawing.width > width:
            rows.append(Drawing([], -gap))
        row = rows[-1]
        row.add(drawing.at(row.width + gap, 0.0))
        row.width, row.height = row.width + gap + drawing.width, max(row.height, drawing.height)
    return stacked(rows, gap)


def inset(drawing: Drawing, x: Number) -> Drawing:
    """A drawing moved to the right."""
    return Drawing([drawing.at(x, 0.0)], drawing.width + x, drawing.height)


def scaled(drawing: Drawing, by: Number) -> Drawing:
    """A drawing in another size, letters and lines included."""
    return Drawing([_scaled(shape, by) for shape in drawing.shapes], drawing.width * by, drawing.height * by)


def _scaled(shape: Shape, by: Number) -> Shape:
    match shape:
        case Path():
            lines = tuple(tuple((x * by, y * by) for x, y in part) for part in shape.lines)
            return replace(shape, lines=lines, width=shape.width * by, dash=tuple(part * by for part in shape.dash))
        case Group():
            shapes = [_scaled(each, by) for each in shape.shapes]
            return replace(shape, shapes=shapes, x=shape.x * by, y=shape.y * by)
        case Cells():
            return replace(shape, x=shape.x * by, y=shape.y * by, cell=(shape.cell[0] * by, shape.cell[1] * by))
    names = ("x", "y", "size") if isinstance(shape, Text) else ("x", "y", "width", "height", "line", "radius")
    return replace(shape, **{name: getattr(shape, name) * by for name in names})


def printed(drawn: Drawing, options: PrintOptions, *, title: str, note: str = "") -> Drawing:
    """A picture of a page in the size of print, or smaller where it is wide; its height follows from what it shows."""
    options.refuse("height", "columns", "labels")
    by = min(TICK / SIZE, (options.width - 2 * MARGIN) / drawn.width)
    least = options.width if options.exact else 0.0
    return framed(scaled(drawn, by), title=options.title_or(title), note=note, width=least)


def fitted(drawn: Callable[[float], Drawing], title: str) -> str:
    """A picture for a page: drawn for a screen, and again for a phone if it is too wide for that."""
    wide = drawn(WIDE)
    both = [wide] if wide.width <= NARROW else [wide, drawn(NARROW)]
    inside = "".join(f'<div class="tlhm-over">{drawing.svg(title=title)}</div>' for drawing in both)
    return f'<div class="tlhm-fit">{inside}</div>'
