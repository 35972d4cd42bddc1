"""Tables for papers: the same cells as text, Markdown, LaTeX and CSV."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.files import csv_text
from .text import latex, markdown, table_text, visible


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

    def latex(self) -> str:
        r"""A ``tabular`` with booktabs rules, for ``\input``."""
        sides = "".join("r" if side == "right" else "l" for _, side in self.columns)
        lines = [r"\begin{tabular}{" + sides + "}", r"\toprule"]
        lines.append(" & ".join(latex(title) for title, _ in self.columns) + r" \\")
        lines.append(r"\midrule")
        lines += [" & ".join(latex(cell) for cell in row) + r" \\" for row in self.rows]
        lines += [r"\bottomrule", r"\end{tabular}"]
        if self.note:
            lines.append("% " + visible(self.note))
        return "\n".join(lines) + "\n"
