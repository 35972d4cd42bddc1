"""The tour: chapters of questions to one model, each answered by a command, as one page with the results beside it.

A step is a function that says which command is run; what is said about the result is what it says itself. A new one is
such a function and its place in :data:`CHAPTERS`.
"""

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

import tl_headmaps as tlhm  # names are loaded when they are used

from ..core.errors import HeadMapsError, UnsupportedModelError, UsageError
from .build import CHECKPOINT, DEVICE, MODEL, Run, open_model
from .commands import COMMANDS
from .output import check_folder, say

if TYPE_CHECKING:
    from ..renderers.figure import Figure

PAGE = "index.html"

RELATIONS = ("country_to_capital", "country_to_language", "name_copying", "past_tense", "comparative", "antonym")
LEAD = RELATIONS[0]
"""The relation the tour follows from what is read of heads to what the model answers."""

SOURCES, TARGETS = ("France", "Germany", "Egypt"), ("Cairo", "Paris", "Berlin")
TEMPLATE = "The capital of <X> is"
SENTENCE = "The capital of France is Paris, and the capital of Germany is Berlin."
QUERY, KEY = "is#2", "Germany"
"""Where the second capital is about to be said, and what has to be known there."""

# What three minutes allow.
N_ABLATED = 8
MAX_TOKENS = 2048
N_ITEMS = 36

Step: TypeAlias = Callable[["Tour"], list[str]]
"""What is asked: the arguments of ``tl-headmaps``, without the choice of a model."""


class _Quiet(Run):
    """A command whose result is kept and not shown."""

    def show(self, result: Any, outputs: list[Path] | None = None, **drawn: Any) -> None:
        self.shown = result


class Tour:
    """A model and what was made of it so far; steps may look at each other, and each is done once."""

    def __init__(self, model: Any) -> None:
        self.model, self.weights = model, tlhm.HeadWeights.of(model)
        self.outcomes: dict[Step, tuple[tlhm.Result, list[str]] | HeadMapsError] = {}

    def outcome(self, step: Step) -> "tuple[tlhm.Result, list[str]] | HeadMapsError":
        """The result of a step with its arguments, or why it cannot be done for this model."""
        if step not in self.outcomes:
            try:
                arguments = step(self)
                self.outcomes[step] = self._made_by(*arguments), arguments
            except HeadMapsError as error:
                self.outcomes[step] = error
        return self.outcomes[step]

    def _made_by(self, name: str, *arguments: str) -> Any:
        command = COMMANDS[name]
        run = _Quiet(command, command.built(name).make_context(name, list(arguments)).params)
        run.model = self.model
        command.carry_out(run)
        return run.shown

    def result(self, step: Step) -> Any:
        """The result of a step; what kept it from being done is raised again."""
        outcome = self.outcome(step)
        if isinstance(outcome, HeadMapsError):
            raise outcome
        return outcome[0]

    @property
    def head(self) -> str:
        """The head that scores highest on the relation the tour follows."""
        return str(self.result(relations).top(1, LEAD)[0][0])


def grid(tour: Tour) -> list[str]:
    """The best head at work."""
    words = ["--sources", ",".join(SOURCES), "--targets", ",".join(TARGETS)]
    return ["grid", "--head", tour.head, *words, "--relation", LEAD]


def relations(tour: Tour) -> list[str]:
    """Scores on those relations that the model's tokenizer can write; on all, for the error, if it can write none."""
    from ..data.relations import kept_pairs, resolve

    tokenizer = tour.weights.tokenizer
    named = [name for name in RELATIONS if tokenizer is None or kept_pairs(resolve(name), tokenizer)]
    return ["relations", *(named or RELATIONS)]


def operations(tour: Tour) -> list[str]:
    """What the best head does when nobody says what to look for."""
    return ["salient", "--heads", tour.head, "--vocabulary", "words"]


def association(_tour: Tour) -> list[str]:
    """Which heads bring two tokens together?"""
    return ["association", "--text", SENTENCE, "--query", QUERY, "--key", KEY]


def mixing(tour: Tour) -> list[str]:
    """The arithmetic of the head that brings them closest."""
    head = tour.result(association).top(1)[0][0]
    return ["mixing", "--text", SENTENCE, "--head", str(head), "--query", QUERY, "--key", KEY]


@dataclass(frozen=True)
class Chapter:
    """Steps that belong together, by the names of their files; ``about`` holds for every model."""

    title: str
    about: str
    steps: dict[str, Step]


CHAPTERS = (
    Chapter(
        "Which heads know the capitals, and does the model need them?",
        "Prompts ask for the capital of a country, and heads are switched off one after the other, best score first, "
        "and as many random other heads beside them. Then the head that scores highest, and nine entries of its map.",
        {
            "ablation": lambda _: [
                *("ablate", LEAD, "--template", TEMPLATE, "--max-heads", str(N_ABLATED), "--controls", "none")
            ],
            "token_grid": grid,
        },
    ),
    Chapter(
        "Which heads know what?",
        "A head's OV circuit maps every token it may attend to, to what it then writes. Its score on a relation is the "
        "share of pairs whose target is among the k tokens written most strongly.",
        {"relation_scores": relations},
    ),
    Chapter(
        "What do heads do when nobody says what to look for?",
        "The tokens a head does most about are those with the largest ratio of what it writes to what it reads. A head "
        "gets a name if a predicate (copy, case variant, first letter, ...) explains their targets better than chance.",
        {"head_names": lambda _: ["name-heads", "--vocabulary", "words"], "salient_operations": operations},
    ),
    Chapter(
        "Do heads write in prompts what was read from them?",
        "Prompts that say nothing about the relation, with its sources in them: what each head writes there, beside "
        "what it was expected to write.",
        {"validation": lambda _: ["validate", LEAD]},
    ),
    Chapter(
        "One sentence",
        "Which tokens do heads bind together, beyond what distance does? Then the place where an answer is due: which "
        "heads bring it together with the country, and how the best of them does it, number by number.",
        {
            "attention_groups": lambda _: ["groups", "--text", SENTENCE],
            "association_heads": association,
            "value_mixing": mixing,
        },
    ),
    Chapter(
        "Which matrices matter?",
        "The first-order effect on the loss of removing the entries of each weight matrix one by one.",
        {"component_map": lambda _: ["components", "--max-tokens", str(MAX_TOKENS)]},
    ),
    Chapter(
        "Which heads serve which cognitive function?",
        "Short questions of eight functions, in sets of the same words, so that words alone cannot tell the functions "
        "apart. A cross-validated probe reads all heads; the maps show what it reads from each, beyond the words.",
        {"task_maps": lambda _: ["tasks", "--sample", str(N_ITEMS)]},
    ),
    Chapter("The model", "What was loaded, and what can be asked of it.", {"model": lambda _: ["model"]}),
)


FOLDER = click.Option(
    ["--out", "folder"],
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    default="demo",
    help="Where to write the page and the results; default: demo.",
)


@click.command(params=[MODEL, CHECKPOINT, DEVICE, FOLDER])
def demo(model: str | None, checkpoint: str | None, device: str | None, folder: Path) -> None:
    """Take the tour: what the heads of a model do, and how sure that is, as one page with the results beside it."""
    from ..renderers.figure import save_page
    from ..renderers.text import in_words, visible, wrapped

    folder = check_folder(folder)
    tour = Tour(open_model(model, checkpoint, device))
    chosen = {"--model": model, "--checkpoint": checkpoint, "--device": device}
    options = [part for option, value in chosen.items() if value is not None for part in (option, value)]
    results: dict[str, tlhm.Result] = {}
    chapters: dict[str, list[Figure | str]] = {}
    for number, chapter in enumerate(CHAPTERS, 1):
        place, start = f"[{number}/{len(CHAPTERS)}]", time.perf_counter()
        click.echo(f"{place} {chapter.title}", err=True)
        say(f"\n== {chapter.title} ==\n\n{wrapped(chapter.about)}")
        shown = chapters[chapter.title] = [chapter.about]
        for name, step in chapter.steps.items():
            outcome = tour.outcome(step)
            if isinstance(outcome, HeadMapsError):
                refusal = f"Left out for this model: {in_words(name)}. {outcome}"
                shown.append(refusal)
                say(f"\n{wrapped(visible(refusal))}")
                continue
            results[name], arguments = outcome
            command = shlex.join(["tl-headmaps", *arguments, *options, "--out", f"{name}.html"])
            try:
                shown.append(results[name].figure().captioned(f"Values: {name}.json. Made by: {command}"))
            except UsageError as error:  # too large to draw, for instance: the result is there all the same
                shown.append(f"Its picture is left out: {in_words(name)}. {error}")
            say(f"\n$ {visible(command)}\n\n{results[name]}")
        click.echo(f"{place} done in {time.perf_counter() - start:.1f} s", err=True)
    if not results:
        raise UnsupportedModelError(f"No step of the tour could be done for {tour.weights.model_name}; see above.")
    # Only now, and the page last: a folder never holds a page whose results are those of another run.
    for name, result in results.items():
        result.save(folder / f"{name}.json")
    if "token_grid" in results and "salient_operations" in results:
        drawn = method_figure(tour.result(grid), tour.result(operations), tour.weights.n_heads)
        chapters = {"The method": [drawn], **chapters}
    save_page(folder / PAGE, chapters, title=f"What the heads of {tour.weights.shown_name} do")
    say(f"\nOpen {folder / PAGE} in a browser; the {len(results)} results are beside it as JSON.")


def method_figure(table: "tlhm.TokenGrid", salient: "tlhm.SalientOperations", n_heads: int) -> "Figure":
    """From a multi-head layer over its map of the vocabulary to A, a predefined relation, and B, a salient operation.

    Args:
        table: A grid of the head, made with ``relation=``.
        salient: The salient operations of the same head.
        n_heads: Heads of its layer.
    """
    from ..renderers.heat import token_grid as grid_figure
    from ..renderers.listing import beside
    from ..renderers.sketch import sketch
    from ..renderers.text import as_words, in_words

    head, window = table.head, slice(3)
    entry, own = salient.name(head), salient.grids[salient.index_of(head)]
    values = [row[window] for row in own.values[window]]
    rows, columns = (
        as_words([salient.strings[token] for token in ids[window]]) for ids in (own.token_ids, own.target_ids)
    )
    presets = [result.provenance.options["preset"] for result in (table, salient)]
    drawing = sketch(
        layer=head.layer,
        head=head.head,
        n_heads=n_heads,
        n_vocab=table.n_vocab,
        windows=[("A", table.values), ("B", values)],
        title=f"{head}, projected to the vocabulary",
    )
    parts = [
        drawing,
        grid_figure(
            table.values,
            table.sources,
            table.targets,
            title=f"A: a predefined relation, {in_words(table.relation or 'chosen_tokens')}",
            unit="entry of M",
            score=table.score,
            note=f"preset {presets[0]}",
        ),
        grid_figure(
            values,
            rows,
            columns,
            title=f"B: its salient operation, {entry.name}",
            unit="entry of M",
            score=entry.score,
            note=f"null {entry.null_mean:.2g} · preset {presets[1]}",
        ),
    ]
    title = "What a head does is read from its map of all tokens by all tokens"
    return beside(parts, title=title, text="\n".join(map(str, parts)))
