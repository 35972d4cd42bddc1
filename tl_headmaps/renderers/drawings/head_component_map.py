"""Component maps opened into heads: layers by heads, one map for each of q, k, v, o."""

from ...drawing import draws
from ...results.component_map import HeadComponentMap
from ..figure import Figure
from ..grids import MapLayer
from ..heat import head_map
from .component_map import note_of


@draws(HeadComponentMap)
def head_component_map_figure(found: HeadComponentMap) -> Figure:
    """One map for each attention matrix; key/value heads where a model groups them."""
    layers = []
    for number, name in enumerate(found.components):
        low, high = found.interval_low, found.interval_high
        layers.append(
            MapLayer(
                name,
                found.values[number],
                interval=None if low is None or high is None else (low[number], high[number]),
                null=None if found.baseline is None else found.baseline[number],
            )
        )
    return head_map(
        layers,
        title=f"{found.metric.replace('_', ' ').capitalize()} by head of {found.provenance.model}",
        unit=found.unit,
        switches=("component", "map"),
        note=note_of(found),
    )
