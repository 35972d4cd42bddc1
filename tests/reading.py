"""A model that no test changes is read, checked and hashed once, however many analyses are asked about it."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tl_headmaps import HeadWeights


@contextmanager
def read_once(model: Any) -> Iterator[HeadWeights]:
    """Every analysis inside this block gets the same weights of this model; of any other, as usual."""
    weights, usual = HeadWeights.from_model(model), HeadWeights.__dict__["from_model"]

    @functools.wraps(usual.__func__)
    def from_model(cls: type[HeadWeights], asked: Any, device: Any = None) -> HeadWeights:
        if asked is model and device is None:
            return weights
        read: HeadWeights = usual.__get__(None, cls)(asked, device)
        return read

    HeadWeights.from_model = classmethod(from_model)
    try:
        yield weights
    finally:
        HeadWeights.from_model = usual
