"""What the README says is true: its names exist and its snippets run."""

import re
from pathlib import Path
from typing import Any

import pytest

import tl_headmaps
from tl_headmaps.cli.app import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in tl_headmaps.__all__ if not name.startswith("_")])
def test_every_public_name_stands_in_the_readme(name: str) -> None:
    assert re.search(rf"\b{name}\b", README)


def test_every_command_stands_in_the_readme() -> None:
    from typer.main import get_command

    for name in get_command(app).commands:  # type: ignore[attr-defined]
        assert f"tl-headmaps {name}" in README or f"make {name}" in README


@pytest.fixture
def opened_once(default_model: Any, clean_catalogue: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tl_headmaps.load_default_model", lambda: default_model)
    monkeypatch.chdir(tmp_path)


@pytest.mark.model
def test_python_in_the_readme_runs(opened_once: None, tmp_path: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", README, re.S)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})
    assert (tmp_path / "scores.json").exists()
