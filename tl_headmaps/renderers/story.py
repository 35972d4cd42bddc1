"""A page that tells a story: chapters of prose and figures, under each figure the command that makes it.

Nothing here knows what the story is about. Styles and scripts are included once, and nothing is fetched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import UsageError
from ..core.files import PAGE_SUFFIX, replacing
from .figure import Figure
from .page import escaped, whole_page


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
    """

    title: str
    about: str
    parts: Sequence[Part]
    headline: str = ""


def story_page(title: str, opening: str, chapters: Sequence[Chapter], closing: Sequence[str] = ()) -> str:
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
        f'<header><h1>{escaped(title)}</h1><p class="story-text">{escaped(opening)}</p></header>'
        f'<nav class="story-text" aria-label="Contents"><ol>{contents}</ol></nav><main>',
        *(_chapter(number, chapter) for number, chapter in enumerate(chapters, 1)),
        "</main>"
        + '<footer class="story-text">'
        + (f"<h2>The results</h2><p>Beside this page, one file each:</p><ul>{listed}</ul>" if files else "")
        + "".join(f"<p>{escaped(line)}</p>" for line in closing)
        + "</footer>",
    ]
    needs = [
        need for chapter in chapters for part in chapter.parts if part.figure is not None for need in part.figure.needs
    ]
    return whole_page(title, bodies, needs, style="story.css")


def save_story(
    path: str | Path, title: str, opening: str, chapters: Sequence[Chapter], closing: Sequence[str] = ()
) -> Path:
    """Write the story as one page that opens offline; the file is complete or absent."""
    path = Path(path)
    if path.suffix.lower() != PAGE_SUFFIX:
        raise UsageError(f"{path.name!r} does not name a page. Use the suffix {PAGE_SUFFIX}.")
    with replacing(path) as temporary:
        temporary.write_text(story_page(title, opening, chapters, closing), encoding="utf-8")
    return path


def _chapter(number: int, chapter: Chapter) -> str:
    return (
        f'<section id="{number}" aria-labelledby="title-{number}"><div class="story-text">'
        f'<h2 id="title-{number}"><span class="story-number">{number}</span> {escaped(chapter.title)}</h2>'
        f"<p>{escaped(chapter.about)}</p></div>" + "".join(map(_part, chapter.parts)) + "</section>"
    )


def _part(part: Part) -> str:
    if part.figure is None and not part.file:
        return f'<p class="story-text story-refused">{escaped(part.says)}</p>'
    figure = "" if part.figure is None else part.figure.body
    command = (
        f'<pre tabindex="0" aria-label="Command"><code>{escaped(part.command)}</code></pre>' if part.command else ""
    )
    saved = f"<p>Result: {_link(part.file)}</p>" if part.file else ""
    return (
        f'<div class="story-text story-finding"><p>{escaped(part.says)}</p></div>'
        f'<figure class="story-figure">{figure}<figcaption>{command}{saved}</figcaption></figure>'
    )


def _link(name: str) -> str:
    return f'<a href="{escaped(name)}">{escaped(name)}</a>'
