"""The public border: what a call does before its first line.

:func:`public` puts a call between setting torch to its defaults and setting it back, checks its options by their
annotations, and completes its docstring::

    @public
    def head_worth(model: Model, texts: Any = None, *, max_tokens: Count = 64, seed: Seed = 0) -> HeadWorth: ...

Options that many calls share are described once, in :data:`SHARED_ARGS`; a call's own ``Args:`` say what is special.
"""

import functools
import inspect
import re
import textwrap
import threading
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import index
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from .errors import UsageError, shown
from .types import MOST_DRAWS, check_choice, is_index

_Call = TypeVar("_Call", bound=Callable[..., Any])


@dataclass(frozen=True)
class Between:
    """The numbers an option may have, both ends included; ``most=None``: no upper end."""

    least: int | float
    most: int | float | None = None

    def __str__(self) -> str:
        return f"at least {self.least}" if self.most is None else f"from {self.least} to {self.most:,}"

    def __contains__(self, value: Any) -> bool:
        return bool(value >= self.least and (self.most is None or value <= self.most))


def AtLeast(least: int | float) -> Between:
    """All numbers from this one on."""
    return Between(least)


Count: TypeAlias = Annotated[int, AtLeast(1)]
Draws: TypeAlias = Annotated[int, Between(1, MOST_DRAWS)]
"""Draws of a null."""
Share: TypeAlias = Annotated[float, Between(0, 1)]
Seed: TypeAlias = Annotated[int, Between(0, 2**63 - 1)]
"""What all generators take."""

SHARED_ARGS: Mapping[str, str] = {
    "model": "A TransformerBridge or HookedTransformer.",
    "head": '``"L23H4"``, ``(23, 4)`` or a HeadIndex.',
    "heads": 'Only these heads (``"L12"``: all of layer 12); all by default.',
    "layers": "Only heads of these layers.",
    "text": "A text, or its token ids.",
    "texts": "Documents (a list, a file, a dataset); the bundled text by default.",
    "column": "Column of a dataset that holds the text.",
    "max_texts": "At most this many texts, evenly spaced; all by default.",
    "max_tokens": "Cut texts to this many tokens.",
    "relation": "A bundled name, a file, or a :class:`Relation`.",
    "relations": (
        "One or several bundled names, files, or :class:`Relation` objects; by default all bundled ones that the "
        "model's tokenizer can write."
    ),
    "data_dir": "Folder of relations to use instead of the bundled one.",
    "tasks": "The items, or a file for :meth:`Tasks.from_file`; the bundled items by default.",
    "multi_token": '``"skip"`` leaves out targets of several tokens, ``"first"`` takes their first token.',
    "k": "Count targets among the k strongest; by default each relation's own k (larger for large vocabularies).",
    "circuit": '``"ov"``: what a head writes about a token. ``"qk"``: which keys a query token attends to.',
    "preset": (
        '``"context"``: what each layer reads at the token behind neutral prompts. ``"folded"``: what the model '
        'computes for the token alone. ``"maps"``: the published recipe. By default ``"context"`` for OV maps of a '
        'model that can run, ``"folded"`` for QK maps and for weights alone.'
    ),
    "prompts": 'With ``"context"``: prefixes that tokens are put behind; by default eight neutral ones.',
    "vectors": (
        'With ``"context"``: :class:`ContextVectors` made before (or their folder), for weights that cannot run.'
    ),
    "prepend_bos": (
        "Begin each text or prompt with BOS; by default as the model does. Token ids are taken as they are."
    ),
    "cache": ("An ``ActivationCache`` of this very text, from ``model.run_with_cache``; the model is then not run."),
    "seed": "Seed of everything that is drawn at random.",
    "budget": "Bytes a batch of prompts may take.",
    "cache_dir": "Where vectors and activations are kept for the next call; the cache folder by default.",
    "run_dir": "Save finished layers in this folder, so that an interrupted run resumes.",
    "executor": "Where to compute layers: any ``concurrent.futures.Executor`` (processes, Dask, MPI, Slurm).",
    "device": "Where to put the model; TransformerLens' own choice by default.",
    "progress": "Show progress bars on a terminal.",
}
"""What a parameter means in every call that has it and does not say otherwise."""


def public(call: _Call) -> _Call:
    """A call for users: it computes under torch's defaults, with options that its annotations allow.

    Checked are options annotated as ``Literal``, ``int``, ``float``, ``bool``, ``str``, or as one of these with a range
    (:data:`Count`, :data:`Share`, ...), each also with ``| None``; whole numbers of numpy become those of Python.

    Example:
        >>> @public
        ... def half(n: Count = 1):
        ...     return n / 2
        >>> half(0)
        Traceback (most recent call last):
        ...
        tl_headmaps.core.errors.UsageError: n=0 is impossible; it must be at least 1.
    """
    signature = inspect.signature(call)

    # When first called: annotations may name what is defined further down.
    @functools.cache
    def hints() -> dict[str, Any]:
        inner = inspect.unwrap(call)
        parameters = {name: hint for name, hint in inner.__annotations__.items() if name != "return"}
        annotated = types.SimpleNamespace(__annotations__=parameters)
        return typing.get_type_hints(annotated, inner.__globals__, include_extras=True)

    @functools.wraps(call)
    def at_border(*arguments: Any, **options: Any) -> Any:
        try:
            bound = signature.bind(*arguments, **options)
        except TypeError:
            return call(*arguments, **options)  # refused in the words of Python, with the name of the call
        for name, value in bound.arguments.items():
            if name in hints():
                bound.arguments[name] = checked(name, value, hints()[name])
        with with_torch_defaults():
            return call(*bound.args, **bound.kwargs)

    at_border.__doc__ = with_shared_args(call.__doc__, signature.parameters)
    vars(at_border)["is_public"] = True
    return typing.cast("_Call", at_border)


def checked(name: str, value: Any, hint: Any) -> Any:
    """The value of an option as its annotation has it; raises a UsageError if that forbids it."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    alternatives = typing.get_args(hint) if union else (hint,)
    kinds = [kind for kind in alternatives if kind is not types.NoneType]
    if len(kinds) != 1 or (value is None and len(alternatives) > 1):
        return value
    kind, allowed = kinds[0], None
    if typing.get_origin(kind) is Literal:
        check_choice(value, kind, name)
    if typing.get_origin(kind) is Annotated:
        kind, allowed = typing.get_args(kind)
    if kind not in _KINDS:
        return value
    try:
        converted = _converted(value, kind)
    except (TypeError, ValueError, OverflowError):
        expected = _KINDS[kind] if allowed is None else f"{_KINDS[kind]}, {allowed}"
        raise UsageError(f"{name}={shown(value)} is impossible; it must be {expected}.") from None
    if allowed is not None and converted not in allowed:
        raise UsageError(f"{name}={shown(value)} is impossible; it must be {allowed}.")
    return converted


_KINDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}


def _converted(value: Any, kind: type) -> Any:
    if kind is int and is_index(value):
        return index(value)
    if kind is float and not isinstance(value, str | bool):
        return float(value)
    if kind is bool and type(value).__name__ in ("bool", "bool_"):  # of Python, and of numpy before and since 2.0
        return bool(value)
    if kind is str and isinstance(value, str):
        return value
    raise TypeError


_SECTION = re.compile(r"[A-Z][a-z]+:")
_ARGUMENT = re.compile(r"    (\w+(?:, \w+)*): (.*)")


def args_of(doc: str | None, parameters: Iterable[str]) -> dict[str, str]:
    """What a docstring says of parameters in its ``Args:``, and :data:`SHARED_ARGS` of those it leaves out.

    Example:
        >>> args_of('''Heads. Args:
        ...
        ... Args:
        ...     heads: Two or
        ...         more.
        ... ''', ["heads", "progress"])
        {'heads': 'Two or more.', 'progress': 'Show progress bars on a terminal.'}
    """
    _, section, _ = _around_args(doc)
    described: dict[str, str] = {}
    names: list[str] = []
    for line in section:
        if match := _ARGUMENT.match(line):
            names = match[1].split(", ")
            described |= dict.fromkeys(names, match[2])
        elif line.strip():
            described |= {name: f"{described[name]} {line.strip()}" for name in names}
    return {name: text for name in parameters if (text := described.get(name, SHARED_ARGS.get(name)))}


def with_shared_args(doc: str | None, parameters: Iterable[str]) -> str | None:
    """A docstring whose ``Args:`` describe all parameters, in their order."""
    described = args_of(doc, parameters)
    if doc is None or not described:
        return doc
    before, _, after = _around_args(doc)
    lines = ["Args:"]
    for name, text in described.items():
        lines += textwrap.wrap(
            f"{name}: {text}", 112, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False
        )
    return "\n".join([*before, *lines, *([""] if after else []), *after])


def _around_args(doc: str | None) -> tuple[list[str], list[str], list[str]]:
    """Lines before the ``Args:`` of a docstring, those inside, and those behind; it may have none yet."""
    lines = inspect.cleandoc(doc or "").split("\n")
    sections = [number for number, line in enumerate(lines) if _SECTION.fullmatch(line)]
    starts = [number for number in sections if lines[number] == "Args:"]
    if starts:
        end = next((number for number in sections if number > starts[0]), len(lines))
        return lines[: starts[0]], lines[starts[0] + 1 : end], lines[end:]
    start = sections[0] if sections else len(lines)
    return [*lines[:start], *([] if sections else [""])], [], lines[start:]


_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")


class _Thread(threading.local):
    inside = False
    """Whether this thread is inside a public call."""


_THREAD = _Thread()
_LOCK = threading.Lock()
_BEFORE: list[tuple[Any, str]] = []
"""Settings of the whole process, as the public calls under way in all threads met them."""


@contextmanager
def _process_defaults() -> Iterator[None]:
    """Default type and precision of products: the first call sets them, the last one of all threads sets them back."""
    import torch

    def set_to(dtype: Any, precision: str) -> None:
        # Only what differs: setting a precision again resets finer settings of the backends.
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)

    with _LOCK:
        _BEFORE.append((torch.get_default_dtype(), torch.get_float32_matmul_precision()))
        set_to(torch.float32, "highest")
    try:
        yield
    finally:
        with _LOCK:
            before = _BEFORE.pop()
            if not _BEFORE:
                set_to(*before)


@contextmanager
def with_torch_defaults() -> Iterator[None]:
    """Torch as it is in a fresh process, without gradients, and as it was before on exit; also a decorator.

    ``torch.autocast``, another default type or device, a lower precision of products, inference mode: each of them
    changes numbers, or makes a call fail far from its cause.

    Example:
        >>> import torch
        >>> torch.set_default_dtype(torch.float64)
        >>> with with_torch_defaults():
        ...     torch.tensor(0.5).dtype
        torch.float32
        >>> torch.set_default_dtype(torch.float32)
    """
    if _THREAD.inside:
        yield
        return
    import torch

    with ExitStack() as stack:
        stack.enter_context(_process_defaults())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            # Only then: while a default device is set, every function of torch takes a detour.
            stack.enter_context(torch.device("cpu"))
        _THREAD.inside = True
        stack.callback(setattr, _THREAD, "inside", False)
        yield
