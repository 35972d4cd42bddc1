"""How the loss on a text depends on every component: gradients reduced to a few sums the moment they exist.

For a matrix W of the model, ``sum(W * dLoss/dW)`` is the derivative of the loss with respect to a factor of W: how much
the loss grows, per unit, when the whole matrix is scaled up. The hook of a parameter runs as soon as its gradient is
complete, adds up what is needed and drops the gradient, so only the gradients of a few matrices exist at once.

The model is left unchanged: which parameters require gradients, the gradients they already have, their hooks and the
training mode are restored, also after an exception; nothing random is drawn.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from ...core.errors import UnsupportedModelError
from ...core.types import Model
from ..isolation import all_modules, isolated
from ..running.batches import TextBatch, TextBatches
from .matrices import Location, ModelComponents, n_parts

_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True)
class GradientSums:
    """Sums over the entries of one component, by batch, layer and head (one head for the MLP's).

    Attributes:
        product: Sum of weight times gradient of the mean loss per token.
        absolute_product: Sum of the absolute values of the same.
        gradient_square: Sum of squared gradients.
        weight_square: Sum of squared weights (the same for every batch).
    """

    product: Float[Tensor, "batch layer part"]
    absolute_product: Float[Tensor, "batch layer part"]
    gradient_square: Float[Tensor, "batch layer part"]
    weight_square: Float[Tensor, "layer part"]

    def whole(self) -> "GradientSums":
        """The same for whole matrices: all heads together."""
        return replace(self, **{name: value.sum(-1, keepdim=True) for name, value in vars(self).items()})


@torch.inference_mode(False)
def component_gradients(
    source: ModelComponents, batches: TextBatches, *, progress: bool = True
) -> dict[str, GradientSums]:
    """Forward and backward pass of every batch, reduced per component.

    Args:
        source: The model's components.
        batches: The text.
        progress: Show a progress bar on a terminal.
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
    sums = {component: _empty(source, component, len(batches.items)) for component in source.components}
    for (layer, component), place in places.items():
        sums[component].weight_square[layer] = _sums(place.of(place.parameter).double().square())
    with _only_gradients(source.model, places) as collect:
        for number, batch in enumerate(tqdm(batches.items, unit="batch", disable=None if progress else True)):
            arrived: set[tuple[int, str]] = set()

            def reduce(
                key: tuple[int, str], gradient: Tensor, number: int = number, arrived: set[Any] = arrived
            ) -> None:
                layer, component = key
                place = places[key]
                slope, weight = place.of(gradient).float(), place.of(place.parameter).float()
                product = slope * weight
                sums[component].product[number, layer] = _sums(product)
                sums[component].absolute_product[number, layer] = _sums(product.abs_())
                sums[component].gradient_square[number, layer] = _sums(slope.square())
                arrived.add(key)

            with collect(reduce):
                mean_loss(source.model, batch).backward()
            for layer, component in sorted(places.keys() - arrived):
                raise UnsupportedModelError(
                    f"The loss has no gradient for {component} of layer {layer}: the forward pass of this model uses a "
                    "copy of that matrix. Load the model without weight processing, or use a metric of the weights "
                    "alone."
                )
    return {component: _only_where_it_is(source, component, found) for component, found in sums.items()}


def _only_where_it_is(source: ModelComponents, component: str, sums: GradientSums) -> GradientSums:
    """NaN in layers that do not have the component."""
    absent = torch.tensor([not source.has(layer, component) for layer in range(source.n_layers)])
    return replace(sums, **{name: value.masked_fill(absent[:, None], torch.nan) for name, value in vars(sums).items()})


def _empty(source: ModelComponents, component: str, n_batches: int) -> GradientSums:
    shape = (source.n_layers, n_parts(source, component))
    return GradientSums(
        product=torch.zeros(n_batches, *shape, dtype=torch.float64),
        absolute_product=torch.zeros(n_batches, *shape, dtype=torch.float64),
        gradient_square=torch.zeros(n_batches, *shape, dtype=torch.float64),
        weight_square=torch.zeros(shape, dtype=torch.float64),
    )


def mean_loss(model: Model, batch: TextBatch) -> Float[Tensor, ""]:
    """Mean cross-entropy of the next token over the real positions of a batch, in float32."""
    logits = model(batch.tokens, return_type="logits")[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())


def _sums(parts: Float[Tensor, "part rows columns"]) -> Float[Tensor, " part"]:
    return parts.sum((1, 2), dtype=torch.float64).cpu()


Reducer = Callable[[tuple[int, str], Tensor], None]


@contextmanager
def _only_gradients(model: Model, places: dict[tuple[int, str], Location]) -> Iterator[Any]:
    """Enable gradients of the components alone; yields a context manager that reduces them."""
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
