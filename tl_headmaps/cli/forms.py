"""How parameters are written on the command line where their type does not say it: heads, words, relations, files."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.errors import UsageError
from ..core.files import home_expanded
from ..core.types import HeadIndex, check_head_names, layer_list


@dataclass(frozen=True)
class Form:
    """How a parameter is written.

    Attributes:
        metavar: What a help page calls it.
        read: Turns what was written into what a call takes.
        help: What a help page says instead of the call's own line, which stays where it explains choices.
        many: A list, in one option or in several: what came first is not lost when an option comes again.
        commas: The parts of a list may stand in one option, with commas between them.
    """

    metavar: str
    read: Callable[[Any], Any]
    help: str = ""
    many: bool = True
    commas: bool = True


def comma_parts(option: Iterable[str]) -> list[str]:
    """The parts of ``a, b,c`` without the spaces around them, of all times an option was given; empty ones are dropped.

    Example:
        >>> comma_parts(["a, b,", "c"])
        ['a', 'b', 'c']
    """
    return [part.strip() for text in option for part in text.split(",") if part.strip()]


def _heads(written: list[str]) -> str:
    return check_head_names(",".join(written))


def _head(written: list[str]) -> str:
    if len(written) > 1:
        raise UsageError(f"{written[0]} and {written[1]} were both given; give one of them.")
    return str(HeadIndex.parse(written[0]))


def _layers(written: list[str]) -> list[int]:
    return layer_list(",".join(written))


def _words(written: list[str]) -> list[str | int]:
    """``France,Germany,#4649``: words, or token ids after a hash."""
    return [int(word[1:]) if word.startswith("#") and word[1:].isdecimal() else word for word in written]


def _relation(written: str) -> Any:
    from ..data.relations import resolve

    return resolve(written)


def _relations(written: list[str]) -> list[Any]:
    from ..data.relations import resolve_relations

    return resolve_relations(written)


def _prompts(written: str) -> tuple[str, ...]:
    from ..data.texts import read_prompts

    return read_prompts(written)


def _templates(written: str) -> tuple[str, ...]:
    from ..capture.running.prompts import read_templates

    return read_templates(written)


def _texts(written: str) -> Path:
    path = home_expanded(written)
    if not path.is_file():
        raise UsageError(f"There is no file {written}. Give a text file with blank lines between texts.")
    return path


def _phrases(written: list[str]) -> dict[str, str | int]:
    """Queries by their phrases; a phrase that is given twice would lose its first query."""
    phrases: dict[str, str | int] = {}
    for phrase, query in map(_phrase, written):
        if phrase in phrases:
            raise UsageError(
                f"{phrase!r} was given twice, with {phrases[phrase]!r} and {query!r}. A phrase has one query: write "
                "another phrase for the second."
            )
        phrases[phrase] = query
    return phrases


def _phrase(text: str) -> tuple[str, str | int]:
    phrase, equals, query = text.rpartition("=")
    if not (equals and phrase.strip() and query.strip()):
        raise UsageError(f'{text!r} has no query. Write the phrase, "=" and its query: "Birds sometimes walk=walk".')
    # An index of a token (-1 is the last), unless the text has these digits.
    is_index = re.fullmatch("-?[0-9]{1,9}", query.strip()) and query.strip() not in phrase
    return phrase, int(query) if is_index else query


PHRASES = Form("PHRASE=QUERY", _phrases, commas=False)
"""Of every mapping from phrases to queries, one in each option."""

FORMS = {
    "controls": Form("NAMES", _relations),
    "functions": Form("NAME[,NAME]", list),
    "head": Form("HEAD", _head, "A head such as L23H4."),
    "heads": Form("HEADS", _heads, "Only these heads: L23H4,L12 (L12: all of layer 12)."),
    "layers": Form("LAYERS", _layers, "Only heads of these layers: 3,4,5."),
    "names": Form("FIRST,SECOND", list),
    "phrases": replace(PHRASES, help='A phrase and its query: "Birds sometimes walk=walk"; may be repeated.'),
    "prompts": Form(
        "FILE", _prompts, "With --preset context: prefixes, one on each line; default: neutral ones.", many=False
    ),
    "relation": Form("NAME|FILE", _relation, many=False),
    "relations": Form("NAMES", _relations, "Relations, bundled names or files; default: all bundled ones."),
    "sources": Form("WORDS", _words, "Row words, separated by commas; #123 is a token id."),
    "targets": Form("WORDS", _words, "Column words, likewise separated by commas."),
    "templates": Form("FILE", _templates, "Prompts, one on each line, <X> in each.", many=False),
    "text": Form("TEXT", str, "The text whose tokens are looked at.", many=False),
    "texts": Form("FILE", _texts, "Texts separated by blank lines; default: those of the package.", many=False),
}
"""By the name of the parameter, which means the same in every call."""
