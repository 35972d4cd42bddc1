"""Whether the running model agrees with scores read from its weights."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import HeadIndex
from ...renderers.figure import Figure
from ...results import Result, nested, tensor_of

if TYPE_CHECKING:
    from typing import Self

CONTEXTS = ("without", "with")
AGREEMENT_COLUMNS = tuple(
    f"{direction}{measure}_{context}{end}"
    for direction in ("", "suppress_")
    for context in CONTEXTS
    for measure in ("pearson", "spearman")
    for end in ("", "_low", "_high")
)
"""Columns of the agreement table behind ``relation``: a correlation and its 95% interval each."""

_STATIC = ("static_promote", "static_suppress")
_DYNAMIC = ("promote_without", "promote_with", "suppress_without", "suppress_with")


@dataclass(frozen=True, eq=False, repr=False)
class Validation(Result):
    """Static and dynamic scores of relations, and how well they agree.

    Attributes:
        relations: Names of the relations.
        templates: The prompts, ``<X>`` standing for the source.
        k: Top-k of each relation.
        n_static: Pairs behind the static scores of each relation.
        n_dynamic: Pairs behind the dynamic scores of each relation, each in every template.
        dropped: (source, target, reason) of the pairs left out of the dynamic scores, by relation.
        static_promote, static_suppress: Scores from the weights alone.
        promote_without, suppress_without: Scores when the last position attends to nothing but the source.
        promote_with, suppress_with: Scores of what the head really writes at the last position.
        agreement: Columns such as ``pearson_without`` or ``suppress_spearman_with_low`` (an end of its 95% interval), a
            value per relation: correlation of static with dynamic scores over heads x templates, NaN where one of them
            does not vary over heads.

    Example:
        >>> from tl_headmaps import Relation, load_default_model, validate
        >>> capitals = Relation.from_pairs("capitals", [("France", "Paris"), ("Egypt", "Cairo"), ("Japan", "Tokyo")])
        >>> found = validate(load_default_model(), capitals, "The story of <X> contains", progress=False)
        >>> found.n_static, found.n_dynamic, found.templates
        ((3,), (3,), ('The story of <X> contains',))
        >>> round(float(found.static_promote[0, 23, 4]), 2), round(float(found.promote_without[0, 0, 23, 4]), 2)
        (1.0, 0.33)
    """

    kind: ClassVar[str] = "validation"
    methods: ClassVar[tuple[str, ...]] = ("elhelo2024maps",)
    relations: tuple[str, ...]
    templates: tuple[str, ...]
    k: tuple[int, ...]
    n_static: tuple[int, ...]
    n_dynamic: tuple[int, ...]
    dropped: tuple[tuple[tuple[str, str, str], ...], ...]
    static_promote: Float[Tensor, "relation layer head"]
    static_suppress: Float[Tensor, "relation layer head"]
    promote_without: Float[Tensor, "relation template layer head"]
    promote_with: Float[Tensor, "relation template layer head"]
    suppress_without: Float[Tensor, "relation template layer head"]
    suppress_with: Float[Tensor, "relation template layer head"]
    agreement: dict[str, tuple[float, ...]]
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "relation template layer head"]:
        """The dynamic promotion scores without context."""
        return self.promote_without

    def number(self, relation: str) -> int:
        """Position of a relation."""
        if relation not in self.relations:
            raise UsageError(f"This result has no relation {relation!r}; it has {', '.join(self.relations)}.")
        return self.relations.index(relation)

    def mean(self, column: str) -> float:
        """Mean of a column of the agreement table over the relations that have a value there."""
        if column not in self.agreement:
            raise UsageError(f"There is no column {column!r}; there are {', '.join(self.agreement)}.")
        known = [value for value in self.agreement[column] if not math.isnan(value)]
        return sum(known) / len(known) if known else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; correlations that are not defined are null."""
        _, n_layers, n_heads = self.static_promote.shape
        table = {name: [None if math.isnan(x) else x for x in column] for name, column in self.agreement.items()}
        return {
            "kind": self.kind,
            "axes": {
                "relation": list(self.relations),
                "template": list(self.templates),
                "layer": list(range(n_layers)),
                "head": list(range(n_heads)),
            },
            "k": list(self.k),
            "n_static": list(self.n_static),
            "n_dynamic": list(self.n_dynamic),
            "dropped": [[list(entry) for entry in entries] for entries in self.dropped],
            "agreement": {"relation": list(self.relations), **table},
            **{name: nested(getattr(self, name)) for name in (*_STATIC, *_DYNAMIC)},
            "provenance": self.provenance.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        return cls(
            relations=tuple(values["axes"]["relation"]),
            templates=tuple(values["axes"]["template"]),
            k=tuple(values["k"]),
            n_static=tuple(values["n_static"]),
            n_dynamic=tuple(values["n_dynamic"]),
            dropped=tuple(tuple((s, t, why) for s, t, why in entries) for entries in values["dropped"]),
            agreement={
                name: tuple(math.nan if x is None else float(x) for x in values["agreement"][name])
                for name in AGREEMENT_COLUMNS
            },
            provenance=Provenance.from_dict(values["provenance"]),
            **{name: tensor_of(values[name]) for name in (*_STATIC, *_DYNAMIC)},
        )

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per relation, template and head."""
        _, n_templates, n_layers, n_heads = self.promote_without.shape
        for number, name in enumerate(self.relations):
            for template in range(n_templates):
                for index in (HeadIndex(layer, head) for layer in range(n_layers) for head in range(n_heads)):
                    at = (number, index.layer, index.head)
                    record: dict[str, Any] = {"relation": name, "template": self.templates[template]}
                    record.update({"head": str(index), "k": self.k[number]})
                    record.update({column: float(getattr(self, column)[at]) for column in _STATIC})
                    here = (number, template, index.layer, index.head)
                    record.update({column: float(getattr(self, column)[here]) for column in _DYNAMIC})
                    yield record

    def figure(self, **options: Any) -> Figure:
        """The picture of this result."""
        from .drawing import validation_figure

        return validation_figure(self, **options)

    def __str__(self) -> str:
        from .text import validation_text

        return validation_text(self)
