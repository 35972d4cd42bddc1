"""Ranks, matched sets, clusters, resamples: against brute force and by their properties."""

import itertools
import math
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_headmaps.core.errors import UsageError
from tl_headmaps.core.types import HeadIndex
from tl_headmaps.scorers.statistics import (
    clustered_interval,
    clusters_of,
    disjoint_sets,
    halves_of,
    jackknife_half_width,
    matched_sets,
    other_assignments,
    pair_clusters,
    permutation_tail,
    permuted_within,
    rank_p_value,
    resamples,
    sequential_p_value,
    sign_p_value,
    sum_tail,
    wilson_interval,
)


def test_sequential_p_values_are_valid_and_end_where_counted() -> None:
    generator = np.random.default_rng(0)
    # Own value and draws alike: the share of small p-values is no larger than it says.
    ranks = generator.random((4000, 40))
    p = np.array([sequential_p_value(torch.from_numpy(row[1:] >= row[0]), enough=3) for row in ranks])
    for level in (0.05, 0.1, 0.3):
        assert (p <= level).mean() <= level + 3 * (level / 4000) ** 0.5
    assert sequential_p_value(torch.tensor([True] * 10)) == 1.0
    assert sequential_p_value(torch.zeros(39, dtype=torch.bool)) == pytest.approx(1 / 40)
    assert np.isnan(sequential_p_value(torch.zeros(0, dtype=torch.bool)))


EVERYTHING = [HeadIndex(layer, head) for layer in range(3) for head in range(4)]


def test_rank_p_values_count_the_own_value_and_ties() -> None:
    assert rank_p_value(5.0, [1.0] * 39) == pytest.approx(1 / 40)
    assert rank_p_value(0.1 + 0.2, [0.3, 0.0]) == pytest.approx(2 / 3), "rounding does not break a tie"
    assert rank_p_value(-5.0, [1.0] * 39, side="less") == pytest.approx(1 / 40)
    assert np.isnan(rank_p_value(1.0, []))


def test_what_is_not_defined_has_no_rank() -> None:
    """NaN exceeds nothing and is exceeded by nothing: counting comparisons would call it the rarest of all."""
    assert np.isnan(rank_p_value(math.nan, [1.0] * 39)) and np.isnan(rank_p_value(math.nan, [1.0] * 39, side="less"))
    assert np.isnan(rank_p_value(1.0, [0.0, math.nan]))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=12))
def test_rank_p_values_of_exchangeable_values_are_valid(values: list[int]) -> None:
    p = [rank_p_value(float(own), [float(v) for v in values[:i] + values[i + 1 :]]) for i, own in enumerate(values)]
    for level in (0.05, 0.2, 0.5, 0.9):
        assert np.mean([value <= level for value in p]) <= level + 1e-12


def test_random_heads_are_others_of_the_same_layers_and_the_same_again() -> None:
    own = [HeadIndex(0, 1), HeadIndex(2, 3), HeadIndex(0, 0)]
    drawn = disjoint_sets(own, EVERYTHING, 2)
    for heads in drawn.sets:
        assert [head.layer for head in heads] == [0, 2, 0]
        assert len(set(heads)) == 3 and not set(heads) & set(own)
    assert not drawn.exact and not drawn.moved
    assert drawn == disjoint_sets(own, EVERYTHING, 2)
    assert drawn.sets != disjoint_sets(own, EVERYTHING, 2, seed=1).sets


def test_all_sets_where_there_are_no_more() -> None:
    own = [HeadIndex(0, 1), HeadIndex(2, 3), HeadIndex(0, 0)]
    drawn = disjoint_sets(own, EVERYTHING, 99)
    assert drawn.exact
    assert len({frozenset(heads) for heads in drawn.sets}) == len(drawn.sets) == comb(2, 2) * comb(3, 1)


def test_different_sets_are_drawn_evenly() -> None:
    own, everything = [HeadIndex(0, 0)], [HeadIndex(0, head) for head in range(30)]
    drawn = [disjoint_sets(own, everything, 28, seed).sets for seed in range(60)]
    assert all(len(set(sets)) == 28 for sets in drawn)
    left_out = {frozenset(everything[1:]) - {heads[0] for heads in sets} for sets in drawn}
    assert len(left_out) > 20, "which one is left out depends on the seed"


def test_a_layer_with_too_few_heads_borrows_from_its_neighbour() -> None:
    own = [HeadIndex(2, head) for head in (3, 1, 0)]
    drawn = disjoint_sets(own, EVERYTHING, 5)
    assert [head.layer for head in drawn.sets[0]] == [2, 1, 1]
    assert drawn.moved == (HeadIndex(2, 1), HeadIndex(2, 0))
    with pytest.raises(UsageError, match="only 4 others"):
        disjoint_sets(EVERYTHING[:8], EVERYTHING, 5)


def test_borrowing_never_takes_what_another_own_head_needs() -> None:
    own = [*[HeadIndex(1, head) for head in range(3)], HeadIndex(0, 0), HeadIndex(0, 1)]
    drawn = disjoint_sets(own, EVERYTHING, 5)
    assert drawn.moved == (HeadIndex(1, 1), HeadIndex(1, 2))
    assert [head.layer for head in drawn.sets[0]] == [1, 2, 2, 0, 0]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(10, 16)), min_size=1, max_size=10))
def test_clusters_are_connected_components(keys: list[tuple[int, int]]) -> None:
    labels = clusters_of(keys).tolist()
    linked = {(i, j) for i, j in itertools.product(range(len(keys)), repeat=2) if set(keys[i]) & set(keys[j])}
    for _ in keys:
        linked |= {(i, k) for (i, j), (m, k) in itertools.product(linked, linked) if j == m}
    for i, j in itertools.product(range(len(keys)), repeat=2):
        assert (labels[i] == labels[j]) == ((i, j) in linked)
    assert list(dict.fromkeys(labels)) == list(range(len(set(labels)))), "numbered in the order of their first item"


def test_items_on_their_own_have_the_plain_interval_and_copies_count_once() -> None:
    hit = torch.tensor([True, False, False, True, False, True, False, False, True, False])
    alone = clustered_interval(hit, torch.arange(10))
    plain = wilson_interval(hit.double().mean(), 10)
    copied = clustered_interval(hit.repeat(5), torch.arange(10).repeat(5))
    again = clustered_interval(hit.repeat(2), torch.arange(10).repeat(2))
    assert [float(end) for end in alone] == pytest.approx([float(end) for end in plain])
    assert [float(end) for end in copied] == pytest.approx([float(end) for end in again], abs=1e-6)
    assert float(copied[0]) == pytest.approx(0.139, abs=1e-3), "Student's quantile for ten clusters widens it a little"


def test_an_interval_of_items_that_agree_counts_clusters() -> None:
    from scipy.stats import t as student

    low, high = clustered_interval(torch.ones(2, 12, dtype=torch.bool), torch.arange(12) // 4)
    expected = wilson_interval(torch.tensor(1.0), 3, quantile=float(student.ppf(0.975, 2)))
    assert low.tolist() == pytest.approx([float(expected[0])] * 2) and high.tolist() == pytest.approx([1.0, 1.0])
    low, high = clustered_interval(torch.arange(6) < 2, torch.zeros(6, dtype=torch.int64))
    assert float(low) < 0.01 and float(high) > 0.98, "one cluster tells next to nothing"


@given(st.integers(1, 6), st.integers(0, 10_000))
def test_the_tail_of_permutations_equals_trying_them_all(n: int, seed: int) -> None:
    hits = np.random.default_rng(seed).integers(0, 4, (n, n))
    own = np.trace(hits)
    tried = [sum(hits[c, d] for c, d in enumerate(order)) >= own for order in itertools.permutations(range(n))]
    assert permutation_tail(hits) == pytest.approx(np.mean(tried), rel=1e-12)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 12), st.integers(0, 10_000))
def test_the_tail_of_a_sum_equals_enumeration(n: int, width: int, least: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    chances = generator.random((n, width)) * (generator.random((n, width)) < 0.7)
    chances[:, 0] += 0.1
    chances /= chances.sum(1, keepdims=True)
    total = sum(
        float(np.prod([chances[i, v] for i, v in enumerate(values)]))
        for values in itertools.product(range(width), repeat=n)
        if sum(values) >= least
    )
    assert sum_tail(chances, least) == pytest.approx(total, abs=1e-12)


def test_a_sign_test_is_a_binomial_tail() -> None:
    from scipy.stats import binomtest

    more, less = torch.tensor([[0, 3, 7], [0, 1, 20]]), torch.tensor([[0, 4, 0], [5, 1, 9]])
    for p, own, other in zip(sign_p_value(more, less).flatten(), more.flatten(), less.flatten(), strict=True):
        tosses = int(own + other)
        expected = binomtest(int(own), tosses, alternative="greater").pvalue if tosses else 1.0
        assert float(p) == pytest.approx(expected, rel=1e-6)


def test_clustered_intervals_cover_where_plain_ones_do_not() -> None:
    generator = np.random.default_rng(0)
    clusters = torch.arange(24).repeat_interleave(4)
    covered = []
    for _ in range(400):
        shared = generator.random(24) < 0.4
        own = generator.random(96) < 0.4
        copies = generator.random(96) < 0.8
        hit = torch.from_numpy(np.where(copies, shared[clusters.numpy()], own))
        intervals = [clustered_interval(hit, clusters), wilson_interval(hit.float().mean(), 96)]
        covered.append([bool(low <= 0.4) and bool(high >= 0.4) for low, high in intervals])
    clustered, plain = np.mean(covered, axis=0)
    assert 0.91 <= clustered <= 0.99
    assert plain < 0.85


def test_resamples_draw_as_many_units_as_there_are() -> None:
    drawn = resamples(7, 500)
    assert drawn.shape == (500, 7) and bool((drawn.sum(1) == 7).all())
    assert drawn.mean(0).tolist() == pytest.approx([1.0] * 7, abs=0.15)
    assert torch.equal(drawn, resamples(7, 500)) and not torch.equal(drawn, resamples(7, 500, seed=1))


def test_a_jackknife_of_one_unit_has_no_width() -> None:
    assert jackknife_half_width(torch.zeros(1, 3)).isnan().all()


def test_orders_stay_inside_groups_and_reach_every_place() -> None:
    groups = torch.tensor([0, 1, 0, 1, 0])
    generator = np.random.default_rng(0)
    orders = {tuple(permuted_within(groups, generator).tolist()) for _ in range(200)}
    assert len(orders) == 6 * 2
    assert all(torch.equal(groups[list(order)], groups) for order in orders)


def test_other_deals_are_all_the_others_or_that_many_different_ones() -> None:
    own = torch.tensor([True, False, True, False, False])
    deals, exact = other_assignments(own, 100)
    assert exact and len(deals) == 9 == len({tuple(deal.tolist()) for deal in deals})
    assert bool((deals.sum(1) == 2).all()) and not bool((deals == own).all(1).any())
    drawn, exact = other_assignments(own, 5)
    assert not exact and len(drawn) == 5 == len({tuple(deal.tolist()) for deal in drawn})
    assert not bool((drawn == own).all(1).any()) and torch.equal(drawn, other_assignments(own, 5)[0])


def grid(n_layers: int, n_heads: int) -> list[HeadIndex]:
    return [HeadIndex(layer, head) for layer in range(n_layers) for head in range(n_heads)]


class TestSetsLike:
    @settings(deadline=None, max_examples=50)
    @given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 40), st.integers(0, 1000))
    def test_are_different_sets_of_the_same_size_and_not_the_own_one(
        self, n_layers: int, n_heads: int, n: int, seed: int
    ) -> None:
        everything = grid(n_layers, n_heads)
        generator = np.random.default_rng(seed)
        size = int(generator.integers(1, len(everything) + 1))
        own = [everything[place] for place in generator.permutation(len(everything))[:size]]
        found = matched_sets(own, everything, n, least=3, seed=seed)
        sets = [frozenset(heads) for heads in found.sets]
        assert len(set(sets)) == len(sets) and frozenset(own) not in sets
        assert all(len(heads) == size and heads <= set(everything) for heads in sets)
        assert len(sets) == n or found.exact
        if not found.moved:
            layers = sorted(head.layer for head in own)
            assert all(sorted(head.layer for head in heads) == layers for heads in sets)

    def test_all_sets_where_there_are_no_more(self) -> None:
        own = [HeadIndex(0, 0), HeadIndex(0, 1), HeadIndex(1, 2)]
        found = matched_sets(own, grid(3, 5), 49)
        assert found.exact and len(found.sets) == 10 * 5 - 1 and found.moved == ()
        assert not matched_sets(own, grid(3, 5), 48).exact

    def test_a_layer_with_one_head_borrows_from_its_neighbours(self) -> None:
        everything = [*grid(2, 8), HeadIndex(2, 0), HeadIndex(3, 0), HeadIndex(9, 0)]
        found = matched_sets([HeadIndex(0, 3), HeadIndex(0, 4), HeadIndex(3, 0)], everything, 999)
        assert found.moved == (HeadIndex(3, 0),)
        assert {head for heads in found.sets for head in heads if head.layer} == {HeadIndex(2, 0), HeadIndex(3, 0)}

    def test_too_few_sets_widen_the_layer_on_both_sides(self) -> None:
        found = matched_sets([HeadIndex(5, 1)], grid(12, 9), 99)
        assert len(found.sets) == 26 and found.exact and found.moved == (HeadIndex(5, 1),)
        assert {heads[0].layer for heads in found.sets} == {4, 5, 6}

    def test_all_heads_have_no_other_set(self) -> None:
        assert matched_sets(grid(2, 3), grid(2, 3), 99).sets == ()

    def test_ranks_of_random_sets_are_p_values_where_one_head_decides(self) -> None:
        """Whoever holds the head loses everything: among sets of other heads, a third would be called special."""
        everything = grid(1, 9)
        p_values = []
        for own in itertools.combinations(everything, 3):
            lost = [-float(everything[4] in heads) for heads in matched_sets(own, everything, 99).sets]
            p_values.append(rank_p_value(-float(everything[4] in own), lost, "less"))
        for level in (0.01, 0.05, 0.2, 1 / 3, 0.9):
            assert np.mean([p <= level for p in p_values]) <= level


def test_pairs_that_share_a_target_or_a_beginning_are_one_cluster() -> None:
    sources = [" walker", "Austria", "Chad", "walked", "australia", "Mali"]
    assert pair_clusters(sources, ["a", "b", "c", "d", "e", "c"]).tolist() == [0, 1, 2, 0, 1, 2]
    assert pair_clusters(["walk", "walker", "walked"], ["a", "b", "a"]).tolist() == [0, 0, 0], "linked through others"


@given(st.lists(st.integers(0, 9), min_size=4, max_size=40), st.integers(0, 100))
def test_halves_keep_clusters_together_and_are_about_equal(keys: list[int], seed: int) -> None:
    clusters = clusters_of([(key,) for key in keys])
    first = halves_of(clusters, seed)
    for cluster in clusters.unique():
        assert len(first[clusters == cluster].unique()) == 1
    assert abs(int(first.sum()) - int((~first).sum())) <= int(clusters.bincount().max())
