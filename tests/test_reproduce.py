"""Reproduction: what it writes, that it can be killed at any point, and that a folder holds one thing."""

import csv
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from planted import knowing_model, shared_model, word

import tl_headmaps
from tl_headmaps import Relation, Reproduction, Result, ablate, reproduce, validate
from tl_headmaps.cli.app import main
from tl_headmaps.core.errors import OutputError, RelationDataError, UsageError, WeightBasisError
from tl_headmaps.renderers.tables import Table

CAPITALS = {3: 10, 4: 11, 5: 12, 6: 13}
NEXT = {14: 20, 15: 21, 16: 22, 17: 23}
TEMPLATE = " word18 <X>"
CREATED = re.compile(rb'"created": "[^"]*"')


@pytest.fixture(scope="module")
def model() -> Any:
    return knowing_model({1: CAPITALS, 3: NEXT}, n_layers=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three relations: two that are known, one that has no prompt to be asked with."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "own").mkdir()
    for name, mapping, eliciting in (
        ("capital", CAPITALS, [TEMPLATE]),
        ("follow", NEXT, [TEMPLATE]),
        ("quiet", {7: 8, 8: 9, 9: 7}, []),
    ):
        templates = {"neutral": [" word19 <X>", " word2 word1 <X> word5"], "eliciting": eliciting}
        pairs = [[word(s), word(t)] for s, t in mapping.items()]
        content = {"name": name, "k": 1, "pairs": pairs, "templates": templates}
        (folder / "own" / f"{name}.json").write_text(json.dumps(content))
    return folder


def run(model: Any, out: Path, data: Path, **options: Any) -> Reproduction:
    return reproduce(model, out, data_dir=data, seeds=2, progress=False, **options)


@pytest.fixture(scope="module")
def whole(model: Any, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reproduction made in one go."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(model, out, data)
    return out


def contents(out: Path) -> dict[str, bytes]:
    """Every file but the time it was made; the manifest's hashes cover those times."""
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    manifest = json.loads(files.pop("manifest.json"))
    assert manifest["complete"] and set(manifest["files"]) == set(files)
    return {name: CREATED.sub(b"", content) for name, content in files.items()}


def test_it_writes_results_tables_and_a_manifest(whole: Path) -> None:
    made = set(contents(whole))
    results = {f"relations/{name}.validation.json" for name in ("capital", "follow", "quiet")}
    results |= {f"relations/{name}.ablation.json" for name in ("capital", "follow")}
    tables = {f"tables/{name}.{suffix}" for name in ("agreement", "ablation") for suffix in ("csv", "md", "tex")}
    assert results | tables | {"reproduction.json"} <= made
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["settings"]["experiment"] == "maps"
    assert set(manifest["settings"]["relations"]) == {"capital", "follow", "quiet"}


def test_its_numbers_are_those_of_the_two_analyses(whole: Path, model: Any, data: Path) -> None:
    result = Reproduction.load(whole / "reproduction.json")
    check = validate(model, "capital", preset="maps", data_dir=data, progress=False)
    curves = ablate(model, "capital", preset="maps", seeds=2, data_dir=data, progress=False)
    row = next(row for row in result.rows if row.relation == "capital")
    assert row.pearson_without == check.agreement["pearson_without"][0]
    assert row.pearson_with == check.agreement["pearson_with"][0]
    assert row.final_accuracy == float(curves.curve.accuracy[-1]) and row.n_heads == len(curves.heads)
    assert row.random_drop == curves.random_drop
    saved = Result.load(whole / "relations" / "capital.ablation.json")
    assert {**saved.to_dict(), "provenance": None} == {**curves.to_dict(), "provenance": None}
    quiet = next(row for row in result.rows if row.relation == "quiet")
    assert (quiet.status, quiet.base_accuracy, quiet.drop) == ("no template", None, None)
    known = [row.drop for row in result.rows if row.drop is not None]
    assert result.mean("drop") == pytest.approx(sum(known) / len(known))


def test_published_figures_stand_beside_ours(whole: Path) -> None:
    text = str(Reproduction.load(whole / "reproduction.json"))
    for line in (r"GPT-2 XL +0\.89 +0\.71", r"Llama-3\.1-8B +0\.78 +0\.72", r"Pythia-6\.9B +88% +-1%"):
        assert re.search(line, text), text
    rows = list(csv.reader(io.StringIO((whole / "tables" / "agreement.csv").read_text())))
    assert rows[0] == ["relation", "pairs", "without context", "with context"]
    assert [row[0] for row in rows[1:4]] == ["capital", "follow", "quiet"]
    assert r"\begin{tabular}{lrrr}" in (whole / "tables" / "agreement.tex").read_text()


def test_its_page_has_both_tables_and_the_published_figures(whole: Path) -> None:
    result = Reproduction.load(whole / "reproduction.json")
    page = result.figure().html
    assert page.count("<table>") == 2 and page.count("published mean") == str(result).count("published mean")
    for row in result.rows:
        assert page.count(f"<td>{row.relation}</td>") == 2


@pytest.mark.parametrize("survived", range(5))
def test_killed_after_any_file_it_goes_on_with_the_same_numbers(
    survived: int, model: Any, data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, saved = tmp_path / "out", []
    save = Result.save

    def killing(self: Result, path: Path) -> Path:
        if len(saved) == survived:
            raise KeyboardInterrupt
        saved.append(path)
        return save(self, path)

    with monkeypatch.context() as patched:
        patched.setattr(Result, "save", killing)
        with pytest.raises(KeyboardInterrupt):
            run(model, out, data)
    assert not json.loads((out / "manifest.json").read_text())["complete"]
    kept = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (out / "relations").rglob("*.json")}
    assert len(kept) == survived
    run(model, out, data)
    assert contents(out) == contents(whole)
    for path, before in kept.items():
        assert (path.stat().st_mtime_ns, path.read_bytes()) == before, "finished relations are not computed again"


def test_a_damaged_file_is_made_again(model: Any, data: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, out, data)
    (out / "relations" / "follow.validation.json").write_bytes(b"")
    run(model, out, data)
    assert contents(out) == contents(whole)


def test_a_folder_of_something_else_is_refused(model: Any, data: Path, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"begun with another seeds.*Choose another folder"):
        reproduce(model, whole, data_dir=data, seeds=3, progress=False)
    with pytest.raises(OutputError, match="begun with another relations"):
        run(model, whole, data, relations=["capital"])
    with pytest.raises(OutputError, match="begun with another model, fingerprint"):
        run(shared_model("gpt2", n_vocab=24, d_model=64), whole, data)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="holds other files and no manifest"):
        run(model, tmp_path, data)
    with pytest.raises(OutputError, match="is a file"):
        run(model, tmp_path / "notes.txt", data)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("[1]")
    with pytest.raises(OutputError, match="cannot be read"):
        run(model, tmp_path / "broken", data)


def test_names_of_relations_do_not_leave_the_folder(model: Any, data: Path, tmp_path: Path) -> None:
    relation = Relation.from_pairs(
        "../../up", [(word(s), word(t)) for s, t in CAPITALS.items()], k=1, neutral_templates=(TEMPLATE,)
    )
    run(model, tmp_path / "deep" / "out", data, relations=[relation])
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    assert len(list((tmp_path / "deep" / "out" / "relations").iterdir())) == 1


def test_bad_input_is_refused_before_anything_is_written(model: Any, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RelationDataError, match="There is no relation 'capitol'"):
        run(model, out, data, relations="capitol")
    with pytest.raises(UsageError, match="No relation was given"):
        run(model, out, data, relations=[])
    with pytest.raises(WeightBasisError, match="needs raw weights"):
        run(shared_model("llama", processed=True), out, data)
    assert not out.exists()


class TestTables:
    TABLE = Table([("a_b", "left"), ("50%", "right")], [["x|y & <b>", "1"], ["{\\}", "#2"]], "see $5_000")

    def test_markdown_shows_every_character(self) -> None:
        assert self.TABLE.markdown().splitlines() == [
            r"| a\_b | 50% |",
            "| --- | ---: |",
            r"| x\|y &amp; &lt;b&gt; | 1 |",
            r"| {\\} | #2 |",
            "",
            r"see \$5\_000",
        ]

    def test_latex_escapes_what_it_must(self) -> None:
        lines = self.TABLE.latex().splitlines()
        assert lines[2] == r"a\_b & 50\% \\"
        assert lines[4] == r"x\textbar{}y \& \textless{}b\textgreater{} & 1 \\"
        assert lines[5] == r"\{\textbackslash{}\} & \#2 \\"

    def test_csv_reads_back(self) -> None:
        assert list(csv.reader(io.StringIO(self.TABLE.csv()))) == [["a_b", "50%"], ["x|y & <b>", "1"], ["{\\}", "#2"]]


def test_command(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, data: Path
) -> None:
    monkeypatch.setattr(tl_headmaps, "load_model", lambda *_: model)
    # The tiny model knows no bundled relation; the folder of its own stands in for them.
    monkeypatch.setattr("tl_headmaps.data.relations.data_folder", lambda *_: data)
    out = tmp_path / "out"
    arguments = ["reproduce", "maps", "--relations", "capital,follow", "--seeds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["tl-headmaps", *arguments])
    for _ in range(2):
        with pytest.raises(SystemExit) as leaving:
            main()
        assert not leaving.value.code
        shown = capsys.readouterr()
        assert "published mean, GPT-2 XL" in shown.out and shown.err.endswith(f"Wrote {out}\n")
