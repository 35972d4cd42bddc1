"""From attention patterns to a graph of tokens: affinities, sinks, trees, and what is inside a group.

A causal query i spreads its attention over i + 1 tokens, so early rows are dense and late rows thin for no other
reason than the triangle. Multiplying row i by i + 1 gives attention relative to even attention: after it, a head
that attends evenly has affinity 1 between any two tokens. A pair of a causal pattern is seen in one direction
only, which is its affinity; a pair of a bidirectional pattern has the mean of both directions. Attention of a
token to itself binds nothing together and is left out.

A token is an attention sink when those after it give it far more than even attention would:
``(share - even) / (1 - even) >= 0.3`` with the mean shares over all later queries. There may be several: besides the
first token, whichever at least four later ones look at (a block of tokens that attend evenly to each other has none).
What is a sink for the heads of one layer is left alone in their graphs.

A mask may also be a tree: each token sees itself and its ancestors, nothing else. Such masks verify many drafted
continuations of a text in one pass (speculative decoding with a token tree).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .partitions import within

SINK_EXCESS = 0.3
"""Share of attention on a token, above even attention, from which on it is a sink."""

_LEAST_LATER = 4
"""Later tokens that must have looked at a token, other than the first, before it is called a sink."""


def is_causal(pattern: Float[Tensor, "query key"]) -> bool:
    """Whether no query attends to a later token."""
    return not any(bool(row[i + 1 :].any()) for i, row in enumerate(pattern))


def even_shares(n: int, causal: bool) -> Float[Tensor, " query"]:
    """What even attention gives each token a query can see."""
    return 1 / torch.arange(1.0, n + 1) if causal else torch.full((n,), 1 / n)


def affinity(pattern: Float[Tensor, "*head query key"], causal: bool) -> Float[Tensor, "*head token token"]:
    """Symmetric affinities relative to even attention, with an empty diagonal.

    Example:
        >>> even = torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])
        >>> affinity(even, causal=True)
        tensor([[0., 1., 1.],
                [1., 0., 1.],
                [1., 1., 0.]])
    """
    relative = pattern / even_shares(pattern.shape[-1], causal).to(pattern)[:, None]
    relative.diagonal(dim1=-2, dim2=-1).zero_()
    # A copy of the transpose: adding a view of itself in place would read what was just written.
    relative += relative.mT.clone()
    return relative if causal else relative.div_(2)


def sink_share(pattern: Float[Tensor, "query key"]) -> float:
    """Mean attention of all later tokens to the first, as a share of what they attend to."""
    later = pattern[1:]
    total = float(later.sum())
    return float(later[:, 0].sum()) / total if total > 0 else 0.0


def self_share(pattern: Float[Tensor, "query key"]) -> float:
    """Share of attention that tokens pay to themselves."""
    total = float(pattern.sum())
    return float(pattern.diagonal().sum()) / total if total > 0 else 0.0


def column_and_row_sums(pattern: Float[Tensor, "query key"]) -> Float[Tensor, "2 token"]:
    """Attention each token receives from later ones, and all that those give."""
    later = pattern.tril(-1).sum(0, dtype=torch.float64)
    given = pattern.sum(1, dtype=torch.float64)
    return torch.stack([later, given.sum() - given.cumsum(0)])


def sinks_of(received: Float[Tensor, "2 token"], causal: bool) -> tuple[int, ...]:
    """Tokens on which attention is parked, from what :func:`column_and_row_sums` says, summed over heads.

    Example:
        >>> parked = torch.tensor([[1, 0, 0], [0.9, 0.1, 0], [0.9, 0, 0.1]])
        >>> sinks_of(column_and_row_sums(parked), causal=True)
        (0,)
    """
    n = received.shape[1]
    even = even_shares(n, causal).double()
    found = []
    for token in range(n - 1):
        if token and n - 1 - token < _LEAST_LATER:
            break
        share = float(received[0, token] / received[1, token]) if float(received[1, token]) > 0 else 0.0
        by_chance = float(even[token + 1 :].mean())
        if by_chance < 1 and (share - by_chance) / (1 - by_chance) >= SINK_EXCESS:
            found.append(token)
    return tuple(found)


def attention_inside(pattern: Float[Tensor, "query key"], labels: Int[Tensor, " token"]) -> Float[Tensor, " group"]:
    """Share of the attention between different tokens that stays inside each group."""
    between = pattern.clone().fill_diagonal_(0)
    total = between.sum()
    return within(between, labels) / total if float(total) > 0 else torch.zeros_like(within(between, labels))


def expected_inside(
    positions: Int[Tensor, " token"], n: int, causal: bool, labels: Int[Tensor, " token"]
) -> Float[Tensor, " group"]:
    """The same for even attention among the kept tokens (``positions`` of ``n``)."""
    even = even_shares(n, causal)[positions].double()
    sizes = torch.nn.functional.one_hot(labels).double()
    # Of the tokens a query sees (causal: the earlier ones), how many are in its own group, and how many in all.
    if causal:
        alike = (sizes.cumsum(0) * sizes).sum(1) - 1
        seen = torch.arange(len(labels), dtype=torch.float64)
    else:
        alike = (sizes.sum(0) * sizes).sum(1) - 1
        seen = torch.full((len(labels),), len(labels) - 1.0, dtype=torch.float64)
    total = (even * seen).sum().clamp_min(1e-30)
    return ((even * alike)[:, None] * sizes).sum(0).div(total).to(torch.float32)


def tree_parents(seen: Bool[Tensor, "query key"]) -> list[int | None] | None:
    """Parent of each token (None for a root), or None if the mask is not a tree or is the plain causal triangle.

    A token's parent is the latest of the tokens it sees; the others must be exactly what the parent sees.

    Example:
        >>> tree_parents(torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool())
        [None, 0, 0]
    """
    n = len(seen)
    lower = torch.ones(n, n, dtype=torch.bool).tril()
    if not n or bool((seen & ~lower).any()) or not bool(seen.diagonal().all()) or bool((seen == lower).all()):
        return None
    parents: list[int | None] = []
    for token in range(n):
        ancestors = seen[token, :token].nonzero().flatten()
        if not len(ancestors):
            parents.append(None)
            continue
        parent = int(ancestors[-1])
        if not torch.equal(seen[token, : parent + 1], seen[parent, : parent + 1]):
            return None
        parents.append(parent)
    return parents
