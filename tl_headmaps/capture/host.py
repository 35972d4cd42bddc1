"""Reading the weights of a loaded TransformerLens model, and running it undisturbed.

Modules are believed, flags are not: on TransformerLens 4.3 a folded bridge still says that it is not folded, and a
Gemma-3 bridge denies its norms after attention. So a norm is measured by what it does to probe vectors, and what is
outside all modules (factors of the embedding, of what blocks add, of scores and logits; the activation function) by
a short forward pass. What was read is compared with another one, seam by seam, before it is used
(:mod:`.selfcheck`): a model that computes something else is refused, not misread.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.errors import HeadMapsError, UnsupportedModelError, UsageError, WeightBasisError
from ..core.types import Basis, Model
from .forward import ForwardPass, forward_pass, weights_loaded
from .parts import ACTIVATIONS, MLP, LayerWeights, Norm, basis_of
from .selfcheck import (
    GATED,
    TOLERANCE,
    attention_output,
    compared,
    embedding_difference,
    logit_cap,
    logit_columns,
    mixing_difference,
    mlp_difference,
    output_bias,
    sampled_logits,
    score_difference,
    without_positions,
)
from .tensors import check_finite, in_float64, joint_digest, tensor_digests

_CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Names under which transformers hands a cache of keys and values to attention."""

_HOOK_DICTIONARIES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def silenced(module: Model | torch.nn.Module) -> Iterator[None]:
    """Run a module without the user's hooks; they are put back on exit."""
    from transformer_lens.hook_points import HookPoint

    points = [part for part in module.modules() if isinstance(part, HookPoint)]
    saved = [{name: getattr(point, name) for name in _HOOK_DICTIONARIES} for point in points]
    try:
        for point in points:
            for name in _HOOK_DICTIONARIES:
                setattr(point, name, OrderedDict())
        yield
    finally:
        for point, hooks in zip(points, saved, strict=True):
            for name, value in hooks.items():
                setattr(point, name, value)


def all_modules(model: Model | torch.nn.Module) -> list[torch.nn.Module]:
    """Every module that runs, including modules of transformers outside the bridge (GPT-2's first dropout)."""
    return list(dict.fromkeys(module for root in _roots(model) for module in root.modules()))


def _roots(model: Model | torch.nn.Module) -> list[Any]:
    inner = getattr(model, "original_model", None)
    return [model, inner] if isinstance(inner, torch.nn.Module) else [model]


@contextmanager
def isolated(model: Model | torch.nn.Module) -> Iterator[None]:
    """Evaluation mode and none of the user's hooks; both are restored on exit."""
    training = [module for module in all_modules(model) if module.training]
    try:
        for module in training:
            module.training = False
        with silenced(model):
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def evaluating(model: Model | torch.nn.Module) -> Iterator[None]:
    """Isolated, and without gradients."""
    with torch.no_grad(), isolated(model):
        yield


def read_model(model: Model, device: str | torch.device | None) -> dict[str, Any]:
    """Fields of HeadWeights for a loaded TransformerBridge or HookedTransformer."""
    try:
        _require_decoder(model)
        with evaluating(model), weights_loaded(model.embed, model.unembed):
            return _Reader(model, device).fields()
    except (HeadMapsError, MemoryError):
        raise
    except Exception as error:
        raise host_error(model, error) from error


def host_error(model: Model, error: Exception) -> UnsupportedModelError:
    """What a user is told when TransformerLens, or a model in it, fails in its own code."""
    reason = str(error).strip().splitlines()
    return UnsupportedModelError(
        f"{_architecture(model)} could not be read: {type(error).__name__}"
        f"{': ' + reason[0].rstrip('.') if reason else ''}. Head maps need attention made of W_Q, W_K, W_V and W_O, "
        "and a model that runs on a few tokens. Try model(tokens) by itself, or use another model."
    )


def _require_decoder(model: Model) -> None:
    name = type(model).__name__
    is_module = isinstance(model, torch.nn.Module)
    if not (is_module and hasattr(model, "cfg") and hasattr(model, "embed")):
        raise UsageError(
            f"{name} is not a TransformerLens model. Pass a TransformerBridge (TransformerLens 4) "
            "or a HookedTransformer (TransformerLens 3)."
        )
    architecture = _architecture(model)
    if not hasattr(model, "blocks") or "Encoder" in name:
        raise UnsupportedModelError(
            f"{architecture} is not a decoder-only language model: it has no single stack of blocks with an "
            "unembedding. Head maps need a causal language model such as GPT-2, Llama or Gemma."
        )
    bidirectional = getattr(model.cfg, "attention_dir", "causal") != "causal"
    if bidirectional or "MaskedLM" in architecture or not hasattr(model, "unembed"):
        raise UnsupportedModelError(
            f"{architecture} is an encoder (its attention is not causal). Head maps need a causal language model such "
            "as GPT-2, Llama or Gemma."
        )
    if not layers_with_heads(model):
        raise UnsupportedModelError(
            f"{architecture} has no attention heads that TransformerLens shows: its layer 0 is "
            f"{_mixer(model.blocks[0])}. Head maps need a model with attention in at least one layer, and W_Q, W_K, "
            "W_V and W_O of it."
        )


def layers_with_heads(model: Model) -> list[int]:
    """Layers whose tokens are mixed by attention heads; in hybrid models others have linear attention, Mamba, ..."""
    return [layer for layer, block in enumerate(model.blocks) if _has_heads(block)]


def _has_heads(block: Any) -> bool:
    try:
        return hasattr(block, "attn") and hasattr(block.attn, "W_V")
    except (NotImplementedError, ValueError):
        # TransformerLens raises these for weights that exist but are not in memory, or cannot be split into heads.
        return True


_MIXERS = {
    "linear_attn": "linear attention",
    "mamba": "Mamba",
    "conv": "convolution",
    "recurrent": "recurrence",
    "mixer": "Mamba",
    "ssm": "a state space model",
}
"""What TransformerLens calls the part of a block that mixes tokens without heads, and what maps call it."""


def _mixer(block: Any) -> str:
    """What mixes the tokens of a layer without heads."""
    parts = dict(block.named_children())
    return next((name for part, name in _MIXERS.items() if part in parts), type(block).__name__)


def keeps_states(model: Model) -> bool:
    """Whether some layer carries a state from token to token, beside or instead of keys and values."""
    return any(part in dict(block.named_children()) for block in model.blocks for part in _MIXERS)


def mlp_module(block: Any) -> Any:
    """The MLP of a block, or None: Granite 4 without experts calls it its shared MLP."""
    module = getattr(block, "mlp", None)
    return getattr(block, "shared_mlp", None) if module is None and not hasattr(block, "moe") else module


def _unread_mlp(block: Any) -> str | None:
    """Name of a part that looks like an MLP, in a block in which none was found."""
    inner = getattr(block, "original_component", None)
    children = [name for owner in (block, inner) if owner is not None for name, _ in owner.named_children()]
    return next((name for name in children if any(word in name for word in ("mlp", "moe", "ffn", "feed", "fc"))), None)


def _architecture(model: Model) -> str:
    named = getattr(model.cfg, "architecture", None) or getattr(model.cfg, "original_architecture", None)
    return str(named or type(model).__name__)


def parameters_digest(model: Model) -> str:
    """SHA-256 over all parameters and buffers of a model, by the names TransformerLens gives them.

    It differs between raw and processed weights, and between a TransformerBridge and a HookedTransformer.
    """
    loaded: dict[str, Tensor] = {}
    digests = {"host": type(model).__name__}
    for prefix, module in [part for root in _roots(model) for part in root.named_modules()]:
        if any(tensor.is_meta for tensor in _own_tensors(prefix, module).values()):
            with weights_loaded(module):
                digests |= tensor_digests(_own_tensors(prefix, module))
        else:
            loaded |= _own_tensors(prefix, module)
    return joint_digest(digests | tensor_digests(loaded))


def _own_tensors(prefix: str, module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module, not of the modules inside it."""
    return dict([*module.named_parameters(prefix, recurse=False), *module.named_buffers(prefix, recurse=False)])


class _Reader:
    """Reads tensors of one model onto one device as float32."""

    def __init__(self, model: Model, device: str | torch.device | None) -> None:
        self.model = model
        embedding = model.embed.W_E
        if not embedding.is_floating_point() or embedding.dtype.itemsize < 2:
            raise UnsupportedModelError(
                f"The weights are stored as {embedding.dtype}, a quantised type. Load the model in "
                "float32, bfloat16 or float16."
            )
        self.dtype, self.d_model = embedding.dtype, embedding.shape[1]
        # A copy: an embedding that is offloaded leaves memory after its own forward pass.
        self.sample = embedding[:8].detach().clone()
        self.device = torch.device(device) if device is not None else embedding.device
        self.score_factor = 1.0

    def fields(self) -> dict[str, Any]:
        model, cfg = self.model, self.model.cfg
        with_heads = layers_with_heads(model)
        self.require_even_heads(with_heads)
        self.require_heads(with_heads[0])
        first, last = self.layer(with_heads[0]), self.layer(with_heads[-1])
        self.require_whole(first)
        W_E = self.stored(model.embed.W_E)
        W_U = self.stored(model.unembed.W_U.T)
        check_finite(W_E, "The embedding W_E")
        check_finite(W_U, "The unembedding W_U")
        ln_final = self.norm(getattr(model, "ln_final", None))
        seen = forward_pass(model, sorted({0, first.layer, last.layer, len(model.blocks) - 1}))
        self.require_same_attention(seen)
        embed_scale, embed_norm = self.embedding(seen, W_E)
        residual_scale = self.residual_scale(first, seen)
        self.score_factor = self.measured_score_factor(first, seen)
        ln2, mlp, ln2_post, refusal = self.first_mlp(seen, residual_scale)
        return {
            "model_name": str(cfg.model_name),
            "architecture": _architecture(model),
            "n_layers": len(model.blocks),
            "n_heads": first.W_Q.shape[0],
            "n_kv_heads": first.W_V.shape[0],
            "d_model": first.W_Q.shape[1],
            "d_head": first.W_V.shape[2],
            "basis": self.basis(ln_final, W_U),
            "W_E": W_E,
            "W_U": W_U,
            "embed_scale": embed_scale,
            "embed_norm": embed_norm,
            "residual_scale": residual_scale,
            "logit_scale": self.logit_scale(W_U, ln_final, seen),
            "moved_biases": self.moved_biases(first),
            "ln_final": ln_final,
            "ln2": ln2,
            "mlp": mlp,
            "ln2_post": ln2_post,
            "mlp_refusal": refusal,
            "read_layer": self.layer,
            "mixers": {
                layer: _mixer(block) for layer, block in enumerate(model.blocks) if layer not in set(with_heads)
            },
            "gated": mixing_difference(first, self.here(seen, first.layer))[1] == GATED,
            "tokenizer": getattr(model, "tokenizer", None),
            "model": model,
        }

    def require_even_heads(self, layers: list[int]) -> None:
        """Refuse layers whose heads differ in number or width from those of the others."""
        for name in ("q", "v"):
            parts = {layer: getattr(self.model.blocks[layer].attn, name, None) for layer in layers}
            stored = {layer: getattr(part, "weight", None) for layer, part in parts.items()}
            shapes = {layer: list(getattr(weight, "shape", ())) for layer, weight in stored.items()}
            first = layers[0]
            other = next((layer for layer in layers if shapes[layer] != shapes[first]), None)
            if other is not None:
                raise UnsupportedModelError(
                    f"{_architecture(self.model)}: the heads of layer {other} differ from those of layer {first} in "
                    f"number or width (W_{name.upper()} is stored as {shapes[other]} there and as {shapes[first]} "
                    "here). Head maps need the same heads in every layer that has any, and TransformerLens does not "
                    "split others into heads. Use another model of this family."
                )

    def require_heads(self, layer: int) -> None:
        """Refuse latent attention, and embeddings of another width than the stream."""
        attn, name = self.model.blocks[layer].attn, _architecture(self.model)
        if type(attn).__name__.startswith("MLA"):
            raise UnsupportedModelError(
                f"{name} has latent attention: its queries, keys and values come from compressed vectors that all "
                "heads share. Head maps need W_Q, W_K, W_V and W_O of each head. Use a model with plain or grouped "
                "heads."
            )
        with weights_loaded(attn):
            widths = (self.d_model, attn.W_Q.shape[1], self.model.unembed.W_U.shape[0])
        if len(set(widths)) > 1:
            raise UnsupportedModelError(
                f"{name} has embeddings of width {widths[0]}, a stream of width {widths[1]} and an unembedding of "
                f"width {widths[2]}, with projections in between. Head maps need one width. Use another model of this "
                "family."
            )

    def require_whole(self, layer: LayerWeights) -> None:
        """Refuse weights whose processing changed what the model computes, so that nothing is left to compare with."""
        attn = self.model.blocks[layer.layer].attn
        reasons = {
            "learned sinks, so its attention does not sum to one": _inner(attn, "sinks") is not None,
            "a norm before W_O": layer.z_norm is not None,
            # TransformerLens 4.3 takes its fused projection apart in the order of other Falcon models.
            "queries, keys and values in one matrix, group by group": bool(
                getattr(self.config, "new_decoder_architecture", False)
            ),
        }
        for what, found in reasons.items():
            if self.processed and found:
                raise WeightBasisError(
                    f"The weights of {_architecture(self.model)} were processed, and it has {what}: processing then "
                    "changes what the model computes. Load the model without processing "
                    "(TransformerBridge.boot_transformers(...) without enable_compatibility_mode())."
                )

    def require_same_attention(self, seen: ForwardPass) -> None:
        """Refuse a bridge whose attention is not that of the transformers module inside it.

        Bridges take fused projections apart and compute attention anew. Processing leaves the module inside as it was,
        so processed weights cannot be compared with it.
        """
        for layer, (given, named) in seen.calls.items():
            inner = getattr(self.model.blocks[layer].attn, "original_component", None)
            theirs = seen.layers[layer].get("attn_result")
            if inner is None or self.processed or theirs is None:
                continue
            # The cache of the first call would let these tokens see themselves twice.
            named = {name: None if name in _CACHES else value for name, value in named.items()}
            with weights_loaded(inner):
                own = inner(*given, **named)
            difference = self.difference((own[0] if isinstance(own, tuple) else own).float(), theirs)
            if difference > self.tolerance:
                raise UnsupportedModelError(
                    f"{_architecture(self.model)}: the attention of layer {layer} in TransformerLens differs from that "
                    f"of the transformers model inside it by {difference:.2g} of the largest value, so nothing it "
                    "computes there is the model's. Use another version of TransformerLens, or another model."
                )

    @property
    def config(self) -> Any:
        """The configuration of the transformers model inside a bridge."""
        return getattr(getattr(self.model, "original_model", None), "config", None)

    @property
    def processed(self) -> bool:
        """Whether the host says that it processed the weights."""
        norm_type = str(getattr(self.model.cfg, "normalization_type", ""))
        return norm_type.endswith("Pre") or bool(getattr(self.model, "_weights_processed", False))

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
                f"{_architecture(self.model)} has no {names[-1]} in {type(module).__name__}; "
                "its attention is not made of W_Q, W_K, W_V and W_O."
            )
        return value

    def layer(self, layer: int) -> LayerWeights:
        block = self.model.blocks[layer]
        attn = block.attn
        with evaluating(block), weights_loaded(block):
            return LayerWeights(
                layer=layer,
                W_Q=self.required(attn, "W_Q"),
                # HookedTransformer expands grouped heads in W_K and keeps the grouped ones in _W_K.
                W_K=self.required(attn, "_W_K", "W_K"),
                W_V=self.required(attn, "_W_V", "W_V"),
                W_O=self.required(attn, "W_O"),
                score_scale=self.score_scale(attn, layer),
                b_Q=self.tensor(attn, "b_Q"),
                b_K=self.tensor(attn, "_b_K", "b_K"),
                b_V=self.tensor(attn, "_b_V", "b_V"),
                ln1=self.norm(getattr(block, "ln1", None)),
                ln1_post=self.norm(getattr(block, "ln1_post", None)),
                q_norm=self.head_norm(attn, "q_norm", attn.W_Q),
                k_norm=self.head_norm(attn, "k_norm", attn.W_K),
                v_norm=self.head_norm(attn, "v_norm", attn.W_V),
                z_norm=self.norm(_inner(attn, "attn_sub_norm"), attn.W_O.shape[0] * attn.W_O.shape[1]),
                clip=self.clip(attn),
            )

    def clip(self, attn: Any) -> float | None:
        """The largest queries, keys and values a model allows, if it says so."""
        limit = getattr(_inner(attn, "config"), "clip_qkv", _inner(attn, "clip_qkv"))
        return float(limit) if isinstance(limit, int | float) else None

    def head_norm(self, attn: Any, name: str, weight: Tensor) -> Norm | None:
        """A norm of queries, keys or values: one for all heads, one for each, or one over all of them together."""
        module = getattr(attn, name, None) or _inner(attn, name)
        if module is None and name != "v_norm":
            # Llama 4 has one without weights for both.
            module = _inner(attn, "qk_norm")
        if module is None:
            return None
        n_heads, width = weight.shape[0], weight.shape[-1]
        shapes = [tuple(value.shape) for name, value in module.named_parameters() if name.endswith("weight")]
        sizes = {math.prod(shape) for shape in shapes}
        if n_heads > 1 and (shapes == [(n_heads, width)] or shapes == [(width,)] * n_heads):
            return self.measured_by_head(module, n_heads, width)
        return self.norm(module, n_heads * width if sizes == {n_heads * width} else width)

    def measured_by_head(self, module: Any, n_heads: int, width: int) -> Norm:
        """A norm with a weight for each head; it is given all heads of a token at once, in one of two orders."""
        stored = {
            kind: [parameter for name, parameter in module.named_parameters() if name.endswith(kind)]
            for kind in ("weight", "bias")
        }
        weights, biases = (
            torch.stack(every) if len(every) == n_heads else every[0] if every else None for every in stored.values()
        )
        assert weights is not None
        probe = _probe(width, weights.device)
        inner = getattr(module, "original_component", module)
        results = []
        for x in (probe, -probe, probe + 0.5):
            heads = x.to(weights.dtype).expand(1, n_heads, 1, width)
            # Modules that hold one norm for each head expect [batch, head, pos, width], a weight by head the reverse.
            together = any(parameter.ndim == 2 for parameter in module.parameters())
            output = inner(heads.transpose(1, 2)).transpose(1, 2) if together else inner(heads)
            results.append(output.detach()[0, :, 0].float())
        up, down, shifted = results
        eps = self.eps(module)
        weight = (up - down) / 2 * torch.sqrt(probe.square().mean() + eps) / probe
        bias = (up + down) / 2
        centres = bool(torch.allclose(shifted, up, rtol=2e-2, atol=1e-3 * float(up.abs().max())))
        weight = _exact(weight, weights)
        bias = torch.zeros_like(bias) if _is_rounding(bias, up) else _exact(bias, biases, up)
        return Norm(centres, weight.to(self.device), bias.to(self.device), eps)

    def score_scale(self, attn: Any, layer: int) -> float:
        """The factor of attention scores (1 / sqrt(d_head) unless the model has another)."""
        return self.stated_scale(attn, layer) * self.score_factor

    def stated_scale(self, attn: Any, layer: int) -> float:
        own = _inner(attn, "scaling")
        if isinstance(own, int | float):
            return float(own)
        # A bridge answers with attributes of the module inside it, where the name may mean something else (Llama 4).
        divisor = getattr(attn, "attn_scale", None) if getattr(attn, "original_component", None) is None else None
        if isinstance(divisor, int | float) and divisor > 0:
            return 1.0 / float(divisor)
        scale = 1.0 / math.sqrt(attn.W_Q.shape[-1])
        if getattr(self.model.cfg, "scale_attn_by_inverse_layer_idx", False):
            scale /= layer + 1
        return scale

    def norm(self, module: Any, width: int | None = None) -> Norm | None:
        """Measure a norm: two opposite probes separate weight from bias, a shifted one shows centring."""
        if module is None or isinstance(getattr(module, "original_component", None), torch.nn.Identity):
            return None
        with weights_loaded(module):
            return self.measured(module, width)

    def measured(self, module: Any, width: int | None) -> Norm:
        stored = getattr(module, "weight", getattr(module, "w", None))
        for parameter in module.parameters():
            check_finite(parameter.detach(), f"A norm ({getattr(module, 'name', None) or type(module).__name__})")
        like = stored if isinstance(stored, Tensor) else self.sample
        probe = _probe(width or self.d_model, like.device)
        up, down, shifted = (
            module(x.to(like.dtype)[None, None]).detach()[0, 0].float() for x in (probe, -probe, probe + 0.5)
        )
        eps = self.eps(module)
        weight = (up - down) / 2 * torch.sqrt(probe.square().mean() + eps) / probe
        bias = (up + down) / 2
        centres = bool(torch.allclose(shifted, up, rtol=2e-2, atol=1e-3 * float(up.abs().max())))
        weight = _exact(weight, stored)
        bias = torch.zeros_like(bias) if _is_rounding(bias, up) else _exact(bias, _bias_of(module), up)
        return Norm(centres, weight.to(self.device), bias.to(self.device), eps)

    def eps(self, module: Any) -> float:
        inner = getattr(module, "original_component", None)
        for owner in (inner, module):
            for name in ("eps", "variance_epsilon"):
                value = getattr(owner, name, None)
                if isinstance(value, int | float):
                    return float(value)
        return float(self.model.cfg.eps)

    def embed_scale(self) -> float:
        token = torch.tensor([[0, 1]], device=self.sample.device)
        embedded = in_float64(self.model.embed(token)).flatten()
        plain = in_float64(self.sample[:2]).flatten()
        scale = float(embedded @ plain / (plain @ plain).clamp_min(1e-30))
        # A measurement close to a factor that models use is that factor, in the precision of the stored type.
        known = (1.0, float(torch.tensor(self.d_model**0.5, dtype=self.dtype, device="cpu")))
        return next((factor for factor in known if abs(scale / factor - 1) < 1e-3), scale)

    def embedding(self, seen: ForwardPass, W_E: Tensor) -> tuple[float, Norm | None]:
        """Factor and norm of the embedding, by what enters layer 0; what does not fit is left to the self-check."""
        plain = W_E[seen.tokens.to(self.device)].to(torch.float32)
        scale = self.embed_scale()
        candidates: list[tuple[float, Norm | None]] = [(scale, None)]
        norm = self.norm(getattr(self.model, "embed_ln", None))
        if norm is not None:
            candidates.append((scale, norm))
        stream = seen.layers[0].get("resid_pre")
        if stream is not None and stream.shape == plain.shape:
            ours, theirs = (without_positions(self.model, seen, x.to(plain)) for x in (plain, stream))
            known = (self.d_model**0.5, *self.stated("embedding_multiplier"))
            candidates.append((_factor(ours, theirs, known), None))
        for centres in (False, True):
            ones = torch.ones(self.d_model, device=self.device)
            candidates.append((scale, Norm(centres, ones, torch.zeros_like(ones), float(self.model.cfg.eps))))
        for factor, norm in candidates:
            x = plain * factor
            if embedding_difference(self.model, seen, x if norm is None else norm(x)).fits(self.dtype):
                return factor, norm
        return candidates[0]

    @property
    def tolerance(self) -> float:
        return TOLERANCE.get(self.dtype, 1e-3)

    def residual_scale(self, layer: LayerWeights, seen: ForwardPass) -> float:
        """The factor of what attention adds to the stream."""
        here = seen.layers[layer.layer]
        if not {"z", "attn_out"} <= set(here):
            return 1.0
        z, theirs = (here[name].to(self.device, torch.float32) for name in ("z", "attn_out"))
        ours = attention_output(layer, z, output_bias(self.model.blocks[layer.layer]))
        return self.fitting_factor(ours, theirs, "residual_multiplier")

    def logit_scale(self, W_U: Tensor, ln_final: Norm | None, seen: ForwardPass) -> float:
        """The factor of the logits after the unembedding."""
        x = seen.layers[len(self.model.blocks) - 1].get("resid_post")
        if x is None or seen.logits.shape[-1] != W_U.shape[0]:
            return 1.0
        columns = logit_columns(W_U.shape[0], self.device)
        ours, bias = sampled_logits(W_U, ln_final, self.model, x.to(self.device, torch.float32), columns)
        theirs = seen.logits.to(self.device, torch.float32)[..., columns]
        cap = logit_cap(self.model)
        if cap is not None and float(theirs.abs().max()) < cap:
            uncapped = cap * torch.atanh(theirs / cap)
            if self.difference(ours, theirs) > self.tolerance:
                theirs = uncapped
        theirs = theirs if bias is None else theirs - bias
        return self.fitting_factor(ours, theirs, "logit_scale", "logits_scaling")

    def here(self, seen: ForwardPass, layer: int) -> dict[str, Tensor]:
        """What a layer computed, as float32 where weights are."""
        return {name: value.to(self.device, torch.float32) for name, value in seen.layers[layer].items()}

    def fitting_factor(self, ours: Tensor, theirs: Tensor, name: str, divisor: str = "") -> float:
        """1, or another factor if only that makes two tensors equal; a configured one in its exact value."""
        if compared(ours, theirs).fits(self.dtype):
            return 1.0
        known = (*self.stated(name), *(1 / stated for stated in self.stated(divisor)))
        factor = _factor(ours, theirs, known, 1e-3 if self.dtype.itemsize > 2 else 1e-2)
        return factor if compared(ours * factor, theirs).fits(self.dtype) else 1.0

    def stated(self, name: str) -> tuple[float, ...]:
        """A factor that the model's configuration states, if it does."""
        value = getattr(self.config, name, None)
        return (float(value),) if isinstance(value, int | float) and value else ()

    def measured_score_factor(self, layer: LayerWeights, seen: ForwardPass) -> float:
        """What scores must be multiplied by to be the model's, if nothing stated says so."""
        here = self.here(seen, layer.layer)
        block = self.model.blocks[layer.layer]
        if "attn_in" not in here:
            return 1.0
        difference, factor = score_difference(self.model, block, layer, here, seen.at_zero)
        if difference.fits(self.dtype) or factor <= 0:
            return 1.0
        # GPT-Neo does not divide by sqrt(d_head).
        root = layer.W_Q.shape[-1] ** 0.5
        factor = root if abs(factor / root - 1) < 1e-2 else factor
        scaled = replace(layer, score_scale=layer.score_scale * factor)
        difference, _ = score_difference(self.model, block, scaled, here, seen.at_zero)
        return factor if difference.fits(self.dtype) else 1.0

    def moved_biases(self, layer: LayerWeights) -> bool:
        """Whether value biases were moved into the output bias: weights were processed, and values could have one."""
        if not self.processed or layer.b_V is not None:
            return False
        block = self.model.blocks[layer.layer]
        moved = output_bias(block)
        # A bias of values that is all zero now (it may have come from a LayerNorm), and one of the output that is not.
        return self.tensor(block.attn, "_b_V", "b_V") is not None and moved is not None and bool(moved.any())

    def first_mlp(
        self, seen: ForwardPass, residual_scale: float
    ) -> tuple[Norm | None, MLP | None, Norm | None, str | None]:
        """Norm, MLP and norm after the MLP of layer 0, and the reason if the MLP cannot be used."""
        with weights_loaded(self.model.blocks[0]):
            return self.mlp_of(self.model.blocks[0], seen, residual_scale)

    def mlp_of(
        self, block: Any, seen: ForwardPass, residual_scale: float
    ) -> tuple[Norm | None, MLP | None, Norm | None, str | None]:
        module = mlp_module(block)
        if module is None:
            unread = _unread_mlp(block)
            if unread is None:
                return None, None, None, None
            ln2, ln2_post = (self.norm(getattr(block, name, None)) for name in ("ln2", "ln2_post"))
            return ln2, None, ln2_post, f"its first MLP ({unread}) has parts that are not known here"
        ln2_post = self.norm(getattr(block, "ln2_post", None))
        ln2 = self.norm(getattr(block, "ln2", None))
        if ln2 is None and ln2_post is None:
            # Parallel blocks with one norm (Phi, GPT-J) feed it to attention and MLP alike.
            ln2 = self.norm(getattr(block, "ln1", None))
        W_in, W_out, W_gate = (self.tensor(module, name, dtype=None) for name in ("W_in", "W_out", "W_gate"))
        stated = self.stated_activation(module)
        if W_in is None or W_out is None or W_in.ndim != 2:
            reason = f"its first MLP is a {type(module).__name__} (mixture of experts or unknown parts)"
            return ln2, None, ln2_post, reason
        b_in, b_gate = self.tensor(module, "b_in"), self.tensor(module, "b_gate")
        if W_gate is None and W_in.shape[1] == 2 * W_out.shape[0]:
            # Gate and up projection in one matrix (ModernBERT).
            W_gate, W_in = W_in.chunk(2, 1)
            b_gate, b_in = (None, None) if b_in is None else b_in.chunk(2)
        here = self.here(seen, 0)
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
            )
            for name, value in vars(mlp).items():
                if isinstance(value, Tensor):
                    check_finite(value, f"{name} of the first MLP")
            if mlp_difference(mlp, ln2, ln2_post, residual_scale, here).fits(self.dtype):
                return ln2, mlp, ln2_post, None
        if stated not in ACTIVATIONS:
            return ln2, None, ln2_post, f"its activation function {stated!r} is not known here"
        return ln2, None, ln2_post, "its first MLP does not compute act(x W_in) W_out"

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

    def difference(self, ours: Tensor, theirs: Tensor) -> float:
        theirs = theirs.detach().to(ours.device, torch.float32)
        return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))

    def basis(self, ln_final: Norm | None, W_U: Tensor) -> Basis:
        norms = [ln_final, *(self.norm(getattr(block, "ln1", None)) for block in self.model.blocks)]
        return basis_of(norms, W_U, self.processed)


def _inner(attn: Any, name: str) -> Any:
    """A part of the transformers module inside an attention bridge."""
    return getattr(getattr(attn, "original_component", None), name, None)


def _factor(ours: Tensor, theirs: Tensor, known: tuple[float, ...], rounding: float = 1e-3) -> float:
    """The factor that makes one tensor most like another; a known one in its exact value."""
    one, other = in_float64(ours).flatten(), in_float64(theirs).flatten()
    factor = float(one @ other / (one @ one).clamp_min(1e-30))
    return next((exact for exact in known if abs(factor / exact - 1) < rounding), factor)


def _probe(width: int, device: torch.device) -> Tensor:
    """A vector without zeros whose mean is zero: 1, -1, 1, -1, ... (odd widths end in 1, 1, -2)."""
    probe = torch.ones(width, device=device)
    probe[1::2] = -1
    if width % 2:
        probe[-3:] = torch.tensor([1.0, 1.0, -2.0], device=device)
    return probe


def _bias_of(module: Any) -> Any:
    inner = getattr(module, "original_component", None)
    return getattr(inner if inner is not None else module, "bias", getattr(module, "b", None))


def _is_rounding(bias: Tensor, output: Tensor) -> bool:
    return float(bias.abs().max()) <= 1e-6 * float(output.abs().max())


def _exact(measured: Tensor, stored: Any, output: Tensor | None = None) -> Tensor:
    """The stored parameter, 1 + it, or ones, whichever was measured; without the rounding of the measurement.

    A bias is measured as a difference of outputs, whose size then decides how much it may have been rounded.
    """
    candidates = [torch.ones_like(measured)]
    if isinstance(stored, Tensor) and stored.shape == measured.shape:
        exact = stored.detach().float()
        candidates += [exact, 1.0 + exact]
    best = min(candidates, key=lambda candidate: float((candidate - measured).abs().max()))
    size = float((measured if output is None else output).abs().max())
    agrees = float((best - measured).abs().max()) <= 2e-2 * size
    return best if agrees else measured
