"""Every figure in a real browser: opened from disk, offline, with mouse and keyboard."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import website
from browser import Browser
from every_figure import BLOCKS, A, V, every_figure

from tl_headmaps.renderers import (
    Figure,
    MapLayer,
    attention_view,
    component_map,
    head_map,
    panels,
    save_page,
    token_grid,
    token_groups_view,
    top_tokens_view,
)

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


class Shown:
    """A figure on the screen, and what a user can do with it."""

    def __init__(self, browser: Browser, figure: Figure, folder: Path, **options: Any) -> None:
        self.browser = browser
        self.path = figure.save(folder / "figure.html")
        browser.open(self.path, **options)

    def place(self, row: int, column: int, shape: tuple[int, int], plot: int = 0) -> tuple[float, float]:
        """Where the centre of a cell is on the screen, once what was done before has been laid out."""
        self.browser.settle()
        script = f"""(() => {{ const plot = document.querySelectorAll('.tlhm-plot')[{plot}];
            plot.scrollIntoView({{block: 'center'}}); const b = plot.getBoundingClientRect();
            return [b.left, b.top, b.width, b.height] }})()"""
        left, top, width, height = self.browser.run(script)
        return left + width * (column + 0.5) / shape[1], top + height * (row + 0.5) / shape[0]

    def hover(self, row: int, column: int, shape: tuple[int, int], plot: int = 0) -> str:
        self.browser.hover(*self.place(row, column, shape, plot))
        return self.browser.text(".tlhm-tip")

    def focus(self, what: str = ".tlhm-plot") -> None:
        """With the keyboard alone: from control to control until the picture has the focus."""
        self.browser.run("document.body.focus()")
        for _ in range(10):
            self.browser.key("Tab")
            if self.browser.run(f"document.activeElement.matches('{what}')"):
                return
        pytest.fail(f"{what} cannot be reached with the Tab key")

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
    """Red, green, blue and opacity of every cell."""
    script = f"""(async () => {{ const picture = new Image();
        picture.src = document.querySelector('.tlhm-panel image').href.baseVal;
        await picture.decode();
        const canvas = new OffscreenCanvas({shape[1]}, {shape[0]}), pen = canvas.getContext('2d');
        pen.drawImage(picture, 0, 0);
        return Array.from({{length: {shape[0]}}}, (_, r) => Array.from({{length: {shape[1]}}}, (_, c) =>
            Array.from(pen.getImageData(c, r, 1, 1).data))) }})()"""
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


def test_the_switch_changes_the_map_and_its_scale(scores: Shown) -> None:
    assert "share of pairs" in scores.browser.text(".tlhm-bar")
    scores.browser.run(
        "(() => { const s = document.querySelector('.tlhm select'); s.value = 'name_copying';"
        "s.dispatchEvent(new Event('change')) })()"
    )
    assert scores.hover(5, 5, SCORES.shape).startswith("L5H5 · name_copying\nlogit")
    bar = scores.browser.text(".tlhm-bar")
    assert "logit" in bar and "\n0.00\n" in bar
    scores.check_quiet()


def test_eight_panels_are_small_and_pin_together(browser: Browser, tmp_path: Path) -> None:
    maps = {f"function {n}": RANDOM.gamma(1, 0.001, (32, 32)) for n in range(8)}
    layers = [MapLayer(name, values, null=values / 2) for name, values in maps.items()]
    shown = Shown(browser, panels(layers, unit="importance"), tmp_path)
    assert shown.path.stat().st_size <= 140 * 1024
    assert browser.run("document.querySelectorAll('.tlhm-plot').length") == 8
    np.testing.assert_array_equal(values_on_page(browser, 7), maps["function 7"].astype(np.float32).ravel())
    assert shown.hover(31, 0, (32, 32), plot=5).startswith("L31H0 · function 5")
    browser.click(*shown.place(3, 4, (32, 32), plot=1))
    # Pinned in one panel, marked in all of them at the same place.
    assert browser.run("document.querySelectorAll('.tlhm-pin').length") == 8
    assert browser.run("new Set([...document.querySelectorAll('.tlhm-pin')].map((pin) => pin.style.cssText)).size") == 1
    assert "L3H4" in browser.text(".tlhm-pinned")
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


def test_layers_without_heads_say_what_they_are_and_are_stepped_over(browser: Browser, tmp_path: Path) -> None:
    values = np.full((5, 2), np.nan)
    values[[1, 3]] = [[0.1, 0.2], [0.3, 0.4]]
    layers = {"0": "linear attention", "2": "linear attention", "4": "<b>Mamba"}
    shown = Shown(browser, head_map(values, title="hybrid", empty=layers), tmp_path)
    shown.check_quiet()
    texts = "JSON.stringify([...document.querySelectorAll('.tlhm-empty')].map(row => row.textContent))"
    assert json.loads(browser.run(texts)) == list(layers.values())
    shown.focus()
    seen = [browser.text(".tlhm-live")[:4]]
    for key in ("ArrowUp", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowUp"):
        browser.key(key)
        seen.append(browser.text(".tlhm-live")[:4])
    assert seen == ["L1H0", "L1H0", "L1H1", "L3H1", "L3H1", "L1H1"]
    assert "missing" not in browser.text(".tlhm-bar")
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


def opened(browser: Browser, name: str, folder: Path, **options: Any) -> Shown:
    """One of the common figures, drawn."""
    figure = every_figure()[name]
    shown = Shown(browser, figure, folder, **options)
    if "circuits" in figure.needs:
        browser.wait("!!document.querySelector('.tlhm-circuits > div')?.childNodes.length")
    return shown


@pytest.mark.parametrize("name", every_figure())
def test_every_figure_opens_offline_without_a_word(browser: Browser, tmp_path: Path, name: str) -> None:
    shown = opened(browser, name, tmp_path)
    shown.check_quiet()
    assert browser.run("document.querySelector('.tlhm').getBoundingClientRect().height") > 60
    assert browser.run("[...document.querySelectorAll('.tlhm > .tlhm-alt')].every(alt => !alt.open)")


@pytest.mark.parametrize("name", every_figure())
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_figures_fit_a_phone_and_can_be_read(browser: Browser, tmp_path: Path, name: str, dark: bool) -> None:
    opened(browser, name, tmp_path, width=390, height=800, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    script = """(() => { const s = getComputedStyle(document.querySelector('.tlhm'));
        const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number); return .3 * r + .59 * g + .11 * b };
        return [light(s.color), light(s.backgroundColor)] })()"""
    text, ground = browser.run(script)
    assert (text - ground if dark else ground - text) > 150


@pytest.mark.parametrize(
    ("mark", "scheme"),
    [
        ('<body data-jp-theme-light="false">', "dark"),
        ('<body data-jp-theme-light="true">', "light"),
        ('<body class="vscode-dark">', "dark"),
        ('<body class="vscode-light">', "light"),
    ],
)
def test_notebook_themes_win_over_the_system(browser: Browser, tmp_path: Path, mark: str, scheme: str) -> None:
    path = tmp_path / "notebook.html"
    path.write_text(f"<!DOCTYPE html><html>{mark}{every_figure()['token_grid'].html}</body></html>", encoding="utf-8")
    browser.open(path, dark=scheme == "light")
    assert browser.run("getComputedStyle(document.querySelector('.tlhm')).colorScheme") == scheme


def points_on_page(browser: Browser, series: int) -> np.ndarray:
    script = f"(s => [Array.from(s.x), Array.from(s.y)])(document.querySelector('.tlhm').headmap.series[{series}])"
    return np.array(browser.run(script))


def test_a_curve_tells_its_values_and_bands(browser: Browser, tmp_path: Path) -> None:
    shown = opened(browser, "curve", tmp_path)
    chart = every_figure()["curve"].data
    for number, one in enumerate(chart.series):
        np.testing.assert_array_equal(points_on_page(browser, number), np.float32([one.x, one.y]))
    shown.focus(".tlhm-chart")
    assert browser.text(".tlhm-tip").splitlines()[:3] == ["relation heads", "heads ablated 0", "accuracy 0.9"]
    browser.key("ArrowRight")
    assert "heads ablated 1" in browser.text(".tlhm-live")
    browser.key("ArrowDown")
    tip = browser.text(".tlhm-tip").splitlines()
    assert tip[0] == "random heads" and tip[3] == "from 0.82 to 0.92"
    browser.key("Enter")
    assert "random heads" in browser.text(".tlhm-pinned")
    shown.check_quiet()


def test_a_point_of_a_cloud_can_be_found_and_clicked(browser: Browser, tmp_path: Path) -> None:
    shown = opened(browser, "scatter", tmp_path)
    one = every_figure()["scatter"].data.series[0]
    np.testing.assert_array_equal(points_on_page(browser, 0), np.float32([one.x, one.y]))
    best = int(np.argmax(one.x))
    # Where the value is between the limits of the axes.
    (left, right), (bottom, top) = every_figure()["scatter"].data.x_limits, every_figure()["scatter"].data.y_limits
    across, up = (one.x[best] - left) / (right - left), (one.y[best] - bottom) / (top - bottom)
    place = browser.run(
        f"(b => [b.left + {across} * b.width, b.bottom - {up} * b.height])"
        "(document.querySelector('.tlhm-chart').getBoundingClientRect())"
    )
    browser.hover(*place)
    assert browser.text(".tlhm-tip").startswith(one.labels[best])
    browser.click(*place)
    assert browser.text(".tlhm-pinned").startswith(one.labels[best])
    browser.run("document.querySelector('.tlhm input').focus()")
    browser.type("L23H4")
    browser.key("Enter")
    assert "France" in browser.text(".tlhm-pinned")
    shown.check_quiet()


def test_the_flowchart_joins_heads_and_tokens(browser: Browser, tmp_path: Path) -> None:
    opened(browser, "flow", tmp_path)
    texts = browser.run("[...document.querySelectorAll('.tlhm-flow text')].map(t => t.textContent)")
    assert texts[:8] == ["Head 0", "Head 1", "Head 2", "It", "I", "is", "am", "the"]
    curves = browser.run(
        "[...document.querySelectorAll('.tlhm-flow path')].map(p => p.getAttribute('d').split('M').length - 1)"
    )
    assert curves == [2, 3, 3]
    fills = browser.run("[...document.querySelectorAll('.tlhm-matrix rect')].map(c => c.getAttribute('fill'))")
    on, off = fills[0], fills[2]
    assert on != off
    np.testing.assert_array_equal([float(fill == on) for fill in fills], np.ravel(BLOCKS))
    boxes, rows = (
        browser.run(
            f"[...document.querySelectorAll('.tlhm-flow {which}')].map(r => r.getBoundingClientRect()).map("
            "b => b.top + b.height / 2)"
        )
        for which in ("> rect[rx]", ".tlhm-matrix rect:nth-child(5n + 1)")
    )
    np.testing.assert_allclose(boxes, rows, atol=1)
    box = "document.querySelectorAll('.tlhm-head rect')[1].getBoundingClientRect()"
    browser.hover(*browser.run(f"[{box}.left + 9, {box}.top + 9]"))
    shown = "[...document.querySelectorAll('.tlhm-flow path')].map(p => Number(getComputedStyle(p).opacity))"
    assert browser.run(shown) == [0.12, 1, 0.12], "the lines of one head stand out"


def test_a_worked_example_shows_its_numbers(browser: Browser, tmp_path: Path) -> None:
    opened(browser, "worked_example", tmp_path)
    cells = browser.run(
        "[...document.querySelectorAll('.tlhm-fit > :first-child [text-anchor=middle]')].map("
        "t => Number(t.textContent.replace('−', '-')))"
    )
    np.testing.assert_array_equal(cells, [*np.ravel(V), *np.ravel(A), 0.18, 0.11, 0.01])


def test_heads_of_an_attention_view_load_on_demand(browser: Browser, tmp_path: Path) -> None:
    n = 1024
    patterns = np.tril(RANDOM.random((n, 4, 4))).astype(np.float32)
    heads = [(layer, head) for layer in range(32) for head in range(32)]
    figure = attention_view(patterns, ["<s>", "</script>", "<img src=x onerror=window.broken=1>", "&amp;"], heads=heads)
    shown = Shown(browser, figure, tmp_path)
    browser.wait("document.querySelectorAll('.tlhm-circuits canvas').length")
    assert browser.run("document.querySelectorAll('.tlhm-circuits canvas').length") <= 9
    found = browser.run("Array.from(document.querySelector('.tlhm').headmap.patterns.slice(-16))")
    np.testing.assert_array_equal(found, patterns[-1].ravel())
    browser.run("document.querySelector('.tlhm input').focus()")
    browser.type("L31H31")
    assert browser.text(".tlhm-found") == "found"
    browser.wait("document.querySelector('.tlhm-circuits').innerText.includes('L31H31')")
    shown.check_quiet()


def test_dangerous_tokens_in_circuitsvis_views_are_text(browser: Browser, tmp_path: Path) -> None:
    views = {
        "groups": token_groups_view(DANGEROUS, [0] * len(DANGEROUS), names=[DANGEROUS[1]]),
        "tops": top_tokens_view({"L0H0": [(token, 1.0) for token in DANGEROUS], "L1H0": [("a", 1.0)]}),
    }
    for figure in views.values():
        shown = Shown(browser, figure, tmp_path)
        browser.wait("document.querySelectorAll('.tlhm-circuits > div > *').length")
        text = browser.text(".tlhm-circuits").replace("\u200b", "").replace("\xa0", " ")
        assert "<s>" in text and "<img src=x onerror=window.broken=1>" in text and "&amp;" in text
        assert browser.run("document.querySelectorAll('.tlhm img').length") == 0
        shown.check_quiet()


def test_one_page_holds_all_figures(browser: Browser, tmp_path: Path) -> None:
    path = save_page(tmp_path / "all.html", list(every_figure().values()), title="All")
    browser.open(path)
    browser.wait("document.querySelectorAll('.tlhm-circuits > div > *').length >= 4")
    assert browser.errors == []
    assert browser.requests == [path.resolve().as_uri()]
    drawn = browser.run("[...document.querySelectorAll('.tlhm-draw')].filter(d => d.childNodes.length).length")
    # A figure of several parts has a drawing for each.
    assert drawn == sum(figure.body.count('class="tlhm-draw"') for figure in every_figure().values() if figure.needs)


def test_the_colour_bar_stands_on_the_right_where_there_is_room(browser: Browser, tmp_path: Path) -> None:
    path = every_figure()["panels"].save(tmp_path / "panels.html")
    sides = (
        "['.tlhm-area', '.tlhm-strip'].map(s => [...document.querySelectorAll(s)].find(e => e.offsetParent)"
        ".getBoundingClientRect())"
        ".map(b => [b.left, b.top, b.right, b.bottom])"
    )
    tops = "[...document.querySelectorAll('.tlhm-plot')].map(p => Math.round(p.getBoundingClientRect().top))"
    browser.open(path, width=960)
    maps, bar = browser.run(sides)
    assert bar[0] >= maps[2] - 1 and bar[1] < maps[3], "beside the maps"
    assert bar[3] - bar[1] > bar[2] - bar[0], "upright"
    assert len(set(browser.run(tops))) == 2, "two rows of four"
    browser.open(path, width=390)
    maps, bar = browser.run(sides)
    assert bar[1] >= maps[3] - 1, "below them on a phone"


def test_without_scripts_the_text_alternative_is_open(browser: Browser, tmp_path: Path) -> None:
    body = every_figure()["head_map"].body
    path = tmp_path / "still.html"
    path.write_text(f"<!DOCTYPE html><meta charset=utf-8>{body}", encoding="utf-8")
    browser.open(path)
    assert "Highest" in browser.text(".tlhm-alt")


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_a_page_of_the_site_is_as_wide_as_the_window(browser: Browser, tmp_path: Path, width: int) -> None:
    """The theme lays out a sidebar beside the content; only a block of code may be wider, and scrolls by itself."""
    theme = "body { margin: 0 } .page, .main { display: flex } .main { flex: 1 } .side { width: 344px }"
    theme += ".content { padding: 0 3em; width: 46em } pre { overflow-x: auto }"
    theme += "@media (max-width: 63em) { .side { display: none } }"
    code = f"<pre>{'a line of code ' * 20}</pre>"
    content = f'<div class="main"><div class="content"><article>{code}</article></div></div>'
    page = tmp_path / "page.html"
    head = f'<meta name="viewport" content="width=device-width"><style>{theme}</style><style>{website.WIDER}</style>'
    page.write_text(f'<!DOCTYPE html>{head}<div class="page"><div class="side"></div>{content}</div>')
    browser.open(page, width=width)
    assert browser.run("document.documentElement.scrollWidth") <= width
