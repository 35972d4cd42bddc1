"""Running a model undisturbed: evaluation mode, no hooks of its user, no gradients; all is put back on exit."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..core.errors import UsageError
from ..core.types import Model

_HOOK_DICTIONARIES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_LOCKS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()

_CHANGED: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How many blocks of the user's that change a model are open, by model; read and written under its lock."""


def lock_of(model: Model | torch.nn.Module) -> Any:
    """The lock of one model object, held while its hooks and modes are not the user's: two threads take turns."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, threading.RLock())


@contextmanager
def silenced(module: Model | torch.nn.Module) -> Iterator[None]:
    """Run a module without the user's hooks; they are put back on exit."""
    from transformer_lens.hook_points import HookPoint

    points = [vars(part) for part in module.modules() if isinstance(part, HookPoint)]
    # Most have none; those that a hook was added to and left in are emptied again.
    known = [(point, name, point[name]) for point in points for name in _HOOK_DICTIONARIES]
    replaced = [entry for entry in known if entry[2]]
    left = [hooks for _, _, hooks in known if not hooks]
    try:
        for point, name, _ in replaced:
            point[name] = OrderedDict()
        yield
    finally:
        for point, name, hooks in replaced:
            point[name] = hooks
        for hooks in left:
            hooks.clear()


def all_modules(model: Model | torch.nn.Module) -> list[torch.nn.Module]:
    """Every module that runs, including modules of transformers outside the bridge (GPT-2's first dropout)."""
    return list(dict.fromkeys(module for root in roots(model) for module in root.modules()))


def roots(model: Model | torch.nn.Module) -> list[Any]:
    """A model, and the model of transformers inside it."""
    inner = getattr(model, "original_model", None)
    return [model, inner] if isinstance(inner, torch.nn.Module) else [model]


@contextmanager
def isolated(model: Model | torch.nn.Module) -> Iterator[None]:
    """Evaluation mode and none of the user's hooks; both are restored on exit. One thread at a time has the model."""
    with lock_of(model):
        if _CHANGED.get(model):
            raise UsageError(
                "Heads of this model are switched off by ablated(...), and a result would name the whole model. Leave "
                "the block before you call an analysis. What switching heads off does is measured by ablate() and "
                "head_worth(); analyses with cache= describe a run_with_cache() made inside the block."
            )
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
def changed(model: Model | torch.nn.Module) -> Iterator[None]:
    """Refuse analyses of a model, in every thread, while a block of the user's changes what it computes.

    The lock is held at the ends of the block alone. Were it held inside, a block that waits for another thread's
    analysis would wait for ever; as it is, that analysis is refused.
    """
    with lock_of(model):
        _CHANGED[model] = _CHANGED.get(model, 0) + 1
    try:
        yield
    finally:
        with lock_of(model):
            _CHANGED[model] -= 1


@contextmanager
def unchanged(model: Model | torch.nn.Module) -> Iterator[None]:
    """Let this thread look at the model without the user's hooks although blocks of the user's are open."""
    with lock_of(model):
        n_blocks = _CHANGED.get(model, 0)
        try:
            _CHANGED[model] = 0
            yield
        finally:
            _CHANGED[model] = n_blocks


@contextmanager
def evaluating(model: Model | torch.nn.Module) -> Iterator[None]:
    """Isolated, and without gradients."""
    with torch.no_grad(), isolated(model):
        yield
