"""A flowchart for print: the page's own places, scaled to the width of the sheet."""

import textwrap
from typing import Any

import numpy as np

from .colours import SERIES, Scale
from .flowchart import BOX, OFF, ON, STRIPE, Flow, bar_width, layout, limits_text, line_width, shortened


def draw_flow(data: Flow, sheet: Any) -> None:
    """The page's own places, scaled to the width; a title above, the note below."""
    from matplotlib.patches import FancyBboxPatch, PathPatch, Rectangle
    from matplotlib.path import Path as Curve

    place = layout(data)
    # A small chart needs no whole page: 96 pixels of the screen are an inch at most.
    wide = min(sheet.get_figwidth(), max(place.width / 96, 2.4))
    inch = (wide - 0.2) / place.width
    size = min(7.0, 12 * inch * 72)
    note = textwrap.wrap(data.note, int((wide - 0.2) * 72 / (0.52 * 6.5))) if data.note else []
    title = textwrap.wrap(data.title, int((wide - 0.2) * 72 / (0.58 * 8)))
    above, below = 0.08 + 0.14 * len(title), 0.12 * len(note) + 0.1
    tall = place.height * inch + above + below
    sheet.set_layout_engine("none")
    sheet.set_size_inches(wide, tall)
    axes = sheet.add_axes((0.1 / wide, below / tall, 1 - 0.2 / wide, place.height * inch / tall))
    axes.set(xlim=(0, place.width), ylim=(place.height, 0))
    axes.axis("off")
    sheet.text(0.5, 1 - 0.06 / tall, "\n".join(title), ha="center", va="top", size=8)
    sheet.text(0.1 / wide, (below - 0.04) / tall, "\n".join(note), va="top", size=6.5, linespacing=1.25, color="0.35")

    def box(x: float, y: float, width: float, text: str, colour: int | None) -> None:
        high = BOX * place.row
        shape = FancyBboxPatch((x, y - high / 2), width, high, boxstyle="round,pad=0,rounding_size=4")
        shape.set(facecolor="white", edgecolor="0.6" if colour is None else SERIES[colour], linewidth=0.8)
        axes.add_patch(shape)
        axes.text(x + width / 2, y, shortened(text), ha="center", va="center", size=size)

    for number, (_, links) in enumerate(data.heads):
        for tokens, share in links:
            colour = SERIES[data.colours[tokens]]
            for points in place.curves(number, tokens):
                drawn = PathPatch(Curve(points, [1, 4, 4, 4]), facecolor="none", edgecolor=colour, alpha=0.6)
                axes.add_patch(drawn)
                drawn.set_linewidth(line_width(share) * inch * 72)
            for top, height in place.stripes(tokens) if place.lane else ():
                stripe = Rectangle((place.lane[number], top), STRIPE, height, facecolor=colour, linewidth=0, zorder=2)
                axes.add_patch(stripe)
    for (head, links), y in zip(data.heads, place.head_at, strict=True):
        box(2.0, y, place.left, head, data.head_colour(links))
    for row, token in enumerate(data.tokens):
        box(place.token, place.middle(row), place.right, token, None if place.lane else data.token_colour(row))
    if data.matrix is None or data.scale is None:
        return
    for (row, column), value in np.ndenumerate(data.matrix):
        if not (data.is_causal and column > row):
            corner = (place.matrix + column * place.cell, place.top + row * place.row)
            cell = Rectangle(corner, place.cell, place.row, facecolor=data.cell_colour(float(value)))
            cell.set(edgecolor="white", linewidth=0.3)
            axes.add_patch(cell)
    bottom = place.top + place.row * len(data.tokens)
    for column, token in enumerate(data.tokens):
        at = (place.matrix + (column + 0.5) * place.cell, place.top - 5 if data.labels == "top" else bottom + 5)
        turned = {"rotation": 90} if place.upright else {}
        side = "bottom" if data.labels == "top" else "top"
        axes.text(*at, shortened(token), ha="center", va=side, size=size, **turned)
    _flow_legend(axes, data, data.scale, place.legend, size)


def _flow_legend(axes: Any, data: Flow, scale: Scale, at: tuple[float, float], size: float) -> None:
    from matplotlib.patches import Rectangle

    x, y = at
    axes.text(x, y + 26, scale.unit, va="center", size=size)
    if data.is_binary:
        for left, colour, said in ((x, ON, "1"), (x + 40, OFF, "0")):
            axes.add_patch(Rectangle((left, y), 14, 14, facecolor=colour))
            axes.text(left + 19, y + 7, said, va="center", size=size)
        return
    wide = bar_width(scale) / len(scale.colours)
    for number, colour in enumerate(scale.colours):
        axes.add_patch(Rectangle((x + wide * number, y), wide + 0.2, 12, facecolor=f"#{colour}"))
    axes.text(x + bar_width(scale) + 8, y + 6, limits_text(scale), va="center", size=size)
