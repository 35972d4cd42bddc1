"""The numbered notebooks: every one runs in a fresh kernel, and is stored with what that run shows."""

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from notebooks import EXAMPLES, INSTALLATION, ROOT, badge, execute, make_storable, outputs_of, run

import tl_headmaps

MACHINE_PATH = re.compile(r"/(home|root|tmp|work|Users|content)/|[A-Z]:\\\\")
NUMBER = re.compile(r"[-<]?[0-9][0-9.,e+-]*%?|─+| +")
"""What another processor may print otherwise: digits, and the width of the columns that hold them."""

LARGEST = 500_000
UPSTREAM = re.compile(r".*TqdmWarning: IProgress not found.*\n.*import tqdm.*\n")
"""Waiting for nobody: tqdm says on import that ipywidgets would draw nicer bars; whoever has them does not see it."""

KERNEL = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def sources(path: Path, kind: str = "code") -> list[str]:
    return [cell.source for cell in read(path).cells if cell.cell_type == kind]


def test_numbers_have_no_gaps_and_nothing_else_lies_beside() -> None:
    assert [path.stem[:3] for path in EXAMPLES] == [f"{number:02d}_" for number in range(1, len(EXAMPLES) + 1)]
    assert 8 <= len(EXAMPLES) <= 10
    entries = {entry.name for entry in (ROOT / "examples").iterdir() if not entry.name.startswith(".")}
    assert entries == {"gallery", "site", *(path.name for path in EXAMPLES)}


@each_example
def test_is_stored_as_make_notebooks_stores_it(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"] == [
        *range(1, 1 + len(sources(path)))
    ]
    assert not any(cell.metadata for cell in notebook.cells)
    shown = outputs_of(notebook)
    assert not [output for output in shown if output.get("name") == "stderr" or output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in shown), "GitHub shows no picture"
    assert not any('class="tlhm"' in output.get("data", {}).get("text/html", "") for output in shown)
    text = path.read_text(encoding="utf-8")
    assert len(text) < LARGEST and not MACHINE_PATH.search(re.sub(r'"image/png": "[^"]*"', "", text))


@each_example
def test_starts_with_a_question_a_badge_and_an_installation_on_colab_only(path: Path) -> None:
    first, second = read(path).cells[:2]
    assert first.cell_type == "markdown" and re.match(r"# .*\?\n", first.source)
    assert first.source.splitlines()[2] == badge(path.name)
    assert second.cell_type == "code" and second.source == INSTALLATION.strip()


@pytest.mark.parametrize(("clone", "expected"), [(True, "..[demo]"), (False, "tl-headmaps[demo]")])
def test_on_colab_the_clone_or_the_release_is_installed(
    clone: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").mkdir()
    if clone:
        (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path / "examples")
    code = INSTALLATION.replace('%pip install --quiet "{source}[demo]"', 'installed.append(f"{source}[demo]")')
    installed: list[str] = []
    exec(code, {"installed": installed})
    assert installed == [] and capsys.readouterr().out == ""
    monkeypatch.setitem(sys.modules, "google.colab", sys)
    exec(code, {"installed": installed})
    assert installed == [expected]
    assert ("the clone" if clone else "the released package") in capsys.readouterr().out


def test_badges_lead_to_the_sources_once_they_have_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "(https://colab.research.google.com/" in badge("01_quickstart.ipynb")
    monkeypatch.setattr("notebooks.pyproject", lambda: {"project": {"urls": {"Source": "https://github.com/a/b"}}})
    assert badge("x.ipynb").endswith("(https://colab.research.google.com/github/a/b/blob/main/examples/x.ipynb)")


@each_example
def test_says_in_one_line_how_to_switch_models_and_asserts_its_numbers(path: Path) -> None:
    lines = "\n".join(sources(path)).splitlines()
    assert len([line for line in lines if re.search(r'load_model\("gpt2"', line)]) == 1
    assert any(line.lstrip().startswith("assert ") for line in lines)


@each_example
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", "\n".join(sources(path, "markdown"))):
        assert target.startswith("https://") or (path.parent / target).is_file(), target


@KERNEL
def test_a_kernel_runs_this_python_and_sees_this_tree(tmp_path: Path) -> None:
    code = "import os, sys, tl_headmaps\nprint(sys.executable, tl_headmaps.__file__, os.getcwd(), sep='\\n')"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    assert execute(notebook, tmp_path) == ""
    assert notebook.cells[0].outputs[0].text.splitlines() == [sys.executable, tl_headmaps.__file__, str(tmp_path)]


@KERNEL
def test_what_a_kernel_leaves_in_its_temporary_folder_is_removed(tmp_path: Path) -> None:
    code = "import tempfile\nprint(tempfile.mkdtemp())"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    execute(notebook, tmp_path)
    assert not Path(notebook.cells[0].outputs[0].text.strip()).exists()


@KERNEL
def test_a_failing_cell_is_shown_with_its_source_and_error(tmp_path: Path) -> None:
    code = "score = 0.5\nassert score > 0.7, 'the head does not know capitals'"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    with pytest.raises(CellExecutionError, match=r"assert score > 0\.7(.|\n)*AssertionError(.|\n)*know capitals"):
        execute(notebook, tmp_path)


@KERNEL
def test_what_goes_to_stderr_comes_back(tmp_path: Path) -> None:
    code = "import warnings\nwarnings.warn('careful')"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    assert "UserWarning: careful" in execute(notebook, tmp_path)


def told(notebook: Any) -> list[list[str]]:
    """What each cell says, in words."""
    kinds = ("text/html", "text/markdown", "text/plain")
    cells = []
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        texts = [output.get("data", {}).get(kind, "") for output in outputs for kind in kinds]
        streams = "".join(output.text for output in outputs if output.output_type == "stream")
        cells.append([NUMBER.sub(" ", text).strip() for text in (streams, *texts)])
    return cells


@pytest.mark.model
@KERNEL
@each_example
def test_runs_and_says_what_is_stored(path: Path, tmp_path: Path) -> None:
    notebook, complaints = run(path, tmp_path)
    complaints = UPSTREAM.sub("", complaints)
    assert "Warning" not in complaints, complaints
    pictures = [shown for shown in outputs_of(notebook) if 'class="tlhm"' in shown.get("data", {}).get("text/html", "")]
    assert pictures, "a notebook shows at least one picture"
    make_storable(notebook)
    assert told(notebook) == told(read(path)), "run make notebooks"
