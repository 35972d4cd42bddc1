"""Component maps: layers by matrices."""

from types import EllipsisType

from ...renderers.figure import Figure
from ...renderers.grids import MapLayer
from ...renderers.heat import component_map
from .result import ComponentMap, MeasuredComponents


def component_map_figure(found: ComponentMap) -> Figure:
    """One value for every weight matrix, with its interval and random baseline where there is one."""
    return component_map(
        [layer_of(found, found.metric)],
        found.components,
        title=f"{found.metric.replace('_', ' ').capitalize()} of every matrix of {found.provenance.model}",
        unit=colour_bar_of(found),
        note=note_of(found),
    )


def layer_of(found: MeasuredComponents, name: str, at: "int | EllipsisType" = ...) -> MapLayer:
    """The whole map, or one component of it."""
    low, high, random = (
        None if cells is None else cells[at] for cells in (found.interval_low, found.interval_high, found.baseline)
    )
    interval = None if low is None or high is None else (low, high)
    if found.relative:
        # Chance is 1 everywhere; what was divided by is worth a look.
        return MapLayer(name, found.values[at], interval=interval, details={"divided by": random})
    return MapLayer(name, found.values[at], interval=interval, null=random)


def colour_bar_of(found: MeasuredComponents) -> str:
    """What a value is, and what it would be by chance."""
    random = _random(found)
    return f"{found.unit}; random: {random}" if random and not found.relative else found.unit


def note_of(found: MeasuredComponents) -> str:
    """What the map was made from."""
    parts = []
    if found.n_batches:
        parts.append(f"{found.n_tokens:,} tokens in {found.n_batches} batches.")
    if found.relative:
        parts.append(f"Divided by the values of random matrices or subspaces: {_random(found)}.")
    return " ".join(parts)


def _random(found: MeasuredComponents) -> str:
    known = [] if found.baseline is None else found.baseline[~found.baseline.isnan()].tolist()
    ends = dict.fromkeys(f"{end(known):.3g}" for end in (min, max)) if known else {}
    return " to ".join(ends)
