"""A notebook with every figure runs in a real kernel, and what it saves stays small."""

import json
from pathlib import Path

import nbformat
import pytest
from every_figure import every_figure
from notebooks import execute
from test_renderers import scores

MEGABYTE = 1 << 20


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_notebook_with_every_figure_runs_and_stays_small(tmp_path: Path) -> None:
    names = list(every_figure())
    cells = ["from every_figure import every_figure\nfigures = every_figure()"]
    cells += [f"figures[{name!r}]" for name in names]
    cells += ["from test_renderers import scores\nscores()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    execute(notebook, tmp_path)
    for cell, name in zip(notebook.cells[1:], [*names, "scores"], strict=True):
        # Without ipywidgets tqdm says on import, on stderr, that its bars could be nicer.
        (output,) = [output for output in cell.outputs if output.get("name") != "stderr"]
        assert 'class="tlhm"' in output.data["text/html"], name
        assert output.data["text/plain"], name
    saved = nbformat.writes(notebook)
    assert json.loads(saved)
    # Each figure is a page with a picture of itself: GitHub shows the picture.
    assert len(saved.encode()) < 0.25 * MEGABYTE * len(cells)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_text_of_a_result_is_the_same_in_a_notebook(tmp_path: Path) -> None:
    """The library that aligns tables shows them itself in a kernel, unless it is told not to."""
    code = "from test_renderers import scores\nprint(scores())"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    execute(notebook, tmp_path)
    shown = [output for output in notebook.cells[0].outputs if output.get("name") != "stderr"]
    assert [output.output_type for output in shown] == ["stream"]
    assert shown[0].text == f"{scores()}\n"
