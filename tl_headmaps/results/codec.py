"""Fields of a result as plain values for JSON, and back by their annotations; equality with NaN equal to NaN.

Values that were read from a file are checked by the same annotations: types, shapes, shared axes. Below that, the cells
of arrays with their labels, and the largest of them.
"""

import itertools
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..core.errors import UsageError
from ..core.types import HeadIndex


class SchemaError(ValueError):
    """Parts of a file that do not belong together."""


@cache
def annotations_of(annotated: type) -> dict[str, Any]:
    """The annotations of a class, resolved."""
    return typing.get_type_hints(annotated)


def fields_of(result_class: Any) -> tuple[Any, ...]:
    """Fields of a dataclass; `dataclasses.fields` for classes that are not known to be one."""
    return fields(result_class)


def plain(value: Any, nullable: bool = False) -> Any:
    """A field as JSON has it: arrays and tuples as lists, heads by their names, NaN as null where it may be."""
    if isinstance(value, Tensor):
        return plain(value.tolist(), nullable)
    if isinstance(value, float):
        return None if nullable and math.isnan(value) else value
    if isinstance(value, HeadIndex):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(entry, nullable) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, nullable) for entry in value]
    if is_dataclass(value) and hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return {entry.name: plain(getattr(value, entry.name), nullable) for entry in fields(value)}
    return value


def typed(value: Any, hint: Any) -> Any:
    """Inverse of :func:`plain`, by the annotation of the field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = next(argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else typed(value, inner)
    if hasattr(hint, "array_type"):
        return tensor_of(value, _dtype(hint))
    if origin is tuple:
        repeated = arguments[1:] == (Ellipsis,)
        kinds = itertools.repeat(arguments[0]) if repeated else iter(arguments)
        return tuple(typed(entry, kind) for entry, kind in zip(value, kinds, strict=not repeated))
    if origin in (dict, Mapping):
        return {name: typed(entry, arguments[1]) for name, entry in value.items()}
    if hint is HeadIndex:
        return HeadIndex.parse(value)
    if isinstance(hint, type) and hasattr(hint, "from_dict"):
        return hint.from_dict(value)
    if isinstance(hint, type) and is_dataclass(hint):
        return hint(
            **{entry.name: typed(value[entry.name], annotations_of(hint)[entry.name]) for entry in fields(hint)}
        )
    return (math.nan if value is None else float(value)) if hint is float else value


def _dtype(hint: Any) -> torch.dtype:
    """``Int`` arrays are int64, ``Bool`` bool, ``Float64`` float64 and all other ``Float`` arrays float32."""
    names = hint.dtypes
    return next(
        (getattr(torch, name) for name in ("float32", "float64", "int64", "bool") if name in names), torch.float32
    )


def nested(values: Tensor) -> Any:
    """Nested lists with None for NaN."""
    return plain(values, nullable=True)


def tensor_of(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverse of :func:`nested`."""

    def filled(part: Any) -> Any:
        return [filled(entry) for entry in part] if isinstance(part, list) else math.nan if part is None else part

    return torch.tensor(filled(values), dtype=dtype)


def equal(one: Any, other: Any) -> bool:
    """Whether two values of a field are equal, NaN being equal to NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and bool(((one == other) | _both_nan(one, other)).all())
        )
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if is_dataclass(one) and type(one) is type(other):
        return all(equal(getattr(one, entry.name), getattr(other, entry.name)) for entry in fields(one))
    return bool(one == other)


def _both_nan(one: Tensor, other: Tensor) -> Tensor:
    return (one != one) & (other != other)


def axes_of(result: Any, name: str) -> list[str]:
    """Names of the axes of a field, or of the arrays in it; none for a field that is not an array."""
    result_class: type = type(result)
    hint = annotations_of(result_class)[name]
    while (arguments := typing.get_args(hint)) and not hasattr(hint, "dim_str"):
        if typing.get_origin(hint) is tuple:
            return []
        hint = arguments[1] if typing.get_origin(hint) in (dict, Mapping) else arguments[0]
    axes = str(getattr(hint, "dim_str", "")).split()
    return list(result.json_axes) if axes == ["*cells"] else axes


def axis_length(result: Any, axis: str) -> int:
    """Length of an axis: that of the first array whose annotation names it."""
    for entry in fields_of(type(result)):
        value, axes = getattr(result, entry.name), axes_of(result, entry.name)
        if isinstance(value, Mapping):
            value = next(iter(value.values()), None)
        if isinstance(value, Tensor) and axis in axes:
            return int(value.shape[axes.index(axis)])
    raise AssertionError(f"no array of {type(result).__name__} has the axis {axis!r}")


def require_schema(value: Any, hint: Any, name: str, sizes: dict[str, Any], nullable: bool) -> None:
    """Raise SchemaError unless a value has the type of its annotation, arrays in their shape.

    Args:
        value: The value of a field.
        hint: Its annotation.
        name: Its name, for the message.
        sizes: Length of each axis by its name (``*name``: the whole shape); axes that are not there yet are added.
        nullable: Whether NaN may stand for a value that is not there.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    sound = True
    if origin in (types.UnionType, typing.Union):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        if value is None:
            sound = len(inner) < len(arguments)
        elif len(inner) == 1:
            require_schema(value, inner[0], name, sizes, nullable)
    elif hasattr(hint, "array_type"):
        sound = isinstance(value, Tensor) and _has_axes(value, hint.dim_str.split(), sizes)
        if sound and value.is_floating_point():
            sound = not bool(value.isinf().any()) and (nullable or not bool(value.isnan().any()))
    elif origin is typing.Literal:
        sound = value in arguments
    elif origin is tuple:
        repeated = arguments[1:] == (Ellipsis,)
        sound = isinstance(value, tuple) and (repeated or len(value) == len(arguments))
        for entry, kind in zip(value, itertools.repeat(arguments[0]) if repeated else arguments, strict=False):
            require_schema(entry, kind, name, sizes, nullable)
    elif origin in (dict, Mapping):
        sound = isinstance(value, Mapping)
        for key, entry in value.items():
            require_schema(key, arguments[0], name, sizes, nullable)
            require_schema(entry, arguments[1], name, sizes, nullable)
    elif isinstance(hint, type) and is_dataclass(hint):
        sound = isinstance(value, hint)
        # An axis inside a part is its own: parts of one kind may differ in length.
        for part in fields(hint):
            require_schema(
                getattr(value, part.name), annotations_of(hint)[part.name], f"{name}.{part.name}", {}, nullable=True
            )
    elif hint in (int, float, str, bool):
        sound = type(value) is hint or (hint is float and type(value) is int)
        if sound and hint is float and not nullable:
            sound = math.isfinite(value)
    if not sound:
        raise SchemaError(f"{name} = {value!r:.60}")


def _has_axes(value: Tensor, axes: list[str], sizes: dict[str, Any]) -> bool:
    if len(axes) == 1 and axes[0].startswith("*"):
        # Any number of axes, the same ones wherever the name stands.
        return bool(sizes.setdefault(axes[0], value.shape) == value.shape)
    if value.ndim != len(axes):
        return False
    named = [(axis, n) for axis, n in zip(axes, value.shape, strict=True) if axis.isidentifier() and axis != "_"]
    return all(sizes.setdefault(axis, n) == n for axis, n in named)


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
