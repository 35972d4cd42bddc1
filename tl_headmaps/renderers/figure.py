"""A figure is a value: a notebook shows it, a file holds it, and creating one displays nothing."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..core.errors import OutputError, UsageError
from ..core.files import FIGURE_SUFFIXES, PAGE_SUFFIX, home_expanded, replacing
from ..core.types import check_choice
from .layout import COLUMN, PAGE, Labels, PrintOptions
from .page import assets, escaped, whole_page
from .text import latex, prose, sentence, visible

Width: TypeAlias = Literal["column", "page"]
"""Widths of figures in print: one column of two (3.4 inches) or the whole page (7 inches)."""

_LEAST_INCHES, _MOST_INCHES = 1, 50
_COLUMN_INCHES = 4.5
"""Wider figures span both columns of a paper."""


@dataclass(frozen=True)
class Figure:
    """One picture, with its text alternative and the values it shows.

    Attributes:
        title: What it shows, in a line.
        body: Markup of the picture without styles and scripts.
        needs: Scripts the markup needs.
        text: The picture in words.
        data: The plain values that were drawn; the printed form is made from them, too.
        source: What it was made from: model, options and versions, for captions and the metadata of files.

    Example:
        >>> from tl_headmaps import AttentionGroups
        >>> groups = AttentionGroups.from_pattern([[1, 0], [0.5, 0.5]], ["It", "is"])
        >>> figure = groups.figure()  # the last line of a notebook cell shows it
        >>> type(figure).__name__, figure.title
        ('Figure', 'Heads and the tokens they bind together')
        >>> figure.save("groups.html").name
        'groups.html'
    """

    title: str
    body: str = field(repr=False)
    needs: tuple[str, ...] = field(repr=False)
    text: str = field(repr=False)
    data: Any = field(repr=False, compare=False)
    source: str = field(default="", repr=False)

    @property
    def html(self) -> str:
        """Self-contained markup for any page, with styles and scripts; the same for the same values."""
        return self.body + assets(self.needs)

    def captioned(self, caption: str) -> "Figure":
        """The same figure with a sentence under it, on pages and (where it has notes there) in print."""
        if not caption or caption in self.body:
            return self
        note = getattr(self.data, "note", None)
        data = self.data if note is None else replace(self.data, note=f"{sentence(note)} {caption}".strip())
        inside = f'<div class="tlhm-note">{escaped(caption)}</div></div>'
        return replace(self, body=self.body.removesuffix("</div>") + inside, data=data)

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return f"Figure({self.title!r}, {type(self.data).__name__}, {len(self.body) / 1024:.0f} KB)"

    def __str__(self) -> str:
        return self.text

    @property
    def rendered(self) -> Any:
        """The same as a ``circuitsvis`` ``RenderedHTML``; neither of its two forms uses the network."""
        from circuitsvis.utils.render import RenderedHTML

        return RenderedHTML(self.html, self.html)

    def save(
        self,
        path: str | Path,
        *,
        width: Width | float | int = "page",
        height: float | int | None = None,
        columns: int | None = None,
        rows: int | None = None,
        title: str | None = None,
        labels: Labels | None = None,
    ) -> Path:
        """Write the figure; the suffix chooses the form.

        ``.html`` is one page that opens offline; ``.svg``, ``.pdf`` and ``.png`` are for print, and everything below is
        about them. :meth:`latex` is the text that includes one in a paper.

        Args:
            path: The file.
            width: ``"column"`` (3.4 inches), ``"page"`` (7 inches), or inches.
            height: Inches; by default what the figure needs, at most 8 in a column and 9 on a page if it has maps.
            columns: How many maps stand beside each other.
            rows: How many rows of maps there are.
            title: Another title; none if it is empty, for figures with a caption of their own.
            labels: Other names: a list for the maps or lines in their order, or a dictionary from names of maps, lines,
                axes and units to others. By default names such as ``country_to_capital`` are written in words.
        """
        path = home_expanded(path)
        suffix = path.suffix.lower()
        if suffix not in FIGURE_SUFFIXES:
            raise UsageError(
                f"{path.name!r} has no suffix that says what to write. Use one of: {', '.join(FIGURE_SUFFIXES)}."
            )
        _inches(width)
        if height is not None:
            _inches(height, "height")
        for name, n in (("columns", columns), ("rows", rows)):
            if n is not None and n < 1:
                raise UsageError(f"{name}={n} leaves no place for a map; give 1 or more.")
        if path.is_dir():
            raise OutputError(f"Cannot write {path}: it is a folder. Give a file name.")
        if suffix == PAGE_SUFFIX:
            with replacing(path) as temporary:
                temporary.write_text(whole_page(self.title, [self.body], self.needs), encoding="utf-8")
        else:
            tall = None if height is None else 72 * _inches(height, "height")
            exact = not isinstance(width, str)
            options = PrintOptions(72 * _inches(width), tall, columns, rows, title, labels, exact)
            self.data.drawing(options).save(path, title=self.title, source=self.source)
        return path

    def latex(self, path: str | Path, *, width: Width | float | int = "page", caption: str | None = None) -> str:
        r"""A ``figure`` environment that includes a saved figure, with its caption and what it was made from.

        It is text to paste or to write where you like: ``x.tex`` beside ``x.pdf`` may be the table of the same result.

        Args:
            path: The file as ``\includegraphics`` is to find it.
            width: As for :meth:`save`; a page is as wide as both columns (``figure*``).
            caption: Another caption; by default the title, and what stands below the figure.

        Example:
            >>> from tl_headmaps import AttentionGroups
            >>> figure = AttentionGroups.from_pattern([[1, 0], [0.5, 0.5]], ["It", "is"]).figure()
            >>> print(figure.latex("groups.pdf", width="column", caption="Groups of 2 tokens, 100% of them."))
            \begin{figure}[t]
            \centering
            \includegraphics[width=3.4in]{groups.pdf}
            \caption{Groups of 2 tokens, 100\% of them.}
            \label{fig:groups}
            % Made from given arrays ... with tl-headmaps ...
            \end{figure}
            <BLANKLINE>
        """
        inches, name = _inches(width), Path(path).as_posix()
        if re.search(r"[\s{}%#&~^\\$]", name):
            raise UsageError(
                f"LaTeX cannot include a file called {name!r:.120}. Use letters, digits, - and _ in its name."
            )
        note = str(getattr(self.data, "note", ""))
        said = ". ".join(part.rstrip(".") for part in (self.title, note) if part) + "."
        kind = "figure*" if inches > _COLUMN_INCHES else "figure"
        lines = [
            rf"\begin{{{kind}}}[t]",
            r"\centering",
            rf"\includegraphics[width={inches:g}in]{{{name}}}",
            rf"\caption{{{latex(said if caption is None else caption)}}}",
            rf"\label{{fig:{Path(path).stem}}}",
            *([f"% {visible(self.source)}"] if self.source else []),
            rf"\end{{{kind}}}",
        ]
        return "\n".join(lines) + "\n"


def _inches(value: Width | float | int, name: str = "width") -> float:
    """A width or height in inches; raises if no paper is that large or small."""
    if isinstance(value, str):
        check_choice(value, Width, name)
        return {"column": COLUMN, "page": PAGE}[value]
    if not _LEAST_INCHES <= value <= _MOST_INCHES:
        raise UsageError(f"{name}={value} inches cannot be printed. Give {_LEAST_INCHES} to {_MOST_INCHES} inches.")
    return float(value)


def save_page(
    path: str | Path,
    figures: Sequence[Figure | str] | Mapping[str, Sequence[Figure | str]],
    *,
    title: str = "Head maps",
) -> Path:
    """Write several figures as one page that opens offline; styles and scripts are included once.

    Args:
        path: The page.
        figures: Figures and, as strings, paragraphs between them; or these by the titles of chapters.
        title: Title of the page.
    """
    path = home_expanded(path)
    if path.suffix.lower() != PAGE_SUFFIX:
        raise UsageError(f"{path.name!r} does not name a page. Use the suffix {PAGE_SUFFIX}.")
    chapters = figures if isinstance(figures, Mapping) else {"": figures}
    bodies = []
    if chapters is figures:
        entries = "".join(f'<li><a href="#{n}">{escaped(name)}</a></li>' for n, name in enumerate(chapters, 1))
        bodies.append(f'<h1>{escaped(title)}</h1><nav aria-label="Contents"><ol>{entries}</ol></nav>')
    for number, (name, parts) in enumerate(chapters.items(), 1):
        bodies += [f'<h2 id="{number}">{escaped(name)}</h2>'] * bool(name)
        bodies += [f"<p>{escaped(prose(part))}</p>" if isinstance(part, str) else part.body for part in parts]
    drawn = [part for parts in chapters.values() for part in parts if isinstance(part, Figure)]
    with replacing(path) as temporary:
        page = whole_page(title, bodies, [need for figure in drawn for need in figure.needs])
        temporary.write_text(page, encoding="utf-8")
    return path
