"""Ablation: against forward passes with heads zeroed by hand, on planted heads, with random heads and controls."""

import inspect
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import DECODERS, knowing_model, needs_hooked, random_model, shared_model, word
from torch import Tensor

import tl_headmaps
from tl_headmaps import AblationCurves, HeadIndex, HeadWeights, Relation, Result, ablate
from tl_headmaps.analyses.ablate.call import AblationExperiment, AblationSettings
from tl_headmaps.capture.anatomy import parameters_digest
from tl_headmaps.capture.running import last_position
from tl_headmaps.capture.running.last_position import LastPosition
from tl_headmaps.cli.app import main
from tl_headmaps.core.errors import RelationDataError, UsageError
from tl_headmaps.scorers.ablation import default_max_heads, top_heads

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


CAPITAL, FOLLOW = named(CAPITALS, "capital"), named(NEXT, "follow")


@pytest.fixture(scope="module")
def knowing() -> Any:
    """Two heads of layer 0, of different key/value groups, shout the answers of a relation each."""
    return knowing_model({1: CAPITALS, 3: NEXT})


class TestLastPosition:
    @pytest.mark.parametrize(("host", "kind"), HOSTS)
    def test_going_on_from_kept_keys_is_a_whole_pass(self, host: str, kind: str) -> None:
        model = shared_model(kind, host=host)
        last = LastPosition(model, PROMPTS)
        assert last.continues

        def change(z: Tensor, rows: tuple[int, ...]) -> Tensor:
            changed = z.clone()
            changed[:, 1:] *= torch.tensor(rows)[:, None, None]
            return changed

        for number, batch in enumerate(last._batches):
            whole = last._logits(batch, {1: change}, None)
            continued = last._logits(batch, {1: change}, last._pasts[number])
            torch.testing.assert_close(continued, whole, rtol=1e-4, atol=1e-4)
            assert not torch.allclose(whole, model(batch.ids)[:, -1], atol=1e-3)
        assert last.next_tokens().tolist() == [int(model(torch.tensor([ids]))[0, -1].argmax()) for ids in PROMPTS]

    def test_a_host_whose_cache_computes_something_else_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = shared_model("llama")
        off = {1: lambda z, rows: torch.zeros_like(z)}
        expected = LastPosition(model, PROMPTS).next_tokens(off)
        monkeypatch.setattr(last_position, "_past", lambda model, ids: lambda more: model(more))
        wrong = LastPosition(model, PROMPTS)
        assert not wrong.continues
        assert torch.equal(wrong.next_tokens(off), expected)

    def test_too_much_to_keep_means_whole_passes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(last_position, "_CACHE_BYTES", 1)
        assert not LastPosition(shared_model("llama"), PROMPTS).continues


def test_the_planted_head_is_the_one_that_knows(knowing: Any) -> None:
    result = ablate(knowing, CAPITAL, controls=[FOLLOW], n_random=3, max_heads=1, progress=False)
    assert result.status == "tested"
    assert result.heads == (HeadIndex(0, 1),) and result.scores == (1.0,)
    assert result.curve.accuracy.tolist() == [1.0, 0.0]
    assert (result.curve.drop, result.random_drop, result.control_drop) == (1.0, 0.0, 0.0)
    (control,) = result.controls
    assert (control.relation, control.overlap) == ("follow", 0.0)
    assert control.curve.accuracy.tolist() == [1.0, 1.0]
    # Wilson, four of four and none of four.
    assert (float(result.curve.low[0]), float(result.curve.high[1])) == pytest.approx((0.5101, 0.4899), abs=1e-4)


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
    """Targets are what a random model answers for half of the pairs: heads of every layer change some of them."""
    model = shared_model(kind)
    sources = range(20, 50)
    answers = [int(model(torch.tensor([[18, s]]))[0, -1].argmax()) for s in sources]
    pairs = [(word(s), word(max(a if s % 2 else s, 3))) for s, a in zip(sources, answers, strict=True)]
    relation = Relation.from_pairs("own", pairs, eliciting_templates=(TEMPLATE,))
    heads = [HeadIndex(2, 1), HeadIndex(0, 0), HeadIndex(1, 3), HeadIndex(0, 2), HeadIndex(2, 0)]
    result = ablate(model, relation, heads, controls=None, n_random=2, method=method, prepend_bos=False, progress=False)
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
    result = ablate(model, relation, prepend_bos=False, progress=False)
    assert result.status == "not testable" and result.heads == ()
    assert result.curve.accuracy.tolist() == [0.0]
    assert result.random_curves == () and result.controls == ()
    assert "not testable: accuracy 0.00 before" in str(result)
    assert math.isnan(result.curve.drop)


def test_a_relation_without_heads_is_said_to_have_none(knowing: Any) -> None:
    weights = HeadWeights.from_model(knowing)
    experiment = AblationExperiment(knowing, weights, AblationSettings("zero", "folded", None, "skip", False, False))
    static = {"capital": torch.zeros(3, 4)}
    questions = experiment.questions(CAPITAL, [TEMPLATE])
    result = experiment.curves(
        questions, heads=None, max_heads=3, candidates=[], all_candidates=False, n_random=2, static=static
    )
    assert result.status == "no heads" and "nothing to ablate" in str(result)


class TestControls:
    def chosen(self, knowing: Any, static: dict[str, Tensor], others: list[Relation]) -> list[str]:
        weights = HeadWeights.from_model(knowing)
        experiment = AblationExperiment(
            knowing, weights, AblationSettings("zero", "folded", None, "skip", False, False)
        )
        result = experiment.curves(
            experiment.questions(CAPITAL, [TEMPLATE]),
            heads=None,
            max_heads=4,
            candidates=others,
            all_candidates=False,
            n_random=0,
            static=static,
        )
        return [control.relation for control in result.controls]

    def test_are_relations_with_other_heads_and_as_much_knowledge(self, knowing: Any) -> None:
        mine, none, shared = torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3, 4)
        mine[0, 1], mine[1, 2] = 0.9, 0.5
        shared[1, 2] = 0.1
        wrong = named({s: 19 for s in NEXT}, "wrong")
        silent = Relation(name="silent", pairs=FOLLOW.pairs, k=1)
        same = named(NEXT, "same")
        static = {"capital": mine, "follow": none, "wrong": none, "silent": none, "same": shared}
        assert self.chosen(knowing, static, [wrong, same, silent, FOLLOW]) == ["follow"]
        assert self.chosen(knowing, static | {"same": none}, [wrong, same, FOLLOW]) == ["same", "follow"]

    def test_are_at_most_three_with_the_least_overlap(self, knowing: Any) -> None:
        mine, one = torch.zeros(3, 4), torch.zeros(3, 4)
        mine[0], mine[1] = torch.tensor([0.1, 0.9, 0.1, 0.0]), 0.05
        one[1, 0] = 0.1
        others = [named(NEXT, name) for name in "abcde"]
        static = {"capital": mine, "a": one} | {name: torch.zeros(3, 4) for name in "bcde"}
        assert self.chosen(knowing, static, others) == ["b", "c", "d"]

    def test_scores_not_known_are_computed_for_the_ablated_heads(self, knowing: Any) -> None:
        """No static scores handed over: the planted head of the other relation is not this one's."""
        result = ablate(knowing, CAPITAL, ["L0H1"], controls=[FOLLOW, named(CAPITALS, "again")], progress=False)
        assert {control.relation: control.overlap for control in result.controls} == {"follow": 0.0, "again": 1.0}


def test_automatic_controls_come_from_the_folder_of_relations(knowing: Any, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for relation in (CAPITAL, FOLLOW):
        content = {"name": relation.name, "k": 1, "pairs": relation.pairs, "templates": {"eliciting": [TEMPLATE]}}
        (folder / f"{relation.name}.json").write_text(json.dumps(content))
    result = ablate(knowing, "capital", ["L0H1"], data_dir=tmp_path, progress=False)
    assert [control.relation for control in result.controls] == ["follow"]
    data = result.provenance.data
    assert data.pop("parameters") == parameters_digest(knowing)
    assert data == {"capital": CAPITAL.digest, "follow": FOLLOW.digest}


def test_a_relation_is_asked_with_the_template_the_model_answers_best(knowing: Any) -> None:
    """Five tokens that are no source dilute what the heads say; a source of the other relation talks over it."""
    relation = named(CAPITALS, "capital", eliciting_templates=(" word16 <X> word16 word16", TEMPLATE, " word19 <X>"))
    result = ablate(knowing, relation, ["L0H1"], controls=None, n_random=0, progress=False)
    assert (result.template, result.base_accuracy) == (TEMPLATE, 1.0)
    first = ablate(knowing, relation, ["L0H1"], template=" word16 <X> word16 word16", controls=None, progress=False)
    assert first.base_accuracy == 0.0


def test_saved_curves_load_back_equal(knowing: Any, tmp_path: Path) -> None:
    result = ablate(knowing, CAPITAL, controls=[FOLLOW], n_random=2, max_heads=3, progress=False)
    assert Result.load(result.save(tmp_path / "a.json")) == result
    assert Result.load(result.save(tmp_path / "a.safetensors")) == result
    values = json.loads((tmp_path / "a.json").read_text())
    assert values["kind"] == "ablation_curves"
    assert values["heads"][0] == "L0H1"
    steps = len(values["heads"]) + 1
    assert values["n_ablated"] == list(range(steps))
    assert len(values["accuracy"]) == len(values["accuracy_low"]) == len(values["accuracy_high"]) == steps
    assert [len(curve) for curve in values["random_accuracy"]] == [steps, steps]
    assert list(values["control_accuracy"]) == ["follow"] and len(values["control_accuracy"]["follow"]) == steps
    rows = result.save(tmp_path / "a.csv").read_text().splitlines()
    assert len(rows) == 1 + 4 * steps
    assert isinstance(AblationCurves.load(tmp_path / "a.json"), AblationCurves)


def test_the_model_is_left_as_found(knowing: Any) -> None:
    calls = []
    with knowing.hooks(fwd_hooks=[("blocks.0.attn.hook_z", lambda value, hook: calls.append(1))]):
        before = torch.get_rng_state()
        ablate(knowing, CAPITAL, max_heads=2, n_random=1, controls=None, progress=False)
        assert calls == [] and torch.equal(torch.get_rng_state(), before)
        knowing(torch.tensor([[1, 2]]))
        assert calls == [1]


BAD = [
    ({"relation": named(CAPITALS, "bare", eliciting_templates=())}, UsageError, "'bare' has no template.*--template"),
    ({"template": "The capital is"}, UsageError, "must contain <X> exactly once"),
    ({"max_heads": 0}, UsageError, "max_heads=0 is impossible"),
    ({"n_random": -1}, UsageError, "n_random=-1 is impossible"),
    ({"method": "noise"}, UsageError, "method='noise' is not known"),
    ({"heads": []}, UsageError, "heads= is empty"),
    ({"heads": ["L9H9"]}, UsageError, "There is no head L9H9"),
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
        inspect.unwrap(ablate)(**call)


def test_a_model_without_a_tokenizer_is_asked_for_one() -> None:
    with pytest.raises(UsageError, match=r"has no tokenizer.*set model\.tokenizer"):
        ablate(random_model("llama", tokenizer=False), CAPITAL)


def test_command(knowing: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(tl_headmaps, "load_model", lambda *_: knowing)
    pairs, out = tmp_path / "pairs.csv", tmp_path / "a.json"
    pairs.write_text("source,target\n" + "\n".join(f"{word(s)},{word(t)}" for s, t in CAPITALS.items()))

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tl-headmaps", "ablate", str(pairs), *arguments])
        try:
            main()
        except SystemExit as leaving:
            return int(leaving.code or 0)
        return 0

    assert run("--controls", "none") == 2
    assert "'pairs' has no template whose next word is the target" in capsys.readouterr().err
    options = ["--template", TEMPLATE, "--controls", "none", "--k", "1", "--n-random", "2"]
    assert run(*options, "--max-heads", "1", "--out", str(out)) == 0
    assert "relative drop: relation 100%, random heads 0%" in capsys.readouterr().out
    assert json.loads(out.read_text())["accuracy"] == [1.0, 0.0]
    assert run(*options, "--heads", "L0H0,L2H1") == 0
    assert "L2H1" in capsys.readouterr().out


@pytest.mark.model
def test_default_model_loses_capitals_with_their_heads_and_not_with_others(default_model: Any) -> None:
    """A plain trial: 0.86 before, 0.38 after two heads, 0.02 after seven; heads of the same layers 0.79 to 0.90."""
    heads = ["L23H4", "L23H5", "L23H1", "L23H2", "L23H0", "L23H7", "L24H5"]
    result = ablate(
        default_model,
        "country_to_capital",
        heads,
        controls=None,
        n_random=2,
        preset="maps",
        prepend_bos=True,
        progress=False,
    )
    assert result.scores[:2] == pytest.approx((0.62, 0.55), abs=0.01) and min(result.scores) > 0
    accuracy = result.curve.accuracy
    assert float(accuracy[0]) == pytest.approx(0.86, abs=0.03)
    assert float(accuracy[2]) == pytest.approx(0.38, abs=0.05)
    assert float(accuracy[7]) < 0.05
    assert all(float(curve.accuracy[-1]) > 0.75 for curve in result.random_curves), "heads of the same layers"
