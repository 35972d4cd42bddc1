"""What every attention head of a TransformerLens model does: from weights, activations and ablation.

Public names load on first use, so that ``import tl_headmaps`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import drawing as _drawing

if TYPE_CHECKING:
    from .analyses.describe_model import describe_model as describe_model
    from .analyses.name_heads import name_heads as name_heads
    from .analyses.relation_scores import relation_scores as relation_scores
    from .analyses.salient_operations import salient_operations as salient_operations
    from .analyses.task_maps import task_maps as task_maps
    from .analyses.token_grid import token_grid as token_grid
    from .capture.bundled import load_default_model as load_default_model
    from .capture.loading import load_model as load_model
    from .capture.weights import HeadWeights as HeadWeights
    from .errors import HeadMapsError as HeadMapsError
    from .naming.predicates import predicate as predicate
    from .relations import Relation as Relation
    from .relations import load_relations as load_relations
    from .renderers.figure import Figure as Figure
    from .results.base import Result as Result
    from .results.head_names import HeadNames as HeadNames
    from .results.relation_scores import RelationScores as RelationScores
    from .results.salient_operations import SalientOperations as SalientOperations
    from .results.task_maps import TaskMaps as TaskMaps
    from .results.task_verification import TaskVerification as TaskVerification
    from .results.token_grid import TokenGrid as TokenGrid
    from .task_files import load_tasks as load_tasks
    from .task_files import read_tasks as read_tasks
    from .tasks import TaskItem as TaskItem
    from .tasks import Tasks as Tasks
    from .types import HeadIndex as HeadIndex

__version__ = "0.1.0"

_HOMES = {
    "Figure": ".renderers.figure",
    "HeadIndex": ".types",
    "HeadMapsError": ".errors",
    "HeadNames": ".results.head_names",
    "HeadWeights": ".capture.weights",
    "Relation": ".relations",
    "RelationScores": ".results.relation_scores",
    "Result": ".results.base",
    "TaskItem": ".tasks",
    "TaskMaps": ".results.task_maps",
    "TaskVerification": ".results.task_verification",
    "Tasks": ".tasks",
    "SalientOperations": ".results.salient_operations",
    "TokenGrid": ".results.token_grid",
    "describe_model": ".analyses.describe_model",
    "load_default_model": ".capture.bundled",
    "load_relations": ".relations",
    "load_model": ".capture.loading",
    "load_tasks": ".task_files",
    "read_tasks": ".task_files",
    "relation_scores": ".analyses.relation_scores",
    "task_maps": ".analyses.task_maps",
    "name_heads": ".analyses.name_heads",
    "predicate": ".naming.predicates",
    "salient_operations": ".analyses.salient_operations",
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


def _discover(kind: str) -> None:
    """Load ``renderers/drawings/<kind>.py``, which registers itself; a kind without one has the drawing of all."""
    home = f"{__name__}.renderers.drawings"
    for name in ("result", kind):
        try:
            import_module(f"{home}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{home}.{name}":
                raise


_drawing.discover = _discover


def __dir__() -> list[str]:
    return __all__
