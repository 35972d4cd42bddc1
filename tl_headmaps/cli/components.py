"""The component map on the command line."""

from pathlib import Path
from typing import Annotated

import typer

from .options import CheckpointOption, DeviceOption, ModelOption, OutOption, RunDirOption, open_weights
from .output import check_outputs, show_and_save


def components(
    metric: Annotated[str, typer.Option("--metric", help="What to measure; an unknown name lists them all.")] = "",
    against: Annotated[
        str | None, typer.Option("--against", metavar="NAME_OR_FOLDER", help="Another model to compare with.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="Texts separated by blank lines; default: bundled.")
    ] = None,
    heads: Annotated[bool, typer.Option("--heads", help="Open q, k, v and o into their heads.")] = False,
    relative: Annotated[
        bool, typer.Option("--relative", help="Relative to random matrices of the same shape.")
    ] = False,
    k: Annotated[int | None, typer.Option("--k", help="Dimensions compared by subspace_overlap; default 16.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Read no more text than this.")] = 8192,
    prepend_bos: Annotated[bool, typer.Option("--prepend-bos", help="Begin sequences with the BOS token.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of the random matrices.")] = 0,
    model: ModelOption = None,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = None,
    run_dir: RunDirOption = None,
    out: OutOption = None,
) -> None:
    """Map what q, k, v, o, up, down and gate contribute in each layer."""
    from .. import component_map, head_component_map
    from ..scorers.components import find_metric

    paths = check_outputs(out)
    # Comparing is what a second model is for.
    name = metric or ("contribution" if against is None else "relative_change")
    find_metric(name)
    result = (head_component_map if heads else component_map)(
        open_weights(model, checkpoint, device),
        name,
        text,
        against,
        relative=relative,
        k=k,
        max_tokens=max_tokens,
        prepend_bos=prepend_bos,
        seed=seed,
        run_dir=run_dir,
    )
    show_and_save(result, paths)
