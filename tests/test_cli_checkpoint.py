"""``--checkpoint``, ``--run-dir`` and ``--workers`` on a small checkpoint."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import COMMANDS
from planted import save_checkpoint, source_model, word

from tl_headmaps.cli.app import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(source_model("llama"), tmp_path_factory.mktemp("cli") / "llama")


@pytest.fixture
def relation(tmp_path: Path) -> str:
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps([[source, source + 7] for source in range(3, 30)]))
    return str(path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """main() in this process: exit code, stdout, stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tl-headmaps", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def refused(answer: tuple[int, str, str], code: int, *parts: str) -> None:
    assert answer[0] == code and answer[1] == "" and "Traceback" not in answer[2]
    assert answer[2].startswith("tl-headmaps: ") and answer[2].count("\n") == 1
    for part in parts:
        assert part in answer[2]


def test_grid_and_model(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    arguments = ("--head", "L1H2", "--sources", word(5), "--targets", f"{word(9)},#7")
    code, out, _ = run("grid", *arguments, "--checkpoint", checkpoint, "--out", tmp_path / "grid.json")
    assert code == 0 and "L1H2 OV map" in out
    saved = json.loads((tmp_path / "grid.json").read_text())
    assert saved["token_ids"] == {"source": [5], "target": [9, 7]}
    assert saved["provenance"]["model"] == checkpoint.name
    code, out, _ = run("model", "--checkpoint", checkpoint)
    assert code == 0 and re.search(r"architecture\s+LlamaForCausalLM", out)


def test_a_run_that_goes_on_writes_the_same_bytes(run: Run, checkpoint: Path, relation: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = ["relations", relation, "--checkpoint", checkpoint, "--run-dir", run_dir, "--out"]
    code, first, _ = run(*command, tmp_path / "first.json")
    assert code == 0
    (run_dir / "layer-0001.safetensors").unlink()
    code, again, progress = run(*command, tmp_path / "again.json")
    assert (code, again) == (0, first)
    assert "2 of 3 layers were done before." in progress.splitlines()
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "first.json").read_bytes()

    refused(run(*command, tmp_path / "x.json", "--preset", "maps"), 2, "started with options.preset", "another folder")


def test_ranks_on_request(run: Run, checkpoint: Path, relation: str, tmp_path: Path) -> None:
    for options, there in ((["--ranks"], True), ([], False)):
        code, _, _ = run("relations", relation, *options, "--checkpoint", checkpoint, "--out", tmp_path / "s.json")
        assert code == 0
        assert ("promote_ranks" in json.loads((tmp_path / "s.json").read_text())) is there


def test_workers(checkpoint: Path, relation: str, tmp_path: Path, run: Run) -> None:
    """As a user starts it: worker processes must not run the command again."""
    command = ["relations", relation, "--checkpoint", str(checkpoint), "--out"]
    done = subprocess.run(
        [sys.executable, "-m", "tl_headmaps", *command, str(tmp_path / "two.json"), "--workers", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    code, out, _ = run(*command, tmp_path / "one.json")
    assert (code, out) == (0, done.stdout)
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    for values in (one, two):
        values["provenance"].pop("created")
    assert one == two


def test_wrong_usage(run: Run, checkpoint: Path, relation: str, tmp_path: Path) -> None:
    refused(run("model", "--checkpoint", checkpoint, "--model", "gpt2"), 2, "--model gpt2 and --checkpoint", "give one")
    refused(run("relations", relation, "--workers", "2"), 2, "--workers needs --checkpoint")
    refused(run("model", "--checkpoint", tmp_path), 2, "is not a folder with a checkpoint")
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"")
    refused(run("model", "--checkpoint", broken), 1, "damaged or incomplete")


RUNNING = {
    "head": ("L0H0",),
    "association": ("--text", "a b", "--query", "a", "--key", "b"),
    "compare-attention": ("--phrases", "a b=b", "--phrases", "a c=c", "--key", "a"),
    "groups": ("--text", "a b"),
    "mixing": ("--text", "a b", "--head", "L0H0"),
    "profile": ("--texts", "x.txt"),
    "trust": (),
    "worth": (),
    "tasks": (),
    "validate": ("antonym",),
    "ablate": ("antonym",),
    "reproduce": ("--out", "x"),
}
"""Commands that run the model, with what they cannot do without."""

WITHOUT_MODEL = {"cite", "compare", "doctor"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_a_checkpoint_or_says_why_not(run: Run, name: str) -> None:
    if name in RUNNING:
        answer = run(name, *RUNNING[name], "--checkpoint", "some/folder")
        refused(answer, 2, "This command runs the model", "--checkpoint only reads weights", "Use --model some/folder")
    elif name not in WITHOUT_MODEL:
        code, shown, _ = run(name, "--help")
        assert code == 0 and "--checkpoint" in shown


def test_without_a_tokenizer(run: Run, tmp_path: Path, relation: str) -> None:
    folder = save_checkpoint(source_model("llama", n_layers=1), tmp_path / "bare", tokenizer=False)
    code, _, _ = run("relations", relation, "--checkpoint", folder)
    assert code == 0
    refused(run("relations", "antonym", "--checkpoint", folder), 2, "The model has no tokenizer")
    code, out, _ = run("relations", "--list", "--checkpoint", folder)
    assert code == 0 and "antonym" in out
