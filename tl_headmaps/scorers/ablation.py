"""Ablation: which heads to switch off, which random heads to compare with, and how accurate the model remains."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from ..core.types import HeadIndex
from .statistics import wilson_interval

_MAX_HEADS_BELOW = ((300, 30), (500, 50), (1000, 100), (1500, 150))
_MAX_HEADS_OF_LARGE_MODELS = 250


def default_max_heads(n_heads: int) -> int:
    """How many heads the published experiment switches off at most in a model with this many heads.

    Example:
        >>> default_max_heads(270), default_max_heads(1200), default_max_heads(5000)
        (30, 150, 250)
    """
    return next((count for limit, count in _MAX_HEADS_BELOW if n_heads < limit), _MAX_HEADS_OF_LARGE_MODELS)


def top_heads(scores: Float[Tensor, "layer head"], max_heads: int) -> list[HeadIndex]:
    """The heads with the largest scores above 0, at most ``max_heads`` (ties: lower layer, then lower head)."""
    width = scores.shape[1]
    flat = scores.nan_to_num(nan=0.0).flatten()
    order = flat.argsort(descending=True, stable=True)[:max_heads].tolist()
    return [HeadIndex(place // width, place % width) for place in order if flat[place] > 0]


def overlap(ablated: Sequence[HeadIndex], others: Collection[HeadIndex]) -> float:
    """Share of the ablated heads that are also among the others."""
    return sum(head in others for head in ablated) / len(ablated)


def grouped_by_layer(heads: Iterable[HeadIndex]) -> dict[int, list[int]]:
    """Numbers of the heads in each layer, for layers that have any."""
    layers: dict[int, list[int]] = {}
    for head in heads:
        layers.setdefault(head.layer, []).append(head.head)
    return layers


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


def switched_off(
    outputs: Float[Tensor, "batch head d_head"],
    heads: Sequence[int],
    instead: Float[Tensor, "head d_head"] | None = None,
) -> Float[Tensor, "batch head d_head"]:
    """Outputs of a layer with those of some heads replaced: by zeros, or by what each of them writes on average."""
    changed = outputs.clone()
    changed[:, list(heads)] = 0.0 if instead is None else instead[list(heads)].to(outputs)
    return changed
