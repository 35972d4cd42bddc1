"""Reading task items from files and records: JSON, JSON lines, CSV, TSV, flat or nested as published data is."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import TaskDataError
from ..core.files import UnreadableError, csv_rows, parse_json, read_text

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
            return _table(csv_rows(text, "\t" if suffix == ".tsv" else ","))
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
            f"Cannot read the task file {path!s:.200}: {error}. Give JSON, JSON lines, CSV or TSV in UTF-8."
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
