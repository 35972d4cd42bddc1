"""How the loss on a text depends on every component, and what every component writes while the text runs.

For a matrix W of the model, ``sum(W * dLoss/dW)`` is the derivative of the loss with respect to a factor of W: how much
the loss grows, per unit, when the whole matrix is scaled up. The hook of a parameter runs as soon as its gradient is
complete, reduces it to what is needed and drops it, so only the gradients of a few matrices exist at once.

Components that read the residual stream (q, k, v, up, gate) multiply the normalised stream x: they write ``x W + b``
and their stream is x. Components that write to it (o, down) add to the residual stream: what they write is measured
after the norm that follows them, where a model has one (Gemma), and their stream is the residual stream they add to. A
head of o writes its own summand. A layer is passed on when it has run, so the activations of one layer exist at a time.

The model is left unchanged: which parameters require gradients, the gradients they already have, their hooks and the
training mode are restored, also after an exception; nothing random is drawn.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.errors import UnsupportedModelError
from ...core.progress import Progress
from ...core.types import MLP_COMPONENTS, Model
from ..anatomy import mlp_module
from ..forward import all_modules, evaluating, isolated, lock_of
from ..running.text import TextBatch, TextBatches
from .matrices import Location, ModelComponents, heads_of, n_parts

_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


Measure = Callable[[Float[Tensor, "part ..."], Float[Tensor, "part ..."]], Float[Tensor, " part"]]
"""Reduces a gradient and its weights, in float32, to a number for each part, in float64."""


@torch.inference_mode(False)
def component_gradients(
    source: ModelComponents, batches: TextBatches, measure: Measure, *, by_head: bool = False, progress: bool = True
) -> dict[str, Float[Tensor, "batch layer part"]]:
    """Forward and backward pass of every batch, the gradient of each component reduced.

    Args:
        source: The model's components.
        batches: The text.
        measure: Reduces the gradient of a component, of the mean loss per token, to what is wanted.
        by_head: Reduce each head by itself, instead of all together.
        progress: Show a progress bar on a terminal.

    Returns:
        Values by component; NaN in layers that do not have it.
    """
    if any(parameter.is_inference() for parameter in source.model.parameters()):
        raise UnsupportedModelError(
            "The model was loaded under torch.inference_mode(), so its weights can have no gradients. Load it outside."
        )
    places = {
        (layer, component): source.location(layer, component)
        for layer in range(source.n_layers)
        for component in source.components
        if source.has(layer, component)
    }
    shape = (len(batches.items), source.n_layers)
    found = {
        component: torch.full(
            (*shape, n_parts(source, component) if by_head else 1), torch.nan, dtype=torch.float64, device="cpu"
        )
        for component in source.components
    }
    with lock_of(source.model), _only_gradients(source.model, places) as collect:
        shown = Progress(total=len(batches.items), desc="gradients", unit="batch", show=progress)
        for number, batch in enumerate(shown.over(batches.items)):
            arrived: set[tuple[int, str]] = set()

            def reduce(
                key: tuple[int, str], gradient: Tensor, number: int = number, arrived: set[Any] = arrived
            ) -> None:
                layer, component = key
                place = places[key]
                slope, weight = place.of(gradient).float(), place.of(place.parameter).float()
                whole = (slope, weight) if by_head else (slope[None], weight[None])
                measured = measure(*whole).cpu()
                found[component][number, layer, : len(measured)] = measured
                arrived.add(key)

            with collect(reduce):
                mean_loss(source.model, batch).backward()
            for layer, component in sorted(places.keys() - arrived):
                raise UnsupportedModelError(
                    f"The loss has no gradient for {component} of layer {layer}: the forward pass of this model uses a "
                    "copy of that matrix. Load the model without weight processing, or use a metric of the weights "
                    "alone."
                )
    return found


def mean_loss(model: Model, batch: TextBatch) -> Float[Tensor, ""]:
    """Mean cross-entropy of the next token over the real positions of a batch, in float32."""
    logits = model(batch.tokens, return_type="logits")[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())


Reducer = Callable[[tuple[int, str], Tensor], None]


@contextmanager
def _only_gradients(model: Model, places: dict[tuple[int, str], Location]) -> Iterator[Any]:
    """Enable gradients of the components alone; yields a context manager that reduces them.

    The caller holds the model's lock: another thread would take what is set here for the user's.
    """
    wanted: dict[int, list[tuple[int, str]]] = {}
    for key, place in places.items():
        wanted.setdefault(id(place.parameter), []).append(key)
    owners = {id(place.parameter): place.parameter for place in places.values()}
    every = {
        id(parameter): parameter for module in all_modules(model) for parameter in module.parameters(recurse=False)
    }
    parameters = list((every | owners).values())
    saved = [
        (
            parameter,
            parameter.requires_grad,
            parameter.grad,
            {name: getattr(parameter, name) for name in _PARAMETER_HOOKS},
        )
        for parameter in parameters
    ]

    @contextmanager
    def collect(reduce: Reducer) -> Iterator[None]:
        with ExitStack() as stack:
            for number, parameter in owners.items():

                def drop(owner: Tensor, keys: list[tuple[int, str]] = wanted[number]) -> None:
                    gradient, owner.grad = owner.grad, None
                    assert gradient is not None
                    for key in keys:
                        reduce(key, gradient)

                stack.callback(parameter.register_post_accumulate_grad_hook(drop).remove)
            yield

    try:
        with isolated(model), torch.enable_grad():
            for parameter in parameters:
                parameter.requires_grad_(id(parameter) in owners)
                parameter.grad = None
                for name in _PARAMETER_HOOKS:
                    # A user's hook might step an optimiser.
                    setattr(parameter, name, OrderedDict())
            yield collect
    finally:
        for parameter, required, gradient, hooks in saved:
            for name, value in hooks.items():
                setattr(parameter, name, value)
            parameter.requires_grad_(required)
            parameter.grad = gradient


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
