"""Which heads are switched off in an ablation, which at random beside them, and how accurate the model stays."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from ..core.types import HeadIndex
from .statistics import wilson_interval

_M_BY_SIZE = ((300, 30), (500, 50), (1000, 100), (1500, 150))
_LARGEST_M = 250


def default_m(n_heads: int) -> int:
    """How many heads are switched off at most in a model of this many heads, as published.

    Example:
        >>> default_m(270), default_m(1200), default_m(5000)
        (30, 150, 250)
    """
    return next((m for limit, m in _M_BY_SIZE if n_heads < limit), _LARGEST_M)


def top_heads(scores: Float[Tensor, "layer head"], m: int) -> list[HeadIndex]:
    """The heads with the largest scores above 0, at most m (ties: lower layer, then lower head)."""
    width = scores.shape[1]
    flat = scores.nan_to_num(nan=0.0).flatten()
    order = flat.argsort(descending=True, stable=True)[:m].tolist()
    return [HeadIndex(place // width, place % width) for place in order if flat[place] > 0]


def random_heads(
    n_layers: int, n_heads: int, excluded: Collection[HeadIndex], length: int, seed: int
) -> list[HeadIndex]:
    """``length`` different heads in random order, none of them excluded (fewer if there are no more)."""
    everything = [HeadIndex(layer, head) for layer in range(n_layers) for head in range(n_heads)]
    others = [head for head in everything if head not in excluded]
    order = np.random.default_rng(seed).permutation(len(others))[:length]
    return [others[place] for place in order]


def overlap(ablated: Sequence[HeadIndex], others: Collection[HeadIndex]) -> float:
    """Share of the ablated heads that are among some others."""
    return sum(head in others for head in ablated) / len(ablated)


def heads_by_layer(heads: Iterable[HeadIndex]) -> dict[int, list[int]]:
    """Head numbers of each layer that has one."""
    found: dict[int, list[int]] = {}
    for head in heads:
        found.setdefault(head.layer, []).append(head.head)
    return found


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers with their 95% Wilson intervals."""

    value: Float[Tensor, " step"]
    low: Float[Tensor, " step"]
    high: Float[Tensor, " step"]


def accuracy(right: Bool[Tensor, "step pair"]) -> Accuracy:
    """Accuracy at each step of an ablation."""
    share = right.float().mean(1)
    return Accuracy(share, *wilson_interval(share, right.shape[1]))


def relative_drop(before: float, after: float) -> float:
    """Share of the accuracy that is lost; NaN where there was none.

    Example:
        >>> relative_drop(0.5, 0.25)
        0.5
    """
    return (before - after) / before if before > 0 else float("nan")


def switched_off(
    outputs: Float[Tensor, "batch head d_head"],
    heads: Sequence[int],
    instead: Float[Tensor, "head d_head"] | None = None,
) -> Float[Tensor, "batch head d_head"]:
    """Outputs with those of some heads replaced: by zeros, or by what each head writes on average."""
    changed = outputs.clone()
    changed[:, list(heads)] = 0.0 if instead is None else instead[list(heads)].to(outputs)
    return changed
