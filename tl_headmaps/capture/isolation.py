"""Running a model undisturbed: evaluation mode, no hooks of its user, no gradients; all is put back on exit."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..core.types import Model

_HOOK_DICTIONARIES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def silenced(module: Model | torch.nn.Module) -> Iterator[None]:
    """Run a module without the user's hooks; they are put back on exit."""
    from transformer_lens.hook_points import HookPoint

    points = [part for part in module.modules() if isinstance(part, HookPoint)]
    saved = [{name: getattr(point, name) for name in _HOOK_DICTIONARIES} for point in points]
    try:
        for point in points:
            for name in _HOOK_DICTIONARIES:
                setattr(point, name, OrderedDict())
        yield
    finally:
        for point, hooks in zip(points, saved, strict=True):
            for name, value in hooks.items():
                setattr(point, name, value)


def all_modules(model: Model | torch.nn.Module) -> list[torch.nn.Module]:
    """Every module that runs, including modules of transformers outside the bridge (GPT-2's first dropout)."""
    return list(dict.fromkeys(module for root in roots(model) for module in root.modules()))


def roots(model: Model | torch.nn.Module) -> list[Any]:
    """A model, and the model of transformers inside it."""
    inner = getattr(model, "original_model", None)
    return [model, inner] if isinstance(inner, torch.nn.Module) else [model]


@contextmanager
def isolated(model: Model | torch.nn.Module) -> Iterator[None]:
    """Evaluation mode and none of the user's hooks; both are restored on exit."""
    training = [module for module in all_modules(model) if module.training]
    try:
        for module in training:
            module.training = False
        with silenced(model):
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def evaluating(model: Model | torch.nn.Module) -> Iterator[None]:
    """Isolated, and without gradients."""
    with torch.no_grad(), isolated(model):
        yield
