"""Every figure in a real browser: opened from disk, offline, with mouse and keyboard."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import EXECUTABLE, Browser

from tl_headmaps.renderers import Figure, MapLayer, component_map, head_map, panels, token_grid

pytestmark = pytest.mark.browser

DANGEROUS = [
    "<s>",
    "</script><script>window.broken = 1</script>",
    "<img src=x onerror=window.broken=1>",
    'a"b',
    "it's",
    "two\nlines",
    "🇫🇷🙂",
    "שלום",
    "‮abc",
    "&amp;",
    "`${window.broken = 1}`",
    "-->",
    "<!--",
    " ",
    "\x00",
]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if EXECUTABLE is None:
        why = "no Chromium was found; install one (apt-get install chromium) and run make test-browser"
        if os.environ.get("TL_HEADMAPS_BROWSER") == "required":
            pytest.fail(why)
        pytest.skip(why)
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


class Shown:
    """A figure on the screen, and what a user can do with it."""

    def __init__(self, browser: Browser, figure: Figure, folder: Path, **options: Any) -> None:
        self.browser = browser
        self.path = figure.save(folder / "figure.html")
        self.seconds = browser.open(self.path, **options)

    def place(self, row: int, column: int, shape: tuple[int, int], plot: int = 0) -> tuple[float, float]:
        """Where the centre of a cell is on the screen."""
        script = f"""(() => {{ const plot = document.querySelectorAll('.tlhm-plot')[{plot}];
            plot.scrollIntoView({{block: 'center'}}); const b = plot.getBoundingClientRect();
            return [b.left, b.top, b.width, b.height] }})()"""
        left, top, width, height = self.browser.run(script)
        return left + width * (column + 0.5) / shape[1], top + height * (row + 0.5) / shape[0]

    def hover(self, row: int, column: int, shape: tuple[int, int], plot: int = 0) -> str:
        self.browser.hover(*self.place(row, column, shape, plot))
        return self.browser.text(".tlhm-tip")

    def focus(self) -> None:
        """With the keyboard alone: from control to control until a map has the focus."""
        self.browser.run("document.body.focus()")
        for _ in range(10):
            self.browser.key("Tab")
            if self.browser.run("document.activeElement.classList.contains('tlhm-plot')"):
                return
        pytest.fail("the map cannot be reached with the Tab key")

    def check_quiet(self) -> None:
        """No error, no warning, and nothing asked for but the file itself."""
        assert self.browser.errors == []
        assert self.browser.requests == [self.path.resolve().as_uri()]
        assert self.browser.run("window.broken") is None


def values_on_page(browser: Browser, number: int = 0) -> np.ndarray:
    """The numbers the page draws from, NaN where it has none."""
    script = f"""Array.from(document.querySelector('.tlhm').headmap.maps[{number}].values,
        v => Number.isNaN(v) ? null : v)"""
    return np.array([np.nan if value is None else value for value in browser.run(script)])


def colours_on_page(browser: Browser, shape: tuple[int, int]) -> list[list[list[int]]]:
    """Red, green, blue and opacity at the centre of every cell."""
    script = f"""(() => {{ const canvas = document.querySelector('.tlhm-plot canvas'), pen = canvas.getContext('2d');
        const w = canvas.width / {shape[1]}, h = canvas.height / {shape[0]};
        return Array.from({{length: {shape[0]}}}, (_, r) => Array.from({{length: {shape[1]}}}, (_, c) =>
            Array.from(pen.getImageData(Math.floor((c + .5) * w), Math.floor((r + .5) * h), 1, 1).data))) }})()"""
    return list(browser.run(script))


RANDOM = np.random.default_rng(0)
SCORES = RANDOM.beta(0.4, 6, (30, 9)).astype(np.float32)
SCORES[3, 4] = np.nan


@pytest.fixture
def scores(browser: Browser, tmp_path: Path) -> Shown:
    other = RANDOM.normal(size=(30, 9)).astype(np.float32)
    layers = [
        MapLayer("country_to_capital", SCORES, null=SCORES / 10, interval=(SCORES * 0.8, SCORES * 1.2)),
        MapLayer("name_copying", other, unit="logit"),
    ]
    drill = {"L23H4": {"salient tokens": [["France", "Paris"]]}, "L2H0": {"salient tokens": [["sushi", "Japan"]]}}
    return Shown(browser, head_map(layers, title="Scores", unit="share of pairs", drill=drill), tmp_path)


def test_values_on_the_page_are_the_values_given(scores: Shown) -> None:
    np.testing.assert_array_equal(values_on_page(scores.browser), SCORES.ravel())
    scores.check_quiet()


def test_colours_are_those_of_the_scale(scores: Shown) -> None:
    figure = head_map(SCORES)
    scale = figure.data.layers[0].scale
    found = colours_on_page(scores.browser, SCORES.shape)
    for (row, column), value in np.ndenumerate(SCORES):
        if np.isnan(value):
            continue
        expected = [int(scale.colour(float(value))[i : i + 2], 16) for i in (1, 3, 5)]
        assert found[row][column] == [*expected, 255], (row, column)


def test_hover_tells_head_value_rank_null_and_interval(scores: Shown) -> None:
    order = np.sort(SCORES[~np.isnan(SCORES)])[::-1]
    value = SCORES[23, 4]
    rank = int((order > value).sum()) + 1
    lines = scores.hover(23, 4, SCORES.shape).splitlines()
    assert lines[0] == "L23H4 · country_to_capital"
    assert lines[1] == f"share of pairs {float(f'{value:.4g}')}"
    assert lines[2] == f"rank {rank} of 269"
    assert float(lines[3].removeprefix("null ")) == pytest.approx(value / 10, rel=1e-2)
    low, high = map(float, lines[4].removeprefix("95% ").split(" to "))
    assert (low, high) == pytest.approx((value * 0.8, value * 1.2), rel=1e-2)
    assert scores.hover(3, 4, SCORES.shape).splitlines()[1] == "share of pairs missing"


def test_click_pins_a_head_and_lists_what_is_known_about_it(scores: Shown) -> None:
    scores.browser.click(*scores.place(23, 4, SCORES.shape))
    pinned = scores.browser.text(".tlhm-pinned")
    assert pinned.startswith("L23H4")
    assert "country_to_capital" in pinned and "name_copying" in pinned
    assert "salient tokens\nFrance\tParis" in pinned
    scores.browser.key("Escape")
    assert scores.browser.text(".tlhm-pinned") == ""


def test_keyboard_alone_is_enough(scores: Shown) -> None:
    scores.focus()
    assert scores.browser.text(".tlhm-tip").startswith("L0H0")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowDown"):
        scores.browser.key(key)
    assert scores.browser.text(".tlhm-tip").startswith("L2H0")
    assert scores.browser.text(".tlhm-live").startswith("L2H0")
    scores.browser.key("Enter")
    assert "sushi" in scores.browser.text(".tlhm-pinned")


@pytest.mark.parametrize(("query", "head"), [("L23H4", "L23H4"), ("l2h0", "L2H0"), ("japan", "L2H0")])
def test_search_finds_heads_and_tokens(scores: Shown, query: str, head: str) -> None:
    scores.browser.run("document.querySelector('.tlhm input').focus()")
    scores.browser.type(query)
    assert scores.browser.text(".tlhm-found") == "1 found"
    scores.browser.key("Enter")
    assert scores.browser.text(".tlhm-pinned").startswith(head)


def test_search_says_when_there_is_nothing(scores: Shown) -> None:
    scores.browser.run("document.querySelector('.tlhm input').focus()")
    scores.browser.type("L99H0")
    assert scores.browser.text(".tlhm-found") == "nothing found"


def test_the_switch_changes_the_map_and_its_scale(scores: Shown) -> None:
    assert "share of pairs" in scores.browser.text(".tlhm-bar")
    scores.browser.run(
        "(() => { const s = document.querySelector('.tlhm select'); s.value = 'name_copying';"
        "s.dispatchEvent(new Event('change')) })()"
    )
    assert scores.hover(5, 5, SCORES.shape).startswith("L5H5 · name_copying\nlogit")
    bar = scores.browser.text(".tlhm-bar")
    assert "logit" in bar and "\n0\n" in bar
    scores.check_quiet()


def test_eight_panels_are_small_and_quick(browser: Browser, tmp_path: Path) -> None:
    maps = {f"function {n}": RANDOM.gamma(1, 0.001, (32, 32)) for n in range(8)}
    shown = Shown(browser, panels(maps, unit="importance"), tmp_path)
    assert shown.path.stat().st_size <= 120 * 1024
    assert min(shown.seconds, browser.open(shown.path), browser.open(shown.path)) < 0.5
    assert browser.run("document.querySelectorAll('.tlhm-plot').length") == 8
    np.testing.assert_array_equal(values_on_page(browser, 7), maps["function 7"].astype(np.float32).ravel())
    assert shown.hover(31, 0, (32, 32), plot=5).startswith("L31H0 · function 5")
    shown.check_quiet()


def test_dangerous_tokens_are_shown_as_text_and_run_nothing(browser: Browser, tmp_path: Path) -> None:
    n = len(DANGEROUS)
    figure = token_grid(np.eye(n), DANGEROUS, DANGEROUS, title=DANGEROUS[1], unit=DANGEROUS[2], note=DANGEROUS[1])
    shown = Shown(browser, figure, tmp_path)
    shown.check_quiet()
    for row, token in enumerate(DANGEROUS):
        tip = shown.hover(row, row, (n, n)).splitlines()[0]
        name = figure.data.rows.label(row)
        assert tip == f"{name} → {name}"
        assert token not in "<s>" or token in tip
    listed = head_map([[1.0]], drill={"L0H0": {DANGEROUS[1]: [DANGEROUS, [1.5]]}})
    shown = Shown(browser, listed, tmp_path)
    browser.click(*shown.place(0, 0, (1, 1)))
    assert "<img src=x onerror=window.broken=1>" in browser.text(".tlhm-pinned")
    shown.check_quiet()


@pytest.mark.parametrize(
    "figure",
    [
        head_map([[0.5]], title="a single head"),
        head_map(np.full((3, 3), np.nan), title="no value"),
        head_map(np.full((3, 3), 0.25), title="all equal"),
        head_map([[0.1, 0.2, 0.3], [0.5], [-0.3, 0.4]], title="ragged"),
        head_map(RANDOM.random((200, 96)), title="200 layers"),
        component_map(RANDOM.random((28, 3)), ["attn.q", "attn.k", "mlp.up"], title="components"),
    ],
    ids=lambda figure: figure.title,
)
def test_unusual_maps_are_drawn(browser: Browser, tmp_path: Path, figure: Figure) -> None:
    shown = Shown(browser, figure, tmp_path)
    shown.check_quiet()
    heat = figure.data
    np.testing.assert_array_equal(values_on_page(browser), heat.layers[0].values.astype(np.float32).ravel())
    assert shown.hover(0, 0, heat.layers[0].values.shape).startswith(heat.cell_name(0, 0))
    shown.focus()
    for _ in range(4):
        browser.key("ArrowDown")
        browser.key("ArrowRight")
    shown.check_quiet()


def test_a_figure_shown_twice_on_a_page_works_twice(browser: Browser, tmp_path: Path) -> None:
    figure = head_map(SCORES, title="twice")
    path = tmp_path / "twice.html"
    path.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{figure.html}{figure.html}</body>", encoding="utf-8")
    browser.open(path)
    assert browser.run("document.querySelectorAll('.tlhm-plot').length") == 2
    assert browser.run("document.querySelectorAll('.tlhm-tip').length") == 2
    ids = json.loads(browser.run("JSON.stringify([...document.querySelectorAll('[id]')].map(e => e.id))"))
    assert len(ids) == len(set(ids))
    assert browser.errors == []
