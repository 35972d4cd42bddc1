"""Runs that begin at the layer of a head: the same numbers as whole passes, without the layers below."""

from typing import Any

import pytest
import torch
from planted import needs_hooked, shared_model
from torch import Tensor

from tl_headmaps import HeadIndex
from tl_headmaps.capture.running import ablated
from tl_headmaps.capture.running.ablated import Streams, run_replacing_each

PROMPTS = [[5, 9, 33, 21], [40, 22], [31, 30, 29, 28], [7, 8, 9, 10, 11, 12]]
HEADS = [HeadIndex(2, 0), HeadIndex(0, 3), HeadIndex(1, 2), HeadIndex(2, 3)]
HOSTS = ["bridge", pytest.param("hooked", marks=needs_hooked)]


def means() -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {layer: torch.randn(4, int(shared_model("llama").cfg.d_head), generator=generator) for layer in range(3)}


def found(model: Any, **options: Any) -> Any:
    logits: dict[tuple[int, int], Tensor] = {}

    def take(number: int, own: Tensor, batch: Any) -> None:
        logits.update({(number, row): values for row, values in zip(batch.rows, own, strict=True)})

    run_replacing_each(model, PROMPTS, HEADS, means(), take, **options)
    return logits


def whole_pass(model: Any, ids: list[int], head: HeadIndex | None) -> Any:
    def replace(z: Tensor, hook: Any) -> Tensor:
        assert head is not None
        z = z.clone()
        z[:, :, head.head] = means()[head.layer][head.head]
        return z

    hooks = [] if head is None else [(f"blocks.{head.layer}.attn.hook_z", replace)]
    return model.run_with_hooks(torch.tensor([ids]), fwd_hooks=hooks)[0]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
def test_every_run_is_a_whole_pass_with_one_head_replaced(kind: str, host: str) -> None:
    model = shared_model(kind, host=host)
    before = [vars(block).copy() for block in model.blocks]
    logits = found(model)
    assert all(vars(block).keys() == own.keys() for block, own in zip(model.blocks, before, strict=True))
    for number, head in enumerate([None, *HEADS]):
        for row, ids in enumerate(PROMPTS):
            torch.testing.assert_close(logits[number, row], whole_pass(model, ids, head), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits[0, 0], logits[1, 0], atol=1e-3), "a test in which heads matter"


def test_small_batches_give_the_same_and_progress_counts_every_run() -> None:
    model, counted = shared_model("llama"), []
    whole, parts = found(model, progress=counted.append), found(model, budget=1)
    assert sum(counted) == (1 + len(HEADS)) * len(PROMPTS) and whole.keys() == parts.keys()
    for key, values in whole.items():
        torch.testing.assert_close(parts[key], values, rtol=1e-5, atol=1e-5)


def mlps_run(model: Any) -> list[int]:
    """How often the MLP of each layer runs, beyond the passes that measure the host."""
    seen = [0] * len(model.blocks)

    def count(layer: int) -> Any:
        def hook(*_: Any) -> None:
            seen[layer] += 1

        return hook

    handles = [block.mlp.register_forward_hook(count(layer)) for layer, block in enumerate(model.blocks)]
    try:
        found(model)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def test_the_layers_below_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lengths; one pass of the whole model, one run of each head from its layer on."""
    monkeypatch.setattr(ablated, "_begins", lambda *_: True)
    assert mlps_run(shared_model("llama")) == [3 * (1 + 1), 3 * (1 + 2), 3 * (1 + 4)]


def test_a_host_that_cannot_leave_out_layers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model("llama")
    expected, taker = found(model), Streams._taker

    def wrong(self: Streams, layer: int) -> Any:
        take = taker(self, layer)
        return lambda value, hook: take(1.01 * value + 0.01, hook)

    monkeypatch.setattr(Streams, "_taker", wrong)
    logits = found(model)
    for key, values in expected.items():
        torch.testing.assert_close(logits[key], values, rtol=1e-4, atol=1e-4)


def test_blocks_are_as_they_were_after_an_exception() -> None:
    model = shared_model("llama")

    def broken(number: int, own: Tensor, batch: Any) -> None:
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_replacing_each(model, PROMPTS, HEADS, means(), broken)
    assert all("forward" not in vars(block) for block in model.blocks)
    torch.testing.assert_close(found(model)[0, 1], whole_pass(model, PROMPTS[1], None))
