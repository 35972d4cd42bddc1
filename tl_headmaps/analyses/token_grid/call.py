"""The first look at a head: what it does with a few tokens you choose."""

from collections.abc import Sequence
from typing import Any

import torch

from ...capture.weights import HeadWeights
from ...circuits.extremes import entries
from ...circuits.maps import CircuitMaps
from ...circuits.ranking import ranks
from ...core.errors import UsageError
from ...core.types import Circuit, HeadLike, Preset, check_choice
from ...core.vocabulary import TokenLike, single_id, token_string
from .result import TokenGrid


def token_grid(
    model: Any,
    head: HeadLike,
    sources: Sequence[TokenLike],
    targets: Sequence[TokenLike],
    *,
    circuit: Circuit = "ov",
    preset: Preset = "folded",
) -> TokenGrid:
    """Entries of one head's map for chosen tokens, with their exact ranks among the whole vocabulary.

    Args:
        model: A TransformerBridge, a HookedTransformer, or HeadWeights.
        head: ``"L23H4"``, ``(23, 4)`` or a HeadIndex.
        sources: Row tokens: words (taken with their leading space, as inside a text) or token ids.
        targets: Column tokens, likewise.
        circuit: ``"ov"``: what the head writes when it attends to a source. ``"qk"``: how much a query (row)
            attends to a key (column).
        preset: ``"folded"``: what the model computes for a token without context. ``"maps"``: the published recipe.

    Example:
        >>> from tl_headmaps import load_default_model, token_grid
        >>> grid = token_grid(load_default_model(), "L23H4", ["France", "Egypt"], ["Paris", "Cairo"])
        >>> grid.best()
        [('France', 'Paris'), ('Egypt', 'Cairo')]
        >>> int(grid.ranks[0, 0])  # of 49,152 tokens, only two are written more strongly than Paris
        2
    """
    check_choice(circuit, Circuit, "circuit")
    check_choice(preset, Preset, "preset")
    weights = HeadWeights.of(model)
    index = weights.head(head)
    for name, words in (("sources", sources), ("targets", targets)):
        if isinstance(words, str) or not len(words):
            raise UsageError(f"{name} must be a list of at least one word or token id, not {words!r}.")
    source_ids = [single_id(weights.tokenizer, word, weights.n_vocab) for word in sources]
    rows = torch.arange(len(source_ids), device=weights.device)
    ids = torch.tensor(source_ids, device=weights.device)
    circuits = CircuitMaps(weights, ids, circuit=circuit, preset=preset)
    target_ids = [single_id(weights.tokenizer, word, circuits.n_columns) for word in targets]
    columns = torch.tensor(target_ids, device=weights.device)
    maps = circuits.layer(index.layer, [index.head])
    found = ranks(maps, rows.repeat_interleave(len(columns)), columns.repeat(len(rows)))
    values = entries(maps, columns)[0]
    return TokenGrid(
        head=index,
        circuit=circuit,
        sources=_labels(weights, sources),
        targets=_labels(weights, targets),
        source_ids=tuple(source_ids),
        target_ids=tuple(target_ids),
        values=values.cpu(),
        ranks=found.greater[0].view(len(rows), len(columns)).cpu(),
        n_vocab=circuits.n_columns,
        provenance=weights.provenance(options={"preset": preset}),
    )


def _labels(weights: HeadWeights, words: Sequence[TokenLike]) -> tuple[str, ...]:
    """Words as they were given; ids as the text of their token."""
    return tuple(
        word
        if isinstance(word, str)
        else (f"#{word}" if weights.tokenizer is None else token_string(weights.tokenizer, word))
        for word in words
    )
