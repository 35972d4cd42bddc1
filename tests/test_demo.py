"""The tour, on a small model that knows three capitals: page, files, commands, and what is left out."""

import html
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from click.testing import CliRunner
from commands import CREATED, Run
from planted import hosted, knowing_source, quiet

from tl_headmaps import HeadIndex, ModelDescription, Result
from tl_headmaps.cli import demo
from tl_headmaps.cli.app import app
from tl_headmaps.core.errors import UsageError
from tl_headmaps.data.tasks import FEWEST_ITEMS

DANGEROUS = "</script><script>window.broken=1</script>"
CAPITALS = {"France": "Paris", "Germany": "Berlin", "Egypt": "Cairo"}
PLAIN = re.findall(r"\w+", f"{demo.SENTENCE} {demo.TEMPLATE} means no")
FILLING = [a + b for a in "bdfg" for b in "aeiou"]
WORDS = list(dict.fromkeys([*CAPITALS, *CAPITALS.values(), *PLAIN, *FILLING, DANGEROUS]))
TOKENS = ["<unk>", "-", "<bos>", "The", ",", ".", *(f"Ġ{word}" for word in WORDS)]
PATTERN = r"Ġ?</script><script>window\.broken=1</script>|Ġ?[A-Za-z]+|[-,.]"
KNOWING = HeadIndex(0, 1)
NAMES = [
    "ablation",
    "token_grid",
    "relation_scores",
    "head_names",
    "salient_operations",
    "validation",
    "attention_groups",
    "association_heads",
    "value_mixing",
    "component_map",
    "task_maps",
    "model",
]
RUNNING = ["ablation", *NAMES[5:-1]]
"""Results for which the model has to run."""


def tokenizer() -> Any:
    """Words of the tour, each one token behind a space; everything else is unknown."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "Ġ")
    made.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    made.decoder = decoders.Sequence([decoders.Replace("Ġ", " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<bos>", eos_token="<bos>", pad_token="<bos>"
    )


def knowing() -> Any:
    ids = {TOKENS.index(f"Ġ{source}"): TOKENS.index(f"Ġ{target}") for source, target in CAPITALS.items()}
    return knowing_source({KNOWING.head: ids}, n_layers=3, n_heads=8, n_vocab=len(TOKENS), max_position_embeddings=128)


@pytest.fixture(scope="module")
def small_model() -> Any:
    return hosted(knowing(), "llama", words=tokenizer())


@dataclass(frozen=True)
class Toured:
    """A finished tour."""

    folder: Path
    run: Run

    @property
    def page(self) -> str:
        return (self.folder / "index.html").read_text(encoding="utf-8")

    @property
    def text(self) -> str:
        """What the page says."""
        return html.unescape(re.sub(r"<[^>]*>", " ", re.sub(r"<(script|style)\b.*?</\1>", "", self.page, flags=re.S)))

    @property
    def commands(self) -> list[list[str]]:
        return [shlex.split(html.unescape(found)) for found in re.findall(r"Made by: (.*?)</div>", self.page)]

    @property
    def files(self) -> list[str]:
        return re.findall(r"Values: (\S+\.json)\.", self.page)


def tour_of(folder: Path, model: Any, *arguments: str) -> Toured:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "N_ITEMS", FEWEST_ITEMS)
        patch.setattr("tl_headmaps.load_model", lambda *_: model)
        done = CliRunner().invoke(app, ["demo", "--out", str(folder), *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Toured(folder, Run(done.exit_code, done.stdout, done.stderr))


@pytest.fixture(scope="module")
def toured(small_model: Any, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Toured]:
    yield tour_of(tmp_path_factory.mktemp("tour") / "new" / "demo", small_model, "--model", "some/name")


def test_chapters_are_told_in_order(toured: Toured) -> None:
    assert toured.run.code == 0, toured.run
    titles = [chapter.title for chapter in demo.CHAPTERS]
    shown = [html.unescape(title) for title in re.findall(r"<h2 id=.*?>(.*?)</h2>", toured.page)]
    listed = [html.unescape(title) for title in re.findall(r'<li><a href="#\d+">(.*?)</a>', toured.page)]
    assert shown == listed == ["The method", *titles]
    assert re.findall(r"^== (.*) ==$", toured.run.out, re.M) == titles


def test_progress_goes_to_stderr_and_the_results_to_stdout(toured: Toured) -> None:
    lines = toured.run.err.splitlines()
    total = len(demo.CHAPTERS)
    for number, chapter in enumerate(demo.CHAPTERS, 1):
        assert lines[2 * number - 2] == f"[{number}/{total}] {chapter.title}"
        assert re.fullmatch(rf"\[{number}/{total}\] done in \d+\.\d s", lines[2 * number - 1])
    assert len(lines) == 2 * total
    assert toured.run.out.splitlines()[-1].startswith(f"Open {toured.folder / 'index.html'} in a browser")
    for name in NAMES:
        assert str(Result.load(toured.folder / f"{name}.json")) in toured.run.out


def test_what_was_planted_is_found(toured: Toured) -> None:
    scores, table, curves = (Result.load(toured.folder / f"{name}.json") for name in _PLANTED)
    assert scores.top(1, demo.LEAD) == [(KNOWING, 1.0)]  # type: ignore[attr-defined, call-arg]
    assert scores.relations == ("country_to_capital",), "no pair of the others is single tokens"  # type: ignore[attr-defined]
    assert table.best() == list(CAPITALS.items())  # type: ignore[attr-defined]
    assert curves.curve.accuracy[:2].tolist() == [1.0, 0.0]  # type: ignore[attr-defined]


_PLANTED = ("relation_scores", "token_grid", "ablation")


def test_every_result_is_beside_the_page_and_loads(toured: Toured) -> None:
    assert toured.files == [f"{name}.json" for name in NAMES]
    assert {path.name for path in toured.folder.iterdir()} == {*toured.files, "index.html"}
    for name in toured.files:
        assert isinstance(Result.load(toured.folder / name), Result)


@pytest.mark.parametrize("name", ["token_grid", "value_mixing", "task_maps"])
def test_a_command_makes_the_result_it_stands_under(
    toured: Toured,
    run: Callable[..., Run],
    small_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
) -> None:
    asked = []
    monkeypatch.setattr("tl_headmaps.load_model", lambda *arguments: asked.append(arguments) or small_model)
    program, *arguments = toured.commands[NAMES.index(name)]
    assert program == "tl-headmaps"
    assert arguments[-2:] == ["--out", f"{name}.html"]
    picture, values = tmp_path / "result.html", tmp_path / "result.json"
    done = run(*arguments[:-1], str(picture), "--out", str(values))
    assert done.code == 0, done
    assert asked == [("some/name", None)]
    kept = (toured.folder / f"{name}.json").read_bytes()
    assert CREATED.sub(b"", values.read_bytes()) == CREATED.sub(b"", kept)
    drawn = re.search(r'<body class="tlhm-page">\n(.*?)</div>\n<style>', picture.read_text(encoding="utf-8"), re.S)
    assert drawn is not None and drawn[1] in toured.page, "the figure on the page is the one the command draws"


def test_the_same_model_gives_the_same_page(toured: Toured, small_model: Any, tmp_path: Path) -> None:
    again = tour_of(tmp_path, small_model, "--model", "some/name")
    assert again.page == toured.page


def test_the_page_needs_nothing_else(toured: Toured) -> None:
    assert (toured.folder / "index.html").stat().st_size < 5 * 1024**2
    assert not re.search(r"(src|href)=\"?(https?:)?//", toured.page)
    assert "default-src 'none'" in toured.page
    assert toured.page.count("<style>") == 1 and toured.page.count("'use strict'") == 1, "assets stand there once"


def test_tokens_are_shown_as_text(toured: Toured) -> None:
    assert DANGEROUS not in toured.page
    assert html.escape(DANGEROUS) in toured.page


class TestLeftOut:
    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        folder = tmp_path / "knowing"
        with quiet():
            knowing().save_pretrained(folder)
            tokenizer().save_pretrained(folder)
        return folder

    def test_a_checkpoint_cannot_run_and_the_tour_goes_on(self, checkpoint: Path, tmp_path: Path) -> None:
        done = tour_of(tmp_path / "demo", None, "--checkpoint", str(checkpoint))
        assert done.run.code == 0, done.run
        assert done.files == [f"{name}.json" for name in NAMES if name not in RUNNING]
        assert {path.name for path in done.folder.iterdir()} == {*done.files, "index.html"}
        assert len(re.findall(r"<p>Left out for this model: ", done.page)) == len(RUNNING)
        assert done.run.out.count("Left out for this model: ") == len(RUNNING)
        assert "HeadWeights cannot run" in done.text and "HeadWeights cannot run" in done.run.out
        assert all(command[-4:-2] == ["--checkpoint", str(checkpoint)] for command in done.commands)

    def test_a_step_without_what_it_looks_at_says_why(self, small_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tl_headmaps.relation_scores", refusing)
        tour = demo.Tour(small_model)
        assert str(tour.outcome(demo.grid)) == "Not <b>today</b>."
        assert tour.outcome(demo.operations) is tour.outcome(demo.relations)

    def test_words_that_are_not_tokens(self, small_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(demo, "TARGETS", ("Atlantis",))
        assert "'Atlantis'" in str(demo.Tour(small_model).outcome(demo.grid))


def refusing(*_: Any, **__: Any) -> Any:
    raise UsageError("Not <b>today</b>.")


def describing(tour: demo.Tour) -> Any:
    return ["model"]


class TestFolder:
    @pytest.fixture
    def chapters(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        def choose(**steps: Any) -> None:
            chosen = tuple(demo.Chapter(f"Chapter {name}", "About.", {name: step}) for name, step in steps.items())
            monkeypatch.setattr(demo, "CHAPTERS", chosen)

        return choose

    def test_a_refusal_is_a_sentence_on_the_page(self, chapters: Any, small_model: Any, tmp_path: Path) -> None:
        chapters(token_grid=refusing, model=describing)
        done = tour_of(tmp_path, small_model)
        assert done.run.code == 0
        assert "<p>Left out for this model: token grid. Not &lt;b&gt;today&lt;/b&gt;.</p>" in done.page
        assert "Left out for this model: token grid. Not <b>today</b>." in done.run.out

    def test_nothing_at_all_is_a_failure(
        self, chapters: Any, run: Callable[..., Run], small_model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        chapters(one=refusing, other=refusing)
        monkeypatch.setattr("tl_headmaps.load_model", lambda *_: small_model)
        done = run("demo", "--out", str(tmp_path / "demo"))
        assert done.code == 1
        assert done.err.splitlines()[-1].startswith("tl-headmaps: No step of the tour could be done for tiny-llama")
        assert not (tmp_path / "demo").exists()

    def test_a_broken_tour_leaves_the_old_one_alone(self, chapters: Any, small_model: Any, tmp_path: Path) -> None:
        chapters(model=describing)
        before = {path.name: path.read_bytes() for path in tour_of(tmp_path, small_model).folder.iterdir()}

        def breaking(tour: demo.Tour) -> Any:
            raise RuntimeError("not foreseen")

        chapters(model=describing, broken=breaking)
        with pytest.raises(RuntimeError, match="not foreseen"):
            tour_of(tmp_path, small_model)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def test_a_result_too_large_to_draw_is_kept(
        self, chapters: Any, small_model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def refuse(result: Result) -> None:
            raise UsageError("There are too many tokens to draw.")

        chapters(model=describing)
        monkeypatch.setattr(ModelDescription, "figure", refuse)
        done = tour_of(tmp_path, small_model)
        assert done.run.code == 0 and (tmp_path / "model.json").exists()
        assert "Its picture is left out: model. There are too many tokens to draw." in done.text

    @pytest.mark.usefixtures("never_loaded")
    def test_a_folder_that_cannot_be_written_is_seen_before_the_model_is_loaded(
        self, run: Callable[..., Run], tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("not a folder")
        run("demo", "--out", str(tmp_path / "file")).assert_refused(2, "is a file", "name of a folder")
        run("demo", "--out", str(tmp_path / "file" / "demo")).assert_refused(1, "Cannot write")


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(toured: Toured, browser: Browser, width: int, dark: bool) -> None:
    path = toured.folder / "index.html"
    browser.open(path, width=width, dark=dark)
    assert browser.errors == []
    assert browser.requests == [path.resolve().as_uri()]
    assert browser.run("window.broken") is None
    assert browser.run("document.documentElement.scrollWidth") <= width
    undrawn = """[...document.querySelectorAll('.tlhm[data-kind]')].filter(f => f.querySelector('script') &&
        !f.querySelector('.tlhm-draw').childNodes.length).map(f => f.getAttribute('aria-label'))"""
    assert browser.run(undrawn) == []
    assert browser.run("document.querySelectorAll('.tlhm-page > .tlhm').length") == 1 + len(NAMES), (
        "and the method first"
    )
    led = "[...document.querySelectorAll('nav a')].map(a => document.getElementById(a.hash.slice(1)).tagName)"
    assert browser.run(led) == ["H2"] * (1 + len(demo.CHAPTERS))
    ids = browser.run("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    light = """(c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number); return .3 * r + .59 * g + .11 * b })"""
    for part in ("h1", "h2", ".tlhm-page > p", "nav a"):
        text = browser.run(f"{light}(getComputedStyle(document.querySelector('{part}')).color)")
        assert text > 130 if dark else text < 110, part
