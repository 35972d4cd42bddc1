"""Value mixing as text: association tables, and worked examples as plain text, Markdown or LaTeX.

A worked example is written once, as sections of equations in a notation; plain text and LaTeX are two notations.
Long vectors and texts are shortened: the first dimensions and the tokens attended to most are written out, the
rest is counted. Sums always run over everything.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...renderers.text import table_text, visible

if TYPE_CHECKING:
    from ..association_heads.result import AssociationHeads
    from .result import ValueMixing
    from .worked_example import WorkedExample

_MOST_DIMENSIONS = 6
_MOST_SOURCES = 6
_MOST_COLUMNS = 12


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
        return visible(token).strip() or repr(token)


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


def example_text(example: "WorkedExample") -> str:
    """The worked example for a terminal."""
    lines = [_title(example), ""]
    for section in _sections(example, _Plain()):
        lines.append(f"{section.heading}:")
        for left, forms in section.equations:
            lines.append(f"  {left} = {forms[0]}")
            lines += [f"  {' ' * len(left)} = {form}" for form in forms[1:]]
        lines.append("")
    return "\n".join([*lines, *_summary(example)])


def example_latex(example: "WorkedExample") -> str:
    """The worked example as LaTeX."""
    parts = [rf"\textbf{{{_latex_escaped(_title(example))}}}"]
    for section in _sections(example, _Latex()):
        parts += [f"{_latex_escaped(section.heading)}:", rf"\[{_aligned(section)}\]"]
    parts += [_latex_escaped(line) for line in _summary(example)]
    return "\n\n".join(parts) + "\n"


def example_markdown(example: "WorkedExample") -> str:
    """The worked example as Markdown with formulas."""
    parts = [f"### {_markdown_escaped(_title(example))}"]
    for section in _sections(example, _Latex()):
        parts += [f"{_markdown_escaped(section.heading)}:", f"$${_aligned(section)}$$"]
    parts += [f"* {_markdown_escaped(line)}" for line in _summary(example)]
    return "\n\n".join(parts) + "\n"


def _aligned(section: _Section) -> str:
    lines = []
    for left, forms in section.equations:
        lines += [f"{left} &= {forms[0]}", *(f"&= {form}" for form in forms[1:])]
    return r"\begin{aligned} " + " \\\\\n".join(lines) + r" \end{aligned}"


def _title(example: "WorkedExample") -> str:
    plain = _Plain()
    query, key = (plain.word(example.tokens[token]) for token in (example.query, example.key))
    return f"What attention does to {query!r}, seen from {key!r}"


def _sections(example: "WorkedExample", write: _Plain) -> list[_Section]:
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


def _shown_sources(example: "WorkedExample") -> list[int]:
    """The tokens written out: all of a short text, else the query, the key and those that weigh most."""
    n = len(example.tokens)
    if n <= _MOST_SOURCES:
        return list(range(n))
    heaviest = sorted(range(n), key=lambda s: (-abs(float(example.row[s])), s))
    ordered = dict.fromkeys([example.query, example.key, *heaviest])
    return sorted(list(ordered)[:_MOST_SOURCES])


def _mixing(example: "WorkedExample", sources: list[int], write: _Plain) -> tuple[tuple[str, tuple[str, ...]], ...]:
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


def _by_source(example: "WorkedExample", sources: list[int], write: _Plain) -> tuple[str, ...]:
    k, row, split = example.key, example.row.tolist(), example.split.tolist()
    hidden = len(row) - len(sources)
    more = f" + {write.more(hidden)}" if hidden else ""
    products = " + ".join(f"{write.factor(row[s])} ({write.v(s)}{write.dot}{write.v(k)})" for s in sources)
    return products + more, _sum([split[s] for s in sources]) + more, _number(example.after)


def _summary(example: "WorkedExample") -> list[str]:
    plain = _Plain()
    order = sorted(range(len(example.tokens)), key=lambda s: (-abs(float(example.split[s])), s))
    shown = sorted(order[:_MOST_SOURCES])

    def parts(split: Sequence[float]) -> str:
        listed = ", ".join(f"{plain.word(example.tokens[s])} {_signed(split[s])}" for s in shown)
        rest = math.fsum(value for s, value in enumerate(split) if s not in shown)
        return listed + (f", {len(split) - len(shown)} others {_signed(rest)}" if len(split) > len(shown) else "")

    lines = [
        f"dot product: {_number(example.before)} before, {_number(example.after)} after, gain {_signed(example.gain)}",
        f"cosine: {_number(example.cosine_before)} before, {_number(example.cosine_after)} after, "
        f"gain {_signed(example.cosine_after - example.cosine_before)}",
        f"after, by source: {parts(example.split.tolist())}",
        f"gain, by source: {parts(example.change_split.tolist())}",
    ]
    return [*lines, *(f"note: {note}" for note in example.notes)]


def value_mixing_text(result: "ValueMixing") -> str:
    """Attention and the change of every association; for long texts the strongest changes of each query."""
    whose = "given arrays" if result.head is None else str(result.head)
    title = f"Value mixing of {whose}: dot product (cosine) with each token's value, before -> after"
    if len(result.tokens) <= _MOST_COLUMNS:
        body = _square(result)
    else:
        body = _strongest(result)
    parts = [title, body]
    if result.reconstruction_error is not None:
        parts.append(f"A V differs from the model's own output by at most {result.reconstruction_error:.1e}")
    if result.example is not None:
        # Its last lines are the notes.
        parts.append(str(result.example))
    else:
        parts += [f"note: {note}" for note in result.notes]
    return "\n\n".join(parts)


def _square(result: "ValueMixing") -> str:
    rows = []
    for row, query in enumerate(result.queries):
        cells = [
            f"{_short(result.before_dot[row, key])} -> {_short(result.after_dot[row, key])} "
            f"({_short(result.before_cosine[row, key])} -> {_short(result.after_cosine[row, key])})"
            for key in range(len(result.tokens))
        ]
        rows.append([result.tokens[query], *cells])
    return table_text([("", "left"), *((visible(token), "right") for token in result.tokens)], rows)


def _strongest(result: "ValueMixing", most: int = 3) -> str:
    rows = []
    change = result.values
    for row, query in enumerate(result.queries[: 5 * _MOST_COLUMNS]):
        order = change[row].abs().argsort(descending=True, stable=True)[:most].tolist()
        for key in order:
            numbers = (result.before_dot, result.after_dot, result.before_cosine, result.after_cosine)
            rows.append([f"{query} {result.tokens[query]}", f"{key} {result.tokens[key]}"])
            rows[-1] += [_short(values[row, key]) for values in numbers]
    titles = ["query", "key", "dot before", "after", "cosine before", "after"]
    columns = [(title, "left" if title in ("query", "key") else "right") for title in titles]
    return table_text(columns, rows)


def association_heads_text(result: "AssociationHeads", top: int = 10) -> str:
    """The heads that bring the query closest to the key, with the null beside the gain."""
    query, key = (_Plain().word(result.tokens[token]) for token in (result.query, result.key))
    rows = []
    for head, gain in result.top(top):
        at = (head.layer, head.head)
        numbers = [result.attention[at], *(getattr(result, f"{when}_{result.measure}")[at] for when in _WHEN)]
        rows.append([str(head), *(_short(number) for number in numbers[:3]), _signed(gain), _short(numbers[3])])
    titles = ["head", "attention", "before", "after", "gain", "others"]
    columns = [(title, "left" if title == "head" else "right") for title in titles]
    title = f"Heads that bring {query!r} closer to {key!r} ({result.measure} of value vectors)"
    note = "gain: association after attention minus before; others: mean gain with the other tokens the query can see"
    return "\n\n".join([title, table_text(columns, rows), note, *(f"note: {text}" for text in result.notes)])


_WHEN = ("before", "after", "others")


def _vector(numbers: Sequence[float], write: _Plain) -> str:
    shown = [_number(number) for number in numbers[:_MOST_DIMENSIONS]]
    return write.vector(shown + ([write.more(len(numbers) - len(shown))] if len(numbers) > len(shown) else []))


def _sum(terms: Sequence[float]) -> str:
    """``0.05 - 0.02 - 0.12``."""
    first, *rest = terms
    return _number(first) + "".join(f" {'-' if term < 0 else '+'} {_number(abs(term))}" for term in rest)


def _number(value: float) -> str:
    """Five significant digits: enough for an exact small example, short enough for a real model."""
    text = f"{value:.5g}"
    return "0" if float(text) == 0 else text


def _signed(value: float) -> str:
    text = _number(value)
    return text if text.startswith("-") else f"+{text}"


def _short(value: object) -> str:
    number = float(value)  # type: ignore[arg-type]
    return "-" if math.isnan(number) else f"{number:.3g}"


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
