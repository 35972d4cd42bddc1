"""From attention patterns to groups of tokens: affinities, sinks, trees, and which head serves which group.

A causal query i spreads its attention over i + 1 tokens, so early rows are dense and late rows thin for no other
reason than the triangle. Multiplying row i by i + 1 gives attention relative to even attention: after it, a head
that attends evenly has affinity 1 between any two tokens. A pair of a causal pattern is seen in one direction
only, which is its affinity; a pair of a bidirectional pattern has the mean of both directions. Attention of a
token to itself binds nothing together and is left out.

A token is an attention sink when those after it give it far more than even attention would:
``(share - even) / (1 - even) >= 0.3`` with the mean shares over all later queries. There may be several: besides the
first token, whichever at least four later ones look at (a block of tokens that attend evenly to each other has none).
What is a sink for the heads of one layer is left alone in their graphs.

*Are the groups of a head sharper than chance?* Attention that falls with distance has modular groups too. So they are
compared with those found, by the same steps, in draws that keep the head's own distance profile and its sinks
(:mod:`.distance`). Draws end early where the answer is clear (at least 10 draws as modular, so p is above .05).

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

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..core.errors import UsageError
from ..core.types import Combine, GroupMethod, HeadIndex, check_choice
from .distance import DistanceNull, expected_on, pair_classes
from .partitions import cluster, is_sharp, members, modularity, within
from .statistics import sequential_p_value

SINK_EXCESS = 0.3
"""Share of attention on a token, above even attention, from which on it is a sink."""

_LEAST_LATER = 4
"""Later tokens that must have looked at a token, other than the first, before it is called a sink."""

THRESHOLD = 0.1
_SEED = 0
_DRAWS = ((7, 0), (32, 3999), (64, 199))
"""Draws made by default for texts up to so many tokens; none for longer ones, whose eigenvectors take too long, and
none for so few tokens that there is hardly anything to exchange."""

_ENOUGH = 10
_FIRST_DRAWS = 20
"""Draws at least as modular after which a head is clearly not special, and draws of the first round; then doubled."""

_BLOCK = 1 << 21
"""Entries of drawn patterns made at once."""

_MOST_PATTERNS = 1 << 18
"""Entries up to which the heads' attention is kept."""

_MOST_EXPECTED = 512
"""Tokens up to which the attention is computed that distance alone would give."""

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
    combine: Combine = "mean"

    def __post_init__(self) -> None:
        check_choice(self.method, GroupMethod, "method")
        check_choice(self.combine, Combine, "combine")
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
    """Groups of the heads' combination (mean or maximum) and of each head.

    Attributes:
        combined: Attention of all heads.
        causal: Whether no token attends to a later one.
        parents: Parent of each token if the mask is a tree.
        found_sinks, sinks: Attention sinks of the combination, and the same if they were left out.
        head_sinks: Further tokens that each head's layer parks attention on; they are alone in its groups.
        method: How the groups of the combination were found.
        groups, head_groups: Groups of the combination and of each head.
        head_shares: Share of each head's attention between different kept tokens inside each of its own groups.
        patterns: The heads' attention, unless there is too much of it.
        weights, even_weights, distance_weights: Share of each head's attention, of even attention, and of attention
            that depends on distance alone, inside each group.
        combination, per_head: Measurements of the combination and of each head by name.
    """

    def __init__(self, visit: Visit, heads: Sequence[HeadIndex], n_tokens: int, options: GroupOptions) -> None:
        self._heads, self._options, self._n = heads, options, n_tokens
        self._dtype = torch.float64 if n_tokens <= _EXACT_TOKENS else torch.float32
        default = next((draws for longest, draws in _DRAWS if n_tokens <= longest), 0)
        self.n_null = default if options.n_null is None else options.n_null

        self.combined = torch.zeros(n_tokens, n_tokens, dtype=self._dtype)
        self._received: dict[int, Tensor] = {}
        visit(self._combine)
        if options.combine == "mean":
            self.combined /= len(heads)
        self.causal = is_causal(self.combined)
        self.parents = tree_parents(self.combined > 0)
        every_layer = sum(self._received.values(), torch.zeros(2, n_tokens, dtype=torch.float64))
        self.found_sinks = self._sinks(every_layer)
        self.sinks = self.found_sinks if options.drop_sink else ()
        self._kept = torch.tensor([token for token in range(n_tokens) if token not in self.sinks], dtype=torch.int64)
        if options.n_groups is not None and options.n_groups > len(self._kept):
            raise UsageError(
                f"n_groups={options.n_groups} is impossible: {len(self._kept)} of {n_tokens} tokens are grouped, sinks "
                f"are not. Give {len(self._kept)} or fewer, or a longer text."
            )
        self._sinks_of_layer = {layer: self._sinks(received) for layer, received in self._received.items()}

        self._labels, edges = self._cluster(self.combined, ())
        sharp = options.n_groups is None and bool(is_sharp(edges[None], options.threshold)[0])
        self.method = ("components" if sharp else "spectral") if options.method == "auto" else options.method
        self.groups = self._tokens_of(self._labels)
        self.even_weights = served_evenly(self._kept, n_tokens, self.causal, self._labels)
        self.weights = torch.zeros(len(heads), len(self.groups))
        self.distance_weights = torch.full_like(self.weights, torch.nan)
        self._tests: list[_Test] = []
        self.combination = self._measured(self.combined, self._labels, edges, ())
        self.head_groups: list[Groups] = []
        self.head_shares: list[tuple[float, ...]] = []
        few = len(heads) * n_tokens**2 <= _MOST_PATTERNS
        self.patterns = torch.zeros(len(heads), n_tokens, n_tokens) if few else None
        self.head_sinks: list[tuple[int, ...]] = []
        self.per_head: dict[str, list[float]] = {}
        # Frees a token x token matrix before the second visit.
        del edges
        visit(self._group)
        self._draw()

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
        matrix = pattern.to("cpu")
        if self._options.combine == "max":
            torch.maximum(self.combined, matrix.to(self._dtype), out=self.combined)
        else:
            self.combined += matrix
        received = self._received.setdefault(head.layer, torch.zeros(2, self._n, dtype=torch.float64))
        received += received_and_given(matrix)

    def _sinks(self, received: Float[Tensor, "2 token"]) -> tuple[int, ...]:
        return () if self.parents is not None else sinks_of(received, self.causal)

    def _group(self, index: int, pattern: Float[Tensor, "query key"]) -> None:
        matrix = pattern.to("cpu", self._dtype)
        layer_sinks = self._sinks_of_layer[self._heads[index].layer] if self._options.drop_sink else ()
        alone = tuple(token for token in layer_sinks if token not in self.sinks)
        labels, edges = self._cluster(matrix, alone)
        self.head_groups.append(self._tokens_of(labels))
        between = self._between(matrix, alone)
        self.head_shares.append(tuple(served(between, labels).tolist()))
        if self.patterns is not None:
            self.patterns[index] = matrix
        self.head_sinks.append(alone)
        self.weights[index] = served(between, self._labels)
        for name, value in self._measured(matrix, labels, edges, alone, index).items():
            self.per_head.setdefault(name, []).append(value)

    def _among_kept(self, matrix: Tensor) -> Tensor:
        """The kept tokens' attention to each other; a view where only the first token is left out."""
        first = self._n - len(self._kept)
        if self.sinks in ((), (0,)):
            return matrix[..., first:, first:]
        return matrix[..., self._kept[:, None], self._kept[None, :]]

    def _between(self, matrices: Tensor, alone: tuple[int, ...]) -> Tensor:
        """The same without anything from or to the tokens that stay alone."""
        kept = self._among_kept(matrices)
        if not alone:
            return kept
        apart = torch.isin(self._kept, torch.tensor(alone))
        return kept.masked_fill(apart[:, None] | apart[None, :], 0)

    def _edges(self, patterns: Tensor, alone: tuple[int, ...]) -> Tensor:
        return self._between(affinity(patterns, self.causal), alone)

    def _cluster(self, pattern: Tensor, alone: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        edges = self._edges(pattern, alone)
        return cluster(edges, self._options.method, self._options.threshold, self._options.n_groups), edges

    def _measured(
        self, pattern: Tensor, labels: Tensor, edges: Tensor, alone: tuple[int, ...], index: int | None = None
    ) -> dict[str, float]:
        own = float(modularity(edges, labels))
        if self.n_null and len(labels[edges.sum(1) > 0].unique()) > 1:
            self._tests.append(_Test(index, pattern, own, alone))
        # One group of all has modularity 0, which every draw reaches. Without edges there is no test.
        return {
            "within_share": float(served(self._between(pattern, alone), labels).sum()),
            "distance_within": self._expected(pattern, labels, alone, index),
            "modularity": own,
            "null_modularity": math.nan,
            "z_score": math.nan,
            "p_value": 1.0 if self.n_null and bool(edges.any()) else math.nan,
            "sink_share": sink_share(pattern),
            "self_share": self_share(pattern),
        }

    def _expected(self, pattern: Tensor, labels: Tensor, alone: tuple[int, ...], index: int | None) -> float:
        """Share inside the groups if attention depended on distance alone; of each group of the combination as well."""
        if self._n > _MOST_EXPECTED:
            return math.nan
        between = self._between(~torch.eye(self._n, dtype=torch.bool), alone)
        inside = [between & (labels[:, None] == labels[None, :]), between]
        for group in range(len(self.groups) if index is not None else 0):
            inside.append(between & (self._labels == group)[:, None] & (self._labels == group)[None, :])
        pairs = torch.zeros(len(inside), self._n, self._n, dtype=torch.bool)
        pairs[:, self._kept[:, None], self._kept[None, :]] = torch.stack(inside)
        within_own, total, *of_groups = expected_on(pattern[None], pairs, self._classes(alone))[0].tolist()
        if total <= 0:
            return math.nan
        if index is not None:
            self.distance_weights[index] = torch.tensor(of_groups) / total
        return within_own / total

    def _classes(self, alone: tuple[int, ...]) -> Tensor:
        sinks = torch.zeros(self._n, dtype=torch.bool)
        sinks[list((*self.found_sinks, *alone))] = True
        return pair_classes(self._n, causal=self.causal, sinks=sinks)

    def _draw(self) -> None:
        """Compare heads with draws of their own distance profiles; heads with the same sinks together."""
        for alone in dict.fromkeys(test.alone for test in self._tests):
            tests = [test for test in self._tests if test.alone == alone]
            null = DistanceNull(torch.stack([test.pattern for test in tests]), self._classes(alone))
            own = torch.tensor([test.modularity for test in tests], dtype=torch.float64)
            for test, drawn in zip(tests, self._drawn(null, own, alone), strict=True):
                for name, value in _compared(test.modularity, drawn).items():
                    if test.index is None:
                        self.combination[name] = value
                    else:
                        self.per_head[name][test.index] = value
        self._tests.clear()

    def _drawn(self, null: DistanceNull, own: Float[Tensor, " head"], alone: tuple[int, ...]) -> list[Tensor]:
        """Modularities of draws of each head: all of them, or as many as it takes for enough to be as large."""
        generator = np.random.default_rng(_SEED)
        drawn: list[Tensor] = [torch.zeros(0, dtype=torch.float64)] * len(own)
        open_heads = torch.arange(len(own))
        done, size = 0, _FIRST_DRAWS
        while done < self.n_null and len(open_heads):
            size = min(size, self.n_null - done)
            state = generator.bit_generator.state
            for some in open_heads.split(max(1, _BLOCK // (size * self._n**2))):
                # Every head sees the same draws, whichever others there are.
                generator.bit_generator.state = state
                edges = self._edges(null.draw(generator, size, some), alone)
                labels = cluster(edges, self._options.method, self._options.threshold, self._options.n_groups)
                for head, values in zip(some.tolist(), modularity(edges, labels), strict=True):
                    drawn[head] = torch.cat([drawn[head], values])
            as_large = [int(exceeding(float(own[head]), drawn[head]).sum()) for head in open_heads.tolist()]
            open_heads = open_heads[torch.tensor(as_large) < _ENOUGH]
            done, size = done + size, 2 * size
        return drawn

    def _tokens_of(self, labels: Tensor) -> Groups:
        return tuple(tuple(int(self._kept[place]) for place in group) for group in members(labels))


@dataclass(frozen=True)
class _Test:
    """A head (or, without an index, the combination) whose groups are to be compared with draws."""

    index: int | None
    pattern: Tensor
    modularity: float
    alone: tuple[int, ...]


def exceeding(own: float, drawn: Float[Tensor, " draw"]) -> Bool[Tensor, " draw"]:
    """Which draws are at least as modular; equal values that were added up in another order are equal."""
    return drawn >= own - 1e-9


def _compared(own: float, drawn: Float[Tensor, " draw"]) -> dict[str, float]:
    """Mean of the draws, standard deviations above it (NaN where all are alike), and the p-value."""
    mean, spread = float(drawn.mean()), float(drawn.std(correction=0))
    return {
        "null_modularity": mean,
        "z_score": (own - mean) / spread if spread > 1e-9 else math.nan,
        "p_value": sequential_p_value(exceeding(own, drawn), _ENOUGH),
    }


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


def received_and_given(pattern: Float[Tensor, "query key"]) -> Float[Tensor, "2 token"]:
    """Attention each token receives from later ones, and all that those give."""
    later = pattern.tril(-1).sum(0, dtype=torch.float64)
    given = pattern.sum(1, dtype=torch.float64)
    return torch.stack([later, given.sum() - given.cumsum(0)])


def sinks_of(received: Float[Tensor, "2 token"], causal: bool) -> tuple[int, ...]:
    """Tokens on which attention is parked, from what :func:`received_and_given` says, summed over heads.

    Example:
        >>> parked = torch.tensor([[1, 0, 0], [0.9, 0.1, 0], [0.9, 0, 0.1]])
        >>> sinks_of(received_and_given(parked), causal=True)
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
