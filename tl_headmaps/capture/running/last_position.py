"""Running the last position of prompts repeatedly, each time with other heads changed there.

A causal model computes every position from itself and those before it. A change at the last position alone changes
nothing earlier, so the earlier positions run once and their keys and values are kept: each further run is one token per
prompt. Whether the host's key/value cache does that exactly is first measured against a whole forward pass; if it does
not, whole passes are made.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...core.types import Model
from .activations import (
    DEFAULT_BUDGET,
    Edit,
    PromptBatch,
    _hooks,
    batches,
    check_prompts,
    model_device,
    sizes_of,
    state_restored,
)

Change: TypeAlias = Callable[[Float[Tensor, "batch head d_head"], tuple[int, ...]], Tensor]
"""Takes outputs z at the last position and the indices of their prompts, and returns changed outputs."""

_CACHE_BYTES = 512 << 20
"""Largest size of kept keys and values; beyond it, whole passes are made."""

_SAME = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest difference from a whole pass, relative to the largest logit, that counts as rounding."""


class LastPosition:
    """The last position of some prompts, ready to run with changed heads."""

    def __init__(self, model: Model, prompts: Sequence[Sequence[int]], budget: int = DEFAULT_BUDGET) -> None:
        check_prompts(model, prompts)
        self._model, self._n = model, len(prompts)
        device, sizes = model_device(model), sizes_of(model)
        self._batches = [
            PromptBatch(batch.ids.to(device), batch.rows) for batch in batches(prompts, sizes.bytes_of, budget)
        ]
        # Keys and values are at most as wide as the stream.
        self._cache_bytes = 8 * len(model.blocks) * sum(map(len, prompts)) * sizes.d_model

    def next_tokens(self, change: Mapping[int, Change] | None = None) -> Int[Tensor, " prompt"]:
        """The most likely next token of each prompt, with heads of some layers changed at its last position."""
        if not change:
            return self._clean[1]
        tokens = torch.zeros(self._n, dtype=torch.int64)
        pasts = self._pasts if self.continues else [None] * len(self._batches)
        with state_restored(self._model):
            for batch, past in zip(self._batches, pasts, strict=True):
                tokens[list(batch.rows)] = self._logits(batch, change, past).argmax(-1).cpu()
        return tokens

    @cached_property
    def continues(self) -> bool:
        """Whether runs continue from kept keys and values: they fit into memory and agree with a whole pass."""
        if self._cache_bytes > _CACHE_BYTES:
            return False
        values, ids = self._clean
        tolerance = _SAME.get(self._model.embed.W_E.dtype, 1e-3) * values.abs().max()
        with state_restored(self._model):
            for batch, past in zip(self._batches, self._pasts, strict=True):
                rows = list(batch.rows)
                logits = self._logits(batch, {}, past).float().cpu()
                at_same = logits.gather(1, ids[rows, None])[:, 0]
                for continued in (at_same, logits.amax(1)):
                    if not bool(((continued - values[rows]).abs() <= tolerance).all()):
                        return False
        return True

    @cached_property
    def _clean(self) -> tuple[Float[Tensor, " prompt"], Int[Tensor, " prompt"]]:
        """Largest logit and its token for each prompt, from whole passes of the unchanged model."""
        values, ids = torch.zeros(self._n), torch.zeros(self._n, dtype=torch.int64)
        with state_restored(self._model):
            for batch in self._batches:
                best = self._logits(batch, {}, None).float().max(-1)
                values[list(batch.rows)], ids[list(batch.rows)] = best.values.cpu(), best.indices.cpu()
        return values, ids

    @cached_property
    def _pasts(self) -> list[Callable[[Tensor], Tensor] | None]:
        with state_restored(self._model):
            return [_past(self._model, batch.ids[:, :-1]) for batch in self._batches]

    def _logits(
        self, batch: PromptBatch, change: Mapping[int, Change], past: Callable[[Tensor], Tensor] | None
    ) -> Float[Tensor, "batch vocab"]:
        """Logits at the last position; from the whole prompt where there is no past."""
        edit: dict[Any, Edit] = {(layer, "z"): _at_last(alter) for layer, alter in change.items()}
        with self._model.hooks(fwd_hooks=_hooks(self._model, batch, (), None, None, edit)):
            if past is None:
                logits: Tensor = self._model(batch.ids, return_type="logits")
            else:
                logits = past(batch.ids[:, -1:])
        return logits[:, -1]


def _at_last(change: Change) -> Edit:
    def edit(z: Tensor, batch: PromptBatch) -> Tensor:
        changed = z.clone()
        changed[:, -1] = change(z[:, -1], batch.rows)
        return changed

    return edit


def _past(model: Model, ids: Int[Tensor, "batch pos"]) -> Callable[[Tensor], Tensor] | None:
    """Run a prefix and return a function that runs the tokens after it; None for an empty prefix."""
    if not ids.shape[1]:
        return None
    if type(model).__name__.startswith("Hooked"):
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        kept = TransformerLensKeyValueCache.init_cache(model.cfg, ids.device, len(ids))
        model(ids, return_type=None, past_kv_cache=kept)
        kept.freeze()
        return lambda more: model(more, return_type="logits", past_kv_cache=kept)
    _, cache = model(ids, return_type="logits_and_cache", use_cache=True)
    # A run appends to the cache it is given, so each gets its own copy.
    return lambda more: model(more, return_type="logits", past_key_values=copy.deepcopy(cache))
