"""Partitions of tokens: finding one in a graph of affinities, and how sharp it is.

A partition is a vector of labels, numbered by first appearance (the group of the first token is 0), so that two
equal partitions have equal labels.

*Clustering* takes a symmetric matrix of affinities:

* **components**: an edge counts when it is at least ``threshold`` times the strongest edge of one of its ends;
  groups are what such edges connect.
* **spectral**: the connected parts of the graph are clustered one by one. Let 1 = l_1 > l_2 >= ... be the eigenvalues
  of the normalised matrix D^-1/2 W D^-1/2. A part with l_2 < 1/2 is one group (two equal groups have l_2 = 1/2 when
  they keep three quarters of their weight to themselves); otherwise the number of groups is the k >= 2 with the
  largest eigengap l_k - l_(k+1). Rows of the first k eigenvectors, scaled to length one, are clustered by k-means
  (Ng, Jordan and Weiss 2001). The gap after l_1 is not compared: l_1 is 1 whatever the graph, so many groups of
  unequal strength would never beat it.
* **auto**: components when the matrix is sharp (at most half of all pairs count, and the edges that do not count
  hold at most 5% of the weight), spectral otherwise.

The same groups come out every time: k-means starts from the token of largest degree and goes on with the row
farthest from those taken, so it depends on distances alone and not on the sign or rotation of eigenvectors;
differences below 1e-9 are ties, and ties go to the lower token.

*Modularity* of a partition is the share of a graph's weight inside groups, less the share expected from the
product of degrees alone: ``Q = sum_c (w_cc / 2m - (d_c / 2m)^2)``. The best partition of pure noise has a
positive Q too, so :func:`shuffled` makes graphs of the same degrees to compare with.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..core.types import GroupMethod

WEAK_SHARE = 0.05
STRONG_PAIRS = 0.5
"""A matrix is sharp when its weak edges hold no more weight, and its strong edges join no more pairs, than this."""

_DENSE = 512
"""Tokens up to which all eigenvectors are computed; above, the leading ones by Lanczos steps."""

_ROWS = 256
"""Rows read at a time."""

_SEPARATE = 0.5
"""Second eigenvalue from which on a connected graph is split."""

_MOST_GROUPS = 32
_DECIMALS = 9
_ROUNDS = 100

_BLOCK = 1 << 22
"""Entries of the shuffled graphs made at once."""

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


def cluster(
    weights: Float[Tensor, "token token"], method: GroupMethod = "auto", threshold: float = 0.1, k: int | None = None
) -> Int[Tensor, " token"]:
    """Labels of the groups of a symmetric, non-negative matrix; its diagonal is not looked at.

    With ``k`` the spectral method makes this many groups of all tokens that have an edge; the others stay alone.

    Example:
        >>> block = torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 1]])
        >>> cluster(block)
        tensor([0, 0, 1])
    """
    if bool(weights.diagonal().any()):
        weights = weights.clone().fill_diagonal_(0)
    if k is None and chosen_method(weights, method, threshold) == "components":
        return connected(len(weights), lambda tokens: strong_rows(weights, tokens, threshold))
    if k is None:
        parts = connected(len(weights), lambda tokens: weights[tokens] > 0)
    else:
        bound = weights.sum(1) > 0
        parts = numbered(torch.where(bound, -1, torch.arange(len(weights))))
    labels = torch.zeros_like(parts)
    for part in range(int(parts.max()) + 1 if len(parts) else 0):
        tokens = (parts == part).nonzero().flatten()
        whole = len(tokens) == len(weights)
        inner = _spectral(weights if whole else weights[tokens][:, tokens], k)
        labels[tokens] = inner + int(labels.max()) + 1
    return numbered(labels)


def chosen_method(
    weights: Float[Tensor, "token token"], method: GroupMethod, threshold: float
) -> Literal["spectral", "components"]:
    """What ``"auto"`` means for a matrix with an empty diagonal."""
    if method != "auto":
        return method
    n = len(weights)
    strong_edges, weak, total = 0, 0.0, 0.0
    for tokens in torch.arange(n).split(_ROWS):
        rows, strong = weights[tokens], strong_rows(weights, tokens, threshold)
        strong_edges += int(strong.sum())
        total += float(rows.sum())
        weak += float(rows[~strong].sum())
    sharp = weak <= WEAK_SHARE * total and strong_edges <= STRONG_PAIRS * n * (n - 1)
    return "components" if sharp else "spectral"


def strong_rows(
    weights: Float[Tensor, "token token"], tokens: Int[Tensor, " some"], threshold: float
) -> Bool[Tensor, "some token"]:
    """Which edges of some tokens count: not far below the strongest edge of either end."""
    strongest = weights.amax(1)
    rows = weights[tokens]
    return (rows >= threshold * torch.minimum(strongest[tokens, None], strongest[None, :])) & (rows > 0)


def connected(n: int, edges_of: Callable[[Tensor], Bool[Tensor, "some token"]]) -> Int[Tensor, " token"]:
    """Labels of the connected parts; ``edges_of`` gives rows of the adjacency, so the full matrix is never built."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    labels = np.arange(n)
    for first in range(0, n, _ROWS):
        ends, others = edges_of(torch.arange(first, min(first + _ROWS, n))).numpy().nonzero()
        # Edges between the parts connected so far; both are numbered by their first token, so the result is too.
        pairs = (labels[first + ends], labels[others])
        edges = coo_array((np.ones(len(ends)), pairs), (int(labels.max()) + 1,) * 2)
        labels = connected_components(edges, directed=False)[1][labels]
    return torch.from_numpy(labels).long()


def _spectral(weights: Float[Tensor, "token token"], k: int | None) -> Int[Tensor, " token"]:
    """Spectral clustering of one part of a graph, into as many groups as its eigengap says unless told."""
    n = len(weights)
    most = min(n // 2, _MOST_GROUPS) if k is None else min(k, n - 1)
    if most < 2:
        return torch.zeros(n, dtype=torch.long)
    degrees = weights.sum(1).double()
    values, vectors = _leading(weights, degrees.rsqrt(), most + 1)
    if k is None:
        if values[1] < _SEPARATE:
            return torch.zeros(n, dtype=torch.long)
        most = int(np.round(values[1:-1] - values[2:], _DECIMALS).argmax()) + 2
    rows = vectors[:, :most]
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    first = int((degrees / degrees.max()).numpy().round(_DECIMALS).argmax())
    return _k_means(rows, most, first)


def _leading(weights: Tensor, scale: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest eigenvalues of the normalised matrix, largest first, and their eigenvectors."""
    n = len(weights)
    if n <= _DENSE:
        values, vectors = np.linalg.eigh((weights * scale[:, None] * scale[None, :]).double().numpy())
        return values[::-1][:k], vectors[:, ::-1][:, :k]
    from scipy.sparse.linalg import LinearOperator, eigsh

    factor = scale.to(weights.dtype)

    def times(vector: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(np.ascontiguousarray(vector.reshape(-1))).to(weights.dtype)
        product: np.ndarray = (factor * (weights @ (factor * x))).double().numpy()
        return product

    # A fixed start that is no eigenvector: the first eigenvector, sqrt(degree), would end the iteration at once.
    start = np.cos(np.arange(n, dtype=np.float64) ** 1.5) + 0.1
    values, vectors = eigsh(
        LinearOperator((n, n), matvec=times, dtype=np.float64), k=k, which="LA", v0=start, tol=1e-6, ncv=min(n, 3 * k)
    )
    order = np.argsort(-values, kind="stable")
    return values[order], vectors[:, order]


def _k_means(points: np.ndarray, k: int, first: int) -> Int[Tensor, " token"]:
    """Lloyd's algorithm from the farthest-first start."""
    taken = [first]
    nearest = _distances(points, points[[first]])[:, 0]
    while len(taken) < k:
        taken.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, _distances(points, points[[taken[-1]]])[:, 0])
    centres = points[taken]
    labels = np.full(len(points), -1)
    for _ in range(_ROUNDS):
        moved = _distances(points, centres).argmin(1)
        if (moved == labels).all():
            break
        labels = moved
        centres = np.stack([points[labels == c].mean(0) if (labels == c).any() else centres[c] for c in range(k)])
    return torch.from_numpy(labels).long()


def _distances(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Squared distances; rounded, so that ties are ties."""
    squared: np.ndarray = ((points[:, None, :] - centres[None, :, :]) ** 2).sum(-1)
    return squared.round(_DECIMALS)


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


def shuffled(weights: Float[Tensor, "token token"], n_null: int, seed: int) -> Iterator[Float[Tensor, "token token"]]:
    """Graphs in which each token deals its weights to earlier tokens at random, brought back to the same degrees.

    A query keeps how sharply it attends and a token keeps how much it is attended to; who attends to whom is chance.
    Scaling back to the degrees is symmetric and stops after fifty rounds, so very sparse graphs meet them only roughly.
    """
    n = len(weights)
    earlier, wanted = weights.tril(-1), weights.sum(1)[:, None]
    unseen = torch.ones(n, n, dtype=torch.bool).triu()
    generator = torch.Generator().manual_seed(seed)
    # As many graphs at once as fit: for the few tokens of a sentence, one by one would cost mostly overhead.
    for count in [len(some) for some in torch.arange(n_null).split(max(1, _BLOCK // (n * n)))]:
        # Row i of the sorted order begins with a permutation of 0 .. i - 1.
        order = torch.rand(count, n, n, generator=generator).masked_fill_(unseen, 2.0).argsort(dim=2, stable=True)
        graphs = torch.zeros_like(earlier).repeat(count, 1, 1).scatter_(2, order, earlier.expand(count, n, n))
        graphs = graphs + graphs.mT
        scale = weights.new_ones(count, n, 1)
        for _ in range(_SCALINGS):
            reached = scale * (graphs @ scale)
            scale = scale * torch.where(reached > 0, wanted / reached.clamp_min(1e-30), 0.0).sqrt()
        yield from graphs.mul_(scale).mul_(scale.mT)
