r"""Relation scores of what heads really write while the model runs, beside those of the weights alone.

A prompt has the source of a pair somewhere and a last position. What head h writes there is ``z_h W_O``; the pair
counts when fewer than k tokens have a strictly greater entry in ``z_h W_O W_U`` than its target (suppression:
strictly smaller).

**Without context** the last row of the pattern is put wholly on the source token. Then ``z_h`` is the head's value
vector at the source position, and since values do not depend on the pattern of their own layer, the clean run has it
already: one forward pass serves both variants.

**Presets.** ``maps`` reads ``z W_O W_U`` as published. ``folded`` reads the head's direct contribution to the logits:
norm after attention (if any) and final norm are applied up to their scale, which is one positive number per position
and changes no rank in a row, and the mean over the vocabulary, which is one number per row and changes none either,
is taken off as in the static maps. The constant part of the values (b_V, and ln1's bias through W_V) is taken off z and
v alike: rows of the pattern sum to one, so it is written whatever the head attends to. With it gone, raw and processed
weights give the same scores.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..capture.parts import LayerWeights
from ..capture.weights import HeadWeights
from ..circuits.blocks import DEFAULT_BUDGET
from ..circuits.factored import LayerMaps
from ..circuits.ov import constant_values, written_maps
from ..circuits.ranking import ranks
from ..core.types import Preset


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
    if preset == "folded":
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
    found = ranks(maps, rows, targets, limit=k, budget=budget)
    return Hits(found.greater < k, found.less < k)
