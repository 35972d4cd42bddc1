"""Met vectors: what a layer reads at a token behind a prompt, equal to a whole forward pass whatever the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from planted import DECODERS, needs_hooked, random_model, shared_model
from torch import Tensor

from tl_headmaps import HeadWeights
from tl_headmaps.capture.running import met as engine
from tl_headmaps.capture.running.met import met_vectors
from tl_headmaps.core.errors import UsageError

PREFIXES = ([2, 5, 9, 4], [2, 7, 3], [2, 11, 6, 8, 10, 12, 3])
SOURCES = [(13,), (14,), (15,), (20, 21), (22,), (30, 31, 32)]
TOLERANCE = 1e-4
"""Largest difference to a whole pass; normalised vectors are of order one."""

KINDS = [*DECODERS, "mistral"]


def expected(model: Any, layer: int) -> Tensor:
    """The same from whole passes and the model's own norm, without weight and bias."""
    norm = HeadWeights.from_model(model).layer(layer).ln1
    rows = []
    for source in SOURCES:
        streams = []
        for prefix in PREFIXES:
            _, cache = model.run_with_cache(torch.tensor([[*prefix, *source]]))
            x = cache[f"blocks.{layer}.hook_resid_pre"][0, -1].float()
            if norm is not None:
                x = x - x.mean() if norm.centres else x
                x = x / torch.sqrt(x.square().mean() + norm.eps)
            streams.append(x)
        rows.append(torch.stack(streams).mean(0))
    return torch.stack(rows)


def check(model: Any, folder: Path) -> None:
    vectors = met_vectors(model, SOURCES, PREFIXES, cache_dir=folder, progress=False)
    for layer in range(len(model.blocks)):
        torch.testing.assert_close(vectors.layer(layer), expected(model, layer), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_whole_passes(kind: str, tmp_path: Path) -> None:
    check(shared_model(kind), tmp_path)


@needs_hooked
@pytest.mark.parametrize("kind", DECODERS)
def test_vectors_of_hooked_transformers(kind: str, tmp_path: Path) -> None:
    check(shared_model(kind, host="hooked"), tmp_path)


def test_sliding_windows_shorter_than_the_prompt(tmp_path: Path) -> None:
    check(
        random_model("gemma3", sliding_window=3, layer_types=["sliding_attention", "full_attention"] * 2, n_layers=4),
        tmp_path,
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_raw_and_processed_weights_give_the_same(kind: str, tmp_path: Path) -> None:
    raw, processed = shared_model(kind), shared_model(kind, processed=True)
    one = met_vectors(raw, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
    other = met_vectors(processed, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
    assert one.folder != other.folder
    for layer in range(len(raw.blocks)):
        # A centring norm leaves nothing of the mean, which processing takes off the stream.
        torch.testing.assert_close(one.layer(layer), other.layer(layer), atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(one.values(layer), other.values(layer), atol=TOLERANCE, rtol=0)


def test_vectors_do_not_depend_on_batches_or_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model("llama")
    whole = met_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path / "a", progress=False)
    monkeypatch.setattr(engine, "_BATCH_BYTES", 1)
    monkeypatch.setattr(engine, "_PART_BYTES", 1)
    single = met_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path / "b", progress=False)
    assert len(whole.parts) == 1 and len(single.parts) == len(SOURCES)
    for layer in range(len(model.blocks)):
        torch.testing.assert_close(whole.layer(layer), single.layer(layer), atol=1e-5, rtol=0)


def test_layer_0_of_a_rotary_model_reads_the_embedding(tmp_path: Path) -> None:
    model = shared_model("llama")
    vectors = met_vectors(model, [(13,), (14,)], PREFIXES, cache_dir=tmp_path, progress=False)
    norm = HeadWeights.from_model(model).layer(0).ln1
    assert norm is not None
    assert torch.equal(vectors.layer(0), norm.normalised(model.embed.W_E[[13, 14]].float()))


def test_a_host_without_a_faithful_cache_runs_whole_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model("llama")
    past = engine._past

    def forgetful(model: Any, prefix: Tensor) -> Any:
        return past(model, prefix[:, :1])

    monkeypatch.setattr(engine, "_past", forgetful)
    check(model, tmp_path)


def test_values_of_each_prefix(tmp_path: Path) -> None:
    model = shared_model("llama")
    vectors = met_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
    _, cache = model.run_with_cache(torch.tensor([[*PREFIXES[1], *SOURCES[3]]]))
    torch.testing.assert_close(vectors.values(2)[1, :, 3], cache["blocks.2.attn.hook_v"][0, -1], atol=TOLERANCE, rtol=0)


class TestCache:
    def test_a_second_call_reads_the_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = shared_model("llama")
        first = met_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
        monkeypatch.setattr(engine, "_capture", None)
        again = met_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
        assert torch.equal(first.layer(1), again.layer(1))

    @pytest.mark.parametrize("harm", ["cut", "flip", "gone"])
    def test_a_damaged_file_is_reported_and_made_again(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
    ) -> None:
        model = shared_model("llama")
        first = met_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
        before, path = first.layer(1), sorted(first.folder.iterdir())[1]
        data = path.read_bytes()
        if harm == "gone":
            path.unlink()
        else:
            path.write_bytes(data[:-9] if harm == "cut" else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        if harm != "gone":
            with pytest.raises(UsageError, match="cannot be read"):
                first.layer(1)
        again = met_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
        assert torch.equal(again.layer(1), before) and path.read_bytes() == data
        assert ("is damaged" in capsys.readouterr().err) == (harm != "gone")

    def test_another_weight_is_another_model(self, tmp_path: Path) -> None:
        model = random_model("llama")
        first = met_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
        with torch.no_grad():
            next(model.blocks[1].mlp.parameters()).mul_(1.5)
        second = met_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
        assert first.folder != second.folder
        assert not torch.allclose(first.layer(2), second.layer(2))


def test_hooks_of_the_user_are_silent_and_stay(tmp_path: Path) -> None:
    model = random_model("llama")
    calls = []
    model.blocks[0].hook_resid_pre.add_hook(lambda value, hook: calls.append(1))
    before = [len(point._forward_hooks) for point in model.modules() if hasattr(point, "_forward_hooks")]
    met_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
    assert not calls
    assert before == [len(point._forward_hooks) for point in model.modules() if hasattr(point, "_forward_hooks")]
