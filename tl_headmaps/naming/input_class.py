"""What the tokens a head cares about have in common, compared with the whole vocabulary."""

from collections import Counter
from collections.abc import Callable, Sequence

LEAST_SHARE = 0.3
"""Share of the tokens a class must hold to be named."""
_LEVEL = 0.01
"""Largest chance of such a share, after correction for the number of classes."""


def input_class(
    tokens: Sequence[str], classes: Callable[[str], frozenset[str]], vocabulary: Counter[str], n_vocabulary: int
) -> tuple[str, float] | None:
    """The class that is most over-represented among some tokens, with its share of them; None if none is.

    Args:
        tokens: The head's salient tokens.
        classes: Classes of a token.
        vocabulary: How many tokens of the vocabulary are in each class.
        n_vocabulary: Size of the vocabulary they were drawn from.
    """
    from scipy.stats import hypergeom

    counts = Counter(name for token in tokens for name in classes(token))
    best: tuple[float, float, str, float] | None = None
    for name, count in sorted(counts.items()):
        share = count / len(tokens)
        if share < LEAST_SHARE:
            continue
        chance = float(hypergeom.sf(count - 1, n_vocabulary, vocabulary[name], len(tokens)))
        if chance * len(vocabulary) < _LEVEL:
            found = (chance, -share, name, share)
            best = found if best is None else min(best, found)
    return None if best is None else (best[2], best[3])
