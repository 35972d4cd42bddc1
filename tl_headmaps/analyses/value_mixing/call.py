"""What one head's attention does to the value vectors of a text."""

from typing import Any, Literal

import torch
from torch import Tensor

from ...capture.running.activations import LayerActivations, hook_name, run_or_read
from ...capture.running.text import EncodedText
from ...capture.weights import HeadWeights
from ...core.ambient import steady
from ...core.errors import UnsupportedModelError, UsageError
from ...core.types import HeadLike, Model
from ...core.vocabulary import TokenLike, token_position
from .explanations import MAX_ATTENTION
from .result import ValueMixing

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest accepted difference between A V and hook_z, relative to the largest entry of z (or to 1)."""


@steady
def value_mixing(
    model: Model,
    text: Any,
    head: HeadLike,
    query: TokenLike | None = None,
    key: TokenLike | None = None,
    *,
    prepend_bos: bool | None = None,
    cache: Any = None,
) -> ValueMixing:
    """Values, attention and mixed values of one head on a text, and every association before and after.

    Args:
        model: A TransformerBridge or HookedTransformer.
        text: A text, or its token ids.
        head: ``"L5H3"``, ``(5, 3)`` or a HeadIndex.
        query: Only this token as a query: its text, ``walk#2`` for the second of several, or an index
            (-1 is the last).
        key: With ``query``, the token it is compared with in the result's worked example.
        prepend_bos: Begin the text with BOS; by default as the model does. Token ids are taken as they are.
        cache: An ``ActivationCache`` of this very text, from ``model.run_with_cache``; the model is then not run.

    Example:
        >>> from tl_headmaps import load_default_model, value_mixing
        >>> mixing = value_mixing(load_default_model(), "Birds sometimes walk", "L16H0", "walk", "sometimes")
        >>> [round(share, 2) for share in mixing.A[0].tolist()]  # what "walk" attends to, BOS first
        [0.11, 0.04, 0.84, 0.0]
        >>> round(mixing.example.cosine_before, 2), round(mixing.example.cosine_after, 2)
        (0.21, 1.0)
    """
    if key is not None and query is None:
        raise UsageError(f"key={key!r} was given without a query. Give the query that is compared with it, too.")
    prompt = EncodedText.of(model, text, prepend_bos=prepend_bos, least=1, what="at least one is needed")
    rows = list(range(len(prompt.ids))) if query is None else [token_position(prompt.tokens, query)]
    place = None if key is None else token_position(prompt.tokens, key)
    weights = HeadWeights.of(model)
    weights.require_own_values("value vectors and their associations")
    index = weights.head(head)
    layer = weights.layer(index.layer)
    # The picture of one query shows the whole matrix, where it can be read.
    whole = list(range(len(prompt.ids))) if query is not None and len(prompt.ids) <= MAX_ATTENTION else []
    kept: list[tuple[Tensor, ...]] = []

    def keep(seen: LayerActivations) -> None:
        values = layer.mixed(key_values(seen, layer.shape.n_kv_heads)[layer.shape.group_of(index.head)].float())
        z = seen["z"][0, rows, index.head]
        gate = (
            seen["gate"][0, rows].unflatten(-1, (layer.shape.n_heads, -1))[:, index.head].sigmoid() if gated else z[:0]
        )
        parts = (seen["pattern"][0, index.head, rows], values, z, gate, seen["pattern"][0, index.head, whole])
        kept.append(tuple(part.to("cpu", torch.float32) for part in parts))

    # Other gates (AFMoE, Laguna) are not shown in this form; the difference below then refuses the head.
    gated: tuple[Literal["gate"], ...] = ("gate",) if hook_name(index.layer, "gate") in model.hook_dict else ()
    run_or_read(model, prompt.ids, cache, read=("pattern", "v", "z", *gated), layers=[index.layer], reduce=keep)
    ((pattern, values, z, gate, attention),) = kept
    mixed = pattern @ values
    error = float(((mixed * gate if gated else mixed) - z).abs().max())
    if error > _TOLERANCE[weights.W_E.dtype] * float(z.abs().max().clamp_min(1.0)):
        raise UnsupportedModelError(
            f"In {weights.model_name!r} the output of {index} is not its pattern times its values (they differ by "
            f"{error:.2g}), so its mixing cannot be explained this way. Choose a model with plain attention."
        )
    options = {
        "query": None if query is None else rows[0],
        "prepend_bos": prompt.prepend_bos,
        "from_cache": cache is not None,
    }
    return ValueMixing(
        tokens=prompt.tokens,
        queries=tuple(rows),
        value_vectors=values,
        pattern=pattern,
        row_sums=pattern.sum(1),
        normalised=False,
        head=index,
        reconstruction_error=error,
        provenance=weights.provenance(runs_model=True, options=options),
        key=place,
        attention=attention if whole else None,
    )


def key_values(seen: LayerActivations, n_kv_heads: int) -> Tensor:
    """Values of the first prompt, key/value head x token x d_head."""
    values = seen["v"][0]
    return values.reshape(len(values), n_kv_heads, -1).transpose(0, 1)
