"""Arrays that a caller hands over: read as tensors, refused in sentences, remembered by their digest."""

import hashlib
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError


def given_tensor(values: Any, name: str, expected: str) -> Tensor:
    """An array, tensor or nested lists as a real tensor; integers become floats."""
    try:
        given = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} is not an array of numbers ({error}). Give {expected}.") from error
    if given.is_complex():
        raise UsageError(f"{name} holds complex numbers; give {expected} of real numbers.")
    return given.detach() if given.is_floating_point() else given.float()


def digest_of(*arrays: Tensor) -> str:
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
