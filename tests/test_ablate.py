"""Ablation: against forward passes with heads zeroed by hand, on planted heads, with random heads and controls."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import DECODERS, knowing_model, needs_hooked, random_model, shared_model, word
from torch import Tensor

import tl_headmaps
from tl_headmaps import AblationCurves, HeadIndex, Relation, ablate
from tl_headmaps.analyses.ablate import Ablation
from tl_headmaps.analyses.relation_scores import RelationScores
from tl_headmaps.analyses.study import Study
from tl_headmaps.capture.anatomy import parameters_digest
from tl_headmaps.capture.running import last_position
from tl_headmaps.capture.running.last_position import LastPosition
from tl_headmaps.core.errors import RelationDataError, UsageError
from tl_headmaps.scorers.ablation import answered, default_max_heads, masks_of, top_heads

CAPITALS = {3: 10, 4: 11, 5: 12, 6: 13}
NEXT = {14: 20, 15: 21, 16: 22, 17: 23}
TEMPLATE = " word18 <X>"
PROMPTS = [[5, 3, 7, 9], [4, 6, 8, 1], [3, 4], [9]]

HOSTS = [("bridge", kind) for kind in DECODERS] + [
    pytest.param("hooked", kind, marks=needs_hooked) for kind in DECODERS
]


def named(mapping: dict[int, int], name: str, **details: Any) -> Relation:
    pairs = [(word(s), word(t)) for s, t in mapping.items()]
    return Relation.from_pairs(name, pairs, **{"k": 1, "eliciting_templates": (TEMPLATE,)} | details)


def ablation_of(model: Any) -> Ablation:
    return Ablation(Study(model, prepend_bos=False, fills_prompts=True, preset="folded", progress=False))


CAPITAL, FOLLOW = named(CAPITALS, "capital"), named(NEXT, "follow")


@pytest.fixture(scope="module")
def knowing() -> Any:
    """Two heads of layer 0, of different key/value groups, shout the answers of a relation each."""
    return knowing_model({1: CAPITALS, 3: NEXT})


def measure(logits: Tensor, rows: Tensor) -> Tensor:
    """The likeliest token, its logit, and whose they are."""
    best = logits.max(-1)
    return torch.stack([best.indices.double(), best.values.double(), rows.double()], 1)


def masks(*sets: list[tuple[int, int]]) -> Tensor:
    return masks_of([[HeadIndex(*head) for head in heads] for heads in sets], 3, 4)


OFF = masks([(1, 2)], [(2, 0), (2, 3)], [(0, 1), (2, 1)], [(1, 0), (1, 1), (1, 2), (1, 3)])


class TestLastPosition:
    @pytest.mark.parametrize(("host", "kind"), HOSTS)
    def test_starting_behind_kept_keys_and_above_kept_layers_is_a_whole_pass(self, host: str, kind: str) -> None:
        """Sets that begin at different layers, prompts of different lengths, one of a single token."""
        model = shared_model(kind, host=host)
        last = LastPosition(model, PROMPTS, measure)
        assert last.continues and last.starts_later
        before = [vars(block).copy() for block in model.blocks]
        found = last.switched_off(OFF)
        assert all(vars(block).keys() == own.keys() for block, own in zip(model.blocks, before, strict=True))
        for mask, values in zip(OFF, found, strict=True):
            for row, ids in enumerate(PROMPTS):
                hooks = [(f"blocks.{i}.attn.hook_z", zeroing(mask[i])) for i in range(3)]
                logits = model.run_with_hooks(torch.tensor([ids]), fwd_hooks=hooks)[0, -1]
                assert values[row, 2] == row
                torch.testing.assert_close(values[row, 1], logits.max().double(), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(found[0, :, 1], last.clean[:, 1], atol=1e-3), "a test in which heads matter"
        assert last.clean[:, 0].tolist() == [int(model(torch.tensor([ids]))[0, -1].argmax()) for ids in PROMPTS]

    def test_sets_and_prompts_in_small_batches_give_the_same(self) -> None:
        model = shared_model("llama")
        whole, parts = (LastPosition(model, PROMPTS, measure, budget=size) for size in (1 << 28, 1))
        assert len(parts._batches) == len(PROMPTS)
        torch.testing.assert_close(parts.switched_off(OFF), whole.switched_off(OFF), rtol=1e-5, atol=1e-5)

    def test_the_layers_below_are_not_run(self) -> None:
        model = shared_model("llama")
        last = LastPosition(model, PROMPTS[:2], measure)
        assert last.starts_later
        seen: list[int] = []
        handles = [
            block.mlp.register_forward_hook(lambda *_, layer=layer: seen.append(layer))
            for layer, block in enumerate(model.blocks)
        ]
        try:
            last._measured(0, 2, OFF[1:2], {})
        finally:
            for handle in handles:
                handle.remove()
        assert seen == [2]

    def test_a_host_whose_cache_computes_something_else_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = shared_model("llama")
        expected = LastPosition(model, PROMPTS, measure).switched_off(OFF)
        monkeypatch.setattr(last_position.KeptPrefix, "run", lambda self, ids, n, wanted: self._model(ids))
        wrong = LastPosition(model, PROMPTS, measure)
        assert not wrong.continues and not wrong.starts_later
        torch.testing.assert_close(wrong.switched_off(OFF), expected, rtol=1e-4, atol=1e-4)

    def test_a_host_that_cannot_leave_out_layers_is_noticed(self) -> None:
        model = shared_model("llama")
        expected = LastPosition(model, PROMPTS, measure).switched_off(OFF)
        wrong = LastPosition(model, PROMPTS, measure)
        for past in wrong._pasts:
            if past is not None:
                kept = past._streams._kept
                kept.update({layer: 2 * stream + 1 for layer, stream in kept.items()})
        assert wrong.continues and not wrong.starts_later
        torch.testing.assert_close(wrong.switched_off(OFF), expected, rtol=1e-4, atol=1e-4)

    def test_too_much_to_keep_means_whole_passes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(last_position, "_CACHE_BYTES", 1)
        assert not LastPosition(shared_model("llama"), PROMPTS, measure).continues


def zeroing(off: Tensor) -> Any:
    def replace(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, -1, off] = 0.0
        return z

    return replace


def test_the_planted_head_is_the_one_that_knows(knowing: Any) -> None:
    result = ablate(knowing, CAPITAL, controls=[FOLLOW], n_random=3, max_heads=1, progress=False, preset="folded")
    assert result.status == "tested"
    assert result.heads == (HeadIndex(0, 1),) and result.scores == (1.0,)
    assert result.curve.accuracy.tolist() == [1.0, 0.0]
    assert (result.curve.drop, result.random_drop, result.control_drop) == (1.0, 0.0, 0.0)
    (control,) = result.controls
    assert (control.relation, control.overlap) == ("follow", 0.0)
    assert control.curve.accuracy.tolist() == [1.0, 1.0]
    # Wilson, four of four and none of four; no two pairs share anything.
    assert (float(result.curve.low[0]), float(result.curve.high[1])) == pytest.approx((0.5101, 0.4899), abs=1e-4)


class TestVerdict:
    def test_ranks_the_heads_that_implement_the_relation_among_all_sets_like_them(
        self, knowing: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One head of four implements it; layers of four have too few others, so all layers are pooled: 12 heads."""
        # Four pairs alone would not beat their null.
        monkeypatch.setattr(RelationScores, "implements", lambda self: {"capital": [HeadIndex(0, 1)]})
        result = ablate(knowing, CAPITAL, controls=None, max_heads=3, preset="folded", progress=False)
        verdict = result.verdict
        assert verdict is not None and (result.n_verdict, verdict.n_heads) == (1, 1)
        assert (verdict.accuracy, verdict.p_value) == (0.0, 1 / 12)
        assert verdict.exact and verdict.pooled == (HeadIndex(0, 1),)
        assert {head for heads in verdict.sets for head in heads} == {
            HeadIndex(layer, head) for layer in range(3) for head in range(4)
        } - {HeadIndex(0, 1)}
        assert verdict.set_accuracy.tolist() == [1.0] * 11
        assert "accuracy 1.00 → 0.00" in str(result)
        assert "11 other sets of as many heads of the same layers (all there are; and of layers near 0" in str(result)
        assert "p = 0.083: rank 1 of 12" in str(result) and "p = 0.083" in result.figure().html

    def test_is_about_all_heads_that_were_named(self, knowing: Any) -> None:
        result = ablate(
            knowing, CAPITAL, ["L0H0", "L0H1", "L1H2"], controls=None, n_random=7, progress=False, preset="folded"
        )
        assert result.verdict is not None and result.verdict.n_heads == 3 and len(result.verdict.sets) == 7
        assert not result.verdict.exact
        for heads in result.verdict.sets:
            assert sorted(head.layer for head in heads) == [0, 0, 1]
        # Sets that hold the head that knows lose as much: ranks count them.
        same = [HeadIndex(0, 1) in heads for heads in result.verdict.sets]
        assert result.verdict.p_value == (1 + sum(same)) / 8

    def test_accuracies_of_the_sets_are_those_of_whole_passes(self) -> None:
        model = shared_model("gpt2")
        relation = answered_by_half(model)
        result = ablate(
            model,
            relation,
            ["L1H3", "L2H0"],
            controls=None,
            n_random=4,
            prepend_bos=False,
            progress=False,
            preset="folded",
        )
        assert result.verdict is not None
        for heads, share in zip(result.verdict.sets, result.verdict.set_accuracy.tolist(), strict=True):
            assert share == pytest.approx(by_hand(model, relation, list(heads), False)[-1])

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"n_random": 0, "heads": ["L0H1"]}, "No verdict: no other heads were switched off"),
            ({"heads": [(i, j) for i in range(3) for j in range(4)], "n_random": 0}, "No verdict: no other heads"),
        ],
    )
    def test_says_why_there_is_none(self, knowing: Any, options: dict[str, Any], sentence: str) -> None:
        result = ablate(knowing, CAPITAL, controls=None, progress=False, **options)
        assert result.verdict is None and sentence in str(result) and sentence in result.figure().html

    def test_needs_heads_that_implement_the_relation(self, knowing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RelationScores, "implements", lambda self: {"capital": []})
        result = ablate(knowing, CAPITAL, controls=None, max_heads=2, progress=False, preset="folded")
        assert result.status == "tested" and result.verdict is None and result.n_verdict == 0
        assert "No verdict: no head implements the relation" in str(result)


class TestSplit:
    MAPPING = CAPITALS | {7: 8, 8: 9, 9: 7, 19: 20}

    def test_heads_are_chosen_on_pairs_they_are_not_tested_on(self) -> None:
        model = knowing_model({1: self.MAPPING})
        relation = named(self.MAPPING, "capital")
        result = ablate(model, relation, controls=None, split=True, max_heads=1, progress=False, preset="folded")
        assert (result.n_pairs, result.n_chosen_on) == (4, 4) and result.provenance.options["split"] is True
        assert result.heads == (HeadIndex(0, 1),) and result.curve.accuracy.tolist() == [1.0, 0.0]
        assert "4 pairs in 4 clusters, heads chosen on 4 others" in str(result)
        experiment = ablation_of(model)
        chosen, tested = experiment.halves(relation)
        assert sorted(chosen.pairs + tested.pairs) == sorted(relation.pairs)

    def test_needs_four_clusters(self, knowing: Any) -> None:
        three = named({3: 10, 4: 11, 5: 12, 6: 12}, "three")
        with pytest.raises(UsageError, match=r"at least 4 clusters of pairs to halve, but 'three' has 3.*Leave split"):
            ablate(knowing, three, controls=None, split=True, progress=False, preset="folded")


def test_the_logit_difference_is_to_the_mean_of_the_other_answers() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 9.0], [4.0, 1.0, 1.0, 0.0]])
    found = answered(logits, torch.tensor([1, 0]), torch.tensor([0, 1, 2]))
    assert found.tolist() == [[0.0, 5 - (1 + 2) / 2], [1.0, 4 - (1 + 1) / 2]]
    assert answered(logits, torch.tensor([3, 3]), torch.tensor([3]))[:, 1].isnan().all()


def test_a_relation_with_one_answer_has_no_logit_difference(knowing: Any, tmp_path: Path) -> None:
    result = ablate(
        knowing, named({3: 10}, "one"), ["L0H1"], controls=None, n_random=1, progress=False, preset="folded"
    )
    assert result.curve.logit_difference.isnan().all()
    values = json.loads(result.save(tmp_path / "a.json").read_text())
    assert values["logit_difference"] == [None, None] and values["verdict"]["logit_difference"] is None
    assert AblationCurves.load(tmp_path / "a.json") == result and "logits - → -" in str(result)


def answered_by_half(model: Any) -> Relation:
    """Targets are what a random model answers for half of the pairs: heads of every layer change some of them."""
    sources = range(20, 50)
    answers = [int(model(torch.tensor([[18, s]]))[0, -1].argmax()) for s in sources]
    pairs = [(word(s), word(max(a if s % 2 else s, 3))) for s, a in zip(sources, answers, strict=True)]
    return Relation.from_pairs("own", pairs, eliciting_templates=(TEMPLATE,))


def by_hand(model: Any, relation: Relation, heads: list[HeadIndex], mean: bool) -> list[float]:
    """Whole passes with hooks written out here; all prompts are two tokens long."""
    ids = [[int(str(name).removeprefix("word")) for name in pair] for pair in relation.pairs]
    prompts, targets = torch.tensor([[18, source] for source, _ in ids]), torch.tensor([target for _, target in ids])
    cache = model.run_with_cache(prompts)[1]
    steps = []
    for n in range(len(heads) + 1):
        hooks = []
        for layer in range(len(model.blocks)):
            off = [head.head for head in heads[:n] if head.layer == layer]
            clean = cache[f"blocks.{layer}.attn.hook_z"][:, -1]

            def replace(z: Tensor, hook: Any, off: list[int] = off, clean: Tensor = clean) -> Tensor:
                z = z.clone()
                z[:, -1, off] = clean[:, off].mean(0) if mean else 0.0
                return z

            hooks.append((f"blocks.{layer}.attn.hook_z", replace))
        logits = model.run_with_hooks(prompts, fwd_hooks=hooks)
        steps.append(float((logits[:, -1].argmax(-1) == targets).float().mean()))
    return steps


@pytest.mark.parametrize("method", ["zero", "mean"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_curves_are_those_of_whole_passes_with_heads_replaced_by_hand(kind: str, method: Any) -> None:
    model = shared_model(kind)
    relation = answered_by_half(model)
    heads = [HeadIndex(2, 1), HeadIndex(0, 0), HeadIndex(1, 3), HeadIndex(0, 2), HeadIndex(2, 0)]
    result = ablate(
        model,
        relation,
        heads,
        controls=None,
        n_random=2,
        method=method,
        prepend_bos=False,
        progress=False,
        preset="folded",
    )
    assert result.curve.accuracy.tolist() == pytest.approx(by_hand(model, relation, heads, method == "mean"))
    for drawn, curve in zip(result.random_heads, result.random_curves, strict=True):
        assert curve.accuracy.tolist() == pytest.approx(by_hand(model, relation, list(drawn), method == "mean"))
    assert len(set(result.curve.accuracy.tolist())) > 2, "a test in which heads matter"


def test_only_heads_above_zero_are_taken_best_first() -> None:
    scores = torch.tensor([[0.0, 0.2], [0.5, 0.2], [float("nan"), 0.0]])
    assert top_heads(scores, 10) == [HeadIndex(1, 0), HeadIndex(0, 1), HeadIndex(1, 1)]
    assert top_heads(scores, 1) == [HeadIndex(1, 0)]


@pytest.mark.parametrize(
    ("n_heads", "max_heads"),
    [(144, 30), (299, 30), (300, 50), (500, 100), (1000, 150), (1200, 150), (1500, 250), (9000, 250)],
)
def test_how_many_heads_follows_the_size_of_the_model(n_heads: int, max_heads: int) -> None:
    assert default_max_heads(n_heads) == max_heads


def test_nothing_known_is_not_testable_and_nothing_lost_is_not_a_number() -> None:
    model = shared_model("llama")
    answers = {s: int(model(torch.tensor([[18, s]]))[0, -1].argmax()) for s in range(20, 40)}
    relation = named({s: 3 if answer != 3 else 4 for s, answer in answers.items()}, "unknown")
    result = ablate(model, relation, prepend_bos=False, progress=False, preset="folded")
    assert result.status == "not testable" and result.heads == ()
    assert result.curve.accuracy.tolist() == [0.0]
    assert result.random_curves == () and result.controls == ()
    assert "not testable: accuracy 0.00 before" in str(result)
    assert math.isnan(result.curve.drop)


def test_a_relation_without_heads_is_said_to_have_none(knowing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = ablation_of(knowing)
    scored = experiment._scores([CAPITAL], None)
    zero = replace(scored, promote=torch.zeros_like(scored.promote))
    monkeypatch.setattr(experiment, "_scores", lambda *_: zero)
    questions = experiment.questions(CAPITAL, [TEMPLATE])
    result = experiment.curves(
        questions, chosen_on=CAPITAL, heads=None, max_heads=3, candidates=[], all_candidates=False, n_random=2
    )
    assert result.status == "no heads" and "nothing to ablate" in str(result)


class TestControls:
    def chosen(self, knowing: Any, own: list[str], static: dict[str, Tensor], others: list[Relation]) -> list[str]:
        experiment = ablation_of(knowing)
        result = experiment.curves(
            experiment.questions(CAPITAL, [TEMPLATE]),
            chosen_on=CAPITAL,
            heads=[HeadIndex.parse(head) for head in own],
            max_heads=4,
            candidates=others,
            all_candidates=False,
            n_random=0,
            static=static,
        )
        return [control.relation for control in result.controls]

    def test_are_relations_with_other_heads_and_as_much_knowledge(self, knowing: Any) -> None:
        own, none, shared = ["L0H1", "L1H2"], torch.zeros(3, 4), torch.zeros(3, 4)
        shared[1, 2] = 0.1
        wrong = named({s: 19 for s in NEXT}, "wrong")
        silent = Relation(name="silent", pairs=FOLLOW.pairs, k=1)
        same = named(NEXT, "same")
        static = {"follow": none, "wrong": none, "silent": none, "same": shared}
        assert self.chosen(knowing, own, static, [wrong, same, silent, FOLLOW]) == ["follow"]
        assert self.chosen(knowing, own, static | {"same": none}, [wrong, same, FOLLOW]) == ["same", "follow"]

    def test_are_the_first_three_that_fit(self, knowing: Any) -> None:
        one = torch.zeros(3, 4)
        one[1, 0] = 0.1
        others = [named(NEXT, name) for name in "abcde"]
        static = {"a": one} | {name: torch.zeros(3, 4) for name in "bcde"}
        assert self.chosen(knowing, ["L0H1", "L0H0", "L0H2", "L1H0"], static, others) == ["b", "c", "d"]

    def test_those_far_behind_are_not_even_scored(self, knowing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Meeting the sources of all bundled relations takes minutes in a large model."""
        scored = []

        def watched(experiment: Ablation, relations: list[Relation], heads: Any) -> Any:
            scored.extend(relation.name for relation in relations)
            return scores(experiment, relations, heads)

        scores = Ablation._scores
        monkeypatch.setattr(Ablation, "_scores", watched)
        others = [named(NEXT, name) for name in "abcdefghij"]
        assert self.chosen(knowing, ["L0H1"], {"a": torch.zeros(3, 4)}, others) == ["a", "b", "c"]
        assert scored == ["capital", *"bcdef"]

    def test_a_few_pairs_tell_whether_heads_are_shared(self, knowing: Any) -> None:
        experiment = ablation_of(knowing)
        many = Relation.from_pairs("many", [(word(i), word(j)) for i in range(3, 10) for j in range(10, 17)])
        sampled = experiment._sample(many).pairs
        assert len(sampled) == 20 and len(set(sampled)) == 20 and set(sampled) <= set(many.pairs)
        assert many.pairs.index(sampled[-1]) >= 40
        assert experiment._sample(CAPITAL).pairs == CAPITAL.pairs

    def test_scores_not_known_are_computed_for_the_ablated_heads(self, knowing: Any) -> None:
        """No static scores handed over: the planted head of the other relation is not this one's."""
        result = ablate(
            knowing, CAPITAL, ["L0H1"], controls=[FOLLOW, named(CAPITALS, "again")], progress=False, preset="folded"
        )
        assert {control.relation: control.overlap for control in result.controls} == {"follow": 0.0, "again": 1.0}


def test_automatic_controls_come_from_the_folder_of_relations(knowing: Any, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for relation in (CAPITAL, FOLLOW):
        content = {"name": relation.name, "k": 1, "pairs": relation.pairs, "templates": {"eliciting": [TEMPLATE]}}
        (folder / f"{relation.name}.json").write_text(json.dumps(content))
    result = ablate(knowing, "capital", ["L0H1"], data_dir=tmp_path, progress=False, preset="folded")
    assert [control.relation for control in result.controls] == ["follow"]
    data = result.provenance.data
    assert data.pop("parameters") == parameters_digest(knowing)
    assert data == {"capital": CAPITAL.digest, "follow": FOLLOW.digest}


def test_a_relation_is_asked_with_the_template_the_model_answers_best(knowing: Any) -> None:
    """Five tokens that are no source dilute what the heads say; a source of the other relation talks over it."""
    relation = named(CAPITALS, "capital", eliciting_templates=(" word16 <X> word16 word16", TEMPLATE, " word19 <X>"))
    result = ablate(knowing, relation, ["L0H1"], controls=None, n_random=0, progress=False, preset="folded")
    assert (result.template, result.base_accuracy) == (TEMPLATE, 1.0)
    first = ablate(
        knowing,
        relation,
        ["L0H1"],
        template=" word16 <X> word16 word16",
        controls=None,
        progress=False,
        preset="folded",
    )
    assert first.base_accuracy == 0.0


def test_json_has_curves_by_step(knowing: Any, tmp_path: Path) -> None:
    heads = ["L0H1", "L0H0", "L1H2"]
    result = ablate(knowing, CAPITAL, heads, controls=[FOLLOW], n_random=2, progress=False, preset="folded")
    values = json.loads(result.save(tmp_path / "a.json").read_text())
    assert values["heads"][0] == "L0H1"
    steps = len(values["heads"]) + 1
    assert values["n_ablated"] == list(range(steps))
    assert len(values["accuracy"]) == len(values["accuracy_low"]) == len(values["accuracy_high"]) == steps
    assert [len(curve) for curve in values["random_accuracy"]] == [steps, steps]
    assert len(values["logit_difference"]) == steps and len(values["verdict"]["sets"]) == 2
    assert list(values["control_accuracy"]) == ["follow"] and len(values["control_accuracy"]["follow"]) == steps
    assert len(list(result.to_rows())) == 4 * steps and AblationCurves.load(tmp_path / "a.json") == result


def test_the_model_is_left_as_found(knowing: Any) -> None:
    calls = []
    with knowing.hooks(fwd_hooks=[("blocks.0.attn.hook_z", lambda value, hook: calls.append(1))]):
        before = torch.get_rng_state()
        ablate(knowing, CAPITAL, max_heads=2, n_random=1, controls=None, progress=False, preset="folded")
        assert calls == [] and torch.equal(torch.get_rng_state(), before)
        knowing(torch.tensor([[1, 2]]))
        assert calls == [1]


BAD = [
    ({"relation": named(CAPITALS, "bare", eliciting_templates=())}, UsageError, "'bare' has no template.*--template"),
    ({"template": "The capital is"}, UsageError, "must contain <X> exactly once"),
    ({"heads": [(i, j) for i in range(3) for j in range(3)]}, UsageError, "9 heads .* only 3 others"),
    ({"controls": ["nothing_like_it"]}, RelationDataError, "There is no relation 'nothing_like_it'"),
    ({"template": " word18" * 40 + " <X>"}, UsageError, "has 42 tokens, but the model takes at most 32"),
]


@pytest.mark.parametrize(("changes", "error", "sentence"), BAD)
def test_bad_input_is_refused_with_a_sentence(
    knowing: Any, changes: dict[str, Any], error: type, sentence: str
) -> None:
    call = {"model": knowing, "relation": CAPITAL, "controls": None, "progress": False} | changes
    with pytest.raises(error, match=sentence):
        ablate(**call)


def test_a_model_without_a_tokenizer_is_asked_for_one() -> None:
    with pytest.raises(UsageError, match=r"has no tokenizer.*set model\.tokenizer"):
        ablate(random_model("llama", tokenizer=False), CAPITAL, preset="folded")


def test_command(run: Any, knowing: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tl_headmaps, "load_model", lambda *_: knowing)
    pairs, out = tmp_path / "pairs.csv", tmp_path / "a.json"
    pairs.write_text("source,target\n" + "\n".join(f"{word(s)},{word(t)}" for s, t in CAPITALS.items()))
    command = ("ablate", str(pairs), "--preset", "folded")
    refused = run(*command, "--controls", "none")
    assert refused.code == 2 and "'pairs' has no template whose next word is the target" in refused.err
    few = (*command, "--template", TEMPLATE, "--controls", "none", "--k", "1", "--n-random", "2")
    for options in (("--out", str(out)), ("--heads", "top")):
        done = run(*few, "--max-heads", "1", *options)
        assert done.code == 0 and "relative drop: relation 100%, random heads 0%" in done.out
    assert json.loads(out.read_text())["accuracy"] == [1.0, 0.0]
    assert "L2H1" in run(*few, "--heads", "L0H0,L2H1").out
    monkeypatch.setattr(tl_headmaps, "ablate", lambda **given: (given["heads"], given["controls"]))
    named = run(*command, "--template", TEMPLATE, "--controls", "auto", "--heads", "top")
    assert named.out == "('top', 'auto')\n", "what the help calls the default"


@pytest.mark.model
def test_default_model_loses_capitals_with_their_heads_and_not_with_others(default_model: Any) -> None:
    """A plain trial: 0.86 before, 0.38 after two heads, 0.02 after seven; heads of the same layers 0.79 to 0.90."""
    heads = ["L23H4", "L23H5", "L23H1", "L23H2", "L23H0", "L23H7", "L24H5"]
    result = ablate(
        default_model,
        "country_to_capital",
        heads,
        controls=None,
        n_random=39,
        preset="maps",
        prepend_bos=True,
        progress=False,
    )
    # Sets of the verdict may share most heads with the own one, so one of 39 may do as much.
    assert result.verdict is not None and result.verdict.p_value <= 2 / 40
    assert result.scores[:2] == pytest.approx((0.62, 0.55), abs=0.01) and min(result.scores) > 0
    accuracy = result.curve.accuracy
    assert float(accuracy[0]) == pytest.approx(0.86, abs=0.03)
    assert float(accuracy[2]) == pytest.approx(0.38, abs=0.05)
    assert float(accuracy[7]) < 0.05
    assert all(float(curve.accuracy[-1]) > 0.75 for curve in result.random_curves), "heads of the same layers"
