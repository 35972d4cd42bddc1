"""Which tokens of a text the heads bind together, from a model or from attention patterns made elsewhere.

Heads are visited one at a time, twice: first for the mean over heads, which shows the sink and the groups of the
combination, then for each head's own groups. No more than a few token x token matrices exist at any time besides
what the model itself makes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ...capture.running.activations import LayerActivations
from ...capture.running.cached import run_or_read
from ...capture.running.text import EncodedText, chosen_heads
from ...capture.weights import HeadWeights
from ...core.arrays import arrays_digest, dtype_name, given_tensor
from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import HeadIndex, HeadLike, check_choice, head_list, head_names
from ...scorers.clustering import GroupMethod, chosen_method, cluster
from ...scorers.grouping import affinity, is_causal, is_sink, self_share, served, served_evenly, sharpness, sink_share
from ...scorers.partitions import members, similar_partitions
from ...scorers.trees import tree_parents
from .result import AttentionGroups, Groups

THRESHOLD = 0.1
SIMILAR = 0.5
_MOST_COMBINED = 1024
_NULL_DRAWS = 20
_MOST_NULL_TOKENS = 256
_EXACT_TOKENS = 1024

Visit: TypeAlias = Callable[[Callable[[int, Tensor], None]], None]
"""Calls its argument with the number and the pattern of every head, one after the other."""


def attention_groups(
    model: Any,
    text_or_tokens: Any,
    *,
    layers: Iterable[int] | int | None = None,
    heads: HeadLike | Iterable[HeadLike] | None = None,
    method: GroupMethod = "auto",
    drop_sink: bool = True,
    threshold: float = THRESHOLD,
    n_groups: int | None = None,
    null_draws: int | None = None,
    prepend_bos: bool = False,
    cache: Any = None,
) -> AttentionGroups:
    """Groups of tokens that the heads of a model bind together in one text.

    Args:
        model: A TransformerBridge or HookedTransformer.
        text_or_tokens: A text, or its token ids.
        layers: Only heads of these layers.
        heads: Only these heads.
        method: ``"spectral"`` (number of groups by the largest eigengap), ``"components"`` (connected by strong edges),
            or ``"auto"``: components where the matrix is sharp.
        drop_sink: Leave the first token out when it is an attention sink.
        threshold: Strong edges are at least this share of the strongest edge of one of their tokens.
        n_groups: So many groups instead of the number the eigengap shows (spectral).
        null_draws: Shuffled graphs to compare each modularity with; by default 20, none above 256 tokens.
        prepend_bos: Put BOS in front of the text.
        cache: An ``ActivationCache`` of this very text, from ``model.run_with_cache``; then nothing is run.

    Example:
        >>> from tl_headmaps import attention_groups, load_default_model
        >>> groups = attention_groups(load_default_model(), "The cat sat on the mat. It was happy.", heads="L3H4")
        >>> groups.words()
        ((' cat', ' sat', ' on', ' mat'), (' the', '.', ' It', ' was', ' happy', '.'))
        >>> groups.tokens[groups.sink]  # where attention is parked; left out
        'The'
    """
    _check_options(method, threshold, n_groups, null_draws)
    prompt = EncodedText.of(model, text_or_tokens, prepend_bos=prepend_bos, least=2, what="a group needs at least two")
    weights = HeadWeights.of(model)
    named = None if heads is None else head_list(heads)
    chosen = chosen_heads(weights, layers, named)
    numbers = {head: number for number, head in enumerate(chosen)}

    def visit(see: Callable[[int, Tensor], None]) -> None:
        def reduce(seen: LayerActivations) -> None:
            for head, pattern in enumerate(seen["pattern"][0]):
                if (number := numbers.get(HeadIndex(seen.layer, head))) is not None:
                    see(number, pattern)

        run_or_read(
            model, prompt.ids, cache, read=("pattern",), reduce=reduce, layers=sorted({head.layer for head in chosen})
        )

    options = {
        "layers": None if layers is None else sorted({head.layer for head in chosen}),
        "heads": head_names(named),
        "prepend_bos": prepend_bos,
        "from_cache": cache is not None,
    }
    found = _Grouping(visit, chosen, prompt.tokens, method, drop_sink, threshold, n_groups, null_draws)
    return found.result(lambda more: weights.provenance(runs_model=True, options={**options, **more}, seed=0))


def attention_groups_from_pattern(
    pattern: Any,
    tokens: Sequence[str] | None = None,
    *,
    method: GroupMethod = "auto",
    drop_sink: bool = True,
    threshold: float = THRESHOLD,
    n_groups: int | None = None,
    null_draws: int | None = None,
) -> AttentionGroups:
    """The same from bare attention: head x query x key, or one query x key matrix.

    Args:
        pattern: Array, tensor or nested lists of non-negative attention; rows need not sum to one.
        tokens: Texts of the tokens; numbers by default.
        method: As in :func:`attention_groups`, like the other options.
        drop_sink: Leave the first token out when it is an attention sink.
        threshold: What makes an edge strong.
        n_groups: So many groups instead of the number the eigengap shows (spectral).
        null_draws: Shuffled graphs to compare with.

    Example:
        >>> from tl_headmaps import attention_groups_from_pattern
        >>> pattern = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [0, 0, 0.5, 0.5]]
        >>> attention_groups_from_pattern(pattern, ["It", "I", "is", "am"]).words()
        (('It', 'I'), ('is', 'am'))
    """
    _check_options(method, threshold, n_groups, null_draws)
    given = _as_patterns(pattern)
    n = given.shape[-1]
    names = tuple(str(token) for token in (range(n) if tokens is None else tokens))
    if len(names) != n:
        raise UsageError(f"There are {len(names)} tokens, but the pattern is {n} x {n}. Give one token for each row.")

    def visit(see: Callable[[int, Tensor], None]) -> None:
        for number, matrix in enumerate(given):
            see(number, matrix)

    heads = [HeadIndex(0, head) for head in range(len(given))]
    found = _Grouping(visit, heads, names, method, drop_sink, threshold, n_groups, null_draws)
    return found.result(
        lambda more: Provenance.of_arrays(arrays_digest(given), dtype_name(given), options=more, seed=0)
    )


class _Grouping:
    """The two visits to all heads, and what they leave behind."""

    def __init__(
        self,
        visit: Visit,
        heads: list[HeadIndex],
        tokens: tuple[str, ...],
        method: GroupMethod,
        drop_sink: bool,
        threshold: float,
        n_groups: int | None,
        null_draws: int | None,
    ) -> None:
        self.heads, self.tokens, self.method, self.threshold = heads, tokens, method, threshold
        self.n = len(tokens)
        self.drop_sink, self.n_groups = drop_sink, n_groups
        self.dtype = torch.float64 if self.n <= _EXACT_TOKENS else torch.float32
        default = _NULL_DRAWS if self.n <= _MOST_NULL_TOKENS else 0
        self.draws = default if null_draws is None else null_draws
        self.per_head: dict[str, list[float]] = {}

        self.combined = torch.zeros(self.n, self.n, dtype=self.dtype)
        visit(self._combine)
        self.combined /= len(heads)
        self.causal = is_causal(self.combined)
        self.parents = tree_parents(self.combined > 0)
        share = sink_share(self.combined)
        self.found_sink = 0 if self.parents is None and is_sink(share, self.n, self.causal) else None
        self.sink = self.found_sink if drop_sink else None
        self.kept = torch.tensor([token for token in range(self.n) if token != self.sink])

        self.labels, edges = self._cluster(self.combined)
        self.chosen_method = "spectral" if n_groups is not None else chosen_method(edges, method, threshold)
        self.combination = self._measured(self.combined, self.labels, edges)
        self.even = served_evenly(self.kept, self.n, self.causal, self.labels)
        self.head_labels = torch.zeros(len(heads), len(self.kept), dtype=torch.long)
        self.weights = torch.zeros(len(heads), len(self.even))
        del edges
        visit(self._group)

    def _combine(self, number: int, pattern: Float[Tensor, "query key"]) -> None:
        self._check(number, pattern)
        self.combined += pattern.to("cpu")

    def _check(self, number: int, pattern: Tensor) -> None:
        head = self.heads[number]
        # One pass each, without a copy: the sum is finite unless an entry is not.
        if not math.isfinite(float(pattern.sum(dtype=torch.float64))):
            raise UsageError(f"The pattern of head {head} holds NaN or infinity; attention must be finite numbers.")
        if float(pattern.amin()) < 0:
            raise UsageError(f"The pattern of head {head} holds negative values; groups need attention of 0 or more.")

    def _group(self, number: int, pattern: Float[Tensor, "query key"]) -> None:
        matrix = pattern.to("cpu", self.dtype)
        labels, edges = self._cluster(matrix)
        self.head_labels[number] = labels
        self.weights[number] = served(self._among_kept(matrix), self.labels)
        for name, value in self._measured(matrix, labels, edges).items():
            self.per_head.setdefault(name, []).append(value)

    def _among_kept(self, matrix: Tensor) -> Tensor:
        """The kept tokens' attention to each other; a view, since only the first token is ever left out."""
        first = 0 if self.sink is None else 1
        return matrix[first:, first:]

    def _cluster(self, pattern: Tensor) -> tuple[Tensor, Tensor]:
        edges = self._among_kept(affinity(pattern, self.causal))
        return cluster(edges, self.method, self.threshold, self.n_groups), edges

    def _measured(self, pattern: Tensor, labels: Tensor, edges: Tensor) -> dict[str, float]:
        sharp = sharpness(edges, labels, self.draws)
        return {
            "within_share": float(served(self._among_kept(pattern), labels).sum()),
            **asdict(sharp),
            "sink_share": sink_share(pattern),
            "self_share": self_share(pattern),
        }

    def result(self, provenance: Callable[[dict[str, Any]], Provenance]) -> AttentionGroups:
        clusters = similar_partitions(self.head_labels, SIMILAR)
        options = {
            "method": self.method,
            "drop_sink": self.drop_sink,
            "threshold": self.threshold,
            "n_groups": self.n_groups,
            "null_draws": self.draws,
        }
        return AttentionGroups(
            tokens=self.tokens,
            heads=tuple(self.heads),
            causal=self.causal,
            method=self.chosen_method,
            sink=self.sink,
            found_sink=self.found_sink,
            groups=self._tokens_of(self.labels),
            head_groups=tuple(self._tokens_of(labels) for labels in self.head_labels),
            head_to_group=tuple(_served_most(weights - self.even) for weights in self.weights),
            head_clusters=tuple(tuple(self.heads[number] for number in cluster) for cluster in clusters),
            weights=self.weights,
            even_weights=self.even,
            combination=self.combination,
            combined=self.combined.float() if self.n <= _MOST_COMBINED else None,
            parents=None if self.parents is None else tuple(self.parents),
            provenance=provenance(options),
            **{name: torch.tensor(values, dtype=torch.float32) for name, values in self.per_head.items()},
        )

    def _tokens_of(self, labels: Tensor) -> Groups:
        return tuple(tuple(int(self.kept[place]) for place in group) for group in members(labels))


def _served_most(excess: Float[Tensor, " group"]) -> int | None:
    """The group with the largest excess over even attention, if any (ties: the first)."""
    best = int(excess.argmax())
    return best if float(excess[best]) > 1e-6 else None


def _check_options(method: str, threshold: float, n_groups: int | None, null_draws: int | None) -> None:
    check_choice(method, GroupMethod, "method")
    if n_groups is not None and (n_groups < 1 or method == "components"):
        raise UsageError(
            f"n_groups={n_groups} with method={method!r} is impossible: give 1 or more, and method 'spectral'."
        )
    if not 0 < threshold <= 1:
        raise UsageError(f"threshold={threshold} is impossible: it is a share, above 0 and at most 1.")
    if null_draws is not None and null_draws < 0:
        raise UsageError(f"null_draws={null_draws} is impossible: give 0 or more.")


def _as_patterns(pattern: Any) -> Tensor:
    """A head x query x key tensor, checked as far as its shape goes; values are checked head by head."""
    given = given_tensor(pattern, "The pattern", "head x query x key, or one square matrix")
    if given.ndim == 2:
        given = given[None]
    if given.ndim != 3 or given.shape[1] != given.shape[2]:
        raise UsageError(
            f"The pattern has shape {tuple(given.shape)}; it must be head x query x key with as many queries as keys, "
            "or one square matrix."
        )
    if not given.shape[0] or given.shape[1] < 2:
        raise UsageError(f"The pattern has shape {tuple(given.shape)}; it needs a head and at least two tokens.")
    return given
