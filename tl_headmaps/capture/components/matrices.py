"""The weight matrices of every layer by one set of names, whatever the host calls them.

A component is one matrix of a layer, rows inputs and columns outputs, heads side by side: ``attn.q`` is
[d_model, head * d_head], ``attn.k`` and ``attn.v`` [d_model, kv_head * d_head] (grouped heads stay grouped), ``attn.o``
[head * d_head, d_model], ``mlp.up`` and ``mlp.gate`` [d_model, d_mlp], ``mlp.down`` [d_mlp, d_model].

Both hosts show a matrix as a view of the parameter that stores it, also where the checkpoint keeps q, k and v in one
tensor. The view says which entries of the parameter (and of its gradient) belong to the component.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.errors import UnsupportedModelError, UsageError
from ...core.provenance import Provenance
from ...core.types import ATTENTION_COMPONENTS, MLP_COMPONENTS
from ..checkpoint.reader import CheckpointOrigin
from ..tensors import check_finite
from ..weights import HeadWeights

_HOST_NAMES = {
    "attn.q": ("W_Q",),
    # HookedTransformer expands grouped heads in W_K and keeps the grouped ones in _W_K.
    "attn.k": ("_W_K", "W_K"),
    "attn.v": ("_W_V", "W_V"),
    "attn.o": ("W_O",),
    "mlp.up": ("W_in",),
    "mlp.down": ("W_out",),
    "mlp.gate": ("W_gate",),
}


@runtime_checkable
class ComponentSource(Protocol):
    """What a component map reads: a model, weights already read, or a checkpoint."""

    weights: HeadWeights
    n_layers: int
    n_heads: int
    n_kv_heads: int
    components: tuple[str, ...]

    def matrix(self, layer: int, component: str) -> Float[Tensor, "rows columns"]:
        """One matrix in its stored type, rows inputs and columns outputs."""

    def provenance(self, **details: Any) -> Provenance:
        """Provenance of a result computed from these matrices."""


def heads_of(source: ComponentSource, layer: int, component: str) -> Float[Tensor, "part rows columns"]:
    """The slice of each head (key/value head for k and v) of an attention matrix."""
    return split_heads(source.matrix(layer, component), component, n_parts(source, component))


def n_parts(source: ComponentSource, component: str) -> int:
    """Into how many heads a component falls; 1 for the MLP's."""
    if component not in ATTENTION_COMPONENTS:
        return 1
    return source.n_kv_heads if component in ("attn.k", "attn.v") else source.n_heads


def split_heads(
    matrix: Float[Tensor, "rows columns"], component: str, n_heads: int
) -> Float[Tensor, "part part_rows part_columns"]:
    """Heads stand side by side in the rows of ``attn.o`` and in the columns of all others."""
    if component == "attn.o":
        rows: Tensor = matrix.unflatten(0, (n_heads, -1))
        return rows
    columns: Tensor = matrix.unflatten(1, (n_heads, -1)).transpose(0, 1)
    return columns


def component_source(model_or_weights: Any, *, attention_only: bool = False) -> ComponentSource:
    """A source of matrices for whatever the user passed; ``attention_only`` does without the MLPs."""
    if isinstance(model_or_weights, HeadWeights):
        from_files = isinstance(model_or_weights.origin, CheckpointOrigin) and not attention_only
        return (CheckpointComponents if from_files else AttentionComponents)(model_or_weights)
    if isinstance(model_or_weights, ComponentSource):
        return model_or_weights
    return ModelComponents(model_or_weights, attention_only=attention_only)


@dataclass(frozen=True)
class Location:
    """Where a component lies in a parameter."""

    parameter: torch.nn.Parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Float[Tensor, "part rows columns"]:
        """The component's entries of a tensor with the parameter's shape: its values or its gradient."""
        owner = self.parameter
        if tensor.stride() != owner.stride():
            # A parameter may itself be a slice (a bridge's q, k, v of GPT-2); its gradient comes without the gaps.
            spaced = torch.empty_strided(owner.shape, owner.stride(), dtype=tensor.dtype, device=tensor.device)
            tensor = spaced.copy_(tensor)
        found = tensor.detach().as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)
        return found if found.ndim == 3 else found[None]


class ModelComponents:
    """The matrices of a loaded TransformerBridge or HookedTransformer, read when they are asked for."""

    def __init__(self, model: Any, *, attention_only: bool = False) -> None:
        _require_floats(model)
        self.weights = HeadWeights.from_model(model)
        self.model = model
        self.n_layers, self.n_heads = self.weights.n_layers, self.weights.n_heads
        self.n_kv_heads = self.weights.n_kv_heads
        self.components = ATTENTION_COMPONENTS
        if not attention_only:
            self.components += tuple(name for name in MLP_COMPONENTS if self._find(0, name) is not None)
            for layer in range(self.n_layers):
                self._require_plain_mlp(layer)

    def _find(self, layer: int, component: str) -> Tensor | None:
        """The host's view of a matrix, heads on the first axis of attention matrices."""
        part, _, _ = component.partition(".")
        module = getattr(self.model.blocks[layer], part, None)
        for name in _HOST_NAMES[component]:
            value = getattr(module, name, None)
            if value is not None:
                return value if isinstance(value, Tensor) else None
        return None

    def _require_plain_mlp(self, layer: int) -> None:
        module = getattr(self.model.blocks[layer], "mlp", None)
        if module is None and "mlp.up" not in self.components:
            return
        found = {name: self._find(layer, name) for name in MLP_COMPONENTS}
        plain = {name for name, value in found.items() if value is not None and value.ndim == 2}
        if not {"mlp.up", "mlp.down"} <= plain:
            raise UnsupportedModelError(
                f"The MLP of layer {layer} is a {type(module).__name__} without one up and one down matrix (a mixture "
                "of experts, or parts unknown here), so a map of components is not defined. Use "
                "by_head=True (--by-head), which needs the attention alone."
            )
        if (found["mlp.gate"] is not None) != ("mlp.gate" in self.components):
            raise UnsupportedModelError(
                f"Layer {layer} {'has' if found['mlp.gate'] is not None else 'lacks'} an MLP gate, unlike layer 0. A "
                "map needs the same components in every layer."
            )

    def viewed(self, layer: int, component: str) -> Float[Tensor, "part rows columns"]:
        """A component as the host shows it, heads (or a single part) first."""
        value = self._find(layer, component)
        if value is None:
            raise UsageError(f"There is no {component} in layer {layer}; there are {', '.join(self.components)}.")
        value = value if value.ndim == 3 else value[None]
        check_finite(value.detach(), f"{component} of layer {layer}")
        return value

    def matrix(self, layer: int, component: str) -> Float[Tensor, "rows columns"]:
        parts = self.viewed(layer, component).detach()
        if component == "attn.o":
            return parts.flatten(0, 1)
        return parts.transpose(0, 1).flatten(1)

    def location(self, layer: int, component: str) -> Location:
        """Where the parameter that the forward pass uses keeps a component."""
        view = self.viewed(layer, component)
        base = view if view._base is None else view._base
        if not isinstance(base, torch.nn.Parameter):
            raise UnsupportedModelError(
                f"{component} of layer {layer} is computed from other tensors, not stored as a parameter, so there is "
                "no gradient to read. Use a metric of the weights alone."
            )
        offset = int(view.storage_offset()) - int(base.storage_offset())
        return Location(base, tuple(view.shape), view.stride(), offset)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self)

    def provenance(self, **details: Any) -> Provenance:
        return _provenance(self.weights, self.fingerprint, details)


def _require_floats(model: Any) -> None:
    """Before anything is read: the forward pass of a quantised model may not even run here."""
    for name, parameter in model.named_parameters() if isinstance(model, torch.nn.Module) else ():
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            raise UnsupportedModelError(
                f"{name.replace('_original_component.', '')} is stored as "
                f"{str(parameter.dtype).removeprefix('torch.')}, a quantised type (int8 or 4-bit): its entries are "
                "codes, not weights. Load the model in float32, bfloat16 or float16."
            )


class AttentionComponents:
    """The attention matrices of weights already read; they keep no MLP but the first."""

    components = ATTENTION_COMPONENTS

    def __init__(self, weights: HeadWeights) -> None:
        self.weights = weights
        self.n_layers, self.n_heads, self.n_kv_heads = weights.n_layers, weights.n_heads, weights.n_kv_heads

    def matrix(self, layer: int, component: str) -> Float[Tensor, "rows columns"]:
        parts = getattr(self.weights.layer(layer), f"W_{component[-1].upper()}")
        matrix: Tensor = parts.flatten(0, 1) if component == "attn.o" else parts.transpose(0, 1).flatten(1)
        return matrix

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self)

    def provenance(self, **details: Any) -> Provenance:
        return _provenance(self.weights, self.fingerprint, details)


class CheckpointComponents:
    """All matrices of a checkpoint, read from its files one at a time."""

    def __init__(self, weights: HeadWeights) -> None:
        assert isinstance(weights.origin, CheckpointOrigin)
        self.weights, self.origin = weights, weights.origin
        self.n_layers, self.n_heads, self.n_kv_heads = weights.n_layers, weights.n_heads, weights.n_kv_heads
        self.components = self.origin.components

    def matrix(self, layer: int, component: str) -> Float[Tensor, "rows columns"]:
        return self.origin.component(layer, component)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self)

    def provenance(self, **details: Any) -> Provenance:
        return _provenance(self.weights, self.fingerprint, details)


def fingerprint(source: ComponentSource) -> str:
    """SHA-256 over all the bytes of all matrices, in one layout for every host."""
    digest = hashlib.sha256()
    for layer in range(source.n_layers):
        for component in source.components:
            matrix = source.matrix(layer, component)
            digest.update(f"{layer} {component} {tuple(matrix.shape)}".encode())
            digest.update(matrix.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _provenance(weights: HeadWeights, mark: str, details: dict[str, Any]) -> Provenance:
    return Provenance(
        model=weights.model_name,
        fingerprint=mark,
        architecture=weights.architecture,
        basis=weights.basis,
        dtype=f"{str(weights.W_E.dtype).removeprefix('torch.')} stored, reduced in float64",
        device=str(weights.device),
        **details,
    )
