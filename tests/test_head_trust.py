"""Head trust: shares equal a dense reference, tokens explain all of layer 0, held-out documents never reach a fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from planted import random_model, shared_model, word
from torch import Tensor

from tl_headmaps import HeadIndex, HeadMapsError, HeadWeights, Relation, Result, head_trust, relation_scores
from tl_headmaps.analyses import head_trust as analysis
from tl_headmaps.capture.running.context import context_vectors
from tl_headmaps.circuits.ov import constant_values
from tl_headmaps.circuits.vectors import token_vectors
from tl_headmaps.core.errors import UsageError
from tl_headmaps.scorers.trust import permuted_within_deciles, share_with_interval, sinks

PROMPTS = [" word5 word6", " word7"]


def documents(n: int = 12, seed: int = 0) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 20, (n,), generator=generator).tolist()
    ids = [torch.randint(20, 60, (length,), generator=generator).tolist() for length in lengths]
    return [" ".join(word(token) for token in document) for document in ids]


def trust(model: Any, texts: Any = None, **options: Any) -> Any:
    texts = documents() if texts is None else texts
    return head_trust(model, texts, **{"prompts": PROMPTS, "n_null": 1, "progress": False, **options})


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tl_headmaps.core.store.cache_folder", lambda: tmp_path / "cache")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("vectors", ["folded", "context"])
def test_shares_equal_a_dense_reference(kind: str, vectors: str) -> None:
    model = shared_model(kind)
    weights = HeadWeights.from_model(model)
    result = trust(model)
    texts = documents()
    held_out = [number % 3 == 2 for number in range(len(texts))]
    number, head = 1, 2
    layer, group = weights.layer(number), weights.group_of(head)
    W_O = layer.W_O[head]
    W_O = W_O - W_O.mean(-1, keepdim=True) if kind == "gpt2" else W_O
    written: list[Tensor] = []
    predicted: list[Tensor] = []
    for text in texts:
        ids = model.to_tokens(f" {text}".lstrip())
        _, cache = model.run_with_cache(ids)
        stream = cache[f"blocks.{number}.hook_resid_pre"][0]
        stream = stream - stream.mean(-1, keepdim=True) if kind == "gpt2" else stream
        sink = sinks(stream)
        pattern = cache[f"blocks.{number}.attn.hook_pattern"][0, head].masked_fill(sink, 0)[~sink]
        value = cache[f"blocks.{number}.attn.hook_v"][0][:, group] - constant_values(layer)[group]
        if vectors == "folded":
            x = token_vectors(weights, ids[0], number, "folded")
            x = x if layer.ln1 is None else layer.ln1.normalised(x)
        else:
            prefixes = [model.to_tokens(prompt)[0].tolist() for prompt in PROMPTS]
            x = context_vectors(model, [(int(i),) for i in ids[0]], prefixes, progress=False).layer(number)
        read = x if layer.ln1 is None else x * layer.ln1.weight
        written.append((pattern @ value @ W_O).double())
        predicted.append((pattern @ (read @ layer.W_V[group]) @ W_O).double())
    fit = [index for index, out in enumerate(held_out) if not out]
    mean, mean_predicted = (torch.cat([rows[i] for i in fit]).mean(0) for rows in (written, predicted))
    left = torch.cat([written[i] for i in fit]) - mean
    right = torch.cat([predicted[i] for i in fit]) - mean_predicted
    scale = (left * right).sum() / right.square().sum()
    tested = [index for index, out in enumerate(held_out) if out]
    left = torch.cat([written[i] for i in tested]) - mean
    right = torch.cat([predicted[i] for i in tested]) - mean_predicted
    expected = 1 - (left - scale * right).square().sum() / left.square().sum()
    assert float(result.token_share[vectors][number, head]) == pytest.approx(float(expected), abs=2e-3)


def test_tokens_say_everything_in_layer_0_of_a_rotary_model() -> None:
    result = trust(shared_model("llama"))
    for vectors in ("folded", "context"):
        torch.testing.assert_close(result.token_share[vectors][0], torch.ones(4), atol=1e-4, rtol=0)
    assert float(result.null["context"][0].max()) < 0.9


def test_held_out_documents_never_reach_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other words in held-out documents change what is reported, and nothing that was fitted."""
    fits: list[list[Tensor]] = []
    original = analysis.Fit.of

    def watched(sums: Any, gram: Any) -> Any:
        fit = original(sums, gram)
        fits[-1].append(fit.scale)
        return fit

    monkeypatch.setattr(analysis.Fit, "of", watched)
    texts, others = documents(), documents(seed=1)
    changed = [others[number] if number % 3 == 2 else text for number, text in enumerate(texts)]
    shares = []
    for chosen in (texts, changed):
        fits.append([])
        shares.append(trust(shared_model("llama"), chosen, n_null=1).token_share["folded"][2])
    # Draw 0 is the truth; draws of the null depend on which tokens there are.
    assert all(torch.allclose(one, other) for one, other in zip(fits[0][::2], fits[1][::2], strict=True))
    assert not torch.allclose(shares[0], shares[1])


def test_raw_and_processed_weights_give_the_same() -> None:
    raw, processed = (trust(shared_model("gpt2", processed=flag)) for flag in (False, True))
    for vectors in ("folded", "context"):
        torch.testing.assert_close(raw.token_share[vectors], processed.token_share[vectors], atol=2e-3, rtol=0)


def test_sinks_are_found_by_their_length() -> None:
    stream = torch.ones(10, 4)
    stream[3] *= 7
    assert sinks(stream).nonzero().flatten().tolist() == [3]
    assert not bool(sinks(torch.ones(10, 4)).any())


def test_permutations_stay_within_deciles_of_frequency() -> None:
    counts = [index // 3 for index in range(60)]
    permutation = permuted_within_deciles(counts, torch.Generator().manual_seed(0))
    assert sorted(permutation) == list(range(60))
    assert permutation != list(range(60))
    assert all(a // 6 == b // 6 for a, b in enumerate(permutation))


def test_the_interval_is_that_of_resampled_documents() -> None:
    left, total = torch.tensor([[1.0], [1.0], [1.0]]).double(), torch.tensor([[2.0], [2.0], [2.0]]).double()
    share, low, high = share_with_interval(left, total)
    assert float(share) == float(low) == float(high) == 0.5
    left[0] = 2.0
    share, low, high = share_with_interval(left, total)
    assert float(low) < float(share) < float(high)


def test_maps_are_by_kind_of_vector() -> None:
    result = trust(shared_model("llama"))
    values = result.to_dict()
    assert set(values["token_share"]) == set(values["null"]) == {"folded", "context"}
    assert list(values["axes"]) == ["layer", "head"] and "held-out documents" in str(result)
    assert [layer.name for layer in result.figure().data.layers] == ["folded", "context"]
    assert result.top(1)[0][0].layer == 0 and torch.equal(result.values, result.head_map("context"))
    alone = result.select("folded", heads="L1H2")
    assert list(alone.token_share) == ["folded"] and alone.top() == [(HeadIndex(1, 2), alone.head_map()[1, 2].item())]
    with pytest.raises(UsageError, match="There are no shares of 'context'; there are those of folded"):
        alone.head_map("context")


@pytest.mark.parametrize("preset", ["folded", "context"])
def test_shown_beside_relation_scores(preset: Any, tmp_path: Path) -> None:
    model = shared_model("llama")
    result = trust(model)
    relation = Relation.from_pairs("own", [(word(20 + n), word(40 + n)) for n in range(8)])
    options: dict[str, Any] = {"preset": preset, "progress": False} | (
        {"prompts": PROMPTS} if preset == "context" else {}
    )
    scores = relation_scores(model, relation, trust=result.save(tmp_path / "trust.json"), **options)
    assert scores.token_share is not None and scores.token_share.equal(result.token_share[preset])
    given = relation_scores(model, relation, trust=result, **options).token_share
    assert given is not None and given.equal(scores.token_share)
    assert Result.load(scores.save(tmp_path / "scores.json")) == scores
    assert "tokens: share of what the head writes" in " ".join(scores.table(full=True).split())
    assert next(iter(scores.to_rows()))["token_share"] == pytest.approx(float(result.token_share[preset][0, 0]))
    assert any(name == "tokens" for name, _ in scores.figure().data.layers[0].details)
    assert relation_scores(model, relation, **options).token_share is None
    with pytest.raises(HeadMapsError, match="belongs to another model"):
        relation_scores(random_model("gpt2"), relation, trust=result, **options)


@pytest.mark.parametrize(
    ("texts", "options", "sentence"),
    [
        (["word20 word21 word22"] * 3, {}, "texts are too few: a third of them is held out"),
        (None, {"prompts": []}, "prompts= is empty"),
    ],
)
def test_bad_input(texts: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HeadMapsError, match=sentence):
        trust(shared_model("llama"), texts, **options)


def test_few_documents_have_no_interval() -> None:
    result = trust(random_model("llama"), documents(8))
    assert result.n_documents == 2
    assert bool(result.interval_low["context"].isnan().all()) and not bool(result.token_share["context"].isnan().any())
    assert str(result).count("too few documents for intervals") == 2
    several = trust(random_model("llama"), documents(18))
    assert str(several).count("heads is above their null") == 2
