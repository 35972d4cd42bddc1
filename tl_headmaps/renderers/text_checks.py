"""Checks of static scores by the running model, as text."""

import math
from typing import TYPE_CHECKING

from .text import table_text, visible

if TYPE_CHECKING:
    from ..results.validation import Validation


def number(value: float | None, digits: int = 2) -> str:
    """A value with so many digits, or a dash where there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def interval(low: float, high: float) -> str:
    """``0.78-0.91``, or a dash."""
    return "-" if math.isnan(low) or math.isnan(high) else f"{low:.2f} to {high:.2f}"


def validation_text(result: "Validation") -> str:
    """The agreement table, the mean over relations in its last row."""
    table = result.agreement
    shown = ("pearson_without", "spearman_without", "pearson_with", "spearman_with")
    rows = []
    for place, name in enumerate(result.relations):
        cells = [name, result.n_dynamic[place], result.k[place]]
        for column in shown:
            cells.append(number(table[column][place]))
            if column.startswith("pearson"):
                cells.append(interval(table[f"{column}_low"][place], table[f"{column}_high"][place]))
        rows.append(cells)
    if len(result.relations) > 1:
        mean: list[object] = ["mean", "", ""]
        for column in shown:
            mean += [number(result.mean(column)), *([""] if column.startswith("pearson") else [])]
        rows.append(mean)
    titles = ["relation", "pairs", "k", "without", "95%", "Spearman", "with", "95%", "Spearman"]
    columns = [(title, "left" if title == "relation" else "right") for title in titles]
    options = result.provenance.options
    title = f"Static against dynamic scores, preset {options['preset']}, {len(result.templates)} templates"
    note = (
        "agreement of static and dynamic scores over heads x templates (Pearson, interval over pairs; Spearman);\n"
        "without: the last position attends to the source alone; with: what the head really writes there"
    )
    templates = "\n".join(f"  {visible(template)}" for template in result.templates)
    return f"{title}\n\n{table_text(columns, rows)}\n\n{note}\ntemplates:\n{templates}"
