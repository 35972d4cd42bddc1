"""Results in, figures out; every drawing also takes plain arrays.

>>> from tl_headmaps.renderers import head_map
>>> head_map([[0.1, 0.7]], title="One layer")
Figure('One layer', Heat, 1 KB)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .figure import Figure as Figure
    from .figure import save_page as save_page
    from .grids import MapLayer as MapLayer
    from .heat import component_map as component_map
    from .heat import head_map as head_map
    from .heat import panels as panels
    from .heat import token_grid as token_grid

_HOMES = {
    "Figure": ".figure",
    "MapLayer": ".grids",
    "component_map": ".heat",
    "head_map": ".heat",
    "panels": ".heat",
    "save_page": ".figure",
    "token_grid": ".heat",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
