"""What each weight matrix of each layer contributes: maps of layers by components, and of layers by heads."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from ..errors import UsageError
from ..provenance import Provenance
from ..types import HeadIndex
from .arrays import nested, tensor_of
from .base import Result

if TYPE_CHECKING:
    from typing import Self

_FACTS = ("metric", "unit", "relative", "n_batches", "n_tokens")
_MAPS = ("values", "interval_low", "interval_high", "baseline")


@dataclass(frozen=True, eq=False)
class ComponentMap(Result):
    """One value per layer and component; a value that is not defined is NaN.

    Attributes:
        metric: Name of the metric.
        unit: What a value is, for the colour bar.
        relative: Whether values and intervals were divided by ``baseline``.
        n_batches: Batches of text averaged over, 0 if the weights alone were looked at.
        n_tokens: Tokens of text read.
        components: Column names, as ``attn.q``.
        values: The map.
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
    metric: str
    unit: str
    relative: bool
    n_batches: int
    n_tokens: int
    components: tuple[str, ...]
    values: Float[Tensor, "layer component"]
    interval_low: Float[Tensor, "layer component"] | None
    interval_high: Float[Tensor, "layer component"] | None
    baseline: Float[Tensor, "layer component"] | None
    provenance: Provenance

    def top(self, n: int = 5) -> list[tuple[int, str, float]]:
        """The ``n`` largest cells as (layer, component, value); ties go to the lower layer."""
        cells = [(layer, name, self.at(layer, name)) for layer in range(len(self.values)) for name in self.components]
        defined = [cell for cell in cells if not math.isnan(cell[2])]
        return sorted(defined, key=lambda cell: -cell[2])[:n]

    def at(self, layer: int, component: str) -> float:
        """One cell."""
        return float(self.values[layer, _column(self.components, component)])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; undefined cells are null."""
        axes = {"layer": list(range(len(self.values))), "component": list(self.components)}
        return _to_dict(self, axes)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        return cls(**_from_dict(values))

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per layer and component."""
        for layer in range(len(self.values)):
            for column, component in enumerate(self.components):
                yield {"layer": layer, "component": component, **_cell(self, (layer, column))}

    def __str__(self) -> str:
        from ..renderers.text import component_map_text

        return component_map_text(self)


@dataclass(frozen=True, eq=False)
class HeadComponentMap(Result):
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
    metric: str
    unit: str
    relative: bool
    n_batches: int
    n_tokens: int
    components: tuple[str, ...]
    values: Float[Tensor, "component layer head"]
    interval_low: Float[Tensor, "component layer head"] | None
    interval_high: Float[Tensor, "component layer head"] | None
    baseline: Float[Tensor, "component layer head"] | None
    provenance: Provenance

    def of(self, component: str) -> Float[Tensor, "layer head"]:
        """The map of one component, without the cells of heads it does not have."""
        values = self.values[_column(self.components, component)]
        return values[:, ~values.isnan().all(0)]

    def top(self, n: int = 5, component: str | None = None) -> list[tuple[str, HeadIndex, float]]:
        """The ``n`` largest cells as (component, head, value), of one component or all."""
        names = self.components if component is None else (component,)
        cells = [
            (name, HeadIndex(layer, head), float(values[layer, head]))
            for name in names
            for values in [self.values[_column(self.components, name)]]
            for layer, head in (~values.isnan()).nonzero().tolist()
        ]
        return sorted(cells, key=lambda cell: -cell[2])[:n]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; undefined cells are null."""
        _, n_layers, n_heads = self.values.shape
        axes = {"component": list(self.components), "layer": list(range(n_layers)), "head": list(range(n_heads))}
        return _to_dict(self, axes)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        return cls(**_from_dict(values))

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per component and head."""
        for column, layer, head in (~self.values.isnan()).nonzero().tolist():
            record = {"component": self.components[column], "layer": layer, "head": head}
            yield {**record, **_cell(self, (column, layer, head))}

    def __str__(self) -> str:
        from ..renderers.text import head_component_map_text

        return head_component_map_text(self)


def _column(components: tuple[str, ...], component: str) -> int:
    if component not in components:
        raise UsageError(f"This map has no component {component!r}; it has {', '.join(components)}.")
    return components.index(component)


def _to_dict(result: "ComponentMap | HeadComponentMap", axes: dict[str, Any]) -> dict[str, Any]:
    maps = {name: getattr(result, name) for name in _MAPS}
    return {
        "kind": result.kind,
        **{name: getattr(result, name) for name in _FACTS},
        "axes": axes,
        **{name: None if value is None else nested(value) for name, value in maps.items()},
        "provenance": result.provenance.to_dict(),
    }


def _from_dict(values: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {name: values[name] for name in _FACTS}
    fields |= {name: None if values[name] is None else tensor_of(values[name]) for name in _MAPS}
    fields["components"] = tuple(values["axes"]["component"])
    fields["provenance"] = Provenance.from_dict(values["provenance"])
    return fields


def _cell(result: "ComponentMap | HeadComponentMap", at: tuple[int, ...]) -> dict[str, float]:
    maps = {"value": result.values, **{name: getattr(result, name) for name in _MAPS[1:]}}
    return {name: float(values[at]) for name, values in maps.items() if values is not None}
