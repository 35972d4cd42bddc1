"""Accuracy by ablated and tested function as a grid."""

import torch

from ...drawing import draws
from ...results.task_verification import TaskVerification
from ...tasks import FUNCTIONS
from .. import heat
from ..figure import Figure


@draws(TaskVerification)
def task_verification_figure(found: TaskVerification) -> Figure:
    """Rows: whose heads are ablated (first none, last random others); columns: whose items are asked."""
    names = [FUNCTIONS.get(function, function) for function in found.functions]
    values = {
        kind: torch.stack(
            [
                getattr(found, f"clean{kind}"),
                *getattr(found, f"accuracy{kind}"),
                getattr(found, f"random{kind}"),
            ]
        )
        for kind in ("", "_low", "_high")
    }
    return heat.token_grid(
        values[""],
        ["none", *names, "random others"],
        names,
        title="Accuracy after ablating the heads of a function",
        unit="share of items right",
        rows="ablated",
        columns="tested",
        details={"95% from": values["_low"], "95% to": values["_high"]},
        note=f"Chance: {', '.join(f'{value:.2f}' for value in sorted(set(found.chance.tolist())))}.",
    )
