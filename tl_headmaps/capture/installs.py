"""Nothing is installed while the host loads a model.

TransformerLens (3.9 and 4.3) runs ``pip install torchvision``, or uv, when the processor of a multimodal checkpoint
does not open. That changes the user's environment: it has replaced torch by another build. Multimodal checkpoints are
not booted whole (:mod:`.multimodal`); this is the guard for a path that was not foreseen.
"""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

from ..core.errors import ModelLoadError

_INSTALLERS = {"pip", "pip3", "uv", "conda", "mamba", "micromamba", "poetry", "pdm", "pixi", "easy_install"}
_ONE_AT_A_TIME = threading.RLock()
"""The guard replaces functions of the standard library: two loads in two threads take turns."""


@contextmanager
def nothing_installed(name: str) -> Iterator[None]:
    """Stop every attempt to run an installer in this block, and end the block with a sentence if there was one.

    The host catches the exception of a command that fails, so stopping alone would stay unnoticed.

    Args:
        name: The model that is loaded, for the sentence.
    """
    stopped: list[str] = []

    def refuse_installers(command: Any) -> None:
        words = _words(command)
        if any(PurePath(word).name.removesuffix(".exe") in _INSTALLERS for word in words):
            stopped.append(" ".join(words))
            raise PermissionError(f"{stopped[-1]!r} was stopped: nothing is installed while a model is loaded.")

    try:
        with _ONE_AT_A_TIME, _commands_seen(refuse_installers):
            yield
    except Exception as error:
        if stopped:
            raise _refusal(name, stopped[0]) from error
        raise
    if stopped:
        raise _refusal(name, stopped[0])


@contextmanager
def _commands_seen(see: Callable[[Any], None]) -> Iterator[None]:
    """Show every command to a function before it starts."""
    start_process, run_in_shell = subprocess.Popen.__init__, os.system

    def seen_process(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        see(args)
        start_process(self, args, *rest, **options)

    def seen_shell(command: Any) -> int:
        see(command)
        return run_in_shell(command)

    setattr(subprocess.Popen, "__init__", seen_process)  # noqa: B010
    os.system = seen_shell
    try:
        yield
    finally:
        setattr(subprocess.Popen, "__init__", start_process)  # noqa: B010
        os.system = run_in_shell


def _words(command: Any) -> list[str]:
    parts = command if isinstance(command, Sequence) and not isinstance(command, str | bytes) else [command]
    return [word for part in parts for word in os.fsdecode(part).replace('"', " ").replace("'", " ").split()]


def _refusal(name: str, command: str) -> ModelLoadError:
    return ModelLoadError(
        f"While loading {name!r} TransformerLens tried to run {command!r} and was stopped: loading a model must not "
        "change what is installed here. Use a text-only checkpoint, or boot the model yourself in an environment that "
        "has what it asks for, and pass it to the analysis."
    )
