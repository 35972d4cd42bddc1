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

What is computed once per model is kept with it: each :class:`HeadWeights` object has one :class:`EngineCache`, found
with :func:`cache_of` and freed with the weights. Calls that are given a model share one, as long as the model does not
change.
"""

import threading
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..capture.parts import LayerWeights
from ..capture.tensors import is_mapped, mean_row, reordered, row_lengths, rows_of
from ..capture.weights import HeadWeights
from ..core.errors import UnsupportedModelError
from ..core.files import cache_folder
from ..core.types import Preset
from .blocks import spans

TIERS = (2048, 6144, 16384)
"""Numbers of tokens, by decreasing unembedding norm, after which a scan drops what is decided."""

_LARGEST_COPY = 512 << 20
"""Bytes of unembedding up to which a second, reordered copy is kept."""

_LARGEST_SHARED = 256 << 20
"""Bytes of unembedding up to which the next call about the same model finds what this one computed."""


class EngineCache:
    """The unembedding's mean and order, and the token vectors computed last.

    Attributes:
        vectors: Where :func:`.vectors.vocabulary_vectors` keeps what it computed last.
    """

    def __init__(self, W_U: Float[Tensor, "vocab_out d_model"]) -> None:
        # The matrix, not the weights it belongs to: those would then never be freed.
        self._W_U = W_U
        self.vectors: dict[Preset, Float[Tensor, "vocab d_model"]] = {}

    @cached_property
    def mean_unembedding(self) -> Float[Tensor, " d_model"]:
        """Mean of the unembedding over the vocabulary, which folded maps subtract from each row."""
        return mean_row(self._W_U)

    @cached_property
    def unembedding_order(self) -> Int[Tensor, " vocab_out"]:
        """Token ids in tiers of decreasing unembedding norm, so that large entries come first.

        Within a tier they ascend, so that a block of them is read from one place of the matrix.
        """
        tiers = row_lengths(self._W_U).argsort(descending=True, stable=True).tensor_split(TIERS)
        return torch.cat([tier.sort().values for tier in tiers])

    @cached_property
    def ordered_unembedding(self) -> Float[Tensor, "vocab_out d_model"] | None:
        """The unembedding in that order, so that scans read it sequentially: in memory, or on disk if it is there.

        None where the copy would be too large: rows are then gathered block by block.
        """
        if self._W_U.nbytes > _LARGEST_COPY:
            return None
        if is_mapped(self._W_U):
            return reordered(self._W_U, self.unembedding_order, cache_folder())
        return self._W_U[self.unembedding_order]


_CACHES: WeakKeyDictionary[Any, EngineCache] = WeakKeyDictionary()
_LOCK = threading.Lock()


def cache_of(weights: HeadWeights) -> EngineCache:
    """The cache of these weights; several threads get the same one."""
    owner = weights.cache_owner if weights.W_U.nbytes <= _LARGEST_SHARED else weights
    with _LOCK:
        return _CACHES.setdefault(owner, EngineCache(weights.W_U))


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
            "norm cannot be applied. The weights or the configuration are damaged. Fetch the checkpoint again."
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
