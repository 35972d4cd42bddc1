"""A computation step by step: one list of steps with matrices and equations, as text, Markdown, LaTeX and a drawing.

>>> values = ExampleMatrix("V", [[0.1, 0.2], [-0.8, 0.3]], rows=["Birds", "walk"])
>>> worked_example([ExampleStep("Each token has a value", [values])])
Figure('Worked example', Example, 2 KB)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import UsageError
from .colours import Scale, text_on
from .figure import Figure
from .formulas import (
    DIGITS,
    TEXT,
    Equation,
    LatexNotation,
    MarkdownNotation,
    Notation,
    Sentence,
    Term,
    UnicodeNotation,
)
from .grids import checked
from .layout import (
    MARGIN,
    SIZE,
    TICK,
    PrintOptions,
    fitted,
    in_rows,
    inset,
    lines_of,
    printed,
    shortened,
    stacked,
    width_of,
)
from .page import escaped, figure_body, label
from .shapes import MIDDLE, Cells, Drawing, Rect, Text
from .text import latex, markdown, table_text, visible

MAX_SIDE = 24
_TEXT_ROOM = 96
_NEARLY = 1e-4
"""Cells below this share of the largest are written as nearly zero."""

_SMALL, _SMALLEST, _LETTER = 12.0, 9.0, 7.2
"""Size of letters in and around matrices, and the least of numbers; width of a letter of an equation."""

_LINE, _INDENT, _GAP, _PAD = 20.0, 22.0, 12.0, 8.0
"""Height of a line; indent of what belongs to a step; space between parts, and around numbers and labels."""

_ROW, _LEAST_CELL, _CELL, _MOST_CELL, _MOST_LABEL = 23.0, 12.0, 52.0, 90.0, 130.0
"""Height of a matrix' row; widths of its columns: the least, the usual one, that of long labels; longest label."""


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

    def numbers(self, write: Notation) -> list[list[str]]:
        """All cells in words; what is nothing beside the largest entry is said to be so."""
        least = _NEARLY * float(np.nanmax(np.abs(self.values), initial=0.0))

        def cell(value: float) -> str:
            if np.isnan(value):
                return write.words("missing")
            return write.nearly_nothing if 0 < abs(value) < least else write.number(value)

        return [[cell(float(value)) for value in row] for row in self.values]

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
        write = Notation(self.digits)
        parts = [self.title]
        for number, step in enumerate(self.steps, 1):
            lines = [f"{number}. {step.text}", *(_as_table(matrix, write) for matrix in step.matrices)]
            lines += [write.equation(each, _TEXT_ROOM, "  ") for each in step.equations]
            parts.append("\n".join(lines))
        closing = "\n".join(self.closing(write))
        return "\n\n".join([*parts, *([closing] if closing else [])])

    def markdown(self) -> str:
        """The steps as Markdown with formulas between dollar signs."""
        write = MarkdownNotation(self.digits)
        parts = [f"### {markdown(self.title)}"]
        for number, step in enumerate(self.steps, 1):
            parts += [f"{number}\\. {markdown(step.text)}", *(f"$${block}$$" for block in _latex_blocks(step, write))]
        parts += [f"* {line}" for line in self.closing(write)]
        return "\n\n".join(parts) + "\n"

    def latex(self) -> str:
        """The steps as LaTeX (amsmath)."""
        write = LatexNotation(self.digits)
        parts = [rf"\textbf{{{latex(self.title)}}}"]
        for number, step in enumerate(self.steps, 1):
            parts += [f"{number}. {latex(step.text)}", *(rf"\[{block}\]" for block in _latex_blocks(step, write))]
        return "\n\n".join([*parts, *self.closing(write)]) + "\n"

    def closing(self, write: Notation) -> list[str]:
        """What the steps come to, and the notes."""
        return [write.sentence(line) for line in (*self.summary, *(f"note: {note}" for note in self.notes))]

    def drawing(self, options: PrintOptions) -> Drawing:
        """The steps for print."""
        drawn = self.drawn((options.width - 2 * MARGIN) * SIZE / TICK)
        return printed(drawn, options, title=self.title, note=" ".join(self.notes))

    def drawn(self, width: float) -> Drawing:
        """The steps under each other, at most so wide, and what they come to."""
        write, parts = UnicodeNotation(self.digits), []
        for number, step in enumerate(self.steps, 1):
            room = width - _INDENT
            matrices = in_rows([_matrix(matrix, room, write) for matrix in step.matrices], room, _GAP)
            below = stacked([matrices, *(_equation(each, room, write) for each in step.equations)])
            parts += [stacked([_paragraph(f"{number}. {step.text}", width), inset(below, _INDENT)])]
        closing = [_paragraph(write.sentence(line), width) for line in self.summary]
        return stacked([*parts, stacked(closing)], _GAP)


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
    text = example.text()
    alternative = f"<pre>{'<br>'.join(map(escaped, text.splitlines()))}</pre>"
    inside, note = fitted(example.drawn, example.title), " ".join(example.notes)
    body = figure_body("example", example.title, inside=inside, alternative=alternative, note=note)
    return Figure(title=example.title, body=body, needs=(), text=text, data=example)


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
        [matrix.rows[number] if matrix.rows else number + 1, *cells]
        for number, cells in enumerate(matrix.numbers(write))
    ]
    return f"\n{matrix.caption(write)}\n{table_text([('', 'left'), *((str(name), 'right') for name in names)], rows)}"


def _latex_blocks(step: ExampleStep, write: LatexNotation) -> list[str]:
    blocks = [_latex_matrix(matrix, write) for matrix in step.matrices]
    return [*blocks, *([write.aligned(step.equations)] if step.equations else [])]


def _latex_matrix(matrix: ExampleMatrix, write: LatexNotation) -> str:
    lines = matrix.numbers(write)
    if matrix.rows is not None:
        lines = [[write.words(str(name)), *line] for name, line in zip(matrix.rows, lines, strict=True)]
    if matrix.columns is not None:
        names = [write.words(str(name)) for name in matrix.columns]
        lines.insert(0, [*([""] if matrix.rows is not None else []), *names])
    sides = ("l|" if matrix.rows is not None else "") + "r" * matrix.values.shape[1]
    table = " \\\\\n".join(" & ".join(line) for line in lines)
    note = rf"\quad {write.words(f'({matrix.note})')}" if matrix.note else ""
    return rf"{write.term(matrix.name)} = \begin{{array}}{{{sides}}} {table} \end{{array}}{note}"


def _paragraph(text: str, width: float) -> Drawing:
    return stacked([_line([(0.0, line)]) for line in lines_of(text, width, SIZE)])


def _equation(equation: Equation, width: float, write: Notation) -> Drawing:
    """An equation with its equals signs below each other."""
    left = min(width / 2, width_of(write.term(equation.left), SIZE))
    drawing = Drawing([], 0.0, _GAP / 3)
    for name, text in write.lines(equation, int((width - left) / _LETTER) - 1):
        # Numbers always fit; the words of a caller may not.
        right = shortened(text.lstrip(), 1.5 * width, SIZE)
        # Viewers leave out spaces at the beginning of a text.
        indent = left + width_of(" " * (len(text) - len(text.lstrip())), SIZE)
        line = _line([(0.0, shortened(name, left, SIZE)), (indent, right)])
        drawing.add(line.at(0.0, drawing.height - _GAP / 3))
        drawing.width, drawing.height = max(drawing.width, line.width), drawing.height + line.height
    return drawing


def _line(parts: Sequence[tuple[float, str]]) -> Drawing:
    """A line of text in parts, each at its place."""
    texts = [Text(x, SIZE, text, SIZE) for x, text in parts if text]
    return Drawing([*texts], max((x + width_of(text, SIZE) for x, text in parts), default=0.0), _LINE)


def _matrix(matrix: ExampleMatrix, width: float, write: Notation) -> Drawing:
    """A matrix under its name; its numbers are written where they fit, its colours always."""
    n_rows, n_columns = matrix.values.shape
    numbers, caption = matrix.numbers(write), shortened(matrix.caption(write), width, _SMALL)
    rows = [shortened(str(name), 0.4 * width, _SMALL) for name in matrix.rows or ()]
    columns = [shortened(str(name), _MOST_LABEL, _SMALL) for name in matrix.columns or ()]
    left = _longest(rows) + _PAD if rows else 0.0
    longest_column, longest_number = _longest(columns), max(map(_longest, numbers))
    wanted = min(_MOST_CELL, max(_CELL, longest_column + _PAD, longest_number + _PAD))
    cell = max(_LEAST_CELL, min(wanted, (width - left) / n_columns))
    upright = longest_column > cell - 2
    top = _LINE + (longest_column + _PAD if upright else _LINE if columns else 0.0)
    right, bottom = left + n_columns * cell, top + n_rows * _ROW
    drawing = Drawing([], max(right, width_of(caption, _SMALL)), bottom + _PAD)
    drawing.add(Text(0.0, SIZE, caption, _SMALL, fill="soft", italic=True))
    drawing.add(Cells(left, top, (cell, _ROW), matrix.scale.pixels(matrix.values)))
    for number, name in enumerate(rows):
        y = top + (number + 0.5) * _ROW + MIDDLE * _SMALL
        drawing.add(Text(left - _PAD / 2, y, name, _SMALL, "end", bold=number == matrix.marked))
    for number, name in enumerate(columns):
        x = left + (number + 0.5) * cell + (MIDDLE * _SMALL if upright else 0.0)
        drawing.add(Text(x, top - _PAD / 2, name, _SMALL, "start" if upright else "middle", upright=upright))
    size = max(_SMALLEST, min(_SMALL, _SMALL * (cell - 2) / longest_number))
    fitting = [at for at in np.ndindex(n_rows, n_columns) if width_of(numbers[at[0]][at[1]], size) < cell]
    # Hardly any numbers but zeros would say nothing.
    if 2 * sum(matrix.values[at] != 0 for at in fitting) >= np.count_nonzero(matrix.values):
        for row, column in fitting:
            x, y = left + (column + 0.5) * cell, top + (row + 0.5) * _ROW + MIDDLE * size
            value = float(matrix.values[row, column])
            ink = "soft" if np.isnan(value) else text_on(matrix.scale.colour(value))
            drawing.add(Text(x, y, numbers[row][column], size, "middle", ink))
    if matrix.marked is not None:
        drawing.add(Rect(left, top + matrix.marked * _ROW, right - left, _ROW, stroke="mark", line=1.5))
    return drawing


def _longest(texts: Iterable[str]) -> float:
    return max((width_of(text, _SMALL) for text in texts), default=0.0)
