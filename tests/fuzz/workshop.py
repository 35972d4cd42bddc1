"""What tries share: a small model, its checkpoint, what its analyses say undisturbed; commands and forked processes."""

import io
import json
import os
import random
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from browser import EXECUTABLE, Browser
from commands import CREATED
from every_result import ANALYSES, ASKED, NEXT
from mutations import mutated_bytes, mutated_json
from planted import random_model, save_checkpoint, source_model

from tl_headmaps import HeadMapsError, HeadWeights, Result, relation_scores, reproduce
from tl_headmaps.core.files import cache_folder

LONGEST_SENTENCE = 2000


class Workshop:
    """What all tries share. Files that a command is told to write land in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.environ["TL_HEADMAPS_CACHE"] = str(folder / "cache")
        assert cache_folder() == folder / "cache"
        os.chdir(folder)

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
    def relation_file(self) -> Path:
        """A relation between words of the small model, with prompts."""
        (self.folder / "data" / "own").mkdir(parents=True)
        templates = {"neutral": [" word19 <X>", " word4 <X>"], "eliciting": [" word18 <X>"]}
        path = self.folder / "data" / "own" / "asked.json"
        content = {"name": "asked", "k": 20, "pairs": list(ASKED.pairs), "templates": templates}
        path.write_text(json.dumps(content))
        return path

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
        return self.run_files(self.swept("whole"))

    def swept(self, name: str) -> Path:
        """A run folder, begun or resumed."""
        weights = HeadWeights.from_checkpoint(self.checkpoint)
        relation_scores(weights, NEXT, run_dir=self.folder / name, progress=False).save(self.folder / f"{name}.json")
        return self.folder / name

    @cached_property
    def whole_reproduction(self) -> dict[str, bytes]:
        """The files of a reproduction that nothing disturbed."""
        return self.reproduction_files(self.reproduced("whole-reproduction"))

    def reproduced(self, name: str) -> Path:
        """The folder of a reproduction, begun or resumed."""
        data = self.relation_file.parent.parent
        reproduce(self.model, self.folder / name, data_dir=data, n_random=2, progress=False)
        return self.folder / name

    @staticmethod
    def run_files(folder: Path) -> dict[str, bytes]:
        """The layers of a run."""
        return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}

    @staticmethod
    def reproduction_files(folder: Path) -> dict[str, bytes]:
        """What a reader opens of a reproduction, but for the time it was started; the manifest must say the same."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        stated = json.loads(files.pop("manifest.json"))["files"]
        shown = {name: data for name, data in files.items() if not name.startswith(("pieces/", "run."))}
        assert stated == {name: sha256(data).hexdigest() for name, data in shown.items()}
        return {name: CREATED.sub(b"", data) for name, data in shown.items()}

    @cached_property
    def browser(self) -> Browser | None:
        return None if EXECUTABLE is None else Browser(self.folder / "browser")

    def empty(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def copy(self, source: str, target: str) -> Path:
        shutil.rmtree(self.folder / target, ignore_errors=True)
        return Path(shutil.copytree(self.folder / source, self.folder / target))

    def close(self) -> None:
        os.chdir("/")
        if "browser" in vars(self) and self.browser is not None:
            self.browser.close()


@contextmanager
def cached_in(folder: Path) -> Iterator[None]:
    """A cache folder of one's own."""
    before = os.environ["TL_HEADMAPS_CACHE"]
    os.environ["TL_HEADMAPS_CACHE"] = str(folder)
    try:
        yield
    finally:
        os.environ["TL_HEADMAPS_CACHE"] = before


def written(path: Path, valid: Any, generator: random.Random) -> Path:
    """Something valid as JSON, damaged in its values or its bytes."""
    if generator.random() < 0.6:
        path.write_text(json.dumps(mutated_json(valid, generator, generator.choice((1, 1, 2, 5)))), "utf-8")
    else:
        path.write_bytes(mutated_bytes(json.dumps(valid).encode(), generator))
    return path


def check_sentence(error: HeadMapsError) -> None:
    """A message for people: a sentence or more, and not pages of them."""
    text = str(error)
    sentence = text.strip() and text.rstrip()[-1] in ".?!)" and len(text) < LONGEST_SENTENCE
    assert sentence, f"not a sentence: {text[:300]!r}"


@dataclass(frozen=True)
class Command:
    """What a command left behind."""

    code: Any
    out: str
    err: str

    @classmethod
    def run(cls, *arguments: str) -> "Command":
        from tl_headmaps.cli.app import main

        out, err, before = io.StringIO(), io.StringIO(), sys.argv
        sys.argv = ["tl-headmaps", *arguments]
        try:
            with redirect_stdout(out), redirect_stderr(err):
                main()
            code: Any = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        finally:
            sys.argv = before
        return cls(code, out.getvalue(), err.getvalue())


def in_child(call: Callable[[], Any], descriptors: Mapping[int, int] | None = None) -> int:
    """Exit status of a call in a forked process: 0 done, 1 a sentence, 3 anything else, negative if it was killed.

    Args:
        call: What it does.
        descriptors: Its own descriptors (1 for stdout), and which of ours they are.
    """
    child = os.fork()
    if child == 0:
        code: Any = 3
        try:
            for theirs, ours in (descriptors or {}).items():
                os.dup2(ours, theirs)
            with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
                call()
            code = 0
        except HeadMapsError:
            code = 1
        except SystemExit as leaving:
            code = leaving.code or 0
        except BaseException:
            traceback.print_exc(limit=-6, file=sys.__stderr__)
        finally:
            os._exit(code if isinstance(code, int) else 3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
