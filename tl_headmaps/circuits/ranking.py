"""Exact questions about factored maps, answered block by block: ranks, top-k, entries, norms, largest entries.

**Rank.** ``rank(s, t)`` counts the columns whose entry in row ``s`` is *strictly greater* than the entry of
``t``; the suppression rank counts the strictly smaller ones. One pass gives both.

**The rounding trap.** An entry computed alone and the same entry computed inside a matrix product differ in
the last bit, so a token could outrank itself and identical tokens each other. Here the entries that are
compared against come from the same kind of product as the rest, and a target's own column is set to that very value
before counting.

BLAS also rounds differently in very small products, so none is smaller than 16 rows by 64 columns.

**Counting.** Comparisons of a block are bytes 0 or 1; summing them eight at a time as 64-bit integers keeps a
count in each byte (at most 255, which bounds the block width), eight times fewer additions than summing booleans.

**Leaving early.** Scores need ranks only up to some limit. Columns are visited from the largest norm down, and a
row leaves when ``limit`` better *and* ``limit`` worse columns have been seen for each of its targets. The
answer, ``min(rank, limit)``, is the same.

All functions take the memory they may use for one block in bytes; the block size changes no answer beyond
floating-point ties.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import UsageError
from .factored import Block, LayerMaps

DEFAULT_BUDGET = 64 << 20
"""Bytes for one block and its comparisons: larger blocks fall out of the last cache and get slower."""

_MAX_WIDTH = 2040
"""Eight booleans are added at a time; a byte holds up to 255 of them."""

_CACHED_WIDTH = 1024
_WIDEST = 2048
_BLOCK_ENTRIES = 1 << 20
"""Entries of a block: few rows take more columns at a time, or calling costs more than computing."""

_TARGET_ROWS = 256
"""Rows whose targets are multiplied out together: every row meets the targets of all the others."""

_MIN_ROWS = 16
_MIN_COLUMNS = 64
"""Below these sizes BLAS takes other code paths, and equal columns no longer give equal entries."""

_PHASES = (2048, 6144, 16384)
"""Columns after which rows that are decided leave."""

_BOUND_SLACK = 1 + 1e-5
"""Norm bounds are computed in float32; the slack is far above its rounding and prunes nothing wrongly."""


Side: TypeAlias = Literal["both", "greater", "less"]


@dataclass(frozen=True)
class Ranks:
    """Strictly better and strictly worse columns for each (row, target) pair, capped at ``limit`` if given."""

    greater: Int[Tensor, "head pair"]
    less: Int[Tensor, "head pair"]


class _Targets:
    """Pairs arranged by row: target ``j`` of a row stands in its slot ``j``."""

    def __init__(self, rows: Tensor, columns: Tensor) -> None:
        self.n_pairs = rows.shape[0]
        unique, inverse, counts = rows.unique(return_inverse=True, return_counts=True)
        by_count = counts.argsort(descending=True, stable=True)
        place = torch.empty_like(by_count)
        place[by_count] = torch.arange(len(by_count), device=rows.device)
        self.rows = unique[by_count]
        self.row_of_pair = place[inverse]
        order = self.row_of_pair.argsort(stable=True)
        starts = torch.cat([counts.new_zeros(1), counts[by_count].cumsum(0)[:-1]])
        slot = torch.empty_like(order)
        slot[order] = torch.arange(self.n_pairs, device=rows.device) - starts[self.row_of_pair[order]]
        self.slot_of_pair = slot
        n_slots = int(counts.max())
        # One set of targets for all heads, or one for each. Rows beyond a slot's prefix hold -1.
        columns = columns if columns.ndim == 2 else columns[None]
        self.columns = torch.full((len(columns), len(unique), n_slots), -1, device=rows.device)
        self.columns[:, self.row_of_pair, slot] = columns

    def of_head(self, head: int) -> Tensor:
        """Target columns [row, slot] of a head."""
        return self.columns[head if len(self.columns) > 1 else 0]

    def rows_with(self, active: Tensor) -> Tensor:
        """Rows of which some pair is true."""
        found = torch.zeros(len(self.rows), dtype=torch.bool, device=active.device)
        found[self.row_of_pair[active]] = True
        return found.nonzero()[:, 0]

    def per_pair(self, by_slot: Tensor) -> Tensor:
        """[head, row, slot] to [head, pair]."""
        return by_slot[:, self.row_of_pair, self.slot_of_pair]


def ranks(
    maps: LayerMaps,
    rows: Int[Tensor, " pair"],
    columns: Int[Tensor, "*head pair"],
    *,
    limit: int | None = None,
    active: Bool[Tensor, "head pair"] | None = None,
    side: Side = "both",
    budget: int = DEFAULT_BUDGET,
) -> Ranks:
    """Exact ranks of target columns in their rows, for promotion and for suppression.

    Args:
        maps: The maps of a layer's heads.
        rows: Row of each pair (position in ``maps.left``); a row may have several targets.
        columns: Target column of each pair, the same for all heads or one for each head.
        limit: Leave early and return ``min(rank, limit)``.
        active: Pairs wanted of each head; the counts of others mean nothing.
        side: Count only the greater or only the smaller entries (the other count is 0): half the work, and rows
            leave sooner.
        budget: Bytes one block may take.
    """
    n_heads, device = len(maps.heads), maps.left.device
    if rows.numel() == 0:
        empty = torch.zeros(n_heads, 0, dtype=torch.int64, device=device)
        return Ranks(empty, empty.clone())
    targets = _Targets(rows, columns)
    scan = _Scan(maps, targets, active, side, limit, budget)
    n_columns = maps.columns.count
    if limit is None:
        scan.phase(slice(0, n_columns), None)
    else:
        order = maps.columns.order()
        stops = [stop for stop in _PHASES if stop < n_columns // 2] + [n_columns]
        start = 0
        for stop in stops:
            scan.phase(slice(start, stop), order)
            scan.leave()
            scan.join_small_heads()
            start = stop
        scan.collect()
    greater, less = targets.per_pair(scan.greater), targets.per_pair(scan.less)
    if limit is not None:
        greater, less = greater.clamp(max=limit), less.clamp(max=limit)
    return Ranks(greater, less)


class _Scan:
    """Counts of one :func:`ranks` call, phase by phase, with the rows of each head still undecided."""

    def __init__(
        self, maps: LayerMaps, targets: _Targets, active: Tensor | None, side: Side, limit: int | None, budget: int
    ) -> None:
        self.maps, self.targets, self.side, self.limit, self.budget = maps, targets, side, limit, budget
        n_heads, (_, n_rows, n_slots) = len(maps.heads), targets.columns.shape
        device = maps.left.device
        self.greater = torch.zeros(n_heads, n_rows, n_slots, dtype=torch.int64, device=device)
        self.less = torch.zeros_like(self.greater)
        self.joined: list[tuple[_Scan, tuple[Tensor, Tensor, Tensor]]] = []
        everything = torch.arange(n_rows, device=device)
        self.alive = [everything if active is None else targets.rows_with(active[head]) for head in range(n_heads)]

    def _target_entries(self, living: list[int]) -> list[Tensor]:
        """Entries [row, slot] of the living rows' targets, out of products of the same kind as the phase's.

        The contraction order follows the number of living rows, so the entries are taken anew in each phase: compared
        with entries of another order, a token with the same column would come out above or below by rounding.
        """
        targets = self.targets
        entries = []
        shared = len(targets.columns) == 1 and all(len(alive) == len(targets.rows) for alive in self.alive)
        blocks: dict[int, tuple[Block, Tensor]] = {}
        for head, alive in enumerate(self.alive):
            left = self.maps.left_of(head)[targets.rows[alive]]
            columns = targets.of_head(head)[alive].clamp_min(0)
            found = []
            for start in range(0, len(alive), _TARGET_ROWS):
                part = slice(start, start + _TARGET_ROWS)
                if not (shared and start in blocks):
                    wanted, place = columns[part].unique(return_inverse=True)
                    if len(wanted) < _MIN_COLUMNS:
                        wanted = wanted.repeat(-(-_MIN_COLUMNS // len(wanted)))
                    rows = living if shared else [n if h == head else 0 for h, n in enumerate(living)]
                    blocks[start] = (self.maps.columns.block(wanted, rows), place)
                block, place = blocks[start]
                found.append(_product(block, head, left[part]).gather(1, place))
            entries.append(torch.cat(found) if found else left.new_zeros(0, columns.shape[1]))
        return entries

    def join_small_heads(self) -> None:
        """Move heads with few rows left into one map: the vocabulary is then read once for all of them."""
        columns = self.maps.columns
        small = [head for head, alive in enumerate(self.alive) if len(alive) and columns.goes_direct(len(alive))]
        if len(small) < 2:
            return
        lefts = [self.maps.left_of(head)[self.targets.rows[self.alive[head]]] for head in small]
        left, shared = columns.direct(small, lefts)
        owner = torch.cat([torch.full_like(self.alive[head], head) for head in small])
        row = torch.cat([self.alive[head] for head in small])
        wanted = torch.cat([self.targets.of_head(head)[self.alive[head]] for head in small])
        joint_row, slot = (wanted >= 0).nonzero(as_tuple=True)
        maps = LayerMaps(self.maps.heads[:1], left[None], (0,), shared, left.new_zeros(1, len(left)))
        targets = _Targets(joint_row, wanted[joint_row, slot])
        joint = _Scan(maps, targets, None, self.side, self.limit, self.budget)
        here = (owner[joint_row], row[joint_row], slot)
        place = (0, targets.row_of_pair, targets.slot_of_pair)
        joint.greater[place], joint.less[place] = self.greater[here], self.less[here]
        self.joined.append((joint, here))
        for head in small:
            self.alive[head] = self.alive[head][:0]

    def collect(self) -> None:
        """Bring back the counts of joined heads."""
        for joint, here in self.joined:
            place = (0, joint.targets.row_of_pair, joint.targets.slot_of_pair)
            self.greater[here], self.less[here] = joint.greater[place], joint.less[place]

    def leave(self) -> None:
        """Drop the rows for which every target is decided."""
        for joint, _ in self.joined:
            joint.leave()
        self.alive = [alive[self.undecided(head).any(1)] for head, alive in enumerate(self.alive)]

    def undecided(self, head: int) -> Tensor:
        """Which targets [row, slot] of the living rows still have to be counted."""
        alive = self.alive[head]
        wanted = self.targets.columns[0][alive] >= 0
        if self.limit is None:
            return wanted
        greater, less = self.greater[head, alive], self.less[head, alive]
        seen = {"both": torch.minimum(greater, less), "greater": greater, "less": less}[self.side]
        return wanted & (seen < self.limit)

    def phase(self, span: slice, order: Tensor | None) -> None:
        """Compare all living rows with the columns ``order[span]`` (all columns in order if None)."""
        for joint, _ in self.joined:
            joint.phase(span, order)
        living = [len(alive) for alive in self.alive]
        if not any(living):
            return
        maps, n_columns = self.maps, self.maps.columns.count
        place = torch.arange(n_columns, device=maps.left.device)
        if order is not None:
            place[order] = place.clone()
        width = _width(max(living), self.budget)
        height = min(max(living), max(_MIN_ROWS, self.budget // (6 * (width + _MIN_COLUMNS))))
        scratch = _Scratch(height, width + _MIN_COLUMNS, place.device)
        blocks = list(_spans(span, width))
        entries = self._target_entries(living)
        heads = [_HeadScan(self, head, entries[head], place, blocks, scratch) for head, n in enumerate(living) if n]
        for number, here in enumerate(blocks):
            block = maps.columns.block(here, living) if order is None else maps.columns.ordered_block(here, living)
            for head in heads:
                head.compare(block, number, here)
        for head in heads:
            for total, counted in ((self.greater, head.greater), (self.less, head.less)):
                total[head.head, head.alive[:, None], head.slots] += counted


def _spans(span: slice, width: int) -> Iterator[slice]:
    """Cut a range into blocks; the last one takes in a remainder that would be too narrow."""
    start = span.start
    while start < span.stop:
        stop = start + width
        if span.stop - stop < _MIN_COLUMNS:
            stop = span.stop
        yield slice(start, stop)
        start = stop


def _width(n_rows: int, budget: int) -> int:
    """Columns of a block for this many rows: a multiple of the cached width, or what the budget allows."""
    wide = min(_WIDEST, max(_CACHED_WIDTH, _BLOCK_ENTRIES // n_rows // _CACHED_WIDTH * _CACHED_WIDTH))
    allowed = budget // (6 * n_rows)
    if allowed >= _CACHED_WIDTH:
        return min(wide, allowed // _CACHED_WIDTH * _CACHED_WIDTH)
    return max(_MIN_COLUMNS, allowed // 8 * 8)


def _product(block: Block, head: int, left: Tensor, out: Tensor | None = None) -> Tensor:
    """A product of at least ``_MIN_ROWS`` rows, so that it rounds like all others."""
    n_rows = len(left)
    if n_rows >= _MIN_ROWS:
        return block.product(head, left, out)
    padded = left.new_zeros(_MIN_ROWS, left.shape[1])
    padded[:n_rows] = left
    return block.product(head, padded)[:n_rows]


class _Scratch:
    """One block of entries and one of comparisons, written over and over: fresh memory costs more than the sums."""

    def __init__(self, height: int, width: int, device: torch.device) -> None:
        self.height = height
        self._values = torch.empty(height * width, device=device)
        self._mask = torch.empty(height * width, dtype=torch.bool, device=device)

    def values(self, n_rows: int, width: int) -> Tensor:
        return self._values[: n_rows * width].view(n_rows, width)

    def mask(self, n_rows: int, width: int) -> Tensor:
        return self._mask[: n_rows * width].view(n_rows, width)


class _HeadScan:
    """Comparisons of one head's living rows during one phase."""

    def __init__(
        self, scan: _Scan, head: int, entries: Tensor, place: Tensor, blocks: list[slice], scratch: _Scratch
    ) -> None:
        self.head, self.side, self.scratch = head, scan.side, scratch
        # Undecided targets first in each row, rows with most of them first: each slot covers a prefix of rows.
        undecided = scan.undecided(head)
        counts = undecided.sum(1)
        by_count = counts.argsort(descending=True, stable=True)
        slots = (~undecided[by_count]).to(torch.uint8).argsort(dim=1, stable=True)
        self.alive = scan.alive[head][by_count]
        self.prefix = [int((counts > slot).sum()) for slot in range(int(counts.max()))]
        self.slots = slots[:, : len(self.prefix)]
        targets = scan.targets
        columns = targets.of_head(head)[self.alive].gather(1, self.slots)
        self.left = scan.maps.left_of(head)[targets.rows[self.alive]]
        self.entries = entries[by_count].gather(1, self.slots)
        # One contiguous column of entries for each slot.
        self.thresholds = [self.entries[:, slot, None].contiguous() for slot in range(len(self.prefix))]
        self.greater = torch.zeros_like(columns)
        self.less = torch.zeros_like(columns)
        own = undecided[by_count].gather(1, self.slots).nonzero()
        self.own_place, by_place = place[columns[own[:, 0], own[:, 1]]].sort()
        self.own = own[by_place]
        edges = torch.tensor([blocks[0].start, *(block.stop for block in blocks)], device=place.device)
        self.edges = torch.searchsorted(self.own_place, edges).tolist()

    def compare(self, block: Block, number: int, here: slice) -> None:
        n_rows, width = len(self.alive), here.stop - here.start
        own = slice(self.edges[number], self.edges[number + 1])
        for start in range(0, n_rows, self.scratch.height):
            part = slice(start, min(start + self.scratch.height, n_rows))
            values = _product(block, self.head, self.left[part], self.scratch.values(part.stop - part.start, width))
            if own.stop > own.start:
                self._equal_themselves(values, own, part, here)
            for slot, n in enumerate(self.prefix):
                stop = min(n, part.stop)
                if stop <= part.start:
                    break
                inside, entry = values[: stop - part.start], self.thresholds[slot][part.start : stop]
                mask = self.scratch.mask(stop - part.start, width)
                if self.side != "less":
                    self.greater[part.start : stop, slot] += count_true(torch.gt(inside, entry, out=mask))
                if self.side != "greater":
                    self.less[part.start : stop, slot] += count_true(torch.lt(inside, entry, out=mask))

    def _equal_themselves(self, values: Tensor, own: slice, part: slice, here: slice) -> None:
        """Set the targets' own columns to the very entries they are compared with."""
        mine, place = self.own[own], self.own_place[own]
        if part.stop - part.start < len(self.alive):
            inside = (mine[:, 0] >= part.start) & (mine[:, 0] < part.stop)
            mine, place = mine[inside], place[inside]
        rows, slots = mine.unbind(1)
        values[rows - part.start, place - here.start] = self.entries[rows, slots]


def count_true(mask: Tensor) -> Int[Tensor, " row"]:
    """Number of true entries in each row of a contiguous boolean matrix."""
    n_rows, width = mask.shape
    if not mask.is_contiguous():
        return mask.sum(1)
    if width > _MAX_WIDTH and width % _CACHED_WIDTH == 0:
        return count_true(mask.view(-1, _CACHED_WIDTH)).view(n_rows, -1).sum(1)
    if width % 8 or width > _MAX_WIDTH:
        return mask.sum(1)
    return mask.view(torch.int64).sum(1, keepdim=True).view(torch.uint8).sum(1)


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
    n_columns = maps.columns.count
    if not 1 <= k <= n_columns:
        raise UsageError(f"k={k} is impossible: a row has {n_columns} columns, so 1 <= k <= {n_columns}.")
    sign = 1.0 if largest else -1.0
    # One more than asked for: if it equals the last one, the choice between them needs a closer look.
    keep = min(k + 1, n_columns)
    found = [_top_of_head(maps, head, keep, sign, budget) for head in range(len(maps.heads))]
    best, best_columns = (torch.stack(parts) for parts in zip(*found, strict=True))
    if keep > k:
        tied = best[..., k] == best[..., k - 1]
        if bool(tied.any()):
            _settle_ties(maps, tied, sign, best, best_columns)
    offset = maps.offset[:, :, None]
    return TopK(best[..., :k] * sign - offset, best_columns[..., :k])


def _top_of_head(maps: LayerMaps, head: int, keep: int, sign: float, budget: int) -> tuple[Tensor, Tensor]:
    """The ``keep`` largest entries of each row and their columns, large columns first.

    The first columns give a threshold for each row; from then on only the few entries above it are looked at.
    """
    left, order = maps.left_of(head) * sign, maps.columns.order()
    n_rows, n_columns = left.shape[0], maps.columns.count
    counts = [n_rows if number == head else 0 for number in range(len(maps.heads))]
    first = min(n_columns, max(_PHASES[0], 2 * keep))
    height = max(_MIN_ROWS, budget // (5 * first))
    stops = [first, *(stop for stop in (*_PHASES, n_columns) if first < stop <= n_columns)]
    values, columns = [], []
    for rows in left.split(height):
        block = maps.columns.ordered_block(slice(0, first), counts)
        best, place = _product(block, head, rows).topk(keep, dim=-1)
        best_columns = order[place]
        for start, stop in pairwise(stops):
            above = _above(maps, head, rows, best[:, -1:].contiguous(), order, slice(start, stop), counts, budget)
            best, best_columns = _merged(best, best_columns, *above)
        by_column = best_columns.argsort(-1)
        best, best_columns = best.gather(-1, by_column), best_columns.gather(-1, by_column)
        best, by_value = best.sort(dim=-1, descending=True, stable=True)
        values.append(best)
        columns.append(best_columns.gather(-1, by_value))
    if not values:
        return left.new_zeros(0, keep), order.new_zeros(0, keep)
    return torch.cat(values), torch.cat(columns)


def _above(
    maps: LayerMaps,
    head: int,
    left: Tensor,
    threshold: Tensor,
    order: Tensor,
    span: slice,
    counts: list[int],
    budget: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and value of all entries above their row's threshold among some columns."""
    block_width = _width(len(left), budget)
    scratch = _Scratch(len(left), block_width + _MIN_COLUMNS, left.device)
    rows, columns, values = [], [], []
    for here in _spans(span, block_width):
        width = here.stop - here.start
        block = maps.columns.ordered_block(here, counts)
        entries = _product(block, head, left, scratch.values(len(left), width))
        row, place = torch.gt(entries, threshold, out=scratch.mask(len(left), width)).nonzero(as_tuple=True)
        rows.append(row)
        columns.append(order[here.start + place])
        values.append(entries[row, place])
    return torch.cat(rows), torch.cat(columns), torch.cat(values)


def _merged(best: Tensor, best_columns: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entries of each row out of those held and some more."""
    if not len(rows):
        return best, best_columns
    n_rows, keep = best.shape
    more = torch.bincount(rows, minlength=n_rows)
    order = rows.argsort(stable=True)
    slot = torch.arange(len(rows), device=rows.device) - (more.cumsum(0) - more)[rows[order]]
    wide = best.new_full((n_rows, keep + int(more.max())), float("-inf"))
    wide_columns = best_columns.new_zeros(wide.shape)
    wide[:, :keep], wide_columns[:, :keep] = best, best_columns
    wide[rows[order], keep + slot], wide_columns[rows[order], keep + slot] = values[order], columns[order]
    merged, place = wide.topk(keep, dim=-1)
    return merged, wide_columns.gather(-1, place)


def _settle_ties(maps: LayerMaps, tied: Tensor, sign: float, best: Tensor, best_columns: Tensor) -> None:
    """Redo rows whose last place is shared, from the whole row in a stable order."""
    everything = slice(0, maps.columns.count)
    n_heads, keep = len(maps.heads), best.shape[-1]
    for head in range(n_heads):
        for rows in tied[head].nonzero()[:, 0].split(64):
            counts = [len(rows) if h == head else 0 for h in range(n_heads)]
            block = maps.columns.block(everything, counts)
            values = _product(block, head, maps.left_of(head)[rows])
            ordered, columns = (values * sign).sort(dim=-1, descending=True, stable=True)
            best[head, rows], best_columns[head, rows] = ordered[:, :keep], columns[:, :keep]


def row_norms(left: Float[Tensor, "row rank"], factor: Float[Tensor, "column rank"]) -> Float[Tensor, " row"]:
    """Norm of every row of ``left @ factor^T`` through the rank x rank Gram matrix of the factor."""
    gram = torch.zeros(factor.shape[1], factor.shape[1], dtype=torch.float64, device=factor.device)
    for block in factor.split(8192):
        gram += block.double().T @ block.double()
    # A square root of the Gram matrix: norms come out as norms, not as roots of rounded differences.
    eigenvalues, vectors = torch.linalg.eigh(gram)
    root = (vectors * eigenvalues.clamp_min(0).sqrt()).to(left.dtype)
    norms: Tensor = torch.linalg.vector_norm(left @ root, dim=-1)
    return norms


@dataclass(frozen=True)
class LargestEntries:
    """The largest entries of a whole map, in descending order, and how much of the map was multiplied out."""

    rows: Int[Tensor, " entry"]
    columns: Int[Tensor, " entry"]
    values: Float[Tensor, " entry"]
    share_scanned: float


def largest_entries(
    maps: LayerMaps, head: int, n: int, *, prune: bool = True, budget: int = DEFAULT_BUDGET
) -> LargestEntries:
    """Exact ``n`` largest entries of one head's whole map (ties: lower row, then lower column).

    Rows and columns are sorted by the norm of their factors and cut into blocks. No entry of a block exceeds the
    product of its largest row norm and largest column norm, so blocks are visited by that bound until it
    falls below the ``n``-th entry found.

    Args:
        maps: Maps with a row for every token of interest.
        head: Position of the head in ``maps.heads``.
        n: How many entries.
        prune: False scans every block (the reference for tests and benchmarks).
        budget: Bytes one block may take.
    """
    left, right = maps.left_of(head), maps.columns.factor(head)
    row_bound, column_bound = _balanced_norms(left, right)
    total = left.shape[0] * right.shape[0]
    if not 1 <= n <= total:
        raise UsageError(f"n={n} is impossible: the map has {total} entries.")
    offset = maps.offset[head]
    row_order = row_bound.argsort(descending=True, stable=True)
    column_order = column_bound.argsort(descending=True, stable=True)
    left, right, offset = left[row_order], right[column_order].contiguous(), offset[row_order]
    height = max(1, min(1024, budget // (5 * _MAX_WIDTH)))
    row_norm = row_bound[row_order][::height]
    column_norm = column_bound[column_order][::_MAX_WIDTH]
    # An offset shifts a whole row, so it widens the bound of its block.
    shift = torch.stack([part.neg().amax() for part in offset.split(height)])
    bounds = (row_norm[:, None] * column_norm[None] * _BOUND_SLACK + shift[:, None]).tolist()
    queue = [(-bounds[i][j], i, j) for i in range(len(row_norm)) for j in range(len(column_norm))]
    heapq.heapify(queue)
    found = _Found(n, left.device)
    scratch = _Scratch(height, _MAX_WIDTH, left.device)
    scanned = 0
    while queue:
        negative_bound, i, j = heapq.heappop(queue)
        if prune and -negative_bound < found.threshold:
            break
        rows = slice(i * height, (i + 1) * height)
        columns = slice(j * _MAX_WIDTH, (j + 1) * _MAX_WIDTH)
        out = scratch.values(len(left[rows]), len(right[columns]))
        values = torch.mm(left[rows], right[columns].T, out=out).sub_(offset[rows, None])
        scanned += values.numel()
        found.add(values, row_order[rows], column_order[columns])
    rows_found, columns_found, best = found.sorted()
    return LargestEntries(rows_found, columns_found, best, scanned / total)


def _balanced_norms(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of the rows and columns after a change of basis that makes their products tight bounds.

    Any invertible T gives the same map, ``(left T)(T^-1 right^T)``. The T that makes both Gram matrices the same
    diagonal minimises the product of the mean squared norms: an entry then uses all directions as evenly as it can.
    """
    gram_left, gram_right = left.double().T @ left.double(), right.double().T @ right.double()
    values, vectors = torch.linalg.eigh(gram_left)
    scale = values.clamp_min(values.max().clamp_min(1e-300) * 1e-12).sqrt()
    root = vectors * scale
    singular, rotation = torch.linalg.eigh(root.T @ gram_right @ root)
    singular = singular.clamp_min(singular.max().clamp_min(1e-300) * 1e-12) ** 0.25
    forward = ((vectors / scale) @ rotation * singular).to(left.dtype)
    backward = (root @ rotation / singular).to(right.dtype)
    return torch.linalg.vector_norm(left @ forward, dim=-1), torch.linalg.vector_norm(right @ backward, dim=-1)


class _Found:
    """The best entries so far, kept between ``n`` and a few times ``n``."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.n = n
        self.values = torch.empty(0, device=device)
        self.rows = torch.empty(0, dtype=torch.int64, device=device)
        self.columns = torch.empty(0, dtype=torch.int64, device=device)
        self.threshold = float("-inf")

    def add(self, values: Tensor, rows: Tensor, columns: Tensor) -> None:
        flat = values.flatten()
        if self.threshold == float("-inf"):
            # No threshold yet: the n-th of this block alone is one.
            start = flat.topk(min(self.n, flat.numel())).values[-1]
            position = (flat >= start).nonzero()[:, 0]
        else:
            position = (flat >= self.threshold).nonzero()[:, 0]
        if not position.numel():
            return
        width = values.shape[1]
        self.values = torch.cat([self.values, flat[position]])
        self.rows = torch.cat([self.rows, rows[position // width]])
        self.columns = torch.cat([self.columns, columns[position % width]])
        if len(self.values) >= self.n:
            self._prune()

    def _prune(self) -> None:
        order = self._order()[: self.n]
        self.values, self.rows, self.columns = self.values[order], self.rows[order], self.columns[order]
        self.threshold = float(self.values[-1])

    def _order(self) -> Tensor:
        order = self.columns.argsort(stable=True)
        order = order[self.rows[order].argsort(stable=True)]
        return order[self.values[order].argsort(descending=True, stable=True)]

    def sorted(self) -> tuple[Tensor, Tensor, Tensor]:
        order = self._order()[: self.n]
        return self.rows[order], self.columns[order], self.values[order]
