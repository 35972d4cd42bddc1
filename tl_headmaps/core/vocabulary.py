"""Words and token ids: the one place that decides which token, or which place in a text, a word means.

Relations are about words inside running text, and every common tokenizer writes a word inside text with
its leading space in the token (``' France'``; SentencePiece: ``'▁France'``). So a plain word means its
word-initial token. ``' France'`` with the space written out is the same token; to name any other token,
give its integer id.
"""

import difflib
import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import index
from typing import Any, SupportsIndex, TypeAlias

from .errors import TokenError, UsageError, shown
from .files import check_text
from .types import is_index

TokenLike: TypeAlias = str | int
Text: TypeAlias = str | tuple[int, ...]
"""A text as the analyses take it: a string, or the ids of its tokens."""

_INDEX = re.compile("-?[0-9]{1,9}")
_NUMBERED = re.compile(r"(.+)#([0-9]{1,9})")


def as_text(text: Any) -> Text:
    """A string as it is, or token ids: a list, or an array or tensor of one dimension or of one row.

    Example:
        >>> import torch
        >>> as_text("Birds walk"), as_text([3, 4]), as_text(torch.tensor([[3, 4]]))
        ('Birds walk', (3, 4), (3, 4))
    """
    if isinstance(text, str):
        return text
    listed = text.tolist() if hasattr(text, "tolist") else text
    if isinstance(listed, Iterable) and not isinstance(listed, bytes | dict):
        listed = list(listed)
        if len(listed) == 1 and not is_index(listed[0]) and not isinstance(listed[0], str):
            return as_text(listed[0])
        wrong = next((token for token in listed if not is_index(token)), None)
        if wrong is None:
            return tuple(map(index, listed))
        if not isinstance(wrong, str) and isinstance(wrong, Iterable):
            raise UsageError(
                f"{len(listed)} texts were given, and this is about one. Give a string, or the token ids of one text."
            )
        raise UsageError(
            f"{wrong!r} is not a token id. Give a text as one string, or a list or tensor of integer token ids."
        )
    raise UsageError(f"{text!r} is not a text. Give a string, or a list or tensor of integer token ids.")


def word_ids(tokenizer: Any, word: str) -> list[int]:
    """Token ids of a word inside running text (with its leading space)."""
    text = word if word[:1].isspace() else f" {word}"
    ids = _encode(tokenizer, text)
    if len(ids) == 1:
        return ids
    # A tokenizer that adds a space of its own (SentencePiece with a dummy prefix) doubles ours: '▁', '▁France'.
    bare = _encode(tokenizer, word.lstrip())
    if 0 < len(bare) < len(ids) and _opens_word(tokenizer, bare[0]):
        return bare
    return ids


def _encode(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def _opens_word(tokenizer: Any, token_id: int) -> bool:
    piece = tokenizer.convert_ids_to_tokens([token_id])[0]
    return isinstance(piece, str) and piece.startswith(("▁", "Ġ", " "))


def token_string(tokenizer: Any, token_id: int) -> str:
    """Text of one token, leading space included."""
    return ids_string(tokenizer, [token_id])


def ids_string(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of tokens that follow each other, leading space included."""
    text = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
    return _with_space(text, tokenizer.convert_ids_to_tokens(list(ids[:1]))[0]) if ids else ""


def _with_space(text: str, piece: object) -> str:
    # SentencePiece decoders drop the space that opens a sequence.
    if isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" "):
        return f" {text}"
    return str(text)


def single_id(tokenizer: Any, token: TokenLike | SupportsIndex, n_vocab: int) -> int:
    """The id of a word that is one token, or of an explicit id; raises with the reason otherwise."""
    if not isinstance(token, str):
        if not is_index(token):
            raise TokenError(f"{token!r} is neither a word nor a token id. Give text or a whole number.")
        token_id = index(token)
        if not 0 <= token_id < n_vocab:
            raise TokenError(f"Token id {shown(token_id)} is outside the vocabulary: ids run from 0 to {n_vocab - 1}.")
        return token_id
    if tokenizer is None:
        raise UsageError(
            f"The model has no tokenizer, so the word {token!r} has no token id. Load the model with its tokenizer, "
            "or give token ids (integers)."
        )
    if not token.strip():
        raise TokenError(f"{token!r} is an empty word. Give a word or a token id.")
    check_text(token, "The word", TokenError)
    ids = word_ids(tokenizer, token)
    if len(ids) != 1:
        pieces = [token_string(tokenizer, token_id) for token_id in ids]
        raise TokenError(
            f"{token!r} is {len(ids)} tokens for this model ({', '.join(map(repr, pieces))}), "
            "and a map has one row or column per token. Choose a word that is a single token, "
            "or give the id of one of its pieces."
        )
    if ids[0] == getattr(tokenizer, "unk_token_id", None) and token.strip() != tokenizer.unk_token:
        raise TokenError(f"The tokenizer does not know {token!r}. Choose a word of its vocabulary, or give a token id.")
    if ids[0] >= n_vocab:
        raise TokenError(
            f"{token!r} has id {ids[0]}, but the model embeds only {n_vocab} tokens: the tokenizer belongs to another "
            "model. Load the model with its own tokenizer."
        )
    return ids[0]


def token_strings(tokenizer: Any, n_vocab: int) -> list[str]:
    """Text of every token that both tokenizer and model have, as :func:`token_string` gives it."""
    ids = list(range(min(n_vocab, len(tokenizer))))
    texts = tokenizer.batch_decode([[token_id] for token_id in ids], clean_up_tokenization_spaces=False)
    pieces = tokenizer.convert_ids_to_tokens(ids)
    return [_with_space(text, piece) for text, piece in zip(texts, pieces, strict=True)]


def token_position(tokens: Sequence[str], token: TokenLike) -> int:
    """Position of a token in a text, given by its text (spaces around it do not matter), as ``walk#2``, or by index.

    ``walk#2`` is the second ``walk``. Digits that are not a token of the text are an index, counted from 0; negative
    ones count from the end.

    Example:
        >>> tokens = ["Birds", " walk", " and", " walk"]
        >>> token_position(tokens, "walk#2"), token_position(tokens, -2), token_position(tokens, "-2")
        (3, 2, 2)
    """
    if not isinstance(token, str):
        if not is_index(token):
            raise TokenError(
                f"{token!r} is not a token of this text. Give the text of a token, or an index (a whole number)."
            )
        place, n = index(token), len(tokens)
        if not -n <= place < n:
            raise TokenError(
                f"There is no token {place}: the text has tokens 0 to {n - 1}, or -{n} to -1 counted from the end."
            )
        return place % n
    places = _occurrences(tokens, token, _places)
    if not places and _INDEX.fullmatch(token.strip()):
        return token_position(tokens, int(token))
    pieces = [] if places else _spelled(tokens, token)
    if pieces:
        first, last = pieces[0]
        listed = ", ".join(f"{place} {tokens[place]!r}" for place in range(first, last + 1))
        raise TokenError(
            f"{token!r} is {last - first + 1} tokens of the text ({listed}), and one is needed. Give the index of one; "
            f"the last, {last}, has read the whole word."
        )
    if not places:
        raise TokenError(
            f"{token!r} is not a token of the text. Its tokens are {_listing(tokens)}. Choose one of them, or give "
            "an index."
        )
    return _only(token, places)[1]


def word_place(tokens: Sequence[str], word: TokenLike) -> tuple[int, int]:
    """First and last token of a word in a text, whatever its case: the word, ``walk#2``, or the index of a token.

    Example:
        >>> word_place(["<s>", "Flam", "ingos", " walk"], "flamingos"), word_place(["Birds", " walk"], "birds")
        ((1, 2), (0, 0))
    """
    if not isinstance(word, str):
        return (token_position(tokens, word),) * 2
    places = _occurrences(tokens, word, _spelled)
    if not places and _INDEX.fullmatch(word.strip()):
        return (token_position(tokens, int(word)),) * 2
    if not places:
        raise TokenError(f"{word!r} is not in the text. Its tokens are {_listing(tokens)}. Choose a word of it.")
    return _only(word, places)


Places: TypeAlias = list[tuple[int, int]]
"""First and last token of each place of a word in a text."""


def _occurrences(tokens: Sequence[str], word: str, find: Callable[[Sequence[str], str], Places]) -> Places:
    """All places of a word, or the one that ``walk#2`` means."""
    places, numbered = find(tokens, word), _NUMBERED.fullmatch(word.strip())
    if places or numbered is None:
        return places
    places, number = find(tokens, numbered[1]), int(numbered[2])
    if places and not 1 <= number <= len(places):
        raise TokenError(
            f"{word!r}: the text has {numbered[1]!r} {len(places)} time{'s' if len(places) > 1 else ''} "
            f"({_listed(places)}), counted from #1."
        )
    return places[number - 1 : number]


def _only(word: str, places: Places) -> tuple[int, int]:
    if len(places) > 1:
        raise TokenError(
            f"{word!r} occurs in the text {len(places)} times ({_listed(places)}). Write '{word.strip()}#2' for the "
            "second, or give the index of a token."
        )
    return places[0]


def _spelled(tokens: Sequence[str], word: str) -> Places:
    """Where the tokens spell a word: first and last token of each place; in its own case, or else in any."""
    if not word.strip():
        return []
    ends = list(itertools.accumulate(map(len, tokens)))
    for flags in (0, re.IGNORECASE):
        matches = re.finditer(rf"(?<!\w){re.escape(word.strip())}(?!\w)", "".join(tokens), flags)
        places = [(bisect_right(ends, match.start()), bisect_right(ends, match.end() - 1)) for match in matches]
        if places:
            return places
    return []


def _places(tokens: Sequence[str], word: str) -> Places:
    """Tokens that are a word: with its spaces written out exactly that token, a bare word in all its forms."""
    exact = [place for place, text in enumerate(tokens) if text == word] if word != word.strip() else []
    bare = [place for place, text in enumerate(tokens) if word.strip() and text.strip() == word.strip()]
    return [(place, place) for place in exact or bare]


def _listed(places: Places) -> str:
    return f"position{'s' if len(places) > 1 else ''} " + ", ".join(str(last) for _, last in places)


def _listing(tokens: Sequence[str], most: int = 24) -> str:
    listed = ", ".join(f"{place} {text!r}" for place, text in enumerate(tokens[:most]))
    return listed if len(tokens) <= most else f"{listed}, and {len(tokens) - most} more"


def near_words(tokenizer: Any, word: str, n_vocab: int, n: int = 3) -> list[str]:
    """Words of a single token that are spelt like a word of several, the nearest first."""
    texts = token_strings(tokenizer, n_vocab)
    words = sorted({text[1:] for text in texts if text[:1] == " " and len(text) > 2 and text[1:].isalpha()})
    # Names stay names: only words with the same case of the first letter.
    alike = [text for text in words if text[0].isupper() == word.strip()[:1].isupper()]
    return difflib.get_close_matches(word.strip(), alike, n=n, cutoff=0.6)


_ENDINGS = ("", "s", "es", "d", "ed", "ing", "er", "ers", "est", "ly", "r", "rs", "st", "n", "en")


@lru_cache(maxsize=1 << 16)
def stems(word: str) -> frozenset[str]:
    """Stems a word may be an inflection of: endings off, y for i, the doubled letter undone, the lost e left off.

    The word is in small letters; two words that share a stem may be forms of one word.

    Example:
        >>> sorted(stems("running") & stems("runs"))
        ['run']
    """
    forms = set()
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            stem = word[: len(word) - len(ending)]
            forms.add(stem)
            forms.add(stem[:-1] if stem.endswith("e") else stem)
            if stem.endswith("i"):
                forms.add(stem[:-1] + "y")
            if len(stem) > 3 and stem[-1] == stem[-2]:
                forms.add(stem[:-1])
    return frozenset(stem for stem in forms if len(stem) >= 3)
