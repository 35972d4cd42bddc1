r"""How much a head does about a token: the norm of what it writes over the norm of what it reads.

``maps``:    ||x W_V W_O|| / ||x||, the published ratio.

``folded``:  the same with the layer's norm applied, ||n(x) W_V W_O|| / ||n(x)||, where n is ln1 with its weight in
the numerator and without it in the denominator: the same whether or not the weights were folded when the model was
loaded.

``context``:     the same, where n(x) is the layer's own input, normalised and averaged over neutral prompts.

For QK, ||x W_Q W_K^T|| / ||x||: how strongly a query token can prefer any key to another.

Norms go through the d_head x d_head Gram matrix of the right-hand factor, so no vocab x d_model product is formed.

**Usable tokens.** Undertrained embeddings can have any norm, and the tops of rankings are where they surface, so a user
may leave out byte fragments, control tokens and tokens that training never met. The latter keep the embedding that all
such tokens share: they are recognised by their likeness to special tokens that are alike among themselves (on the
default model ``<empty_output>``, ``<issue_closed>`` and a dozen more).
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..capture.parts import LayerWeights
from ..capture.tensors import row_blocks
from ..capture.weights import HeadWeights
from ..circuits.extremes import row_norms
from ..circuits.factored import LayerMaps
from ..circuits.ov import normed_inputs
from ..core.types import Circuit, Preset

UNUSED_LIKENESS = 0.95
"""Cosine to the common embedding of unused special tokens above which a token counts as unused."""

_RESERVED = re.compile(r"<\|?(?:reserved|unused|extra|dummy)[\w ]*\|?>|\[unused\d+\]", re.IGNORECASE)
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def salience(
    weights: HeadWeights,
    layer: LayerWeights,
    maps: LayerMaps,
    vectors: Float[Tensor, "row d_model"],
    *,
    circuit: Circuit,
    preset: Preset,
) -> Float[Tensor, "head row"]:
    """Salience ratio of every row of a layer's maps.

    Args:
        weights: The model.
        layer: The layer's weights.
        maps: The layer's maps for these rows.
        vectors: Source vectors of the rows, before ln1.
        circuit: Which circuit the maps are of.
        preset: Which preset they were made with.
    """
    read = _norm_of_read(layer, vectors, preset)
    norms = []
    for number, head in enumerate(maps.heads):
        factor = _written(weights, layer, head.head, preset) if circuit == "ov" else _keyed(layer, head.head, preset)
        norms.append(row_norms(maps.left_of(number), factor))
    ratio = torch.stack(norms) / read
    return torch.where(read > 0, ratio, torch.zeros_like(ratio))


def _norm_of_read(layer: LayerWeights, vectors: Tensor, preset: Preset) -> Tensor:
    if preset != "folded" or layer.ln1 is None:
        norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
        return norms
    if layer.ln1.centres:
        mean_square = vectors.var(-1, correction=0)
    else:
        mean_square = torch.linalg.vector_norm(vectors, dim=-1).square() / vectors.shape[-1]
    # The norm of x / sqrt(mean square + eps), without forming it.
    return torch.sqrt(vectors.shape[-1] * mean_square / (mean_square + layer.ln1.eps))


def _written(weights: HeadWeights, layer: LayerWeights, head: int, preset: Preset) -> Float[Tensor, "d_model d_head"]:
    """W_O without what is lost on the way to the unembedding; the final norm's weight is not part of it."""
    W_O = layer.W_O[head]
    if preset != "maps":
        W_O = normed_inputs(layer, W_O[None], [head])[0]
        W_O = W_O if weights.residual_scale == 1 else W_O * weights.residual_scale
        if layer.ln1_post is not None:
            W_O = layer.ln1_post.folded_into(W_O)
        if weights.ln_final is not None and weights.ln_final.centres:
            W_O = W_O - W_O.mean(-1, keepdim=True)
    return W_O.T


def _keyed(layer: LayerWeights, head: int, preset: Preset) -> Float[Tensor, "d_model d_head"]:
    """W_K with the linear part of the norms around it."""
    shape = layer.shape
    group = shape.group_of(head)
    W_K = layer.W_K[group]
    if preset != "maps":
        if layer.ln1 is not None:
            W_K = W_K * layer.ln1.weight[:, None]
            if layer.ln1.centres:
                W_K = W_K - W_K.mean(0)
        norm = layer.k_norm
        if norm is not None and norm.is_joint(shape.n_kv_heads, shape.d_head):
            W_K = W_K * norm.weight.unflatten(0, (shape.n_kv_heads, -1))[group]
        elif norm is not None:
            W_K = norm.of_head(group).folded_into(W_K)
    return W_K


def most_salient(
    ratio: Float[Tensor, "head row"], usable: Bool[Tensor, " row"], n: int
) -> tuple[Int[Tensor, "head n"], Float[Tensor, "head n"]]:
    """Rows of the ``n`` largest ratios of each head among the usable ones (ties: lower row), and the ratios."""
    masked = ratio.masked_fill(~usable, float("-inf"))
    # One more than asked for: only if it ties with the last one does the whole row have to be sorted.
    values, rows = masked.topk(min(n + 1, masked.shape[1]), dim=-1)
    if values.shape[1] == n or bool((values[:, n] == values[:, n - 1]).any()):
        values, rows = masked.sort(dim=-1, descending=True, stable=True)
    else:
        rows, by_row = rows[:, :n].sort(dim=-1)
        values, by_value = values[:, :n].gather(1, by_row).sort(dim=-1, descending=True, stable=True)
        rows = rows.gather(1, by_value)
    return rows[:, :n], values[:, :n]


@dataclass(frozen=True)
class UsableTokens:
    """Which tokens to consider, and how many were left out for which reason."""

    mask: Bool[Tensor, " token"]
    left_out: dict[str, int]


def usable_tokens(
    strings: Sequence[str], special_ids: Iterable[int], W_E: Float[Tensor, "token d_model"]
) -> UsableTokens:
    """All tokens but byte fragments, control tokens and unused tokens.

    Args:
        strings: Text of each token the tokenizer knows; rows of ``W_E`` beyond them are unused.
        special_ids: Ids of control tokens (``<|endoftext|>``, ...).
        W_E: Embeddings.
    """
    special = {token for token in special_ids if token < len(W_E)}
    alike = _like_unused(W_E, sorted(special)).tolist()
    reasons = [
        _reason(strings[token], token in special, alike[token]) if token < len(strings) else "unused"
        for token in range(len(W_E))
    ]
    mask = torch.tensor([reason is None for reason in reasons], device=W_E.device)
    return UsableTokens(mask, dict(sorted(Counter(reason for reason in reasons if reason is not None).items())))


def _reason(text: str, special: bool, alike: bool) -> str | None:
    if special or _RESERVED.fullmatch(text):
        return "control"
    if "�" in text or _BYTE.fullmatch(text):
        return "byte fragment"
    if alike:
        return "unused"
    if not text or all(unicodedata.category(character) in ("Cc", "Cf", "Cn", "Co", "Cs") for character in text):
        return "control"
    return None


def _like_unused(W_E: Tensor, special: list[int]) -> Tensor:
    """Which embeddings are like the one that several special tokens share."""
    none = torch.zeros(len(W_E), dtype=torch.bool, device=W_E.device)
    if len(special) < 2:
        return none
    known = torch.nn.functional.normalize(W_E[special].float(), dim=-1)
    shared = ((known @ known.T) > UNUSED_LIKENESS).sum(1) > 1
    if not bool(shared.any()):
        return none
    common = torch.nn.functional.normalize(known[shared].mean(0), dim=0)
    cosine = torch.cat([torch.nn.functional.normalize(part.float(), dim=-1) @ common for part in row_blocks(W_E)])
    return cosine > UNUSED_LIKENESS
