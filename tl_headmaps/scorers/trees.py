"""Attention masks that are trees: each token sees itself and its ancestors, nothing else.

Such masks verify many drafted continuations of a text in one pass (speculative decoding with a token tree).
"""

import torch
from jaxtyping import Bool
from torch import Tensor


def tree_parents(seen: Bool[Tensor, "query key"]) -> list[int | None] | None:
    """Parent of each token (None for a root), or None if the mask is no tree or the plain causal triangle.

    A token's parent is the latest of the tokens it sees; the others must be exactly what the parent sees.

    Example:
        >>> tree_parents(torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool())
        [None, 0, 0]
    """
    n = len(seen)
    lower = torch.ones(n, n, dtype=torch.bool).tril()
    if not n or bool((seen & ~lower).any()) or not bool(seen.diagonal().all()) or bool((seen == lower).all()):
        return None
    parents: list[int | None] = []
    for token in range(n):
        ancestors = seen[token, :token].nonzero().flatten()
        if not len(ancestors):
            parents.append(None)
            continue
        parent = int(ancestors[-1])
        if not torch.equal(seen[token, : parent + 1], seen[parent, : parent + 1]):
            return None
        parents.append(parent)
    return parents
