"""What kind of tokens each head attends to, as head maps to switch between."""

import torch

from ...renderers.figure import Figure
from ...renderers.grids import MapLayer
from ...renderers.heat import head_map
from .result import GroupingProfile


def grouping_profile_figure(found: GroupingProfile) -> Figure:
    """Each score by layer and head, over all queries and over those where it is possible."""
    layers = []
    for number, name in enumerate(found.scores):
        even = torch.full_like(found.values[number], float(found.even[number]))
        layers.append(
            MapLayer(
                name.replace("_", " "),
                found.values[number],
                group="all queries",
                null=even,
                interval=(found.interval_low[number], found.interval_high[number]),
            )
        )
        layers.append(
            MapLayer(
                name.replace("_", " "),
                found.where_possible[number],
                group="queries where it is possible",
                interval=(found.where_possible_low[number], found.where_possible_high[number]),
            )
        )
    return head_map(
        layers,
        title=f"What heads attend to, over {found.n_texts} texts ({found.n_tokens:,} tokens)",
        unit="share of attention",
        signed=False,
        switches=("attention to", "over"),
        note="Null: what even attention over all earlier tokens would give.",
    )
