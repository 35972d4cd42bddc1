"""Maps of one circuit for given source tokens, layer by layer."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..capture.running.context import ContextVectors, collect_inputs, vocabulary_keys
from ..capture.running.last_position import Source
from ..capture.weights import HeadWeights
from ..core.errors import UsageError
from ..core.types import Circuit, Preset
from .factored import LayerMaps
from .ov import ov_maps
from .qk import context_qk_maps, qk_maps
from .vectors import token_vectors, vocabulary_vectors


@dataclass(frozen=True)
class ContextSources:
    """What maps with ``preset="context"`` read.

    Attributes:
        rows: Vectors of the source tokens, a row for each.
        keys: Keys of every token of the vocabulary, for QK maps.
    """

    rows: ContextVectors
    keys: ContextVectors | None = None

    @classmethod
    def of(
        cls,
        weights: HeadWeights,
        sources: Sequence[Source],
        circuit: Circuit,
        preset: Preset,
        *,
        prompts: str | Sequence[str] | None = None,
        vectors: ContextVectors | str | Path | None = None,
        prepend_bos: bool | None = None,
        layers: Sequence[int] | None = None,
        progress: bool = True,
    ) -> "ContextSources | None":
        """What an analysis of these sources reads with ``preset="context"``; None with another preset.

        Args:
            weights: The model's weights.
            sources: Token ids of each source.
            circuit: Which circuit reads them.
            preset: The preset asked for.
            prompts, vectors, prepend_bos, layers, progress: As in :func:`.collect_inputs`.
        """
        if preset != "context":
            for name, value in (("prompts", prompts), ("vectors", vectors), ("prepend_bos", prepend_bos)):
                if value is not None:
                    raise UsageError(f"{name}= goes with preset='context'; preset={preset!r} uses no prompts.")
            return None
        rows = collect_inputs(
            weights,
            sources,
            prompts=prompts,
            vectors=vectors,
            prepend_bos=prepend_bos,
            layers=layers,
            progress=progress,
        )
        return cls(rows, vocabulary_keys(weights, rows, progress=progress) if circuit == "qk" else None)

    @property
    def options(self) -> dict[str, Any]:
        """For provenance: the prefixes."""
        return {"prefixes": self.rows.identity["prefixes"]}

    @property
    def data(self) -> dict[str, str]:
        """For provenance: all parameters of the model that ran."""
        return {"parameters": self.rows.identity["parameters"]}


class CircuitMaps:
    """Builds the maps of each layer for some rows (None: a row for every token of the vocabulary).

    Token vectors without context, the same for all layers above 0, are computed once; those in context are read a
    layer at a time from disk. Several threads may ask at the same time.
    """

    def __init__(
        self,
        weights: HeadWeights,
        ids: Int[Tensor, " row"] | None = None,
        *,
        circuit: Circuit = "ov",
        preset: Preset = "folded",
        context: ContextSources | None = None,
    ) -> None:
        if (preset == "context") != (context is not None):
            raise AssertionError("preset='context' and context vectors go together")
        weights.require_circuit(circuit, preset)
        self.weights, self.ids, self.circuit, self.preset, self.context = weights, ids, circuit, preset, context
        self._lock = threading.Lock()
        self._rows: tuple[bool, Tensor] | None = None

    @property
    def n_columns(self) -> int:
        """Number of tokens a row is ranked over."""
        return self.weights.W_U.shape[0] if self.circuit == "ov" else self.weights.n_vocab

    def layer(self, layer: int, heads: Sequence[int] | None = None) -> LayerMaps:
        """Maps of some (default all) heads of a layer, a row for each source token."""
        heads = range(self.weights.shape(layer).n_heads) if heads is None else heads
        with torch.no_grad():
            weights = self.weights.layer(layer)
            rows = self.row_vectors(layer)
            if self.circuit == "ov":
                return ov_maps(self.weights, weights, rows, heads, self.preset)
            if self.context is not None:
                assert self.context.keys is not None
                return context_qk_maps(self.weights, weights, rows, self.context.keys.keys(layer), heads)
            return qk_maps(self.weights, weights, rows, self._vocabulary(layer), heads, self.preset)

    def row_vectors(self, layer: int) -> Float[Tensor, "row d_model"]:
        """Source vectors of the rows, before ln1 (in context: without its weight)."""
        if self.context is not None:
            return self.context.rows.layer(layer).to(self.weights.device)
        if self.ids is None:
            return self._vocabulary(layer)
        with self._lock:
            if self._rows is None or self._rows[0] != (layer > 0):
                self._rows = (layer > 0, token_vectors(self.weights, self.ids, layer, self.preset))
            return self._rows[1]

    def _vocabulary(self, layer: int) -> Float[Tensor, "vocab d_model"]:
        with self._lock:
            return vocabulary_vectors(self.weights, layer, self.preset)
