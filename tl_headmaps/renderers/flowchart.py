"""Which tokens each head binds together: a flowchart whose token boxes are the rows of the attention matrix beside it.

Lines lead from heads to tokens. Where groups of different heads overlap, that would be a tangle: lines then lead to
stripes beside the tokens, one lane for the groups of each head.

>>> flow(["It", "I", "is"], {"Head 0": [([0, 1], 1.0)]}, matrix=[[1, 1, 0], [1, 1, 0], [0, 0, 1]])
Figure('Heads and token groups', Flow, 3 KB)
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from ..core.errors import UsageError
from ..core.types import check_choice
from .colours import SERIES, Scale
from .figure import Figure
from .grids import checked
from .page import escaped, figure_body, label, table
from .text import significant, visible

MAX_TOKENS = 128
MAX_HEADS = 64

LabelSide: TypeAlias = Literal["bottom", "top"]
"""Where the names of the matrix' columns stand."""

ON, OFF = "#2f6fd0", "#3a3d42"
"""Colours of 1 and 0 in a matrix of nothing else."""

BOX = 0.8
"""Height of a box, as a share of a row."""

STRIPE = 8.0
"""Width of a group beside its tokens."""

_LETTER, _SMALL_LETTER = 7.6, 6.6
_GAP, _LANE = 150.0, 14.0
"""Widths of letters, of the way from heads to tokens, and of a lane of groups."""

_WIDEST = 20
_TITLED_CELLS = 1600
_SMALLEST = 0.72
"""Letters of a label that are shown, cells up to which each says its value, and how far a phone may shrink it all."""

_LEGEND_HEIGHT = 46.0
_BIT = 3.0
"""Height of the legend with its two lines, and width of a colour in its bar."""

_ALIKE = 0.5
"""Share of common tokens from which on two groups may have the same colour."""

Link: TypeAlias = tuple[tuple[int, ...], float]
"""Rows of the tokens of a group, and the share of the head's attention that is inside it."""


@dataclass(frozen=True)
class Flow:
    """Heads with the groups they bind, and the attention between the tokens; tokens are in the order of the rows."""

    title: str
    tokens: tuple[str, ...]
    heads: tuple[tuple[str, tuple[Link, ...]], ...]
    matrix: np.ndarray | None = None
    scale: Scale | None = None
    labels: LabelSide = "bottom"
    note: str = ""

    @property
    def is_binary(self) -> bool:
        """Whether the matrix holds nothing but 0 and 1."""
        return self.matrix is not None and set(np.unique(self.matrix)) <= {0.0, 1.0}

    @property
    def is_causal(self) -> bool:
        """Whether no row attends to a later one; those cells are then left empty."""
        return self.matrix is not None and not self.is_binary and not np.triu(self.matrix, 1).any()

    @cached_property
    def colours(self) -> dict[tuple[int, ...], int]:
        """A colour for each group, by its number; heads that bind the same tokens share it, similar groups may."""
        numbers: dict[tuple[int, ...], int] = {}
        for _, links in self.heads:
            taken = {numbers[tokens] for tokens, _ in links if tokens in numbers}
            for tokens in [tokens for tokens, _ in links if tokens not in numbers]:
                numbers[tokens] = _colour_for(tokens, numbers, taken)
                taken.add(numbers[tokens])
        return numbers

    @cached_property
    def lanes(self) -> tuple[int, ...]:
        """For each head the lane that its groups stand in; heads share one unless their groups overlap."""
        lanes: list[set[tuple[int, ...]]] = []
        numbers = []
        for _, links in self.heads:
            own = {tokens for tokens, _ in links}
            fits = (number for number, lane in enumerate(lanes) if _are_apart(own | lane))
            numbers.append(next(fits, len(lanes)))
            if numbers[-1] == len(lanes):
                lanes.append(set())
            lanes[numbers[-1]] |= own
        return tuple(numbers)

    @property
    def n_lanes(self) -> int:
        """Lanes between heads and tokens; none where lines from the heads to the tokens need not cross groups."""
        return 0 if max(self.lanes, default=0) == 0 else max(self.lanes) + 1

    def head_colour(self, links: Sequence[Link]) -> int | None:
        """Colour of the only group a head binds."""
        return self.colours[links[0][0]] if len(links) == 1 else None

    def token_colour(self, row: int) -> int | None:
        """Colour of the only group a token is in."""
        own = {colour for tokens, colour in self.colours.items() if row in tokens}
        return own.pop() if len(own) == 1 else None

    def cell_colour(self, value: float) -> str:
        """Colour of a cell of the matrix."""
        if self.is_binary:
            return ON if value else OFF
        return "" if self.scale is None else self.scale.colour(value)


def _are_apart(groups: set[tuple[int, ...]]) -> bool:
    rows = [row for group in groups for row in group]
    return len(rows) == len(set(rows))


def _colour_for(tokens: tuple[int, ...], numbers: Mapping[tuple[int, ...], int], taken: set[int]) -> int:
    """A colour that the same head has not used: of the group that shares most tokens, else a new one, else any."""

    def alike(other: tuple[int, ...]) -> float:
        return len(set(tokens) & set(other)) / len(set(tokens) | set(other))

    free = [number for number in range(len(SERIES)) if number not in taken]
    shared = [other for other, number in numbers.items() if number in free and alike(other) >= _ALIKE]
    if shared:
        return numbers[max(shared, key=alike)]
    unused = [number for number in free if number not in numbers.values()]
    return (unused or free or [len(numbers) % len(SERIES)])[0]


def runs(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last row of each unbroken run of a group's tokens.

    >>> list(runs((0, 1, 2, 5)))
    [(0, 2), (5, 5)]
    """
    for _, run in itertools.groupby(enumerate(tokens), lambda each: each[1] - each[0]):
        rows = [row for _, row in run]
        yield rows[0], rows[-1]


@dataclass(frozen=True)
class Layout:
    """Where everything is, in pixels: what the page and print draw from.

    Attributes:
        row, cell: Height of a row, and width of a column of the matrix.
        top: Of the first row.
        left, token, right: Width of head boxes, left edge and width of token boxes.
        lane: Left edge of the groups of each head, where they stand in lanes before the tokens.
        matrix, legend: Left edge of the matrix, and left edge and top of its legend.
        head_at: Middle of each head box.
        upright: Whether column labels are turned.
        width, height: Of everything.
    """

    row: float
    cell: float
    top: float
    left: float
    token: float
    right: float
    lane: tuple[float, ...]
    matrix: float
    legend: tuple[float, float]
    head_at: tuple[float, ...]
    upright: bool
    width: float
    height: float

    def middle(self, row: int) -> float:
        """Middle of a row."""
        return self.top + (row + 0.5) * self.row

    def stripes(self, tokens: Sequence[int]) -> list[tuple[float, float]]:
        """Top and height of a group in its lane, for each unbroken run of rows."""
        edge = (1 - BOX) / 2 * self.row
        return [
            (self.top + first * self.row + edge, (last - first + 1) * self.row - 2 * edge)
            for first, last in runs(tokens)
        ]

    def curves(self, head: int, tokens: Sequence[int]) -> list[tuple[tuple[float, float], ...]]:
        """Cubic curves from a head to a group: to its longest run in its lane, or else to each of its tokens."""
        if self.lane:
            top, height = max(self.stripes(tokens), key=lambda stripe: stripe[1])
            ends = [(self.lane[head], top + height / 2)]
        else:
            ends = [(self.token, self.middle(row)) for row in tokens]
        start, y = self.left + 2, self.head_at[head]
        half = (start + min([self.token, *self.lane])) / 2
        return [((start, y), (half, y), (half, to), (x, to)) for x, to in ends]


def flow(
    tokens: Sequence[object],
    heads: Mapping[Any, Any],
    *,
    matrix: Any = None,
    order: Sequence[int] | None = None,
    labels: LabelSide = "bottom",
    title: str = "Heads and token groups",
    unit: str = "attention",
    note: str = "",
) -> Figure:
    """Heads joined to the tokens they bind together, next to the attention matrix with the same rows.

    Args:
        tokens: The tokens of the text.
        heads: For each head its groups: ``{"Head 0": [([0, 1], 0.9)]}`` are positions of tokens, and the share of the
            head's attention inside the group, which is the width of its lines.
        matrix: Attention by query and key position, drawn next to the flowchart if given.
        order: Positions in the order in which they are drawn, if not that of the text.
        labels: Names of the columns under the matrix, or on top of it.
        title: What is shown.
        unit: What the matrix holds.
        note: A sentence under the figure.
    """
    check_choice(labels, LabelSide, "labels")
    names = tuple(map(label, tokens))
    if not names:
        raise UsageError("There is nothing to draw: give at least one token.")
    if len(names) > MAX_TOKENS or len(heads) > MAX_HEADS:
        raise UsageError(
            f"A flowchart of {len(heads):,} heads and {len(names):,} tokens cannot be read; it takes up to {MAX_HEADS} "
            f"heads and {MAX_TOKENS} tokens. Choose the heads with the highest scores, or a shorter text."
        )
    rows = list(range(len(names))) if order is None else [int(position) for position in order]
    if sorted(rows) != list(range(len(names))):
        raise UsageError(f"order={rows} must hold each position from 0 to {len(names) - 1} once.")
    row_of = {position: row for row, position in enumerate(rows)}
    joined = tuple((label(head), _links(label(head), groups, row_of)) for head, groups in heads.items())
    values, scale = None, None
    if matrix is not None:
        array, _ = checked(matrix, "The matrix")
        if array.shape != (len(names),) * 2 or np.isnan(array).any():
            raise UsageError(
                f"The matrix has shape {array.shape}, but there are {len(names)} tokens; they must agree, and every "
                "entry must be a number."
            )
        values = array[np.ix_(rows, rows)]
        scale = Scale.over([values], unit=visible(unit))
    shown = tuple(names[position] for position in rows)
    return flow_figure(Flow(visible(title), shown, joined, values, scale, labels, note))


def _links(head: str, groups: Any, row_of: Mapping[int, int]) -> tuple[Link, ...]:
    links = []
    for positions, share in groups:
        tokens = [int(position) for position in positions]
        if not tokens or len(set(tokens)) < len(tokens) or not set(tokens) <= set(row_of):
            raise UsageError(
                f"{head} binds the tokens {tokens}; give positions from 0 to {len(row_of) - 1}, each at most once."
            )
        if not 0 <= float(share) <= 1 + 1e-6:
            raise UsageError(f"{head} has a share of {share} inside {tokens}; a share is from 0 to 1.")
        links.append((tuple(sorted(row_of[token] for token in tokens)), float(share)))
    return tuple(links)


def flow_figure(chart: Flow) -> Figure:
    """The figure of a flowchart."""
    text = _words(chart)
    rows = [
        [head, " ".join(chart.tokens[row] for row in tokens), f"{share:.0%}"]
        for head, links in chart.heads
        for tokens, share in links
    ]
    body = figure_body(
        "flow",
        chart.title,
        inside=f'<div class="tlhm-wide">{_drawing(chart)}</div>',
        alternative=f"<p>{escaped(text)}</p>" + table(["head", "binds", "of its attention"], rows),
        note=chart.note,
    )
    return Figure(title=chart.title, body=body, needs=(), text=text, data=chart)


def _words(chart: Flow) -> str:
    heads = "; ".join(f"{head} binds {', '.join(_bound(chart, links)) or 'nothing'}" for head, links in chart.heads)
    return f"{chart.title}: {len(chart.tokens)} tokens. {heads or 'No head binds tokens together'}."


def _bound(chart: Flow, links: Sequence[Link]) -> list[str]:
    return [f"{{{' '.join(chart.tokens[row] for row in tokens)}}} ({share:.0%})" for tokens, share in links]


def layout(chart: Flow) -> Layout:
    """Places of all parts: token boxes are rows of the matrix, heads stand beside what they bind."""
    n = len(chart.tokens)
    row = 30.0 if n <= 12 else 24.0 if n <= 40 else 17.0
    cell = min(row, 640.0 / n)
    widest = min(_WIDEST, max(map(len, chart.tokens), default=1))
    upright = widest * _LETTER > cell
    above = (12 + widest * _LETTER if upright else 20.0) if chart.matrix is not None else 2.0
    top = above if chart.labels == "top" else 2.0
    ideal = []
    for _, links in chart.heads:
        rows = [place for tokens, _ in links for place in tokens]
        ideal.append(top + row * (sum(rows) / len(rows) + 0.5) if rows else top + row / 2)
    head_at = _head_places(ideal, [links for _, links in chart.heads], row, (top, top + row * max(n, len(ideal))))
    left = 18 + _LETTER * max((len(head) for head, _ in chart.heads), default=0)
    first_lane = 2 + left + _GAP - (_LANE if chart.n_lanes else 0)
    lane = tuple(first_lane + number * _LANE for number in chart.lanes) if chart.n_lanes else ()
    token = first_lane + chart.n_lanes * _LANE
    right = 14 + _LETTER * widest
    matrix = token + right + 8
    width = matrix + (n * cell + 4 if chart.matrix is not None else 0)
    body = top + row * max(n, len(ideal))
    below = max(0.0 if chart.labels == "top" else above, _LEGEND_HEIGHT) if chart.matrix is not None else 4
    # Left of the matrix' lower corner: what is under the matrix would be out of sight on a phone.
    legend = (max(2.0, matrix - 8 - _legend_width(chart)), body + 10)
    return Layout(row, cell, top, left, token, right, lane, matrix, legend, head_at, upright, width, body + below)


def _head_places(
    ideal: Sequence[float], bound: Sequence[tuple[Link, ...]], row: float, ends: tuple[float, float]
) -> tuple[float, ...]:
    """Middles of head boxes: beside what they bind, or evenly over the height if that would crowd them."""
    order = sorted(range(len(ideal)), key=lambda head: ideal[head])
    alike: list[list[int]] = []
    for head in order:
        # Heads that bind the same tokens stand together.
        if alike and [tokens for tokens, _ in bound[head]] == [tokens for tokens, _ in bound[alike[-1][0]]]:
            alike[-1].append(head)
        else:
            alike.append([head])
    places = {
        head: ideal[head] + row * (number - (len(together) - 1) / 2)
        for together in alike
        for number, head in enumerate(together)
    }
    inside = all(ends[0] + row / 2 <= place <= ends[1] - row / 2 for place in places.values())
    apart = all(places[after] - places[before] >= row - 1e-6 for before, after in itertools.pairwise(order))
    if not (inside and apart):
        step = (ends[1] - ends[0]) / max(1, len(order))
        places = {head: ends[0] + step * (number + 0.5) for number, head in enumerate(order)}
    return tuple(places[head] for head in range(len(ideal)))


def _drawing(chart: Flow) -> str:
    place = layout(chart)
    parts = []
    for number, ((head, links), y) in enumerate(zip(chart.heads, place.head_at, strict=True)):
        lines = "".join(_line(chart, place, number, tokens, share) for tokens, share in links)
        said = f"{head}: {', '.join(_bound(chart, links)) or 'nothing'}"
        parts.append(
            f'<g class="{_class(chart.head_colour(links))}" tabindex="0"><title>{escaped(said)}</title>{lines}'
            + _box(place, 2.0, y, place.left, head)
            + "</g>"
        )
    parts.append(_stripes(chart, place))
    for row, token in enumerate(chart.tokens):
        colour = None if place.lane else chart.token_colour(row)
        box = _box(place, place.token, place.middle(row), place.right, token)
        parts.append(f'<g class="{_class(colour)}">{box}</g>')
    parts.append(_cells(chart, place))
    size = f"{place.width:.0f} {place.height:.0f}"
    return (
        f'<svg class="tlhm-flow" width="{place.width:.0f}" height="{place.height:.0f}" viewBox="0 0 {size}" '
        f'style="min-width:{_SMALLEST * place.width:.0f}px" role="img" aria-label="{escaped(chart.title)}">'
        f"{''.join(parts)}</svg>"
    )


def _class(colour: int | None) -> str:
    return "" if colour is None else f"tlhm-s{colour}"


def _line(chart: Flow, place: Layout, head: int, tokens: tuple[int, ...], share: float) -> str:
    curves = " ".join(
        "M{} C{} {} {}".format(*(f"{x:.1f},{y:.1f}" for x, y in points)) for points in place.curves(head, tokens)
    )
    colour = _class(chart.colours[tokens])
    return f'<path class="{colour}" style="stroke-width:{line_width(share):.1f}" d="{curves}"/>'


def _stripes(chart: Flow, place: Layout) -> str:
    """The groups in their lanes; heads that bind the same share a stripe."""
    if not place.lane:
        return ""
    drawn = {
        (x, top): f'<rect class="tlhm-stripe {_class(chart.colours[tokens])}" x="{x:.1f}" y="{top:.1f}" '
        f'width="{STRIPE:.1f}" height="{height:.1f}" rx="3"/>'
        for (_, links), x in zip(chart.heads, place.lane, strict=True)
        for tokens, _ in links
        for top, height in place.stripes(tokens)
    }
    return "".join(drawn.values())


def line_width(share: float) -> float:
    """Width of a line in pixels: 1 for nothing, 6 for all of a head's attention."""
    return 1 + 5 * min(1.0, share)


def shortened(text: str) -> str:
    """A label that fits into its box."""
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def _box(place: Layout, x: float, y: float, width: float, text: str) -> str:
    tall = BOX * place.row
    return (
        f'<rect x="{x:.1f}" y="{y - tall / 2:.1f}" width="{width:.1f}" height="{tall:.1f}" rx="4"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + 4.5:.1f}" text-anchor="middle">{escaped(shortened(text))}</text>'
    )


def _cells(chart: Flow, place: Layout) -> str:
    if chart.matrix is None or chart.scale is None:
        return ""
    titled = chart.matrix.size <= _TITLED_CELLS
    cells = []
    for (row, column), value in np.ndenumerate(chart.matrix):
        if chart.is_causal and column > row:
            continue
        said = f"{chart.tokens[row]} → {chart.tokens[column]}: {significant(float(value))}"
        x, y = place.matrix + column * place.cell, place.top + row * place.row
        cells.append(
            f'<rect class="tlhm-cell" x="{x:.1f}" y="{y:.1f}" '
            f'width="{place.cell:.1f}" height="{place.row:.1f}" style="fill:{chart.cell_colour(float(value))}"'
            + (f"><title>{escaped(said)}</title></rect>" if titled else "/>")
        )
    bottom = place.top + place.row * len(chart.tokens)
    y = place.top - 6 if chart.labels == "top" else bottom + (8 if place.upright else 16)
    for column, token in enumerate(chart.tokens):
        x = place.matrix + (column + 0.5) * place.cell
        if not place.upright:
            at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="middle"'
        else:
            anchor = "start" if chart.labels == "top" else "end"
            at = f'x="{x:.1f}" y="{y:.1f}" transform="rotate(-90 {x:.1f} {y:.1f})" dy="4" text-anchor="{anchor}"'
        cells.append(f'<text class="tlhm-small" {at}>{escaped(shortened(token))}</text>')
    return "".join(cells) + _legend(chart, place, chart.scale)


def limits_text(scale: Scale) -> str:
    """What stands beside the colour bar of a matrix; the unit stands below."""
    return f"{significant(scale.low)} to {significant(scale.high)}"


def bar_width(scale: Scale) -> float:
    """Width of the colour bar of a matrix."""
    return _BIT * len(scale.colours)


def _legend_width(chart: Flow) -> float:
    if chart.scale is None:
        return 0.0
    first = 60.0 if chart.is_binary else bar_width(chart.scale) + 8 + _SMALL_LETTER * len(limits_text(chart.scale))
    return max(first, _SMALL_LETTER * len(chart.scale.unit))


def _legend(chart: Flow, place: Layout, scale: Scale) -> str:
    x, y = place.legend
    unit = f'<text class="tlhm-small" x="{x:.1f}" y="{y + 30:.1f}">{escaped(scale.unit)}</text>'
    if chart.is_binary:
        squares = "".join(
            f'<rect class="tlhm-cell" x="{x + 40 * i:.1f}" y="{y}" width="14" height="14" style="fill:{colour}"/>'
            f'<text class="tlhm-small" x="{x + 40 * i + 19:.1f}" y="{y + 11:.1f}">{text}</text>'
            for i, (colour, text) in enumerate([(ON, "1"), (OFF, "0")])
        )
        return squares + unit
    bar = "".join(
        f'<rect class="tlhm-bit" x="{x + _BIT * i:.1f}" y="{y}" width="{_BIT + 0.5}" height="12" '
        f'style="fill:#{colour}"/>'
        for i, colour in enumerate(scale.colours)
    )
    after = f'<text class="tlhm-small" x="{x + bar_width(scale) + 8:.1f}" y="{y + 11:.1f}">'
    return f"{bar}{after}{limits_text(scale)}</text>{unit}"
