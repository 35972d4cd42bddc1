"""What each weight matrix of each layer contributes: maps of layers by components, and of layers by heads."""

import math
from abc import abstractmethod
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
from ...scorers.components import find_metric

if TYPE_CHECKING:
    from typing import Self

_FACTS = ("metric", "unit", "relative", "n_batches", "n_tokens")
_MAPS = ("values", "interval_low", "interval_high", "baseline")


@dataclass(frozen=True, eq=False, repr=False)
class MeasuredComponents:
    """What both maps hold: values, intervals and baseline of one shape; see :class:`ComponentMap`."""

    kind: ClassVar[str]
    metric: str
    unit: str
    relative: bool
    n_batches: int
    n_tokens: int
    components: tuple[str, ...]
    values: Float[Tensor, "*cells"]
    interval_low: Float[Tensor, "*cells"] | None
    interval_high: Float[Tensor, "*cells"] | None
    baseline: Float[Tensor, "*cells"] | None
    provenance: Provenance

    @property
    def references(self) -> tuple[str, ...]:
        """Publications the metric is from."""
        return find_metric(self.metric).cites

    @property
    @abstractmethod
    def axes(self) -> dict[str, list[Any]]:
        """Labels of each axis of ``values`` by its name."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; undefined cells are null."""
        maps = {name: getattr(self, name) for name in _MAPS}
        return {
            "kind": self.kind,
            **{name: getattr(self, name) for name in _FACTS},
            "axes": self.axes,
            **{name: None if value is None else nested(value) for name, value in maps.items()},
            "provenance": self.provenance.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        fields: dict[str, Any] = {name: values[name] for name in _FACTS}
        fields |= {name: None if values[name] is None else tensor_of(values[name]) for name in _MAPS}
        components, provenance = tuple(values["axes"]["component"]), Provenance.from_dict(values["provenance"])
        return cls(**fields, components=components, provenance=provenance)

    def _column(self, component: str) -> int:
        if component not in self.components:
            raise UsageError(f"This map has no component {component!r}; it has {', '.join(self.components)}.")
        return self.components.index(component)

    def _record(self, *at: int) -> dict[str, Any]:
        """One cell with its labels."""
        labels = {name: names[number] for (name, names), number in zip(self.axes.items(), at, strict=True)}
        maps = {"value": self.values, **{name: getattr(self, name) for name in _MAPS[1:]}}
        return labels | {name: float(values[at]) for name, values in maps.items() if values is not None}


@dataclass(frozen=True, eq=False, repr=False)
class ComponentMap(MeasuredComponents, Result):
    """One value per layer and component.

    Attributes:
        metric: Name of the metric.
        unit: What a value is, for the colour bar.
        relative: Whether values and intervals were divided by ``baseline``.
        n_batches: Batches of text averaged over, 0 if the weights alone were looked at.
        n_tokens: Tokens of text read.
        components: Column names, as ``attn.q``.
        values: The map; a value that is not defined is NaN.
        interval_low, interval_high: 95% t-interval over batches; None without text or with a single batch.
        baseline: What random matrices of the same shape give, or random subspaces; None where there is no such thing.

    Example:
        >>> from tl_headmaps import component_map, load_default_model
        >>> shares = component_map(load_default_model(), "contribution", "Birds sometimes walk.", progress=False)
        >>> shares.components
        ('attn.q', 'attn.k', 'attn.v', 'attn.o', 'mlp.up', 'mlp.down', 'mlp.gate')
        >>> round(float(shares.values.sum()), 3), round(shares.at(8, "mlp.gate"), 3)
        (1.0, 0.036)
    """

    kind: ClassVar[str] = "component_map"
    values: Float[Tensor, "layer component"]

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Labels of each axis of ``values`` by its name."""
        return {"layer": list(range(len(self.values))), "component": list(self.components)}

    def top(self, n: int = 5) -> list[tuple[int, str, float]]:
        """The ``n`` largest cells as (layer, component, value); ties go to the lower layer."""
        cells = [(layer, name, self.at(layer, name)) for layer in range(len(self.values)) for name in self.components]
        defined = [cell for cell in cells if not math.isnan(cell[2])]
        return sorted(defined, key=lambda cell: -cell[2])[:n]

    def at(self, layer: int, component: str) -> float:
        """One cell."""
        return float(self.values[layer, self._column(component)])

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per layer and component."""
        for layer in range(len(self.values)):
            for column in range(len(self.components)):
                yield self._record(layer, column)

    def figure(self, **options: Any) -> Figure:
        """The picture of this result."""
        from .drawing import component_map_figure

        return component_map_figure(self, **options)

    def __str__(self) -> str:
        from ...renderers.text import component_map_text

        return component_map_text(self)


@dataclass(frozen=True, eq=False, repr=False)
class HeadComponentMap(MeasuredComponents, Result):
    """One value per attention component, layer and head: a :class:`ComponentMap` opened into its heads.

    ``attn.k`` and ``attn.v`` have one head per key/value head; where that is fewer than query heads, the cells left
    over are NaN.

    Attributes:
        components: The attention components, the first axis of every map.
        values: The maps.
        interval_low, interval_high: 95% t-interval over batches; None without text or with a single batch.
        baseline: What random matrices of the same shape give, or random subspaces; None where there is no such thing.
        metric, unit, relative, n_batches, n_tokens: As in :class:`ComponentMap`.

    Example:
        >>> from tl_headmaps import head_component_map, load_default_model
        >>> norms = head_component_map(load_default_model(), "frobenius", progress=False)
        >>> tuple(norms.of("attn.q").shape), tuple(norms.of("attn.k").shape)  # 9 query heads share 3 key heads
        ((30, 9), (30, 3))
        >>> norms.top(1, "attn.q")[0][1]
        HeadIndex(layer=0, head=3)
    """

    kind: ClassVar[str] = "head_component_map"
    values: Float[Tensor, "component layer head"]

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Labels of each axis of ``values`` by its name."""
        _, n_layers, n_heads = self.values.shape
        return {"component": list(self.components), "layer": list(range(n_layers)), "head": list(range(n_heads))}

    def of(self, component: str) -> Float[Tensor, "layer head"]:
        """The map of one component, without the cells of heads it does not have."""
        values = self.values[self._column(component)]
        return values[:, ~values.isnan().all(0)]

    def top(self, n: int = 5, component: str | None = None) -> list[tuple[str, HeadIndex, float]]:
        """The ``n`` largest cells as (component, head, value), of one component or all."""
        names = self.components if component is None else (component,)
        cells = [
            (name, HeadIndex(layer, head), float(values[layer, head]))
            for name in names
            for values in [self.values[self._column(name)]]
            for layer, head in (~values.isnan()).nonzero().tolist()
        ]
        return sorted(cells, key=lambda cell: -cell[2])[:n]

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per component and head."""
        for at in (~self.values.isnan()).nonzero().tolist():
            yield self._record(*at)

    def figure(self, **options: Any) -> Figure:
        """The picture of this result."""
        from .head_drawing import head_component_map_figure

        return head_component_map_figure(self, **options)

    def __str__(self) -> str:
        from ...renderers.text import head_component_map_text

        return head_component_map_text(self)
