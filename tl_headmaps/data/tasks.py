"""Task items: prompts labelled with the cognitive function their answer needs, bundled or a user's own.

An item is what a model reads (``context`` and ``question``, joined by a space), the ``answer`` that follows, and wrong
answers that fit as well (``alternatives``), so that even a small model can be scored: which does it find likeliest?
Items with the same ``content`` stay together on one side of every split: a probe must not be tested on facts it was
trained on.

The bundled items are in ``relations_data/tasks/`` (CC0), written by the script beside them, which explains why their
words do not give their function away. :meth:`Tasks.from_file` and :meth:`Tasks.from_records` read a user's own.
"""

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..core.errors import TaskDataError
from ..core.files import check_text
from ..core.options import Seed, checked
from ..core.types import check_choice
from .records import flat_records, item_fields, listed_records, records_of_file
from .relations import data_folder

FUNCTIONS = {
    "knowledge_recall": "Knowledge Recall",
    "retrieval": "Retrieval",
    "logical_reasoning": "Logical Reasoning",
    "decision_making": "Decision-making",
    "semantic_understanding": "Semantic Understanding",
    "syntactic_understanding": "Syntactic Understanding",
    "inference": "Inference",
    "math_calculation": "Math Calculation",
}
"""The eight functions and how a figure writes them."""

FEWEST_ITEMS = 10
"""Items a function needs before anything is said about it."""

Duplicates: TypeAlias = Literal["refuse", "drop"]

_ALIASES = {"math": "math_calculation", "mathematical_calculation": "math_calculation", "recall": "knowledge_recall"}
_TEMPLATE = "Question: {question}\nAnswer:"
_SHOWN = 5
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class TaskItem:
    """One prompt with its answer and the function the answer needs.

    Attributes:
        question: What follows the context, up to where the answer begins.
        answer: The right answer, without the space in front of it.
        function: Name of the function.
        context: What the model reads first, or nothing.
        alternatives: Wrong answers of the same kind.
        format: Which wording the prompt has; reported so that a format that gives the label away is seen.
        content: Items with the same content are never split.
        matched: Items of one matched set have equal words and different functions.

    Example:
        >>> from tl_headmaps import TaskItem
        >>> item = TaskItem("The cup is", "red", "retrieval", context="The cup is red.", alternatives=("blue", "green"))
        >>> item.prompt
        'The cup is red. The cup is'
    """

    question: str
    answer: str
    function: str
    context: str = ""
    alternatives: tuple[str, ...] = ()
    format: str = ""
    content: str = ""
    matched: str = ""

    @property
    def prompt(self) -> str:
        """What the model reads before the answer."""
        return f"{self.context} {self.question}" if self.context else self.question

    @property
    def decisive(self) -> str:
        """The sentence of the context that is asked about: it shares with the question what no other sentence has.

        Names (capitalised words) that no other sentence has count first, then other such words, then words of two
        sentences, and so on; of equals the last is taken. Without a context it is the question itself.

        Example:
            >>> from tl_headmaps import TaskItem
            >>> TaskItem("So Ann is in", "Oslo", "retrieval", context="Bob is in Rome. Ann is in Oslo.").decisive
            'Ann is in Oslo.'
        """
        sentences = _SENTENCE_END.split(self.context.strip())
        words = [set(_WORD.findall(sentence)) for sentence in sentences]
        shares = {word: sum(word in sentence for sentence in words) for word in set(_WORD.findall(self.question))}

        def shared(place: int) -> tuple[int, ...]:
            rarity = Counter(shares[word] for word in shares.keys() & words[place])
            names = sum(shares[word] == 1 and word[0].isupper() for word in shares.keys() & words[place])
            return (names, *(rarity[n] for n in range(1, len(sentences) + 1)), place)

        best = max(range(len(sentences)), key=shared)
        return sentences[best] or self.question


@dataclass(frozen=True)
class Tasks:
    """Items of at least two functions, checked.

    Attributes:
        items: The items.
        name: Where they come from.
        unknown_labels: How many items each label had that is not one of the functions; those were left out.
        n_dropped: Duplicates that were left out.

    Raises:
        TaskDataError: One function only, a function with fewer than ten items, an empty field, or the same prompt under
            two contents, which a split could put on both sides.

    Example:
        >>> from tl_headmaps import TaskItem, Tasks
        >>> sums = [TaskItem(f"{n} + 1 =", str(n + 1), "math_calculation", content=str(n)) for n in range(10)]
        >>> cups = [TaskItem(f"{n} is", "red", "retrieval", f"Cup {n} is red.", content=str(n)) for n in range(10)]
        >>> tasks = Tasks((*sums, *cups), name="mine")
        >>> len(tasks), tasks.functions
        (20, ('retrieval', 'math_calculation'))
    """

    items: tuple[TaskItem, ...]
    name: str = "custom"
    unknown_labels: Mapping[str, int] = field(default_factory=dict)
    n_dropped: int = 0

    def __post_init__(self) -> None:
        for index, item in enumerate(self.items):
            for part in ("question", "answer", "function"):
                if not getattr(item, part).strip():
                    raise TaskDataError(
                        f"Item {index} of {self.name} has no {part}: {_shown(item)}. Every item needs a question, an "
                        "answer and a function; fill it in or remove the item."
                    )
        check_text([astuple(item) for item in self.items], f"An item of {self.name}", TaskDataError)
        _check_counts(self)
        _check_duplicates(self)

    @classmethod
    def from_file(cls, path: str | Path, *, template: str = _TEMPLATE, duplicates: Duplicates = "refuse") -> "Tasks":
        """Items of a ``.json``, ``.jsonl``, ``.csv`` or ``.tsv`` file; see :meth:`from_records`.

        Example:
            >>> import json
            >>> from pathlib import Path
            >>> from tl_headmaps import Tasks
            >>> sums = [{"question": f"{n} + 1 =", "answer": n + 1, "function": "Math"} for n in range(10)]
            >>> names = [{"question": f"Who is {n}?", "answer": "Nobody", "function": "Recall"} for n in range(10)]
            >>> written = Path("mine.json").write_text(json.dumps(sums + names))
            >>> Tasks.from_file("mine.json").counts
            {'knowledge_recall': 10, 'math_calculation': 10}
        """
        path = Path(path)
        return cls.from_records(records_of_file(path), template=template, duplicates=duplicates, name=path.name)

    @classmethod
    def from_records(
        cls,
        records: Any,
        *,
        template: str = _TEMPLATE,
        duplicates: Duplicates = "refuse",
        name: str = "records",
    ) -> "Tasks":
        """Items of a ``datasets.Dataset`` or a list of dictionaries.

        A record is flat (context, question, answer, alternatives, function, format, content; all but question, answer
        and function may be missing) or nested as in published data: ``{question, answer, generated: [{subquestion,
        answer, cognitive_skill}]}``, where each entry becomes an item whose context and content is the main question.
        Labels are names of the eight functions, whatever their case and punctuation; others are left out and counted in
        ``unknown_labels``.

        Args:
            records: The records.
            template: How a question is asked: ``{question}`` is replaced by it.
            duplicates: ``"drop"`` keeps only the first of equal prompts instead of refusing them.
            name: Where they come from, for provenance and messages.

        Example:
            >>> from tl_headmaps import Tasks
            >>> sums = [{"question": f"{n} + 1 =", "answer": n + 1, "function": "Math"} for n in range(10)]
            >>> names = [{"question": f"Who is {n}?", "answer": "Nobody", "function": "Recall"} for n in range(10)]
            >>> tasks = Tasks.from_records(sums + names, template="{question}")
            >>> tasks.counts, tasks.items[0].prompt
            ({'knowledge_recall': 10, 'math_calculation': 10}, '0 + 1 =')
        """
        check_choice(duplicates, Duplicates, "duplicates")
        if template.count("{question}") != 1:
            raise TaskDataError(f"template={template!r} must contain {{question}} exactly once.")
        flat = list(flat_records(listed_records(records), name))
        unlabelled = [index for index, record in enumerate(flat) if not str(record.get("function") or "").strip()]
        _refuse_unlabelled(unlabelled, len(flat), name)
        items: list[TaskItem] = []
        unknown: Counter[str] = Counter()
        for index, record in enumerate(flat):
            function = _canonical(str(record["function"]))
            if function is None:
                unknown[str(record["function"])] += 1
            else:
                items.append(_item({**record, "function": function}, index, name, template))
        if not items:
            labels = ", ".join(repr(label) for label in sorted(unknown)[:_SHOWN]) or "no record"
            raise TaskDataError(
                f"{name}: no item is labelled with a function (found {labels}). Label them with "
                f"{', '.join(FUNCTIONS)}; for functions of your own, build Tasks from TaskItem objects."
            )
        kept = _without_duplicates(items) if duplicates == "drop" else items
        return cls(tuple(kept), name, dict(sorted(unknown.items())), len(items) - len(kept))

    def __len__(self) -> int:
        return len(self.items)

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions there are: ours in their usual order, then others by name."""
        present = {item.function for item in self.items}
        return (*(name for name in FUNCTIONS if name in present), *sorted(present - set(FUNCTIONS)))

    @property
    def counts(self) -> dict[str, int]:
        """Items of each function."""
        counted = Counter(item.function for item in self.items)
        return {function: counted[function] for function in self.functions}

    @property
    def digest(self) -> str:
        """SHA-256 over every field of every item, in order."""
        content = json.dumps([astuple(item) for item in self.items], ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()

    def select(self, functions: Iterable[str]) -> "Tasks":
        """The items of some functions."""
        wanted = [_function_name(name, self.functions) for name in functions]
        return replace(self, items=tuple(item for item in self.items if item.function in wanted))

    def sample(self, n: int, *, seed: int = 0) -> "Tasks":
        """About ``n`` items of each function for a quick look, in their usual order.

        Matched sets stay whole, so a function may get a few more than ``n``; it gets fewer only if it has fewer.
        Contents and formats are used evenly, and the seed decides among equals.

        Example:
            >>> from tl_headmaps import load_tasks
            >>> load_tasks(["retrieval", "inference"]).sample(30).counts
            {'retrieval': 30, 'inference': 30}
        """
        checked("seed", seed, Seed)
        if n < FEWEST_ITEMS:
            raise TaskDataError(f"sample({n}) is too small: a function needs at least {FEWEST_ITEMS} items.")
        # Items are taken set by set, because half a matched set would let words tell functions apart. An item without
        # a set is a set of its own.
        sets: dict[str, list[int]] = {}
        for index, item in enumerate(self.items):
            sets.setdefault(f"set {item.matched}" if item.matched else f"item {index}", []).append(index)
        order = list(sets.values())
        random.Random(seed).shuffle(order)
        # Sets of the same functions are interchangeable but for their content and format: (indices, content, format).
        alike: dict[tuple[str, ...], list[tuple[list[int], str, str]]] = {}
        for indices in order:
            first = self.items[indices[0]]
            functions = tuple(sorted(self.items[index].function for index in indices))
            alike.setdefault(functions, []).append((indices, first.content, first.format))
        wanted = {name: min(n, count) for name, count in self.counts.items()}
        taken: Counter[str] = Counter()
        contents: Counter[str] = Counter()
        formats: Counter[str] = Counter()
        kept: set[int] = set()
        # Greedy, which is even enough: each step takes the set that brings fewest items nobody needs any more, then the
        # one whose functions are rarest so far, then the rarest content and format; the shuffled order breaks ties.
        while short := {name for name, count in wanted.items() if taken[name] < count}:
            useful = [functions for functions, left in alike.items() if left and short & set(functions)]
            costs = [(sum(name not in short for name in f), max(taken[name] for name in f)) for f in useful]
            cheapest = [functions for functions, cost in zip(useful, costs, strict=True) if cost == min(costs)]
            functions, best = min(
                ((functions, candidate) for functions in cheapest for candidate in alike[functions]),
                key=lambda pair: (contents[pair[1][1]], formats[pair[1][2]]),
            )
            alike[functions].remove(best)
            indices, content, form = best
            kept.update(indices)
            taken.update(functions)
            contents[content] += 1
            formats[form] += 1
        return replace(self, items=tuple(item for index, item in enumerate(self.items) if index in kept))


def load_tasks(functions: Iterable[str] | None = None, *, data_dir: str | Path | None = None) -> Tasks:
    """The bundled items of all eight functions, or of some.

    Args:
        functions: Names such as ``"retrieval"``; at least two. The matched sets are then no longer whole, and words
            tell more (0.7 of the items for four functions, a third for all eight). For fewer items rather use
            :meth:`Tasks.sample`.
        data_dir: Folder that holds ``tasks/`` instead of the bundled one.

    Example:
        >>> from tl_headmaps import load_tasks
        >>> tasks = load_tasks(["retrieval", "inference"])
        >>> tasks.counts
        {'retrieval': 150, 'inference': 150}
    """
    folder = data_folder(data_dir) / "tasks"
    chosen = FUNCTIONS if functions is None else [_function_name(name, list(FUNCTIONS)) for name in functions]
    files = {name: folder / f"{name}.jsonl" for name in FUNCTIONS}
    missing = [path.name for path in files.values() if not path.is_file()]
    if missing:
        raise TaskDataError(f"{folder} lacks {', '.join(missing)}; reinstall tl-headmaps, or pass data_dir=.")
    records = [record for name in FUNCTIONS if name in chosen for record in records_of_file(files[name])]
    items = [_item(record, index, "bundled tasks", "{question}") for index, record in enumerate(records)]
    return Tasks(tuple(items), name="bundled tasks")


def _item(record: Mapping[str, Any], index: int, where: str, template: str) -> TaskItem:
    fields = item_fields(record, index, where)
    return TaskItem(**{**fields, "question": template.replace("{question}", fields["question"])})


def with_alternatives(tasks: Tasks, n: int = 3) -> Tasks:
    """The same items; those without alternatives get other answers of their function and format, like theirs in length.

    Raises:
        TaskDataError: An item whose function and format know no other answer.
    """
    answers: dict[tuple[str, str], dict[str, None]] = {}
    for item in tasks.items:
        answers.setdefault((item.function, item.format), {})[item.answer] = None

    def filled(item: TaskItem) -> TaskItem:
        if item.alternatives:
            return item
        others = [answer for answer in answers[item.function, item.format] if answer != item.answer]
        if not others:
            raise TaskDataError(
                f"{_shown(item)} has no alternatives, and all items of {item.function} in its format have the same "
                "answer. Give it wrong answers in 'alternatives'."
            )
        # Ties in an order that depends on the item, else all items would get the same few.
        key = hashlib.sha256(item.prompt.encode()).hexdigest()
        others.sort(key=lambda text: (abs(len(text) - len(item.answer)), _order(key, text)))
        return replace(item, alternatives=tuple(others[:n]))

    return replace(tasks, items=tuple(filled(item) for item in tasks.items))


def _order(key: str, text: str) -> str:
    return hashlib.sha256(f"{key} {text}".encode()).hexdigest()


def _shown(item: TaskItem) -> str:
    text = f"{item.prompt} -> {item.answer}"
    return repr(text if len(text) <= 120 else f"{text[:119]}…")


def _canonical(label: str) -> str | None:
    """The one of our functions a label means, if any: ``Decision-making`` is ``decision_making``."""
    name = re.sub(r"[^a-z0-9]+", "_", label.casefold()).strip("_")
    name = _ALIASES.get(name, name)
    return name if name in FUNCTIONS else None


def _function_name(name: str, known: Sequence[str]) -> str:
    """The one of the known functions that is meant, or a sentence that lists them."""
    function = name if name in known else _canonical(name)
    if function not in known:
        raise TaskDataError(f"There is no function {name!r} here; there are {', '.join(known)}.")
    return str(function)


def _check_counts(tasks: Tasks) -> None:
    counts = tasks.counts
    if len(counts) < 2:
        present = f"only {next(iter(counts))!r}" if counts else "no labelled item"
        raise TaskDataError(
            f"{tasks.name} holds {present}; telling functions apart needs at least two. Add items of another function."
        )
    few = {function: n for function, n in counts.items() if n < FEWEST_ITEMS}
    if few:
        listed = ", ".join(f"{function} ({n})" for function, n in few.items())
        raise TaskDataError(
            f"{tasks.name} has fewer than {FEWEST_ITEMS} items of {listed}. Add items, or leave the function out with "
            "functions=."
        )


def _text_key(item: TaskItem) -> str:
    """What makes two prompts the same: their words, whatever the spaces and the case."""
    return " ".join(item.prompt.casefold().split())


def _check_duplicates(tasks: Tasks) -> None:
    seen: dict[str, int] = {}
    for index, item in enumerate(tasks.items):
        first = seen.setdefault(_text_key(item), index)
        other = tasks.items[first]
        if other.content != item.content:
            raise TaskDataError(
                f"Items {first} and {index} of {tasks.name} are the same prompt under the contents {other.content!r} "
                f"and {item.content!r}, so a split would put it on both sides: {_shown(other)} ({other.function}) and "
                f"{_shown(item)} ({item.function}). Remove one, give both the same content, or read with "
                "duplicates='drop'."
            )


def _without_duplicates(items: Iterable[TaskItem]) -> list[TaskItem]:
    first: dict[str, TaskItem] = {}
    for item in items:
        first.setdefault(_text_key(item), item)
    return list(first.values())


def _refuse_unlabelled(indices: Sequence[int], n_records: int, where: str) -> None:
    if indices:
        listed = ", ".join(map(str, indices[:_SHOWN])) + (", …" if len(indices) > _SHOWN else "")
        raise TaskDataError(
            f"{where}: {len(indices)} of {n_records} items have no label in 'function' (items {listed}). Every item "
            "needs a function: label or remove them."
        )
