"""Accuracy while heads are switched off, beside random heads and control relations."""

import torch

from ...renderers.charts import Line, curve
from ...renderers.figure import Figure
from ...renderers.listing import text_figure
from .result import AblationCurves


def ablation_curves_figure(found: AblationCurves) -> Figure:
    """The relation's accuracy with its 95% interval, the range of random heads, and each control relation."""
    title = f"Ablating the heads of {found.relation}"
    if not found.heads:
        return text_figure(str(found), title=title)
    lines = [Line("its heads", found.curve.accuracy, found.curve.low, found.curve.high)]
    if found.random_curves:
        drawn = torch.stack([one.accuracy for one in found.random_curves])
        lines.append(
            Line(
                "random heads, mean and range",
                drawn.mean(0),
                drawn.amin(0),
                drawn.amax(0),
            )
        )
    for control in found.controls:
        label = f"control {control.relation}, same heads"
        lines.append(Line(label, control.curve.accuracy, control.curve.low, control.curve.high))
    order = " ".join(map(str, found.heads[:12])) + (" ..." if len(found.heads) > 12 else "")
    return curve(
        list(range(len(found.heads) + 1)),
        lines,
        title=title,
        x_name="heads switched off",
        y_name="accuracy of the next token",
        y_limits=(0.0, 1.0),
        note=f"Prompt: {found.template}. {found.n_pairs} pairs. Order: {order}. "
        f"Random heads: {len(found.random_curves)} draws; other bands are 95% intervals.",
    )
