"""Prompts made from templates, and prefixes that sources are put behind: their token ids, and where the source is.

The position of a source in a template comes from the tokenizer's own offsets, never from searching decoded text. A
prompt only counts if the source is the same token there as in the map it is compared with: at the very start of a text,
or joined to the letters that follow, a word is written with other tokens, which is reported instead of scored.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ...core.files import UnreadableError, check_text, parse_json, read_text
from ...core.types import Model
from ...core.vocabulary import TokenLike, ids_string, token_string
from ...data.relations import PLACEHOLDER
from .activations import encode_prompt
from .last_position import Source


@dataclass(frozen=True)
class Prompt:
    """One filled template.

    Attributes:
        ids: Token ids, with BOS if requested.
        source: Position of the last token of the source.
        source_ids: The tokens of the source inside the prompt.
    """

    ids: tuple[int, ...]
    source: int
    source_ids: tuple[int, ...]


def check_templates(templates: str | Sequence[str]) -> tuple[str, ...]:
    """Refuse templates that do not have the placeholder exactly once, and an empty list of them."""
    templates = [templates] if isinstance(templates, str) else list(templates)
    if not len(templates):
        raise UsageError("There is no template; give at least one, such as 'The story of <X> contains'.")
    check_text(templates, "The template")
    for template in templates:
        if not isinstance(template, str) or template.count(PLACEHOLDER) != 1:
            raise UsageError(
                f"The template {template!r} must contain {PLACEHOLDER} exactly once: the source word takes its "
                "place. Write for example 'The capital of <X> is'."
            )
    return tuple(templates)


def read_templates(path: str | Path) -> tuple[str, ...]:
    """Templates of a file: one on each line, or (``.json``) a list of strings."""
    path = Path(path)
    try:
        text = read_text(path)
        content = parse_json(text) if path.suffix.lower() == ".json" else [line for line in text.splitlines() if line]
    except UnreadableError as error:
        raise UsageError(f"Cannot read templates from {path}: {error}. Write one template on each line.") from error
    if not isinstance(content, list) or not all(isinstance(template, str) for template in content):
        raise UsageError(
            f"{path} does not contain a list of templates. Write one template on each line, or a JSON list of strings."
        )
    return check_templates(content)


def filled(template: str, source: TokenLike, tokenizer: Any) -> tuple[str, int, int]:
    """The text of a template with a source filled in, and where the source starts and stops in it.

    A word is filled in without its leading space, a token id as the text of its token.
    """
    word = (source if isinstance(source, str) else token_string(tokenizer, source)).strip()
    start = template.index(PLACEHOLDER)
    return template[:start] + word + template[start + len(PLACEHOLDER) :], start, start + len(word)


def fill(model: Model, template: str, source: TokenLike, prepend_bos: bool = False) -> Prompt | str:
    """The prompt of a source, or the reason why the source cannot be located in it."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise UsageError(
            f"The model has no tokenizer, so the template {template!r} has no tokens. Load the model with its "
            "tokenizer, or set model.tokenizer."
        )
    if not getattr(tokenizer, "is_fast", False):
        raise UsageError(
            f"{type(tokenizer).__name__} does not tell which characters a token covers, which is needed to locate a "
            "source in a prompt. Load the fast tokenizer of this model (use_fast=True)."
        )
    text, start, stop = filled(template, source, tokenizer)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    covering = [
        place
        for place, (low, high) in enumerate(encoded["offset_mapping"])
        if low < stop and high > start and low < high
    ]
    if not covering:
        return f"no token of {text!r} covers it"
    first, last = covering[0], covering[-1]
    begins, ends = encoded["offset_mapping"][first][0], encoded["offset_mapping"][last][1]
    if text[begins:start].strip() or text[stop:ends].strip():
        joined = token_string(tokenizer, encoded["input_ids"][last if text[stop:ends].strip() else first])
        return f"it is joined to its neighbours in {text!r} (token {joined!r})"
    ids = encode_prompt(model, text, prepend_bos)
    shift = len(ids) - len(encoded["input_ids"])
    return Prompt(tuple(ids), last + shift, tuple(encoded["input_ids"][first : last + 1]))


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
