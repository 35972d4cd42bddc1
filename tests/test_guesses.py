"""What people write at the first try: layers for heads, positions from the end, ids and tensors for texts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from planted import shared_model

from tl_headmaps import (
    HeadIndex,
    HeadWeights,
    association_heads,
    attention_groups,
    compare_attention,
    component_map,
    grouping_profile,
    head_trust,
    relation_scores,
    salient_operations,
    value_mixing,
)
from tl_headmaps.core.errors import TokenError, UsageError
from tl_headmaps.core.types import head_list, layer_list
from tl_headmaps.core.vocabulary import as_text, token_position, word_place
from tl_headmaps.data.relations import Relation
from tl_headmaps.data.texts import read_texts, split_texts

TEXT = " word3 word4 word5 word6 word3 word4"
IDS = [3, 4, 5, 6, 3, 4]


class TestHeads:
    def test_a_layer_means_all_its_heads(self) -> None:
        weights = HeadWeights.of(shared_model("llama"))
        layer = [HeadIndex(1, head) for head in range(4)]
        for heads in ("L1", "l1 ", ["L1"], "L1H0,L1", ("L1",)):
            assert weights.chosen_heads(heads) == layer, heads
        for layers in (1, "L1", "1", [1], ["L1"], np.int64(1), torch.tensor(1), torch.tensor([1])):
            assert weights.chosen_heads(layers=layers) == layer, layers
        assert weights.named_heads("L2H1, L1, L2H1") == [HeadIndex(2, 1), *layer]
        assert weights.named_heads((np.int64(2), 1)) == weights.named_heads([(2, 1)]) == [HeadIndex(2, 1)]

    def test_in_every_call_that_takes_heads(self) -> None:
        model, relation = shared_model("llama"), Relation.from_pairs("next", [(n, n + 1) for n in range(3, 30)])
        by_name = relation_scores(model, relation, heads="L1", preset="folded", progress=False)
        by_layer = relation_scores(model, relation, layers=1, preset="folded", progress=False)
        assert (~by_name.promote[0].isnan()).nonzero()[:, 0].tolist() == [1] * 4
        assert torch.equal(by_name.promote.nan_to_num(-1), by_layer.promote.nan_to_num(-1))
        assert (
            by_name.provenance.options["heads"] == by_layer.provenance.options["heads"] == [f"L1H{n}" for n in range(4)]
        )
        for found in (
            salient_operations(model, "L1", progress=False),
            salient_operations(model, layers="L1", progress=False),
        ):
            assert found.heads == tuple(HeadIndex(1, head) for head in range(4))
        assert len(found.select("L1").heads) == 4
        assert (
            attention_groups(model, TEXT, heads="L1").heads
            == attention_groups(model, TEXT, layers=1).heads
            == found.heads
        )

    @pytest.mark.parametrize(
        ("call", "sentence"),
        [
            (lambda: head_list("5.3"), "'5.3' is not the name of a head"),
            (lambda: head_list(12), "12 is not a head. Write 'L23H4' or .*'L23' is all heads of layer 23"),
            (lambda: HeadIndex.parse("L12"), "'L12' is a layer, and one head is needed. Write for example 'L12H0'"),
            (lambda: HeadIndex.of((True, 1)), "is not a head"),
            (lambda: head_list("L9", [HeadIndex(0, 0), HeadIndex(1, 0)]), "no heads of layer 9 here; .* layers 0, 1"),
            (lambda: layer_list("x"), "'x' is not the number of a layer"),
            (lambda: layer_list(1.5), "1.5 is not the number of a layer"),
        ],
    )
    def test_what_is_none_is_refused(self, call: Callable[[], Any], sentence: str) -> None:
        with pytest.raises(UsageError, match=sentence):
            call()


class TestPositions:
    def test_negative_ones_count_from_the_end(self) -> None:
        tokens = ["Birds", " walk", " on", " 3", " legs"]
        assert [token_position(tokens, place) for place in (-1, "-1", -5, "-5", -2)] == [4, 4, 0, 0, 3]
        assert token_position(tokens, "3") == 3 and word_place(tokens, "-1") == word_place(tokens, -1) == (4, 4)
        for place in (-6, "-6", 5):
            with pytest.raises(TokenError, match=r"There is no token -?\d: the text has tokens 0 to 4, or -5 to -1"):
                token_position(tokens, place)

    def test_in_every_call_that_takes_positions(self) -> None:
        model = shared_model("llama")
        own = {"prepend_bos": False}
        assert value_mixing(model, TEXT, "L1H0", -2, 1, **own).example.query == 4
        mixing = value_mixing(model, TEXT, "L1H0", **own)
        assert str(mixing.explain(-2, -5)) == str(mixing.explain(4, 1))
        found = association_heads(model, TEXT, -1, -4, **own)
        assert (found.query, found.key) == (5, 2)
        phrases = {" word3 word4 word5": -1, " word3 word4 word6": 2}
        compared = compare_attention(model, phrases, -2, **own)
        assert (compared.words, compared.key) == (("word5", "word6"), "word4")
        assert [(phrase.query, phrase.key) for phrase in compared.phrases] == [(2, 1), (2, 1)]
        named = compare_attention(model, {text: text.split()[-1] for text in phrases}, "word4", **own)
        assert torch.equal(named.attention, compared.attention)
        with pytest.raises(UsageError, match="Token 0 is 'word3' and 'word7' in different phrases"):
            compare_attention(model, {" word3 word5": 1, " word7 word6": 1}, 0, **own)

    def test_on_the_command_line(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tl_headmaps.load_model", lambda *_: shared_model("llama"))
        text = ("--text", TEXT, "--no-prepend-bos")
        done = run("mixing", *text, "--head", "L1H0", "--query", "-1", "--key", "-2")
        assert done.code == 0 and "'word4'" in done.out, done
        done = run("association", *text, "--query", "-1", "--key", "-4")
        assert done.code == 0 and "bring 'word4' closer to 'word5'" in done.out, done
        phrases = ("--phrases", " word3 word4 word5=-1", "--phrases", " word3 word4 word6=-1")
        done = run("compare-attention", *phrases, "--key", "word4", "--no-prepend-bos")
        assert done.code == 0 and "word6" in done.out, done
        done = run("groups", *text, "--heads", "L1,L2H0")
        assert done.code == 0, done
        run("groups", *text, "--heads", "L9").assert_refused(2, "There are no heads of layer 9 here")


IDS_IN_MANY_FORMS = [IDS, tuple(IDS), torch.tensor(IDS), torch.tensor([IDS]), np.array(IDS), [IDS]]


class TestTexts:
    @pytest.mark.parametrize("text", IDS_IN_MANY_FORMS, ids=lambda text: type(text).__name__)
    def test_strings_ids_and_tensors_are_one_text(self, text: Any) -> None:
        model = shared_model("llama")
        assert as_text(text) == tuple(IDS) and list(read_texts(text)) == [tuple(IDS)]
        expected = association_heads(model, TEXT, 5, 2, prepend_bos=False)
        found = association_heads(model, text, 5, 2)
        assert found.tokens == expected.tokens and torch.equal(found.values, expected.values)

    def test_several_texts(self) -> None:
        rows = torch.tensor([IDS, IDS[::-1]])
        expected = [tuple(IDS), tuple(IDS[::-1])]
        for texts in (rows, rows.tolist(), list(rows), [row[None] for row in rows], (list(row) for row in rows)):
            assert list(read_texts(texts)) == expected
        assert list(read_texts([TEXT, IDS])) == [TEXT, tuple(IDS)]
        assert split_texts([[1], [2], [3], [1]]) == ([(1,), (2,), (1,)], [(3,)])

    def test_every_analysis_of_texts_takes_them(self) -> None:
        model = shared_model("llama")
        texts, options = [TEXT, " word7 word8 word7 word8", " word9 word3 word9 word3"] * 2, {"progress": False}
        ids = [model.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        for call in (
            lambda given: grouping_profile(model, given, prepend_bos=False, **options).values,
            lambda given: component_map(model, "contribution", given, prepend_bos=False, **options).values,
            lambda given: head_trust(model, given, prepend_bos=False, n_null=1, **options).values,
        ):
            assert torch.equal(call(texts).nan_to_num(-1), call(ids).nan_to_num(-1))

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            (torch.tensor([[3, 4], [5, 6]]), "2 texts were given, and this is about one"),
            (torch.tensor([0.5, 1.0]), "0.5 is not a token id"),
            (torch.tensor([True, False]), "True is not a token id"),
            (7, "7 is not a text"),
            ([3, 10**6], "outside the vocabulary: ids run from 0 to 60"),
        ],
    )
    def test_what_is_none_is_refused(self, text: Any, sentence: str) -> None:
        with pytest.raises(UsageError, match=sentence):
            attention_groups(shared_model("llama"), text)

    def test_ids_of_another_vocabulary_are_refused_before_they_run(self) -> None:
        for call in (
            grouping_profile,
            lambda *given, **options: component_map(given[0], "contribution", given[1], **options),
        ):
            with pytest.raises(UsageError, match="outside the vocabulary"):
                call(shared_model("llama"), [[3, 4, 10**6]], progress=False)
