"""Groups of tokens from a symmetric matrix of affinities: connected components or spectral clustering.

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
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .partitions import numbered

GroupMethod: TypeAlias = Literal["auto", "spectral", "components"]

WEAK_SHARE = 0.05
STRONG_PAIRS = 0.5
"""A matrix is sharp when its weak edges hold no more weight, and its strong edges join no more pairs, than this."""

_DENSE = 512
"""Tokens up to which all eigenvectors are computed; above, the leading ones by Lanczos steps."""

_ROWS = 256
"""Rows looked at in one go."""

_SEPARATE = 0.5
"""Second eigenvalue from which on a connected graph is more than one group."""

_MOST_GROUPS = 32
_DECIMALS = 9
_ROUNDS = 100


def cluster(
    weights: Float[Tensor, "token token"], method: GroupMethod = "auto", threshold: float = 0.1, k: int | None = None
) -> Int[Tensor, " token"]:
    """Labels of the groups of a symmetric, non-negative matrix; its diagonal is not looked at.

    With ``k`` the spectral method makes so many groups of all tokens that have an edge; the others stay alone.

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
    """Labels of connected parts; ``edges_of`` gives rows of the adjacency, so that it never stands as a whole."""
    labels = torch.full((n,), -1)
    label = 0
    while len(free := (labels < 0).nonzero().flatten()):
        frontier = free[:1]
        labels[frontier] = label
        while len(frontier):
            reached = torch.cat([edges_of(some).any(0, keepdim=True) for some in frontier.split(_ROWS)]).any(0)
            frontier = (reached & (labels < 0)).nonzero().flatten()
            labels[frontier] = label
        label += 1
    return labels


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
