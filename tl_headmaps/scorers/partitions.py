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
positive Q too, and attention that only falls with distance a large one: :mod:`.groups` has the null.
"""

from collections.abc import Callable, Iterator

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

_SEPARATE = 0.5
"""Second eigenvalue from which on a connected graph is split."""

_MOST_GROUPS = 32
_DECIMALS = 9
_ROUNDS = 100

_BLOCK = 1 << 20
"""Entries of graphs read at a time."""


def numbered(labels: Int[Tensor, "*graph token"]) -> Int[Tensor, "*graph token"]:
    """The same partitions with groups numbered by their first token.

    Example:
        >>> numbered(torch.tensor([7, 7, 2, 7]))
        tensor([0, 0, 1, 0])
    """
    n = labels.shape[-1]
    same = labels[..., :, None] == labels[..., None, :]
    # The first token of each token's group; groups are counted by those.
    first = same.to(torch.uint8).argmax(-1)
    starts = first == torch.arange(n)
    return (starts.cumsum(-1) - 1).gather(-1, first)


def members(labels: Int[Tensor, " token"]) -> list[list[int]]:
    """Tokens of each group, in order."""
    groups: list[list[int]] = [[] for _ in range(int(labels.max()) + 1 if len(labels) else 0)]
    for token, label in enumerate(labels.tolist()):
        groups[label].append(token)
    return groups


def cluster(
    weights: Float[Tensor, "*graph token token"],
    method: GroupMethod = "auto",
    threshold: float = 0.1,
    k: int | None = None,
) -> Int[Tensor, "*graph token"]:
    """Labels of the groups of symmetric, non-negative matrices; their diagonals are not looked at.

    Many small graphs are clustered at once about as fast as their eigenvectors can be computed. With ``k`` the spectral
    method makes this many groups of all tokens that have an edge; the others stay alone.

    Example:
        >>> block = torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 1]])
        >>> cluster(block)
        tensor([0, 0, 1])
    """
    if bool(weights.diagonal(dim1=-2, dim2=-1).any()):
        weights = weights.clone()
        weights.diagonal(dim1=-2, dim2=-1).zero_()
    n = weights.shape[-1]
    graphs = weights.reshape(-1, n, n)
    if k is None:
        sharp = torch.full((len(graphs),), method == "components") if method != "auto" else is_sharp(graphs, threshold)
        parts = connected(
            graphs, lambda rows: torch.where(sharp[:, None, None], strong(graphs, rows, threshold), graphs[:, rows] > 0)
        )
    else:
        sharp = torch.zeros(len(graphs), dtype=torch.bool)
        bound = graphs.sum(2) > 0
        parts = torch.where(bound, 0, torch.arange(1, n + 1))
    labels = _split(graphs, parts, ~sharp, k)
    return labels.reshape(weights.shape[:-1])


def is_sharp(graphs: Float[Tensor, "graph token token"], threshold: float) -> Bool[Tensor, " graph"]:
    """Whether ``"auto"`` means components: few strong edges hold nearly all the weight. Diagonals are empty."""
    n = graphs.shape[-1]
    strong_edges, weak, total = (torch.zeros(len(graphs), dtype=torch.float64) for _ in range(3))
    for rows in _rows(graphs):
        weights, counts = graphs[:, rows], strong(graphs, rows, threshold)
        strong_edges += counts.sum((1, 2))
        total += weights.sum((1, 2))
        weak += weights.masked_fill(counts, 0).sum((1, 2))
    return (weak <= WEAK_SHARE * total) & (strong_edges <= STRONG_PAIRS * n * (n - 1))


def strong(
    graphs: Float[Tensor, "graph token token"], rows: slice, threshold: float
) -> Bool[Tensor, "graph some token"]:
    """Which edges of some tokens count: not far below the strongest edge of either end."""
    strongest = graphs.amax(2)
    weights = graphs[:, rows]
    return (weights >= threshold * torch.minimum(strongest[:, rows, None], strongest[:, None, :])) & (weights > 0)


def _rows(graphs: Tensor) -> Iterator[slice]:
    """Rows of all graphs that are read at a time."""
    count, n, _ = graphs.shape
    step = max(1, _BLOCK // max(1, count * n))
    return (slice(first, min(first + step, n)) for first in range(0, n, step))


def connected(
    graphs: Float[Tensor, "graph token token"], edges_of: Callable[[slice], Bool[Tensor, "graph some token"]]
) -> Int[Tensor, "graph token"]:
    """Labels of the connected parts, numbered in each graph; ``edges_of`` gives rows, so no full matrix is built."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count, n, _ = graphs.shape
    labels = np.arange(count * n)
    for rows in _rows(graphs):
        graph, ends, others = edges_of(rows).numpy().nonzero()
        # Edges between the parts connected so far; both are numbered by their first token, so the result is too.
        pairs = (labels[graph * n + rows.start + ends], labels[graph * n + others])
        edges = coo_array((np.ones(len(ends)), pairs), (int(labels.max()) + 1,) * 2)
        labels = connected_components(edges, directed=False)[1][labels]
    found = labels.reshape(count, n)
    return torch.from_numpy(found - found[:, :1]).long()


def _split(
    graphs: Float[Tensor, "graph token token"],
    parts: Int[Tensor, "graph token"],
    spectral: Bool[Tensor, " graph"],
    k: int | None,
) -> Int[Tensor, "graph token"]:
    """Labels after the parts of some graphs have been clustered one by one; parts of one size go together."""
    count, n = parts.shape
    if not n:
        return parts
    # Clustering asks for eigenvectors part by part. Parts of one size are stacked, whichever graphs they are from, so
    # that one call of the linear algebra serves thousands of small ones.
    whole = (parts.numpy() + (n + 1) * np.arange(count)[:, None]).ravel()
    order = np.argsort(whole, kind="stable")
    _, starts, sizes = np.unique(whole[order], return_index=True, return_counts=True)
    labels = whole * n
    chosen = spectral.numpy()[order[starts] // n]
    for size in np.unique(sizes[chosen & (sizes > 1)]):
        places = order[starts[chosen & (sizes == size)][:, None] + np.arange(size)]
        graph, tokens = places[:, 0] // n, places % n
        if size == n and len(graph) == count:
            inner = graphs.numpy()
        else:
            inner = graphs.numpy()[graph[:, None, None], tokens[:, :, None], tokens[:, None, :]]
        labels[places] += _spectral(inner, k)
    return numbered(torch.from_numpy(labels.reshape(count, n)))


def _spectral(weights: np.ndarray, k: int | None) -> np.ndarray:
    """Spectral clustering of parts of one size, each into as many groups as its eigengap says unless told."""
    count, n, _ = weights.shape
    labels = np.zeros((count, n), dtype=np.int64)
    if k is not None and k >= n:
        return np.tile(np.arange(n), (count, 1))
    most = min(n // 2, _MOST_GROUPS) if k is None else k
    if most < 2:
        return labels
    degrees = weights.sum(2, dtype=np.float64)
    values, vectors = _leading(weights, 1 / np.sqrt(degrees), most + 1)
    if k is None:
        gaps = np.round(values[:, 1:-1] - values[:, 2:], _DECIMALS)
        numbers = np.where(values[:, 1] < _SEPARATE, 1, gaps.argmax(1) + 2)
    else:
        numbers = np.full(count, most)
    first = (degrees / degrees.max(1, keepdims=True)).round(_DECIMALS).argmax(1)
    for number in np.unique(numbers[numbers > 1]):
        some = np.flatnonzero(numbers == number)
        rows = vectors[some, :, :number]
        rows = rows / np.maximum(np.linalg.norm(rows, axis=2, keepdims=True), 1e-30)
        labels[some] = _k_means(rows, first[some])
    return labels


def _leading(weights: np.ndarray, scale: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest eigenvalues of the normalised matrices, largest first, and their eigenvectors."""
    n = weights.shape[-1]
    if n <= _DENSE:
        values, vectors = np.linalg.eigh(weights * scale[:, :, None] * scale[:, None, :])
        return values[:, ::-1][:, :k], vectors[:, :, ::-1][:, :, :k]
    from scipy.sparse.linalg import LinearOperator, eigsh

    # A fixed start that is no eigenvector: the first eigenvector, sqrt(degree), would end the iteration at once.
    start = np.cos(np.arange(n, dtype=np.float64) ** 1.5) + 0.1
    found = []
    for graph, wide in zip(weights, scale, strict=True):
        factor = wide.astype(graph.dtype)

        def times(vector: np.ndarray, graph: np.ndarray = graph, factor: np.ndarray = factor) -> np.ndarray:
            product: np.ndarray = factor * (graph @ (factor * vector.reshape(-1).astype(graph.dtype)))
            return product.astype(np.float64)

        values, vectors = eigsh(
            LinearOperator((n, n), matvec=times, dtype=np.float64),
            k=k,
            which="LA",
            v0=start,
            tol=1e-6,
            ncv=min(n, 3 * k),
        )
        order = np.argsort(-values, kind="stable")
        found.append((values[order], vectors[:, order]))
    return np.stack([values for values, _ in found]), np.stack([vectors for _, vectors in found])


def _k_means(points: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Lloyd's algorithm from the farthest-first start, for many sets of points; as many groups as dimensions."""
    count, n, k = points.shape
    every = np.arange(count)
    centres = np.empty((count, k, k))
    centres[:, 0] = points[every, first]
    nearest = _distances(points, centres[:, :1])[:, :, 0]
    for number in range(1, k):
        centres[:, number] = points[every, nearest.argmax(1)]
        nearest = np.minimum(nearest, _distances(points, centres[:, number : number + 1])[:, :, 0])
    labels = np.full((count, n), -1)
    moving = every
    for _ in range(_ROUNDS):
        moved = _distances(points[moving], centres[moving]).argmin(2)
        changed = (moved != labels[moving]).any(1)
        moving, moved = moving[changed], moved[changed]
        if not len(moving):
            break
        labels[moving] = moved
        inside = (moved[:, :, None] == np.arange(k)).astype(float)
        sizes = inside.sum(1)[:, :, None]
        sums = inside.transpose(0, 2, 1) @ points[moving]
        centres[moving] = np.where(sizes > 0, sums / np.maximum(sizes, 1), centres[moving])
    return labels


def _distances(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Squared distances of many sets of points; rounded, so that ties are ties."""
    squares = (points**2).sum(2)[:, :, None] + (centres**2).sum(2)[:, None, :]
    squared: np.ndarray = squares - 2 * points @ centres.transpose(0, 2, 1)
    return squared.round(_DECIMALS)


def within(
    weights: Float[Tensor, "*graph token token"], labels: Int[Tensor, "*graph token"]
) -> Float[Tensor, "*graph group"]:
    """Weight between tokens of the same group, for each group."""
    if not labels.shape[-1]:
        return weights.new_zeros(*labels.shape[:-1], 0)
    indicator = torch.nn.functional.one_hot(labels).to(weights.dtype)
    return (indicator * (weights @ indicator)).sum(-2)


def modularity(
    weights: Float[Tensor, "*graph token token"], labels: Int[Tensor, "*graph token"]
) -> Float[Tensor, "*graph"]:
    """Newman's modularity of partitions of symmetric graphs; 0 for a graph without edges.

    Example:
        >>> pairs = torch.tensor([[0.0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]])
        >>> modularity(pairs, torch.tensor([0, 0, 1, 1]))
        tensor(0.5000, dtype=torch.float64)
    """
    degrees = weights.sum(-1).double()
    total = degrees.sum(-1, keepdim=True).clamp_min(1e-300)
    inside = within(weights, labels).double()
    of_group = torch.zeros_like(inside).scatter_add_(-1, labels, degrees)
    return (inside / total - (of_group / total).square()).sum(-1)
