"""Shapes of head maps: against sums written out, on maps with known shapes, and with heads renumbered."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tl_headmaps.scorers.tasks import (
    centre_of_mass,
    corner_shares,
    diagonal_correlation,
    effective_number,
    heads_permuted,
    shape_p_values,
)


def random_map(layers: int, heads: int, seed: int) -> torch.Tensor:
    values = torch.rand(layers, heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values / values.sum()


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 99))
def test_shapes_equal_sums_written_out(layers: int, heads: int, seed: int) -> None:
    shares = random_map(layers, heads, seed)
    cells = [(layer, head, float(shares[layer, head])) for layer in range(layers) for head in range(heads)]
    assert float(effective_number(shares)) == pytest.approx(1 / sum(share**2 for *_, share in cells))
    assert float(centre_of_mass(shares)) == pytest.approx(sum(layer * share for layer, _, share in cells))
    corners = dict.fromkeys(range(4), 0.0)
    for layer, head, share in cells:
        for late, high in ((0, 0), (0, 1), (1, 0), (1, 1)):
            # A cell in the middle of an odd number belongs to both sides by half.
            sides = [min(1.0, max(0.0, n / 2 - place)) for n, place in ((layers, layer), (heads, head))]
            corners[2 * late + high] += (
                share * (1 - sides[0] if late else sides[0]) * (1 - sides[1] if high else sides[1])
            )
    np.testing.assert_allclose(corner_shares(shares), list(corners.values()), atol=1e-12)
    assert float(corner_shares(shares).sum()) == pytest.approx(1)
    expected = 0.0
    if layers > 1 and heads > 1:
        x, y, w = map(np.array, zip(*cells, strict=True))
        covariance = np.cov(np.stack([x, y]), aweights=w, ddof=0)
        expected = covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])
    assert float(diagonal_correlation(shares)) == pytest.approx(expected, abs=1e-9)


def test_renumbering_keeps_layers_and_moves_heads() -> None:
    shares = random_map(4, 6, 0)
    drawn = heads_permuted(shares, 20, np.random.default_rng(0))
    assert torch.equal(drawn.sort(-1).values, shares.sort(-1).values.expand(20, -1, -1))
    assert len({tuple(one.flatten().tolist()) for one in drawn}) == 20


def test_a_map_that_no_permutation_changes_is_as_common_as_can_be() -> None:
    """Heads of a layer count alike, so that every permuted map is the map itself; sums in float32 tell them apart."""
    rows = torch.rand(3, 30, 1, generator=torch.Generator().manual_seed(0)).expand(3, 30, 9)
    p_values = shape_p_values((rows / rows.sum((1, 2), keepdim=True)).contiguous(), n_null=499)
    assert p_values.tolist() == [[1.0] * 3] * 2


def test_a_diagonal_is_found_and_one_bright_layer_is_none() -> None:
    diagonal, layer = torch.eye(8) / 8, torch.zeros(8, 8)
    layer[5] = 1 / 8
    empty = torch.full((1, 8), torch.nan)
    maps = torch.stack([torch.cat([empty, one]) for one in (diagonal, layer)])
    by_diagonal, by_corner = shape_p_values(maps, n_null=199)
    assert float(by_diagonal[0]) == pytest.approx(1 / 200) and float(by_diagonal[1]) == 1
    # All of it is in late layers whatever the numbers of the heads, so its corner is nothing special.
    assert float(by_corner[1]) == 1
    assert bool(shape_p_values(torch.zeros(1, 2, 2), n_null=9).isfinite().all())
