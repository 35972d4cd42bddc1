"""Results in, figures out; every drawing also takes plain arrays.

>>> from tl_headmaps.renderers import head_map
>>> head_map([[0.1, 0.7]], title="One layer")
Figure('One layer', Heat, 1 KB)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .charts import Line as Line
    from .charts import curve as curve
    from .charts import scatter as scatter
    from .example import Matrix as Matrix
    from .example import Step as Step
    from .example import worked_example as worked_example
    from .figure import Figure as Figure
    from .figure import save_page as save_page
    from .flowchart import flow as flow
    from .grids import MapLayer as MapLayer
    from .heat import component_map as component_map
    from .heat import head_map as head_map
    from .heat import panels as panels
    from .heat import token_grid as token_grid
    from .views import attention_view as attention_view
    from .views import token_groups_view as token_groups_view
    from .views import top_tokens_view as top_tokens_view

_HOMES = {
    "Figure": ".figure",
    "Line": ".charts",
    "MapLayer": ".grids",
    "Matrix": ".example",
    "Step": ".example",
    "attention_view": ".views",
    "component_map": ".heat",
    "curve": ".charts",
    "flow": ".flowchart",
    "head_map": ".heat",
    "panels": ".heat",
    "save_page": ".figure",
    "scatter": ".charts",
    "token_grid": ".heat",
    "token_groups_view": ".views",
    "top_tokens_view": ".views",
    "worked_example": ".example",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Cached by hand: importing a submodule leaves it under the name of the function it is called after.
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
