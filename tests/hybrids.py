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
    """A hybrid architecture: its configuration, names of its modules, what mixes tokens without heads, its factors.

    ``after`` is the norm after attention.
    """

    config: str
    changes: dict[str, Any]
    names: tuple[str, ...]
    mixer: str
    gated: bool = False
    after: str | None = None
    embed_factor: float = 1.0
    residual_factor: float = 1.0
    score_factor: float = D_HEAD**-0.5
    logit_factor: float = 1.0


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
    "granite": Kind(
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention"] * 2,
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
            "logits_scaling": 4.0,
        }
        | _MAMBA,
        ("input_layernorm", "post_attention_layernorm", "shared_mlp", "o_proj", "norm"),
        "Mamba",
        embed_factor=3.0,
        residual_factor=0.5,
        score_factor=0.3,
        logit_factor=0.25,
    ),
    "olmo_hybrid": Kind("OlmoHybridConfig", _LINEAR, _LIKE_LLAMA, "linear attention", after="post_attention_layernorm"),
    "bamba": Kind("BambaConfig", _MAMBA | {"attn_layer_indices": [1, 3], "mamba_n_groups": 1}, _LIKE_JAMBA, "Mamba"),
}


if TL_MAJOR < 4:
    # TransformerLens 3 cannot tell their queries from their gates, and does not show the norm after attention.
    KINDS = {name: kind for name, kind in KINDS.items() if not kind.gated and kind.after is None}


@dataclass(frozen=True)
class Refused:
    """A hybrid architecture whose heads cannot be mapped, and what is said about it."""

    config: str
    changes: dict[str, Any]
    sentence: str


_NOT_SHOWN = (
    r"has attention heads, but TransformerLens shows its layers as a whole. Open it with tl_headmaps.load_model"
)

REFUSED = {
    "nemotron_h": Refused(
        "NemotronHConfig",
        {"num_hidden_layers": None, "layers_block_type": ["mamba", "attention", "mlp", "attention"]}
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8},
        _NOT_SHOWN,
    ),
    "recurrent_gemma": Refused(
        "RecurrentGemmaConfig",
        {"lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
        _NOT_SHOWN,
    ),
    "zamba2": Refused(
        "Zamba2Config",
        {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8, "mamba_headdim": 16, "n_mamba_heads": 4}
        | {"mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1},
        "has heads that read two vectors side by side and write into an MLP, not into the stream",
    ),
}


def refused_source(kind: str) -> Any:
    """A transformers model of one of these."""
    refused = REFUSED[kind]
    return _source(refused.config, {n: v for n, v in (_SIZES | refused.changes).items() if v is not None})


def hybrid_source(kind: str, **changes: Any) -> Any:
    """A transformers model whose every parameter comes from one seeded generator."""
    return _source(KINDS[kind].config, _SIZES | KINDS[kind].changes | changes)


def _source(name: str, settings: dict[str, Any]) -> Any:
    import transformers

    config = getattr(transformers, name)(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # vectors keep what they begin with, which may be random
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
        self.embed = self.source.get_input_embeddings().weight * self.kind.embed_factor
        self.unembed = self.source.get_output_embeddings().weight
        self.final = _factor(getattr(self.source.model, final))

    def attention(self, layer: int) -> Any:
        return self.layers[layer].self_attn

    def vectors(self, layer: int) -> Tensor:
        """What a layer above 0 reads of every token without context, after its ln1."""
        first = self.layers[0]
        mlp = getattr(first, self.mlp)(getattr(first, self.ln2)(self.embed)[None])
        x = self.embed + self.kind.residual_factor * (mlp[0] if isinstance(mlp, tuple) else mlp)[0]
        # OLMo's layers of attention have a norm after it instead of one before.
        return getattr(self.layers[layer], self.ln1, lambda x: x)(x)

    def written(self, layer: int, head: int, z: Tensor) -> Tensor:
        """What a head's z [..., d_head] adds to the logits' side of the stream, up to the scale of norms after it."""
        alone = z.new_zeros(*z.shape[:-1], N_HEADS, D_HEAD)
        alone[..., head, :] = z
        added = getattr(self.attention(layer), self.out)(alone.flatten(-2)) * self.kind.residual_factor
        return added if self.kind.after is None else added * _factor(getattr(self.layers[layer], self.kind.after))

    def values(self, layer: int, read: Tensor) -> Tensor:
        """Values of what a layer reads, [..., kv_head, d_head]."""
        return self.attention(layer).v_proj(read).unflatten(-1, (N_GROUPS, D_HEAD))

    def ov(self, layer: int, head: int, read: Tensor) -> Tensor:
        """A head's OV map of what it reads, centred over the vocabulary."""
        values = self.values(layer, read)[..., head // (N_HEADS // N_GROUPS), :]
        readout = (self.unembed - self.unembed.mean(0)).T * self.kind.logit_factor
        return self.written(layer, head, values) * self.final @ readout

    def qk(self, layer: int, head: int) -> Tensor:
        """A head's QK map over the vocabulary, without positions."""
        attention, read = self.attention(layer), self.vectors(layer)
        q, k = attention.q_proj(read), attention.k_proj(read)
        names = ("q_norm", "k_norm") if hasattr(attention, "q_norm") else ("q_layernorm", "k_layernorm")
        norms = [getattr(attention, name, None) for name in names]
        if norms[0] is not None and len(norms[0].weight) == q.shape[-1]:
            # One norm over all heads.
            q, k, norms = norms[0](q), norms[1](k), [None, None]
        # Of a gated model the second half of each head's queries is its gate.
        q = q.unflatten(-1, (N_HEADS, -1))[:, head, :D_HEAD]
        k = k.unflatten(-1, (N_GROUPS, D_HEAD))[:, head // (N_HEADS // N_GROUPS)]
        if norms[0] is not None:
            q, k = norms[0](q), norms[1](k)
        return q @ k.T * self.kind.score_factor

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
