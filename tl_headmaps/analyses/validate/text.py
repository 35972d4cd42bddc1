"""Checks of static scores by the running model, as text."""

import math
from typing import TYPE_CHECKING

from ...renderers.tables import Table
from ...renderers.text import table_text, visible
from ..reproduce.result import PUBLISHED_AGREEMENT, PUBLISHED_DROPS

if TYPE_CHECKING:
    from ..ablate.result import AblationCurves
    from ..reproduce.result import Reproduction
    from .result import Validation


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


def ablation_curves_text(result: "AblationCurves") -> str:
    """Accuracy step by step: the relation, random heads, other relations."""
    options = result.provenance.options
    title = (
        f"{result.relation}: {result.n_pairs} pairs, {visible(result.template)!r}, "
        f"heads by preset {options['preset']}, {options['method']} ablation"
    )
    base = f"accuracy {result.base_accuracy:.2f} before"
    if result.status == "not testable":
        return f"{title}\n\nnot testable: {base}, below 0.1; the model does not know enough of this relation to lose it"
    if result.status == "no heads":
        return f"{title}\n\nno head scores above 0 on this relation, so there is nothing to ablate ({base})"
    rows = []
    for step, accuracy in enumerate(result.curve.accuracy.tolist()):
        spread = [float(curve.accuracy[step]) for curve in result.random_curves]
        cells = [step, str(result.heads[step - 1]) if step else "", number(result.scores[step - 1]) if step else ""]
        cells += [f"{accuracy:.2f}", interval(float(result.curve.low[step]), float(result.curve.high[step]))]
        cells.append(f"{min(spread):.2f} to {max(spread):.2f}" if spread else "-")
        cells += [f"{float(control.curve.accuracy[step]):.2f}" for control in result.controls]
        rows.append(cells)
    titles = ["off", "head", "score", "accuracy", "95%", f"{len(result.random_curves)} random"]
    titles += [control.relation for control in result.controls]
    columns = [(title, "left" if title == "head" else "right") for title in titles]
    lost = f"relative drop: relation {percent(result.curve.drop)}, random heads {percent(result.random_drop)}"
    if result.controls:
        lost += f", control relations {percent(result.control_drop)}"
    elif options.get("controls") == "auto":
        lost += "; no relation with other heads has a similar accuracy, so there is no control"
    note = "off: heads switched off so far at the last position; random: other heads, one draw per seed"
    return f"{title}\n\n{table_text(columns, rows)}\n\n{lost}\n{note}"


def percent(share: float | None) -> str:
    """A share in per cent, or a dash."""
    return "-" if share is None or math.isnan(share) else f"{100 * share:.0f}%"


def agreement_table(result: "Reproduction") -> Table:
    """Agreement of static and dynamic scores by relation, the mean and the published means below."""
    rows: list[list[object]] = [
        [row.relation, row.n_pairs, number(row.pearson_without), number(row.pearson_with)] for row in result.rows
    ]
    means = (result.mean("pearson_without"), result.mean("pearson_with"))
    rows.append([f"mean, {result.provenance.model}", "", *map(number, means)])
    rows += [[f"published mean, {name}", "", *map(number, values)] for name, values in PUBLISHED_AGREEMENT.items()]
    columns = [("relation", "left"), ("pairs", "right"), ("without context", "right"), ("with context", "right")]
    return Table(columns, rows, "Pearson correlation of static and dynamic scores over heads x templates")


def drops_table(result: "Reproduction") -> Table:
    """Accuracy before and after switching off heads by relation, the mean and the published means below."""
    rows: list[list[object]] = []
    for row in result.rows:
        if row.status != "tested":
            rows.append([row.relation, "", number(row.base_accuracy), row.status, "", "", "", ""])
            continue
        values = (row.base_accuracy, row.final_accuracy, row.random_accuracy)
        drops = (percent(share) for share in (row.drop, row.random_drop, row.control_drop))
        rows.append([row.relation, row.n_heads, *map(number, values), *drops])
    drops = (percent(result.mean(name)) for name in ("drop", "random_drop", "control_drop"))
    rows.append([f"mean, {result.provenance.model}", "", "", "", "", *drops])
    rows += [
        [f"published mean, {name}", "", "", "", "", *map(percent, values), "-"]
        for name, values in PUBLISHED_DROPS.items()
    ]
    titles = ("relation", "heads off", "before", "after", "random", "drop", "drop, random", "drop, controls")
    columns = [(title, "left" if title == "relation" else "right") for title in titles]
    return Table(columns, rows, "next-token accuracy; drop: share of the accuracy lost")


def reproduction_text(result: "Reproduction") -> str:
    """Both tables."""
    return (
        f"Static scores and the running model: {result.experiment}, {result.provenance.model}\n\n"
        f"{agreement_table(result).text()}\n\n"
        f"Heads switched off\n\n{drops_table(result).text()}"
    )
