"""What kind of tokens each head attends to, over many texts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import HeadIndex
from ...renderers.figure import Figure
from ...results import Result, nested, tensor_of

if TYPE_CHECKING:
    from typing import Self

_MAPS = (
    "values",
    "interval_low",
    "interval_high",
    "where_possible",
    "where_possible_low",
    "where_possible_high",
)
"""Fields with one value per score, layer and head."""


@dataclass(frozen=True, eq=False, repr=False)
class GroupingProfile(Result):
    """Head maps of six scores, means over texts with 95% intervals.

    Attributes:
        scores: Names of the scores: previous_token, duplicate_token, first_token, induction, syntactic_neighbour,
            sentence_block.
        values: Mean share of a head's attention on the pairs each score is about.
        interval_low, interval_high: 95% interval of that mean over texts (Student's); NaN for a single text.
        where_possible: Mean attention on such pairs of the queries that have one (NaN if there is none in any text).
        where_possible_low, where_possible_high: Its interval.
        even: What even attention would score (the null of ``values``).
        possible: Share of queries that have such a pair.
        n_texts, n_tokens: Texts scored and their tokens.
        n_cut, n_skipped: Texts cut to the longest length, and texts of fewer than two tokens, left out.

    Example:
        >>> from tl_headmaps import grouping_profile, load_default_model
        >>> profile = grouping_profile(load_default_model(), ["Birds walk.", "Cats walk too."], progress=False)
        >>> profile.scores
        ('previous_token', 'duplicate_token', 'first_token', 'induction', 'syntactic_neighbour', 'sentence_block')
        >>> profile.n_texts, tuple(profile.head_map("previous_token").shape)
        (2, (30, 9))
    """

    kind: ClassVar[str] = "grouping_profile"
    methods: ClassVar[tuple[str, ...]] = ("olsson2022induction",)
    scores: tuple[str, ...]
    values: Float[Tensor, "score layer head"]
    interval_low: Float[Tensor, "score layer head"]
    interval_high: Float[Tensor, "score layer head"]
    where_possible: Float[Tensor, "score layer head"]
    where_possible_low: Float[Tensor, "score layer head"]
    where_possible_high: Float[Tensor, "score layer head"]
    even: Float[Tensor, " score"]
    possible: Float[Tensor, " score"]
    n_texts: int
    n_tokens: int
    n_cut: int
    n_skipped: int
    provenance: Provenance

    def number(self, score: str) -> int:
        """Position of a score."""
        if score not in self.scores:
            raise UsageError(f"There is no score {score!r}; choose one of {', '.join(self.scores)}.")
        return self.scores.index(score)

    def head_map(self, score: str) -> Float[Tensor, "layer head"]:
        """Map of one score."""
        return self.values[self.number(score)]

    def top(self, score: str, n: int = 5) -> list[tuple[HeadIndex, float]]:
        """The heads that score highest (ties: lower layer, then lower head)."""
        found = self.head_map(score)
        flat, width = found.flatten(), found.shape[1]
        order = flat.argsort(descending=True, stable=True)[:n].tolist()
        return [(HeadIndex(i // width, i % width), float(flat[i])) for i in order]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        _, n_layers, n_heads = self.values.shape
        return {
            "kind": self.kind,
            "axes": {"score": list(self.scores), "layer": list(range(n_layers)), "head": list(range(n_heads))},
            **{name: nested(getattr(self, name)) for name in _MAPS},
            "even": self.even.tolist(),
            "possible": self.possible.tolist(),
            "n_texts": self.n_texts,
            "n_tokens": self.n_tokens,
            "n_cut": self.n_cut,
            "n_skipped": self.n_skipped,
            "provenance": self.provenance.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        return cls(
            scores=tuple(values["axes"]["score"]),
            even=torch.tensor(values["even"]),
            possible=torch.tensor(values["possible"]),
            provenance=Provenance.from_dict(values["provenance"]),
            n_texts=values["n_texts"],
            n_tokens=values["n_tokens"],
            n_cut=values["n_cut"],
            n_skipped=values["n_skipped"],
            **{name: tensor_of(values[name]) for name in _MAPS},
        )

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per score and head."""
        _, n_layers, n_heads = self.values.shape
        for number, score in enumerate(self.scores):
            for layer in range(n_layers):
                for head in range(n_heads):
                    record: dict[str, Any] = {"score": score, "layer": layer, "head": head}
                    record.update({name: float(getattr(self, name)[number, layer, head]) for name in _MAPS})
                    record["even"] = float(self.even[number])
                    yield record

    def figure(self, **options: Any) -> Figure:
        """The picture of this result."""
        from .drawing import grouping_profile_figure

        return grouping_profile_figure(self, **options)

    def __str__(self) -> str:
        from ..attention_groups.text import grouping_profile_text

        return grouping_profile_text(self)
