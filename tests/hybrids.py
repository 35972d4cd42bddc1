"""Small hybrid models: attention in layers 1 and 3 of four, something else in the others; and what their heads compute.

The reference calls the modules of the transformers model itself, one head at a time. Nothing here uses tl_headmaps.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from planted import TL_MAJOR, hosted
from torch import Tensor

N_VOCAB, N_LAYERS, N_HEADS, N_GROUPS, D_HEAD = 61, 4, 4, 2, 8
WITH_HEADS = (1, 3)

_SIZES: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "num_key_value_heads": N_GROUPS,
    "head_dim": D_HEAD,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
_LIKE_LLAMA = ("input_layernorm", "post_attention_layernorm", "mlp", "o_proj", "norm")
_LIKE_JAMBA = ("input_layernorm", "pre_ff_layernorm", "feed_forward", "o_proj", "final_layernorm")


@dataclass(frozen=True)
class Kind:
    """A hybrid architecture: its configuration, names of its modules, and what mixes tokens without heads."""

    config: str
    changes: dict[str, Any]
    names: tuple[str, ...]
    mixer: str
    gated: bool = False


KINDS = {
    "lfm2": Kind(
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
        ("operator_norm", "ffn_norm", "feed_forward", "out_proj", "embedding_norm"),
        "convolution",
    ),
    "qwen3_5": Kind("Qwen3_5TextConfig", _LINEAR, _LIKE_LLAMA, "linear attention", gated=True),
    "qwen3_next": Kind(
        "Qwen3NextConfig", _LINEAR | {"mlp_only_layers": [0, 1, 2, 3]}, _LIKE_LLAMA, "linear attention", gated=True
    ),
    "jamba": Kind(
        "JambaConfig",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
        | {"use_mamba_kernels": False},
        _LIKE_JAMBA,
        "Mamba",
    ),
    "bamba": Kind("BambaConfig", _MAMBA | {"attn_layer_indices": [1, 3], "mamba_n_groups": 1}, _LIKE_JAMBA, "Mamba"),
}


if TL_MAJOR < 4:
    # TransformerLens 3 boots them, and cannot tell their queries from their gates.
    KINDS = {name: kind for name, kind in KINDS.items() if not kind.gated}


def hybrid_source(kind: str) -> Any:
    """A transformers model whose every parameter comes from one seeded generator."""
    import transformers

    config = getattr(transformers, KINDS[kind].config)(**_SIZES | KINDS[kind].changes)
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.2 * noise if parameter.ndim == 1 else 0.3 * noise)
    return model


@cache
def hybrid_model(kind: str) -> Any:
    """The same in TransformerLens, for tests that only read."""
    return hosted(hybrid_source(kind), kind)


class Reference:
    """What the heads of a transformers model compute, by its own modules."""

    def __init__(self, kind: str) -> None:
        self.kind, self.source = KINDS[kind], hybrid_source(kind)
        self.ln1, self.ln2, self.mlp, self.out, final = self.kind.names
        self.layers = self.source.model.layers
        self.embed = self.source.get_input_embeddings().weight
        self.unembed = self.source.get_output_embeddings().weight
        self.final = _factor(getattr(self.source.model, final))

    def attention(self, layer: int) -> Any:
        return self.layers[layer].self_attn

    def vectors(self, layer: int) -> Tensor:
        """What a layer above 0 reads of every token without context, after its ln1."""
        first = self.layers[0]
        mlp = getattr(first, self.mlp)(getattr(first, self.ln2)(self.embed)[None])
        x = self.embed + (mlp[0] if isinstance(mlp, tuple) else mlp)[0]
        return getattr(self.layers[layer], self.ln1)(x)

    def written(self, layer: int, head: int, z: Tensor) -> Tensor:
        """What a head's z [..., d_head] adds to the stream."""
        alone = z.new_zeros(*z.shape[:-1], N_HEADS, D_HEAD)
        alone[..., head, :] = z
        return getattr(self.attention(layer), self.out)(alone.flatten(-2))

    def values(self, layer: int, read: Tensor) -> Tensor:
        """Values of what a layer reads, [..., kv_head, d_head]."""
        return self.attention(layer).v_proj(read).unflatten(-1, (N_GROUPS, D_HEAD))

    def ov(self, layer: int, head: int, read: Tensor) -> Tensor:
        """A head's OV map of what it reads, centred over the vocabulary."""
        values = self.values(layer, read)[..., head // (N_HEADS // N_GROUPS), :]
        return self.written(layer, head, values) * self.final @ (self.unembed - self.unembed.mean(0)).T

    def qk(self, layer: int, head: int) -> Tensor:
        """A head's QK map over the vocabulary, without positions."""
        attention, read = self.attention(layer), self.vectors(layer)
        # Of a gated model the second half of each head's queries is its gate.
        q = attention.q_proj(read).unflatten(-1, (N_HEADS, -1))[:, head, :D_HEAD]
        k = attention.k_proj(read).unflatten(-1, (N_GROUPS, D_HEAD))[:, head // (N_HEADS // N_GROUPS)]
        for norms in (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm")):
            if hasattr(attention, norms[0]):
                q, k = getattr(attention, norms[0])(q), getattr(attention, norms[1])(k)
        return q @ k.T * D_HEAD**-0.5

    def run(self, ids: list[int]) -> tuple[Tensor, dict[tuple[str, int], Tensor]]:
        """Logits of a prompt, and by layer: ``pattern``, ``v`` and ``z`` of its heads, and its input, ``stream``."""
        seen: dict[tuple[str, int], Tensor] = {}
        handles = []
        for layer, block in enumerate(self.layers):

            def stream(module: Any, arguments: tuple[Any, ...], named: Any, layer: int = layer) -> None:
                seen["stream", layer] = (arguments or (named["hidden_states"],))[0][0]

            handles.append(block.register_forward_pre_hook(stream, with_kwargs=True))
            if layer not in WITH_HEADS:
                continue

            def kept(module: Any, arguments: Any, output: Any, layer: int = layer) -> None:
                seen["pattern", layer] = output[1][0]

            def z(module: Any, arguments: tuple[Any, ...], layer: int = layer) -> None:
                seen["z", layer] = arguments[0][0].unflatten(-1, (N_HEADS, D_HEAD))

            def v(module: Any, arguments: Any, output: Tensor, layer: int = layer) -> None:
                seen["v", layer] = output[0].unflatten(-1, (N_GROUPS, D_HEAD))

            attention = self.attention(layer)
            handles.append(attention.register_forward_hook(kept))
            handles.append(getattr(attention, self.out).register_forward_pre_hook(z))
            handles.append(attention.v_proj.register_forward_hook(v))
        try:
            logits = self.source(torch.tensor([ids]), use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        return logits, seen

    def next_without(self, ids: list[int], heads: list[tuple[int, int]]) -> int:
        """The most likely next token with some heads switched off at the last position."""
        handles = []
        for layer, head in heads:

            def off(module: Any, arguments: tuple[Any, ...], head: int = head) -> tuple[Any, ...]:
                z = arguments[0].unflatten(-1, (N_HEADS, D_HEAD)).clone()
                z[:, -1, head] = 0
                return (z.flatten(-2),)

            handles.append(getattr(self.attention(layer), self.out).register_forward_pre_hook(off))
        try:
            return int(self.source(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        finally:
            for handle in handles:
                handle.remove()


def _factor(norm: Any) -> Tensor:
    """What an RMSNorm multiplies by, measured."""
    width = norm.weight.shape[0]
    x = torch.linspace(0.5, 2, width)
    return norm(x[None])[0] / (x * torch.rsqrt(x.square().mean()))
