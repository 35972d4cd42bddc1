"""The tour, on a small model that knows three capitals: page, files, commands, and what is left out."""

import html
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from browser import Browser
from commands import CREATED, Run
from planted import hosted, knowing_source, quiet

from tl_headmaps import HeadIndex, ModelDescription, Result, describe_model
from tl_headmaps.analyses.tour import sections as tour_sections
from tl_headmaps.analyses.tour.tour import Finding, Section, Tour
from tl_headmaps.cli.app import app
from tl_headmaps.core.errors import UsageError
from tl_headmaps.data.tasks import FEWEST_ITEMS
from tl_headmaps.renderers import head_map
from tl_headmaps.renderers.story import Chapter, Part, save_story, story_page

DANGEROUS = "</script><script>window.broken=1</script>"
CAPITALS = {"France": "Paris", "Germany": "Berlin", "Egypt": "Cairo"}
PLAIN = re.findall(r"\w+", f"{tour_sections.SENTENCE} {tour_sections.TEMPLATE} means no")
FILLING = [a + b for a in "bdfg" for b in "aeiou"]
WORDS = list(dict.fromkeys([*CAPITALS, *CAPITALS.values(), *PLAIN, *FILLING, DANGEROUS]))
TOKENS = ["<unk>", "-", "<bos>", "The", ",", ".", *(f"Ġ{word}" for word in WORDS)]
PATTERN = r"Ġ?</script><script>window\.broken=1</script>|Ġ?[A-Za-z]+|[-,.]"
KNOWING = HeadIndex(0, 1)
NAMES = [
    "model",
    "relation_scores",
    "token_grid",
    "head_names",
    "salient_operations",
    "validation",
    "ablation",
    "attention_groups",
    "association_heads",
    "value_mixing",
    "component_map",
    "task_maps",
]
RUNNING = NAMES[5:]
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
        """The prose of the page."""
        return html.unescape(re.sub(r"<[^>]*>", " ", re.sub(r"<(script|style)\b.*?</\1>", "", self.page, flags=re.S)))

    @property
    def commands(self) -> list[list[str]]:
        marked = re.findall(r"<code>(.*?)</code>", self.page)
        return [shlex.split(html.unescape(re.sub(r"</?span>", "", found))) for found in marked]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(re.findall(r'<a href="([^"#]+)"', self.page)))


def tour_of(folder: Path, model: Any, *arguments: str) -> Toured:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tour_sections, "N_ITEMS", FEWEST_ITEMS)
        patch.setattr("tl_headmaps.load_model", lambda *_: model)
        done = typer.testing.CliRunner().invoke(app, ["demo", "--out", str(folder), *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Toured(folder, Run(done.exit_code, done.stdout, done.stderr))


@pytest.fixture(scope="module")
def toured(small_model: Any, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Toured]:
    yield tour_of(tmp_path_factory.mktemp("tour") / "new" / "demo", small_model, "--model", "some/name")


def test_sections_are_told_in_order(toured: Toured) -> None:
    assert toured.run.code == 0, toured.run
    titles = [section.title for section in tour_sections.SECTIONS]
    shown = [html.unescape(title) for title in re.findall(r"<h2 id=.*?</span> (.*?)</h2>", toured.page)]
    listed = [html.unescape(title) for title in re.findall(r'<li><a href="#\d+">(.*?)</a>', toured.page)]
    assert shown == listed == titles
    assert re.findall(r"^== (.*) ==$", toured.run.out, re.M) == titles


def test_progress_goes_to_stderr_and_the_story_to_stdout(toured: Toured) -> None:
    lines = toured.run.err.splitlines()
    total = len(tour_sections.SECTIONS)
    for number, section in enumerate(tour_sections.SECTIONS, 1):
        assert lines[2 * number - 2] == f"[{number}/{total}] {section.title}"
        assert re.fullmatch(rf"\[{number}/{total}\] done in \d+\.\d s", lines[2 * number - 1])
    assert len(lines) == 2 * total
    assert toured.run.out.splitlines()[-1].startswith(f"Open {toured.folder / 'index.html'} in a browser")
    assert len(toured.run.out.splitlines()) < 100


def test_what_is_said_is_what_was_planted(toured: Toured) -> None:
    assert f"{KNOWING} scores highest on country_to_capital: for 100% of 3 pairs" in toured.text
    assert "France → Paris (rank 1), Germany → Berlin (rank 1), Egypt → Cairo (rank 1)" in toured.text
    assert "Left out, because no pair is single tokens of this model: country_to_language" in toured.text
    assert "The model answers 100% of 3 prompts 'The capital of <X> is' right." in toured.text
    assert "0% are left; 1 is enough to lose half." in toured.text
    assert "accuracy 100% → 0% without them" in toured.text


def test_numbers_on_the_page_are_those_of_the_files(toured: Toured) -> None:
    validation = Result.load(toured.folder / "validation.json")
    assert f"within layers of {validation.agreement['heads_without'][0]:.2f} (95%" in toured.text  # type: ignore[attr-defined]
    groups = Result.load(toured.folder / "attention_groups.json")
    assert f"modularity is {groups.combination['modularity']:.2f}, in draws" in toured.text  # type: ignore[attr-defined]
    (layer, component), share = Result.load(toured.folder / "component_map.json").top(1)[0]  # type: ignore[attr-defined]
    assert f"{component} of layer {layer} ({share:.1%})" in toured.text


def test_every_result_is_beside_the_page_and_loads(toured: Toured) -> None:
    assert toured.files == [f"{name}.json" for name in NAMES]
    assert {path.name for path in toured.folder.iterdir()} == {*toured.files, "index.html"}
    for name in toured.files:
        assert f">{name}</a>" in toured.page
        assert isinstance(Result.load(toured.folder / name), Result)


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_a_command_makes_the_result_it_stands_under(
    toured: Toured,
    run: Callable[..., Run],
    small_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: int,
) -> None:
    asked = []
    monkeypatch.setattr("tl_headmaps.load_model", lambda *arguments: asked.append(arguments) or small_model)
    program, *arguments = toured.commands[number]
    assert program == "tl-headmaps"
    assert arguments[-2:] == ["--out", f"{NAMES[number]}.html"]
    picture, values = tmp_path / "result.html", tmp_path / "result.json"
    done = run(*arguments[:-1], str(picture), "--out", str(values))
    assert done.code == 0, done
    assert asked == [("some/name", None)]
    kept = (toured.folder / f"{NAMES[number]}.json").read_bytes()
    assert CREATED.sub(b"", values.read_bytes()) == CREATED.sub(b"", kept)
    figure = Result.load(values).figure()
    assert figure.body in toured.page, "the figure on the page is the one the command draws"  # type: ignore[attr-defined]


def test_the_same_model_gives_the_same_page(toured: Toured, small_model: Any, tmp_path: Path) -> None:
    again = tour_of(tmp_path, small_model, "--model", "some/name")
    assert again.page == toured.page


def test_the_page_needs_nothing_else(toured: Toured) -> None:
    assert (toured.folder / "index.html").stat().st_size < 5 * 1024**2
    assert not re.search(r"(src|href)=\"?(https?:)?//", toured.page)
    assert "default-src 'none'" in toured.page
    assert toured.page.count("<style>") == 2 and toured.page.count("'use strict'") == 1, "assets stand there once"


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
        assert "France → Paris (rank 1)" in done.text
        sentences = re.findall(r'<p class="story-text story-refused">(.*?)</p>', done.page)
        assert len(sentences) == len(RUNNING)
        assert done.run.out.count("Left out: ") == len(RUNNING)
        assert "HeadWeights cannot run" in done.text and "HeadWeights cannot run" in done.run.out
        assert all(command[-4:-2] == ["--checkpoint", str(checkpoint)] for command in done.commands)

    def test_a_step_without_what_it_looks_at_says_so(self, small_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        tour = Tour(small_model)
        (outcome,) = tour.run(Section("Grid", "", (tour_sections.grid,))).outcomes
        assert not isinstance(outcome, Finding)
        assert outcome.why == "This step looks at relation scores, which could not be made for this model."

    def test_words_that_are_no_tokens(self, small_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tour_sections, "SOURCES", ("Atlantis",))
        tour = Tour(small_model)
        report = tour.run(Section("Both", "", (tour_sections.relations, tour_sections.grid)))
        assert isinstance(report.outcomes[0], Finding)
        assert "'Atlantis'" in report.outcomes[1].why  # type: ignore[union-attr]


def refusing(tour: Tour) -> Finding:
    raise UsageError("Not <b>today</b>.")


def describing(tour: Tour) -> Finding:
    return Finding("model", describe_model(tour.weights), ("model",), "It is there.")


class TestFolder:
    @pytest.fixture
    def sections(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        def choose(*steps: Any) -> None:
            chosen = tuple(Section(f"Section {number}", "About.", (step,)) for number, step in enumerate(steps))
            monkeypatch.setattr(tour_sections, "SECTIONS", chosen)

        return choose

    def test_a_refusal_is_a_sentence_on_the_page(self, sections: Any, small_model: Any, tmp_path: Path) -> None:
        sections(refusing, describing)
        done = tour_of(tmp_path, small_model)
        assert done.run.code == 0
        assert "Left out for this model. Not &lt;b&gt;today&lt;/b&gt;." in done.page
        assert "Left out: Not <b>today</b>." in done.run.out

    def test_nothing_at_all_is_a_failure(
        self, sections: Any, run: Callable[..., Run], small_model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        sections(refusing, refusing)
        monkeypatch.setattr("tl_headmaps.load_model", lambda *_: small_model)
        done = run("demo", "--out", str(tmp_path / "demo"))
        assert done.code == 1
        assert done.err.splitlines()[-1].startswith("tl-headmaps: No section of the tour could be done for tiny-llama")
        assert not (tmp_path / "demo").exists()

    def test_a_broken_tour_leaves_the_old_one_alone(self, sections: Any, small_model: Any, tmp_path: Path) -> None:
        sections(describing)
        before = {path.name: path.read_bytes() for path in tour_of(tmp_path, small_model).folder.iterdir()}

        def breaking(tour: Tour) -> Finding:
            raise RuntimeError("not foreseen")

        sections(describing, breaking)
        with pytest.raises(RuntimeError, match="not foreseen"):
            tour_of(tmp_path, small_model)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def test_a_result_too_large_to_draw_is_kept(
        self, sections: Any, small_model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def refuse(result: Result) -> None:
            raise UsageError("There are too many tokens to draw.")

        sections(describing)
        monkeypatch.setattr(ModelDescription, "figure", refuse)
        done = tour_of(tmp_path, small_model)
        assert done.run.code == 0 and done.files == ["model.json"]
        assert "It is there. Its picture is left out. There are too many tokens to draw." in done.text

    @pytest.mark.usefixtures("never_loaded")
    def test_a_folder_that_cannot_be_written_is_seen_before_the_model_is_loaded(
        self, run: Callable[..., Run], tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("not a folder")
        run("demo", "--out", str(tmp_path / "file")).assert_refused(2, "is a file", "name of a folder")
        run("demo", "--out", str(tmp_path / "file" / "demo")).assert_refused(1, "Cannot write to")


class TestStory:
    def test_every_text_is_escaped(self) -> None:
        figure = head_map([[0.5]], title=DANGEROUS)
        part = Part(DANGEROUS, figure, DANGEROUS, f'"{DANGEROUS}.json')
        page = story_page(DANGEROUS, DANGEROUS, [Chapter(DANGEROUS, DANGEROUS, [part], DANGEROUS)], [DANGEROUS])
        assert DANGEROUS not in page
        assert f'"{DANGEROUS[0]}' not in page

    def test_a_page_is_named_like_one(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="does not name a page"):
            save_story(tmp_path / "story.txt", "Title", "Opening.", [])


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
    assert browser.run("document.querySelectorAll('.story-figure > .tlhm').length") == len(NAMES)
    wider = """[...document.querySelectorAll('.story-text, .story-figure, .story-figure > *')].filter(e =>
        e.getBoundingClientRect().right > innerWidth + 1).length"""
    assert browser.run(wider) == 0
    light = """(c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number); return .3 * r + .59 * g + .11 * b })"""
    for part in (".story-text p", ".story-figure code", ".tlhm-page nav span", ".story-finding p"):
        text = browser.run(f"{light}(getComputedStyle(document.querySelector('{part}')).color)")
        assert text > 150 if dark else text < 110, part


@pytest.mark.browser
def test_the_contents_lead_to_the_sections(toured: Toured, browser: Browser) -> None:
    browser.open(toured.folder / "index.html")
    led = "[...document.querySelectorAll('nav a')].map(a => document.getElementById(a.hash.slice(1)).tagName)"
    assert browser.run(led) == ["SECTION"] * len(tour_sections.SECTIONS)
    browser.key("Tab")
    assert browser.run("document.activeElement.className") == "story-skip"
    ids = browser.run("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.model
def test_the_head_that_knows_capitals(default_weights: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cheap part of the real tour: three sections, one relation."""
    monkeypatch.setattr(tour_sections, "RELATIONS", (tour_sections.LEAD,))
    monkeypatch.setattr(tour_sections, "SECTIONS", tour_sections.SECTIONS[:3])
    done = tour_of(tmp_path, default_weights)
    assert done.run.code == 0, done.run
    assert "L23H4 scores highest on country_to_capital: for 76% of 42 pairs" in done.text
    assert "France → Paris (rank 3), Germany → Berlin (rank 9), Egypt → Cairo (rank 7)" in done.text
    assert done.commands[2][:4] == ["tl-headmaps", "grid", "--head", "L23H4"]
