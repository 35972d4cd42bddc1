"""Statements of the package on heads that know nothing: the slice for CI, and whether every statement has its row."""

import re
from abc import ABCMeta
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration import task_rows
from calibration.rows import Bench, Row
from calibration.run import load_rows, stored
from test_analyses import NOT_A_QUESTION, QUESTIONS, modules

import tl_headmaps
from tl_headmaps.results import Result

ROWS = load_rows()

STATEMENT = re.compile(r"(^|_)(p_value|q_value|p_values|low|high)$")
"""Fields of a result that say how sure it is."""

WITHOUT_A_ROW = {
    "compare": "shows the intervals of the two results beside each other",
    "reproduce": "repeats the statements of relation_scores, validate and ablate",
}


@pytest.fixture(scope="module")
def bench(default_model: Any) -> Bench:
    """One for all rows: some share what they measure."""
    quick = Bench(quick=True)
    quick.model = default_model
    return quick


@pytest.mark.model
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_quick_look_does_not_contradict_the_table(row: Row, bench: Bench) -> None:
    measured = row.measure(bench)
    assert measured.n > 0
    if row.why:
        return
    # Few draws: only what is far outside can be seen here.
    assert measured.at_05 is None or measured.at_05 <= 0.25
    assert measured.coverage is None or measured.coverage >= 0.75
    assert measured.false_verdicts is None or measured.false_verdicts <= 0.25


@pytest.mark.model
def test_sets_drawn_anew_for_each_fold_would_be_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sets would average out what own heads, nearly the same in all folds, do not."""
    matched = task_rows._matched

    def apart(own: Any, everything: Any, n_random: int, seed: int) -> Any:
        each = [matched(heads[None], everything, n_random, seed + fold) for fold, heads in enumerate(own)]
        return replace(each[0], masks=torch.cat([draws.masks for draws in each], 1))

    together = task_rows.random_heads_that_matter_alike(bench)
    monkeypatch.setattr(task_rows, "_matched", apart)
    found = task_rows.random_heads_that_matter_alike(bench)
    assert together.at_05 is not None and found.at_05 is not None
    assert together.at_05 < 0.08 < 0.12 < found.at_05


def test_every_row_is_in_the_table() -> None:
    missing = [row.name for row in ROWS if row.name not in stored()]
    assert not missing, f"run make calibrate; not measured yet: {missing}"


@pytest.mark.parametrize("question", [name for name in QUESTIONS if name not in NOT_A_QUESTION])
def test_a_question_whose_results_say_how_sure_they_are_has_a_row(question: str) -> None:
    found = set()
    for module in modules(question):
        for value in vars(import_module(f"tl_headmaps.{module}")).values():
            # Not inspect.isclass: to Python 3.10, list[int] is a class.
            own = isinstance(value, ABCMeta) and value.__module__ == f"tl_headmaps.{module}"
            if own and issubclass(value, Result):
                found |= {entry.name for entry in fields(value) if STATEMENT.search(entry.name)}
    rows = {row.analysis for row in ROWS}
    if question in WITHOUT_A_ROW:
        assert question not in rows, f"take {question} out of WITHOUT_A_ROW: it has a row"
        return
    assert not found or question in rows, (
        f"{question} has {sorted(found)}: add to tests/calibration a module with @row({question!r}, ...) that tries "
        "them where nothing is there, then make calibrate"
    )


def test_a_figure_that_shows_q_says_over_which_family() -> None:
    folder = Path(tl_headmaps.__file__).parent / "analyses"
    bare = [str(path.relative_to(folder)) for path in folder.rglob("*.py") if '"q":' in path.read_text("utf-8")]
    assert not bare, f"write 'q over ...' in the tooltips of {bare}"
