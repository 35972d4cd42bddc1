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

**Agreement** of static and dynamic scores is their correlation (Pearson, Spearman) over heads and templates. The heads
of a model are not a sample, they are all there is; the pairs of a relation are one. So the interval resamples pairs: a
resample takes all templates and heads of a pair together, scores both sides again and correlates. The spread of the
resamples (1.96 standard deviations to either side, on Fisher's scale) says how far the agreement would move with other
pairs of the same kind and number. It does not say what more pairs would give: scores from few pairs are noisy, and
noise lowers a correlation, so compare only results with similar numbers of pairs.
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

N_RESAMPLES = 1000
_NEARLY_ONE = 1 - 1e-12
_AT_A_TIME = 1 << 24
"""Scores held at a time while resampling (float64: 128 MiB)."""


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
    heads = range(weights.n_heads)
    group = [weights.group_of(head) for head in heads]
    read = torch.cat([values[:, group], outputs]).float().transpose(0, 1)
    if preset != "maps":
        read = read - constant_values(weights, layer)[group][:, None]
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
class Correlation:
    """A correlation with its 95% interval; NaN where a side does not vary."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Agreement:
    """Pearson and Spearman correlation of static with dynamic scores over templates x heads."""

    pearson: Correlation
    spearman: Correlation


def agreement(
    static: Bool[Tensor, "static_pair cell"],
    dynamic: Bool[Tensor, "template pair cell"],
    *,
    same_pairs: bool = True,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Agreement:
    """Agreement of the scores (shares of true entries over pairs) of two sets of hits.

    Args:
        static: Hits of each pair in each head (cell), from the weights.
        dynamic: Hits of each pair in each head, by template.
        same_pairs: Whether both have the same pairs, which are then resampled together.
        n_resamples: Number of resamples of the interval.
        seed: Of the resamples.
    """
    left, right = (hits.cpu().double().numpy() for hits in (static, dynamic))
    n_templates, n_right, n_cells = right.shape
    right = right.transpose(1, 0, 2).reshape(n_right, -1)
    # Counts instead of shares: correlations do not see the difference, and equal counts are exactly equal.
    at = _correlations(left.sum(0)[None], right.sum(0)[None], n_templates)
    generator = np.random.default_rng(seed)
    resampled: list[NDArray[np.float64]] = []
    step = max(1, _AT_A_TIME // (n_templates * n_cells))
    for start in range(0, n_resamples, step):
        size = min(step, n_resamples - start)
        weights = [_resample(generator, len(part), size) for part in ((right,) if same_pairs else (left, right))]
        resampled.append(_correlations(weights[0] @ left, weights[-1] @ right, n_templates))
    draws = np.concatenate(resampled)
    return Agreement(*(_with_interval(float(value), draws[:, place]) for place, value in enumerate(at[0])))


def _with_interval(value: float, resampled: NDArray[np.float64]) -> Correlation:
    """A correlation with 1.96 standard deviations of its resamples to either side, on Fisher's scale."""
    known = resampled[~np.isnan(resampled)]
    if np.isnan(value) or not len(known):
        return Correlation(value, np.nan, np.nan)
    half = 1.96 * _fisher(known).std()
    low, high = np.tanh([_fisher(value) - half, _fisher(value) + half])
    return Correlation(value, float(min(low, value)), float(max(high, value)))


def _fisher(correlation: Any) -> Any:
    """The scale on which the spread of a correlation does not depend on its size; finite at 1."""
    return np.arctanh(np.clip(correlation, -_NEARLY_ONE, _NEARLY_ONE))


def _resample(generator: np.random.Generator, n: int, size: int) -> NDArray[np.float64]:
    """How often each pair is drawn [resample, pair] when n pairs are drawn with replacement."""
    return generator.multinomial(n, np.full(n, 1 / n), size=size).astype(np.float64)


def _correlations(static: NDArray[np.float64], dynamic: NDArray[np.float64], n_templates: int) -> NDArray[np.float64]:
    """Pearson and Spearman [resample, 2] of counts [resample, cell] and [resample, template x cell]."""
    from scipy.stats import rankdata

    repeated = np.tile(static, (1, n_templates))
    # Ranks of a repeated sample are an increasing linear function of the ranks of the sample: no need to sort it all.
    ranked = np.tile(rankdata(static, axis=1), (1, n_templates))
    return np.stack([_pearson(repeated, dynamic), _pearson(ranked, rankdata(dynamic, axis=1))], axis=1)


def _pearson(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    x, y = (values - values.mean(1, keepdims=True) for values in (x, y))
    lengths = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    varies = lengths > 1e-12 * x.shape[1]
    products = (x * y).sum(1)
    return np.where(varies, products / np.where(varies, lengths, 1.0), np.nan)
