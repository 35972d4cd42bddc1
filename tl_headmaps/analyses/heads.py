"""Which heads an analysis is asked about."""

from collections.abc import Iterable
from typing import Any

from ..capture.weights import HeadWeights
from ..errors import UsageError
from ..types import HeadIndex, HeadLike


def heads_by_layer(weights: HeadWeights, heads: HeadLike | Iterable[HeadLike] | None) -> list[list[int]]:
    """Numbers of the chosen heads (None: all) of each layer; raises for heads the model does not have."""
    if heads is None:
        return [list(range(weights.n_heads)) for _ in range(weights.n_layers)]
    chosen: list[list[int]] = [[] for _ in range(weights.n_layers)]
    for index in sorted({weights.head(head) for head in head_list(heads)}):
        chosen[index.layer].append(index.head)
    if not any(chosen):
        raise UsageError("heads= is empty. Name at least one head, or leave it out for all.")
    return chosen


def head_list(heads: Any) -> list[HeadLike]:
    """One head or several: a name, a HeadIndex, a (layer, head) pair, or a list of these."""
    if isinstance(heads, str | HeadIndex):
        return [heads]
    listed = list(heads)
    return [(listed[0], listed[1])] if len(listed) == 2 and all(type(part) is int for part in listed) else listed


def head_names(heads: Any) -> list[str] | None:
    """The same choice as a provenance records it."""
    return None if heads is None else sorted(str(HeadIndex.of(head)) for head in head_list(heads))
