"""Static against dynamic scores: one point per head."""

from typing import Literal, TypeAlias

import torch

from ...core.types import HeadIndex
from ...renderers.charts import scatter
from ...renderers.figure import Figure
from .result import Validation

Context: TypeAlias = Literal["without", "with"]


def validation_figure(found: Validation, *, relation: str | None = None, context: Context | None = None) -> Figure:
    """What heads write in prompts against what their weights say, averaged over templates.

    Args:
        found: The result.
        relation: One relation; all of them by default.
        context: Attention as it is (``"with"``) or wholly on the source (``"without"``); by default both for one
            relation, and without context for several.
    """
    names = list(found.relations) if relation is None else [found.relations[found.number(relation)]]
    contexts = [context] if context is not None else ["without", "with"] if len(names) == 1 else ["without"]
    n_layers, n_heads = found.static_promote.shape[1:]
    heads = [str(HeadIndex(layer, head)) for layer in range(n_layers) for head in range(n_heads)]
    x, y, points, groups = [], [], [], []
    for name in names:
        number = found.number(name)
        for label in contexts:
            dynamic = found.promote_with if label == "with" else found.promote_without
            x.append(found.static_promote[number].flatten())
            y.append(dynamic[number].mean(0).flatten())
            points += heads if len(names) == 1 else [f"{head} {name}" for head in heads]
            groups += [f"{label} context" if len(names) == 1 else name] * len(heads)
    without, with_ = found.agreement["pearson_without"], found.agreement["pearson_with"]
    agreement = ", ".join(
        f"{name} {without[found.number(name)]:.2f} without and {with_[found.number(name)]:.2f} with context"
        for name in names
    )
    return scatter(
        torch.cat(x),
        torch.cat(y),
        names=points,
        groups=groups,
        title=f"Static and dynamic scores, preset {found.provenance.options['preset']}: {', '.join(names)}",
        x_name="static score (weights alone)",
        y_name="dynamic score (prompts)",
        diagonal=True,
        note=f"Pearson correlation over heads and templates: {agreement}.",
    )
