"""``--checkpoint``, ``--run-dir`` and ``--workers`` on a small checkpoint."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import COMMANDS
from planted import save_checkpoint, source_model, word


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(source_model("llama"), tmp_path_factory.mktemp("cli") / "llama"))


@pytest.fixture
def relation(tmp_path: Path) -> str:
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps([[source, source + 7] for source in range(3, 30)]))
    return str(path)


def test_grid_and_model(run: Any, checkpoint: str, tmp_path: Path) -> None:
    out = tmp_path / "grid.json"
    words = ("--sources", word(5), "--targets", f"{word(9)},#7")
    done = run("grid", "L1H2", *words, "--checkpoint", checkpoint, "--out", str(out))
    assert done.code == 0 and "L1H2 OV map" in done.out
    saved = json.loads(out.read_text())
    assert saved["token_ids"] == {"source": [5], "target": [9, 7]}
    assert saved["provenance"]["model"] == Path(checkpoint).name
    done = run("model", "--checkpoint", checkpoint)
    assert done.code == 0 and re.search(r"architecture\s+LlamaForCausalLM", done.out)


def test_a_run_that_goes_on_writes_the_same_bytes(run: Any, checkpoint: str, relation: str, tmp_path: Path) -> None:
    run_dir, first, again = tmp_path / "run", tmp_path / "first.json", tmp_path / "again.json"
    command = ["relations", relation, "--checkpoint", checkpoint, "--run-dir", str(run_dir), "--out"]
    done = run(*command, str(first))
    assert done.code == 0
    (run_dir / "layer-0001.safetensors").unlink()
    resumed = run(*command, str(again))
    assert (resumed.code, resumed.out) == (0, done.out)
    assert "2 of 3 layers were done before." in resumed.err.splitlines()
    assert again.read_bytes() == first.read_bytes()
    other = run(*command, str(again), "--preset", "maps")
    other.assert_refused(2, "started with options.preset", "another folder")


def test_ranks_on_request(run: Any, checkpoint: str, relation: str, tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    for options, there in ((["--ranks"], True), ([], False)):
        assert run("relations", relation, *options, "--checkpoint", checkpoint, "--out", str(out)).code == 0
        assert ("promote_ranks" in json.loads(out.read_text())) is there


def test_workers(run: Any, checkpoint: str, relation: str, tmp_path: Path) -> None:
    """As a user starts it: worker processes must not run the command again."""
    command = ["relations", relation, "--checkpoint", checkpoint, "--out"]
    started = [sys.executable, "-m", "tl_headmaps", *command, str(tmp_path / "two.json"), "--workers", "2"]
    two = subprocess.run(started, capture_output=True, text=True, check=False)
    assert two.returncode == 0, two.stderr
    one = run(*command, str(tmp_path / "one.json"))
    assert (one.code, one.out) == (0, two.stdout)
    values = [json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json")]
    for each in values:
        each["provenance"].pop("created")
    assert values[0] == values[1]


def test_wrong_usage(run: Any, checkpoint: str, relation: str, tmp_path: Path) -> None:
    both = ("model", "--checkpoint", checkpoint, "--model", "gpt2")
    run(*both).assert_refused(2, "--model gpt2 and --checkpoint", "give one")
    run("relations", relation, "--workers", "2").assert_refused(2, "--workers needs --checkpoint")
    run("model", "--checkpoint", str(tmp_path)).assert_refused(2, "is not a folder with a checkpoint")
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"")
    run("model", "--checkpoint", str(broken)).assert_refused(1, "damaged or incomplete")


READING = {"components", "demo", "grid", "model", "name-heads", "relations", "salient"}
"""Commands that weights are enough for."""

WITHOUT_MODEL = {"cite", "compare"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_a_checkpoint_or_says_why_not(run: Any, name: str) -> None:
    options = {
        option for entry in COMMANDS[name].params for option in entry.opts if not getattr(entry, "hidden", False)
    }
    assert ("--checkpoint" in options) is (name in READING)
    if name not in READING | WITHOUT_MODEL:
        refused = run(name, "--checkpoint", "some/folder")
        refused.assert_refused(2, "This command runs the model", "only reads weights", "Use --model some/folder")


def test_without_a_tokenizer(run: Any, tmp_path: Path, relation: str) -> None:
    folder = str(save_checkpoint(source_model("llama", n_layers=1), tmp_path / "bare", tokenizer=False))
    assert run("relations", relation, "--checkpoint", folder).code == 0
    run("relations", "antonym", "--checkpoint", folder).assert_refused(2, "The model has no tokenizer")
    done = run("relations", "--list", "--checkpoint", folder)
    assert done.code == 0 and "antonym" in done.out
