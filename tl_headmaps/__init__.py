"""What every attention head of a TransformerLens model does: from weights, activations and ablation.

Public names load on first use, so that ``import tl_headmaps`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .analyses.association_heads import association_heads as association_heads
    from .analyses.attention_groups import attention_groups as attention_groups
    from .analyses.attention_groups import attention_groups_from_pattern as attention_groups_from_pattern
    from .analyses.describe_model import describe_model as describe_model
    from .analyses.grouping_profile import grouping_profile as grouping_profile
    from .analyses.relation_scores import relation_scores as relation_scores
    from .analyses.token_grid import token_grid as token_grid
    from .analyses.value_mixing import value_mixing as value_mixing
    from .analyses.value_mixing import value_mixing_from as value_mixing_from
    from .capture.bundled import load_default_model as load_default_model
    from .capture.loading import load_model as load_model
    from .capture.weights import HeadWeights as HeadWeights
    from .errors import HeadMapsError as HeadMapsError
    from .relations import Relation as Relation
    from .relations import load_relations as load_relations
    from .results.association_heads import AssociationHeads as AssociationHeads
    from .results.attention_groups import AttentionGroups as AttentionGroups
    from .results.base import Result as Result
    from .results.grouping_profile import GroupingProfile as GroupingProfile
    from .results.relation_scores import RelationScores as RelationScores
    from .results.token_grid import TokenGrid as TokenGrid
    from .results.value_mixing import ValueMixing as ValueMixing
    from .results.worked_example import WorkedExample as WorkedExample
    from .types import HeadIndex as HeadIndex

__version__ = "0.1.0"

_HOMES = {
    "AssociationHeads": ".results.association_heads",
    "AttentionGroups": ".results.attention_groups",
    "GroupingProfile": ".results.grouping_profile",
    "HeadIndex": ".types",
    "HeadMapsError": ".errors",
    "HeadWeights": ".capture.weights",
    "Relation": ".relations",
    "RelationScores": ".results.relation_scores",
    "Result": ".results.base",
    "TokenGrid": ".results.token_grid",
    "ValueMixing": ".results.value_mixing",
    "WorkedExample": ".results.worked_example",
    "association_heads": ".analyses.association_heads",
    "attention_groups": ".analyses.attention_groups",
    "attention_groups_from_pattern": ".analyses.attention_groups",
    "describe_model": ".analyses.describe_model",
    "grouping_profile": ".analyses.grouping_profile",
    "load_default_model": ".capture.bundled",
    "load_relations": ".relations",
    "load_model": ".capture.loading",
    "relation_scores": ".analyses.relation_scores",
    "token_grid": ".analyses.token_grid",
    "value_mixing": ".analyses.value_mixing",
    "value_mixing_from": ".analyses.value_mixing",
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
