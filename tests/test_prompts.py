"""Neutral prefixes say nothing about any bundled relation, and leave the word behind them as it is."""

import json
import re
from typing import Any

import pytest

from tl_headmaps import load_relations
from tl_headmaps.data.relations import data_folder
from tl_headmaps.data.texts import neutral_prompts

WORD = re.compile(r"\w+")


def words(text: object) -> set[str]:
    return set(WORD.findall(str(text).lower()))


@pytest.fixture(scope="module")
def words_of_relations() -> set[str]:
    return {found for relation in load_relations() for pair in relation.pairs for word in pair for found in words(word)}


def test_there_are_eight_of_different_kinds() -> None:
    lines = (data_folder() / "prompts" / "neutral.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert len({record["kind"] for record in records}) == len(set(neutral_prompts())) == len(records) == 8
    assert neutral_prompts() == tuple(record["text"] for record in records)


@pytest.mark.parametrize("prompt", neutral_prompts())
def test_a_prefix_is_short_and_open(prompt: str) -> None:
    assert 5 <= len(prompt.split()) <= 14
    assert prompt == " ".join(prompt.split()) and prompt[-1] not in ".?!"


@pytest.mark.parametrize("prompt", neutral_prompts())
def test_no_word_of_a_relation_occurs(prompt: str, words_of_relations: set[str]) -> None:
    # The check sees what it should.
    assert {"paris", "she", "the", "seven", "a"} <= words_of_relations
    assert not words(prompt) & words_of_relations


def test_relations_do_not_see_the_prefixes() -> None:
    assert "neutral" not in {relation.name for relation in load_relations()}
    assert "prompts" not in {relation.category for relation in load_relations()}


@pytest.mark.model
@pytest.mark.parametrize("prompt", neutral_prompts())
def test_a_word_behind_a_prefix_keeps_its_tokens(prompt: str, default_model: Any) -> None:
    def ids(texts: list[str]) -> list[list[int]]:
        found: list[list[int]] = default_model.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return found

    sources = sorted({str(source) for relation in load_relations() for source, _ in relation.pairs})
    sample = [*sources[::7], "Zürich", "don't", "1984", "3.14", "x", "(", "antidisestablishmentarianism"]
    (prefix,) = ids([prompt])
    behind = ids([f" {word}" for word in sample])
    assert ids([f"{prompt} {word}" for word in sample]) == [prefix + word for word in behind]
