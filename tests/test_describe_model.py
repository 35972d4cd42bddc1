"""Parameters and effective rank of circuits, against dense products."""

import pytest
import torch
from hybrids import hybrid_model
from planted import random_model, shared_model

from tl_headmaps import HeadWeights, describe_model
from tl_headmaps.scorers.spectra import entropy_rank, product_singular_values


def dense_rank(product: torch.Tensor) -> float:
    values = torch.linalg.svdvals(product.double())
    shares = values / values.sum()
    shares = shares[shares > 0]
    return float((-(shares * shares.log()).sum()).exp())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_ranks_are_those_of_the_dense_circuits(name: str) -> None:
    weights = HeadWeights.from_model(shared_model(name))
    found = describe_model(weights)
    assert found.qk_rank is not None and found.ov_rank is not None
    for number in range(weights.n_layers):
        layer = weights.layer(number)
        assert layer.ln1 is not None and weights.ln_final is not None
        read = torch.eye(weights.d_model)
        if layer.ln1.centres:
            read = read - 1 / weights.d_model
        read = read @ torch.diag(layer.ln1.weight)
        for head in range(weights.n_heads):
            group = weights.group_of(head)
            qk = read @ layer.W_Q[head] @ (read @ layer.W_K[group]).mT
            written = layer.W_O[head]
            if weights.ln_final.centres:
                written = written - written.mean(-1, keepdim=True)
            ov = read @ layer.W_V[group] @ written
            assert float(found.qk_rank[number, head]) == pytest.approx(dense_rank(qk), rel=1e-4)
            assert float(found.ov_rank[number, head]) == pytest.approx(dense_rank(ov), rel=1e-4)


def test_processed_weights_have_the_same_ranks() -> None:
    raw, processed = (describe_model(random_model("gpt2", processed=flag)) for flag in (False, True))
    torch.testing.assert_close(raw.qk_rank, processed.qk_rank, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(raw.ov_rank, processed.ov_rank, rtol=1e-4, atol=1e-4)


def test_parameters_are_counted() -> None:
    weights = HeadWeights.from_model(shared_model("llama"))
    found = describe_model(weights)
    each = weights.layer(0).W_Q[0].numel()
    assert found.parameters == {
        **dict.fromkeys(("W_Q", "W_K", "W_V", "W_O"), each), "QK": 2 * each, "OV": 2 * each, "head": 4 * each
    }  # fmt: skip
    d, r = weights.d_model, weights.d_head
    assert f"{r * (2 * d - r):,} of them free" in found.facts["QK circuit"]
    assert "shared by 2 heads" in found.facts["parameters of a head"]
    assert f"of at most {r}; random matrices" in found.facts["effective rank of OV"]


def test_layers_without_heads_have_no_rank() -> None:
    found = describe_model(hybrid_model("jamba"))
    assert found.qk_rank is not None
    empty = found.qk_rank.isnan().all(1)
    assert bool(empty.any()) and not bool(empty.all()) and found.to_json()


def test_the_product_is_never_needed() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 50, 6, generator=generator), torch.randn(2, 40, 6, generator=generator)
    right[..., 5] = 0
    found = product_singular_values(left, right)
    dense = torch.linalg.svdvals((left @ right.mT).double())[:, :6]
    torch.testing.assert_close(found, dense, atol=1e-5, rtol=1e-5)
    assert float(entropy_rank(torch.tensor([1.0, 1.0, 1.0, 0.0]))) == pytest.approx(3)
