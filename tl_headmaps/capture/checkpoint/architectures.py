"""Where each family of Hugging Face checkpoints keeps its tensors, and what its configuration means.

One entry per ``model_type``, for :mod:`.reader`. Names are relative to a layer or to the body of the model and lack
their ``.weight``; a part without a name here does not exist in that family. A bias is read wherever the checkpoint has
one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from ...core.errors import UnsupportedModelError

NormKind: TypeAlias = Literal["layer", "rms", "rms + 1"]
"""LayerNorm, RMSNorm, or an RMSNorm that multiplies by ``1 + w`` (Gemma)."""

Fused: TypeAlias = Literal["thirds", "by head"]
"""How one tensor contains queries, keys and values: one after the other (GPT-2), or interleaved by head (NeoX)."""


@dataclass(frozen=True)
class Architecture:
    """One family of checkpoints.

    Attributes:
        bodies: Possible prefixes of the model's body, tried in this order (GPT-2 exists with and without one).
        layer: Prefix of a layer within the body.
        shared: Names of ``embed`` and ``ln_final`` within the body.
        parts: Names within a layer: ``q k v o`` or ``qkv o``, ``ln1 ln2 ln1_post ln2_post``, ``q_norm k_norm``, and
            ``mlp_in mlp_gate mlp_out``.
        unembed: Possible names of the unembedding, outside the body.
        norm: What the norms compute.
        eps: Configuration field of the norms' epsilon.
        activation: Configuration fields of the MLP's activation; the first that is set counts.
        inputs_first: Matrices are stored [in, out] (GPT-2's Conv1D) instead of [out, in].
        fused: How ``qkv`` is split, if it is one tensor.
        embeds_scaled: Embeddings are multiplied by sqrt(d_model).
        ignored: Tensors within a layer that are not weights (masks and rotary tables of old files).
        refused: Configuration fields that change the computation when set, with what they do.
        defaults: Defaults of the family's configuration class, for fields that a file leaves out.
        aliases: The family's own names of configuration fields.
    """

    bodies: tuple[str, ...]
    layer: str
    shared: Mapping[str, str]
    parts: Mapping[str, str]
    unembed: tuple[str, ...] = ("lm_head",)
    norm: NormKind = "rms"
    eps: str = "rms_norm_eps"
    activation: tuple[str, ...] = ("hidden_act",)
    inputs_first: bool = False
    fused: Fused | None = None
    embeds_scaled: bool = False
    ignored: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)
    refused: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


_LLAMA = Architecture(
    bodies=("model.",),
    layer="layers.{layer}.",
    shared={"embed": "embed_tokens", "ln_final": "norm"},
    parts={
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "ln1": "input_layernorm",
        "ln2": "post_attention_layernorm",
        "mlp_in": "mlp.up_proj",
        "mlp_gate": "mlp.gate_proj",
        "mlp_out": "mlp.down_proj",
    },
    defaults={"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False},
)
_QK_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_GEMMA2 = replace(
    _LLAMA,
    parts={
        **_LLAMA.parts,
        "ln1_post": "post_attention_layernorm",
        "ln2": "pre_feedforward_layernorm",
        "ln2_post": "post_feedforward_layernorm",
    },
    norm="rms + 1",
    activation=("hidden_activation", "hidden_act"),
    embeds_scaled=True,
    defaults={
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
    },
)
_GEMMA3 = replace(
    _GEMMA2,
    parts={**_GEMMA2.parts, **_QK_NORMS},
    refused={"use_bidirectional_attention": "makes it an encoder"},
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, defaults={**_LLAMA.defaults, "num_key_value_heads": 8}),
    "qwen2": replace(_LLAMA, defaults={**_LLAMA.defaults, "num_key_value_heads": 32}),
    "qwen3": replace(
        _LLAMA,
        parts={**_LLAMA.parts, **_QK_NORMS},
        defaults={**_LLAMA.defaults, "num_key_value_heads": 32, "head_dim": 128},
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    # The text half of a model with vision; files from before transformers 4.52 have the two prefixes swapped.
    "gemma3": replace(
        _GEMMA3,
        bodies=("model.language_model.", "language_model.model."),
        unembed=("lm_head", "language_model.lm_head"),
    ),
    "gpt2": Architecture(
        bodies=("transformer.", ""),
        layer="h.{layer}.",
        shared={"embed": "wte", "ln_final": "ln_f"},
        parts={
            "qkv": "attn.c_attn",
            "o": "attn.c_proj",
            "ln1": "ln_1",
            "ln2": "ln_2",
            "mlp_in": "mlp.c_fc",
            "mlp_out": "mlp.c_proj",
        },
        norm="layer",
        eps="layer_norm_epsilon",
        activation=("activation_function",),
        inputs_first=True,
        fused="thirds",
        ignored=("attn.bias", "attn.masked_bias"),
        refused={"add_cross_attention": "adds attention to an encoder"},
        defaults={"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True},
        aliases={"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "hidden_size": "n_embd"},
    ),
    "gpt_neox": Architecture(
        bodies=("gpt_neox.",),
        layer="layers.{layer}.",
        shared={"embed": "embed_in", "ln_final": "final_layer_norm"},
        parts={
            "qkv": "attention.query_key_value",
            "o": "attention.dense",
            "ln1": "input_layernorm",
            "ln2": "post_attention_layernorm",
            "mlp_in": "mlp.dense_h_to_4h",
            "mlp_out": "mlp.dense_4h_to_h",
        },
        unembed=("embed_out", "lm_head"),
        norm="layer",
        eps="layer_norm_eps",
        fused="by head",
        ignored=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
        defaults={"layer_norm_eps": 1e-5, "hidden_act": "gelu", "tie_word_embeddings": False},
    ),
    "phi": Architecture(
        bodies=("model.",),
        layer="layers.{layer}.",
        shared={"embed": "embed_tokens", "ln_final": "final_layernorm"},
        # One norm feeds attention and MLP alike.
        parts={
            "q": "self_attn.q_proj",
            "k": "self_attn.k_proj",
            "v": "self_attn.v_proj",
            "o": "self_attn.dense",
            "ln1": "input_layernorm",
            "ln2": "input_layernorm",
            "mlp_in": "mlp.fc1",
            "mlp_out": "mlp.fc2",
        },
        norm="layer",
        eps="layer_norm_eps",
        refused={"qk_layernorm": "normalises queries and keys with LayerNorms of their own"},
        defaults={"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "tie_word_embeddings": False},
    ),
}


def architecture_of(model_type: object, where: str) -> Architecture:
    """The entry of a ``model_type``; raises with the list of known types."""
    known = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if known is None:
        raise UnsupportedModelError(
            f"{where} is a checkpoint of type {model_type!r}. Weights can be read from checkpoints of type "
            f"{', '.join(ARCHITECTURES)}. Load other models with TransformerLens and pass the model itself."
        )
    return known
