"""Which heads tell functions apart: cross-validated probes on all heads, and what each head adds to them.

Every feature is centred and scaled by its mean and deviation over the training items, so that no head counts more for
being loud. The importance of a head for a function is the mean, over held-out items of that function, of gradient x
activation: the part of the function's logit that the probe reads from this head. The parts of all heads add up to the
logit without its bias (and offset); what a head writes always, whatever the item, is in the bias.

Features are read one layer at a time and only inner products between items are kept: a probe's optimum lies in
the span of its training items, so nothing is lost, and memory does not grow with the number of heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.errors import UsageError
from .probe import fit_linear

PENALTY = 1e-4
"""L2 penalty of the probe, with features of mean squared length one."""

_SMALLEST = 1e-8
"""Directions with less than this share of the variance are rounding."""


def content_folds(
    contents: Sequence[str], labels: Int[Tensor, " item"], n_folds: int, seed: int, functions: Sequence[str]
) -> Int[Tensor, " item"]:
    """Fold of each item: contents stay whole, functions are spread evenly, the seed decides among equals.

    Raises:
        UsageError: Fewer than three folds, fewer contents than folds, or a function in fewer than three folds.
    """
    if n_folds < 3:
        raise UsageError(f"n_folds={n_folds} is too few: one is tested, and baselines need two others. Use 3 or more.")
    groups = {content: number for number, content in enumerate(dict.fromkeys(contents))}
    if len(groups) < n_folds:
        raise UsageError(
            f"The items have {len(groups)} contents, which cannot be split into {n_folds} folds. Ask for fewer folds, "
            "or give items of different content different content keys."
        )
    of_item = torch.tensor([groups[content] for content in contents])
    n_classes = len(functions)
    counts = torch.zeros(len(groups), n_classes)
    counts.index_put_((of_item, labels), torch.ones(len(labels)), accumulate=True)
    order = np.random.default_rng(seed).permutation(len(groups))
    order = order[np.argsort(-counts.sum(1).numpy()[order], kind="stable")]
    filled = torch.zeros(n_folds, n_classes)
    fold_of = torch.zeros(len(groups), dtype=torch.long)
    for group in order.tolist():
        # Where the largest count of any of its functions stays smallest; then the emptiest fold.
        after = ((filled + counts[group]) * (counts[group] > 0)).max(1).values
        fold = int((after * (filled.sum() + 1) + filled.sum(1)).argmin())
        filled[fold] += counts[group]
        fold_of[group] = fold
    spread = (filled > 0).sum(0)
    if int(spread.min()) < 3:
        raise UsageError(
            f"The function {functions[int(spread.argmin())]!r} has items in {int(spread.min())} of {n_folds} folds; it "
            "needs three, to be trained on and tested. Give it items of more different contents."
        )
    return fold_of[of_item]


@dataclass(frozen=True)
class FoldProbes:
    """Probes of one fold, applied to its items.

    Attributes:
        logits: Logits of the held-out items, offsets included.
        parts: Part of each held-out item's own logit that is read from each head.
        train_parts: The same, averaged over the training items of each function, for the second fit (or the only one).
        rest: What the parts of a held-out item's own logit leave out: bias and offset.
    """

    logits: Float[Tensor, "fit test class"]
    parts: Float[Tensor, "fit test layer head"]
    train_parts: Float[Tensor, "class layer head"]
    rest: Float[Tensor, "fit test"]


def probe_fold(
    read_layer: Callable[[int], Tensor],
    n_layers: int,
    n_heads: int,
    labels: Int[Tensor, "fit item"],
    tested: Tensor,
    n_classes: int,
    *,
    offsets: Float[Tensor, "fit item class"],
    penalty: float = PENALTY,
) -> FoldProbes:
    """Train probes on the items that are not tested, and take apart their logits for those that are.

    Args:
        read_layer: Features of a layer, [item, head * d_head].
        n_layers: Number of layers.
        n_heads: Heads of a layer.
        labels: Function of each item, one row per fit.
        tested: Mask of the held-out items.
        n_classes: Number of functions.
        offsets: Logits known beforehand, for each fit.
        penalty: L2 penalty of the probe.
    """
    seen = ~tested
    products, scale = _inner_products(read_layer, n_layers, seen)
    directions, coordinates = _coordinates(products, seen)
    probe = fit_linear(coordinates[seen], labels[:, seen], n_classes, penalty=penalty, offsets=offsets[:, seen])
    logits = probe.logits(coordinates[tested]) + offsets[:, tested]
    # All features of all layers at once would not fit in memory, so the probe was fitted in coordinates of far fewer
    # dimensions: inner products with the training items, times ``directions``. A class's weights by feature are then
    # a sum of the training items' features with these item weights, and one layer after the other is enough.
    item_weights = probe.weight.transpose(1, 2) @ directions.T
    # The fit whose training parts are kept: beyond words, if there is one besides the plain fit.
    main = min(1, len(labels) - 1)
    fits = torch.arange(len(labels))[:, None]
    parts = torch.zeros(len(labels), int(tested.sum()), n_layers, n_heads)
    train_parts = torch.zeros(n_classes, n_layers, n_heads)
    own = torch.nn.functional.one_hot(labels[main, seen], n_classes).T.float()
    for layer in range(n_layers):
        features = _scaled(read_layer(layer), seen) / scale
        weights = item_weights @ features[seen]
        held_out, trained = weights[fits, labels[:, tested]], weights[main, labels[main, seen]]
        parts[:, :, layer] = (held_out * features[tested]).unflatten(-1, (n_heads, -1)).sum(-1)
        by_head = (trained * features[seen]).unflatten(-1, (n_heads, -1)).sum(-1)
        train_parts[:, layer] = own @ by_head / own.sum(1, keepdim=True).clamp_min(1)
    chosen = logits.gather(2, labels[:, tested, None]).squeeze(2)
    return FoldProbes(logits, parts, train_parts, chosen - parts.sum((2, 3)))


def _scaled(features: Tensor, seen: Tensor) -> Tensor:
    """Features less their mean over the training items, in units of their deviation there; constant ones are zero."""
    values = features.float()
    mean, deviation = values[seen].mean(0), values[seen].std(0, correction=0)
    dead = deviation <= 1e-6 * values[seen].abs().amax(0).clamp_min(1e-30)
    return torch.where(dead, 0.0, (values - mean) / torch.where(dead, 1.0, deviation))


def _inner_products(
    read_layer: Callable[[int], Tensor], n_layers: int, seen: Tensor
) -> tuple[Float[Tensor, "item item"], float]:
    """Inner products of all items with each other, scaled so that a training item's mean squared length is one."""
    products = torch.zeros(len(seen), len(seen), dtype=torch.float64)
    for layer in range(n_layers):
        features = _scaled(read_layer(layer), seen)
        products += features @ features.T
    size = float(products.diagonal()[seen].mean().clamp_min(1e-30))
    return products / size, size**0.5


def _coordinates(
    products: Float[Tensor, "item item"], seen: Tensor
) -> tuple[Float[Tensor, "train dim"], Float[Tensor, "item dim"]]:
    """Principal coordinates of all items in the span of the training items, and the weights that make them.

    Coordinates of an item are its inner products with the training items times ``directions``.
    """
    variance, vectors = torch.linalg.eigh(products[seen][:, seen])
    kept = variance > _SMALLEST * variance[-1]
    directions = vectors[:, kept] / variance[kept].sqrt()
    return directions.float(), (products[:, seen] @ directions).float()


def function_means(
    parts: Float[Tensor, "item layer head"], labels: Int[Tensor, " item"], n_classes: int
) -> Float[Tensor, "class layer head"]:
    """Mean over the items of each function."""
    own = torch.nn.functional.one_hot(labels, n_classes).T.to(parts.dtype)
    return torch.einsum("ci,ilh->clh", own / own.sum(1, keepdim=True).clamp_min(1), parts)


def bootstrap_interval(
    parts: Float[Tensor, "item layer head"],
    labels: Int[Tensor, " item"],
    clusters: Sequence[str],
    n_classes: int,
    *,
    seed: int,
    n_draws: int = 1000,
) -> tuple[Float[Tensor, "class layer head"], Float[Tensor, "class layer head"]]:
    """95% interval of :func:`function_means` when whole clusters of items are drawn with replacement."""
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    of_item = torch.tensor([numbers[cluster] for cluster in clusters])
    n_layers, n_heads = parts.shape[1:]
    sums = torch.zeros(len(numbers), n_classes, n_layers * n_heads)
    sums.index_put_((of_item, labels), parts.flatten(1), accumulate=True)
    counts = torch.zeros(len(numbers), n_classes)
    counts.index_put_((of_item, labels), torch.ones(len(labels)), accumulate=True)
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(len(numbers), np.full(len(numbers), 1 / len(numbers)), size=n_draws)
    weights = torch.from_numpy(drawn).float()
    low, high = torch.zeros(2, n_classes, n_layers * n_heads)
    for function in range(n_classes):
        means = (weights @ sums[:, function]) / (weights @ counts[:, function]).clamp_min(1)[:, None]
        low[function], high[function] = means.quantile(torch.tensor([0.025, 0.975]), dim=0)
    return low.view(n_classes, n_layers, n_heads), high.view(n_classes, n_layers, n_heads)


def normalised(importance: Float[Tensor, "class layer head"]) -> Float[Tensor, "class layer head"]:
    """Positive importance, scaled to sum to one over the heads of each function (zero where there is none)."""
    positive = importance.clamp_min(0)
    return positive / positive.sum((1, 2), keepdim=True).clamp_min(1e-30)


def elbow(values: Float[Tensor, "..."]) -> int:
    """How many values are above the elbow of the sorted curve.

    The elbow is the point farthest below the straight line from the largest to the smallest value.

    Example:
        >>> elbow(torch.tensor([0.1, 9.0, 0.2, 8.0, 0.1, 0.0]))
        2
    """
    falling = values.flatten().double().sort(descending=True).values
    span = falling[0] - falling[-1]
    if len(falling) < 3 or span <= 0:
        return 0
    line = torch.linspace(1, 0, len(falling), dtype=torch.float64)
    return int((line - (falling - falling[-1]) / span).argmax())


def rank_correlations(first: Float[Tensor, "class ..."], second: Float[Tensor, "class ..."]) -> Float[Tensor, " class"]:
    """Spearman's rank correlation of two maps, function by function (zero where a map is constant)."""
    from scipy.stats import rankdata

    ranks = [torch.from_numpy(rankdata(values.flatten(1).numpy(), axis=1)) for values in (first, second)]
    a, b = (rank - rank.mean(1, keepdim=True) for rank in ranks)
    size = (a.square().sum(1) * b.square().sum(1)).sqrt()
    return torch.where(size > 0, (a * b).sum(1) / size.clamp_min(1e-30), 0.0).float()
