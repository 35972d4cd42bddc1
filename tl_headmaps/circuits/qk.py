r"""The QK circuit: how much a query token wants to attend to a key token, without positions.

``maps``:    Q = x W_Q W_K^T x^T / sqrt(d_head).

``folded``:  q = norm_q(ln1(x) W_Q + b_Q), k = norm_k(ln1(x) W_K + b_K), Q = q k^T times the model's own score scale:
the attention score before rotation, softmax and soft-capping. The norms of q and k exist in Gemma 3 and Qwen 3.

Rows are query tokens, columns key tokens.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.parts import LayerWeights
from ..capture.weights import HeadWeights
from ..core.types import HeadIndex, Preset
from .blocks import spans
from .factored import FactorColumns, LayerMaps
from .vectors import read_by

_KEY_BLOCK = 4096


def qk_maps(
    weights: HeadWeights,
    layer: LayerWeights,
    queries: Float[Tensor, "row d_model"],
    keys: Float[Tensor, "vocab d_model"],
    heads: Sequence[int],
    preset: Preset,
) -> LayerMaps:
    """QK maps of some heads of a layer: a row for each query vector, a column for each key vector."""
    folded = preset != "maps"
    scale = layer.score_scale if folded else layer.shape.d_head**-0.5
    queries = _with_bias(layer, read_by(layer, queries, preset), folded)
    groups = sorted({layer.shape.group_of(head) for head in heads})
    projected = layer.queries(queries, heads) if folded else [queries @ layer.W_Q[h] for h in heads]
    left = [query * scale for query in projected]
    right = keys.new_empty(len(groups), len(keys), layer.W_K.shape[-1])
    # A normed copy of all keys of a large model would not fit beside them.
    for here in spans(slice(0, len(keys)), _KEY_BLOCK):
        some = _with_bias(layer, read_by(layer, keys[here], preset), folded)
        for number, key in enumerate(layer.keys(some, groups) if folded else [some @ layer.W_K[g] for g in groups]):
            right[number, here] = key
    return _maps(layer, torch.stack(left), right, groups, heads)


def context_qk_maps(
    weights: HeadWeights,
    layer: LayerWeights,
    queries: Float[Tensor, "row d_model"],
    keys: Float[Tensor, "kv_head vocab d_head"],
    heads: Sequence[int],
) -> LayerMaps:
    """The same from context vectors: queries as the layer reads them, keys already multiplied by W_K."""
    queries = _with_bias(layer, read_by(layer, queries, "context"), True)
    groups = sorted({layer.shape.group_of(head) for head in heads})
    left = [query * layer.score_scale for query in layer.queries(queries, heads)]
    joint = layer.k_norm is not None and layer.k_norm.is_joint(len(layer.W_K), layer.shape.d_head)
    needed = list(range(len(layer.W_K))) if joint else groups
    right = keys[needed].to(weights.device)
    for number, g in enumerate(needed):
        if layer.ln1 is not None:
            right[number] += layer.ln1.bias @ layer.W_K[g]
        if layer.b_K is not None:
            right[number] += layer.b_K[g]
        if layer.k_norm is not None and not joint:
            right[number] = layer.k_norm.of_head(g)(right[number])
    if joint:
        assert layer.k_norm is not None
        right = torch.stack(layer.normed(list(right), layer.k_norm, groups))
    return _maps(layer, torch.stack(left), layer.clipped(right), groups, heads)


def _maps(
    layer: LayerWeights,
    left: Float[Tensor, "head row d_head"],
    right: Float[Tensor, "group vocab d_head"],
    groups: list[int],
    heads: Sequence[int],
) -> LayerMaps:
    return LayerMaps(
        heads=tuple(HeadIndex(layer.layer, head) for head in heads),
        left=left,
        group=tuple(range(len(heads))),
        columns=FactorColumns(right, tuple(groups.index(layer.shape.group_of(head)) for head in heads)),
        offset=left.new_zeros(len(heads), left.shape[1]),
    ).checked()


def _with_bias(layer: LayerWeights, read: Tensor, folded: bool) -> Tensor:
    return read + layer.ln1.bias if folded and layer.ln1 is not None else read
