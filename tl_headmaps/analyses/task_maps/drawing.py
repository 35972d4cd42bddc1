"""Task maps as panels with one colour bar, and how they repeat with another seed."""

from ...data.tasks import FUNCTIONS
from ...renderers import heat
from ...renderers.charts import scatter
from ...renderers.figure import Figure
from ...renderers.grids import MapLayer
from .result import STABLE, TaskMaps


def task_maps_figure(maps: TaskMaps, *, stability: bool = False) -> Figure:
    """Every function's importance by layer and head; with ``stability``, one seed against another instead."""
    if stability:
        return _stability(maps)
    layers = [
        MapLayer(
            FUNCTIONS.get(function, function),
            maps.importance_normalised[number],
            details={
                "importance": maps.importance[number],
                "95% from": maps.interval_low[number],
                "95% to": maps.interval_high[number],
                "shuffled labels": maps.null_mean[number],
            },
        )
        for number, function in enumerate(maps.functions)
    ]
    overall = maps.overall_accuracy
    note = (
        f"Share of what a {maps.probe} probe reads from each head beyond the items' words. All items: probe "
        f"{overall['probe']:.2f}, words {overall['words']:.2f}, most frequent function {overall['majority']:.2f}."
    )
    if not maps.stable:
        note += f" Unstable: rank correlation with another seed below {STABLE}."
    return heat.panels(layers, title="Heads by cognitive function", unit="share of all importance", note=note)


def _stability(maps: TaskMaps) -> Figure:
    function = int(maps.stability.argmin())
    name = FUNCTIONS.get(maps.functions[function], maps.functions[function])
    return scatter(
        maps.importance[function],
        maps.importance_again[function],
        title=f"{name}, the least stable of {len(maps.functions)}: rank correlation {maps.stability[function]:.2f}",
        x_name="importance with this seed",
        y_name="importance with another seed",
        diagonal=True,
    )
