"""Arrays of results as JSON: nested lists, null for what was not asked for or is not defined."""

import math
from typing import Any

import torch
from torch import Tensor


def nested(values: Tensor) -> Any:
    """Nested lists with None for NaN."""
    if values.ndim > 1:
        return [nested(part) for part in values]
    return [None if math.isnan(value) else value for value in values.tolist()]


def tensor_of(values: list[Any]) -> Tensor:
    """Inverse of :func:`nested`, float32."""

    def fill(part: Any) -> Any:
        return [fill(entry) for entry in part] if isinstance(part, list) else (math.nan if part is None else part)

    return torch.tensor(fill(values), dtype=torch.float32)
