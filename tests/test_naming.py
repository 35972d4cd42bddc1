"""Predicates, their null, lexicons and which tokens are considered."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tl_headmaps import predicate
from tl_headmaps.core.errors import UsageError
from tl_headmaps.naming.catalogue import Explainer, Explanation, Predicate, best_first, catalogue
from tl_headmaps.naming.lexicon import lexicon
from tl_headmaps.naming.namer import Namer
from tl_headmaps.scorers.salience import usable_tokens

COPY = next(entry for entry in catalogue() if entry.name == "copy")


class TestCatalogue:
    def test_is_large_enough_and_has_both_verdicts(self) -> None:
        assert len(catalogue()) >= 20
        assert len({entry.name for entry in catalogue()}) == len(catalogue())

    @pytest.mark.parametrize("entry", catalogue(), ids=lambda entry: entry.name)
    def test_examples_hold_and_counterexamples_do_not(self, entry: Predicate) -> None:
        assert all(entry.holds(*pair) for pair in entry.examples)
        assert not any(entry.holds(*pair) for pair in entry.counterexamples)

    @pytest.mark.parametrize("entry", catalogue(), ids=lambda entry: entry.name)
    def test_odd_tokens_break_nothing_and_explain_nothing(self, entry: Predicate) -> None:
        odd = ["", " ", "\n\n", "�", "\x00", "ß", "İ", "𝔘", "1" * 40, "½", "²", "<|endoftext|>", "́"]
        for source, target in itertools.product(odd, odd):
            assert entry.holds(source, target) in (True, False)
        assert not entry.holds(" ", " ")
        assert not entry.holds("", "")

    def test_a_predicate_is_added_with_one_decorator(self, clean_catalogue: None) -> None:
        @predicate("doubled", examples=[(" ha", " haha")], counterexamples=[(" ha", " ha")])
        def doubled(source: str, target: str) -> bool:
            return target.strip() == 2 * source.strip()

        assert catalogue()[-1].holds is doubled
        mappings = [(f" {letter}", (f" {letter * 2}",)) for letter in "abcdefghij"]
        found = Namer().names([mappings], [[(" q", (" z",))] * 10])
        assert (found[0].name, found[0].score) == ("doubled", 1.0)

    def test_a_cell_may_be_run_again_and_replaces_its_predicate(self, clean_catalogue: None) -> None:
        for shift in (1, 2):

            @predicate("shifted", examples=[("a", "bc"[shift - 1])], counterexamples=[("a", "a")])
            def shifted(source: str, target: str, shift: int = shift) -> bool:
                return ord(source) + shift == ord(target)

        found = [entry for entry in catalogue() if entry.name == "shifted"]
        assert [entry.holds("a", "c") for entry in found] == [True]

    def test_a_predicate_that_contradicts_its_examples_is_refused(self, clean_catalogue: None) -> None:
        with pytest.raises(UsageError, match=r"'wrong' does not hold for \('a', 'b'\), which is given as an example"):
            predicate("wrong", examples=[("a", "b")], counterexamples=[("a", "a")])(lambda s, t: False)
        with pytest.raises(UsageError, match="given as a counterexample"):
            predicate("wrong", examples=[("a", "b")], counterexamples=[("a", "a")])(lambda s, t: True)
        with pytest.raises(UsageError, match="at least one example and one counterexample"):
            predicate("wrong", examples=[], counterexamples=[("a", "a")])(lambda s, t: False)
        with pytest.raises(UsageError, match="already a predicate 'copy'"):
            predicate("copy", examples=[("a", "a")], counterexamples=[("a", "b")])(lambda s, t: s == t)
        assert "wrong" not in [entry.name for entry in catalogue()]


class TestNull:
    def test_tail_and_mean_equal_all_ways_to_deal_the_lists(self) -> None:
        mappings = [("a", ("a", "x")), ("b", ("c", "b")), ("a", ("y", "z")), ("c", ("c", "a"))]
        found = Explainer([COPY]).explain(mappings, "promote")[0]
        lists = [targets for _, targets in mappings]
        hits = []
        for deal in itertools.product(lists, repeat=len(mappings)):
            hits.append(sum(source in targets for (source, _), targets in zip(mappings, deal, strict=True)))
        assert found.score == 3 / 4
        assert found.null_mean == pytest.approx(np.mean(hits) / 4)
        assert found.p_value == pytest.approx(np.mean(np.array(hits) >= 3))
        assert found.lift == pytest.approx(found.score / found.null_mean)

    def test_a_head_that_always_writes_the_same_beats_no_null(self) -> None:
        mappings = [(letter, ("a", "b", "c")) for letter in "abcabcabc"]
        found = Explainer([COPY]).explain(mappings, "promote")[0]
        assert (found.score, found.null_mean, found.p_value) == (1.0, 1.0, 1.0)

    @given(st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.sampled_from("abcdxyz"), max_size=4)), min_size=1))
    def test_a_p_value_is_a_chance_and_order_does_not_matter(self, drawn: list[tuple[str, list[str]]]) -> None:
        mappings = [(source, tuple(targets)) for source, targets in drawn]
        explainer = Explainer([COPY])
        one, other = explainer.explain(mappings, "promote")[0], explainer.explain(mappings[::-1], "promote")[0]
        assert 0 <= one.p_value <= 1 and 0 <= one.score <= 1
        assert (one.score, one.null_mean) == pytest.approx((other.score, other.null_mean))
        assert one.p_value == pytest.approx(other.p_value)

    def test_shuffled_mappings_earn_no_name(self) -> None:
        words = [f" w{chr(97 + i)}{chr(97 + j)}" for i in range(10) for j in range(3)]
        straight = [(word, (word,)) for word in words]
        generator = np.random.default_rng(0)
        names = []
        for _ in range(10):
            dealt = generator.permutation(words).tolist()
            shuffled = [(word, (target,)) for word, target in zip(words, dealt, strict=True)]
            names += [Namer().names([shuffled], [shuffled])[0].name]
        assert Counter(names)["unclear"] >= 9
        assert Namer().names([straight], [shuffled])[0].name == "copy"

    def test_best_explanation_is_the_least_likely_one(self) -> None:
        loose = Explanation("same initial", "promote", 1.0, 0.2, 1e-6)
        sharp = Explanation("copy", "promote", 0.9, 0.05, 1e-9)
        assert best_first([loose, sharp]) == [sharp, loose]
        assert Explanation("copy", "suppress", 1.0, 0.1, 0.0).name == "suppress copy"


WORDS = ("one", "day", "red", "sky", "old", "sun", "map", "key", "ant", "bee")
MAPPINGS = [(f" {word}", (f" {word}", f"{word}", " the")) for word in WORDS]
OTHERS = [(source, (" the", " of")) for source, _ in MAPPINGS]


class TestNamer:
    def name(self) -> Any:
        return Namer().names([MAPPINGS], [OTHERS])[0]

    def test_name_runner_up_and_evidence(self) -> None:
        found = self.name()
        assert (found.name, found.best, found.score) == ("copy", "copy", 1.0)
        assert found.runner_up == "case or space variant"
        assert found.null_mean == pytest.approx(0.1) and found.lift == pytest.approx(10)
        assert found.p_value == pytest.approx(1e-10)
        assert found.p_value <= found.q_value < 0.05

    def test_suppressed_targets_are_named_as_such(self) -> None:
        found = Namer().names([OTHERS], [MAPPINGS])[0]
        assert found.name == "suppress copy"

    def test_a_predicate_that_raises_is_named_and_the_rest_goes_on(self, clean_catalogue: None) -> None:
        def fragile(source: str, target: str) -> bool:
            if source == " sun":
                raise ZeroDivisionError("no sun")
            return source == target

        predicate("fragile", examples=[("a", "a")], counterexamples=[("a", "b")])(fragile)
        namer = Namer()
        found = namer.names([MAPPINGS], [OTHERS])[0]
        assert namer.failed == {"fragile": "ZeroDivisionError: no sun"}
        assert found.name == "copy"


class TestLexicon:
    @pytest.mark.parametrize(
        ("token", "expected"),
        [
            (" France", "countries"),
            (" Thomas", "names"),
            (" May", "months and days"),
            (" seven", "numbers"),
            ("camelCase", "code"),
            (" NASA", "all capitals"),
            ("ing", "word pieces"),
            (" (", "punctuation"),
            ("\n\n", "white space"),
            ("λόγος", "other scripts"),
            (" q", "letters"),
        ],
    )
    def test_classes(self, token: str, expected: str) -> None:
        assert expected in lexicon().classes(token)

    @pytest.mark.parametrize(("token", "other"), [(" Paris", "countries"), (" cat", "code"), ("12a", "numbers")])
    def test_not_a_class(self, token: str, other: str) -> None:
        assert other not in lexicon().classes(token)


class TestUsableTokens:
    def test_fragments_control_tokens_and_untrained_ones_are_left_out_and_counted(self) -> None:
        generator = torch.Generator().manual_seed(0)
        W_E = torch.randn(10, 64, generator=generator)
        W_E[1] = W_E[0] * 1.1  # two special tokens alike: never trained
        W_E[5] = W_E[0] * 0.7  # an ordinary token with their embedding
        strings = ["<s>", "<pad>", " cat", "�", "<0x0A>", "SolidGold", "\x00", "<unused7>", " dog"]
        found = usable_tokens(strings, [0, 1], W_E)
        assert found.mask.tolist() == [False, False, True, False, False, False, False, False, True, False]
        assert found.left_out == {"byte fragment": 2, "control": 4, "unused": 2}

    def test_without_special_tokens_nothing_is_guessed(self) -> None:
        W_E = torch.ones(3, 8)
        assert usable_tokens([" a", " b", " c"], [], W_E).mask.all()
