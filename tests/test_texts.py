"""Texts from wherever a user keeps them, and sentences for what is not a text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tl_headmaps.core.errors import UsageError
from tl_headmaps.data.texts import describe_source, read_texts, sample_file


def test_the_bundled_sample_is_long_enough() -> None:
    texts = list(read_texts())
    assert len(texts) > 40 and sum(len(text.split()) for text in texts) > 6000
    assert len(set(texts)) == len(texts)
    assert describe_source(None) == "bundled sample english.txt"
    assert list(read_texts(sample_file())) == texts == list(read_texts(str(sample_file())))


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
        (["fine", 3], "Text 1 is 3, of type int"),
        ([["nested"]], r"Text 0 is \['nested'\], of type list"),
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
