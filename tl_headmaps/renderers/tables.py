"""Tables for papers: the same cells as text, Markdown, LaTeX and CSV."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import UsageError
from ..core.files import csv_text
from ..core.types import HeadIndex
from .formulas import DIGITS, decimal_parts
from .text import in_words, latex, markdown, table_text, visible


@dataclass(frozen=True)
class Table:
    """Cells as they are printed; columns are (title, "left" or "right"), ``note`` is printed below."""

    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def text(self) -> str:
        """Aligned text for a terminal."""
        return table_text(self.columns, self.rows) + (f"\n\n{self.note}" if self.note else "")

    def csv(self) -> str:
        """CSV with a header (RFC 4180), safe to open in a spreadsheet."""
        return csv_text([title for title, _ in self.columns], self.rows)

    def markdown(self) -> str:
        """A Markdown table; every character of a cell is shown as it is."""
        lines = [[markdown(title) for title, _ in self.columns]]
        lines.append(["---:" if side == "right" else "---" for _, side in self.columns])
        lines += [[markdown(cell) for cell in row] for row in self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{table}\n" + (f"\n{markdown(self.note)}\n" if self.note else "")

    def latex(self, caption: str | None = None, label: str = "") -> str:
        r"""A ``tabular`` with booktabs rules, for ``\input``; with a caption, a ``table`` around it."""
        sides = "".join("r" if side == "right" else "l" for _, side in self.columns)
        lines = [r"\begin{tabular}{" + sides + "}", r"\toprule"]
        lines.append(" & ".join(_latex_cell(title) for title, _ in self.columns) + r" \\")
        lines.append(r"\midrule")
        lines += [" & ".join(map(_latex_cell, row)) + r" \\" for row in self.rows]
        lines += [r"\bottomrule", r"\end{tabular}"]
        if any(ord(character) > _LAST_LATIN for line in lines for character in line):
            lines.append("% Letters beyond Latin: compile with LuaLaTeX or XeLaTeX and a font that has them")
        if self.note:
            lines.append("% " + visible(self.note))
        if caption is not None:
            above = [r"\begin{table}[t]", r"\centering", rf"\caption{{{latex(caption)}}}", rf"\label{{tab:{label}}}"]
            lines = [*above, *lines, r"\end{table}"]
        return "\n".join(lines) + "\n"


_LAST_LATIN = 0x17F
"""The last letter that pdflatex has without further packages."""

_LEAST_P = 1e-9
"""Smaller probabilities are not told apart: rounding and the model of chance do not carry that far."""

_TITLES = {"promote": "score", "null_mean": "null", "p_value": "p", "q_value": "q"}
"""Columns that the texts of results call otherwise than their fields."""

_NAMES = ("relation", "score", "function")
"""Columns of names, which a paper has in words."""


class Tex(str):
    """A cell that is LaTeX already, and is not escaped again."""


def _latex_cell(cell: object) -> str:
    """A cell as LaTeX shows it; a bracket or star at the start of a row would belong to the end of the row before."""
    text = str(cell) if isinstance(cell, Tex) else latex(cell)
    return f"{{{text}}}" if text.startswith(("[", "*")) else text


def paper_table(
    records: Sequence[Mapping[str, Any]],
    *,
    columns: Sequence[str] = (),
    by: str | None = None,
    n: int | None = None,
    digits: int = DIGITS,
) -> Table:
    """Flat records as a table for a paper: heads by their names, ends of intervals in one column, significant digits.

    Args:
        records: Rows as a result lists them, all with the same keys.
        columns: Keys to show; by default all that are not the same (or missing) in every row.
        by: Key to order rows by, largest absolute value first; by default the first number, if rows are left out.
        n: At most this many rows; where rows are left out without ``by``, so are those of 0.
        digits: Significant digits of numbers.
    """
    rows = [_with_head(record) for record in records]
    if not rows:
        raise UsageError("This result has no rows, so there is no table of it.")
    known = list(rows[0])
    for name in (*columns, *([] if by is None else [by])):
        if name not in known:
            raise UsageError(f"This result has no column {name!r:.80}; it has {', '.join(known)}.")
    n_all = len(rows)
    key = by or next((name for name in known if any(isinstance(row[name], float) for row in rows)), None)
    if key is not None and (by is not None or (n is not None and n < n_all)):
        rows = sorted(rows, key=lambda row: -_size(row[key]))
    shown = list(columns) or [name for name in known if n_all == 1 or _tells(row[name] for row in rows)] or known
    rows = rows[:n]
    if by is None and key is not None and len(rows) < n_all:
        rows = [row for row in rows if _size(row[key]) > 0] or rows
    parts = [] if len(rows) == n_all else [f"{len(rows)} of {n_all:,} rows, by {key or 'their order'}"]
    if not columns:
        parts += [f"{in_words(name)}: {rows[0][name]}" for name in known if name not in shown and _said(rows[0][name])]
    titles: list[tuple[str, str]] = []
    cells: list[list[Any]] = [[] for _ in rows]
    for name in shown:
        stem = name.removesuffix("_low")
        if name.endswith("_high") and f"{name.removesuffix('_high')}_low" in shown:
            continue
        if name.endswith("_low") and f"{stem}_high" in shown:
            titles.append(("95% interval" if stem == "interval" else f"{in_words(stem)}, low to high", "right"))
            for line, row in zip(cells, rows, strict=True):
                line.append(_interval(row[name], row[f"{stem}_high"], digits))
            continue
        numbers = all(isinstance(row[name], float | int | None) and not isinstance(row[name], bool) for row in rows)
        titles.append((_TITLES.get(name, in_words(name)), "right" if numbers else "left"))
        for line, row in zip(cells, rows, strict=True):
            line.append(_named_cell(name, row[name], digits))
    return Table(titles, cells, "; ".join(parts))


def _with_head(record: Mapping[str, Any]) -> dict[str, Any]:
    """Layer and number of a head as its name, in the place of the layer."""
    if not (isinstance(record.get("layer"), int) and isinstance(record.get("head"), int)):
        return dict(record)
    named = str(HeadIndex(record["layer"], record["head"]))
    return {
        ("head" if name == "layer" else name): named if name == "layer" else value
        for name, value in record.items()
        if name != "head"
    }


def _size(value: Any) -> float:
    return float(abs(value)) if isinstance(value, float | int) and not math.isnan(value) else -1.0


def _said(value: Any) -> bool:
    return not (value is None or value == "" or (isinstance(value, float) and math.isnan(value)))


def _tells(values: Iterable[Any]) -> bool:
    """Whether a column tells rows apart."""
    return len({repr(value) for value in values}) > 1


def _named_cell(name: str, value: Any, digits: int) -> Any:
    """A cell of a column: names in words, and no probability said to be zero."""
    if name in _NAMES and isinstance(value, str):
        return in_words(value)
    if name.endswith(("p_value", "q_value")) and isinstance(value, float) and value < _LEAST_P:
        return Tex("$< 10^{-9}$")
    return _cell(value, digits)


def _cell(value: Any, digits: int) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(value, digits)
    if isinstance(value, int):
        return Tex(f"${value}$") if value < 0 else f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else value


def _number(value: float, digits: int) -> Tex:
    """A number with its significant digits, in mathematics where it has a sign or a power of ten."""
    if not math.isfinite(value):
        return Tex("--" if math.isnan(value) else r"$\infty$" if value > 0 else r"$-\infty$")
    written, power = decimal_parts(abs(value), digits, zeros=True)
    sign = "-" if value < 0 and written != "0" else ""
    if power:
        return Tex(rf"${sign}{written} \times 10^{{{power}}}$")
    return Tex(f"${sign}{written}$" if sign else written)


def _interval(low: Any, high: Any, digits: int) -> Tex:
    ends = [_cell(end, digits) for end in (low, high)]
    return Tex("--") if "--" in ends else Tex(" to ".join(map(_latex_cell, ends)))
