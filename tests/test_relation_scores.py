"""Relation scores: against dense references, on planted heads, across weight bases, and with an honest null."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planted import DECODERS, needs_hooked, planted_model, random_model, shared_model, word
from torch import Tensor

from tl_headmaps import HeadIndex, HeadWeights, Relation, relation_scores
from tl_headmaps.circuits.factored import FactorColumns, LayerMaps
from tl_headmaps.core.errors import RelationDataError, UsageError, WeightBasisError
from tl_headmaps.data.relations import encode
from tl_headmaps.scorers.likeness import alike_pairs
from tl_headmaps.scorers.relation import PairGroups, Pairs, score_layer
from tl_headmaps.scorers.statistics import (
    clustered_interval,
    permutation_tail,
    poisson_binomial_tail,
    q_values,
    wilson_interval,
)

N_VOCAB = 24
CAPITALS = {3: 10, 4: 11, 5: 12, 6: 13, 7: 14, 8: 15}
NEXT = {3: 4, 5: 6, 7: 8, 9: 10, 11: 12}


def named(mapping: dict[int, int], name: str = "planted", **details: Any) -> Relation:
    return Relation.from_pairs(name, [(word(s), word(t)) for s, t in mapping.items()], **details)


def dense_maps(model: Any, layer: int, head: int, ids: list[int]) -> Tensor:
    """The published formula to the letter, from the model's own modules."""
    block, first = model.blocks[layer], model.blocks[0]
    x = model.W_E[ids]
    if layer:
        out = first.mlp(first.ln2(x[None]))
        x = out[0]
    group = head // (block.attn.W_O.shape[0] // block.attn.W_V.shape[0])
    return x @ block.attn.W_V[group] @ block.attn.W_O[head] @ model.W_U


def dense_score(rows: Tensor, targets: list[int], k: int) -> tuple[float, float]:
    entry = rows.gather(1, torch.tensor(targets)[:, None])
    promote = ((rows > entry).sum(1) < k).float().mean()
    suppress = ((rows < entry).sum(1) < k).float().mean()
    return float(promote), float(suppress)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("preset", ["maps", "folded"])
def test_planted_heads_come_out_on_top(kind: str, preset: Any) -> None:
    # Six pairs each: the five of NEXT have 120 orders, too few to stand out among 24 heads and relations.
    following = {**NEXT, 13: 14}
    model = planted_model({(0, 1): CAPITALS, (2, 3): following}, kind=kind)
    relations = [
        Relation.from_pairs("capitals", list(CAPITALS.items()), k=1),
        Relation.from_pairs("next", list(following.items()), k=1),
    ]
    scores = relation_scores(model, relations, preset=preset)
    for name, head in (("capitals", HeadIndex(0, 1)), ("next", HeadIndex(2, 3))):
        best, runner_up = scores.top(2, name)
        assert best == (head, 1.0)
        assert runner_up[1] < 1.0
        assert scores.implements()[name][0] == head
        at = (scores.index_of(name), head.layer, head.head)
        assert scores.null_mean[at] == pytest.approx(1 / 6)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox", "qwen2"])
def test_maps_preset_equals_the_dense_formula(kind: str) -> None:
    model = shared_model(kind)
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randint(3, N_VOCAB, (40, 2), generator=generator).tolist()
    scores = relation_scores(model, Relation.from_pairs("random", pairs), preset="maps", k=4)
    sources, targets = zip(*pairs, strict=True)
    for layer in range(len(model.blocks)):
        for head in range(scores.promote.shape[2]):
            expected = dense_score(dense_maps(model, layer, head, list(sources)), list(targets), 4)
            found = float(scores.promote[0, layer, head]), float(scores.suppress[0, layer, head])
            assert found == pytest.approx(expected, abs=1 / 40 + 1e-6)


@pytest.mark.parametrize("kind", DECODERS)
def test_folded_preset_does_not_depend_on_the_basis(kind: str) -> None:
    pairs = [(s, t) for s in range(3, 20) for t in (s + 1, 23 - s)]
    relation = Relation.from_pairs("all", pairs)
    raw = relation_scores(shared_model(kind), relation, k=4, preset="folded")
    folded = relation_scores(shared_model(kind, processed=True), relation, k=4, preset="folded")
    assert raw.provenance.basis == "raw"
    assert folded.provenance.basis == "folded"
    tolerance = 1 / len(pairs) + 1e-6
    assert torch.allclose(raw.promote, folded.promote, rtol=0, atol=tolerance)
    assert torch.allclose(raw.suppress, folded.suppress, rtol=0, atol=tolerance)


@needs_hooked
@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox"])
@pytest.mark.parametrize("processed", [False, True])
def test_hooked_transformer_gives_the_same_scores(kind: str, processed: bool) -> None:
    pairs = [(s, t) for s in range(3, 20) for t in (s + 1, 23 - s)]
    relation = Relation.from_pairs("all", pairs)
    bridge = relation_scores(random_model(kind), relation, k=4, preset="folded")
    hooked = relation_scores(random_model(kind, host="hooked", processed=processed), relation, k=4, preset="folded")
    assert torch.allclose(bridge.promote, hooked.promote, rtol=0, atol=1 / len(pairs) + 1e-6)


def test_maps_preset_is_refused_on_folded_weights() -> None:
    with pytest.raises(WeightBasisError, match=r"needs raw weights.*or use preset='folded'"):
        relation_scores(shared_model("llama", processed=True), named(CAPITALS), preset="maps")


def test_qk_scores_equal_the_dense_formula() -> None:
    model = shared_model("llama")
    pairs = [(s, t) for s in range(3, 15) for t in (s + 2, 4)]
    scores = relation_scores(model, Relation.from_pairs("q", pairs), preset="maps", circuit="qk", k=3)
    first, block = model.blocks[0], model.blocks[1]
    x = first.mlp(first.ln2(model.W_E[None]))[0]
    share = block.attn.W_Q.shape[0] // block.attn.W_K.shape[0]
    for head in range(block.attn.W_Q.shape[0]):
        rows = x[[s for s, _ in pairs]] @ block.attn.W_Q[head] @ block.attn.W_K[head // share].T @ x.T
        expected = dense_score(rows, [t for _, t in pairs], 3)
        assert float(scores.promote[0, 1, head]) == pytest.approx(expected[0], abs=1 / len(pairs) + 1e-6)


def factor_maps(maps: Tensor) -> LayerMaps:
    """Maps given outright [head, row, column]: identity row factors, the entries as column factors."""
    n_heads, n_rows, _ = maps.shape
    return LayerMaps(
        heads=tuple(HeadIndex(0, head) for head in range(n_heads)),
        left=torch.eye(n_rows)[None],
        group=(0,) * n_heads,
        columns=FactorColumns(maps.transpose(1, 2).contiguous(), tuple(range(n_heads))),
        offset=torch.zeros(n_heads, n_rows),
    )


def one_relation(targets: Tensor, k: int) -> Pairs:
    n = len(targets)
    return Pairs(torch.arange(n), targets, torch.zeros(n, dtype=torch.int64), torch.tensor([k]))


def test_null_exposes_a_head_that_always_writes_the_four_pronouns() -> None:
    n_sources, n_vocab, pronouns = 60, 500, torch.tensor([7, 8, 9, 10])
    generator = torch.Generator().manual_seed(0)
    targets = pronouns[torch.arange(n_sources) % 4]
    always, really = torch.randn(2, n_sources, n_vocab, generator=generator)
    always[:, pronouns] += 20
    really[torch.arange(n_sources), targets] += 20
    promote, suppress = score_layer(factor_maps(torch.stack([always, really])), one_relation(targets, 4))
    assert promote.score[0].tolist() == [1.0, 1.0]
    assert promote.null_mean[0, 0] == 1.0
    assert promote.p_value[0, 0] == 1.0, "writing all pronouns always is no relation"
    assert promote.null_mean[0, 1] == pytest.approx(0.25, abs=0.05)
    assert promote.p_value[0, 1] < 1e-20
    assert float(suppress.score[0, 1]) < 0.1


@given(st.integers(0, 10_000), st.integers(2, 12), st.sampled_from([1, 2, 5]), st.booleans())
@pytest.mark.once
def test_null_mean_is_that_of_shuffled_targets(seed: int, n: int, k: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(1, n, 17, generator=generator)
    if ties:
        rows = rows.mul(2).round()
    targets = torch.randint(0, 6, (n,), generator=generator)
    promote, suppress = score_layer(factor_maps(rows), one_relation(targets, k))
    for scored, sign in ((promote, 1), (suppress, -1)):
        signed = rows[0] * sign
        hit = (signed[:, None, :] > signed[:, targets, None]).sum(-1) < k  # [source, target of a pair]
        assert float(scored.score[0, 0]) == pytest.approx(float(hit.diagonal().float().mean()))
        if scored.score[0, 0] == 0:
            assert scored.p_value[0, 0] == 1
        elif not ties:
            chances, own = hit.double().mean(1), int(hit.diagonal().sum())
            assert float(scored.null_mean[0, 0]) == pytest.approx(float(chances.mean()), abs=1e-6)
            if n < 10:
                expected = permutation_tail(hit.long().numpy())
            else:
                arrangements = math.factorial(n) / math.prod(map(math.factorial, targets.bincount().tolist()))
                expected = max(poisson_binomial_tail(chances.numpy(), own), 1 / arrangements)
            assert float(scored.p_value[0, 0]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("n", [3, 5, 9])
@pytest.mark.once
def test_few_pairs_have_the_p_value_of_all_orders(n: int) -> None:
    """A head that hits all pairs of a one-to-one relation: one order of n! does."""
    promote, _ = score_layer(factor_maps(torch.eye(n, 30)[None]), one_relation(torch.arange(n), 1))
    assert promote.score[0, 0] == 1
    assert float(promote.p_value[0, 0]) == pytest.approx(1 / math.factorial(n))


def test_no_p_value_is_smaller_than_that_of_one_arrangement() -> None:
    promote, _ = score_layer(factor_maps(torch.eye(12, 30)[None]), one_relation(torch.arange(12), 1))
    assert float(promote.p_value[0, 0]) == pytest.approx(1 / math.factorial(12)), "independent draws would say 12^-12"


@given(st.integers(0, 10_000), st.sampled_from([5, 14]))
@pytest.mark.once
def test_units_are_shuffled_as_one(seed: int, n_units: int) -> None:
    """Against the definition, written out: each unit keeps its lists and gets another unit's target."""
    generator = torch.Generator().manual_seed(seed)
    unit = torch.cat([torch.arange(n_units), torch.randint(0, n_units, (9,), generator=generator)]).sort().values
    targets = torch.randint(0, 6, (n_units,), generator=generator)
    rows = torch.randn(1, len(unit), 17, generator=generator)
    pairs = one_relation(targets[unit], 4)
    alike = PairGroups(unit, unit, torch.full_like(unit, -1))
    promote, _ = score_layer(factor_maps(rows), pairs, alike)
    hit = (rows[0][:, None, :] > rows[0][:, targets, None]).sum(-1) < 4  # [pair, target of a unit]
    by_unit = torch.zeros(n_units, n_units, dtype=torch.int64).index_add_(0, unit, hit.long())
    own = int(by_unit.diagonal().sum())
    assert float(promote.score[0, 0]) == pytest.approx(own / len(unit))
    if not own:
        assert promote.p_value[0, 0] == 1
        return
    assert float(promote.null_mean[0, 0]) == pytest.approx(float(by_unit.double().mean(1).sum()) / len(unit), abs=1e-6)
    if n_units < 10:
        tried = [
            sum(int(by_unit[c, d]) for c, d in enumerate(order)) >= own
            for order in itertools.permutations(range(n_units))
        ]
        expected = float(np.mean(tried))
    else:
        mass = np.ones(1)
        for row in by_unit.numpy():
            mass = np.convolve(mass, np.bincount(row) / n_units)
        expected = float(mass[own:].sum())
    assert float(promote.p_value[0, 0]) == pytest.approx(expected, rel=1e-5)
    low, high = clustered_interval(hit[torch.arange(len(unit)), unit], unit)
    assert float(promote.interval_low[0, 0]) == pytest.approx(float(low))
    assert float(promote.interval_high[0, 0]) == pytest.approx(float(high))


def test_a_head_that_writes_neighbours_is_told_from_one_that_knows() -> None:
    n, generator = 12, torch.Generator().manual_seed(0)
    targets = torch.arange(n)
    wrong = targets.roll(1)
    knows, writes = 0.1 * torch.randn(2, n, 40, generator=generator)
    knows[torch.arange(n), targets] += 5
    for written in (targets, wrong):
        writes[torch.arange(n), written] += 5
    alone = torch.arange(n)
    promote, _ = score_layer(
        factor_maps(torch.stack([knows, writes])), one_relation(targets, 2), PairGroups(alone, alone, wrong)
    )
    assert promote.score[0].tolist() == [1.0, 1.0]
    hits = (knows[:, None, :] > knows[alone, wrong][:, None, None]).sum(-1)[:, 0] < 2
    assert float(promote.neighbour[0, 0]) == pytest.approx(float(hits.float().mean()))
    assert promote.neighbour[0, 1] == 1 and promote.neighbour_p_value[0, 1] == 1
    n_differ = n - int(hits.sum())
    assert float(promote.neighbour_p_value[0, 0]) == pytest.approx(0.5**n_differ)


def test_alike_sources_are_forms_of_a_word_or_have_similar_embeddings() -> None:
    weights = HeadWeights.from_model(shared_model("llama"))
    embedding = torch.randn(len(weights.W_E), weights.d_model, generator=torch.Generator().manual_seed(1))
    embedding[4] = embedding[3] + 0.01  # alike, with the same target
    embedding[6] = embedding[5] + 0.01  # alike, with another target
    pairs = [(3, 20), (4, 20), (5, 20), (6, 21), (7, 21), (3, 22)]
    relation = Relation.from_pairs("ids", pairs)
    size = len(embedding)
    entry = encode(relation, None, n_sources=size, n_targets=size)
    alike = alike_pairs(replace(weights, W_E=embedding, embed_norm=None, embed_scale=1.0), [entry])
    unit = alike.unit.tolist()
    assert unit[0] == unit[1], "the same target and alike"
    assert unit[2] != unit[3], "alike with different targets"
    assert alike.neighbour[2] == 21 and alike.neighbour[3] == 20, "the neighbour's target"
    assert alike.neighbour[0] not in (20, 22), "a target that is right as well is not wrong"
    assert alike.cluster[0] == alike.cluster[1] == alike.cluster[2] != alike.cluster[3]


@pytest.mark.once
def test_p_value_is_close_to_that_of_real_shuffling() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(1, 30, 40, generator=generator)
    rows[0, :, :8] += torch.randn(30, 8, generator=generator)
    targets = torch.randint(0, 8, (30,), generator=generator)
    rows[0, torch.arange(30), targets] += 0.7
    promote, _ = score_layer(factor_maps(rows), one_relation(targets, 3))
    hit = (rows[0][:, None, :] > rows[0][:, targets, None]).sum(-1) < 3
    observed = int(hit.diagonal().sum())
    random = np.random.default_rng(0)
    shuffled = np.array([int(hit.numpy()[np.arange(30), random.permutation(30)].sum()) for _ in range(4000)])
    simulated = (shuffled >= observed).mean()
    assert shuffled.mean() / 30 == pytest.approx(float(promote.null_mean[0, 0]), abs=0.01)
    assert float(promote.p_value[0, 0]) == pytest.approx(simulated, abs=0.03)


@given(st.lists(st.floats(0, 1), max_size=9), st.integers(0, 9))
@pytest.mark.once
def test_poisson_binomial_tail_equals_enumeration(chances: list[float], hits: int) -> None:
    total = 0.0
    for outcome in range(2 ** len(chances)):
        bits = [outcome >> i & 1 for i in range(len(chances))]
        if sum(bits) >= hits:
            total += float(np.prod([c if bit else 1 - c for c, bit in zip(chances, bits, strict=True)]))
    assert poisson_binomial_tail(np.array(chances, dtype=np.float64), hits) == pytest.approx(min(total, 1.0))


def test_wilson_interval_and_q_values() -> None:
    from scipy.stats import binomtest, false_discovery_control

    low, high = wilson_interval(torch.tensor([0.0, 0.3, 1.0]), 20)
    for share, found in zip((0, 6, 20), zip(low.tolist(), high.tolist(), strict=True), strict=True):
        assert found == pytest.approx(tuple(binomtest(share, 20).proportion_ci(method="wilson")), abs=1e-6)
    p = torch.tensor([[0.01, float("nan")], [0.04, 0.03]])
    q = q_values(p)
    assert q[0, 1].isnan()
    assert q[~q.isnan()].tolist() == pytest.approx([0.03, 0.04, 0.04])
    many = torch.rand(3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 3
    many[0, :5] = many[1, :5]
    assert torch.equal(q_values(many), torch.from_numpy(false_discovery_control(many.flatten())).view(3, 40))
    assert q_values(torch.full((2,), float("nan"))).isnan().all()


@given(st.integers(0, 1000))
def test_score_grows_with_k_and_is_one_at_the_vocabulary(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    maps = factor_maps(torch.randn(2, 8, 11, generator=generator))
    targets = torch.randint(0, 11, (8,), generator=generator)
    scores = torch.stack([score_layer(maps, one_relation(targets, k))[0].score[0] for k in (1, 3, 7, 11)])
    assert bool((scores.diff(dim=0) >= 0).all())
    assert scores[-1].tolist() == [1.0, 1.0]


def test_exact_ranks_agree_with_the_scores() -> None:
    model = shared_model("llama")
    relations = [named(CAPITALS, "capitals", k=3), named(NEXT, "next", k=5)]
    scores = relation_scores(model, relations, ranks=True, preset="folded")
    plain = relation_scores(model, relations, preset="folded")
    assert plain.promote_ranks is None
    assert scores.promote_ranks is not None
    assert scores.suppress_ranks is not None
    for number, k in enumerate((3, 5)):
        assert torch.allclose((scores.promote_ranks[number] < k).float().mean(0), scores.promote[number])
        assert torch.allclose((scores.suppress_ranks[number] < k).float().mean(0), scores.suppress[number])
    assert torch.equal(scores.promote, plain.promote)
    assert torch.equal(scores.p_value, plain.p_value)


def test_sources_shared_by_relations_do_not_change_the_scores() -> None:
    model = shared_model("llama")
    relations = [named(CAPITALS, "a", k=3), named({s: 23 - s for s in CAPITALS}, "b", k=5), named(NEXT, "c", k=1)]
    together = relation_scores(model, relations, preset="folded")
    for relation in relations:
        alone = relation_scores(model, relation, preset="folded")
        for name in ("promote", "suppress", "null_mean", "p_value"):
            assert torch.equal(getattr(together.select(relation.name), name), getattr(alone, name))


def test_json_has_the_agreed_names(tmp_path: Path) -> None:
    model = shared_model("llama")
    scores = relation_scores(
        model, [named(CAPITALS, "capitals"), named(NEXT, "next")], heads=["L0H0", "L2H3"], ranks=True, preset="folded"
    )
    path = scores.save(tmp_path / "s.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["kind"] == "relation_scores"
    assert content["axes"] == {"relation": ["capitals", "next"], "layer": [0, 1, 2], "head": [0, 1, 2, 3]}
    assert content["k"] == [10, 10]
    assert content["n_pairs"] == [6, 5]
    assert content["n_kept"] == [6, 5]
    for name in ("promote", "suppress", "null_mean", "p_value", "q_value", "interval_low", "interval_high"):
        assert np.array(content[name], dtype=object).shape == (2, 3, 4)
        assert content[name][0][1][1] is None
        assert content[name][0][2][3] == pytest.approx(float(getattr(scores, name)[0, 2, 3]))
    assert content["provenance"]["options"]["preset"] == "folded"
    assert set(content["provenance"]["data"]) == {"capitals", "next"}
    table = scores.to_pandas()
    assert len(table) == 4
    assert set(table.columns) >= {"relation", "layer", "head", "promote", "null_mean", "q_value"}


def test_several_token_targets_are_counted_or_taken_by_their_first_token() -> None:
    model = shared_model("llama")
    relation = Relation.from_pairs("mixed", [(word(3), word(4)), (word(5), f"{word(6)}-"), (f"{word(3)}-", word(4))])
    skipped = relation_scores(model, relation, preset="folded")
    assert skipped.n_pairs == (3,)
    assert skipped.n_kept == (1,)
    assert [reason for _, _, reason in skipped.dropped[0]] == ["target is not one token", "source is not one token"]
    first = relation_scores(model, relation, multi_token="first", preset="folded")
    assert first.n_kept == (2,)


def test_repeated_pairs_count_as_given() -> None:
    model = shared_model("llama")
    once = relation_scores(model, Relation.from_pairs("r", [(3, 4), (5, 6)]), ranks=True, k=5, preset="folded")
    twice = relation_scores(
        model, Relation.from_pairs("r", [(3, 4), (5, 6), (3, 4), (3, 9)]), ranks=True, k=5, preset="folded"
    )
    assert once.promote_ranks is not None
    assert twice.promote_ranks is not None
    assert torch.equal(twice.promote_ranks[0][[0, 1]], once.promote_ranks[0])
    assert torch.equal(twice.promote_ranks[0][0], twice.promote_ranks[0][2])


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        ({"relations": []}, UsageError, "No relation was given"),
        ({"relations": "no_such_relation"}, RelationDataError, "There is no relation"),
        ({"relations": [named(CAPITALS), "no_such"]}, RelationDataError, "There is no relation 'no_such'"),
        ({"relations": [named(CAPITALS), named(NEXT)]}, UsageError, "'planted' was given twice"),
        ({"relations": Relation.from_pairs("x", [("France", "Paris")])}, RelationDataError, "No pair of 'x' can be"),
        ({"relations": named(CAPITALS), "k": 62}, UsageError, "k=62 is impossible"),
        ({"relations": named(CAPITALS), "heads": ["L9H0"]}, UsageError, "There is no head L9H0"),
        ({"relations": named(CAPITALS), "heads": []}, UsageError, "heads= is empty"),
    ],
)
def test_bad_calls_stop_before_the_long_work(
    call: dict[str, Any], error: type[Exception], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def long_work(*_: Any, **__: Any) -> None:
        raise AssertionError("the sweep started")

    monkeypatch.setattr("tl_headmaps.analyses.relation_scores.score_layer", long_work)
    with pytest.raises(error, match=sentence):
        relation_scores(shared_model("llama"), **call)


def test_asking_a_result_for_what_it_does_not_hold() -> None:
    scores = relation_scores(shared_model("llama"), [named(CAPITALS, "a"), named(NEXT, "b")], preset="folded")
    with pytest.raises(UsageError, match="holds 2 relations; name one of a, b"):
        scores.top(3)
    with pytest.raises(UsageError, match="no relation 'c'; it has a, b"):
        scores.top(3, "c")


@pytest.mark.model
@pytest.mark.once
def test_default_model_equals_the_dense_formula_on_pairs_of_a_user(default_weights: HeadWeights) -> None:
    """Pairs that are not bundled, layers at both ends and in the middle, every head, both directions."""
    words = "water fire earth stone gold silver red blue green king queen man woman dog cat bread milk sun moon star"
    pairs = [(a, b) for a, b in zip(words.split(), words.split()[1:], strict=False)]
    relation = Relation.from_pairs("neighbours", pairs)
    layers = (0, 1, 15, 29)
    heads = [(layer, head) for layer in layers for head in range(default_weights.n_heads)]
    scores = relation_scores(default_weights, relation, preset="maps", k=200, heads=heads, ranks=True)
    weights = default_weights
    ids = [weights.tokenizer.encode(f" {a}", add_special_tokens=False)[0] for a, _ in pairs]
    targets = [weights.tokenizer.encode(f" {b}", add_special_tokens=False)[0] for _, b in pairs]
    assert weights.mlp is not None and weights.ln2 is not None
    for layer, head in heads:
        x = weights.W_E[ids]
        if layer:
            x = weights.mlp(weights.ln2(x))
        read = weights.layer(layer)
        rows = x @ (read.W_V[head // 3] @ read.W_O[head]) @ weights.W_U.T
        promote, suppress = dense_score(rows, targets, 200)
        assert float(scores.promote[0, layer, head]) == pytest.approx(promote, abs=1 / len(pairs) + 1e-6)
        assert float(scores.suppress[0, layer, head]) == pytest.approx(suppress, abs=1 / len(pairs) + 1e-6)


@pytest.mark.model
@pytest.mark.once
def test_default_model_knows_capitals_and_names(default_weights: HeadWeights) -> None:
    heads = [f"L23H{head}" for head in range(9)]
    relations = ["country_to_capital", "name_copying"]
    maps = relation_scores(default_weights, relations, preset="maps", heads=heads)
    folded = relation_scores(default_weights, relations, heads=heads, preset="folded")
    for scores in (maps, folded):
        assert scores.top(1, "country_to_capital")[0][0] == HeadIndex(23, 4)
        assert scores.top(1, "name_copying")[0][0] == HeadIndex(23, 2)
        assert HeadIndex(23, 4) in scores.implements()["country_to_capital"]
        assert scores.null_mean[0, 23, 4] < 0.05
    assert maps.top(1, "country_to_capital")[0][1] == pytest.approx(0.62, abs=0.03)
    assert folded.top(1, "country_to_capital")[0][1] == pytest.approx(0.76, abs=0.03)
    assert maps.top(1, "name_copying")[0][1] == pytest.approx(0.83, abs=0.03)


def test_files_with_former_names_keep_their_numbers() -> None:
    scores = relation_scores(shared_model("llama"), named(NEXT), preset="folded", progress=False)
    known = replace(scores, multi_token=torch.full_like(scores.promote, 0.5), n_multi_token=(2,))
    old = {{"multi_token": "several", "n_multi_token": "n_several"}.get(k, k): v for k, v in known.to_dict().items()}
    assert type(scores).from_dict(old) == known
