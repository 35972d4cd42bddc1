"""Relation files: the bundled ones are sound, users' own are read or refused with a sentence."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from tl_headmaps import Relation, load_relations
from tl_headmaps.core.errors import RelationDataError, UsageError
from tl_headmaps.data.relations import NEUTRAL_TEMPLATES, PLACEHOLDER, data_folder, encode, resolve, resolve_relations

PATHS = sorted(data_folder().glob("*/*.json"))
FIELDS = ["name", "title", "category", "description", "k", "templates", "source", "licence", "pairs"]
WITHOUT_NUMBER_TOKENS = {"next_year"}
"""Relations the default model's tokenizer cannot write in single tokens: it splits every number."""


def test_there_are_at_least_thirty_relations_in_four_categories() -> None:
    assert len(PATHS) >= 30
    assert {path.parent.name for path in PATHS} == {"algorithmic", "knowledge", "linguistic", "translation"}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_bundled_file_is_sound(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert list(content) == FIELDS
    assert content["name"] == path.stem
    assert content["category"] == path.parent.name
    assert content["licence"] == "CC0-1.0"
    assert all(content[name] for name in FIELDS)
    assert tuple(content["templates"]["neutral"]) == NEUTRAL_TEMPLATES
    assert content["templates"]["eliciting"]
    for template in (*content["templates"]["neutral"], *content["templates"]["eliciting"]):
        assert template.count(PLACEHOLDER) == 1
        assert not template.endswith(" ")
    pairs = content["pairs"]
    assert len(pairs) >= 80
    sources = [source for source, _ in pairs]
    assert len(set(sources)) == len(sources), "a source stands twice"
    for word in (word for pair in pairs for word in pair):
        assert word
        assert word == word.strip()
        assert unicodedata.is_normalized("NFC", word)
    assert content["k"] == (1 if "copying" in path.stem else 10)


@pytest.mark.model
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_enough_pairs_are_single_tokens_of_the_default_model(path: Path, default_weights: Any) -> None:
    n = default_weights.n_vocab
    kept = encode(Relation.from_file(path), default_weights.tokenizer, n_sources=n, n_targets=n).kept
    assert len(kept) >= (0 if path.stem in WITHOUT_NUMBER_TOKENS else 40)


def test_seed_examples_are_among_the_name_variations() -> None:
    pairs = resolve("name_variations").pairs
    assert ("Tomas", "Tom") in pairs
    assert ("Donna", "Don") in pairs


def test_load_relations_by_category_and_for_a_tokenizer() -> None:
    assert {relation.category for relation in load_relations("knowledge")} == {"knowledge"}
    with pytest.raises(RelationDataError, match="no category 'cooking'; the categories are algorithmic, knowledge"):
        load_relations("cooking")


@pytest.mark.model
def test_relations_without_a_pair_are_left_out_for_a_model(default_model: Any) -> None:
    everything = {relation.name for relation in load_relations()}
    usable = {relation.name for relation in load_relations(model=default_model)}
    assert everything - usable == WITHOUT_NUMBER_TOKENS


@pytest.mark.filterwarnings("ignore::tl_headmaps.core.errors.HeadMapsWarning")
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.json", '[["France", "Paris"], ["Chad", "N\'Djamena"]]', (("France", "Paris"), ("Chad", "N'Djamena"))),
        ("a.json", '{"name": "x", "k": 3, "pairs": [["a", "b"]]}', (("a", "b"),)),
        ("a.csv", "source,target\nFrance,Paris\n\nEgypt,Cairo\n", (("France", "Paris"), ("Egypt", "Cairo"))),
        ("a.csv", "target,note,source\nParis,x,France\n", (("France", "Paris"),)),
        ("a.tsv", "source\ttarget\nFrance\tParis\n", (("France", "Paris"),)),
        ("a.json", '[["日本", "東京"], ["مصر", "القاهرة"]]', (("日本", "東京"), ("مصر", "القاهرة"))),
        ("a.json", "[[3, 4]]", ((3, 4),)),
    ],
)
def test_files_of_users(tmp_path: Path, name: str, text: str, expected: Any) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert resolve(str(path)).pairs == expected


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.json", '{"name": "x"}', "a list of \\[source, target\\], or an object with a field 'pairs'"),
        ("a.json", "[]", "Relation 'a' is empty"),
        ("a.json", '[["France"]]', r"pair 0: \['France'\] is not a pair of two words"),
        ("a.json", '["France", "Paris"]', "pair 0: 'France' is not a pair"),
        ("a.json", '[["France", " "]]', "pair 0: ' ' is an empty word"),
        ("a.json", '[["France", null]]', "is not a pair of two words"),
        ("a.json", '{"pairs": [["a", "b"]], "templates": {"eliciting": ["no placeholder"]}}', "must contain <X>"),
        ("a.csv", "", "has no rows"),
        ("a.csv", "source,target\nFrance\n", "row 2: .* does not have two columns"),
        ("a.csv", "source,target\n", "Relation 'a' is empty"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RelationDataError, match=sentence):
        Relation.from_file(path)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RelationDataError, match="Cannot read the relation file"):
        Relation.from_file(tmp_path / "absent.json")
    binary = tmp_path / "b.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RelationDataError, match="Cannot read the relation file"):
        Relation.from_file(binary)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(RelationDataError, match="Did you mean 'country_to_capital'"):
        resolve("country_to_capitol")
    with pytest.raises(RelationDataError, match="relations --list"):
        resolve("zzzzzz")


def test_one_or_several_relations_become_a_list() -> None:
    own = Relation.from_pairs("own", [("x", "y")])
    assert [relation.name for relation in resolve_relations("antonym")] == ["antonym"]
    assert resolve_relations(own) == [own]
    assert [relation.name for relation in resolve_relations(["antonym", own])] == ["antonym", "own"]
    with pytest.raises(UsageError, match="No relation was given"):
        resolve_relations([])
    with pytest.raises(UsageError, match="The relation 'own' was given twice; give each relation its own name"):
        resolve_relations([own, "antonym", own])


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "knowledge/country_to_capital", "..", "a b", ""])
def test_a_name_cannot_leave_its_folder(name: str) -> None:
    with pytest.raises(RelationDataError, match="is not the name of a relation"):
        resolve(name)


def test_from_dataset() -> None:
    from datasets import Dataset, DatasetDict

    dataset = Dataset.from_dict({"country": ["France", "Egypt"], "capital": ["Paris", "Cairo"]})
    relation = Relation.from_dataset(dataset, "capitals", source="country", target="capital", k=5)
    assert relation.pairs == (("France", "Paris"), ("Egypt", "Cairo"))
    assert relation.k == 5
    with pytest.raises(RelationDataError, match="no column 'source'; it has country, capital"):
        Relation.from_dataset(dataset, "capitals")
    streamed = dataset.to_iterable_dataset()
    assert Relation.from_dataset(streamed, "capitals", source="country", target="capital", k=5) == relation
    with pytest.raises(RelationDataError, match=r"Choose a split, for example dataset\['train'\]"):
        Relation.from_dataset(DatasetDict({"train": dataset}), "capitals")
    with pytest.raises(RelationDataError, match="A list is not a dataset"):
        Relation.from_dataset([("France", "Paris")], "capitals")


def test_default_k_grows_with_the_vocabulary() -> None:
    assert resolve("country_to_capital").default_k(49_152) == 10
    assert resolve("country_to_capital").default_k(262_144) == 25
    assert resolve("name_copying").default_k(49_152) == 1
    assert resolve("name_copying").default_k(262_144) == 3


def test_digest_depends_on_everything_a_score_depends_on() -> None:
    one = Relation.from_pairs("a", [("x", "y")])
    others = [
        Relation.from_pairs("b", [("x", "y")]),
        Relation.from_pairs("a", [("x", "z")]),
        Relation.from_pairs("a", [("x", "y")], k=3),
    ]
    assert one.digest == Relation.from_pairs("a", [("x", "y")], title="other title").digest
    assert all(one.digest != other.digest for other in others)
