"""The first public call: planted heads are found, values equal a dense reference, bad input gets a sentence."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from planted import (
    DECODERS,
    Anatomy,
    needs_hooked,
    planted_model,
    random_model,
    shared_model,
    source_model,
    word,
    word_tokenizer,
)
from torch import Tensor

from tl_headmaps import HeadIndex, HeadWeights, Relation, TokenGrid, relation_scores, token_grid
from tl_headmaps.core.errors import TokenError, UnsupportedModelError, UsageError, WeightBasisError

pytestmark = pytest.mark.usefixtures("one_thread")

DENSE = 1e-5
"""Relative difference allowed to the reference: float32 sums of a few dozen terms in another order."""

PLANTED = 1e-3
"""The planted matrices are solved in float64 and rounded to float32, which the products amplify a little."""

N_VOCAB = 24

RELATIONS = {
    (0, 1): {5: 6, 7: 8, 9: 3, 10: 11, 14: 14, 22: 17},
    # Two heads of one key/value group where there are groups: shared sources, other targets.
    (2, 0): {5: 10, 6: 11, 12: 4, 20: 21, 3: 15, 18: 9},
    (2, 1): {5: 20, 6: 7, 8: 8, 20: 5, 3: 19, 11: 13},
    (1, 3): {23: 3, 4: 23, 15: 16, 6: 12, 17: 5, 21: 21},
}


def planted(kind: str, **options: Any) -> HeadWeights:
    weights = HeadWeights.from_model(planted_model(RELATIONS, kind=kind, n_vocab=N_VOCAB, **options))
    # Every head is looked at several times: each layer is read once.
    return replace(weights, read_layer=cache(weights.read_layer))


def assert_planted(weights: HeadWeights, presets: tuple[str, ...]) -> None:
    asked = [Relation.from_pairs(f"{at}", relation.items(), k=1) for at, relation in RELATIONS.items()]
    for preset in presets:
        scores = relation_scores(weights, asked, preset=preset, progress=False).promote
        for at, relation in RELATIONS.items():
            everything = token_grid(weights, at, list(relation), list(range(N_VOCAB)), preset=preset)
            wanted = torch.zeros(len(relation), N_VOCAB)
            wanted[range(len(relation)), list(relation.values())] = 1.0
            if preset == "folded":
                wanted -= wanted.mean(1, keepdim=True)
            assert torch.allclose(everything.values, wanted, atol=PLANTED), (preset, at)
            assert everything.ranks.gather(1, torch.tensor(list(relation.values()))[:, None]).tolist() == [[0]] * 6
            promoted = scores[list(RELATIONS).index(at)]
            assert float(promoted[at]) == 1.0 and int((promoted > 0.5).sum()) == 1, (preset, at)


class TestPlantedHeads:
    @pytest.mark.parametrize("kind", DECODERS)
    def test_found_in_both_presets_and_nowhere_else(self, kind: str) -> None:
        assert_planted(planted(kind), ("maps", "folded"))

    @pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3"])
    def test_found_in_processed_models(self, kind: str) -> None:
        assert_planted(planted(kind, processed=True), ("folded",))

    @pytest.mark.parametrize("n_kv_heads", [1, 4])
    def test_found_with_one_and_with_all_value_heads(self, n_kv_heads: int) -> None:
        weights = planted("llama", n_kv_heads=n_kv_heads, seed=3)
        assert weights.n_kv_heads == n_kv_heads
        assert_planted(weights, ("maps", "folded"))

    @needs_hooked
    @pytest.mark.parametrize("processed", [False, True])
    @pytest.mark.parametrize("kind", ["gpt2", "neox", "llama", "qwen3"])
    def test_found_in_hooked_transformers(self, kind: str, processed: bool) -> None:
        weights = planted(kind, host="hooked", processed=processed)
        assert_planted(weights, ("folded",) if processed else ("maps", "folded"))


def dense_map(parts: Anatomy, layer: int, head: int, circuit: str, preset: str) -> Tensor:
    """A head's whole map with plain torch, from the modules of the transformers model."""
    x, weights = parts.vectors(layer, preset), parts.heads(layer)
    group = head // (parts.n_heads // parts.n_kv_heads)
    ln1 = parts.part(layer, "ln1")
    if circuit == "ov":
        if preset == "folded" and getattr(ln1, "bias", None) is not None:
            # The constant part of the value is left out.
            x = x - ln1.bias
        return x @ weights.W_V[group] @ weights.W_O[head] @ parts.readout(layer, preset).T
    q, k = x @ weights.W_Q[head], x @ weights.W_K[group]
    if preset == "maps":
        return q @ k.T / parts.d_head**0.5
    if weights.b_Q is not None and weights.b_K is not None:
        q, k = q + weights.b_Q[head], k + weights.b_K[group]
    if parts.kind in ("gemma3", "qwen3"):
        attn = parts.part(layer, "attn")
        q, k = attn.q_norm(q), attn.k_norm(k)
    return q @ k.T * parts.score_scale(layer)


class TestAgainstDense:
    SOURCES = (3, 60, 17, 3, 29)
    TARGETS = (8, 5, 60, 0, 33, 8)

    @pytest.mark.parametrize("preset", ["maps", "folded"])
    @pytest.mark.parametrize("circuit", ["ov", "qk"])
    @pytest.mark.parametrize("kind", DECODERS)
    def test_values_and_ranks(self, kind: str, circuit: Any, preset: Any) -> None:
        weights = HeadWeights.from_model(shared_model(kind))
        parts = Anatomy(source_model(kind), kind)
        for layer, head in ((0, 1), (1, 3), (2, 2)):
            whole = dense_map(parts, layer, head, circuit, preset)[list(self.SOURCES)]
            options = {"circuit": circuit, "preset": preset}
            grid = token_grid(weights, (layer, head), self.SOURCES, self.TARGETS, **options)
            wanted = whole[:, list(self.TARGETS)]
            assert float((grid.values - wanted).abs().max()) < DENSE * float(whole.abs().max())
            ranks = (whole[:, None, :] > wanted[:, :, None]).sum(-1)
            gap = (whole[:, None, :] - wanted[:, :, None]).abs()
            certain = (gap > DENSE * whole.abs().max()).sum(-1) == len(whole[0]) - 1
            assert certain.float().mean() > 0.9
            assert torch.equal(grid.ranks[certain], ranks[certain])
            # A repeated row or column is the same row or column.
            assert torch.equal(grid.ranks[0], grid.ranks[3])
            assert torch.equal(grid.ranks[:, 0], grid.ranks[:, 5])

    @pytest.mark.parametrize("kind", ["gpt2", "gemma2", "gemma3"])
    @pytest.mark.parametrize("circuit", ["ov", "qk"])
    def test_processed_models_give_the_same_grid(self, kind: str, circuit: Any) -> None:
        parts = Anatomy(source_model(kind), kind)
        whole = dense_map(parts, 2, 3, circuit, "folded")[list(self.SOURCES)]
        grid = token_grid(
            shared_model(kind, processed=True), "L2H3", self.SOURCES, self.TARGETS, circuit=circuit, preset="folded"
        )
        wanted = whole[:, list(self.TARGETS)]
        assert float((grid.values - wanted).abs().max()) < 1e-4 * float(whole.abs().max())

    def test_scores_divided_by_the_layer(self) -> None:
        changes = {"scale_attn_by_inverse_layer_idx": True}
        parts = Anatomy(source_model("gpt2", **changes), "gpt2")
        grid = token_grid(shared_model("gpt2", **changes), "L2H0", [3, 4], [5, 6], circuit="qk", preset="folded")
        torch.testing.assert_close(grid.values, dense_map(parts, 2, 0, "qk", "folded")[3:5, 5:7])

    def test_folded_ov_is_the_direct_contribution_to_the_logits(self) -> None:
        """Independent of all the formulas: add a head's output to the stream and see the centred logits move."""
        source = source_model("gpt2")
        parts = Anatomy(source, "gpt2")
        grid = token_grid(shared_model("gpt2"), "L1H2", [9], list(range(61)), preset="folded")
        heads, ln1 = parts.heads(1), parts.part(1, "ln1")
        written = (parts.vectors(1, "folded")[9] - ln1.bias) @ heads.W_V[2] @ heads.W_O[2]
        # The final norm divides by a scale; linearise it at a fixed stream by dividing it out.
        stream = torch.randn(32, generator=torch.Generator().manual_seed(0)).double()
        source = source.double()

        def logits(x: Tensor) -> Tensor:
            scale = (x - x.mean()).pow(2).mean().add(parts.ln_final.eps).sqrt()
            return source.lm_head((parts.ln_final(x) - parts.ln_final.bias) * scale)

        moved = logits(stream + written.double()) - logits(stream)
        moved = (moved - moved.mean()).float()
        assert float((grid.values[0] - moved).abs().max()) < DENSE * float(moved.abs().max())


class TestTheResult:
    def test_labels_ids_and_provenance(self) -> None:
        model = shared_model("llama")
        grid = token_grid(model, "l2h3", ["word7", " word8", 9], (word(10), 1), preset="folded")
        assert grid.head == HeadIndex(2, 3)
        assert grid.sources == ("word7", " word8", " word9")
        assert grid.targets == ("word10", "-")
        assert (grid.source_ids, grid.target_ids) == ((7, 8, 9), (10, 1))
        assert grid.values.shape == grid.ranks.shape == (3, 2)
        assert (grid.circuit, grid.n_vocab) == ("ov", 61)
        assert grid.provenance.options == {"preset": "folded"}
        assert grid.provenance.basis == "raw"
        assert grid.provenance.fingerprint == HeadWeights.from_model(model).fingerprint

    @pytest.mark.parametrize("head", ["L2H3", "l2h3", " L2H3 ", (2, 3), [2, 3], HeadIndex(2, 3)])
    def test_ways_to_name_a_head(self, head: Any) -> None:
        assert token_grid(shared_model("llama"), head, [5], [6], preset="folded").head == HeadIndex(2, 3)

    def test_ids_need_no_tokenizer(self) -> None:
        grid = token_grid(random_model("llama", tokenizer=False), "L1H0", [4], [5, 6], preset="folded")
        assert grid.sources == ("#4",)
        assert grid.targets == ("#5", "#6")

    def test_keeps_no_graph(self) -> None:
        with torch.enable_grad():
            assert not token_grid(shared_model("llama"), "L1H0", [4], [5], preset="folded").values.requires_grad


NO_HEAD = "There is no head .*: the model has layers 0 to 2 with heads 0 to 3, so the last head is L2H3"
NO_NAME = "is not the name of a head. Heads are written like 'L23H4': layer 23, head 4, both counted from 0"
NO_WORDS = "must be a list of at least one word or token id, not"
OUTSIDE = "is outside the vocabulary: ids run from 0 to 60"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        *(({"head": head}, NO_HEAD) for head in ("L3H0", (0, 4), (-1, 0), "L99H99")),
        *(({"head": head}, NO_NAME) for head in ("23.4", "", "H3", "L2H3H4", "2,3")),
        *(({"head": head}, r"is not a head. Write 'L23H4' or \(23, 4\)") for head in ((1,), (1, 2, 3))),
        ({"sources": ["word4-"]}, r"'word4-' is 2 tokens .*\(' word4', '-'\)"),
        ({"sources": ["word4-"]}, "Choose a word that is a single token, or give the id of one of its pieces"),
        *(({"sources": [blank]}, r"is an empty word\. Give a word or a token id") for blank in ("", "  ")),
        *(({name: [n]}, f"Token id {n} {OUTSIDE}") for name in ("sources", "targets") for n in (-1, 61, 10**9)),
        ({"sources": ["zebra"]}, "'zebra'"),
        *(({name: words}, f"{name} {NO_WORDS}") for name in ("sources", "targets") for words in ([], (), "word4")),
    ],
)
def test_bad_input_is_refused_with_a_sentence(asked: dict[str, Any], sentence: str) -> None:
    given = {"head": "L1H0", "sources": ["word4"], "targets": ["word5"], "preset": "folded"}
    with pytest.raises((TokenError, UsageError), match=sentence):
        token_grid(shared_model("llama"), **{**given, **asked})


class TestModelsThatCannot:
    def test_model_without_tokenizer(self) -> None:
        model = random_model("llama", tokenizer=False)
        for sentence in (
            "The model has no tokenizer, so the word 'word4' has no token id",
            r"Load the model with its tokenizer, or give token ids \(integers\)",
        ):
            with pytest.raises(UsageError, match=sentence):
                token_grid(model, "L1H0", ["word4"], [5], preset="folded")

    def test_maps_on_a_processed_model(self) -> None:
        with pytest.raises(WeightBasisError, match=r"without enable_compatibility_mode\(\)"):
            token_grid(shared_model("gpt2", processed=True), "L1H0", [4], [5], preset="maps")

    def test_mixture_of_experts(self) -> None:
        model = shared_model("mixtral", n_layers=2)
        assert token_grid(model, "L0H3", [4], [5], preset="folded").values.shape == (1, 1)
        with pytest.raises(UnsupportedModelError, match="only layer 0 can be mapped from the weights alone"):
            token_grid(model, "L1H3", [4], [5], preset="folded")

    def test_a_tokenizer_of_another_model(self) -> None:
        weights = replace(HeadWeights.from_model(shared_model("llama")), tokenizer=word_tokenizer(100))
        with pytest.raises(TokenError, match="'word80' has id 80, but the model embeds only 61 tokens"):
            token_grid(weights, "L1H0", ["word80"], ["word5"], preset="folded")


def test_a_grid_says_which_relation_it_is_an_example_of_and_how_well_the_head_does() -> None:
    model = shared_model("llama")
    relation = Relation.from_pairs("next_word", [(word(3), word(4)), (word(5), word(6)), (word(7), word(8))], k=20)
    grid = token_grid(model, "L1H2", [word(3), word(5)], [word(4)], preset="folded", relation=relation)
    scored = relation_scores(model, relation, heads="L1H2", preset="folded", progress=False)
    assert grid.relation == "next_word" and grid.score_k == 20 and grid.score_pairs == 3
    assert grid.score == pytest.approx(float(scored.promote[0, 1, 2]))
    said = f"next_word: score {grid.score:.2f}, the share of 3 pairs whose target is among the 20 strongest"
    assert said in str(grid)
    one = replace(grid, score_k=1)
    assert "3 pairs whose target is the strongest token" in str(one)
    assert "is the strongest token ·" in one.figure().data.note
    figure = grid.figure()
    assert figure.title == "next word" and f"score {grid.score:.2g} · share of 3 pairs" in figure.body
    assert TokenGrid.from_dict(grid.to_dict()).to_dict() == grid.to_dict()


def test_one_colour_unless_negative_entries_matter() -> None:
    grid = token_grid(shared_model("llama"), "L1H2", [word(3)], [word(4), word(5)], preset="folded")
    for values, signed in (([[4.0, -0.5]], False), ([[4.0, -2.0]], True), ([[-1.0, -3.0]], True)):
        assert replace(grid, values=torch.tensor(values)).figure().data.layers[0].scale.signed is signed


def test_targets_of_several_tokens_are_taken_by_their_first_or_refused() -> None:
    model = shared_model("llama")
    first = token_grid(model, "L0H0", [word(3)], [f"{word(4)}-"], preset="folded", multi_token="first")
    assert first.target_ids == token_grid(model, "L0H0", [word(3)], [word(4)], preset="folded").target_ids
    with pytest.raises(TokenError, match="is 2 tokens"):
        token_grid(model, "L0H0", [word(3)], [f"{word(4)}-"], preset="folded")


@pytest.mark.model
def test_a_refused_word_comes_with_single_tokens_near_it(default_weights: HeadWeights) -> None:
    with pytest.raises(TokenError, match=r"'Tomas' is 2 tokens .* Single tokens near it: .*Thomas"):
        token_grid(default_weights, "L0H0", ["Tomas"], ["Paris"], preset="folded")
