"""What one head's attention does to the value vectors of a text, from a model or from arrays."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...capture.running.activations import LayerActivations
from ...capture.running.cached import run_or_read
from ...capture.running.text import EncodedText
from ...capture.weights import HeadWeights
from ...core.arrays import arrays_digest, dtype_name, given_tensor
from ...core.errors import UnsupportedModelError, UsageError
from ...core.provenance import Provenance
from ...core.types import HeadLike
from ...core.vocabulary import TokenLike, token_position
from .result import ROW_SUM_TOLERANCE, ValueMixing

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest accepted difference between A V and hook_z, relative to the largest entry."""


def value_mixing(
    model: Any,
    text: Any,
    head: HeadLike,
    query: TokenLike | None = None,
    *,
    key: TokenLike | None = None,
    prepend_bos: bool = False,
    cache: Any = None,
) -> ValueMixing:
    """Values, attention and mixed values of one head on a text, and every association before and after.

    Args:
        model: A TransformerBridge or HookedTransformer.
        text: A text, or its token ids.
        head: ``"L5H3"``, ``(5, 3)`` or a HeadIndex.
        query: Only this token as a query: its text, ``walk#2`` for the second of several, or an index.
        key: With ``query``: the token it is compared with in the result's worked example.
        prepend_bos: Put BOS in front of the text.
        cache: An ``ActivationCache`` of this very text, from ``model.run_with_cache``; then nothing is run.

    Example:
        >>> from tl_headmaps import load_default_model, value_mixing
        >>> mixing = value_mixing(load_default_model(), "Birds sometimes walk", "L11H3", "walk", key="sometimes")
        >>> [round(share, 2) for share in mixing.A[0].tolist()]  # what "walk" attends to
        [0.04, 0.84, 0.12]
        >>> round(mixing.example.cosine_before, 2), round(mixing.example.cosine_after, 2)
        (0.13, 0.96)
    """
    if key is not None and query is None:
        raise UsageError(f"The key {key!r} was given without a query; give the token that is compared with it, too.")
    prompt = EncodedText.of(model, text, prepend_bos=prepend_bos, least=1, what="at least one is needed")
    rows = list(range(len(prompt.ids))) if query is None else [token_position(prompt.tokens, query)]
    place = None if key is None else token_position(prompt.tokens, key)
    weights = HeadWeights.of(model)
    index = weights.head(head)
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep(seen: LayerActivations) -> None:
        values = key_values(seen, weights.n_kv_heads)[weights.group_of(index.head)]
        found.append(
            (
                seen["pattern"][0, index.head, rows].to("cpu", torch.float32),
                values.to("cpu", torch.float32),
                seen["z"][0, rows, index.head].to("cpu", torch.float32),
            )
        )

    run_or_read(model, prompt.ids, cache, read=("pattern", "v", "z"), layers=[index.layer], reduce=keep)
    ((pattern, values, z),) = found
    error = float((pattern @ values - z).abs().max())
    if error > _TOLERANCE[weights.W_E.dtype] * float(z.abs().max().clamp_min(1.0)):
        raise UnsupportedModelError(
            f"In {weights.model_name!r} the output of {index} is not its pattern times its values (they differ by "
            f"{error:.2g}), so its mixing cannot be explained this way. Choose a model with plain attention."
        )
    options = {"query": None if query is None else rows[0], "prepend_bos": prepend_bos, "from_cache": cache is not None}
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
    )


def value_mixing_from(A: Any, V: Any, tokens: Sequence[str] | None = None, normalise: bool = False) -> ValueMixing:
    """The same from arrays: attention A (query x key) and values V (token x dimension).

    Args:
        A: Attention. Rows that do not sum to one, or have negative entries, are reported and used as they are.
        V: Values, one row per token.
        tokens: Texts of the tokens; numbers from 1 by default, as in ``v1``.
        normalise: Divide each row of A by its sum.

    Example:
        >>> from tl_headmaps import value_mixing_from
        >>> A = [[1, 0, 0], [0.1, 0.9, 0], [0.6, 0.1, 0.4]]
        >>> V = [[0.1, 0.2, 0.3], [-0.8, 0.3, -0.1], [0.5, -0.1, -0.4]]
        >>> mixing = value_mixing_from(A, V, ["Birds", "sometimes", "walk"])
        >>> [round(value, 3) for value in mixing.V_hat[2].tolist()]
        [0.18, 0.11, 0.01]
        >>> mixing.notes
        ("row 3 of A ('walk') sums to 1.1, not to 1, and is used as it is",)
    """
    pattern = given_tensor(A, "A", "a square matrix, query x key").double()
    values = given_tensor(V, "V", "a matrix, token x dimension").double()
    if pattern.ndim != 2 or pattern.shape[0] != pattern.shape[1] or not len(pattern):
        raise UsageError(f"A has shape {tuple(pattern.shape)}; it must be a square matrix, query x key.")
    if values.ndim != 2 or len(values) != len(pattern) or not values.shape[1]:
        raise UsageError(
            f"V has shape {tuple(values.shape)}; with A of {len(pattern)} tokens it must have {len(pattern)} rows, "
            "one value vector for each token."
        )
    for name, array in (("A", pattern), ("V", values)):
        if not bool(array.isfinite().all()):
            raise UsageError(f"{name} holds NaN or infinity; every entry must be a finite number.")
    names = tuple(str(token) for token in (range(1, len(pattern) + 1) if tokens is None else tokens))
    if len(names) != len(pattern):
        raise UsageError(f"There are {len(names)} tokens, but A is {len(pattern)} x {len(pattern)}.")
    sums = pattern.sum(1)
    digest = arrays_digest(pattern, values)
    if normalise:
        empty = (sums <= 0).nonzero().flatten().tolist()
        if empty:
            raise UsageError(
                f"Row {empty[0] + 1} of A sums to {float(sums[empty[0]]):g} and cannot be normalised; "
                "give rows with a positive sum, or leave normalise out."
            )
        # Rows that sum to one but for rounding stay as they are.
        pattern = torch.where((sums - 1).abs()[:, None] > ROW_SUM_TOLERANCE, pattern / sums[:, None], pattern)
    return ValueMixing(
        tokens=names,
        queries=tuple(range(len(pattern))),
        value_vectors=values,
        pattern=pattern,
        row_sums=sums,
        normalised=normalise,
        head=None,
        reconstruction_error=None,
        provenance=Provenance.of_arrays(digest, dtype_name(pattern), options={"normalise": normalise}),
    )


def key_values(seen: LayerActivations, n_kv_heads: int) -> Tensor:
    """Values of the first prompt, key/value head x token x d_head."""
    values = seen["v"][0]
    return values.reshape(len(values), n_kv_heads, -1).transpose(0, 1)
