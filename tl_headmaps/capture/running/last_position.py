"""Running the last position of prompts repeatedly, each time with other heads switched off there.

A causal model computes every position from itself and those before it. A change at the last position alone changes
nothing earlier, so the earlier positions run once and their keys and values are kept. Nor does it change anything in
the layers below the lowest head that is switched off: the stream at the last position is kept for every layer, and a
run begins at that layer. So a run is a batch of single positions, many sets of heads for each prompt, through the upper
part of the model. Whether the host does all this exactly is first measured against a whole forward pass; where it does
not, whole passes are made.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...core.types import Model
from ..anatomy import keeps_states
from ..weights import HeadWeights
from .ablated import Hooks, Streams, replaced
from .activations import (
    DEFAULT_BUDGET,
    PromptBatch,
    batches,
    check_prompts,
    hook_name,
    model_device,
    only_last,
    sizes_of,
    state_restored,
)

Measure: TypeAlias = Callable[[Float[Tensor, "batch vocab"], Int[Tensor, " batch"]], Float[Tensor, "batch value"]]
"""Takes logits at the last position and the numbers of their prompts, and returns what is wanted of them."""

_CACHE_BYTES = 512 << 20
"""Largest size of kept keys and values; beyond it, whole passes are made."""

SAME = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest difference from a whole pass, relative to the largest entry, that counts as rounding."""


class LastPosition:
    """The last position of some prompts, ready to run with heads switched off.

    Attributes:
        clean: What ``measure`` says of the unchanged model, from whole passes.
    """

    def __init__(
        self, model: Model, prompts: Sequence[Sequence[int]], measure: Measure, budget: int = DEFAULT_BUDGET
    ) -> None:
        check_prompts(model, prompts)
        self._model, self._measure, self._n, self._budget = model, measure, len(prompts), budget
        self._device, self._sizes = model_device(model), sizes_of(model)
        self._batches = list(batches(prompts, lambda length: self._sizes.bytes_of(length, 1), budget, self._device))
        cfg = model.cfg
        d_kept = 2 * int(getattr(cfg, "n_key_value_heads", None) or cfg.n_heads) * int(cfg.d_head)
        self._bytes_of_token = 4 * d_kept * len(model.blocks)
        self._cache_bytes = self._bytes_of_token * sum(map(len, prompts))
        self._best: list[tuple[Tensor, Tensor]] = []
        measured = []
        with state_restored(model):
            for batch in self._batches:
                logits = self._whole(batch.ids, [])
                best = logits.float().max(-1)
                self._best.append((best.values, best.indices))
                measured.append(measure(logits, torch.tensor(batch.rows)).cpu())
        self.clean = self._by_prompt(measured, 0)

    def switched_off(
        self,
        off: Bool[Tensor, "set layer head"],
        instead: Mapping[int, Float[Tensor, "head d_head"]] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Float[Tensor, "set prompt value"]:
        """What ``measure`` says of each prompt when each set of heads is switched off at its last position.

        Args:
            off: The heads of each set; at least one in each.
            instead: What heads of a layer write instead; nothing by default.
            progress: Called with the number of sets that are done.
        """
        lowest = off.any(-1).int().argmax(1)
        measured: list[Tensor] = []
        with state_restored(self._model):
            for number, batch in enumerate(self._batches):
                found: list[Tensor | None] = [None] * len(off)
                for start, sets in self._groups(lowest, batch):
                    for place, values in zip(
                        sets, self._measured(number, start, off[sets], instead or {}), strict=True
                    ):
                        found[place] = values
                    if progress is not None and number == len(self._batches) - 1:
                        progress(len(sets))
                measured.append(torch.stack([values for values in found if values is not None]))
        return self._by_prompt(measured, 1)

    @cached_property
    def continues(self) -> bool:
        """Whether runs continue from kept keys and values: they fit into memory and agree with a whole pass."""
        # A state that is not keys and values (Mamba, ...) is not copied for many sets.
        if self._cache_bytes > _CACHE_BYTES or keeps_states(self._model):
            return False
        with state_restored(self._model):
            return all(past.repeats for past in self._pasts if past) and self._agrees(0)

    @cached_property
    def starts_later(self) -> bool:
        """Whether runs may begin at a layer above the first: that too is compared with a whole pass."""
        if not self.continues or not all(past.can_begin for past in self._pasts if past):
            return False
        with state_restored(self._model):
            return all(self._agrees(start) for start in {len(self._model.blocks) // 2, len(self._model.blocks) - 1})

    def _agrees(self, start: int) -> bool:
        """Whether the unchanged model, begun at a layer and run twice, gives what whole passes give."""
        for past, batch, (best, at) in zip(self._pasts, self._batches, self._best, strict=True):
            if past is not None:
                logits = past.logits(batch.ids[:, -1:], 2, start, []).float().unflatten(0, (-1, 2))
                at_same = logits.gather(2, at[:, None, None].expand(-1, 2, 1))[..., 0]
                tolerance = SAME.get(self._model.embed.W_E.dtype, 1e-3) * best.abs().max()
                for found in (at_same, logits.amax(2)):
                    if not bool(((found - best[:, None]).abs() <= tolerance).all()):
                        return False
        return True

    def _groups(self, lowest: Tensor, batch: PromptBatch) -> Iterator[tuple[int, list[int]]]:
        """Sets that run together: the layer they begin at, and their numbers, as many as the budget allows."""
        starts = [int(layer) if self.starts_later else 0 for layer in lowest]
        length = batch.ids.shape[1]
        bytes_of_one = self._sizes.bytes_of(1 if self.continues else length, 1)
        if self.continues:
            # A set costs one position of logits and of the stream, and a copy of its prompt's keys and values, which is
            # copied again when the new ones are put behind it.
            bytes_of_one += 2 * length * self._bytes_of_token
        size = max(1, self._budget // (bytes_of_one * len(batch.rows)))
        for start in sorted(set(starts)):
            sets = [number for number, own in enumerate(starts) if own == start]
            for first in range(0, len(sets), size):
                yield start, sets[first : first + size]

    def _measured(
        self, number: int, start: int, off: Bool[Tensor, "set layer head"], instead: Mapping[int, Tensor]
    ) -> Float[Tensor, "set row value"]:
        """Some sets in one batch of prompts: each prompt's row is repeated for every set."""
        batch, past = self._batches[number], self._pasts[number] if self.continues else None
        n = len(off)
        hooks: Hooks = []
        for layer in off.any(0).any(-1).nonzero()[:, 0].tolist():
            mask = off[:, layer].repeat(len(batch.rows), 1).to(self._device)
            hooks.append((hook_name(layer, "z"), _replacing(mask, instead.get(layer))))
        if past is None:
            logits = self._whole(batch.ids.repeat_interleave(n, 0), hooks)
        else:
            logits = past.logits(batch.ids[:, -1:], n, start, hooks)
        rows = torch.tensor(batch.rows).repeat_interleave(n)
        values: Tensor = self._measure(logits, rows).cpu().unflatten(0, (-1, n))
        return values.transpose(0, 1)

    def _whole(self, ids: Int[Tensor, "batch pos"], hooks: Hooks) -> Float[Tensor, "batch vocab"]:
        with self._model.hooks(fwd_hooks=[*hooks, only_last(self._model, 1)]):
            logits: Tensor = self._model(ids, return_type="logits")
        return logits[:, -1]

    @cached_property
    def _pasts(self) -> "list[_Past | None]":
        """What came before the last position of each batch; None where nothing did."""
        with state_restored(self._model):
            return [_Past(self._model, batch.ids) if batch.ids.shape[1] > 1 else None for batch in self._batches]

    def _by_prompt(self, measured: list[Tensor], axis: int) -> Tensor:
        rows = torch.tensor([row for batch in self._batches for row in batch.rows])
        return torch.cat(measured, axis).index_select(axis, rows.argsort())


class _Past:
    """Kept keys and values of a batch of prompts, and the stream of every layer at their last position."""

    def __init__(self, model: Model, ids: Int[Tensor, "batch pos"]) -> None:
        self._model, self._streams = model, Streams(model)
        self._kept = KeptPrefix(model, ids[:, :-1])
        self.repeats = self._kept.repeats
        with self._streams.seen(range(len(model.blocks))) as keeping:
            self.logits(ids[:, -1:], 1, 0, keeping)

    @property
    def can_begin(self) -> bool:
        """Whether runs can begin at a layer above the first."""
        return self._streams.can_begin

    def logits(self, last: Int[Tensor, "batch one"], n: int, start: int, hooks: Hooks) -> Float[Tensor, "row vocab"]:
        """Logits behind the kept keys and values, each prompt ``n`` times in a row, from a layer on."""
        with self._streams.starting_at(start, n) as putting_in, self._model.hooks(fwd_hooks=[*putting_in, *hooks]):
            logits: Tensor = self._kept.run(last.repeat_interleave(n, 0), n, "logits")
        return logits[:, -1]


class KeptPrefix:
    """Keys and values of a batch of equally long prefixes, behind which tokens run without them."""

    def __init__(self, model: Model, ids: Int[Tensor, "batch pos"]) -> None:
        self._model, self._hooked = model, type(model).__name__.startswith("Hooked")
        if self._hooked:
            from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

            self._cache: Any = TransformerLensKeyValueCache.init_cache(model.cfg, ids.device, len(ids))
            model(ids, return_type=None, past_kv_cache=self._cache)
        else:
            _, self._cache = model(ids, return_type="logits_and_cache", use_cache=True)

    @property
    def repeats(self) -> bool:
        """Whether the host can repeat what it kept for many rows; some hosts keep nothing (GPT-1)."""
        return hasattr(self._cache, "entries" if self._hooked else "batch_repeat_interleave")

    def run(self, ids: Int[Tensor, "row pos"], n: int, return_type: str | None = None) -> Any:
        """Run tokens behind the prefixes, each of which stands for ``n`` rows in turn."""
        # A run appends to the cache it is given, so each gets its own copy.
        repeated = copy.deepcopy(self._cache)
        if self._hooked:
            for entry in repeated.entries:
                entry.past_keys = entry.past_keys.repeat_interleave(n, 0)
                entry.past_values = entry.past_values.repeat_interleave(n, 0)
            repeated.previous_attention_mask = repeated.previous_attention_mask.repeat_interleave(n, 0)
            return self._model(ids, return_type=return_type, past_kv_cache=repeated)
        if n > 1:
            repeated.batch_repeat_interleave(n)
        return self._model(ids, return_type=return_type, past_key_values=repeated)


def _replacing(
    mask: Bool[Tensor, "row head"], instead: Float[Tensor, "head d_head"] | None
) -> Callable[[Tensor, Any], Tensor]:
    """A hook that writes other outputs for some heads at the last position."""
    return lambda z, hook: replaced(z, mask, instead, [-1])


Source: TypeAlias = tuple[int, ...]
"""Token ids of a source."""

_BATCH_BYTES = 128 << 20
"""Memory a batch of sources may take while it runs: keys and values of the prefix, and some vectors a layer."""


class PrefixRunner:
    """Runs sources behind one prefix, from its kept keys and values where that gives what a whole pass gives."""

    def __init__(self, model: Any, prefix: Sequence[int], weights: HeadWeights) -> None:
        self.model, self.prefix, self.layers = model, list(prefix), weights.layers_with_heads
        # A state that is not keys and values (Mamba, ...) is not copied for many sources: whole passes.
        self._past: KeptPrefix | None = None
        if self.prefix and not keeps_states(model):
            past = KeptPrefix(model, torch.tensor([self.prefix], device=model_device(model)))
            self._past = past if past.repeats else None
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
                self._past.run(ids, len(ids))

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
