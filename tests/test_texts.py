"""Texts from wherever a user keeps them, and sentences for what is not a text."""

import hashlib
import inspect
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tl_headmaps.core.errors import UsageError
from tl_headmaps.data.texts import Sample, describe_source, read_texts, split_texts

PIECES = re.compile(r"[\w'’]+|[^\w\s'’]+")
"""Words and runs of signs: a tokenizer that joins no two of them writes a text in at least as many tokens."""


def test_the_bundled_prose_stays_as_it_was() -> None:
    texts = list(read_texts())
    assert len(texts) == 42 and sum(len(text.split()) for text in texts) == 6839
    # Figures in the README were computed from it.
    (file,) = Sample.PROSE.files
    assert hashlib.sha256(file.read_bytes()).hexdigest().startswith("0ed196a0a7d4767d")
    assert describe_source(None) == describe_source(Sample.PROSE) == "bundled sample english.txt"
    assert list(read_texts(file)) == texts == list(read_texts(str(file))) == list(read_texts(Sample.PROSE))


def test_the_whole_sample_begins_with_the_prose() -> None:
    whole = list(read_texts(Sample.WHOLE))
    assert whole[:42] == list(read_texts())
    assert len(set(whole)) == len(whole) == 135
    # Many registers, all of them in both parts: chosen by hand, so any change is to be looked at.
    assert hashlib.sha256(Sample.WHOLE.files[1].read_bytes()).hexdigest().startswith("f1f05b41d04c4d74")
    assert describe_source(Sample.WHOLE) == "bundled sample english.txt and registers.txt"


def test_both_parts_of_the_whole_sample_are_long_enough() -> None:
    fit, held_out = split_texts(Sample.WHOLE)
    assert not set(fit) & set(held_out)
    assert sorted(fit + held_out) == sorted(read_texts(Sample.WHOLE))
    pieces = {text: len(PIECES.findall(text)) for text in fit + held_out}
    assert sum(pieces.values()) >= 25_000
    assert sum(pieces[text] for text in held_out) >= 8_000
    assert all(60 <= count <= 600 for count in pieces.values())


@pytest.mark.parametrize("file", Sample.WHOLE.files, ids=lambda file: file.name)
def test_bundled_files_are_clean(file: Path) -> None:
    content = file.read_bytes().decode("utf-8")
    assert content.endswith("\n") and not content.endswith("\n\n")
    assert all(line == line.rstrip() for line in content.split("\n"))
    assert all(sign == "\n" or sign.isprintable() for sign in content)


@pytest.mark.model
def test_the_whole_sample_in_tokens_of_the_default_model(default_model: Any) -> None:
    def counts(part: list[str]) -> list[int]:
        return [len(ids) for ids in default_model.tokenizer(part, add_special_tokens=False)["input_ids"]]

    fit, held_out = map(counts, split_texts(Sample.WHOLE))
    assert sum(fit) + sum(held_out) >= 25_000 and sum(held_out) >= 8_000
    assert all(60 <= count <= 600 for count in fit + held_out)


def test_every_third_text_is_held_out() -> None:
    texts = [f"text {number}" for number in range(8)]
    fit, held_out = split_texts(texts)
    assert held_out == ["text 2", "text 5"]
    assert fit == [text for text in texts if text not in held_out]
    assert split_texts(iter(texts)) == (fit, held_out)
    assert split_texts(["", *texts, " "]) == (fit, held_out)
    assert split_texts(["one", "two"]) == (["one", "two"], [])


@given(st.lists(st.text(alphabet="ab ", max_size=3)), st.lists(st.text(alphabet="ab ", max_size=3)))
def test_parts_share_no_text_and_lose_none(texts: list[str], more: list[str]) -> None:
    fit, held_out = split_texts(texts)
    assert not {text.strip() for text in fit} & {text.strip() for text in held_out}
    assert sorted(fit + held_out) == sorted(read_texts(texts))
    assert (len({text.strip() for text in held_out})) == len({text.strip() for text in fit + held_out}) // 3
    assert (list(read_texts(texts, part="fit")), list(read_texts(texts, part="held_out"))) == (fit, held_out)
    # What is added at the end moves nothing that was there.
    later_fit, later_held_out = split_texts(texts + more)
    assert (later_fit[: len(fit)], later_held_out[: len(held_out)]) == (fit, held_out)


def test_parts_of_users_own_texts(tmp_path: Path) -> None:
    from datasets import Dataset

    (tmp_path / "own.txt").write_text("a\n\nb\n\nc\n\n\nd", encoding="utf-8")
    dataset = Dataset.from_dict({"body": ["a", "b", "c", "", "d"]})
    assert split_texts(tmp_path / "own.txt") == split_texts(dataset, column="body") == (["a", "b", "d"], ["c"])
    assert describe_source(tmp_path / "own.txt", "held_out") == "file own.txt, held-out third"
    assert describe_source(dataset, "fit") == "Dataset, without the held-out third"
    endless = (f"text {number}" for number in iter(int, 1))
    assert list(islice(read_texts(endless, part="fit"), 2)) == ["text 0", "text 0"]


def test_an_unknown_part_is_named_before_anything_is_read() -> None:
    with pytest.raises(UsageError, match=r"part='test' is not known\. Choose one of: 'all', 'fit', 'held_out'"):
        inspect.unwrap(read_texts)(["a"], part="test")


def test_a_string_is_a_text_unless_it_names_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").write_text("One\nparagraph.\n\n \nAnother.", encoding="utf-8")
    assert list(read_texts("notes")) == ["One\nparagraph.", "Another."]
    assert list(read_texts("no such thing")) == ["no such thing"]
    for text in ("Two lines\nof text.txt", "x" * 100_000, "nul \0 byte", "It ends in notes.txt"):
        assert list(read_texts(text)) == [text]
    with pytest.raises(UsageError, match=r"There is no file 'missing.txt'"):
        list(read_texts("missing.txt"))


def test_lists_and_generators_are_read_one_by_one() -> None:
    def endless() -> Iterator[str]:
        while True:
            yield "again"

    texts = read_texts(endless())
    assert [next(texts), next(texts)] == ["again", "again"]
    assert list(read_texts(("a", "", " \n", "b"))) == ["a", "b"]


# Waiting for datasets: its iterator of streamed data is not closed when it is left early.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_datasets_are_read_by_column() -> None:
    from datasets import Dataset, DatasetDict

    dataset = Dataset.from_dict({"text": ["first", "second"], "body": ["third", ""]})
    assert list(read_texts(dataset)) == ["first", "second"]
    assert list(read_texts(dataset, column="body")) == ["third"]
    assert next(read_texts(dataset.to_iterable_dataset())) == "first"
    with pytest.raises(UsageError, match=r"no column 'words'; it has text, body"):
        list(read_texts(dataset, column="words"))
    with pytest.raises(UsageError, match=r"splits train, test, .*dataset\['train'\]"):
        list(read_texts(DatasetDict({"train": dataset, "test": dataset})))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (5, "int is not a source of texts"),
        (b"bytes", "bytes is not a source of texts"),
        ({"text": "x"}, "dict is not a source of texts"),
        (["fine", 3], "Text 1: 3 is not a text. Give a string"),
        ([None, "fine"], "Text 0: None is not a text"),
        ([["nested"]], "Text 0: 'nested' is not a token id"),
    ],
)
def test_what_is_no_text_is_named(source: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(read_texts(source))


def test_unreadable_files_are_sentences(tmp_path: Path) -> None:
    binary = tmp_path / "image.txt"
    binary.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(UsageError, match=r"not a text file in UTF-8 \(byte 0"):
        list(read_texts(binary))
    with pytest.raises(UsageError, match=r"Cannot read the text file .*absent"):
        list(read_texts(tmp_path / "absent"))
    with pytest.raises(UsageError, match="Cannot read the text file"):
        list(read_texts(tmp_path))
