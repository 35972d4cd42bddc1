"""Public calls compute as in a fresh process, whatever torch was set to before.

``torch.autocast``, another default type or device, a lower precision of products, inference mode: each of them changes
numbers, or makes a call fail far from its cause. :func:`steady` puts a public call, or the public methods of a class,
between setting torch to its defaults and setting it back::

    @steady
    def token_grid(model, ...): ...
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from .types import check_seed

_Public = TypeVar("_Public", bound=Callable[..., Any])

_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")
_WRAPPED = (staticmethod, classmethod)


class _Defaults(threading.local):
    """Whether this thread is inside a public call."""

    inside = False


class _ProcessWide:
    """Settings of the whole process: the first public call sets them, the last one of all threads sets them back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.n_calls = 0
        self.before: tuple[Any, ...] = ()

    def enter(self) -> None:
        import torch

        with self.lock:
            if self.n_calls == 0:
                self.before = (torch.get_default_dtype(), torch.get_float32_matmul_precision())
                self._set(torch.float32, "highest")
            self.n_calls += 1

    def leave(self) -> None:
        with self.lock:
            self.n_calls -= 1
            if self.n_calls == 0:
                self._set(*self.before)

    @staticmethod
    def _set(dtype: Any, precision: str) -> None:
        import torch

        # Only what differs: setting a precision again resets finer settings of the backends.
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)


_HERE = _Defaults()
_EVERYWHERE = _ProcessWide()


@contextmanager
def steady_torch() -> Iterator[None]:
    """Torch as it is in a fresh process, without gradients; as it was before on exit."""
    import torch

    with ExitStack() as stack:
        _EVERYWHERE.enter()
        stack.callback(_EVERYWHERE.leave)
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            # Only then: while a default device is set, every function of torch takes a detour.
            stack.enter_context(torch.device("cpu"))
        _HERE.inside = True
        stack.callback(setattr, _HERE, "inside", False)
        yield


def steady(public: _Public) -> _Public:
    """A public function that computes under torch's defaults; of a class, all public methods it defines itself.

    A ``seed=`` that no generator takes is refused.

    Example:
        >>> import torch
        >>> @steady
        ... def half():
        ...     return torch.tensor(0.5)
        >>> torch.set_default_dtype(torch.float64)
        >>> half().dtype
        torch.float32
        >>> torch.set_default_dtype(torch.float32)
    """
    if isinstance(public, type):
        for name, value in list(vars(public).items()):
            if _is_public(name):
                setattr(public, name, _steady_member(value))
        return public

    @functools.wraps(public)
    def call(*arguments: Any, **options: Any) -> Any:
        if _HERE.inside:
            return public(*arguments, **options)
        check_seed(options.get("seed"))
        with steady_torch():
            return public(*arguments, **options)

    vars(call)["is_steady"] = True
    return call  # type: ignore[return-value]


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__str__", "_repr_html_")


def _steady_member(value: Any) -> Any:
    if isinstance(value, _WRAPPED):
        return type(value)(steady(value.__func__))
    if isinstance(value, property) and value.fget is not None:
        return property(steady(value.fget), doc=value.__doc__)
    if isinstance(value, functools.cached_property):
        value.func = steady(value.func)
        return value
    return steady(value) if inspect.isfunction(value) else value
