"""Results come back from their files as they went in, and a file is whole or absent."""

import json
import math
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tl_headmaps import HeadIndex, HeadMapsError, Result, TokenGrid, ValueMixing
from tl_headmaps import results as base
from tl_headmaps.analyses.describe_model import ModelDescription
from tl_headmaps.core.errors import OutputError, UsageError
from tl_headmaps.core.files import NUL_IN_CSV, csv_rows
from tl_headmaps.core.provenance import Provenance
from tl_headmaps.renderers.tables import paper_table
from tl_headmaps.renderers.text import latex

AWKWARD = ['say "hi"', "two\nlines", "a,b", "'", "", "🇫🇷 🙂", "שלום", "‮abc", "\\", "\x00", "\ttab", "</script>", "Ġx"]
N_VOCAB = 50_000


def provenance(**details: Any) -> Provenance:
    return Provenance(
        model="tiny",
        fingerprint="0" * 64,
        architecture="Tiny",
        basis="raw",
        dtype="float32",
        device="cpu",
        options={"preset": "folded"},
        **details,
    )


def grid(values: Any, sources: list[str] | None = None, targets: list[str] | None = None, **details: Any) -> TokenGrid:
    entries = torch.tensor(values, dtype=torch.float32)
    rows, columns = entries.shape
    return TokenGrid(
        head=HeadIndex(23, 4),
        circuit="ov",
        sources=tuple(sources or [f"s{i}" for i in range(rows)]),
        targets=tuple(targets or [f"t{j}" for j in range(columns)]),
        token_ids={"source": tuple(range(rows)), "target": tuple(range(columns))},
        values=entries,
        ranks=(entries[:, None, :] > entries[:, :, None]).sum(-1),
        n_vocab=N_VOCAB,
        provenance=provenance(**details),
    )


LABELS = st.one_of(st.text(), st.sampled_from(AWKWARD))


@st.composite
def parts(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of grid(); the result itself is made in the test, because beartype draws random numbers."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return dict(
        values=draw(arrays(np.float32, (rows, columns), elements=finite)),
        sources=draw(st.lists(LABELS, min_size=rows, max_size=rows)),
        targets=draw(st.lists(LABELS, min_size=columns, max_size=columns)),
        seed=draw(st.none() | st.integers(0, 2**63)),
        data=draw(st.dictionaries(LABELS, LABELS, max_size=2)),
    )


def assert_same(one: TokenGrid, other: TokenGrid) -> None:
    """Every field, tensors bit for bit (so that -0.0 and denormals count too)."""
    assert type(one) is type(other)
    for name in ("head", "circuit", "sources", "targets", "token_ids", "n_vocab", "provenance"):
        assert getattr(one, name) == getattr(other, name), name
    assert torch.equal(one.values.view(torch.int32), other.values.view(torch.int32))
    assert one.ranks.dtype == other.ranks.dtype
    assert torch.equal(one.ranks, other.ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@given(parts=parts())
def test_a_grid_survives_its_json_file(folder: Path, parts: dict[str, Any]) -> None:
    result = grid(**parts)
    path = result.save(folder / "grid.json")
    assert_same(TokenGrid.load(path), result)
    assert_same(Result.load(path), result)


@given(parts=parts())
def test_json_is_what_the_format_promises(parts: dict[str, Any]) -> None:
    result = grid(**parts)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    values = json.loads(result.to_json(), parse_constant=refuse)
    assert [*values][:1] + [*values][-1:] == ["kind", "provenance"]
    assert values["kind"] == "token_grid"
    assert (values["head"], values["circuit"]) == ("L23H4", "ov")
    assert values["axes"] == {"source": list(result.sources), "target": list(result.targets)}
    assert values["values"] == result.values.tolist()
    assert values["ranks"] == result.ranks.tolist()
    assert values["provenance"] == result.provenance.to_dict()


def csv_records(text: str) -> list[dict[str, str]]:
    header, *rows = csv_rows(text)
    return [dict(zip(header, row, strict=True)) for row in rows]


@given(parts=parts())
def test_csv_holds_every_cell(parts: dict[str, Any]) -> None:
    result = grid(**parts)
    rows = csv_records(result.to_csv())
    assert [(row["source"], row["target"]) for row in rows] == [
        (source.replace("\0", NUL_IN_CSV), target.replace("\0", NUL_IN_CSV))
        for source in result.sources
        for target in result.targets
    ]
    assert [float(row["value"]) for row in rows] == result.values.flatten().tolist()
    assert [int(row["rank"]) for row in rows] == result.ranks.flatten().tolist()
    assert {row["head"] for row in rows} == {"L23H4"}


SPECIAL = re.compile(r"(?<!\\)[&%$#_{}~^]")


def cells_of(line: str) -> list[str]:
    """Cells of a row of LaTeX, its end taken off."""
    assert line.endswith(r" \\")
    return re.split(r"(?<!\\)&", line.removesuffix(r" \\"))


def assert_sound(text: str, n_columns: int, n_rows: int) -> None:
    """A tabular of so many columns and rows whose braces are balanced and whose lines are what LaTeX expects."""
    bare = re.sub(r"\\[{}]", "", text)
    depths = np.cumsum([(c == "{") - (c == "}") for c in bare])
    assert depths.min() >= 0 and depths[-1] == 0
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    assert lines[0].startswith(r"\begin{tabular}{") and len(lines[0].split("{")[2]) == n_columns + 1
    assert [lines[1], lines[3], *lines[-2:]] == [r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"]
    assert len(lines) == n_rows + 6
    for line in (lines[2], *lines[4:-2]):
        assert len(cells_of(line)) == n_columns
        assert not line.lstrip().startswith(("[", "*")), "the end of the row before would take it for its own"


@given(parts=parts())
def test_a_table_for_a_paper_is_escaped(parts: dict[str, Any]) -> None:
    result = grid(**parts)
    text = result.to_latex(columns=["source", "target", "value", "rank"], n=None)
    assert_sound(text, 4, result.values.numel())
    for line in text.splitlines()[4 : 4 + result.values.numel()]:
        for cell in cells_of(line)[:2]:
            plain = re.sub(r"\\text[a-z]+\{\}|(?<=[-`'?!])\{\}", "", cell.strip())
            plain = plain[1:-1] if plain[:1] == "{" else plain
            assert not SPECIAL.search(plain) and "$" not in plain.replace(r"\$", "")


def test_letters_that_pdflatex_lacks_are_said() -> None:
    plain, other = (grid([[1.0]], [name], ["b"]).to_latex() for name in ("naïve ≤ é", "東京"))
    assert "LuaLaTeX" in other and "LuaLaTeX" not in plain


def test_ends_of_intervals_are_escaped_too() -> None:
    """They are numbers; a record of someone else may have anything there."""
    rows = [{"x": n, "y_low": rf"\input{{{n}}}", "y_high": n} for n in (1, 2)]
    assert r"\input" not in paper_table(rows).latex()


def test_hyphens_and_quotes_in_a_row_stay_apart() -> None:
    assert latex("a--b ''c`` ?` d-e") == "a-{}-b '{}'c`{}` ?{}` d-e"


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [
        (0.7, 3, "0.700"),
        (1.17e-5, 2, r"$1.2 \times 10^{-5}$"),
        (-1.17e-5, 3, r"$-1.17 \times 10^{-5}$"),
        (-0.0421, 2, "$-0.042$"),
        (221.11, 3, "221"),
        (0.0, 3, "0"),
        (3e9, 1, r"$3 \times 10^{9}$"),
        (3.21e-17, 2, r"$3.2 \times 10^{-17}$"),
    ],
)
def test_numbers_of_a_paper_have_significant_digits(value: float, digits: int, shown: str) -> None:
    row = grid([[value]]).to_latex(columns=["value"], digits=digits).splitlines()[4]
    assert row == shown + r" \\"


def test_no_probability_is_said_to_be_zero() -> None:
    rows = [{"relation": "a_b", "q_value": q, "p_value": math.nan} for q in (0.0, 1e-17, 2e-8)]
    assert paper_table(rows, columns=["relation", "q_value", "p_value"]).rows == [
        ["a b", "$< 10^{-9}$", "--"],
        ["a b", "$< 10^{-9}$", "--"],
        ["a b", r"$2.00 \times 10^{-8}$", "--"],
    ]


def test_a_table_of_the_largest_ends_where_there_is_nothing_more() -> None:
    rows = [{"relation": "plural", "promote": score, "null_mean": 0.0} for score in (0.0, 0.5, 0.0, 0.25, 0.0)]
    table = paper_table(rows, columns=["relation", "promote", "null_mean"], n=4)
    assert [title for title, _ in table.columns] == ["relation", "score", "null"], "as the text calls them"
    assert len(table.rows) == 2 and "2 of 5 rows, by promote" in table.note
    assert [len(paper_table(rows, n=n, by=by).rows) for n, by in ((5, None), (None, None), (4, "promote"))] == [5, 5, 4]


def test_a_table_for_a_paper_says_what_it_left_out() -> None:
    result = grid(np.arange(30).reshape(5, 6) - 3.0)
    text = result.to_latex(n=2, columns=["source", "value"])
    assert text.splitlines()[4:6] == [r"s4 & 26.0 \\", r"s4 & 25.0 \\"]
    assert "% Token grid: 2 of 30 rows, by value\n% Made from tiny" in text
    assert result.to_latex(n=1, by="rank", columns=["rank"]).splitlines()[4] == r"5 \\"
    floating = result.to_latex(caption="50% of it")
    assert floating.startswith(r"\begin{table}[t]") and r"\caption{50\% of it}" in floating
    assert r"\label{tab:token_grid}" in floating
    # Columns that are the same in all rows are told once.
    assert "head" not in result.to_latex().splitlines()[2] and "head: L23H4; circuit: ov" in result.to_latex()
    for wrong, sentence in (
        ({"columns": ["score"]}, "no column 'score'; it has head, circuit, source, target, value, rank"),
        ({"by": "score"}, "no column 'score'"),
        ({"digits": 0}, "digits=0 cannot be written. Give 1 to 12"),
        ({"n": 0}, "n=0 leaves no row"),
    ):
        with pytest.raises(UsageError, match=sentence):
            result.to_latex(**wrong)  # type: ignore[arg-type]


@given(parts=parts())
def test_a_data_frame_holds_every_cell(parts: dict[str, Any]) -> None:
    result = grid(**parts)
    frame = result.to_pandas()
    assert list(frame.columns) == ["head", "circuit", "source", "target", "value", "rank"]
    assert frame["value"].tolist() == result.values.flatten().tolist()
    assert frame["rank"].tolist() == result.ranks.flatten().tolist()


@given(parts=parts())
def test_a_grid_prints_one_line_per_source(parts: dict[str, Any]) -> None:
    """Whatever the labels hold, the table stays a table: title, blank, header, rule, rows, blank, note."""
    result = grid(**parts)
    lines = str(result).split("\n")
    assert len(lines) == len(result.sources) + 6
    assert lines[0].startswith("L23H4 OV map")


def test_refusing_nan_is_a_sentence_of_ours(tmp_path: Path) -> None:
    with pytest.raises(HeadMapsError, match="NaN"):
        grid([[1.0, math.nan]]).save(tmp_path / "grid.json")
    for suffix in (".json", ".safetensors"):  # arrays of tensors may hold it, what stands beside them not
        with pytest.raises(HeadMapsError, match="score of this token_grid holds NaN or infinity"):
            replace(grid([[1.0, 2.0]]), score=math.nan).save(tmp_path / f"grid{suffix}")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_json_cannot_hold_are_refused(tmp_path: Path, bad: float) -> None:
    with pytest.raises(HeadMapsError, match="NaN or infinity"):
        grid([[1.0, bad]]).save(tmp_path / "grid.json")
    assert list(tmp_path.iterdir()) == []


def test_best_is_the_largest_of_each_row() -> None:
    assert grid([[1.0, 3.0, 2.0], [0.0, -1.0, -2.0]]).best() == [("s0", "t1"), ("s1", "t0")]


@pytest.mark.parametrize("name", ["grid", "grid.", "grid.txt", "grid.json.bak", ".json"])
def test_unknown_suffixes_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"Use one of: \.json, \.csv"):
        grid([[1.0]]).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_suffixes_in_capitals_are_known(tmp_path: Path) -> None:
    assert TokenGrid.load(grid([[1.0]]).save(tmp_path / "GRID.JSON")).head == HeadIndex(23, 4)


@pytest.mark.parametrize("content", ["[]", "3", "null", "{}", '{"kind": "poem"}', '{"kind": ["token_grid"]}'])
def test_other_json_is_named_as_such(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(OutputError, match=r"other\.json holds .* but Result was expected.*token_grid"):
        Result.load(path)


def test_a_result_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = ModelDescription({"model": "tiny"}, provenance()).save(tmp_path / "model.json")
    with pytest.raises(OutputError, match="holds 'model_description', but TokenGrid was expected"):
        TokenGrid.load(path)


@pytest.mark.parametrize(
    "damage",
    [{"axes": None}, {"values": "no"}, {"head": 3}, {"values": [[1.0], [2.0, 3.0]]}, {"provenance": {}}],
    ids=["axes", "values", "head", "ragged", "provenance"],
)
def test_a_damaged_result_gives_a_sentence(tmp_path: Path, damage: dict[str, Any]) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps({**grid([[1.0]]).to_dict(), **damage}))
    with pytest.raises(OutputError, match=r"damaged\.json"):
        Result.load(path)


@pytest.mark.parametrize("place", ["nowhere.json", "."])
def test_a_missing_file_or_a_folder_gives_a_sentence(tmp_path: Path, place: str) -> None:
    with pytest.raises(OutputError, match="Cannot read"):
        Result.load(tmp_path / place)


def test_unknown_fields_of_a_newer_provenance_are_dropped() -> None:
    known = provenance()
    assert Provenance.from_dict({**known.to_dict(), "mood": "sunny"}) == known


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("error", [Interrupted(), KeyboardInterrupt()])
def test_an_exception_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "grid.json"
    path.write_text("old")

    def half(self: Path, text: str, **options: Any) -> None:
        with self.open("w", **options) as stream:
            stream.write(text[: len(text) // 2])
        raise error

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(type(error)):
        grid([[1.0]]).save(path)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["grid.json"]


def test_a_full_disk_gives_a_sentence_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "grid.json"
    path.write_text("old")

    def full(self: Path, text: str, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OutputError, match=r"Cannot write .*grid\.json: No space left on device"):
        grid([[1.0]]).save(path)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["grid.json"]


def test_a_path_below_a_file_gives_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OutputError, match=r"Cannot write .*file/grid\.json: .*Choose a folder"):
        grid([[1.0]]).save(tmp_path / "file" / "grid.json")
    assert (tmp_path / "file").read_text() == "not a folder"


def test_missing_folders_are_made_and_files_get_usual_rights(tmp_path: Path) -> None:
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    path = grid([[1.0]]).save(tmp_path / "a" / "b" / "grid.csv")
    assert path.stat().st_mode == ordinary.stat().st_mode


@pytest.mark.parametrize("kind", [HeadMapsError, UsageError, OutputError])
def test_a_long_message_keeps_its_beginning_and_its_end(kind: type[HeadMapsError]) -> None:
    error = kind(f"{'x' * 10_000} is no name. Give another.")
    assert len(str(error)) < 1300 and str(error).startswith("xxx") and str(error).endswith("Give another.")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(kind("Short.")) == "Short."


def test_a_fresh_process_loads_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    grid([[1.0, 2.0]]).save(path)
    code = f"from tl_headmaps import Result; print(type(Result.load({str(path)!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("TokenGrid", "")


class TestConversions:
    def test_arrays_go_to_torch_and_numpy_under_their_names(self) -> None:
        result = ValueMixing.from_arrays([[1, 0], [0.5, 0.5]], [[1.0, 2.0], [3.0, 4.0]], ["a", "b"])
        tensors, arrays = result.to_torch(), result.to_numpy()
        assert list(tensors) == list(arrays) and set(tensors) <= set(result.to_dict())
        assert torch.equal(tensors["A"], result.A) and {"A", "V", "V_hat"} <= set(tensors)
        for name, array in arrays.items():
            assert isinstance(array, np.ndarray) and array.tolist() == getattr(result, name).tolist()


class TestProvenanceText:
    def test_a_line_for_each_field_with_content(self) -> None:
        made = provenance()
        lines = str(made).splitlines()
        assert lines[0] == "model:        tiny" and "options:      preset=folded" in lines
        assert not any(line.startswith(("seed", "data")) for line in lines)
        assert "seed:         0" in str(replace(made, seed=0)).splitlines()


class TestPrompt:
    def test_every_kind_has_a_text_of_its_own(self) -> None:
        for kind, result_class in base.kinds().items():
            assert result_class.__str__ is not object.__str__, kind
            assert result_class.__repr__ is Result.__repr__, f"{kind} is shown as its tensors; give it repr=False"
