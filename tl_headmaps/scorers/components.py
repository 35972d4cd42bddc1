"""The metrics of component maps, one registered function each.

Four kinds of evidence, and what a metric of each kind is given:

* ``weights``: one :class:`~.spectra.WeightMatrix`. The same function is applied to random matrices of the same shape
  (independent normal entries of variance 1 / inputs), which is the baseline a value can be divided by.
* ``change``: a :class:`Change`, the matrix and the same matrix of another model.
* ``gradients``: the :class:`GradientSums` of a component, per batch of a text.
* ``outputs``: what the component writes for every token, and the stream it belongs to.

To add a metric, write one more function with the decorator; nothing else changes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.components.gradients import GradientSums
from ..core.errors import UsageError
from .spectra import WeightMatrix, entropy_rank, random_matrix
from .statistics import RunningRatio

Kind: TypeAlias = Literal["weights", "change", "gradients", "outputs"]

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
        normalised: Whether values are divided by their sum over the map.
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
        return self.kind in ("gradients", "outputs")

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
        by_source = {
            "text": names_of("gradients", "outputs"),
            "the weights alone": names_of("weights"),
            "two models (against=)": names_of("change"),
        }
        listed = "; ".join(f"from {source}: {names}" for source, names in by_source.items())
        raise UsageError(f"There is no metric {name!r}. Choose one, {listed}.")
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


@metric("gradients", "share of |sum(w * dLoss/dw)| over the map", normalised=True, cites=("molchanov2019importance",))
def contribution(sums: GradientSums) -> Float[Tensor, "batch layer part"]:
    """First-order effect on the loss of scaling the matrix: |sum of weight times gradient|.

    It sees a matrix as a whole, so matrices that are only ever multiplied with each other contribute the same: q and k,
    v and o, up and down of a gated MLP are equal where no bias, norm or activation is between them (Llama). A norm
    right behind them (of queries and keys in Qwen 3, of all that is written in Gemma) undoes any scaling: they
    contribute zero. ``sensitivity`` tells such matrices apart.
    """
    return sums.product.abs()


@metric("gradients", "share of sum|w * dLoss/dw| over the map", normalised=True, cites=("molchanov2019importance",))
def sensitivity(sums: GradientSums) -> Float[Tensor, "batch layer part"]:
    """First-order effect on the loss of removing the entries one by one: sum of |weight times gradient|."""
    return sums.absolute_product


@metric("gradients", "|dLoss/dw| / |w| (Frobenius norms)")
def gradient_ratio(sums: GradientSums) -> Float[Tensor, "batch layer part"]:
    """Norm of the gradient of the mean loss relative to the norm of the matrix."""
    ratio: Tensor = (sums.gradient_square / sums.weight_square).sqrt()
    return ratio


@metric("outputs", "|output| / |stream| (o, down: the residual stream they add to; others: what they read)")
def output_share(
    written: Float[Tensor, "token part width"], stream: Float[Tensor, "token stream_width"]
) -> Float[Tensor, " part"]:
    """Norm of what the component writes relative to its stream, mean over tokens."""
    size = stream.double().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    share: Tensor = (written.double().norm(dim=-1) / size[:, None]).mean(0)
    return share


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


@dataclass(frozen=True)
class Estimate:
    """Mean over batches with its 95% interval; None where there is one batch only."""

    values: Float[Tensor, "*cells"]
    low: Float[Tensor, "*cells"] | None
    high: Float[Tensor, "*cells"] | None


def mean_over_batches(measured: Float[Tensor, "batch ..."], *, normalised: bool) -> Estimate:
    """Mean and 95% t-interval over batches; with ``normalised``, of the share in the sum over all cells.

    The share is a ratio of two means over the same batches, see :class:`~.statistics.RunningRatio`. NaN cells are none
    at all.
    """
    if normalised:
        totals = measured.nansum(tuple(range(1, measured.ndim)))
        if not totals.mean() > 0:
            raise UsageError(
                "Nothing in this map has any effect on the loss of this text, so shares of it are not defined. Use "
                "another text or metric."
            )
    else:
        totals = torch.ones(len(measured))
    share = RunningRatio(*measured.shape[1:])
    for cells, total in zip(measured, totals, strict=True):
        share.add(cells, total)
        share.next_unit()
    means, half = share.ratio(), share.half_width()
    if len(measured) < 2:
        return Estimate(means, None, None)
    return Estimate(means, (means - half).clamp_min(0), means + half)
