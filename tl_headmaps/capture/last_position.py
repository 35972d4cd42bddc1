"""Running the last position of prompts again and again, each time with other heads changed there.

A causal model computes every position from itself and those before it. What is changed at the last position alone
changes nothing earlier, so the earlier positions run once and their keys and values are kept: each further run is
a run of one token per prompt. Whether the host's key/value cache does that exactly is measured first, against a
whole forward pass; where it does not, whole passes are made.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .activations import DEFAULT_BUDGET, Batch, Edit, _hooks, as_found, batches, check_prompts, model_device, sizes_of

Change: TypeAlias = Callable[[Float[Tensor, "batch head d_head"], tuple[int, ...]], Tensor]
"""Outputs z at the last position and the numbers of their prompts in, changed outputs out."""

_CACHE_BYTES = 512 << 20
"""Keys and values kept at most; with more, whole passes are made."""

_SAME = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest difference to a whole pass, relative to the largest logit, that is still rounding."""


class LastPosition:
    """The last position of some prompts, ready to run with changed heads.

    Attributes:
        continues: Whether runs go on from kept keys and values; False if this host computes something else then.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], budget: int = DEFAULT_BUDGET) -> None:
        check_prompts(model, prompts)
        self._model, self._n = model, len(prompts)
        device, sizes = model_device(model), sizes_of(model)
        self._batches = [Batch(batch.ids.to(device), batch.rows) for batch in batches(prompts, sizes.bytes_of, budget)]
        n_tokens = sum(len(prompt) for prompt in prompts)
        kept = 8 * len(model.blocks) * n_tokens * sizes.d_model
        self._pasts: list[Any] = [None] * len(self._batches)
        self.continues = False
        if kept <= _CACHE_BYTES and any(batch.ids.shape[1] > 1 for batch in self._batches):
            with as_found(model):
                self._pasts = [_past(model, batch.ids[:, :-1]) for batch in self._batches]
            self.continues = all(self._is_exact(number) for number in range(len(self._batches)))

    def next_tokens(self, change: Mapping[int, Change] | None = None) -> Int[Tensor, " prompt"]:
        """The likeliest next token of each prompt, with the heads of some layers changed at its last position."""
        found = torch.zeros(self._n, dtype=torch.int64)
        with as_found(self._model):
            for number, batch in enumerate(self._batches):
                logits = self._logits(number, change or {}, self.continues)
                found[list(batch.rows)] = logits.argmax(-1).cpu()
        return found

    def _is_exact(self, number: int) -> bool:
        with as_found(self._model):
            whole, continued = (self._logits(number, {}, way).float() for way in (False, True))
        tolerance = _SAME.get(self._model.embed.W_E.dtype, 1e-3)
        return bool((whole - continued).abs().max() <= tolerance * whole.abs().max())

    def _logits(self, number: int, change: Mapping[int, Change], continues: bool) -> Float[Tensor, "batch vocab"]:
        batch, past = self._batches[number], self._pasts[number]
        edit: dict[Any, Edit] = {(layer, "z"): _at_last(alter) for layer, alter in change.items()}
        with self._model.hooks(fwd_hooks=_hooks(self._model, batch, (), None, None, edit)):
            if continues and past is not None:
                logits: Tensor = past(batch.ids[:, -1:])
            else:
                logits = self._model(batch.ids, return_type="logits")
        return logits[:, -1]


def _at_last(change: Change) -> Edit:
    def edit(z: Tensor, batch: Batch) -> Tensor:
        changed = z.clone()
        changed[:, -1] = change(z[:, -1], batch.rows)
        return changed

    return edit


def _past(model: Any, ids: Int[Tensor, "batch pos"]) -> Callable[[Tensor], Tensor] | None:
    """Run a prefix and give back what runs the tokens behind it; None for an empty prefix."""
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
