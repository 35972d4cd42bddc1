"""One association worked out by hand, token by token.

Steps are built once, as matrices and terms; text, Markdown, LaTeX and figure are forms of that one list
(:mod:`tl_headmaps.renderers.example`). Of long vectors the dimensions that weigh most are written out, of long texts
the tokens attended to most; what is left, and terms that are nothing beside the largest, are written as their sum, so
every line adds up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Float
from torch import Tensor

from ..renderers.example import Example, ExampleMatrix, ExampleStep, worked_example
from ..renderers.figure import Figure
from ..renderers.formulas import DIGITS, Equation, Gain, Product, Rest, Sentence, Sum, Symbol, Term
from ..renderers.text import word

if TYPE_CHECKING:
    pass

_MOST_DIMENSIONS = 6
_MOST_SOURCES = 6
MAX_ATTENTION = 16
"""The whole A is shown of texts up to this length."""

_WHOLE = 8
"""Vectors up to this length are written out whole."""

_EXACT = 1e-9
LEAST = 1e-3
"""Terms below this share of the largest are summed, where there are several."""


@dataclass(frozen=True, eq=False, repr=False)
class WorkedExample:
    """How attention changes the association of one query with one key, number by number.

    Tokens and dimensions are numbered from 1 here, as in a formula. ``str()`` is plain text; :meth:`markdown`,
    :meth:`to_latex` and :meth:`figure` are the same steps for a notebook, for a paper and as a picture.

    Attributes:
        tokens: Tokens of the text.
        query, key: Indices of the two tokens, counted from 0.
        values: Value vector of every token.
        row: Attention of the query to every token.
        mixed: The query's vector after attention.
        before, after: Dot product of the query with the key's value, before and after.
        cosine_before, cosine_after: The same as cosines.
        split: Part of each token in ``after``; adds up to it.
        change_split: Part of each token in ``after - before``; adds up to it.
        attention: Attention of every token to every token, where it is known and small enough to be shown.
        notes: What is unusual about the row (does not sum to one, negative weights), as sentences.
        digits: Significant digits of the numbers.
        least: Terms below this share of the largest are summed, where there are several.

    Example:
        >>> from tl_headmaps import ValueMixing
        >>> mixing = ValueMixing.from_arrays([[1, 0], [0.5, 0.5]], [[1.0, 2.0], [3.0, -1.0]], ["Birds", "walk"])
        >>> example = mixing.explain("walk", "Birds")
        >>> example.before, example.after, example.gain
        (1.0, 3.0, 2.0)
        >>> example.markdown().splitlines()[0]
        "### What attention does to 'walk', seen from 'Birds'"
    """

    kind: ClassVar[str] = "worked_example"
    tokens: tuple[str, ...]
    query: int
    key: int
    values: Float[Tensor, "key d_head"]
    row: Float[Tensor, " key"]
    mixed: Float[Tensor, " d_head"]
    before: float
    after: float
    cosine_before: float
    cosine_after: float
    split: Float[Tensor, " key"]
    change_split: Float[Tensor, " key"]
    attention: Float[Tensor, "token key"] | None = None
    notes: tuple[str, ...] = ()
    digits: int = DIGITS
    least: float = LEAST

    @property
    def gain(self) -> float:
        """Change of the dot product."""
        return self.after - self.before

    @property
    def title(self) -> str:
        """What is worked out."""
        query, key = (word(self.tokens[token]) for token in (self.query, self.key))
        return f"What attention does to {query!r}, seen from {key!r}"

    def __repr__(self) -> str:
        """What a terminal shows is what it prints, not its tensors, as of a result."""
        return str(self)

    def __str__(self) -> str:
        return self._example.text()

    def markdown(self) -> str:
        """The worked example as Markdown with formulas between dollar signs."""
        return self._example.markdown()

    def to_latex(self) -> str:
        """The worked example as LaTeX (amsmath)."""
        return self._example.latex()

    def figure(self) -> Figure:
        """The same steps as a picture."""
        return worked_example(
            self._steps(), title=self.title, summary=self._summary(), notes=self.notes, digits=self.digits
        )

    def _repr_html_(self) -> str:
        return self.figure()._repr_html_()

    @cached_property
    def _example(self) -> Example:
        drawn: Example = self.figure().data
        return drawn

    @cached_property
    def _sources(self) -> list[int]:
        """The tokens written out: all of a short text, else the query, the key and those that weigh most."""
        n = len(self.tokens)
        if n <= _MOST_SOURCES + 1:
            return list(range(n))
        heaviest = sorted(range(n), key=lambda s: (-abs(float(self.row[s])), s))
        ordered = dict.fromkeys([self.query, self.key, *heaviest])
        return sorted(list(ordered)[:_MOST_SOURCES])

    @cached_property
    def _dimensions(self) -> list[int]:
        """The dimensions written out: all of a short vector, else those with the largest part before or after."""
        n = len(self.mixed)
        if n <= _WHOLE:
            return list(range(n))
        parts = [(self.values[self.query] * self.values[self.key]).abs(), (self.mixed * self.values[self.key]).abs()]
        largest = parts[0].maximum(parts[1]).argsort(descending=True, stable=True)
        return sorted(largest[:_MOST_DIMENSIONS].tolist())

    def _steps(self) -> list[ExampleStep]:
        q, k, shown = self.query, self.key, self._dimensions
        own, other, hat = (vector.tolist() for vector in (self.values[q], self.values[k], self.mixed))
        v = [Symbol("v", token + 1) for token in range(len(self.tokens))]
        v_hat = Symbol("v", q + 1, hat=True)
        names = [f"v{s + 1} ({word(self.tokens[s])})" for s in self._sources]
        left_out = [len(hat) - len(shown), len(self.tokens) - len(self._sources)]
        columns = [f"dim {d + 1}" for d in shown]
        note = ", ".join(
            f"{count} more {what}" for count, what in zip(left_out, ("dimensions", "tokens"), strict=True) if count
        )
        values = ExampleMatrix(Symbol("V"), self.values[self._sources][:, shown], names, columns, note=note)
        mixed = ExampleMatrix(
            v_hat, self.mixed[shown][None], [word(self.tokens[q])], columns, note=note.partition(",")[0]
        )
        before, after = Product(v[q], v[k], sign="dot"), Product(v_hat, v[k], sign="dot")
        terms_shown = self._shown_terms(self.split.tolist(), self._sources)
        by_source = [(float(self.row[s]), Product(v[s], v[k], sign="dot")) for s in terms_shown]
        rest_split = self._remainder(self.split.tolist(), terms_shown, "others")
        return [
            ExampleStep("The values of the tokens", [values]),
            ExampleStep("The attention of each token (rows) to the tokens (columns)", [self._attention_matrix()]),
            ExampleStep("Before: the dot product of the two values", [], [Equation(before, *self._dot(other, own))]),
            ExampleStep("Attention mixes the values, dimension by dimension", [], self._mixing(v_hat, v)),
            ExampleStep("The value after attention", [mixed]),
            ExampleStep("After: the dot product with the mixed value", [], [Equation(after, *self._dot(hat, other))]),
            ExampleStep(
                "The same by source",
                [],
                [
                    Equation(
                        after,
                        Sum(*(Product(weight, pair) for weight, pair in by_source), *rest_split),
                        Sum(*(float(self.split[s]) for s in terms_shown), *rest_split),
                        self.after,
                    )
                ],
            ),
        ]

    def _attention_matrix(self) -> ExampleMatrix:
        """The whole A where it is known and fits, else the query's row; of a long text, the tokens written out."""
        names = [word(token) for token in self.tokens]
        if self.attention is not None and len(names) <= MAX_ATTENTION:
            return ExampleMatrix(Symbol("A"), self.attention, names, names, marked=self.query)
        chosen = list(range(len(names))) if len(names) <= MAX_ATTENTION else self._sources
        left_out = len(names) - len(chosen)
        note = f"row of {names[self.query]!r}" + (f", {left_out} more tokens" if left_out else "")
        return ExampleMatrix(
            Symbol("A"), self.row[chosen][None], [names[self.query]], [names[s] for s in chosen], note=note
        )

    def _mixing(self, v_hat: Symbol, v: Sequence[Symbol]) -> list[Equation]:
        q, sources, row = self.query, self._sources, self.row.tolist()
        terms_shown = self._shown_terms(row, sources)
        n_others = len(row) - len(terms_shown)
        parts: list[Term] = [Product(Symbol("a", q + 1, s + 1), v[s]) for s in terms_shown]
        equations = [Equation(v_hat, Sum(*parts, *([f"... ({n_others} others)"] if n_others else [])))]
        for d in self._dimensions:
            column = self.values[:, d].tolist()
            products = [weight * value for weight, value in zip(row, column, strict=True)]
            terms_shown = self._shown_terms(products, sources)
            rest = self._remainder(products, terms_shown, "others")
            equations.append(
                Equation(
                    Symbol("v", q + 1, d + 1, hat=True),
                    Sum(*(Product(row[s], column[s]) for s in terms_shown), *rest),
                    Sum(*(products[s] for s in terms_shown), *rest),
                    float(self.mixed[d]),
                )
            )
        return equations

    def _dot(self, left: Sequence[float], right: Sequence[float]) -> list[Term]:
        """A dot product in three forms: products, their values, the sum."""
        products = [x * y for x, y in zip(left, right, strict=True)]
        terms_shown = self._shown_terms(products, self._dimensions)
        rest = self._remainder(products, terms_shown, "more")
        return [
            Sum(*(Product(left[d], right[d]) for d in terms_shown), *rest),
            Sum(*(products[d] for d in terms_shown), *rest),
            math.fsum(products),
        ]

    def _shown_terms(self, terms: Sequence[float], shown: Sequence[int]) -> list[int]:
        """Those of the terms shown that are written one by one: not several that are nothing beside the largest."""
        least = self.least * max(map(abs, terms))
        terms_shown = [place for place in shown if abs(terms[place]) >= least]
        return terms_shown if len(terms_shown) < len(shown) - 1 else list(shown)

    @staticmethod
    def _remainder(terms: Sequence[float], shown: Sequence[int], what: str) -> list[Rest]:
        """The sum of the terms that are not shown, if there are any."""
        left = [term for place, term in enumerate(terms) if place not in set(shown)]
        what = "other" if len(left) == 1 and what == "others" else what
        return [Rest(math.fsum(left), f"{len(left)} {what}")] if left else []

    def _summary(self) -> list[Sentence]:
        order = sorted(range(len(self.tokens)), key=lambda s: (-abs(float(self.split[s])), s))
        shown = sorted(order[:_MOST_SOURCES])

        def parts(what: str, split: Sequence[float]) -> Sentence:
            listed = [(word(self.tokens[s]), split[s]) for s in shown]
            listed += [(rest.words, rest.value) for rest in self._remainder(split, shown, "others")]
            labels = [(", " if place else what) + f"{name} " for place, (name, _) in enumerate(listed)]
            return tuple(part for name, (_, value) in zip(labels, listed, strict=True) for part in (name, Gain(value)))

        def change(what: str, before: float, after: float) -> Sentence:
            return (f"{what}: ", before, " before, ", after, " after, gain ", Gain(after - before))

        lines = [
            change("dot product", self.before, self.after),
            change("cosine", self.cosine_before, self.cosine_after),
            parts("after, by source: ", self.split.tolist()),
            parts("gain, by source: ", self.change_split.tolist()),
        ]
        n = {1: "one", 2: "two", 3: "three", 4: "four"}.get(self.digits, str(self.digits))
        rounded = f"Numbers are shown with {n} significant digit{'' if self.digits == 1 else 's'}"
        return lines if self._is_exact else [*lines, f"{rounded}; sums were made of all digits."]

    @property
    def _is_exact(self) -> bool:
        """Whether the digits shown are all there are, so that what is shown adds up to the last digit."""
        numbers = [*self.values.flatten().tolist(), *self.row.tolist(), *self.mixed.tolist()]
        return all(abs(float(f"{x:.{self.digits - 1}e}") - x) <= _EXACT for x in numbers)
