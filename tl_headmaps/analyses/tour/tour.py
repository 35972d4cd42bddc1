"""A tour of a model: sections of steps, each step one result with its command and what it shows.

The steps themselves are in :mod:`.sections`.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ...capture.weights import HeadWeights
from ...core.errors import HeadMapsError, UsageError
from ...results import Result

Step: TypeAlias = Callable[["Tour"], "Finding"]
"""One question to a model."""


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
        drawn: Options of the result's figure that the arguments choose too.
    """

    name: str
    result: Result
    arguments: tuple[str, ...]
    says: str
    headline: str = ""
    printed: str = ""
    drawn: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """Why a step cannot be done for this model."""

    why: str


@dataclass(frozen=True)
class Section:
    """Steps that belong together; ``about`` says what is done in them and holds for every model.

    The results of a section in ``columns`` stand side by side on a page.
    """

    title: str
    about: str
    steps: tuple[Step, ...]
    columns: bool = False


@dataclass(frozen=True)
class SectionReport:
    """The outcomes of a section's steps, and how many seconds they took."""

    section: Section
    outcomes: tuple[Finding | Refusal, ...]
    seconds: float


@dataclass
class Tour:
    """A model and what was found so far; steps may look at each other, and each is done once."""

    model: Any
    weights: HeadWeights = field(init=False)
    outcomes: dict[Step, Finding | HeadMapsError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = HeadWeights.of(self.model)

    def run(self, section: Section) -> SectionReport:
        """Run the steps of a section; after a step that cannot be done, the tour goes on."""
        start = time.perf_counter()
        outcomes = tuple(map(self._outcome, section.steps))
        told = tuple(each if isinstance(each, Finding) else Refusal(str(each)) for each in outcomes)
        return SectionReport(section, told, time.perf_counter() - start)

    def _outcome(self, step: Step) -> Finding | HeadMapsError:
        if step not in self.outcomes:
            try:
                self.outcomes[step] = step(self)
            except HeadMapsError as error:
                self.outcomes[step] = error
        return self.outcomes[step]

    def found(self, step: Step) -> Any:
        """The result of an earlier step, or None where it was not done."""
        outcome = self.outcomes.get(step)
        return outcome.result if isinstance(outcome, Finding) else None

    def needed(self, step: Step) -> Any:
        """The result of a step that another one cannot do without; it is done now if it was not."""
        self._outcome(step)
        result = self.found(step)
        if result is None:
            raise UsageError(f"This step looks at that of {step.__name__}, which could not be done for this model.")
        return result
