"""Results as aligned text for a terminal."""

import io
import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any

_WIDTH = 100_000
"""Tables take their natural width: nothing is cut."""


def visible(text: str) -> str:
    """Text on one line with control characters spelled out, so every token is visible."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def quoted(token: str) -> str:
    """A token in quotes, so its spaces are visible."""
    return f"'{visible(token)}'"


def word(token: str) -> str:
    """A token as a word of a sentence: without the spaces around it, unless it consists of them."""
    return visible(token).strip() or repr(token)


def as_words(tokens: Sequence[str]) -> list[str]:
    """Tokens as words; those that would then look alike are quoted with their spaces.

    Example:
        >>> as_words([" Italy", " Rome", "Rome"])
        ['Italy', "' Rome'", "'Rome'"]
    """
    words = [word(token) for token in tokens]
    return [quoted(token) if words.count(one) > 1 else one for token, one in zip(tokens, words, strict=True)]


def few(items: Sequence[object], n: int, between: str = ", ") -> str:
    """The first ``n``, and how many more there are.

    Example:
        >>> few("abcd", 2), few("ab", 2)
        ('a, b and 2 more', 'a, b')
    """
    shown = between.join(map(str, items[:n]))
    return f"{shown} and {len(items) - n} more" if len(items) > n else shown


def number(value: float | None, digits: int = 2) -> str:
    """A value with this many decimals, or a dash where there is none; a small value is not shown as nothing.

    Example:
        >>> number(0.4567), number(0.00123), number(0.0), number(-4e-7, 3)
        ('0.46', '0.0012', '0.00', '-4e-07')
    """
    if value is None or math.isnan(value):
        return "-"
    text = f"{value:.{digits}f}"
    return significant(value, 2) if value and float(text) == 0 else text


def significant(value: float, digits: int = 3) -> str:
    """A value with this many significant digits, or a dash where there is none."""
    if math.isnan(value):
        return "-"
    text = f"{value:.{digits}g}"
    return "0" if float(text) == 0 else text


def chance(value: float) -> str:
    """A p- or q-value with two significant digits; below 1e-9 nobody can tell."""
    return "<1e-9" if value < 1e-9 else significant(value, 2)


def signed(value: float, digits: int = 3) -> str:
    """The same with a sign in front, plus or minus."""
    text = significant(value, digits)
    return text if text.startswith("-") else f"+{text}"


def true_minus(text: str) -> str:
    """Numbers for a page, with the minus sign instead of the hyphen."""
    return text.replace("-", "−")


def prose(text: str) -> str:
    """A sentence with minus signs before its numbers; ranges such as 20-60% keep their hyphen."""
    return re.sub(r"(?<![^\s(])-(?=\.?\d)", "−", text)


def sentence(text: str) -> str:
    """A text that ends like a sentence, so that another can follow."""
    return f"{text}." if text and text[-1] not in ".!?…" else text


def in_words(name: str) -> str:
    """Names of relations, metrics and columns for readers: ``country_to_capital`` is ``country to capital``.

    Example:
        >>> in_words("country_to_capital"), in_words("_"), in_words("attn.q")
        ('country to capital', '_', 'attn.q')
    """
    return re.sub(r"(?<=[^\W_])_+(?=[^\W_])", " ", name)


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    # Markdown would take these for tags, also between dollar signs.
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    # Signs of our own sentences that pdflatex has no letter for.
    "≤": r"\ensuremath{\leq}",
    "≥": r"\ensuremath{\geq}",
    "→": r"\ensuremath{\rightarrow}",
    "−": r"\ensuremath{-}",
}
_MARKDOWN = {"&": "&amp;", "<": "&lt;", ">": "&gt;", **{character: f"\\{character}" for character in "\\`*_[]|~$"}}


def latex(text: object) -> str:
    """Text that LaTeX shows as it is; hyphens and quotes in a row do not become dashes and other quotes."""
    apart = re.split(r"(?<=[-`'?!])(?=[-`'])", visible(str(text)))
    return "{}".join("".join(_LATEX.get(character, character) for character in part) for part in apart)


def markdown(text: object) -> str:
    """Text inside a line of Markdown that is shown as it is, also where dollar signs mean formulas."""
    return "".join(_MARKDOWN.get(character, character) for character in visible(str(text)))


def wrapped(text: str, width: int = 100) -> str:
    """Prose in lines of at most this many characters."""
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def interval(low: float, high: float) -> str:
    """``0.78 to 0.91``, or a dash."""
    return "-" if math.isnan(low) or math.isnan(high) else f"{number(low)} to {number(high)}"


def percent(share: float | None) -> str:
    """A share in per cent, or a dash if there is none."""
    text = "-" if share is None or math.isnan(share) else f"{100 * share:.0f}%"
    return "0%" if text == "-0%" else text


def table_text(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Any]]) -> str:
    """An aligned table as wide as it needs; columns are (title, "left" or "right"). Wide characters count as two."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title, justify in columns:
        table.add_column(Text(title), justify="right" if justify == "right" else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(visible(str(cell))) for cell in row))
    stream = io.StringIO()
    # In a notebook the console would show the table on its own, and leave the stream empty.
    Console(file=stream, width=_WIDTH, color_system=None, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip("\n").splitlines())
