"""Folders that must not reach TransformerLens: wrong numbers, pickles, files elsewhere, and former tracebacks."""

import json
import math
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import quiet, save_checkpoint, source_model
from safetensors.torch import load_file, save_file

from tl_headmaps import HeadMapsError, HeadWeights, Relation, load_model, relation_scores
from tl_headmaps.capture.checkpoint.shards import INDEX, SINGLE
from tl_headmaps.core.errors import ModelLoadError, UnsupportedModelError, UsageError

MLP = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(source_model("llama"), tmp_path_factory.mktemp("loading") / "llama")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def configured(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def retensored(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def loaded(folder: Path | str) -> Any:
    return load_model(str(folder), "cpu")


HOST = (loaded,)
BOTH = (loaded, HeadWeights.from_checkpoint)


def refused(folder: Path | str, *parts: str, error: type[HeadMapsError] = HeadMapsError, readers: Any = BOTH) -> None:
    """One sentence, whether TransformerLens was to open the folder or the weights alone."""
    for read in readers:
        with pytest.raises(error) as caught:
            read(folder)
        for part in parts:
            assert part in str(caught.value), caught.value


def test_a_sound_folder_opens_with_its_own_numbers(folder: Path) -> None:
    model = load_model(str(folder), "cpu")
    tokens = torch.tensor([[3, 4, 5]])
    assert torch.allclose(model(tokens), source_model("llama")(tokens).logits, atol=1e-5)
    assert load_model(folder, "cpu").cfg.model_name == model.cfg.model_name, "a path is a name, too"


class TestWrongNumbers:
    """The host fills what is missing with random numbers, and says so in a log at most."""

    def test_a_missing_tensor(self, folder: Path) -> None:
        retensored(folder, lambda tensors: tensors.pop(MLP))
        refused(
            folder, f"has no tensor {MLP!r}", "Use a complete checkpoint", error=UnsupportedModelError, readers=HOST
        )

    def test_one_layer_too_many(self, folder: Path) -> None:
        configured(folder, num_hidden_layers=4)
        refused(folder, "has no tensor 'model.layers.3.", "(and 8 more)", readers=HOST)

    def test_one_layer_too_few(self, folder: Path) -> None:
        """The host opened a shorter model, and said so in a log at most."""
        configured(folder, num_hidden_layers=2)
        said = ("has a tensor 'model.layers.2.", "(and 8 more)", "counts 2 of 'model.layers'")
        refused(folder, *said, error=UnsupportedModelError)
        # A layer that predicts several tokens at once is not one of those that the configuration counts.
        retensored(folder, lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.zeros(32, 64)}))
        assert load_model(str(folder), "cpu").cfg.n_layers == HeadWeights.from_checkpoint(folder).n_layers == 2

    def test_one_layer_too_few_without_the_prefix_of_the_body(self, tmp_path: Path) -> None:
        save_checkpoint(source_model("gpt2"), tmp_path)
        tensors = {name.removeprefix("transformer."): x for name, x in load_file(tmp_path / SINGLE).items()}
        save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
        configured(tmp_path, n_layer=2)
        refused(tmp_path, "has a tensor 'h.2.", "counts 2 of 'h'")

    def test_another_shape(self, folder: Path) -> None:
        retensored(folder, lambda tensors: tensors.update({MLP: torch.zeros(3, 5)}))
        refused(folder, f"{MLP} of", "has shape [3, 5], but its config.json implies", readers=HOST)

    def test_a_tensor_that_the_configuration_leaves_out(self, folder: Path) -> None:
        name = "model.layers.0.self_attn.q_proj.bias"
        retensored(folder, lambda tensors: tensors.update({name: torch.ones(32)}))
        refused(folder, f"has a tensor {name!r}", "compute something else")

    def test_a_base_model_without_its_unembedding(self, tmp_path: Path) -> None:
        with quiet():
            source_model("llama").model.save_pretrained(tmp_path)
        configured(tmp_path, architectures=["LlamaForCausalLM"], tie_word_embeddings=False)
        refused(tmp_path, "has no tensor 'lm_head.weight'", readers=HOST)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e400])
    @pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta", "initializer_range"])
    def test_settings_that_are_no_numbers(self, folder: Path, field: str, value: float) -> None:
        configured(folder, **{field: value})
        refused(folder, f"{field} is {value}, but a finite number was expected")

    def test_nested_settings(self, folder: Path) -> None:
        configured(folder, rope_scaling={"rope_type": "linear", "factor": math.nan})
        refused(folder, "rope_scaling.factor is nan")

    @pytest.mark.parametrize("eps", [0, -1e-5, 0.5, 1e30])
    def test_an_epsilon_out_of_range(self, folder: Path, eps: float) -> None:
        configured(folder, rms_norm_eps=eps)
        with pytest.raises(UnsupportedModelError, match=r"rms_norm_eps is .*positive number up to 0\.1"):
            HeadWeights.from_checkpoint(folder)

    @pytest.mark.parametrize(
        ("large", "circuit"), [("embed_tokens", "ov"), ("embed_tokens", "qk"), ("v_proj", "ov"), ("k_proj", "qk")]
    )
    def test_a_map_that_is_not_finite_is_refused_wherever_it_comes_from(
        self, folder: Path, large: str, circuit: str
    ) -> None:
        """Finite weights whose products overflow."""
        relation = Relation.from_pairs("next", [(number, number + 1) for number in range(3, 30)])
        names = {
            "embed_tokens": ("model.embed_tokens.weight",),
            "v_proj": ("model.layers.1.self_attn.v_proj.weight", "lm_head.weight"),
            "k_proj": ("model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"),
        }[large]
        retensored(folder, lambda tensors: tensors.update({name: tensors[name] * 1e25 for name in names}))
        weights = HeadWeights.from_checkpoint(folder)
        with pytest.raises(UnsupportedModelError, match="not finite"):
            relation_scores(weights, relation, circuit=circuit, progress=False, preset="folded")


class TestOpened:
    """What must not be opened: pickles, and files outside the folder."""

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
    def test_pickles(self, folder: Path, tmp_path: Path, name: str) -> None:
        class Trap:
            def __reduce__(self) -> Any:
                return Path.touch, (tmp_path / "sprung",)

        (folder / SINGLE).unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": Trap()}))
        if name.endswith(".json"):
            (folder / "pytorch_model.bin").rename(folder / "part.bin")
            (folder / name).write_text(json.dumps({"weight_map": {"lm_head.weight": "part.bin"}}))
        refused(folder, "a pickle, which can run code", "only .safetensors are read", error=ModelLoadError)
        assert not (tmp_path / "sprung").exists()

    @pytest.mark.parametrize("file", ["/etc/passwd", "../elsewhere/model.safetensors", "model.bin", ".", "", 3, None])
    def test_an_index_that_leads_elsewhere(self, folder: Path, tmp_path: Path, file: Any) -> None:
        (tmp_path / "elsewhere").mkdir()
        (folder / SINGLE).rename(tmp_path / "elsewhere" / SINGLE)
        tensors = load_file(tmp_path / "elsewhere" / SINGLE)
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file)}))
        refused(folder, f"lists {file!r} as a shard", "a plain file name", error=ModelLoadError)

    def test_links_out_of_the_folder(self, folder: Path, tmp_path: Path) -> None:
        (folder / SINGLE).rename(tmp_path / SINGLE)
        (folder / SINGLE).symlink_to(tmp_path / SINGLE)
        refused(folder, f"is a link to {tmp_path / SINGLE}, outside the folder", error=ModelLoadError)

    def test_links_of_the_hubs_cache_stay_in_their_repository(self, sound: Path, tmp_path: Path) -> None:
        snapshot = tmp_path / "models--some--model" / "snapshots" / ("c" * 40)
        blobs = tmp_path / "models--some--model" / "blobs"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for number, path in enumerate(sorted(sound.iterdir())):
            shutil.copy(path, blobs / str(number))
            (snapshot / path.name).symlink_to(f"../../blobs/{number}")
        assert HeadWeights.from_checkpoint(snapshot).n_layers == 3
        assert load_model(str(snapshot), "cpu").cfg.n_layers == 3

    def test_two_sets_of_weights(self, folder: Path) -> None:
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(folder / SINGLE), SINGLE)}))
        refused(folder, f"has both {SINGLE} and {INDEX}")

    def test_an_index_that_is_wrong_about_a_shard(self, folder: Path) -> None:
        (folder / SINGLE).rename(folder / "one.safetensors")
        files = dict.fromkeys([*load_file(folder / "one.safetensors"), "nothing.weight"], "one.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": files}))
        refused(folder, "has no tensor 'nothing.weight', but", readers=HOST)

    def test_weights_named_elsewhere(self, folder: Path) -> None:
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/elsewhere"}))
        refused(folder, "has adapter_config.json, which names weights outside", readers=HOST)
        (folder / "adapter_config.json").unlink()
        configured(folder, transformers_weights="other.safetensors")
        refused(folder, "transformers_weights in its config.json", readers=HOST)

    def test_code_of_a_folder_does_not_run(self, folder: Path, tmp_path: Path) -> None:
        (folder / "modeling.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
        configured(
            folder, model_type="own", auto_map={"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}
        )
        refused(folder, "could not load", readers=HOST)
        assert not (tmp_path / "sprung").exists()


class TestSentences:
    def test_a_truncated_file(self, folder: Path) -> None:
        data = (folder / SINGLE).read_bytes()
        for size in (0, 7, 100, len(data) // 2, len(data) - 1):
            (folder / SINGLE).write_bytes(data[:size])
            refused(folder, "cannot be read as safetensors", "Fetch that file again", error=ModelLoadError)

    @pytest.mark.parametrize("value", [0, -1, 10**9, 2.5, "three", True, [3]])
    def test_a_number_of_layers_that_cannot_be(self, folder: Path, value: Any) -> None:
        configured(folder, num_hidden_layers=value)
        started = time.process_time()
        refused(folder, f"num_hidden_layers is {value!r}", "a number from 1 to 30 was expected", readers=HOST)
        refused(folder, f"num_hidden_layers is {value!r}")
        assert time.process_time() - started < 1

    @pytest.mark.parametrize(
        "changes", [{"rms_norm_eps": -1.0}, {"rms_norm_eps": 1e30}, {"rope_parameters": {"rope_theta": 0}}]
    )
    def test_settings_out_of_range(self, folder: Path, changes: dict[str, Any]) -> None:
        configured(folder, **changes)
        refused(folder, "was expected. Use a checkpoint with a complete configuration", error=UnsupportedModelError)

    @pytest.mark.parametrize(
        "text", ["{", "[]", "null", "[" * 100_000, '{"a": 1' + "0" * 5000 + "}", '{"a": "\\ud800"}']
    )
    def test_a_damaged_configuration(self, folder: Path, text: str) -> None:
        (folder / "config.json").write_text(text)
        refused(folder, "config.json", "Fetch the checkpoint again", error=ModelLoadError)

    @pytest.mark.parametrize("name", ["~nosuch/x", "/nonexistent", "x" * 5000, "a\0b", "/" + "y" * 300])
    def test_no_folder(self, name: str) -> None:
        refused(name, error=UsageError)

    @pytest.mark.parametrize("device", ["meta", "cuda:99", "nothing", "", "cpu:x", "mps"])
    def test_devices(self, folder: Path, device: str) -> None:
        for call in (lambda: load_model(str(folder), device), lambda: load_model(None, device)):
            with pytest.raises(UsageError, match="cannot be used here"):
                call()
        with pytest.raises(UsageError, match="cannot be used here"):
            HeadWeights.from_checkpoint(folder, device=device)

    @pytest.mark.parametrize(
        "changes",
        [
            {"hidden_size": 10**12},
            {"hidden_size": 7},
            {"num_attention_heads": 10**9},
            {"num_attention_heads": 0},
            {"num_key_value_heads": 3},
            {"vocab_size": -1},
            {"vocab_size": 10**15},
            {"hidden_act": "nothing"},
            {"model_type": "nothing"},
            {"model_type": 3},
            {"rope_scaling": {"rope_type": "nothing"}},
            {"max_position_embeddings": "x"},
            {"quantization_config": {"quant_method": "gptq"}},
        ],
        ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items())[:40],
    )
    def test_other_settings(self, folder: Path, changes: dict[str, Any]) -> None:
        configured(folder, **changes)
        refused(folder, readers=HOST)

    def test_steps_are_no_epsilons(self, folder: Path) -> None:
        configured(folder, warmup_steps=500)
        assert HeadWeights.from_checkpoint(folder).n_layers == 3

    def test_what_the_host_says_is_said_whole(self, folder: Path) -> None:
        configured(folder, hidden_size=33)
        refused(folder, "could not load", "33", "Check the name, the network, or give a folder.", readers=HOST)

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {"type": "nothing"}}'])
    def test_damaged_tokenizers(self, folder: Path, text: str) -> None:
        (folder / "tokenizer.json").write_text(text)
        refused(folder, "could not load", readers=HOST)
