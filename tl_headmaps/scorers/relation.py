r"""Relation scores of a layer's heads, and the null they must beat.

**Score.** phi_k is the share of a relation's pairs (s, t) for which fewer than k tokens of row s have a strictly
greater entry than t; suppression is the same with strictly smaller. All relations are scored in one pass over the
vocabulary, each source row multiplied out once however many relations it occurs in.

**Null.** A head that writes the same few tokens whatever it reads scores on relations whose targets repeat. So each
source keeps its top-k set and gets a target drawn at random from the relation's own targets: source s then hits with
chance p_s, the share of the relation's targets (counting repeats) inside its top-k set. The null mean is the mean of
p_s, exactly that of shuffled targets; the p-value is the exact probability that independent trials with chances p_s
hit as often as the true targets do. Shuffling draws without replacement, which narrows the distribution, so the
p-value is conservative; unlike one from a finite number of shuffles, it has no smallest value and needs no seed.

It is needed only where a score is above zero, and there only for rows in which some target of the relation reaches
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
from .statistics import poisson_binomial_tail

SIDES: tuple[Side, Side] = ("greater", "less")
"""What is counted for promotion and for suppression."""


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
class Direction:
    """Scores in one direction (promotion or suppression) with their null."""

    score: Float[Tensor, "relation head"]
    null_mean: Float[Tensor, "relation head"]
    p_value: Float[Tensor, "relation head"]
    ranks: Int[Tensor, "head pair"]


def score_layer(
    maps: LayerMaps, pairs: Pairs, *, exact_ranks: bool = False, budget: int = DEFAULT_BUDGET
) -> tuple[Direction, Direction]:
    """Promotion and suppression scores of every relation for every head of a layer.

    Args:
        maps: Maps with a row for each source.
        pairs: The relations' pairs.
        exact_ranks: Compute full ranks; otherwise ranks are capped at the largest k.
        budget: Bytes one block may take.
    """
    limit = int(pairs.k.max())
    counts = ranks(maps, pairs.rows, pairs.columns, limit=None if exact_ranks else limit, budget=budget)
    rank = torch.stack([counts.greater, counts.less])
    hit = rank < pairs.k[pairs.relation]
    chance = _chances(maps, pairs, hit, budget)
    promote, suppress = (Direction(pairs.share(hit[i]), *_null(pairs, hit[i], chance[i]), rank[i]) for i in range(2))
    return promote, suppress


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


def _null(
    pairs: Pairs, hit: Tensor, chance: Tensor
) -> tuple[Float[Tensor, "relation head"], Float[Tensor, "relation head"]]:
    """Null means and p-values; 0 and 1 where nothing was hit."""
    hits = torch.zeros(len(pairs.k), hit.shape[0], dtype=torch.int64, device=hit.device)
    hits.index_add_(0, pairs.relation, hit.T.long())
    null_mean, p_value = torch.zeros(hits.shape, device="cpu"), torch.ones(hits.shape, device="cpu")
    chances, relation, hits = chance.cpu(), pairs.relation.cpu(), hits.cpu()
    for number, head in hits.nonzero().tolist():
        of_relation = chances[head, relation == number]
        null_mean[number, head] = of_relation.mean()
        p_value[number, head] = poisson_binomial_tail(of_relation.numpy(), int(hits[number, head]))
    return null_mean, p_value


def _target_weights(pairs: Pairs, n_columns: int) -> Float[Tensor, "relation column"]:
    """Share of each token among a relation's targets."""
    weight = torch.zeros(len(pairs.k), n_columns, dtype=torch.float64, device="cpu")
    one = torch.ones_like(pairs.columns, dtype=torch.float64)
    weight.index_put_((pairs.relation, pairs.columns), one / pairs.sizes[pairs.relation], accumulate=True)
    return weight


def _chances(maps: LayerMaps, pairs: Pairs, hit: Tensor, budget: int) -> Float[Tensor, "direction head pair"]:
    """Chance that each pair hits when its target is drawn from the relation's targets.

    It stays 0 for relations of which a head hits no pair: those have the null mean 0 and the p-value 1 anyway.
    """
    limit, n_rows = int(pairs.k.max()), maps.n_rows
    scored = torch.zeros(*hit.shape[:2], len(pairs.k), dtype=torch.int64, device=hit.device)
    scored.index_add_(2, pairs.relation, hit.long())
    active = scored[:, :, pairs.relation] > 0
    # A row needs its top-k list only if some target of its relations is in it. One rank per row tells: that of the
    # best of these targets, and most rows are ruled out by it.
    best, has_best = _best_targets(maps, pairs, scored > 0)
    weight = _target_weights(pairs.to(torch.device("cpu")), maps.columns.count)
    everyone = torch.arange(n_rows, device=hit.device)
    chance = torch.zeros(hit.shape, dtype=torch.float64, device="cpu")
    for direction, side in enumerate(SIDES):
        if not bool(has_best[direction].any()):
            continue
        counts = ranks(
            maps, everyone, best[direction], limit=limit, active=has_best[direction], side=side, budget=budget
        )
        reached = has_best[direction] & ((counts.greater if side == "greater" else counts.less) < limit)
        for head in range(len(maps.heads)):
            needed = reached[head].clone()
            # A pair that hits needs its row in any case, however the two ranks were rounded.
            needed[pairs.rows[hit[direction, head]]] = True
            open_pairs = (active[direction, head] & needed[pairs.rows]).nonzero()[:, 0]
            if not len(open_pairs):
                continue
            rows, place = pairs.rows[open_pairs].unique(return_inverse=True)
            top = top_k(maps.of_head(head).at_rows(rows), limit, largest=side == "greater", budget=budget)
            columns, hits = top.columns[0][place].cpu(), hit[direction, head, open_pairs].cpu()
            relation, target = pairs.relation[open_pairs].cpu(), pairs.columns[open_pairs].cpu()
            # Relations have their own k, at most the limit.
            inside = torch.arange(limit, device="cpu") < pairs.k.cpu()[relation, None]
            # A target that ties with the k-th place hits by rank and may be missing from the k tokens listed.
            listed = ((columns == target[:, None]) & inside).any(1)
            unlisted = weight[relation, target] * (hits & ~listed)
            chance[direction, head, open_pairs.cpu()] = (weight[relation[:, None], columns] * inside).sum(1) + unlisted
    return chance.clamp(max=1.0)


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
