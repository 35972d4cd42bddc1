"""Ablation: which heads to switch off, how the model answers without them, and what other sets of heads would do.

An answer is measured twice: whether the right token is the likeliest, and by how much its logit exceeds the mean logit
of the relation's other answers. The second still moves where the first cannot: an answer may be nearly lost, or lost
by far.
"""

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..core.types import HeadIndex
from .statistics import clustered_interval

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


def masks_of(sets: Sequence[Sequence[HeadIndex]], n_layers: int, n_heads: int) -> Bool[Tensor, "set layer head"]:
    """Sets of heads as masks."""
    masks = torch.zeros(len(sets), n_layers, n_heads, dtype=torch.bool)
    for mask, heads in zip(masks, sets, strict=True):
        for head in heads:
            mask[head.layer, head.head] = True
    return masks


def answered(
    logits: Float[Tensor, "row vocab"], targets: Int[Tensor, " row"], answers: Int[Tensor, " answer"]
) -> Float[Tensor, "row 2"]:
    """Whether each target is the likeliest token (1 or 0), and its logit minus the mean logit of the other answers.

    Args:
        logits: Logits of the next token.
        targets: The right one.
        answers: The different targets of the relation; the difference is NaN if there is only one.
    """
    right = (logits.argmax(1) == targets).double()
    own = logits.gather(1, targets[:, None])[:, 0].double()
    others = (logits[:, answers].double().sum(1) - own) / (len(answers) - 1) if len(answers) > 1 else float("nan")
    return torch.stack([right, own - others], 1)


def accuracy(right: Bool[Tensor, "step pair"], clusters: Int[Tensor, " pair"]) -> tuple[Tensor, Tensor, Tensor]:
    """Accuracy at each step of an ablation, and the ends of its 95% interval over clusters of pairs."""
    return right.float().mean(1), *clustered_interval(right, clusters)
