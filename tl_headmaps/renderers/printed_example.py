"""A worked example for print: steps under each other on one sheet, everything measured in inches."""

import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from .colours import text_on
from .example import Example, ExampleMatrix, ExampleStep
from .formulas import UNICODE, Equation, Notation

_MARGIN, _INDENT = 0.12, 0.26
_SIZE, _SMALL = 7, 6
_LINE, _ROW = 0.145, 0.17
_LETTER, _SMALL_LETTER = 0.057, 0.053
"""About the width of a letter of either size, rather too wide."""

_WIDEST_CELL, _NARROWEST_CELL = 0.46, 0.1

_Block = tuple[float, float, Callable[[float], None]]
"""A height, how far right it reaches, and what draws there, given its upper end (inches from the top)."""


def draw_example(data: Example, sheet: Any) -> None:
    """Draw an example on an empty sheet, whose height is set."""
    sheet.set_layout_engine("none")
    write = UNICODE.with_digits(data.digits)
    blocks = [_lines(sheet, [data.title], _MARGIN, weight="bold")]
    for number, step in enumerate(data.steps, 1):
        blocks += _step(sheet, number, step, write)
    blocks.append(_gap(0.06))
    blocks += [_lines(sheet, _wrapped(sheet, line, _MARGIN), _MARGIN) for line in data.closing(write)]
    # A small example needs no whole page.
    sheet.set_figwidth(min(sheet.get_figwidth(), max(right for _, right, _ in blocks) + _MARGIN))
    sheet.set_figheight(sum(height for height, _, _ in blocks) + 2 * _MARGIN)
    top = _MARGIN
    for height, _, paint in blocks:
        paint(top)
        top += height


def _step(sheet: Any, number: int, step: ExampleStep, write: Notation) -> list[_Block]:
    heading = _wrapped(sheet, f"{number}. {step.text}", _MARGIN)
    return [
        _gap(0.06),
        _lines(sheet, heading, _MARGIN),
        *_matrices(sheet, step, write),
        *(_equation(sheet, each, write) for each in step.equations),
    ]


def _gap(height: float) -> _Block:
    return height, 0.0, lambda top: None


def _wrapped(sheet: Any, text: str, left: float) -> list[str]:
    return textwrap.wrap(text, max(20, int((sheet.get_figwidth() - left - _MARGIN) / _LETTER))) or [""]


def _lines(sheet: Any, lines: list[str], left: float, **style: Any) -> _Block:
    def paint(top: float) -> None:
        for number, line in enumerate(lines):
            _write(sheet, left, top + number * _LINE, line, size=_SIZE, **style)

    return _LINE * len(lines), left + _LETTER * max(map(len, lines)), paint


def _write(sheet: Any, left: float, top: float, text: str, **style: Any) -> None:
    sheet.text(left / sheet.get_figwidth(), 1 - top / sheet.get_figheight(), text, va="top", **style)


def _equation(sheet: Any, equation: Equation, write: Notation) -> _Block:
    room = sheet.get_figwidth() - _INDENT - _MARGIN
    width = _LETTER * len(write.term(equation.left))
    lines = write.lines(equation, max(16, int((room - width) / _LETTER) - 2))

    def paint(top: float) -> None:
        for number, (left, right) in enumerate(lines):
            _write(sheet, _INDENT, top + number * _LINE, left, size=_SIZE)
            _write(sheet, _INDENT + width, top + number * _LINE, right, size=_SIZE)

    reach = _INDENT + width + _LETTER * max(len(right) for _, right in lines)
    return _LINE * len(lines) + 0.02, reach, paint


def _matrices(sheet: Any, step: ExampleStep, write: Notation) -> list[_Block]:
    """Matrices beside each other while they fit."""
    blocks: list[_Block] = []
    row: list[tuple[ExampleMatrix, float, float]] = []
    room = sheet.get_figwidth() - _MARGIN
    left = _INDENT
    for matrix in step.matrices:
        labels = _labels_width(matrix)
        if row and left + labels + _NARROWEST_CELL * matrix.values.shape[1] * 2 > room:
            blocks.append(_matrix_row(sheet, row, write))
            row, left = [], _INDENT
        left += labels
        cell = min(_WIDEST_CELL, max(_NARROWEST_CELL, (room - left) / matrix.values.shape[1]))
        row.append((matrix, left, cell))
        left += cell * matrix.values.shape[1] + 0.15
        # The caption may be longer than the matrix.
        left = max(left, row[-1][1] + _SMALL_LETTER * len(matrix.caption(write)) + 0.15)
    return [*blocks, *([_matrix_row(sheet, row, write)] if row else [])]


def _labels_width(matrix: ExampleMatrix) -> float:
    return 0.0 if matrix.rows is None else 0.06 + _SMALL_LETTER * max(len(str(name)) for name in matrix.rows)


def _upright(matrix: ExampleMatrix, cell: float) -> bool:
    return any(_SMALL_LETTER * len(str(name)) > cell for name in matrix.columns or ())


def _head_height(matrix: ExampleMatrix, cell: float) -> float:
    if matrix.columns is None:
        return 0.04
    return 0.06 + _SMALL_LETTER * max(len(str(n)) for n in matrix.columns) if _upright(matrix, cell) else 0.14


def _matrix_row(sheet: Any, row: list[tuple[ExampleMatrix, float, float]], write: Notation) -> _Block:
    caption = 0.14
    head = max(_head_height(matrix, cell) for matrix, _, cell in row)
    height = caption + head + max(_ROW * len(matrix.values) for matrix, _, _ in row) + 0.08

    def paint(top: float) -> None:
        wide, tall = sheet.get_figwidth(), sheet.get_figheight()
        for matrix, left, cell in row:
            n_rows, n_columns = matrix.values.shape
            start = left - _labels_width(matrix)
            _write(sheet, start, top, matrix.caption(write), size=_SMALL, style="italic")
            bottom = top + caption + head + _ROW * n_rows
            size = (cell * n_columns / wide, _ROW * n_rows / tall)
            _matrix_axes(sheet.add_axes((left / wide, 1 - bottom / tall, *size)), matrix, cell, write)

    reach = max(left + cell * matrix.values.shape[1] for matrix, left, cell in row)
    return height, reach, paint


def _matrix_axes(axes: Any, matrix: ExampleMatrix, cell: float, write: Notation) -> None:
    scale = matrix.scale
    colours = [
        [scale.colour(float(value)) if np.isfinite(value) else "#ffffff" for value in row] for row in matrix.values
    ]
    channels = [[[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in row] for row in colours]
    rows, columns = matrix.values.shape
    edges = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
    axes.pcolormesh(*edges, np.array(channels), edgecolors="face", linewidth=0.15)
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    # Numbers are drawn only where they fit, and none where it would be hardly any but zeros; colours are there anyway.
    texts = {at: matrix.number(float(value), write) for at, value in np.ndenumerate(matrix.values)}
    fitting = [at for at, text in texts.items() if _SMALL_LETTER * len(text) <= cell]
    telling = [at for at in fitting if matrix.values[at] != 0]
    for row, column in fitting if 2 * len(telling) >= np.count_nonzero(matrix.values) else ():
        colour = text_on(colours[row][column])
        axes.text(column, row, texts[row, column], ha="center", va="center", size=_SMALL, color=colour)
    axes.set_xticks(range(matrix.values.shape[1]) if matrix.columns else [], matrix.columns or [])
    axes.set_yticks(range(matrix.values.shape[0]) if matrix.rows else [], matrix.rows or [])
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=_SMALL, pad=1.5)
    if matrix.columns and _upright(matrix, cell):
        axes.tick_params(axis="x", rotation=90)
    if matrix.marked is not None and matrix.rows:
        axes.get_yticklabels()[matrix.marked].set_weight("bold")
    for spine in axes.spines.values():
        spine.set_visible(False)
