"""A notebook with every figure runs in a real kernel, and what it saves stays small."""

import json
from pathlib import Path

import nbformat
import pytest
from every_figure import every_figure
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
MEGABYTE = 1 << 20


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_notebook_with_every_figure_runs_and_stays_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    names = list(every_figure())
    cells = ["from every_figure import every_figure\nfigures = every_figure()"]
    cells += [f"figures[{name!r}]" for name in names]
    cells += ["from test_renderers import scores\nscores()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    for cell, name in zip(notebook.cells[1:], [*names, "scores"], strict=True):
        (output,) = cell.outputs
        assert 'class="tlhm"' in output.data["text/html"], name
        assert output.data["text/plain"], name
    saved = nbformat.writes(notebook)
    assert json.loads(saved)
    assert len(saved.encode()) < 3 * MEGABYTE
