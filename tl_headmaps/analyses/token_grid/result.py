"""A small window on one head's map: chosen source tokens by chosen target tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...core.provenance import Provenance
from ...core.types import Circuit, HeadIndex
from ...renderers.figure import Figure
from ...results import Result

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, eq=False, repr=False)
class TokenGrid(Result):
    """Entries of a head's map and their ranks among all tokens.

    Attributes:
        head: The head.
        circuit: ``"ov"`` (rows attended-to tokens, columns written tokens) or ``"qk"`` (rows queries, columns keys).
        sources: Row labels as they were asked for.
        targets: Column labels as they were asked for.
        source_ids: Token id of each row.
        target_ids: Token id of each column.
        values: Entries of the map.
        ranks: How many of all the tokens in a row have a strictly greater entry (0 is the best).
        n_vocab: Number of tokens ranked against.

    Example:
        >>> from tl_headmaps import load_default_model, token_grid
        >>> grid = token_grid(load_default_model(), "L23H4", ["France", "Egypt"], ["Paris", "Cairo"])
        >>> grid.ranks.diagonal().tolist(), grid.n_vocab
        ([2, 6], 49152)
        >>> list(grid.to_rows())[0]["target"]
        'Paris'
    """

    kind: ClassVar[str] = "token_grid"
    methods: ClassVar[tuple[str, ...]] = ("elhelo2024maps", "elhage2021framework")
    head: HeadIndex
    circuit: Circuit
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    values: Float[Tensor, "source target"]
    ranks: Int[Tensor, "source target"]
    n_vocab: int
    provenance: Provenance

    def best(self) -> list[tuple[str, str]]:
        """The best-ranked target of each source."""
        columns = self.values.argmax(1).tolist()
        return [(source, self.targets[j]) for source, j in zip(self.sources, columns, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "head": str(self.head),
            "circuit": self.circuit,
            "axes": {"source": list(self.sources), "target": list(self.targets)},
            "token_ids": {"source": list(self.source_ids), "target": list(self.target_ids)},
            "n_vocab": self.n_vocab,
            "values": self.values.tolist(),
            "ranks": self.ranks.tolist(),
            "provenance": self.provenance.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        return cls(
            head=HeadIndex.parse(values["head"]),
            circuit=values["circuit"],
            sources=tuple(values["axes"]["source"]),
            targets=tuple(values["axes"]["target"]),
            source_ids=tuple(values["token_ids"]["source"]),
            target_ids=tuple(values["token_ids"]["target"]),
            values=torch.tensor(values["values"]),
            ranks=torch.tensor(values["ranks"]),
            n_vocab=values["n_vocab"],
            provenance=Provenance.from_dict(values["provenance"]),
        )

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per cell."""
        for i, source in enumerate(self.sources):
            for j, target in enumerate(self.targets):
                yield {
                    "head": str(self.head),
                    "circuit": self.circuit,
                    "source": source,
                    "target": target,
                    "value": float(self.values[i, j]),
                    "rank": int(self.ranks[i, j]),
                }

    def figure(self, **options: Any) -> Figure:
        """The picture of this result."""
        from .drawing import token_grid_figure

        return token_grid_figure(self, **options)

    def __str__(self) -> str:
        from ...renderers.text import grid_text

        return grid_text(self)
