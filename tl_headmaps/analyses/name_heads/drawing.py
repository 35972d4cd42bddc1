"""Names of heads as a map: how much of a head its best name explains, the name when it is pinned."""

import torch

from ...core.types import HeadIndex
from ...renderers.figure import Figure
from ...renderers.grids import MapLayer
from ...renderers.heat import head_map
from ..salient_operations.drawing import evidence
from ..salient_operations.result import UNCLEAR
from .result import PUBLISHED_COVERAGE, HeadNames


def head_names_figure(names: HeadNames) -> Figure:
    """Share of salient mappings explained by the best predicate, of all heads or of the named ones alone."""
    null = torch.tensor([[entry.null_mean for entry in row] for row in names.names])
    q = torch.tensor([[entry.q_value for entry in row] for row in names.names])
    named = names.values.clone()
    for layer, row in enumerate(names.names):
        for head, entry in enumerate(row):
            if entry.name == UNCLEAR:
                named[layer, head] = float("nan")
    drill = {
        str(HeadIndex(layer, head)): {entry.name: evidence(entry)}
        for layer, row in enumerate(names.names)
        for head, entry in enumerate(row)
    }
    parts = []
    for part, share in names.coverage().items():
        published = f" (published: {PUBLISHED_COVERAGE[part]})" if part in PUBLISHED_COVERAGE else ""
        parts.append(f"{part} {share:.0%}{published}")
    return head_map(
        [
            MapLayer("named heads", named, null=null, details={"q": q}),
            MapLayer("all heads", names.values, null=null, details={"q": q}),
        ],
        title=f"Names of heads, {names.circuit.upper()} circuits, preset {names.provenance.options['preset']}",
        unit="share of mappings explained",
        signed=False,
        switches=("heads", "measure"),
        drill=drill,
        note=f"Heads with a name: {', '.join(parts)}. Search finds a name, such as copy.",
    )
