"""From attention patterns to groups of tokens: affinities, sinks, trees, and which head serves which group.

A causal query i spreads its attention over i + 1 tokens, so early rows are dense and late rows thin for no other
reason than the triangle. Multiplying row i by i + 1 gives attention relative to even attention: after it, a head
that attends evenly has affinity 1 between any two tokens. A pair of a causal pattern is seen in one direction
only, which is its affinity; a pair of a bidirectional pattern has the mean of both directions. Attention of a
token to itself binds nothing together and is left out.

The first token is an attention sink when the others give it far more than even attention would:
``(share - even) / (1 - even) >= 0.3`` with the mean shares over all later queries.

A mask may also be a tree: each token sees itself and its ancestors, nothing else. Such masks verify many drafted
continuations of a text in one pass (speculative decoding with a token tree).

:class:`Grouping` puts these together for many heads, which it visits one at a time, twice: first for the mean over
heads, which shows the sink and the groups of the combination, then for each head's own groups. Only a few
token x token matrices exist at any time, besides what the visited patterns take.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..core.errors import UsageError
from ..core.types import GroupMethod, HeadIndex, check_choice
from .partitions import chosen_method, cluster, members, modularity, shuffled, within

SINK_EXCESS = 0.3
"""Share of attention on the first token, above even attention, from which on it is a sink."""

THRESHOLD = 0.1
_NULL_SEED = 0
_N_NULL = 20
_MOST_NULL_TOKENS = 256
"""Shuffled graphs drawn by default, and the longest text for which they are."""

_EXACT_TOKENS = 1024
"""Patterns up to this size are added up in float64."""

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Token indices of each group; groups in the order of their first tokens."""

Visit: TypeAlias = Callable[[Callable[[int, Tensor], None]], None]
"""Calls its argument with the index and the pattern of every head, one after the other."""


@dataclass(frozen=True)
class GroupOptions:
    """How groups are found; impossible combinations raise a UsageError."""

    method: GroupMethod = "auto"
    drop_sink: bool = True
    threshold: float = THRESHOLD
    n_groups: int | None = None
    n_null: int | None = None

    def __post_init__(self) -> None:
        check_choice(self.method, GroupMethod, "method")
        if self.n_groups is not None and (self.n_groups < 1 or self.method == "components"):
            raise UsageError(
                f"n_groups={self.n_groups} with method={self.method!r} is impossible: give 1 or more, and method "
                "'spectral'."
            )
        if not 0 < self.threshold <= 1:
            raise UsageError(f"threshold={self.threshold} is impossible: it is a share, above 0 and at most 1.")
        if self.n_null is not None and self.n_null < 0:
            raise UsageError(f"n_null={self.n_null} is impossible: give 0 or more.")


class Grouping:
    """Groups of the mean over heads and of each head.

    Attributes:
        combined: Mean attention over heads.
        causal: Whether no token attends to a later one.
        parents: Parent of each token if the mask is a tree.
        found_sink, sink: The attention sink, and the same if it was left out.
        method: How the groups of the combination were found.
        groups, head_groups: Groups of the combination and of each head.
        weights, even_weights: Share of each head's attention, and of even attention, inside each group.
        combination, per_head: Measurements of the combination and of each head by name.
    """

    def __init__(self, visit: Visit, heads: Sequence[HeadIndex], n_tokens: int, options: GroupOptions) -> None:
        self._heads, self._options = heads, options
        self._dtype = torch.float64 if n_tokens <= _EXACT_TOKENS else torch.float32
        default = _N_NULL if n_tokens <= _MOST_NULL_TOKENS else 0
        self.n_null = default if options.n_null is None else options.n_null

        self.combined = torch.zeros(n_tokens, n_tokens, dtype=self._dtype)
        visit(self._combine)
        self.combined /= len(heads)
        self.causal = is_causal(self.combined)
        self.parents = tree_parents(self.combined > 0)
        share = sink_share(self.combined)
        self.found_sink = 0 if self.parents is None and is_sink(share, n_tokens, self.causal) else None
        self.sink = self.found_sink if options.drop_sink else None
        self._kept = torch.tensor([token for token in range(n_tokens) if token != self.sink])

        self._labels, edges = self._cluster(self.combined)
        self.method = (
            "spectral" if options.n_groups is not None else chosen_method(edges, options.method, options.threshold)
        )
        self.groups = self._tokens_of(self._labels)
        self.combination = self._measured(self.combined, self._labels, edges)
        self.even_weights = served_evenly(self._kept, n_tokens, self.causal, self._labels)
        self.weights = torch.zeros(len(heads), len(self.even_weights))
        self.head_groups: list[Groups] = []
        self.per_head: dict[str, list[float]] = {}
        # Frees a token x token matrix before the second visit.
        del edges
        visit(self._group)

    @property
    def options(self) -> dict[str, Any]:
        """Options as they were used, for provenance."""
        return {**asdict(self._options), "n_null": self.n_null}

    @property
    def head_to_group(self) -> tuple[int | None, ...]:
        """Group of the largest excess over even attention of each head, if there is any (ties: the first)."""
        excess = self.weights - self.even_weights
        return tuple(int(row.argmax()) if float(row.max()) > 1e-6 else None for row in excess)

    def _combine(self, index: int, pattern: Float[Tensor, "query key"]) -> None:
        head = self._heads[index]
        # One pass each, without a copy: the sum is finite unless an entry is not.
        if not math.isfinite(float(pattern.sum(dtype=torch.float64))):
            raise UsageError(f"The pattern of head {head} holds NaN or infinity; attention must be finite numbers.")
        if float(pattern.amin()) < 0:
            raise UsageError(f"The pattern of head {head} holds negative values; groups need attention of 0 or more.")
        self.combined += pattern.to("cpu")

    def _group(self, index: int, pattern: Float[Tensor, "query key"]) -> None:
        matrix = pattern.to("cpu", self._dtype)
        labels, edges = self._cluster(matrix)
        self.head_groups.append(self._tokens_of(labels))
        self.weights[index] = served(self._among_kept(matrix), self._labels)
        for name, value in self._measured(matrix, labels, edges).items():
            self.per_head.setdefault(name, []).append(value)

    def _among_kept(self, matrix: Tensor) -> Tensor:
        """The kept tokens' attention to each other; a view, since only the first token is ever left out."""
        first = 0 if self.sink is None else 1
        return matrix[first:, first:]

    def _cluster(self, pattern: Tensor) -> tuple[Tensor, Tensor]:
        edges = self._among_kept(affinity(pattern, self.causal))
        return cluster(edges, self._options.method, self._options.threshold, self._options.n_groups), edges

    def _measured(self, pattern: Tensor, labels: Tensor, edges: Tensor) -> dict[str, float]:
        return {
            "within_share": float(served(self._among_kept(pattern), labels).sum()),
            **asdict(sharpness(edges, labels, self.n_null)),
            "sink_share": sink_share(pattern),
            "self_share": self_share(pattern),
        }

    def _tokens_of(self, labels: Tensor) -> Groups:
        return tuple(tuple(int(self._kept[place]) for place in group) for group in members(labels))


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


def sharpness(weights: Float[Tensor, "token token"], labels: Int[Tensor, " token"], n_null: int) -> Sharpness:
    """Modularity of groups, compared with that of as many groups found in shuffled graphs (spectral)."""
    own = modularity(weights, labels)
    bound = weights.sum(1) > 0
    if n_null < 1 or int(bound.sum()) < 2:
        return Sharpness(own, float("nan"), float("nan"), float("nan"))
    k = len(labels[bound].unique())
    if k == 1:
        # One group has modularity 0 in every graph: nothing needs drawing.
        return Sharpness(own, 0.0, float("nan"), 1.0)
    inner = weights[bound][:, bound]
    drawn = torch.tensor(
        [modularity(graph, cluster(graph, k=k)) for graph in shuffled(inner, n_null, seed=_NULL_SEED)],
        dtype=torch.float64,
    )
    spread = float(drawn.std(correction=0))
    z_score = (own - float(drawn.mean())) / spread if spread > 1e-9 else float("nan")
    p_value = (1 + int((drawn >= own - 1e-9).sum())) / (1 + n_null)
    return Sharpness(own, float(drawn.mean()), z_score, p_value)


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
