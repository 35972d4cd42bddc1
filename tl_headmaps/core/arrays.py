"""Arrays that a caller passes in: converted to tensors, checked, and recorded by their digest."""

import hashlib
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import UsageError


def given_tensor(values: Any, name: str, expected: str) -> Tensor:
    """An array, tensor or nested list as a tensor of real numbers; lists become float64, integers float32."""
    try:
        given = values if isinstance(values, Tensor) else _from_numpy(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} is not an array of numbers ({error}). Give {expected}.") from error
    if given.is_complex():
        raise UsageError(f"{name} contains complex numbers. Give {expected} of real numbers.")
    return given.detach() if given.is_floating_point() else given.float()


def _from_numpy(values: Any) -> Tensor:
    array = values if isinstance(values, np.ndarray) else np.asarray(values, dtype=np.float64)
    with warnings.catch_warnings():
        # A memory-mapped file may be read-only; nothing here writes to it.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def arrays_digest(*arrays: Tensor) -> str:
    """SHA-256 over shapes and values, read a few rows at a time."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(str(tuple(array.shape)).encode())
        for matrix in array.reshape(-1, *array.shape[-2:]):
            for rows in matrix.split(256):
                digest.update(rows.to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()


def dtype_name(array: Tensor) -> str:
    """``float32`` and so on."""
    return str(array.dtype).removeprefix("torch.")
