"""The tour, on a small model that knows three capitals: page, files, commands, and what is left out."""

import html
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Browser
from click.testing import CliRunner
from commands import CREATED, Run
from planted import hosted, knowing_source, quiet

from tl_headmaps import HeadIndex, ModelDescription, Result, describe_model
from tl_headmaps.analyses.tour import sections as tour_sections
from tl_headmaps.analyses.tour.opening import opening
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
        done = CliRunner().invoke(app, ["demo", "--out", str(folder), *arguments])
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
    assert "accuracy 100% → 0% without" in toured.text


def test_numbers_on_the_page_are_those_of_the_files(toured: Toured) -> None:
    validation = Result.load(toured.folder / "validation.json")
    assert f"within layers of {validation.agreement['heads_without'][0]:.2f} (95%" in toured.text  # type: ignore[attr-defined]
    groups = Result.load(toured.folder / "attention_groups.json")
    n = len(groups.formers())  # type: ignore[attr-defined]
    assert f"{n or 'none'} of 24 heads bind{'s' if n < 2 else ''} tokens beyond distance" in toured.text
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
    drawn = re.search(r'<body class="tlhm-page">\n(.*?)\n<style>', picture.read_text(encoding="utf-8"), re.S)
    assert drawn is not None and drawn[1] in toured.page, "the figure on the page is the one the command draws"


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


class TestOpening:
    """What the page begins with is made from results, whatever they say."""

    @pytest.fixture
    def tour(self, toured: Toured, small_model: Any) -> Tour:
        made = Tour(small_model)
        for step, name in ((tour_sections.relations, "relation_scores"), (tour_sections.ablation, "ablation")):
            made.outcomes[step] = Finding(name, Result.load(toured.folder / f"{name}.json"), (), "")
        # Three pairs are too few to be sure of; here it is.
        self.change(made, tour_sections.ablation, n_verdict=1)
        none = torch.ones_like(made.found(tour_sections.relations).q_value)
        none[0, KNOWING.layer, KNOWING.head] = 0
        self.change(made, tour_sections.relations, q_value=none, neighbour_p_value=none)
        return made

    def change(self, tour: Tour, step: Any, **changes: Any) -> None:
        finding = tour.outcomes[step]
        assert isinstance(finding, Finding)
        tour.outcomes[step] = replace(finding, result=replace(finding.result, **changes))  # type: ignore[type-var]

    def said(self, tour: Tour, preset: str = "folded") -> str:
        finding = tour.outcomes.get(tour_sections.relations)
        if isinstance(finding, Finding):
            provenance = finding.result.provenance
            options = {**provenance.options, "preset": preset}
            self.change(tour, tour_sections.relations, provenance=replace(provenance, options=options))
        return " ".join(opening(tour))

    def test_the_page_begins_with_it(self, toured: Toured) -> None:
        lead = re.search(r'<header><h1>.*?</h1><p class="story-text story-lead">(.*?)</p>', toured.page)
        assert lead is not None
        assert html.unescape(lead[1]).endswith(
            "When the model merely reads the name of a country, none of its 24 heads would already write the capital."
        )
        assert html.unescape(lead[1]) in " ".join(toured.run.out.split())
        assert toured.page.index("story-lead") < toured.page.index('data-kind="sketch"') < toured.page.index("<nav")

    def test_heads_that_are_needed(self, tour: Tour) -> None:
        assert self.said(tour).startswith(
            "From the weights alone, 1 of 24 heads was pointed out as knowing the capitals of countries. Without it "
            "the capitals that the model gets right fall from 100% to 0%; without one random head of the same layers "
            "they stay at 100%"
        )

    def test_weights_alone_are_not_claimed_of_heads_that_met_words(self, tour: Tour) -> None:
        said = self.said(tour, "context")
        assert said.startswith(
            "When the model merely reads the name of a country, 1 of its 24 heads would already write the capital."
        )
        assert "weights alone" not in said

    def test_heads_that_are_not_needed(self, tour: Tour) -> None:
        curves = tour.found(tour_sections.ablation)
        flat = replace(curves.curve, accuracy=torch.ones_like(curves.curve.accuracy))
        verdict = None if curves.verdict is None else replace(curves.verdict, p_value=0.6)
        self.change(tour, tour_sections.ablation, curve=flat, verdict=verdict)
        said = self.said(tour)
        assert "The model can do without it: it gets 100% of the capitals right instead of 100%; without" in said
        assert verdict is None or "; chance could do as much (p = 0.60)." in said

    def test_random_heads_that_are_as_bad(self, tour: Tour) -> None:
        curves = tour.found(tour_sections.ablation)
        self.change(tour, tour_sections.ablation, random_curves=(curves.curve,))
        assert "; without one random head of the same layers 0% are left" in self.said(tour)

    def test_no_heads(self, tour: Tour) -> None:
        self.change(tour, tour_sections.ablation, n_verdict=0)
        assert self.said(tour) == (
            "From the weights alone, none of 24 heads was pointed out as knowing the capitals of countries."
        )

    def test_not_testable(self, tour: Tour) -> None:
        self.change(tour, tour_sections.ablation, status="not testable")
        assert self.said(tour).endswith("it gets 100% of the capitals right, too few to lose.")

    def test_a_model_that_cannot_run(self, tour: Tour) -> None:
        del tour.outcomes[tour_sections.ablation]
        assert self.said(tour).endswith("could not be tested here; the first section says why.")

    def test_no_scores(self, small_model: Any) -> None:
        assert "could not be read from this model" in self.said(Tour(small_model))

    def test_a_head_of_which_three_things_are_said(self, toured: Toured, small_model: Any) -> None:
        sentence = re.search(rf"Of {KNOWING} three sections say three things: (.*?)\. They ask different", toured.text)
        scores, names, maps = (Result.load(toured.folder / f"{name}.json") for name in _THREE)  # type: ignore[misc]
        row = maps.importance[maps.functions.index("knowledge_recall")]  # type: ignore[attr-defined]
        place = 1 + int((row > row[KNOWING.layer, KNOWING.head]).sum())
        entry = names.name(KNOWING)  # type: ignore[attr-defined]
        named = "has no name" if entry.name == "unclear" else f"is named {entry.name} ({entry.score:.0%})"
        assert sentence is not None
        assert sentence[1] == (
            f"it scores {float(scores.promote[0, KNOWING.layer, KNOWING.head]):.2f} on country_to_capital, it {named}, "  # type: ignore[attr-defined]
            f"and here it is number {place} of 24 for Knowledge Recall"
        )
        tour = Tour(small_model)
        for step, name, result in zip(
            (tour_sections.relations, tour_sections.names), _THREE, (scores, names), strict=False
        ):
            tour.outcomes[step] = Finding(name, result, (), "")
        agreeing = replace(maps, standing_out=tuple((KNOWING,) for _ in maps.functions))  # type: ignore[type-var, attr-defined]
        assert tour_sections.disagreement(tour, agreeing) == "", "a head that stands out there, too"


_THREE = ("relation_scores", "head_names", "task_maps")


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
        monkeypatch.setattr(tour_sections, "relation_scores", refusing)
        tour = Tour(small_model)
        (outcome,) = tour.run(Section("Grid", "", (tour_sections.grid,))).outcomes
        assert not isinstance(outcome, Finding)
        assert outcome.why == "This step looks at that of relations, which could not be done for this model."

    def test_words_that_are_no_tokens(self, small_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tour_sections, "TARGETS", ("Atlantis",))
        tour = Tour(small_model)
        report = tour.run(Section("Both", "", (tour_sections.relations, tour_sections.grid)))
        assert isinstance(report.outcomes[0], Finding)
        assert "'Atlantis'" in report.outcomes[1].why  # type: ignore[union-attr]


def refusing(*_: Any) -> Finding:
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
        run("demo", "--out", str(tmp_path / "file" / "demo")).assert_refused(1, "Cannot write")


class TestStory:
    def test_a_command_breaks_between_names_and_options_only(self) -> None:
        command = "tl-headmaps ablate name --template 'The capital of <X> is' --max-heads 8 --exact"
        page = story_page("T", "O", [Chapter("C", "", [Part("Says.", None, command, "x.json")])])
        groups = re.findall(r"<span>(.*?)</span>", re.search(r"<code>(.*?)</code>", page)[1])  # type: ignore[index]
        assert list(map(html.unescape, groups)) == [
            *("tl-headmaps", "ablate", "name"),
            "--template 'The capital of <X> is'",
            "--max-heads 8",
            "--exact",
        ]

    def test_numbers_have_minus_signs_and_ranges_hyphens(self) -> None:
        page = story_page("T", "O", [Chapter("C", "", [Part("From -0.09 (-3) to 20-60%, L2-norm, --k -.5.")])])
        assert "From −0.09 (−3) to 20-60%, L2-norm, --k −.5." in page

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
    assert browser.run("document.querySelectorAll('.story-figure > .tlhm').length") == 1 + len(NAMES), (
        "and the method first"
    )
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
    """A cheap part of the real tour: three steps, one relation."""
    monkeypatch.setattr(tour_sections, "RELATIONS", (tour_sections.LEAD,))
    steps = (tour_sections.grid, tour_sections.relations, tour_sections.operations)
    monkeypatch.setattr(tour_sections, "SECTIONS", (Section("Capitals", "", steps),))
    done = tour_of(tmp_path, default_weights)
    assert done.run.code == 0, done.run
    assert "L23H4 scores highest on country_to_capital: for " in done.text
    assert re.search(
        r"France → Paris \(rank \d+\), Germany → Berlin \(rank \d+\), Egypt → Cairo \(rank \d+\)", done.text
    )
    assert done.commands[0][:4] == ["tl-headmaps", "grid", "--head", "L23H4"]
    n = len(Result.load(tmp_path / "relation_scores.json").implements()[tour_sections.LEAD])  # type: ignore[attr-defined]
    assert f"{n} of its 270 heads would already write the capital." in done.text
    assert "A: a predefined relation, country to capital" in done.text and "49,152 × 49,152" in done.text
