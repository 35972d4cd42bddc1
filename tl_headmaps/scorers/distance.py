r"""Attention that depends on distance alone: a head's attention if it knew nothing but how far away tokens are.

Nearly every head attends more to near tokens than to far ones, and that alone makes tokens of a sentence look bound
together. So a head is compared with itself: every pair (query, key) belongs to a *class*, its distance, and pairs of
one class are exchanged. A sink, a token on which attention is parked, is a class of its own: what it gets is no matter
of distance. Two forms of the idea:

* **In the mean.** A'[q, k] = a_q b_c with the head's own sums over rows and over classes (iterative proportional
  fitting): each query gives away as much as it does, each class gets as much as it does (:func:`expected_on`).
* **As draws.** Scores before the softmax are known up to a constant in each row. ``log A`` less a row effect and a
  class effect (least squares) is what distance does not explain; it is permuted within classes, the class effect is
  added again, and each row is brought back to its sum (:class:`DistanceNull`). Residuals of a fit are smaller than
  what was fitted, those of short rows most: each is divided by the root of one minus its leverage. Permuting attention
  itself would forget that keys of a row compete, and find a pattern in every fifth matrix of sharp noise.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_ROUNDS = 30
_LEAST = 1e-9
"""Shares of a row below this count as this much: the logarithm of 0 is undefined."""


def pair_classes(
    n: int, *, causal: bool = True, sinks: Bool[Tensor, " token"] | None = None
) -> Int[Tensor, "query key"]:
    """Number of the class of each pair: its distance, or a class of its own for each sink; -1 for keys not seen.

    Example:
        >>> pair_classes(3)
        tensor([[ 0, -1, -1],
                [ 1,  0, -1],
                [ 2,  1,  0]])
        >>> pair_classes(3, sinks=torch.tensor([True, False, False]))
        tensor([[ 2, -1, -1],
                [ 2,  0, -1],
                [ 2,  1,  0]])
    """
    token = torch.arange(n)
    distance = token[:, None] - token[None, :]
    # Backwards and forwards are different; numbers are those of the classes there are, in order.
    wanted = torch.where(distance >= 0, distance, n - 1 - distance)
    if sinks is not None and len(sinks):
        wanted = torch.where(sinks[None, :], 2 * n + token[None, :], wanted)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    _, numbers = wanted[seen].unique(return_inverse=True)
    classes = torch.full((n, n), -1)
    classes[seen] = numbers
    return classes


def expected_on(
    pattern: Float[Tensor, "head query key"], pairs: Bool[Tensor, "score query key"], classes: Int[Tensor, "query key"]
) -> Float[Tensor, "head score"]:
    """Attention on some pairs, summed, if it depended on the query and the class of the pair alone."""
    query, key = (classes >= 0).nonzero(as_tuple=True)
    number = classes[query, key]
    n, count = len(classes), int(number.max()) + 1
    attention = pattern[:, query, key].double()
    rows = pattern.double().sum(2)
    of_class = torch.zeros(len(pattern), count, dtype=torch.float64).index_add_(1, number, attention)
    # A query meets each class at most once, so both fits are products with one matrix.
    seen = torch.zeros(n, count, dtype=torch.float64)
    seen[query, number] = 1
    by_row, by_class = torch.ones_like(rows), torch.ones_like(of_class)
    for _ in range(_ROUNDS):
        by_row = rows / (by_class @ seen.T).clamp_min(1e-300)
        by_class = of_class / (by_row @ seen).clamp_min(1e-300)
    fitted = by_row[:, query] * by_class[:, number]
    return fitted @ pairs[:, query, key].double().T


class DistanceNull:
    """Patterns of some heads with everything but distance and sinks left to chance.

    Example:
        >>> far = torch.tensor([[[1.0, 0, 0], [0.5, 0.5, 0], [0.2, 0.2, 0.6]]])
        >>> drawn = DistanceNull(far, pair_classes(3)).draw(np.random.default_rng(0), 4)
        >>> drawn.shape, bool(torch.allclose(drawn.sum(-1), torch.ones(1, 4, 3, dtype=torch.float64)))
        (torch.Size([1, 4, 3, 3]), True)
    """

    def __init__(self, patterns: Float[Tensor, "head query key"], classes: Int[Tensor, "query key"]) -> None:
        self._shape = tuple(patterns.shape)
        self._query, self._key = (classes >= 0).nonzero(as_tuple=True)
        self._class = classes[self._query, self._key]
        self.totals = patterns.double().sum(2)
        shares = patterns.double() / self.totals.clamp_min(1e-300)[:, :, None]
        logs = shares[:, self._query, self._key].clamp_min(_LEAST).log()
        self._residuals, self._effects = _without_rows(logs, self._query, self._class)

    def draw(
        self, generator: np.random.Generator, n_draws: int, heads: Int[Tensor, " some"] | None = None
    ) -> Float[Tensor, "some draw query key"]:
        """Draws for some heads; pairs are exchanged in the same way for all of them."""
        chosen = torch.arange(self._shape[0]) if heads is None else heads
        order = torch.from_numpy(np.argsort(self._class.numpy(), kind="stable"))
        # Random numbers between the classes' numbers: sorting permutes inside each class.
        random = torch.from_numpy(generator.random((n_draws, len(order)))) + self._class
        permuted = torch.empty(n_draws, len(order), dtype=torch.int64)
        permuted[:, order] = random.argsort(1)
        scores = self._residuals[chosen][:, permuted] + self._effects[chosen][:, None, :]
        drawn = scores.new_full((len(chosen), n_draws, *self._shape[1:]), -torch.inf)
        drawn[:, :, self._query, self._key] = scores
        return drawn.softmax(-1).nan_to_num_(0).mul_(self.totals[chosen][:, None, :, None])


def _without_rows(
    logs: Float[Tensor, "head pair"], query: Int[Tensor, " pair"], number: Int[Tensor, " pair"]
) -> tuple[Float[Tensor, "head pair"], Float[Tensor, "head pair"]]:
    """What neither the row nor the class of a pair explains, as large as it was before fitting; and its class' part."""
    n_rows, n_classes = int(query.max()) + 1, int(number.max()) + 1
    design = torch.zeros(n_rows + n_classes, n_rows + n_classes, dtype=torch.float64)
    ones = torch.ones(len(query), dtype=torch.float64)
    for one in (query, n_rows + number):
        for other in (query, n_rows + number):
            design.index_put_((one, other), ones, accumulate=True)
    inverse = torch.linalg.pinv(design, hermitian=True)
    sums = torch.zeros(len(logs), len(design), dtype=torch.float64)
    sums.index_add_(1, query, logs).index_add_(1, n_rows + number, logs)
    fitted = sums @ inverse
    of_class = fitted[:, n_rows + number]
    residuals = logs - fitted[:, query] - of_class
    # A fit takes away part of what it is fitted to: a residual has 1 - leverage of the variance of its noise, less
    # where few pairs share a row or class. Divided by the root of that, all pairs can be exchanged with each other.
    diagonal = inverse.diagonal()
    leverage = diagonal[query] + diagonal[n_rows + number] + 2 * inverse[query, n_rows + number]
    # Pairs that are fitted exactly (the only one of their class or row) have no residual to enlarge.
    free = 1 - leverage
    return torch.where(free > 1e-6, residuals / free.clamp_min(1e-6).sqrt(), 0.0), of_class
