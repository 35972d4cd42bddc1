"""Activations of one text, from a forward pass or from an ``ActivationCache`` of the caller.

A cache is read as it is: if it was made with hooks that patch or ablate, the analysis describes the patched model.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ...core.errors import UsageError
from ...core.types import Model
from .activations import LayerActivations, PromptBatch, readable_layers, run, shown_at

HeadActivation: TypeAlias = Literal["pattern", "q", "k", "v", "z", "gate"]
"""Activations of heads; with their batch axis each has four dimensions (``gate``: three)."""


def run_or_read(
    model: Model,
    ids: Sequence[int],
    cache: Any,
    *,
    read: Sequence[HeadActivation],
    reduce: Callable[[LayerActivations], None],
    layers: Iterable[int] | None = None,
) -> None:
    """Pass the activations of one prompt to ``reduce``, layer by layer, as :func:`~.activations.run` does.

    Args:
        model: TransformerBridge or HookedTransformer; runs only without a cache.
        ids: Token ids of the prompt.
        cache: What ``model.run_with_cache`` returned for this prompt, or None.
        read: Activations for ``reduce``.
        reduce: Receives them.
        layers: Layers to read; all that have heads by default.
    """
    if cache is None:
        run(model, [ids], read=read, reduce=reduce, layers=layers)
        return
    batch, known = PromptBatch(torch.tensor([list(ids)]), (0,)), model.hook_dict
    for layer in readable_layers(model, read) if layers is None else layers:
        values: dict[str, Tensor] = {name: _entry(cache, shown_at(known, layer, name), name, len(ids)) for name in read}
        reduce(LayerActivations(layer, batch, values))


def _entry(cache: Any, hook: str, name: HeadActivation, n_tokens: int) -> Tensor:
    """One activation with its batch axis of 1."""
    try:
        value = cache[hook]
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"The cache has no {hook}. Make it with model.run_with_cache(text) without a names_filter, or with one "
            f"that lets {hook} through."
        ) from error
    if not isinstance(value, Tensor):
        raise UsageError(f"{hook} of the cache is a {type(value).__name__}, not a tensor. Pass an ActivationCache.")
    batched = getattr(cache, "has_batch_dim", value.ndim == (3 if name == "gate" else 4))
    value = value.detach() if batched else value.detach()[None]
    if value.shape[0] != 1:
        raise UsageError(
            f"The cache contains {value.shape[0]} prompts, but the analysis is of one text. Run that text alone, or "
            "pass ActivationCache entries of one row."
        )
    cached = value.shape[2 if name == "pattern" else 1]
    if cached != n_tokens:
        raise UsageError(
            f"The cache contains {cached} tokens, but the text has {n_tokens}. Pass the text and the prepend_bos= that "
            "the cache was made with, or the token ids that were run."
        )
    return value
