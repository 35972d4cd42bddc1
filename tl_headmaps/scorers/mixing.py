"""What attention does to the vectors it mixes, and whether two words attend alike.

A head mixes values: ``v_hat_q = sum_s a_qs v_s``. The association of a query with a key is the dot product (or cosine)
of their value vectors: before attention ``v_q . v_k``, after it ``v_hat_q . v_k``. It is linear in the sources, so it
splits exactly: ``v_hat_q . v_k = sum_s a_qs (v_s . v_k)``. Its change ``v_hat_q . v_k - v_q . v_k`` splits in the same
way, with ``a_qq - 1`` for the query itself, which gives up what attention takes from it.

Attention itself is compared with heads as points and phrasings as units: ``attention[p, h]`` is how much the query of
phrasing ``p`` attends to the key in head ``h``. Two phrasings are alike as far as their attention correlates over
heads; two words are alike as far as their phrasings are, on average over pairs. The same average over pairs of
phrasings of *one* word says how alike they would be if the word made no difference. What a head's difference is worth
is seen by dealing the phrasings out to the two words in every other way.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .statistics import jackknife_half_width, rank_p_value


def mixed(pattern: Float[Tensor, "query key"], values: Float[Tensor, "key d_head"]) -> Float[Tensor, "query d_head"]:
    """Values after attention."""
    return pattern @ values


def dots(left: Float[Tensor, "query d_head"], right: Float[Tensor, "key d_head"]) -> Float[Tensor, "query key"]:
    """Dot product of every two vectors."""
    return left @ right.mT


def cosines(left: Float[Tensor, "query d_head"], right: Float[Tensor, "key d_head"]) -> Float[Tensor, "query key"]:
    """Cosine of every two vectors; 0 where one of them is zero.

    Example:
        >>> cosines(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[2.0, 2.0]]))
        tensor([[1.0000],
                [0.0000]])
    """
    return dots(_unit(left), _unit(right))


def _unit(vectors: Tensor) -> Tensor:
    lengths = vectors.norm(dim=-1, keepdim=True)
    return torch.where(lengths > 0, vectors / lengths.clamp_min(torch.finfo(vectors.dtype).tiny), 0.0)


def split_after(
    row: Float[Tensor, " source"], values: Float[Tensor, "source d_head"], key: int
) -> Float[Tensor, " source"]:
    """Part of each source in the association after attention; the parts add up to it."""
    return row * (values @ values[key])


def split_change(
    row: Float[Tensor, " source"], values: Float[Tensor, "source d_head"], query: int, key: int
) -> Float[Tensor, " source"]:
    """Part of each source in the change of the association; the parts add up to the change."""
    gained = row.clone()
    gained[query] -= 1
    return gained * (values @ values[key])


def strongest_dimensions(parts: Float[Tensor, " d_head"], n: int) -> Int[Tensor, " n"]:
    """The dimensions with the largest parts, either sign, largest first (ties: the lower one)."""
    return parts.abs().argsort(descending=True, stable=True)[:n]


def shared_dimensions(parts: Float[Tensor, "word d_head"], n: int) -> Int[Tensor, " word"]:
    """How many of the ``n`` strongest dimensions of the first word are among those of each word.

    Example:
        >>> shared_dimensions(torch.tensor([[3.0, -2.0, 1.0], [0.0, -4.0, 5.0]]), 2)
        tensor([2, 1])
    """
    chosen = torch.zeros(parts.shape, dtype=torch.bool)
    for row, own in zip(chosen, parts, strict=True):
        row[strongest_dimensions(own, n)] = True
    return (chosen & chosen[0]).sum(1)


def shared_when_turned(
    vectors: Float[Tensor, "word d_head"], keys: Float[Tensor, "word d_head"], n: int, n_draws: int, seed: int = 0
) -> Int[Tensor, "draw word"]:
    """The same count in randomly turned bases, in which all dot products are what they were."""
    generator = torch.Generator().manual_seed(seed)
    d, counts = vectors.shape[1], []
    for _ in range(n_draws):
        turned: Tensor = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
        counts.append(shared_dimensions((vectors.double() @ turned) * (keys.double() @ turned), n))
    return torch.stack(counts)


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
