"""Task data: the bundled items keep their promises, users' own are read or refused with a sentence."""

import csv
import json
import re
import runpy
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from tl_headmaps import TaskItem, Tasks, load_tasks
from tl_headmaps.core.errors import TaskDataError
from tl_headmaps.data.relations import data_folder
from tl_headmaps.data.tasks import FUNCTIONS

GENERATOR = data_folder() / "tasks" / "generate.py"
CHANCE = 1 / 8
SET_SIZE = 3
"""Items of a matched set, which no classifier of words can tell apart."""


@pytest.fixture(scope="module")
def bundled() -> Tasks:
    return load_tasks()


@pytest.fixture(scope="module")
def groups() -> list[Any]:
    return runpy.run_path(str(GENERATOR))["content_groups"]()


def flat(n: int = 12, functions: tuple[str, ...] = ("retrieval", "inference")) -> list[dict[str, Any]]:
    return [
        {"question": f"What is {function} {i}?", "answer": f"a{i}", "function": function}
        for function in functions
        for i in range(n)
    ]


# The bundled items


def test_the_files_are_what_the_generator_writes() -> None:
    done = subprocess.run(
        [sys.executable, str(GENERATOR), "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_generator_notices_a_changed_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    script = runpy.run_path(str(GENERATOR))
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    written = script["files"]()
    changed = {path: text if number else text[1:] for number, (path, text) in enumerate(written.items())}
    monkeypatch.setitem(script["main"].__globals__, "files", lambda: changed)
    assert script["main"]() == 1
    assert capsys.readouterr().err == "knowledge_recall.jsonl is not what this script writes\n"


def test_every_function_has_at_least_150_items(bundled: Tasks) -> None:
    assert list(bundled.counts) == list(FUNCTIONS)
    assert min(bundled.counts.values()) >= 150
    assert bundled.unknown_labels == {}


@pytest.mark.parametrize("part", ["format", "content"])
def test_functions_are_equally_frequent_everywhere(bundled: Tasks, part: str) -> None:
    by_part = defaultdict(Counter)
    for item in bundled.items:
        by_part[getattr(item, part)][item.function] += 1
    assert len(by_part) >= 5
    for counts in by_part.values():
        assert len(counts) == len(FUNCTIONS)
        assert len(set(counts.values())) == 1


def words_of(text: str) -> Counter:
    return Counter(re.findall(r"\w+|[^\w\s]", text))


def test_items_of_a_set_consist_of_the_same_words(bundled: Tasks, groups: list[Any]) -> None:
    names = {name for group in groups for name in group["names"]}
    sets = defaultdict(list)
    for item in bundled.items:
        sets[item.matched].append(item)
    for items in sets.values():
        assert len(items) == SET_SIZE
        assert len({item.function for item in items}) == SET_SIZE
        assert len({(item.content, item.format, frozenset((item.answer, *item.alternatives))) for item in items}) == 1
        if items[0].format.endswith("sentence"):
            bags = [words_of(f"{item.prompt} {item.answer}.") for item in items]
        else:
            bags = [words_of(item.prompt) for item in items]
            for bag in bags:
                for name in names & set(bag):
                    del bag[name]
            assert len({item.context for item in items}) == 1
        assert all(bag == bags[0] for bag in bags)


def test_the_decisive_sentence_is_the_one_about_the_person_asked_for(bundled: Tasks, groups: list[Any]) -> None:
    names = {name for group in groups for name in group["names"]}
    for item in bundled.items:
        (name,) = names & set(words_of(item.question))
        (told,) = [told for told in re.split(r"(?<=[.])\s+", item.context) if re.search(rf"\b{name}\b", told)]
        assert item.decisive == told
    assert TaskItem("What is one plus one?", "two", "math_calculation").decisive == "What is one plus one?"


def test_every_place_in_the_context_asks_for_every_function_equally_often(bundled: Tasks, groups: list[Any]) -> None:
    names = {name for group in groups for name in group["names"]}
    places = defaultdict(Counter)
    for item in bundled.items:
        (name,) = names & set(words_of(item.question))
        found = [n for n, told in enumerate(item.context.split(". ")) if re.search(rf"\b{name}\b", told)]
        assert len(found) == 1
        places[item.format.split("_")[1]][item.function, found[0]] += 1
    assert set(places["sentence"]) == {(function, 4) for function in FUNCTIONS}
    assert set(places["question"]) == {(function, place) for function in FUNCTIONS for place in range(SET_SIZE)}
    assert all(len(set(counts.values())) == 1 for counts in places.values())


def test_answers_depend_neither_on_the_function_nor_on_the_others(bundled: Tasks) -> None:
    """The right answer is among those already given as often as chance has it: 5 of 9."""
    concluded = [
        any(re.search(rf"So .* {item.answer}$", told) for told in item.context.split(". "))
        for item in bundled.items
        if item.format.endswith("sentence")
    ]
    assert abs(sum(concluded) / len(concluded) - 5 / 9) < 0.05


def test_contents_share_neither_names_nor_facts(groups: list[Any]) -> None:
    seen = Counter()
    for group in groups:
        seen.update(group["names"])
        seen.update([*group["place"], *group["place"].values(), *group["object"], *group["object"].values()])
        seen.update(group["number"].values())
        seen.update(word for pair in group["synonyms"] for word in pair)
    assert [word for word, times in seen.items() if times > 1] == []


def accuracy_by_words(bundled: Tasks, texts: list[str], n_grams: int) -> float:
    """Test accuracy of a linear classifier of word counts, split by content."""
    labels = np.array([item.function for item in bundled.items])
    half = np.array([int(item.content[1:]) % 2 for item in bundled.items])
    counts = CountVectorizer(ngram_range=(1, n_grams), token_pattern=r"(?u)\w+|[^\w\s]", lowercase=False)
    features = counts.fit_transform(texts)
    right = 0
    for test in range(2):
        probe = LogisticRegression(C=0.1, max_iter=500).fit(features[half != test], labels[half != test])
        right += (probe.predict(features[half == test]) == labels[half == test]).sum()
    return right / len(labels)


@pytest.mark.parametrize("n_grams", [1, 2])
def test_words_do_not_give_the_function_away(bundled: Tasks, n_grams: int) -> None:
    """With scikit-learn, not with our own probe. A set of three cannot be told apart, so a third is the bound."""
    texts = {
        "context, question": [item.prompt for item in bundled.items],
        "context, question, answer": [f"{item.prompt} {item.answer}" for item in bundled.items],
        "question": [item.question for item in bundled.items],
        "question, answer": [f"{item.question} {item.answer}" for item in bundled.items],
    }
    found = {name: accuracy_by_words(bundled, lines, n_grams) for name, lines in texts.items()}
    assert found["context, question"] < 0.35
    assert found["context, question, answer"] < 0.35
    assert found["question"] < 0.15
    assert found["question, answer"] < 0.15


def test_the_format_does_not_give_the_function_away(bundled: Tasks) -> None:
    by_format = defaultdict(Counter)
    for item in bundled.items:
        by_format[item.format][item.function] += 1
    accuracy = sum(max(counts.values()) for counts in by_format.values()) / len(bundled)
    assert accuracy == CHANCE


@pytest.mark.model
def test_items_are_short_for_the_default_model(bundled: Tasks, default_model: Any) -> None:
    encode = default_model.tokenizer.encode
    assert max(len(encode(item.prompt, add_special_tokens=False)) for item in bundled.items) <= 100
    assert max(len(encode(f" {item.answer}", add_special_tokens=False)) for item in bundled.items) <= 4


def test_some_functions_can_be_chosen() -> None:
    chosen = load_tasks(["Math Calculation", "retrieval"])
    assert chosen.functions == ("retrieval", "math_calculation")
    assert chosen.digest != load_tasks().digest
    assert load_tasks().select(["retrieval", "math_calculation"]).items == chosen.items
    with pytest.raises(TaskDataError, match=r"no function 'maths and logic' here; there are knowledge_recall, "):
        load_tasks(["maths and logic"])
    with pytest.raises(TaskDataError, match=r"only 'retrieval'; telling functions apart needs at least two"):
        load_tasks(["retrieval"])


@pytest.mark.parametrize("n", [10, 12, 30, 75])
def test_a_sample_keeps_sets_whole_and_functions_contents_and_formats_even(bundled: Tasks, n: int) -> None:
    drawn = bundled.sample(n)
    assert all(n <= count <= n + SET_SIZE - 1 for count in drawn.counts.values())
    whole = Counter(item.matched for item in bundled.items)
    assert all(whole[name] == count for name, count in Counter(item.matched for item in drawn.items).items())
    for part in ("content", "format"):
        used = Counter(getattr(item, part) for item in drawn.items)
        assert len(used) == len({getattr(item, part) for item in bundled.items})
        assert max(used.values()) - min(used.values()) <= 2 * SET_SIZE
    places = [bundled.items.index(item) for item in drawn.items]
    assert places == sorted(places)
    assert bundled.sample(n) == drawn
    assert bundled.sample(n, seed=1) != drawn


def test_a_sample_of_more_than_there_is_takes_all(bundled: Tasks) -> None:
    assert bundled.sample(1000) == bundled
    uneven = Tasks(tuple(Tasks.from_records([*flat(30, ("retrieval",)), *flat(12, ("inference",))]).items))
    assert uneven.sample(20).counts == {"retrieval": 20, "inference": 12}
    with pytest.raises(TaskDataError, match=r"sample\(9\) is too small: a function needs at least 10 items"):
        bundled.sample(9)


def test_a_folder_without_tasks_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match=r"lacks knowledge_recall\.jsonl, .*pass data_dir="):
        load_tasks(data_dir=tmp_path)


# Users' own


@pytest.mark.parametrize("suffix", [".json", ".jsonl", "lines.json", ".csv", ".tsv"])
def test_every_file_form_reads_the_same(tmp_path: Path, suffix: str) -> None:
    records = [{**record, "alternatives": ["b, c", "d"], "context": 'He said "x",\nthen left.'} for record in flat()]
    path = tmp_path / f"mine{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(records), encoding="utf-8-sig")
    elif suffix.endswith(("jsonl", "lines.json")):
        path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    else:
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(records[0]), delimiter="\t" if suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows({**record, "alternatives": "|".join(record["alternatives"])} for record in records)
    read = Tasks.from_file(path)
    assert read.items == Tasks.from_records(records).items
    assert read.name == path.name
    item = read.items[0]
    assert item.prompt == 'He said "x",\nthen left. Question: What is retrieval 0?\nAnswer:'
    assert (item.answer, item.alternatives, item.content) == ("a0", ("b, c", "d"), 'He said "x",\nthen left.')


def test_a_dataset_is_read() -> None:
    from datasets import Dataset, DatasetDict

    records = [{**record, "answer": number, "content": "here"} for number, record in enumerate(flat())]
    read = Tasks.from_records(Dataset.from_list(records), template="{question}", name="mine")
    assert read.items[1] == TaskItem("What is retrieval 1?", "1", "retrieval", content="here")
    assert read.name == "mine"
    with pytest.raises(TaskDataError, match=r"dictionary of datasets \(train\); pass one of them"):
        Tasks.from_records(DatasetDict({"train": Dataset.from_list(records)}))


def nested(skills: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "question": f"Main {n}?",
            "answer": "never read",
            "generated": [
                {"subquestion": f"Sub {skill} of {n}?", "answer": f"{skill} {n}", "cognitive_skill": skill}
                for skill in skills
            ],
        }
        for n in range(10)
    ]


def test_the_nested_form_is_taken_apart_and_unknown_labels_are_counted() -> None:
    read = Tasks.from_records(nested(["Retrieval", "Decision-making", "Math", "Other"]))
    assert read.counts == {"retrieval": 10, "decision_making": 10, "math_calculation": 10}
    assert read.unknown_labels == {"Other": 10}
    first = read.items[0]
    assert first.prompt == "Main 0? Question: Sub Retrieval of 0?\nAnswer:"
    assert (first.answer, first.content) == ("Retrieval 0", "Main 0?")


def test_items_may_have_functions_of_ones_own() -> None:
    tasks = Tasks(tuple(TaskItem(**record, content=record["question"]) for record in flat(functions=("go", "chess"))))
    assert tasks.functions == ("chess", "go")
    assert tasks.select(["go", "chess"]) == tasks


def test_unknown_labels_alone_are_refused() -> None:
    with pytest.raises(
        TaskDataError, match=r"no item is labelled with a function \(found 'chess', 'go'\).*from TaskItem objects"
    ):
        Tasks.from_records(flat(functions=("chess", "go")))


def test_unlabelled_items_are_refused_with_their_numbers() -> None:
    records = flat()
    records[3]["function"] = records[20]["function"] = None
    with pytest.raises(TaskDataError, match=r"2 of 24 items have no label in 'function' \(items 3, 20\)"):
        Tasks.from_records(records)
    for record in records:
        del record["function"]
    with pytest.raises(TaskDataError, match=r"24 of 24 items .*\(items 0, 1, 2, 3, 4, …\).*label or remove"):
        Tasks.from_records(records)


def test_few_items_and_single_functions_are_refused() -> None:
    with pytest.raises(TaskDataError, match=r"fewer than 10 items of inference \(9\)\. Add items"):
        Tasks.from_records([*flat(12, ("retrieval",)), *flat(9, ("inference",))])
    with pytest.raises(TaskDataError, match=r"only 'inference'; telling functions apart needs at least two"):
        Tasks.from_records(flat(12, ("inference",)))
    with pytest.raises(TaskDataError, match="no labelled item"):
        Tasks(())


def test_duplicates_across_contents_are_refused_with_the_pair() -> None:
    records = [*flat(), {"question": " what is  RETRIEVAL 3?", "answer": "other", "function": "inference"}]
    with pytest.raises(
        TaskDataError, match=r"Items 3 and 24 .*'item 3' and 'item 24'.*-> a3' \(retrieval\).*-> other' \(inf"
    ):
        Tasks.from_records(records)
    dropped = Tasks.from_records(records, duplicates="drop")
    assert dropped.items == Tasks.from_records(flat()).items
    assert dropped.n_dropped == 1
    # The same content is never split, so there the same prompt does no harm.
    assert len(Tasks.from_records([{**record, "content": "one"} for record in records])) == 25


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (7, "A int is not a list of records; give a datasets.Dataset"),
        ("mine.json", r"A str is not a list of records.*Tasks.from_file reads files"),
        ({"train": []}, "dictionary of datasets"),
        ([], r"no item is labelled with a function \(found no record\)"),
        (
            [{"question": "q", "answer": "", "function": "retrieval"}],
            r"item 0 has no answer \(its fields are 'question', 'answer', 'function'\)",
        ),
        ([{"answer": "a", "function": "retrieval"}], r"item 0 has no question .*give its column the name 'question'"),
        ([{"question": ["q"], "answer": "a", "function": "retrieval"}], "question is a list; it must be text"),
        ([{"question": "q", "answer": True, "function": "retrieval"}], "answer is a bool; it must be text"),
        (
            [{"question": "q", "answer": "a", "function": "retrieval", "alternatives": 3}],
            "alternatives must be a list",
        ),
        ([{"question": "q", "generated": ["none"]}], "'generated' is not a list of objects"),
    ],
)
def test_bad_records_are_refused_in_a_sentence(source: Any, message: str) -> None:
    with pytest.raises(TaskDataError, match=message):
        Tasks.from_records(source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b"{", r"x\.json: line 1, column 2: not valid JSON"),
        ("x.jsonl", b'{"a": 1}\n{', r"x\.jsonl: line 2: column 2: not valid JSON"),
        ("x.txt", b"hello", r"x\.txt is not a \.json, \.jsonl, \.csv or \.tsv file"),
        ("x.json", b"3", "record 0: a int was found"),
        ("x.csv", b"question,answer\nonly", "1 of 1 items have no label"),
    ],
)
def test_bad_files_are_refused_in_a_sentence(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TaskDataError, match=message):
        Tasks.from_file(path)


def test_a_missing_file_and_bad_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match="No such file"):
        Tasks.from_file(tmp_path / "none.json")
    with pytest.raises(TaskDataError, match=r"must contain \{question\} exactly once"):
        Tasks.from_records(flat(), template="Q:")
