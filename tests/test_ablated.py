"""Heads switched off for code of the user's: logits are those of a model without their W_O; nothing stays behind."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from planted import Anatomy, needs_hooked, random_model, shared_model, source_model, word
from torch import Tensor

from tl_headmaps import HeadIndex, HeadMapsError, HeadWeights, ablated, attention_groups, grouping_profile
from tl_headmaps.capture.running.activations import LayerActivations, run
from tl_headmaps.data.texts import read_texts

IDS = torch.tensor([[5, 17, 40, 8, 23, 31], [9, 9, 50, 33, 4, 60]])
HOSTS = ["bridge", pytest.param("hooked", marks=needs_hooked)]
TEXTS = [" ".join(word(token) for token in ids) for ids in ([20, 31, 45, 7], [8, 9], [50, 51, 52, 53, 54])]


def likelihoods(model: Any, ids: Tensor = IDS) -> Tensor:
    output = model(ids)
    return torch.log_softmax(output if isinstance(output, Tensor) else output.logits, -1)


def out_of(source: Any, kind: str, layer: int) -> Any:
    parts = Anatomy(source, kind)
    return getattr(parts.part(layer, "attn"), parts.names["out"])


def without(kind: str, heads: list[tuple[int, int]]) -> Any:
    """The transformers model with the rows of W_O that belong to some heads set to zero."""
    source = source_model(kind)
    d = Anatomy(source, kind).d_head
    for layer, head in heads:
        weight = out_of(source, kind, layer).weight
        rows = weight if kind == "gpt2" else weight.T
        rows.data[head * d : (head + 1) * d] = 0
    return source


def instead(kind: str, vectors: dict[tuple[int, int], Tensor], positions: list[int] | None = None) -> Any:
    """The transformers model in which W_O gets other vectors of some heads at some positions."""
    source = source_model(kind)
    d = Anatomy(source, kind).d_head
    for (layer, head), vector in vectors.items():

        def changed(module: Any, inputs: Any, head: int = head, vector: Tensor = vector) -> Any:
            z = inputs[0].clone()
            z[:, slice(None) if positions is None else positions, head * d : (head + 1) * d] = vector
            return (z,)

        out_of(source, kind, layer).register_forward_pre_hook(changed)
    return source


def hooks_of(model: Any) -> list[tuple[str, int, int]]:
    return [(name, len(point.fwd_hooks), len(point._forward_hooks)) for name, point in model.hook_dict.items()]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    ("kind", "processed"), [("gpt2", False), ("neox", False), ("llama", False), ("llama", True), ("gemma3", False)]
)
def test_logits_are_those_of_a_model_without_the_heads_output_weights(kind: str, processed: bool, host: str) -> None:
    model = shared_model(kind, host=host, processed=processed)
    before, hooks = likelihoods(model), hooks_of(model)
    with ablated(model, ["L0H1", (1, 3), HeadIndex(1, 0)]) as vectors:
        found = likelihoods(model)
        assert set(vectors) == {HeadIndex(0, 1), HeadIndex(1, 3), HeadIndex(1, 0)}
        assert all(not vector.any() for vector in vectors.values())
    torch.testing.assert_close(found, likelihoods(without(kind, [(0, 1), (1, 3), (1, 0)])), atol=2e-4, rtol=1e-4)
    assert not torch.allclose(found, before, atol=1e-2)
    assert likelihoods(model).equal(before)
    assert hooks_of(model) == hooks


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("positions", [None, [0, -1], [2]])
def test_given_vectors_at_some_positions(positions: list[int] | None, host: str) -> None:
    model = shared_model("llama", host=host)
    given = {"L1H2": torch.linspace(-1, 1, 8), "L2H0": [0.5] * 8}
    with ablated(model, ["L2H0", "L1H2"], method=given, positions=positions):
        found = likelihoods(model)
    vectors = {(1, 2): torch.linspace(-1, 1, 8), (2, 0): torch.full((8,), 0.5)}
    torch.testing.assert_close(found, likelihoods(instead("llama", vectors, positions)), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("processed", [False, True])
def test_means_are_over_all_positions_of_texts_and_survive_processing(processed: bool) -> None:
    """Value biases that were moved into the output bias are in no mean, and in what is left of the sum."""
    model, z = shared_model("gpt2", processed=processed), []
    reference = source_model("gpt2")
    out_of(reference, "gpt2", 1).register_forward_pre_hook(lambda module, inputs: z.append(inputs[0]))
    for text in TEXTS:
        reference(model.to_tokens(text))
    mean = torch.cat([part[0] for part in z]).mean(0)[2 * 8 : 3 * 8]
    with ablated(model, "L1H2", method="mean", texts=TEXTS):
        found = likelihoods(model)
    torch.testing.assert_close(found, likelihoods(instead("gpt2", {(1, 2): mean})), atol=2e-4, rtol=1e-4)


def test_means_leave_held_out_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def watched(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        return iter(TEXTS)

    monkeypatch.setattr("tl_headmaps.capture.running.ablated.read_texts", watched)
    ablated(shared_model("llama"), "L1H2", method="mean")
    assert asked == [((), {"part": "fit"})]
    held_out = {*read_texts(part="held_out")}
    assert held_out and held_out.isdisjoint(read_texts(part="fit"))


@pytest.mark.parametrize("host", HOSTS)
def test_blocks_nest_and_may_be_used_again(host: str) -> None:
    model = shared_model("llama", host=host)
    clean = likelihoods(model)
    outer = ablated(model, "L0H1")
    for _ in range(2):
        with outer:
            one = likelihoods(model)
            with ablated(model, "L2H3", method="mean", texts=TEXTS) as inner, outer:
                both = likelihoods(model)
            assert likelihoods(model).equal(one)
        assert likelihoods(model).equal(clean)
    torch.testing.assert_close(one, likelihoods(without("llama", [(0, 1)])), atol=2e-4, rtol=1e-4)
    # The mean is that of the whole model, although a head was off when it was taken.
    with ablated(model, "L2H3", method="mean", texts=TEXTS) as alone:
        assert alone[HeadIndex(2, 3)].equal(inner[HeadIndex(2, 3)])
    with ablated(model, ["L0H1", "L2H3"], method={"L0H1": torch.zeros(8), **alone}):
        assert likelihoods(model).equal(both)


@pytest.mark.parametrize("host", HOSTS)
def test_hooks_are_removed_after_an_exception_and_yours_stay(host: str) -> None:
    model = random_model("llama", host=host)
    seen: list[Tensor] = []
    model.add_hook("blocks.1.attn.hook_z", lambda z, hook: seen.append(z.clone()))
    hooks = hooks_of(model)
    with pytest.raises(ZeroDivisionError), ablated(model, "L1H1"):
        likelihoods(model)
        raise ZeroDivisionError
    assert hooks_of(model) == hooks and len(seen) == 1
    sentence = r"positions= holds 6, but this forward pass has 6 tokens"
    with pytest.raises(HeadMapsError, match=sentence), ablated(model, "L1H1", positions=[6]):
        model(IDS)
    assert hooks_of(model) == hooks
    with ablated(model, "L1H1"):
        _, cache = model.run_with_cache(IDS)
        assert not cache["blocks.1.attn.hook_z"][:, :, 1].any() and cache["blocks.1.attn.hook_z"][:, :, 0].any()
        model.reset_hooks()
        off = likelihoods(model)
    assert not torch.allclose(off, likelihoods(model), atol=1e-2)


def test_gradients_flow_through_the_other_heads() -> None:
    model = random_model("llama")
    with torch.enable_grad(), ablated(model, "L1H1"):
        assert torch.is_grad_enabled()
        likelihoods(model).sum().backward()
        gradient = model.blocks[1].attn.o.original_component.weight.grad
    assert not gradient[:, 8:16].any() and gradient[:, :8].any()


class TestAnalysesInside:
    def test_are_refused_and_work_again_afterwards(self) -> None:
        model = shared_model("llama")
        with ablated(model, "L0H1"):
            with pytest.raises(HeadMapsError, match=r"switched off by ablated\(\.\.\.\)"):
                grouping_profile(model, TEXTS, progress=False)
            _, cache = model.run_with_cache(TEXTS[2])
        assert grouping_profile(model, TEXTS, progress=False).n_texts == 3
        # A cache made inside describes the model without the head: pattern and all.
        changed = attention_groups(model, TEXTS[2], heads="L2H0", cache=cache)
        assert changed.patterns is not None
        assert not changed.patterns.equal(attention_groups(model, TEXTS[2], heads="L2H0").patterns)

    def test_of_another_thread_are_refused_too_and_nobody_waits(self) -> None:
        model = shared_model("llama")
        with ThreadPoolExecutor(1) as pool, ablated(model, "L0H1"):
            # Were the lock held in the block, this would wait for ever.
            refused = pool.submit(grouping_profile, model, TEXTS, progress=False).exception(timeout=60)
        assert isinstance(refused, HeadMapsError) and "ablated" in str(refused)

    def test_a_block_opens_after_the_run_of_another_thread(self) -> None:
        """While an analysis runs the model, hooks are put away: one added then would change it, and be lost."""
        model, off = shared_model("llama"), ablated(shared_model("llama"), "L0H1")
        begun, go_on, opened = threading.Event(), threading.Event(), threading.Event()
        seen: list[bool] = []

        def slow(activations: LayerActivations) -> None:
            begun.set()
            assert go_on.wait(60)
            seen.append(bool(activations["z"][:, :, 1].any()))

        def block() -> None:
            with off:
                opened.set()
                seen.append(bool(model.run_with_cache(IDS)[1]["blocks.0.attn.hook_z"][:, :, 1].any()))

        with ThreadPoolExecutor(2) as pool:
            running = pool.submit(run, model, [[5, 6], [7, 8, 9]], read=("z",), layers=[0], reduce=slow)
            assert begun.wait(60)
            waiting = pool.submit(block)
            assert not opened.wait(0.2)
            go_on.set()
            running.result(60)
            waiting.result(60)
        assert seen == [True, True, False]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"heads": "L9H0"}, "There is no head L9H0"),
        ({"heads": []}, "heads= is empty"),
        ({"method": {}}, "L0H1 is among heads=, but has no vector"),
        ({"method": {"L0H1": [0.0] * 8, "L0H2": [0.0] * 8}}, "L0H2 has a vector, but is not among heads="),
        ({"method": {"L0H1": [0.0] * 32}}, r"The vector of L0H1 has shape \(32,\)"),
        ({"method": {"L0H1": [float("nan")] * 8}}, "not finite"),
        ({"positions": []}, "positions= is empty"),
        ({"positions": ["x"]}, "are not positions"),
        ({"positions": [1.5]}, "are not positions"),
        ({"positions": [False, True]}, "are not positions"),
        ({"positions": "0"}, "are not positions"),
        ({"method": None}, "method=None is not known"),
        ({"method": {"L0H1": "rubbish"}}, "The vector of L0H1 is 'rubbish'"),
        ({"method": {"L0H1": torch.zeros(8, device="meta")}}, "The vector of L0H1 is"),
        ({"method": {"L0H1": torch.zeros(8, dtype=torch.complex64)}}, "The vector of L0H1 has shape"),
        ({"texts": TEXTS}, "they go with method='mean'"),
        ({"method": "mean", "texts": []}, "There is no text to take means over"),
    ],
)
def test_bad_input(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HeadMapsError, match=sentence):
        inspect.unwrap(ablated)(shared_model("llama"), **{"heads": "L0H1", **options})


def test_what_cannot_be_switched_off() -> None:
    with pytest.raises(HeadMapsError, match=r"biases of its values .* method='mean'"):
        ablated(shared_model("gpt2", processed=True), "L0H1")
    with pytest.raises(HeadMapsError, match="HeadWeights cannot run"):
        ablated(HeadWeights.from_model(shared_model("llama")), "L0H1")  # type: ignore[arg-type]
    with pytest.raises(HeadMapsError, match="the name of a model, not a model"):
        ablated("gpt2", "L0H1")  # type: ignore[arg-type]
