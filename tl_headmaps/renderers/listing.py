"""Text and tables as figures, for results that are read rather than looked at."""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .figure import Figure
from .page import figure_body, table
from .text import table_text, visible


@dataclass(frozen=True)
class Listing:
    """Lines of text as they stand."""

    title: str
    text: str


def text_figure(text: str, *, title: str) -> Figure:
    """Text as it stands, in letters of one width."""
    lines = "\n".join(map(visible, text.splitlines()))
    body = figure_body("text", title, inside=f"<pre>{html.escape(lines)}</pre>")
    return Figure(title=visible(title), body=body, needs=(), text=lines, data=Listing(visible(title), lines))


def table_figure(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str,
    text: str | None = None,
    unbroken: bool = False,
) -> Figure:
    """A table; ``text`` is its printed form, if it has one. ``unbroken`` cells scroll instead of wrapping."""
    rows = [list(row) for row in rows]
    shown = text or table_text([(column, "left") for column in columns], rows)
    inside = table(columns, rows)
    if unbroken:
        inside = f'<div class="tlhm-unbroken">{inside}</div>'
    body = figure_body("text", title, inside=inside)
    return Figure(title=visible(title), body=body, needs=(), text=shown, data=Listing(visible(title), shown))
