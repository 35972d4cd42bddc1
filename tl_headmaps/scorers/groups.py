"""From an attention pattern to affinities between tokens, and how an attention pattern meets given groups.

A causal query i spreads its attention over i + 1 tokens, so early rows are dense and late rows thin for no other
reason than the triangle. Multiplying row i by i + 1 gives attention relative to even attention: after it, a head
that attends evenly has affinity 1 between any two tokens. A pair of a causal pattern is seen in one direction
only, which is its affinity; a pair of a bidirectional pattern has the mean of both directions. Attention of a
token to itself binds nothing together and is left out.

The first token is an attention sink when the others give it far more than even attention would:
``(share - even) / (1 - even) >= 0.3`` with the mean shares over all later queries.

A mask may also be a tree: each token sees itself and its ancestors, nothing else. Such masks verify many drafted
continuations of a text in one pass (speculative decoding with a token tree).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .partitions import cluster, modularity, shuffled, within

SINK_EXCESS = 0.3
"""Share of attention on the first token, above even attention, from which on it is a sink."""

_NULL_SEED = 0


@dataclass(frozen=True)
class Sharpness:
    """How sharp groups are on one graph.

    Attributes:
        modularity: Newman's modularity of the groups.
        null_modularity: Mean modularity of as many groups found in shuffled graphs of the same degrees; NaN if not
            drawn.
        z_score: Standard deviations above that mean; NaN where all shuffled graphs are alike.
        p_value: Share of shuffled graphs at least as modular (the graph itself counted); NaN if not drawn.
    """

    modularity: float
    null_modularity: float
    z_score: float
    p_value: float


def is_causal(pattern: Float[Tensor, "query key"]) -> bool:
    """Whether no query attends to a later token."""
    return not any(bool(row[i + 1 :].any()) for i, row in enumerate(pattern))


def even_shares(n: int, causal: bool) -> Float[Tensor, " query"]:
    """What even attention gives each token a query can see."""
    return 1 / torch.arange(1.0, n + 1) if causal else torch.full((n,), 1 / n)


def affinity(pattern: Float[Tensor, "query key"], causal: bool) -> Float[Tensor, "token token"]:
    """Symmetric affinities relative to even attention, with an empty diagonal.

    Example:
        >>> even = torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])
        >>> affinity(even, causal=True)
        tensor([[0., 1., 1.],
                [1., 0., 1.],
                [1., 1., 0.]])
    """
    relative = pattern / even_shares(len(pattern), causal).to(pattern)[:, None]
    relative.fill_diagonal_(0)
    # A copy of the transpose: adding a view of itself in place would read what was just written.
    relative += relative.T.clone()
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


def is_sink(share: float, n: int, causal: bool) -> bool:
    """Whether a first token with this share of attention is a sink."""
    if n < 2:
        return False
    even = float(even_shares(n, causal)[1:].mean())
    return even < 1 and (share - even) / (1 - even) >= SINK_EXCESS


def served(pattern: Float[Tensor, "query key"], labels: Int[Tensor, " token"]) -> Float[Tensor, " group"]:
    """Share of the attention between different tokens that stays inside each group."""
    between = pattern.clone().fill_diagonal_(0)
    total = between.sum()
    return within(between, labels) / total if float(total) > 0 else torch.zeros_like(within(between, labels))


def served_evenly(
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


def sharpness(weights: Float[Tensor, "token token"], labels: Int[Tensor, " token"], draws: int) -> Sharpness:
    """Modularity of groups beside that of as many groups found in shuffled graphs (spectral)."""
    found = modularity(weights, labels)
    bound = weights.sum(1) > 0
    if draws < 1 or int(bound.sum()) < 2:
        return Sharpness(found, float("nan"), float("nan"), float("nan"))
    k = len(labels[bound].unique())
    if k == 1:
        # One group has modularity 0 in every graph: nothing needs drawing.
        return Sharpness(found, 0.0, float("nan"), 1.0)
    inner = weights[bound][:, bound]
    drawn = torch.tensor(
        [modularity(graph, cluster(graph, k=k)) for graph in shuffled(inner, draws=draws, seed=_NULL_SEED)],
        dtype=torch.float64,
    )
    spread = float(drawn.std(correction=0))
    z_score = (found - float(drawn.mean())) / spread if spread > 1e-9 else float("nan")
    p_value = (1 + int((drawn >= found - 1e-9).sum())) / (1 + draws)
    return Sharpness(found, float(drawn.mean()), z_score, p_value)


def tree_parents(seen: Bool[Tensor, "query key"]) -> list[int | None] | None:
    """Parent of each token (None for a root), or None if the mask is no tree or the plain causal triangle.

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
