"""Names for heads from their salient mappings: every predicate on every head, with false discoveries controlled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch

from ..core.types import HeadIndex
from ..scorers.statistics import q_values
from . import predicates as _ours  # noqa: F401  (fills the catalogue)
from .catalogue import LEAST_SCORE, Explainer, Explanation, Mapping, best_first, catalogue

UNCLEAR = "unclear"
"""The name of a head no predicate explains better than chance."""

Describe: TypeAlias = Callable[[HeadIndex, list[tuple[str, list[str]]], str], str]
"""Gets a head, its mappings and a prompt; returns a short description."""

NAMING_TOKENS, NAMING_TARGETS = 30, 5
"""Names are always given on this many salient tokens and targets, however many are shown."""

_LEVEL = 0.05
_LONGEST_DESCRIPTION = 400


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
        description: What the user's ``describe`` returned.
        description_error: Why that was not usable.
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
        if self.description is not None:
            rows.append(["described as", self.description])
        return rows


class Namer:
    """Names each head by the predicate that explains its mappings best, if that beats its null among all tests made.

    Args:
        describe: The user's own way to describe a head, if any.
    """

    def __init__(self, describe: Describe | None = None) -> None:
        self.describe = describe
        self._explainer = Explainer(catalogue())

    @property
    def catalogue(self) -> list[str]:
        """Names of the predicates tried."""
        return [entry.name for entry in self._explainer.predicates]

    @property
    def failed(self) -> dict[str, str]:
        """Predicates that raised."""
        return self._explainer.failed

    def names(
        self, heads: Sequence[HeadIndex], promoted: Sequence[list[Mapping]], suppressed: Sequence[list[Mapping]]
    ) -> tuple[HeadName, ...]:
        """One name for each head."""
        explained = [
            [*self._explainer.explain(up, "promote"), *self._explainer.explain(down, "suppress")]
            for up, down in zip(promoted, suppressed, strict=True)
        ]
        # A predicate that raised on one head was tried on earlier heads only, so it is dropped for all of them.
        explained = [[entry for entry in entries if entry.predicate not in self.failed] for entries in explained]
        p_values = torch.tensor([entry.p_value for entries in explained for entry in entries], dtype=torch.float64)
        q_of = dict(zip(p_values.tolist(), q_values(p_values).tolist(), strict=True))
        return tuple(
            self._name(head, best_first(entries), q_of, mappings)
            for head, entries, mappings in zip(heads, explained, promoted, strict=True)
        )

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

    def _name(
        self, head: HeadIndex, ranked: list[Explanation], q_of: dict[float, float], mappings: list[Mapping]
    ) -> HeadName:
        best = ranked[0] if ranked else Explanation("", "promote", 0.0, 0.0, 1.0)
        second = next((entry for entry in ranked[1:] if entry.score > 0), None)
        q_value = q_of.get(best.p_value, 1.0)
        earned = best.score >= LEAST_SCORE and q_value < _LEVEL
        description, error = self._described(head, mappings)
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
            description=description,
            description_error=error,
        )

    def _described(self, head: HeadIndex, mappings: list[Mapping]) -> tuple[str | None, str | None]:
        if self.describe is None:
            return None, None
        listed = [(source, list(targets)) for source, targets in mappings]
        try:
            description: object = self.describe(head, listed, description_prompt(head, mappings))
        except Exception as error:  # a user's code may raise anything: it is recorded, the name does not depend on it
            return None, f"{type(error).__name__}: {error}"
        if not isinstance(description, str) or not description.strip():
            return None, f"returned {description!r} instead of a text"
        if len(description) > _LONGEST_DESCRIPTION:
            return None, f"returned {len(description)} characters; a description has at most {_LONGEST_DESCRIPTION}"
        return description.strip(), None


def description_prompt(head: HeadIndex, mappings: Sequence[Mapping]) -> str:
    """The prompt that asks a language model about a head."""
    lines = [f"{source!r} -> {', '.join(map(repr, targets))}" for source, targets in mappings]
    return (
        f"Attention head {head} of a language model promotes these tokens when it attends to a source token:\n\n"
        + "\n".join(lines)
        + "\n\nName the one operation that turns most sources into one of their targets, in at most ten words. "
        "If fewer than a third of the lines share an operation, answer: unclear."
    )
