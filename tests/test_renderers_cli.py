"""Pictures from the command line: --out picture.html, .svg, .png, .pdf."""

from pathlib import Path
from typing import Any

import pytest
from commands import GRID

pytestmark = [
    pytest.mark.model,
    pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated:DeprecationWarning"),
]


def test_a_grid_is_written_in_every_form(run: Any, loaded: Any, tmp_path: Path) -> None:
    paths = [tmp_path / f"grid{suffix}" for suffix in (".html", ".svg", ".png", ".pdf", ".json", ".tex")]
    done = run(*GRID, *(part for path in paths for part in ("--out", str(path))))
    assert done.code == 0
    assert [path.stat().st_size > 500 for path in paths] == [True] * 6
    page = paths[0].read_text(encoding="utf-8")
    assert "France → Paris" in page and "L23H4" in page


def test_scores_and_the_model_have_pages(run: Any, loaded: Any, tmp_path: Path) -> None:
    page = tmp_path / "scores.html"
    assert run("relations", "country_to_capital", "--heads", "L23H4,L23H5", "--out", str(page)).code == 0
    assert "Highest: L23H4 0.7381" in page.read_text(encoding="utf-8")
    for suffix in (".html", ".svg"):
        path = tmp_path / f"model{suffix}"
        assert run("model", "--out", str(path)).code == 0
        assert path.stat().st_size > 500
