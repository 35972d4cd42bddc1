"""Which heads serve which group of tokens: a flowchart next to the block matrix of attention.

>>> flow(["It", "I", "is"], [[0, 1], [2]], {"Head 0": [0], "Head 1": [1]})
Figure('Heads and token groups', Flow, 2 KB)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import UsageError
from .colours import SERIES
from .figure import Figure
from .grids import Heat, heat_of
from .heat import heat_figure
from .page import escaped, figure_body, label, table
from .text import visible

MAX_TOKENS = 128
MAX_HEADS = 64

ROW = 30.0
"""Pixels from one box to the next."""

_BOX, _LETTER = 22.0, 8.0


@dataclass(frozen=True)
class Flow:
    """Heads, the groups of tokens they serve, and the attention between the tokens, group by group."""

    title: str
    tokens: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    heads: tuple[tuple[str, tuple[int, ...]], ...]
    matrix: Heat | None = None
    note: str = ""

    @property
    def order(self) -> list[int]:
        """Positions of the tokens, group by group."""
        return [position for group in self.groups for position in group]


def flow(
    tokens: Sequence[object],
    groups: Sequence[Any],
    heads: Mapping[Any, Any],
    *,
    matrix: Any = None,
    title: str = "Heads and token groups",
    unit: str = "attention",
    note: str = "",
) -> Figure:
    """Heads joined to the tokens of the groups they serve, next to the attention matrix in the groups' order.

    Args:
        tokens: The tokens of the text.
        groups: Positions of the tokens of each group; every position in at most one group.
        heads: For each head the numbers of the groups it serves.
        matrix: Attention by query and key position, drawn next to the flowchart if given.
        title: What is shown.
        unit: What the matrix holds.
        note: A sentence under the figure.
    """
    names = tuple(map(label, tokens))
    if len(names) > MAX_TOKENS or len(heads) > MAX_HEADS:
        raise UsageError(
            f"A flowchart of {len(heads):,} heads and {len(names):,} tokens cannot be read; it takes up to {MAX_HEADS} "
            f"heads and {MAX_TOKENS} tokens. Choose the heads with the highest scores, or a shorter text."
        )
    members = tuple(tuple(int(position) for position in group) for group in groups)
    listed = [position for group in members for position in group]
    if len(set(listed)) < len(listed) or not set(listed) <= set(range(len(names))):
        raise UsageError(f"groups={members} must hold positions from 0 to {len(names) - 1}, each at most once.")
    served = tuple((label(head), tuple(int(number) for number in numbers)) for head, numbers in heads.items())
    for head, numbers in served:
        if not set(numbers) <= set(range(len(members))):
            raise UsageError(f"{head} serves groups {numbers}, but there are groups 0 to {len(members) - 1}.")
    rest = tuple(position for position in range(len(names)) if position not in set(listed))
    title = visible(title)
    chart = Flow(title, names, (*members, *([rest] if rest else [])), served, None, note)
    if matrix is not None:
        chart = Flow(title, names, chart.groups, served, _blocks(chart, matrix, unit), note)
    return flow_figure(chart, n_named=len(members))


def _blocks(chart: Flow, matrix: Any, unit: str) -> Heat:
    heat = heat_of(matrix, title="Attention between tokens", unit=unit, rows="query", columns="key", item="pair")
    shape = (heat.rows.n, heat.columns.n)
    if shape != (len(chart.tokens),) * 2:
        raise UsageError(f"The matrix has shape {shape}, but there are {len(chart.tokens)} tokens; they must agree.")
    ordered = heat.layers[0].values[np.ix_(chart.order, chart.order)]
    labels = [chart.tokens[position] for position in chart.order]
    return heat_of(
        ordered,
        title="Attention between tokens",
        unit=unit,
        rows="query",
        columns="key",
        row_labels=labels,
        column_labels=labels,
        item="pair",
        numbers=len(labels) <= 6,
    )


def flow_figure(chart: Flow, *, n_named: int) -> Figure:
    """The figure of a flowchart."""
    text = _words(chart, n_named)
    drawing = _drawing(chart, n_named)
    needs: tuple[str, ...] = ()
    if chart.matrix is not None:
        blocks = heat_figure(chart.matrix)
        drawing += blocks.body
        needs = blocks.needs
    rows = [
        [head, ", ".join(chart.tokens[i] for n in numbers for i in chart.groups[n])] for head, numbers in chart.heads
    ]
    body = figure_body(
        "flow",
        chart.title,
        inside=f'<div class="tlhm-row">{drawing}</div>',
        alternative=f"<p>{escaped(text)}</p>" + table(["head", "tokens"], rows),
        note=chart.note,
    )
    return Figure(title=visible(chart.title), body=body, needs=needs, text=text, data=chart)


def _words(chart: Flow, n_named: int) -> str:
    groups = "; ".join(
        f"group {number}: {' '.join(chart.tokens[i] for i in group)}"
        for number, group in enumerate(chart.groups[:n_named])
    )
    heads = "; ".join(f"{head} serves {', '.join(map(str, numbers)) or 'none'}" for head, numbers in chart.heads)
    return f"{visible(chart.title)}: {len(chart.tokens)} tokens, {groups}. {heads}."


def layout(chart: Flow) -> tuple[dict[int, float], list[float], float]:
    """Heights of token and head boxes, and the total height: gaps between groups, heads next to what they serve."""
    token_at, y = {}, 0.0
    for group in chart.groups:
        for position in group:
            token_at[position] = y
            y += ROW
        y += ROW / 2
    wanted = []
    for _, numbers in chart.heads:
        served = [token_at[position] for number in numbers for position in chart.groups[number]]
        wanted.append(sum(served) / len(served) if served else 0.0)
    # Heads with the same ideal height are spread evenly around it, at least one row apart.
    head_at = [0.0] * len(wanted)
    free = 0.0
    for place in sorted(set(wanted)):
        sharing = [number for number, ideal in enumerate(wanted) if ideal == place]
        free = max(free, place - ROW * (len(sharing) - 1) / 2)
        for number in sharing:
            head_at[number] = free
            free += ROW
    return token_at, head_at, max(y - ROW / 2, free)


def _drawing(chart: Flow, n_named: int) -> str:
    token_at, head_at, height = layout(chart)
    left = 18.0 + _LETTER * max((len(head) for head, _ in chart.heads), default=1)
    right = 18.0 + _LETTER * min(28, max(map(len, chart.tokens), default=1))
    gap = 110.0
    width = left + gap + right + 4
    parts = []
    for number, (head, numbers) in enumerate(chart.heads):
        colour = f"tlhm-s{numbers[0] % len(SERIES)}" if numbers else ""
        y = head_at[number] + _BOX / 2 + 2
        lines = "".join(
            f'<path class="tlhm-s{group % len(SERIES)}" d="M{left + 2},{y:.1f} C{left + gap / 2},{y:.1f} '
            f'{left + gap / 2},{token_at[i] + _BOX / 2 + 2:.1f} {left + gap},{token_at[i] + _BOX / 2 + 2:.1f}"/>'
            for group in numbers
            for i in chart.groups[group]
        )
        parts.append(
            f'<g class="{colour}" tabindex="0"><title>{escaped(head)}</title>{lines}'
            + _box(2.0, head_at[number] + 2, left, head)
            + "</g>"
        )
    for number, group in enumerate(chart.groups):
        colour = f"tlhm-s{number % len(SERIES)}" if number < n_named else ""
        tokens = "".join(_box(left + gap, token_at[i] + 2, right, chart.tokens[i]) for i in group)
        parts.append(f'<g class="{colour}">{tokens}</g>')
    return (
        f'<svg class="tlhm-flow" width="{width}" height="{height + 4:.0f}" viewBox="0 0 {width} {height + 4:.0f}" '
        f'role="img" aria-label="{escaped(chart.title)}">{"".join(parts)}</svg>'
    )


def _box(x: float, y: float, width: float, text: str) -> str:
    shown = text if len(text) <= 28 else text[:27] + "…"
    return (
        f'<rect x="{x}" y="{y:.1f}" width="{width}" height="{_BOX}" rx="4"/>'
        f'<text x="{x + width / 2}" y="{y + 15.5:.1f}" text-anchor="middle">{escaped(shown)}</text>'
    )
