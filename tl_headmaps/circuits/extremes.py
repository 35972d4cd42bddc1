"""Entries of factored maps: chosen ones, the largest of each row, and row norms.

Ties go to the lower column, and the block size changes no answer beyond floating-point ties.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..capture.tensors import in_float64
from ..core.errors import UsageError
from .blocks import (
    DEFAULT_BUDGET,
    MAX_WIDTH,
    MIN_COLUMNS,
    MIN_ROWS,
    Scratch,
    block_width_for,
    places_of_true,
    product,
    spans,
)
from .factored import LayerMaps
from .vectors import TIERS


def entries(maps: LayerMaps, columns: Int[Tensor, " column"]) -> Float[Tensor, "head row column"]:
    """The sub-grid of all rows and some columns."""
    block = maps.columns.block(columns, [maps.n_rows] * len(maps.heads))
    values = [block.product(head, maps.left_of(head)) for head in range(len(maps.heads))]
    return torch.stack(values) - maps.offset[:, :, None]


@dataclass(frozen=True)
class TopK:
    """The largest entries of each row: values descending, equal values by ascending column."""

    values: Float[Tensor, "head row k"]
    columns: Int[Tensor, "head row k"]


def top_k(maps: LayerMaps, k: int, *, largest: bool = True, budget: int = DEFAULT_BUDGET) -> TopK:
    """Exact top-k of every row; ties go to the lower column.

    Args:
        maps: The maps of a layer's heads.
        k: How many entries of each row.
        largest: False for the most negative entries (values ascending).
        budget: Bytes one block may take.
    """
    return _extremes(maps, k, (1.0 if largest else -1.0,), budget)[0]


def top_and_bottom(maps: LayerMaps, k: int, *, budget: int = DEFAULT_BUDGET) -> tuple[TopK, TopK]:
    """The ``k`` largest and the ``k`` most negative entries of every row, out of one pass over the columns."""
    top, bottom = _extremes(maps, k, (1.0, -1.0), budget)
    return top, bottom


def _extremes(maps: LayerMaps, k: int, signs: tuple[float, ...], budget: int) -> list[TopK]:
    n_columns = maps.columns.count
    if not 1 <= k <= n_columns:
        raise UsageError(f"k={k} is impossible: a row has {n_columns} columns, so 1 <= k <= {n_columns}.")
    n_heads, n_rows = len(maps.heads), maps.n_rows
    if n_heads > 1 and maps.columns.goes_direct(n_rows):
        # Few rows of each head: the columns are read once for all heads together.
        left, columns = maps.columns.direct(range(n_heads), [maps.left_of(head) for head in range(n_heads)])
        maps = LayerMaps(maps.heads[:1], left[None], (0,), columns, maps.offset.reshape(1, -1))
    # One more than requested: if it equals the last one, the tie has to be settled.
    keep = min(k + 1, n_columns)
    by_head = [_extremes_of_head(maps, head, keep, signs, budget) for head in range(len(maps.heads))]
    extremes = []
    for side, sign in enumerate(signs):
        best = torch.stack([sides[side][0] for sides in by_head])
        best_columns = torch.stack([sides[side][1] for sides in by_head])
        if keep > k:
            tied = best[..., k] == best[..., k - 1]
            if bool(tied.any()):
                _settle_ties(maps, tied, sign, best, best_columns)
        values = best[..., :k] * sign - maps.offset[:, :, None]
        shape = (n_heads, n_rows, k)
        extremes.append(TopK(values.reshape(shape), best_columns[..., :k].reshape(shape)))
    return extremes


def _extremes_of_head(
    maps: LayerMaps, head: int, keep: int, signs: tuple[float, ...], budget: int
) -> list[tuple[Tensor, Tensor]]:
    """For each sign the ``keep`` largest signed entries of each row and their columns.

    An entry is at most the norm of its row times the norm of its column (Cauchy-Schwarz), so the largest are sought
    among the columns of large norm first. They give a threshold for each row; of the others, which are all still
    looked at, only the few entries beyond it matter.
    """
    left, order = maps.left_of(head), maps.columns.order()
    n_rows, n_columns = left.shape[0], maps.columns.count
    counts = [n_rows if number == head else 0 for number in range(len(maps.heads))]
    first = min(n_columns, max(TIERS[0], 2 * keep))
    height = max(MIN_ROWS, budget // (5 * first))
    stops = [first, *(stop for stop in (*TIERS, n_columns) if first < stop <= n_columns)]
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in signs]
    for rows in left.split(height):
        values = product(maps.columns.ordered_block(slice(0, first), counts), head, rows)
        held = []
        for sign in signs:
            best, place = (values * sign).topk(keep, dim=-1)
            held.append((best, order[place]))
        for start, stop in pairwise(stops):
            limits = [best[:, -1:].contiguous() for best, _ in held]
            beyond = _beyond(maps, head, rows, signs, limits, order, slice(start, stop), counts, budget)
            held = [_merged(*kept, *more) for kept, more in zip(held, beyond, strict=True)]
        for part, kept in zip(parts, held, strict=True):
            part.append(_in_order(*kept))
    if not left.shape[0]:
        return [(left.new_zeros(0, keep), order.new_zeros(0, keep)) for _ in signs]
    return [(torch.cat([b for b, _ in part]), torch.cat([c for _, c in part])) for part in parts]


def _in_order(best: Tensor, best_columns: Tensor) -> tuple[Tensor, Tensor]:
    """Values descending, equal ones by ascending column."""
    by_column = best_columns.argsort(-1)
    best, best_columns = best.gather(-1, by_column), best_columns.gather(-1, by_column)
    best, by_value = best.sort(dim=-1, descending=True, stable=True)
    return best, best_columns.gather(-1, by_value)


def _beyond(
    maps: LayerMaps,
    head: int,
    left: Tensor,
    signs: tuple[float, ...],
    limits: list[Tensor],
    order: Tensor,
    span: slice,
    counts: list[int],
    budget: int,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each sign: row, column and signed value of all entries beyond their row's limit, among some columns."""
    block_width = block_width_for(len(left), budget)
    scratch = Scratch(len(left), block_width + MIN_COLUMNS, left.device)
    beyond: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in signs]
    for here in spans(span, block_width):
        width = here.stop - here.start
        block = maps.columns.ordered_block(here, counts)
        entries = product(block, head, left, scratch.values(len(left), width))
        mask = scratch.mask(len(left), width)
        for side, sign in enumerate(signs):
            if sign > 0:
                torch.gt(entries, limits[side], out=mask)
            else:
                torch.lt(entries, limits[side] * sign, out=mask)
            row, place = places_of_true(mask)
            beyond[side].append((row, order[here.start + place], entries[row, place] * sign))
    joined = [tuple(torch.cat(column) for column in zip(*side, strict=True)) for side in beyond]
    return [(rows, columns, values) for rows, columns, values in joined]


def _merged(best: Tensor, best_columns: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entries of each row, out of those held and more candidates in a flat list of (row, column, value)."""
    if not len(rows):
        return best, best_columns
    n_rows, keep = best.shape
    more = torch.bincount(rows, minlength=n_rows)
    # Rows have different numbers of candidates. Sorted by row, those of a row are consecutive, the first of them after
    # all of earlier rows: the distance from that first one is the slot of a candidate, after the entries held. Slots
    # that a row leaves empty stay -inf, which every entry beats.
    order = rows.argsort(stable=True)
    slot = torch.arange(len(rows), device=rows.device) - (more.cumsum(0) - more)[rows[order]]
    wide = best.new_full((n_rows, keep + int(more.max())), float("-inf"))
    wide_columns = best_columns.new_zeros(wide.shape)
    wide[:, :keep], wide_columns[:, :keep] = best, best_columns
    wide[rows[order], keep + slot], wide_columns[rows[order], keep + slot] = values[order], columns[order]
    merged, place = wide.topk(keep, dim=-1)
    return merged, wide_columns.gather(-1, place)


def _settle_ties(maps: LayerMaps, tied: Tensor, sign: float, best: Tensor, best_columns: Tensor) -> None:
    """Redo rows whose last place is tied, from the whole row in a stable order."""
    blocks = list(spans(slice(0, maps.columns.count), MAX_WIDTH))
    n_heads, keep = len(maps.heads), best.shape[-1]
    for head in range(n_heads):
        for rows in tied[head].nonzero()[:, 0].split(64):
            counts = [len(rows) if h == head else 0 for h in range(n_heads)]
            left = maps.left_of(head)[rows]
            values = torch.cat([product(maps.columns.block(here, counts), head, left) for here in blocks], dim=1)
            ordered, columns = (values * sign).sort(dim=-1, descending=True, stable=True)
            best[head, rows], best_columns[head, rows] = ordered[:, :keep], columns[:, :keep]


def row_norms(left: Float[Tensor, "row rank"], factor: Float[Tensor, "column rank"]) -> Float[Tensor, " row"]:
    """Norm of every row of ``left @ factor^T`` through the rank x rank Gram matrix of the factor."""
    # A square root of the Gram matrix: norms come out as norms, not as roots of rounded differences.
    eigenvalues, vectors = torch.linalg.eigh(_gram(factor))
    root = (vectors * eigenvalues.clamp_min(0).sqrt()).to(left)
    norms: Tensor = torch.linalg.vector_norm(left @ root, dim=-1)
    return norms


def _gram(factor: Float[Tensor, "column rank"]) -> Float[Tensor, "rank rank"]:
    """Gram matrix of a factor's columns in float64, a few thousand rows at a time."""
    blocks = (in_float64(block) for block in factor.split(8192))
    return torch.stack([block.T @ block for block in blocks]).sum(0)
