"""Writes the task items beside this file: ``python relations_data/tasks/generate.py``, or ``--check`` to compare.

Every item tells about three people in three sentences and asks about one of them. Each sentence hides its answer
behind another operation: one must be recalled, one calculated, one decided, and so on. Which operation an item needs is
decided by *which sentence is asked about*, and by nothing else. There are two kinds of format:

* ``..._sentence``: the sentences come one after the other, each with its conclusion; that of the last is asked for.
* ``..._question``: all sentences come first, then a question with the name of one of the three people. Its sentence may
  be the first, second or third.

What makes the items fair:

* The three items of a matched set consist of the same words: in ``sentence`` formats the sentences change places, in
  ``question`` formats the name changes. A classifier of words can tell which three operations are there,
  never which is asked for: at best one item in three is right.
* Triples of functions are the orbits of {0, a, b} under rotation of the eight functions, in that order. So every
  function comes equally often in every format, content group and place (first, second, third sentence).
* Possible answers are the same three words for a whole set, and which is right depends neither on the function nor on
  the other answers of the set.
* Content groups share no name, no fact, no answer (number words aside) and no pair of synonyms. Splits go between
  groups.

Nothing is random: where a choice is free, SHA-256 of its place decides.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FUNCTIONS = (
    "knowledge_recall",
    "retrieval",
    "logical_reasoning",
    "decision_making",
    "semantic_understanding",
    "syntactic_understanding",
    "inference",
    "math_calculation",
)
ORBITS = ((0, 1, 2), (0, 1, 3), (0, 1, 4), (0, 1, 5), (0, 1, 6), (0, 2, 4), (0, 2, 5))
"""The seven orbits of three among eight under rotation."""

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]

QUESTIONS = {
    "place_question": "Question: Where is {N}?\nAnswer: {N} is in",
    "place_sentence": "So {N} is in",
    "object_question": "Question: What does {N} have?\nAnswer: {N} has the",
    "object_sentence": "So {N} has the",
    "number_sentence": "So the number of coins {N} has is",
}
"""N: the person asked about."""

OPENING = "Facts:"
"""Stands first, so that a name at the beginning is the same token as elsewhere."""

SENTENCES = {
    "place": {
        "knowledge_recall": "{N} left {w} for the capital of {fact}.",
        "retrieval": "{N} is in {x} and {M} is in {w}.",
        "logical_reasoning": "{N} is in {first} or {second}, but not in {w}.",
        "decision_making": "{N} takes the {better} trip: {first} at {p1}, {second} at {p2}.",
        "semantic_understanding": "{N} is {like}: the {word1} one is in {first}, the {word2} one in {second}.",
        "syntactic_understanding": "{N}, who called {M} in {w}, is in {x}.",
        "inference": "{M} left {w} for {x} and took {N} along.",
        "math_calculation": "{N} pays {a} plus {b}: {first} at {p1}, {second} at {p2}.",
    },
    "object": {
        "knowledge_recall": "{N} sold the {w} for what {fact}.",
        "retrieval": "{N} has the {x} and {M} has the {w}.",
        "logical_reasoning": "{N} has the {first} or the {second}, but not the {w}.",
        "decision_making": "{N} buys the {better} thing: the {first} at {p1}, the {second} at {p2}.",
        "semantic_understanding": "{N} is {like}: the {word1} one has the {first}, the {word2} one the {second}.",
        "syntactic_understanding": "{N}, who called {M} with the {w}, has the {x}.",
        "inference": "{M} sold the {w} for the {x} and gave all to {N}.",
        "math_calculation": "{N} pays {a} plus {b}: the {first} at {p1}, the {second} at {p2}.",
    },
    "number": {
        "knowledge_recall": "{N} lost {w} coins and has as many as {fact}.",
        "retrieval": "{N} has {x} coins and {M} has {w}.",
        "logical_reasoning": "{N} has {first} or {second} coins, but not {w}.",
        "decision_making": "{N} takes the {better} bag: one has {first} coins, one has {second}.",
        "semantic_understanding": "{N} is {like}: the {word1} one has {first} coins, the {word2} one {second}.",
        "syntactic_understanding": "{N}, who called {M} with {w} coins, has {x}.",
        "inference": "{M} lost {w} coins, kept {x} and gave all to {N}.",
        "math_calculation": "{N} lost {w} coins and has {a} plus {b}.",
    },
}
"""x: the answer; w: a wrong answer; first, second: both in either order; M: somebody else.

All begin with a name: else the word behind ``Facts:`` would tell which sentence is not the last.
"""

PLACES = """
France Egypt Japan Norway|Germany Peru Iraq Kenya|Italy China Cuba Sweden|Spain Russia Canada Iran
Greece Australia Chile Denmark|Ireland Poland Philippines Hungary|Austria Portugal Turkey Thailand
Belgium Finland Vietnam Nepal|Netherlands Ukraine Syria Lebanon|Afghanistan Bulgaria Scotland Serbia
"""

OBJECTS = """
bees make: honey|bakers bake: bread|miners dig for: gold|hens lay: eggs
cows give: milk|authors write: books|pandas eat: bamboo|locksmiths cut: keys
sheep give: wool|dogs chew: bones|pilots fly: planes|tailors sew: clothes
monkeys peel: bananas|silkworms spin: silk|poets write: poems|captains sail: ships
squirrels hide: nuts|oysters make: pearls|painters use: brushes|farmers drive: tractors
mice love: cheese|fishermen catch: fish|singers sing: songs|horses eat: hay
rabbits love: carrots|spiders weave: webs|florists sell: flowers|cobblers mend: shoes
vineyards make: wine|brides wear: rings|photographers use: cameras|soldiers fire: guns
butchers sell: meat|kings wear: crowns|carpenters use: hammers|postmen bring: letters
birds build: nests|smokers smoke: cigarettes|lumberjacks cut: trees|violinists play: violins
"""

COUNTS = """
a spider has legs: eight|a triangle has sides: three|a week has days: seven|a glove has fingers: five
an insect has legs: six|a car has wheels: four|a decade has years: ten|a bird has wings: two
a year has months: twelve|a cow has legs: four|a starfish has arms: five|a tricycle has wheels: three
an octopus has arms: eight|a cube has faces: six|a bicycle has wheels: two|a cat is said to have lives: nine
a rainbow has colours: seven|a square has corners: four|a football team has players: eleven|a foot has toes: five
a guitar has strings: six|a year has seasons: four|a trilogy has books: three|a dozen has eggs: twelve
a pentagon has sides: five|a horse has legs: four|a face has eyes: two|a scorpion has legs: eight
an ant has legs: six|a traffic light has colours: three|a violin has strings: four|both hands have fingers: ten
a hexagon has sides: six|a hand has fingers: five|a person has ears: two|a table has legs: four
an octagon has sides: eight|a triangle has corners: three|Snow White has dwarfs: seven|a chair has legs: four
"""

SYNONYMS = """
big large|happy glad
smart clever|angry mad
rich wealthy|sick ill
scared afraid|lucky fortunate
strong powerful|silent quiet
brave courageous|tired weary
famous renowned|slim thin
funny humorous|elderly old
beautiful pretty|strange weird
evil wicked|fast quick
"""


def table(text: str, row: str = "\n") -> list[list[str]]:
    """Cells of a table in a string; cells are divided by bars."""
    return [[cell.strip() for cell in line.split("|")] for line in text.strip().split(row)]


def bundled(relation: str) -> list[tuple[str, str]]:
    """Pairs of one of our relations."""
    (path,) = HERE.parent.glob(f"*/{relation}.json")
    return [(source, target) for source, target in json.loads(path.read_text(encoding="utf-8"))["pairs"]]


def content_groups() -> list[dict[str, Any]]:
    """Ten groups: names, facts by answer for each kind, synonyms."""
    capitals = dict(bundled("country_to_capital"))
    synonyms = set(bundled("synonym"))
    names = [name for name, _ in bundled("name_copying")][:80]
    countries = [cell.split() for line in table(PLACES) for cell in line]
    groups = []
    for number, (objects, counts, words) in enumerate(zip(table(OBJECTS), table(COUNTS), table(SYNONYMS), strict=True)):
        pairs = [tuple(cell.split()) for cell in words]
        assert all(pair in synonyms or pair[::-1] in synonyms for pair in pairs), pairs
        group = {
            "names": names[number::10],
            "place": {capitals[country]: country for country in countries[number]},
            "object": dict(reversed(cell.split(": ")) for cell in objects),
            "number": dict(reversed(cell.split(": ")) for cell in counts),
            "synonyms": pairs,
        }
        assert all(len(group[kind]) == 4 for kind in SENTENCES), group
        groups.append(group)
    return groups


def ordered(values: Sequence[Any], *place: object) -> list[Any]:
    """The values in an order that only the place decides."""

    def key(pair: tuple[int, Any]) -> str:
        return hashlib.sha256(repr((*place, pair[0])).encode()).hexdigest()

    return [value for _, value in sorted(enumerate(values), key=key)]


def sentence(kind: str, function: str, N: str, M: str, x: str, w: str, group: dict[str, Any], *place: object) -> str:
    """One sentence that gives the answer x about N only by its function."""
    first, second = ordered((x, w), *place, "order")
    if kind == "number":
        right, wrong = NUMBERS.index(x), NUMBERS.index(w)
        better = "bigger" if right > wrong else "smaller"
    else:
        right, wrong = ordered(range(2, 10), *place, "prices")[:2]
        better = "cheaper" if right < wrong else "dearer"
    p1, p2 = (right, wrong) if first == x else (wrong, right)
    a = ordered(range(1, right), *place, "sum")[0]
    (word_x, like), (word_w, _) = [
        ordered(pair, *place, "synonym") for pair in ordered(group["synonyms"], *place, "synonyms")
    ]
    word1, word2 = (word_x, word_w) if first == x else (word_w, word_x)
    return SENTENCES[kind][function].format(
        N=N,
        M=M,
        x=x,
        w=w,
        first=first,
        second=second,
        fact=group[kind][x],
        better=better,
        p1=NUMBERS[p1],
        p2=NUMBERS[p2],
        a=NUMBERS[a],
        b=NUMBERS[right - a],
        word1=word1,
        word2=word2,
        like=like,
    )


def items() -> Iterator[dict[str, Any]]:
    """All items, matched sets together."""
    for number, group in enumerate(content_groups()):
        for position, format_id in enumerate(QUESTIONS):
            orbit = ORBITS[(number + position) % len(ORBITS)]
            for turn in range(len(FUNCTIONS)):
                functions = [FUNCTIONS[(turn + step) % len(FUNCTIONS)] for step in orbit]
                yield from matched_set(number, group, format_id, turn, functions)


def matched_set(
    number: int, group: dict[str, Any], format_id: str, turn: int, functions: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """One item for each of three functions, made of the same words."""
    kind, style = format_id.split("_")
    place = (number, format_id, turn)
    options = ordered(list(group[kind]), *place, "options")[:3]
    people = ordered(group["names"], *place, "names")
    told, asked, answers = [], [], []
    for i, function in enumerate(functions):
        x, w = ordered(options, *place, i, "answer")[:2]
        told.append(sentence(kind, function, people[i], people[i + 3], x, w, group, *place, i))
        asked.append(QUESTIONS[format_id].format(N=people[i]))
        answers.append(x)
    concluded = [f"{told[i]} {asked[i]} {answers[i]}." for i in range(3)]
    for i, function in enumerate(functions):
        before = [concluded[i - 2], concluded[i - 1], told[i]] if style == "sentence" else told
        yield {
            "context": " ".join([OPENING, *before]),
            "question": asked[i],
            "answer": answers[i],
            "alternatives": [option for option in options if option != answers[i]],
            "function": function,
            "format": format_id,
            "content": f"g{number}",
            "matched": f"g{number}-{format_id}-{turn}",
        }


def files() -> dict[Path, str]:
    """Text of each file: the items of one function, one JSON object per line."""
    lines: dict[str, list[str]] = {function: [] for function in FUNCTIONS}
    for item in items():
        lines[item["function"]].append(json.dumps(item, ensure_ascii=False) + "\n")
    return {HERE / f"{function}.jsonl": "".join(written) for function, written in lines.items()}


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 if a file differs")
    check = parser.parse_args().check
    differing = 0
    for path, text in files().items():
        if check:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                differing += 1
                sys.stderr.write(f"{path.name} is not what this script writes\n")
        else:
            path.write_text(text, encoding="utf-8")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
