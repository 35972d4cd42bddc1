"""Tensors in files: mapped into memory, and released page by page once they have been read.

Pages of a mapped file count as resident memory of the process from the first access until the mapping ends, though the
system needs none of them to stay. Code that reads a large matrix in blocks calls :func:`release_pages` after each: the
pages leave the process, stay in the system's file cache, and come back by themselves on the next access. For any other
tensor the call does nothing, so callers need not know where a matrix is.

Mapped tensors are never written to: a change would be private to the process and lost with the page.
"""

import mmap
import tempfile
from itertools import pairwise
from math import prod
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

_WINDOW = 8 << 20
"""Bytes of a mapped matrix whose rows are gathered before its pages are released."""


class _Mapping(mmap.mmap):
    """A part of a file, from a page boundary on; ``start`` is where its tensor begins."""

    start: int


_MAPPINGS: WeakValueDictionary[int, _Mapping] = WeakValueDictionary()
"""Mappings by the address of their tensor's memory; a tensor keeps its own alive."""


def map_tensor(path: Path, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor mapped from ``offset`` of a file; the caller has checked that the file is long enough."""
    with path.open("rb") as stream:
        return _mapped(stream.fileno(), offset, dtype, shape)


def _mapped(file: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    n_entries = prod(shape)
    if not n_entries:
        return torch.empty(shape, dtype=dtype, device="cpu")
    start = offset % mmap.ALLOCATIONGRANULARITY
    # Copy on write: the only access that torch takes without a warning, and the file stays unchanged.
    mapping = _Mapping(file, start + n_entries * dtype.itemsize, access=mmap.ACCESS_COPY, offset=offset - start)
    if start % dtype.itemsize:
        # Files that do not align their tensors cannot be read in place.
        with mapping:
            return torch.frombuffer(bytearray(mapping[start:]), dtype=dtype).view(shape)
    mapping.start = start
    tensor = torch.frombuffer(mapping, dtype=dtype, count=n_entries, offset=start).view(shape)
    _MAPPINGS[tensor.untyped_storage().data_ptr()] = mapping
    return tensor


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor (or the tensor it is a view of) is mapped from a file."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _MAPPINGS


def release_pages(tensor: Tensor) -> None:
    """Drop the pages of a mapped tensor from the process until their next access."""
    if tensor.device.type != "cpu" or not tensor.numel() or not hasattr(mmap, "MADV_DONTNEED"):
        return
    mapping = _MAPPINGS.get(tensor.untyped_storage().data_ptr())
    if mapping is None:
        return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    n_bytes = (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.dtype.itemsize
    start = mapping.start + int(tensor.storage_offset()) * tensor.dtype.itemsize
    # Whole pages: what neighbouring tensors lose with them comes back as well.
    page = start - start % mmap.PAGESIZE
    mapping.madvise(mmap.MADV_DONTNEED, page, start + n_bytes - page)


def rows_of(matrix: Float[Tensor, "row width"], ids: Int[Tensor, " chosen"]) -> Float[Tensor, "chosen width"]:
    """Some rows of a matrix, copied; only a window of a mapped matrix is resident at a time."""
    if not is_mapped(matrix):
        return matrix[ids]
    if len(ids) > 1 and not bool((ids[1:] >= ids[:-1]).all()):
        ascending, place = ids.sort()
        return rows_of(matrix, ascending)[place.argsort()]
    per_window = max(1, _WINDOW // (matrix.shape[1] * matrix.dtype.itemsize))
    windows = torch.arange(0, len(matrix) + per_window, per_window, device=ids.device)
    rows = torch.empty(len(ids), matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    for start, stop in pairwise(torch.searchsorted(ids, windows).tolist()):
        if stop > start:
            torch.index_select(matrix, 0, ids[start:stop], out=rows[start:stop])
            release_pages(matrix)
    return rows


def reordered(
    matrix: Float[Tensor, "row width"], order: Int[Tensor, " chosen"], folder: Path
) -> Float[Tensor, "chosen width"] | None:
    """Rows of a mapped matrix in another order, mapped from an anonymous file that is freed with them.

    Scans then read them sequentially and without a copy in memory. None if the folder is full or cannot be written to.
    """
    per_window = max(1, _WINDOW // (matrix.shape[1] * matrix.dtype.itemsize))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as stream:
            for ids in order.split(per_window):
                stream.write(rows_of(matrix, ids).view(torch.uint8).numpy().data)
            stream.flush()
            return _mapped(stream.fileno(), 0, matrix.dtype, (len(order), matrix.shape[1]))
    except OSError:
        return None
