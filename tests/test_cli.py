"""The command line: what it prints and writes, and that every failure is a sentence and an exit code."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import COMMANDS, GRID, Run
from planted import save_checkpoint, shared_model, source_model

import tl_headmaps
from tl_headmaps import Result, TokenGrid
from tl_headmaps.capture import bundled

pytestmark = [
    pytest.mark.model,
    # Waiting for transformer-lens 3, which announces the end of its own class at the caller's line.
    pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated:DeprecationWarning"),
]

PATIENCE = 300
"""Seconds for a real run; it takes about fifteen on two cores."""

TEXT = "Birds sometimes walk in the old garden"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, default_model: Any) -> None:
    monkeypatch.setattr(tl_headmaps, "load_model", lambda *_: default_model)


class TestGrid:
    def test_prints_an_aligned_table(self, run: Any, loaded: Any) -> None:
        done = run(*GRID)
        assert (done.code, done.err) == (0, "")
        lines = done.out.splitlines()
        header, rows = lines[2], lines[4:7]
        assert header.split() == ["Cairo", "Paris", "Berlin"]
        assert [row.split()[0] for row in rows] == ["France", "Germany", "Egypt"]
        for target, row, rank in (("Paris", rows[0], 3), ("Berlin", rows[1], 9), ("Cairo", rows[2], 7)):
            end = header.index(target) + len(target)
            assert row[:end].endswith(f" #{rank}"), "columns are right-aligned under their titles"
            assert row.count("*") == 1
        assert "49,152 tokens" in lines[-1]
        assert all(line == line.rstrip() for line in lines)
        assert loaded == [(None, None)]

    def test_options_reach_the_analysis(self, run: Any, loaded: Any) -> None:
        done = run(*GRID, "--preset", "maps", "--model", "some/name", "--device", "cpu")
        assert done.code == 0
        assert "preset maps" in done.out and "#19" in done.out
        assert loaded == [("some/name", "cpu")]

    def test_ids_and_words_with_spaces(self, run: Any, loaded: Any) -> None:
        done = run(*grid_with(head="l23h4", sources="#4649, France ,"))
        assert done.code == 0
        rows = done.out.splitlines()[4:6]
        assert rows[0].split() == rows[1].split(), "token 4649 is France"

    def test_writes_what_it_printed(self, run: Any, loaded: Any, tmp_path: Path) -> None:
        as_json, as_csv = tmp_path / "new" / "grid.json", tmp_path / "grid.csv"
        done = run(*GRID, "--out", str(as_json), "--out", str(as_csv))
        assert done.code == 0
        assert done.err == f"Wrote {as_json}\nWrote {as_csv}\n"
        values = json.loads(as_json.read_text(encoding="utf-8"))
        assert str(TokenGrid.load(as_json)) == done.out.rstrip("\n")
        rows = list(csv.DictReader(as_csv.read_text(encoding="utf-8").splitlines()))
        assert [row["rank"] for row in rows] == [str(rank) for row in values["ranks"] for rank in row]


def test_a_model_tells_what_was_detected_and_has_a_page(run: Any, loaded: Any, tmp_path: Path) -> None:
    files = [tmp_path / f"model{suffix}" for suffix in (".json", ".html", ".svg")]
    done = run("model", *(part for path in files for part in ("--out", str(path))))
    assert done.code == 0
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in done.out.splitlines())
    assert facts["model"] == bundled.NAME
    assert facts["layers"] == "30"
    assert facts["heads"] == "9 per layer, 270 in all"
    assert facts["key/value heads"] == "3 per layer, each read by 3 heads"
    assert facts["weight basis"] == "raw"
    assert facts["norm before attention"].startswith("RMSNorm")
    assert facts["first MLP"] == "gated silu, width 1536"
    saved = json.loads(files[0].read_text())
    assert saved["kind"] == "model_description" and saved["facts"] == facts
    assert all(path.stat().st_size > 500 for path in files)


def test_relations_have_a_page_and_further_columns(run: Any, loaded: Any, tmp_path: Path) -> None:
    page = tmp_path / "scores.html"
    command = ("relations", "country_to_capital", "--heads", "L23H4,L23H5", "--out", str(page))
    done, full = run(*command), run(*command, "--full")
    assert done.code == full.code == 0
    assert "neighbour" in full.out.splitlines()[2] and "neighbour" not in done.out.splitlines()[2]
    assert "Highest: L23H4 0.7381" in page.read_text(encoding="utf-8")


def test_salient_operations_and_names(run: Any, loaded: Any, monkeypatch: Any, tmp_path: Path) -> None:
    done = run("salient", "--heads", "L23H4", "--preset", "maps", "--n-tokens", "3", "--n-targets", "2")
    assert done.code == 0 and "' Italian'" in done.out, done
    monkeypatch.setattr(tl_headmaps, "load_model", lambda *_: shared_model("llama"))
    done = run("name-heads", "--out", str(tmp_path / "names.csv"))
    assert done.code == 0, done
    assert "60-96% of later ones" in done.out
    with (tmp_path / "names.csv").open(newline="", encoding="utf-8") as stream:
        assert {"layer", "head", "name", "score"} <= set(next(csv.DictReader(stream)))


@pytest.mark.usefixtures("opened")
class TestAttention:
    def test_groups(self, run: Any, tmp_path: Path) -> None:
        file = tmp_path / "g.json"
        done = run("groups", "--text", TEXT, "--heads", "L5H3,L25H8", "--n-groups", "2", "--out", str(file))
        assert done.code == 0 and "attention sink '<|im_start|>'" in done.out, done
        values = json.loads(file.read_text("utf-8"))
        assert values["kind"] == "attention_groups" and values["head_to_group"].keys() == {"L5H3", "L25H8"}
        assert sorted(token for group in values["groups"] for token in group) == [1, 2, 3, 4, 5, 6, 7]
        assert len(values["groups"]) == 2 and str(Result.load(file)) in done.out
        done = run("groups", "--text", TEXT, "--layers", "3", "--keep-sink", "--n-null", "0", "--no-prepend-bos")
        assert done.code == 0 and "9 heads" in done.out and "and is kept" in done.out

    def test_compare_attention_and_dimensions(self, run: Any, tmp_path: Path) -> None:
        file = tmp_path / "c.json"
        phrases = ("--phrases", "But birds sometimes walk=walk", "--phrases", "But birds are good at flying=flying")
        control = ("--control", "Why do birds like math=math")
        done = run("compare-attention", *phrases, "--key", "birds", *control, "--out", str(file))
        assert done.code == 0 and "Control: 'walk' and 'math'" in " ".join(done.out.split()), done
        assert json.loads(file.read_text("utf-8"))["axes"]["word"] == ["walk", "flying", "math"]
        arguments = ("--text", "But birds walk or go flying, not math", "--query", "walk", "--key", "birds")
        done = run("mixing", "L13H8", *arguments, "--against", "flying", "--control", "math")
        assert done.code == 0 and "of their 8 strongest dimensions" in done.out, done
        again = run("mixing", "L13H8", *arguments, "--against", "flying", "--out", str(file))
        again.assert_refused(2, "Leave --out out")


class TestTopLevel:
    def test_version(self, run: Any) -> None:
        assert run("--version") == Run(0, f"tl-headmaps {tl_headmaps.__version__}\n", "")

    def test_help_names_every_command(self, run: Any) -> None:
        done = run("--help")
        assert done.code == 0
        for name in COMMANDS:
            assert re.search(rf"^\s+{name}\s", done.out, re.MULTILINE), f"{name} is not in the help"

    def test_no_command_is_wrong_usage(self, run: Any) -> None:
        done = run()
        assert done.code == 2 and "Usage: " in done.out + done.err


def grid_with(**options: str) -> list[str]:
    """The usual command with some options changed."""
    chosen = {"head": "L23H4", "sources": "France", "targets": "Paris", "preset": "folded", **options}
    return ["grid", *(part for name, value in chosen.items() for part in (f"--{name}", value))]


MIXING = ["mixing", "L5H3", "--text", TEXT]


class TestWrongUsage:
    """Exit 2."""

    @pytest.mark.usefixtures("never_loaded")
    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            (grid_with(head="23.4"), ["'23.4' is not the name of a head", "L23H4"]),
            (grid_with(head="L23"), ["'L23' is a layer, and one head is needed", "'L23H0'"]),
            (grid_with(out="grid.txt"), ["--out grid.txt", ".json, .csv"]),
            (grid_with(out="grid"), ["--out grid:", ".json, .csv"]),
            (["model", "--out", "model.xlsx"], ["--out model.xlsx", ".json, .csv"]),
            (["model", "--out", "x" * 300 + ".json"], ["--out"]),
            *(([name, "--out", out], [out]) for name in ("demo", "reproduce") for out in ("~no/x", "/dev/null")),
            (["tasks", "--verify", "--n-items", "0"], ["n_items=0 is impossible; it must be at least 1"]),
            (["groups", "--text", TEXT, "--layers", "x"], ["'x' is not the number of a layer"]),
            (["profile", "--texts", "missing.txt"], ["There is no file missing.txt"]),
            (["validate", "capital"], ["There is no relation 'capital'. Did you mean"]),
            ([*MIXING, "--control", "old"], ["Give --against, too"]),
            ([*MIXING, "--against", "old"], ["Give --query and --key, too"]),
            (["compare-attention", "--phrases", "Birds walk", "--key", "birds"], ["'Birds walk' has no query"]),
            (
                ["compare-attention", "--phrases", "Birds walk=walk", "--phrases", "Birds walk=-1", "--key", "Birds"],
                ["'Birds walk' was given twice, with 'walk' and -1"],
            ),
            (["salient"], ["Say which heads: L23H4,L23H2 (or --heads L23H4,L23H2), --layers 12, or --all"]),
            (["salient", "--all", "--heads", "L0H0"], ["Say which heads"]),
            *(
                (["relations", "antonym", *option], [f"{option[0]} is about the bundled relations, and antonym was"])
                for option in (["--category", "linguistic"], ["--list"])
            ),
        ],
        ids=lambda value: " ".join(value)[:40] if isinstance(value, list) and value[0] in COMMANDS else "-",
    )
    def test_is_seen_before_the_model_is_loaded(self, run: Any, arguments: list[str], parts: list[str]) -> None:
        run(*arguments).assert_refused(2, *parts)

    @pytest.mark.usefixtures("never_loaded")
    def test_what_a_list_has_no_use_for(self, run: Any) -> None:
        taken = {"--list", "--category", "--model", "--checkpoint", "--device"}
        values = {"--out": "a.json", "--multi-token": "skip", "--circuit": "ov", "--preset": "maps"}
        for entry in COMMANDS["relations"].params:
            option = entry.opts[0]
            if entry.param_type_name != "option" or option in taken or option == "--help":
                continue
            written = entry.secondary_opts[-1] if entry.secondary_opts else option
            answer = run("relations", "--list", written, *([] if entry.is_flag else [values.get(option, "1")]))
            answer.assert_refused(2, "--list only lists,", f"has no use for {option}.")

    @pytest.mark.usefixtures("never_loaded")
    def test_a_folder_as_output(self, run: Any, tmp_path: Path) -> None:
        out = tmp_path / "folder.json"
        out.mkdir()
        run(*GRID, "--out", str(out)).assert_refused(2, f"{out} is a folder")

    @pytest.mark.usefixtures("never_loaded")
    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            ([*GRID, "--source", "x"], "'--sources'"),
            (grid_with(circuit="vo"), "'vo' is not one of 'ov', 'qk'"),
            (["grid", "--head", "L0H0"], "Missing option '--sources'"),
            (["compare-attention", "--phrases", "a b=b"], "Missing option '--key'"),
            (["grids"], "There is no command 'grids'. Did you mean grid?"),
            (["model", "extra"], "extra"),
        ],
    )
    def test_of_the_command_line(self, run: Any, arguments: list[str], part: str) -> None:
        run(*arguments).assert_failed(2, "Usage: ", part)

    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            (grid_with(head="L99H0"), ["no head L99H0", "layers 0 to 29", "L29H8"]),
            (grid_with(sources="Ouagadougou"), ["'Ouagadougou' is 6 tokens", "' O', 'uag'", "single token"]),
            # What a terminal in another encoding passes on: Python keeps such bytes as lone surrogates.
            (grid_with(sources="\udcff"), ["has half a character"]),
        ],
        ids=["layer", "source", "bytes"],
    )
    def test_that_needs_the_model(self, run: Any, loaded: Any, arguments: list[str], parts: list[str]) -> None:
        run(*arguments).assert_refused(2, *parts)

    def test_a_missing_model_folder(self, run: Any, tmp_path: Path) -> None:
        missing = str(tmp_path / "nowhere")
        run(*GRID, "--model", missing).assert_refused(2, missing, "config.json", "leave --model out")


class TestCannotBeDone:
    """Exit 1."""

    @pytest.fixture
    def empty_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("TL_HEADMAPS_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache"

    def test_no_network(self, run: Any, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(command: list[str], **options: Any) -> Any:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: Network is unreachable\n")

        monkeypatch.setattr(bundled.subprocess, "run", fail)
        done = run(*GRID)
        done.assert_failed(1, "Network is unreachable", "TL_HEADMAPS_CACHE", "run 'tl-headmaps model' once")
        assert done.err.splitlines()[-1].startswith("tl-headmaps: ")
        assert list(empty_cache.iterdir()) == []

    def test_an_unknown_hub_name(self, run: Any) -> None:
        """Offline, as the tests are; the name exists nowhere."""
        name = "no-such-owner/no-such-model"
        run("model", "--model", name).assert_refused(1, f"config.json of '{name}'", "or give a folder")

    def test_whatever_the_host_raises_is_a_sentence(self, run: Any, tmp_path: Path, monkeypatch: Any) -> None:
        from transformer_lens.model_bridge import TransformerBridge

        def fails(*_: Any, **__: Any) -> None:
            raise TypeError("something of its own")

        monkeypatch.setattr(TransformerBridge, "boot_transformers", fails)
        folder = save_checkpoint(source_model("llama"), tmp_path / "llama")
        run("model", "--model", str(folder)).assert_refused(1, "could not load", "something of its own")


CONSOLE_SCRIPT = Path(sys.executable).with_name("tl-headmaps")


@pytest.mark.skipif(not CONSOLE_SCRIPT.exists(), reason="not installed here; run pip install -e .")
def test_the_console_script(tmp_path: Path) -> None:
    """A process of its own: it writes what it prints, and stderr is quiet."""
    files = ["--out", str(tmp_path / "grid.json"), "--out", str(tmp_path / "grid.csv")]
    command = [str(CONSOLE_SCRIPT), *GRID, "--device", "cpu", *files]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"Wrote {files[1]}\nWrote {files[3]}\n"
    assert done.stdout.splitlines()[2].split() == ["Cairo", "Paris", "Berlin"]
    assert [min(row) for row in json.loads((tmp_path / "grid.json").read_text())["ranks"]] == [2, 8, 6]
