"""Tensors in files: read where they lie, let go of and read again, never mistaken for memory of our own."""

import gc
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import random_model, save_checkpoint, source_model
from torch import Tensor

from tl_headmaps import HeadWeights, Relation, relation_scores
from tl_headmaps.capture import tensors
from tl_headmaps.capture.checkpoint.reader import open_tokenizer
from tl_headmaps.capture.tensors import is_mapped, map_tensor, release_pages, reordered, rows_of
from tl_headmaps.circuits import vectors
from tl_headmaps.circuits.vectors import cache_of

ROWS, WIDTH = 3000, 256


@pytest.fixture
def values() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def matrix(values: Tensor, tmp_path: Path) -> Tensor:
    return written(tmp_path / "matrix", values)


def written(path: Path, values: Tensor, offset: int = 104) -> Tensor:
    path.write_bytes(b"\xff" * offset + values.view(torch.uint8).numpy().tobytes())
    return map_tensor(path, offset, values.dtype, tuple(values.shape))


def resident_kib(path: Path) -> int:
    """Memory of this process that is pages of a file."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("how much of a mapping is resident is only shown on Linux")
    found = re.findall(rf"{re.escape(str(path))}(?: \(deleted\))?\n.*?\nRss: +(\d+) kB", smaps.read_text(), re.DOTALL)
    return sum(map(int, found))


@pytest.mark.parametrize("offset", [0, 8, 104, 4096, 70_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_mapped_tensor_is_what_the_file_holds(
    offset: int, dtype: torch.dtype, values: Tensor, tmp_path: Path
) -> None:
    found = written(tmp_path / "file", values.to(dtype), offset)
    assert is_mapped(found) and is_mapped(found[5:].T)
    assert torch.equal(found, values.to(dtype))


def test_a_file_that_is_not_aligned_is_copied(values: Tensor, tmp_path: Path) -> None:
    found = written(tmp_path / "file", values, 103)
    assert not is_mapped(found)
    assert torch.equal(found, values)


def test_an_empty_tensor(tmp_path: Path) -> None:
    assert written(tmp_path / "file", torch.empty(0, 7)).shape == (0, 7)


def test_pages_leave_and_come_back(matrix: Tensor, values: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "matrix"
    matrix.sum()
    assert resident_kib(path) >= ROWS * WIDTH * 4 // 1024
    release_pages(matrix[: ROWS // 2])
    assert resident_kib(path) <= ROWS * WIDTH * 4 // 1024 // 2 + 8
    release_pages(matrix.T[3:])
    assert resident_kib(path) <= 8
    assert torch.equal(matrix, values)


def test_memory_of_our_own_stays(values: Tensor) -> None:
    """The advice would turn anonymous memory into zeros."""
    before = values.clone()
    for tensor in (values, values[7:9], values.T, torch.empty(0), torch.empty(3, device="meta")):
        release_pages(tensor)
        assert not is_mapped(tensor)
    assert torch.equal(values, before)


def test_a_mapping_ends_with_its_last_view(values: Tensor, tmp_path: Path) -> None:
    view = written(tmp_path / "file", values)[10:]
    address = view.untyped_storage().data_ptr()
    assert address in tensors._MAPPINGS
    del view
    gc.collect()
    assert address not in tensors._MAPPINGS


@pytest.mark.parametrize("ids", [[], [4], [0, 1, 2999], [2999, 0, 5, 5, 1], list(range(3000)), [7] * 100])
@pytest.mark.parametrize("window", [1, 5000, 1 << 30])
def test_rows_in_any_order(ids: list[int], window: int, matrix: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_WINDOW", window)
    chosen = torch.tensor(ids, dtype=torch.int64)
    assert torch.equal(rows_of(matrix, chosen), matrix[chosen])
    assert torch.equal(rows_of(matrix.clone(), chosen), matrix[chosen])


def test_gathering_keeps_a_window(values: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, window = tmp_path / "large", 2 << 20
    large = written(path, values.repeat(8, 1))
    monkeypatch.setattr(tensors, "_WINDOW", window)
    most = []
    gone = tensors.release_pages
    monkeypatch.setattr(tensors, "release_pages", lambda tensor: (most.append(resident_kib(path)), gone(tensor)))
    rows_of(large, torch.arange(len(large)))
    # The kernel may bring in 2 MiB around a page that is looked at, at both ends of the window.
    assert len(most) == 12 and max(most) <= (window + 2 * (2 << 20)) // 1024 < large.nbytes // 1024 // 3


def test_another_order_on_disk(matrix: Tensor, tmp_path: Path) -> None:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    folder = tmp_path / "new" / "folder"
    found = reordered(matrix, order, folder)
    assert found is not None and is_mapped(found)
    assert torch.equal(found, matrix[order])
    assert not list(folder.iterdir())
    (tmp_path / "file").touch()
    assert reordered(matrix, order, tmp_path / "file") is None


@pytest.mark.parametrize("way", ["on disk", "nowhere to write", "too large"])
def test_scores_do_not_depend_on_where_the_unembedding_lies(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(source_model("llama", n_vocab=300), tmp_path / "model")
    relation = Relation.from_pairs("some", [(i, 290 - i) for i in range(60)])
    (tmp_path / "file").touch()
    expected = relation_scores(
        HeadWeights.from_checkpoint(folder, device="cpu"), relation, progress=False, preset="folded"
    )
    if way == "nowhere to write":
        monkeypatch.setattr(vectors, "cache_folder", lambda: tmp_path / "file")
    elif way == "too large":
        monkeypatch.setattr(vectors, "_LARGEST_COPY", 0)
    read = HeadWeights.from_checkpoint(folder)
    assert (cache_of(read).ordered_unembedding is not None) == (way == "on disk")
    assert torch.equal(relation_scores(read, relation, progress=False, preset="folded").promote, expected.promote)


def test_what_the_engine_keeps_is_freed_with_the_weights() -> None:
    read = HeadWeights.from_model(random_model("llama"))  # not one that the tests keep
    relation_scores(read, Relation.from_pairs("some", [(3, 4)]), progress=False, preset="folded")
    kept = cache_of(read)
    assert kept is cache_of(read) is not cache_of(replace(read))
    gone = [weakref.ref(kept), weakref.ref(kept.ordered_unembedding)]
    del kept, read
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


class TestTokenizer:
    @pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "TokenizersBackend", "GPT2Tokenizer", None])
    @pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "neox", "phi", "qwen2", "mistral"])
    def test_it_is_the_one_the_library_chooses(self, kind: str, named: str | None, tmp_path: Path) -> None:
        import json

        from transformers import AutoTokenizer

        source = source_model(kind)
        folder = save_checkpoint(source, tmp_path)
        path = folder / "tokenizer_config.json"
        own = json.loads(path.read_text()) | {"tokenizer_class": named}
        path.write_text(json.dumps({name: value for name, value in own.items() if value is not None}))
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        ours, theirs = open_tokenizer("x", folder, config), AutoTokenizer.from_pretrained(folder)
        assert type(ours) is type(theirs)
        assert ours.get_vocab() == theirs.get_vocab()
        text = " ".join(ours.convert_ids_to_tokens(range(20))) + " nobody knows this"
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]

    @pytest.mark.skipif(
        sys.version_info < (3, 11), reason="the last transformers for Python 3.10 loads scikit-learn; run it on 3.11"
    )
    def test_scores_from_a_checkpoint_load_no_model_code(self, tmp_path: Path) -> None:
        folder = save_checkpoint(source_model("llama"), tmp_path)
        code = f"""
import sys
import weakref
from dataclasses import replace
from tl_headmaps import HeadWeights, Relation, relation_scores
weights = HeadWeights.from_checkpoint({str(folder)!r})
assert weights.tokenizer is not None
relation_scores(weights, Relation.from_pairs("some", [(1, 2), (3, 4)]), progress=False)
heavy = ("transformer_lens", "datasets", "pandas", "scipy.stats", "torch._dynamo", "transformers.modeling_utils")
print([name for name in heavy if name in sys.modules])
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"
