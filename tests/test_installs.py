"""Loading a model installs nothing: multimodal checkpoints open as their language model or are refused.

Every load runs in a child process that ends at once, with its own exit code, if any installer is started: the real one
must never run here, whatever fails.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import TL_MAJOR, quiet, word_tokenizer

from tl_headmaps import HeadMapsError
from tl_headmaps.capture.loading import forbid_installs

ROOT = Path(__file__).parent.parent
INSTALLER_RAN = 99

PRELUDE = f"""
import json, os, subprocess, sys
start = subprocess.Popen.__init__
def never_install(self, args, *rest, **options):
    if any(word in str(args) for word in ("pip", "uv", "conda")):
        os._exit({INSTALLER_RAN})
    start(self, args, *rest, **options)
subprocess.Popen.__init__ = never_install
import torch
torch.set_grad_enabled(False)
from tl_headmaps import HeadMapsError, HeadWeights, load_model
"""

OPEN = """
import transformers
said = {}
for folder in sys.argv[1:]:
    try:
        model = load_model(folder, "cpu")
    except HeadMapsError as error:
        said[folder] = {"refused": str(error), "kind": type(error).__name__}
        continue
    whole = getattr(transformers, json.load(open(folder + "/config.json"))["architectures"][0])
    tokens = torch.tensor([[5, 9, 7, 30, 12]])
    theirs = whole.from_pretrained(folder, attn_implementation="eager").eval()(input_ids=tokens).logits
    ours = model(tokens)
    weights = HeadWeights.from_model(model)
    said[folder] = {
        "architecture": weights.architecture,
        "heads": [weights.n_layers, weights.n_heads],
        "difference": float((ours - theirs).abs().max() / theirs.abs().max()),
        "word": model.to_string(torch.tensor([9])),
    }
print(json.dumps(said))
"""

UNFORESEEN = """
import tl_headmaps.capture.loading as loading
loading.language_model_of = lambda where, name: None
try:
    load_model(sys.argv[1], "cpu")
    said = "loaded"
except HeadMapsError as error:
    said = str(error)
print(json.dumps({"said": said, "restored": subprocess.Popen.__init__ is never_install}))
"""

COMMAND = """
from tl_headmaps.cli.app import main
sys.argv = ["tl-headmaps", "model", "--model", sys.argv[1]]
main()
"""

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def gemma3() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config=TEXT | {"query_pre_attn_scalar": 24},
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_id=60,
        boi_token_id=61,
        eoi_token_id=62,
    )
    return Gemma3ForConditionalGeneration(config)


def llava() -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    text = TEXT | {"model_type": "llama"}
    vision = VISION | {"model_type": "clip_vision_model", "projection_dim": 16}
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_id=60))


def qwen2_vl() -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=60, video_token_id=61)
    )


def qwen3_5() -> Any:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = TEXT | {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 16}
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config=text,
            vision_config=vision,
            image_token_id=60,
            video_token_id=61,
            vision_start_token_id=62,
            vision_end_token_id=63,
        )
    )


def gemma4() -> Any:
    """In the shape of the 31B model: global layers have wider heads, whose keys serve as values."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    text = TEXT | {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0}
    text |= {"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    vision = {name: value for name, value in VISION.items() if name != "image_size"}
    vision |= {"num_key_value_heads": 2, "head_dim": 8}
    tokens = {f"{name}_token_id": 56 + place for place, name in enumerate(("eoa", "boa", "video", "audio", "image"))}
    config = Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, boi_token_id=61, eoi_token_id=62, **tokens
    )
    return Gemma4ForConditionalGeneration(config)


NEW = (qwen3_5, gemma4) if TL_MAJOR >= 4 else ()
"""TransformerLens 3 cannot tell the queries of the first from its gates."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    def save(make: Any) -> Path:
        folder = tmp_path_factory.mktemp(make.__name__)
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = make()
            for parameter in model.parameters():
                parameter.data += 0.1 * torch.randn_like(parameter)
            model.save_pretrained(folder)
            word_tokenizer(64).save_pretrained(folder)
        return folder

    return save


def child(script: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PRELUDE + script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode != INSTALLER_RAN, "an installer was started"
    return done


def test_multimodal_checkpoints_open_as_their_language_model_or_are_refused(saved: Callable[[Any], Path]) -> None:
    folders = {make.__name__: saved(make) for make in (gemma3, llava, qwen2_vl, *NEW)}
    broken = saved(gemma3)
    settings = json.loads((broken / "config.json").read_text())
    # The files of a text half with fewer layers than this: the third would have random weights.
    settings["text_config"]["num_hidden_layers"] = 3
    settings["text_config"].pop("layer_types", None)
    (broken / "config.json").write_text(json.dumps(settings))
    # And those of one with more layers: the second would be left out.
    shorter = saved(llava)
    settings = json.loads((shorter / "config.json").read_text())
    settings["text_config"]["num_hidden_layers"] = 1
    (shorter / "config.json").write_text(json.dumps(settings))
    done = child(OPEN, *folders.values(), broken, shorter)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    opens = {"gemma3": "Gemma3ForCausalLM", "llava": "LlamaForCausalLM"}
    opens |= {make.__name__: f"{make.__name__.capitalize()}ForCausalLM" for make in NEW}
    for name, architecture in opens.items():
        opened = said[str(folders[name])]
        assert opened.get("architecture") == architecture, opened
        assert opened["heads"] == [2, 4] and opened["word"] == " word9"
        assert opened["difference"] < 1e-5
    refused = said[str(folders["qwen2_vl"])]
    assert refused["kind"] == "UnsupportedModelError"
    assert "multimodal checkpoint (Qwen2VLForConditionalGeneration, with vision_config)" in refused["refused"]
    assert "no text-only class for its text half (qwen2_vl_text)" in refused["refused"]
    assert "Use a text-only checkpoint" in refused["refused"]
    assert "its files have no weights for model.language_model.layers.2." in said[str(broken)]["refused"]
    uncounted = said[str(shorter)].get("refused", "it was opened")
    assert "has a tensor 'model.language_model.layers.1.input_layernorm.weight' (and 8 more)" in uncounted
    assert "its config.json counts 1 of 'model.language_model.layers'" in uncounted


def test_an_unforeseen_path_to_pip_is_stopped_with_a_sentence(saved: Callable[[Any], Path]) -> None:
    # Without processor files, TransformerLens tries to install torchvision for any checkpoint that it boots whole.
    done = child(UNFORESEEN, saved(llava))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert "tried to run" in answer["said"] and "install torchvision" in answer["said"]
    assert "must not change what is installed here" in answer["said"] and "text-only checkpoint" in answer["said"]
    assert answer["restored"]


def test_the_command_line_says_the_same(saved: Callable[[Any], Path]) -> None:
    done = child(COMMAND, saved(qwen2_vl))
    assert done.returncode == 2 or done.returncode == 1, done.stdout
    assert "is a multimodal checkpoint" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run([sys.executable, "-m", "pip", "--version"], check=False),
        lambda: subprocess.check_call(["uv", "pip", "install", "nothing"]),
        lambda: subprocess.Popen("'/usr/bin/pip' install nothing", shell=True),
        lambda: os.system("conda install nothing"),
    ],
)
def test_the_guard_stops_every_way_to_start_an_installer(start: Callable[[], Any]) -> None:
    before = subprocess.Popen.__init__, os.system
    swallowed = []
    refused = pytest.raises(HeadMapsError, match="While loading 'some' TransformerLens tried to run")
    with refused, forbid_installs("some"):
        try:
            start()
        except Exception as error:
            swallowed.append(error)
    assert isinstance(swallowed[0], PermissionError)
    assert before == (subprocess.Popen.__init__, os.system)


def test_the_guard_lets_everything_else_through() -> None:
    with forbid_installs("some"):
        done = subprocess.run([sys.executable, "-c", "print('fine')"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "fine"
    with pytest.raises(KeyError, match="an error of the host"), forbid_installs("some"):
        raise KeyError("an error of the host")


def test_two_threads_leave_no_guard_behind() -> None:
    before = subprocess.Popen.__init__

    def load() -> None:
        for _ in range(50):
            with forbid_installs("some"):
                pass

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert subprocess.Popen.__init__ is before
