"""How much of a head's attention goes to the previous token, to repeated tokens, inside the sentence, and so on.

Each score names pairs (query, key) of a text and is the share of all the head's attention that is on them:
``sum(A * pairs) / sum(A)``. For the first, second and fourth this is exactly what
``transformer_lens.head_detector`` computes with ``error_measure="mul"``.

* **previous_token**: the token just before.
* **duplicate_token**: an earlier occurrence of the query's token.
* **first_token**: the first token, from any later one (the attention sink).
* **induction**: the token after an earlier occurrence of the query's token.
* **syntactic_neighbour**: from a content word to the nearest content word before it in the same clause, across the
  function words between them ("cat" from "mat" in "the cat on the mat"). Neighbours without a word between them are
  left to ``previous_token``. Words and clauses are cut by rules for English (:class:`Segments`), not by a parser.
* **sentence_block**: earlier tokens of the same sentence but for the one just before, from the second sentence on
  (inside the first there is nothing else to see).

Near tokens are in the same sentence, and most heads attend to near tokens. So the null of a score is what its pairs
would get if the head's attention depended on distance alone: its own distance profile in the same text, with sinks as
they are (:mod:`.distance`). The previous and the first token are positions themselves: their null is even attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .distance import expected_on, pair_classes

PROFILE_SCORES = (
    "previous_token",
    "duplicate_token",
    "first_token",
    "induction",
    "syntactic_neighbour",
    "sentence_block",
)


POSITIONS = ("previous_token", "first_token")
"""Scores that are positions themselves, so that distance explains all of them."""

REPETITION_SCORES = ("duplicate_token", "induction")
"""Scores about tokens that come again."""

SENTENCE_SCORES = ("syntactic_neighbour", "sentence_block")
"""Scores that mean nothing where there are no sentences."""

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
    """Number of the word, clause and sentence of each token, and the words that carry content.

    Rules, not linguistics, and made for English:

    * a *word* starts at a token with a leading space, at the start, and where letters and signs meet;
    * a *sentence* ends with a token that holds ``.``, ``!``, ``?`` or a line break;
    * a *clause* ends there and at ``,``, ``;``, ``:``, dashes, brackets and quotation marks;
    * a *content word* holds a letter or digit and is none of the function words above.
    """

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


def profile_pairs(ids: Sequence[int], tokens: Sequence[str]) -> Bool[Tensor, "score query key"]:
    """Which (query, key) pairs of a text each score is about."""
    n = len(ids)
    token = torch.tensor(ids)
    earlier = torch.ones(n, n, dtype=torch.bool).tril(-1)
    duplicate = (token[:, None] == token[None, :]) & earlier
    induction = torch.zeros_like(duplicate)
    # Shifted by one; the token itself counts when it repeats the one before it.
    induction[:, 1:] = duplicate[:, :-1]
    first = torch.zeros_like(earlier)
    first[1:, 0] = True
    segments = Segments.of(tokens)
    sentence = torch.tensor(segments.sentences)
    previous = torch.diag(torch.ones(n - 1, dtype=torch.bool), -1)
    block = (sentence[:, None] == sentence[None, :]) & earlier & ~previous & (sentence > 0)[:, None]
    return torch.stack([previous, duplicate, first, induction, _neighbours(segments), block])


def _neighbours(segments: Segments) -> Bool[Tensor, "query key"]:
    words, clauses = torch.tensor(segments.words), torch.tensor(segments.clauses)
    pairs = torch.zeros(len(words), len(words), dtype=torch.bool)
    for query, word in enumerate(segments.words):
        if not segments.content[word]:
            continue
        nearest = next((other for other in range(word - 1, -1, -1) if segments.content[other]), None)
        if nearest is not None and nearest < word - 1:
            pairs[query] = (words == nearest) & (clauses == clauses[query])
    return pairs


@dataclass(frozen=True)
class TextShares:
    """Scores of one text for the heads of one layer.

    Attributes:
        shares: Share of all attention on the pairs.
        on_pairs: Attention on the pairs, summed over queries.
    """

    shares: Float[Tensor, "head score"]
    on_pairs: Float[Tensor, "head score"]


def text_shares(pattern: Float[Tensor, "head query key"], pairs: Bool[Tensor, "score query key"]) -> TextShares:
    """Attention of each head on each kind of pairs."""
    flat = pattern.flatten(1).double()
    on_pairs = flat @ pairs.flatten(1).double().T
    return TextShares(on_pairs / flat.sum(1, keepdim=True), on_pairs)


def even_pair_shares(pairs: Bool[Tensor, "score query key"]) -> Float[Tensor, " score"]:
    """A baseline: what a head that attends evenly to all tokens it can see would score."""
    n = pairs.shape[-1]
    return (pairs.sum(2) / torch.arange(1, n + 1)).double().mean(1)


def null_shares(
    pattern: Float[Tensor, "head query key"],
    pairs: Bool[Tensor, "score query key"],
    sinks: Bool[Tensor, " pos"],
) -> Float[Tensor, "head score"]:
    """Share on the pairs if attention depended on distance alone; for scores that are positions, if it were even."""
    by_distance = expected_on(pattern, pairs, pair_classes(pairs.shape[-1], sinks=sinks))
    shares = by_distance / pattern.double().sum((1, 2))[:, None]
    even = even_pair_shares(pairs)
    positions = torch.tensor([score in POSITIONS for score in PROFILE_SCORES])
    return torch.where(positions, even, shares)


def queries_with_pairs(pairs: Bool[Tensor, "score query key"]) -> Int[Tensor, " score"]:
    """Number of queries that have such a key at all."""
    return pairs.any(2).sum(1)
