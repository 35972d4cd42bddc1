"""Whether values read from a file are what the annotations of a dataclass promise: types, shapes, shared axes."""

import itertools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from torch import Tensor


class MisfitError(ValueError):
    """Parts of a file that do not belong together."""


@cache
def annotations_of(annotated: type) -> dict[str, Any]:
    """The annotations of a class, resolved."""
    return typing.get_type_hints(annotated)


def require_fit(value: Any, hint: Any, name: str, sizes: dict[str, Any], nullable: bool) -> None:
    """Raise MisfitError unless a value has the type of its annotation, arrays in their shape.

    Args:
        value: The value of a field.
        hint: Its annotation.
        name: Its name, for the message.
        sizes: Length of each axis by its name (``*name``: the whole shape); axes that are not there yet are added.
        nullable: Whether NaN may stand for a value that is not there.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    fits = True
    if origin in (types.UnionType, typing.Union):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        if value is None:
            fits = len(inner) < len(arguments)
        elif len(inner) == 1:
            require_fit(value, inner[0], name, sizes, nullable)
    elif hasattr(hint, "array_type"):
        fits = isinstance(value, Tensor) and _has_axes(value, hint.dim_str.split(), sizes)
        if fits and value.is_floating_point():
            fits = not bool(value.isinf().any()) and (nullable or not bool(value.isnan().any()))
    elif origin is typing.Literal:
        fits = value in arguments
    elif origin is tuple:
        repeated = arguments[1:] == (Ellipsis,)
        fits = isinstance(value, tuple) and (repeated or len(value) == len(arguments))
        for entry, kind in zip(value, itertools.repeat(arguments[0]) if repeated else arguments, strict=False):
            require_fit(entry, kind, name, sizes, nullable)
    elif origin in (dict, Mapping):
        fits = isinstance(value, Mapping)
        for key, entry in value.items():
            require_fit(key, arguments[0], name, sizes, nullable)
            require_fit(entry, arguments[1], name, sizes, nullable)
    elif isinstance(hint, type) and is_dataclass(hint):
        fits = isinstance(value, hint)
        # An axis inside a part is its own: parts of one kind may differ in length.
        for part in fields(hint):
            require_fit(
                getattr(value, part.name), annotations_of(hint)[part.name], f"{name}.{part.name}", {}, nullable=True
            )
    elif hint in (int, float, str, bool):
        fits = type(value) is hint or (hint is float and type(value) is int)
        if fits and hint is float and not nullable:
            fits = math.isfinite(value)
    if not fits:
        raise MisfitError(f"{name} = {value!r:.60}")


def _has_axes(value: Tensor, axes: list[str], sizes: dict[str, Any]) -> bool:
    if len(axes) == 1 and axes[0].startswith("*"):
        # Any number of axes, the same ones wherever the name stands.
        return bool(sizes.setdefault(axes[0], value.shape) == value.shape)
    if value.ndim != len(axes):
        return False
    named = [(axis, n) for axis, n in zip(axes, value.shape, strict=True) if axis.isidentifier() and axis != "_"]
    return all(sizes.setdefault(axis, n) == n for axis, n in named)
