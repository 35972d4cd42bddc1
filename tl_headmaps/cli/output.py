"""Where results go: output files that are checked early, and a terminal or a pipe that may take no more."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from errno import EIO, ENOSPC, EPIPE
from pathlib import Path
from typing import Any

import click

from ..core.errors import HeadMapsError, OutputError, UsageError
from ..core.files import FIGURE_SUFFIXES, SAVED_SUFFIXES, home_expanded


def check_outputs(paths: Iterable[Path]) -> list[Path]:
    """The output files asked for; raises before the long work starts if one of them cannot be written."""
    checked = []
    for path in map(home_expanded, paths):
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


def show_and_save(result: Any, paths: list[Path], full: bool = False, **drawn: Any) -> None:
    """Write a result to every file asked for, then print it: what is printed can be lost, what is saved must not be.

    A file that cannot be written is reported when the others are. ``full`` prints all columns of a table; ``drawn`` are
    options of the figure.
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
            click.echo(f"Wrote {path}", err=True)
    say(result.table(full=True) if full and hasattr(result, "table") else str(result))
    if unwritten:
        raise unwritten[0]


_UNPRINTED: list[OSError] = []
"""Why stdout could not be written to, if so."""


def say(text: str) -> None:
    """Print a result to stdout; if nobody reads it any more, or its disk is full, the work goes on without it."""
    if _UNPRINTED:
        return
    with printing():
        click.echo(text)


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
