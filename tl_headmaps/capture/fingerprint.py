"""A fingerprint of everything a model computes with, to know activations again that were kept on disk.

:attr:`HeadWeights.fingerprint` covers the weights that weight-only analyses read; activations depend on all of them.
"""

import hashlib
from typing import Any

from .tensors import hash_tensor


def model_fingerprint(model: Any) -> str:
    """SHA-256 over names, shapes, types and all the bytes of all parameters and buffers of a model.

    Two names of one tensor are hashed once. Raw and processed weights, and different hosts, have different ones.
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        place = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if place in seen:
            continue
        seen.add(place)
        digest.update(f"{name} {tensor.dtype}".encode())
        hash_tensor(digest, tensor)
    return digest.hexdigest()
