"""Large matrices, a few rows at a time: mapped, checked, summed and hashed without a converted copy of the whole.

Pages of a mapped file count as resident memory of the process from the first access until the mapping ends, though the
system needs none of them to stay. Code that reads a large matrix in blocks calls :func:`release_pages` after each: the
pages leave the process, stay in the system's file cache, and come back by themselves on the next access. For any other
tensor the call does nothing, so callers need not know where a matrix is. Mapped tensors are never written to: a change
would be private to the process and lost with the page.

Arrays of the caller are converted, checked, and identified by their digest.

Whether weights once were integers is told by their values. Dequantised weights look like any others, but in every block
of a row they lie on a few equally spaced levels. Three forms are told by name (llama.cpp's, blocks of 32 values along
the input); others with sixteen levels (GPTQ, AWQ, NF4, K-quants) are only said to have four bits::

    Q4_0   d * (q - 8)     q = 0 ... 15, and 0 in every block
    Q4_1   d * q + m       q = 0 ... 15, and 0 and 15 in every block
    Q8_0   d * q           q = -127 ... 127, and -127 or 127 in every block
"""

import hashlib
import mmap
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import xxhash
from jaxtyping import Float, Int
from torch import Tensor

from ..core.errors import UnsupportedModelError, UsageError

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


_BLOCK_ENTRIES = 1 << 20
"""Entries of a large matrix that are converted at once."""

_WITHOUT_FLOAT64 = ("mps",)
"""Devices that cannot compute in double precision."""


def check_device(device: str | torch.device | None) -> None:
    """Refuse a device that does not exist here, or that holds no values."""
    if device is None:
        return
    try:
        usable = torch.zeros(1, device=device).device.type != "meta"
        reason = "it holds no values"
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError, ImportError) as error:
        usable, reason = False, (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    if not usable:
        raise UsageError(
            f"The device {str(device)!r:.60} cannot be used here ({reason:.160}). Use cpu, or cuda or mps if there "
            "is one."
        )


def check_finite(tensor: Tensor, name: str) -> None:
    """Refuse NaN and infinite weights: every rank they touch would be silently wrong."""
    # A sum is finite unless an entry is not (or adding overflows), and costs less than testing each.
    if not all(bool(torch.isfinite(rows.sum(dtype=torch.float32))) for rows in row_blocks(tensor)):
        bad = sum(int((~torch.isfinite(rows)).sum()) for rows in row_blocks(tensor))
        if bad:
            raise UnsupportedModelError(
                f"{name} contains {bad} NaN or infinite value{'s' if bad > 1 else ''}; scores need finite weights. "
                "Reload the checkpoint, or repair that tensor."
            )


def row_blocks(matrix: Tensor) -> Iterator[Tensor]:
    """A large matrix, a few rows at a time."""
    per_row = max(1, matrix.numel() // max(1, len(matrix)))
    for rows in matrix.split(max(1, _BLOCK_ENTRIES // per_row)):
        yield rows
        release_pages(rows)


def in_float64(tensor: Tensor) -> Tensor:
    """The tensor in double precision, on the CPU if its device has none (Apple's GPUs)."""
    return (tensor.cpu() if tensor.device.type in _WITHOUT_FLOAT64 else tensor).to(torch.float64)


def mean_row(matrix: Float[Tensor, "row width"]) -> Float[Tensor, " width"]:
    """Mean of the rows of a large matrix, summed in float64 whatever its device and type."""
    # Into one place: small results left between large freed blocks would keep the heap from using those again.
    total = torch.zeros_like(in_float64(matrix[0]))
    for rows in row_blocks(matrix):
        total += in_float64(rows).sum(0)
    return (total / matrix.shape[0]).to(device=matrix.device, dtype=torch.float32)


def row_lengths(matrix: Float[Tensor, "row width"]) -> Float[Tensor, " row"]:
    """Norm of every row of a large matrix, in float32."""
    lengths, done = torch.empty(len(matrix), device=matrix.device), 0
    for rows in row_blocks(matrix):
        lengths[done : done + len(rows)] = rows.float().norm(dim=-1)
        done += len(rows)
    return lengths


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Type, shape and SHA-256 of all the bytes of each tensor, by name.

    Bytes are read in memory order, on as many threads as torch uses. Two names of one tensor are read once.
    """
    places = {
        name: (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) for name, tensor in tensors.items()
    }
    distinct = {places[name]: tensor for name, tensor in tensors.items()}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        digests = dict(zip(distinct, pool.map(_bytes_digest, distinct.values()), strict=True))
    return {name: f"{tensor.dtype} {list(tensor.shape)} {digests[places[name]]}" for name, tensor in tensors.items()}


def joint_digest(digests: Mapping[str, str]) -> str:
    """SHA-256 over digests and their names, in the order of the names."""
    return hashlib.sha256("\n".join(f"{name} {digests[name]}" for name in sorted(digests)).encode()).hexdigest()


def quick_digest(tensor: Tensor) -> str:
    """128 bits over all the bytes of a tensor, at the speed of memory: whether it is the same, in this process."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return xxhash.xxh3_128_hexdigest(tensor.detach().flatten().view(torch.uint8).numpy().data)
    return _bytes_digest(tensor, xxhash.xxh3_128)


def _bytes_digest(tensor: Tensor, algorithm: Callable[[], Any] = hashlib.sha256) -> str:
    digest = algorithm()
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    # A scalar is a row of one.
    for rows in row_blocks(tensor.detach().permute(order) if order else tensor.detach()[None]):
        digest.update(rows.cpu().contiguous().view(torch.uint8).numpy().data)
    hexadecimal: str = digest.hexdigest()
    return hexadecimal


def given_tensor(values: Any, name: str, expected: str) -> Tensor:
    """An array, tensor or nested lists as a real tensor; lists and whole numbers become float64.

    Args:
        values: What the caller passed.
        name: What it is called in an error message.
        expected: What it should have been, for the message.
    """
    try:
        tensor = values if isinstance(values, Tensor) else _from_numpy(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} is not an array of numbers ({error}). Give {expected}.") from error
    if tensor.is_complex():
        raise UsageError(f"{name} holds complex numbers; give {expected} of real numbers.")
    return tensor.detach() if tensor.is_floating_point() else tensor.double()


def _from_numpy(values: Any) -> Tensor:
    array = values if isinstance(values, np.ndarray) else np.asarray(values, dtype=np.float64)
    if any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch has no views that run backwards
    with warnings.catch_warnings():
        # A memory-mapped file may be read-only, which is fine: nothing here writes to it.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def arrays_digest(*arrays: Tensor) -> str:
    """SHA-256 over shapes and values; rows are converted a few at a time, to save memory."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(str(tuple(array.shape)).encode())
        for matrix in array.reshape(-1, *array.shape[-2:]):
            for rows in matrix.split(256):
                digest.update(rows.to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()


_BLOCK = 32
_LEAST_BLOCKS = 64
"""Fewer, as tiny models have them, could look like that by chance."""
_MOST_BLOCKS = 2048
_LEAST_LEVELS = 8
"""Fewer are zeros and repeated values; 32 numbers that were rounded to 16 levels are on 12 or 13 of them."""
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.13}
"""How far values may be from their levels, in steps. bfloat16 rounds by half a step of Q8_0, so that nothing shows."""


def stated_quantisation(config: Any) -> str | None:
    """What the configuration of a transformers model says about quantised weights."""
    stated = getattr(config, "quantization_config", None)
    if not stated:
        return None
    values = stated if isinstance(stated, dict) else vars(stated)
    method = values.get("quant_method", "a method that is not named")
    bits = values.get("bits")
    return str(getattr(method, "value", method)) + (f", {bits} bits" if bits else "")


def quantisation_of(matrix: Tensor, dtype: torch.dtype) -> str | None:
    """How the values of a matrix were quantised before they became numbers again; None if they do not show it.

    Args:
        matrix: Rows are outputs, columns inputs.
        dtype: The type it is stored in.

    Example:
        >>> weights = torch.randn(64, 2, 32, generator=torch.Generator().manual_seed(0))
        >>> step = (weights.abs().amax(2, keepdim=True) / 127).half().float()
        >>> rounded = (weights / step).round() * step
        >>> [quantisation_of(each.flatten(1), torch.float32) for each in (weights, rounded)]
        [None, 'Q8_0, dequantised']
    """
    rows, columns = matrix.shape
    if columns % _BLOCK or rows * columns < _LEAST_BLOCKS * _BLOCK:
        return None
    sample = matrix[: -(-_MOST_BLOCKS * _BLOCK // columns)].detach().cpu().double()
    blocks = sample.unflatten(1, (-1, _BLOCK)).flatten(0, 1).sort(1).values
    levels = 1 + (blocks.diff(dim=1) > 0).sum(1)
    if int(levels.median()) < _LEAST_LEVELS:
        return None
    low, high = blocks[:, :1], blocks[:, -1:]
    largest = torch.where(high.abs() > low.abs(), high, low)
    forms = {"Q8_0": blocks / largest * 127}
    if int(levels.max()) <= 16:
        forms = {"Q4_1": (blocks - low) / (high - low) * 15, "Q4_0": blocks / largest * 8}
    for name, steps in forms.items():
        # A block of zeros has no steps, and says nothing.
        if float((steps - steps.round()).abs().nan_to_num().max()) < _TOLERANCE.get(dtype, 0.0):
            return f"{name}, dequantised"
    return "four bits, dequantised" if "Q4_1" in forms else None
