"""Files: written whole or not at all, and read with suspicion.

What is written goes to a temporary name and is renamed in one step. What is read was written by others: it must be a
regular file of UTF-8 whose JSON is neither nested without end nor contains half a character (a lone surrogate, which no
tokenizer and no file can hold).
"""

import csv
import hashlib
import io
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from .errors import HeadMapsError, OutputError, UsageError

if sys.platform != "win32":
    import fcntl

PAGE_SUFFIX = ".html"
STATIC_SUFFIXES = (".svg", ".png", ".pdf")
FIGURE_SUFFIXES = (PAGE_SUFFIX, *STATIC_SUFFIXES)
SAVED_SUFFIXES = (".json", ".csv", ".tex", ".safetensors", ".parquet", *FIGURE_SUFFIXES)
"""Formats a result can be saved in, chosen by the suffix."""

PART_SUFFIX = ".part"
"""Of files that are being written."""

_CHUNK = 1 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What makes a spreadsheet take a cell for a formula."""

_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]*(e[-+]?[0-9]+)?%?")


class UnreadableError(ValueError):
    """Why a file cannot be read, in a few words; readers say which file it is and what to do about it."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it becomes ``path``, otherwise it is removed.

    Temporary files of processes that were killed while they wrote the same file are removed too.
    """
    handle: int | None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        handle, temporary = _open_part(path)
    except (OSError, ValueError) as error:
        raise OutputError(
            f"Cannot write {path}: {getattr(error, 'strerror', None) or error}. Choose a folder you may write to."
        ) from error
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        if sys.platform == "win32":  # no open file is renamed there; elsewhere the handle keeps the lock until it is
            os.close(handle)
            handle = None
        temporary.replace(path)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(
            f"Cannot write {path}: {error.strerror or error}. Make room there, or choose another folder."
        ) from error
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise OutputError(
            f"Cannot write {path}: a name or token has half a character ({half}), which no text in UTF-8 can have. "
            "Write the character out, or remove it."
        ) from error
    finally:
        if handle is not None:
            os.close(handle)
        temporary.unlink(missing_ok=True)


def _open_part(path: Path) -> tuple[int, Path]:
    """A temporary file beside ``path``, locked as long as its handle is open."""
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART_SUFFIX)
        if sys.platform != "win32":
            with suppress(OSError):  # file systems without locks
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between the two calls above another process may have taken it for abandoned.
        if os.fstat(handle).st_nlink:
            return handle, Path(name)
        os.close(handle)


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of ``path`` that no process holds any more."""
    if sys.platform == "win32":  # an abandoned file is not told from one that is being written there, and stays
        return
    for entry in list(os.scandir(path.parent)):
        if entry.name.startswith(f".{path.name}.") and entry.name.endswith(PART_SUFFIX):
            with suppress(OSError):  # gone by now, not ours, or (BlockingIOError) still held
                handle = os.open(entry.path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    Path(entry.path).unlink(missing_ok=True)
                finally:
                    os.close(handle)


def cache_folder() -> Path:
    """Where downloads, digests and activations are kept: ``TL_HEADMAPS_CACHE`` if set, else the user's cache."""
    chosen = os.environ.get("TL_HEADMAPS_CACHE")
    folder = home_expanded(chosen) if chosen else user_cache_path("tl_headmaps")
    try:
        # One look: between two, another process may make the folder.
        reason = "" if stat.S_ISDIR(folder.stat().st_mode) else "it is not a folder"
    except (FileNotFoundError, NotADirectoryError):
        # Not there yet; whoever writes to it says what is in the way.
        reason = ""
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise UsageError(
            f"The cache folder {folder} cannot be used: {reason}. Set TL_HEADMAPS_CACHE to a folder you may write to."
        )
    return folder


def home_expanded(path: str | Path) -> Path:
    """The path with ``~`` and ``~name`` replaced by that home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{str(path)!r}: there is no such user here. Write the whole path.") from error


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def require_file(path: Path) -> None:
    """Raise UnreadableError unless this is a regular file: opening a pipe would wait for whoever writes to it."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UnreadableError(str(error.strerror or error)) from error
    except ValueError as error:  # a null character
        raise UnreadableError(str(error)) from error
    if not stat.S_ISREG(mode):
        raise UnreadableError(f"it is {'a folder' if stat.S_ISDIR(mode) else 'a pipe or a device'}, not a file")


def read_text(path: str | Path) -> str:
    """The text of a regular file in UTF-8, line ends as they are.

    Raises:
        UnreadableError: There is no such file, it is a pipe or a folder, or not UTF-8.
    """
    path = home_expanded(path)
    require_file(path)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"byte {error.start} is not UTF-8") from error
    except OSError as error:
        raise UnreadableError(str(error.strerror or error)) from error


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        UnreadableError: It is not JSON, nested too deeply, has a number of thousands of digits, or half a character.
    """
    try:
        content = json.loads(text)
        if _ESCAPED_SURROGATE.search(text) and (reason := _half_character(content)):
            raise UnreadableError(reason)
    except json.JSONDecodeError as error:
        raise UnreadableError(
            f"line {error.lineno}, column {error.colno}: not valid JSON ({error.msg.rstrip()})"
        ) from error
    except RecursionError as error:
        raise UnreadableError("its lists and objects are nested too deeply") from error
    except UnreadableError:
        raise
    except ValueError as error:
        raise UnreadableError("it has a number with thousands of digits") from error
    return content


def check_text(content: Any, where: str, refusal: type[HeadMapsError] = UsageError) -> None:
    """Refuse half a character (a lone surrogate) in a string, or in those of nested lists and objects."""
    if reason := _half_character(content):
        raise refusal(f"{where}: {reason}. Write the character out, or remove it.")


def _half_character(content: Any) -> str | None:
    if isinstance(content, str):
        if content.isascii() or not (half := _SURROGATE.search(content)):
            return None
        return f"{content!r:.60} has half a character (\\u{ord(half[0]):04x}), which no text in UTF-8 can have"
    if isinstance(content, Mapping):
        content = [*content.keys(), *content.values()]
    parts = content if isinstance(content, list | tuple) else ()
    return next((reason for part in parts if (reason := _half_character(part))), None)


def csv_rows(text: str, delimiter: str = ",") -> list[list[str]]:
    """Rows of a CSV text; those that :func:`csv_text` wrote have the cells it was given.

    Raises:
        UnreadableError: A cell is longer than the csv module reads (131,072 characters).
    """
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    except csv.Error as error:
        raise UnreadableError(f"it is not a table ({error})") from error
    return [[cell[1:] if cell[:1] == "'" and _needs_mark(cell[1:]) else cell for cell in row] for row in rows]


def csv_text(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    r"""CSV with a header. Text that a spreadsheet would run as a formula gets an apostrophe in front.

    Example:
        >>> csv_text(["token", "score"], [["=1+1", -0.5]])
        "token,score\r\n'=1+1,-0.5\r\n"
        >>> csv_rows(csv_text(["token", "score"], [["=1+1", -0.5]]))
        [['token', 'score'], ['=1+1', '-0.5']]
    """
    stream = io.StringIO()
    # CRLF as in RFC 4180: then a carriage return inside a field is quoted too.
    writer = csv.writer(stream, lineterminator="\r\n")
    for row in (columns, *rows):
        writer.writerow([_marked(cell) if isinstance(cell, str) else cell for cell in row])
    return stream.getvalue()


NUL_IN_CSV = "\0" if sys.version_info >= (3, 11) else "\u2400"
"""The csv module of Python 3.10 neither writes nor reads the character zero; its symbol stands for it there."""


def _marked(cell: str) -> str:
    return ("'" if _needs_mark(cell) else "") + cell.replace("\0", NUL_IN_CSV)


def _needs_mark(cell: str) -> bool:
    """Whether a cell would be run as a formula, or looks like one that was marked."""
    if cell[:1] == "'":
        return _needs_mark(cell[1:])
    return cell.startswith(_FORMULA) and not _NUMBER.fullmatch(cell)
