"""A figure is a value: a notebook shows it, a file holds it, and creating one displays nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..core.errors import OutputError, UsageError
from ..core.files import FIGURE_SUFFIXES, PAGE_SUFFIX, replacing
from ..core.types import check_choice
from .page import assets, escaped, whole_page

Width: TypeAlias = Literal["column", "page"]
"""Widths of figures in print: one column of two (3.4 inches) or the whole page (7 inches)."""

_LEAST_INCHES, _MOST_INCHES = 1, 50


@dataclass(frozen=True)
class Figure:
    """One picture, with its text alternative and the values it shows.

    Attributes:
        title: What it shows, in a line.
        body: Markup of the picture without styles and scripts.
        needs: Scripts the markup needs.
        text: The picture in words.
        data: The plain values that were drawn; the printed form is made from them, too.

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

    @property
    def html(self) -> str:
        """Self-contained markup for any page, with styles and scripts; the same for the same values."""
        return self.body + assets(self.needs)

    def captioned(self, caption: str) -> "Figure":
        """The same figure with a sentence under it, on pages and (where it has notes there) in print."""
        if not caption or caption in self.body:
            return self
        note = getattr(self.data, "note", None)
        data = self.data if note is None else replace(self.data, note=f"{note} {caption}".strip())
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
        title: str | None = None,
    ) -> Path:
        """Write the figure; the suffix chooses the form.

        ``.html`` is one page that opens offline; ``.svg``, ``.pdf`` and ``.png`` are for print and need
        ``pip install 'tl-headmaps[figures]'``.

        Args:
            path: The file.
            width: For print: ``"column"`` (3.4 inches), ``"page"`` (7 inches), or inches.
            height: For print: inches; by default what the figure needs.
            title: For print: another title; none if it is empty, for figures with a caption of their own.
        """
        if isinstance(width, str):
            check_choice(width, Width, "width")
        for name, inches in (("width", width), ("height", height)):
            if isinstance(inches, float | int) and not _LEAST_INCHES <= inches <= _MOST_INCHES:
                raise UsageError(
                    f"{name}={inches} inches cannot be printed. Give {_LEAST_INCHES} to {_MOST_INCHES} inches."
                )
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix not in FIGURE_SUFFIXES:
            raise UsageError(
                f"{path.name!r} has no suffix that says what to write. Use one of: {', '.join(FIGURE_SUFFIXES)}."
            )
        if path.is_dir():
            raise OutputError(f"Cannot write {path}: it is a folder. Give a file name.")
        if suffix == PAGE_SUFFIX:
            with replacing(path) as temporary:
                temporary.write_text(whole_page(self.title, [self.body], self.needs), encoding="utf-8")
        else:
            from .static import save_static

            save_static(self, path, width=width, height=height, title=title)
        return path


def save_page(path: str | Path, figures: Sequence[Figure], *, title: str = "Head maps") -> Path:
    """Write several figures as one page that opens offline; styles and scripts are included once."""
    path = Path(path)
    if path.suffix.lower() != PAGE_SUFFIX:
        raise UsageError(f"{path.name!r} does not name a page. Use the suffix {PAGE_SUFFIX}.")
    needs = [need for figure in figures for need in figure.needs]
    with replacing(path) as temporary:
        temporary.write_text(whole_page(title, [figure.body for figure in figures], needs), encoding="utf-8")
    return path
