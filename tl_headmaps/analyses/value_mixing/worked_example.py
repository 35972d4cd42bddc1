"""One association worked out by hand: the products, the sums, before and after.

A worked example is written once, as sections of equations in a notation; plain text and LaTeX are two notations.
Long vectors and texts are shortened: the first dimensions and the tokens attended to most are written out, the
rest is counted. Sums always run over everything.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from ...renderers.example import Matrix, Step, worked_example
from ...renderers.figure import Figure
from ...renderers.text import signed, significant, word

_MOST_DIMENSIONS = 6
_MOST_SOURCES = 6
_SHOWN_DIMENSIONS = 12
"""Vectors up to this length are drawn; longer ones are read from the numbers made of them."""


@dataclass(frozen=True, eq=False)
class WorkedExample:
    """How attention changes the association of one query with one key, number by number.

    Tokens are numbered from 1 here, as in a formula. ``str()`` is plain text; :meth:`markdown` and :meth:`latex` are
    the same lines for a notebook and for a paper.

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
        notes: What is odd about the row (does not sum to one, negative weights), as sentences.

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

    def _repr_html_(self) -> str:
        return self.figure()._repr_html_()

    def __str__(self) -> str:
        lines = [_title(self), ""]
        for section in _sections(self, _Plain()):
            lines.append(f"{section.heading}:")
            for left, forms in section.equations:
                lines.append(f"  {left} = {forms[0]}")
                lines += [f"  {' ' * len(left)} = {form}" for form in forms[1:]]
            lines.append("")
        return "\n".join([*lines, *_summary(self)])

    def markdown(self) -> str:
        """The worked example as Markdown with formulas between dollar signs."""
        parts = [f"### {_markdown_escaped(_title(self))}"]
        for section in _sections(self, _Latex()):
            parts += [f"{_markdown_escaped(section.heading)}:", f"$${_aligned(section)}$$"]
        parts += [f"* {_markdown_escaped(line)}" for line in _summary(self)]
        return "\n\n".join(parts) + "\n"

    def latex(self) -> str:
        """The worked example as LaTeX (amsmath)."""
        parts = [rf"\textbf{{{_latex_escaped(_title(self))}}}"]
        for section in _sections(self, _Latex()):
            parts += [f"{_latex_escaped(section.heading)}:", rf"\[{_aligned(section)}\]"]
        parts += [_latex_escaped(line) for line in _summary(self)]
        return "\n\n".join(parts) + "\n"

    def figure(self) -> Figure:
        """The steps of the computation, line by line."""
        tokens = [token.strip() or repr(token) for token in self.tokens]
        query, key = tokens[self.query], tokens[self.key]
        steps = []
        short = self.values.shape[1] <= _SHOWN_DIMENSIONS
        if short:
            steps.append(Step("The values of all tokens", [Matrix("V", self.values, rows=tokens)]))
        steps.append(
            Step(
                f"How '{query}' attends", [Matrix(f"A, row of '{query}'", self.row[None], rows=[query], columns=tokens)]
            )
        )
        if short:
            steps.append(
                Step(
                    f"The mixed value of '{query}' is the sum of all values, weighted by that row",
                    [Matrix(f"v̂ of '{query}'", self.mixed[None], rows=[query])],
                    "v̂ = A V",
                )
            )
        steps.append(
            Step(
                f"Association of '{query}' with '{key}' before and after",
                [
                    Matrix(
                        "dot product, cosine",
                        [[self.before, self.cosine_before], [self.after, self.cosine_after]],
                        rows=["before", "after"],
                        columns=["dot product", "cosine"],
                    )
                ],
                f"v · v({key}) = {self.before:.3g}   becomes   v̂ · v({key}) = {self.after:.3g}",
            )
        )
        steps.append(
            Step(
                "What each source token brings",
                [
                    Matrix(
                        "part of the association after attention",
                        self.split[None],
                        rows=["after"],
                        columns=tokens,
                    )
                ],
            )
        )
        return worked_example(
            steps,
            title=f"What attention does to '{query}' as seen by '{key}'",
            note=" ".join(self.notes),
        )


@dataclass(frozen=True)
class _Section:
    """A heading and equations, each a left side and the forms of its right side, one after the other."""

    heading: str
    equations: tuple[tuple[str, tuple[str, ...]], ...]


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

    def vector(self, numbers: Sequence[str]) -> str:
        return f"[{', '.join(numbers)}]"

    def more(self, count: int) -> str:
        return f"... ({count} more)"

    def factor(self, value: float) -> str:
        return _number(value)

    def word(self, token: str) -> str:
        return word(token)


class _Latex(_Plain):
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

    def factor(self, value: float) -> str:
        text = _number(value)
        return f"({text})" if text.startswith("-") else text

    def word(self, token: str) -> str:
        return rf"\text{{{_latex_escaped(super().word(token))}}}"


def _aligned(section: _Section) -> str:
    lines = []
    for left, forms in section.equations:
        lines += [f"{left} &= {forms[0]}", *(f"&= {form}" for form in forms[1:])]
    return r"\begin{aligned} " + " \\\\\n".join(lines) + r" \end{aligned}"


def _title(example: WorkedExample) -> str:
    plain = _Plain()
    query, key = (plain.word(example.tokens[token]) for token in (example.query, example.key))
    return f"What attention does to {query!r}, seen from {key!r}"


def _sections(example: WorkedExample, write: _Plain) -> list[_Section]:
    q, k = example.query, example.key
    own, other = example.values[q].tolist(), example.values[k].tolist()
    sources = _shown_sources(example)
    before, after = f"{write.v(q)}{write.dot}{write.v(k)}", f"{write.v_hat(q)}{write.dot}{write.v(k)}"
    return [
        _Section(
            "The values of the tokens",
            tuple(
                (f"{write.v(s)} ({write.word(example.tokens[s])})", (_vector(example.values[s].tolist(), write),))
                for s in sources
            ),
        ),
        _Section("Before", ((before, _product(other, own, example.before, write)),)),
        _Section("Attention mixes the values", _mixing(example, sources, write)),
        _Section("After", ((after, _product(example.mixed.tolist(), other, example.after, write)),)),
        _Section("The same by source", ((after, _by_source(example, sources, write)),)),
    ]


def _shown_sources(example: WorkedExample) -> list[int]:
    """The tokens written out: all of a short text, else the query, the key and those that weigh most."""
    n = len(example.tokens)
    if n <= _MOST_SOURCES:
        return list(range(n))
    heaviest = sorted(range(n), key=lambda s: (-abs(float(example.row[s])), s))
    ordered = dict.fromkeys([example.query, example.key, *heaviest])
    return sorted(list(ordered)[:_MOST_SOURCES])


def _mixing(example: WorkedExample, sources: list[int], write: _Plain) -> tuple[tuple[str, tuple[str, ...]], ...]:
    q, row, d_head = example.query, example.row.tolist(), len(example.mixed)
    name, hidden = write.v_hat(q), len(row) - len(sources)
    symbols = [f"{write.a(q, s)} {write.v(s)}" for s in sources] + ([write.more(hidden)] if hidden else [])
    equations: list[tuple[str, tuple[str, ...]]] = [(name, (" + ".join(symbols),))]
    for dimension in range(min(d_head, _MOST_DIMENSIONS)):
        column = example.values[:, dimension].tolist()
        total = _number(float(example.mixed[dimension]))
        products = [f"{write.factor(row[s])}{write.times}{write.factor(column[s])}" for s in sources]
        terms = [row[s] * column[s] for s in sources]
        equations.append(
            (
                write.part(name, dimension),
                (
                    " + ".join([*products, *([write.more(hidden)] if hidden else [])]),
                    _sum(terms) + (f" + {write.more(hidden)}" if hidden else ""),
                    total,
                ),
            )
        )
    return (*equations, (name, (_vector(example.mixed.tolist(), write),)))


def _product(left: list[float], right: list[float], total: float, write: _Plain) -> tuple[str, ...]:
    shown = min(len(left), _MOST_DIMENSIONS)
    more = f" + {write.more(len(left) - shown)}" if len(left) > shown else ""
    pairs = list(zip(left, right, strict=True))[:shown]
    products = " + ".join(f"{write.factor(x)}{write.times}{write.factor(y)}" for x, y in pairs)
    return products + more, _sum([x * y for x, y in pairs]) + more, _number(total)


def _by_source(example: WorkedExample, sources: list[int], write: _Plain) -> tuple[str, ...]:
    k, row, split = example.key, example.row.tolist(), example.split.tolist()
    hidden = len(row) - len(sources)
    more = f" + {write.more(hidden)}" if hidden else ""
    products = " + ".join(f"{write.factor(row[s])} ({write.v(s)}{write.dot}{write.v(k)})" for s in sources)
    return products + more, _sum([split[s] for s in sources]) + more, _number(example.after)


def _summary(example: WorkedExample) -> list[str]:
    plain = _Plain()
    order = sorted(range(len(example.tokens)), key=lambda s: (-abs(float(example.split[s])), s))
    shown = sorted(order[:_MOST_SOURCES])

    def parts(split: Sequence[float]) -> str:
        listed = ", ".join(f"{plain.word(example.tokens[s])} {signed(split[s])}" for s in shown)
        rest = math.fsum(value for s, value in enumerate(split) if s not in shown)
        return listed + (f", {len(split) - len(shown)} others {signed(rest)}" if len(split) > len(shown) else "")

    lines = [
        f"dot product: {_number(example.before)} before, {_number(example.after)} after, gain {signed(example.gain)}",
        f"cosine: {_number(example.cosine_before)} before, {_number(example.cosine_after)} after, "
        f"gain {signed(example.cosine_after - example.cosine_before)}",
        f"after, by source: {parts(example.split.tolist())}",
        f"gain, by source: {parts(example.change_split.tolist())}",
    ]
    return [*lines, *(f"note: {note}" for note in example.notes)]


def _vector(numbers: Sequence[float], write: _Plain) -> str:
    shown = [_number(number) for number in numbers[:_MOST_DIMENSIONS]]
    return write.vector(shown + ([write.more(len(numbers) - len(shown))] if len(numbers) > len(shown) else []))


def _sum(terms: Sequence[float]) -> str:
    """``0.05 - 0.02 - 0.12``."""
    first, *rest = terms
    return _number(first) + "".join(f" {'-' if term < 0 else '+'} {_number(abs(term))}" for term in rest)


def _number(value: float) -> str:
    """Five significant digits: enough for an exact small example, short enough for a real model."""
    return significant(value, 5)


_LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    # Markdown would take these for tags, also between dollar signs.
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def _latex_escaped(text: str) -> str:
    return "".join(_LATEX_SPECIAL.get(character, character) for character in text)


def _markdown_escaped(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]()#+|!~$-])", r"\\\1", text)
