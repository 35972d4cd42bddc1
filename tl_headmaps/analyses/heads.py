"""Which heads an analysis is asked about."""

from collections.abc import Iterable

from ..capture.weights import HeadWeights
from ..core.errors import UsageError
from ..core.types import HeadLike, head_list


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
