"""Who is to be cited for what: every key has an entry, every analysis its methods."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import tl_headmaps
from tl_headmaps import cite, value_mixing_from
from tl_headmaps import results as base
from tl_headmaps.core.citations import HOSTS, PUBLICATIONS, bibtex
from tl_headmaps.core.errors import UsageError

ENTRY = re.compile(r"@(\w+)\{(\w+),\n((?:  \w+ = \{.*\},?\n)+)\}")
WITHOUT_METHOD = {"model_description"}


def kinds() -> dict[str, type]:
    base._learn_kinds()
    return {kind: found for kind, found in base._KINDS.items() if found.__module__.startswith("tl_headmaps.")}


def printed(result: Any = None) -> str:
    stream = io.StringIO()
    cite(result, file=stream)
    return stream.getvalue()


@pytest.mark.parametrize("key", PUBLICATIONS)
def test_every_entry_is_bibtex_of_its_key(key: str) -> None:
    match = ENTRY.fullmatch(PUBLICATIONS[key])
    assert match is not None and match[2] == key
    fields = dict(re.findall(r"  (\w+) = \{(.*)\}", match[3]))
    assert {"title", "author", "year"} <= set(fields)
    assert key.startswith(re.split(r"[ ,]", fields["author"].split(" and ")[0])[-1].lower()[:4]) or "von" in key
    assert fields["year"] in key
    assert PUBLICATIONS[key].count("{") == PUBLICATIONS[key].count("}")


def test_every_kind_of_result_names_published_methods() -> None:
    found = kinds()
    assert set(found) > WITHOUT_METHOD
    for kind, result_class in found.items():
        methods = result_class.methods  # type: ignore[attr-defined]
        assert set(methods) <= set(PUBLICATIONS), kind
        by_value = result_class.references is not base.Result.references  # type: ignore[attr-defined]
        assert bool(methods) or by_value or kind in WITHOUT_METHOD, f"{kind} says nothing about whom to cite"


def test_every_entry_is_cited_by_something() -> None:
    from tl_headmaps.scorers.components import METRICS

    used = {key for found in kinds().values() for key in found.methods}  # type: ignore[attr-defined]
    used |= {key for metric in METRICS.values() for key in metric.cites}
    assert used | set(HOSTS) == set(PUBLICATIONS)


def test_the_tool_is_cited_as_in_the_citation_file() -> None:
    citation = yaml.safe_load((Path(__file__).parents[1] / "CITATION.cff").read_text(encoding="utf-8"))
    entry = bibtex().split("\n\n")[0].replace("\\_", "_")
    assert f"title = {{{citation['title']}}}" in entry
    assert citation["authors"][0]["name"] in entry
    assert f"year = {{{str(citation['date-released'])[:4]}}}" in entry
    assert f"version = {{{tl_headmaps.__version__}}}" in entry


def test_a_result_adds_its_methods_once() -> None:
    result = value_mixing_from([[1, 0], [0.5, 0.5]], [[1.0], [2.0]])
    keys = re.findall(r"@\w+\{(\w+),", printed(result))
    assert keys == ["tl_headmaps", *HOSTS, "elhage2021framework"]
    assert re.findall(r"@\w+\{(\w+),", printed()) == ["tl_headmaps", *HOSTS]


def test_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    cite()
    assert capsys.readouterr().out.startswith("@software{tl_headmaps,")


def test_what_is_no_result_is_refused() -> None:
    with pytest.raises(UsageError, match=r"takes a result of an analysis .* not a str.*Result.load"):
        cite("scores.json")


def test_the_command_reads_a_saved_result(run: Any, tmp_path: Path) -> None:
    value_mixing_from([[1, 0], [0.5, 0.5]], [[1.0], [2.0]]).save(tmp_path / "mixing.json")
    assert "elhage2021framework" in run("cite", str(tmp_path / "mixing.json")).out
    assert "elhage2021framework" not in run("cite").out
    missing = run("cite", str(tmp_path / "none.json"))
    assert missing.code == 1 and "Cannot read" in missing.err
