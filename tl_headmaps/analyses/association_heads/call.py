"""Which heads bring two tokens of a text closer together: value mixing, for all heads at once."""

from typing import Any

import torch

from ...capture.running.activations import LayerActivations
from ...capture.running.cached import run_or_read
from ...capture.running.text import EncodedText
from ...capture.weights import HeadWeights
from ...core.errors import UsageError
from ...core.types import check_choice
from ...core.vocabulary import TokenLike, token_position
from ...scorers.mixing import cosines, dots, mixed
from ..value_mixing.call import key_values
from .result import AssociationHeads, Measure


def association_heads(
    model: Any,
    text: Any,
    query: TokenLike,
    key: TokenLike,
    *,
    measure: Measure = "cosine",
    prepend_bos: bool = False,
    cache: Any = None,
) -> AssociationHeads:
    """Head map of the gain: association of ``query`` with ``key`` after each head's attention, minus before.

    Args:
        model: A TransformerBridge or HookedTransformer.
        text: A text, or its token ids.
        query: The token whose vector changes: its text, ``walk#2`` for the second of several, or an index.
        key: The token it is compared with.
        measure: What heads are ranked by. Lengths of values differ between heads, so dot products of different
            heads are hard to compare; cosines can be. Both are kept.
        prepend_bos: Put BOS in front of the text.
        cache: An ``ActivationCache`` of this very text, from ``model.run_with_cache``; then nothing is run.

    Example:
        >>> from tl_headmaps import association_heads, load_default_model
        >>> found = association_heads(load_default_model(), "Birds sometimes walk", "walk", "sometimes")
        >>> [(str(head), round(gain, 2)) for head, gain in found.top(2)]
        [('L11H3', 0.83), ('L0H3', 0.78)]
    """
    check_choice(measure, Measure, "measure")
    prompt = EncodedText.of(model, text, prepend_bos=prepend_bos, least=2, what="an association needs two")
    q, k = token_position(prompt.tokens, query), token_position(prompt.tokens, key)
    if q == k:
        raise UsageError(f"Query and key are the same token, {q} {prompt.tokens[q]!r}; choose two.")
    weights = HeadWeights.of(model)
    names = ("before_dot", "after_dot", "others_dot", "before_cosine", "after_cosine", "others_cosine", "attention")
    maps = {name: torch.full((weights.n_layers, weights.n_heads), float("nan")) for name in names}
    others = [token for token in range(q) if token != k]

    def reduce(seen: LayerActivations) -> None:
        groups = key_values(seen, weights.n_kv_heads).to("cpu", torch.float32)
        rows = seen["pattern"][0, :, q].to("cpu", torch.float32)
        for head, row in enumerate(rows):
            values = groups[weights.group_of(head)]
            own, moved = values[q][None], mixed(row[None], values)
            for name, measured in (("dot", dots), ("cosine", cosines)):
                before, after = measured(own, values)[0], measured(moved, values)[0]
                maps[f"before_{name}"][seen.layer, head] = before[k]
                maps[f"after_{name}"][seen.layer, head] = after[k]
                maps[f"others_{name}"][seen.layer, head] = (after - before)[others].mean() if others else float("nan")
            maps["attention"][seen.layer, head] = row[k]

    run_or_read(model, prompt.ids, cache, read=("pattern", "v"), reduce=reduce)
    options = {"query": q, "key": k, "measure": measure, "prepend_bos": prepend_bos, "from_cache": cache is not None}
    return AssociationHeads(
        tokens=prompt.tokens,
        query=q,
        key=k,
        measure=measure,
        provenance=weights.provenance(runs_model=True, options=options),
        **maps,
    )
