"""Where results find their pictures: renderers register themselves here, so that results need not know them.

The picture of ``RelationScores`` is a function ``scores -> Figure`` marked with ``@draws(RelationScores)``.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

Drawing = Callable[..., "Picture"]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_DRAWINGS: dict[type, Drawing] = {}

PAGE_SUFFIX = ".html"
STATIC_SUFFIXES = (".svg", ".png", ".pdf")
FIGURE_SUFFIXES = (PAGE_SUFFIX, *STATIC_SUFFIXES)


@runtime_checkable
class Picture(Protocol):
    """What a drawing gives (a :class:`tl_headmaps.Figure`): a notebook shows it and a file holds it."""

    @property
    def title(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def html(self) -> str: ...

    @property
    def data(self) -> Any: ...

    @property
    def rendered(self) -> Any: ...

    def _repr_html_(self) -> str: ...

    def save(self, path: Any, *, width: Any = ...) -> Any: ...


def _knows_none(kind: str) -> None:
    """Stands in until the package says where drawings live."""


discover: Callable[[str], None] = _knows_none
"""Loads whatever draws a kind of result; set by the package, which stands above both sides."""


def draws(result_class: type) -> Callable[[_Function], _Function]:
    """Register a function ``result -> Figure`` as the picture of a result class and its subclasses."""

    def register(function: _Function) -> _Function:
        _DRAWINGS[result_class] = function
        return function

    return register


def drawing_of(result_class: type) -> Drawing:
    """The drawing of the class or of its nearest base."""
    discover(getattr(result_class, "kind", "result"))
    for base in result_class.__mro__:
        if base in _DRAWINGS:
            return _DRAWINGS[base]
    raise LookupError(f"Nothing draws {result_class.__name__}.")
