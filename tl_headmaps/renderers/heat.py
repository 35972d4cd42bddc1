"""Heat maps: heads by layer, panels side by side, components by layer, tokens by tokens.

All are one drawing over :class:`~tl_headmaps.renderers.grids.Heat`, so all can be hovered, searched and walked through
with the keyboard alike. Values are arrays, tensors or nested lists by row and column; several maps are passed by name.

>>> figure = head_map([[0.1, 0.7], [None, 0.2]], title="Country to capital", unit="share of pairs")
>>> figure
Figure('Country to capital', Heat, 5 KB)
>>> print(figure)  # doctest: +ELLIPSIS
Country to capital: 2 layers by 2 heads, from 0.1 to 0.7 share of pairs, 1 missing. Highest: L0H1 0.7, L1H1 0.2, ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from typing_extensions import TypedDict, Unpack

from ..core.types import HeadIndex, HeadLike, Origin, check_choice
from .colours import Limits, Palette, Scale
from .figure import Figure
from .grids import Axis, Heat, Layer, MapLayer, checked, drill_of, heat_of
from .layout import shortened, width_of
from .maps import Plot, scale_drawing
from .page import escaped, figure_body, packed, packed_half, table
from .text import visible

_NUMBERED_CELLS = 150
_NUMBERED_COLUMNS = 12
"""Grids up to this size have room for the numbers in their cells."""

_LETTERS, _LABEL_ROOM = 11.0, 160.0
"""Size of letters on a page, and how many pixels a label takes at most."""

_SMALLEST = 0.65
"""How far a map may shrink on a narrow screen before it is scrolled."""

_LISTED = 10
_PALE = 0.25
"""Negative entries below this share of the largest do not matter: a grid of tokens is drawn in one colour."""


class MapOptions(TypedDict, total=False):
    """What all calls for maps take; :func:`head_map` says what they mean."""

    title: str
    unit: str
    signed: bool | None
    limits: Limits | None
    percentile: float | int | None
    palette: Palette
    mark: str
    note: str


def head_map(
    values: Any,
    *,
    switches: tuple[str, str] = ("map", "measure"),
    drill: Mapping[Any, Any] | None = None,
    pinned: HeadLike | None = None,
    empty: Mapping[Any, object] | None = None,
    **options: Unpack[MapOptions],
) -> Figure:
    """Layers by heads, one map at a time; layers may have different numbers of heads.

    Args:
        values: Values by layer and head; or several maps by name, or :class:`MapLayer` entries, to switch between.
        switches: What the two switches are called, if there are several maps (and groups of them).
        drill: Lists shown when a head is pinned: ``{"L23H4": {"salient tokens": [["pasta", "Italian"], ...]}}``.
        pinned: The head whose values are shown at first, until another one is chosen.
        empty: Layers without heads, and what they have instead: ``{0: "linear attention"}``; a number of heads for
            layers that have fewer.
        **options: As for all maps:

            * ``title``: What is shown.
            * ``unit``: What the numbers are, written at the colour bar. Maps of one unit share one colour scale.
            * ``signed``: Centre the colours on zero; by default if any value is negative.
            * ``limits``: Ends of the colour bar; values beyond take its end colours, and the bar says so: ``0.0040+``.
            * ``percentile``: End the bar at this percentile of the values instead (99: one in a hundred is beyond it).
            * ``palette``: Colours of amounts: ``"amounts"`` (viridis), ``"blues"`` or ``"oranges"`` (light to dark).
            * ``mark``: What a dot in a cell means, where a :class:`MapLayer` has ``marked`` ones.
            * ``note``: A sentence under the figure.
    """
    return _heads_figure(values, drill, pinned, switches=switches, empty=empty, **options)


def panels(
    values: Any,
    *,
    origin: Origin = "upper",
    drill: Mapping[Any, Any] | None = None,
    pinned: HeadLike | None = None,
    empty: Mapping[Any, object] | None = None,
    **options: Unpack[MapOptions],
) -> Figure:
    """Several maps of layers by heads side by side, with one colour bar; arguments as for :func:`head_map`.

    ``origin="lower"`` draws the first layer at the bottom.
    """
    check_choice(origin, Origin, "origin")
    return _heads_figure(values, drill, pinned, panels=True, lower=origin == "lower", empty=empty, **options)


def _heads_figure(
    values: Any, drill: Mapping[Any, Any] | None, pinned: HeadLike | None, title: str = "Heads", **options: Any
) -> Figure:
    heat = heat_of(values, title=title, rows="layer", columns="head", **options)
    shape = (heat.rows.n, heat.columns.n)
    head = None if pinned is None else HeadIndex.of(pinned).check(*shape)
    return heat_figure(replace(heat, drill=drill_of(drill, shape), pinned=head))


def component_map(
    values: Any,
    columns: Sequence[str],
    *,
    row_labels: Sequence[object] | None = None,
    switches: tuple[str, str] = ("metric", "measure"),
    **options: Unpack[MapOptions],
) -> Figure:
    """Layers by named components such as ``attn.q`` or ``mlp.up``; several metrics by name, to switch between.

    Each metric has its own unit and colour scale; other arguments are as for :func:`head_map`.
    """
    if isinstance(values, Mapping):
        values = [MapLayer(str(name), array, unit=str(name)) for name, array in values.items()]
    chosen: dict[str, Any] = {"title": "Components", "row_labels": row_labels, "switches": switches, **options}
    heat = heat_of(values, rows="layer", columns="component", column_labels=columns, item="component", **chosen)
    return heat_figure(heat)


def token_grid(
    values: Any,
    sources: Sequence[object],
    targets: Sequence[object],
    *,
    rows: str = "source",
    columns: str = "target",
    details: Mapping[str, Any] | None = None,
    score: float | int | None = None,
    **options: Unpack[MapOptions],
) -> Figure:
    """Source tokens (rows) by target tokens (columns), with the score under the grid if there is one.

    Colours run from light to dark, unless entries below zero matter beside those above.
    """
    layer = values if isinstance(values, MapLayer) else MapLayer("", values)
    layer = replace(layer, details={**layer.details, **(details or {})})
    chosen: dict[str, Any] = {"title": "Tokens", "palette": "blues", **options}
    if chosen.get("signed") is None:
        array = np.nan_to_num(checked(layer.values, "values")[0])
        chosen["signed"] = bool(array.min() < -_PALE * np.abs(array).max())
    if score is not None:
        note = chosen.get("note")
        chosen["note"] = f"score {score:.2g}" + (f" · {note}" if note else "")
    heat = heat_of(layer, rows=rows, columns=columns, row_labels=sources, column_labels=targets, item="pair", **chosen)
    small = heat.rows.n * heat.columns.n <= _NUMBERED_CELLS and heat.columns.n <= _NUMBERED_COLUMNS
    return heat_figure(replace(heat, numbers=small))


def heat_figure(heat: Heat) -> Figure:
    """The figure of a heat map: data for the script, and its text alternative."""
    text = summary(heat)
    body = figure_body(
        "heat",
        heat.title,
        data=page_data(heat),
        drawing=_picture(heat),
        alternative=_alternative(heat, text),
        note=heat.note,
    )
    return Figure(title=visible(heat.title), body=body, needs=("heat",), text=text, data=heat)


def summary(heat: Heat) -> str:
    """The map in words: its size, range, gaps and highest cells."""
    what = f"{heat.rows.n} {_plural(heat.rows.name, heat.rows.n)} by {heat.columns.n} "
    what += _plural(heat.columns.name, heat.columns.n) + _without_cells(heat)
    lines = [_layer_summary(heat, layer) for layer in heat.layers]
    if len(lines) == 1:
        return f"{visible(heat.title)}: {what}, {lines[0]}"
    return f"{visible(heat.title)}: {len(lines)} maps of {what}.\n" + "\n".join(lines)


def _without_cells(heat: Heat) -> str:
    """Rows without cells in words: what they are, and which."""
    rows_of: dict[str, list[str]] = {}
    for row, what in heat.rows.empty.items():
        rows_of.setdefault(what, []).append(heat.rows.label(row))
    parts = [f"{what} in {_plural(heat.rows.name, len(rows))} {', '.join(rows)}" for what, rows in rows_of.items()]
    return f" ({'; '.join(parts)})" if parts else ""


def _plural(name: str, n: int) -> str:
    if n == 1:
        return name
    return f"{name[:-1]}ies" if name.endswith("ry") else f"{name}s"


def _layer_summary(heat: Heat, layer: Layer) -> str:
    finite = layer.values[np.isfinite(layer.values)]
    title = " · ".join(part for part in (layer.group, layer.name) if part)
    prefix = f"{title}: " if title and len(heat.layers) > 1 else ""
    if not finite.size:
        return f"{prefix}no values."
    cells = sum(heat.lengths) if heat.lengths else layer.values.size
    if layer.scale.names:
        return f"{prefix}{', '.join(name for name, _ in layer.scale.names)}."
    unit = f" {layer.scale.unit}" if layer.scale.unit else ""
    missing = f", {cells - finite.size:,} missing" if finite.size < cells else ""
    highest = ", ".join(f"{name} {value:.4g}" for name, value in heat.highest(layer, 3))
    return f"{prefix}from {finite.min():.4g} to {finite.max():.4g}{unit}{missing}. Highest: {highest}."


def _alternative(heat: Heat, text: str) -> str:
    first = heat.layers[0]
    paragraphs = "".join(f"<p>{line}</p>" for line in map(escaped, text.splitlines()[:40]))
    if heat.numbers:
        rows: list[list[object]] = [
            [heat.rows.label(i), *(("" if np.isnan(v) else f"{v:.4g}") for v in first.values[i])]
            for i in range(heat.rows.n)
        ]
        return paragraphs + table(["", *(heat.columns.label(j) for j in range(heat.columns.n))], rows)
    if first.scale.names:
        return paragraphs
    listed = [[name, f"{value:.4g}"] for name, value in heat.highest(first, _LISTED)]
    title = f"The {len(listed)} highest" + (f" of {first.name}" if first.name else "")
    return paragraphs + table([heat.item, first.scale.unit or "value"], listed, title)


def _cell_size(heat: Heat) -> tuple[float, float]:
    """Width and height of a cell in pixels at full size."""
    rows, columns = heat.rows.n, heat.columns.n
    if heat.numbers:
        return 76.0, 30.0
    room = 180 if heat.panels and len(heat.layers) > 1 else 640
    height = min(22.0, max(3.0, room / max(rows, 0.6 * columns)))
    width = min(22.0, room / columns, 4 * height)
    if heat.columns.labels is not None and heat.item == "component":
        widest = max(width_of(name, _LETTERS) for name in heat.columns.labels)
        width = min(max(64.0, widest + 8), room / columns)
    elif heat.columns.labels is not None:
        width = height = max(10.0, min(22.0, room / columns))
    return round(width, 2), round(height, 2)


def _picture(heat: Heat) -> str:
    """The maps, of which the script shows some, and their colour bars."""
    heat = replace(heat, rows=_shortened(heat.rows), columns=_shortened(heat.columns))
    plot = Plot(heat, _cell_size(heat), _LETTERS)
    panels: dict[str, list[int]] = {}
    for number, layer in enumerate(heat.layers):
        panels.setdefault(layer.name if heat.panels else "", []).append(number)
    parts = []
    for name, numbers in panels.items():
        drawing = plot.drawing([heat.layers[i] for i in numbers], [f"map{i}" for i in numbers])
        title = f'<div class="tlhm-pt">{escaped(name)}</div>' if name else ""
        least = _SMALLEST * drawing.width if len(panels) == 1 else 0.0
        svg = drawing.svg(title=name or heat.title, least=least)
        parts.append(f'<div class="tlhm-panel">{title}<div class="tlhm-over">{svg}</div></div>')
    many = " tlhm-many" if len(panels) > 1 else ""
    bars = "".join(_bar(heat, scale, number) for number, scale in enumerate(_scales(heat)))
    if any(layer.marked is not None and layer.marked.any() for layer in heat.layers):
        bars += f'<span class="tlhm-dot">{escaped(heat.mark)}</span>'
    if any((np.isnan(layer.values) & heat.inside).any() for layer in heat.layers):
        bars += '<span class="tlhm-gone">missing</span>'
    standing = "" if heat.item == "pair" else " tlhm-standing"
    main = f'<div class="tlhm-area{many}">{"".join(parts)}</div><div class="tlhm-bar">{bars}</div>'
    return f'<div class="tlhm-sides"><div class="tlhm-main{standing}">{main}</div></div>'


def _shortened(axis: Axis) -> Axis:
    labels = axis.labels and tuple(shortened(name, _LABEL_ROOM, _LETTERS) for name in axis.labels)
    return replace(axis, labels=labels)


def _bar(heat: Heat, scale: Scale, number: int) -> str:
    """A colour bar: upright beside the maps where there is room, else lying below them."""
    if not any(np.isfinite(layer.values).any() for layer in heat.layers if layer.scale == scale):
        inside = '<span class="tlhm-k">no values</span>'
    elif scale.names:
        inside = scale_drawing(scale, 200, size=_LETTERS).svg(title=scale.unit)
    else:
        kinds = [("lying", 220.0)] if heat.item == "pair" else [("lying", 220.0), ("upright", 200.0)]
        drawings = [(kind, scale_drawing(scale, long, lying=kind == "lying", size=_LETTERS)) for kind, long in kinds]
        inside = "".join(
            f'<div class="tlhm-over tlhm-{kind}">{drawing.svg(title=scale.unit)}</div>' for kind, drawing in drawings
        )
    return f'<div class="tlhm-scale" data-scale="{number}"{" hidden" if number else ""}>{inside}</div>'


def _scales(heat: Heat) -> list[Scale]:
    return list(dict.fromkeys(layer.scale for layer in heat.layers))


def page_data(heat: Heat) -> dict[str, Any]:
    """What the script tells of."""
    scales = _scales(heat)
    data: dict[str, Any] = {
        "item": heat.item,
        "rows": {"name": heat.rows.name, "n": heat.rows.n, "labels": heat.rows.labels},
        "cols": {"name": heat.columns.name, "n": heat.columns.n, "labels": heat.columns.labels},
        "panels": heat.panels,
        "lower": heat.lower,
        "numbers": heat.numbers,
        "switches": heat.switches,
        "lengths": heat.lengths,
        "drill": heat.drill,
        "pinned": None if heat.pinned is None else [heat.pinned.layer, heat.pinned.head],
        "mark": heat.mark,
        "scales": [
            {
                "low": scale.low,
                "high": scale.high,
                "unit": scale.unit,
                "signed": scale.signed,
                "names": [name for name, _ in scale.names] or None,
            }
            for scale in scales
        ],
        "maps": [_map_data(layer, scales.index(layer.scale)) for layer in heat.layers],
    }
    return {name: value for name, value in data.items() if value not in (None, {}, False, "")}


def _map_data(layer: Layer, scale: int) -> dict[str, Any]:
    data: dict[str, Any] = {"name": layer.name, "scale": scale, "values": packed(layer.values)}
    if layer.group:
        data["group"] = layer.group
    if layer.null is not None:
        data["null"] = packed_half(layer.null)
    if layer.interval is not None:
        data["interval"] = [packed_half(bound) for bound in layer.interval]
    if layer.marked is not None:
        data["marked"] = np.flatnonzero(layer.marked).tolist()
    if layer.details:
        data["details"] = [[name, packed(values)] for name, values in layer.details]
    return data
