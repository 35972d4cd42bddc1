"""A computation step by step: sentences, formulas and matrices with their numbers.

>>> values = ExampleMatrix("V", [[0.1, 0.2], [-0.8, 0.3]], rows=["Birds", "walk"])
>>> worked_example([ExampleStep("Each token has a value", [values])])
Figure('Worked example', Example, 1 KB)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import UsageError
from .colours import Scale, text_on
from .figure import Figure
from .grids import checked
from .page import escaped, figure_body, label
from .text import significant, table_text, true_minus, visible

MAX_SIDE = 24


@dataclass(frozen=True)
class ExampleMatrix:
    """A small named matrix, with labels of its rows and columns if they have any."""

    name: str
    values: Any
    rows: Sequence[object] | None = None
    columns: Sequence[object] | None = None


@dataclass(frozen=True)
class ExampleStep:
    """One step: what happens, the matrices involved, and the formula with its numbers (as text)."""

    text: str
    matrices: Sequence[ExampleMatrix] = ()
    formula: str = ""


@dataclass(frozen=True)
class Example:
    """All steps, checked, with one colour scale."""

    title: str
    steps: tuple[ExampleStep, ...]
    scale: Scale
    note: str = ""


def worked_example(
    steps: Sequence[ExampleStep], *, title: str = "Worked example", unit: str = "", note: str = ""
) -> Figure:
    """Steps under each other; all matrices share one colour scale, centred on zero if any value is negative."""
    if not steps:
        raise UsageError("There is nothing to draw: give at least one ExampleStep.")
    kept = tuple(
        ExampleStep(
            visible(step.text), tuple(map(_checked, step.matrices)), "\n".join(map(visible, step.formula.splitlines()))
        )
        for step in steps
    )
    scale = Scale.over([matrix.values for step in kept for matrix in step.matrices], unit=unit)
    title = visible(title)
    example = Example(title, kept, scale, note)
    text = _words(example)
    inside = '<ol class="tlhm-steps">' + "".join(_step(step, scale) for step in kept) + "</ol>"
    body = figure_body("example", title, inside=inside, note=note)
    return Figure(title=visible(title), body=body, needs=(), text=text, data=example)


def _checked(matrix: ExampleMatrix) -> ExampleMatrix:
    values, _ = checked(
        np.atleast_2d(matrix.values) if not hasattr(matrix.values, "detach") else matrix.values, matrix.name
    )
    if max(values.shape) > MAX_SIDE:
        raise UsageError(
            f"{matrix.name} has shape {values.shape}; a worked example shows up to {MAX_SIDE} rows and columns. "
            "Choose some of them."
        )
    for labels, n in ((matrix.rows, values.shape[0]), (matrix.columns, values.shape[1])):
        if labels is not None and len(labels) != n:
            raise UsageError(f"{len(labels)} labels were given for {n} rows or columns of {matrix.name}.")
    rows, columns = (None if labels is None else tuple(map(label, labels)) for labels in (matrix.rows, matrix.columns))
    return ExampleMatrix(visible(matrix.name), values, rows, columns)


def _step(step: ExampleStep, scale: Scale) -> str:
    matrices = "".join(_matrix(matrix, scale) for matrix in step.matrices)
    lines = "<br>".join(map(escaped, step.formula.splitlines()))
    formula = f'<div class="tlhm-formula">{lines}</div>' if lines else ""
    row = f'<div class="tlhm-row">{matrices}</div>' if matrices else ""
    return f"<li>{escaped(step.text)}{row}{formula}</li>"


def _matrix(matrix: ExampleMatrix, scale: Scale) -> str:
    head = ""
    if matrix.columns is not None:
        cells = "".join(f'<th scope="col">{escaped(name)}</th>' for name in matrix.columns)
        head = f"<thead><tr>{'<th></th>' if matrix.rows is not None else ''}{cells}</tr></thead>"
    body = ""
    for number, row in enumerate(matrix.values):
        body += "<tr>"
        if matrix.rows is not None:
            body += f'<th scope="row">{escaped(matrix.rows[number])}</th>'
        body += "".join(_cell(float(value), scale) for value in row) + "</tr>"
    table = f"<table><caption>{escaped(matrix.name)}</caption>{head}<tbody>{body}</tbody></table>"
    return f'<div class="tlhm-matrix">{table}</div>'


def _cell(value: float, scale: Scale) -> str:
    if np.isnan(value):
        return f"<td>{cell_text(value)}</td>"
    colour = scale.colour(value)
    return f'<td style="background:{colour};color:{text_on(colour)}">{cell_text(value)}</td>'


def cell_text(value: float) -> str:
    """What the cell of a matrix shows."""
    return "missing" if np.isnan(value) else true_minus(significant(value, 5))


def _words(example: Example) -> str:
    lines = [example.title]
    for number, step in enumerate(example.steps, 1):
        lines.append(f"\n{number}. {step.text}")
        for matrix in step.matrices:
            names = matrix.columns or [str(number) for number in range(matrix.values.shape[1])]
            columns = [("", "left"), *((str(name), "right") for name in names)]
            rows = [
                [matrix.rows[i] if matrix.rows else i, *(cell_text(float(value)) for value in row)]
                for i, row in enumerate(matrix.values)
            ]
            lines.append(f"\n{matrix.name}\n{table_text(columns, rows)}")
        if step.formula:
            lines.append(step.formula)
    return "\n".join(lines)
