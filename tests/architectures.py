"""Small random models of every decoder that TransformerLens 4.3 boots, and what their heads do by their own account.

The reference never looks at a projection, a bias or a multiplier: it runs the transformers model itself with hooks. A
vector is put in front of a layer, the input of the layer's output projection is what its heads computed, and attention
patterns with all positions set to 0 tell scores without positions. Only three things are taken from names and
configurations: where a layer's output projection and the norm after it are, and the factor of the logits. Nothing here
uses tl_headmaps, but for how a model is opened.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from planted import hosted, word_tokenizer
from torch import Tensor

from tl_headmaps.capture.adapters import own_adapters

N_VOCAB = 61

_SIZES: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "rotary_dim": 4,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "initializer_range": 0.02,
}
"""Given to every configuration that knows the name."""


@dataclass(frozen=True)
class Architecture:
    """A row of the matrix.

    Attributes:
        name: Unique name of the row.
        model_type: Name of the configuration in transformers.
        changes: What differs from the common small sizes, and what makes the row interesting.
        post: Name of the norm after attention inside a block, if there is one.
        gate: What a gate of the heads' outputs lets through when its weights are zero.
        mixer: In a hybrid, the module that mixes tokens in layers 0 and 2, which have no heads.
        beside: The module that mixes tokens beside the heads in every layer.
        uneven: Whether layers differ in their number of heads.
        n_own: How many layers, from the first, have keys and values of their own; all by default.
        free_scale: Whether what heads write is known up to a positive factor per token (a norm before W_O).
    """

    name: str
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    post: str | None = None
    gate: float = 1.0
    free_scale: bool = False
    mixer: str | None = None
    beside: str | None = None
    uneven: bool = False
    n_own: int | None = None


def _row(
    name: str,
    model_type: str | None = None,
    post: str | None = None,
    gate: float = 1.0,
    free_scale: bool = False,
    beside: str | None = None,
    uneven: bool = False,
    n_own: int | None = None,
    **changes: Any,
) -> Architecture:
    return Architecture(name, model_type or name, changes, post, gate, free_scale, None, beside, uneven, n_own)


def _hybrid(name: str, model_type: str, mixer: str, gate: float = 1.0, **changes: Any) -> Architecture:
    """Four layers, of which 1 and 3 have heads."""
    return Architecture(
        name, model_type, {"num_hidden_layers": 4} | changes, changes.pop("post", None), gate, mixer=mixer
    )


_SANDWICH = "post_attention_layernorm"
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
_MULTIPLIED: dict[str, Any] = {
    "embedding_multiplier": 7.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}

ARCHITECTURES: tuple[Architecture, ...] = (
    _row("llama"),
    _row("llama with biases", "llama", attention_bias=True, mlp_bias=True),
    _row("mistral"),
    _row("qwen2"),
    _row("qwen3"),
    _row("gemma"),
    _row("gemma2", post=_SANDWICH, query_pre_attn_scalar=24),
    _row("gemma3", "gemma3_text", post=_SANDWICH, query_pre_attn_scalar=24),
    _row("gemma4", "gemma4_text", post=_SANDWICH, hidden_size_per_layer_input=0, global_head_dim=8),
    _row("vaultgemma", query_pre_attn_scalar=24),
    _row("gpt2"),
    _row("gpt2 without a scale", "gpt2", scale_attn_weights=False),
    _row("gpt2 by layer", "gpt2", scale_attn_by_inverse_layer_idx=True),
    _row("openai-gpt"),
    _row("gpt_bigcode"),
    _row("gpt_neo", attention_types=[[["global", "local"], 1]], num_layers=2),
    _row("gpt_neox"),
    _row("gptj"),
    _row("codegen"),
    _row("gpt_oss"),
    _row("phi", num_key_value_heads=4),
    _row("phi3"),
    _row("granite", **_MULTIPLIED),
    _row("granitemoe", **_MULTIPLIED),
    _row("afmoe", post=_SANDWICH, gate=0.5, mup_enabled=True, num_dense_layers=1),
    _row("laguna", gate=math.log(2), mlp_layer_types=["dense", "sparse"]),
    _row("nanochat"),
    _row("bloom"),
    _row("mpt"),
    _row("falcon"),
    _row("falcon new", "falcon", new_decoder_architecture=True, multi_query=False, num_kv_heads=2),
    _row("falcon alibi", "falcon", alibi=True, multi_query=False, parallel_attn=False, bias=True),
    _row("cohere"),
    _row("cohere with qk norms", "cohere", use_qk_norm=True),
    _row("cohere2"),
    _row("stablelm"),
    _row("stablelm with qk norms", "stablelm", qk_layernorm=True, use_qkv_bias=True),
    _row("stablelm parallel", "stablelm", use_parallel_residual=True),
    _row("llama4", "llama4_text", no_rope_layers=[1, 0], moe_layers=[], intermediate_size_mlp=48),
    _row("bitnet", free_scale=True),
    _row("olmo"),
    _row("olmo with clipping", "olmo", clip_qkv=0.5),
    _row("olmo2", post=_SANDWICH),
    _row("olmo3", post=_SANDWICH),
    _row("olmoe"),
    _row("flex_olmo", post=_SANDWICH),
    _row("minimax_m2"),
    _row("opt"),
    _row("opt with projections", "opt", word_embed_proj_dim=16),
    _row("opt-350m", "opt", word_embed_proj_dim=16, do_layer_norm_before=False),
    _row("xglm", num_layers=2, attention_heads=4),
    _row("modernbert-decoder"),
    _row("deepseek_v2", first_k_dense_replace=1),
    _row("deepseek_v3", first_k_dense_replace=1),
    _row("youtu"),
    _row("glm4_moe_lite"),
    _row("apertus"),
    _row("arcee"),
    _row("ernie4_5"),
    _row("ernie4_5 with biases", "ernie4_5", use_bias=True),
    _row("ernie4_5_moe"),
    _row("exaone4", post=_SANDWICH),
    _row("glm"),
    _row("glm4", post="post_self_attn_layernorm"),
    _row("glm4_moe", first_k_dense_replace=1),
    _row("hunyuan", "hunyuan_v1_dense"),
    _row("jais2"),
    _row("jetmoe"),
    _row("ministral3"),
    _row("mixtral"),
    _row("nemotron"),
    _row("qwen2_moe"),
    _row("qwen2_moe dense first", "qwen2_moe", mlp_only_layers=[0]),
    _row("qwen3_moe"),
    _row("seed_oss"),
    _row("smollm3", no_rope_layers=[1, 0]),
    _row("starcoder2"),
    _row("hrm_text"),
    # Heads of another number or width in some layers.
    _row(
        "gemma4 31B",
        "gemma4_text",
        post=_SANDWICH,
        hidden_size_per_layer_input=0,
        global_head_dim=16,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    _row(
        "gemma4 E2B",
        "gemma4_text",
        post=_SANDWICH,
        n_own=2,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=N_VOCAB,
        global_head_dim=16,
        num_kv_shared_layers=1,
    ),
    _row(
        "laguna by layer",
        "laguna",
        gate=math.log(2),
        uneven=True,
        mlp_layer_types=["dense", "dense"],
        num_attention_heads_per_layer=[4, 8],
    ),
    # Hybrids: attention in some layers only.
    _hybrid("qwen3_5", "qwen3_5_text", "linear_attn", gate=0.5, **_LINEAR),
    _hybrid("qwen3_next", "qwen3_next", "linear_attn", gate=0.5, mlp_only_layers=[0, 1, 2, 3], **_LINEAR),
    _hybrid("lfm2", "lfm2", "conv", layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False),
    _hybrid(
        "granite 4",
        "granitemoehybrid",
        "mamba",
        layer_types=["mamba", "attention"] * 2,
        position_embedding_type="rope",
        num_local_experts=0,
        shared_intermediate_size=48,
        **_MULTIPLIED,
        **_MAMBA,
    ),
    _hybrid(
        "jamba",
        "jamba",
        "mamba",
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    _hybrid("bamba", "bamba", "mamba", attn_layer_indices=[1, 3], mamba_n_groups=1, **_MAMBA),
    _hybrid("olmo_hybrid", "olmo_hybrid", "linear_attn", post=_SANDWICH, **_LINEAR),
    _row(
        "falcon_h1",
        beside="mamba",
        mamba_d_ssm=64,
        embedding_multiplier=3.0,
        attention_in_multiplier=0.7,
        attention_out_multiplier=0.6,
        key_multiplier=0.4,
        mlp_multipliers=[0.8, 0.3],
        ssm_out_multiplier=0.9,
        lm_head_multiplier=0.5,
        **_MAMBA,
    ),
    _hybrid(
        "nemotron_h",
        "nemotron_h",
        "mixer",
        num_hidden_layers=None,
        layers_block_type=["mamba", "attention", "mlp", "attention"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
    ),
    _hybrid(
        "recurrent_gemma",
        "recurrent_gemma",
        "temporal_block",
        lru_width=32,
        attention_window_size=16,
        block_types=["recurrent", "attention"],
    ),
    _row(
        "zamba2",
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid"] * 2,
        mamba_d_state=8,
        mamba_headdim=16,
        n_mamba_heads=4,
        mamba_ngroups=1,
        chunk_size=8,
        num_mem_blocks=1,
    ),
)


def configuration(row: Architecture) -> Any:
    """The transformers configuration of a row."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[row.model_type]
    known = {*kind.__dataclass_fields__, *kind.attribute_map}
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    return kind(**{name: value for name, value in (sizes | dict(row.changes)).items() if value is not None})


def source(row: Architecture, seed: int = 0) -> Any:
    """A transformers model with random weights; norms and biases are far from doing nothing."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # transformers' GPT-BigCode, as it is imported.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(configuration(row), attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = (parameter.ndim == 1 and ("norm" in name or ".ln_" in name)) or "_norm" in name
            parameter.copy_(parameter + 0.2 * noise if is_norm else 0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
    return model


HOOKED = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gpt2": "gpt2",
    "gpt2 by layer": "gpt2",
    "gpt_neox": "neox",
    "phi": "phi",
}
"""Rows that a HookedTransformer is built for here, with the kind of planted.py that says how."""


def booted(row: Architecture, *, processed: bool = False, host: str = "bridge", seed: int = 0) -> Any:
    """The same model in TransformerLens."""
    if host == "hooked":
        return hosted(source(row, seed), HOOKED[row.name], host=host, processed=processed)
    with warnings.catch_warnings():
        # TransformerLens says which steps of its processing it leaves out.
        warnings.filterwarnings("ignore", r"\w+ does not support (fold_ln|center_writing_weights)", UserWarning)
        with own_adapters():
            model = hosted(source(row, seed), row.name, processed=processed)
    # TransformerLens opens the tokenizer again, for some architectures as one of another kind.
    model._tokenizer = word_tokenizer(N_VOCAB)
    return model


_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "Wo")
_POSITIONS = ("wpe", "embed_positions", "positions_embed")


class Dense:
    """What the heads of a transformers model do, found by running it.

    Positions are taken out of it first: learned ones are set to zero, and so is what sinks take of a pattern.
    """

    def __init__(self, row: Architecture, seed: int = 0) -> None:
        self.row, self.model = row, source(row, seed)
        config = self.config = self.model.config
        self.n_heads, self.n_layers = config.num_attention_heads, config.num_hidden_layers
        self.with_heads = list(range(1, self.n_layers, 2) if row.mixer else range(row.n_own or self.n_layers))
        modules = dict(self.model.named_modules())
        self.layers = next(
            part for part in modules.values() if isinstance(part, torch.nn.ModuleList) and len(part) == self.n_layers
        )
        inside = {part for layer in self.layers for part in layer.modules()}
        norms = [
            part
            for name, part in modules.items()
            if part not in inside
            and ("norm" in name or "ln_" in name)
            and "per_layer" not in name
            and not list(part.children())
        ]
        self.ln_final = norms[-1] if norms else None
        for name, part in modules.items():
            if name.rsplit(".", 1)[-1] in _POSITIONS:
                for tensor in (*part.parameters(), *part.buffers()):
                    tensor.data.zero_()
        for name, parameter in self.model.named_parameters():
            if name.endswith(".sinks"):
                parameter.data.fill_(-1e4)
            if row.gate != 1 and name.rsplit(".", 2)[-2] in ("gate_proj", "g_proj") and "attn" in name:
                parameter.data.zero_()
            if row.mixer and row.gate != 1 and name.endswith("q_proj.weight"):
                # The second half of each head's queries is its gate.
                parameter.data.view(self.n_heads, 2, -1, parameter.shape[-1])[:, 1] = 0

    def heads_in(self, layer: int) -> int:
        """Heads of a layer."""
        return getattr(self.config, "num_attention_heads_per_layer", None)[layer] if self.row.uneven else self.n_heads

    def out(self, layer: int) -> Any:
        """The output projection of a layer's attention."""
        return next(
            part
            for name, part in self.layers[layer].named_modules()
            if name.rsplit(".", 1)[-1] in _OUTPUTS and ("att" in name or name.startswith(f"{self.row.mixer}."))
        )

    def output_matrix(self, layer: int, centred: bool = False) -> Tensor:
        """What it multiplies by, [head * d_head, d_model]; centred as processing does where the final norm centres."""
        out = self.out(layer)
        width = self.outputs(layer, self.vectors(layer)).shape[-1]
        matrix: Tensor = out(torch.eye(width)) - out(torch.zeros(width))
        if centred and self.ln_final is not None and _centres(self.ln_final, matrix):
            matrix = matrix - matrix.mean(-1, keepdim=True)
        return matrix

    @contextmanager
    def _hooked(self, *hooks: tuple[Any, str, Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for module, when, hook in hooks:
                register = module.register_forward_pre_hook if when == "before" else module.register_forward_hook
                stack.callback(register(hook, with_kwargs=True).remove)
            yield

    def _run(self, ids: Tensor, **options: Any) -> Any:
        return self.model(input_ids=ids, use_cache=False, **options)

    @cached_property
    def _every_token(self) -> Tensor:
        return torch.arange(N_VOCAB)[:, None]

    def vectors(self, layer: int) -> Tensor:
        """What layer ``layer`` is given for every token without context: above 0, as if layer 0 had no attention."""
        seen: list[Tensor] = []
        # Weights alone say no more about layers above 1 than about layer 1.
        hooks = [(self.layers[min(layer, 1)], "before", _taking(seen))]
        if layer:
            mixing = self.out(0) if 0 in self.with_heads else getattr(self.layers[0], str(self.row.mixer))
            hooks.append((mixing, "after", _nothing))
            if self.row.beside is not None:
                hooks.append((getattr(self.layers[0], self.row.beside), "after", _nothing))
        with self._hooked(*hooks):
            self._run(self._every_token)
        return seen[0][:, 0]

    def outputs(self, layer: int, x: Tensor) -> Tensor:
        """What the heads of a layer compute for its input ``x``, attending to itself alone: the input of ``out``."""
        seen: list[Tensor] = []
        with self._hooked(
            (self.layers[layer], "before", _giving(x[:, None])), (self.out(layer), "before", _taking(seen))
        ):
            self._run(self._every_token)
        return seen[0][:, 0]

    def written(self, layer: int) -> Tensor:
        """[head, token, d_model]: what each head adds to the stream, without what it adds for any token."""
        x = self.vectors(layer)
        z = self.outputs(layer, x) - self.outputs(layer, torch.zeros_like(x))
        heads = z.unflatten(-1, (self.heads_in(layer), -1))
        out = self.out(layer)
        alone = torch.zeros(heads.shape[1], *heads.shape)
        for head in range(heads.shape[1]):
            alone[head, :, head] = heads[:, head]
        written = out(alone.flatten(-2)) - out(torch.zeros_like(z))
        for name in ("residual_multiplier", "attention_out_multiplier"):
            written = written * getattr(self.config, name, 1.0)
        written = written / self.row.gate
        if self.row.post is not None:
            written = linear_part(getattr(self.layers[layer], self.row.post), written)
        return written

    def readout(self, written: Tensor) -> Tensor:
        """Contributions to the centred logits, up to the scale of the final norm."""
        if self.ln_final is not None:
            written = linear_part(self.ln_final, written)
        unembedding = self.model.get_output_embeddings()
        logits = written @ unembedding.weight.T * self.logit_scale
        return logits - logits.mean(-1, keepdim=True)

    def sizes(self, written: Tensor) -> Tensor:
        """Size of what heads write, without what the final norm takes away."""
        if self.ln_final is not None and _centres(self.ln_final, written):
            written = written - written.mean(-1, keepdim=True)
        return written.norm(dim=-1)

    def read_size(self, layer: int) -> Tensor:
        """Size of what a layer's norm passes on, without its weight: sqrt(d_model) but for eps; else of the stream."""
        x = self.vectors(layer)
        if self.row.post is not None and not hasattr(self.layers[layer], "input_layernorm"):
            return x.norm(dim=-1)
        return torch.full((len(x),), x.shape[-1] ** 0.5)

    @property
    def score_cap(self) -> float | None:
        return getattr(self.config, "attn_logit_softcapping", None)

    @property
    def logit_scale(self) -> float:
        scale = getattr(self.config, "logit_scale", getattr(self.config, "lm_head_multiplier", None))
        return (1.0 if scale is None else scale) / getattr(self.config, "logits_scaling", 1.0)

    def ov(self, layer: int) -> Tensor:
        """[head, source, target]."""
        return self.readout(self.written(layer))

    def preferences(self, layer: int, sequences: Tensor) -> Tensor:
        """[sequence, head, query, key]: log attention minus that of the query to itself, positions all 0."""
        x = self.vectors(layer)[sequences]
        with self._hooked((self.layers[layer], "before", _giving(x))):
            options = (
                {}
                if self.config.model_type in _NO_POSITION_IDS
                else {"position_ids": torch.zeros_like(sequences), "attention_mask": torch.ones_like(sequences)}
            )
            patterns = self._run(sequences, output_attentions=True, **options).attentions
            pattern = patterns[self.place(layer, patterns)]
        logs = pattern.clamp_min(1e-30).log()
        return logs - logs.diagonal(dim1=-2, dim2=-1)[..., None]

    def place(self, layer: int, patterns: Sequence[Tensor]) -> int:
        """Where a layer's pattern is: some hybrids give patterns of layers with heads only."""
        return self.with_heads.index(layer) if len(patterns) == len(self.with_heads) else layer


_NO_POSITION_IDS = ("bloom", "mpt")


def _taking(seen: list[Tensor]) -> Any:
    def hook(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append((given[0] if given else named["hidden_states"]).detach())

    return hook


def _nothing(module: Any, given: Any, named: Any, output: Any) -> Any:
    """Zeros instead of what a module gives."""
    if isinstance(output, tuple):
        return (torch.zeros_like(output[0]), *output[1:])
    return torch.zeros_like(output)


def _giving(x: Tensor) -> Any:
    def hook(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if given:
            return (x.to(given[0].dtype), *given[1:]), named
        return given, named | {"hidden_states": x}

    return hook


def _centres(norm: Any, x: Tensor) -> bool:
    zero = torch.zeros_like(x)
    return bool(torch.allclose(norm(x) - norm(zero), norm(x + 1.0) - norm(zero), rtol=1e-3, atol=1e-3))


def linear_part(norm: Any, x: Tensor) -> Tensor:
    """A norm without its bias and its scale: found by what it makes of x, and of x shifted."""
    deviation = x - x.mean(-1, keepdim=True) if _centres(norm, x) else x
    size = deviation.square().mean(-1, keepdim=True).sqrt()
    # Large enough for eps not to matter.
    return (norm(x * 1e3 / size.clamp_min(1e-20)) - norm(torch.zeros_like(x))) * size


class Running(Dense):
    """The same model as it is, running on text."""

    def __init__(self, row: Architecture, seed: int = 0) -> None:
        super().__init__(row, seed)
        self.model = source(row, seed)
        self.layers = next(
            part
            for part in self.model.modules()
            if isinstance(part, torch.nn.ModuleList) and len(part) == self.n_layers
        )

    def heads(self, ids: list[int]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """By layer, patterns [head, query, key] and outputs [head, query, d_head]."""
        seen: dict[int, list[Tensor]] = {layer: [] for layer in self.with_heads}
        with self._hooked(*((self.out(layer), "before", _taking(seen[layer])) for layer in self.with_heads)):
            ran = self._run(torch.tensor([ids]), output_attentions=True).attentions
        outputs = {n: z[0][0].unflatten(-1, (self.heads_in(n), -1)).transpose(0, 1) for n, z in seen.items()}
        return {n: ran[self.place(n, ran)][0] for n in self.with_heads}, outputs

    def gates(self, ids: list[int]) -> dict[int, Tensor]:
        """By layer [head, query, d_head], what the gates of a gated hybrid let through."""
        seen: dict[int, Tensor] = {}

        def taking(layer: int) -> Any:
            def hook(module: Any, given: Any, named: Any, output: Tensor) -> None:
                seen[layer] = output[0].unflatten(-1, (self.n_heads, 2, -1))[:, :, 1].sigmoid().transpose(0, 1)

            return hook

        projections = {n: dict(self.layers[n].named_modules())["self_attn.q_proj"] for n in self.with_heads}
        with self._hooked(*((part, "after", taking(n)) for n, part in projections.items())):
            self._run(torch.tensor([ids]))
        return seen

    def next_tokens(self, prompts: Tensor, off: Sequence[tuple[int, int]]) -> Tensor:
        """The most likely next token of each prompt, with some heads giving nothing at the last position."""

        def without(layer: int) -> Any:
            def hook(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
                z = given[0].unflatten(-1, (self.heads_in(layer), -1)).clone()
                for head in (number for at, number in off if at == layer):
                    z[:, -1, head] = 0
                return (z.flatten(-2), *given[1:]), named

            return hook

        with self._hooked(*((self.out(layer), "before", without(layer)) for layer in self.with_heads)):
            found: Tensor = self._run(prompts).logits[:, -1].argmax(-1)
            return found
