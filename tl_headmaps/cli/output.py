"""What commands share: reading lists and heads, checking output files early, printing and saving a result."""

import os
from pathlib import Path
from typing import Any

import typer

from ..core.errors import OutputError, UsageError
from ..core.files import SAVED_SUFFIXES, STATIC_SUFFIXES
from ..core.types import HeadIndex


def comma_parts(text: str) -> list[str]:
    """The parts of ``a, b,c`` without the spaces around them; empty parts are dropped."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_heads(text: str) -> list[HeadIndex]:
    """Heads from a list such as ``L23H4,L23H2``."""
    return [HeadIndex.parse(name) for name in comma_parts(text)]


def check_outputs(paths: list[Path] | None) -> list[Path]:
    """The output files asked for; raises before the long work starts if one of them cannot be written."""
    for path in paths or []:
        suffix = path.suffix.lower()
        if suffix not in SAVED_SUFFIXES:
            known = ", ".join(SAVED_SUFFIXES)
            raise UsageError(f"--out {path}: the suffix chooses what is written; use one of {known}.")
        if suffix in STATIC_SUFFIXES:
            from ..renderers.static import require_matplotlib

            require_matplotlib()
        if path.is_dir():
            raise UsageError(f"--out {path} is a folder; give a file name.")
        existing = next(parent for parent in path.absolute().parents if parent.exists())
        if not (existing.is_dir() and os.access(existing, os.W_OK)):
            raise OutputError(f"Cannot write {path}: {existing} is not a folder that you may write to.")
    return list(paths or [])


def show_and_save(result: Any, paths: list[Path]) -> None:
    """Print a result and write it to every file asked for."""
    typer.echo(str(result))
    for path in paths:
        result.save(path)
        typer.echo(f"Wrote {path}", err=True)
