"""Reading the weights of a loaded TransformerLens model, and running it undisturbed.

Modules are believed, flags are not: on TransformerLens 4.3 a folded bridge still says that it is not folded, and a
Gemma-3 bridge denies its norms after attention. So a norm is measured by what it does to probe vectors, and what is
outside all modules (factors of the embedding, of what blocks add, of scores and logits; the activation function) by
a short forward pass. What was read is compared with another one, seam by seam, before it is used
(:mod:`.selfcheck`): a model that computes something else is refused, not misread.
"""

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from ..core.errors import HeadMapsError, UnsupportedModelError
from ..core.types import Basis, Model
from .anatomy import (
    architecture_of,
    as_wide_as_the_stream,
    host_error,
    inner_part,
    is_processed,
    layers_with_heads,
    mixer_of,
    mlp_module,
    norm_before,
    split_view,
    state_of,
    unembedding_of,
    uneven_shapes,
    unread_mlp,
)
from .forward import evaluating, forward_pass, lock_of, weights_loaded
from .measuring import Measurements, NormReader
from .parts import ACTIVATIONS, MLP, HeadShape, LayerWeights, Norm, basis_of
from .requirements import (
    require_decoder,
    require_heads,
    require_same_attention,
    require_whole,
    unmapped_circuits,
)
from .selfcheck import GATED, mixing_difference, mlp_difference, output_bias
from .tensors import check_finite

_N_READINGS = 2
"""Of how many models it is remembered what was read of them; each may hold copies of an embedding."""


@dataclass(eq=False)
class Reading:
    """What was read of a model, which holds as long as everything that decides it is as it was.

    Attributes:
        fields: Fields of HeadWeights, but for the model itself, which this does not keep alive.
        known: What was computed of these weights since and belongs to them: self-check and digests, by name.
    """

    reader: "_Reader"
    fields: Mapping[str, Any]
    device: str | torch.device | None
    state: tuple[Any, ...] | None
    known: dict[str, Any] = field(default_factory=dict)

    def holds(self, model: Model) -> bool:
        """Whether the model is the same as when it was read."""
        with lock_of(model):
            return self.state is not None and self.state == state_of(model)

    def fields_with(self, model: Model) -> dict[str, Any]:
        """All fields of HeadWeights."""
        read_layer = partial(_read_layer, model, self.reader)
        return {**self.fields, "read_layer": read_layer, "tokenizer": getattr(model, "tokenizer", None), "model": model}


_READINGS: WeakKeyDictionary[Any, Reading] = WeakKeyDictionary()
_READINGS_LOCK = threading.Lock()


def read_model(model: Model, device: str | torch.device | None) -> Reading:
    """What HeadWeights need of a loaded TransformerBridge or HookedTransformer; read again if anything has changed."""
    try:
        require_decoder(model)
        with evaluating(model), weights_loaded(model.embed, model.unembed):
            known = _READINGS.get(model)
            if known is not None and known.device == device and known.holds(model):
                return known
            reader = _Reader(model, device)
            fields = reader.fields()
            # Not before: hosts set up some of their modules when they first run.
            reading = Reading(reader, fields, device, state_of(model))
    except (HeadMapsError, MemoryError):
        raise
    except Exception as error:
        raise host_error(model, error) from error
    with _READINGS_LOCK:
        _READINGS.pop(model, None)
        if reading.state is not None:
            _READINGS[model] = reading
        for oldest in list(_READINGS)[:-_N_READINGS]:
            del _READINGS[oldest]
    return reading


def _read_layer(model: Model, reader: "_Reader", number: int) -> LayerWeights:
    """A layer of a model, which is kept alive by whoever may still ask for one."""
    return reader.layer(number)


class _FirstMLP(NamedTuple):
    """Norms around the MLP of layer 0, the MLP with its factor, and the reason if it cannot be used."""

    ln2: Norm | None
    ln2_post: Norm | None
    refusal: str | None = None
    mlp: MLP | None = None
    scale: float = 1.0


class _Reader:
    """Reads tensors of one model, which it does not keep alive, onto one device as float32."""

    def __init__(self, model: Model, device: str | torch.device | None) -> None:
        self._model = ref(model)
        embedding = model.embed.W_E
        if not embedding.is_floating_point() or embedding.dtype.itemsize < 2:
            raise UnsupportedModelError(
                f"The weights are stored as {embedding.dtype}, a quantised type. Load the model in "
                "float32, bfloat16 or float16."
            )
        self.dtype = embedding.dtype
        self.device = torch.device(device) if device is not None else embedding.device
        self.norms = NormReader(model, self.device)
        self.score_factor = self.read_scale = 1.0
        self.post_norm = False
        self.shapes: dict[int, HeadShape] = {}

    @property
    def model(self) -> Model:
        model: Model | None = self._model()
        assert model is not None
        return model

    def fields(self) -> dict[str, Any]:
        model, cfg = self.model, self.model.cfg
        with_heads = layers_with_heads(model)
        self.shapes = uneven_shapes(model, with_heads)
        require_heads(model, with_heads[0])
        first, last = self.layer(with_heads[0]), self.layer(with_heads[-1])
        require_whole(model, first)
        W_E = self.stored(as_wide_as_the_stream(model, model.embed.W_E))
        W_U = self.stored(unembedding_of(model))
        check_finite(W_E, "The embedding W_E")
        check_finite(W_U, "The unembedding W_U")
        ln_final = self.norms.norm(getattr(model, "ln_final", None))
        seen = forward_pass(model, sorted({0, first.layer, last.layer, len(model.blocks) - 1}))
        require_same_attention(model, seen)
        measured = Measurements(model, self.norms, seen)
        embed_scale, embed_norm = measured.embedding(W_E)
        residual_scale, beside = measured.residual_scale(first), measured.beside(first)
        self.post_norm = measured.post_norm(first)
        self.score_factor, self.read_scale = measured.score_factor(first), measured.read_scale(first)
        with weights_loaded(model.blocks[0]):
            first_mlp = self.first_mlp(model.blocks[0], measured.here(0), residual_scale)
        return {
            "model_name": str(cfg.model_name),
            "architecture": architecture_of(model),
            "n_layers": len(model.blocks),
            "shapes": self.shapes,
            "n_heads": max([first.shape.n_heads, *(shape.n_heads for shape in self.shapes.values())]),
            "n_kv_heads": first.W_V.shape[0],
            "d_model": first.W_Q.shape[1],
            "d_head": first.W_V.shape[2],
            "basis": self.basis(ln_final, W_U),
            "W_E": W_E,
            "W_U": W_U,
            "embed_scale": embed_scale,
            "embed_norm": embed_norm,
            "residual_scale": residual_scale * (1.0 if beside is None else beside.attention_scale),
            "mlp_scale": residual_scale if first_mlp.mlp is None else first_mlp.scale,
            "beside": beside,
            "logit_scale": measured.logit_scale(W_U, ln_final),
            "moved_biases": self.moved_biases(first),
            "unmapped": unmapped_circuits(model, self.post_norm),
            "ln_final": ln_final,
            "ln2": first_mlp.ln2,
            "mlp": first_mlp.mlp,
            "ln2_post": first_mlp.ln2_post,
            "mlp_refusal": first_mlp.refusal,
            "mixers": {
                layer: mixer_of(block) for layer, block in enumerate(model.blocks) if layer not in set(with_heads)
            },
            "gated": mixing_difference(first, measured.here(first.layer))[1] == GATED,
        }

    def stored(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device).contiguous()

    def tensor(self, module: Any, *names: str, dtype: torch.dtype | None = torch.float32) -> Tensor | None:
        """The first of these attributes that is set, as float32 or (``dtype=None``) in its stored type."""
        for name in names:
            value = getattr(module, name, None)
            if value is not None:
                if not value.is_floating_point():
                    raise UnsupportedModelError(
                        f"{name} is stored as {value.dtype}, a quantised type. Load the model in "
                        "float32, bfloat16 or float16."
                    )
                read: Tensor = value.detach().to(device=self.device, dtype=dtype or value.dtype)
                return read
        return None

    def required(self, module: Any, *names: str) -> Tensor:
        value = self.tensor(module, *names)
        if value is None:
            raise UnsupportedModelError(
                f"{architecture_of(self.model)} has no {names[-1]} in {type(module).__name__}; "
                "its attention is not made of W_Q, W_K, W_V and W_O."
            )
        return value

    def layer(self, layer: int) -> LayerWeights:
        block = self.model.blocks[layer]
        attn = block.attn
        with lock_of(self.model), evaluating(block), weights_loaded(block):
            split = self.split(attn, layer)
            # HookedTransformer expands grouped heads in W_K and keeps the grouped ones in _W_K.
            W_Q, W_K, W_V, W_O = (self.required(split, f"_W_{part}", f"W_{part}") for part in "QKVO")
            return LayerWeights(
                layer=layer,
                W_Q=W_Q,
                W_K=W_K,
                W_V=W_V,
                W_O=W_O,
                score_scale=self.score_scale(attn, layer, W_Q.shape[-1]),
                b_Q=self.tensor(split, "b_Q"),
                b_K=self.tensor(split, "_b_K", "b_K"),
                b_V=self.tensor(split, "_b_V", "b_V"),
                ln1=self.ln1(block),
                ln1_post=self.norms.norm(getattr(block, "ln1_post", None)),
                q_norm=self.norms.head_norm(attn, "q_norm", W_Q),
                k_norm=self.norms.head_norm(attn, "k_norm", W_K),
                v_norm=self.norms.head_norm(attn, "v_norm", W_V),
                z_norm=self.norms.norm(inner_part(attn, "attn_sub_norm"), W_O.shape[0] * W_O.shape[1]),
                clip=self.clip(attn),
            )

    def split(self, attn: Any, layer: int) -> Any:
        """Attention with its matrices by head: as TransformerLens splits it, or where layers differ as it is stored."""
        if layer not in self.shapes:
            return attn
        names = [f"{kind}_{part}" for kind in "Wb" for part in "QKVO" if (kind, part) != ("b", "O")]
        return SimpleNamespace(**{name: split_view(attn, name, self.shapes[layer]) for name in names})

    def ln1(self, block: Any) -> Norm | None:
        """The norm before attention, with the factor of what attention then reads (Falcon-H1)."""
        norm = None if self.post_norm else self.norms.norm(norm_before(block))
        if norm is None or self.read_scale == 1:
            return norm
        return replace(norm, weight=norm.weight * self.read_scale, bias=norm.bias * self.read_scale)

    def clip(self, attn: Any) -> float | None:
        """The largest queries, keys and values a model allows, if it says so."""
        limit = getattr(inner_part(attn, "config"), "clip_qkv", inner_part(attn, "clip_qkv"))
        return float(limit) if isinstance(limit, int | float) else None

    def score_scale(self, attn: Any, layer: int, d_head: int) -> float:
        """The factor of attention scores (1 / sqrt(d_head) unless the model has another)."""
        return self.stated_scale(attn, layer, d_head) * self.score_factor

    def stated_scale(self, attn: Any, layer: int, d_head: int) -> float:
        own = inner_part(attn, "scaling")
        if isinstance(own, int | float):
            return float(own)
        # A bridge answers with attributes of the module inside it, where the name may mean something else (Llama 4).
        divisor = getattr(attn, "attn_scale", None) if getattr(attn, "original_component", None) is None else None
        if isinstance(divisor, int | float) and divisor > 0:
            return 1.0 / float(divisor)
        scale = 1.0 / math.sqrt(d_head)
        if getattr(self.model.cfg, "scale_attn_by_inverse_layer_idx", False):
            scale /= layer + 1
        return scale

    def moved_biases(self, layer: LayerWeights) -> bool:
        """Whether value biases were moved into the output bias: weights were processed, and values could have one."""
        if not is_processed(self.model) or layer.b_V is not None:
            return False
        block = self.model.blocks[layer.layer]
        moved = output_bias(block)
        # A bias of values that is all zero now (it may have come from a LayerNorm), and one of the output that is not.
        return self.tensor(block.attn, "_b_V", "b_V") is not None and moved is not None and bool(moved.any())

    def first_mlp(self, block: Any, here: Mapping[str, Tensor], residual_scale: float) -> _FirstMLP:
        if hasattr(block, "post_per_layer_input_norm"):
            return _FirstMLP(None, None, "its layers add an embedding of the token beside their MLP")
        if self.post_norm:
            return _FirstMLP(None, None, "its norms come after attention and MLP (post-norm)")
        module = mlp_module(block)
        ln2, ln2_post = (self.norms.norm(getattr(block, name, None)) for name in ("ln2", "ln2_post"))
        if module is None:
            unread = unread_mlp(block)
            if unread is None:
                return _FirstMLP(None, None)
            return _FirstMLP(ln2, ln2_post, f"its first MLP ({unread}) has parts that are not known here")
        if ln2 is None and ln2_post is None:
            # Parallel blocks with one norm (Phi, GPT-J) feed it to attention and MLP alike.
            ln2 = self.norms.norm(norm_before(block))
        W_in, W_out, W_gate = (self.tensor(module, name, dtype=None) for name in ("W_in", "W_out", "W_gate"))
        stated = self.stated_activation(module)
        if W_in is None or W_out is None or W_in.ndim != 2:
            reason = f"its first MLP is a {type(module).__name__} (mixture of experts or unknown parts)"
            return _FirstMLP(ln2, ln2_post, reason)
        b_in, b_gate = self.tensor(module, "b_in"), self.tensor(module, "b_gate")
        if W_gate is None and W_in.shape[1] == 2 * W_out.shape[0]:
            # Gate and up projection in one matrix (ModernBERT).
            W_gate, W_in = W_in.chunk(2, 1)
            b_gate, b_in = (None, None) if b_in is None else b_in.chunk(2)
        # Falcon-H1 multiplies what goes through its gate, and what its MLP gives back.
        gate_scale, scale = (_factor_in(module, name) for name in ("gate_multiplier", "down_multiplier"))
        # A host may state no activation function, or another than the model's: the one that fits is the model's.
        for activation in sorted(ACTIVATIONS, key=lambda name: name != stated):
            mlp = MLP(
                W_in=W_in,
                W_out=W_out,
                activation=activation,
                W_gate=W_gate,
                b_in=b_in,
                b_gate=b_gate,
                b_out=self.tensor(module, "b_out"),
                gate_scale=gate_scale,
            )
            if mlp_difference(mlp, ln2, ln2_post, scale * residual_scale, here).fits(self.dtype):
                return _FirstMLP(ln2, ln2_post, None, mlp, scale * residual_scale)
        if stated not in ACTIVATIONS:
            return _FirstMLP(ln2, ln2_post, f"its activation function {stated!r} is not known here")
        return _FirstMLP(ln2, ln2_post, "its first MLP does not compute act(x W_in) W_out")

    def stated_activation(self, module: Any) -> str:
        """The function that a module of the MLP computes, else the one that the host states.

        In reduced precision a wrong function may be within the tolerance of the whole MLP.
        """
        stated = str(getattr(self.model.cfg, "act_fn", None))
        x = torch.linspace(-4, 4, 65)
        for part in getattr(module, "original_component", module).children():
            if any(True for _ in part.parameters()):
                continue
            y = part(x)
            same = [name for name, act in ACTIVATIONS.items() if torch.allclose(act(x), y, rtol=0, atol=1e-5)]
            if same:
                return stated if stated in same else same[0]
        return stated

    def basis(self, ln_final: Norm | None, W_U: Tensor) -> Basis:
        norms = [ln_final, *(self.norms.norm(norm_before(block)) for block in self.model.blocks)]
        return basis_of(norms, W_U, is_processed(self.model))


def _factor_in(module: Any, name: str) -> float:
    """A factor that the transformers module inside a bridge has under this name, else 1."""
    factor = inner_part(module, name)
    return float(factor) if isinstance(factor, int | float) else 1.0
