"""Sheets of paper: how wide text is, lines that fit, and the frame of a printed figure (title above, caption below)."""

import re
from typing import Any
from unicodedata import east_asian_width

from .text import prose

INCHES = {"column": 3.4, "page": 7.0}
TALLEST = {"column": 8.0, "page": 9.0}
"""Most inches that a figure of maps takes, title and caption included, in a column and on a page."""

TICK_SIZE, TITLE_SIZE, CAPTION_SIZE = 7.0, 8.0, 6.0
LINE_INCHES = 0.12
"""Height of a line at the size of the ticks."""

_MARGIN = 0.12


def inches_of(text: str, size: float = TICK_SIZE) -> float:
    """About how wide a text is in print, rather too wide than too narrow."""
    return sum(map(_letter_inches, text)) * size / TICK_SIZE


def _letter_inches(letter: str) -> float:
    if ord(letter) > 0xFFFF:
        return 0.16
    if letter in "MWm@%—…" or east_asian_width(letter) in "WF":
        return 0.105
    if letter in "Iijl '|!.,:;frt()[]-/":
        return 0.035 if letter in "Iijl '|!.,:;" else 0.042
    return 0.08 if letter.isupper() or letter == "w" else 0.064


def lines_of(text: str, room: float, size: float = TICK_SIZE) -> list[str]:
    """A text in lines of at most ``room`` inches, broken at spaces and behind - _ and /, or else inside a long word.

    Example:
        >>> lines_of("Decision-making and math", 0.8)
        ['Decision-', 'making and', 'math']
    """
    lines = [""]
    for piece in re.findall(r"[^ \-_/]*[ \-_/]?", text)[:-1]:
        if inches_of((lines[-1] + piece).rstrip(), size) <= room:
            lines[-1] += piece
            continue
        if lines[-1]:
            lines.append("")
        for letter in piece:
            if lines[-1] and letter != " " and inches_of(lines[-1] + letter, size) > room:
                lines.append("")
            lines[-1] += letter
    return [line.rstrip(" ") for line in lines]


def line_height(size: float) -> float:
    """Inches from a line to the next."""
    return 1.25 * size / 72


def _framing(sheet: Any, title: str, note: str) -> tuple[list[str], list[str]]:
    """Lines of title and caption that fit the width of a sheet."""
    room = float(sheet.get_figwidth()) - _MARGIN
    return lines_of(title, room, TITLE_SIZE) if title else [], lines_of(prose(note), room, CAPTION_SIZE) if note else []


def frame_height(sheet: Any, *, title: str = "", note: str = "") -> float:
    """Inches that title and caption take of a sheet's height."""
    above, below = _framing(sheet, title, note)
    return len(above) * line_height(TITLE_SIZE) + len(below) * line_height(CAPTION_SIZE) + 0.1


def frame(sheet: Any, height: float, *, title: str = "", note: str = "") -> None:
    """Give a sheet (in constrained layout) its height, room for title and caption included, and write both."""
    above, below = _framing(sheet, title, note)
    sheet.set_figheight(height + frame_height(sheet, title=title, note=note))
    if above:
        sheet.suptitle("\n".join(above), fontsize=TITLE_SIZE)
    if below:
        place = {"x": _MARGIN / 2 / sheet.get_figwidth(), "ha": "left", "multialignment": "left"}
        sheet.supxlabel("\n".join(below), fontsize=CAPTION_SIZE, **place)
