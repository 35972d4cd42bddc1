"""Which heads tell functions apart: cross-validated probes on all heads, and what each head adds to them.

Every feature is centred and scaled, so that no head counts more for being loud. The importance of a head for a function
is the mean, over held-out items of that function, of gradient x activation: the part of the function's logit that the
probe reads from this head. The parts of all heads add up to the logit without its bias; what a head writes always,
whatever the item, is in the bias.

Items are held out by content and by wording: neither the facts of a tested item nor its format were trained on.
Features are read one layer at a time and only inner products between items are kept: a probe's optimum lies in the
span of its training items, so nothing is lost, and memory does not grow with the number of heads.

Maps have shapes: how many heads carry them, whether they have a diagonal or a full corner. Layers have an order and
heads have not (a model with its heads renumbered within each layer is the same model), so what a diagonal or a corner
in a picture means is asked against maps with heads permuted within their layers.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.errors import UsageError
from .probe import Cell, fit_dual, one_hot, standardised
from .statistics import rank_p_value

PENALTY = 1e-4
"""L2 penalty of the probe, with features of mean squared length one."""

_FITS_AT_ONCE = 100
"""Fits whose weights of training items are laid out together: 15 MB for 48 tested and 768 training items."""


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


def wording_folds(
    formats: Sequence[str], labels: Int[Tensor, " item"], folds: Int[Tensor, " item"], n_classes: int
) -> Int[Tensor, " item"]:
    """Group of formats of each item, held out together with its fold: at most as many groups as folds.

    One group for all, so that nothing is held out, if there is one format only or if a function would lose all its
    training items with some group.
    """
    counts = Counter(formats)
    n_groups = min(len(counts), int(folds.max()) + 1)
    filled, group_of = [0] * n_groups, {}
    for form, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
        group_of[form] = filled.index(min(filled))
        filled[group_of[form]] += count
    groups = torch.tensor([group_of[form] for form in formats])
    whole = all(len(labels[seen].unique()) == n_classes for _, seen in cells_of(folds, groups))
    return groups if whole else torch.zeros_like(groups)


def cells_of(folds: Int[Tensor, " item"], wordings: Int[Tensor, " item"]) -> list[Cell]:
    """For each fold and group of formats: its items, and the items of other folds in other formats.

    Items of fold -1 are left out. With one group of formats, only the fold is held out.
    """
    cells = []
    several = int(wordings.max()) > 0
    for fold in range(int(folds.max()) + 1):
        for wording in range(int(wordings.max()) + 1):
            tested = (folds == fold) & (wordings == wording)
            seen = (folds != fold) & (folds >= 0) & ((wordings != wording) if several else True)
            if bool(tested.any()) and bool(seen.any()):
                cells.append((tested.nonzero().flatten(), seen.nonzero().flatten()))
    return cells


def exchange_groups(
    matched: Sequence[str],
    contents: Sequence[str],
    labels: Int[Tensor, " item"],
    folds: Int[Tensor, " item"],
    wordings: Int[Tensor, " item"],
) -> tuple[Int[Tensor, " item"], tuple[str, ...]]:
    """Among which items labels may be exchanged if heads know nothing, and what these groups are.

    Items of a matched set; without one, items of a content and its format, if they have several functions; else items
    of the same fold and group of formats, which is right only if every content has one such item. Where formats of one
    group all belong to one function there is nothing to exchange in it: then items of the same fold, whatever format.
    """
    fold_of, wording_of, label_of = folds.tolist(), wordings.tolist(), labels.tolist()
    functions: dict[tuple[object, int], set[int]] = {}
    for content, fold, wording, label in zip(contents, fold_of, wording_of, label_of, strict=True):
        for key in ((content, wording), (fold, wording)):
            functions.setdefault(key, set()).add(label)
    keys: list[tuple[str, object]] = []
    for name, content, fold, wording in zip(matched, contents, fold_of, wording_of, strict=True):
        if name:
            keys.append(("matched sets", name))
        elif len(functions[content, wording]) > 1:
            keys.append(("contents", (content, wording)))
        else:
            keys.append(("folds", (fold, wording) if len(functions[fold, wording]) > 1 else fold))
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys]), tuple(sorted({kind for kind, _ in keys}))


class Features:
    """Standardised features of all heads, read one layer at a time; the squared length of a mean item is one.

    Args:
        read_layer: Features of a layer, [item, head * d_head].
        n_layers: Number of layers.
        n_heads: Heads of a layer.
    """

    def __init__(self, read_layer: Callable[[int], Tensor], n_layers: int, n_heads: int) -> None:
        self._read, self.n_layers, self.n_heads = read_layer, n_layers, n_heads
        self._scale = 1.0
        total = sum((rows @ rows.T).double() for rows in (self.layer(layer).flatten(1) for layer in range(n_layers)))
        assert isinstance(total, Tensor)
        size = float(total.diagonal().mean().clamp_min(1e-30))
        self.products: Float[Tensor, "item item"] = total / size
        self._scale = size**-0.5

    def layer(self, layer: int) -> Float[Tensor, "item head d_head"]:
        """Features of one layer."""
        features: Tensor = self._scale * standardised(self._read(layer).float())
        by_head: Tensor = features.unflatten(1, (self.n_heads, -1))
        return by_head


@dataclass(frozen=True)
class Probes:
    """Fits that share training items, and the held-out items they are applied to.

    Attributes:
        place: Place of the first fit among all.
        tested, seen: Numbers of the items.
        weights: How much of each training item's features is in a function's weights.
        bias: Of each function.
        labels: Function of each held-out item, in each fit.
    """

    place: int
    tested: Int[Tensor, " test"]
    seen: Int[Tensor, " train"]
    weights: Float[Tensor, "fit class train"]
    bias: Float[Tensor, "fit class"]
    labels: Int[Tensor, "fit test"]


def fit_probes(
    products: Float[Tensor, "item item"],
    targets: Float[Tensor, "fit item class"],
    labels: Int[Tensor, "fit item"],
    cell: Cell,
    place: int = 0,
    penalty: float = PENALTY,
) -> Probes:
    """Fit several sets of targets to the training items of a cell."""
    tested, seen = cell
    columns = targets[:, seen].transpose(0, 1)
    weights, bias = fit_dual(products[seen][:, seen], columns.flatten(1), penalty)
    n_fits, n_classes = columns.shape[1:]
    by_fit = weights.view(-1, n_fits, n_classes).permute(1, 2, 0).float().contiguous()
    return Probes(place, tested, seen, by_fit, bias.view(n_fits, n_classes).float(), labels[:, tested])


def head_importance(
    features: Features,
    probes: Sequence[Probes],
    n_fits: int,
    n_classes: int,
    progress: Callable[[int], object] | None = None,
) -> Float[Tensor, "fit class layer head"]:
    """Mean, over the held-out items of each function, of the part of its own logit that is read from each head.

    A logit is the inner product of an item with a weighted sum of training items, and inner products are sums over
    heads. So a part is a sum over training items of weight x inner product in this head: with hundreds of fits that is
    seven times less work than writing out the weights of every feature.
    """
    sums = torch.zeros(n_fits, n_classes, features.n_layers, features.n_heads)
    counts = torch.zeros(n_fits, n_classes)
    for probe in probes:
        fits = slice(probe.place, probe.place + len(probe.labels))
        counts[fits] += one_hot(probe.labels, n_classes).sum(1).float()
    # Fits stand in one row: the own labels first, then every shuffle; `place` is where those of a cell begin. A layer's
    # features are read once for all of them, and the inner products serve every fit.
    for layer in range(features.n_layers):
        by_head = features.layer(layer).transpose(0, 1)
        for probe in probes:
            # [test, train, head]: items of one cell with its training items, head by head.
            inner = (by_head[:, probe.tested] @ by_head[:, probe.seen].mT).permute(1, 2, 0).contiguous()
            for start in range(0, len(probe.labels), _FITS_AT_ONCE):
                some = probe.labels[start : start + _FITS_AT_ONCE]
                place = torch.arange(start, start + len(some))
                parts = probe.weights[place, some.T] @ inner
                own = one_hot(some, n_classes).float()
                sums[probe.place + place, :, layer] += torch.einsum("ftc,tfh->fch", own, parts)
        if progress is not None:
            progress(1)
    return sums / counts.clamp_min(1)[..., None, None]


def normalised(importance: Float[Tensor, "class layer head"]) -> Float[Tensor, "class layer head"]:
    """Positive importance, scaled to sum to one over the heads of each function (zero where there is none)."""
    positive = importance.clamp_min(0)
    return positive / positive.sum((1, 2), keepdim=True).clamp_min(1e-30)


def rank_correlations(first: Float[Tensor, "class ..."], second: Float[Tensor, "class ..."]) -> Float[Tensor, " class"]:
    """Spearman's rank correlation of two maps, function by function (zero where a map is constant)."""
    from scipy.stats import rankdata

    ranks = [torch.from_numpy(rankdata(values.flatten(1).numpy(), axis=1)) for values in (first, second)]
    a, b = (rank - rank.mean(1, keepdim=True) for rank in ranks)
    size = (a.square().sum(1) * b.square().sum(1)).sqrt()
    return torch.where(size > 0, (a * b).sum(1) / size.clamp_min(1e-30), 0.0).float()


def effective_number(shares: Float[Tensor, "*map layer head"]) -> Float[Tensor, "*map"]:
    """How many equally important heads would be as concentrated: one over the sum of squared shares; 0 without any.

    Example:
        >>> effective_number(torch.tensor([[0.5, 0.5], [0.0, 0.0]]))
        tensor(2.)
    """
    squares = shares.square().sum((-2, -1))
    return torch.where(squares > 0, 1 / squares.clamp_min(1e-30), 0.0)


def centre_of_mass(shares: Float[Tensor, "*map layer head"]) -> Float[Tensor, "*map"]:
    """Mean layer, weighted by share.

    Example:
        >>> centre_of_mass(torch.tensor([[0.25, 0.0], [0.0, 0.75]]))
        tensor(0.7500)
    """
    layers = torch.arange(shares.shape[-2], dtype=shares.dtype)
    return shares.sum(-1) @ layers / shares.sum((-2, -1)).clamp_min(1e-30)


def corner_shares(shares: Float[Tensor, "*map layer head"]) -> Float[Tensor, "*map corner"]:
    """Share of each quarter of the map (middle layers and heads of odd numbers count for half).

    Early layers with low and high head numbers, then late layers.

    Example:
        >>> corner_shares(torch.tensor([[0.5, 0.0], [0.25, 0.25]]))
        tensor([0.5000, 0.0000, 0.2500, 0.2500])
    """
    early, low = (_first_half(n, shares.dtype) for n in shares.shape[-2:])
    halves = [torch.einsum("...lh,l->...h", shares, rows) for rows in (early, 1 - early)]
    return torch.stack([half @ columns for half in halves for columns in (low, 1 - low)], -1)


def _first_half(n: int, dtype: torch.dtype) -> Float[Tensor, " place"]:
    """1 in the first half of places, 0 in the second, one half in the middle of an odd number."""
    return (n / 2 - torch.arange(n, dtype=dtype)).clamp(0, 1)


def diagonal_correlation(shares: Float[Tensor, "*map layer head"]) -> Float[Tensor, "*map"]:
    """Correlation of layer number and head number, each head weighted by its share (0 in a single row or column).

    Example:
        >>> diagonal_correlation(torch.eye(3))
        tensor(1.)
    """
    weights = shares.double() / shares.double().sum((-2, -1), keepdim=True).clamp_min(1e-30)
    layer, head = (torch.arange(n, dtype=torch.float64) for n in shares.shape[-2:])
    by_layer, by_head = weights.sum(-1), weights.sum(-2)
    mean_layer, mean_head = by_layer @ layer, by_head @ head
    covariance = torch.einsum("...lh,l,h->...", weights, layer, head) - mean_layer * mean_head
    spread = (by_layer @ layer.square() - mean_layer.square()) * (by_head @ head.square() - mean_head.square())
    return torch.where(spread > 1e-12, covariance / spread.clamp_min(1e-30).sqrt(), 0.0).to(shares.dtype)


def heads_permuted(
    shares: Float[Tensor, "layer head"], n: int, generator: np.random.Generator
) -> Float[Tensor, "draw layer head"]:
    """The map with heads renumbered at random, each within its layer."""
    orders = generator.random((n, *shares.shape)).argsort(-1)
    return shares.expand(n, -1, -1).gather(-1, torch.from_numpy(orders))


def shape_p_values(
    shares: Float[Tensor, "map layer head"], *, n_null: int = 999, seed: int = 0
) -> Float[Tensor, "diagonal_or_corner map"]:
    """How often, with heads permuted within their layers, a diagonal is as strong or a corner as full.

    Rows of NaN are layers without heads.
    """
    # In float64: in float32 a map that no permutation changes differs from itself by rounding, and ties are lost.
    maps = shares.nan_to_num(nan=0.0).double()
    generator = np.random.default_rng(seed)
    p_values = []
    for own in maps:
        drawn = heads_permuted(own, n_null, generator)
        diagonal = rank_p_value(float(diagonal_correlation(own).abs()), diagonal_correlation(drawn).abs())
        corner = rank_p_value(float(corner_shares(own).max()), corner_shares(drawn).amax(-1))
        p_values.append([diagonal, corner])
    return torch.tensor(p_values, dtype=torch.float64).T
