"""Runs of a model that begin at a layer, with the stream that an earlier run had there.

What is changed in a layer changes nothing below it: the blocks below need not run again. They pass on what they get,
and the kept stream is put in above them. A bridge's own ``start_at_layer`` computes the lower blocks and throws away
what they give.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...core.types import HeadIndex, Model
from ..anatomy import shares_keys
from .ablated import replaced
from .activations import (
    DEFAULT_BUDGET,
    PromptBatch,
    batches,
    check_prompts,
    hook_name,
    model_device,
    sizes_of,
    state_restored,
)

Hooks: TypeAlias = list[tuple[str, Callable[..., Any]]]

_SAME = 1e-5
"""Largest difference from a whole pass, relative to its largest logit: the same blocks read the same numbers."""


class Streams:
    """The stream before layers, as one run had it, for runs that begin there."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._kept: dict[int, Tensor] = {}
        self._forms: list[type | None] = []
        """What each block returns: a tensor, or a tuple of one; None for anything else."""

    @property
    def can_begin(self) -> bool:
        """Whether blocks can be left out: all that goes from one to the next is the stream."""
        return None not in self._forms and not shares_keys(self._model)

    @contextmanager
    def seen(self, layers: Collection[int]) -> Iterator[Hooks]:
        """Hooks that keep the stream before these layers, for one run inside the block."""
        self._forms = []
        with ExitStack() as watching:
            for block in self._model.blocks:
                watching.callback(block.register_forward_hook(self._see).remove)
            yield [(hook_name(layer, "resid_pre"), self._taker(layer)) for layer in layers]

    @contextmanager
    def begun_at(self, layer: int, times: int = 1) -> Iterator[Hooks]:
        """Hooks that put the kept stream in before a layer; inside the block those below pass on what they get.

        Args:
            layer: The layer; 0 for a whole run, which needs no hook.
            times: Repeat each prompt this often in a row.
        """
        below = list(self._model.blocks)[:layer]
        # Whoever offloads weights has put a forward of its own on a block.
        own = [vars(block).get("forward") for block in below]
        stream = self._kept[layer].repeat_interleave(times, 0) if layer else None
        try:
            for block, form in zip(below, self._forms, strict=False):
                # A bridge's own __setattr__ would put it on the block it stands for.
                vars(block)["forward"] = _passing_on(form)
            yield [(hook_name(layer, "resid_pre"), lambda value, hook: stream)] if layer else []
        finally:
            for block, forward in zip(below, own, strict=True):
                vars(block).pop("forward", None)
                if forward is not None:
                    vars(block)["forward"] = forward

    def _see(self, block: Any, arguments: Any, output: Any) -> None:
        single = isinstance(output, tuple) and len(output) == 1 and isinstance(output[0], Tensor)
        self._forms.append(tuple if single else Tensor if isinstance(output, Tensor) else None)

    def _taker(self, layer: int) -> Callable[..., None]:
        def take(value: Tensor, hook: Any) -> None:
            self._kept[layer] = value

        return take


def run_without_each(
    model: Model,
    prompts: Sequence[Sequence[int]],
    heads: Sequence[HeadIndex],
    instead: Mapping[int, Float[Tensor, "head d_head"]],
    logits: Callable[[int, Float[Tensor, "batch pos vocab"], PromptBatch], None],
    *,
    budget: int = DEFAULT_BUDGET,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Run prompts through the whole model, then once for each head with that head alone replaced.

    Each of these runs begins at the layer of its head. Whether the host does that exactly is first measured on a
    prompt; where it does not, whole passes are made.

    Args:
        model: TransformerBridge or HookedTransformer.
        prompts: Token ids of each prompt.
        heads: The heads.
        instead: What heads hand to W_O in place of what they computed, by layer.
        logits: Receives the number of the run (0: the whole model), its logits, and its batch.
        budget: Bytes a batch may take, which sets its size.
        progress: Called after each run with the number of prompts in it.
    """
    check_prompts(model, prompts)
    sizes, device, layers = sizes_of(model), model_device(model), sorted({head.layer for head in heads})
    kept = 4 * len(layers) * sizes.d_model
    with state_restored(model):
        shortest = min(prompts, key=len)
        begins = _begins(model, torch.tensor([list(shortest)], device=device), layers)
        for batch in batches(prompts, lambda length: sizes.bytes_of(length) + kept * length, budget):
            batch = PromptBatch(batch.ids.to(device), batch.rows)
            streams = Streams(model)
            with streams.seen(layers) as keeping:
                logits(0, _logits(model, batch.ids, keeping), batch)
            if progress is not None:
                progress(len(batch.rows))
            for number, head in enumerate(heads, 1):
                with streams.begun_at(head.layer if begins else 0) as putting_in:
                    logits(number, _logits(model, batch.ids, [*putting_in, _replacing(head, instead)]), batch)
                if progress is not None:
                    progress(len(batch.rows))


def _begins(model: Model, ids: Int[Tensor, "one pos"], layers: Sequence[int]) -> bool:
    """Whether runs that begin at these layers give what a whole pass gives."""
    streams = Streams(model)
    with streams.seen(layers) as keeping:
        whole = _logits(model, ids, keeping)
    if not streams.can_begin:
        return False
    for layer in layers:
        with streams.begun_at(layer) as putting_in:
            found = _logits(model, ids, putting_in)
        if not bool((found - whole).abs().max() <= _SAME * whole.abs().max()):
            return False
    return True


def _logits(model: Model, ids: Int[Tensor, "batch pos"], hooks: Hooks) -> Float[Tensor, "batch pos vocab"]:
    with model.hooks(fwd_hooks=hooks):
        logits: Tensor = model(ids, return_type="logits")
    return logits


def _replacing(head: HeadIndex, instead: Mapping[int, Tensor]) -> tuple[str, Callable[..., Tensor]]:
    vectors = instead[head.layer]
    off = torch.arange(len(vectors)) == head.head
    return hook_name(head.layer, "z"), lambda z, hook: replaced(z, off, vectors)


def _passing_on(form: type | None) -> Callable[..., Any]:
    def forward(*arguments: Any, **named: Any) -> Any:
        value = arguments[0] if arguments else named["hidden_states"]
        return (value,) if form is tuple else value

    return forward
