"""Running a model: what reducers see is what the model computed, and the model is left as it was found."""

from typing import Any

import pytest
import torch
from planted import DECODERS, needs_hooked, random_model, shared_model

from tl_headmaps.capture.running.activations import LayerActivations, batches, run, sizes_of
from tl_headmaps.core.errors import UsageError

PROMPTS = [[1, 2, 3], [4, 5], [3, 1, 2], [7], [6, 2, 2, 1]]


def state_of(model: Any) -> list[Any]:
    """Everything an analysis must leave alone."""
    hooks = [
        (name, len(module._forward_hooks), len(module._backward_hooks), module.training)
        for name, module in model.named_modules()
    ]
    parameters = [(name, value.requires_grad, value.grad is None) for name, value in model.named_parameters()]
    return [hooks, parameters, torch.is_grad_enabled(), torch.get_rng_state().tolist()]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("llama")


def cached(model: Any, prompt: list[int]) -> Any:
    return model.run_with_cache(torch.tensor([prompt]))


def test_reducers_see_what_the_model_computed_for_each_prompt_alone(model: Any) -> None:
    seen: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    ends: dict[int, torch.Tensor] = {}

    def keep(found: Any) -> None:
        for place, row in enumerate(found.batch.rows):
            seen[found.layer, row] = {name: value[place].clone() for name, value in found.values.items()}

    def end(logits: torch.Tensor, batch: Any) -> None:
        ends.update({row: logits[place, -1] for place, row in enumerate(batch.rows)})

    run(model, PROMPTS, read=("pattern", "v", "z"), reduce=keep, logits=end)
    assert len(seen) == len(PROMPTS) * len(model.blocks)
    for row, prompt in enumerate(PROMPTS):
        logits, cache = cached(model, prompt)
        torch.testing.assert_close(ends[row], logits[0, -1], atol=1e-5, rtol=1e-5)
        for layer in range(len(model.blocks)):
            for name in ("pattern", "v", "z"):
                expected = cache[f"blocks.{layer}.attn.hook_{name}"][0]
                torch.testing.assert_close(seen[layer, row][name], expected, atol=1e-5, rtol=1e-5)


def test_a_small_budget_changes_the_batches_and_not_the_numbers(model: Any) -> None:
    def collected(budget: int) -> tuple[dict[int, torch.Tensor], list[int]]:
        found: dict[int, torch.Tensor] = {}
        sizes: list[int] = []
        run(
            model,
            PROMPTS,
            logits=lambda logits, batch: found.update(zip(batch.rows, logits[:, -1], strict=True)),
            progress=sizes.append,
            budget=budget,
        )
        return found, sizes

    large, small = collected(1 << 30), collected(1)
    assert large[1] == [1, 1, 2, 1]
    assert small[1] == [1, 1, 1, 1, 1]
    for row in range(len(PROMPTS)):
        torch.testing.assert_close(large[0][row], small[0][row], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("host", ["bridge", pytest.param("hooked", marks=needs_hooked)])
@pytest.mark.parametrize("kind", DECODERS)
def test_logits_of_the_last_positions_are_those_of_the_whole_pass(kind: str, host: str) -> None:
    model = shared_model(kind, host=host)
    found: dict[int, torch.Tensor] = {}
    run(model, PROMPTS, logits=lambda logits, batch: found.update(zip(batch.rows, logits, strict=True)), last=2)
    for row, prompt in enumerate(PROMPTS):
        assert len(found[row]) == min(2, len(prompt))
        expected = model(torch.tensor([prompt]), return_type="logits")[0, -2:]
        torch.testing.assert_close(found[row], expected, atol=1e-4, rtol=1e-4)


def test_fewer_logits_make_larger_batches(model: Any) -> None:
    sizes = sizes_of(model)
    assert sizes.bytes_of(10, 10) == sizes.bytes_of(10) == sizes.bytes_of(10, 99)
    assert sizes.bytes_of(10) - sizes.bytes_of(10, 2) == 8 * 2 * 4 * sizes.n_vocab


def test_batches_hold_prompts_of_one_length_within_the_budget() -> None:
    made = list(batches(PROMPTS, lambda length: 10 * length, budget=30))
    assert [batch.rows for batch in made] == [(3,), (1,), (0,), (2,), (4,)]
    together = list(batches(PROMPTS, lambda length: 10 * length, budget=60))
    assert [batch.rows for batch in together] == [(3,), (1,), (0, 2), (4,)]


def test_an_edit_is_what_readers_and_the_rest_of_the_model_see(model: Any) -> None:
    seen = []
    changed: list[torch.Tensor] = []
    run(
        model,
        [[1, 2, 3]],
        edit={(0, "z"): lambda z, batch: torch.zeros_like(z)},
        read=("z",),
        layers=[0],
        reduce=lambda found: seen.append(found["z"].abs().max().item()),
        logits=lambda logits, batch: changed.append(logits),
    )
    assert seen == [0.0]
    assert not torch.allclose(changed[0], model(torch.tensor([[1, 2, 3]])))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_model_is_left_as_found_also_when_a_forward_pass_breaks(model: Any, error: type[BaseException]) -> None:
    calls = []
    model.train()
    try:
        with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", lambda value, hook: calls.append(1))]):
            before = state_of(model)
            run(model, PROMPTS, read=("z",), reduce=lambda found: torch.rand(1))
            assert state_of(model) == before
            assert calls == []

            def break_off(found: Any) -> None:
                raise error

            with pytest.raises(error):
                run(model, PROMPTS, read=("z",), reduce=break_off)
            assert state_of(model) == before
            model(torch.tensor([[1, 2]]))
            assert calls == [1]
    finally:
        model.eval()


def test_prompts_are_checked_before_anything_runs(model: Any) -> None:
    for prompts, sentence in (
        ([], "no prompt to run"),
        ([[1], []], "Prompt 1 is empty"),
        ([[10_000]], "outside the vocabulary"),
        ([[1] * (model.cfg.n_ctx + 1)], f"takes at most {model.cfg.n_ctx}"),
    ):
        with pytest.raises(UsageError, match=sentence):
            run(model, prompts)


@pytest.mark.parametrize("host", ["bridge", pytest.param("hooked", marks=needs_hooked)])
@pytest.mark.parametrize("kind", DECODERS)
def test_layers_above_the_last_that_is_read_are_not_run(kind: str, host: str) -> None:
    model = shared_model(kind, host=host)
    seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    finished: list[int] = []
    handle = model.blocks[2].register_forward_hook(lambda block, inputs, output: finished.append(1))
    try:
        for every, found in seen.items():
            finished.clear()

            def keep(one: LayerActivations, found: list[torch.Tensor] = found) -> None:
                if one.layer < 2:
                    found += [one["z"].clone(), one["resid_pre"].clone()]

            layers = None if every else [0, 1]
            run(model, [[3, 4, 5], [6, 7]], read=("z", "resid_pre"), layers=layers, reduce=keep)
            assert len(finished) == (2 if every else 0)
    finally:
        handle.remove()
    assert all(one.equal(other) for one, other in zip(seen[True], seen[False], strict=True)) and len(seen[False]) == 8
    logits: list[torch.Tensor] = []
    taken: dict[str, Any] = {"read": ("z",), "layers": [0], "reduce": lambda one: None}
    run(model, [[3, 4, 5]], logits=lambda found, batch: logits.append(found), **taken)
    assert logits[0].shape == (1, 3, 61)
