"""Texts for the analyses that run a model: the bundled sample, a string, token ids, a list, a file or a dataset.

The bundled samples (:class:`Sample`, in ``relations_data/text/``) were written for this package and are CC0. A text
file holds texts separated by blank lines, in UTF-8.

What is fitted on texts is judged on others. A third of the texts of any source is held out, by one rule
(:func:`_with_part`): every third text, a repeated one always in the part in which it came first. Texts added at the end
of a source change nothing about those before them.

Beside them, the neutral prompts behind which a word is put, so that a model reads it in a sentence and not alone.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..core.errors import UsageError
from ..core.files import UnreadableError, check_text, home_expanded, read_text, require_file
from ..core.types import check_choice, is_index
from ..core.vocabulary import Text, as_text
from .records import column_values
from .relations import data_folder

Part: TypeAlias = Literal["all", "fit", "held_out"]

_FILE_SUFFIXES = (".txt", ".text", ".md")
_CHUNK = 8
_PART_NAMES = {"all": "", "fit": ", without the held-out third", "held_out": ", held-out third"}


class Sample(Enum):
    """A sample of English that comes with the package, by the files it consists of.

    Attributes:
        PROSE: 42 texts, about 8,000 tokens, mostly prose; read where no source is given.
        WHOLE: These, and then 93 more in 31 registers, from dialogue and verse to tables, sums and code: about 33,000
            tokens. The registers take turns, so that each of them is in both parts and in any long stretch.
    """

    PROSE = ("english.txt",)
    WHOLE = ("english.txt", "registers.txt")

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(data_folder() / "text" / name for name in self.value)


def read_texts(source: Any = None, column: str = "text", part: Part = "all") -> Iterator[Text]:
    """The texts of a source, one after the other, empty ones left out; nothing is read before it is asked for.

    Args:
        source: None for the bundled prose, or another :class:`Sample`; the path of a UTF-8 file with texts separated by
            blank lines; a string (a file if it names one, else a text itself); token ids of a text in a list or tensor;
            a list or other iterable of texts, or a tensor with one in each row; or a ``datasets.Dataset`` (also a
            streamed one).
        column: The column of a dataset that holds the text.
        part: ``"fit"`` for the texts that may be fitted on, ``"held_out"`` for the third to judge on.

    Example:
        >>> list(read_texts(["One text.", "", "Another."]))
        ['One text.', 'Another.']
        >>> list(read_texts(["One", "Two", "Three", "Four"], part="held_out"))
        ['Three']
        >>> list(read_texts([3, 4])), list(read_texts([[3, 4], [5, 6]]))
        ([(3, 4)], [(3, 4), (5, 6)])
    """
    check_choice(part, Part, "part")
    if source is None:
        source = Sample.PROSE
    if isinstance(source, Sample):
        texts: Iterator[Any] = chain.from_iterable(map(_from_file, source.files))
    elif isinstance(source, Path) or (isinstance(source, str) and _names_a_file(source)):
        texts = _from_file(home_expanded(source))
    elif isinstance(source, str):
        texts = iter([source])
    elif hasattr(source, "column_names"):
        texts = (text for (text,) in column_values(source, (column,)))
    elif isinstance(source, Iterable) and not isinstance(source, bytes | dict):
        texts = _listed(source)
    else:
        raise UsageError(
            f"{type(source).__name__} is not a source of texts. Give a string, a list of strings, token ids, the path "
            "of a text file, or a datasets.Dataset."
        )
    texts = _checked(texts)
    if part == "all":
        return texts
    return (text for text, held_out in _with_part(texts) if held_out == (part == "held_out"))


def split_texts(source: Any = None, column: str = "text") -> tuple[list[Text], list[Text]]:
    """The texts to fit on and the texts held out, of a source that is read once; see :func:`read_texts`.

    Fewer than three different texts leave nothing held out.

    Example:
        >>> split_texts(["One", "Two", "Three", "Four", "Three"])
        (['One', 'Two', 'Four'], ['Three', 'Three'])
    """
    fit: list[Text] = []
    held: list[Text] = []
    for text, held_out in _with_part(read_texts(source, column)):
        (held if held_out else fit).append(text)
    return fit, held


def repeated_tokens(usable: Sequence[int], longest: int, n: int = 24, length: int = 64) -> list[tuple[int, ...]]:
    """Sequences of different random tokens, each repeated, where induction heads show.

    The second time, chunks of eight tokens come in another order. If all of it came again as it was, what follows the
    first occurrence would always be equally far away, and attention by distance could not be told from induction.

    Args:
        usable: Token ids to draw from.
        longest: Most tokens of a sequence, both times together.
        n: Number of sequences.
        length: Tokens that are said twice, fewer if there is no room or there are no more.

    Example:
        >>> (tokens,) = repeated_tokens(range(100), longest=64, n=1)
        >>> sorted(tokens[:32]) == sorted(tokens[32:]), tokens[:32] == tokens[32:]
        (True, False)
    """
    draw = random.Random(0)
    size = min(length, longest // 2, len(usable))
    sequences = []
    for _ in range(n):
        once = draw.sample(usable, size)
        chunks = [once[start : start + _CHUNK] for start in range(0, size, _CHUNK)]
        sequences.append((*once, *chain.from_iterable(draw.sample(chunks, len(chunks)))))
    return sequences


def describe_source(source: Any, part: Part = "all") -> str:
    """Where texts came from, in a few words, for provenance."""
    return _origin(source) + _PART_NAMES[part]


def _origin(source: Any) -> str:
    if source is None or isinstance(source, Sample):
        return f"bundled sample {' and '.join((source or Sample.PROSE).value)}"
    if isinstance(source, Path) or (isinstance(source, str) and _names_a_file(source)):
        return f"file {Path(source).name}"
    return "text of the call" if isinstance(source, str) else type(source).__name__


def text_bytes(text: Text) -> bytes:
    """What a digest of a text is of."""
    return text.encode() if isinstance(text, str) else repr(text).encode()


def _with_part(texts: Iterable[Text]) -> Iterator[tuple[Text, bool]]:
    """Each text, and whether it is held out: the third, sixth, ninth ... different one, wherever it comes again."""
    seen: dict[bytes, bool] = {}
    for text in texts:
        digest = hashlib.sha256(text_bytes(text.strip() if isinstance(text, str) else text)).digest()
        yield text, seen.setdefault(digest, len(seen) % 3 == 2)


def _names_a_file(text: str) -> bool:
    if "\n" in text or len(text) > 1000:
        return False
    try:
        if Path(text).expanduser().is_file():
            return True
    except (OSError, ValueError, RuntimeError):  # too long for a name, or of no user: then it is a text
        return False
    if text.lower().endswith(_FILE_SUFFIXES) and not text.split()[1:]:
        raise UsageError(f"There is no file {text!r}. Check the path, or give the text itself.")
    return False


def _from_file(path: Path) -> Iterator[str]:
    try:
        require_file(path)
        with path.open(encoding="utf-8-sig") as stream:
            lines: list[str] = []
            for line in stream:
                if line.strip():
                    lines.append(line)
                elif lines:
                    yield "".join(lines).strip()
                    lines = []
            if lines:
                yield "".join(lines).strip()
    except (OSError, UnreadableError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"Cannot read the text file {path}: {reason}. Give a text file in UTF-8.") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not a text file in UTF-8 (byte {error.start} cannot be read). Convert it to UTF-8 first."
        ) from error


def _listed(source: Iterable[Any]) -> Iterator[Any]:
    """The texts of a list, which may be the token ids of a single one."""
    items = iter(source)
    for first in items:
        return iter([[first, *items]]) if is_index(first) else chain([first], items)
    return iter(())


def _checked(texts: Iterator[Any]) -> Iterator[Text]:
    for number, given in enumerate(texts):
        try:
            text = as_text(given)
        except UsageError as error:
            raise UsageError(f"Text {number}: {error}") from error
        check_text(text, f"Text {number}")
        if text if not isinstance(text, str) else text.strip():
            yield text


def neutral_prompts() -> tuple[str, ...]:
    """The eight neutral prefixes, without a space at the end: a word follows as ``f"{prefix} {word}"``.

    They are in ``relations_data/prompts/neutral.jsonl`` (our own, CC0): one of each kind of text, every one open to a
    noun, a verb, a name, an adjective or a number. No word of a bundled relation occurs in them, so that they favour
    none.

    Example:
        >>> neutral_prompts()[0]
        'Afterwards we chatted, rather vaguely, about'
    """
    lines = (data_folder() / "prompts" / "neutral.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line)["text"] for line in lines if line)


def read_prompts(path: str | Path) -> tuple[str, ...]:
    """Prefixes of a user's file, one on each line; empty lines are left out."""
    try:
        lines = read_text(path).splitlines()
    except UnreadableError as error:
        raise UsageError(
            f"Cannot read the prompts in {path}: {error}. Give a UTF-8 file with a prompt on each line."
        ) from error
    return tuple(line.strip() for line in lines if line.strip())
