"""Reading what users write: pairs of words from tables, task items from files and records, columns of datasets."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import HeadMapsWarning, RelationDataError, TaskDataError, UsageError
from ..core.files import UnreadableError, csv_rows, parse_json, read_text

_COLUMN_NAMES = frozenset(
    {
        *("source", "target", "from", "to", "input", "output", "subject", "object", "word", "words", "token", "key"),
        *("value", "question", "answer", "prompt", "label", "name", "first", "second", "left", "right", "x", "y"),
    }
)
"""What columns are usually called."""


def table_pairs(path: Path, text: str, header: bool | None) -> list[tuple[str, str]]:
    """(source, target) pairs of a CSV or TSV file: columns named source and target, else the first two."""
    rows = [[cell.strip() for cell in row] for row in _rows(path, text)]
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


def _rows(path: Path, text: str) -> list[list[str]]:
    return csv_rows(text, "\t" if path.suffix.lower() == ".tsv" else ",")


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


_TEXT_FIELDS = ("context", "question", "answer", "function", "format", "content", "matched")


def listed_records(records: Any) -> list[Any]:
    """Records of whatever was given; what is in them is judged later, record by record."""
    if isinstance(records, Mapping):
        splits = ", ".join(map(str, records))
        raise TaskDataError(f"This is a dictionary of datasets ({splits}); pass one of them, or a list of records.")
    if isinstance(records, str | Path) or not isinstance(records, Iterable):
        raise TaskDataError(
            f"A {type(records).__name__} is not a list of records; give a datasets.Dataset or a list of dictionaries "
            "(Tasks.from_file reads files)."
        )
    return list(records)


def records_of_file(path: Path) -> list[Any]:
    """Records of a file; the suffix says how to read it."""
    suffix = path.suffix.lower()
    if suffix not in (".json", ".jsonl", ".csv", ".tsv"):
        raise TaskDataError(f"{path} is not a .json, .jsonl, .csv or .tsv file; the suffix says how to read it.")
    try:
        text = read_text(path)
        if suffix in (".csv", ".tsv"):
            return _table(_rows(path, text))
        if suffix == ".json":
            try:
                content = parse_json(text)
            except UnreadableError as error:
                # Several objects, one per line: JSON lines under another name.
                if "Extra data" not in str(error):
                    raise
            else:
                return list(content) if isinstance(content, list) else [content]
        return [_line(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    except UnreadableError as error:
        raise TaskDataError(
            f"Cannot read the task file {path}: {error}. Give JSON, JSON lines, CSV or TSV in UTF-8."
        ) from error


def _line(number: int, line: str) -> Any:
    try:
        return parse_json(line)
    except UnreadableError as error:
        raise UnreadableError(f"line {number}: {str(error).removeprefix('line 1, ')}") from error


def _table(rows: list[list[str]]) -> list[dict[str, str]]:
    """A record for each row below the header; a row may be shorter than the header, not longer."""
    filled = [row for row in rows if row]
    for number, row in enumerate(filled):
        if len(row) > len(filled[0]):
            raise UnreadableError(f"row {number} has {len(row)} cells, but the header has {len(filled[0])}")
    return [dict(zip(filled[0], row, strict=False)) for row in filled[1:]]


def flat_records(records: Iterable[Any], where: str) -> Iterator[dict[str, Any]]:
    """One record per item; nested records are taken apart."""
    for index, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise TaskDataError(
                f"{where}, record {index}: a {type(record).__name__} was found; records are objects with named fields."
            )
        steps = record.get("generated")
        if steps is None:
            yield dict(record)
            continue
        if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
            raise TaskDataError(f"{where}, record {index}: 'generated' is not a list of objects.")
        main = record.get("question")
        for step in steps:
            yield {
                "context": main,
                "content": main,
                "question": step.get("subquestion"),
                "answer": step.get("answer"),
                "alternatives": step.get("alternatives"),
                "function": step.get("cognitive_skill"),
                "format": record.get("format"),
            }


def item_fields(record: Mapping[str, Any], index: int, where: str) -> dict[str, Any]:
    """Fields of the item a flat record holds; a content is always among them."""
    values: dict[str, Any] = {name: _text(record.get(name), name, index, where) for name in _TEXT_FIELDS}
    for part in ("question", "answer"):
        if not values[part]:
            fields = f"{', '.join(map(repr, record)):.200}"
            raise TaskDataError(
                f"{where}, item {index} has no {part} (its fields are {fields}). Fill it in, or give its column the "
                f"name {part!r}."
            )
    # Questions about one passage stay together; without a passage each item is its own content.
    values["content"] = values["content"] or values["context"] or f"item {index}"
    wrong = _alternatives(record.get("alternatives"), index, where)
    values["alternatives"] = tuple(text for text in dict.fromkeys(wrong) if text != values["answer"])
    return values


def _text(value: Any, name: str, index: int, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise TaskDataError(f"{where}, item {index}: {name} is a {type(value).__name__}; it must be text.")
    return str(value).strip()


def _alternatives(value: Any, index: int, where: str) -> list[str]:
    """A list, or text with bars between the alternatives (a CSV cell)."""
    parts = value.split("|") if isinstance(value, str) else [] if value is None else value
    if not isinstance(parts, list | tuple):
        raise TaskDataError(f"{where}, item {index}: alternatives must be a list, or text such as 'red|green'.")
    return [text for part in parts if (text := _text(part, "alternatives", index, where))]


def column_values(dataset: Any, columns: Sequence[str], error: type[UsageError] = UsageError) -> Iterator[list[Any]]:
    """What a dataset has in some columns, row by row; refuses several splits, and columns that are not there."""
    known = dataset.column_names
    if isinstance(known, dict):
        raise error(
            f"This is a dataset with the splits {', '.join(map(str, known))}, not one of them. "
            f"Choose a split, for example dataset[{next(iter(known), 'train')!r}]."
        )
    # A streamed dataset may not know its columns before its first row.
    if known is not None:
        _require_columns(columns, known, error)
    for row in dataset:
        _require_columns(columns, row, error)
        yield [row[column] for column in columns]


def _require_columns(columns: Sequence[str], known: Iterable[str], error: type[UsageError]) -> None:
    for column in columns:
        if column not in known:
            listed = ", ".join(map(str, known)) or "none"
            raise error(f"The dataset has no column {column!r}; it has {listed}. Name one of them.")
