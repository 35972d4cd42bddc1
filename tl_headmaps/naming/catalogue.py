"""Predicates over (source, target): which of them explains a head's mappings, and better than chance?

A *mapping* is a salient source token with the few targets it promotes (or suppresses) most. A predicate explains a
mapping when it holds for at least one of the targets; its score is the share of the head's mappings it explains.

The null deals the same target lists to the same sources at random: source ``i`` is then explained with the share of the
lists that would explain it, and the number explained is a sum of such independent trials, whose tail is exact
(Poisson binomial). A head that writes the same tokens whatever it reads cannot beat it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from ..core.errors import UsageError
from ..scorers.statistics import poisson_binomial_tail

Holds: TypeAlias = Callable[[str, str], bool]
Mapping: TypeAlias = tuple[str, tuple[str, ...]]
"""A source token and its targets."""
NamedDirection: TypeAlias = Literal["promote", "suppress"]

LEAST_SCORE = 0.15
"""Share of mappings a name must explain, as for relations."""


@dataclass(frozen=True)
class Predicate:
    """A possible explanation of a mapping.

    Attributes:
        name: How it is shown.
        holds: Whether it explains a target, given the source; tokens come with their leading spaces.
        examples: (source, target) pairs for which it holds.
        counterexamples: Pairs for which it does not.
        sources: The only source words (without spaces) it can hold for, where they are few; others are not tried.
    """

    name: str
    holds: Holds
    examples: tuple[tuple[str, str], ...]
    counterexamples: tuple[tuple[str, str], ...]
    sources: frozenset[str] | None = None


_CATALOGUE: dict[str, Predicate] = {}


def predicate(
    name: str,
    *,
    examples: Iterable[tuple[str, str]],
    counterexamples: Iterable[tuple[str, str]],
    sources: Iterable[str] | None = None,
) -> Callable[[Holds], Holds]:
    """Add a predicate over (source token, target token) to the catalogue; every later naming uses it.

    Its examples are its test: they are tried at once, and a predicate that contradicts them is refused.

    Args:
        name: The name of a head whose mappings it explains.
        examples: Pairs of tokens for which it holds, with their leading spaces.
        counterexamples: Pairs for which it does not.
        sources: Try it on these source words only; on all by default.

    Example:
        >>> from tl_headmaps import predicate
        >>> @predicate("rhyme", examples=[(" cat", " hat")], counterexamples=[(" cat", " dog")])
        ... def rhyme(source, target):
        ...     return source.strip() != target.strip() and source[-2:] == target[-2:]
        >>> rhyme(" house", " mouse")  # from now on a head may be called "rhyme"
        True
    """

    def add(holds: Holds) -> Holds:
        only = None if sources is None else frozenset(sources)
        entry = Predicate(name, holds, tuple(examples), tuple(counterexamples), only)
        check_examples(entry)
        if name in _CATALOGUE and not _is_rerun(_CATALOGUE[name].holds, holds):
            raise UsageError(f"There is already a predicate {name!r}; choose another name.")
        _CATALOGUE[name] = entry
        return holds

    return add


def _is_rerun(old: Holds, new: Holds) -> bool:
    """Whether a notebook cell that defines a predicate was run again."""
    places = [(getattr(f, "__module__", None), getattr(f, "__qualname__", None)) for f in (old, new)]
    return places[0] == places[1] and "<lambda>" not in str(places[0][1])


def check_examples(entry: Predicate) -> None:
    """Raise unless a predicate has examples of both verdicts and agrees with them."""
    if not entry.examples or not entry.counterexamples:
        raise UsageError(f"The predicate {entry.name!r} needs at least one example and one counterexample.")
    for pairs, expected in ((entry.examples, True), (entry.counterexamples, False)):
        for source, target in pairs:
            if bool(entry.holds(source, target)) is not expected:
                verdict = "does not hold" if expected else "holds"
                kind = "an example" if expected else "a counterexample"
                raise UsageError(
                    f"The predicate {entry.name!r} {verdict} for ({source!r}, {target!r}), which is given as {kind}."
                )


def catalogue() -> list[Predicate]:
    """Every predicate, in the order in which they were added."""
    return list(_CATALOGUE.values())


def forget(name: str) -> None:
    """Take a predicate out of the catalogue."""
    _CATALOGUE.pop(name, None)


@dataclass(frozen=True)
class Explanation:
    """How well one predicate explains the mappings of one head.

    Attributes:
        score: Share of the mappings explained.
        null_mean: The same with target lists dealt at random.
        p_value: Probability that they explain as many; 1 below the least score, where no name is given anyway.
    """

    predicate: str
    direction: NamedDirection
    score: float
    null_mean: float
    p_value: float

    @property
    def lift(self) -> float:
        """Score over null; 0 when nothing is explained."""
        return self.score / self.null_mean if self.null_mean > 0 else 0.0

    @property
    def name(self) -> str:
        """The predicate, with the direction where it is not promotion."""
        return self.predicate if self.direction == "promote" else f"suppress {self.predicate}"


@dataclass
class Explainer:
    """Tries predicates on heads; one that raises is left out from then on, and its error is kept."""

    predicates: Sequence[Predicate]

    def __post_init__(self) -> None:
        self.failed: dict[str, str] = {}

    def explain(self, mappings: Sequence[Mapping], direction: NamedDirection) -> list[Explanation]:
        """Every predicate that still works, on one head's mappings."""
        explanations = []
        for entry in self.predicates:
            if entry.name in self.failed:
                continue
            try:
                explanations.append(_explanation(entry, mappings, direction))
            except Exception as error:  # a user's code may raise anything: it is named in the result
                self.failed[entry.name] = f"{type(error).__name__}: {error}"
        return explanations


def _explanation(entry: Predicate, mappings: Sequence[Mapping], direction: NamedDirection) -> Explanation:
    n, holds = len(mappings), entry.holds
    tried = [
        (row, source, targets)
        for row, (source, targets) in enumerate(mappings)
        if entry.sources is None or source.strip() in entry.sources
    ]
    hits = sum(any(holds(source, target) for target in targets) for _, source, targets in tried)
    score = hits / n
    if score < LEAST_SCORE:
        return Explanation(entry.name, direction, score, 0.0, 1.0)
    places: dict[str, list[int]] = {}
    for number, (_, targets) in enumerate(mappings):
        for target in targets:
            places.setdefault(target, []).append(number)
    # A source's chance is the share of target lists with at least one target that explains it. Each distinct target
    # is tried once, however many lists it is in.
    chances = np.zeros(n)
    for row, source, _ in tried:
        explained = [lists for target, lists in places.items() if holds(source, target)]
        chances[row] = len(set().union(*explained)) / n
    return Explanation(entry.name, direction, score, float(chances.mean()), poisson_binomial_tail(chances, hits))


def best_first(explanations: Iterable[Explanation]) -> list[Explanation]:
    """Explanations by p-value; equal ones by lift, then score, then as they came."""
    return sorted(explanations, key=lambda entry: (entry.p_value, -entry.lift, -entry.score))
