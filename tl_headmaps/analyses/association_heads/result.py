"""Which heads bring two tokens of a text closer together."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from jaxtyping import Float
from torch import Tensor

from ...core.provenance import Provenance
from ...core.types import HeadIndex
from ...renderers.figure import Figure
from ...results import Result, nested, tensor_of

if TYPE_CHECKING:
    from typing import Self

Measure: TypeAlias = Literal["cosine", "dot"]

_MAPS = ("before_dot", "after_dot", "others_dot", "before_cosine", "after_cosine", "others_cosine", "attention")
"""Fields with one value per layer and head."""


@dataclass(frozen=True, eq=False, repr=False)
class AssociationHeads(Result):
    """Head maps of the association of a query with a key, before and after each head's attention.

    Attributes:
        tokens: Tokens of the text.
        query, key: Indices of the two tokens.
        measure: What :attr:`values` and :meth:`top` look at.
        before_dot, after_dot: ``v_q . v_k`` and ``v_hat_q . v_k`` in each head's value space.
        before_cosine, after_cosine: The same as cosines.
        others_dot, others_cosine: The null: mean gain of the query with the other tokens it can see (not itself,
            not the key); NaN where there is none.
        attention: Attention of the query to the key.

    Example:
        >>> from tl_headmaps import association_heads, load_default_model
        >>> found = association_heads(load_default_model(), "Birds sometimes walk", "walk", "sometimes")
        >>> found.tokens[found.query], found.tokens[found.key], found.measure
        (' walk', ' sometimes', 'cosine')
        >>> round(float(found.attention[11, 3]), 2), round(float(found.specific("cosine")[11, 3]), 2)
        (0.84, 0.79)
    """

    kind: ClassVar[str] = "association_heads"
    methods: ClassVar[tuple[str, ...]] = ("elhage2021framework",)
    tokens: tuple[str, ...]
    query: int
    key: int
    measure: Measure
    before_dot: Float[Tensor, "layer head"]
    after_dot: Float[Tensor, "layer head"]
    others_dot: Float[Tensor, "layer head"]
    before_cosine: Float[Tensor, "layer head"]
    after_cosine: Float[Tensor, "layer head"]
    others_cosine: Float[Tensor, "layer head"]
    attention: Float[Tensor, "layer head"]
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "layer head"]:
        """The gain: association after minus before."""
        return self.gain(self.measure)

    def gain(self, measure: Measure) -> Float[Tensor, "layer head"]:
        """The gain in one measure."""
        after: Tensor = getattr(self, f"after_{measure}")
        before: Tensor = getattr(self, f"before_{measure}")
        return after - before

    def specific(self, measure: Measure) -> Float[Tensor, "layer head"]:
        """The gain above the mean gain with the other tokens."""
        others: Tensor = getattr(self, f"others_{measure}")
        return self.gain(measure) - others.nan_to_num(nan=0.0)

    @property
    def notes(self) -> tuple[str, ...]:
        """What to mind when reading the map, as sentences."""
        found = []
        if self.key > self.query:
            found.append("the key comes after the query, which a causal head cannot see")
        if self.key == 0:
            found.append(
                "the key is the first token, where many heads park their attention whatever it means; "
                "a word or BOS in front of it (prepend_bos) makes the map say more"
            )
        return tuple(found)

    def top(self, n: int = 5) -> list[tuple[HeadIndex, float]]:
        """The heads that bring the two closest together (ties: lower layer, then lower head)."""
        flat = self.values.flatten()
        width = self.values.shape[1]
        order = flat.argsort(descending=True, stable=True)[:n].tolist()
        return [(HeadIndex(i // width, i % width), float(flat[i])) for i in order]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        n_layers, n_heads = self.attention.shape
        return {
            "kind": self.kind,
            "axes": {"layer": list(range(n_layers)), "head": list(range(n_heads)), "token": list(self.tokens)},
            "query": self.query,
            "key": self.key,
            "measure": self.measure,
            "notes": list(self.notes),
            **{name: nested(getattr(self, name)) for name in _MAPS},
            "provenance": self.provenance.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        return cls(
            tokens=tuple(values["axes"]["token"]),
            query=values["query"],
            key=values["key"],
            measure=values["measure"],
            provenance=Provenance.from_dict(values["provenance"]),
            **{name: tensor_of(values[name]) for name in _MAPS},
        )

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per head."""
        n_layers, n_heads = self.attention.shape
        for layer in range(n_layers):
            for head in range(n_heads):
                yield {
                    "layer": layer,
                    "head": head,
                    **{name: float(getattr(self, name)[layer, head]) for name in _MAPS},
                }

    def figure(self, **options: Any) -> Figure:
        """The picture of this result."""
        from .drawing import association_heads_figure

        return association_heads_figure(self, **options)

    def __str__(self) -> str:
        from ..value_mixing.text import association_heads_text

        return association_heads_text(self)
