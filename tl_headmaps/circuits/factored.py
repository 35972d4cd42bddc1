"""Vocabulary-sized maps of a layer's heads, kept as factors and multiplied out one block at a time.

The map of head ``h`` is ``M_h = left[group_h] @ columns_h^T``: a row per given token, a column per token of the
vocabulary, rank d_head. It has n x vocab entries (vocab x vocab for all rows); the full matrix is never built.

For OV, the column factor is itself a product, ``W_U W_O^T``. Forming it costs ``d_model * d_head`` per column and then
``d_head`` per entry; going through d_model instead costs ``d_model`` per entry and nothing else. With few rows the
second is cheaper, with many the first: :meth:`Columns.block` decides for each head by the number of operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..capture.tensors import release_pages, rows_of
from ..core.errors import UnsupportedModelError
from ..core.types import HeadIndex


@runtime_checkable
class Block(Protocol):
    """A range of columns of every head, ready to be multiplied."""

    def product(
        self,
        head: int,
        left: Float[Tensor, "row rank"],
        out: Float[Tensor, "row column"] | None = None,
    ) -> Float[Tensor, "row column"]:
        """Entries of a head (its position in the layer's list) for these rows."""


@runtime_checkable
class Columns(Protocol):
    """The right-hand factors of a layer's heads, for all columns."""

    @property
    def count(self) -> int:
        """Number of columns."""

    def block(self, index: slice | Int[Tensor, " column"], rows: Sequence[int]) -> Block:
        """Prepare some columns for products with ``rows[h]`` rows of head ``h`` (0: head not needed)."""

    def ordered_block(self, here: slice, rows: Sequence[int]) -> Block:
        """The same for the columns ``order()[here]``."""

    def factor(self, head: int) -> Float[Tensor, "column rank"]:
        """The whole column factor of one head."""

    def order(self) -> Int[Tensor, " column"]:
        """Columns with large norms first."""

    def bound(self) -> float:
        """What the largest entry of a row factor is multiplied by at most; NaN or infinite if a factor is."""

    def of_head(self, head: int) -> "Columns":
        """The columns of one head alone."""

    def goes_direct(self, n_rows: int) -> bool:
        """Whether this few rows are cheaper to multiply without forming the head's column factor."""

    def direct(self, heads: Sequence[int], lefts: Sequence[Float[Tensor, "row rank"]]) -> tuple[Tensor, "Columns"]:
        """Rows of several heads as rows of one map with shared columns: row factors and columns of that map."""


_LARGEST = 1e38
"""Entries of maps stay below it: about a third of the largest float32."""

_FAVOURED = 128
"""Columns at either end of a head's mean row that a scan looks at first."""

_LEAST_WIDTH = 32
"""Column factors made at once, in columns, at least. BLAS rounds otherwise in a narrow product, and the factor of one
head of 8 dimensions must equal the one made together with those of other heads: else equal tokens would not tie."""

_AT_A_TIME = 8192
"""Columns of a mean row multiplied out at a time."""

_FIRST = 2048
"""So many of the columns with large norms hold the one with the largest (:data:`.vectors.TIERS`)."""


def _largest(factor: Tensor) -> float:
    return float(factor.abs().amax()) if factor.numel() else 0.0


def _largest_token(tokens: Tensor, large_first: Tensor) -> float:
    """At least the largest entry: no entry exceeds the norm of its row, nor that of the row with the largest norm."""
    return float(tokens.shape[1] ** 0.5 * _largest(rows_of(tokens, large_first[:_FIRST]).to(torch.float32)))


def _chosen(tokens: Tensor, index: slice | Tensor) -> Tensor:
    """Some tokens in float32; pages of earlier blocks of a mapped matrix are released."""
    if isinstance(index, Tensor):
        return rows_of(tokens, index).to(torch.float32)
    release_pages(tokens)
    return tokens[index].to(torch.float32)


@dataclass(frozen=True)
class _ProductBlock:
    tokens: Float[Tensor, "column d_model"]
    middle: Float[Tensor, "head rank d_model"]
    factors: dict[int, Float[Tensor, "column rank"]]

    def product(self, head: int, left: Tensor, out: Tensor | None = None) -> Tensor:
        factor = self.factors.get(head)
        if factor is None:
            return torch.mm(left @ self.middle[head], self.tokens.T, out=out)
        return torch.mm(left, factor.T, out=out)


@dataclass(frozen=True)
class ProductColumns:
    """Column factors ``tokens @ middle_h^T`` with the tokens shared by all heads and layers (OV)."""

    tokens: Float[Tensor, "column d_model"]
    middle: Float[Tensor, "head rank d_model"]
    large_first: Int[Tensor, " column"]
    tokens_in_order: Float[Tensor, "column d_model"] | None = None

    @property
    def count(self) -> int:
        return self.tokens.shape[0]

    def block(self, index: slice | Tensor, rows: Sequence[int]) -> Block:
        return self._block(_chosen(self.tokens, index), rows)

    def ordered_block(self, here: slice, rows: Sequence[int]) -> Block:
        if self.tokens_in_order is None:
            return self.block(self.large_first[here], rows)
        return self._block(_chosen(self.tokens_in_order, here), rows)

    def _block(self, tokens: Tensor, rows: Sequence[int]) -> Block:
        _, rank, d_model = self.middle.shape
        chosen = [h for h, n in enumerate(rows) if not self.goes_direct(n)]
        if not chosen:
            return _ProductBlock(tokens, self.middle, {})
        # One product for all heads: BLAS is fastest with a tall matrix times a square one.
        factors = self.middle[chosen].reshape(-1, d_model)
        narrow = _LEAST_WIDTH - len(factors)
        if narrow > 0:
            factors = torch.cat([factors, factors.new_zeros(narrow, d_model)])
        joint = (tokens @ factors.T)[:, : len(chosen) * rank]
        return _ProductBlock(tokens, self.middle, dict(zip(chosen, joint.split(rank, dim=1), strict=True)))

    def factor(self, head: int) -> Tensor:
        blocks = [slice(start, start + 8192) for start in range(0, self.count, 8192)]
        return torch.cat([_chosen(self.tokens, here) @ self.middle[head].T for here in blocks])

    def order(self) -> Tensor:
        return self.large_first

    def bound(self) -> float:
        _, rank, d_model = self.middle.shape
        return rank * d_model * _largest(self.middle) * _largest_token(self.tokens, self.large_first)

    def goes_direct(self, n_rows: int) -> bool:
        # Multiplications per column: n d_model with the rows taken to d_model first, or d_model rank for the factor of
        # the column and n rank with it.
        _, rank, d_model = self.middle.shape
        return n_rows * (d_model - rank) <= d_model * rank

    def direct(self, heads: Sequence[int], lefts: Sequence[Tensor]) -> tuple[Tensor, "Columns"]:
        left = torch.cat([left @ self.middle[head] for head, left in zip(heads, lefts, strict=True)])
        return left, TokenColumns(self.tokens, self.large_first, self.tokens_in_order)

    def of_head(self, head: int) -> "ProductColumns":
        return replace(self, middle=self.middle[head : head + 1])


@dataclass(frozen=True)
class _TokenBlock:
    tokens: Float[Tensor, "column d_model"]

    def product(self, head: int, left: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(left, self.tokens.T, out=out)


@dataclass(frozen=True)
class TokenColumns:
    """Columns that are the tokens themselves, for rows that already live in d_model."""

    tokens: Float[Tensor, "column d_model"]
    large_first: Int[Tensor, " column"]
    tokens_in_order: Float[Tensor, "column d_model"] | None = None

    @property
    def count(self) -> int:
        return self.tokens.shape[0]

    def block(self, index: slice | Tensor, rows: Sequence[int]) -> Block:
        return _TokenBlock(_chosen(self.tokens, index))

    def ordered_block(self, here: slice, rows: Sequence[int]) -> Block:
        if self.tokens_in_order is None:
            return self.block(self.large_first[here], rows)
        return _TokenBlock(_chosen(self.tokens_in_order, here))

    def factor(self, head: int) -> Tensor:
        return self.tokens.to(torch.float32)

    def order(self) -> Tensor:
        return self.large_first

    def bound(self) -> float:
        return self.tokens.shape[1] * _largest_token(self.tokens, self.large_first)

    def of_head(self, head: int) -> "TokenColumns":
        return self

    def goes_direct(self, n_rows: int) -> bool:
        return False

    def direct(self, heads: Sequence[int], lefts: Sequence[Tensor]) -> tuple[Tensor, "Columns"]:
        return torch.cat(list(lefts)), self


@dataclass(frozen=True)
class _FactorBlock:
    factors: Float[Tensor, "group column rank"]
    group: Sequence[int]

    def product(self, head: int, left: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(left, self.factors[self.group[head]].T, out=out)


@dataclass(frozen=True)
class FactorColumns:
    """Column factors given outright, shared by the heads of a group (QK: the keys)."""

    factors: Float[Tensor, "group column rank"]
    group: Sequence[int]

    @property
    def count(self) -> int:
        return self.factors.shape[1]

    def block(self, index: slice | Tensor, rows: Sequence[int]) -> Block:
        return _FactorBlock(self.factors[:, index], self.group)

    def ordered_block(self, here: slice, rows: Sequence[int]) -> Block:
        return self.block(self.order()[here], rows)

    def factor(self, head: int) -> Tensor:
        return self.factors[self.group[head]]

    def order(self) -> Tensor:
        return self._order

    def bound(self) -> float:
        return self.factors.shape[2] * _largest(self.factors)

    @cached_property
    def _order(self) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.factors, dim=-1).amax(0)
        return norms.argsort(descending=True, stable=True)

    def goes_direct(self, n_rows: int) -> bool:
        return False

    def direct(self, heads: Sequence[int], lefts: Sequence[Tensor]) -> tuple[Tensor, "Columns"]:
        raise AssertionError("goes_direct() is never true: the factors are given")

    def of_head(self, head: int) -> "FactorColumns":
        group = self.group[head]
        return FactorColumns(self.factors[group : group + 1], (0,))


@dataclass(frozen=True)
class LayerMaps:
    """Maps of some heads of one layer: given rows, all columns.

    Attributes:
        heads: The heads, in the order of every result's head axis.
        left: Row factors, shared by the heads of a group.
        group: Which row factor each head uses.
        columns: The column factors.
        offset: Subtracted from every entry of a row of a head: never changes a rank within a row.
    """

    heads: tuple[HeadIndex, ...]
    left: Float[Tensor, "group row rank"]
    group: tuple[int, ...]
    columns: Columns
    offset: Float[Tensor, "head row"]

    def checked(self) -> "LayerMaps":
        """The maps themselves; raises if an entry may be NaN or infinite: every rank in its row would be wrong."""
        if not _largest(self.left) * self.columns.bound() < _LARGEST:
            raise UnsupportedModelError(
                f"The maps of layer {self.heads[0].layer} are not finite: some product of the weights is NaN or too "
                "large for float32. The weights or the configuration are damaged. Fetch the checkpoint again."
            )
        return self

    @property
    def n_rows(self) -> int:
        """Number of rows of each map."""
        return self.left.shape[1]

    @cached_property
    def favoured(self) -> tuple[Int[Tensor, "head column"], Int[Tensor, "head column"]]:
        """Columns with the largest and with the smallest entries of each head's mean row."""
        columns: Columns = self.columns
        lefts = {head: self.left_of(head).mean(0, keepdim=True) for head in range(len(self.heads))}
        if columns.goes_direct(1):
            # As rows of one map: the vocabulary is read once for all heads.
            left, columns = columns.direct(list(lefts), list(lefts.values()))
            lefts = {0: left}
        spans = (slice(start, start + _AT_A_TIME) for start in range(0, columns.count, _AT_A_TIME))
        blocks = (columns.block(here, [len(left) for left in lefts.values()]) for here in spans)
        rows = torch.cat([torch.cat([block.product(*item) for item in lefts.items()]) for block in blocks], dim=1)
        n = min(_FAVOURED, columns.count)
        return rows.topk(n).indices, rows.topk(n, largest=False).indices

    def left_of(self, head: int) -> Float[Tensor, "row rank"]:
        """Row factors of a head, by its position in ``heads``."""
        return self.left[self.group[head]]

    def of_head(self, head: int) -> "LayerMaps":
        """The map of one head alone."""
        return LayerMaps(
            heads=(self.heads[head],),
            left=self.left_of(head)[None],
            group=(0,),
            columns=self.columns.of_head(head),
            offset=self.offset[head : head + 1],
        )

    def at_rows(self, rows: Int[Tensor, " chosen"]) -> "LayerMaps":
        """The same maps with some of the rows."""
        return replace(self, left=self.left[:, rows], offset=self.offset[:, rows])

    def negative(self) -> "LayerMaps":
        """The maps with every entry's sign turned."""
        return replace(self, left=-self.left, offset=-self.offset)

    def with_own_rows(self, rows: Int[Tensor, "head chosen"]) -> "LayerMaps":
        """The same maps with each head's own choice of rows."""
        heads = range(len(self.heads))
        return replace(
            self,
            left=torch.stack([self.left_of(head)[rows[head]] for head in heads]),
            group=tuple(heads),
            offset=self.offset.gather(1, rows),
        )

    def with_rows_of(self, other: "LayerMaps") -> "LayerMaps":
        """These maps with the rows of others (of the same heads and columns) appended: one scan then serves both."""
        if other.heads != self.heads or other.columns.count != self.columns.count:
            raise AssertionError(f"rows of {other.heads} cannot be appended to rows of {self.heads}")
        heads = range(len(self.heads))
        left = torch.stack([torch.cat([self.left_of(head), other.left_of(head)]) for head in heads])
        return replace(self, left=left, group=tuple(heads), offset=torch.cat([self.offset, other.offset], dim=1))
