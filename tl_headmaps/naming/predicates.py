"""The catalogue of predicates that heads are named with, from plain copying to the bundled relations.

To add one, write it here or in your own code with ``@predicate(name, examples=..., counterexamples=...)``. Tokens come
as they are, with their leading spaces. A predicate must be cheap: it is called a few thousand times per head.
"""

import re
from functools import lru_cache

from ..core.vocabulary import stems
from .catalogue import predicate as predicate
from .lexicon import bare, lexicon, script_of


@lru_cache(maxsize=1 << 17)
def folded(token: str) -> str:
    """The word of a token without spaces and case."""
    return bare(token).casefold()


@lru_cache(maxsize=1 << 17)
def _word(token: str) -> str:
    """The same if it is a word of letters, else empty."""
    word = folded(token)
    return word if word.isalpha() else ""


@predicate("copy", examples=[(" cat", " cat")], counterexamples=[(" cat", "cat"), (" cat", " dog")])
def copy(source: str, target: str) -> bool:
    """The very same token."""
    return source == target and bool(bare(source))


@predicate(
    "case or space variant",
    examples=[(" cat", "cat"), (" cat", " Cat"), ("CAT", " cat")],
    counterexamples=[(" cat", " cat"), (" cat", " cats")],
)
def variant(source: str, target: str) -> bool:
    """The same word as another token: case or leading space differ."""
    return source != target and folded(source) == folded(target) != ""


@predicate("first letter", examples=[(" cat", " c"), ("Dog", "D")], counterexamples=[(" cat", " t"), (" c", " c")])
def first_letter(source: str, target: str) -> bool:
    """The first letter of the word."""
    word = _word(source)
    return len(word) > 1 and folded(target) == word[0]


@predicate("last letter", examples=[(" cat", " t"), ("Dog", "G")], counterexamples=[(" cat", " c"), (" t", " t")])
def last_letter(source: str, target: str) -> bool:
    """The last letter of the word."""
    word = _word(source)
    return len(word) > 1 and folded(target) == word[-1]


@predicate(
    "beginning of the word", examples=[(" Sweden", "Swed")], counterexamples=[(" Sweden", " s"), (" cat", " cat")]
)
def beginning(source: str, target: str) -> bool:
    """A proper beginning of the word, two letters or more."""
    word, part = _word(source), _word(target)
    return 2 <= len(part) < len(word) and word.startswith(part)


@predicate("end of the word", examples=[(" walking", "ing")], counterexamples=[(" walking", "g"), (" cat", " cat")])
def end(source: str, target: str) -> bool:
    """A proper end of the word, two letters or more."""
    word, part = _word(source), _word(target)
    return 2 <= len(part) < len(word) and word.endswith(part)


@predicate("completed word", examples=[(" Swed", " Sweden")], counterexamples=[(" Sweden", " Swed"), (" c", " cat")])
def completed(source: str, target: str) -> bool:
    """A longer word that begins with the source."""
    part, word = _word(source), _word(target)
    return 2 <= len(part) < len(word) and word.startswith(part)


@predicate(
    "word ending in it", examples=[(" ball", " football")], counterexamples=[(" football", " ball"), ("l", " ball")]
)
def prefixed(source: str, target: str) -> bool:
    """A longer word that ends with the source."""
    part, word = _word(source), _word(target)
    return 2 <= len(part) < len(word) and word.endswith(part)


@predicate(
    "same initial", examples=[(" cat", " castle")], counterexamples=[(" cat", " dog"), (" cat", " c"), (" cat", "Cat")]
)
def same_initial(source: str, target: str) -> bool:
    """Another word with the same first letter."""
    one, other = _word(source), _word(target)
    return min(len(one), len(other)) > 1 and one != other and one[0] == other[0]


@predicate(
    "same beginning", examples=[(" station", " stable")], counterexamples=[(" station", " shed"), (" sta", " station")]
)
def same_beginning(source: str, target: str) -> bool:
    """Another word with the same first three letters, neither the beginning of the other."""
    one, other = _word(source), _word(target)
    return one[:3] == other[:3] and len(one[:3]) == 3 and not one.startswith(other) and not other.startswith(one)


@predicate(
    "same ending", examples=[(" station", " nation")], counterexamples=[(" station", " shed"), ("ion", " nation")]
)
def same_ending(source: str, target: str) -> bool:
    """Another word with the same last three letters, neither the end of the other."""
    one, other = _word(source), _word(target)
    return one[-3:] == other[-3:] and min(len(one), len(other)) > 3 and one != other


@predicate(
    "plural or singular",
    examples=[(" cat", " cats"), (" cities", " city"), (" child", " children")],
    counterexamples=[(" cat", " cat"), (" cat", " caster")],
)
def plural(source: str, target: str) -> bool:
    """The plural of a noun, or its singular."""
    one, other = sorted((_word(source), _word(target)), key=len)
    if len(one) < 2 or one == other:
        return False
    regular = other in (f"{one}s", f"{one}es") or (one.endswith("y") and other == f"{one[:-1]}ies")
    irregular = lexicon().pairs.get("plural", frozenset())
    return regular or (one, other) in irregular or (other, one) in irregular


@predicate(
    "inflection",
    examples=[(" walk", " walked"), (" running", " run"), (" happy", " happily"), (" went", " go")],
    counterexamples=[(" walk", " walk"), (" walk", " wall")],
)
def inflection(source: str, target: str) -> bool:
    """Another form of the same word: tense, comparison, adverb, agent."""
    one, other = _word(source), _word(target)
    if one == other or min(len(one), len(other)) < 2:
        return False
    if one[0] == other[0] and stems(one) & stems(other):
        return True
    known = lexicon().pairs
    return any(
        (one, other) in known.get(name, ()) or (other, one) in known.get(name, ())
        for name in ("past_tense", "present_participle", "comparative", "superlative")
    )


_AFFIXES = re.compile(
    r"(?:ness|ment|ments|tion|tions|ation|ity|able|ible|ful|less|ism|ist|ists|al|ous|ive|ian|ians|ish|ize)"
)


@predicate(
    "derived word",
    examples=[(" kind", " kindness"), (" Italian", " Ital")],
    counterexamples=[(" kind", " kinds"), (" a", " al")],
)
def derived(source: str, target: str) -> bool:
    """One word is the other with an ending that makes a new word (-ness, -ment, -ian)."""
    one, other = sorted((_word(source), _word(target)), key=len)
    return len(one) >= 3 and other.startswith(one) and _AFFIXES.fullmatch(other[len(one) :]) is not None


_NEGATIONS = ("un", "in", "im", "il", "ir", "dis", "non", "mis")


@predicate(
    "negated word",
    examples=[(" happy", " unhappy"), (" dishonest", " honest")],
    counterexamples=[(" happy", " happily")],
)
def negated(source: str, target: str) -> bool:
    """One word is the other with un-, in-, dis- before it."""
    one, other = sorted((_word(source), _word(target)), key=len)
    return len(one) >= 3 and any(other == negation + one for negation in _NEGATIONS)


@lru_cache(maxsize=1 << 18)
def _near(one: str, other: str, most: int) -> bool:
    """Whether the edit distance is at most ``most`` (banded dynamic programming)."""
    if abs(len(one) - len(other)) > most:
        return False
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        previous, row[0] = row[0], i
        for j, candidate in enumerate(other, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (letter != candidate))
        if min(row) > most:
            return False
    return row[-1] <= most


@predicate(
    "spelling variant",
    examples=[(" Tomas", " Thomas"), (" colour", " color"), (" Catherine", " Katherine")],
    counterexamples=[(" cat", " hat"), (" colour", " colour"), (" colour", " flower")],
)
def spelling(source: str, target: str) -> bool:
    """A word of four letters or more that one or, from seven letters on, two edits turn into the other."""
    one, other = _word(source), _word(target)
    shorter = min(len(one), len(other))
    return shorter >= 4 and one != other and _near(one, other, 2 if shorter >= 7 else 1)


@predicate(
    "name variation",
    examples=[(" Tomas", " Tom"), (" Donna", " Don"), (" Thomas", " Tommy")],
    counterexamples=[(" Thomas", " Thomas"), (" Thomas", " Peter"), (" walked", " walk")],
)
def name_variation(source: str, target: str) -> bool:
    """Another form of a first name: short form, spelling, nickname."""
    if folded(source) == folded(target) or "names" not in lexicon().meanings(source):
        return False
    other = bare(target)
    if lexicon().short_forms(source) & lexicon().short_forms(target):
        return True
    short, long = sorted((folded(source), folded(target)), key=len)
    return other[:1].isupper() and len(short) >= 3 and (long.startswith(short[:3]) or _near(short, long, 2))


_MONTHS = "january february march april may june july august september october november december"
_SEQUENCES = (
    tuple(_MONTHS.split()),
    ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
    ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"),
    tuple("abcdefghijklmnopqrstuvwxyz"),
    ("i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix", "x"),
)


@lru_cache(maxsize=1 << 14)
def _places(word: str) -> tuple[tuple[int, int], ...]:
    """(sequence, place) of a word in the sequences above; numbers in digits are a sequence of their own."""
    places = [(number, sequence.index(word)) for number, sequence in enumerate(_SEQUENCES) if word in sequence]
    if word.isdecimal() and len(word) <= 6:
        places.append((len(_SEQUENCES), int(word)))
    return tuple(places)


def _step(source: str, target: str, step: int) -> bool:
    places = _places(folded(target))
    return any((sequence, place + step) in places for sequence, place in _places(folded(source)))


@predicate(
    "next in sequence",
    examples=[(" Monday", " Tuesday"), (" 3", "4")],
    counterexamples=[(" Monday", " Sunday"), (" 3", " 5")],
)
def successor(source: str, target: str) -> bool:
    """The next number, letter, month, day or ordinal."""
    return _step(source, target, 1)


@predicate(
    "previous in sequence",
    examples=[(" Tuesday", " Monday")],
    counterexamples=[(" Monday", " Tuesday"), (" cat", " bat")],
)
def predecessor(source: str, target: str) -> bool:
    """The previous number, letter, month, day or ordinal."""
    return _step(source, target, -1)


@predicate(
    "same sequence",
    examples=[(" March", " July"), (" seven", " two")],
    counterexamples=[(" March", " Monday"), (" a", " b"), (" x", " y")],
)
def same_sequence(source: str, target: str) -> bool:
    """Another month, day, number word or ordinal."""
    if min(len(folded(source)), len(folded(target))) < 2 or folded(source) == folded(target):
        return False
    return bool(
        {sequence for sequence, _ in _places(folded(source))} & {sequence for sequence, _ in _places(folded(target))}
    )


@predicate(
    "same number in words or digits",
    examples=[(" three", "3"), ("7", " seven")],
    counterexamples=[(" three", "4"), ("7", "7")],
)
def same_number(source: str, target: str) -> bool:
    """A number in words for one in digits, or the other way round."""
    words = _SEQUENCES[2]
    one, other = sorted((folded(source), folded(target)))
    return one.isdecimal() and other in words and int(one) == words.index(other)


@predicate(
    "number to number", examples=[(" 1990", "7"), ("12", "13")], counterexamples=[("12", "12"), ("12", " twelve")]
)
def number(source: str, target: str) -> bool:
    """Another number in digits."""
    return bare(source).isdecimal() and bare(target).isdecimal() and bare(source) != bare(target)


_BRACKETS = {"(": ")", "[": "]", "{": "}", "<": ">", '"': '"', "'": "'", "“": "”", "‘": "’", "«": "»", "/*": "*/"}


@predicate("closing bracket or quote", examples=[(" (", ")"), ("[", "],")], counterexamples=[(" (", "]"), (")", "(")])
def closing(source: str, target: str) -> bool:
    """The mark that closes what the source opens last."""
    opening = next((mark for mark in sorted(_BRACKETS, key=len, reverse=True) if bare(source).endswith(mark)), None)
    return opening is not None and bare(target).startswith(_BRACKETS[opening])


@predicate("punctuation to punctuation", examples=[(",", ";"), (" (", ")")], counterexamples=[(",", ","), (",", " a")])
def punctuation(source: str, target: str) -> bool:
    """Another token without a letter or digit."""
    one, other = bare(source), bare(target)
    return bool(one) and bool(other) and one != other and not any(map(str.isalnum, one + other))


@predicate("same script", examples=[("α", " λόγος"), ("и", "в")], counterexamples=[("α", "в"), (" cat", " dog")])
def same_script(source: str, target: str) -> bool:
    """Letters of the same script, when it is not Latin."""
    return script_of(source) == script_of(target) not in ("", "LATIN") and bare(source) != bare(target)


@predicate(
    "all capitals to all capitals", examples=[(" NASA", "FBI")], counterexamples=[(" NASA", " Nasa"), (" A", " B")]
)
def capitals(source: str, target: str) -> bool:
    """Another word in capitals."""
    one, other = bare(source), bare(target)
    return (
        min(len(one), len(other)) > 1
        and one.isalpha()
        and one.isupper()
        and other.isalpha()
        and other.isupper()
        and one != other
    )


@predicate(
    "code to code",
    examples=[(" get_name", "__init__"), ("()", "[];")],
    counterexamples=[(" cat", "__init__"), (".", ",")],
)
def code(source: str, target: str) -> bool:
    """Another token of program text."""

    def is_code(token: str) -> bool:
        word = bare(token)
        return "code" in lexicon().classes(token) or (len(word) > 1 and bool(set(word) & set("(){}[]=<>_;$#")))

    return folded(source) != folded(target) and is_code(source) and is_code(target)


@predicate(
    "same country",
    examples=[(" Paris", " French"), (" Italy", " Italian")],
    counterexamples=[(" Paris", " German"), (" Italy", " Italy")],
)
def same_country(source: str, target: str) -> bool:
    """Another word about the same country: its name, people, language, cities."""
    return lexicon().same_country(source, target)


@predicate(
    "same class of words",
    examples=[(" Paris", " Berlin"), (" Thomas", " Peter")],
    counterexamples=[(" Paris", " Peter"), (" Paris", " Paris")],
)
def same_class(source: str, target: str) -> bool:
    """Another word of the same meaning class: two cities, two names, two animals."""
    return folded(source) != folded(target) and bool(lexicon().meanings(source) & lexicon().meanings(target))


def _add_relations() -> None:
    """One predicate for each bundled relation whose pairs are not found by their spelling."""
    covered = {
        "copying",
        "name_copying",
        "capitalise",
        "word_first_letter",
        "word_last_letter",
        "name_variations",
        "plural",
    }
    for name, relation in lexicon().relations.items():
        if name in covered:
            continue
        pairs = lexicon().pairs[name]

        def holds(source: str, target: str, pairs: frozenset[tuple[str, str]] = pairs) -> bool:
            return (bare(source), bare(target)) in pairs

        first = next((s, t) for s, t in relation.pairs if isinstance(s, str) and isinstance(t, str))
        predicate(
            name.replace("_", " "),
            examples=[(f" {first[0]}", f" {first[1]}")],
            counterexamples=[(f" {first[0]}", f" {first[0]}{first[1]}")],
            sources=(source for source, _ in pairs),
        )(holds)


_add_relations()
