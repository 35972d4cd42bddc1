"""Least-squares probes, and what words, formats and frequencies alone tell: the baselines a probe on heads must beat.

A probe is ridge regression on the functions as 0 and 1, with a free intercept:

    mean over items of |target - features W - bias|^2  +  penalty * |W|^2

Its optimum is a weighted sum of the training items' features, so it is found from inner products between items,
whatever the number of features. One factorisation serves any number of targets: that is what makes it affordable to
fit the labels as they are and shuffled hundreds of times with the same estimator. A logistic probe recognises no more
of our items (0.85 of them; this one 0.87).
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

_WORD = re.compile(r"\w+|[^\w\s]")
_MOST_WORDS = 4096
WORD_PENALTY = 1e-2
"""Penalty of word probes, with rows of mean squared length one; other orders of magnitude do not score higher."""

Cell = tuple[Tensor, Tensor]
"""Numbers of the items that are tested, and of those that are trained on for it."""


def fit_dual(
    products: Float[Tensor, "train train"], targets: Float[Tensor, "train column"], penalty: float
) -> tuple[Float[Tensor, "train column"], Float[Tensor, " column"]]:
    """Weights of the training items, and biases, of ridge regressions that share their features.

    A prediction is ``inner products with the training items @ weights + bias``. The weights of a column sum to zero, so
    a feature that is the same in all items tells nothing.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
        >>> weights, bias = fit_dual(x @ x.T, 3 * x + 1, penalty=0.0001)
        >>> bool(((x @ x.T @ weights + bias - (3 * x + 1)).abs() < 0.01).all())
        True
    """
    n = len(products)
    shifted = products.double() + penalty * n * torch.eye(n, dtype=torch.float64)
    columns = torch.cat([torch.ones(n, 1, dtype=torch.float64), targets.double()], 1)
    solved = torch.cholesky_solve(columns, torch.linalg.cholesky(shifted))
    ones, own = solved[:, :1], solved[:, 1:]
    bias = own.sum(0) / ones.sum()
    return own - ones * bias, bias


def standardised(values: Float[Tensor, "item feature"]) -> Float[Tensor, "item feature"]:
    """Features less their mean over all items, in units of their deviation; constant ones are zero.

    No label has a say in that, so it gives nothing away about items that are held out.
    """
    mean, deviation = values.mean(0), values.std(0, correction=0)
    dead = deviation <= 1e-6 * values.abs().amax(0).clamp_min(1e-30)
    return torch.where(dead, 0.0, (values - mean) / torch.where(dead, 1.0, deviation))


def one_hot(labels: Int[Tensor, "*shape"], n_classes: int) -> Float[Tensor, "*shape class"]:
    """Functions as 0 and 1."""
    return torch.nn.functional.one_hot(labels, n_classes).double()


def word_counts(texts: Sequence[str], n_grams: int = 1) -> Float[Tensor, "item word"]:
    """How often each word (or run of up to ``n_grams`` words) is in each text.

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
    return counted


def word_products(texts: Sequence[str], n_grams: int = 1) -> Float[Tensor, "item item"]:
    """Inner products of texts by their standardised word counts, scaled so that a mean text's with itself is one."""
    counts = standardised(word_counts(texts, n_grams)).double()
    products = counts @ counts.T
    return products / products.diagonal().mean().clamp_min(1e-30)


def recognised(
    products: Float[Tensor, "item item"],
    labels: Int[Tensor, " item"],
    cells: Iterable[Cell],
    n_classes: int,
    penalty: float,
) -> Int[Tensor, " item"]:
    """The function that a probe gives each item, held out with its cell, from inner products between items."""
    targets = one_hot(labels, n_classes)
    predicted = torch.zeros_like(labels)
    for tested, seen in cells:
        weights, bias = fit_dual(products[seen][:, seen], targets[seen], penalty)
        predicted[tested] = (products[tested][:, seen].double() @ weights + bias).argmax(1)
    return predicted


class BeyondWords:
    """What words leave to be told about each item: its function as 0 and 1, less what a word probe says.

    The word probe of an item never saw the item's own fold, nor the folds that are excluded. So for an excluded fold it
    is an ordinary held-out prediction, and for the others a target that a second probe may be trained on without
    believing the words more than they deserve, and without a trace of the excluded labels.

    Args:
        products: Inner products of the items by their words.
        labels: Function of each item.
        folds: Fold of each item; items of fold -1 are left out altogether.
        n_classes: Number of functions.
    """

    def __init__(
        self,
        products: Float[Tensor, "item item"],
        labels: Int[Tensor, " item"],
        folds: Int[Tensor, " item"],
        n_classes: int,
    ) -> None:
        self._products = products
        self._targets, self._folds = one_hot(labels, n_classes), folds
        self._kept: dict[frozenset[int], Tensor] = {}

    def without(self, *excluded: int) -> Float[Tensor, "item class"]:
        """The targets when these folds are excluded."""
        left = torch.zeros_like(self._targets)
        for fold in range(int(self._folds.max()) + 1):
            shown = self._folds == fold
            left[shown] = self._targets[shown] - self._predicted(frozenset((*excluded, fold)))[shown]
        return left

    def _predicted(self, unseen: frozenset[int]) -> Float[Tensor, "item class"]:
        """What the words of every item say, after training on all folds but some."""
        if unseen not in self._kept:
            seen = ~torch.isin(self._folds, torch.tensor([-1, *unseen]))
            n_items, n_classes = self._targets.shape
            predicted = torch.full((n_items, n_classes), 1 / n_classes, dtype=torch.float64)
            if bool(seen.any()):
                weights, bias = fit_dual(self._products[seen][:, seen], self._targets[seen], WORD_PENALTY)
                predicted = self._products[:, seen] @ weights + bias
            self._kept[unseen] = predicted
        return self._kept[unseen]


def majority_share(labels: Int[Tensor, " item"], n_classes: int) -> Float[Tensor, " class"]:
    """Share of each function's items that is right by always guessing the most frequent one (or one of several).

    Example:
        >>> majority_share(torch.tensor([0, 0, 1, 1, 2]), 3)
        tensor([0.5000, 0.5000, 0.0000])
    """
    counts = labels.bincount(minlength=n_classes)
    most = (counts == counts.max()).float()
    return most / most.sum()


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
