"""How the loss on a text depends on every component.

For a matrix W of the model, ``sum(W * dLoss/dW)`` is the derivative of the loss with respect to a factor of W: how much
the loss grows, per unit, when the whole matrix is scaled up. The hook of a parameter runs as soon as its gradient is
complete, reduces it to what is needed and drops it, so only the gradients of a few matrices exist at once.

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
from ...core.types import Model
from ..forward import all_modules, isolated, lock_of
from ..running.text import TextBatch, TextBatches
from .matrices import Location, ModelComponents, n_parts

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
