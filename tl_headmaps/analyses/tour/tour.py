"""A tour of a model: sections of steps, each step one result with its command and what it shows.

What the steps are is in :mod:`.tour_sections`; here is how they are taken.
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
        arguments: The command that makes it, behind ``tl-headmaps`` and before the choice of a model.
        says: What is seen, in a sentence or two.
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
    """A step that this model cannot take, with the sentence that says why."""

    why: str


@dataclass(frozen=True)
class Section:
    """Steps that belong together; ``about`` says what is done in them and holds for every model."""

    title: str
    about: str
    steps: tuple[Callable[["Tour"], Finding], ...]


@dataclass(frozen=True)
class Taken:
    """What came out of a section, and how many seconds it took."""

    section: Section
    outcomes: tuple[Finding | Refusal, ...]
    seconds: float


@dataclass
class Tour:
    """A model and what was found so far; later steps look at what earlier ones found."""

    model: Any
    weights: HeadWeights = field(init=False)
    found: dict[str, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = HeadWeights.of(self.model)

    def take(self, section: Section) -> Taken:
        """Take the steps of a section; one that is refused leaves its sentence, and the tour goes on."""
        start = time.perf_counter()
        outcomes: list[Finding | Refusal] = []
        for step in section.steps:
            try:
                finding = step(self)
            except HeadMapsError as error:
                outcomes.append(Refusal(str(error)))
            else:
                self.found[finding.name] = finding.result
                outcomes.append(finding)
        return Taken(section, tuple(outcomes), time.perf_counter() - start)

    def earlier(self, name: str) -> Any:
        """What an earlier step found."""
        if name not in self.found:
            raise UsageError(f"This step looks at {name.replace('_', ' ')}, which could not be made for this model.")
        return self.found[name]
