"""What surrounds an analysis: torch as the caller left it, other threads, closed pipes, kills, files by others."""

import csv
import fcntl
import io
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from every_result import ANALYSES, NEXT, plain
from planted import random_model, save_checkpoint, source_model
from test_results import assert_sound, cells_of

import tl_headmaps
from tl_headmaps import (
    HeadMapsError,
    HeadWeights,
    Relation,
    Result,
    TaskItem,
    Tasks,
    ValueMixing,
    attention_groups,
    grouping_profile,
    relation_scores,
    token_grid,
)
from tl_headmaps.cli.app import main
from tl_headmaps.core.errors import HeadMapsWarning, OutputError, RelationDataError, RunError, TaskDataError, UsageError
from tl_headmaps.core.files import csv_rows, csv_text, replacing
from tl_headmaps.data.texts import read_texts
from tl_headmaps.results import kinds


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("llama")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


STATES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "half": lambda: default_dtype(torch.float16),
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "precision": lambda: matmul_precision("medium"),
    "gradients": torch.enable_grad,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(source_model("llama"), tmp_path_factory.mktemp("printing") / "llama")


@pytest.fixture(scope="module")
def results(model: Any) -> dict[str, Result]:
    return {name: call(model) for name, call in ANALYSES.items()}


def test_every_kind_is_among_them(results: dict[str, Result]) -> None:
    assert {result.kind for result in results.values()} == set(kinds()), "tests/every_result.py makes one of each"


@pytest.mark.parametrize("analysis", ANALYSES)
def test_every_result_has_a_table_for_a_paper(analysis: str, results: dict[str, Result], tmp_path: Path) -> None:
    result = results[analysis]
    text = result.save(tmp_path / "x.tex").read_text(encoding="utf-8")
    assert text == result.to_latex() and result.provenance.fingerprint[:12] in text.splitlines()[-1]
    n_columns = len(cells_of(text.splitlines()[2]))
    assert n_columns <= 9
    assert_sound(text, n_columns, min(20, len(list(result.to_rows()))))


@pytest.mark.parametrize("analysis", ANALYSES)
def test_every_result_comes_back_from_its_files(analysis: str, results: dict[str, Result], tmp_path: Path) -> None:
    result = results[analysis]
    rows = list(result.to_rows())
    for suffix in (".json", ".safetensors"):
        loaded = Result.load(result.save(tmp_path / f"x{suffix}"))
        assert loaded == result and str(loaded) == str(result) and repr(list(loaded.to_rows())) == repr(rows)
    text = result.save(tmp_path / "x.csv").read_text(encoding="utf-8")
    assert len(list(csv.DictReader(io.StringIO(text)))) == len(rows) == result.to_dataset().num_rows
    frame = pd.read_parquet(result.save(tmp_path / "x.parquet"))
    assert set(frame.columns) == {name for row in rows for name in row} and len(frame) == len(rows)


class TestAmbientState:
    @pytest.mark.parametrize("analysis", ANALYSES)
    def test_results_do_not_depend_on_it(
        self, analysis: str, model: Any, results: dict[str, Result], tmp_path: Path
    ) -> None:
        for names in (("autocast", "float64", "precision", "gradients"), ("half", "device", "inference")):
            with ExitStack() as stack:
                for name in names:
                    stack.enter_context(STATES[name]())
                result = ANALYSES[analysis](model)
                loaded = Result.load(result.save(tmp_path / "result.json"))
                shown = str(result)
            assert plain(result) == plain(results[analysis]), names
            assert loaded == result and shown == str(results[analysis]), names

    def test_weights_and_models_too(self, tmp_path: Path) -> None:
        folder = save_checkpoint(source_model("llama"), tmp_path / "llama")
        expected = HeadWeights.from_checkpoint(folder)
        for name in ("float64", "device", "autocast"):
            with STATES[name]():
                assert HeadWeights.from_checkpoint(folder).fingerprint == expected.fingerprint
                loaded = tl_headmaps.load_model(str(folder), "cpu")
            assert HeadWeights.from_model(loaded).fingerprint == expected.fingerprint
            assert all(parameter.dtype == torch.float32 for parameter in loaded.parameters())

    def test_it_is_restored_also_after_an_error(self, model: Any) -> None:
        with (
            STATES["float64"](),
            STATES["precision"](),
            torch.device("meta"),
            torch.autocast("cpu"),
            torch.enable_grad(),
        ):
            with pytest.raises(HeadMapsError):
                token_grid(model, "L99H0", [3], [4], preset="folded")
            assert torch.tensor(0.5).dtype == torch.float64
            assert torch.get_float32_matmul_precision() == "medium"
            assert torch.zeros(1).is_meta and torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()

    def test_threads_share_the_default_type(self, model: Any) -> None:
        expected = plain(ANALYSES["relation_scores"](model))
        with STATES["float64"]():
            found = in_threads([lambda: plain(ANALYSES["relation_scores"](model))] * 4)
            assert torch.get_default_dtype() == torch.float64
        assert found == [expected] * 4

    def test_every_call_is_public(self) -> None:
        calls = {name: getattr(tl_headmaps, name) for name in tl_headmaps.__all__}
        for name, call in calls.items():
            if callable(call) and not isinstance(call, type) and ".analyses." in call.__module__:
                assert getattr(call, "is_public", False), f"@public is missing above {name}()"
        for method in (HeadWeights.from_model, HeadWeights.from_checkpoint, calls["ContextVectors"].of):
            assert getattr(method.__func__, "is_public", False), method


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


class TestThreads:
    def test_hooks_of_the_user_are_as_before_and_results_are_those_of_one_thread(self, model: Any) -> None:
        names = ["attention_groups", "grouping_profile", "value_mixing", "component_map of gradients"]
        expected = [plain(ANALYSES[name](model)) for name in names]
        model.train()
        called: list[str] = []
        points = [point for name, point in model.hook_dict.items() if name.endswith(("hook_pattern", "hook_z"))]
        for point in points:
            point.add_hook(lambda value, hook: called.append(hook.name))
        before = {id(point): list(point._forward_hooks) for point in points}
        assert len(points) >= 4
        try:
            found = in_threads([lambda name=name: plain(ANALYSES[name](model)) for name in names * 2])
            assert found == expected * 2
            assert called == [], "a hook of the user ran inside an analysis"
            assert {id(point): list(point._forward_hooks) for point in points} == before
            assert all(module.training for module in model.modules())
            model(torch.tensor([[3, 4]]))
            assert len(called) == len(points)
        finally:
            model.reset_hooks()
            model.eval()


def grid_command(folder: Path, *out: Path) -> list[str]:
    options = ["--head", "L0H0", "--sources", "#3,#4", "--targets", "#5,#6", "--checkpoint", str(folder)]
    outputs = [word for path in out for word in ("--out", str(path))]
    return [sys.executable, "-m", "tl_headmaps", "grid", *options, *outputs]


@pytest.mark.once
class TestPrinting:
    @pytest.fixture(params=["No space left on device", "Broken pipe"])
    def unwritable(self, request: pytest.FixtureRequest) -> Iterator[tuple[int, str]]:
        """What takes no byte, and how the system calls that."""
        if request.param == "Broken pipe":
            reading, writing = os.pipe()
            os.close(reading)
        elif Path("/dev/full").exists():
            writing = os.open("/dev/full", os.O_WRONLY)
        else:
            pytest.skip("no /dev/full here; run on Linux")
        yield writing, request.param
        os.close(writing)

    def test_stdout_that_cannot_be_written_to_loses_no_file(
        self, unwritable: tuple[int, str], folder: Path, tmp_path: Path
    ) -> None:
        stdout, why = unwritable
        help_page = [sys.executable, "-m", "tl_headmaps", "grid", "--help"]
        for command in (help_page, grid_command(folder, tmp_path / "a.json")):
            done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
            assert done.returncode == 1 and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
            # A help page that is piped to head needs no words.
            assert f"printed in full ({why})" in done.stderr or (command, why) == (help_page, "Broken pipe")
        assert Result.load(tmp_path / "a.json").kind == "token_grid"

    def test_a_file_that_cannot_be_written_takes_no_other_with_it(
        self, run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(self: Result) -> str:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Result, "to_csv", full)
        done = run(*grid_command(folder, tmp_path / "a.csv", tmp_path / "b.json")[3:])
        assert done.code == 1 and "No space left on device" in done.err and "L0H0 OV map" in done.out
        assert Result.load(tmp_path / "b.json").kind == "token_grid"

    def test_what_an_encoding_lacks_is_escaped(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Output sent to a file on Windows is cp1252, which has no box characters."""
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "argv", ["tl-headmaps", *grid_command(folder)[3:]])
        with pytest.raises(SystemExit) as left:
            main()
        assert not left.value.code
        stdout.flush()
        assert rb"\u2500" in stdout.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.once
class TestTemporaryFiles:
    def test_those_of_a_killed_process_go_with_the_next_one(self, tmp_path: Path) -> None:
        script = (
            "import os, signal, sys; from pathlib import Path; from tl_headmaps.core.files import replacing\n"
            "with replacing(Path(sys.argv[1])) as temporary:\n"
            "    temporary.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
        )
        target = tmp_path / "result.json"
        for _ in range(2):
            done = subprocess.run([sys.executable, "-c", script, str(target)], check=False)
            assert done.returncode == -signal.SIGKILL
            assert len(list(tmp_path.iterdir())) == 1
        with replacing(target) as temporary:
            temporary.write_text("whole")
        assert [path.name for path in tmp_path.iterdir()] == ["result.json"]

    def test_those_of_a_living_process_stay(self, tmp_path: Path) -> None:
        target = tmp_path / "result.json"
        with replacing(target) as theirs:
            theirs.write_text("theirs")
            with replacing(target) as ours:
                ours.write_text("ours")
            assert target.read_text() == "ours" and theirs.exists()
        assert target.read_text() == "theirs"
        assert len(list(tmp_path.iterdir())) == 1

    @pytest.mark.parametrize(("platform", "is_open"), [("win32", False), ("linux", True)])
    def test_windows_renames_a_closed_file_and_others_one_that_is_locked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, is_open: bool
    ) -> None:
        made, found = [], []
        make, rename = tempfile.mkstemp, Path.replace

        def noted(**options: Any) -> tuple[int, str]:
            made.append(make(**options))
            return made[-1]

        def renamed(self: Path, target: Path) -> Path:
            with suppress(OSError):
                found.append(os.fstat(made[-1][0]))
            return rename(self, target)

        monkeypatch.setattr("tl_headmaps.core.files.sys", SimpleNamespace(platform=platform))
        monkeypatch.setattr(tempfile, "mkstemp", noted)
        monkeypatch.setattr(Path, "replace", renamed)
        with replacing(tmp_path / "result.json") as temporary:
            temporary.write_text("whole")
        assert (len(made), len(found)) == (1, int(is_open))
        assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(made[-1][0])

    def test_other_files_are_left_alone(self, tmp_path: Path) -> None:
        for name in (".other.json.x.part", "result.json.part", ".result.json.x.tmp"):
            (tmp_path / name).write_text("")
        with (tmp_path / ".result.json.y.part").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with replacing(tmp_path / "result.json") as temporary:
                temporary.write_text("")
        assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.once
class TestFilesOfOthers:
    @pytest.mark.parametrize("k", ["10", None, [10], 2.5, True, 0, -3, 10**30, {}])
    def test_k(self, tmp_path: Path, k: Any) -> None:
        self.refused(tmp_path, {"pairs": [["a", "b"]], "k": k}, "k is")

    @pytest.mark.parametrize(
        "templates",
        [
            "The <X>",
            ["The <X>"],
            {"neutral": "The <X>"},
            {"neutral": [3]},
            {"neutral": [["<X>"]]},
            3,
            {"eliciting": None},
        ],
        ids=range(7),
    )
    def test_templates(self, tmp_path: Path, templates: Any) -> None:
        self.refused(tmp_path, {"pairs": [["a", "b"]], "templates": templates}, "templates are")

    @pytest.mark.parametrize("field", ["name", "title", "category", "description", "source", "licence"])
    def test_texts(self, tmp_path: Path, field: str) -> None:
        self.refused(tmp_path, {"pairs": [["a", "b"]], field: 3}, f"{field} is 3; it must be text")
        self.refused(tmp_path, {"pairs": [["a", "b"]], field: "\ud800"}, "half a character")

    @pytest.mark.parametrize("word", ["a\ud800", "\udfff", 10**25, 2.5, None, True, ["a"], {}])
    def test_words(self, tmp_path: Path, word: Any) -> None:
        self.refused(tmp_path, {"pairs": [["a", word]]})
        self.refused(tmp_path, [["a", word]])
        with pytest.raises(RelationDataError):
            Relation.from_pairs("own", [("a", word)])

    def refused(self, folder: Path, content: Any, part: str = "") -> None:
        path = folder / "relation.json"
        path.write_text(json.dumps(content))
        with pytest.raises(RelationDataError) as caught:
            Relation.from_file(path)
        assert part in str(caught.value)

    @pytest.mark.parametrize("suffix", [".json", ".csv", ".tsv", ".jsonl"])
    @pytest.mark.parametrize(
        "content",
        [b"[" * 100_000, b'[["a", 1' + b"0" * 5000 + b"]]", b'"' + b"x" * 200_000 + b'",b\n', b"\xff\xfe", b"", b"\0"],
        ids=["deep", "long number", "long cell", "not UTF-8", "empty", "null"],
    )
    def test_rubbish(self, tmp_path: Path, suffix: str, content: bytes) -> None:
        path = tmp_path / f"rubbish{suffix}"
        path.write_bytes(content)
        if suffix != ".jsonl":
            # A row of two cells is a pair, whatever it says.
            is_pair = suffix == ".csv" and content.startswith(b'[["a", 1')
            with warnings.catch_warnings(), nullcontext() if is_pair else pytest.raises(RelationDataError):
                warnings.simplefilter("ignore", HeadMapsWarning)
                Relation.from_file(path)
        with pytest.raises(TaskDataError):
            Tasks.from_file(path)
        if content:
            with pytest.raises(OutputError):
                Result.load(path)

    def test_csv_with_line_breaks_in_cells(self, tmp_path: Path) -> None:
        path = tmp_path / "relation.csv"
        path.write_bytes('source,target\r\n"a\nb",c\r\nd\u2028e,"f\x1cg"\r\n'.encode())
        assert Relation.from_file(path).pairs == (("a\nb", "c"), ("d\u2028e", "f\x1cg"))

    def test_task_tables_with_line_breaks_in_cells(self, tmp_path: Path) -> None:
        path = tmp_path / "tasks.csv"
        questions = [(f"{n}\u2028+\n{f}", f) for n in range(10) for f in ("retrieval", "inference")]
        rows = [[question, "a", function] for question, function in questions]
        path.write_text(csv_text(["question", "answer", "function"], rows), newline="")
        items = Tasks.from_file(path, template="{question}").items
        assert [item.question for item in items] == [question for question, _ in questions]

    def test_a_pipe_is_refused_at_once(self, tmp_path: Path) -> None:
        for suffix in (".json", ".csv", ".txt", ".safetensors"):
            pipe = tmp_path / f"pipe{suffix}"
            os.mkfifo(pipe)
            for read in (Relation.from_file, Tasks.from_file, Result.load, lambda path: list(read_texts(path))):
                with pytest.raises(HeadMapsError):
                    read(pipe)
        (tmp_path / "config.json").symlink_to(tmp_path / "pipe.json")
        with pytest.raises(HeadMapsError):
            HeadWeights.from_checkpoint(tmp_path)

    def test_half_characters_in_texts(self, model: Any) -> None:
        broken = " word3 word4 \ud800 word5"
        with pytest.raises(UsageError, match="half a character"):
            attention_groups(model, broken)
        with pytest.raises(UsageError, match="half a character"):
            grouping_profile(model, [broken], progress=False)
        with pytest.raises(RelationDataError, match="half a character"):
            Relation.from_pairs("own", [("a", "b")], eliciting_templates=("\udc00 <X>",))
        items = [TaskItem(f"{n}\udc80", "a", name) for n in range(10) for name in ("retrieval", "inference")]
        with pytest.raises(TaskDataError, match="half a character"):
            Tasks(tuple(items))

    @pytest.mark.parametrize("suffix", [".json", ".csv", ".html", ".svg"])
    def test_half_characters_in_names_are_written_nowhere(self, suffix: str, tmp_path: Path) -> None:
        """Those of a caller's own arrays; a sentence, or an escape, and no file that is half written."""
        mixing = ValueMixing.from_arrays([[1.0, 0.0], [0.5, 0.5]], [[1.0], [2.0]], ["\ud800", "b"])
        path = tmp_path / f"a{suffix}"
        try:
            mixing.save(path)
        except OutputError as error:
            assert r"half a character (\ud800)" in str(error) and not list(tmp_path.iterdir())
        else:
            path.read_text("utf-8")
        mixing.figure().save(tmp_path / "b.svg", title="\ud800")

    def test_home_is_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not a folder called "~" beside the notebook."""
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        mixing = ValueMixing.from_arrays([[1.0]], [[1.0]], ["a"])
        for path in (mixing.save("~/a.json"), mixing.save("~/a.html"), mixing.figure().save("~/b.html")):
            assert Path(path).parent == tmp_path
        assert Result.load("~/a.json") == mixing
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.json", "b.html"]
        with pytest.raises(UsageError, match="there is no such user"):
            mixing.save("~nosuch/a.json")

    @pytest.mark.parametrize("name", ["~nosuch/x.json", "x" * 5000 + ".json", "a\0.json"])
    def test_paths_that_cannot_be(self, name: str) -> None:
        for read in (Relation.from_file, Tasks.from_file, Result.load):
            with pytest.raises(HeadMapsError):
                read(name)


@pytest.mark.once
class TestResults:
    def test_shapes_and_axes_are_checked_against_each_other(self, results: dict[str, Result], tmp_path: Path) -> None:
        """Whatever loads can be printed, listed and saved again."""
        generator = np.random.default_rng(0)
        path = tmp_path / "result.json"
        n_refused = 0
        for name, result in results.items():
            for _ in range(12):
                path.write_text(json.dumps(mutated(json.loads(result.to_json()), generator)))
                try:
                    loaded = Result.load(path)
                except OutputError:
                    n_refused += 1
                    continue
                assert str(loaded) and loaded.to_csv() and loaded.to_json(), name
        assert n_refused > 50

    def test_numbers_no_json_can_hold_inside_a_result_of_results(
        self, results: dict[str, Result], tmp_path: Path
    ) -> None:
        values = json.loads(results["describe_head"].to_json())
        values["operations"]["operations"][0]["score"] = math.nan
        (tmp_path / "a.json").write_text(json.dumps(values))
        with pytest.raises(OutputError, match="is damaged"):
            Result.load(tmp_path / "a.json")

    def test_arrays_and_labels_of_another_length(self, results: dict[str, Result], tmp_path: Path) -> None:
        scores, grid = (json.loads(results[name].to_json()) for name in ("relation_scores", "token_grid"))
        scores["suppress"] = [rows[:-1] for rows in scores["suppress"]]
        grid["axes"]["source"].append("more")
        for values, sentence in ((scores, r"(?s)is damaged.*suppress"), (grid, "is damaged")):
            (tmp_path / "a.json").write_text(json.dumps(values))
            with pytest.raises(OutputError, match=sentence):
                Result.load(tmp_path / "a.json")

    def test_a_newer_file_says_so(self, results: dict[str, Result], tmp_path: Path) -> None:
        values = json.loads(results["token_grid"].to_json())
        values["provenance"]["versions"]["tl-headmaps"] = "99.0.1"
        (tmp_path / "a.json").write_text(json.dumps(values))
        assert Result.load(tmp_path / "a.json").kind == "token_grid"
        for change in ({"kind": "oracle"}, {"clearer": [1]}, {"ranks": "moved"}):
            (tmp_path / "a.json").write_text(json.dumps(values | change))
            with pytest.raises(OutputError, match=r"saved by tl-headmaps 99\.0\.1, which is newer.*pip install"):
                Result.load(tmp_path / "a.json")

    def test_a_full_disk_gives_a_sentence_for_tensors_too(
        self, results: dict[str, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(self: Path, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(OutputError, match="No space left on device"):
            results["token_grid"].save(tmp_path / "a.safetensors")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        "cell", ["=1+1", "+1;x", "-x", "@sum", "\tx", "\rx", "'=x", "''", "'", "-", "-3%", "a=b", ""]
    )
    def test_cells_of_spreadsheets(self, cell: str) -> None:
        text = csv_text([cell, "n"], [[cell, -0.5], [f"{cell}\n", 1]])
        assert csv_rows(text) == [[cell, "n"], [cell, "-0.5"], [f"{cell}\n", "1"]]
        written = text.split(",")[0].strip('"')
        assert not written.startswith(("=", "@", "\t", "\r", "+1;", "-x"))

    @pytest.mark.parametrize("answer", [b"", b"rubbish", None, 3, {"values": 1}])
    def test_what_an_executor_returns_is_looked_at(self, tmp_path: Path, answer: Any) -> None:
        weights = HeadWeights.from_checkpoint(save_checkpoint(source_model("llama"), tmp_path / "llama"))

        class Elsewhere:
            def submit(self, call: Any, layer: int) -> Any:
                future: Future[Any] = Future()
                future.set_result(answer)
                return future

        with pytest.raises(RunError, match="is not a result of this run"):
            relation_scores(
                weights, NEXT, executor=Elsewhere(), run_dir=tmp_path / "run", progress=False, preset="folded"
            )
        assert not list((tmp_path / "run").glob("layer-*"))


def mutated(value: Any, generator: np.random.Generator) -> Any:
    """The same JSON with one thing in it changed: removed, repeated, or replaced by something of another kind."""
    places = list(walk(value))
    container, key = places[generator.integers(len(places))]
    kind = generator.integers(4)
    if kind == 0 and isinstance(container, list):
        container.pop(key)
    elif kind == 1 and isinstance(container, list):
        container.append(container[key])
    elif kind == 2 and isinstance(container, dict):
        container.pop(key)
    else:
        rubbish: list[Any] = [None, -1, 10**30, 1.5, "x", [], {}, True, "\u202e</script>", [[1]], float("nan")]
        container[key] = rubbish[generator.integers(len(rubbish))]
    return value


def walk(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in list(items):
        yield value, key
        yield from walk(inside)
