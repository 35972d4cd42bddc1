"""What every component writes while a text runs through the model, and the stream it reads or adds to.

Components that read the residual stream (q, k, v, up, gate) multiply the normalised stream x: they write ``x W + b``
and their stream is x. Components that write to it (o, down) add to the residual stream: what they write is measured
after the norm that follows them, where a model has one (Gemma), and their stream is the residual stream they add to. A
head of o writes its own summand. A layer is passed on when it has run, so the activations of one layer exist at a time.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.errors import UnsupportedModelError
from ...core.types import MLP_COMPONENTS
from ..anatomy import mlp_module
from ..isolation import evaluating
from ..running.batches import TextBatch
from .matrices import ModelComponents, heads_of

_BIASES = {
    "attn.q": ("b_Q",),
    "attn.k": ("_b_K", "b_K"),
    "attn.v": ("_b_V", "b_V"),
    "mlp.up": ("b_in",),
    "mlp.gate": ("b_gate",),
}

Receiver = Callable[[int, str, Float[Tensor, "token part width"], Float[Tensor, "token stream_width"]], None]
"""Called with layer, component, what each of its parts writes for every token, and the stream."""


def component_outputs(source: ModelComponents, batch: TextBatch, receive: Receiver, *, by_head: bool = False) -> None:
    """Run a batch and pass every component's output and stream to ``receive``, layer by layer.

    Args:
        source: The model's components.
        batch: The text; padded positions are left out.
        receive: Receives float32 tensors, and should reduce them at once.
        by_head: The output of every head, instead of all heads together.
    """
    model, real = source.model, batch.real
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(value: Tensor, hook: Any) -> None:
            seen[name] = value.detach()[real].float()

        return hook

    def keep_input(name: str) -> Callable[..., None]:
        def hook(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            value = next(x for x in (*arguments, *named.values()) if isinstance(x, Tensor))
            # With use_attn_in every head gets its own copy of the same input.
            seen[name] = (value[:, :, 0] if value.ndim == 4 else value).detach()[real].float()

        return hook

    def finish(layer: int) -> Callable[..., None]:
        def hook(value: Tensor, hook: Any) -> None:
            for component in source.components:
                if source.has(layer, component):
                    receive(layer, component, *_output(source, layer, component, seen, by_head))
            seen.clear()

        return hook

    hooks: list[tuple[str, Callable[..., None]]] = []
    with evaluating(model), ExitStack() as stack:
        for layer, block in enumerate(model.blocks):
            for name, module in (("attn.in", getattr(block, "attn", None)), ("mlp.in", mlp_module(block))):
                if module is not None:
                    handle = module.register_forward_pre_hook(keep_input(name), with_kwargs=True)
                    stack.callback(handle.remove)
            names = ("hook_resid_pre", "hook_resid_mid", "hook_attn_out", "hook_mlp_out", "attn.hook_z")
            known = model.hook_dict
            hooks += [(at, keep(name)) for name in names if (at := f"blocks.{layer}.{name}") in known]
            hooks.append((f"blocks.{layer}.hook_resid_post", finish(layer)))
        model.run_with_hooks(batch.tokens, return_type=None, fwd_hooks=hooks)


def _output(
    source: ModelComponents, layer: int, component: str, seen: dict[str, Tensor], by_head: bool
) -> tuple[Float[Tensor, "token part width"], Float[Tensor, "token stream_width"]]:
    if component == "mlp.down":
        # Parallel blocks (Pythia) add to the stream attention read; there is no stream in between.
        return _seen(seen, "hook_mlp_out")[:, None], seen.get("hook_resid_mid", _seen(seen, "hook_resid_pre"))
    if component == "attn.o":
        if by_head:
            written = _heads_written(source, layer, seen) * source.weights.residual_scale
        else:
            # What attention gives back is shown with Granite's factor, but without Falcon-H1's.
            beside = source.weights.beside
            written = _seen(seen, "hook_attn_out")[:, None] * (1.0 if beside is None else beside.attention_scale)
        return written, _seen(seen, "hook_resid_pre")
    stream = _seen(seen, f"{component.partition('.')[0]}.in")
    parts = heads_of(source, layer, component).float()
    written = torch.einsum("td,pdr->tpr", stream, parts)
    bias = _bias(source, layer, component)
    if bias is not None:
        written = written + bias.reshape(written.shape[1:])
    return (written if by_head else written.flatten(1)[:, None]), stream


def _heads_written(source: ModelComponents, layer: int, seen: dict[str, Tensor]) -> Float[Tensor, "token head d_model"]:
    """What each head adds to what attention gives back, without the model's factor of it."""
    shape = source.weights.shape(layer)
    z = _seen(seen, "attn.hook_z").reshape(-1, shape.n_heads, shape.d_head)
    written = torch.einsum("thr,hrd->thd", z, heads_of(source, layer, "attn.o").float())
    norm = source.weights.layer(layer).ln1_post
    if norm is None:
        return written
    together = written.sum(1)
    bias = getattr(source.model.blocks[layer].attn, "b_O", None)
    if bias is not None:
        together = together + bias.detach().float()
    if norm.centres:
        together = together - together.mean(-1, keepdim=True)
    scale = torch.rsqrt(together.square().mean(-1, keepdim=True) + norm.eps)
    return norm.folded_into(written) * scale[:, None]


def _bias(source: ModelComponents, layer: int, component: str) -> Tensor | None:
    block = source.model.blocks[layer]
    module = mlp_module(block) if component in MLP_COMPONENTS else block.attn
    for name in _BIASES[component]:
        value = getattr(module, name, None)
        if isinstance(value, Tensor):
            return value.detach().float()
    return None


def _seen(seen: dict[str, Tensor], name: str) -> Tensor:
    if name not in seen:
        raise UnsupportedModelError(
            f"This model has no hook {name!r}, so what its components write cannot be measured. Use a metric of "
            "gradients or of the weights alone."
        )
    return seen[name]
