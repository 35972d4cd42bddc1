"""Reading task items: the bundled ones, and users' own files and datasets.

Our own items lie in ``relations_data/tasks/`` (CC0), written by the script beside them, which explains why their words
do not give their function away. :func:`read_tasks` reads a user's JSON, JSON lines, CSV, TSV or ``datasets.Dataset``,
flat or nested as published data is.
"""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..core.errors import TaskDataError
from .relations import data_folder
from .tasks import FUNCTIONS, TaskItem, Tasks, canonical, function_name, normalised, text_key

Duplicates: TypeAlias = Literal["refuse", "drop"]

_COLUMNS = ("context", "question", "answer", "alternatives", "function", "format", "content", "matched")
_NESTED = ("generated", "subquestion", "cognitive_skill")
_TEMPLATE = "Question: {question}\nAnswer:"
_SHOWN = 5


def task_files(data_dir: str | Path | None = None) -> dict[str, Path]:
    """Bundled file of each function."""
    folder = data_folder(data_dir) / "tasks"
    files = {name: folder / f"{name}.jsonl" for name in FUNCTIONS}
    missing = [path.name for path in files.values() if not path.is_file()]
    if missing:
        raise TaskDataError(f"{folder} lacks {', '.join(missing)}; reinstall tl-headmaps, or pass data_dir=.")
    return files


def load_tasks(functions: Iterable[str] | None = None, *, data_dir: str | Path | None = None) -> Tasks:
    """The bundled items of all eight functions, or of some.

    Args:
        functions: Names such as ``"retrieval"``; at least two. The matched sets are then no longer whole, and words
            tell more (0.7 of the items for four functions, a third for all eight). For fewer items rather use
            :meth:`Tasks.sample`.
        data_dir: Folder that holds ``tasks/`` instead of the bundled one.

    Example:
        >>> from tl_headmaps import load_tasks
        >>> tasks = load_tasks(["retrieval", "inference"])
        >>> tasks.counts
        {'retrieval': 150, 'inference': 150}
    """
    files = task_files(data_dir)
    chosen = list(files) if functions is None else [function_name(name, list(files)) for name in functions]
    records = [record for name in files if name in chosen for record in _records(files[name])]
    items = [
        _item(record, number, "bundled tasks", _plain(None), "{question}") for number, record in enumerate(records)
    ]
    return Tasks(tuple(items), name="bundled tasks")


def read_tasks(
    source: Any,
    *,
    columns: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    template: str = _TEMPLATE,
    duplicates: Duplicates = "refuse",
) -> Tasks:
    """Items from a user's own file, ``datasets.Dataset`` or list of records.

    A record is flat (context, question, answer, alternatives, function, format, content; all but question, answer and
    function may be missing) or nested as in published data: ``{question, answer, generated: [{subquestion, answer,
    cognitive_skill}]}``, where each entry becomes an item whose context and content is the main question.

    Args:
        source: Path of a ``.json``, ``.jsonl``, ``.csv`` or ``.tsv`` file, a dataset, or a list of dictionaries.
        columns: Their name for ours, for example ``{"question": "prompt", "function": "skill"}``; for nested records
            also ``generated``, ``subquestion`` and ``cognitive_skill``.
        labels: Their label to a function's name. Labels that already mean one of the eight functions need none; others
            are left out and counted in ``unknown_labels``.
        template: How a question is asked; ours is kept short: ``Question: ...`` and ``Answer:``.
        duplicates: ``"drop"`` keeps only the first of equal prompts instead of refusing them.

    Example:
        >>> from tl_headmaps import read_tasks
        >>> sums = [{"prompt": f"{n} + 1 =", "answer": str(n + 1), "skill": "Math"} for n in range(10)]
        >>> recall = [{"prompt": f"Who is number {n}?", "answer": "Nobody", "skill": "Recall"} for n in range(10)]
        >>> tasks = read_tasks(sums + recall, columns={"question": "prompt", "function": "skill"})
        >>> tasks.counts
        {'knowledge_recall': 10, 'math_calculation': 10}
    """
    if template.count("{question}") != 1:
        raise TaskDataError(f"template={template!r} must contain {{question}} exactly once.")
    names = _plain(columns)
    where = Path(source).name if isinstance(source, str | Path) else type(source).__name__
    known = {normalised(label): function for label, function in (labels or {}).items()}
    unknown: Counter[str] = Counter()
    items: list[TaskItem] = []
    unlabelled: list[int] = []
    number = -1
    for number, record in enumerate(_flat(_records(source), names, where)):
        label = record.get(names["function"])
        if label is None or not str(label).strip():
            unlabelled.append(number)
            continue
        function = known.get(normalised(str(label))) or canonical(str(label))
        if function is None:
            unknown[str(label)] += 1
            continue
        items.append(_item({**record, names["function"]: function}, number, where, names, template))
    _refuse_unlabelled(unlabelled, number + 1, where, names["function"])
    if not items:
        found = ", ".join(repr(label) for label in sorted(unknown)[:_SHOWN]) or "no record"
        raise TaskDataError(
            f"{where}: no item is labelled with a function (found {found}). Functions are {', '.join(FUNCTIONS)}; map "
            "other labels with labels={'theirs': 'ours'}."
        )
    kept = _without_duplicates(items) if duplicates == "drop" else items
    return Tasks(tuple(kept), where, dict(sorted(unknown.items())), len(items) - len(kept))


def _plain(columns: Mapping[str, str] | None) -> dict[str, str]:
    names = {name: name for name in (*_COLUMNS, *_NESTED)}
    strange = set(columns or {}) - set(names)
    if strange:
        raise TaskDataError(f"columns= names {', '.join(sorted(strange))}; our columns are {', '.join(names)}.")
    return names | dict(columns or {})


def _refuse_unlabelled(rows: Sequence[int], n_records: int, where: str, column: str) -> None:
    if rows:
        listed = ", ".join(map(str, rows[:_SHOWN])) + (", …" if len(rows) > _SHOWN else "")
        raise TaskDataError(
            f"{where}: {len(rows)} of {n_records} items have no label in {column!r} (items {listed}). Every item needs "
            "a function: label or remove them, or name the label's column with columns={'function': ...}."
        )


def _without_duplicates(items: Iterable[TaskItem]) -> list[TaskItem]:
    first: dict[str, TaskItem] = {}
    for item in items:
        first.setdefault(text_key(item), item)
    return list(first.values())


def _records(source: Any) -> list[Any]:
    """Records of whatever was given; what is in them is judged later, record by record."""
    if isinstance(source, str | Path):
        return _records_of_file(Path(source))
    if isinstance(source, Mapping):
        splits = ", ".join(map(str, source))
        raise TaskDataError(f"This is a dictionary of datasets ({splits}); pass one of them, or a list of records.")
    if not isinstance(source, Iterable):
        raise TaskDataError(
            f"{type(source).__name__} is no task data; give a file, a datasets.Dataset or a list of dictionaries."
        )
    return list(source)


def _records_of_file(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskDataError(
            f"Cannot read the task file {path}: {getattr(error, 'strerror', None) or error}."
        ) from error
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        return list(csv.DictReader(text.splitlines(keepends=True), delimiter="\t" if suffix == ".tsv" else ","))
    if suffix not in (".json", ".jsonl"):
        raise TaskDataError(f"{path} is no .json, .jsonl, .csv or .tsv file; the suffix says how to read it.")
    if suffix == ".json":
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            # Several objects, one per line: JSON lines under another name.
            if "Extra data" not in error.msg:
                raise TaskDataError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}).") from error
        else:
            return list(content) if isinstance(content, list) else [content]
    return [_line(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskDataError(f"{path}, line {number}: not valid JSON ({error.msg}).") from error


def _flat(records: Iterable[Any], names: Mapping[str, str], where: str) -> Iterator[dict[str, Any]]:
    """One record per item; nested records are taken apart."""
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise TaskDataError(
                f"{where}, record {number}: a {type(record).__name__} was found; records are objects with named fields."
            )
        steps = record.get(names["generated"])
        if steps is None:
            yield dict(record)
            continue
        if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
            raise TaskDataError(f"{where}, record {number}: {names['generated']!r} is not a list of objects.")
        main = record.get(names["question"])
        for step in steps:
            yield {
                names["context"]: main,
                names["content"]: main,
                names["question"]: step.get(names["subquestion"]),
                names["answer"]: step.get(names["answer"]),
                names["alternatives"]: step.get(names["alternatives"]),
                names["function"]: step.get(names["cognitive_skill"]),
                names["format"]: record.get(names["format"]),
            }


def _item(record: Mapping[str, Any], number: int, where: str, names: Mapping[str, str], template: str) -> TaskItem:
    values = {name: _text(record.get(names[name]), name, number, where) for name in _COLUMNS if name != "alternatives"}
    for part in ("question", "answer"):
        if not values[part]:
            known = ", ".join(map(repr, record))
            raise TaskDataError(
                f"{where}, item {number} has no {part} in {names[part]!r} (its fields are {known}). Fill it in, or "
                f"name the column with columns={{'{part}': ...}}."
            )
    # Questions about one passage stay together; without a passage each item is its own content.
    values["content"] = values["content"] or values["context"] or f"item {number}"
    values["question"] = template.replace("{question}", values["question"])
    wrong = _alternatives(record.get(names["alternatives"]), number, where)
    return TaskItem(**values, alternatives=tuple(text for text in dict.fromkeys(wrong) if text != values["answer"]))


def _text(value: Any, name: str, number: int, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise TaskDataError(f"{where}, item {number}: {name} is a {type(value).__name__}; it must be text.")
    return str(value).strip()


def _alternatives(value: Any, number: int, where: str) -> list[str]:
    """A list, or text with bars between the alternatives (a CSV cell)."""
    parts = value.split("|") if isinstance(value, str) else [] if value is None else value
    if not isinstance(parts, list | tuple):
        raise TaskDataError(f"{where}, item {number}: alternatives must be a list, or text such as 'red|green'.")
    return [text for part in parts if (text := _text(part, "alternatives", number, where))]
