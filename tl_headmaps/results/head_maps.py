"""Results with maps over layers and heads."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..core.errors import UsageError
from ..core.types import HeadIndex, HeadLike, LayerLike, head_list, layer_list
from .base import Result
from .codec import axes_of, fields_of, largest_heads

if TYPE_CHECKING:
    from typing import Self


class HeadMaps(Result):
    """A result with maps over layers and heads: all of them are read alike.

    Attributes:
        labelled: The field that names the first axis of the maps (or holds maps by these names); None for a single map.
        aligned: Fields with an entry for each of these names, which no annotation tells.
    """

    labelled: ClassVar[str | None] = None
    aligned: ClassVar[tuple[str, ...]] = ()

    @property
    def _axis(self) -> str:
        """What a name of the first axis is: a relation, a function, a score."""
        return next(name for name, source in self.json_axes.items() if source == self.labelled)

    def index_of(self, label: str | None = None) -> int:
        """Position of a name on the first axis; None means the only one."""
        names: tuple[str, ...] = tuple(getattr(self, str(self.labelled)))
        if label is None and len(names) > 1:
            raise UsageError(f"This result holds {len(names)} {self.labelled}; name one of {', '.join(names)}.")
        if label is not None and label not in names:
            raise UsageError(f"This result has no {self._axis} {label!r}; it has {', '.join(names)}.")
        return 0 if label is None else names.index(label)

    def head_map(self, label: str | None = None) -> Float[Tensor, "layer head"]:
        """The map that :meth:`top` ranks; where there are several, that of one name."""
        values: Tensor = getattr(self, "values")  # noqa: B009
        if self.labelled is None and label is not None:
            raise UsageError(f"This result has one map, and none of a name such as {label!r}. Leave the name out.")
        return values if self.labelled is None else values[self.index_of(label)]

    @property
    def n_measured(self) -> int:
        """Number of heads with a value in some map: what a best head is the best of."""
        values: Tensor = getattr(self, "values")  # noqa: B009
        return int((~values.isnan()).reshape(-1, *values.shape[-2:]).any(0).sum())

    def top(self, n: int = 5, label: str | None = None) -> list[tuple[Any, float]]:
        """The ``n`` heads with the largest values (ties: lower layer, then lower head)."""
        return largest_heads(self.head_map(label), n)

    def select(
        self,
        labels: str | Sequence[str] | None = None,
        heads: HeadLike | Iterable[HeadLike] | None = None,
        *,
        layers: LayerLike | Iterable[LayerLike] | None = None,
    ) -> "Self":
        """The same result for some names of the first axis, or with all but some heads left out (NaN).

        Args:
            labels: One name or several; all by default.
            heads: Only these heads (``"L12"``: all of layer 12).
            layers: Only heads of these layers.
        """
        if labels is not None and (self.labelled is None or not labels):
            raise UsageError(
                "This result has one map. Choose heads= or layers= of it."
                if self.labelled is None
                else f"No {self._axis} was named; this result has {', '.join(getattr(self, self.labelled))}."
            )
        names = [labels] if isinstance(labels, str) else labels
        numbers = None if names is None else [self.index_of(name) for name in names]
        left_out = None if heads is None and layers is None else ~self._chosen(heads, layers)
        changes: dict[str, Any] = {}
        for entry in fields_of(type(self)):
            axes = axes_of(self, entry.name)

            def chosen(value: Any, axes: list[str] = axes) -> Any:
                if isinstance(value, Mapping):
                    labelled = names is not None and set(value) == set(getattr(self, str(self.labelled)))
                    kept = names if labelled and names is not None else list(value)
                    return {name: chosen(part) for name, part in value.items() if name in kept}
                if isinstance(value, tuple):
                    return value if numbers is None else tuple(value[number] for number in numbers)
                for place, axis in enumerate(axes):
                    if numbers is not None and axis == self._axis:
                        value = value.index_select(place, torch.tensor(numbers))
                masked = left_out is not None and axes[-2:] == ["layer", "head"] and value.is_floating_point()
                return value.masked_fill(left_out, math.nan) if masked else value

            if axes or entry.name in (self.labelled, *self.aligned):
                value = getattr(self, entry.name)
                changes[entry.name] = None if value is None else chosen(value)
        whole: Any = self
        selected: Self = replace(whole, **changes)
        return selected

    def _chosen(self, heads: Any, layers: Any) -> Bool[Tensor, "layer head"]:
        n_layers, n_heads = len(self.axes["layer"]), len(self.axes["head"])
        every = [HeadIndex(layer, head) for layer in range(n_layers) for head in range(n_heads)]
        named = every if heads is None else [head.check(n_layers, n_heads) for head in head_list(heads, every)]
        numbers = range(n_layers) if layers is None else layer_list(layers)
        for number in numbers:
            HeadIndex(number, 0).check(n_layers, n_heads)
        mask = torch.zeros(n_layers, n_heads, dtype=torch.bool)
        for head in named:
            mask[head.layer, head.head] = head.layer in numbers
        return mask
