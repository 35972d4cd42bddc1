"""What a token looks like to a layer when nothing is before it: the vectors the circuits read.

=========  =======================  =========================================================
preset     layer 0                  layers above 0
=========  =======================  =========================================================
maps       e_t                      MLP_0(ln2_0(e_t)), without the residual (published recipe)
folded     e_t                      e_t + MLP_0(ln2_0(e_t)), with the norm after the MLP if any
=========  =======================  =========================================================

Position embeddings are left out in both. ``e_t`` carries the model's embedding factor and the norm after it, and the
MLP the model's factor of what blocks add, only in ``folded``. The vectors of ``context`` come from a running model
(:mod:`..capture.running.context`) and are normalised already.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..capture.parts import LayerWeights
from ..capture.tensors import rows_of
from ..capture.weights import HeadWeights
from ..core.errors import UnsupportedModelError
from ..core.types import Preset
from .blocks import spans
from .cache import cache_of

_VOCAB_BLOCK = 4096
_LARGEST = 1e18
"""Entries of vectors stay below it: the sum of their squares is then a float32."""


def token_vectors(
    weights: HeadWeights, ids: Int[Tensor, " token"], layer: int, preset: Preset
) -> Float[Tensor, "token d_model"]:
    """Source vectors of given tokens as layer ``layer`` reads them, before its ln1.

    They are the same for every layer above 0, so callers compute them twice for all layers, not once a layer.
    """
    weights.require(preset, needs_mlp=layer > 0)
    embedding = weights.embedded(ids) if preset == "folded" else rows_of(weights.W_E, ids).to(torch.float32)
    if layer == 0 or weights.mlp is None:
        return embedding
    normed = embedding if weights.ln2 is None else weights.ln2(embedding)
    output = weights.mlp(normed)
    if preset == "maps":
        return output
    if weights.ln2_post is not None:
        output = weights.ln2_post(output)
    if weights.mlp_scale != 1:
        output = output * weights.mlp_scale
    return embedding + output


def read_by(layer: LayerWeights, vectors: Float[Tensor, "row d_model"], preset: Preset) -> Float[Tensor, "row d_model"]:
    """What a layer's matrices read of these vectors: after its ln1, without the bias."""
    if vectors.numel() and not float(vectors.abs().amax()) < _LARGEST:
        raise UnsupportedModelError(
            f"The vectors that layer {layer.layer} reads are not finite, or their squares overflow, so its "
            "norm is of no use. The weights or the configuration are damaged. Fetch the checkpoint again."
        )
    if preset == "maps" or layer.ln1 is None:
        return vectors
    return vectors * layer.ln1.weight if preset == "context" else layer.ln1.scaled(vectors)


def vocabulary_vectors(weights: HeadWeights, layer: int, preset: Preset) -> Float[Tensor, "vocab d_model"]:
    """Source vectors of the whole vocabulary, computed in blocks; those of the layers above 0 are kept.

    The first MLP over the whole vocabulary is by far the longest single step of a weight-only analysis, and the
    same for every layer, head and call.
    """
    kept = cache_of(weights).vectors
    if layer > 0 and preset in kept:
        return kept[preset]
    everything = torch.arange(weights.n_vocab, device=weights.device)
    # Filled in place: with a large vocabulary there is no room for both the parts and the whole.
    vectors = torch.empty(weights.n_vocab, weights.d_model, device=weights.device)
    for here in spans(slice(0, weights.n_vocab), _VOCAB_BLOCK):
        vectors[here] = token_vectors(weights, everything[here], layer, preset)
    if layer > 0:
        kept.clear()
        kept[preset] = vectors
    return vectors
