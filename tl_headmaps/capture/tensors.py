"""Large matrices, a few rows at a time: checked, summed and hashed without a converted copy of the whole.

And arrays of the caller: converted, checked, and identified by their digest.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import xxhash
from jaxtyping import Float
from torch import Tensor

from ..core.errors import UnsupportedModelError, UsageError
from .mapped import release_pages

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
