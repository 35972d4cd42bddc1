"""Whether weights once were integers: what a configuration says, or what the values of a matrix show.

Dequantised weights look like any others, but in every block of a row they lie on a few equally spaced levels. Three
forms are told by name (llama.cpp's, blocks of 32 values along the input):

    Q4_0   d * (q - 8)     q = 0 ... 15, and 0 in every block
    Q4_1   d * q + m       q = 0 ... 15, and 0 and 15 in every block
    Q8_0   d * q           q = -127 ... 127, and -127 or 127 in every block

Others with sixteen levels (GPTQ, AWQ, NF4, K-quants) are only said to have four bits.
"""

from typing import Any

import torch
from torch import Tensor

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
