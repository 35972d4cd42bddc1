"""A page that tells a story: chapters of prose and figures, under each figure the command that makes it.

Nothing here knows what the story is about. Styles and scripts are included once, and nothing is fetched.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import UsageError
from ..core.files import PAGE_SUFFIX, replacing
from .figure import Figure
from .page import escaped, whole_page
from .text import prose

_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""")
"""A word of a command; spaces inside quotes belong to it."""


@dataclass(frozen=True)
class Part:
    """One finding, or a sentence that says why there is none.

    Attributes:
        says: What is seen.
        figure: The picture, if there is one.
        command: The command that makes it.
        file: Name of the file next to the page that holds the result.
    """

    says: str
    figure: Figure | None = None
    command: str = ""
    file: str = ""


@dataclass(frozen=True)
class Chapter:
    """Parts under one title.

    Attributes:
        title: The title.
        about: What is done in it.
        parts: What is shown.
        headline: What was found, in a few words, for the table of contents.
        columns: Whether its parts stand side by side, where there is room.
    """

    title: str
    about: str
    parts: Sequence[Part]
    headline: str = ""
    columns: bool = False


@dataclass(frozen=True)
class Lead:
    """What stands above everything else.

    Attributes:
        says: What was found, in a few sentences.
        invites: What the command below does.
        command: The command.
        figure: The first picture, if there is one.
    """

    says: Sequence[str]
    invites: str
    command: str
    figure: Figure | None = None


def story_page(
    title: str,
    opening: str,
    chapters: Sequence[Chapter],
    closing: Sequence[str] = (),
    lead: Lead | None = None,
) -> str:
    """The whole document."""
    contents = "".join(
        f'<li><a href="#{number}">{escaped(chapter.title)}</a>'
        + (f"<span>{escaped(chapter.headline)}</span>" if chapter.headline else "")
        + "</li>"
        for number, chapter in enumerate(chapters, 1)
    )
    files = [part.file for chapter in chapters for part in chapter.parts if part.file]
    listed = "".join(f"<li>{_link(name)}</li>" for name in files)
    bodies = [
        '<a class="story-skip" href="#1">To the first section</a>'
        f'<header><h1>{_unbroken(title)}</h1>{_lead(lead)}<p class="story-text">{escaped(opening)}</p></header>'
        f'<nav class="story-text" aria-label="Contents"><ol>{contents}</ol></nav><main>',
        *(_chapter(number, chapter) for number, chapter in enumerate(chapters, 1)),
        "</main>"
        + "<footer>"
        + (f"<h2>The results</h2><p>Beside this page, one file each:</p><ul>{listed}</ul>" if files else "")
        + "".join(f"<p>{escaped(line)}</p>" for line in closing)
        + "</footer>",
    ]
    figures = [part.figure for chapter in chapters for part in chapter.parts]
    figures.append(None if lead is None else lead.figure)
    needs = [need for figure in figures if figure is not None for need in figure.needs]
    return whole_page(title, bodies, needs, style="story.css")


def save_story(
    path: str | Path,
    title: str,
    opening: str,
    chapters: Sequence[Chapter],
    closing: Sequence[str] = (),
    lead: Lead | None = None,
) -> Path:
    """Write the story as one page that opens offline; the file is complete or absent."""
    path = Path(path)
    if path.suffix.lower() != PAGE_SUFFIX:
        raise UsageError(f"{path.name!r} does not name a page. Use the suffix {PAGE_SUFFIX}.")
    with replacing(path) as temporary:
        temporary.write_text(story_page(title, opening, chapters, closing, lead), encoding="utf-8")
    return path


def _lead(lead: Lead | None) -> str:
    if lead is None:
        return ""
    figure = "" if lead.figure is None else f'<figure class="story-figure">{lead.figure.body}</figure>'
    says = escaped(prose(" ".join(lead.says)))
    return (
        (f'<p class="story-text story-lead">{says}</p>' if says else "")
        + f'<p class="story-text story-run">{escaped(lead.invites)} '
        f'<code class="story-command">{_command(lead.command)}</code></p>{figure}'
    )


def _chapter(number: int, chapter: Chapter) -> str:
    parts = "".join(map(_part, chapter.parts))
    if chapter.columns:
        parts = f'<div class="story-columns">{parts}</div>'
    return (
        f'<section id="{number}" aria-labelledby="title-{number}"><div class="story-text">'
        f'<h2 id="title-{number}"><span class="story-number">{number}</span> {escaped(chapter.title)}</h2>'
        f"<p>{escaped(chapter.about)}</p></div>{parts}</section>"
    )


def _part(part: Part) -> str:
    said = escaped(prose(part.says))
    if part.figure is None and not part.file:
        return f'<p class="story-text story-refused">{said}</p>'
    figure = "" if part.figure is None else part.figure.body
    command = (
        f'<pre tabindex="0" aria-label="Command"><code>{_command(part.command)}</code></pre>' if part.command else ""
    )
    saved = f"<p>Result: {_link(part.file)}</p>" if part.file else ""
    below = f"<figcaption>{command}{saved}</figcaption>" if command or saved else ""
    return (
        f'<div class="story-part"><div class="story-text story-finding"><p>{said}</p></div>'
        f'<figure class="story-figure">{figure}{below}</figure></div>'
    )


def _unbroken(title: str) -> str:
    """A title whose lines do not break inside names such as SmolLM2-135M."""
    return " ".join(f"<span>{escaped(word)}</span>" if "-" in word else escaped(word) for word in title.split())


def _command(command: str) -> str:
    """A command whose lines break between options and names only: an option and its value stay together."""
    groups: list[list[str]] = []
    for word in _WORD.findall(command):
        if word.startswith("--") or not groups or not groups[-1][0].startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return " ".join(f"<span>{escaped(' '.join(group))}</span>" for group in groups)


def _link(name: str) -> str:
    return f'<a href="{escaped(name)}">{escaped(name)}</a>'
