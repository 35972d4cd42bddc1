"""What every attention head of a TransformerLens model does: from weights, activations and ablation.

Public names load on first use, so that ``import tl_headmaps`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .analyses.describe_model import describe_model as describe_model
    from .analyses.describe_run import describe_run as describe_run
    from .analyses.relation_scores import relation_scores as relation_scores
    from .analyses.token_grid import token_grid as token_grid
    from .capture.bundled import load_default_model as load_default_model
    from .capture.loading import load_model as load_model
    from .capture.weights import HeadWeights as HeadWeights
    from .errors import HeadMapsError as HeadMapsError
    from .relations import Relation as Relation
    from .relations import load_relations as load_relations
    from .results.base import Result as Result
    from .results.relation_scores import RelationScores as RelationScores
    from .results.run_state import RunState as RunState
    from .results.token_grid import TokenGrid as TokenGrid
    from .types import HeadIndex as HeadIndex

__version__ = "0.1.0"

_HOMES = {
    "HeadIndex": ".types",
    "HeadMapsError": ".errors",
    "HeadWeights": ".capture.weights",
    "Relation": ".relations",
    "RelationScores": ".results.relation_scores",
    "Result": ".results.base",
    "RunState": ".results.run_state",
    "TokenGrid": ".results.token_grid",
    "describe_model": ".analyses.describe_model",
    "describe_run": ".analyses.describe_run",
    "load_default_model": ".capture.bundled",
    "load_relations": ".relations",
    "load_model": ".capture.loading",
    "relation_scores": ".analyses.relation_scores",
    "token_grid": ".analyses.token_grid",
}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Cached by hand: importing the submodule would otherwise leave the module under the function's name.
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
