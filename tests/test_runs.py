"""Runs survive: killed, resumed, damaged, refused, and computed by threads, processes and a Dask cluster alike."""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from planted import hosted, save_checkpoint, source_model
from safetensors.torch import load_file, save_file

from tl_headmaps import HeadWeights, Relation, RelationScores, Result, relation_scores
from tl_headmaps.analyses import sweep as sweeping
from tl_headmaps.analyses.sweep import LayerStep, sweep_layers
from tl_headmaps.core.errors import ModelLoadError, OutputError, RunError, UsageError
from tl_headmaps.core.store import RUN_FILE, identity_of

N_LAYERS = 6
PAIRS = [(s, t) for s in range(3, 20) for t in (s + 1, 40 - s)]
RELATION = Relation.from_pairs("all", PAIRS)
OTHER = Relation.from_pairs("all", PAIRS[1:])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = source_model("llama", n_layers=N_LAYERS)
    return save_checkpoint(source, tmp_path_factory.mktemp("model") / "llama", tokenizer=False)


@pytest.fixture(scope="module")
def weights(checkpoint: Path) -> HeadWeights:
    return HeadWeights.from_checkpoint(checkpoint)


@pytest.fixture(scope="module")
def plain(weights: HeadWeights) -> RelationScores:
    """The same scores without any of this."""
    return relation_scores(weights, RELATION, ranks=True, progress=False, preset="folded")


def scores(weights: HeadWeights, run: Path | None, **options: Any) -> RelationScores:
    options = {"ranks": True, "progress": False, "preset": "folded"} | options
    return relation_scores(weights, options.pop("relation", RELATION), run_dir=run, **options)


def timeless(result: Result) -> dict[str, Any]:
    values = result.to_dict()
    values["provenance"].pop("created")
    return values


def pieces(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.glob("layer-*.safetensors"))}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers that are really computed in this process."""
    layers: list[int] = []
    read = HeadWeights.layer

    def noted(self: HeadWeights, layer: int) -> Any:
        layers.append(layer)
        return read(self, layer)

    monkeypatch.setattr(HeadWeights, "layer", noted)
    return layers


class TestRunFolder:
    def test_same_scores_with_and_without(self, weights: HeadWeights, plain: RelationScores, tmp_path: Path) -> None:
        assert timeless(scores(weights, tmp_path / "run")) == timeless(plain)
        assert len(pieces(tmp_path / "run")) == N_LAYERS

    def test_finished_layers_are_not_computed_again(
        self, weights: HeadWeights, tmp_path: Path, computed: list[int]
    ) -> None:
        first = scores(weights, tmp_path)
        assert sorted(set(computed)) == list(range(N_LAYERS))
        computed.clear()
        time.sleep(1.1)  # the times of two runs are told apart by the second
        again = scores(weights, tmp_path)
        assert computed == []
        assert again.to_json() == first.to_json()

    def test_only_missing_layers_are_computed(self, weights: HeadWeights, tmp_path: Path, computed: list[int]) -> None:
        first, before = scores(weights, tmp_path), pieces(tmp_path)
        for layer in (1, 4):
            (tmp_path / f"layer-{layer:04d}.safetensors").unlink()
        computed.clear()
        assert scores(weights, tmp_path).to_json() == first.to_json()
        assert computed == [1, 4]
        assert pieces(tmp_path) == before

    def test_each_piece_carries_its_provenance(self, weights: HeadWeights, tmp_path: Path) -> None:
        scores(weights, tmp_path)
        data = (tmp_path / "layer-0002.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["piece"])
        assert (header["piece"], len(header["checksum"])) == ("layer-0002", 64)
        assert header["provenance"]["fingerprint"] == weights.fingerprint
        assert header["provenance"]["options"]["preset"] == "folded"
        assert header["provenance"]["data"] == {"all": RELATION.digest}

    def test_some_heads(self, weights: HeadWeights, tmp_path: Path) -> None:
        heads = ["L1H0", "L4H3", "L4H1"]
        found = scores(weights, tmp_path, heads=heads)
        assert sorted(pieces(tmp_path)) == ["layer-0001.safetensors", "layer-0004.safetensors"]
        assert timeless(found) == timeless(scores(weights, None, heads=heads))

    def test_a_loaded_model_and_its_checkpoint_are_the_same_run(
        self, weights: HeadWeights, tmp_path: Path, computed: list[int]
    ) -> None:
        scores(weights, tmp_path)
        computed.clear()
        model = hosted(source_model("llama", n_layers=N_LAYERS), "llama")
        loaded = HeadWeights.from_model(model)
        assert (loaded.fingerprint, loaded.quantisation) == (weights.fingerprint, weights.quantisation)
        assert loaded.numbers_digest == weights.numbers_digest
        computed.clear()
        found = scores(loaded, tmp_path)
        assert computed == []
        assert found.provenance.model == "tiny-llama"


def damage_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def damage_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"checksum", b"chocksum"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def rewrite_tensors(path: Path) -> None:
    save_file(load_file(path), path)


def of_another_layer(path: Path) -> None:
    path.write_bytes((path.parent / "layer-0000.safetensors").read_bytes())


DAMAGE = [
    damage_middle,
    damage_header,
    truncate,
    rewrite_tensors,
    of_another_layer,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"\xff" * 64),
    lambda path: (path.unlink(), path.mkdir()),
]


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGE[:-1])
    def test_a_damaged_piece_is_reported_and_made_again(
        self,
        damage: Callable[[Path], None],
        weights: HeadWeights,
        tmp_path: Path,
        computed: list[int],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        first, before = scores(weights, tmp_path), pieces(tmp_path)
        path = tmp_path / "layer-0003.safetensors"
        damage(path)
        computed.clear()
        assert scores(weights, tmp_path).to_json() == first.to_json()
        assert computed == [3]
        assert pieces(tmp_path) == before
        assert f"{path} is damaged: " in (shown := capsys.readouterr().err)
        assert "It is computed again." in shown

    def test_a_folder_in_the_place_of_a_piece(self, weights: HeadWeights, tmp_path: Path) -> None:
        scores(weights, tmp_path)
        DAMAGE[-1](tmp_path / "layer-0003.safetensors")
        with pytest.raises(
            OutputError, match=r"layer-0003.safetensors could not be written.*Everything finished before is saved"
        ):
            scores(weights, tmp_path)

    def test_a_disk_that_is_full(self, weights: HeadWeights, plain: RelationScores, tmp_path: Path) -> None:
        """Files may not grow past a limit: the system refuses the write as it does on a full disk."""
        scores(weights, tmp_path, heads=["L0H0"])
        limit = (tmp_path / RUN_FILE).stat().st_size + 2000
        run = tmp_path / "full"
        with file_size_limit(limit), pytest.raises(OutputError) as caught:
            scores(weights, run)
        assert "layer-0000.safetensors could not be written (File too large). Everything" in str(caught.value)
        assert "make room there, and start the same call again" in str(caught.value)
        assert not list(run.glob(".*.part"))
        assert timeless(scores(weights, run)) == timeless(plain)

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "identity": 3, "layers": 0}'])
    def test_a_damaged_record_is_a_sentence(self, text: str, weights: HeadWeights, tmp_path: Path) -> None:
        scores(weights, tmp_path)
        (tmp_path / RUN_FILE).write_text(text)
        with pytest.raises(OutputError, match=r"run.json is damaged .*Remove the folder and start over"):
            scores(weights, tmp_path)

    def test_a_run_of_an_older_version_is_refused(self, weights: HeadWeights, tmp_path: Path) -> None:
        scores(weights, tmp_path)
        record = json.loads((tmp_path / RUN_FILE).read_text())
        (tmp_path / RUN_FILE).write_text(json.dumps(record | {"format": record["format"] - 1}))
        with pytest.raises(OutputError, match=r"written by another version of this package.* Give another folder"):
            scores(weights, tmp_path)

    def test_leftovers_of_a_kill_are_removed(self, weights: HeadWeights, tmp_path: Path) -> None:
        (tmp_path / ".layer-0001.safetensors.abc.part").write_text("half")
        (tmp_path / ".x.part").mkdir()
        scores(weights, tmp_path)
        assert [path.name for path in tmp_path.glob(".*.part")] == [".x.part"], "folders are left alone"


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestRefusals:
    @pytest.fixture
    def started(self, weights: HeadWeights, tmp_path: Path) -> Path:
        scores(weights, tmp_path)
        return tmp_path

    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"preset": "maps"}, 'options.preset = "folded", but this call has "maps"'),
            ({"k": 3}, "options.k = null, but this call has 3"),
            ({"heads": ["L1H1"]}, 'options.heads = null, but this call has ["L1H1"]'),
            ({"circuit": "qk"}, 'circuit = "ov", but this call has "qk"'),
            ({"ranks": False}, "ranks = true, but this call has false"),
            ({"relation": OTHER}, f'data.all = "{RELATION.digest}", but this call has "{OTHER.digest}"'),
        ],
        ids=lambda value: value if isinstance(value, str) else next(iter(value)),
    )
    def test_another_option_or_other_data(
        self, options: dict[str, Any], field: str, started: Path, weights: HeadWeights
    ) -> None:
        with pytest.raises(UsageError) as caught:
            scores(weights, started, **options)
        assert f"The run in {started} was started with {field}. Give another folder" in str(caught.value)

    def test_another_model(self, started: Path, tmp_path: Path) -> None:
        folder = save_checkpoint(source_model("llama", n_layers=N_LAYERS, seed=1), tmp_path / "other")
        with pytest.raises(UsageError, match="was started with fingerprint = "):
            scores(HeadWeights.from_checkpoint(folder), started)

    def test_the_same_tensors_with_other_numbers(self, started: Path, tmp_path: Path) -> None:
        """The fingerprint is of tensors: layers that were computed with another eps were read as finished."""
        folder = save_checkpoint(source_model("llama", n_layers=N_LAYERS, rms_norm_eps=0.05), tmp_path / "other")
        with pytest.raises(UsageError, match="was started with numbers = "):
            scores(HeadWeights.from_checkpoint(folder), started)

    def test_another_version(self, started: Path, weights: HeadWeights, monkeypatch: pytest.MonkeyPatch) -> None:
        record = json.loads((started / RUN_FILE).read_text())
        record["identity"]["versions"]["torch"] = "1.0"
        (started / RUN_FILE).write_text(json.dumps(record))
        with pytest.raises(UsageError, match=r'started with versions.torch = "1.0", but this call has'):
            scores(weights, started)

    def test_a_folder_with_other_things(self, weights: HeadWeights, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("precious")
        with pytest.raises(UsageError, match=r"is not a run folder: it contains 'thesis.tex'. Give a new or empty"):
            scores(weights, tmp_path)

    def test_two_processes_at_once(self, started: Path, weights: HeadWeights) -> None:
        with FileLock(started / "run.lock"), pytest.raises(UsageError, match="Another process is working on the run"):
            scores(weights, started)

    @pytest.mark.parametrize("thing", [3, "dask", ThreadPoolExecutor])
    def test_not_an_executor(self, thing: Any, weights: HeadWeights) -> None:
        with pytest.raises(UsageError, match=r"has no submit\(\). Pass any concurrent.futures.Executor"):
            scores(weights, None, executor=thing)


KILLED_RUN = """
import os, signal, sys
from tl_headmaps import HeadWeights, Relation, relation_scores
from tl_headmaps.core.store import Store

moment, count, checkpoint, run, pairs = sys.argv[1], int(sys.argv[2]), *sys.argv[3:5], eval(sys.argv[5])
written = Store.write
seen = []

def write(self, layer, tensors):
    seen.append(layer)
    if len(seen) == count and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if len(seen) == count and moment == "inside":
        # The piece is half written when the process dies.
        from pathlib import Path
        Path.write_bytes = lambda path, data: (path.open("wb").write(data[:100]), os.kill(os.getpid(), signal.SIGKILL))
    written(self, layer, tensors)
    if len(seen) == count and moment == "after":
        os.kill(os.getpid(), signal.SIGKILL)

Store.write = write
relation_scores(HeadWeights.from_checkpoint(checkpoint), Relation.from_pairs("all", pairs), ranks=True, run_dir=run)
"""


class TestKilled:
    def kill(self, moment: str, count: int, checkpoint: Path, run: Path) -> None:
        arguments = [moment, str(count), str(checkpoint), str(run), repr(PAIRS)]
        done = subprocess.run(
            [sys.executable, "-c", KILLED_RUN, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == -signal.SIGKILL, done.stderr

    def test_killed_again_and_again_and_finished(
        self, checkpoint: Path, weights: HeadWeights, plain: RelationScores, tmp_path: Path, computed: list[int]
    ) -> None:
        """Before a piece is written, in the middle of it, and after it."""
        run, whole = tmp_path / "run", tmp_path / "whole"
        for moment, n_pieces in (("before", 1), ("inside", 2), ("after", 4)):
            self.kill(moment, 2, checkpoint, run)
            assert sorted(pieces(run)) == [f"layer-{layer:04d}.safetensors" for layer in range(n_pieces)]
        computed.clear()
        resumed = scores(weights, run)
        assert computed == [4, 5]
        assert timeless(resumed) == timeless(plain)
        scores(weights, whole)
        assert pieces(run) == pieces(whole)
        assert not list(run.glob(".*.part"))


@dataclass(frozen=True)
class Slow:
    """A task that tells where it runs and takes its time; the first to do the given layer can be killed meanwhile."""

    weights: HeadWeights
    notes: str
    seconds: float = 0.0

    def prepare(self) -> LayerStep:
        Path(self.notes, f"prepared-{os.getpid()}-{time.monotonic_ns()}").touch()

        def step(layer: int) -> dict[str, torch.Tensor]:
            Path(self.notes, f"layer-{layer}-{os.getpid()}").touch()
            time.sleep(self.seconds)
            read = self.weights.layer(layer)
            return {"norm": read.W_O.flatten(1).norm(dim=1)}

        return step


def slow_sweep(task: Slow, executor: Any, run: Path | None = None) -> dict[int, torch.Tensor]:
    layers = list(range(N_LAYERS))
    swept = sweep_layers(
        task,
        layers,
        kind="norms",
        provenance=task.weights.provenance(),
        run_dir=run,
        executor=executor,
        progress=False,
    )
    return {layer: swept.layers[layer]["norm"] for layer in layers}


class TestExecutors:
    def test_threads(self, weights: HeadWeights, plain: RelationScores, tmp_path: Path) -> None:
        with ThreadPoolExecutor(3) as pool:
            assert timeless(scores(weights, tmp_path, executor=pool)) == timeless(plain)
        assert len(pieces(tmp_path)) == N_LAYERS

    def test_threads_share_a_loaded_model(self, plain: RelationScores) -> None:
        model = HeadWeights.from_model(hosted(source_model("llama", n_layers=N_LAYERS), "llama"))
        with ThreadPoolExecutor(3) as pool:
            found = scores(model, None, executor=pool, circuit="qk")
        assert timeless(found) == timeless(scores(model, None, circuit="qk"))

    def test_a_loaded_model_cannot_go_to_processes(self) -> None:
        model = HeadWeights.from_model(hosted(source_model("llama", n_layers=1), "llama"))
        with pytest.raises(UsageError, match=r"cannot be sent to another one. Use HeadWeights.from_checkpoint"):
            scores(model, None, executor=Immediate())

    def test_processes(self, weights: HeadWeights, plain: RelationScores, tmp_path: Path) -> None:
        """Equal scores, equal pieces; each worker opens the checkpoint and prepares the task once."""
        notes = tmp_path / "notes"
        notes.mkdir()
        run, whole = tmp_path / "run", tmp_path / "whole"
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            assert timeless(scores(weights, run, executor=pool)) == timeless(plain)
            found = slow_sweep(Slow(weights, str(notes), 0.05), pool)
        scores(weights, whole)
        assert pieces(run) == pieces(whole)
        expected = slow_sweep(Slow(weights, str(tmp_path)), None)
        assert all(torch.equal(found[layer], expected[layer]) for layer in expected)
        by_process = [path.name.split("-")[1] for path in notes.glob("prepared-*")]
        assert len(by_process) == len(set(by_process)) and str(os.getpid()) not in by_process

    def test_a_killed_process_is_a_sentence_and_the_run_goes_on(
        self, weights: HeadWeights, tmp_path: Path, computed: list[int]
    ) -> None:
        notes, run = tmp_path / "notes", tmp_path / "run"
        notes.mkdir()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            killer = threading.Thread(target=kill_worker_of, args=(notes, 2))
            killer.start()
            with pytest.raises(
                RunError, match=r"A worker could not compute layer \d \(BrokenProcessPool.*repeat the same call"
            ):
                slow_sweep(Slow(weights, str(notes), 0.3), pool, run)
            killer.join()
        done = len(pieces(run))
        assert 2 <= done < N_LAYERS
        computed.clear()
        slow_sweep(Slow(weights, str(notes), 0.3), None, run)
        assert computed == list(range(done, N_LAYERS))

    def test_the_first_error_of_a_worker_is_raised_and_the_others_are_kept(
        self, weights: HeadWeights, tmp_path: Path
    ) -> None:
        with ThreadPoolExecutor(1) as pool, pytest.raises(RunError, match=r"layer 3 \(ZeroDivisionError"):
            slow_sweep(Failing(weights, str(tmp_path)), pool, tmp_path / "run")
        kept = pieces(tmp_path / "run")
        assert {f"layer-000{layer}.safetensors" for layer in range(3)} <= set(kept)
        assert "layer-0003.safetensors" not in kept

    def test_futures_of_another_family(self, weights: HeadWeights, plain: RelationScores) -> None:
        """Slurm executors such as submitit give jobs with result() and cancel() that are no standard futures."""
        assert timeless(scores(weights, None, executor=Immediate())) == timeless(plain)

    def test_workers_with_other_weights_or_versions_are_refused(
        self, weights: HeadWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task = Slow(weights, str(tmp_path))
        identity = identity_of("norms", weights.provenance(), {"layers": [0]})
        shipped = sweeping._Shipped.of(task, [0, 1], identity)
        other = save_checkpoint(source_model("llama", n_layers=N_LAYERS, seed=3), tmp_path / "other")
        moved = Slow(HeadWeights.from_checkpoint(other), str(tmp_path))
        sent = sweeping._Shipped.of(moved, [0, 1], identity)
        wrong = sweeping._Shipped(sent.task, identity, shipped.shared_digest, shipped.layer_digests)
        with pytest.raises(
            ModelLoadError, match=r"has different weights under .*\(embedding, unembedding or first MLP\)"
        ):
            wrong(0)
        layer = sweeping._Shipped(sent.task, identity, sent.shared_digest, shipped.layer_digests)
        with pytest.raises(ModelLoadError, match=r"\(layer 1\).*Use a folder that all workers can see"):
            layer(1)
        monkeypatch.setattr(sweeping, "package_versions", lambda: dict.fromkeys(identity["versions"], "0.0"))
        with pytest.raises(RunError, match=r"has tl-headmaps 0.0, the process that started the sweep has 0.2.0"):
            shipped(0)


class Failing(Slow):
    def prepare(self) -> LayerStep:
        step = super().prepare()
        return lambda layer: step(layer // (layer != 3))


class Job:
    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self) -> Any:
        return self.value

    def cancel(self) -> None:
        """Done already."""

    def cancelled(self) -> bool:
        return False


class Immediate:
    """Computes when asked, and answers with jobs that are no concurrent.futures.Future."""

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Job:
        return Job(call(*arguments))


def kill_worker_of(notes: Path, layer: int) -> None:
    """Wait until some process works on a layer, and kill it."""
    stop = time.monotonic() + PATIENCE
    while time.monotonic() < stop:
        for note in notes.glob(f"layer-{layer}-*"):
            os.kill(int(note.name.rsplit("-", 1)[1]), signal.SIGKILL)
            return
        time.sleep(0.02)


PATIENCE = 300
"""Seconds to wait for a worker to start; it takes about three on a quiet machine."""


class TestDask:
    def test_a_worker_of_two_is_killed_and_the_result_is_whole(
        self, weights: HeadWeights, plain: RelationScores, tmp_path: Path
    ) -> None:
        distributed = pytest.importorskip("distributed", reason="pip install tl-headmaps[cluster]")
        notes, run, whole = tmp_path / "notes", tmp_path / "run", tmp_path / "whole"
        notes.mkdir()
        with (
            distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            assert isinstance(client.get_executor(), Executor)
            killer = threading.Thread(target=kill_worker_of, args=(notes, 1))
            killer.start()
            found = slow_sweep(Slow(weights, str(notes), 0.4), client.get_executor(), run)
            killer.join()
            assert timeless(scores(weights, None, executor=client.get_executor())) == timeless(plain)
        workers = {note.name.split("-")[2] for note in notes.glob("layer-*")}
        assert len(workers) >= 2 and str(os.getpid()) not in workers
        assert len(list(notes.glob("layer-1-*"))) == 2, "the killed layer was done again by another process"
        slow_sweep(Slow(weights, str(tmp_path)), None, whole)
        assert pieces(run) == pieces(whole)
        expected = slow_sweep(Slow(weights, str(tmp_path)), None)
        assert all(torch.equal(found[layer], expected[layer]) for layer in expected)


class TestProgress:
    def test_a_run_that_goes_on_says_how_many_layers_are_done(
        self, weights: HeadWeights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        scores(weights, tmp_path, progress=True)
        assert "done before" not in capsys.readouterr().err
        (tmp_path / "layer-0002.safetensors").unlink()
        (tmp_path / "layer-0005.safetensors").write_bytes(b"x")
        scores(weights, tmp_path, progress=True)
        assert "4 of 6 layers were done before." in capsys.readouterr().err.splitlines()
        scores(weights, tmp_path)
        assert capsys.readouterr().err == ""
