"""Where parts of a figure stand: lines that fit, drawings below and beside each other, and what is asked for in print.

Sizes are pixels of a page, and points (1/72 inch) in print.

>>> box = Drawing([], 30, 9)
>>> whole = stacked([in_rows([box, box, box], 70, 5), box], gap=5)
>>> whole.width, whole.height
(65, 37)
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias
from unicodedata import combining, east_asian_width

from ..core.errors import UsageError
from .shapes import Cells, Drawing, Group, Number, Path, Shape, Text
from .text import in_words, prose, visible

Labels: TypeAlias = Mapping[str, str] | Sequence[str]
"""Other names of maps or lines in print: a list in their order, or a dictionary from old names to new ones."""

COLUMN, PAGE = 3.4, 7.0
"""Inches of a column of two, and of a whole page."""

TICK, TITLE, CAPTION = 7.0, 8.0, 6.0
"""Sizes of letters in print."""

SIZE = 13.0
"""Letters on a page."""

WIDE, NARROW, _SLIM = 720.0, 340.0, 480.0
"""Widths, on a page, of pictures that have one arrangement for screens and another for phones; what shrinks before."""

MARGIN = 4.0


def width_of(text: str, size: Number = TICK) -> float:
    """About how wide a text is in print, rather too wide than too narrow."""
    return sum(map(_letter_width, text)) * size


def _letter_width(letter: str) -> float:
    """As a share of the size of the letters."""
    if combining(letter):
        return 0.0
    if ord(letter) > 0xFFFF:
        return 1.65
    if letter in "MWm@%—…" or east_asian_width(letter) in "WF":
        return 1.08
    if letter in "Iijl '|!.,:;":
        return 0.36
    if letter in "frt()[]-/₀₁₂₃₄₅₆₇₈₉":
        return 0.43
    return 0.82 if letter.isupper() or letter == "w" else 0.66


def lines_of(text: str, room: Number, size: Number = TICK) -> list[str]:
    """A text in lines of at most ``room`` points, broken at spaces and behind - _ and /, or else inside a long word.

    Example:
        >>> lines_of("Decision-making and math", 57)
        ['Decision-', 'making and', 'math']
    """
    lines = [""]
    for piece in re.findall(r"[^ \-_/]*[ \-_/]?", text)[:-1]:
        if width_of((lines[-1] + piece).rstrip(), size) <= room:
            lines[-1] += piece
            continue
        if lines[-1]:
            lines.append("")
        for letter in piece:
            if lines[-1] and letter != " " and width_of(lines[-1] + letter, size) > room:
                lines.append("")
            lines[-1] += letter
    return [line.rstrip(" ") for line in lines]


def shortened(text: str, room: Number, size: Number = TICK) -> str:
    """A text cut off where it is wider than ``room``.

    >>> shortened("a rather long label", 60)
    'a rather long …'
    """
    if width_of(text, size) <= room:
        return text
    while text and width_of(text + "…", size) > room:
        text = text[:-1]
    return text + "…"


def line_height(size: Number) -> float:
    """From a line to the next."""
    return 1.25 * size


def written(lines: Sequence[str], x: Number, y: Number, size: Number, **style: object) -> list[Text]:
    """Lines of text below each other, the first with its upper edge at ``y``."""
    return [
        Text(x, y + size + number * line_height(size), text, size, **style)  # type: ignore[arg-type]
        for number, text in enumerate(lines)
    ]


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


@dataclass(frozen=True)
class PrintOptions:
    """What a caller wants in print; see :meth:`Figure.save`. The plain values of a figure have ``drawing(options)``.

    Attributes:
        width: Points there are at most.
        height: Points there are to be, title and caption included; None for what the figure needs.
        columns, rows: How maps are arranged.
        title: Another title, or none if it is empty.
        labels: Other names of maps or lines.
        exact: Whether the sheet is as wide as that, also where less would do.
    """

    width: Number = 72 * PAGE
    height: Number | None = None
    columns: int | None = None
    rows: int | None = None
    title: str | None = None
    labels: Labels | None = None
    exact: bool = False

    @property
    def narrow(self) -> bool:
        """Whether this is a column rather than a page."""
        return self.width <= 72 * 5

    def title_or(self, title: str) -> str:
        """The title that is asked for, or else this one."""
        return title if self.title is None else self.title

    def refuse(self, *names: str) -> None:
        """Raise if one of these was given, for a figure that has no use for it: height, columns (and rows), labels."""
        if "height" in names and self.height is not None:
            raise UsageError(
                f"height={self.height / 72:g} was given, but the height of this figure follows from what it shows. "
                "Leave height out, or choose another width."
            )
        if "columns" in names and (self.columns, self.rows) != (None, None):
            raise UsageError(
                "columns= and rows= arrange the maps of a figure, and this one has no maps. Leave them out."
            )
        if "labels" in names and self.labels is not None:
            raise UsageError("labels= names the maps or lines of a figure, and this one has neither. Leave it out.")


class Naming:
    """Names of maps or lines for readers, and what a caller calls axes and units."""

    def __init__(self, names: Sequence[str], labels: Labels | None, others: Sequence[str]) -> None:
        self.mapping: dict[str, str] = {}
        if isinstance(labels, Mapping):
            # Names as the result has them, or as they are shown: country_to_capital, country to capital.
            shown = {in_words(name): name for name in (*names, *others)}
            old = {
                str(name): str(name) if name in names else shown.get(in_words(str(name)), str(name)) for name in labels
            }
            self.mapping = {old[str(name)]: visible(str(label)) for name, label in labels.items()}
            unknown = [name for name in self.mapping if name not in (*names, *others)]
            if unknown:
                known = ", ".join(repr(name) for name in dict.fromkeys((*names, *others)) if name)
                raise UsageError(f"labels= has {unknown[0]!r:.80}, which this figure does not show. It shows {known}.")
        elif labels is not None and (isinstance(labels, str) or len(labels) != len(names)):
            n = 1 if isinstance(labels, str) else len(labels)
            raise UsageError(
                f"labels= has {n} name{'' if n == 1 else 's'} for {len(names)} maps or lines. "
                "Give one for each, in their order, or a dictionary from the old names to the new."
            )
        elif labels is not None:
            self.names = [visible(str(label)) for label in labels]
            return
        self.names = [self.mapping.get(name, in_words(name)) for name in names]

    def other(self, name: str) -> str:
        """What a caller calls an axis or a unit."""
        return self.mapping.get(name, name)


def frame_height(width: Number, *, title: str = "", note: str = "") -> float:
    """What title and caption add to the height of a drawing."""
    above, below = _framing(width, title, note)
    return len(above) * line_height(TITLE) + len(below) * line_height(CAPTION) + (4 if below else 3) * MARGIN


def framed(drawing: Drawing, *, title: str = "", note: str = "", width: Number = 0.0) -> Drawing:
    """A drawing in the middle of a sheet, at least ``width`` wide, with a title above and a caption below."""
    wide = max(width, drawing.width + 2 * MARGIN)
    above, below = _framing(wide, title, note)
    top = MARGIN + len(above) * line_height(TITLE) + (MARGIN if above else 0.0)
    sheet = Drawing([], wide, frame_height(wide, title=title, note=note) + drawing.height)
    sheet.add(*written(above, wide / 2, MARGIN, TITLE, anchor="middle"))
    sheet.add(drawing.at((wide - drawing.width) / 2, top))
    sheet.add(*written(below, MARGIN, top + drawing.height + MARGIN, CAPTION, fill="soft"))
    return sheet


def _framing(width: Number, title: str, note: str) -> tuple[list[str], list[str]]:
    """Lines of title and caption that fit a width."""
    room = width - 2 * MARGIN
    return lines_of(title, room, TITLE) if title else [], lines_of(prose(note), room, CAPTION) if note else []


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
    slim = " tlhm-slim" if wide.width <= _SLIM else ""
    return f'<div class="tlhm-fit{slim}">{inside}</div>'
