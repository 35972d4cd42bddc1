"""Which tokens each head binds together: a flowchart whose token boxes are the rows of the attention matrix beside it.

Lines lead from heads to tokens. Where groups of different heads overlap, that would be a tangle: lines then lead to
stripes beside the tokens, one lane for the groups of each head.

>>> flow(["It", "I", "is"], {"Head 0": [([0, 1], 1.0)]}, matrix=[[1, 1, 0], [1, 1, 0], [0, 0, 1]])
Figure('Heads and token groups', Flow, 4 KB)
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from ..core.errors import UsageError
from ..core.types import check_choice
from .colours import SERIES, Scale
from .figure import Figure
from .grids import checked
from .layout import SIZE, PrintOptions, printed, shortened, width_of
from .maps import scale_drawing
from .page import escaped, figure_body, label, table
from .shapes import MIDDLE, Cells, Drawing, Group, Path, Point, Rect, Shape, Text
from .text import significant, visible

MAX_TOKENS = 128
MAX_HEADS = 64

LabelSide: TypeAlias = Literal["bottom", "top"]
"""Where the names of the matrix' columns stand."""

ON, OFF = "#2f6fd0", "#3a3d42"
"""Colours of 1 and 0 in a matrix of nothing else."""

_ON_OFF = (("0", OFF), ("1", ON))

_SMALL = 12.0
"""Size of letters around the matrix."""

_BOX, _STRIPE, _LANE, _GAP = 0.8, 8.0, 14.0, 150.0
"""Height of a box as a share of a row; widths of a group beside its tokens, of its lane, and from heads to tokens."""

_WIDEST, _TITLED_CELLS, _SMALLEST = 150.0, 1600, 0.72
"""Room of a label, cells up to which each says its value, and how far a phone may shrink it all."""

_BAR = 130.0
"""Length of the colour bar."""

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
        return self.scale is not None and bool(self.scale.names)

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
        """For each head the lane of its groups, which heads share unless their groups overlap; all 0 if none do."""
        lanes: list[set[tuple[int, ...]]] = []
        numbers = []
        for _, links in self.heads:
            groups = {tokens for tokens, _ in links}
            fits = (number for number, lane in enumerate(lanes) if _are_apart(groups | lane))
            numbers.append(next(fits, len(lanes)))
            if numbers[-1] == len(lanes):
                lanes.append(set())
            lanes[numbers[-1]] |= groups
        return tuple(numbers)

    def drawing(self, options: PrintOptions) -> Drawing:
        """The flowchart for print."""
        return printed(self.drawn(), options, title=self.title, note=self.note)

    def drawn(self) -> Drawing:
        """Heads, lines, tokens and matrix, in pixels of a page."""
        place = _Layout(self)
        drawing = Drawing([*_heads(self, place), *_tokens(self, place)], place.width, place.height)
        if self.matrix is not None and self.scale is not None:
            drawing.add(Group([*_cells(self, self.matrix, self.scale, place)], key="matrix"))
            drawing.add(*_column_names(self, place), place.legend)
        return drawing


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
        is_binary = set(np.unique(values)) <= {0.0, 1.0}
        scale = replace(Scale.over([values], unit=visible(unit)), names=_ON_OFF if is_binary else ())
    chart = Flow(visible(title), tuple(names[position] for position in rows), joined, values, scale, labels, note)
    heads_text = "; ".join(_said(chart, head, links) for head, links in joined) or "No head binds tokens together"
    text = f"{chart.title}: {len(names)} tokens. {heads_text}."
    bound = [
        [head, " ".join(chart.tokens[row] for row in group), f"{share:.0%}"]
        for head, links in joined
        for group, share in links
    ]
    drawn = chart.drawn()
    picture = drawn.svg(title=chart.title, kind="flow", least=_SMALLEST * drawn.width)
    body = figure_body(
        "flow",
        chart.title,
        inside=f'<div class="tlhm-wide">{picture}</div>',
        alternative=f"<p>{escaped(text)}</p>" + table(["head", "binds", "of its attention"], bound),
        note=note,
    )
    return Figure(title=chart.title, body=body, needs=(), text=text, data=chart)


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


def _said(chart: Flow, head: str, links: Sequence[Link]) -> str:
    groups = (f"{{{' '.join(chart.tokens[row] for row in tokens)}}} ({share:.0%})" for tokens, share in links)
    return f"{head} binds {', '.join(groups) or 'nothing'}"


class _Layout:
    """Where everything is: token boxes are rows of the matrix, heads stand beside what they bind."""

    def __init__(self, chart: Flow) -> None:
        n, n_heads = len(chart.tokens), len(chart.heads)
        has_matrix, on_top = chart.matrix is not None, chart.labels == "top"
        self.row = 30.0 if n <= 12 else 24.0 if n <= 40 else 17.0
        self.cell = min(self.row, 640.0 / n)
        widest = max(min(_WIDEST, width_of(token, SIZE)) for token in chart.tokens)
        self.upright = widest > self.cell
        names = (12 + widest if self.upright else 20.0) if has_matrix else 2.0
        self.top = names if on_top else 2.0
        bottom = self.top + self.row * max(n, n_heads)
        self.head_at = _head_places(chart.heads, self.row, self.top, bottom)
        self.head_width = 18 + max((min(_WIDEST, width_of(head, SIZE)) for head, _ in chart.heads), default=0.0)
        # Lines lead to the tokens, unless they would cross groups: then to lanes before the tokens.
        n_lanes = max(chart.lanes, default=0) + 1 if any(chart.lanes) else 0
        first = 2 + self.head_width + _GAP - (_LANE if n_lanes else 0)
        self.lanes = [first + lane * _LANE for lane in chart.lanes] if n_lanes else []
        self.tokens = first + n_lanes * _LANE
        self.token_width = 14 + widest
        self.matrix = self.tokens + self.token_width + 8
        self.matrix_bottom = self.top + self.row * n
        self.width = self.matrix + (n * self.cell + 4 if has_matrix else 0)
        legend = Drawing() if chart.scale is None else scale_drawing(chart.scale, _BAR, lying=True, size=_SMALL)
        # Left of the matrix' lower corner: what is under the matrix would be out of sight on a phone.
        self.legend = legend.at(max(2.0, self.matrix - 8 - legend.width), bottom + 10)
        self.height = bottom + (max(0.0 if on_top else names, legend.height + 10) if has_matrix else 4.0)

    def middle(self, row: int) -> float:
        """Middle of a row."""
        return self.top + (row + 0.5) * self.row

    def stripes(self, tokens: Sequence[int]) -> list[tuple[float, float]]:
        """Top and height of a group in its lane, for each unbroken run of rows."""
        half = _BOX / 2 * self.row
        ends = [(self.middle(first) - half, self.middle(last) + half) for first, last in runs(tokens)]
        return [(top, bottom - top) for top, bottom in ends]

    def curves(self, head: int, tokens: Sequence[int]) -> tuple[tuple[Point, ...], ...]:
        """Cubic curves from a head to a group: to its longest run in its lane, or else to each of its tokens."""
        if self.lanes:
            top, height = max(self.stripes(tokens), key=lambda stripe: stripe[1])
            ends = [(self.lanes[head], top + height / 2)]
        else:
            ends = [(self.tokens, self.middle(row)) for row in tokens]
        start, y = self.head_width + 2, self.head_at[head]
        half = (start + min([self.tokens, *self.lanes])) / 2
        return tuple(((start, y), (half, y), (half, to), (x, to)) for x, to in ends)


def _head_places(
    heads: Sequence[tuple[str, tuple[Link, ...]]], row: float, top: float, bottom: float
) -> tuple[float, ...]:
    """Middles of head boxes: beside what they bind, or evenly over the height if that would crowd them."""
    groups = [tuple(tokens for tokens, _ in links) for _, links in heads]
    ideal = [top + row * (float(np.mean(list(itertools.chain(*bound)) or [0])) + 0.5) for bound in groups]
    order = sorted(range(len(ideal)), key=lambda head: ideal[head])
    places = {}
    # Heads that bind the same tokens stand together.
    for _, alike in itertools.groupby(order, key=lambda head: groups[head]):
        together = list(alike)
        for number, head in enumerate(together):
            places[head] = ideal[head] + row * (number - (len(together) - 1) / 2)
    inside = all(top + row / 2 <= place <= bottom - row / 2 for place in places.values())
    apart = all(places[after] - places[before] >= row - 1e-6 for before, after in itertools.pairwise(order))
    if not (inside and apart):
        step = (bottom - top) / max(1, len(order))
        places = {head: top + step * (number + 0.5) for number, head in enumerate(order)}
    return tuple(places[head] for head in range(len(ideal)))


def _heads(chart: Flow, place: _Layout) -> Iterator[Shape]:
    """Each head with its lines, which a page makes stand out together; then the groups in their lanes."""
    for number, (head, links) in enumerate(chart.heads):
        lines = [
            Path(
                place.curves(number, tokens),
                _ink(chart.colours[tokens]),
                # From 1 pixel for nothing to 6 for all of a head's attention.
                1 + 5 * min(1.0, share),
                curved=True,
                opacity=0.55,
            )
            for tokens, share in links
        ]
        colour = chart.colours[links[0][0]] if len(links) == 1 else None
        box = _box(place, 2.0, place.head_at[number], place.head_width, head, colour)
        yield Group([*lines, *box], key="head", said=_said(chart, head, links))
    # Heads that bind the same tokens share a stripe.
    stripes = {
        (x, top): Rect(x, top, _STRIPE, height, _ink(chart.colours[tokens]), radius=3)
        for (_, links), x in zip(chart.heads, place.lanes, strict=False)
        for tokens, _ in links
        for top, height in place.stripes(tokens)
    }
    yield Group([*stripes.values()], key="stripes")


def _tokens(chart: Flow, place: _Layout) -> Iterator[Shape]:
    """A box for each token, in the colour of its only group unless there are lanes for that."""
    for row, token in enumerate(chart.tokens):
        groups = {colour for tokens, colour in chart.colours.items() if row in tokens}
        colour = groups.pop() if len(groups) == 1 and not place.lanes else None
        yield from _box(place, place.tokens, place.middle(row), place.token_width, token, colour)


def _box(place: _Layout, x: float, middle: float, width: float, text: str, colour: int | None) -> Iterator[Shape]:
    height = _BOX * place.row
    yield Rect(x, middle - height / 2, width, height, "pane", _ink(colour), 1.5, 4)
    yield Text(x + width / 2, middle + MIDDLE * SIZE, shortened(text, _WIDEST, SIZE), SIZE, "middle")


def _ink(colour: int | None) -> str:
    return "line" if colour is None else f"series{colour}"


def _cells(chart: Flow, matrix: np.ndarray, scale: Scale, place: _Layout) -> Iterator[Shape]:
    """Cells of the matrix, each with its value if they are not too many; none where attention is causal."""
    if not chart.is_binary and not np.triu(matrix, 1).any():
        matrix = np.where(np.tri(len(matrix), dtype=bool), matrix, np.nan)
    if matrix.size > _TITLED_CELLS:
        yield Cells(place.matrix, place.top, (place.cell, place.row), scale.pixels(matrix))
        return
    for (row, column), value in np.ndenumerate(matrix):
        if not np.isnan(value):
            said = f"{chart.tokens[row]} → {chart.tokens[column]}: {significant(float(value))}"
            corner = place.matrix + column * place.cell, place.top + row * place.row
            yield Rect(*corner, place.cell, place.row, scale.colour(float(value)), "ground", said=said)


def _column_names(chart: Flow, place: _Layout) -> Iterator[Shape]:
    on_top = chart.labels == "top"
    y = place.top - 6 if on_top else place.matrix_bottom + (8 if place.upright else 16)
    anchor: Any = "middle" if not place.upright else "start" if on_top else "end"
    for column, token in enumerate(chart.tokens):
        x = place.matrix + (column + 0.5) * place.cell + (MIDDLE * _SMALL if place.upright else 0)
        yield Text(x, y, shortened(token, _WIDEST, _SMALL), _SMALL, anchor, "soft", upright=place.upright)
