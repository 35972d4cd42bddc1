"""Metrics from text: outputs as the modules of transformers write them, batches of all tokens, honest intervals."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import HOSTS, SIX, TEXTS, mlp_matrices, token_ids
from planted import Anatomy, random_model, shared_model, source_model
from scipy.stats import t as student
from torch import Tensor

from tl_headmaps import component_map
from tl_headmaps.capture.components.gradients import component_gradients
from tl_headmaps.capture.components.matrices import ModelComponents
from tl_headmaps.capture.running.batches import TextBatch, TextBatches, token_batches
from tl_headmaps.core.errors import UsageError
from tl_headmaps.scorers.components import mean_over_batches


def recorded(source: Any, modules: dict[str, Any], batch: TextBatch) -> dict[str, tuple[Tensor, Tensor]]:
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
    found = component_map(model, "output_share", TEXTS, prepend_bos=False)
    by_head = component_map(model, "output_share", TEXTS, by_head=True, prepend_bos=False)
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
    found = component_map(model, "output_share", text, prepend_bos=False)
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


# Text and batches


def test_padding_changes_nothing() -> None:
    model = shared_model("llama")
    together = token_ids(model, TEXTS[:2], batch_tokens=1000)
    padded = TextBatch(
        torch.nn.utils.rnn.pad_sequence([item.tokens[0] for item in together.items], batch_first=True, padding_value=9),
        torch.cat([item.lengths for item in together.items]),
    )
    source = ModelComponents(model)
    alone = component_gradients(source, together, progress=False)
    joined = component_gradients(source, TextBatches((padded,), 33, ""), progress=False)
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

    found = component_map(shared_model("gpt2"), "contribution", endless(), max_tokens=100, prepend_bos=False)
    assert found.n_tokens == 100


def test_bos_is_prepended_when_asked_for() -> None:
    model = shared_model("gpt2")
    batches = token_ids(model, TEXTS[:1], prepend_bos=True)
    assert batches.items[0].tokens[0, 0] == 2
    assert batches.n_tokens == token_ids(model, TEXTS[:1]).n_tokens + 1
    found = [component_map(model, "contribution", TEXTS, prepend_bos=flag) for flag in (False, True)]
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
    found = component_map(shared_model("gpt2"), "contribution", TEXTS[0])
    assert (found.n_batches, found.interval_low, found.interval_high) == (1, None, None)
    several = component_map(shared_model("gpt2"), "contribution", TEXTS)
    assert several.n_batches == len(TEXTS)
    assert several.interval_low is not None and several.interval_high is not None
    assert bool((several.interval_low <= several.values).all() and (several.values <= several.interval_high).all())
    assert float(several.values.sum()) == pytest.approx(1, abs=1e-5)
