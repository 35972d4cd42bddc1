"""Where each family of Hugging Face checkpoints keeps its tensors, and what its configuration means.

One entry per ``model_type``, for :mod:`.reader`. Names are relative to a layer or to the body of the model and lack
their ``.weight``; a part without a name here does not exist in that family.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from ...core.errors import UnsupportedModelError

NormKind: TypeAlias = Literal["layer", "layer + 1", "rms", "rms + 1"]
"""LayerNorm or RMSNorm, multiplying by the weight or by ``1 + w`` (Nemotron, Gemma)."""

Fused: TypeAlias = Literal["in turn", "by group"]
"""How one tensor contains queries, keys and values: all of each in turn (GPT-2, Phi-3), or for every key/value head its
queries, its key and its value (NeoX, Falcon)."""


HeadNorms: TypeAlias = Literal["alike", "by head", "joint"]
"""Norms of queries and keys: one for every head, one for each, or one over all heads of a token together."""


@dataclass(frozen=True)
class Variant:
    """What is otherwise in a family where its configuration has certain values.

    Attributes:
        when: Values of configuration fields; all fields must have one of theirs.
        parts: As those of the family, which they replace.
        fixed: Configuration fields with the value that counts, whatever the file says.
    """

    when: Mapping[str, tuple[Any, ...]]
    parts: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Architecture:
    """One family of checkpoints.

    Attributes:
        bodies: Possible prefixes of the model's body, tried in this order (GPT-2 exists with and without one).
        layer: Prefix of a layer within the body.
        shared: Names of ``embed`` and ``ln_final`` within the body.
        parts: Names within a layer: ``q k v o`` or ``qkv o`` (``q_gate`` where one tensor is for each head its query
            and then the gate of what it mixes), ``ln1 ln2 ln1_post ln2_post``, ``q_norm k_norm``, and
            ``mlp_in mlp_gate mlp_out`` (``mlp_gate_in`` where one tensor is the gate and then the other).
        unembed: Possible names of the unembedding, outside the body.
        norm: What the norms compute.
        head_norms: How norms of queries and keys treat heads; ``{head}`` in their names stands for the head's number.
        eps: Configuration field of the norms' epsilon.
        activation: Configuration fields of the MLP's activation; the first that is set counts.
        activations: Activations that the family computes under another name than the configuration's.
        inputs_first: Matrices are stored [in, out] (GPT-2's Conv1D) instead of [out, in].
        fused: How ``qkv`` is split, if it is one tensor.
        embeds_scaled: Embeddings are multiplied by sqrt(d_model).
        factors: Configuration fields of the model's factors and the power of each that counts: ``score_scale``
            (1 / sqrt(d_head) without one), ``embed_scale``, ``residual_scale``, ``logit_scale``.
        mixers: Beginnings of the names, within a layer, of what mixes tokens without heads, and what it is called.
        experts: Beginnings of the names, within a layer, of a mixture of experts; a layer with any has no plain MLP.
        ignored: Tensors within a layer that are not weights (masks and rotary tables of old files).
        refused: Configuration fields that change the computation when set, with what they do.
        biases: Parts that have a bias: always (True), or if a configuration field is set (its name). Others have none.
        defaults: Defaults of the family's configuration class, for fields that a file leaves out.
        aliases: The family's own names of configuration fields.
        fixed: Configuration fields with the value that counts, whatever the file says.
        variants: What certain configurations change, applied in this order.
    """

    bodies: tuple[str, ...]
    layer: str
    shared: Mapping[str, str]
    parts: Mapping[str, str]
    unembed: tuple[str, ...] = ("lm_head",)
    norm: NormKind = "rms"
    head_norms: HeadNorms = "alike"
    eps: str = "rms_norm_eps"
    activation: tuple[str, ...] = ("hidden_act",)
    activations: Mapping[str, str] = field(default_factory=dict)
    inputs_first: bool = False
    fused: Fused | None = None
    embeds_scaled: bool = False
    factors: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    mixers: Mapping[str, str] = field(default_factory=dict)
    experts: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)
    refused: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str | bool] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[Variant, ...] = ()


def _like(base: Architecture, *, defaults: Mapping[str, Any] | None = None, **changes: Any) -> Architecture:
    """A family that differs from another in some entries, of its defaults only in those given."""
    return replace(base, defaults={**base.defaults, **(defaults or {})}, **changes)


def _under(prefix: str, **names: str) -> dict[str, str]:
    """Names of parts that begin alike."""
    return {part: prefix + name for part, name in names.items()}


_QKV = _under("self_attn.", q="q_proj", k="k_proj", v="v_proj", o="o_proj")
_NORMS = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}
_GATED = {"mlp_in": "mlp.up_proj", "mlp_gate": "mlp.gate_proj", "mlp_out": "mlp.down_proj"}
_FUSED_GATED = {"mlp_gate_in": "mlp.gate_up_proj", "mlp_out": "mlp.down_proj"}
_UNGATED = {"mlp_in": "mlp.up_proj", "mlp_out": "mlp.down_proj"}
_QK_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_POST_NORMS = {"ln1_post": "post_attention_layernorm", "ln2_post": "post_feedforward_layernorm"}
_MLP = ("mlp_in", "mlp_gate", "mlp_out")
_ATTENTION_BIASES: Mapping[str, str | bool] = dict.fromkeys("qkvo", "attention_bias")
_MLP_BIASES: Mapping[str, str | bool] = dict.fromkeys(_MLP, "mlp_bias")
_NORM_BIASES: Mapping[str, str | bool] = dict.fromkeys(("ln1", "ln2", "ln_final"), True)
_LLAMA = Architecture(
    bodies=("model.",),
    layer="layers.{layer}.",
    shared={"embed": "embed_tokens", "ln_final": "norm"},
    parts={**_QKV, **_NORMS, **_GATED},
    biases={**_ATTENTION_BIASES, **_MLP_BIASES},
    defaults={"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False},
)
_QWEN3 = _like(
    _LLAMA,
    parts={**_LLAMA.parts, **_QK_NORMS},
    biases=_ATTENTION_BIASES,
    defaults={"num_key_value_heads": 32, "head_dim": 128},
)
_EXPERTS = ("mlp.experts.", "mlp.gate.", "mlp.shared_expert.", "mlp.shared_experts.", "mlp.shared_expert_gate.")
_QWEN3_5 = _like(
    _QWEN3,
    bodies=("model.language_model.", "model."),
    parts={**_NORMS, **_GATED, **_QK_NORMS, "q_gate": "self_attn.q_proj", **{part: _QKV[part] for part in "kvo"}},
    norm="rms + 1",
    mixers={"linear_attn.": "linear attention"},
    biases={"q_gate": "attention_bias", **_ATTENTION_BIASES},
    defaults={"num_key_value_heads": 4, "head_dim": 256},
)
_GLM = _like(
    _LLAMA,
    parts={**_QKV, **_NORMS, **_FUSED_GATED},
    biases=dict.fromkeys("qkv", "attention_bias"),
    defaults={"rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
)
_OLMO2 = _like(
    _LLAMA,
    parts={**_QKV, **_POST_NORMS, **_QK_NORMS, **_GATED},
    head_norms="joint",
    biases=_ATTENTION_BIASES,
    defaults={"rms_norm_eps": 1e-5},
)
_COHERE = _like(
    _LLAMA,
    parts={**_QKV, "ln1": "input_layernorm", "ln2": "input_layernorm", **_GATED},
    norm="layer",
    eps="layer_norm_eps",
    head_norms="by head",
    factors={"logit_scale": ("logit_scale", 1.0)},
    biases=_ATTENTION_BIASES,
    defaults={"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "logit_scale": 0.0625},
)
_GRANITE = _like(
    _LLAMA,
    factors={
        "score_scale": ("attention_multiplier", 1.0),
        "embed_scale": ("embedding_multiplier", 1.0),
        "residual_scale": ("residual_multiplier", 1.0),
        "logit_scale": ("logits_scaling", -1.0),
    },
    defaults=dict.fromkeys(
        ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0
    ),
)
_BAMBA = _like(
    _LLAMA,
    shared={"embed": "embed_tokens", "ln_final": "final_layernorm"},
    parts={
        **_QKV,
        **_under("", ln1="input_layernorm", ln2="pre_ff_layernorm"),
        **_under("feed_forward.", mlp_in="up_proj", mlp_gate="gate_proj", mlp_out="down_proj"),
    },
    mixers={"mamba.": "Mamba"},
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8},
)
_GEMMA = _like(
    _LLAMA,
    norm="rms + 1",
    # Files of the first Gemma say gelu; the models were trained with its approximation.
    activations={"gelu": "gelu_pytorch_tanh"},
    embeds_scaled=True,
    refused={"use_bidirectional_attention": "makes it an encoder"},
    biases=_ATTENTION_BIASES,
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
)
_GEMMA2 = _like(
    _GEMMA,
    parts={**_LLAMA.parts, **_POST_NORMS, "ln2": "pre_feedforward_layernorm"},
    activation=("hidden_activation", "hidden_act"),
    activations={},
    factors={"score_scale": ("query_pre_attn_scalar", -0.5)},
    defaults={"hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 4, "query_pre_attn_scalar": 256},
)
_GEMMA3 = _like(_GEMMA2, parts={**_GEMMA2.parts, **_QK_NORMS})
_GPT2 = Architecture(
    bodies=("transformer.", ""),
    layer="h.{layer}.",
    shared={"embed": "wte", "ln_final": "ln_f"},
    parts={
        **_under("attn.", qkv="c_attn", o="c_proj"),
        **_under("", ln1="ln_1", ln2="ln_2"),
        **_under("mlp.", mlp_in="c_fc", mlp_out="c_proj"),
    },
    norm="layer",
    eps="layer_norm_epsilon",
    activation=("activation_function",),
    inputs_first=True,
    fused="in turn",
    ignored=("attn.bias", "attn.masked_bias"),
    refused={"add_cross_attention": "adds attention to an encoder"},
    biases={**dict.fromkeys(("qkv", "o", *_MLP), True), **_NORM_BIASES},
    defaults={"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True},
    aliases={"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "hidden_size": "n_embd"},
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _like(_LLAMA, biases={}, defaults={"num_key_value_heads": 8}),
    "ministral3": _like(_LLAMA, biases={}, defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128}),
    "seed_oss": _like(
        _LLAMA,
        biases={**_LLAMA.biases, "o": "attention_out_bias"},
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    ),
    "ernie4_5": _like(
        _LLAMA,
        biases=dict.fromkeys(("q", "k", "v", "o", *_MLP), "use_bias"),
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 128},
    ),
    "arcee": _like(
        _LLAMA, parts={**_QKV, **_NORMS, **_UNGATED}, defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2"}
    ),
    "nemotron": _like(
        _LLAMA,
        parts={**_QKV, **_NORMS, **_UNGATED},
        norm="layer + 1",
        eps="norm_eps",
        biases={**_LLAMA.biases, **_NORM_BIASES},
        defaults={"norm_eps": 1e-5, "hidden_act": "relu2"},
    ),
    "smollm3": _like(_LLAMA, defaults={"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2": _like(_LLAMA, biases=dict.fromkeys("qkv", True), defaults={"num_key_value_heads": 32}),
    "qwen2_moe": _like(
        _LLAMA,
        experts=_EXPERTS,
        biases=dict.fromkeys("qkv", "qkv_bias"),
        defaults={"num_key_value_heads": 16, "qkv_bias": True},
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": _like(_QWEN3, experts=_EXPERTS, defaults={"num_key_value_heads": 4, "head_dim": None}),
    "qwen3_next": _like(
        _QWEN3_5, bodies=("model.",), experts=_EXPERTS, defaults={"num_key_value_heads": 2, "head_dim": 256}
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5": _QWEN3_5,
    "mixtral": _like(
        _LLAMA,
        parts={**_QKV, **_NORMS},
        experts=("block_sparse_moe.", "mlp."),
        biases={},
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    ),
    "minimax_m2": _like(
        _LLAMA,
        parts={**_QKV, **_NORMS, **_QK_NORMS},
        head_norms="joint",
        experts=("block_sparse_moe.", "mlp."),
        biases={},
        defaults={"num_key_value_heads": 8, "head_dim": 128},
    ),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": _like(
        _OLMO2,
        parts={**_QKV, **_NORMS, **_QK_NORMS},
        experts=_EXPERTS,
        refused={"clip_qkv": "cuts off large queries, keys and values"},
    ),
    "exaone4": _like(_OLMO2, head_norms="alike", biases={}, defaults={"num_key_value_heads": 32}),
    "granite": _GRANITE,
    "granitemoe": _like(_GRANITE, parts={**_QKV, **_NORMS}, experts=("block_sparse_moe.",), biases=_ATTENTION_BIASES),
    "granitemoehybrid": _like(
        _GRANITE,
        parts={**_QKV, **_NORMS, "mlp_gate_in": "shared_mlp.input_linear", "mlp_out": "shared_mlp.output_linear"},
        mixers={"mamba.": "Mamba"},
        experts=("block_sparse_moe.",),
        biases=_ATTENTION_BIASES,
    ),
    "bamba": _BAMBA,
    "jamba": _like(
        _BAMBA,
        experts=("feed_forward.experts.", "feed_forward.router."),
        biases={},
        defaults={"rms_norm_eps": 1e-6},
    ),
    "lfm2": _like(
        _LLAMA,
        shared={"embed": "embed_tokens", "ln_final": "embedding_norm"},
        parts={
            **_QKV,
            **_under("self_attn.", o="out_proj", q_norm="q_layernorm", k_norm="k_layernorm"),
            **_under("", ln1="operator_norm", ln2="ffn_norm"),
            **_under("feed_forward.", mlp_gate="w1", mlp_in="w3", mlp_out="w2"),
        },
        eps="norm_eps",
        mixers={"conv.": "convolution"},
        biases={},
        defaults={"norm_eps": 1e-5, "tie_word_embeddings": True, "num_key_value_heads": 8},
        fixed={"hidden_act": "silu"},
    ),
    "cohere": _like(_COHERE, variants=(Variant({"use_qk_norm": (True,)}, _QK_NORMS),)),
    "cohere2": _COHERE,
    "phi3": _like(
        _LLAMA,
        parts={"qkv": "self_attn.qkv_proj", "o": "self_attn.o_proj", **_NORMS, **_FUSED_GATED},
        fused="in turn",
        biases={},
        defaults={"rms_norm_eps": 1e-5},
    ),
    "glm": _GLM,
    "glm4": _like(_GLM, parts={**_GLM.parts, "ln1_post": "post_self_attn_layernorm", "ln2_post": "post_mlp_layernorm"}),
    "glm4_moe": _like(
        _LLAMA,
        experts=_EXPERTS,
        biases=_GLM.biases,
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8},
        variants=(Variant({"use_qk_norm": (True,)}, _QK_NORMS),),
    ),
    "stablelm": _like(
        _LLAMA,
        norm="layer",
        eps="layer_norm_eps",
        defaults={"layer_norm_eps": 1e-5, "num_key_value_heads": 32},
        head_norms="by head",
        biases={**dict.fromkeys("qkv", "use_qkv_bias"), **_NORM_BIASES},
        variants=(
            Variant({"use_parallel_residual": (True,)}, {"ln2": "input_layernorm"}),
            Variant(
                {"qk_layernorm": (True,)},
                {"q_norm": "self_attn.q_layernorm.norms.{head}", "k_norm": "self_attn.k_layernorm.norms.{head}"},
            ),
        ),
    ),
    "starcoder2": _like(
        _LLAMA,
        parts={**_QKV, **_NORMS, "mlp_in": "mlp.c_fc", "mlp_out": "mlp.c_proj"},
        norm="layer",
        eps="norm_epsilon",
        biases={**dict.fromkeys(("q", "k", "v", "o", *_MLP), "use_bias"), **_NORM_BIASES},
        defaults={
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "num_key_value_heads": 2,
        },
    ),
    "gemma": _GEMMA,
    "vaultgemma": _like(
        _GEMMA2, parts={**_QKV, "ln1": "input_layernorm", "ln2": "pre_feedforward_layernorm", **_GATED}, refused={}
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    # The text half of a model with vision; files from before transformers 4.52 have the two prefixes swapped.
    "gemma3": _like(
        _GEMMA3,
        bodies=("model.language_model.", "language_model.model."),
        unembed=("lm_head", "language_model.lm_head"),
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": _like(
        _GPT2,
        inputs_first=False,
        fused="by group",
        defaults={"activation_function": "gelu_pytorch_tanh", "multi_query": True},
        variants=(
            Variant({"multi_query": (True,)}, fixed={"num_key_value_heads": 1}),
            Variant({"multi_query": (False,)}, fixed={"num_key_value_heads": None}),
        ),
    ),
    "gptj": _like(
        _GPT2,
        parts={
            **_under("attn.", q="q_proj", k="k_proj", v="v_proj", o="out_proj"),
            **_under("", ln1="ln_1", ln2="ln_1"),
            **_under("mlp.", mlp_in="fc_in", mlp_out="fc_out"),
        },
        inputs_first=False,
        refused={},
        biases={**dict.fromkeys(_MLP, True), **_NORM_BIASES},
        defaults={"tie_word_embeddings": False},
    ),
    "gpt_neo": _like(
        _GPT2,
        parts={
            **_under("attn.attention.", q="q_proj", k="k_proj", v="v_proj", o="out_proj"),
            **_under("", ln1="ln_1", ln2="ln_2"),
            **_under("mlp.", mlp_in="c_fc", mlp_out="c_proj"),
        },
        inputs_first=False,
        ignored=("attn.attention.bias", "attn.attention.masked_bias"),
        refused={},
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
        fixed={"scale_attn_weights": False},
    ),
    "gpt_neox": Architecture(
        bodies=("gpt_neox.",),
        layer="layers.{layer}.",
        shared={"embed": "embed_in", "ln_final": "final_layer_norm"},
        parts={
            **_under("attention.", qkv="query_key_value", o="dense"),
            **_NORMS,
            **_under("mlp.", mlp_in="dense_h_to_4h", mlp_out="dense_4h_to_h"),
        },
        unembed=("embed_out", "lm_head"),
        norm="layer",
        eps="layer_norm_eps",
        fused="by group",
        ignored=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
        biases={**dict.fromkeys(("qkv", "o"), "attention_bias"), **dict.fromkeys(_MLP, True), **_NORM_BIASES},
        defaults={"layer_norm_eps": 1e-5, "hidden_act": "gelu", "tie_word_embeddings": False, "attention_bias": True},
    ),
    "falcon": Architecture(
        bodies=("transformer.",),
        layer="h.{layer}.",
        shared={"embed": "word_embeddings", "ln_final": "ln_f"},
        parts={
            **_under("self_attention.", qkv="query_key_value", o="dense"),
            **_NORMS,
            **_under("mlp.", mlp_in="dense_h_to_4h", mlp_out="dense_4h_to_h"),
        },
        norm="layer",
        eps="layer_norm_epsilon",
        activation=("activation",),
        fused="by group",
        ignored=("self_attention.rotary_emb.inv_freq",),
        biases={**dict.fromkeys(("qkv", "o", *_MLP), "bias"), **_NORM_BIASES},
        defaults={
            "layer_norm_epsilon": 1e-5,
            "activation": "gelu",
            "tie_word_embeddings": True,
            "parallel_attn": True,
            "multi_query": True,
            "new_decoder_architecture": False,
        },
        aliases={"num_key_value_heads": "num_kv_heads"},
        variants=(
            Variant({"parallel_attn": (True,)}, {"ln2": "input_layernorm"}),
            Variant(
                {"new_decoder_architecture": (True,), "num_ln_in_parallel_attn": (None, 2)},
                {"ln1": "ln_attn", "ln2": "ln_mlp"},
            ),
            # Only the new architecture shares keys and values among some heads; the old one among all or none.
            Variant({"new_decoder_architecture": (False,), "multi_query": (True,)}, fixed={"num_key_value_heads": 1}),
            Variant(
                {"new_decoder_architecture": (False,), "multi_query": (False,)}, fixed={"num_key_value_heads": None}
            ),
        ),
    ),
    # One norm feeds attention and MLP alike.
    "phi": _like(
        _LLAMA,
        shared={"embed": "embed_tokens", "ln_final": "final_layernorm"},
        parts={
            **_QKV,
            **_under("", o="self_attn.dense", ln1="input_layernorm", ln2="input_layernorm"),
            **_under("mlp.", mlp_in="fc1", mlp_out="fc2"),
        },
        norm="layer",
        eps="layer_norm_eps",
        refused={"qk_layernorm": "normalises queries and keys with LayerNorms of their own"},
        biases={**dict.fromkeys(("q", "k", "v", "o", *_MLP), True), **_NORM_BIASES},
        defaults={"layer_norm_eps": 1e-5, "hidden_act": "gelu_new"},
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
