"""Who is to be cited for what: every key has an entry, every analysis its methods."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import tl_headmaps
from tl_headmaps import Result, ValueMixing, cite
from tl_headmaps.core.citations import HOSTS, REFERENCES, bibtex, publications
from tl_headmaps.core.errors import UsageError
from tl_headmaps.results import kinds
from tl_headmaps.scorers.components import METRICS

ENTRY = re.compile(r"@(\w+)\{(\w+),\n((?:  \w+ = \{.*\},?\n)+)\}")


METHODS = [
    *(
        (f"methods of {kind!r} ({result.__module__})", key)
        for kind, result in kinds().items()
        for key in result.methods
    ),
    *((f"cites of the metric {name!r}", key) for name, metric in METRICS.items() for key in metric.cites),
]
"""Who cites what: every key must have an entry."""


def printed(result: Any = None) -> str:
    stream = io.StringIO()
    cite(result, file=stream)
    return stream.getvalue()


@pytest.mark.parametrize("key", publications())
def test_every_entry_is_bibtex_of_its_key(key: str) -> None:
    entry = publications()[key]
    match = ENTRY.fullmatch(entry)
    assert match is not None and match[2] == key
    fields = dict(re.findall(r"  (\w+) = \{(.*)\}", match[3]))
    assert {"title", "author", "year"} <= set(fields)
    assert key.startswith(re.split(r"[ ,]", fields["author"].split(" and ")[0])[-1].lower()[:4]) or "von" in key
    assert fields["year"] in key
    assert entry.count("{") == entry.count("}")


def test_every_line_belongs_to_an_entry() -> None:
    written = REFERENCES.read_text(encoding="utf-8")
    assert written.count("\n@") + 1 == len(publications()) + 1
    assert ENTRY.sub("", written).strip() == ""


@pytest.mark.parametrize(("cited_by", "key"), METHODS)
def test_every_key_has_an_entry(cited_by: str, key: str) -> None:
    missing = f"@misc{{{key},\n  title = {{...}},\n  author = {{...}},\n  year = {{...}}\n}}"
    assert key in publications(), f"{cited_by} names {key!r}; add to {REFERENCES.name}:\n\n{missing}"


def test_every_kind_of_result_names_published_methods() -> None:
    for kind, result_class in kinds().items():
        by_value = result_class.references is not Result.references
        assert bool(result_class.methods) or by_value, f"{kind} says nothing about whom to cite"


def test_every_entry_is_cited_by_something() -> None:
    assert {key for _, key in METHODS} | set(HOSTS) == set(publications())


def test_the_tool_is_cited_as_in_the_citation_file() -> None:
    citation = yaml.safe_load((Path(__file__).parents[1] / "CITATION.cff").read_text(encoding="utf-8"))
    entry = bibtex().split("\n\n")[0].replace("\\_", "_")
    assert f"title = {{{citation['title']}}}" in entry
    assert citation["authors"][0]["name"] in entry
    assert f"year = {{{str(citation['date-released'])[:4]}}}" in entry
    assert f"version = {{{tl_headmaps.__version__}}}" in entry


def test_a_result_adds_its_methods_once() -> None:
    result = ValueMixing.from_arrays([[1, 0], [0.5, 0.5]], [[1.0], [2.0]])
    keys = re.findall(r"@\w+\{(\w+),", printed(result))
    assert keys == ["tl_headmaps", *HOSTS, "elhage2021framework"]
    assert re.findall(r"@\w+\{(\w+),", printed()) == ["tl_headmaps", *HOSTS]


def test_what_is_no_result_is_refused() -> None:
    with pytest.raises(UsageError, match=r"takes a result of an analysis .* not a str.*Result.load"):
        cite("scores.json")


def test_the_command_reads_a_saved_result(run: Any, tmp_path: Path) -> None:
    ValueMixing.from_arrays([[1, 0], [0.5, 0.5]], [[1.0], [2.0]]).save(tmp_path / "mixing.json")
    assert "elhage2021framework" in run("cite", str(tmp_path / "mixing.json")).out
    assert "elhage2021framework" not in run("cite").out
    missing = run("cite", str(tmp_path / "none.json"))
    assert missing.code == 1 and "Cannot read" in missing.err
