"""Rows of the calibration table: what a statement of the package does on heads that know nothing.

A row is a function that measures, on real weights, how often a p-value is small although nothing is there, how often a
95% interval covers the truth, or how often a verdict is given that should not be. It registers itself:

    @row("relation_scores", "p_value", null="inner rotation of W_O")
    def relation_p_values(bench: Bench) -> Measured:
        return Measured.of_p_values(p)

Every p-value, interval and verdict of a result needs one (``tests/test_calibration.py`` asks for it).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

AT_05, AT_01 = 0.06, 0.015
"""Most that may be below .05 and .01 on null heads."""

COVERAGE = (0.92, 0.98)
"""Coverage that a 95% interval may have."""


@dataclass(frozen=True)
class Measured:
    """What was measured: shares of small p-values, a coverage, or a share of false verdicts; and from how many."""

    n: int
    at_05: float | None = None
    at_01: float | None = None
    coverage: float | None = None
    false_verdicts: float | None = None

    @classmethod
    def of_p_values(cls, p_values: Iterable[float] | Tensor) -> "Measured":
        """Of p-values of statements that are all false; NaN (no test made) is left out."""
        p = torch.as_tensor(p_values if isinstance(p_values, Tensor) else list(p_values), dtype=torch.float64).flatten()
        p = p[~p.isnan()]
        # 1 of 20 is above .05 in single precision.
        at_05, at_01 = (float((p <= level + 1e-7).double().mean()) for level in (0.05, 0.01))
        return cls(len(p), at_05=at_05, at_01=at_01)

    @classmethod
    def of_intervals(cls, covered: Iterable[bool] | Tensor) -> "Measured":
        """Of intervals, by whether each holds the truth."""
        inside = torch.as_tensor(covered if isinstance(covered, Tensor) else list(covered)).flatten().double()
        return cls(len(inside), coverage=float(inside.mean()))

    @classmethod
    def of_verdicts(cls, given: Iterable[bool] | Tensor) -> "Measured":
        """Of verdicts that should not be given."""
        wrong = torch.as_tensor(given if isinstance(given, Tensor) else list(given)).flatten().double()
        return cls(len(wrong), false_verdicts=float(wrong.mean()))

    @property
    def holds(self) -> bool:
        """Whether it is within what the package promises."""
        if self.at_05 is not None and self.at_01 is not None:
            return self.at_05 <= AT_05 and self.at_01 <= AT_01
        if self.coverage is not None:
            return COVERAGE[0] <= self.coverage <= COVERAGE[1]
        return self.false_verdicts is not None and self.false_verdicts <= AT_05


@dataclass(eq=False)
class Bench:
    """What rows share: the default model, and how much work to do. Hashable: rows cache by it what several of them use.

    Attributes:
        quick: A slice for CI: seconds a row instead of minutes.
        seed: Of everything drawn.
    """

    quick: bool = False
    seed: int = 0

    @cached_property
    def model(self) -> Any:
        from tl_headmaps import load_default_model

        return load_default_model()

    @cached_property
    def weights(self) -> Any:
        from tl_headmaps import HeadWeights

        return HeadWeights.from_model(self.model)

    def generator(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def count(self, whole: int, quick: int) -> int:
        """How many draws to make."""
        return quick if self.quick else whole


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        analysis: The public call.
        claim: The fields of its result that are put to the test.
        null: What the statement is tried on.
        measure: Measures it.
        why: Why it is not within its limits, and what the result says about it; empty where it is.
    """

    analysis: str
    claim: str
    null: str
    measure: Callable[[Bench], Measured] = field(repr=False)
    why: str = ""

    @property
    def name(self) -> str:
        return f"{self.analysis}: {self.claim}, {self.null}"

    @property
    def module(self) -> str:
        """Where it is written: without the folder."""
        return self.measure.__module__.rpartition(".")[2]


ROWS: list[Row] = []


def row(analysis: str, *claims: str, null: str, why: str = "") -> Callable[..., Callable[[Bench], Measured]]:
    """Register what measures one or several fields of an analysis' result."""

    def register(measure: Callable[[Bench], Measured]) -> Callable[[Bench], Measured]:
        ROWS.append(Row(analysis, ", ".join(claims), null, measure, why))
        return measure

    return register
