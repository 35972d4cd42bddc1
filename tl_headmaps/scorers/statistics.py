"""How sure a score is: one place for intervals, exact tails, permutations, matched draws and false discovery rates.

What is resampled or permuted is always the unit that could have come out otherwise: clusters of pairs that share a
target or a stem, documents of a text, heads of the same layers. Items inside a unit are not independent.
"""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from ..core.errors import UsageError
from ..core.types import HeadIndex

_Z95 = 1.959963984540054

LEAST_UNITS = 4
"""Documents or clusters that an interval or a test over them needs: fewer say too little about others."""


def wilson_interval(share: Float[Tensor, "*shape"], n: Tensor | int, quantile: float = _Z95) -> tuple[Tensor, Tensor]:
    """95% Wilson interval of a share of ``n`` independent trials (``n`` may broadcast).

    Example:
        >>> low, high = wilson_interval(torch.tensor(0.5), 100)
        >>> round(float(low), 4), round(float(high), 4)
        (0.4038, 0.5962)
    """
    z2 = quantile**2
    count = torch.as_tensor(n, dtype=torch.float64, device=share.device)
    p = share.double()
    centre = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = quantile / (1 + z2 / count) * torch.sqrt(p * (1 - p) / count + z2 / (4 * count**2))
    return (centre - half).clamp(0, 1).to(share.dtype), (centre + half).clamp(0, 1).to(share.dtype)


class RunningRatio:
    """Ratio of two means over units (texts, batches) with its 95% interval, in constant memory.

    With ``y = 1`` it is the mean of x. The interval is Student's, with the spread of ``x - ratio * y`` over units
    (delta method); it needs two units. A unit may count for some places only: the others know nothing of it.

    Example:
        >>> mean = RunningRatio()
        >>> for value in (1.0, 2.0, 3.0):
        ...     mean.add(torch.tensor(value))
        ...     mean.next_unit()
        >>> float(mean.ratio()), round(float(mean.half_width()), 4)
        (2.0, 2.4841)
    """

    def __init__(self, *shape: int) -> None:
        self._count = torch.zeros((), dtype=torch.float64)
        self._sums = {name: torch.zeros(shape, dtype=torch.float64) for name in ("x", "y", "xx", "xy", "yy")}

    def add(self, x: Tensor, y: Tensor | float = 1.0, *, at: int | tuple[int, slice] | EllipsisType = ...) -> None:
        """Add a unit's values, or those at some places of it; :meth:`next_unit` ends the unit."""
        x, y = x.double(), torch.as_tensor(y, dtype=torch.float64)
        for name, value in (("x", x), ("y", y), ("xx", x * x), ("xy", x * y), ("yy", y * y)):
            self._sums[name][at] += value

    def next_unit(self, counted: Tensor | float = 1.0) -> None:
        """The unit is complete; ``counted`` is 0 where it has no say (its x and y are 0 there, too)."""
        self._count = self._count + torch.as_tensor(counted, dtype=torch.float64)

    def ratio(self) -> Tensor:
        """Mean of x over mean of y; NaN where y is 0."""
        return self._sums["x"] / self._sums["y"]

    def half_width(self) -> Tensor:
        """Half of the 95% interval; NaN for fewer than two units."""
        from scipy.special import stdtrit

        ratio, n = self.ratio(), self._count
        # Residuals x - ratio * y have mean zero, so their sum of squares is their spread.
        squares = self._sums["xx"] - 2 * ratio * self._sums["xy"] + ratio.square() * self._sums["yy"]
        freedom = (n - 1).clamp_min(1)
        spread = (squares.clamp_min(0) * n / freedom).sqrt()
        quantile = torch.as_tensor(stdtrit(freedom.numpy(), 0.975))
        return torch.where(n < 2, float("nan"), quantile * spread / self._sums["y"])

    def p_value(self) -> Tensor:
        """One-sided p-value of a ratio above 0 (Student's); NaN for fewer than four units, or if all are alike.

        Example:
            >>> mean = RunningRatio()
            >>> for value in (1.0, 2.0, 3.0, 2.0):
            ...     mean.add(torch.tensor(value))
            ...     mean.next_unit()
            >>> round(float(mean.p_value()), 4)
            0.0081
        """
        from scipy.special import stdtr, stdtrit

        n, ratio = self._count, self.ratio()
        freedom = (n - 1).clamp_min(1).numpy()
        error = self.half_width() / torch.as_tensor(stdtrit(freedom, 0.975))
        known = (n >= LEAST_UNITS) & (error > 1e-12 * (1 + ratio.abs()))
        p = torch.as_tensor(stdtr(freedom, -(ratio / error.clamp_min(1e-300)).numpy()))
        return torch.where(known, p, float("nan"))


def poisson_binomial_tail(chances: NDArray[np.float64], hits: int) -> float:
    """Probability of at least ``hits`` successes in independent trials with different chances.

    Every term added is positive, so small tails keep their relative accuracy.

    Example:
        >>> poisson_binomial_tail(np.array([0.5, 0.5]), 2)
        0.25
    """
    return sum_tail(np.stack([1 - chances, chances], axis=1), hits)


def sum_tail(chances: NDArray[np.float64], least: int) -> float:
    """Probability that independent counts add up to at least ``least``; ``chances[i, v]`` is that of count i being v.

    Example:
        >>> sum_tail(np.array([[0.5, 0.0, 0.5], [0.5, 0.5, 0.0]]), 3)
        0.25
    """
    if least <= 0:
        return 1.0
    # Counts that are certain only shift the sum.
    certain = (chances == 1).any(1)
    shift = int(chances[certain].argmax(1).sum())
    return float(min(1.0, _sum_masses(chances[~certain])[max(0, least - shift) :].sum()))


def _sum_masses(chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probability of each sum of independent counts."""
    n, width = chances.shape
    mass = np.zeros(n * (width - 1) + 1)
    mass[0] = 1.0
    top = 0
    for own in chances:
        before = mass[: top + 1].copy()
        mass[: top + 1] *= own[0]
        for value in own[1:].nonzero()[0] + 1:
            mass[value : value + top + 1] += before * own[value]
        top += int(own.nonzero()[0][-1])
    return mass


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


def rank_p_value(own: float, draws: Sequence[float] | Tensor, side: Literal["greater", "less"] = "greater") -> float:
    """Share of the draws, the own value counted as one of them, that are at least as extreme as the own value.

    Never smaller than ``1 / (1 + number of draws)``; NaN without draws, and where the own value or a draw is NaN. With
    all sets there are it is exact.

    Example:
        >>> rank_p_value(3.0, [1.0, 2.0, 3.0])
        0.5
    """
    drawn = torch.as_tensor(draws, dtype=torch.float64)
    # NaN is neither more nor less extreme: counted as less, a value that is not defined would be the rarest of all.
    if not len(drawn) or math.isnan(own) or bool(drawn.isnan().any()):
        return float("nan")
    # Equal values that were added up in another order count as equal.
    slack = 1e-9 * max(1.0, abs(own))
    extreme = drawn >= own - slack if side == "greater" else drawn <= own + slack
    return (1 + int(extreme.sum())) / (1 + len(drawn))


@dataclass(frozen=True)
class MatchedSets:
    """Sets of heads to compare a set with.

    Attributes:
        sets: Each with as many heads of each layer as the own set. Of :func:`disjoint_sets`: aligned with it, and with
            none of its heads; of :func:`matched_sets`: layer by layer, with at least one other.
        exact: Whether these are all the sets there are.
        moved: Heads of the own set whose layer has too few others, so that neighbouring layers give some.
    """

    sets: tuple[tuple[HeadIndex, ...], ...]
    exact: bool
    moved: tuple[HeadIndex, ...]


def disjoint_sets(own: Sequence[HeadIndex], everything: Iterable[HeadIndex], n: int, seed: int = 0) -> MatchedSets:
    """Up to ``n`` different sets of other heads, drawn at random from the layers of the own ones.

    Heads of one layer share what they read and when they write, so heads of other layers would be an easier comparison.
    Where a layer has too few others, the nearest layer that has some to spare gives one. If there are no more than
    ``n`` sets, all of them are returned.

    Raises:
        UsageError: There are fewer other heads than own ones.
    """
    others: dict[int, list[HeadIndex]] = {}
    for head in everything:
        if head not in own:
            others.setdefault(head.layer, []).append(head)
    if sum(map(len, others.values())) < len(own):
        raise UsageError(
            f"{len(own)} heads are to be compared with random ones, but the model has only "
            f"{sum(map(len, others.values()))} others. Choose fewer heads, or no random draws."
        )
    # Own layers first, for all heads; only then do neighbours lend what they can spare.
    taken = dict.fromkeys(others, 0)
    layer_of: dict[HeadIndex, int] = {}
    for head in own:
        if taken.get(head.layer, 0) < len(others.get(head.layer, [])):
            layer_of[head] = head.layer
            taken[head.layer] += 1
    moved = tuple(head for head in own if head not in layer_of)
    for head in moved:
        spare = [layer for layer in others if taken[layer] < len(others[layer])]
        layer_of[head] = min(spare, key=lambda layer: (abs(layer - head.layer), layer))
        taken[layer_of[head]] += 1
    wanted = {layer: count for layer, count in taken.items() if count}
    n_sets = math.prod(math.comb(len(others[layer]), count) for layer, count in wanted.items())
    if n_sets <= n:
        choices = itertools.product(*(itertools.combinations(others[layer], count) for layer, count in wanted.items()))
        chosen = [dict(zip(wanted, choice, strict=True)) for choice in choices]
    else:
        generator = np.random.default_rng(seed)
        different: dict[tuple[tuple[int, ...], ...], dict[int, tuple[HeadIndex, ...]]] = {}
        while len(different) < n:
            places = {layer: generator.permutation(len(others[layer]))[:count] for layer, count in wanted.items()}
            key = tuple(tuple(sorted(place.tolist())) for place in places.values())
            different[key] = {layer: tuple(others[layer][i] for i in place) for layer, place in places.items()}
        chosen = list(different.values())
    sets = []
    for drawn in chosen:
        left = {layer: list(heads) for layer, heads in drawn.items()}
        sets.append(tuple(left[layer_of[head]].pop(0) for head in own))
    return MatchedSets(tuple(sets), n_sets <= n, moved)


def clusters_of(keys: Sequence[Iterable[Hashable]]) -> Int[Tensor, " item"]:
    """Number of the cluster of each item: items that share a key are in one, and so are those linked through others.

    Example:
        >>> clusters_of([("he", "John"), ("she", "Mary"), ("he", "Paul"), ("they", "Mary")])
        tensor([0, 1, 0, 1])
    """
    parent = list(range(len(keys)))

    def root(item: int) -> int:
        while parent[item] != item:
            parent[item] = item = parent[parent[item]]
        return item

    first: dict[Hashable, int] = {}
    for item, own in enumerate(keys):
        for key in own:
            one, other = sorted((root(first.setdefault(key, item)), root(item)))
            parent[other] = one
    roots = [root(item) for item in range(len(keys))]
    number = {cluster: place for place, cluster in enumerate(dict.fromkeys(roots))}
    return torch.tensor([number[cluster] for cluster in roots], dtype=torch.int64, device="cpu")


def clustered_interval(
    hit: Bool[Tensor, "*shape item"], clusters: Int[Tensor, " item"]
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """95% interval of a share of items that come in clusters: Wilson's, with as many trials as they are worth.

    The variance of the share is that of a mean of clusters; the number of independent trials with the same variance is
    at most the number of items. Where all items agree, no variance can be seen, and clusters are counted instead. (A
    percentile bootstrap would say that a share of 1 has no uncertainty at all.) Clusters of different sizes are worth
    as many equal ones as Kish counts, n^2 / sum of squared sizes; that number less one gives Student's degrees of
    freedom, at least 1: few clusters have a wide interval, and one tells next to nothing. Without clusters it is plain.
    """
    from scipy.special import stdtrit

    x = hit.double()
    n, sizes = x.shape[-1], torch.bincount(clusters).double()
    n_clusters, equal_clusters = len(sizes), float(n**2 / sizes.square().sum())
    share = x.mean(-1)
    if n_clusters == n:
        low, high = wilson_interval(share, n)
        return low.float(), high.float()
    sums = torch.zeros(*x.shape[:-1], n_clusters, dtype=torch.float64, device=x.device)
    sums.index_add_(-1, clusters.to(x.device), x - share[..., None])
    correction = n_clusters / max(1, n_clusters - 1)
    variance = correction * sums.square().sum(-1) / n**2
    binomial = share * (1 - share)
    seen = variance > 1e-12
    trials = torch.where(seen, (binomial / variance.clamp_min(1e-12)).clamp(max=n), equal_clusters)
    low, high = wilson_interval(share, trials, quantile=float(stdtrit(max(1.0, equal_clusters - 1), 0.975)))
    return low.float(), high.float()


def resamples(n_units: int, n_draws: int, seed: int = 0) -> Float[Tensor, "draw unit"]:
    """How often each unit is drawn when as many units as there are are drawn with replacement."""
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(n_units, np.full(n_units, 1 / n_units), size=n_draws)
    return torch.from_numpy(drawn).double()


def jackknife_half_width(without_each: Float[Tensor, "unit ..."]) -> Float[Tensor, "..."]:
    """Half of the 95% interval of an estimate, from the same estimate without each unit in turn; NaN for one unit.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        >>> round(float(jackknife_half_width((x.sum() - x) / 2)), 4)  # of a mean it is Student's interval
        2.4841
    """
    n = len(without_each)
    if n < 2:
        return torch.full_like(without_each[0], float("nan"))
    from scipy.special import stdtrit

    spread = (without_each - without_each.mean(0)).square().sum(0) * (n - 1) / n
    return float(stdtrit(n - 1, 0.975)) * spread.sqrt()


def permuted_within(groups: Int[Tensor, " item"], generator: np.random.Generator) -> Int[Tensor, " item"]:
    """A random order of items in which each stays inside its group: place ``i`` gets item ``order[i]``."""
    numbers = groups.numpy()
    order = np.arange(len(numbers))
    for group in np.unique(numbers):
        places = np.flatnonzero(numbers == group)
        order[places] = generator.permutation(places)
    return torch.from_numpy(order)


def other_assignments(own: Bool[Tensor, " item"], n: int, seed: int = 0) -> tuple[Bool[Tensor, "deal item"], bool]:
    """Other ways to deal items out to two groups of the same sizes, at most ``n``; and whether these are all of them.

    Example:
        >>> deals, exact = other_assignments(torch.tensor([True, True, False, False]), 100)
        >>> len(deals), exact
        (5, True)
    """
    n_items, size = len(own), int(own.sum())
    n_deals = math.comb(n_items, size) - 1
    if n_deals <= n:
        chosen = list(itertools.combinations(range(n_items), size))
    else:
        generator = np.random.default_rng(seed)
        different: dict[tuple[int, ...], None] = {}
        own_members = tuple(own.nonzero().flatten().tolist())
        while len(different) < n:
            drawn = tuple(sorted(generator.permutation(n_items)[:size].tolist()))
            if drawn != own_members:
                different[drawn] = None
        chosen = list(different)
    deals = torch.zeros(len(chosen), n_items, dtype=torch.bool)
    for place, members in enumerate(chosen):
        deals[place, list(members)] = True
    return deals[(deals != own).any(1)], n_deals <= n


def matched_sets(
    own: Sequence[HeadIndex], everything: Iterable[HeadIndex], n: int, *, least: int = 19, seed: int = 0
) -> MatchedSets:
    """Up to ``n`` different sets with as many heads of each layer as the own one, to rank it among.

    Unlike :func:`disjoint_sets` they may share heads with it. If the own set were a random one, all of these could as
    well have been it, so its rank is a p-value. Sets of *other* heads do not give one: where a single head decides, a
    random set that happens to hold it would beat all of them. (Measured on three random heads of a layer of nine: 20 to
    33% below .05, instead of 5%.)

    A layer whose heads are all own is pooled with its neighbours, nearest first, and so are all layers while there are
    fewer than ``least`` other sets: heads of a pool count as heads of one layer. If there are no more than ``n`` sets,
    all of them are returned; none if the own set is all there is. ``moved`` are the own heads of pooled layers.

    Example:
        >>> heads = [HeadIndex(layer, head) for layer in range(2) for head in range(6)]
        >>> found = matched_sets([HeadIndex(0, 1), HeadIndex(0, 2), HeadIndex(1, 0)], heads, 999)
        >>> len(found.sets), found.exact, found.moved  # 15 twos of the first layer, 6 heads of the second
        (89, True, ())
    """
    found = relabelled_sets([own], everything, n, least=least, seed=seed)
    return MatchedSets(tuple(sets[0] for sets in found.sets), found.exact, found.moved)


@dataclass(frozen=True)
class RelabelledSets:
    """Several own sets with heads renamed: ``sets[draw][number]`` is like own set ``number``.

    Attributes:
        sets: What each renaming makes of the own sets.
        exact: Whether these are all there are.
        moved: Own heads of pooled layers.
    """

    sets: tuple[tuple[tuple[HeadIndex, ...], ...], ...]
    exact: bool
    moved: tuple[HeadIndex, ...]


def relabelled_sets(
    owns: Sequence[Sequence[HeadIndex]], everything: Iterable[HeadIndex], n: int, *, least: int = 19, seed: int = 0
) -> RelabelledSets:
    """Up to ``n`` different renamings of heads within their layers, each applied to all own sets at once.

    What own sets have in common, their renamed forms have in common too. That matters where something is averaged over
    the sets (the heads of a function, chosen anew for each fold): independent draws for each would average out what
    nearly equal sets do not, and a random choice of heads would look rare too often.

    Layers are pooled as in :func:`matched_sets`, which is the case of one set: while a pool has a single arrangement of
    own heads, or all pools together fewer than ``least`` others.

    Example:
        >>> heads = [HeadIndex(0, head) for head in range(3)]
        >>> found = relabelled_sets([heads[:1], heads[:2]], heads, 99)
        >>> len(found.sets), found.exact  # the first set is in the second, whatever the names
        (5, True)
        >>> [str(head) for one in found.sets[0] for head in one]
        ['L0H0', 'L0H0', 'L0H2']
    """
    # A p-value needs other sets that could as well have been the own ones. A layer whose heads are all own has none,
    # and a few small layers have too few, so that layers are pooled until there are enough: the price is that heads of
    # a pool are compared across layers, which `moved` tells.
    by_layer: dict[int, list[HeadIndex]] = {}
    for head in everything:
        by_layer.setdefault(head.layer, []).append(head)
    members_of = {head: tuple(number for number, own in enumerate(owns) if head in own) for own in owns for head in own}
    own_layers = [head.layer for head in members_of]
    pools = [{layer} for layer in dict.fromkeys(own_layers)]
    pooled: set[int] = set()

    def heads_of(pool: set[int]) -> list[HeadIndex]:
        return [head for layer in sorted(pool) for head in by_layer[layer]]

    def n_ways(pool: set[int]) -> int:
        """Different arrangements of the own heads of a pool: heads of the same own sets are interchangeable."""
        heads = heads_of(pool)
        alike = Counter(members_of.get(head) for head in heads).values()
        return math.factorial(len(heads)) // math.prod(map(math.factorial, alike))

    def nearest(pool: set[int]) -> int:
        """The layer outside that is nearest to a layer of own heads in the pool."""
        inside = [layer for layer in own_layers if layer in pool]
        outside = (layer for layer in by_layer if layer not in pool)
        return min(outside, key=lambda layer: (min(abs(layer - one) for one in inside), layer))

    while True:
        # First those that can be arranged in one way only: no other set has others of theirs.
        ways = [n_ways(pool) for pool in pools]
        tight = [pool for pool, count in zip(pools, ways, strict=True) if count == 1]
        narrow = [pool for pool in tight or (pools if math.prod(ways) - 1 < least else []) if len(pool) < len(by_layer)]
        if not narrow:
            break
        for pool in narrow:
            pool.add(nearest(pool))
            pooled |= pool
        pools = _joined(pools)
    heads = [heads_of(pool) for pool in pools]
    own_arrangement = tuple(tuple(members_of.get(head, ()) for head in pool) for pool in heads)
    # Heads of no own set come last.
    sorts = [sorted(pool, key=lambda kind: (not kind, kind)) for pool in own_arrangement]
    exact = math.prod(ways) - 1 <= n
    arranged: Iterable[tuple[tuple[tuple[int, ...], ...], ...]]
    if exact:
        arranged = (one for one in itertools.product(*map(_arrangements, sorts)) if one != own_arrangement)
    else:
        arranged = _drawn_arrangements(sorts, own_arrangement, n, np.random.default_rng(seed))

    def renamed(arrangement: tuple[tuple[tuple[int, ...], ...], ...]) -> tuple[tuple[HeadIndex, ...], ...]:
        placed = [
            (head, kind) for pair in zip(heads, arrangement, strict=True) for head, kind in zip(*pair, strict=True)
        ]
        return tuple(tuple(head for head, kind in placed if number in kind) for number in range(len(owns)))

    return RelabelledSets(
        tuple(map(renamed, arranged)), exact, tuple(head for head in members_of if head.layer in pooled)
    )


def _arrangements(kinds: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every different order of some things, of which several may be alike."""
    if not kinds:
        yield ()
    for kind in dict.fromkeys(kinds):
        rest = list(kinds)
        rest.remove(kind)
        yield from ((kind, *others) for others in _arrangements(rest))


def _drawn_arrangements(
    sorts: Sequence[Sequence[tuple[int, ...]]],
    own: tuple[tuple[tuple[int, ...], ...], ...],
    n: int,
    generator: np.random.Generator,
) -> Iterable[tuple[tuple[tuple[int, ...], ...], ...]]:
    """So many different ones at random, pool by pool, none of them the own one."""
    different: dict[tuple[tuple[tuple[int, ...], ...], ...], None] = {}
    while len(different) < n:
        drawn = []
        for kinds in sorts:
            places = generator.permutation(len(kinds)).tolist()
            drawn.append(tuple(kind for _, kind in sorted(zip(places, kinds, strict=True))))
        if tuple(drawn) != own:
            different[tuple(drawn)] = None
    return different


def _joined(pools: list[set[int]]) -> list[set[int]]:
    """Pools without a layer in common: those that have one are one."""
    joined: list[set[int]] = []
    for pool in pools:
        for other in [one for one in joined if one & pool]:
            pool = pool | other
            joined.remove(other)
        joined.append(pool)
    return joined


def pair_clusters(sources: Sequence[str], targets: Sequence[Hashable]) -> Int[Tensor, " pair"]:
    """Number of the cluster of each pair: pairs that share a target, or the first five letters of their sources.

    Example:
        >>> pair_clusters(["Austria", "Chad", "Australia"], ["Vienna", "NDjamena", "Canberra"])
        tensor([0, 1, 0])
    """
    stems = [source.strip().casefold()[:5] for source in sources]
    return clusters_of([(("target", target), ("stem", stem)) for stem, target in zip(stems, targets, strict=True)])


def halves_of(clusters: Int[Tensor, " item"], seed: int = 0) -> Bool[Tensor, " item"]:
    """Which items are in the first half when whole clusters are dealt out at random, to the smaller half each.

    Example:
        >>> halves_of(torch.tensor([0, 0, 1, 2, 3, 3]))  # clusters stay together
        tensor([False, False,  True,  True,  True,  True])
    """
    sizes = clusters.bincount()
    first = torch.zeros(len(sizes), dtype=torch.bool)
    taken = [0, 0]
    for cluster in np.random.default_rng(seed).permutation(len(sizes)).tolist():
        half = int(taken[1] < taken[0])
        taken[half] += int(sizes[cluster])
        first[cluster] = half == 0
    return first[clusters]


def permutation_tail(hits: Int[NDArray[np.int64], "unit unit"]) -> float:
    """Share of all orders of the units' targets that hit at least as often as their own order.

    ``hits[c, d]`` is how often unit ``c`` hits with the target of unit ``d``. Orders are counted by the targets already
    dealt and the hits so far, 2^n states in place of n! orders.

    Example:
        >>> permutation_tail(np.eye(3, dtype=np.int64))  # of six orders one hits three times
        0.16666666666666666
    """
    n, own = len(hits), int(np.trace(hits))
    masks = np.arange(1 << n)
    ways = np.zeros((1 << n, own + 1))  # the last column: the own number of hits or more
    ways[0, 0] = 1.0
    for row in hits:
        dealt = np.zeros_like(ways)
        for target, gained in enumerate(row):
            free = masks[masks & (1 << target) == 0]
            moved, gain = ways[free], min(int(gained), own)
            taken = free | (1 << target)
            dealt[taken, gain:] += moved[:, : own + 1 - gain]
            dealt[taken, own] += moved[:, own + 1 - gain :].sum(1)
        ways = dealt
    return float(ways[-1, own] / ways[-1].sum())


def sign_p_value(more: Int[Tensor, "*shape"], less: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Exact one-sided sign test: the chance that as many of ``more + less`` fair coins fall on the first side.

    Example:
        >>> sign_p_value(torch.tensor([5, 2]), torch.tensor([0, 2]))
        tensor([0.0312, 0.6875])
    """
    from scipy.special import betainc

    k, n = more.double().numpy(), (more + less).double().numpy()
    # The binomial tail P(X >= k) is a beta integral; of k = 0 it is 1.
    tail = np.where(k > 0, betainc(np.maximum(k, 1.0), n - k + 1.0, 0.5), 1.0)
    return torch.from_numpy(tail).float()


def sequential_p_value(exceeds: Bool[Tensor, " draw"], enough: int = 10) -> float:
    """Rank p-value of draws that end when ``enough`` of them are as extreme as the own value (Besag and Clifford 1991).

    Ending there says early that something is not rare, and the p-value stays valid: ``enough`` over the number of draws
    made, or as in :func:`rank_p_value` if all draws were made first. NaN without draws.

    Example:
        >>> sequential_p_value(torch.tensor([True, False, True, True]), enough=2)
        0.6666666666666666
        >>> sequential_p_value(torch.tensor([False] * 199))
        0.005
    """
    if not len(exceeds):
        return float("nan")
    counts = exceeds.cumsum(0)
    if int(counts[-1]) >= enough:
        return enough / (1 + int((counts < enough).sum()))
    return (1 + int(counts[-1])) / (1 + len(exceeds))
