"""What a model must have before it is read; each refusal says what was found, what is needed and what to do."""

from typing import Any

import torch

from ..core.errors import UnsupportedModelError, UsageError, WeightBasisError
from ..core.types import Circuit, Model
from .adapters import EXTENDED
from .anatomy import (
    architecture_of,
    as_wide_as_the_stream,
    beside_heads,
    config_of,
    inner_part,
    is_processed,
    layers_with_heads,
    mixer_of,
)
from .forward import ForwardPass, weights_loaded
from .parts import LayerWeights
from .selfcheck import TOLERANCE, compared

_CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Names under which transformers hands a cache of keys and values to attention."""


def require_host(model: object) -> None:
    """Refuse the name of a model, and a model of transformers that TransformerLens has not wrapped."""
    if isinstance(model, str):
        raise UsageError(f"{model!r:.80} is the name of a model, not a model. Pass load_model({model!r:.80}).")
    if any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__):
        name = getattr(model, "name_or_path", "") or "the name or folder of its config.json"
        raise UsageError(
            f"{type(model).__name__} is a model of transformers; heads are read through TransformerLens. Boot it: "
            f"model = TransformerBridge.boot_transformers({name!r}, hf_model=model, tokenizer=tokenizer)  "
            "# from transformer_lens.model_bridge import TransformerBridge"
        )


def require_decoder(model: Model) -> None:
    """Refuse what is not a decoder of TransformerLens with attention heads."""
    require_host(model)
    name = type(model).__name__
    is_module = isinstance(model, torch.nn.Module)
    if not (is_module and hasattr(model, "cfg") and hasattr(model, "embed")):
        raise UsageError(
            f"{name} is not a TransformerLens model. Pass a TransformerBridge (TransformerLens 4) "
            "or a HookedTransformer (TransformerLens 3)."
        )
    architecture = architecture_of(model)
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
        raise UnsupportedModelError(_no_heads(model))


_READS_ITS_LOAD = "Open it with tl_headmaps.load_model(...), which has TransformerLens take it apart as it is stored."


def _no_heads(model: Model) -> str:
    architecture = architecture_of(model)
    if architecture in EXTENDED:
        return (
            f"{architecture} has attention heads, but TransformerLens shows its layers as a whole. Open it with "
            "tl_headmaps.load_model(...), which has TransformerLens show them."
        )
    if any(hasattr(inner_part(block, "shared_transformer"), "self_attn") for block in model.blocks):
        return (
            f"{architecture} has heads that read two vectors side by side and write into an MLP, not into the "
            "stream, so there is no map from what a head reads to what it says. Head maps need heads that read "
            "and write one stream. Use another model."
        )
    return (
        f"{architecture} has no attention heads that TransformerLens shows: its layer 0 is "
        f"{mixer_of(model.blocks[0])}. Head maps need a model with attention in at least one layer, and W_Q, W_K, "
        "W_V and W_O of it."
    )


def require_heads(model: Model, layer: int) -> None:
    """Refuse latent attention, and embeddings that do not become as wide as the stream."""
    attn, name = model.blocks[layer].attn, architecture_of(model)
    if type(attn).__name__.startswith("MLA"):
        raise UnsupportedModelError(
            f"{name} has latent attention: its queries, keys and values come from compressed vectors that all "
            "heads share. Head maps need W_Q, W_K, W_V and W_O of each head. Use a model with plain or grouped "
            "heads."
        )
    with weights_loaded(attn):
        width = _width(attn)
    embedded = as_wide_as_the_stream(model, model.embed.W_E[:1].detach()).shape[1]
    read_out = model.unembed.W_U.shape[0] if not hasattr(model, "project_out") else width
    if {embedded, read_out} != {width}:
        raise UnsupportedModelError(
            f"{name} has embeddings of width {embedded}, a stream of width {width} and an unembedding of width "
            f"{read_out}, and what stands in between is not known here. Head maps need one width. Use another model of "
            "this family."
        )


def _width(attn: Any) -> int:
    """Width of what attention reads."""
    try:
        return int(attn.W_Q.shape[1])
    except ValueError:
        # TransformerLens does not split heads of layers that differ from its configuration.
        return int(attn.q.weight.shape[1])


def unmapped_circuits(model: Model, post_norm: bool) -> dict[Circuit, str]:
    """By circuit, why its maps are not defined for a model whose heads run like others."""
    if post_norm:
        reason = (
            "norms its whole stream after attention and after each MLP (post-norm), so what a head reads and writes is "
            "scaled anew in every layer above it, by what all other parts have written"
        )
        return {"ov": reason, "qk": reason}
    if hasattr(model, "prediction_head"):
        return {"ov": "has a layer with an activation function between its stream and its unembedding"}
    return {}


def require_whole(model: Model, layer: LayerWeights) -> None:
    """Refuse weights whose processing changed what the model computes, so that nothing is left to compare with."""
    block = model.blocks[layer.layer]
    reasons = {
        "learned sinks, so its attention does not sum to one": inner_part(block.attn, "sinks") is not None,
        "a norm before W_O": layer.z_norm is not None,
        # Processing folds norms into the heads, and takes the projection for a part of the stream. OPT-350M itself has
        # its norms after attention, and nothing is folded.
        "a projection between its embeddings and its stream": hasattr(model, "project_in")
        and bool(getattr(config_of(model), "do_layer_norm_before", True)),
        # Processing folds the norm that both read into the heads alone.
        f"{beside_heads(block)} beside its heads": beside_heads(block) is not None,
        # TransformerLens 4.3 takes its fused projection apart in the order of other Falcon models.
        "queries, keys and values in one matrix, group by group": _is_split_wrongly(model),
    }
    for what, found in reasons.items():
        if is_processed(model) and found:
            raise WeightBasisError(
                f"The weights of {architecture_of(model)} were processed, and it has {what}: processing then "
                "changes what the model computes. Load the model without processing "
                "(TransformerBridge.boot_transformers(...) without enable_compatibility_mode())."
                + (f" {_READS_ITS_LOAD}" if _is_split_wrongly(model) else "")
            )


def _is_split_wrongly(model: Model) -> bool:
    grouped = bool(getattr(config_of(model), "new_decoder_architecture", False))
    return grouped and not getattr(getattr(model, "adapter", None), "splits_by_group", False)


def require_same_attention(model: Model, seen: ForwardPass) -> None:
    """Refuse a bridge whose attention is not that of the transformers module inside it.

    Bridges take fused projections apart and compute attention anew. Processing leaves the module inside as it was,
    so processed weights cannot be compared with it.
    """
    if is_processed(model) and getattr(config_of(model), "scale_attn_weights", True) is False:
        raise UnsupportedModelError(
            f"{architecture_of(model)} compares queries and keys without a scale (scale_attn_weights=False), and "
            "TransformerLens divides by the root of d_head all the same, so its attention is not the model's. Read the "
            "weights with HeadWeights.from_checkpoint(folder), which goes by the configuration."
        )
    for layer, (given, named) in seen.calls.items():
        inner = getattr(model.blocks[layer].attn, "original_component", None)
        theirs = seen.layers[layer].get("attn_result")
        if inner is None or is_processed(model) or theirs is None:
            continue
        # The cache of the first call would let these tokens see themselves twice.
        named = {name: None if name in _CACHES else value for name, value in named.items()}
        with weights_loaded(inner):
            own = inner(*given, **named)
        result = (own[0] if isinstance(own, tuple) else own).float()
        difference = compared(result, theirs.detach().to(result)).largest
        if difference > TOLERANCE.get(model.embed.W_E.dtype, 1e-3):
            raise UnsupportedModelError(
                f"{architecture_of(model)}: the attention of layer {layer} in TransformerLens differs from that "
                f"of the transformers model inside it by {difference:.2g} of the largest value, so nothing it "
                f"computes there is the model's. {_instead(model)}"
            )


def _instead(model: Model) -> str:
    return _READS_ITS_LOAD if _is_split_wrongly(model) else "Use another version of TransformerLens, or another model."
