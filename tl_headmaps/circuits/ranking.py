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
_SCAN_WIDTH = 1976
"""Widest block of a scan: it may take in a narrow remainder and still fit a byte's count."""

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
    """Pairs arranged by row: rows with most targets first, so that slot ``j`` always covers a prefix of rows."""

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
    scan = _Scan(maps, targets, active, side, budget)
    n_columns = maps.columns.count
    if limit is None:
        scan.phase(slice(0, n_columns), None)
    else:
        order = maps.columns.order()
        stops = [stop for stop in _PHASES if stop < n_columns // 2] + [n_columns]
        start = 0
        for stop in stops:
            scan.phase(slice(start, stop), order)
            scan.leave(limit)
            start = stop
    greater, less = targets.per_pair(scan.greater), targets.per_pair(scan.less)
    if limit is not None:
        greater, less = greater.clamp(max=limit), less.clamp(max=limit)
    return Ranks(greater, less)


class _Scan:
    """Counts of one :func:`ranks` call, phase by phase, with the rows of each head still undecided."""

    def __init__(self, maps: LayerMaps, targets: _Targets, active: Tensor | None, side: Side, budget: int) -> None:
        self.maps, self.targets, self.side, self.budget = maps, targets, side, budget
        n_heads, (_, n_rows, n_slots) = len(maps.heads), targets.columns.shape
        device = maps.left.device
        self.greater = torch.zeros(n_heads, n_rows, n_slots, dtype=torch.int64, device=device)
        self.less = torch.zeros_like(self.greater)
        everything = torch.arange(n_rows, device=device)
        self.alive = [everything if active is None else targets.rows_with(active[head]) for head in range(n_heads)]
        # The contraction order is chosen once: switching it as rows leave would round equal columns differently.
        self.n_rows = [len(alive) for alive in self.alive]
        self.entries = self._target_entries()

    def _target_entries(self) -> Tensor:
        """Entries of the targets, out of products of the same kind as the scan's."""
        targets, n_heads = self.targets, len(self.maps.heads)
        wanted, position = targets.columns.clamp_min(0).unique(return_inverse=True)
        if len(wanted) < _MIN_COLUMNS:
            wanted = wanted.repeat(-(-_MIN_COLUMNS // len(wanted)))
        block = self.maps.columns.block(wanted, self.n_rows)
        height = max(1, self.budget // (4 * len(wanted)))
        entries = torch.zeros(n_heads, *targets.columns.shape[1:], device=self.maps.left.device)
        for head, alive in enumerate(self.alive):
            at = position[head if len(position) > 1 else 0]
            for part in alive.split(height):
                left = self.maps.left_of(head)[targets.rows[part]]
                entries[head, part] = _product(block, head, left).gather(1, at[part])
        return entries

    def leave(self, limit: int) -> None:
        """Drop the rows for which every target is decided."""
        missing = self.targets.columns[0] < 0
        for head, alive in enumerate(self.alive):
            greater, less = self.greater[head, alive], self.less[head, alive]
            seen = {"both": torch.minimum(greater, less), "greater": greater, "less": less}[self.side]
            self.alive[head] = alive[((seen < limit) & ~missing[alive]).any(1)]

    def phase(self, span: slice, order: Tensor | None) -> None:
        """Compare all living rows with the columns ``order[span]`` (all columns in order if None)."""
        living = [len(alive) for alive in self.alive]
        if not any(living):
            return
        maps, n_columns = self.maps, self.maps.columns.count
        place = torch.arange(n_columns, device=maps.left.device)
        if order is not None:
            place[order] = place.clone()
        width = _CACHED_WIDTH if max(living) >= _CACHED_WIDTH // 2 else _SCAN_WIDTH
        width = max(_MIN_COLUMNS, min(width, self.budget // (6 * max(living)) // 8 * 8))
        height = min(max(living), max(_MIN_ROWS, self.budget // (6 * (width + _MIN_COLUMNS))))
        scratch = _Scratch(height, width + _MIN_COLUMNS, place.device)
        blocks = list(_spans(span, width))
        heads = [_HeadScan(self, head, place, blocks, scratch) for head, n in enumerate(living) if n]
        n_rows = [total if left else 0 for total, left in zip(self.n_rows, living, strict=True)]
        for number, here in enumerate(blocks):
            block = maps.columns.block(here if order is None else order[here], n_rows)
            for head in heads:
                head.compare(block, number, here)
        for head in heads:
            self.greater[head.head, head.alive] += head.greater
            self.less[head.head, head.alive] += head.less


def _spans(span: slice, width: int) -> Iterator[slice]:
    """Cut a range into blocks; the last one takes in a remainder that would be too narrow."""
    start = span.start
    while start < span.stop:
        stop = start + width
        if span.stop - stop < _MIN_COLUMNS:
            stop = span.stop
        yield slice(start, stop)
        start = stop


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

    def __init__(self, scan: _Scan, head: int, place: Tensor, blocks: list[slice], scratch: _Scratch) -> None:
        self.head, self.alive, self.side, self.scratch = head, scan.alive[head], scan.side, scratch
        targets = scan.targets
        columns = targets.of_head(head)[self.alive]
        self.left = scan.maps.left_of(head)[targets.rows[self.alive]]
        self.entries = scan.entries[head, self.alive]
        # One contiguous column of entries for each slot.
        self.thresholds = [self.entries[:, slot, None].contiguous() for slot in range(columns.shape[1])]
        self.greater = torch.zeros_like(columns)
        self.less = torch.zeros_like(columns)
        # Living rows keep their order, so a slot still covers a prefix of them.
        self.prefix = (columns >= 0).sum(0).tolist()
        own = torch.nonzero(columns >= 0)
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
    width = mask.shape[1]
    if width % 8 or width > _MAX_WIDTH or not mask.is_contiguous():
        return mask.sum(1)
    return mask.view(torch.int64).sum(1, keepdim=True).view(torch.uint8).sum(1)


def entries(maps: LayerMaps, columns: Int[Tensor, " column"]) -> Float[Tensor, "head row column"]:
    """The sub-grid of all rows and some columns."""
    block = maps.columns.block(columns, [maps.n_rows] * len(maps.heads))
    values = [block.product(head, maps.left_of(head)) for head in range(len(maps.heads))]
    return torch.stack(values) - maps.offset[:, :, None]


def row_blocks(
    maps: LayerMaps, *, budget: int = DEFAULT_BUDGET
) -> Iterator[tuple[slice, Float[Tensor, "head row column"]]]:
    """All rows in full, a range of columns at a time, in order."""
    n_heads, n_rows = len(maps.heads), max(1, maps.n_rows)
    width = max(8, min(_MAX_WIDTH, budget // (4 * n_heads * n_rows)))
    for start in range(0, maps.columns.count, width):
        here = slice(start, min(start + width, maps.columns.count))
        block = maps.columns.block(here, [n_rows] * n_heads)
        values = [block.product(head, maps.left_of(head)) for head in range(n_heads)]
        yield here, torch.stack(values) - maps.offset[:, :, None]


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
    best = best_columns = None
    for here, values in row_blocks(maps, budget=budget):
        top, position = values.topk(min(keep, values.shape[-1]), dim=-1, largest=largest)
        top = top * sign
        position = position + here.start
        if best is not None and best_columns is not None:
            top, position = torch.cat([best, top], -1), torch.cat([best_columns, position], -1)
        best_columns, order = position.sort(-1)
        best = top.gather(-1, order)
        best, order = best.sort(dim=-1, descending=True, stable=True)
        best, best_columns = best[..., :keep], best_columns.gather(-1, order)[..., :keep]
    assert best is not None and best_columns is not None
    if keep > k:
        tied = best[..., k] == best[..., k - 1]
        if bool(tied.any()):
            _settle_ties(maps, tied, sign, best, best_columns)
    return TopK(best[..., :k] * sign, best_columns[..., :k])


def _settle_ties(maps: LayerMaps, tied: Tensor, sign: float, best: Tensor, best_columns: Tensor) -> None:
    """Redo rows whose last place is shared, from the whole row in a stable order."""
    everything = slice(0, maps.columns.count)
    n_heads, keep = len(maps.heads), best.shape[-1]
    for head in range(n_heads):
        for rows in tied[head].nonzero()[:, 0].split(64):
            counts = [len(rows) if h == head else 0 for h in range(n_heads)]
            block = maps.columns.block(everything, counts)
            values = block.product(head, maps.left_of(head)[rows]) - maps.offset[head, rows, None]
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
