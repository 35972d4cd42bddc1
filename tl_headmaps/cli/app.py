"""The ``tl-headmaps`` command: one line per subcommand.

Results go to stdout and to every ``--out`` file (the suffix chooses the form), progress and errors to stderr.
Exit code 0: done; 1: the analysis could not be done; 2: wrong usage.

Nothing here or in the modules of the commands imports torch: each command imports its analysis when it is called.
"""

import sys
import warnings
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from ..core.errors import HeadMapsError, HeadMapsWarning, UsageError
from .attention import association, compare_attention, groups, mixing, profile
from .checks import ablate, reproduce, validate
from .compare import compare
from .components import components
from .demo import demo
from .doctor import doctor
from .head import head, worth
from .model import cite, model
from .output import printing, require_printed
from .relations import grid, relations
from .salient import name_heads, salient
from .tasks import tasks
from .trust import trust

app = typer.Typer(
    name="tl-headmaps",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Tell what every attention head of a language model does.",
)


def main() -> None:
    """Entry point: every foreseen failure is one sentence and an exit code, never a traceback."""
    shown = warnings.showwarning

    def as_sentence(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if issubclass(category, HeadMapsWarning):
            typer.echo(f"tl-headmaps: {message}", err=True)
        else:
            shown(message, category, filename, lineno, *rest)

    warnings.showwarning = as_sentence  # type: ignore[assignment]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # What a terminal or a pipe cannot take (box characters in cp1252, half a character in a file's name) is
            # written as an escape.
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            # Around everything: help pages and versions are printed by the library.
            with printing():
                app()
        finally:
            require_printed()
    except HeadMapsError as error:
        typer.echo(f"tl-headmaps: {error}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    finally:
        warnings.showwarning = shown


def _print_version(value: bool | None) -> None:
    if value:
        from .. import __version__

        typer.echo(f"tl-headmaps {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool | None, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = None,
) -> None:
    """Tell what every attention head of a language model does."""


app.command()(grid)
app.command()(relations)
app.command()(head)
app.command()(model)
app.command()(cite)
app.command()(salient)
app.command("name-heads")(name_heads)
app.command()(groups)
app.command()(profile)
app.command()(mixing)
app.command()(association)
app.command("compare-attention")(compare_attention)
app.command()(compare)
app.command()(components)
app.command()(tasks)
app.command()(demo)
app.command()(validate)
app.command()(trust)
app.command()(worth)
app.command()(ablate)
app.command()(reproduce)
app.command()(doctor)
