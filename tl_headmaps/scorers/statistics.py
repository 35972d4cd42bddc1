"""How sure a score is: intervals, exact tails, false discovery rates."""

from types import EllipsisType

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

_Z95 = 1.959963984540054


def wilson_interval(share: Float[Tensor, "*shape"], n: Tensor | int) -> tuple[Tensor, Tensor]:
    """95% Wilson interval of a share of ``n`` independent trials (``n`` may broadcast).

    Example:
        >>> low, high = wilson_interval(torch.tensor(0.5), 100)
        >>> round(float(low), 4), round(float(high), 4)
        (0.4038, 0.5962)
    """
    z2 = _Z95**2
    count = torch.as_tensor(n, dtype=torch.float64, device=share.device)
    p = share.double()
    centre = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z95 / (1 + z2 / count) * torch.sqrt(p * (1 - p) / count + z2 / (4 * count**2))
    return (centre - half).clamp(0, 1).to(share.dtype), (centre + half).clamp(0, 1).to(share.dtype)


class RunningRatio:
    """Ratio of two means over units (texts, batches) with its 95% interval, in constant memory.

    With ``y = 1`` it is the mean of x. The interval is Student's, with the spread of ``x - ratio * y`` over units
    (delta method); it needs two units.

    Example:
        >>> mean = RunningRatio()
        >>> for value in (1.0, 2.0, 3.0):
        ...     mean.add(torch.tensor(value))
        ...     mean.next_unit()
        >>> float(mean.ratio()), round(float(mean.half_width()), 4)
        (2.0, 2.4841)
    """

    def __init__(self, *shape: int) -> None:
        self._count = 0
        self._sums = {name: torch.zeros(shape, dtype=torch.float64) for name in ("x", "y", "xx", "xy", "yy")}

    def add(self, x: Tensor, y: Tensor | float = 1.0, *, at: int | EllipsisType = ...) -> None:
        """Add a unit's values, or those of row ``at`` of it; :meth:`next_unit` ends the unit."""
        x, y = x.double(), torch.as_tensor(y, dtype=torch.float64)
        for name, value in (("x", x), ("y", y), ("xx", x * x), ("xy", x * y), ("yy", y * y)):
            self._sums[name][at] += value

    def next_unit(self) -> None:
        """The unit is complete."""
        self._count += 1

    def ratio(self) -> Tensor:
        """Mean of x over mean of y; NaN where y is 0."""
        return self._sums["x"] / self._sums["y"]

    def half_width(self) -> Tensor:
        """Half of the 95% interval; NaN for fewer than two units."""
        ratio, n = self.ratio(), self._count
        if n < 2:
            return torch.full_like(ratio, float("nan"))
        from scipy.stats import t as student

        # Residuals x - ratio * y have mean zero, so their sum of squares is their spread.
        squares = self._sums["xx"] - 2 * ratio * self._sums["xy"] + ratio.square() * self._sums["yy"]
        spread = (squares.clamp_min(0) * n / (n - 1)).sqrt()
        return float(student.ppf(0.975, n - 1)) * spread / self._sums["y"]


def poisson_binomial_tail(chances: NDArray[np.float64], hits: int) -> float:
    """Probability of at least ``hits`` successes in independent trials with different chances.

    Every term added is positive, so small tails keep their relative accuracy.

    Example:
        >>> poisson_binomial_tail(np.array([0.5, 0.5]), 2)
        0.25
    """
    if hits <= 0:
        return 1.0
    certain = int((chances >= 1).sum())
    uncertain = chances[(chances > 0) & (chances < 1)]
    if hits <= certain:
        return 1.0
    return float(min(1.0, _poisson_binomial(uncertain)[hits - certain :].sum()))


def _poisson_binomial(chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probability of each number of successes in independent trials with different chances."""
    mass = np.zeros(len(chances) + 1)
    mass[0] = 1.0
    for done, chance in enumerate(chances, start=1):
        mass[1 : done + 1] = mass[1 : done + 1] * (1 - chance) + mass[:done] * chance
        mass[0] *= 1 - chance
    return mass


def paired_p_value(own: Bool[Tensor, " item"], others: Bool[Tensor, "draw item"]) -> float:
    """Two-sided exact p-value: do the same items come out right as often in one condition as in several others?

    If the condition made no difference, each of an item's outcomes could as well have been its own. Given how often
    the item is right in all conditions, its own outcome is then a draw from them. With one other condition this is
    McNemar's exact test; more of them make the comparison sharper.

    Example:
        >>> paired_p_value(torch.tensor([False] * 5 + [True]), torch.tensor([[True] * 6]))
        0.0625
    """
    chances = torch.cat([own[None], others]).double().mean(0).numpy()
    uncertain = (chances > 0) & (chances < 1)
    mass = _poisson_binomial(chances[uncertain])
    seen = mass[int(own.numpy()[uncertain].sum())]
    # As unlikely as what was seen, or more so; the factor is for rounding between equals.
    return float(min(1.0, mass[mass <= seen * (1 + 1e-7)].sum()))


def q_values(p_values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Benjamini-Hochberg q-values over all entries; NaN marks tests that were not made.

    ``q_(i) = min over j >= i of p_(j) m / j`` for the ``m`` sorted p-values.
    """
    made = ~p_values.isnan()
    result = torch.full_like(p_values, float("nan"))
    known = p_values[made].double().numpy()
    order = known.argsort()
    # Written out: scipy.stats has it too, and takes 60 MB of memory to import.
    adjusted = known[order] * (len(known) / np.arange(1, len(known) + 1))
    adjusted = np.minimum.accumulate(adjusted[::-1])[::-1].clip(0, 1)
    known[order] = adjusted
    result[made] = torch.from_numpy(known).to(result.dtype)
    return result
