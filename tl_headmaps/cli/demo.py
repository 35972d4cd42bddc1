"""The tour: real heads of a real model from their weights to its answers, in about two minutes."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..core.errors import UnsupportedModelError, UsageError
from .build import CHECKPOINT, DEVICE, MODEL, open_model
from .output import check_folder, say

if TYPE_CHECKING:
    from ..analyses.tour.tour import Finding, SectionReport, Tour
    from ..renderers.story import Chapter, Part

PAGE = "index.html"
YOUR_MODEL = "your/model"


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
    from ..analyses.tour.opening import opening
    from ..analyses.tour.sections import SECTIONS
    from ..analyses.tour.tour import Finding, Tour
    from ..renderers.text import visible, wrapped

    folder = check_folder(folder)
    tour = Tour(open_model(model, checkpoint, device))
    reports = []
    for number, section in enumerate(SECTIONS, 1):
        click.echo(f"[{number}/{len(SECTIONS)}] {section.title}", err=True)
        reports.append(tour.run(section))
        click.echo(f"[{number}/{len(SECTIONS)}] done in {reports[-1].seconds:.1f} s", err=True)
        say(_printed(reports[-1]))
    findings = [outcome for report in reports for outcome in report.outcomes if isinstance(outcome, Finding)]
    if not findings:
        raise UnsupportedModelError(f"No section of the tour could be done for {tour.weights.model_name}; see above.")
    options = _model_options(model, checkpoint, device)
    # Only now, and the page last: a folder never holds a page whose results are those of another run.
    for finding in findings:
        finding.result.save(folder / _file(finding))
    _save_page(folder / PAGE, tour, reports, options)
    say(f"\n{wrapped(visible(' '.join(opening(tour))))}")
    say(f"\nOpen {folder / PAGE} in a browser; the {len(findings)} results are beside it as JSON.")


def _model_options(model: str | None, checkpoint: str | None, device: str | None) -> list[str]:
    """The options with which every command opens the same model."""
    chosen = {"--model": model, "--checkpoint": checkpoint, "--device": device}
    return [part for option, value in chosen.items() if value is not None for part in (option, value)]


def _file(finding: "Finding") -> str:
    return f"{finding.name}.json"


def _printed(report: "SectionReport") -> str:
    """A section for the terminal: what its results show, and the tables that are short enough."""
    from ..analyses.tour.tour import Refusal
    from ..renderers.text import visible, wrapped

    lines = [f"\n== {report.section.title} =="]
    for outcome in report.outcomes:
        if isinstance(outcome, Refusal):
            lines += ["", wrapped(visible(f"Left out: {outcome.why}"))]
            continue
        lines += ["", wrapped(visible(outcome.says))]
        if outcome.printed:
            lines += ["", outcome.printed]
    return "\n".join(lines)


def _save_page(path: Path, tour: "Tour", reports: "list[SectionReport]", options: list[str]) -> None:
    from .. import __version__
    from ..analyses.tour.opening import method_of, opening
    from ..renderers.story import Lead, save_story

    command = shlex.join(["tl-headmaps", "demo", "--model", YOUR_MODEL])
    save_story(
        path,
        f"What the heads of {tour.weights.shown_name} do",
        f"Made by tl-headmaps {__version__} in one run: every number on this page comes from it. Figures answer to "
        "mouse, touch and keyboard. Under each stands the command that makes it, and the file with its values.",
        [_chapter(report, options) for report in reports],
        [
            'Read a file back in Python: from tl_headmaps import Result; Result.load("relation_scores.json"). Each '
            "says in its provenance which model, weights, versions and options it was made with."
        ],
        Lead(opening(tour), "One command does this for your model:", command, method_of(tour)),
    )


def _chapter(report: "SectionReport", options: list[str]) -> "Chapter":
    from ..analyses.tour.tour import Finding
    from ..renderers.story import Chapter, Part

    parts = [
        _part(outcome, options) if isinstance(outcome, Finding) else Part(f"Left out for this model. {outcome.why}")
        for outcome in report.outcomes
    ]
    headlines = [outcome.headline for outcome in report.outcomes if isinstance(outcome, Finding) and outcome.headline]
    section = report.section
    return Chapter(section.title, section.about, parts, "; ".join(headlines), section.columns)


def _part(finding: "Finding", options: list[str]) -> "Part":
    from ..renderers.figure import Figure
    from ..renderers.story import Part

    command = shlex.join(["tl-headmaps", *finding.arguments, *options, "--out", f"{finding.name}.html"])
    try:
        figure = finding.result.figure(**finding.drawn)
    except UsageError as error:
        # Too large to draw, for instance: the result is there all the same.
        return Part(f"{finding.says} Its picture is left out. {error}", None, command, _file(finding))
    assert isinstance(figure, Figure)
    return Part(finding.says, figure, command, _file(finding))
