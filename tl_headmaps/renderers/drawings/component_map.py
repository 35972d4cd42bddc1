"""Component maps: layers by matrices."""

from ...drawing import draws
from ...results.component_map import ComponentMap, MeasuredComponents
from ..figure import Figure
from ..grids import MapLayer
from ..heat import component_map


@draws(ComponentMap)
def component_map_figure(found: ComponentMap) -> Figure:
    """One value for every weight matrix, with its interval and random baseline where there is one."""
    return component_map(
        [_layer(found)],
        found.components,
        title=f"{found.metric.replace('_', ' ').capitalize()} of every matrix of {found.provenance.model}",
        unit=found.unit,
        note=note_of(found),
    )


def _layer(found: ComponentMap) -> MapLayer:
    low, high = found.interval_low, found.interval_high
    interval = None if low is None or high is None else (low, high)
    return MapLayer(found.metric, found.values, interval=interval, null=found.baseline)


def note_of(found: MeasuredComponents) -> str:
    """What the map was made from, and its random baseline."""
    parts = []
    if found.n_batches:
        parts.append(f"{found.n_tokens:,} tokens in {found.n_batches} batches.")
    if found.baseline is not None:
        known = found.baseline[~found.baseline.isnan()]
        if len(known):
            parts.append(f"Random baseline: {float(known.min()):.3g} to {float(known.max()):.3g}.")
    return " ".join(parts)
