"""A computation step by step: one list of steps with matrices and equations, in five forms.

:class:`Example` writes its steps as text, Markdown and LaTeX; :func:`worked_example` draws them as a figure, whose
page has MathML and whose printed form Unicode. No form has lines that another lacks.

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
from .formulas import (
    DIGITS,
    LATEX,
    MARKDOWN,
    MATHML,
    TEXT,
    UNICODE,
    Equation,
    LatexNotation,
    MathNotation,
    Notation,
    Sentence,
    Term,
)
from .grids import checked
from .page import escaped, figure_body, label
from .text import latex, markdown, table_text, visible

MAX_SIDE = 24
_MANY_COLUMNS = 10
"""Wider matrices have smaller numbers."""

_TEXT_ROOM = 96
_NEARLY = 1e-4
"""Cells below this share of the largest are written as nearly zero."""


@dataclass(frozen=True)
class ExampleMatrix:
    """A small named matrix with a colour scale of its own.

    Attributes:
        name: What it is called.
        values: Its numbers.
        rows, columns: Labels, if they have any.
        marked: The row that the computation uses, if it is one of several.
        note: What is left out, for instance.
    """

    name: Term
    values: Any
    rows: Sequence[object] | None = None
    columns: Sequence[object] | None = None
    marked: int | None = None
    note: str = ""

    @property
    def scale(self) -> Scale:
        """Colours of this matrix, centred on zero if any value is negative."""
        return Scale.over([self.values])

    def number(self, value: float, write: Notation) -> str:
        """A cell; what is nothing beside the largest entry is said to be so."""
        if np.isnan(value):
            return write.words("missing")
        nearly = 0 < abs(value) < _NEARLY * float(np.nanmax(np.abs(self.values)))
        return write.nearly_nothing if nearly else write.number(value)

    def caption(self, write: Notation) -> str:
        """Name and note."""
        return write.term(self.name) + (f" {write.words(f'({self.note})')}" if self.note else "")


@dataclass(frozen=True)
class ExampleStep:
    """One step: what happens, the matrices involved, and the equations with their numbers."""

    text: str
    matrices: Sequence[ExampleMatrix] = ()
    equations: Sequence[Equation] = ()


@dataclass(frozen=True)
class Example:
    """All steps, checked, what they come to, and what to keep in mind."""

    title: str
    steps: tuple[ExampleStep, ...]
    summary: tuple[Sentence, ...] = ()
    notes: tuple[str, ...] = ()
    digits: int = DIGITS

    def text(self) -> str:
        """The steps for a terminal."""
        write = TEXT.with_digits(self.digits)
        parts = [self.title]
        for number, step in enumerate(self.steps, 1):
            lines = [f"{number}. {step.text}", *(_as_table(matrix, write) for matrix in step.matrices)]
            lines += [write.equation(each, _TEXT_ROOM, "  ") for each in step.equations]
            parts.append("\n".join(lines))
        closing = "\n".join(self.closing(write))
        return "\n\n".join([*parts, *([closing] if closing else [])])

    def markdown(self) -> str:
        """The steps as Markdown with formulas between dollar signs."""
        write = MARKDOWN.with_digits(self.digits)
        parts = [f"### {markdown(self.title)}"]
        for number, step in enumerate(self.steps, 1):
            parts += [f"{number}\\. {markdown(step.text)}", *(f"$${block}$$" for block in _latex_blocks(step, write))]
        parts += [f"* {line}" for line in self.closing(write)]
        return "\n\n".join(parts) + "\n"

    def latex(self) -> str:
        """The steps as LaTeX (amsmath)."""
        write = LATEX.with_digits(self.digits)
        parts = [rf"\textbf{{{latex(self.title)}}}"]
        for number, step in enumerate(self.steps, 1):
            parts += [f"{number}. {latex(step.text)}", *(rf"\[{block}\]" for block in _latex_blocks(step, write))]
        return "\n\n".join([*parts, *self.closing(write)]) + "\n"

    def closing(self, write: Notation) -> list[str]:
        """What the steps come to, and the notes."""
        return [write.sentence(line) for line in (*self.summary, *(f"note: {note}" for note in self.notes))]


def worked_example(
    steps: Sequence[ExampleStep],
    *,
    title: str = "Worked example",
    summary: Sequence[Sentence] = (),
    notes: Sequence[str] = (),
    digits: int = DIGITS,
) -> Figure:
    """Steps under each other, then what they come to and what to keep in mind; each matrix has its own colours."""
    if not steps:
        raise UsageError("There is nothing to draw: give at least one ExampleStep.")
    kept = tuple(
        ExampleStep(visible(step.text), tuple(map(_checked, step.matrices)), tuple(step.equations)) for step in steps
    )
    example = Example(visible(title), kept, tuple(summary), tuple(map(visible, notes)), digits)
    mathml, unicode = MATHML.with_digits(digits), UNICODE.with_digits(digits)
    inside = '<ol class="tlhm-steps">' + "".join(_step(step, mathml, unicode) for step in kept) + "</ol>"
    inside += "".join(f"<div>{escaped(unicode.sentence(line))}</div>" for line in example.summary)
    body = figure_body("example", example.title, inside=inside, note=" ".join(example.notes))
    return Figure(title=example.title, body=body, needs=(), text=example.text(), data=example)


def _checked(matrix: ExampleMatrix) -> ExampleMatrix:
    name = TEXT.term(matrix.name)
    values, _ = checked(np.atleast_2d(matrix.values) if not hasattr(matrix.values, "detach") else matrix.values, name)
    if max(values.shape) > MAX_SIDE:
        raise UsageError(
            f"{name} has shape {values.shape}; a worked example shows up to {MAX_SIDE} rows and columns. "
            "Choose some of them."
        )
    for labels, n in ((matrix.rows, values.shape[0]), (matrix.columns, values.shape[1])):
        if labels is not None and len(labels) != n:
            raise UsageError(f"{len(labels)} labels were given for {n} rows or columns of {name}.")
    rows, columns = (None if labels is None else tuple(map(label, labels)) for labels in (matrix.rows, matrix.columns))
    return ExampleMatrix(matrix.name, values, rows, columns, matrix.marked, visible(matrix.note))


def _as_table(matrix: ExampleMatrix, write: Notation) -> str:
    names = matrix.columns or range(1, matrix.values.shape[1] + 1)
    rows = [
        [matrix.rows[i] if matrix.rows else i + 1, *(matrix.number(float(value), write) for value in row)]
        for i, row in enumerate(matrix.values)
    ]
    return f"\n{matrix.caption(write)}\n{table_text([('', 'left'), *((str(name), 'right') for name in names)], rows)}"


def _latex_blocks(step: ExampleStep, write: LatexNotation) -> list[str]:
    blocks = [_latex_matrix(matrix, write) for matrix in step.matrices]
    return [*blocks, *([write.aligned(step.equations)] if step.equations else [])]


def _latex_matrix(matrix: ExampleMatrix, write: LatexNotation) -> str:
    lines = [[matrix.number(float(value), write) for value in row] for row in matrix.values]
    if matrix.rows is not None:
        lines = [[LATEX.words(str(name)), *line] for name, line in zip(matrix.rows, lines, strict=True)]
    if matrix.columns is not None:
        names = [LATEX.words(str(name)) for name in matrix.columns]
        lines.insert(0, [*([""] if matrix.rows is not None else []), *names])
    sides = ("l|" if matrix.rows is not None else "") + "r" * matrix.values.shape[1]
    table = " \\\\\n".join(" & ".join(line) for line in lines)
    return rf"{LATEX.term(matrix.name)} = \begin{{array}}{{{sides}}} {table} \end{{array}}" + (
        rf"\quad {LATEX.words(f'({matrix.note})')}" if matrix.note else ""
    )


def _step(step: ExampleStep, write: MathNotation, unicode: Notation) -> str:
    matrices = "".join(_matrix(matrix, unicode) for matrix in step.matrices)
    row = f'<div class="tlhm-row">{matrices}</div>' if matrices else ""
    return f"<li>{escaped(step.text)}{row}{''.join(map(write.markup, step.equations))}</li>"


def _matrix(matrix: ExampleMatrix, write: Notation) -> str:
    scale, head, body = matrix.scale, "", ""
    if matrix.columns is not None:
        cells = "".join(f'<th scope="col">{escaped(name)}</th>' for name in matrix.columns)
        head = f"<thead><tr>{'<th></th>' if matrix.rows is not None else ''}{cells}</tr></thead>"
    for number, row in enumerate(matrix.values):
        body += '<tr class="tlhm-used">' if number == matrix.marked else "<tr>"
        if matrix.rows is not None:
            body += f'<th scope="row">{escaped(matrix.rows[number])}</th>'
        body += "".join(_cell(matrix, float(value), scale, write) for value in row) + "</tr>"
    note = f" {escaped(f'({matrix.note})')}" if matrix.note else ""
    caption = f"<caption><math>{MATHML.term(matrix.name)}</math>{note}</caption>"
    dense = " tlhm-dense" if matrix.values.shape[1] > _MANY_COLUMNS else ""
    return f'<div class="tlhm-matrix{dense}"><table>{caption}{head}<tbody>{body}</tbody></table></div>'


def _cell(matrix: ExampleMatrix, value: float, scale: Scale, write: Notation) -> str:
    text = matrix.number(value, write)
    if np.isnan(value):
        return f"<td>{text}</td>"
    colour = scale.colour(value)
    return f'<td style="background:{colour};color:{text_on(colour)}">{text}</td>'
