"""Attention groups: the fixtures exactly, every number against a slow reference, the invariants by hypothesis."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import DECODERS, random_model, shared_model

from tl_headmaps import AttentionGroups, HeadIndex, attention_groups
from tl_headmaps.core.errors import UsageError
from tl_headmaps.scorers import partitions
from tl_headmaps.scorers.affinity import (
    affinity,
    attention_inside,
    column_and_row_sums,
    expected_inside,
    sink_share,
    sinks_of,
    tree_parents,
)
from tl_headmaps.scorers.distance import DistanceNull, expected_on, pair_classes
from tl_headmaps.scorers.groups import Grouping, GroupOptions
from tl_headmaps.scorers.partitions import cluster, members, modularity, numbered

ROOT = Path(__file__).parents[1]
WORDS = ["It", "I", "is", "am", "the"]
TREE_WORDS = ["It", "I", "is", "am", "the", "is", "am", "the"]
TREE_PARENTS = [None, None, 0, 0, 0, 1, 1, 1]
TEXT = "The old man walked. The birds sang in the garden."


def seed_pattern() -> torch.Tensor:
    """Seed 001: Head 0 sees {It, I}, Heads 1 and 2 see {is, am, the}; ones inside, zeros across."""
    pattern = torch.zeros(3, 5, 5)
    pattern[0, :2, :2] = 1
    pattern[1:, 2:, 2:] = 1
    return pattern


def tree_mask(parents: list[int | None]) -> torch.Tensor:
    mask = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent is not None:
            mask[token] |= mask[parent]
    return mask


def random_pattern(seed: int, n: int, heads: int = 1, *, causal: bool, sharp: float = 2.0) -> torch.Tensor:
    scores = sharp * torch.randn(heads, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if causal:
        scores.masked_fill_(torch.ones(n, n).triu(1).bool(), -math.inf)
    return scores.softmax(-1)


def blocks(labels: list[int], inside: float, across: float, *, sink: float = 0.0) -> torch.Tensor:
    """A causal pattern whose attention prefers the query's own block; ``sink`` goes to the first token."""
    same = torch.tensor(labels)[:, None] == torch.tensor(labels)[None, :]
    weights = torch.where(same, inside, across).double().tril()
    weights = weights / weights.sum(1, keepdim=True) * (1 - sink)
    weights[:, 0] += sink
    return weights / weights.sum(1, keepdim=True)


@pytest.mark.once
class TestFixtures:
    def test_the_drawing_of_seed_001_comes_out_exactly(self) -> None:
        found = AttentionGroups.from_pattern(seed_pattern(), WORDS)
        assert found.groups == ((0, 1), (2, 3, 4))
        assert found.words() == (("It", "I"), ("is", "am", "the"))
        assert found.head_to_group == (0, 1, 1)
        assert found.weights.tolist() == [[1, 0], [0, 1], [0, 1]], "zero attention across"
        assert found.sink is None and found.found_sink is None and not found.causal
        assert found.head_groups == (((0, 1), (2,), (3,), (4,)), ((0,), (1,), (2, 3, 4)), ((0,), (1,), (2, 3, 4)))
        assert found.within_share.tolist() == [1, 1, 1]
        # Weight 1 on the pair, 2 (two heads) on each of three pairs: 2m = 14, of which 2 and 12 are inside.
        assert found.combination["modularity"] == pytest.approx(2 / 14 + 12 / 14 - (2 / 14) ** 2 - (12 / 14) ** 2)
        assert found.order == (0, 1, 2, 3, 4) and found.labels == (0, 0, 1, 1, 1)

    @pytest.mark.parametrize("method", ["auto", "spectral", "components"])
    def test_every_method_finds_them(self, method: Any) -> None:
        assert AttentionGroups.from_pattern(seed_pattern(), WORDS, method=method).groups == ((0, 1), (2, 3, 4))

    def test_one_matrix_of_all_blocks_is_one_head(self) -> None:
        found = AttentionGroups.from_pattern(seed_pattern().amax(0).tolist(), WORDS)
        assert found.groups == ((0, 1), (2, 3, 4)) and found.heads == (HeadIndex(0, 0),)

    def test_interleaved_blocks_are_put_side_by_side(self) -> None:
        pattern = torch.zeros(4, 4)
        pattern[::2, ::2] = 1
        pattern[1::2, 1::2] = 1
        found = AttentionGroups.from_pattern(pattern)
        assert found.groups == ((0, 2), (1, 3)) and found.order == (0, 2, 1, 3)

    def test_the_tree_of_eight_tokens_is_recognised_with_every_parent(self) -> None:
        mask = tree_mask(TREE_PARENTS)
        found = AttentionGroups.from_pattern(mask, TREE_WORDS)
        assert found.parents == tuple(TREE_PARENTS)
        assert found.groups == ((0, 2, 3, 4), (1, 5, 6, 7))
        assert found.sink is None, "a root is no sink"
        # With probabilities in place of ones it is the same tree.
        evenly = mask.float() / mask.sum(1, keepdim=True)
        assert AttentionGroups.from_pattern(evenly, TREE_WORDS).parents == tuple(TREE_PARENTS)
        assert "0 It" in str(found) and "tree" in str(found)


@pytest.mark.once
class TestTrees:
    @given(st.lists(st.integers(-1, 10), min_size=1, max_size=12))
    def test_any_tree_is_found_again(self, choices: list[int]) -> None:
        parents = [None if choice < 0 or not token else choice % token for token, choice in enumerate(choices)]
        mask = tree_mask(parents)
        if bool((mask == torch.ones_like(mask).tril()).all()):
            assert tree_parents(mask) is None, "the causal triangle is every decoder's mask"
        else:
            assert tree_parents(mask) == parents

    def test_what_is_no_tree(self) -> None:
        # Token 3 sees 2 but not its parent 0, token 3 sees two branches, a token sees a later one, or not itself.
        broken = tree_mask([None, 0, 0, 2])
        broken[3, 0] = False
        forked = tree_mask([None, 0, 0, 2])
        forked[3, 1] = True
        ahead = tree_mask([None, 0, 0])
        ahead[0, 2] = True
        blind = tree_mask([None, 0, 0])
        blind[1, 1] = False
        for mask in (broken, forked, ahead, blind):
            assert tree_parents(mask) is None


@pytest.mark.once
class TestAffinity:
    @pytest.mark.parametrize("n", [2, 5, 9])
    def test_even_causal_attention_has_affinity_one_everywhere(self, n: int) -> None:
        even = torch.ones(n, n).tril() / torch.arange(1.0, n + 1)[:, None]
        torch.testing.assert_close(affinity(even, True), 1 - torch.eye(n))
        found = AttentionGroups.from_pattern(even)
        assert found.groups == (tuple(range(n)),) and found.found_sink is None
        assert found.head_to_group == (None,), "no more inside than even attention has"

    def test_against_a_loop(self) -> None:
        causal, both = random_pattern(1, 6, causal=True)[0], random_pattern(1, 6, causal=False)[0]
        for i, j in itertools.permutations(range(6), 2):
            late, early = max(i, j), min(i, j)
            assert float(affinity(causal, True)[i, j]) == pytest.approx(float(causal[late, early]) * (late + 1))
            assert float(affinity(both, False)[i, j]) == pytest.approx(6 * float(both[i, j] + both[j, i]) / 2)

    def test_a_sink_is_found_reported_and_left_out(self) -> None:
        pattern = blocks([0, 0, 0, 0, 1, 1, 1], inside=1.0, across=0.01, sink=0.6)
        found = AttentionGroups.from_pattern(pattern, drop_sink=True)
        assert found.sink == found.found_sink == 0 and found.kept == (1, 2, 3, 4, 5, 6)
        assert found.groups == ((1, 2, 3), (4, 5, 6)) and found.order[0] == 0 and found.labels[0] is None
        assert found.combination["sink_share"] == pytest.approx(float(pattern[1:, 0].mean()))
        assert "attention sink '0'" in str(found)
        kept = AttentionGroups.from_pattern(pattern, drop_sink=False)
        assert kept.found_sink == 0 and kept.sink is None and kept.kept == tuple(range(7))

    def test_what_counts_as_a_sink(self) -> None:
        # Even attention of two later queries gives the first token (1/2 + 1/3) / 2; 0.3 of the way to 1 is the line.
        line = 5 / 12 + 0.3 * 7 / 12
        for share, expected in ((line + 1e-6, (0,)), (line - 1e-6, ())):
            parked = torch.tensor([[1.0, 0, 0], [share, 1 - share, 0], [share, 0, 1 - share]], dtype=torch.float64)
            assert sinks_of(column_and_row_sums(parked), True) == expected
        assert sink_share(torch.tensor([[1.0, 0], [0.25, 0.75]])) == pytest.approx(0.25)

    def test_there_may_be_several_sinks_but_a_block_is_none(self) -> None:
        pattern = torch.full((10, 10), 0.01, dtype=torch.float64).tril() + torch.eye(10) * 0.2
        pattern[1:, 0] += 0.6
        pattern[4:, 3] += 0.6
        pattern /= pattern.sum(1, keepdim=True)
        found = AttentionGroups.from_pattern(pattern)
        assert found.sinks == (0, 3) and found.sink == 0 and found.kept == (1, 2, 4, 5, 6, 7, 8, 9)
        assert "left out as well: '3'" in str(found)
        assert AttentionGroups.from_pattern(pattern, drop_sink=False).sinks == ()
        for size in (4, 5, 8):
            block = blocks([0] * 8 + [1] * size, 1.0, 1e-6)
            assert set(sinks_of(column_and_row_sums(block), True)) <= {0}

    def test_a_sink_of_one_layer_is_alone_in_its_heads(self) -> None:
        parked = torch.eye(10, dtype=torch.float64)
        parked[4:, 3] = 4.0
        parked /= parked.sum(1, keepdim=True)
        plain = torch.ones(10, 10, dtype=torch.float64).tril()
        plain /= plain.sum(1, keepdim=True)
        patterns = [parked, plain, plain]

        def visit(see: Any) -> None:
            for index, pattern in enumerate(patterns):
                see(index, pattern)

        heads = [HeadIndex(0, 0), HeadIndex(1, 0), HeadIndex(1, 1)]
        grouping = Grouping(visit, heads, 10, GroupOptions(n_null=0))
        assert grouping.sinks == () and grouping.head_sinks == [(3,), (), ()]
        assert (3,) in grouping.head_groups[0] and grouping.head_groups[1] == (tuple(range(10)),)

    def test_shares_inside_groups_against_a_loop(self) -> None:
        pattern, labels = random_pattern(3, 7, causal=True)[0], torch.tensor([0, 1, 0, 1, 2, 0, 1])
        even = torch.ones(7, 7).tril() / torch.arange(1.0, 8)[:, None]
        for matrix, ours in (
            (pattern, attention_inside(pattern, labels)),
            (even, expected_inside(torch.arange(7), 7, True, labels)),
            (torch.full((7, 7), 1 / 7), expected_inside(torch.arange(7), 7, False, labels)),
        ):
            total = sum(float(matrix[i, j]) for i, j in itertools.permutations(range(7), 2))
            for group in range(3):
                inside = [i for i in range(7) if labels[i] == group]
                expected = sum(float(matrix[i, j]) for i, j in itertools.permutations(inside, 2)) / total
                assert float(ours[group]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.once
class TestClustering:
    @pytest.mark.parametrize("causal", [True, False])
    def test_planted_blocks_are_found_in_noise(self, causal: bool) -> None:
        labels = [0] * 5 + [1] * 6 + [2] * 5
        found = AttentionGroups.from_pattern(
            blocks(labels, 1.0, 0.05) if causal else _both_ways(labels), method="spectral"
        )
        assert found.groups == tuple(tuple(i for i in range(16) if labels[i] == g) for g in range(3))
        assert float(found.p_value[0]) <= 0.05 and float(found.z_score[0]) > 1

    @pytest.mark.parametrize(("kept", "n_groups"), [(0.74, 1), (0.76, 2)])
    def test_two_equal_groups_need_three_quarters_of_their_weight(self, kept: float, n_groups: int) -> None:
        same = torch.arange(40)[:, None] // 20 == torch.arange(40)[None, :] // 20
        weights = torch.where(same, kept / 19, (1 - kept) / 20).fill_diagonal_(0)
        assert int(cluster(weights, "spectral").max()) + 1 == n_groups

    def test_many_groups_of_unequal_strength_are_found(self) -> None:
        found = AttentionGroups.from_pattern(blocks([token // 50 for token in range(400)], 20.0, 1.0))
        # The triangle leaves the first block nothing but even attention, so it joins another; no block is torn.
        assert len(found.groups) == 7 and found.labels[0] == found.labels[49]
        assert all(len({found.labels[token] for token in range(s, s + 50)}) == 1 for s in range(0, 400, 50))

    @pytest.mark.parametrize("slope", [0.0, 0.6])
    def test_p_values_of_noise_and_of_recency_are_honest(self, slope: float) -> None:
        """The number of groups is chosen on the data; attention that falls with distance is no group."""
        scores = random_pattern(5, 14, heads=80, causal=True).log()
        distance = torch.arange(14.0)[:, None] - torch.arange(14.0)[None, :]
        pattern = (scores - slope * distance.clamp_min(0)).softmax(-1)
        found = AttentionGroups.from_pattern(pattern, drop_sink=False, n_null=99)
        # Of 80 heads without groups 4 are expected at .05; more than 10 come about in one of 400 such tests.
        assert int((found.p_value <= 0.05).sum()) <= 10
        assert int((found.p_value <= 0.2).sum()) <= 30

    def test_pure_recency_has_nothing_to_exchange(self) -> None:
        distance = torch.arange(12.0)[:, None] - torch.arange(12.0)[None, :]
        pattern = torch.where(distance >= 0, -0.5 * distance, -math.inf).softmax(-1)
        found = AttentionGroups.from_pattern(pattern, method="spectral", drop_sink=False, n_null=19)
        assert len(found.groups) > 1 and float(found.p_value[0]) > 0.5
        assert found.formers() == []

    def test_which_heads_form_groups(self) -> None:
        labels = torch.tensor([0, 1, 2, 0, 0, 1, 2, 2, 1, 0, 1, 2])
        same = labels[:, None] == labels[None, :]
        noise = random_pattern(3, 12, 4, causal=False, sharp=0.5)
        found = AttentionGroups.from_pattern(
            torch.cat([torch.where(same, 1.0, 0.05)[None].double(), noise]), n_null=199
        )
        assert [head for head, _ in found.formers()] == [HeadIndex(0, 0)]
        assert float(found.p_value[0]) == pytest.approx(1 / 200), "never smaller than the draws allow"
        assert float(found.q_value[0]) == pytest.approx(5 / 200)
        with pytest.raises(UsageError, match="No draws were made for these 12 tokens"):
            AttentionGroups.from_pattern(torch.where(same, 1.0, 0.05), n_null=0).formers()

    def test_every_third_token_is_a_matter_of_distance(self) -> None:
        same = torch.arange(12)[:, None] % 3 == torch.arange(12)[None, :] % 3
        found = AttentionGroups.from_pattern(torch.where(same, 1.0, 0.05), n_null=39)
        assert len(found.groups) == 3 and float(found.p_value[0]) == 1 and found.formers() == []

    def test_a_head_has_the_same_p_value_whichever_others_there_are(self) -> None:
        pattern = random_pattern(11, 10, 3, causal=True)
        together = AttentionGroups.from_pattern(pattern, drop_sink=False, n_null=39)
        alone = AttentionGroups.from_pattern(pattern[1], drop_sink=False, n_null=39)
        assert float(together.p_value[1]) == float(alone.p_value[0])

    def test_n_groups_is_obeyed(self) -> None:
        pattern = random_pattern(2, 12, causal=True)
        for n in (1, 2, 4):
            assert len(AttentionGroups.from_pattern(pattern, n_groups=n, drop_sink=False).groups) == n

    def test_signs_and_rotations_of_eigenvectors_do_not_matter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weights = affinity(blocks([0, 0, 0, 0, 1, 1, 1, 1], 1.0, 0.05), True)
        plain, leading = cluster(weights, "spectral"), partitions._leading
        assert int(plain.max()) == 1

        def turned(*arguments: Any) -> Any:
            values, vectors = leading(*arguments)
            return values, vectors * np.where(np.arange(vectors.shape[2]) % 2, -1.0, 1.0)

        monkeypatch.setattr(partitions, "_leading", turned)
        assert torch.equal(cluster(weights, "spectral"), plain)
        points = np.random.default_rng(0).normal(size=(30, 3))
        rotation, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))
        first = np.array([4])
        plain_labels, turned_labels = (partitions._k_means(p[None], first) for p in (points, points @ rotation))
        np.testing.assert_array_equal(plain_labels, turned_labels)

    def test_many_graphs_at_once_are_clustered_as_one_by_one(self) -> None:
        patterns = random_pattern(8, 11, heads=40, causal=True, sharp=3.0)
        graphs = torch.stack([affinity(pattern, True) for pattern in patterns])
        # Some graphs in several parts, some sharp, some not.
        graphs[::3] = torch.where(graphs[::3] > 0.5, graphs[::3], 0.0)
        for options in ({}, {"method": "spectral"}, {"method": "components", "threshold": 0.5}, {"k": 3}):
            together = cluster(graphs, **options)
            assert torch.equal(together, torch.stack([cluster(graph, **options) for graph in graphs]))
            each = torch.stack([modularity(graph, labels) for graph, labels in zip(graphs, together, strict=True)])
            torch.testing.assert_close(modularity(graphs, together), each)

    def test_the_lanczos_way_agrees_with_the_dense_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weights = affinity(blocks([0] * 30 + [1] * 40 + [2] * 30, 1.0, 0.05), True).float()
        dense = cluster(weights, "spectral")
        assert int(dense.max()) == 2
        monkeypatch.setattr(partitions, "_DENSE", 10)
        assert torch.equal(cluster(weights, "spectral"), dense)
        scale = weights.sum(1).double().rsqrt()
        values, _ = partitions._leading(weights[None].numpy(), scale[None].numpy(), 5)
        exact = np.linalg.eigvalsh((weights.double() * scale[:, None] * scale[None, :]).numpy())[::-1][:5]
        np.testing.assert_allclose(values[0], exact, atol=1e-4)

    def test_modularity_is_networkx_s(self) -> None:
        weights = affinity(random_pattern(4, 9, causal=True)[0], True)
        labels = numbered(torch.tensor([0, 0, 1, 2, 1, 0, 2, 2, 1]))
        theirs = networkx.community.modularity(
            networkx.from_numpy_array(weights.numpy()), [set(group) for group in members(labels)], weight="weight"
        )
        assert float(modularity(weights, labels)) == pytest.approx(theirs)
        assert float(modularity(torch.zeros(3, 3), torch.tensor([0, 1, 2]))) == 0

    def test_components_are_networkx_s(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(10):
            edges = (torch.rand(12, 12, generator=generator) < 0.1).float()
            edges = torch.maximum(edges, edges.T).fill_diagonal_(0)
            theirs = networkx.connected_components(networkx.from_numpy_array(edges.numpy()))
            assert members(cluster(edges, "components")) == sorted(sorted(part) for part in theirs)


@pytest.mark.once
class TestDistance:
    def test_fitted_attention_has_the_own_sums_of_rows_and_distances(self) -> None:
        pattern = random_pattern(2, 9, 2, causal=True)
        pairs = torch.zeros(17, 9, 9, dtype=torch.bool)
        distance = torch.arange(9)[:, None] - torch.arange(9)[None, :]
        for place in range(9):
            pairs[place, place] = True
            if place < 8:
                pairs[9 + place] = distance == place
        found = expected_on(pattern, pairs, pair_classes(9))
        own = torch.stack([(pattern * pair).sum((1, 2)) for pair in pairs], 1)
        torch.testing.assert_close(found, own, atol=1e-3, rtol=1e-3)

    def test_attention_by_distance_alone_is_its_own_null(self) -> None:
        distance = torch.arange(8.0)[:, None] - torch.arange(8.0)[None, :]
        pattern = torch.where(distance >= 0, -0.4 * distance, -math.inf).softmax(-1)[None].double()
        pairs = torch.rand(4, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.3
        found = expected_on(pattern, pairs, pair_classes(8))
        torch.testing.assert_close(found[0], (pattern * pairs).sum((1, 2)), atol=1e-6, rtol=1e-6)
        drawn = DistanceNull(pattern, pair_classes(8)).draw(np.random.default_rng(0), 5)
        torch.testing.assert_close(drawn[0], pattern.expand(5, 8, 8), atol=1e-6, rtol=1e-6)

    def test_draws_exchange_scores_within_distances_against_a_loop(self) -> None:
        pattern = random_pattern(4, 7, causal=True)
        null, classes = DistanceNull(pattern, pair_classes(7)), pair_classes(7)
        drawn = null.draw(np.random.default_rng(1), 3)
        torch.testing.assert_close(drawn.sum(-1), torch.ones(1, 3, 7, dtype=torch.float64))
        assert not bool(drawn.triu(1).any())
        # Least squares by another way: dummies for rows and distances.
        places = [(q, k) for q in range(7) for k in range(q + 1)]
        design = np.zeros((len(places), 14))
        for row, (q, k) in enumerate(places):
            design[row, q] = design[row, 7 + q - k] = 1
        logs = np.array([math.log(float(pattern[0, q, k])) for q, k in places])
        coefficients, *_ = np.linalg.lstsq(design, logs, rcond=None)
        hat = design @ np.linalg.pinv(design)
        free = 1 - np.diag(hat)
        left = np.where(free > 1e-6, (logs - design @ coefficients) / np.sqrt(np.maximum(free, 1e-6)), 0.0)
        ours = null._residuals[0].numpy()
        np.testing.assert_allclose(ours, left, atol=1e-8)
        # What a draw holds at a distance is a permutation of what the head had there, up to a constant in each row.
        scores = drawn[0, 0].log()
        for q, k in places:
            assert int(classes[q, k]) == q - k
        residual = {(q, k): float(scores[q, k]) for q, k in places}
        effect = {q - k: float(null._effects[0][places.index((q, k))]) for q, k in places}
        # Of the longest row the constant is known once one entry is matched: the last distance has one pair alone.
        constant = residual[6, 0] - effect[6]
        last = [residual[6, k] - effect[6 - k] - constant for k in range(7)]
        for k, value in enumerate(last):
            own = [left[places.index((q, j))] for q, j in places if q - j == 6 - k]
            assert min(abs(value - one) for one in own) < 1e-6

    def test_a_sink_keeps_what_it_gets(self) -> None:
        pattern = random_pattern(6, 8, causal=True)
        pattern[:, :, 0] += 2
        pattern /= pattern.sum(-1, keepdim=True)
        sinks = torch.arange(8) == 0
        pairs = torch.zeros(1, 8, 8, dtype=torch.bool)
        pairs[0, :, 0] = True
        found = expected_on(pattern, pairs, pair_classes(8, sinks=sinks))
        torch.testing.assert_close(found[0], pattern[0, :, 0].sum()[None], atol=1e-4, rtol=1e-4)


def _both_ways(labels: list[int]) -> torch.Tensor:
    same = torch.tensor(labels)[:, None] == torch.tensor(labels)[None, :]
    return torch.where(same, 1.0, 0.05)


@pytest.mark.once
class TestInvariants:
    @settings(max_examples=20)
    @given(st.integers(0, 10_000), st.integers(2, 12), st.integers(1, 3), st.booleans(), st.booleans())
    def test_groups_partition_the_kept_tokens(self, seed: int, n: int, heads: int, causal: bool, drop: bool) -> None:
        pattern = random_pattern(seed, n, heads, causal=causal)
        found = AttentionGroups.from_pattern(pattern, drop_sink=drop, n_null=2)
        for groups in (found.groups, *found.head_groups):
            assert sorted(token for group in groups for token in group) == list(found.kept)
            assert list(groups) == sorted(groups)
        assert sorted(found.order) == list(range(n))
        assert bool(((found.weights >= 0) & (found.weights.sum(1, keepdim=True) <= 1 + 1e-6)).all())

    @settings(max_examples=20)
    @given(st.integers(0, 10_000), st.permutations(range(9)), st.sampled_from(["spectral", "components"]))
    def test_permuting_tokens_permutes_groups(self, seed: int, order: list[int], method: Any) -> None:
        pattern = random_pattern(seed, 9, 2, causal=False)
        options: dict[str, Any] = {"drop_sink": False, "n_null": 0, "method": method, "threshold": 0.5}
        plain = AttentionGroups.from_pattern(pattern, **options)
        moved = AttentionGroups.from_pattern(pattern[:, order][:, :, order], **options)

        def back(groups: Any) -> list[list[int]]:
            return sorted(sorted(order[token] for token in group) for group in groups)

        assert back(moved.groups) == sorted(map(list, plain.groups))
        for mine, theirs in zip(moved.head_groups, plain.head_groups, strict=True):
            assert back(mine) == sorted(map(list, theirs))
        torch.testing.assert_close(moved.modularity, plain.modularity)

    @settings(max_examples=20)
    @given(st.integers(0, 10_000), st.permutations(range(1, 8)))
    def test_behind_a_sink_the_others_may_be_permuted(self, seed: int, order: list[int]) -> None:
        pattern = random_pattern(seed, 8, causal=False)
        pattern[:, :, 0] += 3
        order = [0, *order]
        plain = AttentionGroups.from_pattern(pattern, n_null=0)
        moved = AttentionGroups.from_pattern(pattern[:, order][:, :, order], n_null=0)
        assert plain.sink == moved.sink == 0
        assert sorted(sorted(order[token] for token in group) for group in moved.groups) == sorted(
            map(list, plain.groups)
        )

    @settings(max_examples=20)
    @given(st.integers(0, 10_000), st.floats(0.01, 100))
    def test_scale_does_not_matter(self, seed: int, factor: float) -> None:
        pattern = random_pattern(seed, 8, causal=True)
        plain, scaled = (AttentionGroups.from_pattern(p, n_null=0) for p in (pattern, factor * pattern))
        assert plain.groups == scaled.groups
        torch.testing.assert_close(plain.weights, scaled.weights)


class TestModels:
    @pytest.mark.parametrize("name", DECODERS)
    def test_every_architecture_gives_what_its_cached_patterns_give(self, name: str) -> None:
        model, ids = shared_model(name), [3, 9, 4, 9, 5, 3, 7]
        found = attention_groups(model, ids, layers=[1, 2], n_null=0)
        _, cache = model.run_with_cache(torch.tensor([ids]))
        patterns = torch.cat([cache[f"blocks.{layer}.attn.hook_pattern"][0] for layer in (1, 2)])
        bare = AttentionGroups.from_pattern(patterns, found.tokens, n_null=0)
        assert found.groups == bare.groups and found.head_groups == bare.head_groups
        torch.testing.assert_close(found.weights, bare.weights, atol=1e-5, rtol=1e-4)
        assert [str(head) for head in found.heads] == [f"L{layer}H{head}" for layer in (1, 2) for head in range(4)]

    @pytest.mark.model
    def test_the_default_model_binds_the_words_of_a_sentence(self, default_model: Any) -> None:
        found = attention_groups(default_model, TEXT, heads=["L25H8", "L13H2", "L5H3"])
        assert found.sink == 0 and found.tokens[:2] == ("<|im_start|>", "The") and found.causal
        assert found.provenance.model and found.provenance.seed == 0
        assert json.loads(found.to_json())["head_to_group"].keys() == {"L5H3", "L13H2", "L25H8"}
        assert not any(
            len(module._forward_hooks) for name, module in default_model.named_modules() if "hook_pattern" in name
        )


@pytest.mark.once
class TestFigure:
    def test_the_drawing_of_seed_001_comes_out_exactly(self) -> None:
        found = AttentionGroups.from_pattern(seed_pattern(), WORDS, combine="max")
        assert found.combined is not None and torch.equal(found.combined, seed_pattern().amax(0))
        chart = found.figure(names=["Head 0", "Head 1", "Head 2"], labels="top").data
        assert chart.tokens == tuple(WORDS) and chart.labels == "top" and chart.is_binary
        assert chart.heads == (
            ("Head 0", (((0, 1), 1.0),)),
            ("Head 1", (((2, 3, 4), 1.0),)),
            ("Head 2", (((2, 3, 4), 1.0),)),
        )
        np.testing.assert_array_equal(chart.matrix, seed_pattern().amax(0))
        assert chart.note.endswith(
            "The separation is complete: no attention crosses the groups (30% if it depended on distance alone). "
            "Specialised for {It I}: Head 0; {is am the}: Head 1, Head 2."
        )

    def test_one_head_is_drawn_with_its_own_attention(self) -> None:
        pattern = torch.stack([blocks([0, 0, 0, 0, 1, 1, 1, 1], 1.0, 0.01), random_pattern(1, 8, causal=True)[0]])
        found = AttentionGroups.from_pattern(pattern, drop_sink=False, n_null=19)
        chart = found.figure(head="L0H0").data
        np.testing.assert_allclose(chart.matrix, pattern[0], atol=1e-6)
        assert [tokens for tokens, _ in chart.heads[0][1]] == [(0, 1, 2, 3), (4, 5, 6, 7)]
        assert "of the attention between tokens crosses groups" in chart.note
        for options, sentence in (
            ({"head": "L4H0"}, "not among the 2 heads"),
            ({"names": ["one"]}, "1 names were given for 2 heads"),
        ):
            with pytest.raises(UsageError, match=sentence):
                found.figure(**options)

    def test_a_head_that_binds_nothing_is_not_drawn(self) -> None:
        even = torch.ones(6, 6).tril() / torch.arange(1.0, 7)[:, None]
        found = AttentionGroups.from_pattern(torch.stack([even, blocks([0, 0, 0, 1, 1, 1], 1.0, 0.0).float()]))
        assert [head for head, _ in found.figure().data.heads] == ["L0H1"]


@pytest.mark.once
class TestResult:
    def test_json_is_as_promised(self) -> None:
        values = json.loads(AttentionGroups.from_pattern(seed_pattern(), WORDS).to_json())
        assert values["groups"] == [[0, 1], [2, 3, 4]]
        assert values["head_to_group"] == {"L0H0": 0, "L0H1": 1, "L0H2": 1}

    def test_rows_and_heads(self) -> None:
        found = AttentionGroups.from_pattern(seed_pattern(), WORDS)
        rows = list(found.to_rows())
        assert len(rows) == 6 and sum(row["serves"] for row in rows) == 3
        assert found.groups_of("L0H1") == ((0,), (1,), (2, 3, 4))
        assert [head for head, _ in found.top(2)] == [HeadIndex(0, 0), HeadIndex(0, 1)]
        assert [row["tokens"] for row in rows[:2]] == ["0 1", "2 3 4"]
        assert found.to_csv().splitlines()[2].startswith("L0H0,1,2 3 4,0.0,")


class TestBadInput:
    @pytest.mark.parametrize(
        ("pattern", "sentence"),
        [
            (torch.ones(2, 3), "as many queries as keys"),
            (torch.ones(2, 3, 4), "as many queries as keys"),
            (torch.ones(2, 2, 3, 3), "as many queries as keys"),
            (torch.ones(1, 1), "at least two tokens"),
            (torch.ones(0, 3, 3), "needs a head"),
            (torch.full((2, 2), math.nan), "head L0H0 holds NaN"),
            (torch.full((2, 2), math.inf), "head L0H0 holds NaN or infinity"),
            (-torch.ones(2, 2), "negative values"),
            ("rubbish", "not an array of numbers"),
            ([[1, 2], [3]], "not an array of numbers"),
            (torch.ones(2, 2, dtype=torch.complex64), "complex"),
            (np.array([["a", "b"], ["c", "d"]]), "not an array of numbers"),
        ],
    )
    def test_patterns_are_refused_with_a_sentence(self, pattern: Any, sentence: str) -> None:
        with pytest.raises(UsageError, match=sentence):
            AttentionGroups.from_pattern(pattern)

    def test_options_are_refused_with_a_sentence(self) -> None:
        for options, sentence in (
            ({"tokens": ["a"]}, "There are 1 tokens"),
            ({"threshold": 0.0}, "above 0 and at most 1"),
            ({"n_groups": 4}, "3 of 3 tokens are grouped, sinks are not. Give 3 or fewer"),
            ({"n_groups": 2, "method": "components"}, "method='components' is impossible"),
        ):
            with pytest.raises(UsageError, match=sentence):
                AttentionGroups.from_pattern(torch.ones(3, 3), **options)

    def test_rounds_of_draws_do_not_outgrow_memory_and_change_no_p_value(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Draws of one head used to double without end: half of all draws were made at once."""
        from tl_headmaps.scorers import groups as scored

        group = torch.tensor([0, 1, 2, 0, 0, 1, 2, 2, 1, 0, 1, 2])
        pattern = torch.where(group[:, None] == group[None, :], 1.0, 0.05)
        whole = AttentionGroups.from_pattern(pattern, n_null=399)
        sizes: list[int] = []
        plain = scored.DistanceNull.draw

        def draw(self: Any, generator: Any, n_draws: int, *heads: Any) -> Any:
            sizes.append(n_draws)
            return plain(self, generator, n_draws, *heads)

        monkeypatch.setattr(scored.DistanceNull, "draw", draw)
        monkeypatch.setattr(scored, "_MOST_OF_A_HEAD", 30 * 12**2)
        found = AttentionGroups.from_pattern(pattern, n_null=399)
        assert max(sizes) == 30
        assert torch.equal(found.p_value, whole.p_value) and not bool(found.p_value.isnan().any())

    def test_texts_are_refused_with_a_sentence(self) -> None:
        model = shared_model("llama")
        for text, sentence in (
            ("", "is empty"),
            (" \n", "is empty"),
            (" word7", "has 1 token, but a group needs at least two"),
            ([], "has 0 tokens"),
            (["a", "b"], "'a' is not a token id"),
            ([3, 100_000], "outside the vocabulary"),
            ([3] * 33, "takes at most 32"),
        ):
            with pytest.raises(UsageError, match=sentence):
                attention_groups(model, text)
        for options in ({"layers": [0], "heads": "L1H0"}, {"layers": []}):
            with pytest.raises(UsageError, match="No head is left"):
                attention_groups(model, [3, 4], **options)
        with pytest.raises(UsageError, match=r"Set model\.tokenizer"):
            attention_groups(random_model("llama", tokenizer=False), "word7 word8")

    def test_two_tokens_behind_a_sink_are_one_group_of_one(self) -> None:
        found = AttentionGroups.from_pattern(torch.tensor([[1.0, 0.0], [0.95, 0.05]]))
        assert found.sink == 0 and found.groups == ((1,),) and found.head_to_group == (None,)

    def test_tokens_that_attend_to_nothing_stay_alone(self) -> None:
        found = AttentionGroups.from_pattern(torch.zeros(3, 3))
        assert found.groups == ((0,), (1,), (2,)) and found.to_json()


MEMORY = """
import resource, sys, torch
from tl_headmaps import AttentionGroups
n, heads = 1300, 4
pattern = torch.rand(heads, n, n, generator=torch.Generator().manual_seed(0)).tril_()
AttentionGroups.from_pattern(pattern[:, :600, :600])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = AttentionGroups.from_pattern(pattern)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (4 * n * n / 1024), found.combined is None)
"""


def test_heads_are_streamed_so_that_long_texts_stay_within_the_budget() -> None:
    """Above the pattern itself only a few token x token matrices: 4,000 tokens fit into 256 MiB and a little."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, cwd=ROOT, env=None, check=True
    )
    matrices, dropped = done.stdout.split()
    assert float(matrices) < 5 and dropped == "True"
