"""Cells of arrays with their labels, and the largest of them."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..core.errors import UsageError
from ..core.types import HeadIndex


def cells(axes: Mapping[str, Sequence[Any]], values: Tensor) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
    """Every cell of an array that is not NaN: its index, and its labels by the name of their axis."""
    for index in itertools.product(*(range(n) for n in values.shape)):
        if not math.isnan(values[index]):
            yield index, {name: labels[at] for (name, labels), at in zip(axes.items(), index, strict=True)}


def largest_cells(
    axes: Mapping[str, Sequence[Any]], values: Any, n: int, kind: str
) -> list[tuple[tuple[Any, ...], float]]:
    """The ``n`` largest cells of an array with their labels, NaN left out; ties go to the first."""
    if not isinstance(values, Tensor) or list(values.shape) != [len(labels) for labels in axes.values()]:
        what = kind.replace("_", " ")
        raise UsageError(f"This result ({what}) has no values that could be ranked. Print it, or see to_rows().")
    found = [(tuple(labels.values()), float(values[at])) for at, labels in cells(axes, values)]
    return sorted(found, key=lambda cell: -cell[1])[:n]


def largest_heads(values: Tensor, n: int) -> list[tuple[HeadIndex, float]]:
    """The ``n`` largest cells of a map over layers and heads, NaN left out; ties go to the lower layer, then head."""
    flat, width = values.flatten(), values.shape[1]
    order = flat.nan_to_num(nan=-math.inf).argsort(descending=True, stable=True)[:n].tolist()
    return [(HeadIndex(i // width, i % width), float(flat[i])) for i in order if not math.isnan(flat[i])]
