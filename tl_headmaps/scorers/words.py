"""What words, formats and frequencies alone tell about a function: the baselines a probe on heads must beat."""

import re
from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .probe import fit_linear

_WORD = re.compile(r"\w+|[^\w\s]")
_MOST_WORDS = 4096
_LARGEST_FACTOR = 100.0
PENALTY = 3e-3
"""L2 penalty of word probes, with rows of mean squared length one; smaller ones do not score higher on our items."""


def word_counts(texts: Sequence[str], n_grams: int = 1) -> Float[Tensor, "item word"]:
    """How often each word (or run of up to ``n_grams`` words) stands in each text, scaled to rows of mean length one.

    Words in one text only cannot help and are left out; of the others the 4,096 most frequent are kept.
    """
    found = []
    for text in texts:
        words = _WORD.findall(text.casefold())
        runs = [words[i : i + n] for n in range(1, n_grams + 1) for i in range(len(words) - n + 1)]
        found.append(Counter(" ".join(run) for run in runs))
    in_texts = Counter(word for counts in found for word in counts)
    common = sorted((word for word, n in in_texts.items() if n > 1), key=lambda word: (-in_texts[word], word))
    columns = {word: column for column, word in enumerate(common[:_MOST_WORDS])}
    counted = torch.zeros(len(texts), max(1, len(columns)))
    for row, counts in enumerate(found):
        for word, n in counts.items():
            if word in columns:
                counted[row, columns[word]] = n
    length = counted.square().sum(1).mean().sqrt()
    return counted / length.clamp_min(1e-12)


def cross_logits(
    features: Float[Tensor, "item dim"],
    labels: Int[Tensor, " item"],
    folds: Int[Tensor, " item"],
    n_classes: int,
    *,
    inner: bool = True,
) -> Float[Tensor, "fold item class"]:
    """Logits of a linear probe on features such as word counts, for every fold that is tested.

    Entry ``[f, i]`` comes from a probe that saw neither fold ``f`` nor the fold of item ``i``. So for the items of fold
    ``f`` it is an ordinary held-out prediction, and for the others an offset that a second probe may be trained on
    without believing it more than it deserves. Without ``inner`` only the former are computed, the rest is zero.
    """
    n_folds = int(folds.max()) + 1
    logits = torch.zeros(n_folds, len(labels), n_classes)
    for first in range(n_folds):
        for second in range(first, n_folds if inner else first + 1):
            kept = (folds != first) & (folds != second)
            probe = fit_linear(features[kept], labels[kept][None], n_classes, penalty=PENALTY)
            for tested, shown in ((first, second), (second, first)):
                rows = folds == shown
                logits[tested, rows] = probe.logits(features[rows])[0]
    return logits


def calibrated(
    logits: Float[Tensor, "fold item class"], labels: Int[Tensor, " item"], folds: Int[Tensor, " item"]
) -> Float[Tensor, "fold item class"]:
    """Logits of :func:`cross_logits` as sure of themselves as they deserve, fold by fold.

    A penalised probe is too cautious and leaves something to whoever comes after it, even where it is always right; on
    few items it is too bold. So for each tested fold all logits are multiplied by the factor (0 to 100) with which
    they fit the other folds' labels best.
    """
    from scipy.optimize import minimize_scalar

    result = torch.empty_like(logits)
    for fold, known in enumerate(logits):
        seen = folds != fold
        inputs, targets = known[seen].double(), labels[seen]

        def loss(factor: float, inputs: Tensor = inputs, targets: Tensor = targets) -> float:
            return float(torch.nn.functional.cross_entropy(factor * inputs, targets))

        factor = minimize_scalar(loss, bounds=(0, _LARGEST_FACTOR), method="bounded").x
        result[fold] = float(factor) * known
    return result


def majority_predictions(
    keys: Sequence[str], labels: Int[Tensor, " item"], folds: Int[Tensor, " item"], n_classes: int
) -> Int[Tensor, " item"]:
    """The function that is most frequent in the other folds among items with the same key (else among all)."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    of_item = torch.tensor([numbers[key] for key in keys])
    predicted = torch.zeros_like(labels)
    for fold in range(int(folds.max()) + 1):
        seen = folds != fold
        counts = torch.zeros(len(numbers), n_classes)
        counts.index_put_((of_item[seen], labels[seen]), torch.ones(int(seen.sum())), accumulate=True)
        counts[counts.sum(1) == 0] = counts.sum(0)
        predicted[~seen] = counts.argmax(1)[of_item[~seen]]
    return predicted
