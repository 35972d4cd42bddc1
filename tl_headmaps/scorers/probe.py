"""Linear probes, and what words, formats and frequencies alone tell: the baselines a probe on heads must beat.

Several fits share one set of features: the labels as they are, and shuffled ones for the null. A probe is multinomial
logistic regression with an L2 penalty, solved to its unique optimum:

    mean over items of -log softmax(features W + bias + offset)[label]  +  penalty / 2 * |W|^2

``offsets`` are logits that are already known, for example what the words of an item say. A probe with offsets learns
only what the features know beyond them.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

_MAX_ITERATIONS = 1000
_CURVATURE = 0.1
"""Typical variance p (1 - p) of a class; only the speed depends on it."""
_SMALLEST = 1e-12
"""Directions with less than this share of the largest square are rounding."""
_GRADIENT = 3e-6
"""Largest entry of the gradient at which a fit counts as solved (entries are means over items)."""

_WORD = re.compile(r"\w+|[^\w\s]")
_MOST_WORDS = 4096
_LARGEST_FACTOR = 100.0
_WORD_PENALTY = 3e-3
"""L2 penalty of word probes, with rows of mean squared length one; smaller ones do not score higher on our items."""


@dataclass(frozen=True)
class Linear:
    """Fitted probes: ``logits = x @ weight + bias``."""

    weight: Float[Tensor, "fit dim class"]
    bias: Float[Tensor, "fit class"]

    def logits(self, x: Float[Tensor, "item dim"]) -> Float[Tensor, "fit item class"]:
        """Logits of each fit, offsets not included."""
        return x @ self.weight + self.bias[:, None]


def fit_linear(
    features: Float[Tensor, "item dim"],
    labels: Int[Tensor, "fit item"],
    n_classes: int,
    *,
    penalty: float,
    offsets: Float[Tensor, "fit item class"] | None = None,
) -> Linear:
    """Logistic regressions of several label sets on the same features."""
    from scipy.optimize import minimize

    n_fits, n_items = labels.shape
    basis, x, shrink = _preconditioned(features.double(), penalty)
    # One row of parameters per direction, the last for the bias: all fits side by side in one matrix product.
    shape = (x.shape[1] + 1, n_fits, n_classes)
    known = None if offsets is None else offsets.double().transpose(0, 1)
    right = torch.nn.functional.one_hot(labels.T, n_classes).double()

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        parameters = torch.from_numpy(flat).view(shape)
        weight = parameters[:-1].flatten(1)
        logits = (x @ weight).view(n_items, n_fits, n_classes) + parameters[-1]
        if known is not None:
            logits = logits + known
        log_chances = logits.log_softmax(-1)
        loss = -(log_chances * right).sum() / n_items + (shrink * weight.square()).sum() / 2
        miss = (log_chances.exp() - right) / n_items
        gradient = torch.empty(shape, dtype=torch.float64)
        gradient[:-1] = (x.T @ miss.flatten(1) + shrink * weight).view(-1, n_fits, n_classes)
        gradient[-1] = miss.sum(0)
        return float(loss), gradient.flatten().numpy()

    solved = minimize(
        objective,
        np.zeros(math.prod(shape)),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": _MAX_ITERATIONS, "maxfun": 2 * _MAX_ITERATIONS, "gtol": _GRADIENT, "ftol": 0.0},
    )
    parameters = torch.from_numpy(solved.x).view(shape)
    weight = (basis @ parameters[:-1].flatten(1)).view(-1, n_fits, n_classes).transpose(0, 1)
    return Linear(weight.to(features.dtype), parameters[-1].to(features.dtype))


def _preconditioned(
    x: Float[Tensor, "item dim"], penalty: float
) -> tuple[Float[Tensor, "dim direction"], Float[Tensor, "item direction"], Float[Tensor, "direction 1"]]:
    """Directions in which the loss is curved about equally, the features along them, and the penalty of each.

    The optimum lies in the span of the items, whose principal directions come from the smaller of the two Gram
    matrices. The curvature of the loss along one of them is its variance times about ``_CURVATURE``, plus the penalty;
    with steps in units of its root fewer iterations are needed.
    """
    n_items, dim = x.shape
    small = x.T @ x if dim <= n_items else x @ x.T
    squares, vectors = torch.linalg.eigh(small)
    kept = squares > _SMALLEST * squares[-1].clamp_min(1e-300)
    squares, vectors = squares[kept], vectors[:, kept]
    directions = vectors if dim <= n_items else x.T @ (vectors / squares.sqrt())
    unit = (_CURVATURE * squares / n_items + penalty).rsqrt()
    basis = directions * unit
    return basis, x @ basis, (penalty * unit.square())[:, None]


def word_counts(texts: Sequence[str], n_grams: int = 1) -> Float[Tensor, "item word"]:
    """How often each word (or run of up to ``n_grams`` words) is in each text, scaled to rows of mean length one.

    Words in one text only cannot help and are left out; of the others the 4,096 most frequent are kept.
    """
    by_text = []
    for text in texts:
        words = _WORD.findall(text.casefold())
        runs = [words[i : i + n] for n in range(1, n_grams + 1) for i in range(len(words) - n + 1)]
        by_text.append(Counter(" ".join(run) for run in runs))
    in_texts = Counter(word for counts in by_text for word in counts)
    common = sorted((word for word, n in in_texts.items() if n > 1), key=lambda word: (-in_texts[word], word))
    columns = {word: column for column, word in enumerate(common[:_MOST_WORDS])}
    counted = torch.zeros(len(texts), max(1, len(columns)))
    for row, counts in enumerate(by_text):
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
            probe = fit_linear(features[kept], labels[kept][None], n_classes, penalty=_WORD_PENALTY)
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
