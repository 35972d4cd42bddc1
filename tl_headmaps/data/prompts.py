"""Neutral prefixes, behind which a word is put so that a model reads it in a sentence and not alone.

They lie in ``relations_data/prompts/neutral.jsonl`` (our own, CC0): one of each kind of text, every one open to a noun,
a verb, a name, an adjective or a number. No word of a bundled relation occurs in them, so that they favour none.
"""

import json

from .relations import data_folder


def neutral_prompts() -> tuple[str, ...]:
    """The eight neutral prefixes, without a space at the end: a word follows as ``f"{prefix} {word}"``.

    Example:
        >>> neutral_prompts()[0]
        'Afterwards we chatted, rather vaguely, about'
    """
    lines = (data_folder() / "prompts" / "neutral.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line)["text"] for line in lines if line)
