"""Groups of tokens: of each head and of all heads together, and whether they are sharper than chance.

*Are the groups of a head sharper than chance?* Attention that falls with distance has modular groups too. So they are
compared with those found, by the same steps, in draws that keep the head's own distance profile and its sinks
(:mod:`.distance`). Draws end once 10 of them are as modular: the p-value, ten in as many as that took, is valid.

:class:`Grouping` puts these together for many heads, which it visits one at a time, twice: first for the mean over
heads, which shows the sink and the groups of the combination, then for each head's own groups. Only a few
token x token matrices exist at any time, besides what the visited patterns take.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..core.errors import UsageError
from ..core.options import Between, checked
from ..core.types import MOST_DRAWS, Combine, GroupMethod, HeadIndex
from .affinity import (
    affinity,
    attention_inside,
    column_and_row_sums,
    expected_inside,
    is_causal,
    self_share,
    sink_share,
    sinks_of,
    tree_parents,
)
from .distance import DistanceNull, expected_on, pair_classes
from .partitions import cluster, is_sharp, members, modularity
from .statistics import sequential_p_value

THRESHOLD = 0.1
_SEED = 0
_DRAWS = ((7, 0), (32, 3999), (64, 199))
"""Draws made by default for texts up to this many tokens; none for longer ones, whose eigenvectors take too long, and
none for so few tokens that there is hardly anything to exchange."""

_ENOUGH = 10
_FIRST_DRAWS = 20
"""Draws at least as modular after which a head is not drawn on, and draws of the first round; then doubled."""

_BLOCK = 1 << 21
"""Entries of drawn patterns made at once, if one head does not need more."""

_MOST_OF_A_HEAD = 1 << 22
"""Entries of one head's draws made at once: rounds are not doubled beyond that."""

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
        checked("method", self.method, GroupMethod)
        checked("combine", self.combine, Combine)
        if self.n_groups is not None and (self.n_groups < 1 or self.method == "components"):
            raise UsageError(
                f"n_groups={self.n_groups} with method={self.method!r} is impossible: give 1 or more, and method "
                "'spectral'."
            )
        if not 0 < self.threshold <= 1:
            raise UsageError(f"threshold={self.threshold} is impossible: it is a share, above 0 and at most 1.")
        checked("n_null", self.n_null, Annotated[int, Between(0, MOST_DRAWS)] | None)


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
        self.even_weights = expected_inside(self._kept, n_tokens, self.causal, self._labels)
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
        received += column_and_row_sums(matrix)

    def _sinks(self, received: Float[Tensor, "2 token"]) -> tuple[int, ...]:
        return () if self.parents is not None else sinks_of(received, self.causal)

    def _group(self, index: int, pattern: Float[Tensor, "query key"]) -> None:
        matrix = pattern.to("cpu", self._dtype)
        layer_sinks = self._sinks_of_layer[self._heads[index].layer] if self._options.drop_sink else ()
        alone = tuple(token for token in layer_sinks if token not in self.sinks)
        labels, edges = self._cluster(matrix, alone)
        self.head_groups.append(self._tokens_of(labels))
        between = self._between(matrix, alone)
        self.head_shares.append(tuple(attention_inside(between, labels).tolist()))
        if self.patterns is not None:
            self.patterns[index] = matrix
        self.head_sinks.append(alone)
        self.weights[index] = attention_inside(between, self._labels)
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
            "within_share": float(attention_inside(self._between(pattern, alone), labels).sum()),
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
        return float(within_own / total)

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
        # Most heads are ordinary, and a few draws show it: numbers of draws double, and a head whose value was reached
        # often enough is done (its p-value stays valid, see sequential_p_value). Only the rare ones need all draws.
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
            done, size = done + size, min(2 * size, max(_FIRST_DRAWS, _MOST_OF_A_HEAD // self._n**2))
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
