"""How much of a head's attention goes to the previous token, to repeated tokens, inside the sentence, and so on.

Each score names pairs (query, key) of a text and is the share of all the head's attention that lies on them:
``sum(A * pairs) / sum(A)``. For the first, second and fourth this is exactly what
``transformer_lens.head_detector`` computes with ``error_measure="mul"``.

* **previous_token**: the token just before.
* **duplicate_token**: an earlier occurrence of the query's token.
* **first_token**: the first token, from any later one (the attention sink).
* **induction**: the token after an earlier occurrence of the query's token.
* **syntactic_neighbour**: from a content word to the nearest content word before it in the same clause, across the
  function words between them ("cat" from "mat" in "the cat on the mat"). Neighbours without a word between them are
  left to ``previous_token``. Words and clauses are cut by rules for English (:mod:`.segments`), not by a parser.
* **sentence_block**: earlier tokens of the same sentence but for the one just before, from the second sentence on
  (inside the first there is nothing else to see).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .segments import Segments

PROFILE_SCORES = (
    "previous_token",
    "duplicate_token",
    "first_token",
    "induction",
    "syntactic_neighbour",
    "sentence_block",
)


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
    """The null: what a head that attends evenly to all tokens it can see would score."""
    n = pairs.shape[-1]
    return (pairs.sum(2) / torch.arange(1, n + 1)).double().mean(1)


def queries_with_pairs(pairs: Bool[Tensor, "score query key"]) -> Int[Tensor, " score"]:
    """Number of queries that have such a key at all."""
    return pairs.any(2).sum(1)


class RunningRatio:
    """Ratio of two means over texts with its 95% interval, in constant memory.

    With ``y = 1`` it is the mean of x. The interval is Student's, with the spread of ``x - ratio * y`` over texts
    (delta method); it needs two texts.
    """

    def __init__(self, *shape: int) -> None:
        self.count = 0
        self.sums = {name: torch.zeros(shape, dtype=torch.float64) for name in ("x", "y", "xx", "xy", "yy")}

    def add(self, at: int, x: Tensor, y: Tensor | float) -> None:
        """Add one text's values to row ``at`` (the layer); :meth:`next_text` ends the text."""
        y = torch.as_tensor(y, dtype=torch.float64).expand_as(x)
        for name, value in (("x", x), ("y", y), ("xx", x * x), ("xy", x * y), ("yy", y * y)):
            self.sums[name][at] += value

    def next_text(self) -> None:
        """One text is complete."""
        self.count += 1

    def ratio(self) -> Tensor:
        """Mean of x over mean of y; NaN where y is 0."""
        return self.sums["x"] / self.sums["y"]

    def half_width(self) -> Tensor:
        """Half of the 95% interval; NaN with fewer than two texts."""
        ratio, n = self.ratio(), self.count
        if n < 2:
            return torch.full_like(ratio, float("nan"))
        from scipy.stats import t as student

        # Residuals x - ratio * y have mean zero, so their sum of squares is their spread.
        squares = self.sums["xx"] - 2 * ratio * self.sums["xy"] + ratio.square() * self.sums["yy"]
        spread = (squares.clamp_min(0) * n / (n - 1)).sqrt()
        return float(student.ppf(0.975, n - 1)) * spread / self.sums["y"]
