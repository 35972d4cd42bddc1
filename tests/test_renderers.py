"""Figures are values: same input, same bytes; any text is safe; bad input is refused with a sentence; print works."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_figure import FUNCTIONS, every_figure
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from test_results import grid, provenance

import tl_headmaps
from tl_headmaps import HeadMapsError, RelationScores, Result
from tl_headmaps.analyses.describe_model import ModelDescription
from tl_headmaps.core.errors import OutputError, UsageError
from tl_headmaps.renderers import (
    Equation,
    ExampleMatrix,
    ExampleStep,
    Figure,
    Line,
    MapLayer,
    attention_view,
    component_map,
    curve,
    flow,
    head_map,
    name_layer,
    panels,
    save_page,
    scatter,
    shapes,
    token_grid,
    token_groups_view,
    top_tokens_view,
    worked_example,
)
from tl_headmaps.renderers.colours import AMOUNTS, BLUES, NAMES, ORANGES, SERIES, SIGNED, UNCLEAR, Scale
from tl_headmaps.renderers.formulas import Sum
from tl_headmaps.renderers.layout import PrintOptions, width_of
from tl_headmaps.renderers.maps import ticks_of
from tl_headmaps.renderers.page import packed, packed_half
from tl_headmaps.renderers.shapes import Cells, Drawing, Rect, Text, every_shape
from tl_headmaps.renderers.text import percent

FIGURES = every_figure()
GUIDE = (Path(__file__).parents[1] / "examples" / "site" / "guide.md").read_text(encoding="utf-8")


def scores(n_layers: int = 3, n_heads: int = 4, names: tuple[str, ...] = ("capitals", "copying")) -> RelationScores:
    shape = (len(names), n_layers, n_heads)
    values = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    values[0, 0, 0] = float("nan")
    maps = {name: values / (i + 1) for i, name in enumerate(
        ("promote", "suppress", "null_mean", "p_value", "q_value", "interval_low", "interval_high",
         "suppress_null_mean", "suppress_p_value", "suppress_q_value", "neighbour", "neighbour_p_value"))}  # fmt: skip
    n = len(names)
    return RelationScores(
        relations=names, circuit="ov", k=(10,) * n, n_pairs=(5,) * n, n_kept=(5,) * n, dropped=((),) * n,
        test=("all orders of pairs",) * n, n_units=(5,) * n, n_clusters=(5,) * n, provenance=provenance(), **maps,
    )  # fmt: skip


def test_a_relation_that_no_head_implements_lists_none() -> None:
    found = scores()
    promote = found.promote.clone()
    promote[1] = 0
    lines = str(replace(found, promote=promote)).splitlines()
    (row,) = [line for line in lines if line.startswith("copying")]
    assert row.split() == ["copying", "none"]
    assert next(line for line in lines if line.startswith("capitals")).split()[1].startswith("L")


class Structure(HTMLParser):
    """Elements of a page in order, and whether all were closed."""

    VOID = frozenset({"meta", "br", "input", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [str(value) for name, value in attributes if name in ("src", "href", "action", "data")]
        assert not [name for name, _ in attributes if name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def plain(figure: Figure) -> Any:
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', figure.body)
    return json.loads(data)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_a_quiet_value(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    figure = FIGURES[name]
    assert repr(figure).count("\n") == 0 and figure.title in repr(figure)
    assert figure._repr_html_() == figure.html
    assert len(str(figure)) > 20, "a text alternative"
    page = Structure(figure.html)
    assert page.open == [] and page.addresses == []
    assert "https://" not in figure.body and "http://" not in figure.body
    assert capsys.readouterr() == ("", "")
    with pytest.raises(AttributeError):
        figure.title = "another"  # type: ignore[misc]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_usable_where_circuitsvis_output_is(name: str) -> None:
    from circuitsvis.utils.render import RenderedHTML

    rendered = FIGURES[name].rendered
    assert isinstance(rendered, RenderedHTML)
    assert rendered.local_src == str(rendered) == FIGURES[name].html
    assert "unpkg.com" not in str(rendered)


STARTS = {".html": b"<!DOCTYPE html>", ".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG"}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_can_be_printed(name: str, tmp_path: Path) -> None:
    assert FIGURES[name].save(tmp_path / "x.png", width="column").read_bytes().startswith(STARTS[".png"])


@pytest.mark.parametrize("name", FIGURES)
def test_a_page_is_whole_and_forbids_connections(name: str, tmp_path: Path) -> None:
    page = FIGURES[name].save(tmp_path / "x.html").read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and policy[1].startswith("default-src 'none'")
    assert Structure(page).open == []


LONG = "What each head of a rather large model writes when it attends to the words of a very long sentence, by layer"


def printed(figure: Figure, inches: float = 3.4, **options: Any) -> Drawing:
    """A figure for print."""
    drawing: Drawing = figure.data.drawing(PrintOptions(72 * inches, **options))
    return drawing


def placed(drawing: Drawing, kind: Any) -> list[Any]:
    """Shapes of one kind where they are on the sheet."""
    return [
        replace(shape, x=shape.x + x, y=shape.y + y)
        for shape, (x, y) in every_shape(drawing.shapes)
        if isinstance(shape, kind)
    ]


def box_of(text: Text) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text, as wide as it is measured."""
    long = width_of(text.text, text.size)
    before = {"start": 0.0, "middle": long / 2, "end": long}[text.anchor]
    if text.upright:
        return text.x - text.size, text.y - long + before, text.x + 0.3 * text.size, text.y + before
    return text.x - before, text.y - text.size, text.x - before + long, text.y + 0.3 * text.size


def maps_of(drawing: Drawing) -> list[Cells]:
    """The maps of a sheet, without colour bars."""
    return [cells for cells in placed(drawing, Cells) if not cells.key]


def words_in(drawing: Drawing) -> str:
    return " ".join(" ".join(text.text.split()) for text in placed(drawing, Text))


@pytest.mark.parametrize("inches", [3.4, 7.0])
@pytest.mark.parametrize(
    "figure",
    [
        head_map([[0.1, 0.7], [None, 0.2]], title=LONG, note=f"{LONG}. {LONG}.", unit="share of pairs"),
        panels({f"{LONG[:30]} {i}": np.eye(30)[:, :9] for i in range(8)}, title=LONG, note=LONG, unit=LONG[:60]),
        token_grid(np.eye(2) / 7e9, ["a", LONG], [LONG, "b"], title=LONG, score=0.7, note="k = 10"),
        curve([0, 1], [Line("a", [0.2, 0.4])], title=LONG, x_name=LONG, y_name=LONG[:70], note=LONG),
        head_map([name_layer("names", [["copy", LONG]])], title=LONG, note=LONG),
        flow(["a", LONG], {LONG: [([0, 1], 1.0)]}, matrix=np.eye(2) / 3, title=LONG, note=LONG, unit=LONG[:60]),
        worked_example(
            [ExampleStep(LONG, [ExampleMatrix(LONG, np.eye(9), [LONG] * 9)], [Equation(LONG, Sum(0.1, LONG), LONG)])],
            title=LONG,
            summary=[(LONG, 0.5)],
            notes=[LONG],
        ),
    ],
    ids=["map", "panels", "grid", "curve", "names", "flow", "example"],
)
def test_nothing_is_cut_in_print(figure: Figure, inches: float) -> None:
    sheet = printed(figure, inches)
    assert sheet.width <= 72 * inches + 1
    for text in placed(sheet, Text):
        left, top, right, bottom = box_of(text)
        assert left >= -1 and right <= sheet.width + 1 and top >= -1 and bottom <= sheet.height + 1, text
    words = words_in(sheet)
    assert LONG in words and getattr(figure.data, "note", LONG) in words


def test_notes_and_scores_are_a_caption_in_print() -> None:
    figure = token_grid(np.eye(2), ["a", "b"], ["c", "d"], score=0.7, note="k = 10, context; 3 of 5 pairs")
    assert "score 0.7 · k = 10, context; 3 of 5 pairs" in words_in(printed(figure))
    gaps = head_map([MapLayer("", [[0.1, None]], marked=[[True, False]])], mark="interval includes 0")
    assert "Dot: interval includes 0. Hatched: missing." in words_in(printed(gaps))


def test_eight_panels_fit_a_column_with_one_colour_bar() -> None:
    note = "A linear probe reads this share of the function from the head, beyond what the words of the items say. " * 6
    layers = [MapLayer(name, np.random.default_rng(0).random((30, 9))) for name in FUNCTIONS]
    for figure in (FIGURES["panels"], panels(layers, unit="share", note=note, title=LONG)):
        sheet = printed(figure)
        assert sheet.width == pytest.approx(72 * 3.4) and sheet.height <= 72 * 8.0
        maps = maps_of(sheet)
        assert len(maps) == 8 and len(placed(sheet, Cells)) == 9
        boxes = []
        for cells in maps:
            rows, columns, _ = cells.colours.shape
            wide, tall = columns * cells.cell[0], rows * cells.cell[1]
            boxes.append((cells.x, cells.y, cells.x + wide, cells.y + tall))
            assert wide > 0.75 * 72 and tall > 0.9 * 72
        # Titles keep off the maps, and none breaks a word.
        titles = [text for text in placed(sheet, Text) if text.size == 8.0]
        for text in titles:
            left, top, right, bottom = box_of(text)
            assert not any(left < box[2] and box[0] < right and top < box[3] and box[1] < bottom for box in boxes)
        said = " ".join(text.text for text in titles).replace("- ", "-")
        assert all(name in said for name in FUNCTIONS)
    assert "0.0040+" in words_in(printed(FIGURES["panels"]))


def test_eight_panels_are_small_files(tmp_path: Path) -> None:
    sizes = [FIGURES["panels"].save(tmp_path / f"x{suffix}").stat().st_size for suffix in (".svg", ".pdf")]
    assert sizes[0] <= 200 * 1024 and sizes[1] <= 80 * 1024


def test_columns_and_rows_arrange_maps(tmp_path: Path) -> None:
    figure = panels({f"map {i}": np.eye(4) for i in range(6)})

    def places(**asked: Any) -> tuple[int, int]:
        maps = maps_of(printed(figure, **asked))
        return len({round(cells.x) for cells in maps}), len({round(cells.y) for cells in maps})

    assert places(columns=6) == (6, 1) and places(rows=3) == (2, 3) and places(columns=2, rows=3) == (2, 3)
    for asked, sentence in (
        ({"columns": 0}, "columns=0 leaves no place for a map; give 1 or more"),
        ({"columns": 2, "rows": 2}, "6 maps do not fit into 2 x 2 places"),
    ):
        with pytest.raises(UsageError, match=sentence):
            figure.save(tmp_path / "x.png", **asked)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="this one has no maps"):
        FIGURES["curve"].save(tmp_path / "x.png", rows=2)


def test_names_are_words_in_print_or_those_asked_for(tmp_path: Path) -> None:
    maps = FIGURES["head_map"]

    def titles(sheet: Drawing) -> list[str]:
        return [text.text for text in placed(sheet, Text) if text.size == 8.0][1:]

    assert titles(printed(maps)) == ["country to capital", "name copying"]
    renamed = printed(maps, labels={"country_to_capital": "Capitals", "share of pairs": "accuracy"})
    assert titles(renamed) == ["Capitals", "name copying"]
    assert "accuracy" in words_in(renamed) and "share of pairs" not in words_in(renamed)
    # Labels of a caller stay as they are.
    assert titles(printed(maps, labels=["A_1", "B"])) == ["A_1", "B"]
    lines = words_in(printed(FIGURES["curve"], labels={"accuracy": "Accuracy (%)"}))
    assert "Accuracy (%)" in lines and "relation heads" in lines
    grid = printed(token_grid(np.eye(1), ["my_token"], ["a_b"]))
    assert "my_token" in words_in(grid) and "a_b" in words_in(grid), "tokens are no names"
    for wrong, sentence in (
        (["one"], "labels= has 1 name for 2 maps or lines"),
        (
            {"capital": "x"},
            "'capital', which this figure does not show. It shows 'country_to_capital', 'name_copying', 'la",
        ),
    ):
        with pytest.raises(UsageError, match=sentence):
            maps.save(tmp_path / "x.png", labels=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="this one has neither"):
        FIGURES["worked_example"].save(tmp_path / "x.png", labels=["a"])


def test_a_figure_says_what_it_was_made_from(tmp_path: Path) -> None:
    figure = scores().figure()
    assert figure.source.startswith("Made from tiny (fingerprint 000000000000), preset=folded with tl-headmaps ")
    assert replace(figure, source="") != figure
    assert figure.source in figure.save(tmp_path / "x.svg").read_text(encoding="utf-8")
    text = figure.latex("figures/x_1.pdf", width="column")
    assert r"\includegraphics[width=3.4in]{figures/x_1.pdf}" in text and r"\label{fig:x_1}" in text
    assert "\n% Made from tiny" in text and figure.latex("x.pdf").startswith(r"\begin{figure*}")
    said = re.search(r"\\caption\{(.*)\}\n", text)
    assert said and "k strongest tokens (k = 10)" in said[1] and r"p \ensuremath{\leq} 0.05" in said[1]
    assert r"\caption{50\% \& more}" in figure.latex("x.pdf", caption="50% & more")
    assert "% Made" not in FIGURES["head_map"].latex("x.pdf"), "arrays of a caller have no provenance"
    with pytest.raises(UsageError, match=r"LaTeX cannot include a file called 'a b\.pdf'"):
        figure.latex("a b.pdf")
    with pytest.raises(UsageError, match=r"width=0\.2 inches cannot be printed"):
        figure.latex("a.pdf", width=0.2)


def test_numbers_are_printed_only_where_they_fit() -> None:
    wide = printed(token_grid([[1.23, 4.56]], ["a"], ["b", "c"]))
    assert "1.23" in words_in(wide) and "4.56" in words_in(wide)
    narrow = printed(token_grid(np.full((1, 12), -0.000123), ["a"], list("bcdefghijklm")))
    assert not [text for text in placed(narrow, Text) if text.fill in ("#000000", "#ffffff")]
    assert "−4.56" in words_in(printed(token_grid([[-4.56]], ["a"], ["b"])))


def test_ticks_count_layers_in_fours_and_name_the_last() -> None:
    figure = component_map(np.random.default_rng(0).random((28, 7)), [f"attn.{i}" for i in range(7)])
    labels = [text.text for text in placed(printed(figure), Text) if text.anchor == "end" and not text.upright]
    assert labels == ["0", "4", "8", "12", "16", "20", "24", "27"]
    assert ticks_of(9, 1.0, 1.0) == list(range(9)) and ticks_of(1, 0.1, 1.0) == [0]


@pytest.mark.parametrize("width", [3.3, 7.0])
def test_no_component_goes_without_its_name(width: float) -> None:
    names = ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down", "mlp.gate"]
    assert " ".join(names) in words_in(printed(component_map(np.eye(7), names), width))


def test_what_is_counted_has_ticks_at_whole_numbers() -> None:
    def ticks(x: list[float]) -> list[float]:
        texts = placed(printed(curve(x, [Line("", [0.0] * len(x))])), Text)
        return [float(text.text) for text in texts if text.anchor == "middle" and text.text[0].isdigit()]

    assert all(tick == round(tick) for tick in ticks([0, 1, 2]))
    assert any(tick != round(tick) for tick in ticks([0, 0.5, 1]))
    found = [curve(x, [Line("", [0.0, 1.0])]).data.counts for x in ([0, 3], [0.5, 1])]
    assert found == [True, False]


def test_a_share_that_rounds_to_nothing_has_no_sign() -> None:
    assert [percent(share) for share in (-0.001, 0.0, -0.1, 0.756, None)] == ["0%", "0%", "-10%", "76%", "-"]


@given(st.integers(1, 400), st.floats(0.01, 1), st.floats(0.01, 1))
def test_ticks_have_room_and_end_at_the_last(n: int, room: float, need: float) -> None:
    shown = ticks_of(n, room, need)
    assert shown[0] == 0 and all((b - a) * room >= need for a, b in pairwise(shown))
    assert shown[-1] == n - 1 or (n - 1) * room < need


def test_print_takes_inches_and_another_title(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("head_map", "curve", "panels"):
        with Image.open(FIGURES[name].save(tmp_path / "p.png", width=5.5, height=4, title="Another")) as image:
            assert (image.width, image.height) == pytest.approx((1100, 800), abs=1)
    for width, inches in (("column", 3.4), ("page", 7.0)):
        with Image.open(FIGURES["curve"].save(tmp_path / "p.png", width=width)) as image:  # type: ignore[arg-type]
            assert image.width == pytest.approx(inches * 200, abs=1)
    plain, titled = (FIGURES["curve"].save(tmp_path / f"{i}.svg", title=t) for i, t in enumerate(("", None)))
    assert plain.stat().st_size < titled.stat().st_size
    for wrong in ({"width": 0.1}, {"height": 500}, {"width": float("nan")}):
        with pytest.raises(UsageError, match=r"inches cannot be printed\. Give 1 to 50 inches"):
            FIGURES["curve"].save(tmp_path / "x.png", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["flow", "worked_example"])
def test_a_height_that_follows_from_the_figure_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"height=3 was given, but the height of this figure follows from what it"):
        FIGURES[name].save(tmp_path / "x.pdf", height=3)
    assert not list(tmp_path.iterdir())


def test_notes_of_views_are_printed_and_details_of_grids_shown(tmp_path: Path) -> None:
    note = "Two tokens are few."
    views = [
        attention_view([[[1.0, 0.0], [0.5, 0.5]]], ["a", "b"], note=note),
        token_groups_view(["a", "b"], [0, 1], note=note),
        top_tokens_view({"L0H0": [("a", 0.9)]}, note=note),
    ]
    for view in views:
        assert note in getattr(view.data, "note", getattr(view.data, "text", "")), view
    layer = MapLayer("", [[1.0]], details={"rank": [[1.0]]})
    grid = token_grid(layer, ["a"], ["b"], details={"logit": [[2.0]]})
    assert [name for name, _ in grid.data.layers[0].details] == ["rank", "logit"]


def test_names_have_colours_a_legend_and_a_pale_rest() -> None:
    rows = [["copy", "unclear", "plural"], ["copy", None, "unclear"], ["unclear", "unclear", None]]
    figure = head_map([name_layer("names", rows, details={"q": np.zeros((3, 3))})], title="Names")
    layer = figure.data.layers[0]
    assert layer.scale.names == (("copy (2)", SERIES[0]), ("plural (1)", SERIES[1]), ("unclear (4)", UNCLEAR))
    assert np.isnan(layer.values).sum() == 2 and layer.values[0].tolist() == [0, 2, 1]
    assert [layer.scale.colour(float(value)) for value in layer.values[0]] == [SERIES[0], UNCLEAR, SERIES[1]]
    assert str(figure) == "Names: 3 layers by 3 heads, copy (2), plural (1), unclear (4)."
    words = words_in(printed(figure))
    assert "copy (2)" in words and "unclear (4)" in words
    many = name_layer("", [[f"name {i}" for i in range(20)]])
    assert many.scale is not None and len({colour for _, colour in many.scale.names}) == len(NAMES)


@pytest.mark.parametrize("inches", [3.4, 7.0])
def test_long_labels_leave_room_for_the_map(inches: float) -> None:
    def size_of(sources: list[str], targets: list[str]) -> tuple[float, float]:
        (cells,) = maps_of(printed(token_grid(np.eye(2), sources, targets), inches))
        return cells.cell

    short, long = size_of(["a", "b"], ["c", "d"]), size_of(["x" * 500, "W" * 39], ["\n" * 50, "🇫🇷" * 30])
    assert long[0] > 0.4 * short[0] and long[1] > 0.4 * short[1]


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    figure = FIGURES["token_grid"]
    blocked = tmp_path / "file"
    blocked.write_text("")
    for suffix in (".html", ".png"):
        with pytest.raises(OutputError, match="Cannot write"):
            figure.save(blocked / f"x{suffix}")
        with pytest.raises(OutputError, match="Cannot write"):
            (tmp_path / f"folder{suffix}").mkdir()
            figure.save(tmp_path / f"folder{suffix}")
    with pytest.raises(UsageError, match=r"Use one of: \.html, \.svg, \.png, \.pdf"):
        figure.save(tmp_path / "x.gif")
    with pytest.raises(UsageError, match=r"Use the suffix \.html"):
        save_page(tmp_path / "x.png", [figure])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.html", "folder.png"]


def test_a_page_of_many_views_carries_the_script_once(tmp_path: Path) -> None:
    views = [FIGURES[name] for name in ("attention", "token_groups", "top_tokens", "head_map", "curve")]
    page = save_page(tmp_path / "all.html", views, title="All").read_text(encoding="utf-8")
    assert page.count('class="tlhm-circuitsvis"') == 1
    assert page.count("<style>") == 1
    assert len(page) < 700_000


# Numbers


@given(arrays(np.float32, st.integers(1, 300), elements=st.floats(width=32, allow_infinity=False)))
def test_packed_numbers_come_back_exactly(values: np.ndarray) -> None:
    import base64

    found = packed(values)
    if "f" in found:
        back = np.frombuffer(base64.b64decode(found["f"]), "<f4")
    else:
        table = np.frombuffer(base64.b64decode(found["t"]), "<f4")
        back = table[np.frombuffer(base64.b64decode(found["i"]), "u1")]
    np.testing.assert_array_equal(back, values)


@given(arrays(np.float64, 20, elements=st.floats(1e-6, 1e6)))
def test_half_numbers_keep_three_digits(values: np.ndarray) -> None:
    import base64

    found = packed_half(values)
    back = np.frombuffer(base64.b64decode(found["h"]), "<f2").astype(float) * found["m"] / 1024
    # 11 bits of mantissa above the smallest normal number; below it, an absolute error that no reader sees.
    np.testing.assert_allclose(back, values, rtol=2**-11, atol=values.max() * 2**-34)


def lightness(colour: str) -> float:
    """CIELAB L* of a hexadecimal colour."""
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    y = float(linear @ [0.2126, 0.7152, 0.0722])
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def test_lightness_changes_evenly() -> None:
    for table in (AMOUNTS.split(), BLUES.split(), ORANGES.split(), SIGNED.split()[16:], SIGNED.split()[16::-1]):
        steps = np.diff([lightness(colour) for colour in table])
        assert (np.sign(steps) == np.sign(steps[0])).all()
        assert abs(steps).max() < 1.5 * abs(steps).mean()


def test_amounts_are_viridis() -> None:
    import matplotlib

    for i, colour in enumerate(AMOUNTS.split()):
        wanted = matplotlib.colormaps["viridis"](i / 32)[:3]
        assert [int(colour[j : j + 2], 16) for j in (0, 2, 4)] == pytest.approx([c * 255 for c in wanted], abs=1)


@given(arrays(np.float64, 12, elements=st.floats(-1e6, 1e6)))
def test_scales_are_centred_when_signed_and_never_lie(values: np.ndarray) -> None:
    scale = Scale.over([values])
    assert scale.low <= values.min() and scale.high >= values.max()
    assert not scale.below and not scale.above
    if values.min() < 0:
        assert scale.signed and scale.low == -scale.high
        assert scale.colour(0.0) == "#" + SIGNED.split()[16]
    order = np.sort(values)
    places = [scale.position(float(value)) for value in order]
    assert places == sorted(places)


def test_limits_say_when_values_lie_beyond() -> None:
    scale = Scale.over([np.array([-1.0, 0.5, 3.0])], limits=(0, 2), signed=False)
    assert (scale.below, scale.above) == (True, True)
    assert scale.colour(3.0) == "#" + AMOUNTS.split()[-1]
    with pytest.raises(UsageError, match="two finite numbers, the smaller one first"):
        head_map([[1.0]], limits=(2, 1))


def test_a_value_of_exactly_the_limit_is_not_beyond_it() -> None:
    # Maps hold 32-bit floats, and 0.1 as one of them is a little more than 0.1.
    scale = head_map([[0.0, 0.1]], limits=(0, 0.1)).data.layers[0].scale
    assert (scale.low, scale.high, scale.below, scale.above) == (0, 0.1, False, False)
    low = head_map([[0.7, 0.9]], limits=(0.7, 0.9)).data.layers[0].scale  # 0.7 as a 32-bit float is less than 0.7
    assert not low.below and not low.above
    assert head_map([[0.0, 0.1001]], limits=(0, 0.1)).data.layers[0].scale.above


def test_a_percentile_keeps_a_few_values_from_taking_all_colours() -> None:
    values = np.linspace(0, 0.00401, 1000)
    values[7] = 3.0
    figure = panels({"a": values.reshape(20, 50)}, percentile=99, unit="share")
    scale = figure.data.layers[0].scale
    assert (scale.low, scale.high, scale.below, scale.above) == (0, 0.0040, False, True)
    assert [label for _, label in scale.ticks] == ["0.0000", "0.0020", "0.0040+"]
    assert ">0.0040+<" in figure.body


def test_percentiles_end_both_sides_away_from_zero_and_stay_centred_when_signed() -> None:
    scale = Scale.over([np.linspace(0.12, 0.18, 101), np.array([0.05, 0.5])], percentile=95)
    assert (scale.low, scale.high) == pytest.approx((0.122, 0.178), abs=0.001)
    assert [label for _, label in scale.ticks] == ["≤ 0.122", "0.150", "0.178+"]
    signed = Scale.over([np.linspace(-1, 1, 101), np.array([50.0])], percentile=95)
    assert signed.low == -signed.high == -0.96 and signed.above and signed.below
    # Nearly all equal: the one that is not is still seen.
    assert Scale.over([np.array([0.0] * 200 + [1.0])], percentile=99).high == 1.0
    for wrong in (0, 50, 100, 101, float("nan")):
        with pytest.raises(UsageError, match="between 50 and 100"):
            Scale.over([values := np.ones(3)], percentile=wrong)
    with pytest.raises(UsageError, match="give one of them"):
        Scale.over([values], limits=(0, 1), percentile=99)


@given(st.floats(-1e6, 1e6), st.floats(1e-9, 1e6))
def test_labels_of_the_bar_say_where_they_stand(low: float, spread: float) -> None:
    scale = Scale(low, low + spread)
    for value, label in scale.ticks:
        said = float(label.replace("−", "-").replace(",", ""))
        with_exponent = max(abs(low), abs(low + spread)) < 1e-4
        assert abs(said - value) <= 0.006 * (max(spread, abs(value)) if with_exponent else spread)


def test_maps_of_one_unit_share_a_scale_and_others_do_not() -> None:
    figure = head_map({"a": [[0.0, 1.0]], "b": [[0.0, 5.0]]}, unit="share")
    assert len({layer.scale for layer in figure.data.layers}) == 1
    metrics = component_map({"norm": [[0.1, 0.2]], "rank": [[10.0, 64.0]]}, ["attn.q", "attn.k"])
    assert [layer.scale.high for layer in metrics.data.layers] == pytest.approx([0.2, 64.0])
    assert metrics.data.layers[0].scale.unit == "norm"


# Text

AWKWARD = st.one_of(
    st.text(), st.sampled_from(["</script>", "<!--", "<img src=x onerror=alert(1)>", "&lt;", '"', "\ud800", "‮", "]]>"])
)


@settings(max_examples=15)
@given(st.lists(AWKWARD, min_size=1, max_size=4), AWKWARD)
def test_any_text_is_safe_anywhere(labels: list[str], title: str) -> None:
    n = len(labels)
    step = ExampleStep(title, [ExampleMatrix(title, np.ones((n, 1)), labels)], [Equation(title, Sum(title, 1.0))])
    figures = [
        token_grid(np.ones((n, n)), labels, labels, title=title, unit=title, note=title),
        head_map([MapLayer(title, [[1.0]], group=title)], title=title, drill={"L0H0": {title: [labels]}}),
        flow(labels, {"head": [([0], 0.5)]}, title=title, note=title),
        worked_example([step], title=title),
        scatter(range(n), range(n), names=labels, groups=labels, x_name=title, title=title, drill={title: {title: []}}),
        attention_view(np.ones((1, n, n)), labels, title=title),
        token_groups_view(labels, [0] * n, names=[title], title=title),
        top_tokens_view({"L0H0": [(label, 1.0) for label in labels]}, title=title, note=title),
    ]
    for figure in figures:
        figure.body.encode("utf-8")
        page = Structure(figure.body)
        assert page.open == []
        assert "img" not in page.tags
        assert all(json.loads(script) for script in page.scripts)


def test_circuitsvis_never_sees_the_start_of_a_tag() -> None:
    figure = attention_view(np.ones((1, 3, 3)), ["<s>", "&lt;", "</script>"])
    tokens = plain(figure)["tokens"]
    assert [token.replace("\u200b", "") for token in tokens] == ["<s>", "&lt;", "</script>"]
    assert not [token for token in tokens if re.search(r"<[a-z/!?]|&[a-z#]", token)]


# Results


def test_a_result_shows_its_figure_and_a_loaded_one_too(tmp_path: Path) -> None:
    for result in (scores(), grid([[1.0, -2.0]], ["<s>"], ["a", "b"])):
        figure = result.figure()
        assert isinstance(figure, Figure)
        assert result._repr_html_() == figure.html
        assert Result.load(result.save(tmp_path / "r.safetensors"))._repr_html_() == figure.html


def test_relation_scores_are_drawn_as_they_are() -> None:
    result = scores()
    heat = result.figure().data
    assert [(layer.name, layer.group) for layer in heat.layers] == [
        (name, group) for name in ("capitals", "copying") for group in ("score", "suppression")
    ]
    np.testing.assert_array_equal(heat.layers[2].values, result.promote[1].double().numpy())
    np.testing.assert_array_equal(heat.layers[3].values, result.suppress[1].double().numpy())
    side_by_side = result.figure(side_by_side=True).data
    assert side_by_side.panels and [layer.name for layer in side_by_side.layers] == ["capitals", "copying"]


def test_all_relations_of_a_small_model_fit_in_a_megabyte(tmp_path: Path) -> None:
    result = scores(30, 9, tuple(f"relation_{n}" for n in range(39)))
    assert result.save(tmp_path / "all.html").stat().st_size < 1 << 20


def test_a_grid_of_tokens_is_light_to_dark_unless_what_is_below_zero_matters() -> None:
    pale, deep = (token_grid([[1.0, low]], ["a"], ["b", "c"]).data.layers[0].scale for low in (-0.2, -0.3))
    assert not pale.signed and pale.palette == "blues"
    assert deep.signed


def test_overlapping_groups_stand_in_lanes_and_alike_ones_share_a_colour() -> None:
    heads = {
        "L1H0": [([0, 1, 2], 0.5), ([3, 4, 5], 0.5)],
        "L1H1": [([0, 1], 0.4), ([2, 5], 0.1), ([3, 4], 0.2)],
        "L1H2": [([0, 1, 2], 0.9)],
    }
    figure = flow("abcdef", heads, matrix=np.tril(np.ones((6, 6)) / 2))
    chart = figure.data
    assert chart.lanes == (0, 1, 0)
    colours = chart.colours
    assert colours[(0, 1)] == colours[(0, 1, 2)] and colours[(3, 4)] == colours[(3, 4, 5)]
    assert len({colours[group] for group in ((0, 1), (2, 5), (3, 4))}) == 3, "groups of one head differ"
    assert len(stripes_of(figure)) == 2 + 4, "two for a broken group, one for a shared one"
    paths = [shape for shape, _ in every_shape(chart.drawn().shapes) if isinstance(shape, shapes.Path)]
    assert len(paths) == 6 and all(len(path.lines) == 1 for path in paths), "one line from a head to a group"
    assert {path.width for path in paths} == {1 + 5 * share for share in (0.5, 0.4, 0.1, 0.2, 0.9)}


def test_groups_that_do_not_overlap_are_joined_to_their_tokens() -> None:
    figure = FIGURES["flow"]
    assert not any(figure.data.lanes) and not stripes_of(figure)


def stripes_of(figure: Figure) -> list[Any]:
    (stripes,) = [shape for shape in figure.data.drawn().shapes if getattr(shape, "key", "") == "stripes"]
    return list(stripes.shapes)


def test_the_legend_of_a_flowchart_is_where_a_phone_shows_it() -> None:
    drawing = FIGURES["flow"].data.drawn()
    (unit,) = [text for text in placed(drawing, Text) if text.text == "attention"]
    assert 0 < unit.x < min(cell.x for cell in placed(drawing, Rect) if cell.said)


def test_numbers_in_print_are_of_one_size_and_fit() -> None:
    values = [[-31.47 - column, *[1.0] * 6] for column in range(3)]
    sheet = printed(token_grid(values, list("abc"), [f"column {i}" for i in range(7)]))
    numbers = [text for text in placed(sheet, Text) if text.fill in ("#000000", "#ffffff")]
    assert len(numbers) == 21, "made smaller, not left out"
    assert len({text.size for text in numbers}) == 1


def test_a_narrow_matrix_does_not_show_its_zeros_alone() -> None:
    wide = np.tril(np.full((16, 16), 0.00123))
    example = worked_example([ExampleStep("Attention", [ExampleMatrix("A", wide, list("abcdefghijklmnop"))])]).data

    def numbers(width: float) -> list[str]:
        return [text.text for text in placed(example.drawn(width), Text) if text.text[:1].isdigit()][1:]

    assert numbers(340.0) == [] and len(numbers(1000.0)) == 256


def test_a_legend_in_print_covers_nothing() -> None:
    texts = {text.text: text.y for text in placed(printed(FIGURES["curve"]), Text)}
    assert texts["heads ablated"] < min(texts[name] - 7 for name in ("relation heads", "random heads"))


def test_a_dot_stands_beside_a_number() -> None:
    figure = token_grid(MapLayer("", np.eye(2), marked=np.eye(2)), ["a", "b"], ["c", "d"], mark="holds")
    sheet = printed(figure)
    dots = [shape for shape in placed(sheet, Rect) if shape.radius]
    boxes = [box_of(text) for text in placed(sheet, Text) if text.text in ("0", "1")]
    assert len(dots) == 2 and len(boxes) == 4
    for dot in dots:
        assert not any(
            a < dot.x + dot.width and dot.x < c and b < dot.y + dot.height and dot.y < d for a, b, c, d in boxes
        )


def test_a_head_is_pinned_at_first() -> None:
    two = [[1.0, 2.0], [3.0, 4.0]]
    assert '"pinned":[1,0]' in head_map(two, pinned="L1H0").body
    assert '"pinned":[0,1]' in panels({"a": two, "b": two}, pinned=(0, 1)).body
    assert '"pinned"' not in head_map(two).body
    with pytest.raises(UsageError, match="no head L5H0"):
        head_map([[1.0]], pinned="L5H0")


def test_a_token_grid_keeps_values_and_ranks() -> None:
    result = grid([[1.0, -2.0], [0.5, 7.0]])
    heat = result.figure().data
    np.testing.assert_array_equal(heat.layers[0].values, result.values.double().numpy())
    ((name, ranks),) = heat.layers[0].details
    assert "rank" in name
    np.testing.assert_array_equal(ranks, result.ranks.double().numpy() + 1, "readers count from 1")
    assert "largest of each row: s0 → t0, s1 → t1" in result._repr_html_()


def test_a_caption_begins_a_sentence_of_its_own() -> None:
    for note, shown in (("largest: a", "largest: a. Q4_1."), ("It is so.", "It is so. Q4_1."), ("", "Q4_1.")):
        assert head_map([[1.0]], note=note).captioned("Q4_1.").data.note == shown


def test_a_result_too_large_to_draw_says_so(tmp_path: Path) -> None:
    result = grid(np.zeros((1200, 2)))
    assert result._repr_html_().startswith("<p>values has 1,200 rows and 2 columns; a figure takes up to 1,000")
    with pytest.raises(UsageError, match="Choose some rows and columns"):
        result.save(tmp_path / "x.html")
    assert list(tmp_path.iterdir()) == []


def test_results_without_a_drawing_show_their_text(tmp_path: Path) -> None:
    class Plain(ModelDescription):
        figure = Result.figure

    description = Plain({"a": "<b>"}, provenance())
    assert "&lt;b&gt;" in description._repr_html_()
    for suffix in (".html", ".svg", ".png", ".pdf"):
        assert description.save(tmp_path / f"m{suffix}").stat().st_size > 100


# Refusals

ONE = [[1.0]]


def one_step(values: Any, **labels: Any) -> Figure:
    return worked_example([ExampleStep("a", [ExampleMatrix("M", values, **labels)])])


REFUSED = {
    "infinite": (lambda: head_map([[1.0, float("inf")]]), r"values\[0, 1\] is infinite"),
    "empty": (lambda: head_map(np.zeros((0, 3))), "at least one of each"),
    "flat": (lambda: head_map([1.0, 2.0]), "a row is 1.0"),
    "text": (lambda: head_map([["a"]]), "table of numbers"),
    "no maps": (lambda: head_map({}), "nothing to draw"),
    "shapes": (lambda: panels({"a": ONE, "b": [[1.0, 2.0]]}), "they must agree"),
    "null": (lambda: head_map([MapLayer("a", ONE, null=[[1.0, 2.0]])]), "they must agree"),
    "twice": (lambda: head_map([MapLayer("a", ONE), MapLayer("a", ONE)]), "Two maps are called 'a'"),
    "huge": (lambda: token_grid(np.zeros((3000, 3000)), range(3000), range(3000)), "3,000 rows and 3,000 columns"),
    "many": (lambda: head_map({str(i): np.zeros((200, 200)) for i in range(101)}), "too many for one page"),
    "labels": (lambda: token_grid(ONE, ["a", "b"], ["c"]), "2 labels were given for 1 source"),
    "drill": (lambda: head_map(ONE, drill={"L9H9": {}}), "There is no head L9H9"),
    "no lines": (lambda: curve([0], []), "nothing to draw"),
    "line": (lambda: curve([0, 1], [Line("a", [1.0, float("nan")])]), "finite numbers"),
    "half a band": (lambda: curve([0], [Line("a", [1.0], low=[0.0])]), "one edge only"),
    "short line": (lambda: curve([0, 1], [Line("a", [1.0])]), "2 positions but 1 values"),
    "points": (lambda: scatter([1.0], [1.0, 2.0]), "they must agree"),
    "names": (lambda: scatter([1.0], [1.0], names=[]), "one name"),
    "groups": (lambda: flow(["a"], {"h": [([1], 1.0)]}), "positions from 0 to 0"),
    "share": (lambda: flow(["a"], {"h": [([0], 3.0)]}), "a share is from 0 to 1"),
    "order": (lambda: flow(["a"], {}, order=[1]), "must hold each position from 0 to 0 once"),
    "long flow": (lambda: flow(["a"] * 200, {}), "cannot be read"),
    "matrix": (lambda: flow(["a"], {}, matrix=[[1.0, 2.0]]), "they must agree"),
    "steps": (lambda: worked_example([]), "nothing to draw"),
    "no tokens": (lambda: flow([], {}), "nothing to draw"),
    "big matrix": (lambda: one_step(np.zeros((30, 2))), "up to 24 rows"),
    "matrix labels": (lambda: one_step(ONE, rows=["a", "b"]), "2 labels"),
    "patterns": (lambda: attention_view(np.ones((1, 2, 3)), ["a", "b"]), r"expected \(head, 2, 2\)"),
    "pattern values": (lambda: attention_view(np.full((1, 1, 1), np.nan), ["a"]), "not finite"),
    "heads": (lambda: attention_view(np.ones((1, 1, 1)), ["a"], heads=["L0H0", "L0H1"]), "name each"),
    "long text": (lambda: attention_view(np.ones((1, 600, 600)), ["a"] * 600), "a shorter text"),
    "group list": (lambda: token_groups_view(["a"], [0, 1]), "one for each token"),
    "no group": (lambda: token_groups_view(["a"], [None]), "nothing to colour"),
    "no tops": (lambda: top_tokens_view({}), "nothing to draw"),
    "top value": (lambda: top_tokens_view({"L0H0": [("a", float("nan"))]}), "not finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_with_a_sentence(name: str) -> None:
    call, sentence = REFUSED[name]
    with pytest.raises(HeadMapsError, match=sentence):
        call()


def test_renderers_name_all_they_have() -> None:
    import tl_headmaps.renderers as renderers

    assert set(renderers.__all__) <= set(dir(renderers))
    for name in renderers.__all__:
        value = getattr(renderers, name)
        assert callable(value) and value.__doc__ and value.__name__ == name
        assert re.search(rf"\b{name}\(|`{name}`", GUIDE), f"{name} is not in the guide"
    with pytest.raises(AttributeError, match=r"attribute.*pie"):
        _ = renderers.pie
    assert tl_headmaps.Figure is Figure
