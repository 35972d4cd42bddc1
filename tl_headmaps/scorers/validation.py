r"""Relation scores of what heads write while the model runs, and how well those of the weights alone agree with them.

A prompt contains the source of a pair. What head h writes at the last position is ``z_h W_O``; the pair counts when
fewer than k tokens have a strictly greater entry in ``z_h W_O W_U`` than its target (suppression: strictly smaller).

**Without context** the last row of the pattern is put wholly on the source token. Then ``z_h`` is the head's value
vector at the source position, and since values do not depend on the pattern of their own layer, the clean run has it
already: one forward pass serves both variants.

**Presets.** ``maps`` reads ``z W_O W_U`` as published. ``folded`` reads the head's direct contribution to the logits:
norm after attention (if any) and final norm are applied up to their scale, which is one positive number per position
and changes no rank in a row, and the mean over the vocabulary, which is one number per row and changes none either,
is taken off as in the static maps. The constant part of the values (b_V, and ln1's bias through W_V) is taken off z and
v alike: rows of the pattern sum to one, so it is written whatever the head attends to. With it gone, raw and processed
weights give the same scores.

**Agreement** of static and dynamic scores, three times:

* Over heads: templates are averaged, the mean of each layer is taken off both scores, and what is left is correlated.
  Its p-value permutes heads within their layers: layers differ in how much their heads do at all, and that alone would
  correlate. Few heads score anything on a relation, so the number of those that do stands beside it.
* Confirmed: of the heads with a static score of .15 or more, those that have it in prompts too.
* As published: Pearson (and Spearman) over heads x templates, for comparison with other models. Most of these points
  are zero in both scores, and those of one head are not independent.

Heads are all there are; pairs are a sample, and pairs that share a target or the beginning of their sources are one
*cluster*. So intervals say how far a figure would move with other clusters of pairs: those of correlations are a
jackknife over clusters on Fisher's scale, that of the confirmed share takes the middle 95% of resampled clusters. Both
scores are made from the same clusters each time, since most pairs are behind both; a cluster that only one of them has
(a template dropped its pairs, or prompts have other sources) adds nothing to the other. Intervals are about scores from
this many pairs: scores from few pairs are noisy, and noise lowers a correlation, so compare only results with similar
numbers of pairs. Fewer than four clusters behind either score give no interval.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from ..capture.parts import LayerWeights
from ..capture.weights import HeadWeights
from ..circuits.blocks import DEFAULT_BUDGET
from ..circuits.factored import LayerMaps
from ..circuits.ov import constant_values, written_maps
from ..circuits.ranking import ranks
from ..core.types import Preset
from .statistics import LEAST_UNITS, jackknife_half_width, permuted_within, rank_p_value, resamples

CONFIRMED = 0.15
"""Score from which a head counts, in the weights and in prompts."""

_N_DRAWS = 999
_NEARLY_ONE = 1 - 1e-12


def output_maps(
    weights: HeadWeights,
    layer: LayerWeights,
    values: Float[Tensor, "prompt kv_head d_head"],
    outputs: Float[Tensor, "prompt head d_head"],
    preset: Preset,
) -> LayerMaps:
    """Maps of all heads of a layer with two rows for each prompt: first all value vectors, then all outputs.

    Args:
        weights: The model.
        layer: The layer's weights.
        values: ``v`` at the source position of each prompt.
        outputs: ``z`` at the last position of each prompt.
        preset: ``"folded"`` or ``"maps"``.
    """
    heads = range(layer.shape.n_heads)
    group = [layer.shape.group_of(head) for head in heads]
    read = torch.cat([values[:, group], outputs]).float().transpose(0, 1)
    if preset != "maps":
        read = read - constant_values(layer)[group][:, None]
    return written_maps(weights, layer, read, tuple(heads), heads, preset)


@dataclass(frozen=True)
class Hits:
    """Which pairs have their target among the k strongest (``promote``) and k weakest entries of their row."""

    promote: Bool[Tensor, "head row"]
    suppress: Bool[Tensor, "head row"]


def hits(maps: LayerMaps, targets: Int[Tensor, " row"], k: int, *, budget: int = DEFAULT_BUDGET) -> Hits:
    """For each row of each head, whether its target is among the first k, in both directions."""
    rows = torch.arange(len(targets), device=targets.device)
    at_targets = ranks(maps, rows, targets, limit=k, budget=budget)
    return Hits(at_targets.greater < k, at_targets.less < k)


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% interval; NaN where there is none."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Agreement:
    """How well static and dynamic scores of heads agree.

    Attributes:
        heads: Pearson correlation over heads, templates averaged and layer means taken off.
        p_value: Share of permutations of heads within layers that correlate as highly.
        n_active: Heads with a score above 0, in the weights or in prompts.
        n_static: Heads with a static score of .15 or more.
        n_confirmed: Those of them that have it in prompts too.
        confirmed: Their share.
        pearson, spearman: Correlation over heads x templates, as published; by ranks without an interval: most heads
            tie at 0, and a pair or two decide which few rank above them, which no resampling of pairs shows.
    """

    heads: Estimate
    p_value: float
    n_active: int
    n_static: int
    n_confirmed: int
    confirmed: Estimate
    pearson: Estimate
    spearman: float


@dataclass(frozen=True)
class PairHits:
    """Hits of pairs added up by cluster: what a resample draws.

    Attributes:
        hits: Number of hits [cluster, template, head].
        sizes: Number of pairs of each cluster; 0 for clusters that only the other side has.
    """

    hits: NDArray[np.float64]
    sizes: NDArray[np.float64]

    @classmethod
    def of(
        cls, hits: Bool[Tensor, "template pair head"], clusters: Int[Tensor, " pair"], n_clusters: int | None = None
    ) -> "PairHits":
        """Hits of each pair in each head, by template; of so many clusters, if there are more than these pairs have."""
        by_pair = hits.cpu().double().transpose(0, 1)
        sizes = clusters.bincount(minlength=n_clusters or 0).double()
        sums = torch.zeros(len(sizes), *by_pair.shape[1:], dtype=torch.float64)
        sums.index_add_(0, clusters, by_pair)
        return cls(sums.numpy(), sizes.numpy())

    @property
    def n_clusters(self) -> int:
        """Clusters that have pairs here."""
        return int((self.sizes > 0).sum())

    def scores(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Scores [draw, template, head] when each cluster is drawn this many times [draw, cluster]."""
        counts = np.tensordot(times, self.hits, 1)
        scores: NDArray[np.float64] = counts / (times @ self.sizes)[:, None, None]
        return scores


def agreement(
    static: PairHits,
    dynamic: PairHits,
    layers: Int[Tensor, " head"],
    *,
    orders: Int[Tensor, "draw head"] | None = None,
    seed: int = 0,
) -> Agreement:
    """Agreement of the scores (shares of hits over pairs) from weights and in prompts.

    Args:
        static: Hits from the weights (one template).
        dynamic: Hits in prompts, of the same clusters: either side may have no pairs of some.
        layers: The layer of each head.
        orders: Permutations within layers, from :func:`orders_within`; made here by default.
        seed: Of the permutations and resamples.
    """
    orders = orders_within(layers, seed) if orders is None else orders
    groups = layers.numpy()
    n_all = len(static.sizes)
    x, y = (side.scores(np.ones((1, n_all))) for side in (static, dynamic))
    values = _correlations(x, y, groups)[0]
    enough = min(static.n_clusters, dynamic.n_clusters) >= LEAST_UNITS
    half = np.full(2, np.nan)
    if enough:
        without_each = 1 - np.eye(n_all)
        half = _half_widths(static.scores(without_each), dynamic.scores(without_each), groups)
    heads, pearson = (_with_interval(float(v), float(h)) for v, h in zip(values, half, strict=True))
    left, right = _within(x[:, 0], groups)[0], _within(y.mean(1), groups)[0]
    permuted = left[orders.numpy()] @ right
    p_value = float("nan") if np.isnan(values[0]) else rank_p_value(float(left @ right), torch.from_numpy(permuted))
    counted, confirmed = _confirmed(x, y)
    share, ends = _shares(counted, confirmed), (np.nan, np.nan)
    if enough:
        drawn = _shares(*_confirmed(*_resampled(static, dynamic, seed)))
        if len(known := drawn[~np.isnan(drawn)]) and not np.isnan(share[0]):
            ends = tuple(np.quantile(known, [0.025, 0.975]).tolist())
    return Agreement(
        heads=heads,
        p_value=p_value,
        n_active=int(((x[0, 0] > 0) | (y[0].mean(0) > 0)).sum()),
        n_static=int(counted[0]),
        n_confirmed=int(confirmed[0]),
        confirmed=Estimate(float(share[0]), *ends),
        pearson=pearson,
        spearman=_spearman(x[0, 0], y[0]),
    )


def orders_within(layers: Int[Tensor, " head"], seed: int = 0) -> Int[Tensor, "draw head"]:
    """Random orders of heads in which each stays in its layer."""
    generator = np.random.default_rng(seed)
    return torch.stack([permuted_within(layers, generator) for _ in range(_N_DRAWS)])


def _resampled(static: PairHits, dynamic: PairHits, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scores of both sides [draw, 1, head] with clusters drawn again, templates averaged."""
    times = resamples(len(static.sizes), _N_DRAWS, seed).numpy()
    # A draw without any pair of a side has no score there.
    times = times[(times @ static.sizes > 0) & (times @ dynamic.sizes > 0)]
    return static.scores(times), PairHits(dynamic.hits.mean(1, keepdims=True), dynamic.sizes).scores(times)


def _confirmed(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many heads count by their static scores [draw, 1, head], and how many of them by the dynamic ones too."""
    # 3 of 20 pairs are .15, however they were added up.
    counts = x[:, 0] >= CONFIRMED - 1e-9
    return counts.sum(1), (counts & (y.mean(1) >= CONFIRMED - 1e-9)).sum(1)


def _shares(counted: NDArray[np.int64], confirmed: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.where(counted > 0, confirmed / np.maximum(counted, 1), np.nan)


def _half_widths(x: NDArray[np.float64], y: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.float64]:
    """Half of the interval of each correlation on Fisher's scale, from the scores without each cluster."""
    half: NDArray[np.float64] = jackknife_half_width(torch.from_numpy(_fisher(_correlations(x, y, groups)))).numpy()
    return half


def _with_interval(value: float, half: float) -> Estimate:
    if np.isnan(value) or np.isnan(half):
        return Estimate(value, np.nan, np.nan)
    low, high = np.tanh([_fisher(value) - half, _fisher(value) + half])
    return Estimate(value, float(min(low, value)), float(max(high, value)))


def _fisher(correlation: Any) -> Any:
    """The scale on which the spread of a correlation does not depend on its size; finite at 1."""
    return np.arctanh(np.clip(correlation, -_NEARLY_ONE, _NEARLY_ONE))


def _within(scores: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.float64]:
    """Scores [draw, head] less the mean of their layer."""
    same = groups[:, None] == groups[None]
    centred: NDArray[np.float64] = scores - scores @ (same / same.sum(0))
    return centred


def _correlations(x: NDArray[np.float64], y: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.float64]:
    """Pearson over heads within layers, and over heads x templates [draw, 2], of scores of both sides."""
    repeated = np.tile(x[:, 0], (1, y.shape[1]))
    return np.stack(
        [
            _pearson(_within(x[:, 0], groups), _within(y.mean(1), groups)),
            _pearson(repeated, y.reshape(len(y), -1)),
        ],
        axis=1,
    )


def _spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Over heads x templates, of scores [head] and [template, head]."""
    from scipy.stats import rankdata

    # Rounding must not make two of equal values.
    ranked = (rankdata(values.round(9))[None] for values in (np.tile(x, len(y)), y.ravel()))
    return float(_pearson(*ranked)[0])


def _pearson(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    x, y = (values - values.mean(1, keepdims=True) for values in (x, y))
    spread = np.minimum((x * x).sum(1), (y * y).sum(1))
    varies = spread > 1e-18 * x.shape[1]
    lengths = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    return np.where(varies, (x * y).sum(1) / np.where(varies, lengths, 1.0), np.nan)
