"""The ``tl-headmaps`` command.

Results go to stdout and to every ``--out`` file (the suffix chooses the form), progress and errors to stderr.
Exit code 0: done; 1: the analysis could not be done; 2: wrong usage.

Nothing here imports torch: each command imports its analysis when it is called.
"""

import difflib
import io
import sys
import warnings
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click

from ..core.errors import HeadMapsError, HeadMapsWarning, UsageError
from .commands import COMMANDS
from .demo import demo
from .doctor import doctor
from .output import printing, require_printed, say


@click.command()
@click.argument("result", required=False, type=click.Path(path_type=Path))
def cite(result: Path | None) -> None:
    """Print BibTeX of this tool, and of the methods behind a saved result (.json or .safetensors)."""
    from .. import Result
    from .. import cite as print_citations

    text = io.StringIO()
    print_citations(None if result is None else Result.load(result), file=text)
    say(text.getvalue().rstrip("\n"))


class _Commands(click.Group):
    """All commands; one is built when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            return COMMANDS[cmd_name].built(cmd_name)
        if cmd_name not in self.commands:
            near = difflib.get_close_matches(cmd_name, self.list_commands(ctx))
            hint = f"Did you mean {' or '.join(near)}?" if near else "See tl-headmaps --help."
            raise click.UsageError(f"There is no command {cmd_name!r}. {hint}", ctx)
        return self.commands[cmd_name]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # As a shell reports it; 1 would say that the analysis could not be done.
            sys.exit(130)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Without building them: a summary is all that is shown."""
        made = [(name, command.signature.summary) for name, command in COMMANDS.items()]
        with formatter.section("Commands"):
            formatter.write_dl([*made, *((name, command.help or "") for name, command in self.commands.items())])


def _print_version(context: click.Context, _option: click.Parameter, value: bool | None) -> None:
    if value:
        from .. import __version__

        click.echo(f"tl-headmaps {__version__}")
        context.exit()


app = _Commands(
    name="tl-headmaps",
    commands=[cite, demo, doctor],
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print the version.",
        )
    ],
    help="Tell what every attention head of a language model does.",
)


def main() -> None:
    """Entry point: every foreseen failure is one sentence and an exit code, never a traceback."""
    shown = warnings.showwarning

    def as_sentence(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if issubclass(category, HeadMapsWarning):
            click.echo(f"tl-headmaps: {message}", err=True)
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
        click.echo(f"tl-headmaps: {error}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    finally:
        warnings.showwarning = shown
