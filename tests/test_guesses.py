"""What people write at the first try: layers for heads, positions from the end, ids and tensors for texts."""

import inspect
import json
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from every_result import ANALYSES
from planted import save_checkpoint, shared_model, source_model

from tl_headmaps import (
    HeadIndex,
    HeadWeights,
    Relation,
    TokenGrid,
    association_heads,
    attention_groups,
    compare_attention,
    component_map,
    describe_model,
    grouping_profile,
    head_trust,
    load_relations,
    relation_scores,
    salient_operations,
    token_grid,
    value_mixing,
)
from tl_headmaps.capture.tensors import quantisation_of, stated_quantisation
from tl_headmaps.core.errors import HeadMapsWarning, RelationDataError, TokenError, UsageError
from tl_headmaps.core.progress import Progress
from tl_headmaps.core.types import Preset, check_choice, head_list, layer_list
from tl_headmaps.core.vocabulary import as_text, token_position, word_place
from tl_headmaps.data.relations import resolve
from tl_headmaps.data.texts import read_texts, repeated_tokens, split_texts
from tl_headmaps.renderers.text import chance, interval, number
from tl_headmaps.results import HeadMaps, kinds
from tl_headmaps.results.codec import annotations_of

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
        for one in ("L1", "1", np.int64(1)):
            assert torch.equal(weights.layer(one).W_V, weights.layer(1).W_V), one
        for wrong, sentence in (
            ("L1,L2", "is not one layer"),
            ("x", "is not the number of a layer"),
            ("L9", "no head"),
        ):
            with pytest.raises(UsageError, match=sentence):
                weights.layer(wrong)
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

    def test_on_the_command_line(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tl_headmaps.load_model", lambda *_: shared_model("llama"))
        few = ("--n-tokens", "2", "--n-targets", "1")
        by_option = run("salient", "--heads", "L1,L2H3", *few)
        assert by_option.code == 0 and "L2H3" in by_option.out, by_option
        for words in (("L1", "L2H3"), ("L1,L2H3",), ("L1", "--heads", "L2H3"), ("L1", "L2H3", "L1H0")):
            assert run("salient", *words, *few).out == by_option.out, words
        text = ("--text", TEXT, "--no-prepend-bos")
        grid = ("--sources", "#3", "--targets", "#4", "--preset", "folded")
        for command, option, heads, rest in (
            ("groups", "--heads", "L1", (*text, "--n-null", "0")),
            ("mixing", "--head", "L1H0", text),
            ("grid", "--head", "L1H0", grid),
        ):
            expected = run(command, option, heads, *rest)
            assert expected.code == 0 and run(command, heads, *rest).out == expected.out, command
        run("salient", "12").assert_refused(2, "'12' is not the name of a head")
        run("mixing", *text, "L1").assert_refused(2, "'L1' is a layer, and one head is needed")
        run("mixing", *text).assert_refused(2, "give a head, or --query and --key (--query and --key missing)")
        run("grid", "L1H0", "--head", "L1H1", *grid).assert_refused(2, "L1H0 and L1H1 were both given")

    def test_an_option_that_is_given_twice_adds_up(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tl_headmaps.load_model", lambda *_: shared_model("llama"))
        few = ("--n-tokens", "2", "--n-targets", "1")
        grid = ("--head", "L1H0", "--preset", "folded")
        for command, option, one, other, rest in (
            ("salient", "--heads", "L1H0", "L2", few),
            ("salient", "--layers", "1", "L2", few),
            ("grid", "--sources", "#3", "#5", (*grid, "--targets", "#4")),
            ("grid", "--targets", "#3", "#5", (*grid, "--sources", "#4")),
        ):
            expected = run(command, option, f"{one},{other}", *rest)
            twice = run(command, option, one, option, other, *rest)
            assert (twice.code, twice.out) == (0, expected.out), (command, option)
        tokens = ("--sources", "#3", "--targets", "#4")
        run("grid", "--head", "L1H0", "--head", "L1H1", *tokens).assert_refused(2, "L1H0 and L1H1 were both given")

    @pytest.mark.parametrize(
        ("call", "sentence"),
        [
            (lambda: head_list("5.3", []), "'5.3' is not the name of a head"),
            (lambda: head_list(12, []), "12 is not a head. Write 'L23H4' or .*'L23' is all heads of layer 23"),
            (lambda: HeadIndex.parse("L12"), "'L12' is a layer, and one head is needed. Write for example 'L12H0'"),
            (lambda: HeadIndex.of((True, 1)), "is not a head"),
            (lambda: HeadIndex.of(torch.tensor(12)), r"tensor\(12\) is not a head"),
            (lambda: head_list(np.array(12), []), r"array\(12\) is not a head"),
            (lambda: layer_list(torch.tensor(1.5)), r"tensor\(1\.5000\) is not the number of a layer"),
            (lambda: HeadIndex.parse(f"L{'9' * 5000}H0"), "is not the name of a head"),
            (lambda: layer_list("9" * 5000), "is not the number of a layer"),
            (lambda: token_position(["Birds"], f"Birds#{'9' * 5000}"), "is not a token of the text"),
            (lambda: word_place(["Birds"], f"Birds#{'9' * 5000}"), "is not in the text"),
            (
                lambda: check_choice(np.array(["context", "maps"]), Preset, "preset"),
                "is not known. Choose one of: 'context'",
            ),
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


def with_maps() -> set[str]:
    """Kinds of results with an array over layers and heads."""
    found = set()
    for kind, result_class in kinds().items():
        hints = [str(getattr(hint, "dim_str", hint)) for hint in annotations_of(result_class).values()]
        values = (
            str(inspect.signature(inspect.unwrap(result_class.values.fget)).return_annotation)
            if isinstance(getattr(result_class, "values", None), property)
            else ""
        )
        if any("layer head" in hint for hint in [*hints, values]):
            found.add(kind)
    return found


def test_every_result_is_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results: dict[str, Any] = {}
    for call in ANALYSES.values():
        result = call(shared_model("llama"))
        results.setdefault(result.kind, result)
    results = {kind: results[kind] for kind in with_maps()}
    for kind, result in results.items():
        label = {"grouping_profile": "induction", "head_component_map": "attn.q"}.get(kind)
        given = () if label is None else (label,)
        shown = result.head_map(*given)
        assert shown.shape == (3, 4), kind
        top = result.top(3, *given)
        heads = [head[1] if isinstance(head, tuple) else head for head, _ in top]
        assert all(isinstance(head, HeadIndex) for head in heads) and len(top) <= 3, kind
        ranked = [float(shown[head.layer, head.head]) for head in heads]
        size = abs if kind == "attention_comparison" else float
        assert ranked == [value for _, value in top] == sorted(ranked, key=size, reverse=True), kind
        if not isinstance(result, HeadMaps):
            assert kind in {"head_names", "model_description"}
            continue
        every = int((~shown.isnan()).sum())
        assert result.n_measured >= every, kind
        if kind not in {"validation", "task_maps"}:
            assert f"of {result.n_measured}" in str(result), f"{kind}: the best of how many heads?"
        for options in ({"heads": "L1"}, {"layers": 1}, {"heads": ["L1H0", "L1"], "layers": "L1"}):
            one = result.select(**options).head_map(*given)
            assert torch.equal(one[1], shown[1]) or bool(shown[1].isnan().any()), kind
            assert bool(one[[0, 2]].isnan().all()), kind
        assert torch.equal(result.head_map(*given).nan_to_num(-9), shown.nan_to_num(-9)), "the original is as it was"
        assert type(result).from_dict(result.select(heads="L1H2").to_dict()).head_map(*given)[1, 2] == shown[1, 2]
    for kind, result_class in kinds().items():
        assert callable(result_class.top), kind
    with pytest.raises(UsageError, match="There is no head L9H0"):
        results["relation_scores"].select(heads="L9H0")
    with pytest.raises(UsageError, match=r"This result has one map\. Choose heads= or layers="):
        results["association_heads"].select("x")
    with pytest.raises(UsageError, match="has no score 'magic'; it has previous_token"):
        results["grouping_profile"].select("magic")
    chosen = results["grouping_profile"].select(["induction", "first_token"])
    assert chosen.scores == ("induction", "first_token") and chosen.values.shape == (2, 3, 4)
    assert torch.equal(chosen.null[1], results["grouping_profile"].null[2])
    assert results["task_maps"].select("inference").overlap.shape == (1, 1)
    assert results["validation"].select("asked").agreement == results["validation"].agreement


class TestProfileWithoutTexts:
    def test_each_score_is_about_the_texts_made_for_it(self) -> None:
        model = shared_model("llama")
        found = grouping_profile(model, max_texts=3, progress=False)
        assert (found.n_texts, found.n_repeated, found.provenance.seed) == (27, 24, 0)
        assert "repeated random tokens" in str(found) and "english.txt" in found.provenance.data["source"]
        own = repeated_tokens([1, *range(3, 61)], 31)
        alone = grouping_profile(model, [(2, *ids) for ids in own], progress=False)
        for score in ("induction", "duplicate_token"):
            torch.testing.assert_close(found.head_map(score), alone.head_map(score))
            place = found.index_of(score)
            torch.testing.assert_close(found.possible[place], alone.possible[place])
            torch.testing.assert_close(found.where_possible_null[place], alone.where_possible_null[place])
        prose = grouping_profile(model, max_texts=3, texts=list(islice(read_texts(), 3)), progress=False)
        place = found.index_of("sentence_block")
        torch.testing.assert_close(found.values[place], prose.values[place])
        torch.testing.assert_close(found.even[place], prose.even[place])

    def test_distance_does_not_explain_what_comes_again(self) -> None:
        (tokens,) = repeated_tokens(range(1000), 128, n=1)
        place = {token: number for number, token in enumerate(tokens[:64])}
        distances = {number + 64 - place[token] for number, token in enumerate(tokens[64:])}
        assert len(distances) >= 6, "the same tokens come again at several distances"
        assert repeated_tokens(range(1000), 128, n=1) == [tokens]

    def test_the_null_where_possible_is_the_dense_one(self) -> None:
        """From the model's own pattern: the mean at each distance (sinks apart), on the pairs of induction."""
        model, ids = shared_model("llama"), [2, *IDS, *IDS]
        found = grouping_profile(model, [ids], prepend_bos=False, progress=False)
        pattern = model.run_with_cache(torch.tensor([ids]))[1]["blocks.1.attn.hook_pattern"][0]
        pairs = [(q, k + 1) for q in range(len(ids)) for k in range(q) if ids[k] == ids[q]]
        queries = {q for q, _ in pairs}
        where = torch.stack([pattern[:, q, k] for q, k in pairs]).sum(0) / len(queries)
        torch.testing.assert_close(found.where_possible[3, 1], where)
        share, null = found.values[3, 1], found.null[3, 1]
        torch.testing.assert_close(found.where_possible_null[3, 1], where * null / share)

    def test_a_command_without_texts(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tl_headmaps.load_model", lambda *_: shared_model("llama"))
        done = run("profile", "--max-texts", "1")
        assert done.code == 0 and "24 of repeated random tokens" in done.out, done

    def test_induction_heads_of_the_default_model(self, default_model: Any) -> None:
        sequences = repeated_tokens(range(1000, 40_000), 128, n=4)
        found = grouping_profile(default_model, [(1, *ids) for ids in sequences], progress=False).select("induction")
        assert {str(head) for head, _ in found.top(3)} == {"L18H6", "L17H3", "L17H4"}
        for head, value in found.top(3):
            at = (0, head.layer, head.head)
            assert value > 3 * found.where_possible_null[at] and found.q_value[at] < 0.01


class TestRelationFiles:
    @pytest.mark.parametrize(
        ("name", "text", "header"),
        [
            ("a.csv", "country,capital\nFrance,Paris\nEgypt,Cairo\n", True),
            ("a.csv", 'country,capital\n"Korea, South",Seoul\n', True),
            ("a.csv", "France,Paris\nEgypt,Cairo\n", False),
            ("a.csv", "cat,cats\ndog,dogs\n", False),
            ("word_to_plural.csv", "Word,Plural\ncat,cats\ndog,dogs\n", True),
            ("singular_plural.csv", "singular,plural\ncat,cats\ndog,dogs\n", True),
            ("a.tsv", "input\toutput\ncat\tcats\n", True),
            ("a.csv", "number,next\n1,2\n2,3\n", True),
            ("a.csv", "1,2\n2,3\n", False),
        ],
    )
    def test_a_header_is_recognised_and_said(self, tmp_path: Path, name: str, text: str, header: bool) -> None:
        path = tmp_path / name
        path.write_text(text)
        said = "names of its columns; header=False" if header else "its first pair; header=True"
        with pytest.warns(HeadMapsWarning, match=said):
            found = Relation.from_file(path)
        rows = text.strip().splitlines()
        assert len(found.pairs) == len(rows) - header
        assert len(Relation.from_file(path, header=not header).pairs) == len(rows) - (not header)

    def test_templates(self, tmp_path: Path) -> None:
        path = tmp_path / "capitals.json"
        path.write_text('{"pairs": [["France", "Paris"]], "templates": {"eliciting": ["<X> has"]}}')
        assert Relation.from_file(path).eliciting_templates == ("<X> has",)
        for templates in ("The capital of <X> is", ["The capital of <X> is"], {"eliciting": ["The capital of <X> is"]}):
            found = Relation.from_file(path, templates=templates)
            assert found.eliciting_templates == ("The capital of <X> is",)
            assert found.neutral_templates == Relation.from_file(path).neutral_templates
        for templates, sentence in (("no place", "must contain <X> exactly once"), ({"odd": ["<X>"]}, "it may have")):
            with pytest.raises(RelationDataError, match=sentence):
                Relation.from_file(path, templates=templates)

    def test_of_two_forms_of_a_relation_the_json_file_counts(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("source,target\nFrance,Lyon\n")
        (tmp_path / "a.json").write_text('[["France", "Paris"]]')
        (tmp_path / "a.tsv").write_text("source\ttarget\nFrance\tNice\n")
        assert [relation.pairs for relation in load_relations(data_dir=tmp_path)] == [(("France", "Paris"),)]

    def test_two_files_with_one_name_are_refused(self, tmp_path: Path) -> None:
        for category, target in (("europe", "Paris"), ("worlds", "Lyon")):
            (tmp_path / category).mkdir()
            (tmp_path / category / "a.json").write_text(f'[["France", "{target}"]]')
        both = r"europe.a\.json and .*worlds.a\.json are both called 'a'"
        with pytest.raises(RelationDataError, match=both):
            load_relations(data_dir=tmp_path)
        with pytest.raises(RelationDataError, match=both):
            resolve("a", tmp_path)
        (relation,) = load_relations("europe", data_dir=tmp_path)
        assert relation.pairs == (("France", "Paris"),), "the other category was not asked for"
        (tmp_path / "worlds" / "a.json").rename(tmp_path / "b.json")
        assert len(load_relations(data_dir=tmp_path)) == 2
        (tmp_path / "b.json").write_text('{"name": "a", "pairs": [["France", "Lyon"]]}')
        with pytest.raises(RelationDataError, match=r"b\.json and .*europe.a\.json are both called 'a'"):
            load_relations(data_dir=tmp_path)

    def test_a_folder_may_hold_other_files(self, tmp_path: Path) -> None:
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "a.json").write_text('[["France", "Paris"]]')
        (tmp_path / "b.csv").write_text("source,target\nEgypt,Cairo\n")
        (tmp_path / "notes.md").write_text("mine")
        (tmp_path / "settings.json").write_text('{"theme": "dark"}')
        with pytest.warns(HeadMapsWarning, match=r"settings\.json was left out: it is not a relation"):
            assert sorted(relation.name for relation in load_relations(data_dir=tmp_path)) == ["a", "b"]
        (tmp_path / "own" / "c.json").write_text('{"pairs": [["France"]]}')
        with pytest.raises(RelationDataError, match="is not a pair of two words"):
            load_relations(data_dir=tmp_path / "own")

    def test_all_relations_are_meant_where_none_is_named(self, tmp_path: Path) -> None:
        for name, step in (("next", 1), ("last", 2)):
            rows = "".join(f"word{n},word{n + step}\n" for n in range(3, 30))
            (tmp_path / f"{name}.csv").write_text(f"source,target\n{rows}")
        (tmp_path / "elsewhere.csv").write_text("source,target\nnowhere,nothing\n")
        weights = HeadWeights.of(shared_model("llama"))
        scores = relation_scores(weights, data_dir=tmp_path, heads="L1", preset="folded", progress=False)
        assert sorted(scores.relations) == ["last", "next"], "without those that the tokenizer cannot write"

    def test_commands_say_it_in_a_sentence(self, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tl_headmaps.load_model", lambda *_: shared_model("llama"))
        path = tmp_path / "a.csv"
        path.write_text("word3,word4\nword5,word6\n")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            done = run("relations", str(path), "--preset", "folded")
        assert done.code == 0
        assert "tl-headmaps: a.csv: the first row (word3, word4) was taken for its first pair" in done.err


@pytest.mark.parametrize("call", ANALYSES.values(), ids=list(ANALYSES))
def test_a_model_of_transformers_is_refused_with_the_line_that_boots_it(
    call: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"LlamaForCausalLM is a model of transformers; .* Boot it: model = "):
        call(_raw())
    with pytest.raises(UsageError, match=r"'gpt2' is the name of a model, not a model\. Pass load_model\('gpt2'\)"):
        call("gpt2")


@lru_cache
def _raw() -> Any:
    return source_model("llama")


def test_that_line_boots_it(tmp_path: Path) -> None:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_checkpoint(source_model("llama"), tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(UsageError) as refused:
        describe_model(model)
    names = {"TransformerBridge": TransformerBridge, "model": model, "tokenizer": tokenizer}
    exec(str(refused.value).partition("Boot it: ")[2], names)
    assert describe_model(names["model"]).facts["heads"] == "4 per layer, 12 in all"


def test_small_values_are_not_shown_as_nothing() -> None:
    assert [number(value) for value in (0.5, 0.004, -0.0004, 3e-8, 0.0)] == [
        "0.50",
        "0.004",
        "-0.0004",
        "3e-08",
        "0.00",
    ]
    assert interval(0.0004, 0.02) == "0.0004 to 0.02" and number(0.0004, 3) == "0.0004"
    assert chance(1e-12) == "<1e-9" and chance(0.0312) == "0.031" and chance(math.nan) == "-"
    maps = component_map(shared_model("llama"), "frobenius", progress=False)
    tiny = replace(maps, values=maps.values * 1e-6)
    assert "0.00 " not in str(tiny) and "e-0" in str(tiny)


def test_help_lists_the_metrics(run: Any) -> None:
    from tl_headmaps.scorers.components import METRICS

    words = set(re.findall(r"[a-z_]+", run("components", "--help").out))
    assert words >= set(METRICS), "add it to components() in cli/commands.py"


class TestProgress:
    def test_long_work_says_how_long(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        clock = iter(range(0, 10_000, 5))
        monkeypatch.setattr("tl_headmaps.core.progress.time.monotonic", lambda: next(clock))
        for show, total, said in ((True, 48, "ablation: this takes about 4 minutes\n"), (False, 48, ""), (True, 4, "")):
            assert len(list(Progress(total=total, desc="ablation", show=show).over(range(total)))) == total
            assert said in (err := capsys.readouterr().err) and (said or "about" not in err)

    def test_it_says_what_takes_so_long(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("_LONG", "_MEASURED"):
            monkeypatch.setattr(f"tl_headmaps.core.progress.{name}", -1.0)
        model, relation = shared_model("llama"), Relation.from_pairs("next", [(n, n + 1) for n in range(3, 30)])
        texts = [f"{TEXT} word{n % 9 + 7}" for n in range(48)]  # more than are read at once
        for call, what in (
            (lambda: relation_scores(model, relation, preset="folded"), "scores of next"),
            (lambda: grouping_profile(model, texts), "profile"),
        ):
            call()
            assert f"{what}: this takes about" in capsys.readouterr().err

    def test_a_slow_start_is_not_taken_for_the_rest(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        clock = iter([0, *range(60, 10_000)])
        monkeypatch.setattr("tl_headmaps.core.progress.time.monotonic", lambda: next(clock))
        list(Progress(total=60, desc="ablation", show=True).over(range(60)))
        assert "ablation: this takes about 2 minutes\n" in capsys.readouterr().err

    def test_bars_are_those_of_notebooks_too(self) -> None:
        """``tqdm.auto`` shows a widget in a notebook, where plain tqdm with disable=None shows nothing."""
        package = Path(inspect.getfile(Progress)).parents[1]
        imports = [
            line for path in package.rglob("*.py") for line in path.read_text().splitlines() if "import tqdm" in line
        ]
        assert imports and set(imports) == {"from tqdm.auto import tqdm"}


class TestDoctor:
    def test_a_line_for_each_thing(self, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("tl_headmaps.load_model", lambda *_: shared_model("llama"))
        monkeypatch.setenv("TL_HEADMAPS_CACHE", str(tmp_path))
        (tmp_path / "context").mkdir()
        (tmp_path / "context" / "x").write_bytes(b"0" * 2500)
        done = run("doctor")
        lines = {line.split()[1]: line for line in done.out.splitlines()}
        assert done.code == 0 and {"versions", "cache", "hub", "model", "browser", "matplotlib"} <= set(lines)
        assert "context 2 KB" in lines["cache"] and "context and activations are kept up to 5 GB" in lines["cache"]
        assert "torch 2" in lines["versions"]
        assert lines["model"].startswith("missing") and "tl-headmaps model" in lines["model"]
        done = run("doctor", "--model", "tiny")
        assert done.code == 0 and "ok       model       tiny-llama, 9 of 9 seams fit" in done.out, done.out

    def test_what_is_missing_names_the_extra_that_brings_it(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tl_headmaps.load_model", lambda *_: shared_model("llama"))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        out = run("doctor", "--model", "tiny").out
        for name, use, wanted in (
            ("ipywidgets", "progress bars in notebooks", "'tl-headmaps[notebook]'"),
            ("gguf", "making the default model", "'tl-headmaps[demo]'"),
            ("distributed", "layers on a Dask cluster", "'tl-headmaps[cluster]'"),
            ("pyarrow", "results as .parquet", "pyarrow"),
        ):
            assert f"missing  {name:<12}{use}: pip install {wanted}\n" in out

    @pytest.mark.parametrize("cache", ["file", "file/below", "x" * 300, "~nosuch/x"])
    def test_a_cache_that_cannot_be(
        self, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: str
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("TL_HEADMAPS_CACHE", cache if cache.startswith("~") else str(tmp_path / cache))
        done = run("doctor")
        assert done.code == 1 and "broken   cache" in done.out and "Traceback" not in done.err
        run("model").assert_failed(1 if cache == "file/below" else 2)

    def test_a_limit_that_cannot_be(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TL_HEADMAPS_CACHE_GB", "much")
        done = run("doctor")
        assert done.code == 1 and "broken   cache       TL_HEADMAPS_CACHE_GB='much' is not a size" in done.out
        monkeypatch.setenv("TL_HEADMAPS_CACHE_GB", "inf")
        assert "context and activations are kept without a limit" in run("doctor").out

    def test_what_is_broken_fails(self, run: Any, tmp_path: Path) -> None:
        done = run("doctor", "--model", str(tmp_path / "nothing"))
        assert done.code == 1 and "broken   model" in done.out and "Traceback" not in done.err


def quantised(form: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix as llama.cpp rounds it, written anew from its description."""
    blocks = torch.randn(96, 2, 32, generator=torch.Generator().manual_seed(1))
    if form == "Q8_0":
        step = (blocks.abs().amax(-1, keepdim=True) / 127).half().float()
        return ((blocks / step).round() * step).flatten(1).to(dtype)
    if form == "Q4_1":
        low = blocks.amin(-1, keepdim=True).half().float()
        step = ((blocks.amax(-1, keepdim=True) - low) / 15).half().float()
        return (((blocks - low) / step).round().clamp(0, 15) * step + low).flatten(1).to(dtype)
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    step = (extreme / -8).half().float()
    return (((blocks / step).round() + 8).clamp(0, 15).sub(8) * step).flatten(1).to(dtype)


class TestQuantisation:
    @pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q8_0"])
    def test_forms_are_told_from_their_values(self, form: str) -> None:
        for dtype in (torch.float32, torch.float16):
            assert quantisation_of(quantised(form, dtype), dtype) == f"{form}, dequantised", dtype
        rounded = quantisation_of(quantised(form, torch.bfloat16), torch.bfloat16)
        assert rounded == (None if form == "Q8_0" else "four bits, dequantised")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_weights_that_never_were_raise_no_alarm(self, dtype: torch.dtype) -> None:
        for seed in range(20):
            noise = torch.randn(128, 64, generator=torch.Generator().manual_seed(seed)) * 0.02
            assert quantisation_of(noise.to(dtype), dtype) is None, seed
        for matrix in (torch.zeros(128, 64), torch.eye(128), torch.ones(128, 64), quantised("Q4_1")[:16]):
            assert quantisation_of(matrix.to(dtype), dtype) is None
        assert HeadWeights.of(shared_model("llama")).quantisation is None

    def test_a_configuration_says_it(self) -> None:
        assert (
            stated_quantisation(SimpleNamespace(quantization_config={"quant_method": "gptq", "bits": 4}))
            == "gptq, 4 bits"
        )
        assert stated_quantisation(SimpleNamespace()) is None and stated_quantisation(None) is None

    def test_the_default_model_says_it_everywhere(self, default_weights: Any, tmp_path: Path) -> None:
        assert default_weights.quantisation == "Q4_1, dequantised"
        assert default_weights.fingerprint.startswith("5e4b17c21b5dc741"), "what a model is called changed"
        facts = describe_model(default_weights).facts
        assert facts["quantisation"].startswith("Q4_1, dequantised; the original weights: load_model('HuggingFaceTB/")
        grid = token_grid(default_weights, "L23H4", ["France"], ["Paris"], preset="folded")
        assert grid.provenance.quantisation == "Q4_1, dequantised"
        caption = "SmolLM2-135M-Instruct: weights Q4_1, dequantised."
        assert grid.figure().html.count(caption) == 1 and caption in grid.figure().data.note
        path = grid.save(tmp_path / "grid.json")
        assert TokenGrid.load(path) == grid
        content = json.loads(path.read_text())
        del content["provenance"]["quantisation"]
        path.write_text(json.dumps(content))
        assert TokenGrid.load(path).provenance.quantisation is None

    def test_other_figures_have_no_caption(self) -> None:
        grid = token_grid(shared_model("llama"), "L0H0", [3], [4], preset="folded")
        assert "weights" not in grid.figure().html.split("tlhm-note")[-1][:100]
        assert "quantisation" not in grid.provenance.to_dict()
