"""Statements of the package on heads that know nothing: the slice for CI, and whether every statement has its row."""

from typing import Any

import pytest
from calibration.rows import Bench, Row
from calibration.run import load_rows, stored

ROWS = load_rows()


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


def test_every_row_is_in_the_table() -> None:
    missing = [row.name for row in ROWS if row.name not in stored()]
    assert not missing, f"run make calibrate; not measured yet: {missing}"
