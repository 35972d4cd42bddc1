"""Which heads bring two tokens together: the gain in association by layer and head."""

from ...renderers.figure import Figure
from ...renderers.grids import MapLayer
from ...renderers.heat import head_map
from .result import AssociationHeads


def association_heads_figure(found: AssociationHeads) -> Figure:
    """Gain in cosine and in dot product, and the attention behind it."""
    query, key = found.tokens[found.query].strip(), found.tokens[found.key].strip()
    gains = {
        "cosine": (found.gain("cosine"), found.before_cosine, found.after_cosine),
        "dot product": (found.gain("dot"), found.before_dot, found.after_dot),
    }
    layers = [
        MapLayer(f"gain in {name}", gain, details={"before": before, "after": after}, unit=f"gain in {name}")
        for name, (gain, before, after) in gains.items()
    ]
    if found.measure == "dot":
        layers.reverse()
    layers.append(MapLayer("attention", found.attention, unit="attention"))
    return head_map(
        layers,
        title=f"Heads that bring '{query}' and '{key}' together",
        unit="gain",
        switches=("measure", "map"),
        note=" ".join(found.notes),
    )
