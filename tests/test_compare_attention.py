"""Two words and one key: attention against the model's own, statistics against loops, planted differences, refusals."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hybrids import hybrid_model
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import shared_model

from tl_headmaps import AttentionComparison, association_heads, compare_attention
from tl_headmaps.core.errors import HeadMapsError
from tl_headmaps.scorers.mixing import (
    difference_of,
    largest_difference_p_values,
    separation_p_value,
    word_correlations,
)
from tl_headmaps.scorers.statistics import other_assignments

FIRST = {f" word3 word{i} word9 word{i + 1} word7": "word7" for i in range(10, 14)}
SECOND = {f" word3 word{i} word9 word{i + 1} word8": "word8" for i in range(10, 14)}
ONE_EACH = dict([next(iter(FIRST.items())), next(iter(SECOND.items()))])
CONTROL = {" word4 word9 word5": "word5"}


@pytest.fixture(scope="module")
def found() -> AttentionComparison:
    return compare_attention(shared_model("llama"), {**FIRST, **SECOND}, "word9", control=CONTROL)


class TestTheCall:
    def test_attention_is_the_models_own(self, found: AttentionComparison) -> None:
        model = shared_model("llama")
        assert found.words == ("word7", "word8", "word5") and found.attention.shape == (9, 3, 4)
        for phrase, attention in zip(found.phrases, found.attention, strict=True):
            ids = model.tokenizer.encode(phrase.text, add_special_tokens=False)
            _, cache = model.run_with_cache(torch.tensor([[2, *ids]]))
            assert phrase.tokens[phrase.query].strip() == phrase.word and phrase.tokens[phrase.key] == " word9"
            for layer in range(3):
                own = cache[f"blocks.{layer}.attn.hook_pattern"][0, :, phrase.query, phrase.key]
                torch.testing.assert_close(attention[layer], own, atol=1e-6, rtol=1e-5)

    def test_numbers_of_the_result(self, found: AttentionComparison) -> None:
        torch.testing.assert_close(found.difference, found.mean("word7") - found.mean("word8"))
        head, difference = found.top(1)[0]
        assert abs(difference) == float(found.difference.abs().max())
        assert float(found.difference[head.layer, head.head]) == difference
        assert (found.n_deals, found.exact) == (69, True) and found.smallest_p == pytest.approx(2 / 70)
        assert bool(((found.interval_low <= found.difference) & (found.difference <= found.interval_high)).all())
        assert float(found.p_value.min()) >= found.smallest_p - 1e-6
        assert "'word5' 1" in str(found) and "Control: 'word7' and 'word5'" in found.verdict()
        assert found.figure().data.diagonal and found.verdict() in found.figure().data.note
        for p, are in ((0.02, "are"), (0.6, "are not shown to be")):
            said = f"Phrasings of one word {are} more alike than phrasings of the two (p = {p})."
            assert said in replace(found, separation_p=p).verdict()

    def test_what_one_phrasing_cannot_tell_is_said(self) -> None:
        one = compare_attention(shared_model("llama"), ONE_EACH, "word9")
        assert math.isnan(one.separation_p) and bool(one.interval_low.isnan().all())
        assert "Too few phrasings" in one.verdict()
        text = "\n".join(one.notes())
        assert "no p-value can be below 1; give at least 4" in text and "without a control phrase" in text

    def test_a_key_in_front_is_pointed_out(self) -> None:
        phrases = {" word9 word7": "word7", " word3 word9 word8": "word8"}
        for bos in (True, False):
            found = compare_attention(shared_model("llama"), phrases, "word9", prepend_bos=bos)
            assert "in 1 of 2 phrases 'word9' is the first word" in found.notes()[0]

    def test_a_word_of_the_letters_of_bos_is_a_word_in_front(self, found: AttentionComparison) -> None:
        changed = replace(found.phrases[0], tokens=("<bos>", "sob", " word9", " word7"), query=3, key=2)
        assert not any("is the first word" in note for note in replace(found, phrases=(changed,)).notes())
        changed = replace(changed, tokens=("<bos>", "word", "9", " word7"))
        assert "in 1 of 1 phrases 'word9' is the first word" in replace(found, phrases=(changed,)).notes()[0]

    def test_words_of_several_tokens_are_their_last_one(self) -> None:
        phrases = {" word9- word7": "word7", " word3 word9- word8": "word8"}
        found = compare_attention(shared_model("llama"), phrases, "word9-", prepend_bos=False)
        assert [phrase.key for phrase in found.phrases] == [1, 2]
        assert sum("has 2 tokens; its last one stands for it" in note for note in found.notes()) == 2

    def test_case_and_number_of_the_key(self) -> None:
        phrases = {" word9 word3 word9 word7": "word7", " word9 word4 word9 word8": "word8"}
        found = compare_attention(shared_model("llama"), phrases, "WORD9#2", prepend_bos=False)
        assert [phrase.key for phrase in found.phrases] == [2, 2]

    def test_layers_without_heads_stay_empty(self) -> None:
        phrases = {" word9 word7": "word7", " word3 word9 word8": "word8"}
        found = compare_attention(hybrid_model("jamba"), phrases, "word9")
        empty = found.difference.isnan().all(1)
        assert bool(empty.any()) and not bool(empty.all())
        assert bool((found.p_value.isnan().all(1) == empty).all()) and found.to_json()

    @pytest.mark.parametrize(
        ("phrases", "key", "control", "sentence"),
        [
            ({" word9 word7": "word7"}, "word9", None, "1 phrase was given, and two words are compared"),
            ({}, "word9", None, "0 phrase"),
            ({" word9 word7": "word7", " word9 word3 word7": "word7"}, "word9", None, "ask about 1 different words"),
            (
                {" word9 word7": "word7", " word9 word8": "word8", " word9 word6": "word6"},
                "word9",
                None,
                "ask about 3 different words .* others belong to control=",
            ),
            (
                {" word9 word7": "word7", " word4 word8": "word8"},
                "word9",
                None,
                "Phrase ' word4 word8': 'word9' is not in",
            ),
            ({" word9 word7": "word7", " word9 word8": "word6"}, "word9", None, "'word6' is not in the text"),
            ({" word9 word7": "word7", " word8 word9": "word8"}, "word9", None, "does not come before the query"),
            ({" word9 word7": "word7", " word9 word8": "word9"}, "word9", None, "does not come before the query"),
            ({" word9 word9 word7": "word7", " word9 word8": "word8"}, "word9", None, "2 times .* Write 'word9#2'"),
            (
                {" word9 word7": "word7", " word9 word8": "word8"},
                "word9",
                {" word9 word3 word7": "word7"},
                "its own control",
            ),
            ({" word9 word7": "word7", " word9 word8": "word8"}, "word9", {" word9 word7": "word6"}, "at once"),
            ({" word9 word7": "word7", "": "word8"}, "word9", None, "is empty"),
        ],
    )
    def test_bad_input_is_one_sentence(self, phrases: Any, key: str, control: Any, sentence: str) -> None:
        with pytest.raises(HeadMapsError, match=sentence):
            compare_attention(shared_model("llama"), phrases, key, control=control, prepend_bos=False)

    def test_a_name_is_refused_where_there_is_one_map(self) -> None:
        model = shared_model("llama")
        pair = association_heads(model, " word3 word4 word5", 2, 1)
        for result in (pair, compare_attention(model, {**FIRST, **SECOND}, "word9")):
            with pytest.raises(HeadMapsError, match=r"one map, and none of a name such as 'induction'\. Leave"):
                result.top(3, "induction")

    def test_a_word_that_was_not_asked_about(self) -> None:
        with pytest.raises(HeadMapsError, match="'word6' was not asked about"):
            compare_attention(shared_model("llama"), {**FIRST, **SECOND}, "word9").mean("word6")

    @pytest.mark.model
    def test_birds(self, default_model: Any) -> None:
        phrases = {"Birds sometimes walk": "walk", "But birds are good at flying": "flying"}
        found = compare_attention(default_model, phrases, key="birds")
        assert float(found.correlation[0, 1]) == pytest.approx(0.13, abs=0.01)
        # Behind another word the key is no sink any more.
        phrases = {"But birds sometimes walk": "walk", "But birds are good at flying": "flying"}
        assert float(compare_attention(default_model, phrases, key="birds").correlation[0, 1]) > 0.5


@pytest.mark.once
class TestStatistics:
    @given(st.integers(0, 1000), st.integers(2, 4), st.integers(2, 4))
    @settings(max_examples=10)
    def test_against_loops(self, seed: int, one: int, other: int) -> None:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(one + other, 7))
        members = [list(range(one)), list(range(one, one + other))]
        attention = torch.from_numpy(x)
        values, _ = word_correlations(attention, members)
        for i, j in itertools.product(range(2), repeat=2):
            pairs = [np.corrcoef(x[a], x[b])[0, 1] for a in members[i] for b in members[j] if a != b]
            assert float(values[i, j]) == pytest.approx(np.mean(pairs))
        difference, half = difference_of(attention, *members)
        np.testing.assert_allclose(difference, x[:one].mean(0) - x[one:].mean(0))
        assert bool((half > 0).all())
        own = torch.tensor([True] * one + [False] * other)
        deals, exact = other_assignments(own, 1000)
        assert exact
        p = largest_difference_p_values(attention, own, deals)
        counts = np.zeros(7)
        separated = 0
        every = list(itertools.combinations(range(one + other), one))
        alike = np.corrcoef(x)

        def apart(group: tuple[int, ...]) -> float:
            pairs: dict[bool, list[float]] = {True: [], False: []}
            for a, b in itertools.combinations(range(one + other), 2):
                pairs[(a in group) == (b in group)].append(float(alike[a, b]))
            return float(np.mean(pairs[True]) - np.mean(pairs[False]))

        for group in every:
            rest = [i for i in range(one + other) if i not in group]
            counts += np.abs(x[list(group)].mean(0) - x[rest].mean(0)).max() >= np.abs(difference.numpy()) - 1e-9
            separated += apart(group) >= apart(tuple(range(one))) - 1e-9
        np.testing.assert_allclose(p, counts / len(every))
        assert separation_p_value(attention, own, deals) == pytest.approx(separated / len(every))

    def test_a_planted_difference_is_found_and_nothing_else(self) -> None:
        generator = torch.Generator().manual_seed(0)
        attention = 0.3 + 0.05 * torch.randn(10, 200, generator=generator, dtype=torch.float64)
        attention[:5, 17] += 0.6
        own = torch.tensor([True] * 5 + [False] * 5)
        deals, _ = other_assignments(own, 2000)
        p = largest_difference_p_values(attention, own, deals)
        assert (p <= 0.05).nonzero().flatten().tolist() == [17]

    def test_attention_that_is_the_same_in_all_heads_separates_nothing(self) -> None:
        """Over one head there is no correlation, so no p-value either."""
        own = torch.tensor([True, True, True, False, False, False])
        deals, _ = other_assignments(own, 99)
        assert math.isnan(separation_p_value(torch.rand(6, 1), own, deals))

    def test_the_order_of_heads_and_words_does_not_matter(self) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.rand(8, 30, generator=generator, dtype=torch.float64)
        members, order = [[0, 1, 2, 3], [4, 5, 6, 7]], torch.randperm(30, generator=generator)
        torch.testing.assert_close(word_correlations(x, members)[0], word_correlations(x[:, order], members)[0])
        difference, half = difference_of(x, *members)
        back, same = difference_of(x, members[1], members[0])
        torch.testing.assert_close(back, -difference)
        torch.testing.assert_close(same, half)
