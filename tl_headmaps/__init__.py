"""What every attention head of a TransformerLens model does: from weights, activations and ablation.

A call stands beside the result it returns. Public names load on first use, so that ``import tl_headmaps`` costs
nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import drawing as _drawing

if TYPE_CHECKING:
    from .analyses.ablate import ablate as ablate
    from .analyses.association_heads import association_heads as association_heads
    from .analyses.attention_groups import attention_groups as attention_groups
    from .analyses.attention_groups import attention_groups_from_pattern as attention_groups_from_pattern
    from .analyses.component_map import component_map as component_map
    from .analyses.component_map import head_component_map as head_component_map
    from .analyses.describe_model import describe_model as describe_model
    from .analyses.describe_run import describe_run as describe_run
    from .analyses.grouping_profile import grouping_profile as grouping_profile
    from .analyses.name_heads import name_heads as name_heads
    from .analyses.relation_scores import relation_scores as relation_scores
    from .analyses.reproduce import reproduce as reproduce
    from .analyses.salient_operations import salient_operations as salient_operations
    from .analyses.task_maps import task_maps as task_maps
    from .analyses.token_grid import token_grid as token_grid
    from .analyses.validate import validate as validate
    from .analyses.value_mixing import value_mixing as value_mixing
    from .analyses.value_mixing import value_mixing_from as value_mixing_from
    from .capture.bundled import default_model_folder as default_model_folder
    from .capture.bundled import load_default_model as load_default_model
    from .capture.loading import load_model as load_model
    from .capture.weights import HeadWeights as HeadWeights
    from .citations import cite as cite
    from .errors import HeadMapsError as HeadMapsError
    from .naming.predicates import predicate as predicate
    from .relations import Relation as Relation
    from .relations import load_relations as load_relations
    from .renderers.figure import Figure as Figure
    from .results.ablation_curves import AblationCurves as AblationCurves
    from .results.association_heads import AssociationHeads as AssociationHeads
    from .results.attention_groups import AttentionGroups as AttentionGroups
    from .results.base import Result as Result
    from .results.component_map import ComponentMap as ComponentMap
    from .results.component_map import HeadComponentMap as HeadComponentMap
    from .results.grouping_profile import GroupingProfile as GroupingProfile
    from .results.head_names import HeadNames as HeadNames
    from .results.relation_scores import RelationScores as RelationScores
    from .results.reproduction import Reproduction as Reproduction
    from .results.run_state import RunState as RunState
    from .results.salient_operations import SalientOperations as SalientOperations
    from .results.task_maps import TaskMaps as TaskMaps
    from .results.task_verification import TaskVerification as TaskVerification
    from .results.token_grid import TokenGrid as TokenGrid
    from .results.validation import Validation as Validation
    from .results.value_mixing import ValueMixing as ValueMixing
    from .results.worked_example import WorkedExample as WorkedExample
    from .task_files import load_tasks as load_tasks
    from .task_files import read_tasks as read_tasks
    from .tasks import TaskItem as TaskItem
    from .tasks import Tasks as Tasks
    from .types import HeadIndex as HeadIndex

__version__ = "0.1.0"

_HOMES = {
    "ablate": ".analyses.ablate",
    "AblationCurves": ".results.ablation_curves",
    "association_heads": ".analyses.association_heads",
    "AssociationHeads": ".results.association_heads",
    "attention_groups": ".analyses.attention_groups",
    "attention_groups_from_pattern": ".analyses.attention_groups",
    "AttentionGroups": ".results.attention_groups",
    "cite": ".citations",
    "component_map": ".analyses.component_map",
    "ComponentMap": ".results.component_map",
    "default_model_folder": ".capture.bundled",
    "describe_model": ".analyses.describe_model",
    "describe_run": ".analyses.describe_run",
    "Figure": ".renderers.figure",
    "grouping_profile": ".analyses.grouping_profile",
    "GroupingProfile": ".results.grouping_profile",
    "head_component_map": ".analyses.component_map",
    "HeadComponentMap": ".results.component_map",
    "HeadIndex": ".types",
    "HeadMapsError": ".errors",
    "HeadNames": ".results.head_names",
    "HeadWeights": ".capture.weights",
    "load_default_model": ".capture.bundled",
    "load_model": ".capture.loading",
    "load_relations": ".relations",
    "load_tasks": ".task_files",
    "name_heads": ".analyses.name_heads",
    "predicate": ".naming.predicates",
    "read_tasks": ".task_files",
    "Relation": ".relations",
    "relation_scores": ".analyses.relation_scores",
    "RelationScores": ".results.relation_scores",
    "reproduce": ".analyses.reproduce",
    "Reproduction": ".results.reproduction",
    "Result": ".results.base",
    "RunState": ".results.run_state",
    "salient_operations": ".analyses.salient_operations",
    "SalientOperations": ".results.salient_operations",
    "task_maps": ".analyses.task_maps",
    "TaskItem": ".tasks",
    "TaskMaps": ".results.task_maps",
    "Tasks": ".tasks",
    "TaskVerification": ".results.task_verification",
    "token_grid": ".analyses.token_grid",
    "TokenGrid": ".results.token_grid",
    "validate": ".analyses.validate",
    "Validation": ".results.validation",
    "value_mixing": ".analyses.value_mixing",
    "value_mixing_from": ".analyses.value_mixing",
    "ValueMixing": ".results.value_mixing",
    "WorkedExample": ".results.worked_example",
}

__all__ = [*_HOMES, "__version__"]


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
