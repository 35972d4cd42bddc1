"""Pairs of words from CSV and TSV files, whose first row may or may not name the columns."""

import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from ..core.errors import HeadMapsWarning, RelationDataError
from ..core.files import csv_rows

_COLUMN_NAMES = frozenset(
    {
        *("source", "target", "from", "to", "input", "output", "subject", "object", "word", "words", "token", "key"),
        *("value", "question", "answer", "prompt", "label", "name", "first", "second", "left", "right", "x", "y"),
    }
)
"""What columns are usually called."""


def table_pairs(path: Path, text: str, header: bool | None) -> list[tuple[str, str]]:
    """(source, target) pairs of a CSV or TSV file: columns named source and target, else the first two."""
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    rows = [[cell.strip() for cell in row] for row in csv_rows(text, delimiter)]
    rows = [row for row in rows if any(row)]
    if not rows:
        raise RelationDataError(f"{path} has no rows; it needs (source, target) pairs.")
    names = [cell.lower() for cell in rows[0]]
    named = header is not False and {"source", "target"} <= set(names)
    if header is None and not named:
        header = _is_header(path, rows)
        taken, other = ("the names of its columns", "header=False") if header else ("its first pair", "header=True")
        warnings.warn(
            f"{path.name}: the first row ({', '.join(rows[0][:2]):.80}) was taken for {taken}; {other} says otherwise.",
            HeadMapsWarning,
            stacklevel=4,
        )
    columns = (names.index("source"), names.index("target")) if named else (0, 1)
    pairs = []
    for number, row in enumerate(rows):
        if number == 0 and (header or named):
            continue
        if len(row) <= max(columns):
            raise RelationDataError(f"{path}, row {number + 1}: {row!r} does not have two columns.")
        pairs.append((row[columns[0]], row[columns[1]]))
    return pairs


def _is_header(path: Path, rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row names columns: by usual names or those of the file, or unlike all that is below it."""
    first, below = rows[0][:2], rows[1:]
    names = [cell.lower() for cell in first]
    if _COLUMN_NAMES.intersection(names) or set(names) <= set(re.split("[^a-z0-9]+", path.stem.lower())):
        return True
    unlike = []
    for place, cell in enumerate(first):
        column = [row[place] for row in below if len(row) > place]
        features: tuple[Callable[[str], bool], ...] = (
            lambda text: text[:1].isupper(),
            lambda text: text.lstrip("-").isdigit(),
        )
        differs = any(all(map(feature, column)) and not feature(cell) for feature in features)
        unlike.append((bool(column) and differs, len(column)))
    # Of a single row below, both cells must differ.
    return all(differs for differs, _ in unlike) or any(differs and n > 1 for differs, n in unlike)
