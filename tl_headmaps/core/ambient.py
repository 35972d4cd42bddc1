"""The former form of ``@public``, until every call has it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .options import with_torch_defaults

_Public = TypeVar("_Public", bound=Callable[..., Any])


def steady(public: _Public) -> _Public:
    """A call under torch's defaults; of a class, all public methods it defines itself."""
    if isinstance(public, type):
        for name, value in list(vars(public).items()):
            if not name.startswith("_") or name in ("__str__", "_repr_html_"):
                setattr(public, name, _steady_member(value))
        return cast("_Public", public)

    @functools.wraps(public)
    def call(*arguments: Any, **options: Any) -> Any:
        with with_torch_defaults():
            return public(*arguments, **options)

    vars(call)["is_public"] = True
    return cast("_Public", call)


def _steady_member(value: Any) -> Any:
    if isinstance(value, staticmethod | classmethod):
        return type(value)(steady(value.__func__))
    if isinstance(value, property) and value.fget is not None:
        return property(steady(value.fget), doc=value.__doc__)
    return steady(value) if inspect.isfunction(value) else value
