"""Salient operations equal a dense reference, planted heads are named, bad input gets a sentence."""

import inspect
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from planted import DECODERS, Anatomy, planted_model, shared_model, source_model
from test_token_grid import dense_map
from torch import Tensor

from tl_headmaps import HeadWeights, Result, name_heads, predicate, salient_operations
from tl_headmaps.analyses.salient_operations import _grid, _Strings
from tl_headmaps.circuits.blocks import places_of_true
from tl_headmaps.circuits.extremes import top_and_bottom, top_k
from tl_headmaps.circuits.maps import CircuitMaps
from tl_headmaps.circuits.vectors import cache_of
from tl_headmaps.core.errors import OutputError, UsageError
from tl_headmaps.core.types import HeadIndex
from tl_headmaps.naming.namer import NAMING_TOKENS, HeadName, Namer
from tl_headmaps.renderers.text import chance
from tl_headmaps.renderers.text import number as decimal

TOLERANCE = 2e-4
"""Float32 products in another order, relative to the largest value."""


def assert_same_top(found_ids: Tensor, found_values: Tensor, reference: Tensor, n: int) -> None:
    """The same set up to ties, each with its reference value."""
    scale = float(reference.abs().max())
    torch.testing.assert_close(found_values, reference[found_ids], atol=TOLERANCE * scale, rtol=0)
    least = reference.topk(n).values[-1]
    assert bool((reference[found_ids] >= least - TOLERANCE * scale).all())
    assert len(set(found_ids.tolist())) == n


class TestAgainstDense:
    @pytest.mark.parametrize("kind", DECODERS)
    @pytest.mark.parametrize("circuit", ["ov", "qk"])
    @pytest.mark.parametrize("preset", ["maps", "folded"])
    def test_targets_of_every_token(self, kind: str, circuit: Any, preset: Any) -> None:
        weights = HeadWeights.from_model(shared_model(kind))
        parts = Anatomy(source_model(kind), kind)
        found = salient_operations(weights, circuit=circuit, preset=preset, n_tokens=6, n_targets=4, progress=False)
        for number, head in enumerate(found.heads):
            whole = dense_map(parts, head.layer, head.head, circuit, preset)
            for place, token in enumerate(found.token_ids[number].tolist()):
                row = whole[token]
                if preset == "folded" and circuit == "ov":
                    row = row - row.mean()
                up = (found.promoted_ids[number, place], found.promoted_values[number, place])
                down = (found.suppressed_ids[number, place], found.suppressed_values[number, place])
                assert_same_top(*up, row, 4)
                assert_same_top(down[0], -down[1], -row, 4)
            grid = found.grids[number]
            rows = whole[list(grid.token_ids)]
            rows = rows - rows.mean(1, keepdim=True) if preset == "folded" and circuit == "ov" else rows
            expected = rows[:, list(grid.target_ids)]
            assert grid.token_ids == tuple(found.token_ids[number].tolist())
            torch.testing.assert_close(
                torch.tensor(grid.values), expected, rtol=0, atol=TOLERANCE * float(rows.abs().max())
            )

    @pytest.mark.parametrize("kind", DECODERS)
    def test_published_salience(self, kind: str) -> None:
        weights = HeadWeights.from_model(shared_model(kind))
        parts = Anatomy(source_model(kind), kind)
        found = salient_operations(weights, preset="maps", n_tokens=5, progress=False)
        for number, head in enumerate(found.heads):
            x, layer = parts.vectors(head.layer, "maps"), parts.heads(head.layer)
            group = head.head // (parts.n_heads // parts.n_kv_heads)
            ratio = (x @ layer.W_V[group] @ layer.W_O[head.head]).norm(dim=-1) / x.norm(dim=-1)
            assert_same_top(found.token_ids[number], found.salience[number], ratio, 5)

    @pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "gemma3", "neox"])
    @pytest.mark.parametrize("circuit", ["ov", "qk"])
    def test_raw_and_processed_models_agree(self, kind: str, circuit: Any) -> None:
        raw, processed = (
            salient_operations(shared_model(kind, processed=flag), circuit=circuit, n_tokens=61, progress=False)
            for flag in (False, True)
        )
        for number in range(len(raw.heads)):
            by_token = [
                dict(zip(found.token_ids[number].tolist(), found.salience[number].tolist(), strict=True))
                for found in (raw, processed)
            ]
            for token, value in by_token[0].items():
                if token in by_token[1]:
                    assert by_token[1][token] == pytest.approx(value, rel=2e-3)

    def test_folded_salience_is_that_of_normed_vectors(self) -> None:
        weights = HeadWeights.from_model(shared_model("gpt2"))
        layer = weights.layer(2)
        found = salient_operations(weights, "L2H1", n_tokens=8, progress=False)
        x = CircuitMaps(weights).row_vectors(2)
        plain = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + layer.ln1.eps).sqrt()
        written = (plain * layer.ln1.weight) @ layer.W_V[1] @ layer.W_O[1]
        ratio = (written - written.mean(-1, keepdim=True)).norm(dim=-1) / plain.norm(dim=-1)
        assert_same_top(found.token_ids[0], found.salience[0], ratio, 8)

    @pytest.mark.once
    def test_the_capital_head_of_the_default_model(self, default_weights: HeadWeights) -> None:
        found = salient_operations(default_weights, "L23H4", preset="maps", progress=False)
        tokens = [found.strings[token] for token in found.token_ids[0].tolist()]
        assert {" Italian", " pasta", " Swed", " Johannesburg"} <= set(tokens)
        assert " Italian" in dict(found.mappings("L23H4"))[" pasta"]
        assert found.name("L23H4").name != "unclear"


@pytest.mark.once
class TestEngine:
    @pytest.mark.parametrize("kind", ["llama", "gpt2"])
    @pytest.mark.parametrize("circuit", ["ov", "qk"])
    def test_both_sides_at_once_equal_one_at_a_time(self, kind: str, circuit: Any) -> None:
        weights = HeadWeights.from_model(shared_model(kind))
        maps = CircuitMaps(weights, torch.arange(40), circuit=circuit).layer(1)
        top, bottom = top_and_bottom(maps, 7)
        for found, largest in ((top, True), (bottom, False)):
            alone = top_k(maps, 7, largest=largest)
            assert torch.equal(found.columns, alone.columns)
            assert torch.equal(found.values, alone.values)

    def test_own_rows_of_each_head(self) -> None:
        weights = HeadWeights.from_model(shared_model("llama"))
        maps = CircuitMaps(weights).layer(1)
        rows = torch.tensor([[3, 9], [9, 3], [1, 1], [0, 5]])
        chosen, whole = top_k(maps.with_own_rows(rows), 3), top_k(maps, 3)
        for head in range(4):
            assert torch.equal(chosen.columns[head], whole.columns[head, rows[head]])

    @pytest.mark.parametrize("width", [8, 64, 63, 1])
    @pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
    def test_places_of_true(self, width: int, share: float) -> None:
        mask = torch.rand(11, width, generator=torch.Generator().manual_seed(0)) < share
        expected = mask.nonzero(as_tuple=True)
        assert all(torch.equal(a, b) for a, b in zip(places_of_true(mask), expected, strict=True))

    def test_vocabulary_vectors_are_computed_once(self) -> None:
        weights = HeadWeights.from_model(shared_model("llama"))
        first = CircuitMaps(weights).row_vectors(1)
        assert CircuitMaps(weights).row_vectors(2) is first
        assert not torch.equal(CircuitMaps(weights, preset="maps").row_vectors(2), first)


class TestPlanted:
    RELATION = {3 + i: 3 + i for i in range(14)}  # noqa: RUF012

    def test_a_planted_copying_head_is_named(self) -> None:
        weights = HeadWeights.from_model(planted_model({(1, 2): self.RELATION}, n_kv_heads=4))
        found = salient_operations(weights, "L1H2", n_tokens=10, progress=False)
        assert found.name("L1H2").name == "copy"
        assert set(found.token_ids[0].tolist()) <= set(self.RELATION)
        assert all(targets[0] == token for token, targets in found.mappings("L1H2"))

    def test_its_picture_is_what_it_copies(self) -> None:
        weights = HeadWeights.from_model(planted_model({(1, 2): self.RELATION}, n_kv_heads=4))
        found = salient_operations(weights, "L1H2", n_tokens=10, progress=False)
        grid, name = found.grids[0], found.name("L1H2")
        assert grid.token_ids == grid.target_ids == tuple(found.token_ids[0, :6].tolist())
        values, explained = torch.tensor(grid.values), torch.tensor(grid.explained)
        assert torch.equal(explained, torch.eye(6, dtype=torch.bool))
        assert torch.equal(values.argmax(1), torch.arange(6))
        heat = found.figure().data.parts[0]
        assert heat.title == "L1H2: copy"
        assert heat.note == f"copy {decimal(name.score)} · null {decimal(name.null_mean)} · q {chance(name.q_value)}"
        assert heat.layers[0].scale.colours[0] > heat.layers[0].scale.colours[-1], "light to dark"

    def test_a_suppressing_head_is_shown_with_what_it_suppresses(self, clean_catalogue: None) -> None:
        model = shared_model("llama")
        before = salient_operations(model, "L2H3", progress=False)
        second = {
            (before.strings[token], before.strings[targets[1]])
            for token, targets in zip(before.token_ids[0].tolist(), before.suppressed_ids[0].tolist(), strict=True)
        }
        some, other = sorted(second)[0], ("nothing", "nothing")
        predicate("second", examples=[some], counterexamples=[other])(lambda *pair: pair in second)
        found = salient_operations(model, "L2H3", progress=False)
        grid = found.grids[0]
        assert found.name("L2H3").name == "suppress second"
        assert set(grid.target_ids) == set(before.suppressed_ids[0, :6, 1].tolist())
        for row, token in enumerate(grid.token_ids):
            marked = [target for target, holds in zip(grid.target_ids, grid.explained[row], strict=True) if holds]
            assert (before.strings[token], before.strings[marked[0]]) in second

    def test_tokens_that_share_their_target_have_more_columns(self) -> None:
        shown = {"token_ids": torch.tensor([3, 4]), "promoted_ids": torch.tensor([[9, 5, 7], [9, 5, 8]])}
        crossed = torch.arange(24.0).view(2, 2, 2, 3)
        nameless = HeadName("unclear", 0.0, 0.0, 0.0, 1.0, 1.0)
        grid = _grid(Namer(), _Strings(), nameless, shown, crossed)
        assert grid.target_ids == (9, 5, 7)
        assert grid.values == ((0.0, 1.0, 2.0), (12.0, 13.0, 14.0)), "both tokens at the targets of the first"

    def test_a_users_predicate_names_a_head(self, clean_catalogue: None) -> None:
        shifted = {3 + i: 3 + (i + 5) % 14 for i in range(14)}
        weights = HeadWeights.from_model(planted_model({(2, 1): shifted}, n_kv_heads=4))
        assert salient_operations(weights, "L2H1", n_tokens=10, progress=False).name("L2H1").name == "unclear"

        def shift(source: str, target: str) -> bool:
            digits = [int("".join(filter(str.isdigit, text)) or -1) for text in (source, target)]
            return shifted.get(digits[0]) == digits[1]

        predicate("shifted", examples=[("word3", "word8")], counterexamples=[("word3", "word4")])(shift)
        found = salient_operations(weights, "L2H1", n_tokens=10, progress=False)
        assert found.name("L2H1").name == "shifted"
        assert "shifted" in str(found)
        assert "shifted" in found.provenance.options["predicates"]


class TestNames:
    @pytest.mark.once
    def test_coverage_of_the_default_model_falls_when_outputs_are_rotated(self, default_weights: HeadWeights) -> None:
        """With each head's output turned at random, names must be as rare as false discoveries."""
        chosen = [HeadIndex(layer, head) for layer in (22, 23, 24) for head in range(9)]
        generator = torch.Generator().manual_seed(0)
        d_model = default_weights.d_model

        def rotated(layer: int) -> Any:
            read = default_weights.layer(layer)
            turns = [
                torch.linalg.qr(torch.randn(d_model, d_model, generator=generator))[0]
                for _ in range(default_weights.n_heads)
            ]
            return replace(read, W_O=torch.stack([W @ Q for W, Q in zip(read.W_O, turns, strict=True)]))

        real = salient_operations(default_weights, chosen, vocabulary="words", progress=False)
        random = replace(default_weights, read_layer=rotated, model=None)
        random.__dict__["fingerprint"] = "rotated"
        cache_of(random).vectors.update(cache_of(default_weights).vectors)
        turned = salient_operations(random, chosen, vocabulary="words", progress=False)

        def named(found: Any) -> int:
            return sum(entry.name != "unclear" for entry in found.names)

        assert named(real) >= 9
        assert named(turned) <= 2

    def test_map_and_coverage(self) -> None:
        copying = {3 + i: 3 + i for i in range(14)}
        weights = HeadWeights.from_model(planted_model({(2, 0): copying, (2, 3): copying}, n_kv_heads=4))
        names = name_heads(weights, progress=False)
        assert names.name("L2H0").name == "copy"
        assert names.named()["copy"] == [HeadIndex(2, 0), HeadIndex(2, 3)]
        assert names.coverage() == pytest.approx({"all": 2 / 12, "early": 0.0, "middle": 0.0, "late": 0.5})
        assert names.values.shape == (3, 4)
        assert "copy" in str(names)
        # The thirds of component maps: of four layers, two are in the middle.
        four = replace(names, names=(*names.names, names.names[0])).coverage()
        assert four == pytest.approx({"all": 2 / 16, "early": 0.0, "middle": 2 / 8, "late": 0.0})
        rows = str(names).splitlines()
        published = next(number for number, row in enumerate(rows) if "60-96%" in row)
        # Of other models, so in a sentence that says so, not in a row with ours.
        assert "other, larger models" in " ".join(rows[published - 1 : published + 1])
        assert not any("60-96%" in row for row in rows if row.startswith(("all", "early", "late")))
        assert len(list(names.to_rows())) == 12
        assert type(names).from_dict(names.to_dict()) == names


@pytest.fixture(scope="module")
def found() -> Any:
    return salient_operations(shared_model("llama"), ["L0H1", "L2H3"], n_tokens=4, n_targets=3)


class TestResult:
    def test_json_has_the_promised_names(self, found: Any) -> None:
        values = found.to_dict()
        operation = values["operations"][0]
        assert {"head", "name", "score", "lift", "p_value", "tokens", "grid"} <= set(operation)
        assert set(operation["grid"]) == {"tokens", "targets", "values", "explained"}
        token = operation["tokens"][0]
        assert set(token) == {"token", "id", "salience", "promotes", "suppresses"}
        assert set(token["promotes"][0]) == {"token", "id", "value"}
        assert len(operation["tokens"]) == 4 and len(token["suppresses"]) == 3

    def test_a_grid_with_rows_missing_is_refused(self, found: Any, tmp_path: Any) -> None:
        values = found.to_dict()
        values["operations"][1]["grid"]["values"] = values["operations"][1]["grid"]["values"][:-1]
        (tmp_path / "s.json").write_text(json.dumps(values))
        with pytest.raises(OutputError, match="a grid whose rows are not as long"):
            Result.load(tmp_path / "s.json")

    def test_select_and_unknown_heads(self, found: Any) -> None:
        selected = found.select(["L2H3"])
        assert selected.heads == (HeadIndex(2, 3),)
        assert type(selected).from_dict(selected.to_dict()) == selected, "texts of other heads' tokens are left behind"
        with pytest.raises(UsageError, match="has no head L1H1"):
            found.name("L1H1")

    def test_names_do_not_depend_on_how_much_is_shown(self) -> None:
        model = shared_model("llama")
        short, long = (salient_operations(model, "L2H3", n_tokens=n, n_targets=t) for n, t in ((1, 1), (40, 9)))
        assert short.names == long.names
        assert short.token_ids.shape == (1, 1) and long.promoted_ids.shape == (1, 40, 9)
        assert NAMING_TOKENS == 30

    def test_a_whole_layer_prints_the_first_tokens_of_each_head(self) -> None:
        weights = HeadWeights.from_model(shared_model("llama"))
        layer = salient_operations(weights, "L1", n_tokens=20, progress=False)
        assert str(layer).count("salience") == len(layer.heads)
        assert len(str(layer).splitlines()) < 12 * len(layer.heads)
        assert f"the 5 most salient of 20 tokens; select('{layer.heads[0]}') prints all" in str(layer)
        one = str(layer.select("L1H0"))
        assert len(one.splitlines()) > 20 and "prints all" not in one

    def test_ids_stand_in_for_a_missing_tokenizer(self) -> None:
        weights = replace(HeadWeights.from_model(shared_model("llama")), tokenizer=None)
        found = salient_operations(weights, "L1H1", n_tokens=2)
        assert all(text.startswith("#") for text in found.strings.values())

    def test_control_characters_can_be_seen(self, found: Any) -> None:
        odd = replace(found, strings=dict.fromkeys(found.strings, " \n\x1b[31m"))
        assert "' \\n\\x1b[31m'" in str(odd)


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"n_tokens": 62}, "n_tokens=62 is impossible: the vocabulary filter leaves 61"),
            ({"n_targets": 1000}, "n_targets=1000 is impossible"),
            ({"vocabulary": lambda text: False}, "leaves no token"),
            ({"prompts": [" word5"]}, "prompts= goes with preset='context'"),
            ({"prepend_bos": False}, "prepend_bos= goes with preset='context'"),
        ],
    )
    def test_is_refused(self, options: dict[str, Any], sentence: str) -> None:
        with pytest.raises(UsageError, match=sentence):
            salient_operations(shared_model("llama"), **options)

    def test_unknown_vocabulary(self) -> None:
        with pytest.raises(UsageError, match="'all', 'words', or a function"):
            inspect.unwrap(salient_operations)(shared_model("llama"), vocabulary="most")

    def test_words_need_a_tokenizer(self) -> None:
        weights = replace(HeadWeights.from_model(shared_model("llama")), tokenizer=None)
        with pytest.raises(UsageError, match="no tokenizer"):
            salient_operations(weights, vocabulary="words")

    def test_a_function_chooses_the_sources(self) -> None:
        found = salient_operations(
            shared_model("llama"),
            "L1H0",
            n_tokens=3,
            vocabulary=lambda text: text.strip() in {"word5", "word6", "word7"},
        )
        assert {found.strings[token].strip() for token in found.token_ids[0].tolist()} == {"word5", "word6", "word7"}
        assert found.left_out == {"vocabulary function": 58}


class TestFigures:
    def test_a_few_heads_are_a_table_and_many_a_map(self, found: Any) -> None:
        assert "L2H3" in found.figure().html and "<table>" in found.figure().html
        everything = salient_operations(shared_model("llama"), n_tokens=3, n_targets=2)
        figure = everything.figure(view="map")
        assert "best predicate" in figure.html
        token = everything.strings[int(everything.token_ids[0, 0])]
        assert token.strip() in figure.html
        assert [value for _, value in figure.data.highest(figure.data.layers[0], 1)] == [
            pytest.approx(max(entry.score for entry in everything.names))
        ]

    def test_top_tokens_through_circuitsvis(self, found: Any) -> None:
        assert "TopkTokens" in found.figure(view="top_tokens").html
