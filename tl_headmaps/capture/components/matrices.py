"""The weight matrices of every layer under one set of names for all hosts.

A component is one matrix of a layer, rows inputs and columns outputs, heads side by side: ``attn.q`` is
[d_model, head * d_head], ``attn.k`` and ``attn.v`` [d_model, kv_head * d_head] (grouped heads stay grouped), ``attn.o``
[head * d_head, d_model], ``mlp.up`` and ``mlp.gate`` [d_model, d_mlp], ``mlp.down`` [d_mlp, d_model].

Both hosts expose a matrix as a view of the parameter that stores it, even where the checkpoint has q, k and v in one
tensor. The view tells which entries of the parameter (and of its gradient) belong to the component.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.errors import UnsupportedModelError, UsageError
from ...core.provenance import Provenance
from ...core.types import ATTENTION_COMPONENTS, MLP_COMPONENTS, Model
from ..anatomy import mlp_module, split_view
from ..tensors import check_finite, joint_digest, tensor_digests
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


class ComponentSource(ABC):
    """What a component map reads: a model, weights already read, or a checkpoint."""

    components: tuple[str, ...] = ATTENTION_COMPONENTS

    def __init__(self, weights: HeadWeights) -> None:
        self.weights = weights
        self.n_layers, self.n_heads, self.n_kv_heads = weights.n_layers, weights.n_heads, weights.n_kv_heads

    def has(self, layer: int, component: str) -> bool:
        """Whether a layer has a component: in hybrid models some layers have no attention."""
        return component not in ATTENTION_COMPONENTS or layer not in self.weights.mixers

    @abstractmethod
    def matrix(self, layer: int, component: str) -> Float[Tensor, "rows columns"]:
        """One matrix in its stored type, rows inputs and columns outputs."""

    @cached_property
    def _mlp_digest(self) -> str:
        names = [name for name in self.components if name in MLP_COMPONENTS]
        digests: dict[str, str] = {}
        for layer in range(self.n_layers):
            # One memory order for all: hosts and checkpoints store inputs or outputs first.
            matrices = {f"layer {layer} {name}": self.matrix(layer, name).contiguous() for name in names}
            digests |= tensor_digests(matrices)
        return joint_digest(digests)

    def provenance(
        self, *, runs_model: bool = False, data: Mapping[str, str] | None = None, **details: Any
    ) -> Provenance:
        """Provenance of a result computed from these matrices; what the fingerprint leaves out is among its data."""
        read = dict(data or {})
        # The fingerprint covers the attention; where the model runs, `parameters` covers the rest.
        if not runs_model and set(self.components) - set(ATTENTION_COMPONENTS):
            read["mlp_weights"] = self._mlp_digest
        provenance = self.weights.provenance(runs_model=runs_model, data=read, **details)
        stored = provenance.dtype.partition(" ")[0]
        return replace(provenance, dtype=f"{stored} stored, reduced in float64 (spectra: or in float32)")


def heads_of(source: ComponentSource, layer: int, component: str) -> Float[Tensor, "part rows columns"]:
    """The slice of each head (key/value head for k and v) of an attention matrix."""
    return split_heads(source.matrix(layer, component), component, n_parts(source, component, layer))


def n_parts(source: ComponentSource, component: str, layer: int | None = None) -> int:
    """Number of heads of a component in a layer, or the most in any; 1 for those of the MLP."""
    if component not in ATTENTION_COMPONENTS:
        return 1
    shapes = [source.weights.shape(n) for n in (source.weights.layers_with_heads if layer is None else [layer])]
    return max(shape.n_kv_heads if component in ("attn.k", "attn.v") else shape.n_heads for shape in shapes)


def split_heads(
    matrix: Float[Tensor, "rows columns"], component: str, n_heads: int
) -> Float[Tensor, "part part_rows part_columns"]:
    """The heads of a matrix: blocks of rows in ``attn.o``, blocks of columns in all others."""
    if component == "attn.o":
        rows: Tensor = matrix.unflatten(0, (n_heads, -1))
        return rows
    columns: Tensor = matrix.unflatten(1, (n_heads, -1)).transpose(0, 1)
    return columns


def component_source(model: Model | HeadWeights | ComponentSource, *, attention_only: bool = False) -> ComponentSource:
    """The matrices of a model, or of weights; ``attention_only`` leaves the MLPs out."""
    if isinstance(model, HeadWeights):
        from_files = model.origin is not None and not attention_only
        return (CheckpointComponents if from_files else AttentionComponents)(model)
    if isinstance(model, ComponentSource):
        return model
    return ModelComponents(model, attention_only=attention_only)


@dataclass(frozen=True)
class Location:
    """Where a component is in a parameter."""

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
        parts = tensor.detach().as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)
        return parts if parts.ndim == 3 else parts[None]


class ModelComponents(ComponentSource):
    """The matrices of a loaded TransformerBridge or HookedTransformer."""

    def __init__(self, model: Model, *, attention_only: bool = False) -> None:
        _require_floats(model)
        super().__init__(HeadWeights.from_model(model))
        self.model = model
        if not attention_only:
            self.components += tuple(name for name in MLP_COMPONENTS if self._find(0, name) is not None)
            for layer in range(self.n_layers):
                self._require_plain_mlp(layer)

    def _find(self, layer: int, component: str) -> Tensor | None:
        """The host's view of a matrix, with heads on the first axis of attention matrices."""
        block = self.model.blocks[layer]
        module = mlp_module(block) if component in MLP_COMPONENTS else getattr(block, "attn", None)
        if component in ATTENTION_COMPONENTS and module is not None and self.weights.shapes:
            return split_view(module, _HOST_NAMES[component][-1], self.weights.shape(layer))
        for name in _HOST_NAMES[component]:
            value = getattr(module, name, None)
            if value is not None:
                return value if isinstance(value, Tensor) else None
        return None

    def _require_plain_mlp(self, layer: int) -> None:
        module = mlp_module(self.model.blocks[layer])
        if module is None and "mlp.up" not in self.components:
            return
        matrices = {name: self._find(layer, name) for name in MLP_COMPONENTS}
        plain = {name for name, value in matrices.items() if value is not None and value.ndim == 2}
        if not {"mlp.up", "mlp.down"} <= plain:
            raise UnsupportedModelError(
                f"The MLP of layer {layer} is a {type(module).__name__} without one up and one down matrix (a mixture "
                "of experts, or parts unknown here), so a map of components is not defined. Use "
                "by_head=True (--by-head), which needs the attention alone."
            )
        gated = matrices["mlp.gate"] is not None
        if gated != ("mlp.gate" in self.components):
            raise UnsupportedModelError(
                f"Layer {layer} {'has' if gated else 'lacks'} an MLP gate, unlike layer 0. A "
                "map needs the same components in every layer."
            )

    def viewed(self, layer: int, component: str) -> Float[Tensor, "part rows columns"]:
        """A component as the host exposes it, heads (or a single part) first."""
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
        """Where a component is in the parameter that the forward pass uses."""
        view = self.viewed(layer, component)
        base = view if view._base is None else view._base
        if not isinstance(base, torch.nn.Parameter):
            raise UnsupportedModelError(
                f"{component} of layer {layer} is computed from other tensors, not stored as a parameter, so there is "
                "no gradient to read. Use a metric of the weights alone."
            )
        offset = int(view.storage_offset()) - int(base.storage_offset())
        return Location(base, tuple(view.shape), view.stride(), offset)


def _require_floats(model: Model) -> None:
    """Refuse quantised weights before anything is read: the model may not even run here."""
    for name, parameter in model.named_parameters() if isinstance(model, torch.nn.Module) else ():
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            raise UnsupportedModelError(
                f"{name.replace('_original_component.', '')} is stored as "
                f"{str(parameter.dtype).removeprefix('torch.')}, a quantised type (int8 or 4-bit): its entries are "
                "codes, not weights. Load the model in float32, bfloat16 or float16."
            )


class AttentionComponents(ComponentSource):
    """The attention matrices of weights already read, which have no MLP but the first."""

    def matrix(self, layer: int, component: str) -> Float[Tensor, "rows columns"]:
        parts = getattr(self.weights.layer(layer), f"W_{component[-1].upper()}")
        matrix: Tensor = parts.flatten(0, 1) if component == "attn.o" else parts.transpose(0, 1).flatten(1)
        return matrix


class CheckpointComponents(ComponentSource):
    """All matrices of a checkpoint, read from its files one at a time."""

    def __init__(self, weights: HeadWeights) -> None:
        super().__init__(weights)
        assert weights.origin is not None
        self.origin = weights.origin
        self.components = self.origin.components

    def matrix(self, layer: int, component: str) -> Float[Tensor, "rows columns"]:
        return self.origin.component(layer, component)
