"""Accuracy by ablated and tested function as a grid."""

import torch

from ...data.tasks import FUNCTIONS
from ...renderers import heat
from ...renderers.figure import Figure
from .result import TaskVerification


def task_verification_figure(found: TaskVerification) -> Figure:
    """Rows: whose heads are ablated (first none, last random others); columns: whose items are asked."""
    names = [FUNCTIONS.get(function, function) for function in found.functions]
    # The mark comes first: the ends of long labels are cut.
    asked = [name if able else f"† {name}" for name, able in zip(names, found.testable, strict=True)]
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
    chances = ", ".join(f"{value:.2f}" for value in sorted(set(found.chance.tolist())))
    return heat.token_grid(
        values[""],
        ["none", *names, "random others"],
        asked,
        title="Accuracy after ablating the heads of a function",
        unit="share of items right",
        rows="ablated",
        columns="tested",
        details={"95% from": values["_low"], "95% to": values["_high"]},
        note=f"Chance: {chances}. {_verdict(found, names)}",
    )


def _verdict(found: TaskVerification, names: list[str]) -> str:
    """Own heads against random ones in a sentence or two."""
    by_verdict: dict[str, list[str]] = {}
    for name, verdict in zip(names, found.verdicts, strict=True):
        by_verdict.setdefault(verdict, []).append(name)
    said = {
        "worse": "Worse without own heads than without random ones (paired exact test, false discovery rate 5%)",
        "better": "Better without own heads than without random ones",
        "no difference": "No difference shown",
        "not testable": "† Not testable, the interval with all heads reaches chance",
    }
    return " ".join(f"{said[verdict]}: {', '.join(by_verdict[verdict])}." for verdict in said if verdict in by_verdict)
