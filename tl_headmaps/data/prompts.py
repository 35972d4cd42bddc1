"""Neutral prefixes, behind which a word is put so that a model reads it in a sentence and not alone.

They are in ``relations_data/prompts/neutral.jsonl`` (our own, CC0): one of each kind of text, every one open to a noun,
a verb, a name, an adjective or a number. No word of a bundled relation occurs in them, so that they favour none.
"""

import json
from pathlib import Path

from ..core.errors import UsageError
from ..core.files import UnreadableError, read_text
from .relations import data_folder


def neutral_prompts() -> tuple[str, ...]:
    """The eight neutral prefixes, without a space at the end: a word follows as ``f"{prefix} {word}"``.

    Example:
        >>> neutral_prompts()[0]
        'Afterwards we chatted, rather vaguely, about'
    """
    lines = (data_folder() / "prompts" / "neutral.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line)["text"] for line in lines if line)


def read_prompts(path: str | Path) -> tuple[str, ...]:
    """Prefixes of a user's file, one on each line; empty lines are left out."""
    try:
        lines = read_text(path).splitlines()
    except UnreadableError as error:
        raise UsageError(
            f"Cannot read the prompts in {path}: {error}. Give a UTF-8 file with a prompt on each line."
        ) from error
    return tuple(line.strip() for line in lines if line.strip())
