"""The commands groups, profile, mixing and association: what they print, write and refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import CREATED

import tl_headmaps
from tl_headmaps import Result

pytestmark = pytest.mark.model

TEXT = "Birds sometimes walk in the old garden"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, default_model: Any) -> None:
    monkeypatch.setattr(tl_headmaps, "load_model", lambda *_: default_model)


def test_groups_prints_and_writes(run: Any, opened: None, tmp_path: Path) -> None:
    files = [tmp_path / "g.json", tmp_path / "again.json"]
    for file in files:
        done = run("groups", "--text", TEXT, "--heads", "L5H3,L25H8", "--n-groups", "2", "--out", str(file))
        assert done.code == 0 and "attention sink '<|im_start|>'" in done.out, done
    values = json.loads(files[0].read_text("utf-8"))
    assert values["kind"] == "attention_groups" and values["head_to_group"].keys() == {"L5H3", "L25H8"}
    assert sorted(token for group in values["groups"] for token in group) == [1, 2, 3, 4, 5, 6, 7]
    assert len(values["groups"]) == 2
    bare = [CREATED.sub(b"", file.read_bytes()) for file in files]
    assert bare[0] == bare[1]
    assert str(Result.load(files[0])) in done.out


def test_groups_of_layers(run: Any, opened: None) -> None:
    done = run("groups", "--text", TEXT, "--layers", "3", "--keep-sink", "--n-null", "0", "--no-prepend-bos")
    assert done.code == 0 and "9 heads" in done.out and "and is kept" in done.out


def test_profile_reads_a_file(run: Any, opened: None, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text(f"{TEXT}\n\nThe dog barked. The dog slept.", encoding="utf-8")
    done = run("profile", "--texts", str(texts))
    assert done.code == 0 and "2 texts" in done.out and "induction" in done.out
    done = run("profile", "--texts", str(texts), "--max-texts", "1", "--max-tokens", "4")
    assert done.code == 0 and "1 texts, 4 tokens, 1 cut" in done.out


def test_mixing_prints_the_worked_example(run: Any, opened: None, tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    arguments = ("--text", "Birds sometimes walk", "--query", "walk", "--key", "Birds")
    done = run("mixing", *arguments, "--head", "L5H3", "--out", str(file))
    assert done.code == 0 and "What attention does to 'walk', seen from 'Birds'" in done.out
    values = json.loads(file.read_text("utf-8"))
    assert (values["kind"], values["head"], values["axes"]["query"], values["key"]) == ("value_mixing", "L5H3", [3], 1)
    assert values["reconstruction_error"] < 1e-5
    done = run("association", *arguments, "--measure", "dot")
    assert done.code == 0 and "bring 'walk' closer to 'Birds' (dot" in done.out


def test_compare_attention_and_dimensions(run: Any, opened: None, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    phrases = ("--phrases", "But birds sometimes walk=walk", "--phrases", "But birds are good at flying=flying")
    done = run(
        "compare-attention", *phrases, "--key", "birds", "--control", "Why do birds like math=math", "--out", str(file)
    )
    assert done.code == 0 and "Control: 'walk' and 'math'" in " ".join(done.out.split()), done
    assert json.loads(file.read_text("utf-8"))["axes"]["word"] == ["walk", "flying", "math"]
    arguments = (
        "--text",
        "But birds walk or go flying, not math",
        "--head",
        "L13H8",
        "--query",
        "walk",
        "--key",
        "birds",
    )
    done = run("mixing", *arguments, "--against", "flying", "--control", "math")
    assert done.code == 0 and "of their 8 strongest dimensions" in done.out, done
    run("mixing", *arguments, "--against", "flying", "--out", str(file)).assert_refused(2, "Leave --out out")


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["compare-attention", "--phrases", "a b=b"], "--key"),
        (["groups"], "--text"),
        (["association", "--text", TEXT, "--query", "walk"], "--key"),
    ],
)
def test_a_missing_option_is_named(run: Any, never_loaded: None, arguments: list[str], option: str) -> None:
    run(*arguments).assert_failed(2, f"Missing option '{option}'")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["profile", "--texts", "missing.txt"], ["There is no file missing.txt"]),
        (["groups", "--text", TEXT, "--heads", "5.3"], ["'5.3' is not the name of a head"]),
        (["groups", "--text", TEXT, "--layers", "x"], ["'x' is not the number of a layer"]),
        (["groups", "--text", TEXT, "--out", "g.xyz"], ["the suffix chooses"]),
        (["mixing", "--text", TEXT, "--head", "5.3"], ["'5.3' is not the name of a head"]),
        (["mixing", "--text", TEXT, "--head", "L5H3", "--control", "old"], ["Give --against, too"]),
        (["mixing", "--text", TEXT, "--head", "L5H3", "--against", "old"], ["Give --query and --key, too"]),
        (["compare-attention", "--phrases", "Birds walk", "--key", "birds"], ["'Birds walk' has no query"]),
        (
            ["compare-attention", "--phrases", "Birds walk=walk", "--phrases", "Birds walk=-1", "--key", "Birds"],
            ["'Birds walk' was given twice, with 'walk' and -1"],
        ),
    ],
)
def test_wrong_usage_is_seen_before_the_model_is_loaded(
    run: Any,
    never_loaded: None,
    arguments: list[str],
    parts: list[str],
) -> None:
    run(*arguments).assert_refused(2, *parts)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["groups", "--text", ""], ["is empty"]),
        (["groups", "--text", "Birds"], ["has 1 token"]),
        (["groups", "--text", TEXT, "--heads", "L99H0"], ["There is no head L99H0"]),
        (["mixing", "--text", TEXT, "--head", "L5H3", "--query", "fly"], ["'fly' is not a token of the text"]),
        (["association", "--text", "walk or walk", "--query", "walk", "--key", "or"], ["positions 1, 3", "walk#2"]),
    ],
)
def test_what_cannot_be_done_is_a_sentence(
    run: Any,
    opened: None,
    arguments: list[str],
    parts: list[str],
) -> None:
    run(*arguments).assert_refused(2, *parts)
