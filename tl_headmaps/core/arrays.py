"""Arrays passed in by a caller: converted to tensors, checked, and identified by their digest."""

import hashlib
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import UsageError


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


def dtype_name(array: Tensor) -> str:
    """``float32`` and so on."""
    return str(array.dtype).removeprefix("torch.")
