"""What figures are made of: rectangles, text, paths and cells; one painter for pages and .svg, one for .pdf and .png.

Coordinates run right and down from the upper left corner: pixels on a page, 1/72 inch (points) in print. A colour is
``#rrggbb``, ``"none"``, or an ink: the name of a colour that a page in the dark has another shade of.

>>> drawing = Drawing([Rect(0, 0, 40, 20, "pane"), Text(20, 13, "a <b>", anchor="middle")], 40, 20)
>>> drawing.svg()  # doctest: +ELLIPSIS
'<svg ... viewBox="0 0 40 20"...<rect ... fill="#f5f6f8"/><text ...>a &lt;b&gt;</text></svg>'
"""

import base64
import html
import itertools
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from pathlib import Path as File
from typing import Any, Literal, TypeAlias

import numpy as np

from ..core.files import replacing
from .colours import SERIES
from .text import visible

Number: TypeAlias = float | int
Point: TypeAlias = tuple[Number, Number]

Anchor: TypeAlias = Literal["start", "middle", "end"]
"""Which part of a text stands at its place."""

INKS = {
    "text": "#1b1c1e",
    "soft": "#5b5f66",
    "line": "#d0d3d8",
    "pane": "#f5f6f8",
    "mark": "#d0006f",
    "ground": "#ffffff",
    **{f"series{number}": colour for number, colour in enumerate(SERIES)},
}
"""Colours in print and on a light page; in the dark the page's style has others of the same names."""

MIDDLE = 0.36
"""From the middle of a line of text down to its baseline, as a share of its size."""

_SIZE = 11.0
"""Of letters, if nothing else is said."""

_DEFAULTS = {
    "fill": INKS["text"],
    "stroke": "none",
    "stroke-width": 1,
    "opacity": 1,
    "rx": 0,
    "text-anchor": "start",
    "font-size": _SIZE,
}
"""Attributes that shapes need not say."""

_FONTS = "DejaVu Sans,Verdana,sans-serif"
_MONO = "DejaVu Sans Mono,monospace"
_NAMESPACE = "http://www.w3.org/2000/svg"
_DPI = 200
_OVERLAP = 0.4
"""How far a cell reaches into the next one at most (small cells: 15%): else viewers show hairlines between them."""

_STYLE = {
    "font.family": "DejaVu Sans",
    "pdf.fonttype": 42,
    # Letters are as wide on a screen as in print: rounded to whole pixels, a long line would not fit.
    "text.hinting": "none",
    # Tokens are text, never mathematics.
    "text.usetex": False,
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Rect:
    """A rectangle, or with a ``radius`` of half its sides a circle; ``said`` is shown by a page under the pointer."""

    x: Number
    y: Number
    width: Number
    height: Number
    fill: str = "none"
    stroke: str = "none"
    line: Number = 1.0
    radius: Number = 0.0
    opacity: Number = 1.0
    said: str = ""


@dataclass(frozen=True)
class Text:
    """A line of text on its baseline; ``upright`` text reads from below to above, turned around the same point."""

    x: Number
    y: Number
    text: str
    size: Number = _SIZE
    anchor: Anchor = "start"
    fill: str = "text"
    upright: bool = False
    bold: bool = False
    italic: bool = False
    mono: bool = False


@dataclass(frozen=True)
class Path:
    """Lines through points, several for one shape: filled if it has a ``fill``, in cubic curves if ``curved``.

    A curve is a point, and then two controls and an end for each of its parts. ``dash`` is the length of dashes and
    of the gaps between them. Lines with ``round`` ends that lead nowhere are discs.
    """

    lines: tuple[tuple[Point, ...], ...]
    stroke: str = "line"
    width: Number = 1.0
    fill: str = "none"
    curved: bool = False
    dash: tuple[Number, ...] = ()
    round: bool = False
    opacity: Number = 1.0


@dataclass(frozen=True, eq=False)
class Cells:
    """A grid of coloured cells, each as large as ``cell`` (width, height).

    ``colours`` has bytes of red, green, blue and opacity by row and column (:meth:`Scale.pixels` of values makes them),
    clear where there is no cell. On a page it is an image of one pixel per cell; by its ``key`` the page's script
    finds it.
    """

    x: Number
    y: Number
    cell: Point
    colours: np.ndarray
    key: str = ""


@dataclass(frozen=True)
class Group:
    """Shapes that belong together, moved right and down by ``x`` and ``y``.

    Attributes:
        shapes: Back to front.
        x, y: Where they are moved.
        key: By which a page's script and style find them: a class (``tlhm-`` and the key) and ``data-key``.
        said: What a page says about them under the pointer and to the keyboard, which can then reach them.
        hidden: Whether a page shows them only when its script says so; they are never printed.
    """

    shapes: Sequence["Shape"]
    x: Number = 0.0
    y: Number = 0.0
    key: str = ""
    said: str = ""
    hidden: bool = False


Shape: TypeAlias = Rect | Text | Path | Cells | Group


def line(x: Number, y: Number, to_x: Number, to_y: Number, **style: Any) -> Path:
    """A straight line."""
    return Path((((x, y), (to_x, to_y)),), **style)


@dataclass
class Drawing:
    """A picture: shapes from back to front, and its size."""

    shapes: list[Shape] = field(default_factory=list)
    width: Number = 0.0
    height: Number = 0.0

    def add(self, *shapes: Shape) -> None:
        """Put shapes in front of the others."""
        self.shapes += shapes

    def svg(self, *, title: str = "", kind: str = "", least: Number = 0.0) -> str:
        """The picture as part of a page, where it shrinks with the screen down to a width of ``least`` pixels.

        The style of the page finds it as ``tlhm-drawing`` and by its ``kind`` (``tlhm-`` and the kind).
        """
        kinds, style = "tlhm-drawing" + f" tlhm-{kind}" * bool(kind), f"min-width:{_n(least)}px" * bool(least)
        return self._element(class_=kinds, style=style, width=self.width, height=self.height, aria_label=title)

    def at(self, x: Number, y: Number) -> Group:
        """The whole picture as part of another one."""
        return Group(self.shapes, x, y)

    def _element(self, about: str = "", *, vectors: bool = False, **attributes: Any) -> str:
        inside = about + "".join(markup(shape, vectors) for shape in self.shapes)
        attributes["viewBox"] = f"0 0 {_n(self.width)} {_n(self.height)}"
        letters = {"font_family": _FONTS, "font_size": f"{_n(_SIZE)}px", "xml:space": "preserve"}
        # All inside has the colour of text if it says nothing else: "#1b1c1e" would be left out here, too.
        return _tag("svg", inside, role="img", **attributes, **letters, fill=INKS["text"].upper())

    def save(self, path: str | File, *, title: str = "", source: str = "") -> None:
        """Write the picture as .svg, .pdf or .png; the same values give the same bytes.

        Letters of a .pdf are embedded; ``title`` and ``source`` become the file's metadata.
        """
        path = File(path)
        title, source = (text.encode("utf-8", "backslashreplace").decode() for text in (title, source))
        with replacing(path) as temporary:
            if path.suffix.lower() == ".svg":
                about = "".join(_tag(tag, _text(text)) for tag, text in (("title", title), ("desc", source)) if text)
                size = {"width": f"{_n(self.width)}pt", "height": f"{_n(self.height)}pt"}
                whole = self._element(about, vectors=True, xmlns=_NAMESPACE, **size)
                temporary.write_text(f'<?xml version="1.0" encoding="UTF-8"?>\n{whole}\n', encoding="utf-8")
            else:
                self._print(temporary, path.suffix.lower()[1:], title, source)

    def _print(self, path: File, form: str, title: str, source: str) -> None:
        # Half a second, which pages do without.
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        with rc_context(_STYLE), warnings.catch_warnings():
            # Letters that no installed font has are drawn as boxes.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            wide, tall = round(self.width, 2), round(self.height, 2)
            sheet = Figure(figsize=(wide / 72, tall / 72))
            axes = sheet.add_axes((0, 0, 1, 1), xlim=(0, wide), ylim=(tall, 0))
            axes.axis("off")
            for number, patch in enumerate(_patches(self.shapes)):
                patch.set_zorder(number)
                axes.add_artist(patch)
            about = {"Title": title, "CreationDate": None, "Producer": None, "Creator": None, "Subject": source}
            if form == "png":
                about = {"Software": None, "Title": title, "Description": source}
            sheet.savefig(path, format=form, dpi=_DPI, metadata=about)


def every_shape(shapes: Iterable[Shape], x: Number = 0.0, y: Number = 0.0) -> Iterator[tuple[Shape, Point]]:
    """Shapes of all groups that are not hidden, and how far each is moved."""
    for shape in shapes:
        if isinstance(shape, Group):
            if not shape.hidden:
                yield from every_shape(shape.shapes, x + shape.x, y + shape.y)
        else:
            yield shape, (x, y)


def _n(value: Number) -> str:
    """A coordinate with two decimals at most.

    >>> _n(1.0), _n(0.456), _n(-0.001)
    ('1', '0.46', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _text(text: object) -> str:
    return html.escape(visible(str(text)))


def _colour(ink: str) -> str:
    return INKS.get(ink, ink)


def _tag(tag: str, inside: str = "", **attributes: Any) -> str:
    """An element with its attributes; those that are empty, or as they are anyway, are left out."""
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    start = tag + "".join(
        f' {name}="{_n(value) if isinstance(value, float | int) else _text(value)}"'
        for name, value in named.items()
        if value != "" and _DEFAULTS.get(name) != value
    )
    return f"<{start}>{inside}</{tag}>" if inside else f"<{start}/>"


def _inks(fill: str, stroke: str = "none") -> dict[str, str]:
    """Attributes for colours; classes let the style of a page replace those of inks."""
    kinds = [f"tlhm-fill-{fill}"] * (fill in INKS and fill != "text") + [f"tlhm-stroke-{stroke}"] * (stroke in INKS)
    return {"class_": " ".join(kinds), "fill": _colour(fill), "stroke": _colour(stroke)}


def _said(text: str) -> str:
    return _tag("title", _text(text)) if text else ""


@singledispatch
def markup(shape: Shape, vectors: bool) -> str:
    """A shape as SVG; ``vectors`` writes cells as lines, which no viewer blurs, instead of an image."""
    raise TypeError(f"{type(shape).__name__} is not a shape.")


@markup.register
def _(shape: Rect, vectors: bool) -> str:
    look: dict[str, Any] = {**_inks(shape.fill, shape.stroke), "stroke_width": shape.line, "opacity": shape.opacity}
    if _is_disc(shape):
        center = {"cx": shape.x + shape.radius, "cy": shape.y + shape.radius}
        return _tag("circle", _said(shape.said), **center, r=shape.radius, **look)
    size: dict[str, Any] = {
        "x": shape.x,
        "y": shape.y,
        "width": shape.width,
        "height": shape.height,
        "rx": shape.radius,
    }
    return _tag("rect", _said(shape.said), **size, **look)


@markup.register
def _(shape: Text, vectors: bool) -> str:
    turned = f"rotate(-90 {_n(shape.x)} {_n(shape.y)})" * shape.upright
    place: dict[str, Any] = {"x": shape.x, "y": shape.y, "text_anchor": shape.anchor, "transform": turned}
    weight = {"font_weight": "bold" * shape.bold, "font_style": "italic" * shape.italic}
    letters: dict[str, Any] = {"font_size": shape.size, "font_family": _MONO * shape.mono, **weight}
    return _tag("text", _text(shape.text), **place, **_inks(shape.fill), **letters)


@markup.register
def _(shape: Path, vectors: bool) -> str:
    look: dict[str, Any] = {**_inks(shape.fill, shape.stroke), "stroke_width": shape.width, "opacity": shape.opacity}
    ends = {"stroke_dasharray": " ".join(map(_n, shape.dash)), "stroke_linecap": "round" * shape.round}
    way = "C" if shape.curved else "L"
    ways = ((_at(first), " ".join(map(_at, others))) for first, *others in shape.lines)
    return _tag("path", **look, **ends, d="".join(f"M{first}{way * bool(others)}{others}" for first, others in ways))


def _at(point: Point) -> str:
    return f"{_n(point[0])},{_n(point[1])}"


@markup.register
def _(shape: Group, vectors: bool) -> str:
    if shape.hidden and vectors:
        return ""
    inside = _said(shape.said) + "".join(markup(each, vectors) for each in shape.shapes)
    moved = f"translate({_n(shape.x)} {_n(shape.y)})" * bool(shape.x or shape.y)
    key = {"class_": f"tlhm-{shape.key}" * bool(shape.key), "data_key": shape.key, "transform": moved}
    return _tag("g", inside, **key, style="display:none" * shape.hidden, tabindex="0" * bool(shape.said))


@markup.register
def _(shape: Cells, vectors: bool) -> str:
    width, height = shape.cell
    rows, columns, _ = shape.colours.shape
    if not vectors:
        size: dict[str, Any] = {"x": shape.x, "y": shape.y, "width": columns * width, "height": rows * height}
        image = "data:image/png;base64," + base64.b64encode(png(shape.colours)).decode()
        looks = {"preserveAspectRatio": "none", "image_rendering": "pixelated", "data_key": shape.key}
        return _tag("image", **size, **looks, href=image)
    paths = "".join(
        _tag("path", stroke=colour, d="".join(f"M{_n(x)},{_n(y)}H{_n(end)}" for x, end, y in lines.tolist()))
        for colour, lines in _cell_lines(shape)
    )
    return _tag("g", paths, stroke_width=height + _overlap(height), fill="none", shape_rendering="crispEdges")


def _overlap(side: Number) -> float:
    return min(_OVERLAP, 0.15 * side)


def _cell_lines(shape: Cells) -> Iterator[tuple[str, np.ndarray]]:
    """For each colour the lines that are its cells, as wide as those are tall: x of both ends, and y."""
    (width, height), columns = shape.cell, shape.colours.shape[1]
    for colour, runs in colour_runs(shape.colours).items():
        row, first, last = runs.T
        ends = shape.x + last * width + np.where(last < columns, _overlap(width), 0.0)
        yield colour, np.stack([shape.x + first * width, ends, shape.y + (row + 0.5) * height], axis=1)


def colour_runs(colours: np.ndarray) -> dict[str, np.ndarray]:
    """Cells of equal colour in a row, as (row, first column, column after the last), by their colour.

    Shades are rounded to a fifth of the steps a screen has, which no eye tells apart: few colours make small files.

    >>> colour_runs(np.array([[[0, 0, 0, 255], [1, 0, 0, 255], [250, 0, 0, 255]]], dtype=np.uint8))
    {'#000000': array([[0, 0, 2]]), '#fa0000': array([[0, 2, 3]])}
    """
    shades = ((colours.astype(int) + 2) // 5 * 5) @ [1 << 16, 1 << 8, 1, 0]
    shades[colours[..., 3] == 0] = -1
    new = np.ones(shades.shape, dtype=bool)
    new[:, 1:] = shades[:, 1:] != shades[:, :-1]
    rows, firsts = np.nonzero(new)
    ends = np.append(np.flatnonzero(new)[1:], shades.size) - rows * shades.shape[1]
    runs, shade = np.stack([rows, firsts, ends], axis=1), shades[new]
    order = np.argsort(shade, kind="stable")
    kinds, starts = np.unique(shade[order], return_index=True)
    parts = zip(kinds.tolist(), np.split(runs[order], starts[1:]), strict=True)
    return {f"#{kind:06x}": part for kind, part in parts if kind >= 0}


def png(colours: np.ndarray) -> bytes:
    """An image of one pixel per cell."""
    rows, columns, _ = colours.shape
    clear = bool((colours[..., 3] < 255).any())
    lines = np.zeros((rows, 1 + columns * (4 if clear else 3)), dtype=np.uint8)
    lines[:, 1:] = colours[..., : 4 if clear else 3].reshape(rows, -1)
    head = struct.pack(">2I5B", columns, rows, 8, 6 if clear else 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )


def _patches(shapes: Iterable[Shape]) -> Iterator[Any]:
    """What matplotlib draws."""
    for _, run in itertools.groupby(every_shape(shapes), _kind):
        alike = list(run)
        shape, (right, down) = alike[0]
        if isinstance(shape, Text):
            yield _letters(shape, right, down)
        elif isinstance(shape, Rect):
            outlines = [_outline(each, *moved) for each, moved in alike if isinstance(each, Rect)]
            yield _patch(outlines, shape.stroke, shape.line, shape.fill, alpha=shape.opacity)
        elif isinstance(shape, Path):
            way = 4 if shape.curved else 2
            parts = [_lines([(x + right, y + down) for x, y in part], way) for part in shape.lines]
            style: dict[str, Any] = {"alpha": shape.opacity, "capstyle": "round" if shape.round else "butt"}
            if shape.dash:
                style["linestyle"] = (0, tuple(length / shape.width for length in shape.dash))
            yield _patch(parts, shape.stroke, shape.width, shape.fill, **style)
        elif isinstance(shape, Cells):
            tall = shape.cell[1]
            for colour, lines in _cell_lines(shape):
                # Short numbers make small files.
                places = np.round(lines + np.array([right, right, down]), 1 if min(shape.cell) > 2 else 2)
                points = places[:, [0, 2, 1, 2]].reshape(-1, 2)
                parts = [(points, [1, 2] * len(lines))]
                yield _patch(parts, colour, tall + _overlap(tall))


def _kind(placed: tuple[Shape, Point]) -> Any:
    """What rectangles have in common that are drawn at once, which is many times faster; other shapes are alone."""
    shape, moved = placed
    if isinstance(shape, Rect):
        return shape.fill, shape.stroke, shape.line, shape.opacity
    return id(shape), moved


Outline: TypeAlias = tuple[Any, Sequence[int]]
"""Points, and what matplotlib does with each: 1 moves there, 2 draws a line, 4 a curve."""


def _outline(shape: Rect, right: Number, down: Number) -> Outline:
    from matplotlib.patches import FancyBboxPatch
    from matplotlib.path import Path as Curve

    x, y, radius = shape.x + right, shape.y + down, shape.radius
    style = f"round,pad=0,rounding_size={radius}" if radius else "square,pad=0"
    disc = (x + radius, y + radius), radius
    path: Any = (
        Curve.circle(*disc) if _is_disc(shape) else FancyBboxPatch((x, y), shape.width, shape.height, style).get_path()
    )
    return path.vertices.tolist(), path.codes.tolist()


def _is_disc(shape: Rect) -> bool:
    return bool(shape.radius) and shape.width == shape.height == 2 * shape.radius


def _lines(points: Sequence[Point], way: int = 2) -> Outline:
    return points, [1, *[way] * (len(points) - 1)]


def _patch(outlines: Sequence[Outline], stroke: str, width: Number, fill: str = "none", **style: Any) -> Any:
    """What matplotlib draws of several outlines that look alike."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    points, codes = (np.concatenate(part) for part in zip(*outlines, strict=True))
    colours = {"facecolor": _colour(fill), "edgecolor": _colour(stroke)}
    look = {"linewidth": width if stroke != "none" else 0, "capstyle": "butt", "snap": False, "clip_on": False}
    return PathPatch(Curve(points, codes), **{**look, **colours, **style})


def _letters(shape: Text, right: Number, down: Number) -> Any:
    from matplotlib.text import Text as Letters

    side: Any = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
    return Letters(
        shape.x + right,
        shape.y + down,
        visible(shape.text),
        size=shape.size,
        color=_colour(shape.fill),
        horizontalalignment=side,
        verticalalignment="baseline",
        rotation=90 if shape.upright else 0,
        rotation_mode="anchor",
        weight="bold" if shape.bold else "normal",
        style="italic" if shape.italic else "normal",
        family="DejaVu Sans Mono" if shape.mono else "DejaVu Sans",
    )
