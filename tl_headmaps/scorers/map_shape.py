"""The shape of a map of heads: how many carry it, where over the layers it lies, whether it has a diagonal or corner.

Layers have an order and heads have not: a model with its heads renumbered within each layer is the same model. So what
a diagonal or a corner in a picture means is asked against maps with heads permuted within their layers.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .statistics import rank_p_value


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
