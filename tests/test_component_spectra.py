"""Metrics of the weights alone: equal to their definitions by a float64 singular value decomposition."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import SIX
from planted import shared_model
from torch import Tensor

from tl_headmaps import component_map
from tl_headmaps.capture.components.matrices import component_source, heads_of
from tl_headmaps.scorers.components import METRICS, random_baseline
from tl_headmaps.scorers.spectra import WeightMatrix, parallel_map, random_matrix

METRIC_ACCURACY = 1e-4
"""Relative, as promised."""


def by_definition(matrix: Tensor) -> dict[str, float]:
    """From a float64 singular value decomposition."""
    s = torch.linalg.svdvals(matrix.double())
    share = s / s.sum()
    squares = s**2
    k = len(s) // 2
    return {
        "frobenius": float(matrix.double().norm()),
        "spectral": float(s[0]),
        "stable_rank": float((s**2).sum() / s[0] ** 2),
        "effective_rank": math.exp(-sum(float(p) * math.log(p) for p in share.tolist() if p > 0)),
        "tail_exponent": 1 + k / sum(math.log(float(squares[i] / squares[k])) for i in range(k)),
    }


@given(st.integers(2, 40), st.integers(2, 40), st.floats(0, 3), st.integers(0, 10**6))
def test_spectral_metrics_equal_the_definition(rows: int, columns: int, decades: float, seed: int) -> None:
    """Tall, wide and square, with singular values over up to three decades beyond chance."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator) * torch.logspace(0, -decades, columns)
    for name, expected in by_definition(matrix).items():
        assert METRICS[name].measure(WeightMatrix(matrix)) == pytest.approx(expected, rel=METRIC_ACCURACY), name


def planted(values: Tensor, rows: int, columns: int, seed: int = 0) -> Tensor:
    """A matrix with these singular values, stored in float32."""
    generator = torch.Generator().manual_seed(seed)
    sides = (torch.randn(n, len(values), generator=generator, dtype=torch.float64) for n in (rows, columns))
    left, right = (torch.linalg.qr(side).Q for side in sides)
    return (left * values.double() @ right.T).float()


@given(
    st.lists(st.floats(-6, 0), min_size=2, max_size=24),
    st.integers(0, 3),
    st.floats(2, 6),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_long_matrices_of_any_spectrum_equal_the_definition(
    exponents: list[float], zeros: int, aspect: float, tall: bool, seed: int
) -> None:
    """Six decades, repeated values, missing directions."""
    values = torch.cat([torch.tensor(exponents, dtype=torch.float64), torch.full((zeros,), -math.inf)])
    values = (10**values).sort(descending=True).values
    shape = (len(values), math.ceil(len(values) * aspect))
    matrix = planted(values, *(shape[::-1] if tall else shape), seed)
    for name, expected in by_definition(matrix).items():
        if name == "tail_exponent" and not 1e-4 < float(values[len(values) // 2] / values[0]) < 0.9:
            # Rounding of the entries themselves decides here: see the tests of low rank and of equal values.
            continue
        assert METRICS[name].measure(WeightMatrix(matrix)) == pytest.approx(expected, rel=METRIC_ACCURACY), name


def normal(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("scale", [1e-25, 1e-14, 1e14, 1e25])
def test_scale_changes_no_rank_and_overflows_nowhere(scale: float) -> None:
    weight = normal(20, 50)
    for name in ("stable_rank", "effective_rank", "tail_exponent"):
        plain, scaled = (METRICS[name].measure(WeightMatrix(matrix)) for matrix in (weight, weight * scale))
        assert scaled == pytest.approx(plain, rel=METRIC_ACCURACY)
    largest = METRICS["spectral"].measure(WeightMatrix(weight)) * scale
    assert METRICS["spectral"].measure(WeightMatrix(weight * scale)) == pytest.approx(largest, rel=METRIC_ACCURACY)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_stored_types_are_read_as_they_are(dtype: torch.dtype) -> None:
    weight = normal(30, 80).to(dtype)
    for name, expected in by_definition(weight).items():
        assert METRICS[name].measure(WeightMatrix(weight)) == pytest.approx(expected, rel=METRIC_ACCURACY), name


def test_small_singular_values_keep_their_digits() -> None:
    """Down to 1e-5 of the largest, where float32 decompositions have lost them."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 30, generator=generator, dtype=torch.float64)).Q for n in (50, 40))
    values = torch.logspace(0, -5, 30, dtype=torch.float64)
    found = WeightMatrix(left * values @ right.T).singular_values
    assert torch.allclose(found[:30], values, rtol=METRIC_ACCURACY)
    assert float(found[30:].max()) < 1e-7


@pytest.mark.parametrize("name", ["centred", "orthogonal", "low rank", "two largest alike", "one entry"])
def test_the_largest_singular_value_is_found_whatever_the_matrix(name: str) -> None:
    """Also without a gap to the next, and with hardly any others."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(96, 300, generator=generator)
    basis = torch.linalg.qr(normal.T).Q.T
    values = torch.linspace(1, 0.1, 96)
    matrix = {
        "centred": normal - normal.mean(0),
        "orthogonal": basis,
        "low rank": normal[:, :2] @ normal[:2],
        "two largest alike": basis * torch.cat([torch.ones(2), values[2:]])[:, None],
        "one entry": torch.zeros(96, 300).index_put((torch.tensor(5), torch.tensor(7)), torch.tensor(2.0)),
    }[name]
    expected = float(torch.linalg.svdvals(matrix.double())[0])
    for turned in (matrix, matrix.T):
        assert METRICS["spectral"].measure(WeightMatrix(turned)) == pytest.approx(expected, rel=1e-9)


def test_a_low_rank_matrix_has_that_effective_rank() -> None:
    """Noise of the hundreds of other singular values would show here."""
    basis = torch.linalg.qr(torch.randn(300, 5, generator=torch.Generator().manual_seed(1))).Q
    matrix = WeightMatrix(basis @ basis.T)
    assert METRICS["effective_rank"].measure(matrix) == pytest.approx(5, rel=METRIC_ACCURACY)
    assert METRICS["stable_rank"].measure(matrix) == pytest.approx(5, rel=METRIC_ACCURACY)
    assert math.isnan(METRICS["tail_exponent"].measure(matrix))


def test_zero_and_tiny_matrices_are_undefined_not_wrong() -> None:
    zero = WeightMatrix(torch.zeros(4, 6))
    assert METRICS["frobenius"].measure(zero) == METRICS["spectral"].measure(zero) == 0
    for name in ("stable_rank", "effective_rank", "tail_exponent"):
        assert math.isnan(METRICS[name].measure(zero))
    assert math.isnan(METRICS["tail_exponent"].measure(WeightMatrix(torch.ones(1, 3))))


@pytest.mark.parametrize("name", ["frobenius", "spectral", "stable_rank", "effective_rank", "tail_exponent"])
def test_a_random_matrix_is_like_its_baseline(name: str) -> None:
    own = METRICS[name].measure(WeightMatrix(random_matrix(96, 240, seed=77)))
    assert own == pytest.approx(random_baseline(METRICS[name], 96, 240, seed=0), rel=0.05)


def test_relative_divides_by_the_baseline() -> None:
    plain, relative = (component_map(shared_model("llama"), "spectral", relative=flag) for flag in (False, True))
    assert plain.baseline is not None and torch.equal(plain.baseline, relative.baseline)
    assert torch.allclose(relative.values, plain.values / plain.baseline)
    assert relative.unit == "spectral norm, relative to random" and relative.relative and not plain.relative
    # Closed form for a large matrix with entries of variance 1 / rows: 1 + sqrt(columns / rows).
    assert random_baseline(METRICS["spectral"], 400, 900, seed=0) == pytest.approx(1 + 1.5, rel=0.02)


def test_head_maps_are_maps_of_slices() -> None:
    source = component_source(shared_model("llama"))
    found = component_map(shared_model("llama"), "effective_rank", by_head=True)
    assert found.values.shape == (4, 3, 4)
    assert found.of("attn.k").shape == found.of("attn.v").shape == (3, 2)
    for number, name in enumerate(SIX[:4]):
        for layer in range(3):
            for head, matrix in enumerate(heads_of(source, layer, name)):
                expected = by_definition(matrix)["effective_rank"]
                assert float(found.values[number, layer, head]) == pytest.approx(expected, rel=METRIC_ACCURACY)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_side_by_side_keeps_the_order_for_any_number_of_threads(threads: Callable[[int], None]) -> None:
    for count in (1, 3):
        threads(count)
        assert list(parallel_map(lambda i: i * i, range(50))) == [i * i for i in range(50)]
        assert torch.get_num_threads() == count


def test_side_by_side_gives_threads_back_after_an_exception(threads: Callable[[int], None]) -> None:
    threads(3)
    with pytest.raises(ZeroDivisionError):
        list(parallel_map(lambda i: 1 / i, range(5)))
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("name", ["frobenius", "spectral", "stable_rank", "effective_rank", "tail_exponent"])
def test_any_number_of_threads_gives_the_same_bytes(name: str, threads: Callable[[int], None]) -> None:
    """Large enough for every library to divide the work if it were allowed to."""
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(300, 700, generator=generator), torch.randn(400, 400, generator=generator)]
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(list(parallel_map(lambda weight: METRICS[name].measure(WeightMatrix(weight)), weights)))
    assert found[0] == found[1] == found[2]


@pytest.mark.model
def test_the_default_spectra_are_those_of_a_decomposition(default_model: Any) -> None:
    """One layer's seven matrices, against torch.linalg.svdvals."""
    source = component_source(default_model)
    for name in source.components:
        matrix = source.matrix(11, name)
        for metric_name, expected in by_definition(matrix).items():
            found = METRICS[metric_name].measure(WeightMatrix(matrix))
            assert found == pytest.approx(expected, rel=METRIC_ACCURACY), (name, metric_name)
