"""Probes: classifiers that read a function from features, many label sets at once.

Several fits share one set of features: the labels as they are, and shuffled ones for the null. A *linear* probe is
multinomial logistic regression with an L2 penalty, solved to its unique optimum:

    mean over items of -log softmax(features W + bias + offset)[label]  +  penalty / 2 * |W|^2

An *mlp* has one hidden layer, trained with all items at once for a fixed number of steps from seeded weights; the fits
do not influence each other.

``offsets`` are logits that are already known, for example what the words of an item say. A probe with offsets learns
only what the features know beyond them.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

_HIDDEN = 32
_STEPS = 200
_RATE = 0.02
_DECAY = 1e-2
_MAX_ITERATIONS = 1000
_CURVATURE = 0.1
"""Typical variance p (1 - p) of a class; only the speed depends on it."""
_SMALLEST = 1e-12
"""Directions with less than this share of the largest square are rounding."""
_GRADIENT = 3e-6
"""Largest entry of the gradient at which a linear fit counts as solved (entries are means over items)."""


@dataclass(frozen=True)
class Linear:
    """Fitted linear probes: ``logits = x @ weight + bias``."""

    weight: Float[Tensor, "fit dim class"]
    bias: Float[Tensor, "fit class"]

    def logits(self, x: Float[Tensor, "item dim"]) -> Float[Tensor, "fit item class"]:
        """Logits of each fit, offsets not included."""
        return x @ self.weight + self.bias[:, None]

    def gradients(
        self, x: Float[Tensor, "item dim"], classes: Int[Tensor, "fit item"]
    ) -> Float[Tensor, "fit item dim"]:
        """Gradient of each item's logit of a class by its features: the class's weights, whatever the item."""
        fits = torch.arange(len(classes))[:, None]
        return self.weight.transpose(1, 2)[fits, classes]


@dataclass(frozen=True)
class Perceptron:
    """Fitted probes with one hidden layer: ``logits = tanh(x @ first + shift) @ weight + bias``."""

    first: Float[Tensor, "fit dim hidden"]
    shift: Float[Tensor, "fit hidden"]
    weight: Float[Tensor, "fit hidden class"]
    bias: Float[Tensor, "fit class"]

    def hidden(self, x: Float[Tensor, "item dim"]) -> Float[Tensor, "fit item hidden"]:
        """The hidden layer."""
        return torch.tanh(x @ self.first + self.shift[:, None])

    def logits(self, x: Float[Tensor, "item dim"]) -> Float[Tensor, "fit item class"]:
        """Logits of each fit, offsets not included."""
        return self.hidden(x) @ self.weight + self.bias[:, None]

    def gradients(
        self, x: Float[Tensor, "item dim"], classes: Int[Tensor, "fit item"]
    ) -> Float[Tensor, "fit item dim"]:
        """Gradient of each item's logit of a class by its features."""
        fits = torch.arange(len(classes))[:, None]
        slope = (1 - self.hidden(x).square()) * self.weight.transpose(1, 2)[fits, classes]
        return slope @ self.first.transpose(1, 2)


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


def fit_mlp(
    features: Float[Tensor, "item dim"],
    labels: Int[Tensor, "fit item"],
    n_classes: int,
    *,
    seed: int,
    offsets: Float[Tensor, "fit item class"] | None = None,
) -> Perceptron:
    """One-hidden-layer probes of several label sets; every fit starts from the same weights."""
    n_fits, dim = len(labels), features.shape[1]
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(dim, _HIDDEN, generator=generator) / math.sqrt(dim)
    weight = torch.randn(_HIDDEN, n_classes, generator=generator) / math.sqrt(_HIDDEN)
    starts = (first, torch.zeros(_HIDDEN), weight, torch.zeros(n_classes))
    x = features.float()
    with torch.enable_grad():
        parameters = [start.expand(n_fits, *start.shape).clone().requires_grad_() for start in starts]
        optimiser = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=_DECAY)
        for _ in range(_STEPS):
            optimiser.zero_grad()
            logits = Perceptron(*parameters).logits(x)
            if offsets is not None:
                logits = logits + offsets
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / labels.shape[1]).backward()
            optimiser.step()
    return Perceptron(*(parameter.detach() for parameter in parameters))
