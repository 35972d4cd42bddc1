"""Exact ranks in factored maps, counted block by block.

**Rank.** ``rank(s, t)`` counts the columns whose entry in row ``s`` is *strictly greater* than the entry of
``t``; the suppression rank counts the strictly smaller ones. One pass gives both.

**The rounding trap.** An entry computed alone and the same entry computed inside a matrix product can differ in the
last bit, so a token could outrank itself and identical tokens each other. Here the entries that others are compared
with come from the same kind of product, and a target's own column is set to exactly that value before counting.

**Leaving early.** Scores need ranks only up to some limit. A row leaves when ``limit`` better *and* ``limit`` worse
columns have been counted for each of its targets. The answer, ``min(rank, limit)``, is the same. A head writes much the
same tokens whatever it reads, so the columns that its mean row favours decide most rows alone. Those they do not
decide are counted from the start again, with columns visited from the largest norm down.

``budget`` is the memory for one block in bytes; the block size changes no answer beyond floating-point ties.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from .blocks import DEFAULT_BUDGET, MIN_COLUMNS, MIN_ROWS, Scratch, block_width_for, count_true, product, spans
from .factored import Block, LayerMaps
from .vectors import TIERS

_TARGET_ROWS = 256
"""Rows whose targets are multiplied out together: every row meets the targets of all the others."""

_GLANCE_ROWS = 16
"""Rows of a head, on average, from which on it pays to multiply out the mean row of every head first."""

_ROUGH_TIERS = 2
"""Tiers of columns that rough ranks look at."""

Side: TypeAlias = Literal["both", "greater", "less"]


@dataclass(frozen=True)
class Ranks:
    """Strictly better and strictly worse columns for each (row, target) pair, capped at ``limit`` if given."""

    greater: Int[Tensor, "head pair"]
    less: Int[Tensor, "head pair"]


class _Targets:
    """Pairs arranged by row: target ``j`` of a row is in its slot ``j``; rows with most targets come first.

    So the rows that use a slot are the first ones of all: a block of entries is compared with one target of every row
    at a time, in one comparison of neighbouring rows, and rows with few targets cost nothing in later slots.
    """

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
        """Rows with at least one active pair."""
        has_any = torch.zeros(len(self.rows), dtype=torch.bool, device=active.device)
        has_any[self.row_of_pair[active]] = True
        return has_any.nonzero()[:, 0]

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
    roughly: bool = False,
    budget: int = DEFAULT_BUDGET,
) -> Ranks:
    """Exact ranks of target columns in their rows, for promotion and for suppression.

    Args:
        maps: The maps of a layer's heads.
        rows: Row of each pair (position in ``maps.left``); a row may have several targets.
        columns: Target column of each pair, the same for all heads or one for each head.
        limit: Leave early and return ``min(rank, limit)``.
        active: Pairs needed of each head; the counts of others are meaningless.
        side: Count only the greater or only the smaller entries (the other count is 0): half the work, and rows
            leave sooner.
        roughly: With a limit: leave out the columns of small norm. Ranks may then be too small, never too large.
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
        stops = [stop for stop in TIERS if stop < n_columns // 2] + [n_columns]
        if len(stops) > 1 and scan.n_alive >= _GLANCE_ROWS * n_heads:
            scan.prefilter()
        if roughly:
            stops = stops[:_ROUGH_TIERS]
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
        """Entries [row, slot] of the living rows' targets, from products of the same kind as the phase's.

        The contraction order depends on the number of living rows, so the entries are computed anew in each phase:
        compared with entries of another order, a token with the same column would rank above or below by rounding.
        """
        targets = self.targets
        entries = []
        shared = len(targets.columns) == 1 and all(len(alive) == len(targets.rows) for alive in self.alive)
        blocks: dict[int, tuple[Block, Tensor]] = {}
        for head, alive in enumerate(self.alive):
            left = self.maps.left_of(head)[targets.rows[alive]]
            columns = targets.of_head(head)[alive].clamp_min(0)
            parts = []
            for start in range(0, len(alive), _TARGET_ROWS):
                part = slice(start, start + _TARGET_ROWS)
                if not (shared and start in blocks):
                    wanted, place = columns[part].unique(return_inverse=True)
                    if len(wanted) < MIN_COLUMNS:
                        wanted = wanted.repeat(-(-MIN_COLUMNS // len(wanted)))
                    rows = living if shared else [n if h == head else 0 for h, n in enumerate(living)]
                    blocks[start] = (self.maps.columns.block(wanted, rows), place)
                block, place = blocks[start]
                parts.append(product(block, head, left[part]).gather(1, place))
            entries.append(torch.cat(parts) if parts else left.new_zeros(0, columns.shape[1]))
        return entries

    def join_small_heads(self) -> None:
        """Join heads with few rows left into one map: the vocabulary is then read once for all of them."""
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
        """Copy the counts of joined heads back."""
        for joint, here in self.joined:
            place = (0, joint.targets.row_of_pair, joint.targets.slot_of_pair)
            self.greater[here], self.less[here] = joint.greater[place], joint.less[place]

    def leave(self) -> None:
        """Drop rows whose targets are all decided."""
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
        counted = {"both": torch.minimum(greater, less), "greater": greater, "less": less}[self.side]
        return wanted & (counted < self.limit)

    @property
    def n_alive(self) -> int:
        """Rows of all heads that are still undecided."""
        return sum(len(alive) for alive in self.alive)

    def prefilter(self) -> None:
        """Drop the rows that their head's favoured columns decide; nothing is counted of the others yet."""
        living = [len(alive) for alive in self.alive]
        entries = self._target_entries(living)
        for head, n in enumerate(living):
            if n:
                self._prefilter(head, [n if h == head else 0 for h in range(len(living))], entries)
        self.leave()
        for head, alive in enumerate(self.alive):
            self.greater[head, alive], self.less[head, alive] = 0, 0

    def _prefilter(self, head: int, living: list[int], entries: list[Tensor]) -> None:
        top, bottom = (side[head] for side in self.maps.favoured)
        favoured = {"both": torch.cat([top, bottom]), "greater": top, "less": bottom}[self.side]
        columns = self.maps.columns
        self._compare(
            living, entries, slice(0, len(favoured)), favoured, lambda here: columns.block(favoured[here], living)
        )

    def phase(self, span: slice, order: Tensor | None) -> None:
        """Compare all living rows with the columns ``order[span]`` (all columns in order if None)."""
        for joint, _ in self.joined:
            joint.phase(span, order)
        living = [len(alive) for alive in self.alive]
        if not any(living):
            return
        columns = self.maps.columns
        block_of = columns.block if order is None else columns.ordered_block
        self._compare(living, self._target_entries(living), span, order, lambda here: block_of(here, living))

    def _compare(
        self,
        living: list[int],
        entries: list[Tensor],
        span: slice,
        order: Tensor | None,
        block_of: Callable[[slice], Block],
    ) -> None:
        """Count for the heads with living rows; ``order`` may be of some columns only."""
        device, n_columns = self.maps.left.device, self.maps.columns.count
        place = torch.arange(n_columns, device=device)
        if order is not None:
            place = torch.full_like(place, n_columns)
            place[order] = torch.arange(len(order), device=device)
        width = block_width_for(max(living), self.budget)
        height = min(max(living), max(MIN_ROWS, self.budget // (6 * (width + MIN_COLUMNS))))
        scratch = Scratch(height, width + MIN_COLUMNS, device)
        blocks = list(spans(span, width))
        heads = [_HeadScan(self, head, entries[head], place, blocks, scratch) for head, n in enumerate(living) if n]
        for number, here in enumerate(blocks):
            block = block_of(here)
            for head in heads:
                head.compare(block, number, here)
        for head in heads:
            for total, counted in ((self.greater, head.greater), (self.less, head.less)):
                total[head.head, head.alive[:, None], head.slots] += counted


class _HeadScan:
    """Comparisons of one head's living rows during one phase.

    A row can have several targets, each in a slot. Per block of columns the entries of all rows are computed once and
    compared with one slot after the other, so a slot should concern a contiguous range of rows: undecided targets are
    moved to the first slots of their row, and rows with most of them to the top. Slot ``j`` then concerns the rows
    before ``prefix[j]``, a slice of the block instead of a gather.

    A target's own column must equal its entry exactly (see the rounding trap above). ``own`` lists (row, slot) of every
    undecided target, sorted by where its column comes in the order of the scan (``own_place``), and ``edges[b]`` is the
    first of them in block ``b``, so a block finds its own targets without a search.
    """

    def __init__(
        self, scan: _Scan, head: int, entries: Tensor, place: Tensor, blocks: list[slice], scratch: Scratch
    ) -> None:
        self.head, self.side, self.scratch = head, scan.side, scratch
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
        # A contiguous column for each slot: comparing with a strided one is slower.
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
            values = product(block, self.head, self.left[part], self.scratch.values(part.stop - part.start, width))
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
        """Set the targets' own columns to exactly the entries they are compared with."""
        targets, place = self.own[own], self.own_place[own]
        if part.stop - part.start < len(self.alive):
            inside = (targets[:, 0] >= part.start) & (targets[:, 0] < part.stop)
            targets, place = targets[inside], place[inside]
        rows, slots = targets.unbind(1)
        values[rows - part.start, place - here.start] = self.entries[rows, slots]
