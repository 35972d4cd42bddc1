"""How sure a score is: intervals, exact tails, false discovery rates."""

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
    """Benjamini-Hochberg q-values over all entries; NaN marks tests that were not made."""
    from scipy.stats import false_discovery_control

    made = ~p_values.isnan()
    result = torch.full_like(p_values, float("nan"))
    if bool(made.any()):
        adjusted = false_discovery_control(p_values[made].double().numpy(), method="bh")
        result[made] = torch.from_numpy(np.asarray(adjusted)).to(result.dtype)
    return result
