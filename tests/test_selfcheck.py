"""What was read of a model is compared with what it computes: right models fit, and any factor of 1.01 is found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from planted import DECODERS, needs_hooked, save_checkpoint, shared_model, source_model

from tl_headmaps import HeadWeights, Relation, ablate, attention_groups, describe_model, token_grid, value_mixing
from tl_headmaps.capture import selfcheck
from tl_headmaps.capture.forward import ForwardPass, forward_pass
from tl_headmaps.capture.parts import LayerWeights
from tl_headmaps.capture.selfcheck import SEAMS, compared
from tl_headmaps.core.errors import UnsupportedModelError, WeightBasisError

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDING = 1e-4
"""Small models in float32 agree with themselves far better than the tolerance asks for."""

HOSTS = ["bridge", pytest.param("hooked", marks=needs_hooked)]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("kind", DECODERS)
def test_every_seam_of_a_model_that_is_read_rightly_fits(kind: str, processed: bool, host: str) -> None:
    check = HeadWeights.from_model(shared_model(kind, processed=processed, host=host)).check
    assert check is not None
    assert tuple(seam.name for seam in check.seams) == SEAMS
    for seam in check.seams:
        assert seam.fits and seam.difference < ROUNDING and not seam.note, seam


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "gemma3", "qwen3", "phi"])
def test_rounding_of_the_stored_type_is_no_difference(kind: str, dtype: torch.dtype) -> None:
    check = HeadWeights.from_model(shared_model(kind, dtype=dtype)).check
    assert check is not None and all(seam.fits for seam in check.seams), check.record()


RELATION = Relation.from_pairs("own", [("word3", "word4")], eliciting_templates=(" word5 <X>",))

Break = Callable[[HeadWeights], HeadWeights]


def with_layers(change: Callable[[LayerWeights], LayerWeights]) -> Break:
    return lambda weights: replace(weights, read_layer=lambda number: change(weights.read_layer(number)))


def factor(name: str) -> Break:
    return with_layers(lambda layer: replace(layer, **{name: 1.01 * getattr(layer, name)}))


def larger_norm(layer: LayerWeights) -> LayerWeights:
    assert layer.ln1 is not None
    return replace(layer, ln1=replace(layer.ln1, weight=1.01 * layer.ln1.weight))


def larger_mlp(weights: HeadWeights) -> HeadWeights:
    assert weights.mlp is not None
    return replace(weights, mlp=replace(weights.mlp, W_out=1.01 * weights.mlp.W_out))


BROKEN: list[tuple[str, Break]] = [
    ("embedding", lambda weights: replace(weights, embed_scale=1.01)),
    ("embedding", lambda weights: replace(weights, W_E=1.01 * weights.W_E)),
    ("norm before attention", with_layers(larger_norm)),
    ("scores", factor("W_Q")),
    ("scores", factor("W_K")),
    ("scores", factor("score_scale")),
    ("values", factor("W_V")),
    ("attention output", factor("W_O")),
    ("attention output", lambda weights: replace(weights, residual_scale=1.01)),
    ("first MLP", larger_mlp),
    ("first MLP", lambda weights: replace(weights, mlp_scale=1.01)),
    ("logits", lambda weights: replace(weights, W_U=1.01 * weights.W_U)),
    ("logits", lambda weights: replace(weights, logit_scale=1.01)),
]


@pytest.mark.parametrize(
    "stored",
    [{}, pytest.param({"host": "hooked"}, marks=needs_hooked), {"dtype": torch.bfloat16}, {"dtype": torch.float16}],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(("name", "break_it"), BROKEN)
def test_a_reader_that_is_wrong_by_a_hundredth_is_caught(name: str, break_it: Break, kind: str, stored: Any) -> None:
    weights = break_it(HeadWeights.from_model(shared_model(kind, **stored)))
    assert weights.check is not None
    seam = weights.check[name]
    assert not seam.fits and (stored.get("dtype") or 0.002 < seam.difference < 0.02)
    if stored.get("dtype") == torch.bfloat16:  # in float16 an entry may say so already
        assert 0.985 < seam.factor < 0.995 and str(seam).startswith("differs by a factor of 0.99")
    # The others are compared with the model's own values, so that a mistake is found where it is.
    assert {other.name for other in weights.check.seams if not other.fits} == {name}


def test_a_few_large_entries_do_not_decide_about_a_factor() -> None:
    """One entry of a stream may be a thousand times larger than the others, and rounded by half a percent."""
    theirs = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    theirs[0, 0] = 1e4
    ours = theirs.clone()
    ours[0, 0] *= 1.006
    assert compared(ours, theirs).fits(torch.bfloat16)
    assert not compared(1.01 * ours, theirs).fits(torch.bfloat16)
    assert not compared(ours, theirs).fits(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shown", "names"), [("z", {"mixing", "attention output"}), ("resid_post", {"stream", "logits"})]
)
def test_a_host_that_shows_something_else_is_caught(
    shown: str, names: set[str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(model: Any, layers: Any) -> ForwardPass:
        seen = forward_pass(model, layers)
        return replace(seen, layers={n: {**here, shown: 1.01 * here[shown]} for n, here in seen.layers.items()})

    # A norm hides a factor: the last stream is shown turned a little, too.
    weights = replace(HeadWeights.from_model(shared_model("llama", dtype=dtype)))  # not checked yet
    monkeypatch.setattr(selfcheck, "forward_pass", other)
    assert weights.check is not None
    found = {seam.name for seam in weights.check.seams if not seam.fits}
    assert found >= names - {"logits"} and found <= names


def test_only_what_depends_on_the_seam_is_refused() -> None:
    weights = factor("W_V")(HeadWeights.from_model(shared_model("llama")))
    with pytest.raises(UnsupportedModelError) as caught:
        token_grid(weights, "L1H0", [3], [4], preset="folded")
    sentence = str(caught.value)
    assert "'tiny-llama' was run on a few tokens, and the seam 'values' is not what its weights say" in sentence
    assert "it differs by 0.01 of the largest value in layer" in sentence
    assert "OV maps could be wrong" in sentence
    assert (
        token_grid(weights, "L1H0", [3], [4], circuit="qk", preset="folded")
        .provenance.seams["values"]
        .startswith("differs by")
    )


def test_it_is_recorded_and_printed(tmp_path: Any) -> None:
    model = shared_model("llama")
    description = describe_model(model)
    assert description.provenance.seams == dict.fromkeys(SEAMS, "fits")
    assert [description.facts[f"self-check, {name}"] for name in SEAMS] == ["fits"] * len(SEAMS)
    assert attention_groups(model, " word3 word4 word5").provenance.seams == description.provenance.seams
    read = HeadWeights.from_checkpoint(save_checkpoint(source_model("llama"), tmp_path))
    assert read.check is None and describe_model(read).provenance.seams == {}


@pytest.mark.parametrize("host", HOSTS)
def test_moved_value_biases_are_no_answer_of_their_own(host: str) -> None:
    raw, processed = (shared_model("gpt2", processed=flag, host=host) for flag in (False, True))
    value_mixing(raw, " word3 word4 word5", "L1H0")
    sentence = "biases of its values were added up over heads in the output bias.*Load the model without processing"
    with pytest.raises(WeightBasisError, match=sentence):
        value_mixing(processed, " word3 word4 word5", "L1H0")
    with pytest.raises(WeightBasisError, match=r"switching off a head would differ.*or use method='mean'"):
        ablate(processed, RELATION, "L1H0", controls=None, n_random=0, progress=False, preset="folded")
    assert not HeadWeights.from_model(shared_model("llama", processed=True, host=host)).moved_biases
