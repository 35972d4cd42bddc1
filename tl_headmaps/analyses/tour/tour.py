"""A tour of a model: sections of steps, each step one result with its command and what it shows.

The steps themselves are in :mod:`.sections`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...capture.weights import HeadWeights
from ...core.errors import HeadMapsError, UsageError
from ...results import Result


@dataclass(frozen=True)
class Finding:
    """One result with what it shows.

    Attributes:
        name: Name of its file, without suffix.
        result: The result.
        arguments: Arguments of ``tl-headmaps`` that make it, without the choice of a model.
        says: What it shows, in a sentence or two.
        headline: The same in a few words, for a table of contents.
        printed: What a terminal shows below the sentences.
    """

    name: str
    result: Result
    arguments: tuple[str, ...]
    says: str
    headline: str = ""
    printed: str = ""


@dataclass(frozen=True)
class Refusal:
    """Why a step cannot be done for this model."""

    why: str


@dataclass(frozen=True)
class Section:
    """Steps that belong together; ``about`` says what is done in them and holds for every model."""

    title: str
    about: str
    steps: tuple[Callable[["Tour"], Finding], ...]


@dataclass(frozen=True)
class SectionReport:
    """The outcomes of a section's steps, and how many seconds they took."""

    section: Section
    outcomes: tuple[Finding | Refusal, ...]
    seconds: float


@dataclass
class Tour:
    """A model and its results so far; later steps look at those of earlier ones."""

    model: Any
    weights: HeadWeights = field(init=False)
    results: dict[str, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = HeadWeights.of(self.model)

    def run(self, section: Section) -> SectionReport:
        """Run the steps of a section; after a step that cannot be done, the tour goes on."""
        start = time.perf_counter()
        outcomes: list[Finding | Refusal] = []
        for step in section.steps:
            try:
                finding = step(self)
            except HeadMapsError as error:
                outcomes.append(Refusal(str(error)))
            else:
                self.results[finding.name] = finding.result
                outcomes.append(finding)
        return SectionReport(section, tuple(outcomes), time.perf_counter() - start)

    def earlier(self, name: str) -> Any:
        """The result of an earlier step."""
        if name not in self.results:
            raise UsageError(f"This step looks at {name.replace('_', ' ')}, which could not be made for this model.")
        return self.results[name]
