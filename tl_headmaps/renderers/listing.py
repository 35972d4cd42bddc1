"""Text and tables as figures, for results that are read rather than looked at; and figures side by side."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .figure import Figure
from .layout import MARGIN, TICK, PrintOptions, framed, in_rows, line_height, written
from .page import escaped, figure_body, table
from .shapes import Drawing
from .tables import Table
from .text import visible

_MOST_LINES = 90
_MONO_LETTER = 0.61
"""Width of a monospaced letter, as a share of its size."""


@dataclass(frozen=True)
class Listing:
    """Preformatted lines of text."""

    title: str
    text: str

    def drawing(self, options: PrintOptions) -> Drawing:
        """The lines for print, as large as the width allows."""
        options.refuse("height", "columns", "labels")
        lines = self.text.splitlines()
        if len(lines) > _MOST_LINES:
            lines = [*lines[:_MOST_LINES], f"… and {len(lines) - _MOST_LINES:,} more lines"]
        longest = max(map(len, lines), default=1) or 1
        size = min(TICK, (options.width - 2 * MARGIN) / (_MONO_LETTER * longest))
        texts = written(lines, 2 * MARGIN, 2 * MARGIN, size, mono=True)
        width = options.width if options.exact else 4 * MARGIN + _MONO_LETTER * size * longest
        return Drawing([*texts], min(options.width, width), 4 * MARGIN + len(lines) * line_height(size))


@dataclass(frozen=True)
class SideBySide:
    """The plain values of several figures that are shown together."""

    title: str
    parts: tuple[Any, ...]

    def drawing(self, options: PrintOptions) -> Drawing:
        """All parts for print, beside each other where they fit."""
        options.refuse("height", "columns", "labels")
        listed = [isinstance(part, Listing) for part in self.parts]
        room = options.width / (1 if options.narrow or listed.count(False) < 2 else 2)
        widths = [options.width if is_listed else room for is_listed in listed]
        drawings = [part.drawing(PrintOptions(width)) for part, width in zip(self.parts, widths, strict=True)]
        least = options.width if options.exact else 0.0
        return framed(in_rows(drawings, options.width), title=options.title_or(self.title), width=least)


def beside(figures: Sequence[Figure], *, title: str, text: str) -> Figure:
    """Several figures as one, side by side where there is room; ``text`` is what they say together."""
    inside = f'<div class="tlhm-row">{"".join(figure.body for figure in figures)}</div>'
    return Figure(
        title=visible(title),
        body=figure_body("row", title, inside=inside),
        needs=_needs(figures),
        text=text,
        data=SideBySide(visible(title), tuple(figure.data for figure in figures)),
    )


def text_figure(text: str, *, title: str) -> Figure:
    """Preformatted text in a monospaced font."""
    lines = "\n".join(map(visible, text.splitlines()))
    body = figure_body("text", title, inside=f"<pre>{html.escape(lines)}</pre>")
    return Figure(title=visible(title), body=body, needs=(), text=lines, data=Listing(visible(title), lines))


def table_figure(*tables: Table, title: str, text: str = "", unbroken: bool = True) -> Figure:
    """Tables below each other, whose cells do not wrap if they are ``unbroken``; ``text`` is their printed form.

    The note of a table is its caption, or stands under the only one; without rows it is all there is.
    """
    inside = "".join(
        table([name for name, _ in each.columns], each.rows, each.note if len(tables) > 1 else "")
        if each.rows
        else f"<p>{escaped(each.note)}</p>"
        for each in tables
    )
    if unbroken:
        inside = f'<div class="tlhm-unbroken">{inside}</div>'
    note = tables[0].note if len(tables) == 1 and tables[0].rows else ""
    text = text or "\n\n".join(each.text() if each.rows else each.note for each in tables)
    body = figure_body("text", title, inside=inside, note=note)
    return Figure(title=visible(title), body=body, needs=(), text=text, data=Listing(visible(title), text))


def stacked(figures: Sequence[Figure], *, title: str, text: str) -> Figure:
    """Several figures as one, below each other; in print it is the text."""
    return Figure(
        title=visible(title),
        body="\n".join(figure.body for figure in figures),
        needs=_needs(figures),
        text=text,
        data=Listing(visible(title), text),
    )


def _needs(figures: Sequence[Figure]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(need for figure in figures for need in figure.needs))
