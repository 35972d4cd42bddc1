"""The method as one picture: a layer of heads, one head's map over the vocabulary, and the windows that are looked at.

The windows themselves are grids of tokens beside the sketch. Shapes are plain values: the page and print draw them.

>>> window = ("A", [[0.9, 0.1], [0.2, 0.8]])
>>> sketch(layer=23, head=4, n_heads=9, n_vocab=49152, windows=[window])
Figure('From a layer to its maps', Sketch, 6 KB)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from .colours import Scale
from .figure import Figure
from .grids import checked
from .page import escaped, figure_body

Ink: TypeAlias = Literal["text", "soft", "line", "pane", "mark"]
"""What a shape is for; its colour follows from that and from the page."""

WIDTH, HEIGHT = 400.0, 262.0
INKS = {"text": "#1b1c1e", "soft": "#5b5f66", "line": "#9aa0a8", "pane": "#f5f6f8", "mark": "#d0006f"}
"""Colours in print."""

_LATTICE = 8
_CELL = 20.0
_LAYER = (2.0, 30.0, 150.0, 184.0)
_MAP = (236.0, 48.0)


@dataclass(frozen=True)
class Box:
    """A rectangle: filled with a colour or an ink, and framed."""

    x: float
    y: float
    width: float
    height: float
    fill: str = "none"
    frame: Ink | None = "line"


@dataclass(frozen=True)
class Words:
    """A line of text around, before or behind a point."""

    x: float
    y: float
    text: str
    size: int = 12
    anchor: Literal["start", "middle", "end"] = "middle"
    ink: Ink = "text"
    upright: bool = False


@dataclass(frozen=True)
class Stroke:
    """A line, with a head at its end if it is an arrow; or a ring around its start."""

    x: float
    y: float
    to: tuple[float, float]
    ink: Ink = "line"
    arrow: bool = False
    ring: float = 0.0


Shape: TypeAlias = Box | Words | Stroke


@dataclass(frozen=True)
class Sketch:
    """What is drawn, back to front."""

    title: str
    shapes: tuple[Shape, ...]


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
    drawing = Sketch(title, (*_layer(layer, head, n_heads), *_map(n_vocab, shown)))
    letters = " and ".join(letter for letter, _ in shown)
    text = (
        f"{title}: the circuits of head {head}, one of {n_heads} in layer {layer}, are projected to the "
        f"vocabulary, {n_vocab:,} by {n_vocab:,} tokens; windows of that map: {letters}."
    )
    shapes = "".join(map(_markup, drawing.shapes))
    inside = (
        f'<svg class="tlhm-sketch" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{escaped(text)}">'
        f"{shapes}</svg>"
    )
    return Figure(title, figure_body("sketch", title, inside=inside), (), text, drawing)


def _layer(layer: int, head: int, n_heads: int) -> Iterator[Shape]:
    x, y, width, height = _LAYER
    middle = x + width / 2
    yield Stroke(middle, y + height + 24, (middle, y + height + 2), "soft", arrow=True)
    yield Stroke(middle, y - 2, (middle, y - 24), "soft", arrow=True)
    yield Box(x, y, width, height, "pane")
    yield Words(middle, y + 20, f"attention, layer {layer}", 15)
    rows = sorted({0, head, n_heads - 1})
    for number, one in enumerate(rows):
        at = y + 34 + number * 50
        for column, name in enumerate(("VO", "QK")):
            left = x + 14 + column * 64
            chosen = one == head
            yield Box(left, at, 58.0, 38.0, "none", "mark" if chosen and column == 0 else "line")
            yield Words(left + 20, at + 25, "W", 17, ink="text" if chosen else "soft")
            yield Words(left + 29, at + 31, name, 12, "start", "text" if chosen else "soft")
            yield Words(left + 29, at + 16, str(one), 12, "start", "text" if chosen else "soft")
        if one == head:
            eye = (x + 14 + 29, at + 19)
            yield Stroke(*eye, (eye[0] + 26, eye[1] + 30), "mark", ring=28.0)
            yield Stroke(x + width + 4, at + 19, (_MAP[0] - 24, at + 19), "soft", arrow=True)
            yield Words((x + width + _MAP[0] - 20) / 2, at + 11, "project", 13, ink="soft")
        if number + 1 < len(rows) and rows[number + 1] > one + 1:
            yield Words(middle, at + 48, "⋮", 13, ink="soft")


def _map(n_vocab: int, windows: Sequence[tuple[str, np.ndarray]]) -> Iterator[Shape]:
    x, y = _MAP
    side = _LATTICE * _CELL
    yield Words(x + side / 2, y - 25, f"M: {n_vocab:,} × {n_vocab:,}", 15)
    yield Words(x + side / 2, y - 6, "|V|", 13, ink="soft")
    yield Words(x - 8, y + side / 2, "|V|", 13, ink="soft", upright=True)
    yield Box(x, y, side, side, "pane")
    for i in range(1, _LATTICE):
        yield Stroke(x + i * _CELL, y, (x + i * _CELL, y + side))
        yield Stroke(x, y + i * _CELL, (x + side, y + i * _CELL))
    for number, (letter, values) in enumerate(windows):
        left, top = x + (1 + 3.5 * number) * _CELL, y + (1 + 3.5 * number) * _CELL
        scale = Scale.over([values], signed=False, palette="blues")
        for (row, column), value in np.ndenumerate(values):
            fill = scale.colour(float(value)) if np.isfinite(value) else "none"
            yield Box(left + column * _CELL, top + row * _CELL, _CELL, _CELL, fill, None)
        rows, columns = values.shape
        yield Box(left, top, columns * _CELL, rows * _CELL, "none", "mark")
        yield Words(left + columns * _CELL + 9, top + 15, letter, 17, ink="mark")
    said = f"windows {' and '.join(letter for letter, _ in windows)}"
    yield Words(x + side / 2, y + side + 22, said, 13, ink="soft")


def _markup(shape: Shape) -> str:
    if isinstance(shape, Box):
        fill = f'class="tlhm-i-{shape.fill}"' if shape.fill in INKS else f'fill="{shape.fill}"'
        frame = "" if shape.frame is None else f' style="stroke:var(--i-{shape.frame})"'
        return (
            f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}" '
            f"{fill}{frame}/>"
        )
    if isinstance(shape, Words):
        turned = f' transform="rotate(-90 {shape.x:.1f} {shape.y:.1f})"' if shape.upright else ""
        return (
            f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}"{turned} '
            f'style="font-size:{shape.size}px;fill:var(--i-{shape.ink})">{escaped(shape.text)}</text>'
        )
    ring = f'<circle cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.ring:.0f}"/>' if shape.ring else ""
    start = _rim(shape)
    line = f'<path d="M{start[0]:.1f},{start[1]:.1f} L{shape.to[0]:.1f},{shape.to[1]:.1f}"/>'
    head = f'<path d="{_arrow_head(shape)}"/>' if shape.arrow else ""
    wide = 2 if shape.ring else 1.4 if shape.arrow else 0.6
    return f'<g style="stroke:var(--i-{shape.ink});stroke-width:{wide}">{ring}{line}{head}</g>'


def _direction(shape: Stroke) -> tuple[float, float]:
    dx, dy = shape.to[0] - shape.x, shape.to[1] - shape.y
    length = max(1e-9, float(np.hypot(dx, dy)))
    return dx / length, dy / length


def _rim(shape: Stroke) -> tuple[float, float]:
    """Where a line begins: at the rim of its ring, if it has one."""
    dx, dy = _direction(shape)
    return shape.x + dx * shape.ring, shape.y + dy * shape.ring


def _arrow_head(shape: Stroke) -> str:
    (dx, dy), (x, y) = _direction(shape), shape.to
    sides = [(x - 7 * dx + side * 4 * dy, y - 7 * dy - side * 4 * dx) for side in (1, -1)]
    return " ".join(
        [f"M{sides[0][0]:.1f},{sides[0][1]:.1f}", f"L{x:.1f},{y:.1f}", f"L{sides[1][0]:.1f},{sides[1][1]:.1f}"]
    )


def draw_sketch(data: Sketch, sheet: Any) -> None:
    """The same shapes in print."""
    from matplotlib.patches import Circle, Rectangle

    from .sheets import frame

    wide = min(float(sheet.get_figwidth()), 3.4)
    sheet.set_figwidth(wide)
    frame(sheet, wide * HEIGHT / WIDTH, title=data.title)
    axes = sheet.subplots()
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0), aspect="equal")
    axes.axis("off")
    points = 72 * wide / WIDTH
    for shape in data.shapes:
        if isinstance(shape, Box):
            edge = "none" if shape.frame is None else INKS[shape.frame]
            fill = INKS.get(shape.fill, shape.fill)
            where = (shape.x, shape.y), shape.width, shape.height
            axes.add_patch(Rectangle(*where, facecolor=fill, edgecolor=edge, linewidth=0.7))
        elif isinstance(shape, Words):
            side = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
            turned = {"rotation": 90} if shape.upright else {}
            size = shape.size * points
            axes.text(shape.x, shape.y, shape.text, size=size, color=INKS[shape.ink], ha=side, va="baseline", **turned)
        else:
            colour, width = INKS[shape.ink], 1.2 if shape.ring else 0.9 if shape.arrow else 0.3
            if shape.ring:
                axes.add_patch(Circle((shape.x, shape.y), shape.ring, fill=False, edgecolor=colour, linewidth=width))
            style = "->" if shape.arrow else "-"
            axes.annotate(
                "",
                xy=shape.to,
                xytext=_rim(shape),
                arrowprops={"arrowstyle": style, "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0},
            )
