"""Blocks of a map: how wide they are, how they round, and how their comparisons are counted.

**Rounding.** BLAS rounds differently in very small products, so none is smaller than 16 rows by 64 columns.

**Counting.** Comparisons of a block are bytes 0 or 1; summing them eight at a time as 64-bit integers keeps a count in
each byte (at most 255, which limits the width), with an eighth of the additions that summing booleans takes.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from .factored import Block

DEFAULT_BUDGET = 64 << 20
"""Bytes for one block and its comparisons: larger blocks do not fit into the last cache and are slower."""

MAX_WIDTH = 2040
"""Booleans are added eight at a time, and a byte counts up to 255."""

CACHED_WIDTH = 1024
_WIDEST = 2048
_BLOCK_ENTRIES = 1 << 20
"""Entries of a block: with few rows, narrow blocks would cost more in calls than in computing."""

MIN_ROWS = 16
MIN_COLUMNS = 64
"""Below these sizes BLAS uses other kernels, and equal columns no longer give equal entries."""


def spans(span: slice, width: int) -> Iterator[slice]:
    """Split a range into blocks; a remainder that would be too narrow joins the last one."""
    start = span.start
    while start < span.stop:
        stop = start + width
        if span.stop - stop < MIN_COLUMNS:
            stop = span.stop
        yield slice(start, stop)
        start = stop


def block_width_for(n_rows: int, budget: int) -> int:
    """Columns of a block for this many rows: a multiple of the cached width, or what the budget allows."""
    wide = min(_WIDEST, max(CACHED_WIDTH, _BLOCK_ENTRIES // n_rows // CACHED_WIDTH * CACHED_WIDTH))
    allowed = budget // (6 * n_rows)
    if allowed >= CACHED_WIDTH:
        return min(wide, allowed // CACHED_WIDTH * CACHED_WIDTH)
    return max(MIN_COLUMNS, allowed // 8 * 8)


def product(block: Block, head: int, left: Tensor, out: Tensor | None = None) -> Tensor:
    """A product of at least ``MIN_ROWS`` rows, so that it rounds like all others."""
    n_rows = len(left)
    if n_rows >= MIN_ROWS:
        return block.product(head, left, out)
    padded = left.new_zeros(MIN_ROWS, left.shape[1])
    padded[:n_rows] = left
    return block.product(head, padded)[:n_rows]


class Scratch:
    """One block of entries and one of comparisons, reused: allocating memory costs more than the sums."""

    def __init__(self, height: int, width: int, device: torch.device) -> None:
        self.height = height
        self._values = torch.empty(height * width, device=device)
        self._mask = torch.empty(height * width, dtype=torch.bool, device=device)

    def values(self, n_rows: int, width: int) -> Tensor:
        return self._values[: n_rows * width].view(n_rows, width)

    def mask(self, n_rows: int, width: int) -> Tensor:
        return self._mask[: n_rows * width].view(n_rows, width)


def count_true(mask: Tensor) -> Int[Tensor, " row"]:
    """Number of true entries in each row of a contiguous boolean matrix."""
    n_rows, width = mask.shape
    if not mask.is_contiguous():
        return mask.sum(1)
    if width > MAX_WIDTH and width % CACHED_WIDTH == 0:
        return count_true(mask.view(-1, CACHED_WIDTH)).view(n_rows, -1).sum(1)
    if width % 8 or width > MAX_WIDTH:
        return mask.sum(1)
    return mask.view(torch.int64).sum(1, keepdim=True).view(torch.uint8).sum(1)


def places_of_true(mask: Tensor) -> tuple[Int[Tensor, " place"], Int[Tensor, " place"]]:
    """Row and column of every true entry of a boolean matrix, row by row; fast if they are few.

    Eight entries are tested together as one 64-bit integer, and only words that are not zero are examined.
    """
    n_rows, width = mask.shape
    if width % 8 or not mask.is_contiguous():
        row, column = mask.nonzero(as_tuple=True)
        return row, column
    row, word = mask.view(torch.int64).nonzero(as_tuple=True)
    which, byte = mask.view(n_rows, width // 8, 8)[row, word].nonzero(as_tuple=True)
    return row[which], word[which] * 8 + byte
