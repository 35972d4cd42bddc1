"""Models spread over devices: what can be seen without a GPU.

A ``device_map`` with ``disk`` leaves placeholders on the meta device, as one over GPUs leaves tensors elsewhere; and
with the meta device as torch's default, a tensor that is made without saying where cannot be computed with.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TL_MAJOR
from planted import quiet, save_checkpoint, source_model

from tl_headmaps import HeadWeights, Relation, relation_scores, token_grid
from tl_headmaps.capture.anatomy import parameters_digest
from tl_headmaps.circuits.extremes import row_norms, top_k
from tl_headmaps.circuits.maps import CircuitMaps

RELATION = Relation.from_pairs("all", [(s, t) for s in range(3, 20) for t in (s + 1, 40 - s)])
PARTS = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", *(f"model.layers.{n}" for n in range(3)))
KINDS = ("llama", "gpt2", "gemma3", "neox")


@pytest.fixture(params=KINDS)
def weights(request: Any, tmp_path: Path) -> HeadWeights:
    return HeadWeights.from_checkpoint(save_checkpoint(source_model(request.param), tmp_path / request.param))


def offloaded(folder: Path, here: tuple[str, ...]) -> Any:
    """A bridge whose other parts lie on disk."""
    from transformer_lens.model_bridge import TransformerBridge

    where = {part: "cpu" if part in (*here, "model.rotary_emb") else "disk" for part in PARTS}
    with quiet():
        return TransformerBridge.boot_transformers(
            str(folder), device_map=where, offload_folder=str(folder / "offload"), dtype=torch.float32
        )


@pytest.mark.skipif(TL_MAJOR < 4, reason="device_map came with TransformerLens 4; run make test")
@pytest.mark.parametrize(
    "here",
    [
        ("model.embed_tokens", "model.norm", "lm_head", "model.layers.0"),
        ("model.embed_tokens", "lm_head", "model.layers.2"),
        ("model.layers.1",),
    ],
    ids=["later layers", "first layer and norm", "nearly everything"],
)
def test_weights_on_disk_are_brought_in_as_needed(here: tuple[str, ...], tmp_path: Path) -> None:
    folder = save_checkpoint(source_model("llama"), tmp_path)
    model = offloaded(folder, here)
    away = [name for name, value in model.original_model.named_parameters() if value.is_meta]
    assert away
    weights, expected = HeadWeights.from_model(model), HeadWeights.from_checkpoint(folder)
    assert weights.device.type == "cpu"
    assert weights.fingerprint == expected.fingerprint
    assert weights.parameters_digest == parameters_digest(offloaded(folder, PARTS))
    one, other = (
        relation_scores(w, RELATION, ranks=True, progress=False, preset="folded") for w in (weights, expected)
    )
    for name in ("promote_ranks", "suppress_ranks"):
        assert torch.equal(getattr(one, name)[0], getattr(other, name)[0])
    still = [name for name, value in model.original_model.named_parameters() if value.is_meta]
    assert still == away, "what was brought in was put back"


@pytest.mark.parametrize("circuit", ["ov", "qk"])
def test_no_tensor_is_made_on_torchs_default_device(weights: HeadWeights, circuit: Any) -> None:
    """Everything an analysis makes says where: beside the weights, or on the CPU for the result."""
    expected = relation_scores(weights, RELATION, circuit=circuit, progress=False, preset="folded")
    grid = token_grid(weights, "L2H1", [5, 6], [7, 8], circuit=circuit, preset="folded")
    fresh = HeadWeights.from_checkpoint(weights.model_name)
    with torch.device("meta"):
        assert torch.zeros(1).is_meta
        found = relation_scores(fresh, RELATION, circuit=circuit, progress=False, preset="folded")
        again = token_grid(fresh, "L2H1", [5, 6], [7, 8], circuit=circuit, preset="folded")
        maps = CircuitMaps(fresh, torch.arange(20, device="cpu"), circuit=circuit).layer(1)
        assert not top_k(maps, 3).values.is_meta
        assert not row_norms(maps.left_of(0), maps.columns.factor(0)).is_meta
    for name in ("promote", "suppress", "p_value", "interval_low"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert torch.equal(again.ranks, grid.ranks) and torch.equal(again.values, grid.values)
