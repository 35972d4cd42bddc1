"""Partitions of tokens: how they are numbered, how sharp one is on a weighted graph, how alike two are.

A partition is a vector of labels, numbered by first appearance (the group of the first token is 0), so that two
equal partitions have equal labels.

*Modularity* of a partition is the share of a graph's weight inside groups, less the share expected from the
product of degrees alone: ``Q = sum_c (w_cc / 2m - (d_c / 2m)^2)``. The best partition of pure noise has a
positive Q too, so :func:`shuffled` makes graphs of the same degrees to compare with.

*Adjusted Rand index*: 1 for equal partitions, 0 on average for unrelated ones.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

_BLOCK = 1 << 22
"""Entries of a block of co-membership."""

_SCALINGS = 50
"""Rounds that bring a shuffled graph back to its degrees."""


def numbered(labels: Int[Tensor, " token"]) -> Int[Tensor, " token"]:
    """The same partition with groups numbered by their first token.

    Example:
        >>> numbered(torch.tensor([7, 7, 2, 7]))
        tensor([0, 0, 1, 0])
    """
    names: dict[int, int] = {}
    return torch.tensor([names.setdefault(label, len(names)) for label in labels.tolist()], dtype=torch.long)


def members(labels: Int[Tensor, " token"]) -> list[list[int]]:
    """Tokens of each group, in order."""
    groups: list[list[int]] = [[] for _ in range(int(labels.max()) + 1 if len(labels) else 0)]
    for token, label in enumerate(labels.tolist()):
        groups[label].append(token)
    return groups


def within(weights: Float[Tensor, "token token"], labels: Int[Tensor, " token"]) -> Float[Tensor, " group"]:
    """Weight between tokens of the same group, for each group."""
    if not len(labels):
        return weights.new_zeros(0)
    indicator = torch.nn.functional.one_hot(labels).to(weights.dtype)
    return (indicator * (weights @ indicator)).sum(0)


def modularity(weights: Float[Tensor, "token token"], labels: Int[Tensor, " token"]) -> float:
    """Newman's modularity of a partition of a symmetric graph; 0 for a graph without edges."""
    degrees = weights.sum(1).double()
    total = float(degrees.sum())
    if total <= 0:
        return 0.0
    inside = within(weights, labels).double()
    of_group = torch.zeros_like(inside).index_add_(0, labels, degrees)
    return float((inside / total - (of_group / total).square()).sum())


def shuffled(weights: Float[Tensor, "token token"], draws: int, seed: int) -> Iterator[Float[Tensor, "token token"]]:
    """Graphs in which each token deals its weights to earlier tokens at random, brought back to the same degrees.

    A query keeps how sharply it attends and a token keeps how much it is attended to; who attends to whom is chance.
    Scaling back to the degrees is symmetric and stops after fifty rounds, so very sparse graphs meet them only roughly.
    """
    n = len(weights)
    earlier, wanted = weights.tril(-1), weights.sum(1)[:, None]
    unseen = torch.ones(n, n, dtype=torch.bool).triu()
    generator = torch.Generator().manual_seed(seed)
    # As many graphs at once as fit: for the few tokens of a sentence, one by one would cost mostly overhead.
    for count in [len(some) for some in torch.arange(draws).split(max(1, _BLOCK // (n * n)))]:
        # Row i of the sorted order begins with a permutation of 0 .. i - 1.
        order = torch.rand(count, n, n, generator=generator).masked_fill_(unseen, 2.0).argsort(dim=2, stable=True)
        graphs = torch.zeros_like(earlier).repeat(count, 1, 1).scatter_(2, order, earlier.expand(count, n, n))
        graphs = graphs + graphs.mT
        scale = weights.new_ones(count, n, 1)
        for _ in range(_SCALINGS):
            reached = scale * (graphs @ scale)
            scale = scale * torch.where(reached > 0, wanted / reached.clamp_min(1e-30), 0.0).sqrt()
        yield from graphs.mul_(scale).mul_(scale.mT)


def rand_indices(labels: Int[Tensor, "head token"]) -> Float[Tensor, "head head"]:
    """Adjusted Rand index of every two partitions of the same tokens.

    Example:
        >>> rand_indices(torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 0, 1]]))[0].round(decimals=3).tolist()
        [1.0, 1.0, -0.5]
    """
    n_heads, n = labels.shape
    together = torch.zeros(n_heads, n_heads, dtype=torch.float64)
    # Co-membership of a block of tokens with all, flattened: inner products count the pairs two partitions share.
    for block in labels.split(max(1, _BLOCK // max(1, n_heads * n)), dim=1):
        same = (block[:, :, None] == labels[:, None, :]).flatten(1).float()
        together += (same @ same.T).double()
    pairs = (together - n) / 2
    of_one, total = pairs.diagonal(), n * (n - 1) / 2
    expected = of_one[:, None] * of_one[None, :] / max(total, 1.0)
    highest = (of_one[:, None] + of_one[None, :]) / 2
    index = (pairs - expected) / (highest - expected)
    # Both have no pairs, or both only pairs: then they are equal.
    return torch.where(highest == expected, torch.ones_like(index), index)


def similar_partitions(labels: Int[Tensor, "head token"], least: float) -> list[list[int]]:
    """Clusters of partitions (average linkage) whose mean index is at least ``least``, by their first member."""
    if len(labels) < 2:
        return [[number] for number in range(len(labels))]
    from scipy.cluster.hierarchy import fcluster, linkage

    distances = 1 - rand_indices(labels)
    rows, columns = torch.triu_indices(len(labels), len(labels), 1).unbind()
    tree = linkage(distances[rows, columns].clamp_min(0).numpy(), method="average")
    found = fcluster(tree, t=1 - least + 1e-9, criterion="distance")
    return members(numbered(torch.from_numpy(found).long()))
