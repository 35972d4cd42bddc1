"""The metrics of component maps, one registered function each.

Three kinds of evidence, and what a metric of each kind is given:

* ``weights``: one :class:`~.spectra.WeightMatrix`. The same function is applied to random matrices of the same shape
  (independent normal entries of variance 1 / inputs), which is the baseline a value can be divided by.
* ``change``: a :class:`Change`, the matrix and the same matrix of another model.
* ``gradients``: the gradient of the mean loss of a batch of text with respect to a component, and its weights.

To add a metric, write one more function with the decorator; nothing else changes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..core.errors import UsageError
from .spectra import WeightMatrix, entropy_rank, random_matrix
from .statistics import LEAST_UNITS, jackknife_half_width

Kind: TypeAlias = Literal["weights", "change", "gradients"]

_DRAWS = 3
"""Random matrices averaged for a baseline: their metrics hardly differ at the size of weight matrices."""

_NOISE = 1e-12
"""A squared singular value below this part of the largest is rounding."""


@dataclass(frozen=True)
class Metric:
    """A way to fill a component map.

    Attributes:
        unit: What a value is, for the colour bar.
        measure: The registered function.
        normalised: Whether values are divided by their sum, over the map or the layer.
        chance: For ``change``: what unrelated matrices give, None if nothing is known.
        cites: Publications the metric is from, by their keys in ``core/references.bib``.
    """

    name: str
    kind: Kind
    unit: str
    measure: Callable[..., Any]
    normalised: bool = False
    chance: "Callable[[Change], float] | None" = None
    cites: tuple[str, ...] = ()

    @property
    def needs_text(self) -> bool:
        return self.kind == "gradients"

    @property
    def has_baseline(self) -> bool:
        return self.kind == "weights" or self.chance is not None


METRICS: dict[str, Metric] = {}


def metric(
    kind: Kind,
    unit: str,
    *,
    normalised: bool = False,
    chance: "Callable[[Change], float] | None" = None,
    cites: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the metric of its name."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        METRICS[name] = Metric(name, kind, unit, function, normalised, chance, cites)
        return function

    return register


def find_metric(name: str) -> Metric:
    """The metric of a name; the error lists them all."""
    if name not in METRICS:
        struck = "The metric output_share is gone" if name == "output_share" else f"There is no metric {name!r}"
        by_source = {
            "text": names_of("gradients"),
            "the weights alone": names_of("weights"),
            "two models (against=)": names_of("change"),
        }
        listed = "; ".join(f"from {source}: {names}" for source, names in by_source.items())
        raise UsageError(f"{struck}. Choose one, {listed}.")
    return METRICS[name]


def names_of(*kinds: Kind) -> str:
    """The metrics of some kinds, for a sentence."""
    return ", ".join(name for name, entry in METRICS.items() if entry.kind in kinds)


@dataclass(frozen=True)
class Change:
    """A matrix, the one it is compared with, and the size of the subspaces compared."""

    new: WeightMatrix
    old: WeightMatrix
    k: int


def _total(entries: Float[Tensor, "part ..."]) -> Float[Tensor, " part"]:
    total: Tensor = entries.sum(tuple(range(1, entries.ndim)), dtype=torch.float64)
    return total


@metric("gradients", "share of |sum(w * dLoss/dw)|", normalised=True, cites=("molchanov2019importance",))
def contribution(slope: Float[Tensor, "part ..."], weight: Float[Tensor, "part ..."]) -> Float[Tensor, " part"]:
    """First-order effect on the loss of scaling the matrix: |sum of weight times gradient|.

    The sum has a sign and is averaged with it over all tokens; what is shown is its size. It sees a matrix as a whole,
    so matrices that are only ever multiplied with each other contribute the same: q and k, v and o, up and down of a
    gated MLP are equal where no bias, norm or activation is between them (Llama). A norm right behind them (of queries
    and keys in Qwen 3, of all that is written in Gemma) undoes any scaling: they contribute zero. ``sensitivity`` tells
    such matrices apart.
    """
    return _total(slope * weight)


@metric("gradients", "share of sum|w * dLoss/dw|", normalised=True, cites=("molchanov2019importance",))
def sensitivity(slope: Float[Tensor, "part ..."], weight: Float[Tensor, "part ..."]) -> Float[Tensor, " part"]:
    """First-order effect on the loss of removing the entries one by one: sum of |weight times gradient|.

    The gradient is that of one sequence of text, so the value does not depend on how many are read at once.
    """
    return _total((slope * weight).abs_())


@metric("gradients", "|dLoss/dw| / |w| (Frobenius norms)")
def gradient_ratio(slope: Float[Tensor, "part ..."], weight: Float[Tensor, "part ..."]) -> Float[Tensor, " part"]:
    """Norm of the gradient of a sequence's mean loss relative to the norm of the matrix."""
    return (_total(slope.square()) / _total(weight.square())).sqrt()


@metric("weights", "Frobenius norm")
def frobenius(matrix: WeightMatrix) -> float:
    """Root of the sum of squared entries."""
    return matrix.frobenius


@metric("weights", "spectral norm")
def spectral(matrix: WeightMatrix) -> float:
    """The largest singular value."""
    return float(matrix.singular_values[0])


@metric("weights", "stable rank (Frobenius / spectral norm, squared)", cites=("rudelson2007sampling",))
def stable_rank(matrix: WeightMatrix) -> float:
    """How many singular values as large as the largest would make up the Frobenius norm."""
    squares = matrix.singular_values.square()
    return float(squares.sum() / squares[0])


@metric("weights", "effective rank (exp of the entropy of singular values)", cites=("roy2007effective",))
def effective_rank(matrix: WeightMatrix) -> float:
    """Exponential of the entropy of the singular values divided by their sum (Roy and Vetterli, 2007)."""
    return float(entropy_rank(matrix.singular_values))


@metric("weights", "tail exponent (Hill, upper half of the spectrum of W'W)", cites=("hill1975simple",))
def tail_exponent(matrix: WeightMatrix) -> float:
    """Hill estimate of the power-law exponent of the density of squared singular values, from their upper half.

    ``1 + k / sum(log(l_i / l_(k+1)))`` over the k = n / 2 largest: about 2 to 4 for heavy tails, larger for none.
    """
    squares = matrix.singular_values.square()
    k = len(squares) // 2
    if k == 0 or not squares[k] > _NOISE * squares[0]:
        return math.nan
    return float(1 + k / (squares[:k] / squares[k]).log().sum())


@metric("change", "|W - W'| / |W'| (Frobenius norms; W' the model compared with)")
def relative_change(change: Change) -> float:
    """Norm of the difference relative to the norm of the matrix compared with."""
    difference, size = WeightMatrix(change.new.exact - change.old.exact).frobenius, change.old.frobenius
    if difference and not size:
        return math.nan
    return difference / size if difference else 0.0


@metric("change", "share of entries that differ")
def changed_share(change: Change) -> float:
    """Share of entries that are not exactly equal."""
    return float((change.new.exact != change.old.exact).double().mean())


def _chance_overlap(change: Change) -> float:
    """What k random directions of a space of d dimensions share with k others: sqrt(k / d)."""
    rows, columns = change.new.weight.shape
    return math.sqrt(change.k / (columns if change.new.writes else rows))


@metric("change", "overlap of principal subspaces (1 the same; 0 orthogonal)", chance=_chance_overlap)
def subspace_overlap(change: Change) -> float:
    """Root mean squared cosine between the k strongest directions of both matrices in the residual stream."""
    cosines = change.new.stream_basis(change.k).mT @ change.old.stream_basis(change.k)
    return float((cosines.square().sum() / change.k).sqrt())


@lru_cache(maxsize=256)
def random_baseline(measured: Metric, rows: int, columns: int, seed: int) -> float:
    """A metric of the weights for random matrices of a shape, mean over a few draws."""
    draws = [measured.measure(WeightMatrix(random_matrix(rows, columns, seed + draw))) for draw in range(_DRAWS)]
    return float(sum(draws) / _DRAWS)


Share: TypeAlias = Literal["map", "layer"]
"""What the values of a map are shares of: the sum of all of them, or of those of the same layer."""


@dataclass(frozen=True)
class Estimate:
    """A map estimated from documents.

    Attributes:
        values: Its cells.
        low, high: 95% interval over documents; None for fewer than four.
        without_each: The map without each document in turn, None where there is no interval.
    """

    values: Float[Tensor, "component layer part"]
    low: Float[Tensor, "component layer part"] | None = None
    high: Float[Tensor, "component layer part"] | None = None
    without_each: Float[Tensor, "document component layer part"] | None = None


def over_documents(
    measured: Float[Tensor, "batch component layer part"],
    weights: Float[Tensor, " batch"],
    documents: Int[Tensor, " batch"],
    share: Share | None = None,
) -> Estimate:
    """The size of the weighted mean over batches, as a share if asked for, with its jackknife interval over documents.

    The mean is taken with signs, so values that cancel over the text come out small; which batch a token was in makes
    no difference to it. The interval is that of the signed share: it reaches 0 where the sign is not known. NaN cells
    are none at all.

    Args:
        measured: Mean value of each batch, with its sign.
        weights: Number of tokens each of them is a mean over.
        documents: Number of the document of each batch, counted from 0.
        share: Divide sizes by their sum over the map, or over the layer.
    """
    n = int(documents.max()) + 1
    weights = weights.double()
    sums = measured.new_zeros(n, *measured.shape[1:]).index_add_(0, documents, measured * _like(weights, measured))
    tokens = weights.new_zeros(n).index_add_(0, documents, weights)

    def signed(total: Tensor, count: Tensor) -> Tensor:
        mean = total / count
        if share is None:
            return mean
        axes = (-3, -2, -1) if share == "map" else (-3, -1)
        whole = mean.abs().nansum(axes, keepdim=True)
        # A layer that is all NaN has no cells to take shares of.
        if bool(((whole == 0) & ~mean.isnan().amin(axes, keepdim=True)).any()):
            raise UsageError(
                "Nothing in this map, or in one of its layers, has any effect on the loss of this text, so shares of "
                "it are not defined. Use another text or metric."
            )
        return mean / whole

    values = signed(sums.sum(0), tokens.sum())
    if n < LEAST_UNITS:
        return Estimate(values.abs())
    without = signed(sums.sum(0) - sums, _like(tokens.sum() - tokens, sums))
    half = jackknife_half_width(without)
    return Estimate(values.abs(), (values.abs() - half).clamp_min(0), values.abs() + half, without.abs())


def attention_share(
    cells: Float[Tensor, "*document component layer part"], attention: Bool[Tensor, " component"]
) -> Float[Tensor, "*document layer"]:
    """What the components of attention have of the sum of their layer; NaN in layers that have none."""
    by_component = cells.nansum(-1)
    share: Tensor = by_component[..., attention, :].sum(-2) / by_component.sum(-2)
    absent = cells[..., attention, :, :].isnan().all(-1).all(-2)
    return share.masked_fill(absent, math.nan)


def trend_over_layers(
    values: Float[Tensor, "*document layer"],
) -> tuple[Float[Tensor, "*document third"], Float[Tensor, "*document"]]:
    """Means over the thirds of the layers, and the slope from the first layer to the last by least squares.

    Layers without a value are left out.
    """
    n = values.shape[-1]
    known = ~values.reshape(-1, n).isnan().any(0)
    thirds = [values[..., part][..., known[part]].mean(-1) for part in thirds_of(n)]
    depth = torch.linspace(0, 1, n, dtype=values.dtype)[known]
    centred = depth - depth.mean()
    return torch.stack(thirds, -1), (values[..., known] * centred).sum(-1) / centred.square().sum()


def thirds_of(n_layers: int) -> tuple[slice, slice, slice]:
    """The layers of each third, as equal as possible.

    Example:
        >>> thirds_of(10)
        (slice(0, 3, None), slice(3, 7, None), slice(7, 10, None))
    """
    first, second = round(n_layers / 3), round(2 * n_layers / 3)
    return slice(0, first), slice(first, second), slice(second, n_layers)


def _like(values: Float[Tensor, " unit"], cells: Float[Tensor, "unit component layer part"]) -> Tensor:
    return values.reshape(-1, *[1] * (cells.ndim - 1))
