"""Component maps opened into heads: layers by heads, one map for each of q, k, v, o."""

from ...renderers.figure import Figure
from ...renderers.heat import head_map
from .drawing import colour_bar_of, layer_of, note_of
from .result import HeadComponentMap


def head_component_map_figure(found: HeadComponentMap) -> Figure:
    """One map for each attention matrix; key/value heads where a model groups them."""
    note = note_of(found)
    if bool(found.values.isnan().all(1).any()):
        note += " Query heads share keys and values: attn.k and attn.v have one column for each key/value head."
    return head_map(
        [layer_of(found, name, number) for number, name in enumerate(found.components)],
        title=f"{found.metric.replace('_', ' ').capitalize()} by head of {found.provenance.model}",
        unit=colour_bar_of(found),
        switches=("component", "map"),
        note=note.strip(),
    )
