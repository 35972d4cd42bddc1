"""Ranks, matched sets, clusters, resamples: against brute force and by their properties."""

import itertools
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tl_headmaps.core.errors import UsageError
from tl_headmaps.core.types import HeadIndex
from tl_headmaps.scorers.statistics import (
    clustered_interval,
    clusters_of,
    jackknife_half_width,
    matched_sets,
    permuted_within,
    rank_p_value,
    resamples,
    sequential_p_value,
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


@given(st.lists(st.integers(0, 5), min_size=2, max_size=12))
def test_rank_p_values_of_exchangeable_values_are_valid(values: list[int]) -> None:
    p = [rank_p_value(float(own), [float(v) for v in values[:i] + values[i + 1 :]]) for i, own in enumerate(values)]
    for level in (0.05, 0.2, 0.5, 0.9):
        assert np.mean([value <= level for value in p]) <= level + 1e-12


def test_random_heads_are_others_of_the_same_layers_and_the_same_again() -> None:
    own = [HeadIndex(0, 1), HeadIndex(2, 3), HeadIndex(0, 0)]
    drawn = matched_sets(own, EVERYTHING, 2)
    for heads in drawn.sets:
        assert [head.layer for head in heads] == [0, 2, 0]
        assert len(set(heads)) == 3 and not set(heads) & set(own)
    assert not drawn.exact and not drawn.moved
    assert drawn == matched_sets(own, EVERYTHING, 2)
    assert drawn.sets != matched_sets(own, EVERYTHING, 2, seed=1).sets


def test_all_sets_where_there_are_no_more() -> None:
    own = [HeadIndex(0, 1), HeadIndex(2, 3), HeadIndex(0, 0)]
    drawn = matched_sets(own, EVERYTHING, 99)
    assert drawn.exact
    assert len({frozenset(heads) for heads in drawn.sets}) == len(drawn.sets) == comb(2, 2) * comb(3, 1)


def test_different_sets_are_drawn_evenly() -> None:
    own, everything = [HeadIndex(0, 0)], [HeadIndex(0, head) for head in range(30)]
    drawn = [matched_sets(own, everything, 28, seed).sets for seed in range(60)]
    assert all(len(set(sets)) == 28 for sets in drawn)
    left_out = {frozenset(everything[1:]) - {heads[0] for heads in sets} for sets in drawn}
    assert len(left_out) > 20, "which one is left out depends on the seed"


def test_a_layer_with_too_few_heads_borrows_from_its_neighbour() -> None:
    own = [HeadIndex(2, head) for head in (3, 1, 0)]
    drawn = matched_sets(own, EVERYTHING, 5)
    assert [head.layer for head in drawn.sets[0]] == [2, 1, 1]
    assert drawn.moved == (HeadIndex(2, 1), HeadIndex(2, 0))
    with pytest.raises(UsageError, match="only 4 others"):
        matched_sets(EVERYTHING[:8], EVERYTHING, 5)


def test_borrowing_never_takes_what_another_own_head_needs() -> None:
    own = [*[HeadIndex(1, head) for head in range(3)], HeadIndex(0, 0), HeadIndex(0, 1)]
    drawn = matched_sets(own, EVERYTHING, 5)
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


def test_items_on_their_own_have_nearly_the_plain_interval_and_copies_count_once() -> None:
    hit = torch.tensor([True, False, False, True, False, True, False, False, True, False])
    alone = clustered_interval(hit, torch.arange(10))
    plain = wilson_interval(hit.float().mean(), 10)
    copied = clustered_interval(hit.repeat(5), torch.arange(10).repeat(5))
    for one, other, copies in zip(alone, plain, copied, strict=True):
        assert float(one) == pytest.approx(float(other), abs=0.02)
        assert float(copies) == pytest.approx(float(one), abs=1e-6)


def test_an_interval_of_items_that_agree_counts_clusters() -> None:
    low, high = clustered_interval(torch.ones(2, 12, dtype=torch.bool), torch.arange(12) // 4)
    expected = wilson_interval(torch.tensor(1.0), 3)
    assert low.tolist() == pytest.approx([float(expected[0])] * 2) and high.tolist() == pytest.approx([1.0, 1.0])


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
