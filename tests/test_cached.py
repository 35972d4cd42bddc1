"""Analyses of one text give the same from an ActivationCache at hand as from a forward pass of their own."""

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, booted
from planted import DECODERS, TL_MAJOR, shared_model

from tl_headmaps import association_heads, attention_groups, value_mixing
from tl_headmaps.capture.running import activations
from tl_headmaps.core.errors import UsageError

IDS = [3, 9, 4, 9, 5, 7]
CALLS = {
    "groups": lambda model, **options: attention_groups(model, IDS, n_null=0, **options),
    "mixing": lambda model, **options: value_mixing(model, IDS, "L2H3", **options),
    "association": lambda model, **options: association_heads(model, IDS, 5, 1, **options),
}


def values_of(result: Any) -> dict[str, Any]:
    return {name: value for name, value in result.to_dict().items() if name != "provenance"}


@pytest.fixture
def never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was run although a cache was given")

    monkeypatch.setattr(activations, "run", run)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_cache_gives_the_same(name: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model(name)
    expected = CALLS[call](model)
    _, cache = model.run_with_cache(torch.tensor([IDS]))
    monkeypatch.setattr(activations, "run", None)
    found = CALLS[call](model, cache=cache)
    assert values_of(found) == values_of(expected)
    assert found.provenance.options["from_cache"] is True and expected.provenance.options["from_cache"] is False


@pytest.mark.parametrize("call", CALLS)
def test_without_the_batch_axis_and_as_a_plain_mapping(call: str, never_run: None) -> None:
    model = shared_model("llama")
    cache = model.run_with_cache(torch.tensor([IDS]))[1]
    plain = dict(cache.items())
    expected = CALLS[call](model, cache=cache)
    bare = cache.remove_batch_dim() or cache
    assert values_of(CALLS[call](model, cache=bare)) == values_of(expected)
    assert values_of(CALLS[call](model, cache=plain)) == values_of(expected)


@pytest.mark.skipif(TL_MAJOR < 4, reason="TransformerLens 3 does not show these heads; run make test")
@pytest.mark.parametrize("name", ["qwen3_5", "gemma4 31B"])
def test_gates_and_keys_that_serve_as_values(name: str) -> None:
    """The gate has an axis less than the others; where keys serve as values a cache has no values."""
    model = booted(next(row for row in ARCHITECTURES if row.name == name))
    cache = model.run_with_cache(torch.tensor([IDS]))[1]
    expected = value_mixing(model, IDS, "L1H3")
    for given in (cache, dict(cache.items())):
        assert values_of(value_mixing(model, IDS, "L1H3", cache=given)) == values_of(expected)


def test_a_patched_run_shows_the_patched_model(never_run: None) -> None:
    model = shared_model("llama")

    def on_the_first(pattern: torch.Tensor, hook: Any) -> torch.Tensor:
        pattern = torch.zeros_like(pattern)
        pattern[..., 0] = 1
        return pattern

    with model.hooks(fwd_hooks=[("blocks.2.attn.hook_pattern", on_the_first)]):
        cache = model.run_with_cache(torch.tensor([IDS]))[1]
    found = value_mixing(model, IDS, "L2H3", cache=cache)
    assert found.pattern[:, 0].tolist() == [1.0] * len(IDS)


@pytest.mark.model
def test_a_text_is_encoded_as_run_with_cache_encodes_it(default_model: Any, never_run: None) -> None:
    text = "Birds sometimes walk"
    cache = default_model.run_with_cache(text)[1]
    found = value_mixing(default_model, text, "L5H3", cache=cache)
    assert len(found.tokens) == cache["blocks.5.attn.hook_pattern"].shape[-1]
    with pytest.raises(UsageError, match=r"contains 4 tokens, but the text has 3\..*prepend_bos="):
        value_mixing(default_model, text, "L5H3", prepend_bos=False, cache=cache)


class TestRefusals:
    def test_a_filtered_cache_names_what_is_missing(self) -> None:
        model = shared_model("gpt2")
        cache = model.run_with_cache(torch.tensor([IDS]), names_filter=lambda name: name.endswith("hook_pattern"))[1]
        assert attention_groups(model, IDS, cache=cache, n_null=0).tokens
        with pytest.raises(UsageError, match=r"has no blocks\.2\.attn\.hook_v\. Make it with model\.run_with_cache"):
            value_mixing(model, IDS, "L2H3", cache=cache)

    def test_several_prompts(self) -> None:
        model = shared_model("llama")
        cache = model.run_with_cache(torch.tensor([IDS, IDS]))[1]
        with pytest.raises(UsageError, match=r"contains 2 prompts, but the analysis is of one text"):
            attention_groups(model, IDS, cache=cache)

    @pytest.mark.parametrize("rubbish", [3, {"blocks.2.attn.hook_pattern": "no"}])
    def test_rubbish(self, rubbish: Any) -> None:
        with pytest.raises(UsageError, match=r"The cache has no|is a str, not a tensor"):
            value_mixing(shared_model("llama"), IDS, "L2H3", cache=rubbish)
