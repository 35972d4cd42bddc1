"""Metrics from text: batches of all tokens, honest intervals."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import SIX, TEXTS, token_ids
from planted import shared_model
from scipy.stats import t as student
from torch import Tensor

from tl_headmaps import ComponentMap, component_map
from tl_headmaps.capture.components.gradients import component_gradients
from tl_headmaps.capture.components.matrices import ModelComponents
from tl_headmaps.capture.running import text as batches_module
from tl_headmaps.capture.running.text import TextBatch, TextBatches, token_batches
from tl_headmaps.core.errors import UsageError
from tl_headmaps.scorers.components import METRICS, attention_share, over_documents, trend_over_layers

# Text and batches


def test_padding_changes_nothing() -> None:
    model = shared_model("llama")
    together = token_ids(model, TEXTS[:2])
    padded = TextBatch(
        torch.nn.utils.rnn.pad_sequence([item.tokens[0] for item in together.items], batch_first=True, padding_value=9),
        torch.cat([item.lengths for item in together.items]),
    )
    source = ModelComponents(model)
    measure = METRICS["contribution"].measure
    alone = component_gradients(source, together, measure, progress=False)
    joined = component_gradients(source, TextBatches((padded,), (0,), 2, 33, ""), measure, progress=False)
    counts = (padded.lengths - 1).double()
    for name in source.components:
        expected = (alone[name] * counts[:, None, None]).sum(0) / counts.sum()
        assert torch.allclose(joined[name][0], expected, rtol=2e-3, atol=2e-5)


@given(st.lists(st.integers(0, 90), min_size=1, max_size=12), st.integers(2, 40), st.sampled_from([2, 5, 128]))
def test_batches_hold_every_token_once(lengths: list[int], length: int, most_units: int) -> None:
    class Counting:
        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text]}

    texts = ["".join(chr(65 + (i + j) % 26) for j in range(n)) for i, n in enumerate(lengths)]
    if max(lengths) < 2:
        with pytest.raises(UsageError, match="too short"):
            token_batches(texts, Counting(), length=length, max_tokens=10**6)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches_module, "_MOST_UNITS", most_units)
        found = token_batches(texts, Counting(), length=length, max_tokens=10**6)
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
        assert int((item.targets != -100).sum()) == item.n_targets == int((item.lengths - 1).sum())
        assert int(item.lengths.sum()) <= length
    units = list(found.units)
    assert units == sorted(units) and set(units) == set(range(units[-1] + 1)) and len(set(units)) <= most_units
    assert found.n_documents == sum(len(text) >= 2 for text in texts)
    if found.n_documents <= most_units:
        # A batch is from one document: no two of them share a unit.
        assert len(set(units)) == found.n_documents
        by_unit = {unit: "" for unit in units}
        for unit, item in zip(units, found.items, strict=True):
            rows = [row[:n].tolist() for row, n in zip(item.tokens, item.lengths.tolist(), strict=True)]
            by_unit[unit] += "".join(chr(token) for row in rows for token in row)
        if length > 2:
            kept = [text for text in texts if len(text) >= 2]
            assert all(mine == text for mine, text in zip(by_unit.values(), kept, strict=True))


def test_max_tokens_stops_reading() -> None:
    def endless() -> Any:
        number = 0
        while True:
            number += 1
            assert number < 100, "more was read than needed"
            yield TEXTS[0]

    found = component_map(shared_model("gpt2"), "contribution", endless(), max_tokens=100, prepend_bos=False)
    assert found.n_tokens == 100


def maps(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_signed_mean_over_all_tokens_comes_first_and_then_its_size() -> None:
    """By hand: two documents that pull in opposite directions cancel; sizes averaged would not."""
    measured = torch.tensor([3.0, -1.0, 1.0, 1.0], dtype=torch.float64).reshape(2, 2, 1, 1)
    found = over_documents(measured, torch.tensor([1.0, 3.0]), torch.tensor([0, 1]))
    assert found.values.flatten().tolist() == [1.5, 0.5]
    shares = over_documents(measured, torch.tensor([1.0, 3.0]), torch.tensor([0, 1]), "map")
    assert shares.values.flatten().tolist() == [0.75, 0.25]
    cancelling = torch.tensor([1.0, 1.0, -1.0, 1.0], dtype=torch.float64).reshape(2, 2, 1, 1)
    assert over_documents(cancelling, torch.ones(2), torch.tensor([0, 1]), "map").values.flatten().tolist() == [0, 1]


@given(st.integers(0, 100), st.sampled_from([None, "map", "layer"]))
def test_batches_make_no_difference(seed: int, share: Any) -> None:
    """Tokens split over batches in any way: the same map, and the same interval if documents stay whole."""
    random = np.random.default_rng(seed)
    tokens = maps(seed, 60, 3, 2, 2) + 0.3
    documents = torch.from_numpy(np.sort(random.integers(0, 6, 60)))
    documents = torch.unique(documents, return_inverse=True)[1]
    edges = [
        0,
        *sorted(set(random.integers(1, 60, 9).tolist()) | set((documents.diff().nonzero()[:, 0] + 1).tolist())),
        60,
    ]
    parts = [slice(first, last) for first, last in pairwise(edges)]
    batches = torch.stack([tokens[part].mean(0) for part in parts])
    sizes = torch.tensor([float(part.stop - part.start) for part in parts])
    one = over_documents(tokens, torch.ones(60), documents, share)
    other = over_documents(batches, sizes, documents[edges[:-1]], share)
    for mine, theirs in zip(vars(one).values(), vars(other).values(), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.allclose(mine, theirs)


def test_the_interval_is_the_jackknife_over_documents() -> None:
    """Against a loop that leaves one document out at a time; of a plain mean of equal documents it is Student's."""
    values, sizes = maps(1, 8, 3, 2, 1) + 0.5, torch.rand(8, generator=torch.Generator().manual_seed(2)) + 0.5
    documents = torch.tensor([0, 0, 1, 2, 3, 3, 3, 4])

    def share(keep: Tensor) -> Tensor:
        mean = (values[keep] * sizes[keep].double()[:, None, None, None]).sum(0) / sizes[keep].sum().double()
        return mean / mean.abs().sum()

    without = torch.stack([share(documents != document) for document in range(5)])
    half = student.ppf(0.975, 4) * ((without - without.mean(0)).square().sum(0) * 4 / 5).sqrt()
    found = over_documents(values, sizes, documents, "map")
    size = share(documents >= 0).abs()
    assert found.low is not None and found.high is not None
    assert torch.allclose(found.values, size) and torch.allclose(found.high, size + half)
    assert torch.allclose(found.low, (size - half).clamp_min(0))
    plain = over_documents(values.abs(), torch.ones(8), torch.arange(8))
    half = student.ppf(0.975, 7) * values.abs().std(0) / math.sqrt(8)
    assert plain.high is not None and torch.allclose(plain.high, values.abs().mean(0) + half)


def test_rows_sum_to_one_when_shares_are_of_the_layer() -> None:
    found = component_map(shared_model("llama"), texts=TEXTS, normalise="layer")
    assert torch.allclose(found.values.sum(1), torch.ones(3))
    assert found.unit == "share of sum|w * dLoss/dw| of its layer"
    drawn = found.figure().data
    assert drawn.layers[0].scale.unit == "share of its layer"
    assert drawn.note.startswith("Sensitivity: sum|w * dLoss/dw| over the entries of a matrix.")
    whole = component_map(shared_model("llama"), texts=TEXTS, normalise="map")
    assert torch.allclose(found.values, whole.values / whole.values.sum(1, keepdim=True))
    assert component_map(shared_model("llama"), texts=TEXTS).provenance.options["normalise"] == "map"
    assert whole.figure().data.layers[0].scale.unit == "share of the map"
    heads = component_map(shared_model("llama"), texts=TEXTS, normalise="layer", by_head=True)
    assert torch.allclose(heads.values.nansum((0, 2)), torch.ones(3))
    with pytest.raises(UsageError, match=r"frobenius is not a share of anything, but normalise='layer' was given"):
        component_map(shared_model("llama"), "frobenius", normalise="layer")


def test_fewer_than_four_documents_have_no_interval_and_say_so() -> None:
    model = shared_model("gpt2")
    found = component_map(model, "contribution", TEXTS[:3])
    assert (found.n_documents, found.interval_low, found.interval_high) == (3, None, None)
    assert "No intervals: they need 4 documents." in str(found) and "need 4 documents" in found.figure().data.note
    assert found.zeros is None and found.shift().intervals is None
    several = component_map(model, "contribution", TEXTS)
    assert several.n_documents == several.n_batches == len(TEXTS)
    assert several.interval_low is not None and several.interval_high is not None
    assert bool((several.interval_low <= several.values).all() and (several.values <= several.interval_high).all())
    assert float(several.values.sum()) == pytest.approx(1, abs=1e-5)
    assert "need 4" not in str(several)


def test_cells_whose_interval_includes_zero_are_marked() -> None:
    found = component_map(shared_model("gpt2"), "contribution", TEXTS)
    low = found.interval_low
    assert low is not None and found.zeros is not None and 0 < int(found.zeros.sum()) < found.zeros.numel()
    assert torch.equal(found.zeros, low == 0)
    shown = str(found)
    assert shown.partition("share of")[0].count("(") == int(found.zeros.sum())
    assert f"In {int(found.zeros.sum())} cells (in brackets) the 95% interval includes 0." in " ".join(shown.split())
    layer = found.figure().data.layers[0]
    assert layer.marked.tolist() == found.zeros.tolist()
    assert "95% interval includes 0" in found.figure().body


def test_many_short_documents_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "_MOST_UNITS", 5)
    found = component_map(shared_model("gpt2"), "contribution", TEXTS * 4)
    alone = component_map(shared_model("gpt2"), "contribution", TEXTS)
    assert found.n_documents == 24 and 5 <= found.n_batches < 24
    assert torch.allclose(found.values, alone.values, rtol=1e-3, atol=1e-6)


# Attention and MLP over the layers


def test_the_shift_is_that_of_a_planted_trend() -> None:
    """Attention's share falls from 0.6 to 0.3 in equal steps: thirds and slope by hand."""
    share = torch.linspace(0.6, 0.3, 7)
    values = torch.stack([share / 4] * 4 + [(1 - share) / 3] * 3, 1) * torch.rand(7, 1)
    found = component_map(shared_model("llama"), texts=TEXTS)
    planted = replace(found, values=values, attention_without=None).shift()
    assert planted.layers == ((0, 1), (2, 4), (5, 6))
    assert planted.thirds == pytest.approx((0.575, 0.45, 0.325)) and planted.slope == pytest.approx(-0.3)
    assert str(planted).endswith("It falls by 0.30 from the first layer to the last.")
    without = share + 0.01 * torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    sure = replace(found, values=values, attention_without=without, n_documents=4).shift()
    assert sure.intervals is not None
    half = student.ppf(0.975, 3) * 0.01 * math.sqrt(3)
    assert sure.intervals[0] == pytest.approx((0.575 - half, 0.575 + half), abs=1e-6)
    assert sure.intervals[3] == pytest.approx((-0.3, -0.3), abs=1e-6)
    assert str(sure).endswith("a shift from attention to the MLP (95% over 4 documents).")
    unsteady = replace(sure, thirds=(0.3, 0.4, 0.2))
    assert "a shift from attention to the MLP, though no steady one: it is largest in between (95%" in str(unsteady)
    tilted = share + 0.5 * torch.linspace(-1, 1, 7) * torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    unsure = str(replace(found, values=values, attention_without=tilted, n_documents=4).shift())
    assert "its slope, −0.30 (" in unsure and "shows no shift (95% over 4 documents)" in unsure


def test_the_shift_of_a_model_is_in_the_text_and_under_the_figure() -> None:
    found = component_map(shared_model("llama"), texts=TEXTS)
    shift = found.shift()
    expected = found.values[:, :4].sum(1) / found.values.sum(1)
    assert shift.thirds == pytest.approx(tuple(expected.tolist()), rel=1e-5)
    assert shift.intervals is not None and shift.n_documents == len(TEXTS)
    assert str(shift) in found.figure().data.note
    assert "Attention's share of its layer" in str(found)
    again = ComponentMap.from_dict(json.loads(found.to_json()))
    assert str(again.shift()) == str(shift)
    for other in (component_map(shared_model("llama"), "frobenius"), replace(found, components=SIX[:3] + SIX[3:4] * 4)):
        with pytest.raises(UsageError, match="A shift from attention to the MLP is seen in shares of both"):
            other.shift()
        assert "Attention's share" not in str(other)


def test_layers_without_attention_are_left_out_of_the_trend() -> None:
    values = torch.tensor([0.5, math.nan, 0.5, math.nan, 0.25, 0.25], dtype=torch.float64)
    thirds, slope = trend_over_layers(values)
    assert thirds.tolist() == [0.5, 0.5, 0.25]
    expected = np.polyfit(np.array([0, 2, 4, 5]) / 5, [0.5, 0.5, 0.25, 0.25], 1)[0]
    assert float(slope) == pytest.approx(expected)
    cells = torch.ones(7, 2, 1, dtype=torch.float64)
    cells[:4, 1] = math.nan
    attention = torch.tensor([True] * 4 + [False] * 3)
    shares = attention_share(cells, attention)
    assert float(shares[0]) == pytest.approx(4 / 7) and bool(shares[1].isnan())
