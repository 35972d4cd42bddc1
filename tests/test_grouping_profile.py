"""Grouping profiles: pairs worked out by hand, agreement with TransformerLens' own head detector, streaming."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from planted import shared_model, word

from tl_headmaps import GroupingProfile, grouping_profile
from tl_headmaps.core.errors import UsageError
from tl_headmaps.results import largest_heads
from tl_headmaps.scorers.profile import (
    POSITIONS,
    PROFILE_SCORES,
    Segments,
    even_pair_shares,
    null_shares,
    profile_pairs,
    queries_with_pairs,
    text_shares,
)
from tl_headmaps.scorers.statistics import RunningRatio

TEXTS = [
    "When Mary and John went to the store, John gave a drink to Mary. When Mary and John went home, Mary slept.",
    "A cat on the mat slept. The dog in the house barked at the cat on the mat.",
]
DETECTED = {
    "previous_token": "previous_token_head",
    "duplicate_token": "duplicate_token_head",
    "induction": "induction_head",
}


def listed(pairs: torch.Tensor, score: str) -> list[list[int]]:
    return pairs[PROFILE_SCORES.index(score)].nonzero().tolist()


class TestPairs:
    def test_worked_out_by_hand(self) -> None:
        tokens = ["A", " cat", " on", " the", " mat", ".", " A", " cat"]
        pairs = profile_pairs([1, 2, 3, 4, 5, 6, 1, 2], tokens)
        assert listed(pairs, "previous_token") == [[i, i - 1] for i in range(1, 8)]
        assert listed(pairs, "duplicate_token") == [[6, 0], [7, 1]]
        assert listed(pairs, "first_token") == [[i, 0] for i in range(1, 8)]
        assert listed(pairs, "induction") == [[6, 1], [7, 2]]
        assert listed(pairs, "syntactic_neighbour") == [[4, 1]], "mat to cat; the second cat has none in its clause"
        assert listed(pairs, "sentence_block") == [], "the second sentence has only neighbours"

    def test_a_sentence_block_reaches_over_its_own_sentence_only(self) -> None:
        pairs = profile_pairs(list(range(6)), ["One", ".", " Two", " three", " four", "."])
        assert listed(pairs, "sentence_block") == [[4, 2], [5, 2], [5, 3]]

    def test_a_repeated_neighbour_counts_as_the_head_detector_counts_it(self) -> None:
        pairs = profile_pairs([7, 7], ["a", "a"])
        assert listed(pairs, "duplicate_token") == [[1, 0]] and listed(pairs, "induction") == [[1, 1]]

    def test_words_of_several_tokens_are_one_word(self) -> None:
        tokens = ["The", " Geor", "gian", " of", " T", "bil", "isi", ",", " in", " town"]
        segments = Segments.of(tokens)
        assert segments.words == (0, 1, 1, 2, 3, 3, 3, 4, 5, 6)
        assert segments.content == (False, True, False, True, False, False, True)
        pairs = profile_pairs(list(range(10)), tokens)
        # Every token of Tbilisi looks at both tokens of Georgian; town's clause has no other content word.
        assert listed(pairs, "syntactic_neighbour") == [[q, k] for q in (4, 5, 6) for k in (1, 2)]

    def test_shares_against_a_loop(self) -> None:
        generator = torch.Generator().manual_seed(0)
        pattern = torch.rand(3, 6, 6, generator=generator).tril()
        pattern /= pattern.sum(-1, keepdim=True)
        pairs = profile_pairs([1, 2, 1, 2, 3, 1], ["a", " b", ".", " b", " c", " a"])
        found = text_shares(pattern, pairs)
        for head in range(3):
            for score in range(6):
                on = sum(float(pattern[head, q, k]) for q, k in pairs[score].nonzero().tolist())
                assert float(found.on_pairs[head, score]) == pytest.approx(on, abs=1e-6)
                assert float(found.shares[head, score]) == pytest.approx(on / 6, abs=1e-6)

    def test_the_null_is_the_score_of_even_attention(self) -> None:
        pairs = profile_pairs([1, 2, 1, 2, 3], ["a", " b", ".", " b", " c"])
        even = torch.ones(1, 5, 5).tril() / torch.arange(1.0, 6)[:, None]
        torch.testing.assert_close(even_pair_shares(pairs), text_shares(even, pairs).shares[0], atol=1e-7, rtol=1e-6)
        assert queries_with_pairs(pairs).tolist()[:4] == [4, 2, 4, 2]


class TestNull:
    def test_attention_by_distance_alone_is_its_own_null(self) -> None:
        distance = torch.arange(9.0)[:, None] - torch.arange(9.0)[None, :]
        pattern = torch.where(distance >= 0, -0.4 * distance, -math.inf).softmax(-1)[None]
        pairs = profile_pairs([1, 2, 1, 2, 3, 1, 4, 2, 1], ["a", " b", ".", " b", " c", " a", ".", " b", " a"])
        found = null_shares(pattern, pairs, torch.zeros(9, dtype=torch.bool))[0]
        own = text_shares(pattern, pairs).shares[0]
        for number, score in enumerate(PROFILE_SCORES):
            expected = even_pair_shares(pairs)[number] if score in POSITIONS else own[number]
            assert float(found[number]) == pytest.approx(float(expected), abs=1e-6)

    def test_a_sink_is_no_matter_of_distance(self) -> None:
        """Attention parked on one token would be spread over all pairs of its distances, and hide everything else."""
        generator = torch.Generator().manual_seed(1)
        pattern = torch.rand(1, 12, 12, generator=generator, dtype=torch.float64).tril()
        pattern[:, 3:, 2] += 20
        pattern /= pattern.sum(-1, keepdim=True)
        pairs = profile_pairs([1, 2, 3, 4, 1, 2, 5, 6, 7, 1, 2, 8], [" w"] * 12)
        number = PROFILE_SCORES.index("duplicate_token")
        blind, seeing = (
            float(null_shares(pattern, pairs, sinks)[0, number])
            for sinks in (torch.arange(12) < 0, torch.arange(12) == 2)
        )
        own = float(text_shares(pattern, pairs).shares[0, number])
        assert abs(seeing - own) < 0.02 and blind > 2 * own

    def test_p_values_are_student_s_and_need_four_texts(self) -> None:
        from scipy import stats

        model = shared_model("llama")
        texts = [sentence(*(3 + (7 * i + j * j) % 9 for j in range(12))) for i in range(6)]
        single = [grouping_profile(model, [text]) for text in texts]
        whole, few = grouping_profile(model, texts), grouping_profile(model, texts[:3])
        excess = torch.stack([one.values - one.null for one in single]).double().numpy()
        number = PROFILE_SCORES.index("induction")
        expected = stats.ttest_1samp(excess[:, number], 0, alternative="greater").pvalue
        np.testing.assert_allclose(whole.p_value[number].numpy(), expected, rtol=2e-2, atol=1e-4)
        assert bool((whole.q_value >= whole.p_value - 1e-6)[~whole.p_value.isnan()].all())
        assert bool(few.p_value.isnan().all()) and "fewer than 4 texts, so there is no p" in str(few)
        assert "fewer than 4 texts" in few.figure().html and "fewer than" not in str(whole)


class TestRunningRatio:
    def test_mean_and_ratio_with_their_intervals(self) -> None:
        from scipy import stats

        rng = np.random.default_rng(0)
        x, y = rng.random((9, 2)), rng.random((9, 2)) + 1
        mean, ratio = RunningRatio(1, 2), RunningRatio(1, 2)
        for row in range(9):
            mean.add(torch.from_numpy(x[row]), at=0)
            ratio.add(torch.from_numpy(x[row]), torch.from_numpy(y[row]), at=0)
            mean.next_unit()
            ratio.next_unit()
        low, high = stats.t.interval(0.95, 8, loc=x.mean(0), scale=stats.sem(x))
        np.testing.assert_allclose(mean.ratio()[0], x.mean(0))
        np.testing.assert_allclose(mean.half_width()[0], (high - low) / 2)
        np.testing.assert_allclose(ratio.ratio()[0], x.sum(0) / y.sum(0))
        spread = (x - x.sum(0) / y.sum(0) * y).std(0, ddof=1) / math.sqrt(9) / y.mean(0)
        np.testing.assert_allclose(ratio.half_width()[0], stats.t.ppf(0.975, 8) * spread)

    def test_one_text_has_no_interval(self) -> None:
        one = RunningRatio(1, 1)
        one.add(torch.tensor([[0.5]]))
        one.next_unit()
        assert float(one.ratio()) == 0.5 and bool(one.half_width().isnan().all())

    def test_units_that_do_not_count_for_a_place_are_as_good_as_not_there(self) -> None:
        values = torch.tensor([[0.1, 0.2], [0.3, 0.0], [0.2, 0.0], [0.4, 0.0], [0.6, 0.9]])
        counted = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
        both = RunningRatio(2)
        for x, y in zip(values, counted, strict=True):
            both.add(x, y)
            both.next_unit(y)
        for place in range(2):
            alone = RunningRatio()
            for x in values[counted[:, place] > 0, place]:
                alone.add(x)
                alone.next_unit()
            for name in ("ratio", "half_width", "p_value"):
                one, other = getattr(both, name)()[place], getattr(alone, name)()
                torch.testing.assert_close(one, other, equal_nan=True)
        assert float(both.half_width()[1]) > 4 and bool(both.p_value()[1].isnan()), "two units, not five"


def sentence(*ids: int) -> str:
    return "".join(f" {word(token)}" for token in ids)


class TestModels:
    def test_is_the_mean_of_the_single_texts(self) -> None:
        model = shared_model("llama")
        texts = [sentence(3, 9, 4, 9, 5), sentence(7, 7, 8), sentence(3, 4, 5, 6, 3)]
        single = [grouping_profile(model, [text]) for text in texts]
        whole = grouping_profile(model, iter(texts))
        torch.testing.assert_close(whole.values, torch.stack([one.values for one in single]).mean(0))
        assert whole.n_texts == 3 and whole.n_tokens == 13 + 3
        assert bool(((whole.interval_low <= whole.values) & (whole.values <= whole.interval_high)).all())
        assert bool(single[0].interval_low.isnan().all()), "one text has no interval"
        number = PROFILE_SCORES.index("induction")
        assert bool(single[0].where_possible[number].isfinite().all()), "word9 repeats"

    def test_long_texts_are_cut_and_short_ones_skipped(self) -> None:
        found = grouping_profile(shared_model("llama"), [sentence(3, 9, 4, 5), sentence(3), sentence(*range(3, 53))])
        assert (found.n_texts, found.n_skipped, found.n_cut, found.n_tokens) == (2, 1, 1, 5 + 32)
        assert "1 cut, 1 too short" in str(found)
        short = grouping_profile(shared_model("llama"), [sentence(3, 9, 4, 5)], max_tokens=2)
        assert short.n_tokens == 2 and short.n_cut == 1

    def test_random_tokens_lend_no_certainty_to_the_scores_of_sentences(self) -> None:
        """Sentences are read in the one text of prose alone, whatever number of random sequences stand beside it."""
        found = grouping_profile(shared_model("llama"), max_texts=1, progress=False)
        assert found.n_repeated and found.n_texts == found.n_repeated + 1
        for name in ("interval_low", "interval_high", "where_possible_low", "where_possible_high", "p_value"):
            values = getattr(found, name)
            assert bool(values[found.index_of("sentence_block")].isnan().all()), name
            assert not bool(values[found.index_of("previous_token")].isnan().any()), name

    def test_heads_that_were_not_asked_for_are_empty_in_every_map(self) -> None:
        found = grouping_profile(shared_model("llama"), [sentence(3, 9, 4, 9, 5)] * 2, heads="L1H2", progress=False)
        for name in ("values", "null", "where_possible", "where_possible_null"):
            known = (~getattr(found, name).isnan()).any(0).nonzero().tolist()
            assert known == [[1, 2]], name

    def test_bad_input(self) -> None:
        model = shared_model("llama")
        for options, sentence_ in (
            ({"texts": []}, "no text of at least two tokens"),
            ({"texts": [sentence(3)]}, "no text of at least two tokens"),
            ({"texts": [sentence(3, 4)], "max_tokens": 1}, "max_tokens=1 is impossible; it must be at least 2"),
            ({"texts": [sentence(3, 4), 5]}, "Text 1: 5 is not a text"),
        ):
            with pytest.raises(UsageError, match=sentence_):
                grouping_profile(model, **options)
        found = grouping_profile(model, [sentence(3, 4)])
        with pytest.raises(UsageError, match="no score 'magic'"):
            found.head_map("magic")


@pytest.fixture(scope="module")
def profile(default_model: Any) -> GroupingProfile:
    # The head detector puts BOS in front.
    return grouping_profile(default_model, TEXTS)


@pytest.mark.model
class TestAgreement:
    @pytest.mark.parametrize("score", DETECTED)
    def test_scores_are_the_head_detectors(self, default_model: Any, profile: GroupingProfile, score: str) -> None:
        from transformer_lens.head_detector import detect_head

        theirs = torch.stack([detect_head(default_model, text, DETECTED[score]) for text in TEXTS]).mean(0)
        torch.testing.assert_close(profile.values[profile.index_of(score)], theirs.float(), atol=1e-5, rtol=1e-4)
        best = theirs.flatten().argsort(descending=True)[:5].tolist()
        found = largest_heads(profile.values[profile.index_of(score)], 5)
        assert [head.layer * 9 + head.head for head, _ in found] == best
