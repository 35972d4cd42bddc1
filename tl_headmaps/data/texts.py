"""Plain text for the analyses that run a model: the bundled sample, a string, a list, a file or a dataset.

The bundled sample (``relations_data/text/english.txt``) was written for this package: about 8,000 tokens of English in
many registers, CC0. A text file holds texts separated by blank lines, in UTF-8.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..core.errors import UsageError
from .relations import data_folder

_FILE_SUFFIXES = (".txt", ".text", ".md")


def sample_file() -> Path:
    """The bundled English sample."""
    return data_folder() / "text" / "english.txt"


def read_texts(source: Any = None, column: str = "text") -> Iterator[str]:
    """The texts of a source, one after the other, empty ones left out; nothing is read before it is asked for.

    Args:
        source: None for the bundled sample; the path of a UTF-8 file with texts separated by blank lines; a string
            (a file if it names one, else a text itself); a list or other iterable of strings; or a
            ``datasets.Dataset`` (also a streamed one).
        column: The column of a dataset that holds the text.

    Example:
        >>> list(read_texts(["One text.", "", "Another."]))
        ['One text.', 'Another.']
    """
    if source is None:
        source = sample_file()
    if isinstance(source, Path) or (isinstance(source, str) and _names_a_file(source)):
        found = _from_file(Path(source).expanduser())
    elif isinstance(source, str):
        found = iter([source])
    elif hasattr(source, "column_names"):
        found = _from_dataset(source, column)
    elif isinstance(source, Iterable) and not isinstance(source, bytes | dict):
        found = iter(source)
    else:
        raise UsageError(
            f"{type(source).__name__} is not a source of texts. Give a string, a list of strings, the path of a text "
            "file, or a datasets.Dataset."
        )
    return _checked(found)


def describe_source(source: Any) -> str:
    """Where texts came from, in a few words, for provenance."""
    if source is None:
        return f"bundled sample {sample_file().name}"
    if isinstance(source, Path) or (isinstance(source, str) and _names_a_file(source)):
        return f"file {Path(source).name}"
    return "text of the call" if isinstance(source, str) else type(source).__name__


def _names_a_file(text: str) -> bool:
    if "\n" in text or len(text) > 1000:
        return False
    try:
        if Path(text).expanduser().is_file():
            return True
    except (OSError, ValueError, RuntimeError):
        return False
    if text.lower().endswith(_FILE_SUFFIXES) and not text.split()[1:]:
        raise UsageError(f"There is no file {text!r}. Check the path, or give the text itself.")
    return False


def _from_file(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as stream:
            lines: list[str] = []
            for line in stream:
                if line.strip():
                    lines.append(line)
                elif lines:
                    yield "".join(lines).strip()
                    lines = []
            if lines:
                yield "".join(lines).strip()
    except OSError as error:
        raise UsageError(f"Cannot read the text file {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not a text file in UTF-8 (byte {error.start} cannot be read). Convert it to UTF-8 first."
        ) from error


def _from_dataset(dataset: Any, column: str) -> Iterator[Any]:
    columns = dataset.column_names
    if isinstance(columns, dict):
        raise UsageError(
            f"This is a dataset with the splits {', '.join(map(str, columns))}, not one of them. "
            f"Choose a split, for example dataset[{next(iter(columns), 'train')!r}]."
        )
    # A streamed dataset may not know its columns before its first row.
    if columns is not None and column not in columns:
        raise UsageError(f"The dataset has no column {column!r}; it has {', '.join(map(str, columns)) or 'none'}.")
    for row in dataset:
        if column not in row:
            raise UsageError(f"The dataset has no column {column!r}; it has {', '.join(map(str, row))}.")
        yield row[column]


def _checked(texts: Iterator[Any]) -> Iterator[str]:
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise UsageError(
                f"Text {number} is {text!r:.60}, of type {type(text).__name__}. Every text must be a string."
            )
        if text.strip():
            yield text
