"""Reproduction: what it writes, that it resumes wherever it was interrupted, and that a folder holds one run."""

import csv
import io
import json
import math
import re
import shutil
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from planted import knowing_model, shared_model, word

import tl_headmaps
from tl_headmaps import Relation, Reproduction, Result, ablate, reproduce, validate
from tl_headmaps.core.errors import OutputError, RelationDataError, UsageError, WeightBasisError
from tl_headmaps.core.store import Store
from tl_headmaps.renderers.tables import Table

CAPITALS = {3: 10, 4: 11, 5: 12, 6: 13}
NEXT = {14: 20, 15: 21, 16: 22, 17: 23}
TEMPLATE = " word18 <X>"
CREATED = re.compile(rb'"created": "([^"]*)"')


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
    return reproduce(model, out, data_dir=data, n_random=2, progress=False, **options)


@pytest.fixture(scope="module")
def whole(model: Any, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reproduction made in one go."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(model, out, data)
    return out


BOOKKEEPING = ("run.json", "run.lock")


def contents(out: Path) -> dict[str, bytes]:
    """Every file that a reader opens, as the manifest lists them, without the time the run was started."""
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    manifest = json.loads(files.pop("manifest.json"))
    files = {name: data for name, data in files.items() if name not in BOOKKEEPING and not name.startswith("pieces/")}
    assert manifest["files"] == {name: sha256(data).hexdigest() for name, data in files.items()}
    started = json.loads((out / "run.json").read_text())["provenance"]["created"]
    for name, data in files.items():
        assert {stamp.decode() for stamp in CREATED.findall(data)} <= {started}, name
    return {name: CREATED.sub(b"", data) for name, data in files.items()}


def pieces(out: Path) -> dict[str, tuple[int, bytes]]:
    return {path.stem: (path.stat().st_mtime_ns, path.read_bytes()) for path in (out / "pieces").glob("*")}


def test_it_writes_results_tables_and_a_manifest(whole: Path) -> None:
    made = set(contents(whole))
    results = {f"relations/{name}.validation.json" for name in ("capital", "follow", "quiet")}
    results |= {f"relations/{name}.ablation.json" for name in ("capital", "follow")}
    tables = {f"tables/{name}.{suffix}" for name in ("agreement", "ablation") for suffix in ("csv", "md", "tex")}
    assert results | tables | {"reproduction.json"} <= made
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["complete"] and manifest["settings"]["options"] == {"n_random": 2, "prepend_bos": False}
    assert set(manifest["settings"]["relations"]) == {"capital", "follow", "quiet"}


def test_its_numbers_are_those_of_the_two_analyses(whole: Path, model: Any, data: Path) -> None:
    result = Reproduction.load(whole / "reproduction.json")
    check = validate(model, "capital", preset="maps", data_dir=data, progress=False)
    curves = ablate(model, "capital", preset="maps", n_random=2, data_dir=data, progress=False)
    row = next(row for row in result.rows if row.relation == "capital")
    assert row.pearson_without == check.agreement["pearson_without"][0]
    assert row.pearson_with == check.agreement["pearson_with"][0]
    assert row.final_accuracy == float(curves.curve.accuracy[-1]) and row.n_heads == len(curves.heads)
    assert row.random_drop == curves.random_drop
    assert row.n_verdict == curves.n_verdict
    assert row.p_value == (None if curves.verdict is None else curves.verdict.p_value)
    expected = check.agreement["heads_with"][0]
    assert row.heads_with == (None if math.isnan(expected) else expected)
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
    drops = {"Pythia-6.9B": "88%", "Pythia-12B": "72%", "GPT-2 XL": "65%", "Llama-3.1-8B": "44%"}
    for name, drop in drops.items():
        assert re.search(rf"published mean, {re.escape(name)} +{drop}", text), "all of them, not the best alone"
    rows = list(csv.reader(io.StringIO((whole / "tables" / "agreement.csv").read_text())))
    assert rows[0] == ["relation", "pairs", "without context", "with context"]
    assert [row[0] for row in rows[1:4]] == ["capital", "follow", "quiet"]
    assert r"\begin{tabular}{lrrr}" in (whole / "tables" / "agreement.tex").read_text()


@pytest.mark.parametrize("survived", range(5))
def test_interrupted_at_any_piece_it_resumes_with_the_same_bytes(
    survived: int, model: Any, data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, stored = tmp_path / "out", []
    write = Store.write

    def interrupted(self: Store, piece: str, tensors: Any) -> None:
        if self.folder == out and len(stored) == survived:
            raise KeyboardInterrupt
        write(self, piece, tensors)
        stored.extend([piece] if self.folder == out else [])

    with monkeypatch.context() as patched:
        patched.setattr(Store, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(model, out, data)
    assert not (out / "manifest.json").exists()
    kept = pieces(out)
    assert len(kept) == survived
    time.sleep(1.1)  # times are told apart by the second
    run(model, out, data)
    assert contents(out) == contents(whole)
    assert pieces(out).items() >= kept.items(), "finished relations are not computed again"


@pytest.mark.parametrize("survived", [0, 1, 7])
def test_interrupted_while_writing_it_computes_nothing_again(
    survived: int, model: Any, data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, saved = tmp_path / "out", []
    save = Result.save

    def interrupted(self: Result, path: Path) -> Path:
        if len(saved) == survived:
            raise KeyboardInterrupt
        saved.append(path)
        return save(self, path)

    with monkeypatch.context() as patched:
        patched.setattr(Result, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(model, out, data)
    kept = pieces(out)
    (out / "relations").mkdir(exist_ok=True)
    (out / "relations" / ".capital.ablation.json.abc.part").write_text("half")
    run(model, out, data)
    assert contents(out) == contents(whole) and pieces(out) == kept


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def other_number(path: Path) -> None:
    """A well-formed piece with another number in it: only the checksum can tell."""
    piece = path.read_bytes()
    assert b'"n_pairs": 4,' in piece
    path.write_bytes(piece.replace(b'"n_pairs": 4,', b'"n_pairs": 5,'))


def of_another_relation(path: Path) -> None:
    path.write_bytes((path.parent / path.name.replace("follow", "capital")).read_bytes())


@pytest.mark.parametrize("damage", [flip_a_bit, other_number, of_another_relation, lambda path: path.write_bytes(b"")])
def test_a_damaged_or_altered_piece_is_reported_and_made_again(
    damage: Callable[[Path], object],
    model: Any,
    data: Path,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    piece = out / "pieces" / "follow.ablation.safetensors"
    damage(piece)
    run(model, out, data)
    assert f"{piece} is damaged: " in capsys.readouterr().err
    assert contents(out) == contents(whole)
    assert piece.read_bytes() == (whole / "pieces" / piece.name).read_bytes()


def test_results_edited_by_hand_are_not_believed(model: Any, data: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    edited = out / "relations" / "follow.ablation.json"
    edited.write_text(edited.read_text().replace('"n_pairs": 4,', '"n_pairs": 5,'))
    assert edited.read_bytes() != (whole / "relations" / edited.name).read_bytes()
    run(model, out, data)
    assert contents(out) == contents(whole)


def test_a_folder_of_something_else_is_refused(model: Any, data: Path, whole: Path, tmp_path: Path) -> None:
    before = contents(whole)
    with pytest.raises(UsageError, match=r"options.n_random = 2, but this call has 3. Give another folder"):
        reproduce(model, whole, data_dir=data, n_random=3, progress=False)
    with pytest.raises(UsageError, match=r"was started with data\.follow = "):
        run(model, whole, data, relations=["capital"])
    with pytest.raises(UsageError, match="was started with fingerprint = "):
        run(shared_model("gpt2", n_vocab=24, d_model=64), whole, data)
    changed = tmp_path / "data"
    shutil.copytree(data, changed)
    quiet = changed / "own" / "quiet.json"
    quiet.write_text(quiet.read_text().replace('"eliciting": []', '"eliciting": [" word2 <X>"]'))
    with pytest.raises(UsageError, match=r"relations.quiet.eliciting = \[\], but this call has"):
        run(model, whole, changed)
    assert contents(whole) == before
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("[1]")
    with pytest.raises(OutputError, match=r"run.json is damaged"):
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


def test_command(run: Any, model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: Path) -> None:
    monkeypatch.setattr(tl_headmaps, "load_model", lambda *_: model)
    # The tiny model knows no bundled relation; the folder of its own stands in for them.
    monkeypatch.setattr("tl_headmaps.data.relations.data_folder", lambda *_: data)
    out = tmp_path / "out"
    for _ in range(2):
        done = run("reproduce", "--relations", "capital,follow", "--n-random", "1", "--out", str(out))
        assert done.code == 0 and "published mean, GPT-2 XL" in done.out and done.err.endswith(f"Wrote {out}\n")
