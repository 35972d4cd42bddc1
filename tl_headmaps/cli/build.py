"""Commands made from public calls: options are the call's parameters, help pages their lines in ``Args:``.

What the command line alone has (where the model comes from, where results go, who computes) is declared here, once.
"""

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from ..core.errors import UsageError
from ..core.files import SAVED_SUFFIXES, check_text
from ..core.options import Count, Draws, Seed, Share, checked
from .forms import FORMS, PHRASES, Form, comma_parts
from .output import check_outputs, show_and_save
from .signatures import PACKAGE, REQUIRED, Parameter, Signature, plain

PYTHON_ONLY = frozenset(
    {"model", "executor", "progress", "data_dir", "cache_dir", "cache", "column", "budget", "file", "tasks"}
)
"""Parameters that are never options: the command line has a way of its own, or no use for them."""

OPPOSITES = {"drop_sink": "--keep-sink", "prepend_bos": "--no-prepend-bos"}
"""What switches a parameter off. Others are off until they are switched on."""

RANGES = {"Count": Count, "Draws": Draws, "Seed": Seed, "Share": Share}
"""Numbers that are checked here too, before the long work: the call does it after a model was opened."""

HEADS = ("head", "heads")
"""What is written with its name or without."""

ARGUMENTS = {
    "head": ("HEAD", "The same as --head: L23H4."),
    "heads": ("HEAD|LAYER", "The same as --heads: L23H4 L12."),
    "relation": ("NAME|FILE", "A relation: a bundled name or a file."),
    "relations": ("NAME|FILE", "Relations: bundled names or files."),
}
"""What a help page calls parameters that are written without their name, and what it says about them."""

MODEL = click.Option(["--model"], metavar="NAME_OR_FOLDER", help="Hub name or folder; default: SmolLM2-135M-Instruct.")
DEVICE = click.Option(["--device"], help="cpu, cuda, mps; default: the model's own.")
CHECKPOINT = click.Option(
    ["--checkpoint"],
    metavar="FOLDER",
    help="Read weights from this folder's safetensors (or a hub name) without building the model.",
)
WORKERS = click.Option(
    ["--workers"], metavar="N", type=click.IntRange(min=1), help="Compute layers in N processes (needs --checkpoint)."
)
FULL = click.Option(["--full"], is_flag=True, default=None, help="Print all columns.")
OUT = click.Option(
    ["--out"],
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path),
    help=f"Write the result; the suffix chooses the form: {', '.join(SAVED_SUFFIXES)}. May be repeated.",
)


def _refuse_checkpoint(_context: click.Context, _option: click.Parameter, checkpoint: str | None) -> None:
    if checkpoint is not None:
        raise UsageError(
            f"This command runs the model, and --checkpoint only reads weights. Use --model {checkpoint}: it takes a "
            "folder or a hub name too, and loads the model."
        )


NO_CHECKPOINT = click.Option(
    ["--checkpoint"], hidden=True, is_eager=True, expose_value=False, callback=_refuse_checkpoint
)
"""For commands that run the model: refuses the option that other commands have, and names the one to use instead."""


def is_set(written: Any) -> bool:
    """Whether something was written on the command line: what was not is left to the call and its default.

    Example:
        >>> [is_set(written) for written in (None, (), 0, False)]
        [False, False, True, True]
    """
    return written is not None and written != ()


def read(parameter: Parameter, written: Any, commas: bool = True) -> Any:
    """What a call takes for what was written; refused are bytes that no text has, which a shell passes on."""
    value = _value(parameter, written, commas)
    check_text(value, _flag(parameter))
    return value


def _value(parameter: Parameter, written: Any, commas: bool) -> Any:
    form = _form(parameter)
    for name in parameter.types & set(RANGES):
        written = checked(parameter.name, written, RANGES[name])
    if form is None:
        return list(written) if isinstance(written, tuple) else written
    if not form.many:
        return form.read(written)
    parts = comma_parts(written) if form.commas and commas else list(written)
    if len(parts) == 1 and parts[0] in parameter.choices:
        return parts[0]
    if parts == ["none"] and "None" in parameter.types and parameter.default is not None:
        return None
    return form.read(parts)


def _flag(parameter: Parameter) -> str:
    return f"--{parameter.name.rstrip('_').replace('_', '-')}"


def _form(parameter: Parameter) -> Form | None:
    if parameter.choices and not parameter.types - {"None"}:
        return None
    return FORMS.get(parameter.name, PHRASES if "Mapping" in parameter.types else None)


def _argument(parameter: Parameter) -> click.Argument:
    """A parameter that is written without its name."""
    form, name = _form(parameter), parameter.name
    required = parameter.default is REQUIRED and name not in HEADS
    metavar, _ = _as_argument(parameter)
    return click.Argument(
        [f"{name}_argument" if name in HEADS else name],
        metavar=f"{metavar if required else f'[{metavar}]'}{'...' if form and form.many and name != 'head' else ''}",
        nargs=-1 if form and form.many else 1,
        required=required,
        type=None if form else click.Path(path_type=Path),
    )


def _as_argument(parameter: Parameter) -> tuple[str, str]:
    return ARGUMENTS.get(parameter.name, (parameter.name.upper(), explained(parameter)))


def _option(parameter: Parameter) -> click.Option:
    form, flag = _form(parameter), _flag(parameter)
    text = explained(parameter)
    if form is None and not parameter.choices and "bool" in parameter.types:
        opposite = f"/{OPPOSITES[parameter.name]}" if parameter.name in OPPOSITES else ""
        return click.Option([flag + opposite, parameter.name], is_flag=True, default=None, help=text)
    return click.Option(
        [flag, parameter.name],
        metavar=form and form.metavar,
        type=None if form else _type(parameter),
        multiple=form.many if form else "Sequence" in parameter.types,
        required=parameter.default is REQUIRED and parameter.name not in HEADS,
        help=text,
    )


class _Choice(click.Choice[str]):
    """One of some words; the former name of a preset is answered with its new one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "met" and "context" in self.choices:
            self.fail("'met' is called 'context' now", param, ctx)
        return super().convert(value, param, ctx)


def _type(parameter: Parameter) -> "click.ParamType[Any] | None":
    if parameter.choices:
        return _Choice(parameter.choices)
    if "Path" in parameter.types:
        return click.Path(path_type=Path)
    if "str" not in parameter.types:
        return click.INT if "int" in parameter.types else click.FLOAT if "float" in parameter.types else None
    return None


def explained(parameter: Parameter) -> str:
    """The line of a help page: what the form says, or the first sentence of the call; of choices, all sentences.

    Example:
        >>> explained(Parameter("k", frozenset({"int"}), (), 5, "Count targets of :func:`x`. Two sentences."))
        'Count targets of x. Default: 5.'
    """
    form = _form(parameter)
    text = plain(parameter.doc)
    if not parameter.choices:
        text = form.help if form and form.help else re.split(r"(?<=[.])\s+(?=[A-Z])", text)[0]
    shown = parameter.default is not REQUIRED and isinstance(parameter.default, str | int | float)
    is_told = isinstance(parameter.default, bool) or "default" in text
    return text if is_told or not shown else f"{text} Default: {str(parameter.default).rstrip('.')}."


@dataclass(frozen=True)
class Command:
    """A line of the table of commands.

    Attributes:
        call: Name of the public call.
        arguments: Parameters that are written without their name. Heads may be written with it, too.
        around: What the command does beside calling; its parameters are options that replace or follow the call's.
    """

    call: str
    arguments: tuple[str, ...] = ()
    around: Callable[..., None] | None = None

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Those of the call that can be written on a command line."""
        own = self.own_parameters
        found = self.signature.parameters
        return {name: found[name] for name in found if name not in PYTHON_ONLY and name not in own}

    @cached_property
    def own_parameters(self) -> dict[str, Parameter]:
        """Those of ``around``."""
        if self.around is None:
            return {}
        module = PACKAGE.parent.joinpath(*self.around.__module__.split(".")).with_suffix(".py")
        _, *own = Signature(module, self.around.__name__).parameters.items()
        return dict(own)

    @cached_property
    def signature(self) -> Signature:
        """What the call takes, and what it is about."""
        return Signature.of_call(self.call)

    def built(self, name: str) -> click.Command:
        """The command as click runs it."""
        unnamed = [self.parameters[each] for each in self.arguments]
        named = [each for each in self.parameters.values() if each not in unnamed or each.name in HEADS]
        return click.Command(
            name,
            callback=lambda **written: self.carry_out(Run(self, written)),
            params=[*map(_argument, unnamed), *map(_option, [*named, *self.own_parameters.values()]), *self._shared()],
            help="\n\n".join([self.signature.summary, *(": ".join(_as_argument(each)) for each in unnamed)]),
        )

    def _shared(self) -> Iterator[click.Option]:
        taken = self.signature.parameters
        if "model" in taken:
            yield from (MODEL, CHECKPOINT if "HeadWeights" in taken["model"].types else NO_CHECKPOINT, DEVICE)
        if "executor" in taken:
            yield WORKERS
        if "out" not in self.own_parameters:
            yield from (FULL, OUT)

    def carry_out(self, run: "Run") -> None:
        """Make and show what was asked for."""
        if self.around is None:
            run.show(run.result())
        else:
            own = self.own_parameters
            self.around(run, **{name: read(own[name], run.written[name]) for name in own if name in run.written})


class Run:
    """A command as it was typed: what it sets, the model that it opens when asked, and where results go.

    Attributes:
        written: What was set on the command line, by name.
        outputs: The files of ``--out``; one that cannot be written is refused before anything else is done.
    """

    def __init__(self, command: Command, written: dict[str, Any]) -> None:
        self._command = command
        self.written = {name: value for name, value in written.items() if is_set(value)}
        self.outputs = [] if "out" in command.own_parameters else check_outputs(self.written.get("out", ()))

    @cached_property
    def options(self) -> dict[str, Any]:
        """What the call is given. Options that were not set keep its defaults."""
        found = {}
        for name, parameter in self._command.parameters.items():
            argument, option = self.written.get(f"{name}_argument", ()), self.written.get(name)
            if argument or option is not None:
                written = (*argument, *(option or ())) if name in HEADS else option
                found[name] = read(parameter, written, commas=name not in self._command.arguments)
            elif parameter.default is REQUIRED:
                # Heads may be an argument or an option, so that click itself cannot miss them.
                raise UsageError("Say which head: L23H4, or --head L23H4.")
        return found

    @cached_property
    def model(self) -> Any:
        """The model or the checkpoint that was named; by default the default model."""
        _ = self.options  # what is written wrong is refused before the long work
        return open_model(*map(self.written.get, ("model", "checkpoint", "device")))

    def result(self, **options: Any) -> Any:
        """What the call gives for the options of the command line, and for these."""
        options = self.options | options
        call = getattr(importlib.import_module("..", __package__), self._command.call)
        with worker_pool(self.written.get("workers"), self.written.get("checkpoint")) as pool:
            options |= {} if pool is None else {"executor": pool}
            options |= {"model": self.model} if "model" in self._command.signature.parameters else {}
            return call(**options)

    def show(self, result: Any, outputs: list[Path] | None = None, **drawn: Any) -> None:
        """Write a result to the files of ``--out`` or to these, and print it; ``drawn`` are options of its figure."""
        full = bool(self.written.get("full"))
        show_and_save(result, self.outputs if outputs is None else outputs, full=full, **drawn)


def open_model(model: str | None, checkpoint: str | None, device: str | None) -> Any:
    """The model or the checkpoint that was named; by default the default model."""
    from .. import HeadWeights, load_model

    if checkpoint is None:
        return load_model(model, device)
    if model is not None:
        raise UsageError(f"--model {model} and --checkpoint {checkpoint} were both given; give one of them.")
    return HeadWeights.from_checkpoint(checkpoint, device=device or "cpu")


@contextmanager
def worker_pool(n_workers: int | None, checkpoint: str | None) -> Iterator[Any]:
    """A process pool of this size, with the cores shared among its workers; None if none was asked for."""
    if n_workers is None:
        yield None
        return
    if checkpoint is None:
        raise UsageError("--workers needs --checkpoint: worker processes open the weights themselves.")
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    import torch

    threads = max(1, torch.get_num_threads() // n_workers)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n_workers, spawn, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        yield pool
