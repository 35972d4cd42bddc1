"""What several test files share; what examples need too is in docstring_examples.py."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import pytest
import torch
from browser import EXECUTABLE, Browser
from commands import Run
from hypothesis import HealthCheck, settings

settings.register_profile(
    "tests", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("tests")

TL_MAJOR = int(version("transformer-lens").split(".")[0])


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def same_checks() -> None:
    """The type checker looks at one random item of a container: the same one in every run."""
    random.seed(0)


@pytest.fixture(scope="session")
def default_weights(default_model: Any) -> Any:
    from tl_headmaps import HeadWeights

    return HeadWeights.from_model(default_model)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """main() in this process, as the console script calls it."""
    from tl_headmaps.cli.app import main

    def call(*arguments: str) -> Run:
        monkeypatch.setattr(sys, "argv", ["tl-headmaps", *arguments])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        capsys.readouterr()
        try:
            main()
            code: Any = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        shown = capsys.readouterr()
        return Run(code, shown.out, shown.err)

    return call


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, default_weights: Any) -> list[tuple[Any, ...]]:
    """Loading is replaced by the session's weights; the list tells what was asked for."""
    asked: list[tuple[Any, ...]] = []

    def load(*arguments: Any) -> Any:
        asked.append(arguments)
        return default_weights

    monkeypatch.setattr("tl_headmaps.load_model", load)
    return asked


@pytest.fixture
def never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any) -> None:
        raise AssertionError("the model was loaded before the mistake was seen")

    monkeypatch.setattr("tl_headmaps.load_model", load)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if EXECUTABLE is None:
        why = "no Chromium was found; install one (apt-get install chromium) and run make test-browser"
        if os.environ.get("TL_HEADMAPS_BROWSER") == "required":
            pytest.fail(why)
        pytest.skip(why)
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads cost more than they bring on small matrices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
