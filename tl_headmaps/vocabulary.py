"""Words and token ids: the one place that decides which token a word means.

Relations are about words inside running text, and every common tokenizer writes a word inside text with
its leading space in the token (``' France'``; SentencePiece: ``'▁France'``). So a plain word means its
word-initial token. ``' France'`` with the space written out is the same token; to name any other token,
give its integer id.
"""

from typing import Any, SupportsInt, TypeAlias

from .errors import TokenError, UsageError

TokenLike: TypeAlias = str | int


def word_ids(tokenizer: Any, word: str) -> list[int]:
    """Token ids of a word as it stands inside running text (with its leading space)."""
    text = word if word[:1].isspace() else f" {word}"
    ids = _encode(tokenizer, text)
    if len(ids) == 1:
        return ids
    # A tokenizer that adds a space of its own (SentencePiece with a dummy prefix) doubles ours: '▁', '▁France'.
    bare = _encode(tokenizer, word.lstrip())
    if len(bare) == 1 and _opens_word(tokenizer, bare[0]):
        return bare
    return ids


def _encode(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def _opens_word(tokenizer: Any, token_id: int) -> bool:
    piece = tokenizer.convert_ids_to_tokens([token_id])[0]
    return isinstance(piece, str) and piece.startswith(("▁", "Ġ", " "))


def token_string(tokenizer: Any, token_id: int) -> str:
    """Text of one token, leading space included."""
    text = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    return _with_space(text, tokenizer.convert_ids_to_tokens([token_id])[0])


def _with_space(text: str, piece: object) -> str:
    # SentencePiece decoders drop the space that opens a sequence.
    if isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" "):
        return f" {text}"
    return str(text)


def single_id(tokenizer: Any, token: TokenLike | SupportsInt, n_vocab: int) -> int:
    """The id of a word that is one token, or of an explicit id; raises with the reason otherwise."""
    if not isinstance(token, str):
        token_id = int(token)
        if not 0 <= token_id < n_vocab:
            raise TokenError(f"Token id {token_id} is outside the vocabulary: ids run from 0 to {n_vocab - 1}.")
        return token_id
    if tokenizer is None:
        raise UsageError(
            f"The model has no tokenizer, so the word {token!r} has no token id. "
            "Load the model with its tokenizer, or give token ids (integers)."
        )
    if not token.strip():
        raise TokenError(f"{token!r} is an empty word; give a word or a token id.")
    if not token.isascii() and token.encode("utf-8", "replace") != token.encode("utf-8", "surrogatepass"):
        raise TokenError(f"{token!r} is not valid Unicode text; give a word in UTF-8 or a token id.")
    ids = word_ids(tokenizer, token)
    if len(ids) != 1:
        pieces = [token_string(tokenizer, token_id) for token_id in ids]
        raise TokenError(
            f"{token!r} is {len(ids)} tokens for this model ({', '.join(map(repr, pieces))}), "
            "and a map has one row or column per token. Choose a word that is a single token, "
            "or give the id of one of its pieces."
        )
    if ids[0] == getattr(tokenizer, "unk_token_id", None) and token.strip() != tokenizer.unk_token:
        raise TokenError(f"The tokenizer does not know {token!r}; choose a word of its vocabulary, or give a token id.")
    if ids[0] >= n_vocab:
        raise TokenError(
            f"{token!r} has id {ids[0]}, but the model embeds only {n_vocab} tokens: "
            "the tokenizer does not belong to this model."
        )
    return ids[0]


def token_strings(tokenizer: Any, n_vocab: int) -> list[str]:
    """Texts of the tokens 0, 1, ..., as many as both tokenizer and model have; the same as :func:`token_string`."""
    ids = list(range(min(n_vocab, len(tokenizer))))
    texts = tokenizer.batch_decode([[token_id] for token_id in ids], clean_up_tokenization_spaces=False)
    pieces = tokenizer.convert_ids_to_tokens(ids)
    return [_with_space(text, piece) for text, piece in zip(texts, pieces, strict=True)]
