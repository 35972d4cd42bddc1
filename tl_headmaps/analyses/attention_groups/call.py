"""Which tokens of a text the heads of a model bind together."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ...capture.running.activations import LayerActivations, run_or_read
from ...capture.running.text import EncodedText
from ...capture.weights import HeadWeights
from ...core.ambient import steady
from ...core.types import Combine, GroupMethod, HeadIndex, HeadLike, LayerLike, Model
from ...scorers.groups import THRESHOLD, Grouping, GroupOptions
from .result import AttentionGroups


@steady
def attention_groups(
    model: Model,
    text: Any,
    *,
    layers: LayerLike | Iterable[LayerLike] | None = None,
    heads: HeadLike | Iterable[HeadLike] | None = None,
    method: GroupMethod = "auto",
    drop_sink: bool = True,
    threshold: float = THRESHOLD,
    n_groups: int | None = None,
    n_null: int | None = None,
    combine: Combine = "mean",
    prepend_bos: bool | None = None,
    cache: Any = None,
) -> AttentionGroups:
    """Groups of tokens that the heads of a model bind together in one text.

    Args:
        model: A TransformerBridge or HookedTransformer.
        text: A text, or its token ids.
        layers: Only heads of these layers.
        heads: Only these heads (``"L12"``: all of layer 12).
        method: ``"spectral"`` (number of groups by the largest eigengap), ``"components"`` (connected by strong edges),
            or ``"auto"``: components where the matrix is sharp.
        drop_sink: Leave attention sinks out: the first token, and others on which attention is parked.
        threshold: Strong edges are at least this share of the strongest edge of one of their tokens.
        n_groups: Make this many groups instead of letting the eigengap decide (spectral).
        n_null: Most draws to compare each head's modularity with. They keep its distance profile and its sinks, and end
            once ten are as modular. By default up to 3,999 for 8 to 32 tokens, 199 up to 64, else none.
        combine: What the groups of all heads together are found in: the mean over heads, or the maximum.
        prepend_bos: Begin the text with BOS; by default as the model does. Token ids are taken as they are.
        cache: An ``ActivationCache`` of this very text, from ``model.run_with_cache``; the model is then not run.

    Example:
        >>> from tl_headmaps import attention_groups, load_default_model
        >>> groups = attention_groups(load_default_model(), "The cat sat on the mat. It was happy.", heads="L13H2")
        >>> groups.words()
        (('The', ' cat'), (' sat', ' on', ' the', ' mat'), ('.', ' It', ' was', ' happy', '.'))
        >>> groups.tokens[groups.sink]  # where attention is parked; left out
        '<|im_start|>'
    """
    chosen_options = GroupOptions(method, drop_sink, threshold, n_groups, n_null, combine)
    prompt = EncodedText.of(model, text, prepend_bos=prepend_bos, least=2, what="a group needs at least two")
    weights = HeadWeights.of(model)
    named = None if heads is None else weights.named_heads(heads)
    chosen = weights.chosen_heads(named, layers)
    chosen_layers = sorted({head.layer for head in chosen})
    index_of = {head: index for index, head in enumerate(chosen)}

    def visit(see: Callable[[int, Tensor], None]) -> None:
        def reduce(seen: LayerActivations) -> None:
            for head, pattern in enumerate(seen["pattern"][0]):
                if (index := index_of.get(HeadIndex(seen.layer, head))) is not None:
                    see(index, pattern)

        run_or_read(model, prompt.ids, cache, read=("pattern",), reduce=reduce, layers=chosen_layers)

    grouping = Grouping(visit, chosen, len(prompt.tokens), chosen_options)
    options = {
        "layers": None if layers is None else chosen_layers,
        "heads": None if named is None else sorted(map(str, named)),
        "prepend_bos": prompt.prepend_bos,
        "from_cache": cache is not None,
        **grouping.options,
    }
    return AttentionGroups.from_grouping(
        grouping, prompt.tokens, chosen, weights.provenance(runs_model=True, options=options, seed=0)
    )
