"""Weights from safetensors on disk: the same as from the loaded model to the last bit, and nothing else is opened."""

import json
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from planted import DECODERS, GROUPED, Anatomy, hosted, random_model, save_checkpoint, source_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from tl_headmaps import (
    HeadWeights,
    Relation,
    component_map,
    describe_model,
    name_heads,
    relation_scores,
    salient_operations,
)
from tl_headmaps.capture import bundled
from tl_headmaps.capture.checkpoint import shards
from tl_headmaps.capture.checkpoint.architectures import ARCHITECTURES
from tl_headmaps.capture.checkpoint.shards import INDEX, SINGLE, Shards, shown_name
from tl_headmaps.capture.parts import ACTIVATIONS, MLP, LayerWeights, Norm
from tl_headmaps.core.errors import HeadMapsError, ModelLoadError, UnsupportedModelError, UsageError

KINDS = (*DECODERS, "mistral")
PAIRS = [(s, t) for s in range(3, 20) for t in (s + 1, 40 - s)]
RELATION = Relation.from_pairs("all", PAIRS)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Digests are kept apart from the user's."""
    monkeypatch.setattr(shards, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def assert_same(one: Any, other: Any, name: str = "weights") -> None:
    """All values equal, tensors also in type and memory order: products round by it."""
    if isinstance(one, Tensor):
        assert isinstance(other, Tensor), name
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), name
        assert torch.equal(one, other), name
    elif isinstance(one, HeadWeights | LayerWeights | Norm | MLP):
        # The fields alone: what was looked up and kept (the self-check) is not read from files.
        for field in (entry.name for entry in fields(one)):
            if field == "activation":
                # One function may have several names.
                x = torch.linspace(-3, 3, 100)
                assert torch.equal(*(ACTIVATIONS[getattr(part, field)](x) for part in (one, other)))
            elif field == "mlp_refusal":
                assert (getattr(one, field) is None) == (getattr(other, field) is None)
            elif field not in ("read_layer", "tokenizer", "model_name", "origin", "model"):
                assert_same(getattr(one, field), getattr(other, field), f"{name}.{field}")
    else:
        assert one == pytest.approx(other, rel=1e-15) if isinstance(one, float) else one == other, name


def assert_same_weights(one: HeadWeights, other: HeadWeights) -> None:
    assert_same(one, other)
    for layer in range(one.n_layers):
        if layer not in one.mixers:
            assert_same(one.layer(layer), other.layer(layer), f"layer {layer}")
    assert one.fingerprint == other.fingerprint
    assert one.numbers_digest == other.numbers_digest


def without_time_and_place(result: Any) -> dict[str, Any]:
    values = result.to_dict()
    # Only a loaded model is run to be checked.
    for field in ("created", "model", "seams"):
        values["provenance"].pop(field)
    return values


def assert_same_scores(one: HeadWeights, other: HeadWeights, **options: Any) -> None:
    options = {"preset": "folded", "ranks": True, "progress": False} | options
    first, second = (relation_scores(w, RELATION, **options) for w in (one, other))
    assert without_time_and_place(first) == without_time_and_place(second)


class TestSameAsTheLoadedModel:
    @pytest.mark.parametrize("kind", ["llama", "neox", "gpt2"])
    def test_reduced_precision_on_disk_scores_as_the_model_loaded_in_float32(self, kind: str, tmp_path: Path) -> None:
        """Casting up is exact, so only the stored bytes differ, and with them the fingerprint."""
        source = source_model(kind, n_vocab=131).bfloat16()
        save_checkpoint(source, tmp_path)
        loaded, read = HeadWeights.from_model(hosted(source.float(), kind)), HeadWeights.from_checkpoint(tmp_path)
        one, other = (relation_scores(w, RELATION, ranks=True, progress=False, preset="folded") for w in (loaded, read))
        for name in ("promote_ranks", "suppress_ranks"):
            assert torch.equal(getattr(one, name)[0], getattr(other, name)[0])
        assert one.provenance.fingerprint != other.provenance.fingerprint

    # A smaller example would take minutes to find and say no more: the arguments are in the failure.
    @settings(
        max_examples=8,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(
        kind=st.sampled_from(KINDS),
        groups=st.integers(1, 3),
        per_group=st.integers(1, 3),
        d_head=st.sampled_from([2, 4, 10]),
        tied=st.booleans(),
        bias=st.booleans(),
        seed=st.integers(0, 100),
    )
    def test_any_size(
        self, kind: str, groups: int, per_group: int, d_head: int, tied: bool, bias: bool, seed: int, tmp_path: Path
    ) -> None:
        heads = groups * per_group
        sizes: dict[str, Any] = {"n_heads": heads, "n_layers": 2, "seed": seed, "tie_word_embeddings": tied}
        if kind in GROUPED:
            # Widths of heads that have nothing to do with d_model.
            sizes |= {"n_kv_heads": groups, "d_head": d_head, "d_model": 6 * heads}
        else:
            sizes |= {"d_model": 8 * heads}
        if kind in ("llama", "neox", "qwen3"):
            sizes["attention_bias"] = bias
        source = source_model(kind, **sizes)
        folder = tmp_path / "any"
        shutil.rmtree(folder, ignore_errors=True)
        save_checkpoint(source, folder, shard_size="1KB")
        assert (folder / INDEX).is_file()
        assert_same_weights(HeadWeights.from_model(hosted(source, kind)), HeadWeights.from_checkpoint(folder))

    @pytest.mark.parametrize(
        ("kind", "changes"),
        [
            ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
            ("gpt2", {"tie_word_embeddings": False}),
            ("llama", {"tie_word_embeddings": True}),
            ("gemma3", {"tie_word_embeddings": False}),
            ("neox", {"use_parallel_residual": False}),
            ("phi", {"hidden_act": "relu"}),
        ],
        ids=lambda value: value if isinstance(value, str) else "-".join(value),
    )
    def test_what_configurations_change(self, kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
        source = source_model(kind, **changes)
        save_checkpoint(source, tmp_path)
        read = HeadWeights.from_checkpoint(tmp_path)
        assert_same_weights(HeadWeights.from_model(hosted(source, kind)), read)
        tied = read.W_E.data_ptr() == read.W_U.data_ptr()
        assert tied == bool(source.config.tie_word_embeddings)

    def test_an_unknown_activation_leaves_layer_0(self, tmp_path: Path) -> None:
        source = source_model("llama", hidden_act="tanh")
        save_checkpoint(source, tmp_path)
        read = HeadWeights.from_checkpoint(tmp_path)
        assert read.mlp is None and "'tanh' is not known here" in str(read.mlp_refusal)
        relation_scores(read, RELATION, heads="L0H1", progress=False, preset="folded")
        with pytest.raises(UnsupportedModelError, match="only layer 0 can be mapped"):
            relation_scores(read, RELATION, heads="L1H1", progress=False, preset="folded")


@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_of_every_layer(kind: str, tmp_path: Path) -> None:
    """Rows inputs, columns outputs, in the stored type: for analyses that look at more than attention."""
    source = source_model(kind).bfloat16()
    save_checkpoint(source, tmp_path)
    origin, parts = HeadWeights.from_checkpoint(tmp_path).origin, Anatomy(source, kind)
    assert origin is not None
    gated = kind in GROUPED
    assert origin.components == ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down", *["mlp.gate"] * gated)
    for layer in range(3):
        heads, mlp = parts.heads(layer), parts.part(layer, "mlp")
        for name in ("q", "k", "v", "o"):
            by_head = getattr(heads, f"W_{name.upper()}")
            expected = by_head.flatten(0, 1) if name == "o" else by_head.transpose(0, 1).flatten(1)
            assert torch.equal(origin.component(layer, f"attn.{name}"), expected)
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
        up, down = origin.component(layer, "mlp.up"), origin.component(layer, "mlp.down")
        assert (up.shape, down.shape) == ((32, up.shape[1]), (up.shape[1], 32))
        assert up.dtype == torch.bfloat16
        inner = {"gpt2": "c_fc", "neox": "dense_h_to_4h", "phi": "fc1"}.get(kind, "up_proj")
        module = getattr(mlp, inner)
        ours = x @ up if module.bias is None else x @ up + module.bias
        torch.testing.assert_close(ours, module(x), rtol=2e-2, atol=2e-2)
    for name, layer in (("mlp.side", 0), ("attn.q", 3)):
        with pytest.raises(UsageError, match=f"There is no {name} in layer {layer}; there are attn.q"):
            origin.component(layer, name)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_defaults_are_those_of_the_configuration_class(model_type: str) -> None:
    """Files leave out what their class has as a default, so the table must have the same."""
    from transformers import AutoConfig

    known = ARCHITECTURES[model_type]
    config = AutoConfig.for_model(model_type).get_text_config()
    chosen = {field for variant in known.variants for field in variant.fixed}
    factors = {field for field, _ in known.factors.values()}
    for field in {"tie_word_embeddings", "num_key_value_heads", "head_dim", known.eps, *factors} - chosen:
        default = known.defaults.get(field)
        theirs = getattr(config, field, None)
        if default is None and field == "num_key_value_heads":
            assert theirs in (None, config.num_attention_heads)
        elif default is None and field == "head_dim":
            assert theirs in (None, config.hidden_size // config.num_attention_heads)
        else:
            assert default == theirs, field
    if known.activation[0] not in known.fixed:
        assert known.defaults[known.activation[0]] == getattr(config, known.activation[0])
    for field in ("scale_attn_by_inverse_layer_idx", *known.refused):
        assert not getattr(config, field, False)
    for field in {field for variant in known.variants for field in variant.when}:
        assert bool(known.defaults.get(field)) == bool(getattr(config, field)), field
    for field in {field for field in known.biases.values() if isinstance(field, str)}:
        assert bool(known.defaults.get(field)) == getattr(config, field), field
    for ours, theirs in known.aliases.items():
        assert config.attribute_map.get(ours, theirs) == theirs and hasattr(config, theirs)


class TestOtherFormsOnDisk:
    def renamed(self, folder: Path, rename: Any, **more: Tensor) -> None:
        tensors = load_file(folder / SINGLE)
        save_file({rename(name): tensor for name, tensor in tensors.items()} | more, folder / SINGLE)

    def test_gpt2_without_prefix_and_with_masks(self, tmp_path: Path) -> None:
        source = source_model("gpt2")
        save_checkpoint(source, tmp_path)
        before = HeadWeights.from_checkpoint(tmp_path).fingerprint
        masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8) for layer in range(3)}
        self.renamed(tmp_path, lambda name: name.removeprefix("transformer."), **masks)
        assert HeadWeights.from_checkpoint(tmp_path).fingerprint == before

    @pytest.mark.parametrize("body", ["model.language_model.", "language_model.model."])
    def test_the_text_half_of_gemma_3_with_vision(self, body: str, tmp_path: Path) -> None:
        """Both orders of the prefix that are on the hub, and a configuration that leaves out its defaults."""
        source = source_model("gemma3", d_head=256, query_pre_attn_scalar=256)
        save_checkpoint(source, tmp_path)
        expected = HeadWeights.from_checkpoint(tmp_path)
        scales = expected.embed_scale, expected.layer(1).score_scale
        assert len(expected.fingerprint) == 64
        self.renamed(
            tmp_path,
            lambda name: name.replace("model.", body, 1),
            **{"vision_tower.layers.0.weight": torch.zeros(2, 2)},
        )
        text = json.loads((tmp_path / "config.json").read_text())
        for default in ("head_dim", "query_pre_attn_scalar", "rms_norm_eps", "tie_word_embeddings", "architectures"):
            text.pop(default)
        config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
        (tmp_path / "config.json").write_text(json.dumps(config))
        read = HeadWeights.from_checkpoint(tmp_path)
        assert read.architecture == "Gemma3ForConditionalGeneration"
        assert read.fingerprint == expected.fingerprint
        assert (read.embed_scale, read.layer(1).score_scale) == scales

    def test_shards_with_nothing_to_read_may_be_missing(self, tmp_path: Path) -> None:
        source = source_model("llama")
        save_checkpoint(source, tmp_path)
        expected = HeadWeights.from_checkpoint(tmp_path).fingerprint
        tensors = load_file(tmp_path / SINGLE)
        later = {name for name in tensors if ".mlp." in name and ".layers.0." not in name}
        assert len(later) == 6
        save_file({name: tensor for name, tensor in tensors.items() if name not in later}, tmp_path / "a.safetensors")
        files = {name: "gone.safetensors" if name in later else "a.safetensors" for name in tensors}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
        (tmp_path / SINGLE).unlink()
        assert HeadWeights.from_checkpoint(tmp_path).fingerprint == expected

    def test_without_a_tokenizer_token_ids_still_work(self, tmp_path: Path) -> None:
        source = source_model("llama")
        save_checkpoint(source, tmp_path, tokenizer=False)
        read = HeadWeights.from_checkpoint(tmp_path)
        assert read.tokenizer is None
        loaded = HeadWeights.from_model(hosted(source, "llama"))
        assert_same_scores(loaded, read)
        with pytest.raises(UsageError, match=r"The model has no tokenizer.*or give token ids"):
            relation_scores(read, Relation.from_pairs("words", [("big", "small")]), progress=False, preset="folded")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(source_model("llama"), tmp_path / "llama", shard_size="20KB")


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that were read."""
    names: list[str] = []
    stored = Shards.stored

    def noted(self: Shards, tensor: str) -> Tensor:
        names.append(tensor)
        return stored(self, tensor)

    monkeypatch.setattr(Shards, "stored", noted)
    return names


class TestLazy:
    ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

    def test_opening_reads_no_attention(self, folder: Path, touched: list[str]) -> None:
        HeadWeights.from_checkpoint(folder)
        assert not [name for name in touched if "self_attn" in name]
        assert {name for name in touched if ".mlp." in name} == {
            f"model.layers.0.mlp.{part}_proj.weight" for part in ("up", "gate", "down")
        }

    def test_a_layer_reads_itself(self, folder: Path, touched: list[str]) -> None:
        weights = HeadWeights.from_checkpoint(folder)
        touched.clear()
        weights.layer(1)
        expected = {f"model.layers.1.self_attn.{part}.weight" for part in self.ATTENTION}
        assert set(touched) == expected | {"model.layers.1.input_layernorm.weight"}

    def test_embedding_and_unembedding_stay_in_the_file(self, folder: Path) -> None:
        """The tensors lie in memory that the system has mapped from the shards."""
        weights = HeadWeights.from_checkpoint(folder)
        assert weights.mlp is not None
        maps = Path("/proc/self/maps")
        if not maps.exists():
            pytest.skip("the memory map of a process is only shown on Linux")
        spans = []
        for line in maps.read_text().splitlines():
            parts = line.split(maxsplit=5)
            if len(parts) == 6 and parts[5].startswith(str(folder)):
                spans.append([int(end, 16) for end in parts[0].split("-")])
        for tensor in (weights.W_E, weights.W_U, weights.mlp.W_in, weights.mlp.W_out):
            assert any(start <= tensor.data_ptr() < stop for start, stop in spans)
        assert not any(start <= weights.layer(1).W_V.data_ptr() < stop for start, stop in spans)


class TestDigests:
    def test_all_layers_are_hashed_once_per_checkpoint(self, folder: Path, touched: list[str], own_cache: Path) -> None:
        first = HeadWeights.from_checkpoint(folder).fingerprint
        assert [name for name in touched if ".layers.1.self_attn" in name]
        touched.clear()
        again = HeadWeights.from_checkpoint(folder)
        assert again.fingerprint == first
        assert not [name for name in touched if "self_attn" in name]
        assert len(list(own_cache.rglob("*.json"))) == 1

    def test_a_changed_file_is_hashed_again(self, folder: Path) -> None:
        before = HeadWeights.from_checkpoint(folder).fingerprint
        name = json.loads((folder / INDEX).read_text())["weight_map"]["model.layers.2.self_attn.k_proj.weight"]
        tensors = load_file(folder / name)
        changed = tensors["model.layers.2.self_attn.k_proj.weight"]
        changed.view(-1)[-1] += 1
        save_file(tensors, folder / name)
        assert HeadWeights.from_checkpoint(folder).fingerprint != before

    @pytest.mark.parametrize("rubbish", ["", "[]", '{"layer 0": 3}', '{"shared": "abc"}', "\0\0"])
    def test_a_damaged_cache_is_not_believed(self, rubbish: str, folder: Path, own_cache: Path) -> None:
        before = HeadWeights.from_checkpoint(folder).fingerprint
        (kept,) = own_cache.rglob("*.json")
        kept.write_text(rubbish)
        assert HeadWeights.from_checkpoint(folder).fingerprint == before

    def test_a_cache_that_cannot_be_written_costs_only_time(self, folder: Path, own_cache: Path) -> None:
        own_cache.write_text("a file where the folder should be")
        assert len(HeadWeights.from_checkpoint(folder).fingerprint) == 64


class TestTravel:
    def test_only_the_name_travels(self, folder: Path) -> None:
        weights = HeadWeights.from_checkpoint(folder)
        assert len(weights.fingerprint) == 64
        sent = pickle.dumps(weights)
        assert len(sent) < 1000
        received = pickle.loads(sent)
        assert received is pickle.loads(sent)
        assert_same_weights(weights, received)
        assert received.tokenizer is None, "workers get token ids"

    def test_a_loaded_model_does_not(self) -> None:
        weights = HeadWeights.from_model(random_model("llama", n_layers=1))
        with pytest.raises(UsageError, match=r"in this process and cannot be sent.*HeadWeights.from_checkpoint"):
            pickle.dumps(weights)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        if value is None:
            config.pop(name)
        else:
            config[name] = value
    (folder / "config.json").write_text(json.dumps(config))


def change_tensor(folder: Path, name: str, change: Any) -> None:
    """Replace a tensor (None drops it) in a folder with one file."""
    tensors = load_file(folder / SINGLE)
    changed = change(tensors.pop(name, None))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, folder / SINGLE)


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


class TestBadInput:
    @pytest.fixture
    def single(self, tmp_path: Path) -> Path:
        return save_checkpoint(source_model("llama"), tmp_path / "single")

    def refused(self, folder: Path | str, error: type[HeadMapsError], *parts: str) -> None:
        with pytest.raises(error) as caught:
            HeadWeights.from_checkpoint(folder)
        for part in parts:
            assert part in str(caught.value)

    def test_a_missing_shard(self, folder: Path) -> None:
        shard = sorted(folder.glob("model-*.safetensors"))[1]
        shard.unlink()
        self.refused(folder, ModelLoadError, f"The shard {shard.name} of", "is missing", f"Put it into {folder}")

    @pytest.mark.parametrize("field", ["num_attention_heads", "num_hidden_layers"])
    def test_a_config_without_heads_or_layers(self, single: Path, field: str) -> None:
        change_config(single, **{field: None})
        self.refused(single, UnsupportedModelError, f"{field} is missing", "cannot be split into heads")

    @pytest.mark.parametrize("value", [0, -4, "four", 2.5, [4], True])
    def test_a_config_with_rubbish_for_heads(self, single: Path, value: Any) -> None:
        change_config(single, num_attention_heads=value)
        self.refused(single, UnsupportedModelError, f"num_attention_heads is {value!r}", "a positive number")

    def test_a_config_with_rubbish_elsewhere(self, single: Path) -> None:
        change_config(single, rms_norm_eps="small", architectures="Llama")
        self.refused(single, UnsupportedModelError, "rms_norm_eps is 'small', but a positive number")

    def test_heads_that_do_not_fit(self, single: Path) -> None:
        change_config(single, num_key_value_heads=3)
        self.refused(single, UnsupportedModelError, "4 heads cannot share 3 key/value heads evenly")
        change_config(single, num_key_value_heads=4)
        self.refused_layer(single, "k_proj.weight", "has shape [16, 32], but its config.json implies [32, 32]")

    def refused_layer(self, folder: Path, *parts: str) -> None:
        weights = HeadWeights.from_checkpoint(folder)
        with pytest.raises(UnsupportedModelError) as caught:
            weights.layer(1)
        for part in parts:
            assert part in str(caught.value)

    @pytest.mark.parametrize("model_type", ["mamba", "rwkv", "", None, 3, ["llama"]])
    def test_other_architectures_are_refused_with_the_list(self, single: Path, model_type: Any) -> None:
        change_config(single, model_type=model_type)
        self.refused(single, UnsupportedModelError, f"of type {model_type!r}", ", ".join(ARCHITECTURES))

    def test_no_weights_at_all(self, single: Path) -> None:
        (single / SINGLE).unlink()
        self.refused(single, ModelLoadError, f"has neither {SINGLE} nor {INDEX}")

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}'])
    def test_a_damaged_index(self, folder: Path, text: str) -> None:
        (folder / INDEX).write_text(text)
        self.refused(folder, ModelLoadError, "is not an index of shards", "Fetch that file again")

    def test_a_symlink_loop(self, folder: Path, tmp_path: Path) -> None:
        loop = tmp_path / "loop"
        loop.symlink_to(loop)
        self.refused(loop, UsageError, "is not a folder with a checkpoint")
        shard = sorted(folder.glob("model-*.safetensors"))[0]
        shard.unlink()
        shard.symlink_to(shard.name)
        self.refused(folder, ModelLoadError, shard.name, "a broken link")

    def test_missing_tensors(self, single: Path) -> None:
        change_tensor(single, Q_PROJ, lambda old: None)
        self.refused(single, UnsupportedModelError, f"has no tensor {Q_PROJ!r}, which a LlamaForCausalLM has")

    @pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"])
    def test_missing_shared_tensors(self, single: Path, name: str) -> None:
        change_tensor(single, name, lambda old: None)
        self.refused(single, UnsupportedModelError, f"has no tensor {name!r}")

    def test_tensors_nobody_knows(self, single: Path) -> None:
        name = "model.layers.1.self_attn.sinks"
        change_tensor(single, name, lambda old: torch.zeros(4))
        self.refused(single, UnsupportedModelError, f"has a tensor {name!r}", "computes something else")

    def test_quantised(self, single: Path) -> None:
        change_tensor(single, Q_PROJ, lambda old: old.to(torch.int8))
        self.refused_layer(single, f"{Q_PROJ} of", "is stored as I8, a quantised type")
        change_tensor(single, Q_PROJ, lambda old: old.to(torch.float8_e4m3fn))
        self.refused_layer(single, "F8_E4M3, a quantised type")
        change_config(single, quantization_config={"quant_method": "gptq"})
        self.refused(single, UnsupportedModelError, "is a quantised checkpoint")

    @pytest.mark.parametrize(
        ("name", "called"),
        [
            ("model.embed_tokens.weight", "The embedding W_E"),
            ("lm_head.weight", "The unembedding W_U"),
            ("model.norm.weight", "The norm model.norm"),
            ("model.layers.0.mlp.up_proj.weight", "W_in of the first MLP"),
        ],
    )
    def test_nan(self, single: Path, name: str, called: str) -> None:
        def spoil(tensor: Tensor) -> Tensor:
            tensor.view(-1)[3] = float("nan")
            return tensor

        change_tensor(single, name, spoil)
        self.refused(single, UnsupportedModelError, f"{called} contains 1 NaN")

    def test_nan_in_a_layer_is_found_when_it_is_read(self, single: Path) -> None:
        change_tensor(single, Q_PROJ, lambda old: old * float("inf"))
        self.refused_layer(single, "W_Q of layer 1 contains")

    def test_an_embedding_of_another_width(self, single: Path) -> None:
        change_tensor(single, "lm_head.weight", lambda old: old[:, :31].contiguous())
        self.refused(single, UnsupportedModelError, "has shape [61, 31]", "rows of 32")

    def test_a_damaged_tokenizer(self, single: Path) -> None:
        (single / "tokenizer.json").write_text("{")
        self.refused(single, ModelLoadError, "The tokenizer of", "cannot be opened", "use token ids")

    def test_options_that_change_the_computation(self, tmp_path: Path) -> None:
        save_checkpoint(source_model("phi"), tmp_path)
        change_config(tmp_path, qk_layernorm=True)
        self.refused(tmp_path, UnsupportedModelError, "sets qk_layernorm, which normalises queries and keys")


@pytest.fixture(scope="module")
def from_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadWeights]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr(shards, "cache_folder", lambda: folder)
        yield HeadWeights.from_checkpoint(bundled.default_model_folder())


@pytest.mark.model
class TestTheDefaultModel:
    def test_every_tensor(self, from_disk: HeadWeights, default_weights: HeadWeights) -> None:
        assert_same_weights(default_weights, from_disk)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox", "gemma3"])
def test_every_analysis_of_weights_takes_a_checkpoint(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / kind
    save_checkpoint(source_model(kind), folder)
    from_files, loaded = HeadWeights.from_checkpoint(folder), random_model(kind)
    options = {"n_tokens": 5, "n_targets": 3, "progress": False}
    one, other = (salient_operations(source, **options) for source in (from_files, loaded))
    assert torch.equal(one.token_ids, other.token_ids) and torch.equal(one.promoted_ids, other.promoted_ids)
    assert name_heads(from_files, progress=False).names == name_heads(loaded, progress=False).names
    maps = [component_map(source, "stable_rank", progress=False) for source in (from_files, loaded)]
    assert maps[0].components == maps[1].components
    torch.testing.assert_close(maps[0].values, maps[1].values)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("metric", ["stable_rank", "relative_change"])
def test_component_maps_go_on_after_a_kill(by_head: bool, metric: str, tmp_path: Path) -> None:
    folder = save_checkpoint(source_model("llama"), tmp_path / "one")
    weights = HeadWeights.from_checkpoint(folder)
    against = None
    if metric == "relative_change":
        against = save_checkpoint(source_model("llama", seed=5), tmp_path / "other")
    call = partial(component_map, weights, by_head=by_head, progress=False)
    plain = call(metric, against=against)
    whole = call(metric, against=against, run_dir=tmp_path / "run")
    assert without_time_and_place(plain) == without_time_and_place(whole)
    (tmp_path / "run" / "layer-0001.safetensors").unlink()
    assert call(metric, against=against, run_dir=tmp_path / "run") == whole
    with pytest.raises(UsageError, match=r"started with options.metric = .*another folder"):
        call("frobenius", run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match=r"contribution runs texts .* leave run_dir out"):
        call("contribution", run_dir=tmp_path / "new")


def test_a_checkpoint_is_compared_with_a_folder_without_building_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [save_checkpoint(source_model("llama", seed=seed), tmp_path / str(seed)) for seed in (1, 2)]
    loaded = component_map(random_model("llama", seed=1), "relative_change", against=random_model("llama", seed=2))

    def built(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("tl_headmaps.analyses.component_map.load_model", built)
    found = component_map(HeadWeights.from_checkpoint(folders[0]), "relative_change", against=folders[1])
    torch.testing.assert_close(found.values, loaded.values)


def test_salient_operations_go_on_after_a_kill(tmp_path: Path) -> None:
    weights = HeadWeights.from_model(random_model("llama"))
    options = {"n_tokens": 4, "progress": False}
    whole = salient_operations(weights, run_dir=tmp_path / "run", **options)
    piece = next(path for path in sorted((tmp_path / "run").rglob("*")) if path.suffix == ".safetensors")
    piece.unlink()
    assert salient_operations(weights, run_dir=tmp_path / "run", **options) == whole


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("gpt2", "gpt2"),
        ("EleutherAI/pythia-70m", "EleutherAI/pythia-70m"),
        ("/home/me/models/mine", "mine"),
        ("~/models/mine/", "mine"),
        ("./models/mine", "mine"),
        ("/hub/models--EleutherAI--pythia-70m/snapshots/0123abc", "EleutherAI/pythia-70m"),
        ("/", "/"),
    ],
)
def test_results_do_not_tell_where_a_folder_lies(name: str, shown: str) -> None:
    assert shown_name(name) == shown


def test_what_is_saved_of_a_checkpoint_has_its_name_alone(tmp_path: Path) -> None:
    folder = save_checkpoint(source_model("llama"), tmp_path / "mine")
    result = describe_model(HeadWeights.from_checkpoint(folder))
    assert result.facts["model"] == result.provenance.model == "mine"
    for suffix in (".json", ".html"):
        assert str(tmp_path) not in result.save(tmp_path / f"model{suffix}").read_text(encoding="utf-8")
