"""Classes of tokens, by what a word means (from the bundled relations) and by what it looks like.

A token belongs to any number of classes. Words count with and without their leading space; meaning is judged with the
case as written (``" May"`` is a month, ``" may"`` is not), except for plain nouns and verbs at the start of a sentence.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

from ..data.relations import Relation, load_relations

_SOURCES, _TARGETS, _BOTH = 0, 1, 2

_FROM_RELATIONS: dict[str, list[tuple[str, int]]] = {
    "names": [("name_copying", _SOURCES), ("name_variations", _BOTH)],
    "countries": [("country_to_capital", _SOURCES), ("city_to_country", _TARGETS), ("country_to_adjective", _SOURCES)],
    "cities": [("country_to_capital", _TARGETS), ("city_to_country", _SOURCES)],
    "nationalities and languages": [("country_to_adjective", _TARGETS), ("country_to_language", _TARGETS)],
    "continents": [("country_to_continent", _TARGETS)],
    "currencies": [("country_to_currency", _TARGETS)],
    "months and days": [("next_month_or_day", _BOTH)],
    "numbers": [("next_number", _BOTH)],
    "chemical elements": [("element_to_symbol", _SOURCES)],
    "animals": [("animal_to_young", _BOTH)],
    "companies": [("company_to_product_category", _SOURCES)],
    "people by work": [("verb_to_agent", _TARGETS), ("work_to_location", _SOURCES)],
    "people by kinship or sex": [("male_to_female", _BOTH)],
    "things": [("object_to_superclass", _SOURCES)],
    "verbs": [("past_tense", _BOTH), ("present_participle", _BOTH)],
    "adjectives": [("comparative", _BOTH), ("superlative", _BOTH)],
    "adverbs": [("adjective_to_adverb", _TARGETS)],
    "plural nouns": [("plural", _TARGETS)],
    "pronouns": [("noun_to_pronoun", _TARGETS)],
    "French words": [("english_to_french", _TARGETS)],
    "German words": [("english_to_german", _TARGETS)],
    "Italian words": [("english_to_italian", _TARGETS)],
    "Spanish words": [("english_to_spanish", _TARGETS)],
}
_FOREIGN = ("French words", "German words", "Italian words", "Spanish words")

_CODE = re.compile(r"\s*(?=.*[A-Za-z])(?:.*[_(){}\[\]=<>;/\\$#@`*&|^~].*|.*[a-z][A-Z].*|\.\w+|\w+\.\w+)\s*", re.DOTALL)


def bare(token: str) -> str:
    """The word of a token, without the space around it."""
    return token.strip()


@lru_cache(maxsize=1 << 16)
def script_of(token: str) -> str:
    """First word of the Unicode names of a token's letters (LATIN, GREEK, CJK, ...); empty without letters or mixed."""
    scripts = {unicodedata.name(letter, "").split(" ")[0] for letter in token if letter.isalpha()}
    return scripts.pop() if len(scripts) == 1 else ""


_SHAPES: dict[str, Callable[[str], bool]] = {
    "numbers": lambda token: bare(token).isdigit(),
    "letters": lambda token: len(bare(token)) == 1 and bare(token).isalpha(),
    "all capitals": lambda token: len(bare(token)) > 1 and bare(token).isalpha() and bare(token).isupper(),
    "capitalised words": lambda token: token[:1] == " " and len(bare(token)) > 1 and _is_title(bare(token)),
    "capitalised line or word starts": lambda token: token[:1] != " " and len(token) > 1 and _is_title(token),
    "lower-case words": lambda token: token[:1] == " " and bare(token).isalpha() and bare(token).islower(),
    "word pieces": lambda token: token[:1] != " " and token.isalpha() and token.islower(),
    "punctuation": lambda token: bool(bare(token)) and not any(map(str.isalnum, token)),
    "white space": lambda token: bool(token) and not bare(token),
    "code": lambda token: _CODE.fullmatch(token) is not None,
    "other scripts": lambda token: script_of(token) not in ("", "LATIN"),
}


def _is_title(word: str) -> bool:
    return word.isalpha() and word[0].isupper() and word[1:].islower()


class Lexicon:
    """Word classes and facts, built out of relations.

    Example:
        >>> lexicon().classes(" France") >= {"countries", "capitalised words"}
        True
        >>> lexicon().same_country(" Paris", " French")
        True
    """

    def __init__(self, relations: Iterable[Relation]) -> None:
        self.relations = {relation.name: relation for relation in relations}
        self.pairs = {name: _text_pairs(relation) for name, relation in self.relations.items()}
        self._words = {name: self._collect(parts) for name, parts in _FROM_RELATIONS.items()}
        english = {word for name in self._words if name not in _FOREIGN for word in self._words[name]}
        english |= {source for name in self.pairs if name.startswith("english_to_") for source, _ in self.pairs[name]}
        for name in _FOREIGN:
            self._words[name] -= english
        self._classes = lru_cache(maxsize=1 << 17)(self._find_classes)
        self._countries = self._group_countries()
        forms: dict[str, set[str]] = {}
        for name, short in self.pairs.get("name_variations", ()):
            forms.setdefault(name, set()).add(short)
        self._short_forms = {name: frozenset(shorts) for name, shorts in forms.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """All classes."""
        return tuple(dict.fromkeys([*self._words, *_SHAPES]))

    def _collect(self, parts: list[tuple[str, int]]) -> set[str]:
        words: set[str] = set()
        for name, side in parts:
            for pair in self.pairs.get(name, ()):
                words.update(pair if side == _BOTH else (pair[side],))
        return words

    def classes(self, token: str) -> frozenset[str]:
        """Every class a token belongs to."""
        return self._classes(token)

    def _find_classes(self, token: str) -> frozenset[str]:
        word = bare(token)
        meanings = {name for name, words in self._words.items() if word in words}
        return frozenset(meanings | {name for name, fits in _SHAPES.items() if fits(token)})

    def meanings(self, token: str) -> frozenset[str]:
        """The classes that come from what the word means, not from what it looks like."""
        word = bare(token)
        return frozenset(name for name, words in self._words.items() if word in words)

    def _group_countries(self) -> dict[str, frozenset[str]]:
        countries: dict[str, set[str]] = {}
        for name in ("country_to_capital", "country_to_adjective", "country_to_language"):
            for country, other in self.pairs.get(name, ()):
                countries.setdefault(other, set()).add(country)
                countries.setdefault(country, set()).add(country)
        for name in ("city_to_country", "capital_to_country"):
            for city, country in self.pairs.get(name, ()):
                countries.setdefault(city, set()).add(country)
                countries.setdefault(country, set()).add(country)
        return {word: frozenset(names) for word, names in countries.items()}

    def short_forms(self, token: str) -> frozenset[str]:
        """A first name with the short forms known for it."""
        return self._short_forms.get(bare(token), frozenset()) | {bare(token)}

    def same_country(self, source: str, target: str) -> bool:
        """Whether two different words are about the same country: it, its people, language or cities."""
        one, other = bare(source), bare(target)
        return one != other and bool(self._countries.get(one, frozenset()) & self._countries.get(other, frozenset()))


def _text_pairs(relation: Relation) -> frozenset[tuple[str, str]]:
    return frozenset((s, t) for s, t in relation.pairs if isinstance(s, str) and isinstance(t, str))


@lru_cache(maxsize=4)
def lexicon(data_dir: Path | None = None) -> Lexicon:
    """The lexicon of the bundled relations (or of another folder of relations), built once."""
    return Lexicon(load_relations(data_dir=data_dir))
