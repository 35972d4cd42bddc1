r"""Relation scores of a layer's heads, and the null they must beat.

**Score.** phi_k is the share of a relation's pairs (s, t) for which fewer than k tokens of row s have a strictly
greater entry than t; suppression is the same with strictly smaller. All relations are scored in one pass over the
vocabulary, each source row multiplied out once however many relations it occurs in.

**Null.** A head that writes the same few tokens whatever it reads scores on relations whose targets repeat. So each
source keeps its top-k set and gets a target drawn at random from the relation's own targets: source s then hits with
chance p_s, the share of the relation's targets (repeats counted) inside its top-k set. The null mean is the mean of
p_s, exactly that of shuffled targets; the p-value is the exact probability that independent trials with chances p_s
hit as often as the true targets do. Shuffling draws without replacement, which narrows the distribution, so the
p-value errs on the careful side; and unlike a finite number of shuffles it has no smallest value and needs no seed.

It is needed only where a score is above zero, and there only for rows in which some target of the relation reaches
the top k at all: found by ranking each row's best target first, leaving early.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..circuits.factored import LayerMaps
from ..circuits.ranking import DEFAULT_BUDGET, entries, ranks, top_k
from .statistics import poisson_binomial_tail


@dataclass(frozen=True)
class Pairs:
    """The pairs of several relations, one after the other.

    Attributes:
        rows: Row of each pair's source in the maps.
        columns: Target id of each pair.
        relation: Number of the relation each pair belongs to, ascending.
        k: Top-k of each relation.
    """

    rows: Int[Tensor, " pair"]
    columns: Int[Tensor, " pair"]
    relation: Int[Tensor, " pair"]
    k: Int[Tensor, " relation"]

    @property
    def sizes(self) -> Int[Tensor, " relation"]:
        """Number of pairs of each relation."""
        return torch.bincount(self.relation, minlength=len(self.k))

    def share(self, hit: Tensor) -> Float[Tensor, "relation head"]:
        """Share of each relation's pairs that are true, from [head, pair]."""
        total = torch.zeros(len(self.k), hit.shape[0], dtype=torch.float64, device=hit.device)
        total.index_add_(0, self.relation, hit.T.double())
        return (total / self.sizes[:, None]).float()


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
    limit = None if exact_ranks else int(pairs.k.max())
    found = ranks(maps, pairs.rows, pairs.columns, limit=limit, budget=budget)
    k = pairs.k[pairs.relation]
    directions = []
    for largest, counted in ((True, found.greater), (False, found.less)):
        hit = counted < k
        null_mean, p_value = _null(maps, pairs, hit, largest, budget)
        directions.append(Direction(pairs.share(hit), null_mean, p_value, counted))
    return directions[0], directions[1]


def _null(
    maps: LayerMaps, pairs: Pairs, hit: Tensor, largest: bool, budget: int
) -> tuple[Float[Tensor, "relation head"], Float[Tensor, "relation head"]]:
    n_relations, n_heads = len(pairs.k), len(maps.heads)
    null_mean = torch.zeros(n_relations, n_heads)
    p_value = torch.ones(n_relations, n_heads)
    weight = _target_weights(pairs, maps.columns.count)
    for head in range(n_heads):
        scored = pairs.relation[hit[head]].unique()
        if not len(scored):
            continue
        active = torch.isin(pairs.relation, scored).nonzero()[:, 0]
        chance = _chances(maps.of_head(head), pairs, active, hit[head], weight, largest, budget).cpu()
        relation = pairs.relation[active].cpu()
        hits = hit[head, active].cpu()
        for number in scored.tolist():
            mine = relation == number
            chances = chance[mine]
            null_mean[number, head] = chances.mean()
            p_value[number, head] = poisson_binomial_tail(chances.numpy(), int(hits[mine].sum()))
    return null_mean, p_value


def _target_weights(pairs: Pairs, n_columns: int) -> Float[Tensor, "relation column"]:
    """Share of each token among a relation's targets."""
    weight = torch.zeros(len(pairs.k), n_columns, dtype=torch.float64, device=pairs.rows.device)
    one = torch.ones_like(pairs.columns, dtype=torch.float64)
    weight.index_put_((pairs.relation, pairs.columns), one / pairs.sizes[pairs.relation], accumulate=True)
    return weight


def _chances(
    maps: LayerMaps,
    pairs: Pairs,
    active: Tensor,
    hit: Tensor,
    weight: Tensor,
    largest: bool,
    budget: int,
) -> Float[Tensor, " active"]:
    """Chance of each active pair to hit when its target is drawn from the relation's targets."""
    rows, columns, relation = pairs.rows[active], pairs.columns[active], pairs.relation[active]
    best = _best_targets(maps, rows, columns, relation, largest)
    found = ranks(maps, rows, best, limit=int(pairs.k.max()), budget=budget)
    k = pairs.k[relation]
    reached = ((found.greater if largest else found.less)[0] < k) | hit[active]
    chance = torch.zeros(len(active), dtype=torch.float64, device=rows.device)
    if not bool(reached.any()):
        return chance
    reached_rows, place = rows[reached].unique(return_inverse=True)
    top = top_k(maps.at_rows(reached_rows), int(pairs.k.max()), largest=largest, budget=budget).columns[0][place]
    inside = torch.arange(top.shape[1], device=rows.device) < k[reached, None]
    chance[reached] = (weight[relation[reached, None], top] * inside).sum(1)
    # A target that ties with the k-th place hits by rank and may be missing from the k tokens listed.
    listed = ((top == columns[reached, None]) & inside).any(1)
    extra = weight[relation[reached], columns[reached]] * (hit[active][reached] & ~listed)
    chance[reached] += extra
    return chance.clamp(max=1.0)


def _best_targets(maps: LayerMaps, rows: Tensor, columns: Tensor, relation: Tensor, largest: bool) -> Tensor:
    """For each pair, the target of its relation with the largest (or smallest) entry in its row."""
    wanted, column_place = columns.unique(return_inverse=True)
    chosen, row_place = rows.unique(return_inverse=True)
    values = entries(maps.at_rows(chosen), wanted)[0]
    if not largest:
        values = -values
    best = torch.empty_like(columns)
    for number in relation.unique():
        mine = (relation == number).nonzero()[:, 0]
        targets = column_place[mine].unique()
        best[mine] = wanted[targets[values[row_place[mine]][:, targets].argmax(1)]]
    return best
