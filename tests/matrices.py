"""Where transformers keeps the matrices of a component map, and texts for one. Nothing here uses its metrics."""

from typing import Any

import pytest
import torch
from planted import Anatomy, needs_hooked, word
from torch import Tensor

from tl_headmaps.capture.running.text import TextBatches, token_batches

SIX = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down")
GATED = ("llama", "gemma2", "gemma3", "qwen2", "qwen3")
HOSTS = ["bridge", pytest.param("hooked", marks=needs_hooked)]

TEXTS = [" ".join(word(3 + (7 * i + 3 * j * j) % 50) for j in range(n)) for i, n in enumerate((24, 9, 17, 30, 5, 21))]
TEXTS = [f" {text}" for text in TEXTS]


def mlp_matrices(parts: Anatomy, layer: int) -> dict[str, Tensor]:
    """Inputs by outputs, from the modules of transformers."""
    mlp = parts.part(layer, "mlp")
    if parts.kind == "gpt2":
        return {"mlp.up": mlp.c_fc.weight, "mlp.down": mlp.c_proj.weight}
    if parts.kind == "neox":
        return {"mlp.up": mlp.dense_h_to_4h.weight.T, "mlp.down": mlp.dense_4h_to_h.weight.T}
    if parts.kind == "phi":
        return {"mlp.up": mlp.fc1.weight.T, "mlp.down": mlp.fc2.weight.T}
    return {
        "mlp.up": mlp.up_proj.weight.T,
        "mlp.down": mlp.down_proj.weight.T,
        "mlp.gate": mlp.gate_proj.weight.T,
    }


def expected_matrices(parts: Anatomy, layer: int) -> dict[str, Tensor]:
    heads = parts.heads(layer)
    beside = {name: torch.cat(list(getattr(heads, f"W_{name[-1].upper()}")), dim=1) for name in SIX[:3]}
    return {**beside, "attn.o": torch.cat(list(heads.W_O)), **mlp_matrices(parts, layer)}


def token_ids(model: Any, texts: list[str], **options: Any) -> TextBatches:
    settings = {"length": 32, "max_tokens": 1000} | options
    return token_batches(texts, model.tokenizer, **settings)
