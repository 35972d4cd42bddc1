"""Hybrid models: layers without heads are empty rows that say what they are, and all else is as in any model."""

import json
import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, booted, source
from hybrids import (
    D_HEAD,
    KINDS,
    N_GROUPS,
    N_HEADS,
    N_LAYERS,
    N_VOCAB,
    REFUSED,
    WITH_HEADS,
    Reference,
    hybrid_model,
    hybrid_source,
    refused_source,
)
from planted import TL_MAJOR, hosted, word

from tl_headmaps import (
    AttentionGroups,
    ContextVectors,
    HeadIndex,
    HeadWeights,
    Relation,
    Result,
    TaskItem,
    Tasks,
    ablate,
    association_heads,
    attention_groups,
    component_map,
    describe_model,
    grouping_profile,
    head_trust,
    name_heads,
    relation_scores,
    salient_operations,
    task_maps,
    token_grid,
    validate,
    value_mixing,
    verify_tasks,
)
from tl_headmaps.capture.parts import ParallelMixer
from tl_headmaps.capture.running.head_features import capture_head_features
from tl_headmaps.core.errors import UnsupportedModelError, UsageError, WeightBasisError
from tl_headmaps.scorers.statistics import q_values

ROUNDING = 2e-5
"""Largest difference to the modules of transformers, relative to the largest entry: another order of float32 sums."""

EMPTY = [layer for layer in range(N_LAYERS) if layer not in WITH_HEADS]
PAIRS = [(word(5 + i), word(25 + i)) for i in range(20)]
TOY = Relation.from_pairs("toy", PAIRS, neutral_templates=("some <X> and",), eliciting_templates=("some <X> and",))
TEXT = " ".join(word(i) for i in (7, 12, 7, 30, 12, 9))

everywhere = pytest.mark.parametrize("kind", list(KINDS))
"""Every hybrid architecture."""

mixed = pytest.mark.parametrize("kind", [kind for kind in ("lfm2", "qwen3_5", "bamba") if kind in KINDS])
"""A convolution, a gated architecture and one that keeps states: what runs the model is the same for the others."""


def relative(ours: Any, theirs: Any) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def refused_if_gated(kind: str) -> AbstractContextManager[Any]:
    """Analyses of running heads need outputs that are pattern times values, without a gate."""
    return pytest.raises(UnsupportedModelError, match="up to a gate") if KINDS[kind].gated else nullcontext()


def is_empty(maps: Any) -> bool:
    """Whether a map [..., layer, head] has values in the layers with heads and in no other."""
    return bool(maps[..., EMPTY, :].isnan().all()) and not bool(maps[..., list(WITH_HEADS), :].isnan().any())


@everywhere
class TestWeights:
    def test_the_host_computes_what_the_reference_computes(self, kind: str) -> None:
        ids = [7, 12, 30, 9, 41]
        logits, _ = Reference(kind).run(ids)
        assert relative(hybrid_model(kind)(torch.tensor([ids]))[0], logits) < ROUNDING

    def test_layers_without_heads_say_what_they_are(self, kind: str) -> None:
        weights = HeadWeights.from_model(hybrid_model(kind))
        assert weights.mixers == {layer: KINDS[kind].mixer for layer in EMPTY}
        assert weights.layers_with_heads == list(WITH_HEADS)
        assert weights.n_all_heads == len(weights.chosen_heads()) == 2 * N_HEADS
        assert weights.gated == KINDS[kind].gated

    @pytest.mark.parametrize("circuit", ["ov", "qk"])
    def test_maps_are_those_of_the_modules(self, kind: str, circuit: Any) -> None:
        reference, weights = Reference(kind), HeadWeights.from_model(hybrid_model(kind))
        everything = list(range(N_VOCAB))
        for layer in WITH_HEADS:
            for head in (0, 3):
                grid = token_grid(weights, (layer, head), everything, everything, circuit=circuit, preset="folded")
                theirs = (
                    reference.ov(layer, head, reference.vectors(layer))
                    if circuit == "ov"
                    else reference.qk(layer, head)
                )
                assert relative(grid.values, theirs) < ROUNDING

    def test_relation_scores_are_dense_ranks_and_tests_count_heads_that_exist(self, kind: str) -> None:
        reference = Reference(kind)
        scores = relation_scores(hybrid_model(kind), TOY, k=10, progress=False, preset="folded")
        for layer in WITH_HEADS:
            for head in range(N_HEADS):
                rows = reference.ov(layer, head, reference.vectors(layer))[5:25]
                targets = rows.gather(1, torch.arange(25, 45)[:, None])
                share = ((rows > targets).sum(1) < 10).float().mean()
                assert float(scores.promote[0, layer, head]) == pytest.approx(float(share))
        assert is_empty(scores.promote) and is_empty(scores.q_value) and is_empty(scores.interval_low)
        tested = scores.p_value[:, list(WITH_HEADS)]
        assert torch.equal(scores.q_value[:, list(WITH_HEADS)], q_values(tested))
        assert {head.layer for head, _ in scores.top(100)} == set(WITH_HEADS)
        assert len(scores.top(100)) == len(list(scores.to_rows())) == 2 * N_HEADS
        assert all(head.layer in WITH_HEADS for head in scores.implements(0.0, 1.1)["toy"])

    def test_processed_weights_give_the_same_maps(self, kind: str) -> None:
        raw = HeadWeights.from_model(hybrid_model(kind))
        with warnings.catch_warnings():
            # TransformerLens says so where it does not fold norms.
            warnings.filterwarnings("ignore", message=".* does not support .*", category=UserWarning)
            processed = HeadWeights.from_model(hosted(hybrid_source(kind), kind, processed=True))
        assert processed.mixers == raw.mixers
        for circuit in ("ov", "qk"):
            for layer in WITH_HEADS:
                ours, theirs = (
                    token_grid(
                        weights,
                        (layer, 2),
                        list(range(N_VOCAB)),
                        list(range(N_VOCAB)),
                        circuit=circuit,
                        preset="folded",
                    ).values
                    for weights in (processed, raw)
                )
                assert relative(ours, theirs) < ROUNDING


class TestRefusals:
    def test_a_first_mlp_of_experts_leaves_met_vectors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TL_HEADMAPS_CACHE", str(tmp_path))
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 0}
        model = hosted(hybrid_source("jamba", **experts), "jamba")
        sentence = "Layers above 0 read the output of the first MLP, so no layer that has heads can be mapped from the "
        for call in (
            lambda: relation_scores(model, TOY, progress=False, preset="folded"),
            lambda: token_grid(model, "L1H0", [5], [6], preset="folded"),
            lambda: validate(model, TOY, progress=False, preset="folded"),
        ):
            with pytest.raises(UnsupportedModelError, match=sentence):
                call()
        context = relation_scores(model, TOY, preset="context", prompts=f" {word(40)}", progress=False)
        assert is_empty(context.promote)
        assert "no layer" in describe_model(model).facts["analyses"]

    def test_processed_weights_of_heads_with_mamba_beside_them(self) -> None:
        row = next(row for row in ARCHITECTURES if row.name == "falcon_h1")
        # With fewer keys than queries TransformerLens does not get that far.
        row = replace(row, changes={**row.changes, "num_key_value_heads": 4})
        with pytest.raises(WeightBasisError, match=r"it has Mamba beside its heads: processing then changes what"):
            HeadWeights.from_model(booted(row, processed=True))

    @pytest.mark.parametrize("kind", list(REFUSED))
    def test_heads_that_the_host_does_not_show(self, kind: str) -> None:
        model = hosted(refused_source(kind), kind)
        with pytest.raises(UnsupportedModelError, match=REFUSED[kind].sentence):
            relation_scores(model, TOY, progress=False, preset="folded")
        with pytest.raises(UnsupportedModelError):
            relation_scores(model, TOY, preset="context", prompts=f" {word(40)}", progress=False)


@pytest.mark.skipif(TL_MAJOR < 4, reason="TransformerLens 3 has no Falcon-H1; run make test")
class TestBesideTheHeads:
    """Falcon-H1: Mamba beside attention in every layer, and factors of what both give back."""

    def test_the_factors_are_found_and_checked(self) -> None:
        weights = HeadWeights.from_model(_falcon_h1())
        assert weights.beside == ParallelMixer("Mamba", 0.9, 0.6) and weights.mixers == {}
        assert (weights.residual_scale, weights.mlp_scale, weights.embed_scale, weights.logit_scale) == (
            0.6,
            0.3,
            3,
            0.5,
        )
        assert weights.check is not None
        assert str(weights.check["stream"]) == "fits with what Mamba adds beside the heads"
        assert describe_model(weights).facts["beside the heads"] == "Mamba, in every layer"
        for wrong in (replace(weights.beside, scale=0.909), replace(weights.beside, attention_scale=0.606)):
            check = replace(weights, beside=wrong).check
            assert check is not None and not check["stream"].fits

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_in_half_precision_too(self, dtype: torch.dtype) -> None:
        weights = HeadWeights.from_model(hosted(source(_FALCON_H1).to(dtype), "falcon_h1"))
        assert weights.beside == ParallelMixer("Mamba", 0.9, 0.6) and weights.mlp_refusal is None
        assert weights.check is not None and all(seam.fits for seam in weights.check.seams), weights.check.record()


_FALCON_H1 = next(row for row in ARCHITECTURES if row.name == "falcon_h1")


@cache
def _falcon_h1() -> Any:
    return booted(_FALCON_H1)


@mixed
class TestWhatUsersSee:
    def test_a_head_of_a_layer_without_heads_is_refused(self, kind: str) -> None:
        sentence = (
            rf"Layer 2 of 'tiny-{kind}' has no heads: its tokens are mixed by {KINDS[kind].mixer}. Choose a layer"
        )
        model = hybrid_model(kind)
        for call in (
            lambda: token_grid(model, "L2H1", [5], [6], preset="folded"),
            lambda: relation_scores(model, TOY, heads="L2H1", preset="folded"),
            lambda: value_mixing(model, TEXT, "L2H1"),
            lambda: attention_groups(model, TEXT, layers=[2]),
            lambda: ablate(model, TOY, ["L2H1"], preset="folded"),
            lambda: HeadWeights.from_model(model).layer(2),
        ):
            with pytest.raises(UsageError, match=sentence + " with heads: 1, 3."):
                call()
        with pytest.raises(UsageError, match="There is no head L4H0: the model has layers 0 to 3"):
            token_grid(model, "L4H0", [5], [6], preset="folded")

    def test_results_print_save_and_load(self, kind: str, tmp_path: Path) -> None:
        scores = relation_scores(hybrid_model(kind), TOY, progress=False, preset="folded")
        for suffix in ("json", "safetensors"):
            assert Result.load(scores.save(tmp_path / f"scores.{suffix}")) == scores
        stored = json.loads((tmp_path / "scores.json").read_text())
        assert stored["promote"][0][0] == [None] * N_HEADS
        assert stored["provenance"]["mixers"] == {"0": KINDS[kind].mixer, "2": KINDS[kind].mixer}
        page = scores.save(tmp_path / "scores.html").read_text()
        assert page.count(">" + KINDS[kind].mixer[:6]) >= 2 and page.count('data-key="empty"') >= 2
        assert '"lengths":[0,4,0,4]' in page
        assert f"4 layers by 4 heads ({KINDS[kind].mixer} in layers 0, 2)" in str(scores.figure())
        assert "missing" not in str(scores.figure())
        panels = scores.figure(side_by_side=True)
        assert panels.data.lengths == (0, 4, 0, 4)

    def test_a_gate_is_said_in_the_result(self, kind: str) -> None:
        model, gated = hybrid_model(kind), KINDS[kind].gated
        scores = relation_scores(model, TOY, progress=False, preset="folded")
        names = name_heads(model, progress=False)
        grid = token_grid(model, "L1H0", [5], [6], preset="folded")
        for result in (scores, names, grid, salient_operations(model, "L1H0", progress=False)):
            assert ("right only up to it" in str(result)) == gated
            assert len(result.provenance.notes) == gated
        for result in (scores, names, grid):
            assert ("right only up to it" in result.figure().body) == gated
        assert ("note" in describe_model(model).facts) == gated
        assert ("notes" in scores.to_dict()["provenance"]) == gated

    def test_the_model_is_described(self, kind: str) -> None:
        facts = describe_model(hybrid_model(kind)).facts
        assert facts["layers"] == f"4 (2 with heads, 2 with {KINDS[kind].mixer}; heads in 1, 3)"
        assert facts["heads"] == "4 per layer that has any, 8 in all"

    def test_names_are_those_of_heads_that_exist(self, kind: str, tmp_path: Path) -> None:
        model = hybrid_model(kind)
        names = name_heads(model, progress=False)
        assert [len(row) for row in names.names] == [0, N_HEADS, 0, N_HEADS]
        assert is_empty(names.values)
        assert Result.load(names.save(tmp_path / "names.json")) == names
        assert len(list(names.to_rows())) == 2 * N_HEADS and names.figure().data.lengths == (0, 4, 0, 4)
        with pytest.raises(
            UsageError, match=f"There is no head L0H1: the tokens of layer 0 are mixed by {KINDS[kind].mixer}"
        ):
            names.name("L0H1")
        operations = salient_operations(model, progress=False)
        reference = Reference(kind)
        for number, head in enumerate(operations.heads):
            rows = reference.ov(head.layer, head.head, reference.vectors(head.layer))[operations.token_ids[number]]
            expected = rows.topk(operations.promoted_values.shape[-1]).values
            assert relative(operations.promoted_values[number], expected) < ROUNDING
        assert [entry for row in names.names for entry in row] == list(operations.names)
        assert operations.figure(view="map").data.lengths == (0, 4, 0, 4)


@mixed
class TestRunning:
    def test_value_mixing(self, kind: str) -> None:
        model = hybrid_model(kind)
        ids = [7, 12, 7, 30, 12, 9]
        _, seen = Reference(kind).run(ids)
        for layer in WITH_HEADS:
            mixing = value_mixing(model, ids, (layer, 2))
            assert relative(mixing.pattern, seen["pattern", layer][2]) < ROUNDING
            assert relative(mixing.value_vectors, seen["v", layer][:, 1]) < ROUNDING
            assert mixing.reconstruction_error < 1e-4
        assert ("A V times the gate" in str(mixing)) == KINDS[kind].gated
        _, cache = model.run_with_cache(torch.tensor([ids]))
        assert torch.equal(value_mixing(model, ids, (3, 2), cache=cache).pattern, mixing.pattern)

    def test_association_heads_and_groups(self, kind: str) -> None:
        model = hybrid_model(kind)
        with refused_if_gated(kind):
            heads = association_heads(model, TEXT, 3, 1)
            assert is_empty(heads.attention) and is_empty(heads.values)
        groups = attention_groups(model, TEXT)
        assert {head.layer for head in groups.heads} == set(WITH_HEADS) and len(groups.heads) == 2 * N_HEADS
        profile = grouping_profile(model, [TEXT, TEXT[::-1].replace("drow", "word") + " " + TEXT], progress=False)
        assert is_empty(profile.head_map("previous_token"))
        assert profile.figure().data.lengths == (0, 4, 0, 4)

    def test_groups_profiles_and_task_maps_read_what_the_modules_compute(self, kind: str, tmp_path: Path) -> None:
        model, ids = hybrid_model(kind), [7, 12, 7, 30, 12, 9]
        _, seen = Reference(kind).run(ids)
        patterns = torch.cat([seen["pattern", layer] for layer in WITH_HEADS])
        groups, bare = attention_groups(model, ids), AttentionGroups.from_pattern(patterns)
        assert (groups.groups, groups.head_groups) == (bare.groups, bare.head_groups)
        assert relative(groups.weights, bare.weights) < ROUNDING
        profile = grouping_profile(model, [f" {TEXT}"], prepend_bos=False, progress=False)
        previous = profile.head_map("previous_token")[list(WITH_HEADS)].flatten()
        assert relative(previous, patterns.diagonal(-1, 1, 2).mean(-1)) < ROUNDING
        features = capture_head_features(model, [ids], [(4, 6)], parameters="", cache_dir=tmp_path)
        assert tuple(features.layers) == tuple(WITH_HEADS)
        for layer in WITH_HEADS:
            assert relative(features.layer(layer)[0], seen["z", layer][4:6].mean(0).flatten()) < ROUNDING

    def test_validate(self, kind: str) -> None:
        model, reference = hybrid_model(kind), Reference(kind)
        if KINDS[kind].gated:
            with refused_if_gated(kind):
                validate(model, TOY, k=10, prepend_bos=False, progress=False, preset="folded")
            return
        validation = validate(model, TOY, k=10, prepend_bos=False, progress=False, preset="folded")
        scores = relation_scores(model, TOY, k=10, progress=False, preset="folded")
        assert torch.equal(validation.static_promote.nan_to_num(), scores.promote.nan_to_num())
        hits = torch.zeros(2, len(PAIRS), N_LAYERS, N_HEADS)
        readout = (reference.unembed * reference.final).T
        for number in range(len(PAIRS)):
            ids = model.tokenizer.encode(f"some {PAIRS[number][0]} and", add_special_tokens=False)
            place, target = ids.index(5 + number), 25 + number
            _, seen = reference.run(ids)
            for layer in WITH_HEADS:
                for head in range(N_HEADS):
                    z = (seen["v", layer][place, head // 2], seen["z", layer][-1, head])
                    for context, vector in enumerate(z):
                        row = reference.written(layer, head, vector) @ readout
                        hits[context, number, layer, head] = float((row > row[target]).sum() < 10)
        means = hits.mean(1)[:, list(WITH_HEADS)]
        assert relative(validation.promote_without[0, 0, list(WITH_HEADS)], means[0]) < 1e-6
        assert relative(validation.promote_with[0, 0, list(WITH_HEADS)], means[1]) < 1e-6
        assert is_empty(validation.promote_with) and is_empty(validation.static_suppress)
        assert not math.isnan(validation.mean("pearson_without"))
        assert validation.figure() is not None and len(list(validation.to_rows())) == 2 * N_HEADS

    def test_ablate(self, kind: str) -> None:
        model, reference = hybrid_model(kind), Reference(kind)
        prompts = [model.tokenizer.encode(f"some {word(i)} and", add_special_tokens=False) for i in range(5, 25)]
        # Targets are what the model answers, for half of the pairs what it answers without two heads.
        off = [(3, 1), (1, 2), (3, 0)]
        answers = [reference.next_without(ids, off[:2] if row % 2 else []) for row, ids in enumerate(prompts)]
        kept = [(row, answer) for row, answer in enumerate(answers) if answer > 2]
        relation = Relation.from_pairs(
            "answers", [(word(5 + row), word(answer)) for row, answer in kept], eliciting_templates=("some <X> and",)
        )
        curves = ablate(
            model, relation, off, controls=None, n_random=3, prepend_bos=False, progress=False, preset="folded"
        )
        for n in range(4):
            right = [reference.next_without(prompts[row], off[:n]) == answer for row, answer in kept]
            assert float(curves.values[n]) == pytest.approx(sum(right) / len(right))
        drawn = {head for heads in curves.random_heads for head in heads}
        assert {head.layer for head in drawn} <= set(WITH_HEADS) and not drawn & {HeadIndex(*head) for head in off}

    def test_met_vectors_are_what_layers_read(self, kind: str, tmp_path: Path) -> None:
        model, reference = hybrid_model(kind), Reference(kind)
        prefixes = [word(40), f"{word(41)} {word(42)}"]
        vectors = ContextVectors.of(
            model,
            [(5,), (6,), (7,)],
            [" " + p for p in prefixes],
            prepend_bos=False,
            cache_dir=tmp_path,
            progress=False,
        )
        for layer in WITH_HEADS:
            for row, token in enumerate((5, 6, 7)):
                streams = [reference.run([*ids, token])[1]["stream", layer][-1] for ids in ([40], [41, 42])]
                normed = [x * torch.rsqrt(x.square().mean() + 1e-5) for x in streams]
                assert relative(vectors.layer(layer)[row], torch.stack(normed).mean(0)) < 1e-3
        scores = relation_scores(model, TOY, preset="context", prompts=[" " + p for p in prefixes], progress=False)
        assert is_empty(scores.promote)
        assert scores.stream is not None and bool(scores.stream[:, EMPTY].isnan().all())
        assert scores.figure() is not None and "stream" in str(scores)

    def test_head_trust(self, kind: str, tmp_path: Path) -> None:
        texts = [" ".join(word(3 + (7 * n + 5 * i * i) % 50) for i in range(9)) for n in range(9)]
        options: dict[str, Any] = {"prompts": [" " + word(40)], "n_null": 1, "cache_dir": str(tmp_path)}
        if KINDS[kind].gated:
            with refused_if_gated(kind):
                head_trust(hybrid_model(kind), texts, **options, progress=False)
            return
        trust = head_trust(hybrid_model(kind), texts, **options, progress=False)
        assert is_empty(trust.token_share["context"]) and is_empty(trust.token_share["folded"])
        assert bool(trust.sink_share[EMPTY].isnan().all())
        assert Result.load(trust.save(tmp_path / "trust.json")) == trust
        assert trust.n_tokens == sum(len(text.split()) for text in texts[6:]) + trust.n_documents * int(
            trust.provenance.options["prepend_bos"]
        )

    def test_component_maps(self, kind: str) -> None:
        model, reference = hybrid_model(kind), Reference(kind)
        whole = component_map(model, "frobenius", progress=False)
        heads = component_map(model, "frobenius", by_head=True, progress=False)
        for index, name in enumerate(whole.components):
            attention = name.startswith("attn")
            assert whole.values[:, index].isnan().tolist() == [
                attention and layer in EMPTY for layer in range(N_LAYERS)
            ]
        assert bool(heads.values[:, EMPTY].isnan().all())
        for layer in WITH_HEADS:
            value = reference.attention(layer).v_proj.weight
            assert float(whole.values[layer, whole.components.index("attn.v")]) == pytest.approx(float(value.norm()))
            parts = value.unflatten(0, (N_GROUPS, D_HEAD)).flatten(1).norm(dim=1)
            assert relative(heads.of("attn.v")[layer], parts) < ROUNDING
        assert heads.figure().data.lengths == (0, 4, 0, 4)
        for metric in ("sensitivity", "gradient_ratio"):
            found = component_map(model, metric, [TEXT, TEXT], progress=False).values[EMPTY]
            assert bool(found[:, :4].isnan().all()) and not bool(found[:, 4:].isnan().any())
            assert not bool(component_map(model, metric, [TEXT], progress=False).values[list(WITH_HEADS)].isnan().any())
            by_head = component_map(model, metric, [TEXT, TEXT], by_head=True, progress=False)
            assert bool(by_head.values[:, EMPTY].isnan().all()) and is_empty(by_head.values[[0, 3]])

    def test_task_maps(self, kind: str, tmp_path: Path) -> None:
        model = hybrid_model(kind)
        # The same words in another order, so that words do not tell the functions apart.
        orders = {"math_calculation": " {0} word50 word51", "retrieval": " word51 word50 {0}"}
        items = [
            TaskItem(order.format(word(5 + n)), word(20 + n), function, "", (word(40),), "", str(n))
            for function, order in orders.items()
            for n in range(10)
        ]
        tasks = Tasks(tuple(items))
        maps = task_maps(model, tasks, n_folds=3, n_null=1, cache_dir=str(tmp_path), progress=False)
        assert is_empty(maps.importance) and is_empty(maps.fold_importance) and is_empty(maps.null_mean)
        assert maps.importance_normalised.nansum((1, 2)).tolist() == pytest.approx([1.0, 1.0])
        assert {head.layer for heads in maps.standing_out for head in heads} <= set(WITH_HEADS)
        assert Result.load(maps.save(tmp_path / "maps.json")) == maps
        assert maps.figure().data.lengths == (0, 4, 0, 4) and maps.figure(stability=True) is not None
        verified = verify_tasks(model, maps, tasks, n_items=4, n_random=2, max_heads=2, progress=False)
        assert verified.n_items == (4, 4)
