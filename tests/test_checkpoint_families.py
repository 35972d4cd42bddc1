"""Every family in the table of checkpoints, against a small built copy of it with random weights.

Two references that know nothing of the table: what the transformers model computes in a forward pass, seam by seam, and
the same model loaded into TransformerLens, tensor by tensor and rank by rank.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import TL_MAJOR, hosted, save_checkpoint, source_model
from safetensors.torch import load_file, save_file
from test_checkpoint import assert_same, assert_same_weights, own_cache
from torch import Tensor
from torch.nn.functional import softmax
from transformers import AutoModelForCausalLM

from tl_headmaps import HeadWeights, component_map
from tl_headmaps.capture.checkpoint.architectures import ARCHITECTURES
from tl_headmaps.capture.checkpoint.shards import SINGLE
from tl_headmaps.capture.parts import LayerWeights, Norm
from tl_headmaps.core.errors import UnsupportedModelError

__all__ = ["own_cache"]

pytestmark = pytest.mark.filterwarnings(
    # GPT-BigCode of transformers 5 compiles its softmax the old way.
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}

LINEAR = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1}
GRANITE4 = {"position_embedding_type": "rope", **MULTIPLIERS, **MAMBA}
UNROTATED = {"position_embedding_type": "nope"}
JAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
}

FAMILIES: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "llama": ({}, {"attention_bias": True, "mlp_bias": True}),
    "mistral": ({},),
    "ministral3": ({"head_dim": 12},),
    "seed_oss": ({"head_dim": 12},),
    "ernie4_5": ({"head_dim": 12}, {"head_dim": 8, "use_bias": True}),
    "arcee": ({"mlp_bias": True},),
    "nemotron": ({},),
    "qwen2": ({},),
    "qwen2_moe": ({**EXPERTS, "shared_expert_intermediate_size": 16},),
    "qwen3": ({"d_head": 12},),
    "qwen3_moe": ({"head_dim": 12, **EXPERTS}, {**EXPERTS, "mlp_only_layers": [0]}),
    "qwen3_next": (
        {**LINEAR, "head_dim": 12, "mlp_only_layers": [0, 1, 2, 3]},
        {**LINEAR, "head_dim": 12, **EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_5_text": ({**LINEAR, "head_dim": 12}, {**LINEAR, "head_dim": 8, "attention_bias": True}),
    "granitemoehybrid": (
        {**GRANITE4, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0},
        {**GRANITE4, **EXPERTS, "layer_types": ["attention", "mamba", "attention"]},
        {**GRANITE4, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, **UNROTATED},
    ),
    "bamba": ({**MAMBA, "attn_layer_indices": [1]},),
    "jamba": ({**JAMBA, "num_experts": 1}, {**JAMBA, **EXPERTS, "expert_layer_offset": 0}),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},),
    "mixtral": (EXPERTS,),
    "smollm3": ({}, {"attention_bias": True}),
    "minimax_m2": ({"head_dim": 12, **EXPERTS},),
    "olmo2": ({}, {"attention_bias": True}),
    "olmo3": ({},),
    "olmoe": (EXPERTS,),
    "exaone4": ({"head_dim": 12},),
    "granite": (MULTIPLIERS, {**MULTIPLIERS, "attention_bias": True, "mlp_bias": True}),
    "granitemoe": ({**MULTIPLIERS, **EXPERTS},),
    "cohere": ({"logit_scale": 0.25}, {"use_qk_norm": True}),
    "cohere2": ({"logit_scale": 0.25},),
    "phi3": ({},),
    "glm": ({"head_dim": 12},),
    "glm4_moe": (
        {"head_dim": 12, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 0},
        {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "use_qk_norm": True},
    ),
    "glm4": ({"head_dim": 12},),
    "stablelm": ({}, {"use_qkv_bias": True, "qk_layernorm": True}, {"use_parallel_residual": True}),
    "starcoder2": ({}, {"use_bias": False}),
    "gemma": ({"head_dim": 12}, {"hidden_act": "gelu"}),
    "vaultgemma": ({"head_dim": 12, "query_pre_attn_scalar": 24},),
    "gemma2": ({"d_head": 12},),
    "gemma3_text": ({"d_head": 12},),
    "gpt2": ({},),
    "gpt_bigcode": ({}, {"multi_query": False}),
    "gptj": ({"rotary_dim": 4},),
    "gpt_neo": ({"attention_types": [[["global"], 3]]},),
    "gpt_neox": ({},),
    "falcon": (
        {},
        {"bias": True, "activation": "relu"},
        {"multi_query": False},
        {"multi_query": False, "parallel_attn": False, "bias": True},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "phi": ({},),
}
"""Configurations of each family that are built: one that is plain, and those that change what is read."""

KINDS = {"gpt_neox": "neox", "gemma3_text": "gemma3"}
"""Families that :mod:`planted` knows by another name."""

WITH_VISION = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}
"""Text halves of models with vision: another family with a prefix."""

NOT_LOADED: Mapping[tuple[str, int], str] = {
    ("falcon", 4): "TransformerLens 4.3 cuts the fused tensor of new Falcons at the wrong places",
    ("falcon", 5): "TransformerLens 4.3 cuts the fused tensor of new Falcons at the wrong places",
    ("gpt_bigcode", 1): "TransformerLens 4.3 refuses it",
    ("granitemoehybrid", 2): "TransformerLens 4.3 fails without rotation",
    ("qwen3_5_text", 1): "the loaded reader refuses biases of queries with a gate",
}
"""Configurations that cannot be compared with the loaded model, and why."""

NOT_LOADED_BY_3: Mapping[tuple[str, int], str] = {
    ("qwen3_next", 0): "TransformerLens 3 does not part queries from gates",
    ("qwen3_next", 1): "TransformerLens 3 does not part queries from gates",
    ("qwen3_5_text", 0): "TransformerLens 3 does not part queries from gates",
    ("olmo2", 0): "TransformerLens 3 takes norms after attention for norms before it",
    ("olmo2", 1): "TransformerLens 3 takes norms after attention for norms before it",
    ("olmo3", 0): "TransformerLens 3 takes norms after attention for norms before it",
    ("exaone4", 0): "TransformerLens 3 takes norms after attention for norms before it",
    ("cohere", 1): "TransformerLens 3 refuses norms by head",
    ("jamba", 0): "TransformerLens 3 does not show what its attention mixes",
}
"""The same on TransformerLens 3."""

CASES = [(family, number) for family, every in FAMILIES.items() for number in range(len(every))]
LOADED = [case for case in CASES if case not in NOT_LOADED and (TL_MAJOR > 3 or case not in NOT_LOADED_BY_3)]


def built(family: str, number: int, **sizes: Any) -> Any:
    return source_model(KINDS.get(family, family), **{**FAMILIES[family][number], **sizes})


def test_every_family_is_built_here() -> None:
    """A family that is added to the table needs a configuration in FAMILIES."""
    assert set(ARCHITECTURES) == {*FAMILIES, *WITH_VISION}


class ForwardPass:
    """What a transformers model computes for a few tokens that all stand at position 0, where nothing is rotated."""

    def __init__(self, source: Any, tokens: Tensor) -> None:
        self.tokens = tokens
        weights = source.state_dict()
        source = AutoModelForCausalLM.from_config(source.config, attn_implementation="eager").float().eval()
        source.load_state_dict(weights)
        self.layers = next(
            part
            for part in source.modules()
            if isinstance(part, torch.nn.ModuleList) and len(part) == source.config.num_hidden_layers
        )
        self.seen: dict[tuple[int, str], Any] = {}
        hooks = []
        for layer, block in enumerate(self.layers):
            parts = [("block", block), ("attention", _attention(block)), *(("mlp", mlp) for mlp in _mlps(block))]
            for name, module in parts:
                if module is None:
                    continue
                hooks.append(module.register_forward_hook(self._keeping(layer, name), with_kwargs=True))
        self.logits = source(tokens[None], position_ids=torch.zeros_like(tokens)[None]).logits[0]
        for hook in hooks:
            hook.remove()

    def _keeping(self, layer: int, name: str) -> Any:
        def keep(_: Any, arguments: Any, options: Any, output: Any) -> None:
            read = arguments[0] if arguments else options["hidden_states"]
            # Copies: blocks may add to it in place.
            self.seen[layer, f"{name} reads"] = read[0].clone()
            everything = output if isinstance(output, tuple) else (output,)
            # Two parts of one MLP, experts and what all tokens share, are added up.
            self.seen[layer, name] = self.seen.get((layer, name), 0) + everything[0][0]
            if name == "attention":
                self.seen[layer, "pattern"] = everything[1][0].clone()

        return keep

    def __getitem__(self, key: tuple[int, str]) -> Tensor:
        return self.seen[key]


def _attention(block: Any) -> Any:
    return next((part for part in block.children() if "Attention" in type(part).__name__), None)


def _mlps(block: Any) -> list[Any]:
    names = ("mlp", "block_sparse_moe", "feed_forward", "shared_mlp")
    return [part for name, part in block.named_children() if name in names]


def normed(norm: Norm | None, x: Tensor, n_heads: int) -> Tensor:
    """Queries or keys [pos, head, d_head] after a norm of any of the three kinds."""
    if norm is None:
        return x
    if norm.weight.shape == (n_heads * x.shape[-1],) and n_heads > 1:
        return norm(x.flatten(1)).view(x.shape)
    return norm.normalised(x) * norm.weight + norm.bias


def attended(weights: LayerWeights, reads: Tensor, cap: float | None, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pattern and output (without its bias) of a layer's attention, by the weights that were read and a given gate."""

    def projected(matrix: Tensor, bias: Tensor | None) -> Tensor:
        every = torch.einsum("pd,ndh->pnh", reads, matrix)
        return every if bias is None else every + bias

    q = normed(weights.q_norm, projected(weights.W_Q, weights.b_Q), len(weights.W_Q))
    k = normed(weights.k_norm, projected(weights.W_K, weights.b_K), len(weights.W_K))
    v = projected(weights.W_V, weights.b_V)
    share = len(weights.W_Q) // len(weights.W_K)
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    scores = torch.einsum("pnh,snh->nps", q, k) * weights.score_scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    pattern = softmax(scores.masked_fill(later, float("-inf")), -1)
    z = torch.einsum("nps,snh->pnh", pattern, v)
    return pattern, torch.einsum("pnh,nhd->pd", z if gate is None else z * gate, weights.W_O)


def assert_close(ours: Tensor, theirs: Tensor, seam: str) -> None:
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    assert difference < 2e-5, f"{seam} differs by {difference:.1e}"


def from_first(x: Tensor) -> Tensor:
    """Differences from the first position, in which biases and position vectors are lost."""
    return x[1:] - x[0]


@pytest.mark.parametrize(("family", "number"), CASES)
def test_every_seam_of_a_forward_pass(family: str, number: int, tmp_path: Path) -> None:
    source = built(family, number)
    read = HeadWeights.from_checkpoint(save_checkpoint(source, tmp_path, tokenizer=False))
    seen, config = ForwardPass(source, torch.tensor([5, 9, 17, 30, 31])), source.config
    assert_close(
        from_first(read.W_E[seen.tokens] * read.embed_scale), from_first(seen[0, "block reads"]), "the embedding"
    )
    assert read.layers_with_heads == [layer for layer, block in enumerate(seen.layers) if _attention(block) is not None]
    if 0 in read.mixers:
        assert_first_mlp(read, seen)
    for layer in read.layers_with_heads:
        weights, x = read.layer(layer), seen[layer, "block reads"]
        reads = x if weights.ln1 is None else weights.ln1(x)
        assert_close(reads, seen[layer, "attention reads"], f"ln1 of layer {layer}")
        gate = None
        if read.gated:
            every = _attention(seen.layers[layer]).q_proj(reads).unflatten(-1, (read.n_heads, -1))
            gate = every[..., read.d_head :].sigmoid()
        pattern, output = attended(weights, reads, getattr(config, "attn_logit_softcapping", None), gate)
        assert_close(pattern, seen[layer, "pattern"], f"the pattern of layer {layer}")
        assert_close(from_first(output), from_first(seen[layer, "attention"]), f"attention of layer {layer}")
        added = seen[layer, "attention"]
        middle = x + (added if weights.ln1_post is None else weights.ln1_post(added)) * read.residual_scale
        mlp_added = seen[layer, "mlp"] * read.residual_scale
        if layer == 0:
            assert_first_mlp(read, seen, x, middle)
            mlp_added = mlp_added if read.ln2_post is None else read.ln2_post(seen[0, "mlp"])
        if layer == 0 or read.ln2_post is None:
            assert_close(middle + mlp_added, seen[layer, "block"], f"what layer {layer} adds")
    last = seen[read.n_layers - 1, "block"]
    logits = (last if read.ln_final is None else read.ln_final(last)) @ read.W_U.T * read.logit_scale
    cap = getattr(config, "final_logit_softcapping", None)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    assert_close(from_first(logits), from_first(seen.logits), "the logits")


def assert_first_mlp(read: HeadWeights, seen: ForwardPass, *streams: Tensor) -> None:
    """Blocks with attention and MLP side by side give the MLP what they give attention: one of two streams is read.

    Without any, the stream is what the block writes less what its MLP adds.
    """
    streams = streams or (seen[0, "block"] - seen[0, "mlp"] * read.residual_scale,)
    theirs = seen[0, "mlp reads"].view(streams[0].shape)
    candidates = [x if read.ln2 is None else read.ln2(x) for x in streams]
    assert_close(min(candidates, key=lambda ours: float((ours - theirs).abs().max())), theirs, "ln2 of layer 0")
    if read.mlp is not None:
        assert_close(read.mlp(theirs), seen[0, "mlp"], "the first MLP")
    else:
        assert read.mlp_refusal == "its first MLP is a mixture of experts"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "number"), LOADED)
def test_every_tensor_of_the_loaded_model(family: str, number: int, dtype: torch.dtype, tmp_path: Path) -> None:
    source = built(family, number).to(dtype)
    save_checkpoint(source, tmp_path)
    loaded, read = HeadWeights.from_model(hosted(source, family)), HeadWeights.from_checkpoint(tmp_path)
    assert read.W_E.dtype == dtype
    assert_same_weights(loaded, read)


@pytest.mark.parametrize(("family", "number"), LOADED)
def test_every_component_of_the_loaded_model(family: str, number: int, tmp_path: Path) -> None:
    source = built(family, number)
    read = HeadWeights.from_checkpoint(save_checkpoint(source, tmp_path))
    model = hosted(source, family)
    mixture = "num_experts_per_tok" in FAMILIES[family][number]
    one, other = (component_map(x, "frobenius", by_head=mixture, progress=False) for x in (read, model))
    assert one.components == other.components
    torch.testing.assert_close(one.values, other.values, equal_nan=True)
    if mixture:
        with pytest.raises(UnsupportedModelError, match=r"is a mixture of experts.*Use by_head=True"):
            component_map(read, "frobenius", progress=False)


@pytest.mark.parametrize("family", WITH_VISION)
def test_the_text_half_of_a_model_with_vision(family: str, tmp_path: Path) -> None:
    text = WITH_VISION[family]
    save_checkpoint(built(text, 0), tmp_path, tokenizer=False)
    alone = HeadWeights.from_checkpoint(tmp_path)
    fingerprint, first = alone.fingerprint, alone.layer(alone.layers_with_heads[0])
    tensors = {
        name.removeprefix("model.").removeprefix("language_model."): x
        for name, x in load_file(tmp_path / SINGLE).items()
    }
    prefix = "model.language_model."
    renamed = {name if name.startswith("lm_head") else f"{prefix}{name}": x for name, x in tensors.items()}
    save_file(renamed | {"model.visual.weight": torch.zeros(2, 2)}, tmp_path / SINGLE)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": family, "text_config": config}))
    read = HeadWeights.from_checkpoint(tmp_path)
    assert (read.fingerprint, read.mixers, read.gated) == (fingerprint, alone.mixers, alone.gated)
    assert_same(first, read.layer(first.layer))


@pytest.mark.parametrize(("family", "number"), CASES)
def test_biases_are_those_of_the_built_model(family: str, number: int, tmp_path: Path) -> None:
    """Without those it has, or with those it has not, a checkpoint is not the model of its configuration."""
    known = ARCHITECTURES[family]
    save_checkpoint(built(family, number), tmp_path, tokenizer=False)
    tensors = load_file(tmp_path / SINGLE)
    projections = {name for part, name in known.parts.items() if "norm" not in name and not part.startswith("ln")}
    owners = {
        name.removesuffix(".weight") for name in tensors if name.endswith(tuple(f".{p}.weight" for p in projections))
    }
    assert owners
    biased = {owner for owner in owners if f"{owner}.bias" in tensors}
    biased |= {name.removesuffix(".bias") for name in tensors if "norm" in name and name.endswith(".bias")}
    for owner in sorted(biased):
        save_file({name: x for name, x in tensors.items() if name != f"{owner}.bias"}, tmp_path / SINGLE)
        with pytest.raises(UnsupportedModelError, match=f"has no tensor '{owner}.bias'"):
            HeadWeights.from_checkpoint(tmp_path)
    for owner in sorted(owners - biased):
        save_file(tensors | {f"{owner}.bias": torch.zeros(1)}, tmp_path / SINGLE)
        with pytest.raises(UnsupportedModelError, match=f"has a tensor '{owner}.bias', which .* does not use"):
            HeadWeights.from_checkpoint(tmp_path)


def test_without_any_heads_there_is_nothing_to_map(tmp_path: Path) -> None:
    plain = {"layer_types": ["conv"] * 3, "block_auto_adjust_ff_dim": False}
    save_checkpoint(source_model("lfm2", **plain), tmp_path, tokenizer=False)
    with pytest.raises(UnsupportedModelError, match="has no attention heads: its layers are convolution"):
        HeadWeights.from_checkpoint(tmp_path)
