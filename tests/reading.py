"""A model that no test changes is read, checked and hashed once, however many analyses are asked about it."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tl_headmaps import HeadWeights

_USUAL = HeadWeights.__dict__["from_model"]
_KEPT: dict[int, Any] = {}
_READ: dict[int, tuple[Any, HeadWeights]] = {}


def keep(model: Any) -> None:
    """From now on every analysis gets the same weights of this model; of any other, as usual."""
    _KEPT[id(model)] = model


@contextmanager
def read_once(model: Any) -> Iterator[HeadWeights]:
    """The same inside a block."""
    keep(model)
    try:
        yield HeadWeights.from_model(model)
    finally:
        _READ.pop(id(model), None)
        del _KEPT[id(model)]


@functools.wraps(_USUAL.__func__)
def _from_model(cls: type[HeadWeights], model: Any, device: Any = None) -> HeadWeights:
    if id(model) not in _KEPT or device is not None:
        read: HeadWeights = _USUAL.__get__(None, cls)(model, device)
        return read
    # A test may well give it another tokenizer, or change a weight and put it back.
    state = (id(model.tokenizer), model.cfg.model_name, *(parameter._version for parameter in model.parameters()))
    if id(model) not in _READ or _READ[id(model)][0] != state:
        weights = _USUAL.__get__(None, cls)(model, device)
        if weights.d_model < _SMALL:
            weights = replace(weights, read_layer=functools.cache(weights.read_layer))
        _READ[id(model)] = (state, weights)
    return _READ[id(model)][1]


_SMALL = 200
"""Width below which all layers of a model are kept."""

HeadWeights.from_model = classmethod(_from_model)
