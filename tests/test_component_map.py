"""Component maps: the right matrices, comparison of two models, the result, and sentences for what can go wrong."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrices import GATED, HOSTS, SIX, TEXTS, expected_matrices, mlp_matrices
from planted import DECODERS, Anatomy, hosted, needs_hooked, random_model, shared_model, source_model, word
from torch import Tensor

import tl_headmaps
from tl_headmaps import ComponentMap, HeadIndex, HeadWeights, component_map
from tl_headmaps.capture.components.matrices import ModelComponents, component_source, heads_of
from tl_headmaps.core.errors import UnsupportedModelError, UsageError, WeightBasisError
from tl_headmaps.scorers.components import METRICS, Change, metric
from tl_headmaps.scorers.spectra import WeightMatrix

# Reading the matrices


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("kind", DECODERS)
def test_matrices_are_those_of_the_checkpoint(kind: str, host: str) -> None:
    """Also where q, k and v are one tensor (GPT-2, Pythia) and where key/value heads are shared."""
    source = component_source(shared_model(kind, host=host))
    parts = Anatomy(source_model(kind), kind)
    assert source.components == (*SIX, "mlp.gate") if kind in GATED else SIX
    for layer in range(3):
        expected = expected_matrices(parts, layer)
        assert set(expected) == set(source.components)
        for name, matrix in expected.items():
            assert torch.equal(source.matrix(layer, name), matrix), (layer, name)
        heads = parts.heads(layer)
        for name in SIX[:4]:
            assert torch.equal(heads_of(source, layer, name), getattr(heads, f"W_{name[-1].upper()}"))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@needs_hooked
def test_hosts_agree_to_the_byte(kind: str) -> None:
    maps = [component_map(shared_model(kind, host=host), "stable_rank") for host in ("bridge", "hooked")]
    assert torch.equal(maps[0].values, maps[1].values)
    assert maps[0].provenance.fingerprint == maps[1].provenance.fingerprint


@needs_hooked
@pytest.mark.parametrize("name", ["contribution", "gradient_ratio"])
@pytest.mark.parametrize("kind", ["neox", "llama", "gemma3"])
def test_hosts_agree_on_text(kind: str, name: str) -> None:
    for by_head in (False, True):
        ours, theirs = (
            component_map(shared_model(kind, host=host), name, TEXTS, by_head=by_head, prepend_bos=False).values
            for host in ("bridge", "hooked")
        )
        # A norm behind a matrix leaves nothing but rounding in its contribution: it is compared as a share of the map.
        atol = 1e-4 if name == "contribution" else 1e-6
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=atol, equal_nan=True)


def test_weights_give_the_attention_columns() -> None:
    model = shared_model("llama")
    whole, attention = (component_map(source, "spectral") for source in (model, HeadWeights.from_model(model)))
    assert attention.components == SIX[:4]
    assert torch.equal(attention.values, whole.values[:, :4])
    sources = (model, HeadWeights.from_model(model))
    heads = [component_map(source, "spectral", by_head=True).values for source in sources]
    assert torch.equal(*(values.nan_to_num() for values in heads))


def test_mixtures_of_experts_are_refused_and_their_heads_are_not() -> None:
    model = shared_model("mixtral")
    with pytest.raises(UnsupportedModelError, match=r"layer 0 is a MoEBridge .*mixture of experts.*by_head=True"):
        component_map(model, "frobenius")
    assert component_map(model, "frobenius", by_head=True).values.shape == (4, 3, 4)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_quantised_models_are_refused(dtype: torch.dtype) -> None:
    model = random_model("llama")
    parameter = ModelComponents(model).location(1, "mlp.up").parameter
    parameter.requires_grad_(False)
    parameter.data = parameter.data.to(dtype)
    with pytest.raises(
        UnsupportedModelError, match=r"layers.1.mlp.up_proj.weight is stored as u?int8, a quantised type"
    ):
        component_map(model, "frobenius")


def test_half_precision_is_read() -> None:
    found = component_map(random_model("llama", dtype=torch.bfloat16), "frobenius").values
    assert torch.allclose(found, component_map(shared_model("llama"), "frobenius").values, rtol=1e-2)


# Two models


def edited(component: str, layer: int, change: Callable[[Tensor], None], kind: str = "llama") -> Any:
    source = source_model(kind)
    change(expected_matrices(Anatomy(source, kind), layer)[component])
    return hosted(source, kind)


def test_an_edit_shows_in_exactly_one_cell() -> None:
    def change(matrix: Tensor) -> None:
        matrix[3, 5] += 0.5

    base, new = shared_model("llama"), edited("mlp.gate", 1, change)
    matrix = mlp_matrices(Anatomy(source_model("llama"), "llama"), 1)["mlp.gate"]
    for name, expected in (("relative_change", 0.5 / float(matrix.norm())), ("changed_share", 1 / matrix.numel())):
        found = component_map(new, name, against=base)
        assert found.values.nonzero().tolist() == [[1, 6]]
        assert found.at(1, "mlp.gate") == pytest.approx(expected, rel=1e-5)
        assert found.baseline is None
        assert found.provenance.data["against"] == component_map(base, "frobenius").provenance.fingerprint


def test_a_fused_edit_shows_in_its_head() -> None:
    source = source_model("neox")
    Anatomy(source, "neox").write_value(2, 3, torch.zeros(32, 8))
    found = component_map(hosted(source, "neox"), "relative_change", against=shared_model("neox"), by_head=True)
    assert found.values.nonzero().tolist() == [[2, 2, 3]]
    assert found.top(1) == [(("attn.v", HeadIndex(2, 3)), 1.0)]


def test_a_model_overlaps_with_itself_and_by_chance_with_others() -> None:
    same = component_map(shared_model("llama"), "subspace_overlap", against=shared_model("llama"))
    assert torch.allclose(same.values, torch.ones(3, 7))
    assert same.provenance.options["k"] == 8
    assert same.baseline is not None and torch.allclose(same.baseline, torch.full((3, 7), math.sqrt(8 / 32)))
    other = component_map(shared_model("llama"), "subspace_overlap", against=random_model("llama", seed=9))
    assert float(other.values.mean()) == pytest.approx(math.sqrt(8 / 32), rel=0.1)
    assert float(other.values.max()) < 0.8
    assert "Random matrices or subspaces: 0.5." in str(other)


def test_overlap_is_taken_in_the_residual_stream() -> None:
    """Scaling neurons or heads mixes the other side; rotating the stream by 90 degrees leaves nothing."""
    basis = torch.eye(12, dtype=torch.float64)
    one = basis[:, :2] @ torch.diag(torch.tensor([3.0, 2.0], dtype=torch.float64)) @ basis[:2]
    other = basis[:, 2:4] @ torch.diag(torch.tensor([3.0, 2.0], dtype=torch.float64)) @ basis[:2]
    measure = METRICS["subspace_overlap"].measure
    assert measure(Change(WeightMatrix(one), WeightMatrix(other), 2)) == pytest.approx(0, abs=1e-12)
    assert measure(Change(WeightMatrix(one, writes=True), WeightMatrix(other, writes=True), 2)) == pytest.approx(1)
    tall, k = torch.randn(40, 9, generator=torch.Generator().manual_seed(0)), 4
    left = torch.linalg.svd(tall.double(), full_matrices=False).U[:, :k]
    found = WeightMatrix(tall).stream_basis(k)
    assert float((left.T @ found).square().sum()) == pytest.approx(k, rel=1e-9)


def test_a_folder_is_opened(tmp_path: Path) -> None:
    model = shared_model("llama")
    source = source_model("llama")
    source.model.layers[1].self_attn.q_proj.weight.mul_(1.5)
    source.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    found = component_map(model, "relative_change", against=tmp_path)
    assert found.values.nonzero().tolist() == [[1, 0]]
    assert found.at(1, "attn.q") == pytest.approx(1 / 3, rel=1e-5)


def test_models_of_different_shape_are_refused() -> None:
    model = shared_model("llama")
    for change, message in (
        ({"intermediate_size": 48}, r"mlp.up of layer 0 is \[32, 64\] here and \[32, 48\]"),
        ({"n_layers": 2}, r"n_layers is 3 here and 2"),
        ({"n_kv_heads": 4}, r"n_kv_heads is 2 here and 4"),
    ):
        with pytest.raises(UsageError, match=f"{message} in the one compared with"):
            component_map(model, "relative_change", against=random_model("llama", **change))
    with pytest.raises(UsageError, match=r"components is .*'mlp.gate'.* here and"):
        component_map(model, "relative_change", against=shared_model("gpt2"))
    with pytest.raises(WeightBasisError, match=r"raw here and folded in the model compared with"):
        component_map(model, "relative_change", against=shared_model("llama", processed=True))


# The result


def test_a_registered_function_is_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """One function, nothing else: it gets its baseline, its place in the list and its map."""
    monkeypatch.setattr("tl_headmaps.scorers.components.METRICS", METRICS)

    @metric("weights", "largest entry")
    def largest(matrix: WeightMatrix) -> float:
        return float(matrix.weight.abs().max())

    try:
        found = component_map(shared_model("llama"), "largest")
        assert found.unit == "largest entry" and found.baseline is not None
        matrix = component_source(shared_model("llama")).matrix(2, "attn.v")
        assert found.at(2, "attn.v") == float(matrix.abs().max())
        with pytest.raises(UsageError, match="largest"):
            component_map(shared_model("llama"), "unknown")
    finally:
        del METRICS["largest"]


def test_json_says_what_it_holds() -> None:
    result = component_map(shared_model("llama"), "stable_rank")
    read = json.loads(result.to_json())
    assert read["metric"] == "stable_rank"
    assert read["axes"] == {"layer": [0, 1, 2], "component": [*SIX, "mlp.gate"]}
    assert [len(row) for row in read["values"]] == [7, 7, 7]
    assert read["provenance"]["seed"] == 0
    head = json.loads(component_map(shared_model("llama"), "stable_rank", by_head=True).to_json())
    assert head["kind"] == "head_component_map" and list(head["axes"]) == ["component", "layer", "head"]
    assert head["values"][1][0][2:] == [None, None]
    rows = list(result.to_rows())
    assert len(rows) == 21 and rows[8]["component"] == "attn.k" and rows[8]["layer"] == 1
    assert rows[8]["value"] == float(result.values[1, 1])
    assert len(list(component_map(shared_model("llama"), "stable_rank", by_head=True).to_rows())) == 3 * (4 + 2 + 2 + 4)


def test_undefined_cells_are_null() -> None:
    source = source_model("llama")
    source.model.layers[0].self_attn.o_proj.weight.zero_()
    model = hosted(source, "llama")
    found = component_map(model, "stable_rank")
    assert math.isnan(found.at(0, "attn.o")) and json.loads(found.to_json())["values"][0][3] is None
    assert len(found.top(100)) == 20 and " - " in str(found)
    assert math.isnan(component_map(shared_model("llama"), "relative_change", against=model).at(0, "attn.o"))
    assert math.isnan(component_map(model, "gradient_ratio", TEXTS).at(0, "attn.o"))


def test_cells_can_be_looked_up() -> None:
    found = component_map(shared_model("llama"), "frobenius")
    (layer, component), value = found.top(1)[0]
    assert value == float(found.values.max()) == found.at(layer, component)
    with pytest.raises(UsageError, match=r"no component 'attn.x'; it has attn.q"):
        found.at(0, "attn.x")
    heads = component_map(shared_model("llama"), "frobenius", by_head=True)
    (component, head), value = heads.top(1, "attn.k")[0]
    assert component == "attn.k" and value == float(heads.of("attn.k").max())
    assert value == float(heads.of("attn.k")[head.layer, head.head])
    assert [value for _, value in heads.top(1000)] == sorted(heads.values[~heads.values.isnan()].tolist(), reverse=True)


def test_the_text_form_shows_the_map() -> None:
    shown = str(component_map(shared_model("gpt2"), "contribution", TEXTS))
    assert shown.startswith("Component map of tiny-gpt2: contribution, ")
    assert all(name in shown for name in SIX) and "mlp.gate" not in shown
    assert "share of |sum(w * dLoss/dw)| over the map; from " in shown
    shown = str(component_map(shared_model("gpt2"), "contribution", TEXTS, by_head=True))
    assert "Component map by head of tiny-gpt2" in shown and "key/value heads" in shown
    # Baselines by size, not by their first digit.
    found = component_map(shared_model("llama"), "frobenius")
    assert "Random matrices or subspaces: 9, 10." in str(
        replace(found, baseline=torch.full((3, 7), 10.0).index_fill(1, torch.tensor(0), 9))
    )


# What can go wrong


def test_wrong_calls_are_sentences() -> None:
    model = shared_model("llama")
    weights = HeadWeights.from_model(model)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"metric": "nonsense"}, r"no metric 'nonsense'.*contribution.*frobenius.*relative_change"),
        ({"metric": "relative_change"}, r"compares two models.*against="),
        ({"metric": "frobenius", "against": model}, r"looks at one model, but against="),
        ({"metric": "frobenius", "texts": "words"}, r"reads the weights alone, but texts were given"),
        ({"metric": "contribution", "relative": True}, r"contribution has no random baseline"),
        ({"metric": "relative_change", "against": model, "relative": True}, r"no random baseline"),
        ({"metric": "subspace_overlap", "against": model, "k": 17}, r"k=17 is impossible.*16 directions"),
        ({"metric": "stable_rank", "k": 3}, r"stable_rank compares no subspaces, but k=3 was given"),
        ({"metric": "relative_change", "against": model, "k": 3}, r"relative_change compares no subspaces"),
        (
            {"texts": f" {word(5)}", "prepend_bos": False},
            r"too short: the longest text has 1 token, .*at least two tokens",
        ),
        ({"texts": []}, r"too short: there is no text"),
        ({"texts": ["", "  "]}, r"too short: there is no text"),
        ({"texts": TEXTS, "max_tokens": 1}, r"max_tokens=1 is impossible; it must be at least 2"),
    ]
    for options, message in cases:
        with pytest.raises(UsageError, match=message):
            component_map(model, **options)
    with pytest.raises(UsageError, match=r"runs a text through the model, but only weights"):
        component_map(weights)
    with pytest.raises(UsageError, match=r"is not a TransformerLens model"):
        component_map(object(), "frobenius")
    with pytest.raises(UnsupportedModelError, match="no tokenizer"):
        component_map(shared_model("llama", tokenizer=False), "contribution", TEXTS)


def test_head_subspaces_are_limited_by_the_head() -> None:
    with pytest.raises(UsageError, match=r"k=9 is impossible: the smallest matrix has 8 directions"):
        component_map(shared_model("llama"), "subspace_overlap", against=shared_model("llama"), k=9, by_head=True)


def test_nan_weights_are_refused() -> None:
    model = edited("mlp.down", 2, lambda matrix: matrix[0].fill_(math.nan))
    with pytest.raises(UnsupportedModelError, match=r"mlp.down of layer 2 contains 32 NaN"):
        component_map(model, "frobenius")


# The default model


@pytest.fixture(scope="module")
def default_map(default_model: Any) -> ComponentMap:
    return component_map(default_model, max_tokens=200, progress=False)


@pytest.mark.model
def test_the_default_model_maps_thirty_layers_by_seven(default_map: ComponentMap) -> None:
    assert default_map.values.shape == (30, 7) and default_map.components == (*SIX, "mlp.gate")
    assert float(default_map.values.sum()) == pytest.approx(1, abs=1e-5)
    assert default_map.n_tokens == 200 + 2  # BOS in front of both sequences
    assert default_map.provenance.options["texts"] == "bundled sample english.txt"


def test_the_command_writes_json(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tl_headmaps, "load_model", lambda *_: shared_model("llama"))
    text, out = tmp_path / "text.txt", tmp_path / "c.json"
    text.write_text(f" {word(5)} {word(6)}-\n\n {word(9)} {word(8)}\n", encoding="utf-8")
    done = run("components", "--texts", str(text), "--metric", "gradient_ratio", "--out", str(out))
    saved = json.loads(out.read_text("utf-8"))
    assert saved["kind"] == "component_map" and saved["axes"]["component"] == [*SIX, "mlp.gate"]
    assert done.code == 0 and saved["n_batches"] == 2 and "gradient_ratio, 7 tokens" in done.out
    assert run("components", "--metric", "frobenius", "--by-head", "--out", str(out)).code == 0
    assert json.loads(out.read_text("utf-8"))["kind"] == "head_component_map"
    for arguments, message in (
        (["--metric", "loudness"], "There is no metric 'loudness'"),
        (["--metric", "output_share"], "The metric output_share is gone. Choose one, from text: contribution"),
        (["--texts", str(tmp_path / "none.txt")], "There is no file"),
        (["--against", str(tmp_path)], "is not a folder with a checkpoint"),
    ):
        run("components", *arguments).assert_refused(2, message)
