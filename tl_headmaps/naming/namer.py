"""Names for heads from their salient mappings: every predicate on every head, with false discoveries controlled."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..scorers.statistics import q_values
from . import predicates as _ours  # noqa: F401  (fills the catalogue)
from .catalogue import LEAST_SCORE, Explainer, Explanation, Mapping, best_first, catalogue

UNCLEAR = "unclear"
"""The name of a head no predicate explains better than chance."""

NAMING_TOKENS, NAMING_TARGETS = 30, 5
"""Names are always given on this many salient tokens and targets, however many are shown."""

_LEVEL = 0.05


@dataclass(frozen=True)
class HeadName:
    """The best explanation of one head.

    Attributes:
        name: A predicate of the catalogue, ``suppress ...`` where it holds for suppressed targets, or ``unclear``.
        score: Share of the salient mappings that the best predicate explains, even where that earns no name.
        null_mean: The same with target lists dealt to sources at random.
        lift: Score over null.
        p_value: Probability that dealt lists score as well.
        q_value: The same after Benjamini-Hochberg over all heads and predicates of this result.
        best: The best predicate, whether or not it earned the name.
        runner_up: The second-best predicate, if there is one, with its score and p-value.
        description, description_error: None, but in files of versions before, where a user's function could describe a
            head.
    """

    name: str
    score: float
    null_mean: float
    lift: float
    p_value: float
    q_value: float
    best: str | None = None
    runner_up: str | None = None
    runner_up_score: float = 0.0
    runner_up_p_value: float = 1.0
    description: str | None = None
    description_error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the name first."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "HeadName":
        """Inverse of :meth:`to_dict`; other entries are ignored."""
        return cls(**{entry.name: values[entry.name] for entry in fields(cls)})

    def evidence(self) -> list[list[str]]:
        """The name and the evidence for it, as rows of two cells."""
        rows = [
            ["name", self.name],
            ["best predicate", self.best or "none"],
            ["share explained", f"{self.score:.2f} (null {self.null_mean:.2f})"],
            ["p, q", f"{self.p_value:.2g}, {self.q_value:.2g}"],
        ]
        if self.runner_up is not None:
            rows.append(["runner-up", f"{self.runner_up} {self.runner_up_score:.2f}"])
        return rows


class Namer:
    """Names each head by the predicate that explains its mappings best, if that beats its null among all tests made."""

    def __init__(self) -> None:
        self._explainer = Explainer(catalogue())

    @property
    def catalogue(self) -> list[str]:
        """Names of the predicates tried."""
        return [entry.name for entry in self._explainer.predicates]

    @property
    def failed(self) -> dict[str, str]:
        """Predicates that raised."""
        return self._explainer.failed

    def names(self, promoted: Sequence[list[Mapping]], suppressed: Sequence[list[Mapping]]) -> tuple[HeadName, ...]:
        """One name for each head, from what it promotes and suppresses."""
        explained = [
            [*self._explainer.explain(up, "promote"), *self._explainer.explain(down, "suppress")]
            for up, down in zip(promoted, suppressed, strict=True)
        ]
        # A predicate that raised on one head was tried on earlier heads only, so it is dropped for all of them.
        explained = [[entry for entry in entries if entry.predicate not in self.failed] for entries in explained]
        p_values = torch.tensor([entry.p_value for entries in explained for entry in entries], dtype=torch.float64)
        q_of = dict(zip(p_values.tolist(), q_values(p_values).tolist(), strict=True))
        return tuple(self._name(best_first(entries), q_of) for entries in explained)

    def suppresses(self, entry: HeadName) -> bool:
        """Whether the best explanation of a head is about the targets it suppresses."""
        return entry.best is not None and entry.best not in self.catalogue

    def explained(self, entry: HeadName, source: str, targets: Sequence[str]) -> list[bool]:
        """Which targets of a source the best predicate of a head explains."""
        name = (entry.best or "").removeprefix("suppress " if self.suppresses(entry) else "")
        tried = next((each for each in self._explainer.predicates if each.name == name), None)
        if tried is None or (tried.sources is not None and source.strip() not in tried.sources):
            return [False] * len(targets)
        return [bool(tried.holds(source, target)) for target in targets]

    @staticmethod
    def _name(ranked: list[Explanation], q_of: dict[float, float]) -> HeadName:
        best = ranked[0] if ranked else Explanation("", "promote", 0.0, 0.0, 1.0)
        second = next((entry for entry in ranked[1:] if entry.score > 0), None)
        q_value = q_of.get(best.p_value, 1.0)
        earned = best.score >= LEAST_SCORE and q_value < _LEVEL
        return HeadName(
            name=best.name if earned else UNCLEAR,
            score=best.score,
            null_mean=best.null_mean,
            lift=best.lift,
            p_value=best.p_value,
            q_value=q_value,
            best=best.name if best.score > 0 else None,
            runner_up=None if second is None else second.name,
            runner_up_score=0.0 if second is None else second.score,
            runner_up_p_value=1.0 if second is None else second.p_value,
        )
