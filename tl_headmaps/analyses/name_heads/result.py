"""A name for every head of a model, and how many heads earned one."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.provenance import Provenance
from ...core.types import Circuit, HeadIndex, HeadLike
from ...renderers.figure import Figure
from ...results import Result
from ..salient_operations.result import UNCLEAR, HeadName

if TYPE_CHECKING:
    from typing import Self

THIRDS = ("early", "middle", "late")

PUBLISHED_COVERAGE = {"early": "20-60%", "late": "60-96%"}
"""Heads that a person or a large language model could describe in the MAPS paper (early and later layers)."""


@dataclass(frozen=True, eq=False, repr=False)
class HeadNames(Result):
    """Names of all heads, by layer and head.

    Attributes:
        circuit: ``"ov"`` or ``"qk"``.
        names: The name of each head with its evidence, by layer.
        left_out: How many tokens of the vocabulary were not considered, by reason.
        failed_predicates: Predicates that raised, with their errors.

    Example:
        >>> from dataclasses import replace
        >>> from tl_headmaps import HeadWeights, load_default_model, name_heads
        >>> weights = HeadWeights.from_model(load_default_model())
        >>> names = name_heads(replace(weights, n_layers=1), progress=False)  # the first layer only: all take a minute
        >>> names.coverage()  # share of heads with a name, by third of the model
        {'all': 0.0, 'early': 0.0}
        >>> round(names.name("L0H5").score, 2), names.named()
        (0.7, {})
    """

    kind: ClassVar[str] = "head_names"
    methods: ClassVar[tuple[str, ...]] = ("elhelo2024maps", "elhage2021framework", "benjamini1995controlling")
    circuit: Circuit
    names: tuple[tuple[HeadName, ...], ...]
    left_out: dict[str, int]
    failed_predicates: dict[str, str]
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "layer head"]:
        """Share of salient mappings the best predicate explains."""
        return torch.tensor([[entry.score for entry in row] for row in self.names])

    def name(self, head: HeadLike) -> HeadName:
        """The name of one head, with its evidence."""
        index = HeadIndex.of(head).check(len(self.names), len(self.names[0]))
        return self.names[index.layer][index.head]

    def named(self) -> dict[str, list[HeadIndex]]:
        """Heads by name, the most frequent name first; ``unclear`` ones left out."""
        found: dict[str, list[HeadIndex]] = {}
        for layer, row in enumerate(self.names):
            for head, entry in enumerate(row):
                if entry.name != UNCLEAR:
                    found.setdefault(entry.name, []).append(HeadIndex(layer, head))
        return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))

    def coverage(self) -> dict[str, float]:
        """Share of heads with a name: of the whole model, and of the early, middle and late third of its layers."""
        named = torch.tensor([[entry.name != UNCLEAR for entry in row] for row in self.names]).float()
        thirds = torch.arange(len(named)) * 3 // len(named)
        shares = {"all": float(named.mean())}
        for number, third in enumerate(THIRDS):
            rows = named[thirds == number]
            if len(rows):
                shares[third] = float(rows.mean())
        return shares

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "circuit": self.circuit,
            "axes": {"layer": list(range(len(self.names))), "head": list(range(len(self.names[0])))},
            "coverage": self.coverage(),
            "heads": [
                {"head": str(HeadIndex(layer, head)), **entry.to_dict()}
                for layer, row in enumerate(self.names)
                for head, entry in enumerate(row)
            ],
            "left_out": self.left_out,
            "failed_predicates": self.failed_predicates,
            "provenance": self.provenance.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        fields = HeadName.__dataclass_fields__
        listed = [HeadName(**{name: entry[name] for name in fields}) for entry in values["heads"]]
        width = len(values["axes"]["head"])
        return cls(
            circuit=values["circuit"],
            names=tuple(tuple(listed[i : i + width]) for i in range(0, len(listed), width)),
            left_out=dict(values["left_out"]),
            failed_predicates=dict(values["failed_predicates"]),
            provenance=Provenance.from_dict(values["provenance"]),
        )

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per head."""
        for layer, row in enumerate(self.names):
            for head, entry in enumerate(row):
                yield {"layer": layer, "head": head, **entry.to_dict()}

    def figure(self, **options: Any) -> Figure:
        """The picture of this result."""
        from .drawing import head_names_figure

        return head_names_figure(self, **options)

    def __str__(self) -> str:
        from ..salient_operations.text import head_names_text

        return head_names_text(self)
