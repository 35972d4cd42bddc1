"""Relation scores as head maps, one relation at a time or side by side."""

from ...renderers import heat
from ...renderers.figure import Figure
from ...renderers.grids import MapLayer
from .result import IMPLEMENTS_Q, IMPLEMENTS_SCORE, RelationScores


def relation_scores_figure(scores: RelationScores, *, side_by_side: bool = False) -> Figure:
    """Every relation's scores by layer and head, with null, interval and q-value; promotion and suppression."""
    layers = []
    for number, name in enumerate(scores.relations):
        layers.append(
            MapLayer(
                name,
                scores.promote[number],
                group="promotes",
                null=scores.null_mean[number],
                interval=(scores.interval_low[number], scores.interval_high[number]),
                details={"q": scores.q_value[number]},
            )
        )
        layers.append(
            MapLayer(
                name,
                scores.suppress[number],
                group="suppresses",
                null=scores.suppress_null_mean[number],
                details={"q": scores.suppress_q_value[number]},
            )
        )
    preset = scores.provenance.options.get("preset", "")
    title = f"{scores.circuit.upper()} relation scores, preset {preset}"
    unit = "share of pairs"
    counts = sorted(set(scores.k))
    note = (
        f"Share of pairs whose target is among the k = {', '.join(map(str, counts))} strongest tokens. "
        f"A head implements a relation at a score of {IMPLEMENTS_SCORE} or more with q < {IMPLEMENTS_Q}."
    )
    if side_by_side:
        return heat.panels(
            [layer for layer in layers if layer.group == "promotes"], title=title, unit=unit, signed=False, note=note
        )
    return heat.head_map(layers, title=title, unit=unit, signed=False, switches=("relation", "direction"), note=note)
