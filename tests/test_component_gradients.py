"""Gradients of every matrix: the derivatives of the loss, dropped as they come, and a model left as it was found."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from conftest import TL_MAJOR
from matrices import GATED, HOSTS, SIX, TEXTS, expected_matrices, mlp_matrices, token_ids
from planted import Anatomy, random_model, shared_model, source_model
from torch import Tensor
from torch.nn.functional import cross_entropy

from tl_headmaps import component_map
from tl_headmaps.capture.components import gradients as gradients_module
from tl_headmaps.capture.components.gradients import component_gradients
from tl_headmaps.capture.components.matrices import ModelComponents
from tl_headmaps.capture.running.text import TextBatch, TextBatches
from tl_headmaps.core.errors import UnsupportedModelError
from tl_headmaps.scorers.components import METRICS


def loss_of(source: Any, batch: TextBatch) -> Tensor:
    """By transformers itself, sequence by sequence without padding, in float64."""
    losses = []
    for row, length in zip(batch.tokens, batch.lengths.tolist(), strict=True):
        logits = source(row[None, :length]).logits[0]
        losses.append(cross_entropy(logits[:-1], row[1:length], reduction="none"))
    return torch.cat(losses).mean()


def slice_of(parts: Anatomy, layer: int, component: str, head: int | None) -> Callable[[float], None]:
    """A function that multiplies a component (or one head of it) in place."""
    attn, r, d = parts.part(layer, "attn"), parts.d_head, parts.W_E.shape[1]
    mine = slice(None) if head is None else slice(head * r, (head + 1) * r)
    place = {"q": 0, "k": 1, "v": 2}.get(component[-1], 0)
    if component.startswith("mlp"):
        target = mlp_matrices(parts, layer)[component]
    elif component == "attn.o":
        out = getattr(attn, parts.names["out"]).weight
        target = out[mine] if parts.kind == "gpt2" else out[:, mine]
    elif parts.kind == "gpt2":
        target = attn.c_attn.weight[:, place * d : (place + 1) * d][:, mine]
    elif parts.kind == "neox":
        by_head = attn.query_key_value.weight.view(-1, 3, r, d)[:, place]
        target = by_head if head is None else by_head[head]
    else:
        target = getattr(attn, f"{component[-1]}_proj").weight[mine]
    return target.mul_


FINITE = [
    (kind, component)
    for kind in ("gpt2", "neox", "llama", "gemma3")
    for component in ((*SIX, "mlp.gate") if kind in GATED else SIX)
    # Behind their own norm the scale of queries and keys does nothing: see the test of that.
    if not (kind == "gemma3" and component in ("attn.q", "attn.k"))
]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(("kind", "component"), FINITE)
def test_contribution_is_the_derivative_of_the_loss(kind: str, component: str, host: str) -> None:
    """Scaling a matrix by 1 + eps changes the loss by eps times the signed sum; the same for one head."""
    model = shared_model(kind, host=host)
    batches = token_ids(model, TEXTS[:3])
    measure = METRICS["contribution"].measure
    sums = component_gradients(ModelComponents(model), batches, measure, by_head=True, progress=False)[component]
    whole = component_gradients(ModelComponents(model), batches, measure, progress=False)[component]
    # transformers computes norms in float32 whatever the model: a smaller step would drown in their rounding.
    layer, eps = 1, 5e-3
    heads = [None] if component.startswith("mlp") else [None, 1]
    for head in heads:
        losses = []
        for factor in (1 + eps, 1 - eps):
            source = source_model(kind).double()
            slice_of(Anatomy(source, kind), layer, component, head)(factor)
            losses.append([float(loss_of(source, batch)) for batch in batches.items])
        numeric = [(up - down) / (2 * eps) for up, down in zip(*losses, strict=True)]
        found = whole[:, layer, 0] if head is None else sums[:, layer, head]
        assert found.tolist() == pytest.approx(numeric, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gradient_norms_are_those_of_autograd(kind: str) -> None:
    """Against transformers' own backward pass; gradient_ratio and sensitivity follow from them."""
    model = shared_model(kind)
    batch = token_ids(model, TEXTS[:2]).items[0]
    one = TextBatches((batch,), (0,), 1, int(batch.lengths.sum()), "")
    found = {
        name: component_gradients(ModelComponents(model), one, METRICS[name].measure, progress=False)
        for name in ("sensitivity", "gradient_ratio")
    }
    source = source_model(kind)
    with torch.enable_grad():
        loss_of(source, batch).backward()
    values = {name: value.clone() for name, value in expected_matrices(Anatomy(source, kind), 2).items()}
    # The gradient is read through the same reference reader as the weights.
    for parameter in source.parameters():
        parameter.data = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    gradients = expected_matrices(Anatomy(source, kind), 2)
    for name, gradient in gradients.items():
        close = lambda value: pytest.approx(float(value), rel=1e-3)  # noqa: E731
        assert float(found["sensitivity"][name][0, 2]) == close((gradient * values[name]).abs().sum())
        assert float(found["gradient_ratio"][name][0, 2]) == close(gradient.norm() / values[name].norm())


def test_matrices_that_only_multiply_each_other_contribute_the_same() -> None:
    found = component_map(shared_model("llama"), "contribution", TEXTS)
    q, k, v, o, up, down, gate = found.values.T
    for one, other in ((q, k), (v, o), (up, down)):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)
    assert not torch.allclose(gate, up, rtol=0.1)


def test_the_default_metric_tells_all_seven_matrices_apart() -> None:
    found = component_map(shared_model("llama"), texts=TEXTS)
    assert found.metric == "sensitivity"
    for one, other in combinations(found.values.T, 2):
        assert not torch.allclose(one, other, rtol=0.05)


def test_a_norm_behind_queries_and_keys_leaves_them_nothing() -> None:
    found = component_map(shared_model("qwen3"), "contribution", TEXTS)
    assert float(found.values[:, :2].max()) < 1e-5 < float(found.values[:, 2:].min())


def test_contribution_does_not_depend_on_folding() -> None:
    """Where norms have no bias. TransformerLens 3 computes processed gated MLPs with copies: see the refusal."""
    if TL_MAJOR < 4:
        pytest.skip("a processed bridge of TransformerLens 3 has no gradients; run make test")
    models = (shared_model("llama", processed=flag) for flag in (False, True))
    raw, processed = (component_map(model, "contribution", TEXTS) for model in models)
    assert torch.allclose(raw.values, processed.values, rtol=1e-2, atol=1e-6)
    assert (raw.provenance.basis, processed.provenance.basis) == ("raw", "folded")


@pytest.mark.skipif(TL_MAJOR >= 4, reason="only bridges of TransformerLens 3 keep copies; run make test-tl3")
def test_a_matrix_without_gradient_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no gradient for mlp.* uses a copy of that matrix"):
        component_map(shared_model("llama", processed=True), "contribution", TEXTS)


def test_gradients_are_dropped_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a second copy of the model: while one parameter is reduced, no other holds a gradient."""
    model = random_model("neox")
    parameters = list(model.parameters())
    held: list[int] = []
    contribution = METRICS["contribution"]

    def watching(slope: Tensor, weight: Tensor) -> Tensor:
        held.append(sum(parameter.grad is not None for parameter in parameters))
        return contribution.measure(slope, weight)

    monkeypatch.setitem(METRICS, "contribution", replace(contribution, measure=watching))
    component_map(model, "contribution", TEXTS, progress=False)
    assert len(held) > 100 and max(held) == 0


class Remembered:
    """Everything of a model that a call could disturb."""

    def __init__(self, model: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        model(torch.tensor([[3, 4]]))  # A bridge adds hooks of its own to norms when it first runs.
        self.model, self.fired = model, []
        parameters = self.parameters()
        for number, parameter in enumerate(parameters):
            parameter.requires_grad_(number % 3 > 0)
            if number % 2:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        trainable = next(parameter for parameter in parameters if parameter.requires_grad)
        trainable.register_hook(lambda gradient: self.fired.append("gradient"))
        trainable.register_post_accumulate_grad_hook(lambda parameter: self.fired.append("optimiser"))
        model.add_hook("blocks.1.attn.hook_z", lambda value, hook: self.fired.append("z"))
        model.train()
        model.blocks[1].eval()
        self.before = self.state()

    def roots(self) -> list[Any]:
        """A bridge and the transformers model it runs: neither holds all modules."""
        return [self.model, getattr(self.model, "original_model", self.model)]

    def parameters(self) -> list[Any]:
        return list(dict.fromkeys(parameter for root in self.roots() for parameter in root.parameters()))

    def state(self) -> Any:
        parameters = self.parameters()
        return {
            "values": [parameter.detach().clone() for parameter in parameters],
            "requires": [parameter.requires_grad for parameter in parameters],
            "grad": [parameter.grad for parameter in parameters],
            "grad values": [None if p.grad is None else p.grad.clone() for p in parameters],
            "hooks": [(list(p._backward_hooks or {}), list(p._post_accumulate_grad_hooks or {})) for p in parameters],
            "module hooks": [
                (len(module._forward_hooks), len(module._forward_pre_hooks))
                for root in self.roots()
                for module in root.modules()
            ],
            "training": [module.training for root in self.roots() for module in root.modules()],
            "random": torch.get_rng_state(),
            "grad enabled": torch.is_grad_enabled(),
        }

    def assert_unchanged(self) -> None:
        after = self.state()
        for name, old in self.before.items():
            new = after[name]
            if name == "grad":
                assert all(a is b for a, b in zip(old, new, strict=True))
            elif name in ("values", "grad values"):
                assert all(a is b or torch.equal(a, b) for a, b in zip(old, new, strict=True))
            elif name == "random":
                assert torch.equal(old, new)
            else:
                assert old == new, name
        assert self.fired == []


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["contribution", "stable_rank"])
def test_the_model_is_left_as_it_was_found(host: str, name: str) -> None:
    model = random_model("gpt2", host=host)
    remembered = Remembered(model)
    text = None if name == "stable_rank" else TEXTS
    component_map(model, name, text)
    remembered.assert_unchanged()


@pytest.mark.parametrize("where", ["forward", "reduce"])
def test_also_after_an_exception(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    model = random_model("llama")
    remembered = Remembered(model)
    calls = iter(range(1000))
    contribution, mean_loss = METRICS["contribution"], gradients_module.mean_loss

    def failing(at: int, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Any) -> Tensor:
            if next(calls) == at:
                raise KeyboardInterrupt
            return original(*arguments)

        return call

    if where == "forward":
        monkeypatch.setattr(gradients_module, "mean_loss", failing(1, mean_loss))
    else:
        monkeypatch.setitem(METRICS, "contribution", replace(contribution, measure=failing(40, contribution.measure)))
    with pytest.raises(KeyboardInterrupt):
        component_map(model, "contribution", TEXTS)
    remembered.assert_unchanged()


def test_dropout_is_off_in_a_model_that_trains() -> None:
    """Of GPT-2, which has dropout in three places, one of them outside a bridge's own modules."""
    model = random_model("gpt2")
    resting = component_map(model, "contribution", TEXTS).values
    model.train()
    assert torch.equal(component_map(model, "contribution", TEXTS).values, resting)


def test_inference_tensors_are_refused() -> None:
    with torch.inference_mode():
        model = random_model("llama")
    with pytest.raises(UnsupportedModelError, match=r"inference_mode.*Load it outside"):
        component_map(model, "contribution", TEXTS)
