"""Two results of one kind side by side."""

from pathlib import Path
from typing import Annotated

import typer

from .options import OutOption, given
from .output import check_outputs, comma_parts, show_and_save


def compare(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A result saved as .json or .safetensors.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Another; differences are second minus first.")],
    names: Annotated[
        list[str] | None,
        typer.Option("--names", metavar="FIRST,SECOND", help="What they are called; default: their models."),
    ] = None,
    common: Annotated[
        bool, typer.Option("--common", help="Compare what both have, if one has more than the other.")
    ] = False,
    out: OutOption = None,
) -> None:
    """Show what differs between two results of one kind: of a base model and of its fine-tuned form, say."""
    from .. import compare

    paths = check_outputs(out)
    called = comma_parts(names) if names else None
    show_and_save(compare(first, second, common=common, **given(names=called)), paths)
