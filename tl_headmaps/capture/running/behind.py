"""Running many sources behind one prefix, from its keys and values where that gives what a whole pass gives."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..anatomy import keeps_states
from ..weights import HeadWeights
from .activations import hook_name, model_device, only_last
from .last_position import SAME

Source: TypeAlias = tuple[int, ...]
"""Token ids of a source."""

_BATCH_BYTES = 128 << 20
"""Memory a batch of sources may take while it runs: keys and values of the prefix, and some vectors a layer."""


class Behind:
    """Runs sources behind one prefix, from its kept keys and values where that gives what a whole pass gives."""

    def __init__(self, model: Any, prefix: Sequence[int], weights: HeadWeights) -> None:
        self.model, self.prefix, self.layers = model, list(prefix), weights.layers_with_heads
        # A state that is not keys and values (Mamba, ...) is not copied for many sources: whole passes.
        continues = bool(prefix) and not keeps_states(model)
        self._past = _past(model, torch.tensor([self.prefix], device=model_device(model))) if continues else None
        self._checked = self._past is None

    def batches(self, sources: Sequence[Source]) -> Iterator[list[int]]:
        """Rows of equally long sources, so many that a batch stays within its budget."""
        cfg = self.model.cfg
        groups = int(getattr(cfg, "n_key_value_heads", None) or cfg.n_heads)
        by_length: dict[int, list[int]] = {}
        for row, source in enumerate(sources):
            by_length.setdefault(len(source), []).append(row)
        for length, rows in sorted(by_length.items()):
            # Keys and values of all layers, and of one layer repeated for every query head.
            heads = len(self.model.blocks) * groups + int(cfg.n_heads)
            kept = 2 * heads * (len(self.prefix) + length) * int(cfg.d_head)
            size = max(1, min(512, _BATCH_BYTES // (4 * (kept + 40 * length * int(cfg.d_model)))))
            for start in range(0, len(rows), size):
                yield rows[start : start + size]

    def run(self, ids: Tensor, take: Callable[[int, Tensor], None]) -> None:
        """Run sources and hand the stream before each layer, at their last tokens, to ``take``."""
        if not self._checked:
            self._check(ids[:1])
        with self._hooked(take):
            if self._past is None:
                whole = torch.tensor([self.prefix], dtype=ids.dtype, device=ids.device).expand(len(ids), -1)
                self.model(torch.cat([whole, ids], 1), return_type=None)
            else:
                self._past(ids)

    def _check(self, ids: Tensor) -> None:
        """Leave the kept keys and values if they do not give what a whole pass gives."""
        self._checked = True
        quick: dict[int, Tensor] = {}
        whole: dict[int, Tensor] = {}
        past = self._past
        self.run(ids, lambda layer, x: quick.update({layer: x.float()}))
        self._past = None
        self.run(ids, lambda layer, x: whole.update({layer: x.float()}))
        tolerance = SAME.get(self.model.embed.W_E.dtype, 1e-3)
        same = all(
            float((quick[layer] - x).abs().max()) <= tolerance * float(x.abs().max()) for layer, x in whole.items()
        )
        self._past = past if same else None

    @contextmanager
    def _hooked(self, take: Callable[[int, Tensor], None]) -> Iterator[None]:
        def taker(layer: int) -> Callable[..., None]:
            def hook(value: Tensor, hook: Any) -> None:
                take(layer, value[:, -1])

            return hook

        hooks = [(hook_name(layer, "resid_pre"), taker(layer)) for layer in self.layers]
        # Nobody reads these logits: one row is enough.
        with self.model.hooks(fwd_hooks=[*hooks, only_last(self.model, 1, slice(1))]):
            yield


def _past(model: Any, prefix: Tensor) -> Callable[[Tensor], Any] | None:
    """Run a prefix and give back what runs a batch of tokens behind it; None if its model keeps nothing (GPT-1)."""
    if type(model).__name__.startswith("Hooked"):
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        kept = TransformerLensKeyValueCache.init_cache(model.cfg, prefix.device, 1)
        model(prefix, return_type=None, past_kv_cache=kept)

        def behind(ids: Tensor) -> Any:
            repeated = copy.deepcopy(kept)
            for entry in repeated.entries:
                entry.past_keys = entry.past_keys.expand(len(ids), *entry.past_keys.shape[1:])
                entry.past_values = entry.past_values.expand(len(ids), *entry.past_values.shape[1:])
            mask = repeated.previous_attention_mask
            repeated.previous_attention_mask = mask.expand(len(ids), *mask.shape[1:])
            return model(ids, return_type=None, past_kv_cache=repeated)

        return behind
    _, cache = model(prefix, return_type="logits_and_cache", use_cache=True)
    if cache is None:
        return None

    def continued(ids: Tensor) -> Any:
        repeated = copy.deepcopy(cache)
        repeated.batch_repeat_interleave(len(ids))
        return model(ids, return_type=None, past_key_values=repeated)

    return continued
