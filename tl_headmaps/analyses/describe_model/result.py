"""What was detected in a model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...core.provenance import Provenance
from ...renderers.figure import Figure
from ...results import Result

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, repr=False)
class ModelDescription(Result):
    """Facts about a model, as (name, value) pairs in reading order."""

    kind: ClassVar[str] = "model_description"
    facts: tuple[tuple[str, str], ...]
    provenance: Provenance

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"kind": self.kind, "facts": dict(self.facts), "provenance": self.provenance.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        return cls(tuple(values["facts"].items()), Provenance.from_dict(values["provenance"]))

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per fact."""
        return ({"fact": name, "value": value} for name, value in self.facts)

    def figure(self, **options: Any) -> Figure:
        """The picture of this result."""
        from .drawing import model_figure

        return model_figure(self, **options)

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.facts)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.facts)
