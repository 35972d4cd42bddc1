"""Maps of one circuit for given source tokens, layer by layer."""

import threading
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..capture.weights import HeadWeights
from ..core.types import Circuit, Preset
from .factored import LayerMaps
from .ov import ov_maps
from .qk import qk_maps
from .vectors import token_vectors, vocabulary_vectors


class CircuitMaps:
    """Builds the maps of each layer for some rows (None: a row for every token of the vocabulary).

    Token vectors, the same for all layers above 0, are computed once. Several threads may call it at the same time.
    """

    def __init__(
        self,
        weights: HeadWeights,
        ids: Int[Tensor, " row"] | None = None,
        *,
        circuit: Circuit = "ov",
        preset: Preset = "folded",
    ) -> None:
        self.weights, self.ids, self.circuit, self.preset = weights, ids, circuit, preset
        self._lock = threading.Lock()
        self._rows: tuple[bool, Tensor] | None = None

    @property
    def n_columns(self) -> int:
        """Number of tokens a row is ranked over."""
        return self.weights.W_U.shape[0] if self.circuit == "ov" else self.weights.n_vocab

    def layer(self, layer: int, heads: Sequence[int] | None = None) -> LayerMaps:
        """Maps of some (default all) heads of a layer, a row for each source token."""
        heads = range(self.weights.n_heads) if heads is None else heads
        with torch.no_grad():
            weights = self.weights.layer(layer)
            rows = self.row_vectors(layer)
            if self.circuit == "ov":
                return ov_maps(self.weights, weights, rows, heads, self.preset)
            return qk_maps(self.weights, weights, rows, self._vocabulary(layer), heads, self.preset)

    def row_vectors(self, layer: int) -> Float[Tensor, "row d_model"]:
        """Source vectors of the rows, before ln1."""
        if self.ids is None:
            return self._vocabulary(layer)
        with self._lock:
            if self._rows is None or self._rows[0] != (layer > 0):
                self._rows = (layer > 0, token_vectors(self.weights, self.ids, layer, self.preset))
            return self._rows[1]

    def _vocabulary(self, layer: int) -> Float[Tensor, "vocab d_model"]:
        with self._lock:
            return vocabulary_vectors(self.weights, layer, self.preset)
