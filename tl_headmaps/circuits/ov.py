r"""The OV circuit: what a head writes about a token it attends to, read out over the vocabulary.

``maps``:    M = x W_V W_O W_U.

``folded``:  M = ln1(x) W_V W_O P (W_U - mean), where P applies the norm after attention (where a model has one)
and the final norm up to their scale, and the mean over the vocabulary is taken off each row. That is the head's
direct contribution to the centred logits, up to one positive factor per position.

``context``:     the same with the layer's own input at the token, averaged over neutral prompts, in place of ln1(x).

The constant part of a value vector (b_V, and ln1's bias times W_V) is left out of ``folded``: rows of the
attention pattern sum to one, so it is added whatever the head attends to and says nothing about the source. It is
also what TransformerLens moves into b_O, summed over heads, when it processes weights; a score that
used it could not be the same for raw and processed models.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.parts import LayerWeights
from ..capture.weights import HeadWeights
from ..core.types import HeadIndex, Preset
from .factored import LayerMaps, ProductColumns, TokenColumns
from .vectors import cache_of, read_by


def ov_maps(
    weights: HeadWeights,
    layer: LayerWeights,
    vectors: Float[Tensor, "row d_model"],
    heads: Sequence[int],
    preset: Preset,
) -> LayerMaps:
    """OV maps of some heads of a layer, with a row for each source vector.

    Args:
        weights: The model.
        layer: The layer's weights, from ``weights.layer(...)``.
        vectors: Source vectors: before ln1, from :func:`.vectors.token_vectors`; of ``context`` without its weight.
        heads: Head numbers within the layer.
        preset: Which vectors they are; all but ``"maps"`` apply the norms.
    """
    vectors = read_by(layer, vectors, preset)
    groups = sorted({layer.shape.group_of(head) for head in heads})
    left = torch.stack([vectors @ layer.W_V[group] for group in groups])
    if preset != "maps":
        left = layer.mixed(left)
    group = tuple(groups.index(layer.shape.group_of(head)) for head in heads)
    return written_maps(weights, layer, left, group, heads, preset)


def written_maps(
    weights: HeadWeights,
    layer: LayerWeights,
    left: Float[Tensor, "group row d_head"],
    group: tuple[int, ...],
    heads: Sequence[int],
    preset: Preset,
) -> LayerMaps:
    """What heads write for given vectors in their own d_head dimensions, read out over the vocabulary.

    The vectors may be projected token vectors (the OV map), or values and outputs ``z`` of a running model.

    Args:
        weights: The model.
        layer: The layer's weights.
        left: Vectors that W_O multiplies, shared by the heads of a group.
        group: Which of them each head writes.
        heads: Head numbers within the layer.
        preset: Which vectors they are; all but ``"maps"`` apply the norms.
    """
    middle, cache = written(weights, layer, heads, preset), cache_of(weights)
    if preset != "maps":
        mean = cache.mean_unembedding
        offset = torch.stack([left[g] @ (middle[h] @ mean) for h, g in enumerate(group)])
    else:
        offset = left.new_zeros(len(heads), left.shape[1])
    return LayerMaps(
        heads=tuple(HeadIndex(layer.layer, head) for head in heads),
        left=left,
        group=group,
        columns=ProductColumns(weights.W_U, middle, cache.unembedding_order, cache.ordered_unembedding),
        offset=offset,
    ).checked()


def stream_map(weights: HeadWeights, layer: int, vectors: Float[Tensor, "row d_model"]) -> LayerMaps:
    """What the stream itself says (the logit lens): a single map whose rows are read out without any head.

    Args:
        weights: The model.
        layer: The layer whose input the vectors are.
        vectors: Normalised inputs of the layer, from context vectors.
    """
    left = vectors if weights.ln_final is None else weights.ln_final.folded_into(vectors)
    cache = cache_of(weights)
    return LayerMaps(
        heads=(HeadIndex(layer, 0),),
        left=left[None],
        group=(0,),
        columns=TokenColumns(weights.W_U, cache.unembedding_order, cache.ordered_unembedding),
        offset=(left @ cache.mean_unembedding)[None],
    ).checked()


def constant_values(layer: LayerWeights) -> Float[Tensor, "kv_head d_head"]:
    """The part of a value vector that does not depend on the source: b_V, and ln1's bias through W_V."""
    constant = layer.W_V.new_zeros(len(layer.W_V), layer.W_V.shape[-1])
    if layer.ln1 is not None:
        constant = constant + torch.einsum("d,gdh->gh", layer.ln1.bias, layer.W_V)
    return constant if layer.b_V is None else constant + layer.b_V


def normed_inputs(
    layer: LayerWeights, W_O: Float[Tensor, "head d_head d_model"], heads: Sequence[int]
) -> Float[Tensor, "head d_head d_model"]:
    """W_O of some heads with the weight of the norm before it, where a model has one.

    That norm's scale is one positive number per position, shared by all heads, as that of the final norm.
    """
    if layer.z_norm is None:
        return W_O
    weight: Tensor = layer.z_norm.weight.unflatten(0, (len(layer.W_O), -1))[list(heads)][..., None]
    return weight * W_O


def written(
    weights: HeadWeights, layer: LayerWeights, heads: Sequence[int], preset: Preset
) -> Float[Tensor, "head d_head d_model"]:
    """W_O of some heads; in ``folded`` with the linear part of the norms around it and the model's own factors."""
    W_O = layer.W_O[list(heads)]
    if preset != "maps":
        W_O = normed_inputs(layer, W_O, heads)
        factor = weights.residual_scale * weights.logit_scale
        W_O = W_O if factor == 1 else W_O * factor
        for norm in (layer.ln1_post, weights.ln_final):
            if norm is not None:
                W_O = norm.folded_into(W_O)
    return W_O
