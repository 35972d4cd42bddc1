"""Running a model undisturbed, and what it computes for a few tokens at every seam that head maps rely on.

Undisturbed: evaluation mode, no hooks of its user, no gradients; all is put back on exit. In the short forward pass all
tokens are given position 0 where the host allows it: rotations then cancel in the attention scores, and learned
positions add the same vector to every token.
"""

import inspect
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.errors import UsageError
from ..core.types import Model

_HOOK_DICTIONARIES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_LOCKS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()

_CHANGED: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How many blocks of the user's that change a model are open, by model; read and written under its lock."""


def lock_of(model: Model | torch.nn.Module) -> Any:
    """The lock of one model object, held while its hooks and modes are not the user's: two threads take turns."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, threading.RLock())


@contextmanager
def without_user_hooks(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Run modules without the user's hooks; they are put back on exit."""
    from transformer_lens.hook_points import HookPoint

    points = [vars(part) for part in modules if isinstance(part, HookPoint)]
    # Most have none; those that a hook was added to and left in are emptied again.
    known = [(point, name, point[name]) for point in points for name in _HOOK_DICTIONARIES]
    replaced = [entry for entry in known if entry[2]]
    left = [hooks for _, _, hooks in known if not hooks]
    try:
        for point, name, _ in replaced:
            point[name] = OrderedDict()
        yield
    finally:
        for point, name, hooks in replaced:
            point[name] = hooks
        for hooks in left:
            hooks.clear()


def all_modules(model: Model | torch.nn.Module) -> list[torch.nn.Module]:
    """Every module that runs, including modules of transformers outside the bridge (GPT-2's first dropout)."""
    # As torch's own modules() would, but ten times faster: this is asked at every call of a model.
    found: dict[torch.nn.Module, None] = {}
    left = roots(model)[::-1]
    while left:
        module = left.pop()
        if module not in found:
            found[module] = None
            left += [part for part in reversed(module._modules.values()) if part is not None]
    return list(found)


def roots(model: Model | torch.nn.Module) -> list[Any]:
    """A model, and the model of transformers inside it."""
    inner = getattr(model, "original_model", None)
    return [model, inner] if isinstance(inner, torch.nn.Module) else [model]


@contextmanager
def isolated(model: Model | torch.nn.Module) -> Iterator[None]:
    """Evaluation mode and none of the user's hooks; both are restored on exit. One thread at a time has the model."""
    with lock_of(model):
        if _CHANGED.get(model):
            raise UsageError(
                "Heads of this model are switched off by ablated(...), and a result would name the whole model. Leave "
                "the block before you call an analysis. What switching heads off does is measured by ablate() and "
                "head_worth(); analyses with cache= describe a run_with_cache() made inside the block."
            )
        modules = all_modules(model)
        training = [module for module in modules if module.training]
        try:
            for module in training:
                module.training = False
            with without_user_hooks(modules):
                yield
        finally:
            for module in training:
                module.training = True


@contextmanager
def refusing_analyses(model: Model | torch.nn.Module) -> Iterator[None]:
    """Refuse analyses of a model, in every thread, while a block of the user's changes what it computes.

    The lock is held at the ends of the block alone. Were it held inside, a block that waits for another thread's
    analysis would wait for ever; as it is, that analysis is refused.
    """
    with lock_of(model):
        _CHANGED[model] = _CHANGED.get(model, 0) + 1
    try:
        yield
    finally:
        with lock_of(model):
            _CHANGED[model] -= 1


@contextmanager
def allowing_analyses(model: Model | torch.nn.Module) -> Iterator[None]:
    """Let this thread look at the model without the user's hooks although blocks of the user's are open."""
    with lock_of(model):
        n_blocks = _CHANGED.get(model, 0)
        try:
            _CHANGED[model] = 0
            yield
        finally:
            _CHANGED[model] = n_blocks


@contextmanager
def evaluating(model: Model | torch.nn.Module) -> Iterator[None]:
    """Isolated, and without gradients."""
    with torch.no_grad(), isolated(model):
        yield


N_PROMPTS, N_TOKENS = 2, 8
"""A few different tokens: every seam is compared entry by entry, so that few say enough."""

_HOOKS = {
    "resid_pre": "hook_resid_pre",
    "resid_mid": "hook_resid_mid",
    "resid_post": "hook_resid_post",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
    "mixer_out": "mamba.hook_out",
    "token_out": "post_per_layer_input_norm.hook_out",
    "v": "attn.hook_v",
    "z": "attn.hook_z",
    "scores": "attn.hook_attn_scores",
    "pattern": "attn.hook_pattern",
    "gate": "attn.gate.hook_out",
    "q_gate": "attn.hook_q_gate",
}


@contextmanager
def weights_loaded(*modules: Any) -> Iterator[None]:
    """Load weights that a ``device_map`` keeps on disk or on another device, for the length of this block.

    Accelerate leaves placeholders on the meta device and loads the weights for a module's own forward pass only.
    """
    real = [module for module in modules if isinstance(module, torch.nn.Module)]
    if not any(parameter.is_meta for module in real for parameter in module.parameters()):
        yield
        return
    from accelerate.utils import align_module_device

    with ExitStack() as stack:
        for part in {id(part): part for module in real for part in module.modules()}.values():
            stack.enter_context(align_module_device(part))
        yield


@dataclass(frozen=True)
class ForwardPass:
    """What a model computed for a few tokens.

    Attributes:
        tokens: Their ids.
        layers: By layer, activations by their name; one that the host does not show is missing.
        logits: For all tokens.
        at_zero: Whether all tokens were at position 0.
        calls: By layer, what its attention was called with.
    """

    tokens: Int[Tensor, "prompt pos"]
    layers: Mapping[int, Mapping[str, Tensor]]
    logits: Float[Tensor, "prompt pos vocab_out"]
    at_zero: bool
    calls: Mapping[int, tuple[tuple[Any, ...], dict[str, Any]]]


def forward_pass(model: Model, layers: Sequence[int]) -> ForwardPass:
    """Run a model on a few tokens, spread over its vocabulary, and keep what some of its layers compute.

    The caller isolates the model from its user's hooks.
    """
    n_vocab, device = model.embed.W_E.shape[0], model.embed.W_E.device
    steps = torch.arange(1, N_PROMPTS * N_TOKENS + 1, device=device)
    tokens = (steps * n_vocab // (len(steps) + 1)).view(N_PROMPTS, N_TOKENS)
    seen: dict[int, dict[str, Tensor]] = {layer: {} for layer in layers}
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    known = model.hook_dict
    hooks = [
        (name, partial(_keep, seen[layer], short))
        for layer in layers
        for short, hook in _HOOKS.items()
        if (name := f"blocks.{layer}.{hook}") in known
    ]
    # Where keys serve as values (Gemma 4) there is no value to see.
    hooks += [
        (f"blocks.{layer}.attn.hook_k", partial(_keep, seen[layer], "v"))
        for layer in layers
        if f"blocks.{layer}.attn.hook_v" not in known and f"blocks.{layer}.attn.hook_k" in known
    ]
    options = _at_zero(model, tokens)
    with ExitStack() as stack:
        for layer in layers:
            attn = getattr(model.blocks[layer], "attn", None)
            if attn is None:
                continue
            take = partial(_keep_input, seen[layer], calls, layer)
            stack.callback(attn.register_forward_pre_hook(take, with_kwargs=True).remove)
            stack.callback(attn.register_forward_hook(partial(_keep_result, seen[layer])).remove)
        stack.enter_context(model.hooks(fwd_hooks=hooks))
        logits = model(tokens, return_type="logits", **options)
    return ForwardPass(tokens, seen, logits.detach(), bool(options), calls)


def _at_zero(model: Model, tokens: Tensor) -> dict[str, Tensor]:
    """Options that give every token position 0, if the model takes them."""
    inner = getattr(model, "original_model", None)
    if inner is None or "position_ids" not in inspect.signature(inner.forward).parameters:
        return {}
    # Without a mask, transformers takes repeated positions for packed sequences that do not see each other.
    return {"position_ids": torch.zeros_like(tokens), "attention_mask": torch.ones_like(tokens)}


def _keep(seen: dict[str, Tensor], name: str, value: Any, hook: Any) -> None:
    if isinstance(value, Tensor):
        # Some hosts add to a tensor in place after they have shown it.
        seen[name] = value.detach().clone()


def _keep_result(seen: dict[str, Tensor], module: Any, given: tuple[Any, ...], output: Any) -> None:
    value = output[0] if isinstance(output, tuple) else output
    if isinstance(value, Tensor):
        seen["attn_result"] = value.detach().clone()


def _keep_input(
    seen: dict[str, Tensor],
    calls: dict[int, Any],
    layer: int,
    module: Any,
    given: tuple[Any, ...],
    named: dict[str, Any],
) -> None:
    calls[layer] = (given, dict(named))
    value = next(x for x in (*given, *named.values()) if isinstance(x, Tensor))
    # With use_attn_in every head gets its own copy of the same input.
    seen["attn_in"] = (value[:, :, 0] if value.ndim == 4 else value).detach().clone()
