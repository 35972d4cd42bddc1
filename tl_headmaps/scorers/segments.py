"""Words, clauses and sentences of a token sequence, without a parser.

Rules, not linguistics, and made for English:

* a *word* starts at a token with a leading space, at the start, and where letters and signs meet;
* a *sentence* ends with a token that holds ``.``, ``!``, ``?`` or a line break;
* a *clause* ends there and at ``,``, ``;``, ``:``, dashes, brackets and quotation marks;
* a *content word* holds a letter or digit and is none of the function words below.
"""

from collections.abc import Sequence
from dataclasses import dataclass

FUNCTION_WORDS = frozenset(
    """a an the this that these those my your his her its our their some any no every each either neither all both
    of in on at by for from to with without into onto upon over under above below between among through during before
    after about against around across behind beside beyond near since until up down out off as than like per via
    and or but nor so yet if because although though while when where whether unless
    i you he she it we they me him us them who whom whose which what there here
    is am are was were be been being do does did have has had will would shall should can could may might must
    not n't 's 're 've 'll 'd 'm s t re ve ll d m very too also just only then""".split()  # noqa: SIM905
)
"""English determiners, prepositions, conjunctions, pronouns, auxiliaries and particles."""

_SENTENCE_ENDS = frozenset(".!?\n。！？")
_CLAUSE_ENDS = _SENTENCE_ENDS | frozenset(',;:()[]{}"“”«»—–')


@dataclass(frozen=True)
class Segments:
    """Number of the word, clause and sentence of each token, and the words that carry content."""

    words: tuple[int, ...]
    clauses: tuple[int, ...]
    sentences: tuple[int, ...]
    content: tuple[bool, ...]
    """For each word, not each token."""

    @classmethod
    def of(cls, tokens: Sequence[str]) -> "Segments":
        """Cut a text.

        Example:
            >>> Segments.of(["The", " cat", " sl", "ept", ".", " It", " woke"])
            Segments(words=(0, 1, 2, 2, 3, 4, 5), clauses=(0, 0, 0, 0, 0, 1, 1), sentences=(0, 0, 0, 0, 0, 1, 1), \
content=(False, True, True, False, False, True))
        """
        words: list[int] = []
        texts: list[str] = []
        for place, token in enumerate(tokens):
            bare = token.strip()
            starts = place == 0 or token[:1].isspace() or not bare or _kind(bare) != _kind(texts[-1])
            if starts:
                texts.append(bare)
            else:
                texts[-1] += bare
            words.append(len(texts) - 1)
        content = tuple(_kind(text) and text.lower() not in FUNCTION_WORDS for text in texts)
        return cls(tuple(words), _ended(tokens, _CLAUSE_ENDS), _ended(tokens, _SENTENCE_ENDS), content)


def _kind(text: str) -> bool:
    """Letters and digits (with apostrophes and hyphens inside), against signs."""
    return any(character.isalnum() for character in text)


def _ended(tokens: Sequence[str], ends: frozenset[str]) -> tuple[int, ...]:
    """Numbers that go up after every token with one of these characters."""
    numbers, number = [], 0
    for token in tokens:
        numbers.append(number)
        number += not ends.isdisjoint(token)
    return tuple(numbers)
