r"""Relation scores of a layer's heads, and the null they must beat.

**Score.** phi_k is the share of a relation's pairs (s, t) for which fewer than k tokens of row s have a strictly
greater entry than t; suppression is the same with strictly smaller. All relations are scored in one pass over the
vocabulary, each source row multiplied out once however many relations it occurs in.

**Null.** A head that writes the same few tokens whatever it reads scores on relations whose targets repeat. So each
source keeps its top-k set, and the targets are shuffled among the sources. What is shuffled are *units*: a pair, or
several pairs with the same target whose sources are alike, for a head that knows nothing treats these alike too. (On
heads with W_O turned inside d_head, shuffling single pairs gives p <= .01 two to three times too often for relations
such as name to he/she.) Below ten units all orders are counted. From there on each unit draws its target independently
of the others, whose tail is exact and needs no seed: shuffling deals without replacement, so this errs to either side,
by a few percent around p = .05 from n = 40 on and by more further out. No p-value is smaller than the share of a
single arrangement of the targets among all there are.

**Specificity.** A head may write neighbours: months for a month. So every pair is scored a second time with a wrong
target, that of the most similar source with another one. The p-value is that of an exact sign test over units: how
often do more of a unit's own targets than of its wrong ones reach the top k, and the other way round?

Both are needed only where a score is above zero, and there only for rows in which some target of the relation reaches
the top k at all: found by ranking each row's best target first, leaving early.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..circuits.blocks import DEFAULT_BUDGET
from ..circuits.extremes import entries, top_k
from ..circuits.factored import LayerMaps
from ..circuits.ranking import Side, ranks
from .statistics import clustered_interval, permutation_tail, sign_p_value, sum_tail

SIDES: tuple[Side, Side] = ("greater", "less")
"""What is counted for promotion and for suppression."""

EXACT_BELOW = 10
"""Units below which all orders of the targets are counted."""


@dataclass(frozen=True)
class Pairs:
    """The pairs of several relations, one after the other.

    Attributes:
        rows: Row of each pair's source in the maps.
        columns: Target id of each pair.
        relation: Index of the relation each pair belongs to, ascending.
        k: Top-k of each relation.
    """

    rows: Int[Tensor, " pair"]
    columns: Int[Tensor, " pair"]
    relation: Int[Tensor, " pair"]
    k: Int[Tensor, " relation"]

    def to(self, device: torch.device) -> "Pairs":
        """The same pairs on another device."""
        return Pairs(*(getattr(self, entry.name).to(device) for entry in fields(self)))

    def of_relations(self, numbers: Sequence[int]) -> "Pairs":
        """The pairs of some relations, given ascending; they are numbered anew."""
        chosen = torch.tensor(numbers, device=self.relation.device)
        inside = torch.isin(self.relation, chosen)
        relation = torch.searchsorted(chosen, self.relation[inside])
        return Pairs(self.rows[inside], self.columns[inside], relation, self.k[chosen])

    def repeated(self, n: int, n_rows: int) -> "Pairs":
        """The same pairs for ``n`` blocks of ``n_rows`` rows each: every block's relations are counted apart."""
        block = torch.arange(n, device=self.rows.device).repeat_interleave(len(self.rows))
        return Pairs(
            self.rows.repeat(n) + block * n_rows,
            self.columns.repeat(n),
            self.relation.repeat(n) + block * len(self.k),
            self.k.repeat(n),
        )

    @property
    def sizes(self) -> Int[Tensor, " relation"]:
        """Number of pairs of each relation."""
        return torch.bincount(self.relation, minlength=len(self.k))

    def share(self, hit: Tensor) -> Float[Tensor, "relation head"]:
        """Share of each relation's pairs that are hit, from [head, pair]."""
        # On the CPU, like everything computed from counts: not every device has double precision.
        total = torch.zeros(len(self.k), hit.shape[0], dtype=torch.float64, device="cpu")
        total.index_add_(0, self.relation.cpu(), hit.T.cpu().double())
        return (total / self.sizes[:, None].cpu()).float()


@dataclass(frozen=True)
class PairGroups:
    """Which pairs of a relation belong together; numbers count from 0 in each relation.

    Attributes:
        unit: Pairs with the same target and alike sources: their targets are shuffled together.
        cluster: Pairs that share a target or a stem: they are resampled together.
        neighbour: Target of the most similar source with another one; -1 where there is none.
    """

    unit: Int[Tensor, " pair"]
    cluster: Int[Tensor, " pair"]
    neighbour: Int[Tensor, " pair"]

    @classmethod
    def separate(cls, pairs: Pairs) -> "PairGroups":
        """Every pair on its own."""
        starts = pairs.sizes.cumsum(0) - pairs.sizes
        alone = (torch.arange(len(pairs.rows), device=pairs.rows.device) - starts[pairs.relation]).cpu()
        return cls(alone, alone, torch.full_like(alone, -1))


@dataclass(frozen=True)
class Direction:
    """Scores in one direction (promotion or suppression) with interval, null and specificity.

    Where nothing is hit, the null mean is 0, the p-value 1, and wrong targets are not looked at (NaN).
    """

    score: Float[Tensor, "relation head"]
    interval_low: Float[Tensor, "relation head"]
    interval_high: Float[Tensor, "relation head"]
    null_mean: Float[Tensor, "relation head"]
    p_value: Float[Tensor, "relation head"]
    neighbour: Float[Tensor, "relation head"]
    neighbour_p_value: Float[Tensor, "relation head"]
    ranks: Int[Tensor, "head pair"]


def score_layer(
    maps: LayerMaps,
    pairs: Pairs,
    alike: PairGroups | None = None,
    *,
    exact_ranks: bool = False,
    budget: int = DEFAULT_BUDGET,
) -> tuple[Direction, Direction]:
    """Promotion and suppression scores of every relation for every head of a layer.

    Args:
        maps: Maps with a row for each source.
        pairs: The relations' pairs.
        alike: Which pairs belong together; none by default.
        exact_ranks: Compute full ranks; otherwise ranks are capped at the largest k.
        budget: Bytes one block may take.
    """
    limit = int(pairs.k.max())
    counts = ranks(maps, pairs.rows, pairs.columns, limit=None if exact_ranks else limit, budget=budget)
    rank = torch.stack([counts.greater, counts.less])
    hit = rank < pairs.k[pairs.relation]
    alike = PairGroups.separate(pairs) if alike is None else alike
    null = _Null(pairs.to(torch.device("cpu")), alike, len(maps.heads))
    _find_nulls(maps, pairs, hit, null, budget)
    directions = []
    for i in range(2):
        low, high = _intervals(pairs, alike, hit[i].cpu())
        null_mean, p_value, neighbour, neighbour_p_value = null.tables[i]
        directions.append(
            Direction(
                score=pairs.share(hit[i]),
                interval_low=low,
                interval_high=high,
                null_mean=null_mean,
                p_value=p_value,
                neighbour=neighbour,
                neighbour_p_value=neighbour_p_value,
                ranks=rank[i],
            )
        )
    return directions[0], directions[1]


def _intervals(pairs: Pairs, alike: PairGroups, hit: Tensor) -> tuple[Tensor, Tensor]:
    """Ends of the intervals [relation, head] of the scores."""
    sizes = pairs.sizes.tolist()
    by_relation = zip(hit.split(sizes, 1), alike.cluster.split(sizes), strict=True)
    ends = [clustered_interval(part, clusters) for part, clusters in by_relation]
    return torch.stack([low for low, _ in ends]), torch.stack([high for _, high in ends])


def shares(
    maps: LayerMaps,
    pairs: Pairs,
    *,
    active: Bool[Tensor, "head pair"] | None = None,
    budget: int = DEFAULT_BUDGET,
) -> Float[Tensor, "relation head"]:
    """Promotion scores alone, without suppression and nulls (meaningless for cells without active pairs)."""
    limit = int(pairs.k.max())
    counted = ranks(maps, pairs.rows, pairs.columns, limit=limit, active=active, side="greater", budget=budget).greater
    return pairs.share(counted < pairs.k[pairs.relation])


class _Null:
    """What shuffled and wrong targets score, by direction, relation and head."""

    def __init__(self, pairs: Pairs, alike: PairGroups, n_heads: int) -> None:
        shape = (2, len(pairs.k), n_heads)
        self.null_mean, self.p_value = torch.zeros(shape, device="cpu"), torch.ones(shape, device="cpu")
        self.neighbour, self.neighbour_p_value = (torch.full(shape, torch.nan, device="cpu") for _ in range(2))
        self.relations = [_Shuffled.of(pairs, alike, number) for number in range(len(pairs.k))]

    @property
    def tables(self) -> list[tuple[Tensor, ...]]:
        """Null means, p-values, scores of wrong targets and their p-values, for each direction."""
        tables = (self.null_mean, self.p_value, self.neighbour, self.neighbour_p_value)
        return [tuple(table[direction] for table in tables) for direction in range(2)]

    def put(self, direction: int, head: int, hit: Tensor, listed: Tensor, pair: Tensor) -> None:
        """Fill in the relations of which a head hits a pair.

        Args:
            direction: Promotion or suppression.
            head: The head.
            hit: Which pairs are hit [pair].
            listed: Columns of the top-k lists [open pair, k], -1 beyond the k of the relation.
            pair: The pair of each list, ascending; no target of the relation is in the lists of the others.
        """
        for number, relation in enumerate(self.relations):
            own = hit[relation.span]
            if not bool(own.any()):
                continue
            inside = (pair >= relation.span.start) & (pair < relation.span.stop)
            place, here = pair[inside] - relation.span.start, (direction, number, head)
            self.null_mean[here], self.p_value[here] = relation.shuffled(own, listed[inside], place)
            if not bool((relation.neighbour >= 0).any()):
                continue
            neighbour = torch.zeros_like(own)
            neighbour[place] = (listed[inside] == relation.neighbour[place, None]).any(1) & (
                relation.neighbour[place] >= 0
            )
            self.neighbour[here] = neighbour.float().mean()
            self.neighbour_p_value[here] = relation.above(own, neighbour)


@dataclass(frozen=True)
class _Shuffled:
    """One relation's units and targets.

    Attributes:
        span: Its pairs.
        targets: Its different targets, ascending.
        unit: Unit of each pair.
        target_of_unit: Place of each unit's target.
        weight: Share of the units with each target.
        neighbour: Target of the neighbour of each pair.
        own: Place of each pair's target.
    """

    span: slice
    targets: Int[Tensor, " target"]
    unit: Int[Tensor, " pair"]
    target_of_unit: Int[Tensor, " unit"]
    weight: Float[Tensor, " target"]
    neighbour: Int[Tensor, " pair"]
    own: Int[Tensor, " pair"]

    @classmethod
    def of(cls, pairs: Pairs, alike: PairGroups, number: int) -> "_Shuffled":
        inside = (pairs.relation == number).nonzero()[:, 0]
        span = slice(int(inside[0]), int(inside[-1]) + 1)
        targets, own = pairs.columns[span].unique(return_inverse=True)
        unit = alike.unit[span]
        target_of_unit = torch.zeros(int(unit.max()) + 1, dtype=torch.int64, device="cpu")
        target_of_unit[unit] = own
        weight = torch.bincount(target_of_unit, minlength=len(targets)).double() / len(target_of_unit)
        return cls(span, targets, unit, target_of_unit, weight, alike.neighbour[span], own)

    def shuffled(self, hit: Tensor, listed: Tensor, place: Tensor) -> tuple[float, float]:
        """Mean score of shuffled targets, and how often they score as well.

        Args:
            hit: Which pairs are hit.
            listed: Top-k lists of some pairs; -1 is no token.
            place: The pairs they are of.
        """
        n_units, n_targets, n_hits = len(self.target_of_unit), len(self.targets), int(hit.sum())
        found = torch.searchsorted(self.targets, listed).clamp(max=n_targets - 1)
        row, at = (self.targets[found] == listed).nonzero(as_tuple=True)
        cell = place[row] * n_targets + found[row, at]
        # A target that ties with the k-th place hits by rank and may be missing from the k tokens listed.
        hitting = hit.nonzero()[:, 0]
        cell = torch.cat([cell, hitting * n_targets + self.own[hitting]]).unique()
        pair, target = cell // n_targets, cell % n_targets
        of_unit, count = (self.unit[pair] * n_targets + target).unique(return_counts=True)
        unit, target = of_unit // n_targets, of_unit % n_targets
        # How many of a unit's pairs hit when it draws the target of a random unit.
        chance = torch.zeros(n_units, int(count.max()) + 1, dtype=torch.float64, device="cpu")
        chance.index_put_((unit, count), self.weight[target], accumulate=True)
        chance[:, 0] = (1 - chance.sum(1)).clamp_min(0)
        mean = float((chance * torch.arange(chance.shape[1], device="cpu")).sum() / len(hit))
        if n_units < EXACT_BELOW:
            by_target = torch.zeros(n_units, n_targets, dtype=torch.int64, device="cpu")
            by_target[unit, target] = count
            return mean, permutation_tail(by_target[:, self.target_of_unit].numpy())
        return mean, max(sum_tail(chance.numpy(), n_hits), self.smallest)

    @property
    def smallest(self) -> float:
        """Share of one arrangement of the targets among all there are."""
        same = torch.bincount(self.target_of_unit)
        n = torch.tensor(len(self.target_of_unit) + 1.0, dtype=torch.float64, device="cpu")
        return float(torch.exp((same + 1.0).double().lgamma().sum() - n.lgamma()))

    def above(self, hit: Tensor, neighbour: Tensor) -> Tensor:
        """p-value of more units hitting their own targets than wrong ones."""
        known = self.neighbour >= 0
        more = torch.zeros(len(self.target_of_unit), dtype=torch.int64, device="cpu")
        more.index_add_(0, self.unit[known], hit[known].long() - neighbour[known].long())
        return sign_p_value((more > 0).sum(), (more < 0).sum())


def _find_nulls(maps: LayerMaps, pairs: Pairs, hit: Tensor, null: _Null, budget: int) -> None:
    """Fill in the nulls of all relations and heads with a hit."""
    limit, n_rows = int(pairs.k.max()), maps.n_rows
    scored = torch.zeros(*hit.shape[:2], len(pairs.k), dtype=torch.int64, device=hit.device)
    scored.index_add_(2, pairs.relation, hit.long())
    active = scored[:, :, pairs.relation] > 0
    # A row needs its top-k list only if some target of its relations is in it. One rank per row tells: that of the
    # best of these targets, and most rows are ruled out by it. A rough one will do: a list too many changes nothing.
    best, has_best = _best_targets(maps, pairs, scored > 0)
    everyone = torch.arange(n_rows, device=hit.device)
    needed = torch.zeros_like(has_best)
    for direction, side in enumerate(SIDES):
        if not bool(has_best[direction].any()):
            continue
        wanted = has_best[direction]
        counts = ranks(
            maps, everyone, best[direction], limit=limit, active=wanted, side=side, roughly=True, budget=budget
        )
        needed[direction] = wanted & ((counts.greater if side == "greater" else counts.less) < limit)
    beyond = torch.arange(limit, device=hit.device) >= pairs.k[pairs.relation, None]
    for head in range(len(maps.heads)):
        # A pair that hits needs its row in any case, however the two ranks were rounded.
        for direction in range(2):
            needed[direction, head, pairs.rows[hit[direction, head]]] = True
        listed = _both_ends(maps.of_head(head), needed[:, head], limit, budget)
        for direction in range(2):
            open_pairs = (active[direction, head] & needed[direction, head, pairs.rows]).nonzero()[:, 0]
            if len(open_pairs):
                # Relations have their own k, at most the limit.
                columns = listed[direction][pairs.rows[open_pairs]].masked_fill(beyond[open_pairs], -1)
                null.put(direction, head, hit[direction, head].cpu(), columns.cpu(), open_pairs.cpu())


def _both_ends(
    maps: LayerMaps, needed: Bool[Tensor, "direction row"], k: int, budget: int
) -> tuple[Int[Tensor, "row k"], Int[Tensor, "row k"]]:
    """Columns of the k largest entries of some rows of a map, and of the k smallest of others; -1 for other rows.

    The smallest entries of a row are the largest of its negative: one pass over the columns finds both.
    """
    largest, smallest = (rows.nonzero()[:, 0] for rows in needed)
    both = maps.at_rows(largest).with_rows_of(maps.at_rows(smallest).negative())
    listed = torch.full((2, maps.n_rows, k), -1, device=needed.device)
    if both.n_rows:
        found = top_k(both, k, budget=budget).columns[0]
        listed[0, largest], listed[1, smallest] = found.split([len(largest), len(smallest)])
    return listed[0], listed[1]


def _best_targets(
    maps: LayerMaps, pairs: Pairs, scored: Bool[Tensor, "direction head relation"]
) -> tuple[Int[Tensor, "direction head row"], Bool[Tensor, "direction head row"]]:
    """For each row, the best and the worst target of the scored relations it belongs to, and whether there is one.

    If even that target is not among the first k of its row, no other is.
    """
    members = [(pairs.relation == number).nonzero()[:, 0] for number in range(len(pairs.k))]
    targets = [pairs.columns[of_relation].unique() for of_relation in members]
    shape = (2, len(maps.heads), maps.n_rows)
    best = torch.zeros(shape, dtype=torch.int64, device=pairs.rows.device)
    value = torch.full(shape, float("-inf"), device=pairs.rows.device)
    for head in range(len(maps.heads)):
        alone = maps.of_head(head)
        for number in scored[:, head].any(0).nonzero()[:, 0].tolist():
            rows, columns = pairs.rows[members[number]], targets[number]
            block = entries(alone.at_rows(rows), columns)[0]
            for direction in scored[:, head, number].nonzero()[:, 0].tolist():
                top, at = (block if direction == 0 else -block).max(1)
                better = top > value[direction, head, rows]
                value[direction, head, rows[better]] = top[better]
                best[direction, head, rows[better]] = columns[at[better]]
    return best, value > float("-inf")
