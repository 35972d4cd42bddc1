"""Component maps: the right matrices, exact metrics, honest gradients, and a model left as it was found."""

import inspect
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TL_MAJOR
from hypothesis import given
from hypothesis import strategies as st
from planted import (
    DECODERS,
    Anatomy,
    hosted,
    needs_hooked,
    random_model,
    shared_model,
    source_model,
    word,
)
from scipy.stats import t as student
from torch import Tensor
from torch.nn.functional import cross_entropy

import tl_headmaps
from tl_headmaps import ComponentMap, HeadComponentMap, HeadWeights, component_map, head_component_map
from tl_headmaps.capture import component_gradients as gradients_module
from tl_headmaps.capture.batches import Batch, Batches, token_batches
from tl_headmaps.capture.component_gradients import component_gradients
from tl_headmaps.capture.components import ModelComponents, component_source, heads_of
from tl_headmaps.cli.app import main
from tl_headmaps.errors import UnsupportedModelError, UsageError, WeightBasisError
from tl_headmaps.scorers.components import METRICS, Change, mean_over_batches, metric, random_baseline
from tl_headmaps.scorers.spectra import Matrix, random_matrix, side_by_side

SIX = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down")
GATED = ("llama", "gemma2", "gemma3", "qwen2", "qwen3")
HOSTS = ["bridge", pytest.param("hooked", marks=needs_hooked)]

METRIC_ACCURACY = 1e-4
"""Relative, as promised."""

FLOAT32 = 1e-5
"""Relative: the same float32 products in another order."""

TEXTS = [" ".join(word(3 + (7 * i + 3 * j * j) % 50) for j in range(n)) for i, n in enumerate((24, 9, 17, 30, 5, 21))]
TEXTS = [f" {text}" for text in TEXTS]


def mlp_matrices(parts: Anatomy, layer: int) -> dict[str, Tensor]:
    """Inputs by outputs, from the modules of transformers."""
    mlp = parts.part(layer, "mlp")
    if parts.kind == "gpt2":
        return {"mlp.up": mlp.c_fc.weight, "mlp.down": mlp.c_proj.weight}
    if parts.kind == "neox":
        return {"mlp.up": mlp.dense_h_to_4h.weight.T, "mlp.down": mlp.dense_4h_to_h.weight.T}
    if parts.kind == "phi":
        return {"mlp.up": mlp.fc1.weight.T, "mlp.down": mlp.fc2.weight.T}
    return {
        "mlp.up": mlp.up_proj.weight.T,
        "mlp.down": mlp.down_proj.weight.T,
        "mlp.gate": mlp.gate_proj.weight.T,
    }


def expected_matrices(parts: Anatomy, layer: int) -> dict[str, Tensor]:
    heads = parts.heads(layer)
    beside = {name: torch.cat(list(getattr(heads, f"W_{name[-1].upper()}")), dim=1) for name in SIX[:3]}
    return {**beside, "attn.o": torch.cat(list(heads.W_O)), **mlp_matrices(parts, layer)}


# Reading the matrices


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("kind", DECODERS)
def test_matrices_are_those_of_the_checkpoint(kind: str, host: str) -> None:
    """Also where q, k and v are one tensor (GPT-2, Pythia) and where key/value heads are shared."""
    source = component_source(shared_model(kind, host=host))
    parts = Anatomy(source_model(kind), kind)
    assert source.components == (*SIX, "mlp.gate") if kind in GATED else SIX
    for layer in range(3):
        expected = expected_matrices(parts, layer)
        assert set(expected) == set(source.components)
        for name, matrix in expected.items():
            assert torch.equal(source.matrix(layer, name), matrix), (layer, name)
        heads = parts.heads(layer)
        for name in SIX[:4]:
            assert torch.equal(heads_of(source, layer, name), getattr(heads, f"W_{name[-1].upper()}"))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@needs_hooked
def test_hosts_agree_to_the_byte(kind: str) -> None:
    maps = [component_map(shared_model(kind, host=host), "stable_rank") for host in ("bridge", "hooked")]
    assert torch.equal(maps[0].values, maps[1].values)
    assert maps[0].provenance.fingerprint == maps[1].provenance.fingerprint


@needs_hooked
@pytest.mark.parametrize("name", ["contribution", "gradient_ratio", "output_share"])
@pytest.mark.parametrize("kind", ["neox", "llama", "gemma3"])
def test_hosts_agree_on_text(kind: str, name: str) -> None:
    for call in (component_map, head_component_map):
        ours, theirs = (call(shared_model(kind, host=host), name, TEXTS).values for host in ("bridge", "hooked"))
        # The norm of queries and keys leaves rounding alone in contribution.
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-6, equal_nan=True)


def test_weights_give_the_attention_columns() -> None:
    model = shared_model("llama")
    whole, attention = (component_map(source, "spectral") for source in (model, HeadWeights.from_model(model)))
    assert attention.components == SIX[:4]
    assert torch.equal(attention.values, whole.values[:, :4])
    heads = [head_component_map(source, "spectral").values for source in (model, HeadWeights.from_model(model))]
    assert torch.equal(*(values.nan_to_num() for values in heads))


def test_mixtures_of_experts_are_refused_and_their_heads_are_not() -> None:
    model = shared_model("mixtral")
    with pytest.raises(UnsupportedModelError, match=r"layer 0 is a MoEBridge .*mixture of experts.*head_component_map"):
        component_map(model, "frobenius")
    assert head_component_map(model, "frobenius").values.shape == (4, 3, 4)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_quantised_models_are_refused(dtype: torch.dtype) -> None:
    model = random_model("llama")
    parameter = ModelComponents(model).location(1, "mlp.up").parameter
    parameter.requires_grad_(False)
    parameter.data = parameter.data.to(dtype)
    with pytest.raises(
        UnsupportedModelError, match=r"layers.1.mlp.up_proj.weight is stored as u?int8, a quantised type"
    ):
        component_map(model, "frobenius")


def test_half_precision_is_read() -> None:
    found = component_map(random_model("llama", dtype=torch.bfloat16), "frobenius").values
    assert torch.allclose(found, component_map(shared_model("llama"), "frobenius").values, rtol=1e-2)


# Spectral metrics


def by_definition(matrix: Tensor) -> dict[str, float]:
    """From a float64 singular value decomposition."""
    s = torch.linalg.svdvals(matrix.double())
    share = s / s.sum()
    squares = s**2
    k = len(s) // 2
    return {
        "frobenius": float(matrix.double().norm()),
        "spectral": float(s[0]),
        "stable_rank": float((s**2).sum() / s[0] ** 2),
        "effective_rank": math.exp(-sum(float(p) * math.log(p) for p in share.tolist() if p > 0)),
        "tail_exponent": 1 + k / sum(math.log(float(squares[i] / squares[k])) for i in range(k)),
    }


@given(st.integers(2, 40), st.integers(2, 40), st.floats(0, 3), st.integers(0, 10**6))
def test_spectral_metrics_equal_the_definition(rows: int, columns: int, decades: float, seed: int) -> None:
    """Tall, wide and square, with singular values over up to three decades beyond chance."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator) * torch.logspace(0, -decades, columns)
    for name, expected in by_definition(matrix).items():
        assert METRICS[name].measure(Matrix(matrix)) == pytest.approx(expected, rel=METRIC_ACCURACY), name


def test_small_singular_values_keep_their_digits() -> None:
    """Down to 1e-5 of the largest, where float32 decompositions have lost them."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 30, generator=generator, dtype=torch.float64)).Q for n in (50, 40))
    values = torch.logspace(0, -5, 30, dtype=torch.float64)
    found = Matrix(left * values @ right.T).singular_values
    assert torch.allclose(found[:30], values, rtol=METRIC_ACCURACY)
    assert float(found[30:].max()) < 1e-7


def test_a_low_rank_matrix_has_that_effective_rank() -> None:
    """Noise of the hundreds of other singular values would show here."""
    basis = torch.linalg.qr(torch.randn(300, 5, generator=torch.Generator().manual_seed(1))).Q
    matrix = Matrix(basis @ basis.T)
    assert METRICS["effective_rank"].measure(matrix) == pytest.approx(5, rel=METRIC_ACCURACY)
    assert METRICS["stable_rank"].measure(matrix) == pytest.approx(5, rel=METRIC_ACCURACY)
    assert math.isnan(METRICS["tail_exponent"].measure(matrix))


def test_zero_and_tiny_matrices_are_undefined_not_wrong() -> None:
    zero = Matrix(torch.zeros(4, 6))
    assert METRICS["frobenius"].measure(zero) == METRICS["spectral"].measure(zero) == 0
    for name in ("stable_rank", "effective_rank", "tail_exponent"):
        assert math.isnan(METRICS[name].measure(zero))
    assert math.isnan(METRICS["tail_exponent"].measure(Matrix(torch.ones(1, 3))))


@pytest.mark.parametrize("name", ["frobenius", "spectral", "stable_rank", "effective_rank", "tail_exponent"])
def test_a_random_matrix_is_like_its_baseline(name: str) -> None:
    own = METRICS[name].measure(Matrix(random_matrix(96, 240, seed=77)))
    assert own == pytest.approx(random_baseline(METRICS[name], 96, 240, seed=0), rel=0.05)


def test_relative_divides_by_the_baseline() -> None:
    plain, relative = (component_map(shared_model("llama"), "spectral", relative=flag) for flag in (False, True))
    assert plain.baseline is not None and torch.equal(plain.baseline, relative.baseline)
    assert torch.allclose(relative.values, plain.values / plain.baseline)
    assert relative.unit == "spectral norm, relative to random" and relative.relative and not plain.relative
    # Closed form for a large matrix with entries of variance 1 / rows: 1 + sqrt(columns / rows).
    assert random_baseline(METRICS["spectral"], 400, 900, seed=0) == pytest.approx(1 + 1.5, rel=0.02)


def test_head_maps_are_maps_of_slices() -> None:
    source = component_source(shared_model("llama"))
    found = head_component_map(shared_model("llama"), "effective_rank")
    assert found.values.shape == (4, 3, 4)
    assert found.of("attn.k").shape == found.of("attn.v").shape == (3, 2)
    for number, name in enumerate(SIX[:4]):
        for layer in range(3):
            for head, matrix in enumerate(heads_of(source, layer, name)):
                expected = by_definition(matrix)["effective_rank"]
                assert float(found.values[number, layer, head]) == pytest.approx(expected, rel=METRIC_ACCURACY)


def test_side_by_side_keeps_the_order_for_any_number_of_threads() -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert list(side_by_side(lambda i: i * i, range(50))) == [i * i for i in range(50)]
    finally:
        torch.set_num_threads(threads)


# Gradients


def token_ids(model: Any, texts: list[str], **options: Any) -> Batches:
    settings = {"length": 32, "max_tokens": 1000, "batch_tokens": 512} | options
    return token_batches(texts, model.tokenizer, **settings)


def loss_of(source: Any, batch: Batch) -> Tensor:
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
    sums = component_gradients(ModelComponents(model), batches, progress=False)[component]
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
        found = sums.product[:, layer].sum(-1) if head is None else sums.product[:, layer, head]
        assert found.tolist() == pytest.approx(numeric, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gradient_norms_are_those_of_autograd(kind: str) -> None:
    """Against transformers' own backward pass; gradient_ratio and sensitivity follow from them."""
    model = shared_model(kind)
    batch = token_ids(model, TEXTS[:2]).items[0]
    found = component_gradients(ModelComponents(model), Batches((batch,), int(batch.lengths.sum()), ""), progress=False)
    source = source_model(kind)
    with torch.enable_grad():
        loss_of(source, batch).backward()
    values = {name: value.clone() for name, value in expected_matrices(Anatomy(source, kind), 2).items()}
    # The gradient is read through the same reference reader as the weights.
    for parameter in source.parameters():
        parameter.data = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    gradients = expected_matrices(Anatomy(source, kind), 2)
    for name, gradient in gradients.items():
        sums = found[name]
        close = lambda value: pytest.approx(float(value), rel=1e-3)  # noqa: E731
        assert float(sums.gradient_square[0, 2].sum()) == close(gradient.square().sum())
        assert float(sums.absolute_product[0, 2].sum()) == close((gradient * values[name]).abs().sum())
        assert float(sums.weight_square[2].sum()) == close(values[name].square().sum())
        ratio = METRICS["gradient_ratio"].measure(sums.whole())[0, 2, 0]
        assert float(ratio) == close(gradient.norm() / values[name].norm())


def test_matrices_that_only_multiply_each_other_contribute_the_same() -> None:
    found = component_map(shared_model("llama"), text=TEXTS)
    q, k, v, o, up, down, gate = found.values.T
    for one, other in ((q, k), (v, o), (up, down)):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)
    assert not torch.allclose(gate, up, rtol=0.1)
    told_apart = component_map(shared_model("llama"), "sensitivity", TEXTS).values.T
    assert not torch.allclose(told_apart[0], told_apart[1], rtol=0.05)


def test_a_norm_behind_queries_and_keys_leaves_them_nothing() -> None:
    found = component_map(shared_model("qwen3"), text=TEXTS)
    assert float(found.values[:, :2].max()) < 1e-5 < float(found.values[:, 2:].min())


def test_contribution_does_not_depend_on_folding() -> None:
    """Where norms have no bias. TransformerLens 3 computes processed gated MLPs with copies: see the refusal."""
    if TL_MAJOR < 4:
        pytest.skip("a processed bridge of TransformerLens 3 has no gradients; run make test")
    raw, processed = (component_map(shared_model("llama", processed=flag), text=TEXTS) for flag in (False, True))
    assert torch.allclose(raw.values, processed.values, rtol=1e-2, atol=1e-6)
    assert (raw.provenance.basis, processed.provenance.basis) == ("raw", "folded")


@pytest.mark.skipif(TL_MAJOR >= 4, reason="only bridges of TransformerLens 3 keep copies; run make test-tl3")
def test_a_matrix_without_gradient_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no gradient for mlp.* uses a copy of that matrix"):
        component_map(shared_model("llama", processed=True), text=TEXTS)


def test_gradients_are_dropped_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a second copy of the model: while one parameter is reduced, no other holds a gradient."""
    model = random_model("neox")
    parameters = list(model.parameters())
    held: list[int] = []
    reduce = gradients_module._sums

    def watching(parts: Tensor) -> Tensor:
        held.append(sum(parameter.grad is not None for parameter in parameters))
        return reduce(parts)

    monkeypatch.setattr(gradients_module, "_sums", watching)
    component_map(model, text=TEXTS, progress=False)
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
@pytest.mark.parametrize("name", ["contribution", "output_share", "stable_rank"])
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
    name = {"forward": "mean_loss", "reduce": "_sums"}[where]
    original = getattr(gradients_module, name)

    def failing(*arguments: Any) -> Tensor:
        if next(calls) == {"forward": 1, "reduce": 40}[where]:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(gradients_module, name, failing)
    with pytest.raises(KeyboardInterrupt):
        component_map(model, text=TEXTS)
    remembered.assert_unchanged()


def test_dropout_is_off_in_a_model_that_trains() -> None:
    """Of GPT-2, which has dropout in three places, one of them outside a bridge's own modules."""
    model = random_model("gpt2")
    resting = component_map(model, text=TEXTS).values
    model.train()
    assert torch.equal(component_map(model, text=TEXTS).values, resting)


def test_inference_tensors_are_refused() -> None:
    with torch.inference_mode():
        model = random_model("llama")
    with pytest.raises(UnsupportedModelError, match=r"inference_mode.*Load it outside"):
        component_map(model, text=TEXTS)


def test_it_runs_inside_inference_mode() -> None:
    model = random_model("llama")
    outside = component_map(model, text=TEXTS)
    with torch.inference_mode():
        assert torch.equal(component_map(model, text=TEXTS).values, outside.values)


# Outputs


def recorded(source: Any, modules: dict[str, Any], batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """First input and output of modules of transformers, one row per real token."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in modules}
    handles = []
    for name, module in modules.items():

        def hook(_: Any, arguments: Any, named: Any, out: Any, name: str = name) -> None:
            given = next(x for x in (*arguments, *named.values()) if isinstance(x, Tensor))
            seen[name].append((given[0], (out[0] if isinstance(out, tuple) else out).reshape(given.shape[1], -1)))

        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    for row, length in zip(batch.tokens, batch.lengths.tolist(), strict=True):
        source(row[None, :length])
    for handle in handles:
        handle.remove()
    return {name: tuple(torch.cat(part) for part in zip(*pairs, strict=True)) for name, pairs in seen.items()}  # type: ignore[misc]


def share(written: Tensor, stream: Tensor) -> float:
    return float((written.norm(dim=-1) / stream.norm(dim=-1)).mean())


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_output_shares_are_those_of_the_modules(kind: str, host: str) -> None:
    """Against transformers' own modules: biases (Qwen 2) and norms behind components (Gemma 3) included."""
    model = random_model(kind, host=host)
    # transformers reopens a tokenizer as the one its model type usually has; Qwen's cannot hold these words.
    model.tokenizer = shared_model("llama").tokenizer
    source = source_model(kind)
    parts = Anatomy(source, kind)
    found = component_map(model, "output_share", TEXTS)
    by_head = head_component_map(model, "output_share", TEXTS)
    layer = 1
    block, attn, mlp = parts.layers[layer], parts.part(layer, "attn"), parts.part(layer, "mlp")
    modules = {"attn.q": attn.q_proj, "attn.k": attn.k_proj, "attn.v": attn.v_proj, "o": attn.o_proj, "block": block}
    modules |= {"mlp.up": mlp.up_proj, "mlp.gate": mlp.gate_proj, "mlp": mlp, "ln2": parts.part(layer, "ln2")}
    posts = {name: parts.part(layer, name) for name in ("ln1_post", "ln2_post")}
    modules |= {name: module for name, module in posts.items() if module is not None}
    expected: dict[str, list[float]] = {}
    heads: dict[str, list[Tensor]] = {"attn.q": [], "attn.o": []}
    for item in token_ids(model, TEXTS).items:
        seen = recorded(source, modules, item)
        for name in ("attn.q", "attn.k", "attn.v", "mlp.up", "mlp.gate"):
            expected.setdefault(name, []).append(share(seen[name][1], seen[name][0]))
        written = seen["ln1_post" if "ln1_post" in seen else "o"][1]
        expected.setdefault("attn.o", []).append(share(written, seen["block"][0]))
        written = seen["ln2_post" if "ln2_post" in seen else "mlp"][1]
        expected.setdefault("mlp.down", []).append(share(written, seen["ln2"][0]))
        q = seen["attn.q"][1].unflatten(1, (4, -1)).norm(dim=-1) / seen["attn.q"][0].norm(dim=-1)[:, None]
        heads["attn.q"].append(q.mean(0))
        z = seen["o"][0].unflatten(1, (4, -1))
        own = torch.einsum("thr,hrd->thd", z, parts.heads(layer).W_O)
        if "ln1_post" in seen:
            # The norm is a factor per token and direction: what came out over what went in.
            own = own * (seen["ln1_post"][1] / seen["o"][1])[:, None]
        heads["attn.o"].append((own.norm(dim=-1) / seen["block"][0].norm(dim=-1)[:, None]).mean(0))
    for name, values in expected.items():
        assert found.at(layer, name) == pytest.approx(sum(values) / len(values), rel=1e-4), name
    for name, values in heads.items():
        mine = by_head.values[SIX.index(name), layer]
        assert torch.allclose(mine, torch.stack(values).mean(0), rtol=1e-3), name


@pytest.mark.parametrize("kind", ["gpt2", "neox", "phi"])
def test_output_shares_without_a_gate(kind: str) -> None:
    """Parallel blocks (Pythia, Phi) have one residual stream for attention and MLP."""
    model = shared_model(kind)
    source, layer = source_model(kind), 2
    parts = Anatomy(source, kind)
    text = TEXTS[3]
    found = component_map(model, "output_share", text)
    batch = token_ids(model, [text]).items[0]
    attn, mlp = parts.part(layer, "attn"), parts.part(layer, "mlp")
    modules = {"block": parts.layers[layer], "attn": attn, "mlp": mlp, "ln2": parts.part(layer, "ln2")}
    seen = recorded(source, modules, batch)
    stream = seen["ln2" if kind == "gpt2" else "block"][0]
    assert found.at(layer, "mlp.down") == pytest.approx(share(seen["mlp"][1], stream), rel=1e-4)
    assert found.at(layer, "attn.o") == pytest.approx(share(seen["attn"][1], seen["block"][0]), rel=1e-4)
    x, heads = seen["attn"][0], parts.heads(layer)
    q = torch.einsum("td,hdr->thr", x, heads.W_Q) + heads.b_Q
    assert found.at(layer, "attn.q") == pytest.approx(share(q.flatten(1), x), rel=1e-4)
    up = {"gpt2": "c_fc", "neox": "dense_h_to_4h", "phi": "fc1"}[kind]
    written = mlp_matrices(parts, layer)["mlp.up"]
    x = seen["mlp"][0]
    assert found.at(layer, "mlp.up") == pytest.approx(share(x @ written + getattr(mlp, up).bias, x), rel=1e-4)


# Two models


def edited(component: str, layer: int, change: Callable[[Tensor], None], kind: str = "llama") -> Any:
    source = source_model(kind)
    change(expected_matrices(Anatomy(source, kind), layer)[component])
    return hosted(source, kind)


def test_an_edit_shows_in_exactly_one_cell() -> None:
    def change(matrix: Tensor) -> None:
        matrix[3, 5] += 0.5

    base, new = shared_model("llama"), edited("mlp.gate", 1, change)
    matrix = mlp_matrices(Anatomy(source_model("llama"), "llama"), 1)["mlp.gate"]
    for name, expected in (("relative_change", 0.5 / float(matrix.norm())), ("changed_share", 1 / matrix.numel())):
        found = component_map(new, name, against=base)
        assert found.values.nonzero().tolist() == [[1, 6]]
        assert found.at(1, "mlp.gate") == pytest.approx(expected, rel=1e-5)
        assert found.baseline is None
        assert found.provenance.data["against"] == component_map(base, "frobenius").provenance.fingerprint


def test_a_fused_edit_shows_in_its_head() -> None:
    source = source_model("neox")
    Anatomy(source, "neox").write_value(2, 3, torch.zeros(32, 8))
    found = head_component_map(hosted(source, "neox"), "relative_change", against=shared_model("neox"))
    assert found.values.nonzero().tolist() == [[2, 2, 3]]
    assert found.top(1) == [("attn.v", (found.top(1)[0][1]), 1.0)] and str(found.top(1)[0][1]) == "L2H3"


def test_a_model_overlaps_with_itself_and_by_chance_with_others() -> None:
    same = component_map(shared_model("llama"), "subspace_overlap", against=shared_model("llama"))
    assert torch.allclose(same.values, torch.ones(3, 7))
    assert same.provenance.options["k"] == 8
    assert same.baseline is not None and torch.allclose(same.baseline, torch.full((3, 7), math.sqrt(8 / 32)))
    other = component_map(shared_model("llama"), "subspace_overlap", against=random_model("llama", seed=9))
    assert float(other.values.mean()) == pytest.approx(math.sqrt(8 / 32), rel=0.1)
    assert float(other.values.max()) < 0.8
    assert "random: 0.5000" in str(other)


def test_overlap_is_taken_in_the_residual_stream() -> None:
    """Scaling neurons or heads mixes the other side; rotating the stream by 90 degrees leaves nothing."""
    basis = torch.eye(12, dtype=torch.float64)
    one = basis[:, :2] @ torch.diag(torch.tensor([3.0, 2.0], dtype=torch.float64)) @ basis[:2]
    other = basis[:, 2:4] @ torch.diag(torch.tensor([3.0, 2.0], dtype=torch.float64)) @ basis[:2]
    measure = METRICS["subspace_overlap"].measure
    assert measure(Change(Matrix(one), Matrix(other), 2)) == pytest.approx(0, abs=1e-12)
    assert measure(Change(Matrix(one, writes=True), Matrix(other, writes=True), 2)) == pytest.approx(1)
    tall, k = torch.randn(40, 9, generator=torch.Generator().manual_seed(0)), 4
    left = torch.linalg.svd(tall.double(), full_matrices=False).U[:, :k]
    found = Matrix(tall).stream_basis(k)
    assert float((left.T @ found).square().sum()) == pytest.approx(k, rel=1e-9)


def test_a_folder_is_opened(tmp_path: Path) -> None:
    model = shared_model("llama")
    source = source_model("llama")
    source.model.layers[1].self_attn.q_proj.weight.mul_(1.5)
    source.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    found = component_map(model, "relative_change", against=tmp_path)
    assert found.values.nonzero().tolist() == [[1, 0]]
    assert found.at(1, "attn.q") == pytest.approx(1 / 3, rel=1e-5)


def test_models_of_different_shape_are_refused() -> None:
    model = shared_model("llama")
    for change, message in (
        ({"intermediate_size": 48}, r"mlp.up of layer 0 is \[32, 64\] here and \[32, 48\]"),
        ({"n_layers": 2}, r"n_layers is 3 here and 2"),
        ({"n_kv_heads": 4}, r"n_kv_heads is 2 here and 4"),
    ):
        with pytest.raises(UsageError, match=f"{message} in the one compared with"):
            component_map(model, "relative_change", against=random_model("llama", **change))
    with pytest.raises(UsageError, match=r"components is .*'mlp.gate'.* here and"):
        component_map(model, "relative_change", against=shared_model("gpt2"))
    with pytest.raises(WeightBasisError, match=r"raw here and folded in the model compared with"):
        component_map(model, "relative_change", against=shared_model("llama", processed=True))


# Text and batches


def test_padding_changes_nothing() -> None:
    model = shared_model("llama")
    together = token_ids(model, TEXTS[:2], batch_tokens=1000)
    padded = Batch(
        torch.nn.utils.rnn.pad_sequence([item.tokens[0] for item in together.items], batch_first=True, padding_value=9),
        torch.cat([item.lengths for item in together.items]),
    )
    source = ModelComponents(model)
    alone = component_gradients(source, together, progress=False)
    joined = component_gradients(source, Batches((padded,), 33, ""), progress=False)
    counts = (padded.lengths - 1).double()
    for name in source.components:
        expected = (alone[name].product * counts[:, None, None]).sum(0) / counts.sum()
        assert torch.allclose(joined[name].product[0], expected, rtol=2e-3, atol=2e-5)


@given(st.lists(st.integers(0, 90), min_size=1, max_size=12), st.integers(2, 40), st.integers(2, 200))
def test_batches_hold_every_token_once(lengths: list[int], length: int, batch_tokens: int) -> None:
    class Counting:
        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text]}

    texts = ["".join(chr(65 + (i + j) % 26) for j in range(n)) for i, n in enumerate(lengths)]
    if max(lengths) < 2:
        with pytest.raises(UsageError, match="too short"):
            token_batches(texts, Counting(), length=length, max_tokens=10**6, batch_tokens=batch_tokens)
        return
    found = token_batches(texts, Counting(), length=length, max_tokens=10**6, batch_tokens=batch_tokens)
    rows = [row[:n] for item in found.items for row, n in zip(item.tokens, item.lengths.tolist(), strict=True)]
    assert all(2 <= len(row) <= length for row in rows)
    joined = "".join(chr(token) for row in rows for token in row.tolist())
    # A sequence of one token has no loss: only such rests may be missing.
    dropped = sum(map(len, texts)) - len(joined)
    assert found.n_tokens == len(joined)
    assert dropped <= sum(1 for text in texts if text) * (length if length == 2 else 1)
    if all(len(text) >= 2 for text in texts) and length > 2:
        assert joined == "".join(texts)
    for item in found.items:
        assert int((item.targets != -100).sum()) == int((item.lengths - 1).sum())


def test_max_tokens_stops_reading() -> None:
    def endless() -> Any:
        number = 0
        while True:
            number += 1
            assert number < 100, "more was read than needed"
            yield TEXTS[0]

    assert component_map(shared_model("gpt2"), text=endless(), max_tokens=100).n_tokens == 100


def test_bos_is_prepended_when_asked_for() -> None:
    model = shared_model("gpt2")
    batches = token_ids(model, TEXTS[:1], prepend_bos=True)
    assert batches.items[0].tokens[0, 0] == 2
    assert batches.n_tokens == token_ids(model, TEXTS[:1]).n_tokens + 1
    found = [component_map(model, text=TEXTS, prepend_bos=flag) for flag in (False, True)]
    assert not torch.allclose(found[0].values, found[1].values)
    assert found[1].provenance.options["prepend_bos"] is True


def test_intervals_are_t_intervals_over_batches() -> None:
    values = torch.rand(7, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    plain = mean_over_batches(values, normalised=False)
    half = student.ppf(0.975, 6) * values.std(0) / math.sqrt(7)
    assert torch.allclose(plain.values, values.mean(0))
    assert plain.low is not None and torch.allclose(plain.low, values.mean(0) - half)
    shares = values / values.sum((1, 2), keepdim=True)
    share = mean_over_batches(shares, normalised=True)
    # With equal sums in all batches the ratio is a plain mean.
    assert share.high is not None
    assert torch.allclose(share.high, shares.mean(0) + student.ppf(0.975, 6) * shares.std(0) / math.sqrt(7))
    assert float(share.values.sum()) == pytest.approx(1)


def test_intervals_cover_shares_as_often_as_they_say() -> None:
    """400 maps of two cells from 8 batches whose sums vary: 95% of the intervals hold the true share."""
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        size = torch.rand(8, 1, generator=generator, dtype=torch.float64) + 0.5
        cells = size * (torch.tensor([0.3, 0.7]) + 0.05 * torch.randn(8, 2, generator=generator, dtype=torch.float64))
        found = mean_over_batches(cells, normalised=True)
        assert found.low is not None and found.high is not None
        covered += bool(found.low[0] <= 0.3 <= found.high[0])
    assert 0.92 < covered / 400 < 0.98


def test_one_batch_has_no_interval() -> None:
    found = component_map(shared_model("gpt2"), text=TEXTS[0])
    assert (found.n_batches, found.interval_low, found.interval_high) == (1, None, None)
    several = component_map(shared_model("gpt2"), text=TEXTS)
    assert several.n_batches == len(TEXTS)
    assert several.interval_low is not None and several.interval_high is not None
    assert bool((several.interval_low <= several.values).all() and (several.values <= several.interval_high).all())
    assert float(several.values.sum()) == pytest.approx(1, abs=1e-5)


# The result


def test_a_registered_function_is_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """One function, nothing else: it gets its baseline, its place in the list and its map."""
    monkeypatch.setattr("tl_headmaps.scorers.components.METRICS", METRICS)

    @metric("weights", "largest entry")
    def largest(matrix: Matrix) -> float:
        return float(matrix.weight.abs().max())

    try:
        found = component_map(shared_model("llama"), "largest")
        assert found.unit == "largest entry" and found.baseline is not None
        matrix = component_source(shared_model("llama")).matrix(2, "attn.v")
        assert found.at(2, "attn.v") == float(matrix.abs().max())
        with pytest.raises(UsageError, match="largest"):
            component_map(shared_model("llama"), "unknown")
    finally:
        del METRICS["largest"]


@pytest.mark.parametrize("call", [component_map, head_component_map])
@pytest.mark.parametrize("name", ["contribution", "tail_exponent"])
@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_maps_load_back_equal(call: Any, name: str, suffix: str, tmp_path: Path) -> None:
    result = call(shared_model("llama"), name, TEXTS if name == "contribution" else None)
    again = type(result).load(result.save(tmp_path / f"map{suffix}"))
    assert again == result
    assert str(again) == str(result)


def test_json_says_what_it_holds(tmp_path: Path) -> None:
    result = component_map(shared_model("llama"), "stable_rank")
    read = json.loads(result.save(tmp_path / "c.json").read_text("utf-8"))
    assert read["kind"] == "component_map" and read["metric"] == "stable_rank"
    assert read["axes"] == {"layer": [0, 1, 2], "component": [*SIX, "mlp.gate"]}
    assert [len(row) for row in read["values"]] == [7, 7, 7]
    assert read["provenance"]["seed"] == 0
    head = json.loads(head_component_map(shared_model("llama"), "stable_rank").to_json())
    assert head["kind"] == "head_component_map" and list(head["axes"]) == ["component", "layer", "head"]
    assert head["values"][1][0][2:] == [None, None]
    rows = list(result.to_rows())
    assert len(rows) == 21 and rows[8]["component"] == "attn.k" and rows[8]["layer"] == 1
    assert rows[8]["value"] == float(result.values[1, 1])
    assert len(list(head_component_map(shared_model("llama"), "stable_rank").to_rows())) == 3 * (4 + 2 + 2 + 4)


def test_undefined_cells_are_null() -> None:
    source = source_model("llama")
    source.model.layers[0].self_attn.o_proj.weight.zero_()
    model = hosted(source, "llama")
    found = component_map(model, "stable_rank")
    assert math.isnan(found.at(0, "attn.o")) and json.loads(found.to_json())["values"][0][3] is None
    assert len(found.top(100)) == 20 and " - " in str(found)
    assert math.isnan(component_map(shared_model("llama"), "relative_change", against=model).at(0, "attn.o"))
    assert math.isnan(component_map(model, "gradient_ratio", TEXTS).at(0, "attn.o"))


def test_cells_can_be_looked_up() -> None:
    found = component_map(shared_model("llama"), "frobenius")
    layer, component, value = found.top(1)[0]
    assert value == float(found.values.max()) == found.at(layer, component)
    with pytest.raises(UsageError, match=r"no component 'attn.x'; it has attn.q"):
        found.at(0, "attn.x")
    heads = head_component_map(shared_model("llama"), "frobenius")
    assert heads.top(1, "attn.k")[0][2] == float(heads.of("attn.k").max())


def test_the_text_form_shows_the_map() -> None:
    shown = str(component_map(shared_model("gpt2"), text=TEXTS))
    assert shown.startswith("Component map of tiny-gpt2: contribution, ")
    assert all(name in shown for name in SIX) and "mlp.gate" not in shown
    assert "share of |sum(w * dLoss/dw)| over the map; from " in shown
    shown = str(head_component_map(shared_model("gpt2"), text=TEXTS))
    assert "Component map by head of tiny-gpt2" in shown and "key/value heads" in shown


# What can go wrong


def test_wrong_calls_are_sentences() -> None:
    model = shared_model("llama")
    weights = HeadWeights.from_model(model)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"metric": "nonsense"}, r"no metric 'nonsense'.*contribution.*frobenius.*relative_change"),
        ({"metric": "relative_change"}, r"compares two models.*against="),
        ({"metric": "frobenius", "against": model}, r"looks at one model, but against="),
        ({"metric": "frobenius", "text": "words"}, r"reads the weights alone, but a text was given"),
        ({"relative": True}, r"contribution has no random baseline"),
        ({"metric": "relative_change", "against": model, "relative": True}, r"no random baseline"),
        ({"metric": "subspace_overlap", "against": model, "k": 17}, r"k=17 is impossible.*16 directions"),
        ({"metric": "subspace_overlap", "against": model, "k": 0}, r"k=0 is impossible"),
        ({"text": f" {word(5)}"}, r"too short: the longest text has 1 token, .*at least two tokens"),
        ({"text": []}, r"too short: there is no text"),
        ({"text": ["", "  "]}, r"too short: there is no text"),
        ({"text": 5}, r"int is not a source of texts"),
        ({"text": TEXTS, "max_tokens": 1}, r"max_tokens=1 is too few"),
    ]
    for options, message in cases:
        with pytest.raises(UsageError, match=message):
            component_map(model, **options)
    with pytest.raises(UsageError, match=r"runs a text through the model, but only weights"):
        component_map(weights)
    with pytest.raises(UsageError, match=r"is not a TransformerLens model"):
        component_map(object(), "frobenius")
    with pytest.raises(UnsupportedModelError, match="no tokenizer"):
        component_map(shared_model("llama", tokenizer=False), text=TEXTS)


def test_head_subspaces_are_limited_by_the_head() -> None:
    with pytest.raises(UsageError, match=r"k=9 is impossible: the smallest matrix has 8 directions"):
        head_component_map(shared_model("llama"), "subspace_overlap", against=shared_model("llama"), k=9)


def test_nan_weights_are_refused() -> None:
    model = edited("mlp.down", 2, lambda matrix: matrix[0].fill_(math.nan))
    with pytest.raises(UnsupportedModelError, match=r"mlp.down of layer 2 holds 32 NaN"):
        component_map(model, "frobenius")


def test_signature_is_the_documented_one() -> None:
    for call in (component_map, head_component_map):
        names = list(inspect.signature(call).parameters)
        assert names[:4] == ["model_or_weights", "metric", "text", "against"]


# The default model


@pytest.fixture(scope="module")
def default_map(default_model: Any) -> ComponentMap:
    return component_map(default_model, max_tokens=200, progress=False)


@pytest.mark.model
def test_the_default_model_maps_thirty_layers_by_seven(default_map: ComponentMap) -> None:
    assert default_map.values.shape == (30, 7) and default_map.components == (*SIX, "mlp.gate")
    assert float(default_map.values.sum()) == pytest.approx(1, abs=1e-5)
    assert default_map.n_tokens == 200
    assert default_map.provenance.options["text"] == "bundled sample english.txt"


@pytest.mark.model
def test_the_default_map_is_reproducible_to_the_byte(default_model: Any, default_map: ComponentMap) -> None:
    again = component_map(default_model, max_tokens=200, progress=False)
    ours, theirs = ({**json.loads(m.to_json()), "provenance": None} for m in (default_map, again))
    assert json.dumps(ours) == json.dumps(theirs)
    assert default_map.provenance.fingerprint == again.provenance.fingerprint


@pytest.mark.model
def test_the_default_spectra_are_those_of_a_decomposition(default_model: Any) -> None:
    """One layer's seven matrices, against torch.linalg.svdvals."""
    source = component_source(default_model)
    for name in source.components:
        matrix = source.matrix(11, name)
        for metric_name, expected in by_definition(matrix).items():
            found = METRICS[metric_name].measure(Matrix(matrix))
            assert found == pytest.approx(expected, rel=METRIC_ACCURACY), (name, metric_name)


def test_the_command_writes_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tl_headmaps, "load_model", lambda *_: shared_model("llama"))

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tl-headmaps", "components", *arguments])
        try:
            main()
        except SystemExit as leaving:
            return int(leaving.code or 0)
        return 0

    text = tmp_path / "text.txt"
    text.write_text(f" {word(5)} {word(6)}-\n\n {word(9)} {word(8)}\n", encoding="utf-8")
    out = tmp_path / "c.json"
    assert run("--text", str(text), "--metric", "output_share", "--out", str(out)) == 0
    saved = json.loads(out.read_text("utf-8"))
    assert saved["kind"] == "component_map" and saved["axes"]["component"] == [*SIX, "mlp.gate"]
    assert saved["n_batches"] == 2 and "output_share, 5 tokens" in capsys.readouterr().out
    assert run("--metric", "frobenius", "--heads", "--out", str(out)) == 0
    assert json.loads(out.read_text("utf-8"))["kind"] == "head_component_map"
    capsys.readouterr()
    for arguments, message in (
        (["--metric", "loudness"], "There is no metric 'loudness'"),
        (["--text", str(tmp_path / "none.txt")], "Cannot read the text file"),
        (["--against", str(tmp_path)], "is not a folder with a model"),
    ):
        assert run(*arguments) == 2
        shown = capsys.readouterr().err
        assert message in shown and "Traceback" not in shown


def test_results_are_of_their_classes() -> None:
    assert isinstance(component_map(shared_model("gpt2"), "frobenius"), ComponentMap)
    assert isinstance(head_component_map(shared_model("gpt2"), "frobenius"), HeadComponentMap)
