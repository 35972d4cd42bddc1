"""What commands share: reading lists and heads, checking output files early, printing and saving a result."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EIO, ENOSPC, EPIPE
from pathlib import Path
from typing import Any

import typer

from ..core.errors import HeadMapsError, OutputError, UsageError
from ..core.files import FIGURE_SUFFIXES, SAVED_SUFFIXES, home_expanded
from ..core.types import HeadIndex, check_head_names, layer_list


def comma_parts(option: list[str] | None) -> list[str]:
    """The parts of ``a, b,c`` without the spaces around them, of all times an option was given; empty ones are dropped.

    Example:
        >>> comma_parts(["a, b,", "c"])
        ['a', 'b', 'c']
    """
    return [part.strip() for text in option or [] for part in text.split(",") if part.strip()]


def parse_layers(option: list[str] | None) -> list[int] | None:
    """Layers of ``--layers``, such as ``3,4``; None if it was not given."""
    return layer_list(",".join(option)) if option else None


def parse_heads(option: list[str] | None, arguments: list[str] | None = None) -> str | None:
    """Heads of ``--heads`` and of the arguments, such as ``L23H4,L23``; None if there are none.

    Raises for a wrong spelling before a model is loaded.
    """
    written = [*(arguments or []), *(option or [])]
    return check_head_names(",".join(written)) if written else None


def parse_head(option: list[str] | None, argument: str | None) -> str:
    """The head of ``--head`` or of the argument, likewise; exactly one of them is to be given, once."""
    written = [*([] if argument is None else [argument]), *(f"--head {head}" for head in option or [])]
    if not written:
        raise UsageError("Say which head: L23H4, or --head L23H4.")
    if len(written) > 1:
        raise UsageError(f"{written[0]} and {written[1]} were both given; give one of them.")
    return str(HeadIndex.parse(option[0] if option else written[0]))


def check_outputs(paths: list[Path] | None) -> list[Path]:
    """The output files asked for; raises before the long work starts if one of them cannot be written."""
    checked = []
    for path in map(home_expanded, paths or []):
        suffix = path.suffix.lower()
        if suffix not in SAVED_SUFFIXES:
            known = ", ".join(SAVED_SUFFIXES)
            raise UsageError(f"--out {path}: the suffix chooses what is written; use one of {known}.")
        if existing_part(path) == path.absolute() and path.is_dir():
            raise UsageError(f"--out {path} is a folder; give a file name.")
        checked.append(path)
    return checked


def check_folder(path: Path) -> Path:
    """The output folder asked for, likewise."""
    path = home_expanded(path)
    if existing_part(path) == path.absolute() and not path.is_dir():
        raise UsageError(f"--out {path} is a file; give the name of a folder.")
    return path


def existing_part(path: Path) -> Path:
    """As much of an output's path as there is; raises if the rest cannot be made there."""
    try:
        if "\0" in str(path):
            raise ValueError("it has a null character")
        there = next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--out {str(path)!r:.120}: {reason}. Give another name.") from error
    folder = there.parent if there == path.absolute() and not there.is_dir() else there
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise OutputError(f"Cannot write {path}: {folder} is not a folder that you may write to.")
    return there


def show_and_save(result: Any, paths: list[Path], **drawn: Any) -> None:
    """Write a result to every file asked for, then print it: what is printed can be lost, what is saved must not be.

    A file that cannot be written is reported when the others are. ``drawn`` are options of its figure.
    """
    unwritten: list[HeadMapsError] = []
    for path in paths:
        try:
            if drawn and path.suffix.lower() in FIGURE_SUFFIXES:
                result.figure(**drawn).save(path)
            else:
                result.save(path)
        except HeadMapsError as error:
            unwritten.append(error)
        else:
            typer.echo(f"Wrote {path}", err=True)
    say(str(result))
    if unwritten:
        raise unwritten[0]


_UNPRINTED: list[OSError] = []
"""Why stdout could not be written to, if so."""


def say(text: str) -> None:
    """Print a result to stdout; if nobody reads it any more, or its disk is full, the work goes on without it."""
    if _UNPRINTED:
        return
    with printing():
        typer.echo(text)


@contextmanager
def printing() -> Iterator[None]:
    """What is printed inside may be lost: that is said when all is done, by :func:`require_printed`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, HeadMapsError) or error.errno not in (ENOSPC, EPIPE, EIO):
            raise
        _UNPRINTED.append(error)
        # Whatever is still in the buffer must not fail a second time when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def require_printed() -> None:
    """Raise if something could not be printed: everything that was to be saved is saved by now."""
    if _UNPRINTED:
        error = _UNPRINTED.pop()
        raise OutputError(
            f"The result could not be printed in full ({error.strerror or error}). Files of --out are complete; give "
            "--out, or send stdout to where there is room."
        ) from error
