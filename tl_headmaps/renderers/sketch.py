"""The method as one picture: a layer of heads, one head's map over the vocabulary, and the windows that are looked at.

The windows themselves are grids of tokens beside the sketch.

>>> window = ("A", [[0.9, 0.1], [0.2, 0.8]])
>>> sketch(layer=23, head=4, n_heads=9, n_vocab=49152, windows=[window])
Figure('From a layer to its maps', Sketch, 6 KB)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .colours import Scale
from .figure import Figure
from .grids import checked
from .layout import PrintOptions, printed
from .page import figure_body
from .shapes import Drawing, Path, Rect, Shape, Text, line

WIDTH, HEIGHT = 400.0, 262.0

_LATTICE, _CELL = 8, 20.0
_LAYER = (2.0, 30.0, 150.0, 184.0)
_MAP = (236.0, 48.0)


@dataclass(frozen=True)
class Sketch:
    """What is drawn."""

    title: str
    drawn: Drawing

    def drawing(self, options: PrintOptions) -> Drawing:
        """The sketch for print."""
        return printed(self.drawn, options, title=self.title)


def sketch(
    *,
    layer: int,
    head: int,
    n_heads: int,
    n_vocab: int,
    windows: Sequence[tuple[str, Any]],
    title: str = "From a layer to its maps",
) -> Figure:
    """One head of a layer, and its map of all tokens by all tokens with windows of real entries.

    Args:
        layer: Number of the layer.
        head: The head that is looked at.
        n_heads: Heads of the layer.
        n_vocab: Tokens of the vocabulary.
        windows: A letter and the entries of each window, at most three by three of them are drawn.
        title: What is shown.
    """
    shown = [(letter, checked(values, letter)[0][:3, :3]) for letter, values in windows]
    drawing = Drawing([*_layer(layer, head, n_heads), *_map(n_vocab, shown)], WIDTH, HEIGHT)
    letters = " and ".join(letter for letter, _ in shown)
    text = (
        f"{title}: the circuits of head {head}, one of {n_heads} in layer {layer}, are projected to the "
        f"vocabulary, {n_vocab:,} by {n_vocab:,} tokens; windows of that map: {letters}."
    )
    body = figure_body("sketch", title, inside=drawing.svg(title=text, kind="sketch"))
    return Figure(title, body, (), text, Sketch(title, drawing))


def _layer(layer: int, head: int, n_heads: int) -> Iterator[Shape]:
    x, y, width, height = _LAYER
    middle = x + width / 2
    yield from _arrow(middle, y + height + 24, middle, y + height + 2)
    yield from _arrow(middle, y - 2, middle, y - 24)
    yield Rect(x, y, width, height, "pane", "line")
    yield Text(middle, y + 20, f"attention, layer {layer}", 15, "middle")
    rows = sorted({0, head, n_heads - 1})
    for number, one in enumerate(rows):
        at = y + 34 + number * 50
        ink = "text" if one == head else "soft"
        for left, name in ((x + 14, "VO"), (x + 78, "QK")):
            yield Rect(left, at, 58, 38, stroke="mark" if one == head and name == "VO" else "line")
            yield Text(left + 20, at + 25, "W", 17, "middle", ink)
            yield Text(left + 29, at + 31, name, 12, fill=ink)
            yield Text(left + 29, at + 16, str(one), 12, fill=ink)
        if one == head:
            # A magnifying glass over the head, and where it leads.
            eye, radius = (x + 43, at + 19), 28.0
            rim = (eye[0] + 0.655 * radius, eye[1] + 0.756 * radius)
            yield Rect(eye[0] - radius, eye[1] - radius, 2 * radius, 2 * radius, stroke="mark", line=2, radius=radius)
            yield Path(((rim, (eye[0] + 26, eye[1] + 30)),), "mark", 2)
            yield from _arrow(x + width + 4, at + 19, _MAP[0] - 24, at + 19)
            yield Text((x + width + _MAP[0] - 20) / 2, at + 11, "project", 13, "middle", "soft")
        if number + 1 < len(rows) and rows[number + 1] > one + 1:
            yield Text(middle, at + 48, "⋮", 13, "middle", "soft")


def _arrow(x: float, y: float, to_x: float, to_y: float) -> Iterator[Shape]:
    """A line with a head, along one of the axes."""
    yield line(x, y, to_x, to_y, stroke="soft", width=1.4)
    back_x, back_y = 7 * float(np.sign(x - to_x)), 7 * float(np.sign(y - to_y))
    side_x, side_y = 4 * bool(back_y), 4 * bool(back_x)
    ends = [(to_x + back_x + sign * side_x, to_y + back_y + sign * side_y) for sign in (1, -1)]
    yield Path(((ends[0], (to_x, to_y), ends[1]),), "soft", 1.4)


def _map(n_vocab: int, windows: Sequence[tuple[str, np.ndarray]]) -> Iterator[Shape]:
    x, y = _MAP
    side = _LATTICE * _CELL
    yield Text(x + side / 2, y - 25, f"M: {n_vocab:,} × {n_vocab:,}", 15, "middle")
    yield Text(x + side / 2, y - 6, "|V|", 13, "middle", "soft")
    yield Text(x - 8, y + side / 2, "|V|", 13, "middle", "soft", upright=True)
    yield Rect(x, y, side, side, "pane", "line")
    for i in range(1, _LATTICE):
        yield line(x + i * _CELL, y, x + i * _CELL, y + side, width=0.6)
        yield line(x, y + i * _CELL, x + side, y + i * _CELL, width=0.6)
    for number, (letter, values) in enumerate(windows):
        left, top = x + (1 + 3.5 * number) * _CELL, y + (1 + 3.5 * number) * _CELL
        scale = Scale.over([values], signed=False, palette="blues")
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                yield Rect(left + column * _CELL, top + row * _CELL, _CELL, _CELL, scale.colour(float(value)))
        rows, columns = values.shape
        yield Rect(left, top, columns * _CELL, rows * _CELL, stroke="mark")
        yield Text(left + columns * _CELL + 9, top + 15, letter, 17, "middle", "mark")
    said = f"windows {' and '.join(letter for letter, _ in windows)}"
    yield Text(x + side / 2, y + side + 22, said, 13, "middle", "soft")
