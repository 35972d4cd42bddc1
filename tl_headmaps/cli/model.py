"""Commands about a model as a whole, and about whom to cite."""

import io
from pathlib import Path
from typing import Annotated

import typer

from .options import CheckpointOption, DeviceOption, ModelOption, OutOption, open_weights
from .output import check_outputs, say, show_and_save


def model(
    model: ModelOption = None,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show what was found in a model: its size, weight basis, norms, and what can be analysed."""
    from .. import describe_model

    paths = check_outputs(out)
    show_and_save(describe_model(open_weights(model, checkpoint, device)), paths)


def cite(
    result: Annotated[
        Path | None, typer.Argument(metavar="RESULT", help="A saved result (.json or .safetensors).")
    ] = None,
) -> None:
    """Print BibTeX of this tool, and of the methods behind a saved result."""
    from .. import Result
    from .. import cite as print_citations

    text = io.StringIO()
    print_citations(None if result is None else Result.load(result), file=text)
    say(text.getvalue().rstrip("\n"))
