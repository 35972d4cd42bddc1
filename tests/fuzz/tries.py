"""One try of each kind: something valid is damaged, and must be refused with a sentence or give the same bytes.

A try returns True if it was let through and held, False if it was refused; anything else is an exception.
"""

import ctypes
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from browser import EXECUTABLE, Browser
from mutations import HOSTILE, RUBBISH, mutated_bytes, mutated_json
from planted import random_model, save_checkpoint, source_model
from test_shell import ANALYSES, NEXT, default_dtype, in_threads, matmul_precision, plain

from tl_headmaps import (
    HeadMapsError,
    HeadWeights,
    Relation,
    Result,
    Tasks,
    ValueMixing,
    load_model,
    relation_scores,
    token_grid,
)
from tl_headmaps.core.files import cache_folder


class Workshop:
    """What all tries share: a folder, a small model, its checkpoint, and what its analyses say undisturbed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.environ["TL_HEADMAPS_CACHE"] = str(folder / "cache")
        assert cache_folder() == folder / "cache"

    @cached_property
    def model(self) -> Any:
        return random_model("llama")

    @cached_property
    def checkpoint(self) -> Path:
        return save_checkpoint(source_model("llama"), self.folder / "llama")

    @cached_property
    def results(self) -> dict[str, Result]:
        return {name: call(self.model) for name, call in ANALYSES.items()}

    @cached_property
    def relation(self) -> dict[str, Any]:
        templates = {"neutral": ["The <X> is"], "eliciting": ["The capital of <X> is"]}
        words = [["France", "Paris"], ["Egypt", "Cairo"], [3, 4]]
        return {"name": "own", "k": 5, "title": "t", "source": "s", "pairs": words, "templates": templates}

    @cached_property
    def tasks(self) -> list[dict[str, Any]]:
        return [
            {"question": f"{n} {label}", "answer": "a", "function": label, "alternatives": ["b"], "content": str(n)}
            for n in range(12)
            for label in ("retrieval", "inference")
        ]

    @cached_property
    def whole_run(self) -> dict[str, bytes]:
        """The files of a run that nothing disturbed."""
        swept(self.checkpoint, self.folder / "whole")
        return run_files(self.folder / "whole")

    @cached_property
    def browser(self) -> Browser | None:
        return None if EXECUTABLE is None else Browser(self.folder / "browser")

    def empty(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def close(self) -> None:
        if "browser" in vars(self) and self.browser is not None:
            self.browser.close()


def written(path: Path, valid: Any, generator: random.Random) -> Path:
    """Something valid as JSON, damaged in its values or its bytes."""
    if generator.random() < 0.6:
        path.write_text(json.dumps(mutated_json(valid, generator, generator.choice((1, 1, 2, 5)))), "utf-8")
    else:
        path.write_bytes(mutated_bytes(json.dumps(valid).encode(), generator))
    return path


def relation_file(shop: Workshop, generator: random.Random) -> bool:
    suffix = generator.choice((".json", ".csv", ".tsv"))
    path = shop.folder / f"relation{suffix}"
    if suffix == ".json":
        written(path, generator.choice([shop.relation, shop.relation["pairs"]]), generator)
    else:
        path.write_bytes(mutated_bytes(b'source,target\r\nFrance,Paris\r\n"a\nb",c\r\n=1,\'x\r\n' * 2, generator))
    relation = Relation.from_file(path)
    relation_scores(shop.model, relation, heads="L1H0", progress=False, preset="folded").to_json()
    return True


def task_file(shop: Workshop, generator: random.Random) -> bool:
    suffix = generator.choice((".json", ".jsonl", ".csv"))
    path = shop.folder / f"tasks{suffix}"
    if suffix == ".csv":
        rows = "".join(f'"{n}\n?",a,{f}\r\n' for n in range(10) for f in ("retrieval", "inference"))
        path.write_bytes(mutated_bytes(f"question,answer,function\r\n{rows}".encode(), generator))
    elif suffix == ".jsonl":
        path.write_bytes(mutated_bytes("\n".join(map(json.dumps, shop.tasks)).encode(), generator))
    else:
        written(path, shop.tasks, generator)
    tasks = Tasks.from_file(path, duplicates=generator.choice(("refuse", "drop")))
    assert tasks.digest and tasks.sample(10, seed=0).counts
    return True


def checkpoint_folder(shop: Workshop, generator: random.Random) -> bool:
    """Configurations, indexes and weights; whatever opens must give finite numbers, both ways the same."""
    folder = shop.empty("hostile")
    for path in shop.checkpoint.iterdir():
        shutil.copy(path, folder)
    kind = generator.choice(("config", "config", "index", "weights", "tokenizer"))
    if kind == "config":
        written(folder / "config.json", json.loads((folder / "config.json").read_text()), generator)
    elif kind == "index":
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        names = dict.fromkeys(source_model("llama").state_dict(), "part.safetensors")
        written(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": names}, generator)
    elif kind == "weights":
        data = (folder / "model.safetensors").read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        damaged = mutated_bytes(data[:header], generator) + data[header:]
        if generator.random() < 0.3:
            damaged = mutated_bytes(data, generator)
        (folder / "model.safetensors").write_bytes(damaged)
    else:
        name = generator.choice(("tokenizer.json", "tokenizer_config.json"))
        written(folder / name, json.loads((folder / name).read_text()), generator)
    outcomes = []
    for open_it in (HeadWeights.from_checkpoint, lambda path: load_model(str(path), "cpu")):
        try:
            outcomes.append(plain(token_grid(open_it(folder), "L1H0", [3, 4], [5, 6], preset="folded")))
        except HeadMapsError as error:
            check_sentence(error)
    if len(outcomes) == 2 and kind != "tokenizer":
        first, second = (torch.tensor(outcome["values"]) for outcome in outcomes)
        assert torch.allclose(first, second, atol=1e-4), "a folder gives two different results"
    return bool(outcomes)


def result_file(shop: Workshop, generator: random.Random) -> bool:
    """Whatever loads can be printed, listed, saved and drawn."""
    name = generator.choice(list(shop.results))
    path = shop.folder / "result.json"
    if generator.random() < 0.2:
        path = shop.results[name].save(shop.folder / "result.safetensors")
        path.write_bytes(mutated_bytes(path.read_bytes(), generator))
    else:
        written(path, json.loads(shop.results[name].to_json()), generator)
    loaded = Result.load(path)
    assert str(loaded) is not None and loaded.to_json() and loaded.figure()
    loaded.to_csv()
    return True


def swept(checkpoint: Path, run_dir: Path) -> Result:
    weights = HeadWeights.from_checkpoint(checkpoint)
    return relation_scores(weights, NEXT, run_dir=run_dir, progress=False)


def run_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".safetensors",)}


def run_folder(shop: Workshop, generator: random.Random) -> bool:
    """A damaged file of a run is made again, bit for bit, or the folder is refused."""
    whole = shop.whole_run
    folder = shop.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(shop.folder / "whole", folder)
    path = generator.choice(sorted(path for path in folder.iterdir() if path.name != "run.lock"))
    path.write_bytes(mutated_bytes(path.read_bytes(), generator))
    with redirect_stderr(io.StringIO()):
        swept(shop.checkpoint, folder)
    assert run_files(folder) == whole, f"{path.name} was damaged, and the run has other bytes"
    return True


def command_line(shop: Workshop, generator: random.Random) -> bool:
    """Options with anything in them: exit code 0, 1 or 2, and no traceback."""
    from tl_headmaps.cli.app import main

    places = [str(shop.folder), str(shop.checkpoint), "~nosuch/x", "y" * 5000, "/dev/full"]
    safe = [str(value).replace("\0", "") for value in (*RUBBISH, *places, "L1H0")]
    commands = {
        "grid": ["--head", "L1H0", "--sources", "#3,#4", "--targets", "#5", "--circuit", "ov", "--preset", "maps"],
        "relations": ["country_to_capital", "--heads", "L1H0", "--k", "3", "--run-dir", str(shop.folder / "cli")],
        "components": ["--metric", "stable_rank", "--seed", "0"],
        "model": [],
        "cite": [],
    }
    command = generator.choice(list(commands))
    arguments = [*commands[command]] + (["--checkpoint", str(shop.checkpoint)] if command != "cite" else [])
    if command in ("grid", "model"):
        arguments += ["--out", str(shop.folder / f"out{generator.choice(['.json', '.csv', '.html', '.txt', ''])}")]
    if arguments:
        arguments[generator.randrange(len(arguments))] = generator.choice(safe)
    if generator.random() < 0.3:
        arguments.append(generator.choice([*safe, "--device", "--workers", "--out", "--nothing"]))
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["tl-headmaps", command, *arguments]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
        code: Any = 0
    except SystemExit as leaving:
        code = leaving.code or 0
    finally:
        sys.argv = before
    assert code in (0, 1, 2) and "Traceback" not in err.getvalue(), (code, arguments, err.getvalue()[-500:])
    assert code == 0 or err.getvalue().strip(), (code, arguments)
    return code == 0


def page(shop: Workshop, generator: random.Random) -> bool:
    """Hostile strings in every field that reaches a page: nothing runs, and nothing is asked for."""
    result = generator.choice(list(shop.results.values()))
    values = json.loads(result.to_json())

    def poisoned(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: poisoned(inside, name) for name, inside in value.items()}
        if isinstance(value, list):
            return [poisoned(inside, key) for inside in value]
        changeable = isinstance(value, str) and key not in ("kind", "circuit", "measure", "method", "head", "heads")
        return generator.choice(HOSTILE) if changeable and generator.random() < 0.5 else value

    path = shop.folder / "poisoned.json"
    path.write_text(json.dumps(poisoned(values)), "utf-8")
    if generator.random() < 0.3:
        tokens = [generator.choice(HOSTILE) for _ in range(3)]
        drawn: Result = ValueMixing.from_arrays(torch.eye(3), torch.ones(3, 2), tokens)
    else:
        drawn = Result.load(path)
    drawn.save(shop.folder / "poisoned.html")
    if shop.browser is None:
        return True
    shop.browser.open(shop.folder / "poisoned.html")
    assert shop.browser.run("typeof window.sprung") == "undefined", "a script of a label ran"
    outside = [url for url in shop.browser.requests if not url.startswith(("file:", "data:", "blob:", "about:"))]
    assert not outside, f"the page asked for {outside[0]}"
    return True


def in_child(call: Callable[[], Any]) -> int:
    """Exit status of a call in a forked process: 0 done, 1 a sentence, 3 anything else, negative if it was killed."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
                call()
            code = 0
        except HeadMapsError:
            code = 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(shop: Workshop, generator: random.Random) -> bool:
    """Killed at any I/O event, a run resumes to the same bytes, and nothing temporary is left."""
    whole = shop.whole_run
    folder, out = shop.folder / "killed", shop.folder / "killed.json"
    shutil.rmtree(folder, ignore_errors=True)
    after = generator.randrange(1, 120)

    def doomed() -> None:
        left = [after]

        def count(event: str, _: Any) -> None:
            if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod"):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        swept(shop.checkpoint, folder).save(out)

    assert in_child(doomed) in (0, -signal.SIGKILL)
    with redirect_stderr(io.StringIO()):
        swept(shop.checkpoint, folder).save(out)
    assert run_files(folder) == whole, f"killed after {after} events, the run has other bytes"
    left = [path.name for place in (folder, shop.folder) for path in place.glob(".*.part")]
    assert not left, f"killed after {after} events: {left} stays"
    Result.load(out)
    return True


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """A file system of a few bytes, if this process may mount one."""
    folder.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()) == 0
    try:
        yield mounted
    finally:
        if mounted:
            libc.umount2(os.fsencode(folder), 2)


def full_disk(shop: Workshop, generator: random.Random) -> bool:
    """A disk that is full: a sentence, the old file as it was, and nothing half-written."""
    result = generator.choice(list(shop.results.values()))
    name = "result" + generator.choice((".json", ".csv", ".safetensors", ".html"))
    size = generator.choice((4096, 8192, 16384, 65536))
    with small_disk(shop.folder / "disk", size) as mounted:
        target = shop.folder / "disk" / name
        target.write_text("old")

        def save() -> None:
            if not mounted:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            result.save(target)

        code = in_child(save)
        assert code in (0, 1), f"exit {code}"
        assert (target.read_text("utf-8", "replace") == "old") == (code == 1), "the old file is gone"
        assert [path.name for path in target.parent.iterdir()] == [name]
        target.unlink()
    return code == 0


def ambient(shop: Workshop, generator: random.Random) -> bool:
    """Whatever torch was set to before: the same numbers."""
    name = generator.choice(list(shop.results))
    states: list[Callable[[], Any]] = [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.device("meta"),
        torch.inference_mode,
        torch.enable_grad,
    ]
    dtype = generator.choice((torch.float64, torch.float16, torch.bfloat16, torch.float32))
    precision = generator.choice(("highest", "high", "medium"))
    with default_dtype(dtype), matmul_precision(precision), generator.choice(states)(), generator.choice(states)():
        result = ANALYSES[name](shop.model)
        figure = result.figure()
    assert plain(result) == plain(shop.results[name]), f"{name} gives other numbers"
    assert figure is not None
    return True


def threads(shop: Workshop, generator: random.Random) -> bool:
    """Analyses in several threads on one model: the numbers of one thread, and the user's hooks as before."""
    names = [generator.choice(list(shop.results)) for _ in range(3)]
    points = [point for name, point in shop.model.hook_dict.items() if name.endswith("hook_z")]
    called: list[str] = []
    for point in points:
        point.add_hook(lambda value, hook: called.append(hook.name))
    before = [list(point._forward_hooks) for point in points]
    try:
        found = in_threads([lambda name=name: plain(ANALYSES[name](shop.model)) for name in names])
        assert [list(point._forward_hooks) for point in points] == before and not called
    finally:
        shop.model.reset_hooks()
    for name, values in zip(names, found, strict=True):
        if isinstance(values, BaseException):
            raise values
        assert values == plain(shop.results[name]), f"{name} gives other numbers beside {names}"
    return True


def check_sentence(error: HeadMapsError) -> None:
    """A message for people: a sentence or more, and not pages of them."""
    text = str(error)
    assert text.strip() and text.rstrip()[-1] in ".?!)" and len(text) < 2000, f"not a sentence: {text[:300]!r}"


TRIES: dict[str, Callable[[Workshop, random.Random], bool]] = {
    "relation files": relation_file,
    "task files": task_file,
    "checkpoint folders": checkpoint_folder,
    "result files": result_file,
    "run folders": run_folder,
    "command lines": command_line,
    "pages": page,
    "kills": kill,
    "full disks": full_disk,
    "torch states": ambient,
    "threads": threads,
}
