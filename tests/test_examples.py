"""The numbered notebooks: clean as they are stored, and every one runs in a fresh kernel."""

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from notebooks import ROOT, execute

import tl_headmaps

EXAMPLES = sorted((ROOT / "examples").glob("*.ipynb"))
MACHINE_PATH = re.compile(r"/(home|root|tmp|work|Users|content)/|[A-Z]:\\")
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
    assert len(EXAMPLES) >= 8
    entries = {entry.name for entry in (ROOT / "examples").iterdir() if not entry.name.startswith(".")}
    assert entries == {"gallery", *(path.name for path in EXAMPLES)}


@each_example
def test_is_stored_clean(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None)
        assert not cell.metadata
    assert not MACHINE_PATH.search(path.read_text(encoding="utf-8"))


@each_example
def test_starts_with_a_question_and_an_installation_on_colab_only(path: Path) -> None:
    first, second = read(path).cells[:2]
    assert first.cell_type == "markdown" and re.match(r"# .*\?\n", first.source)
    assert second.cell_type == "code" and "%pip install" in second.source
    _, _, guarded = second.source.partition('if "google.colab" in sys.modules:\n')
    assert guarded.strip().startswith("%pip install") and "\n" not in guarded.strip()
    assert second.source == sources(EXAMPLES[0])[0], "all notebooks install in the same way"


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


@pytest.mark.model
@KERNEL
@each_example
def test_runs(path: Path, tmp_path: Path) -> None:
    notebook = read(path)
    complaints = UPSTREAM.sub("", execute(notebook, tmp_path))
    assert "Warning" not in complaints, complaints
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in shown if 'class="tlhm"' in output.get("data", {}).get("text/html", "")]
    assert pictures, "a notebook shows at least one picture"
