"""One association worked out by hand: the products, the sums, before and after."""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from ...renderers.figure import Figure


@dataclass(frozen=True, eq=False)
class WorkedExample:
    """How attention changes the association of one query with one key, number by number.

    Tokens are numbered from 1 here, as in a formula. ``str()`` is plain text; :meth:`markdown` and :meth:`latex` are
    the same lines for a notebook and for a paper.

    Attributes:
        tokens: Tokens of the text.
        query, key: Indices of the two tokens, counted from 0.
        values: Value vector of every token.
        row: Attention of the query to every token.
        mixed: The query's vector after attention.
        before, after: Dot product of the query with the key's value, before and after.
        cosine_before, cosine_after: The same as cosines.
        split: Part of each token in ``after``; adds up to it.
        change_split: Part of each token in ``after - before``; adds up to it.
        notes: What is odd about the row (does not sum to one, negative weights), as sentences.

    Example:
        >>> from tl_headmaps import value_mixing_from
        >>> mixing = value_mixing_from([[1, 0], [0.5, 0.5]], [[1.0, 2.0], [3.0, -1.0]], ["Birds", "walk"])
        >>> example = mixing.explain("walk", "Birds")
        >>> example.before, example.after, example.gain
        (1.0, 3.0, 2.0)
        >>> example.markdown().splitlines()[0]
        "### What attention does to 'walk', seen from 'Birds'"
    """

    kind: ClassVar[str] = "worked_example"
    tokens: tuple[str, ...]
    query: int
    key: int
    values: Float[Tensor, "key d_head"]
    row: Float[Tensor, " key"]
    mixed: Float[Tensor, " d_head"]
    before: float
    after: float
    cosine_before: float
    cosine_after: float
    split: Float[Tensor, " key"]
    change_split: Float[Tensor, " key"]
    notes: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """Change of the dot product."""
        return self.after - self.before

    def _repr_html_(self) -> str:
        return self.figure()._repr_html_()

    def markdown(self) -> str:
        """The worked example as Markdown with formulas between dollar signs."""
        from .text import example_markdown

        return example_markdown(self)

    def latex(self) -> str:
        """The worked example as LaTeX (amsmath)."""
        from .text import example_latex

        return example_latex(self)

    def figure(self, **options: Any) -> Figure:
        """The picture of this result."""
        from .worked_example_drawing import worked_example_figure

        return worked_example_figure(self, **options)

    def __str__(self) -> str:
        from .text import example_text

        return example_text(self)
