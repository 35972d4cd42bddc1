"""One association worked out by hand: the products, the sums, before and after.

There is one list of steps, each a heading, equations and matrices. It is written in a notation (plain text, a page,
LaTeX); text, Markdown, LaTeX and the figure lay it out. Long vectors and texts are shortened: the first dimensions and
the tokens attended to most are written out, the rest is counted. Sums always run over everything.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias
from unicodedata import combining

from jaxtyping import Float
from torch import Tensor

from ...renderers.example import MAX_SIDE, ExampleMatrix, ExampleStep, worked_example
from ...renderers.figure import Figure
from ...renderers.text import latex, markdown, signed, significant, word

_MOST_DIMENSIONS = 6
_MOST_SOURCES = 6
_DRAWN_DIMENSIONS = 12
"""Vectors up to this length are drawn; longer ones are only written, in part."""

_DIGITS = 5
"""Enough for an exact small example, short enough for a real model."""

_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")

Equation: TypeAlias = tuple[str, tuple[str, ...]]
"""A left side and the forms of its right side, one after the other."""


@dataclass(frozen=True, eq=False)
class WorkedExample:
    """How attention changes the association of one query with one key, number by number.

    Tokens are numbered from 1 here, as in a formula. ``str()`` is plain text; :meth:`markdown`, :meth:`latex` and
    :meth:`figure` are the same steps for a notebook, for a paper and as a picture.

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
        notes: What is unusual about the row (does not sum to one, negative weights), as sentences.

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
    notes: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """Change of the dot product."""
        return self.after - self.before

    @property
    def title(self) -> str:
        """What is worked out."""
        query, key = (word(self.tokens[token]) for token in (self.query, self.key))
        return f"What attention does to {query!r}, seen from {key!r}"

    def __str__(self) -> str:
        parts = [self.title, *(f"{step.heading}:\n{step.lines('  ')}" for step in self._steps(_Plain()))]
        return "\n\n".join([*parts, "\n".join(self._summary())])

    def markdown(self) -> str:
        """The worked example as Markdown with formulas between dollar signs."""
        parts = [f"### {markdown(self.title)}"]
        for step in self._steps(_Latex()):
            parts += [f"{step.heading}:", f"$${step.aligned()}$$"]
        parts += [f"* {markdown(line)}" for line in self._summary()]
        return "\n\n".join(parts) + "\n"

    def latex(self) -> str:
        """The worked example as LaTeX (amsmath)."""
        parts = [rf"\textbf{{{latex(self.title)}}}"]
        for step in self._steps(_Latex()):
            parts += [f"{step.heading}:", rf"\[{step.aligned()}\]"]
        parts += [latex(line) for line in self._summary()]
        return "\n\n".join(parts) + "\n"

    def figure(self) -> Figure:
        """The same steps with their matrices drawn."""
        steps = [
            ExampleStep(step.heading, step.matrices, "" if step.drawn_instead else step.lines())
            for step in self._steps(_Page())
        ]
        both = ExampleMatrix(
            "dot product, cosine",
            [[self.before, self.cosine_before], [self.after, self.cosine_after]],
            rows=["before", "after"],
            columns=["dot product", "cosine"],
        )
        summary = "\n".join(line for line in self._summary() if not line.startswith("note: "))
        steps.append(ExampleStep("Before and after", [both], summary))
        return worked_example(steps, title=self.title, note=" ".join(self.notes))

    def _repr_html_(self) -> str:
        return self.figure()._repr_html_()

    def _steps(self, write: "_Plain") -> "list[_Step]":
        q, k = self.query, self.key
        own, other = self.values[q].tolist(), self.values[k].tolist()
        sources = self._written_sources()
        before, after = f"{write.v(q)}{write.dot}{write.v(k)}", f"{write.v_hat(q)}{write.dot}{write.v(k)}"
        short = len(own) <= _DRAWN_DIMENSIONS
        drawn = list(range(len(self.tokens))) if len(self.tokens) <= MAX_SIDE else sources
        names, query = [word(self.tokens[s]) for s in drawn], [word(self.tokens[q])]
        values = ExampleMatrix("V", self.values[drawn], rows=names)
        row = ExampleMatrix(f"A, row of {query[0]!r}", self.row[drawn][None], rows=query, columns=names)
        mixed = ExampleMatrix(write.v_hat(q), self.mixed[None], rows=query)
        parts = ExampleMatrix("part of each token", self.split[drawn][None], rows=["after"], columns=names)
        vectors = tuple(
            (f"{write.v(s)} ({write.word(self.tokens[s])})", (_vector(self.values[s].tolist(), write),))
            for s in sources
        )
        return [
            _Step("The values of the tokens", vectors, (values,) if short else (), drawn_instead=short),
            _Step("Before", ((before, _product(other, own, self.before, write)),)),
            _Step("Attention mixes the values", self._mixing(sources, write), (row,)),
            _Step(
                "After",
                ((after, _product(self.mixed.tolist(), other, self.after, write)),),
                (mixed,) if short else (),
            ),
            _Step("The same by source", ((after, self._by_source(sources, write)),), (parts,)),
        ]

    def _written_sources(self) -> list[int]:
        """The tokens written out: all of a short text, else the query, the key and those that weigh most."""
        n = len(self.tokens)
        if n <= _MOST_SOURCES:
            return list(range(n))
        heaviest = sorted(range(n), key=lambda s: (-abs(float(self.row[s])), s))
        ordered = dict.fromkeys([self.query, self.key, *heaviest])
        return sorted(list(ordered)[:_MOST_SOURCES])

    def _mixing(self, sources: list[int], write: "_Plain") -> tuple[Equation, ...]:
        q, row = self.query, self.row.tolist()
        name, more = write.v_hat(q), _more(len(row) - len(sources), write)
        equations: list[Equation] = [(name, (" + ".join(f"{write.a(q, s)} {write.v(s)}" for s in sources) + more,))]
        for dimension in range(min(len(self.mixed), _MOST_DIMENSIONS)):
            column = self.values[:, dimension].tolist()
            products = " + ".join(f"{write.factor(row[s])}{write.times}{write.factor(column[s])}" for s in sources)
            terms = _sum([row[s] * column[s] for s in sources])
            total = _number(float(self.mixed[dimension]))
            equations.append((write.part(name, dimension), (products + more, terms + more, total)))
        return (*equations, (name, (_vector(self.mixed.tolist(), write),)))

    def _by_source(self, sources: list[int], write: "_Plain") -> tuple[str, ...]:
        row, split = self.row.tolist(), self.split.tolist()
        more = _more(len(row) - len(sources), write)
        products = " + ".join(f"{write.factor(row[s])} ({write.v(s)}{write.dot}{write.v(self.key)})" for s in sources)
        return products + more, _sum([split[s] for s in sources]) + more, _number(self.after)

    def _summary(self) -> list[str]:
        order = sorted(range(len(self.tokens)), key=lambda s: (-abs(float(self.split[s])), s))
        shown = sorted(order[:_MOST_SOURCES])

        def parts(split: Sequence[float]) -> str:
            listed = ", ".join(f"{word(self.tokens[s])} {signed(split[s], _DIGITS)}" for s in shown)
            rest = math.fsum(value for s, value in enumerate(split) if s not in shown)
            left_out = len(split) - len(shown)
            return listed + (f", {left_out} others {signed(rest, _DIGITS)}" if left_out else "")

        def change(before: float, after: float) -> str:
            return f"{_number(before)} before, {_number(after)} after, gain {signed(after - before, _DIGITS)}"

        return [
            f"dot product: {change(self.before, self.after)}",
            f"cosine: {change(self.cosine_before, self.cosine_after)}",
            f"after, by source: {parts(self.split.tolist())}",
            f"gain, by source: {parts(self.change_split.tolist())}",
            *(f"note: {note}" for note in self.notes),
        ]


@dataclass(frozen=True)
class _Step:
    """What is computed: equations to write, and matrices to draw beside them or instead of them."""

    heading: str
    equations: tuple[Equation, ...]
    matrices: tuple[ExampleMatrix, ...] = ()
    drawn_instead: bool = False

    def lines(self, indent: str = "") -> str:
        """The equations below each other, equals signs of one equation aligned."""
        lines = []
        for left, forms in self.equations:
            # The hat of v̂ takes no room of its own.
            room = " " * sum(not combining(character) for character in left)
            lines += [f"{indent}{left} = {forms[0]}", *(f"{indent}{room} = {form}" for form in forms[1:])]
        return "\n".join(lines)

    def aligned(self) -> str:
        """The same for amsmath."""
        lines = []
        for left, forms in self.equations:
            lines += [f"{left} &= {forms[0]}", *(f"&= {form}" for form in forms[1:])]
        return r"\begin{aligned} " + " \\\\\n".join(lines) + r" \end{aligned}"


class _Plain:
    """Formulas for a terminal."""

    times, dot = " * ", " . "

    def v(self, token: int) -> str:
        return f"v{token + 1}"

    def v_hat(self, token: int) -> str:
        return f"v_hat{token + 1}"

    def part(self, name: str, dimension: int) -> str:
        return f"{name}[{dimension + 1}]"

    def a(self, query: int, key: int) -> str:
        return f"a{query + 1},{key + 1}"

    def more(self, count: int) -> str:
        return f"... ({count} more)"

    def factor(self, value: float) -> str:
        return _number(value)

    def word(self, token: str) -> str:
        return word(token)


class _Page(_Plain):
    """Formulas for a page: signs and subscripts of their own."""

    times, dot = " × ", " · "

    def v(self, token: int) -> str:
        return super().v(token).translate(_SUBSCRIPTS)

    def v_hat(self, token: int) -> str:
        return f"v̂{token + 1}".translate(_SUBSCRIPTS)

    def a(self, query: int, key: int) -> str:
        return super().a(query, key).translate(_SUBSCRIPTS)

    def factor(self, value: float) -> str:
        text = _number(value)
        return f"({text})" if text.startswith("-") else text


class _Latex(_Page):
    """Formulas for amsmath and MathJax."""

    times, dot = r" \times ", r" \cdot "

    def v(self, token: int) -> str:
        return rf"\vec{{v}}_{{{token + 1}}}"

    def v_hat(self, token: int) -> str:
        return rf"\hat{{v}}_{{{token + 1}}}"

    def part(self, name: str, dimension: int) -> str:
        return f"({name})_{{{dimension + 1}}}"

    def a(self, query: int, key: int) -> str:
        return f"a_{{{query + 1},{key + 1}}}"

    def more(self, count: int) -> str:
        return rf"\dots\ (\text{{{count} more}})"

    def word(self, token: str) -> str:
        return rf"\text{{{latex(super().word(token))}}}"


def _more(count: int, write: _Plain) -> str:
    return f" + {write.more(count)}" if count else ""


def _product(left: list[float], right: list[float], total: float, write: _Plain) -> tuple[str, ...]:
    shown = min(len(left), _MOST_DIMENSIONS)
    more = _more(len(left) - shown, write)
    pairs = list(zip(left, right, strict=True))[:shown]
    products = " + ".join(f"{write.factor(x)}{write.times}{write.factor(y)}" for x, y in pairs)
    return products + more, _sum([x * y for x, y in pairs]) + more, _number(total)


def _vector(numbers: Sequence[float], write: _Plain) -> str:
    shown = [_number(number) for number in numbers[:_MOST_DIMENSIONS]]
    left_out = len(numbers) - len(shown)
    return f"[{', '.join([*shown, *([write.more(left_out)] if left_out else [])])}]"


def _sum(terms: Sequence[float]) -> str:
    """``0.05 - 0.02 - 0.12``."""
    first, *rest = terms
    return _number(first) + "".join(f" {'-' if term < 0 else '+'} {_number(abs(term))}" for term in rest)


def _number(value: float) -> str:
    return significant(value, _DIGITS)
