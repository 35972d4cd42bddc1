"""Which token a word means, on small tokenizers of the two common families."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tl_headmaps.core.errors import TokenError, UsageError
from tl_headmaps.core.vocabulary import ids_string, single_id, token_string, word_ids


def bpe(words: list[str], alphabet: list[str]) -> models.BPE:
    """Merges that build each word letter by letter, over an alphabet that covers everything else."""
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in words:
        built = word[0]
        for letter in word[1:]:
            if (built, letter) not in merges:
                merges.append((built, letter))
            built += letter
            vocab.setdefault(built, len(vocab))
    return models.BPE(vocab=vocab, merges=merges)


def byte_level() -> Any:
    """Like GPT-2, Llama 3 and SmolLM: the leading space is the letter Ġ of the word."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(bpe(["ĠFrance", "France", "ĠParis", "Ġa"], alphabet))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentencepiece() -> Tokenizer:
    alphabet = ["▁", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", "é"]
    return Tokenizer(bpe(["▁France", "France", "▁Paris", "▁a"], alphabet))


def metaspace(prepend_scheme: str) -> Any:
    """Like T5 (``always``: a space of its own where there is none) or Gemma (``never``)."""
    tokenizer = sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def dummy_prefix() -> Any:
    """Like Llama 2 and Mistral: a space is always put in front, also before our own."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {
    "byte-level": byte_level(),
    "metaspace, never prepended": metaspace("never"),
    "metaspace, always prepended": metaspace("always"),
    "dummy prefix": dummy_prefix(),
}
OPENING = {family: "Ġ" if family == "byte-level" else "▁" for family in TOKENIZERS}


@pytest.fixture(params=list(TOKENIZERS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def vocabulary(family: str) -> dict[str, int]:
    found: dict[str, int] = TOKENIZERS[family].get_vocab()
    return found


def test_the_dummy_prefix_really_doubles_the_space() -> None:
    """The trap that word_ids is there for: without it the word would be refused as two tokens."""
    doubled = TOKENIZERS["dummy prefix"]
    assert doubled.convert_ids_to_tokens(doubled.encode(" France", add_special_tokens=False)) == [
        "▁",
        "▁France",
    ]


@pytest.mark.parametrize("word", ["France", "Paris", "a"])
def test_a_word_gets_its_word_initial_token(family: str, word: str) -> None:
    expected = vocabulary(family)[OPENING[family] + word]
    assert single_id(TOKENIZERS[family], word, 10_000) == expected
    assert single_id(TOKENIZERS[family], f" {word}", 10_000) == expected


def test_the_same_word_without_its_space_is_another_token(family: str) -> None:
    assert single_id(TOKENIZERS[family], "France", 10_000) != vocabulary(family)["France"]


def test_a_word_that_is_one_token_only_without_its_space_is_refused() -> None:
    """A tokenizer that adds no space of its own has no word-initial form: the bare piece is not the word."""
    tokenizer = Tokenizer(bpe(["France"], sorted(pre_tokenizers.ByteLevel.alphabet())))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    with pytest.raises(TokenError, match=r"'France' is 2 tokens for this model \(' ', 'France'\)"):
        single_id(PreTrainedTokenizerFast(tokenizer_object=tokenizer), "France", 10_000)


def test_several_tokens_are_refused_and_shown(family: str) -> None:
    with pytest.raises(TokenError) as refused:
        single_id(TOKENIZERS[family], "Parisb", 10_000)
    message = str(refused.value)
    assert "'Parisb' is" in message and "tokens for this model" in message
    assert "' Paris', 'b'" in message
    assert "Choose a word that is a single token" in message


@pytest.mark.parametrize("word", ["Parisb", "France Paris", " Parisb"])
def test_a_word_of_several_tokens_begins_with_its_word_initial_token(family: str, word: str) -> None:
    """Behind a dummy prefix it began with a lone space, which multi_token="first" then took for the word."""
    tokenizer = TOKENIZERS[family]
    ids = word_ids(tokenizer, word)
    assert tokenizer.convert_ids_to_tokens(ids)[0] == OPENING[family] + ("France" if "France" in word else "Paris")
    assert ids_string(tokenizer, ids) == f" {word.strip()}"


@pytest.mark.parametrize("word", ["", " ", "\t\n"])
def test_empty_words_are_refused(family: str, word: str) -> None:
    with pytest.raises(TokenError, match="empty word"):
        single_id(TOKENIZERS[family], word, 10_000)


@given(token=st.integers(0, 99))
def test_ids_pass_through_even_without_a_tokenizer(token: int) -> None:
    assert single_id(None, token, 100) == token


def test_ids_from_numpy_pass_through(family: str) -> None:
    """What a notebook has at hand after an argsort."""
    token: Any = np.int64(5)
    assert single_id(TOKENIZERS[family], token, 100) == 5


@pytest.mark.parametrize("token", [-1, 100, 10**12])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(TokenError, match=f"id {token} is outside the vocabulary: ids run from 0 to 99"):
        single_id(None, token, 100)


def test_a_word_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no tokenizer.*'France'.*give token ids"):
        single_id(None, "France", 100)


def test_a_tokenizer_larger_than_the_model_is_refused(family: str) -> None:
    with pytest.raises(TokenError, match="embeds only 5 tokens"):
        single_id(TOKENIZERS[family], "France", 5)


def test_token_string_keeps_the_leading_space(family: str) -> None:
    ids = vocabulary(family)
    assert token_string(TOKENIZERS[family], ids[OPENING[family] + "France"]) == " France"
    assert token_string(TOKENIZERS[family], ids["France"]) == "France"


@given(number=st.integers(0, 3), word=st.sampled_from(["France", "Paris", "a"]))
def test_word_to_id_to_text_and_back(number: int, word: str) -> None:
    tokenizer = TOKENIZERS[list(TOKENIZERS)[number]]
    (token,) = word_ids(tokenizer, word)
    text = token_string(tokenizer, token)
    assert text == f" {word}"
    assert word_ids(tokenizer, text) == [token]
