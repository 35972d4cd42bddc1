"""What the ranking engine computes once per model and keeps for as long as its weights live.

Each :class:`HeadWeights` object has one :class:`EngineCache`, found with :func:`cache_of` and freed with the weights.
Calls that are given a model share one, as long as the model does not change.
"""

import threading
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..capture.tensors import is_mapped, mean_row, reordered, row_lengths
from ..capture.weights import HeadWeights
from ..core.files import cache_folder
from ..core.types import Preset

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
