"""Prefixes that sources are put behind: their token ids, and which of them do not suit some sources."""

import re
from collections.abc import Sequence
from typing import Any

from ...core.errors import UsageError
from ...core.vocabulary import ids_string
from .activations import encode_prompt
from .behind import Source


def encode_prefixes(model: Any, prompts: Sequence[str], prepend_bos: bool) -> list[list[int]]:
    """Token ids of each prefix; refuses none at all, empty ones, and two that are the same."""
    listed = [prompts] if isinstance(prompts, str) else list(prompts)
    if not listed:
        raise UsageError("prompts= is empty. Give at least one prefix to put sources behind, or leave it out.")
    for prompt in listed:
        if not isinstance(prompt, str) or not prompt.strip():
            raise UsageError(f"The prompt {prompt!r} is empty. A prompt is a text that a source can follow.")
    if len(set(listed)) < len(listed):
        raise UsageError("A prompt was given twice; give each once.")
    # The source brings its own space: a trailing one would be a token of its own.
    return [encode_prompt(model, prompt.rstrip(), prepend_bos) for prompt in listed]


def problems_of(model: Any, prompts: Sequence[str], sources: Sequence[Source]) -> list[str | None]:
    """Why each prompt does not suit some source: it contains it, or its last token merges with it; None if it does."""
    tokenizer = model.tokenizer
    # Only sources that are words on their own: a letter or a piece of a word may stand anywhere.
    words = [text for source in sources if (text := ids_string(tokenizer, source)).startswith(" ") and len(text) > 2]
    by_first: dict[str, list[str]] = {}
    for word in words:
        for part in _parts(word)[:1]:
            by_first.setdefault(part, []).append(word)
    return [_contained(prompt, by_first) or _merging(tokenizer, prompt, words) for prompt in prompts]


def _parts(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _contained(prompt: str, by_first: dict[str, list[str]]) -> str | None:
    """What is wrong with a prompt that contains a source; sources are given by their first word."""
    inside = _parts(prompt)
    for at, part in enumerate(inside):
        for word in by_first.get(part, ()):
            wanted = _parts(word)
            if inside[at : at + len(wanted)] == wanted:
                return (
                    f"The prompt {prompt!r} contains the source {word!r}, so the model would have met it already. Give "
                    "prompts without any word of the relation's sources."
                )
    return None


def _merging(tokenizer: Any, prompt: str, words: Sequence[str]) -> str | None:
    """What is wrong with a prompt whose last token merges with a source behind it."""
    plain = tokenizer.encode(prompt.rstrip(), add_special_tokens=False)
    joined = tokenizer([prompt.rstrip() + word for word in words], add_special_tokens=False) if words else {}
    for word, ids in zip(words, joined.get("input_ids", ()), strict=True):
        if ids[: len(plain)] != plain:
            return (
                f"Behind the prompt {prompt!r} the tokenizer merges the source {word!r} with the prompt's last "
                "token. End the prompt with a whole word or a comma."
            )
    return None
