"""Do two words attend to a key alike? Heads are points, phrasings are the units.

``attention[p, h]`` is how much the query of phrasing ``p`` attends to the key in head ``h``. Two phrasings are alike as
far as their attention correlates over heads; two words are alike as far as their phrasings are, on average over pairs.
The same average over pairs of phrasings of *one* word says how alike they would be if the word made no difference.
What a head's difference is worth is seen by dealing the phrasings out to the two words in every other way.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .statistics import jackknife_half_width, rank_p_value


def word_correlations(
    attention: Float[Tensor, "phrase head"], members: Sequence[Sequence[int]]
) -> tuple[Float[Tensor, "word word"], Float[Tensor, "word word"]]:
    """Mean correlation over heads of two phrasings, by their words; and half of its 95% interval over phrasings.

    On the diagonal are pairs of different phrasings of one word; NaN for a word with a single one. Intervals are NaN
    where leaving one phrasing out leaves none.
    """
    pairs = _correlations(attention)
    values = torch.full((len(members), len(members)), float("nan"), dtype=torch.float64)
    half = values.clone()
    for one, first in enumerate(members):
        for other, second in enumerate(members):
            values[one, other] = _mean_of_pairs(pairs, first, second)
            units = list(dict.fromkeys([*first, *second]))
            without = torch.stack([_mean_of_pairs(pairs, _less(first, unit), _less(second, unit)) for unit in units])
            half[one, other] = jackknife_half_width(without)
    return values, half


def _correlations(attention: Tensor) -> Tensor:
    centred = attention.double() - attention.double().mean(1, keepdim=True)
    unit: Tensor = centred / centred.norm(dim=1, keepdim=True)
    return unit @ unit.mT


def _mean_of_pairs(pairs: Tensor, first: Sequence[int], second: Sequence[int]) -> Tensor:
    chosen = [pairs[i, j] for i in first for j in second if i != j]
    return torch.stack(chosen).mean() if chosen else torch.tensor(float("nan"), dtype=torch.float64)


def _less(members: Sequence[int], unit: int) -> list[int]:
    return [member for member in members if member != unit]


def difference_of(
    attention: Float[Tensor, "phrase head"], first: Sequence[int], second: Sequence[int]
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"]]:
    """Mean attention of the first word's phrasings minus that of the second's; half of its 95% interval."""
    x = attention.double()

    def difference(one: Sequence[int], other: Sequence[int]) -> Tensor:
        if not one or not other:
            return torch.full_like(x[0], float("nan"))
        return x[list(one)].mean(0) - x[list(other)].mean(0)

    units = [*first, *second]
    without = torch.stack([difference(_less(first, unit), _less(second, unit)) for unit in units])
    return difference(first, second), jackknife_half_width(without)


def largest_difference_p_values(
    attention: Float[Tensor, "phrase head"], first: Bool[Tensor, " phrase"], deals: Bool[Tensor, "deal phrase"]
) -> Float[Tensor, " head"]:
    """For each head: how often does *any* head differ as much when phrasings are dealt out otherwise?

    So the chance that one head or more of a model without differences is below .05 is .05, however many heads there
    are and however they depend on each other.
    """
    x = attention.double()

    def differences(chosen: Tensor) -> Tensor:
        share = chosen.double()
        return (share @ x) / share.sum(-1, keepdim=True) - ((1 - share) @ x) / (1 - share).sum(-1, keepdim=True)

    own = differences(first[None])[0].abs()
    largest = differences(deals).abs().amax(1) if len(deals) else torch.zeros(0, dtype=torch.float64)
    return torch.tensor([rank_p_value(float(value), largest) for value in own], dtype=torch.float64)


def separation_p_value(
    attention: Float[Tensor, "phrase head"], first: Bool[Tensor, " phrase"], deals: Bool[Tensor, "deal phrase"]
) -> float:
    """How often are words further apart, and phrasings of a word closer together, when phrasings are dealt otherwise?

    The statistic is the mean correlation within words minus that between them; NaN if a word has one phrasing only.
    """
    pairs = _correlations(attention)
    off = 1 - torch.eye(len(pairs), dtype=torch.float64)

    def separations(chosen: Tensor) -> Tensor:
        share = chosen.double()
        same = share[:, :, None] * share[:, None] + (1 - share[:, :, None]) * (1 - share[:, None])
        within, between = same * off, (1 - same) * off
        return (within * pairs).sum((1, 2)) / within.sum((1, 2)) - (between * pairs).sum((1, 2)) / between.sum((1, 2))

    if min(int(first.sum()), int((~first).sum())) < 2:
        return float("nan")
    return rank_p_value(float(separations(first[None])[0]), separations(deals) if len(deals) else [])
