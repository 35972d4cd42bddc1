r"""Formulas with their numbers: written once as terms, written as text, Unicode, LaTeX and Markdown.

A term is a number, a :class:`Symbol`, a :class:`Product`, a :class:`Sum`, a :class:`Rest` (what is not written out, as
its sum) or plain words. Numbers have three significant digits unless others are asked for, and powers of ten instead
of ``1.17e-05``.

>>> mixed = Equation(Symbol("v", 3, 1, hat=True), Sum(Product(0.6, 0.1), Product(0.1, -0.8)), -0.02)
>>> print(TEXT.equation(mixed))
v_hat3,1 = 0.6 × 0.1 + 0.1 × (-0.8)
         = -0.02
>>> LatexNotation().term(mixed.left), LatexNotation().number(1.17e-5), LatexNotation(2).number(1.17e-5)
('\\hat{v}_{3,1}', '1.17 \\times 10^{-5}', '1.2 \\times 10^{-5}')
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar, Literal, TypeAlias
from unicodedata import combining

from .text import latex, markdown, visible

DIGITS, MOST_DIGITS = 3, 12
"""Significant digits of numbers, unless others are asked for, and the most there may be."""

_SMALLEST, _LARGEST = -4, 6
"""Powers of ten between which numbers are written in full."""

_NOTHING = 1e-12
"""Less is what rounding leaves of sums that cancel."""


@dataclass(init=False)
class Symbol:
    """A letter with indices: ``Symbol("v", 3, hat=True)``."""

    name: str
    index: tuple[int, ...]
    hat: bool

    def __init__(self, name: str, *index: int, hat: bool = False) -> None:
        self.name, self.index, self.hat = name, index, hat


@dataclass(init=False)
class Product:
    """Factors with a sign between them: ``times`` for numbers, ``dot`` for vectors."""

    factors: "tuple[Term, ...]"
    sign: Literal["times", "dot"]

    def __init__(self, *factors: "Term", sign: Literal["times", "dot"] = "times") -> None:
        self.factors, self.sign = factors, sign


@dataclass
class Rest:
    """What is not written out: the number it comes to, and what it is (``10 others``)."""

    value: float
    words: str

    def __abs__(self) -> "Rest":
        return Rest(abs(self.value), self.words)


@dataclass(init=False)
class Sum:
    """Terms added up; ``goes_on`` if it continues the line above."""

    terms: "tuple[Term, ...]"
    goes_on: bool

    def __init__(self, *terms: "Term", goes_on: bool = False) -> None:
        self.terms, self.goes_on = terms, goes_on


Term: TypeAlias = float | str | Symbol | Product | Rest | Sum


@dataclass
class Gain:
    """A number that is always written with its sign."""

    value: float


Sentence: TypeAlias = str | tuple[str | float | Gain, ...]
"""Prose with numbers in it."""


@dataclass(init=False)
class Equation:
    """A left side and the forms of its right side, each equal to the one before."""

    left: Term
    right: tuple[Term, ...]

    def __init__(self, left: Term, *right: Term) -> None:
        self.left, self.right = left, right


def decimal_parts(value: float, digits: int = DIGITS, zeros: bool = False) -> tuple[str, int]:
    """Significant digits and power of ten: ``("0.18", 0)``, ``("1.17", -5)``.

    With ``zeros``, as tables have it, zeros at the end stay, and no value is too small to be told.
    """
    if value == 0 or (abs(value) < _NOTHING and not zeros):
        return "0", 0
    written, power = f"{value:.{digits - 1}e}".split("e")
    exponent = int(power)
    if _SMALLEST <= exponent < _LARGEST:
        written, exponent = format(Decimal(f"{written}e{power}"), "f"), 0
    return written if zeros or "." not in written else written.rstrip("0").rstrip("."), exponent


class Notation:
    """How terms are written; this one is plain text of Latin letters, for a terminal."""

    times, dot, plus, minus, equals = " × ", " · ", " + ", " - ", " = "
    negative, nearly_nothing, hat, power = "-", "~0", "_hat", "^"
    space, indent = " ", "   "
    raised: ClassVar[dict[int, int]] = {}
    lowered: ClassVar[dict[int, int]] = {}

    def __init__(self, digits: int = DIGITS) -> None:
        self.n_digits = digits

    def number(self, value: float) -> str:
        """A number with its significant digits; a dash for NaN."""
        if math.isnan(value):
            return self.words("-")
        digits, power = decimal_parts(abs(value), self.n_digits)
        sign = self.negative if value < 0 and digits != "0" else ""
        return sign + (self.scaled(digits, power) if power else digits)

    def scaled(self, digits: str, power: int) -> str:
        return f"{digits}{self.times}10{self.power}{str(power).translate(self.raised)}"

    def symbol(self, symbol: Symbol) -> str:
        return symbol.name + self.hat * symbol.hat + ",".join(map(str, symbol.index)).translate(self.lowered)

    def words(self, text: str) -> str:
        return visible(text)

    def sentence(self, sentence: Sentence) -> str:
        """Prose with its numbers."""
        parts = (sentence,) if isinstance(sentence, str) else sentence
        return "".join(self.prose(part) if isinstance(part, str) else self.inline(part) for part in parts)

    def prose(self, text: str) -> str:
        return visible(text)

    def inline(self, number: float | Gain) -> str:
        if not isinstance(number, Gain):
            return self.number(number)
        return ("" if number.value < 0 else "+") + self.number(number.value)

    def term(self, term: Term) -> str:
        """A term on one line."""
        return "".join(self.pieces(term))

    def pieces(self, term: Term) -> list[str]:
        """The parts of a term between which a line may break."""
        match term:
            case str():
                return [self.words(term)]
            case Symbol():
                return [self.symbol(term)]
            case Product():
                return [getattr(self, term.sign).join(map(self._factor, term.factors))]
            case Rest():
                return [self.number(term.value) + self.space + self.words(f"({term.words})")]
            case Sum():
                return [self._added(each, place == 0 and not term.goes_on) for place, each in enumerate(term.terms)]
            case _:
                return [self.number(term)]

    def _added(self, term: Term, first: bool) -> str:
        if first:
            return self.term(term)
        value = term.value if isinstance(term, Rest) else term
        if isinstance(value, float | int) and value < 0:
            return self.minus + self.term(abs(term))  # type: ignore[arg-type]
        return self.plus + self.term(term)

    def _factor(self, term: Term) -> str:
        text = self.term(term)
        signed = isinstance(term, float | int) and (term < 0 or decimal_parts(abs(term), self.n_digits)[1] != 0)
        return f"({text})" if isinstance(term, Sum | Product) or signed else text

    def lines(self, equation: Equation, room: int | None = None) -> list[tuple[str, str]]:
        """Left and right side of each line, at most about ``room`` letters of plain text in each right side."""
        rows = [
            (self.indent if place else self.equals) + self.term(part)
            for form in equation.right
            for place, part in enumerate(broken(form, room))
        ]
        return list(zip([self.term(equation.left), *[""] * (len(rows) - 1)], rows, strict=True))

    def equation(self, equation: Equation, room: int | None = None, indent: str = "") -> str:
        """An equation as lines of text with its equals signs below each other."""
        lines = self.lines(equation, room)
        # The hat of v̂ takes no room of its own.
        width = sum(not combining(letter) for letter in lines[0][0])
        return "\n".join(f"{indent}{name or ' ' * width}{right}" for name, right in lines)


def broken(term: Term, room: int | None) -> list[Term]:
    """A sum cut into parts of at most about ``room`` letters; anything else as it is."""
    if room is None or not isinstance(term, Sum):
        return [term]
    rows: list[list[Term]] = [[]]
    used = 0
    for piece, each in zip(TEXT.pieces(term), term.terms, strict=True):
        if rows[-1] and used + len(piece) > room:
            rows.append([])
            used = 0
        rows[-1].append(each)
        used += len(piece)
    return [Sum(*row, goes_on=place > 0 or term.goes_on) for place, row in enumerate(rows)]


class UnicodeNotation(Notation):
    """Letters that look like a formula: subscripts, the minus sign, the hat."""

    minus, negative, nearly_nothing, hat, power = " − ", "−", "≈0", "\u0302", ""
    raised = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
    lowered = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


class LatexNotation(Notation):
    """Formulas for amsmath and MathJax."""

    times, dot, plus, minus, equals = r" \times ", r" \cdot ", " + ", " - ", "= "
    nearly_nothing, space, indent = r"\approx 0", r"\ ", r"\quad "

    def scaled(self, digits: str, power: int) -> str:
        return rf"{digits} \times 10^{{{power}}}"

    def symbol(self, symbol: Symbol) -> str:
        name = rf"\hat{{{symbol.name}}}" if symbol.hat else symbol.name
        return name + (f"_{{{','.join(map(str, symbol.index))}}}" if symbol.index else "")

    def words(self, text: str) -> str:
        return rf"\text{{{latex(text)}}}"

    def prose(self, text: str) -> str:
        return latex(text)

    def inline(self, number: float | Gain) -> str:
        return rf"\({super().inline(number)}\)"

    def aligned(self, equations: Sequence[Equation], room: int = 60) -> str:
        """Equations below each other (amsmath)."""
        lines = [f"{left} &{right}" for each in equations for left, right in self.lines(each, room)]
        return r"\begin{aligned} " + " \\\\\n".join(lines) + r" \end{aligned}"


class MarkdownNotation(LatexNotation):
    """The same between dollar signs."""

    def prose(self, text: str) -> str:
        return markdown(text)

    def inline(self, number: float | Gain) -> str:
        return f"${Notation.inline(self, number)}$"


TEXT, UNICODE = Notation(), UnicodeNotation()
