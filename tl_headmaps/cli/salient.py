"""``tl-headmaps salient`` and ``tl-headmaps name-heads``."""

from typing import Annotated

import typer

from ..core.errors import UsageError
from .options import (
    CheckpointOption,
    CircuitOption,
    DeviceOption,
    ModelOption,
    OutOption,
    PresetOption,
    RunDirOption,
    VocabularyOption,
    WorkersOption,
    open_weights,
    worker_pool,
)
from .output import check_outputs, parse_heads, show_and_save


def salient(
    heads: Annotated[str | None, typer.Option("--heads", help="Heads to look at: L23H4,L23H2.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All heads of the model.")] = False,
    tokens: Annotated[int, typer.Option("--tokens", help="Salient tokens of each head.")] = 15,
    targets: Annotated[int, typer.Option("--targets", help="Promoted and suppressed targets of each token.")] = 5,
    vocabulary: VocabularyOption = "all",
    circuit: CircuitOption = "ov",
    preset: PresetOption = "folded",
    model: ModelOption = None,
    checkpoint: CheckpointOption = None,
    run_dir: RunDirOption = None,
    workers: WorkersOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show what heads do when nobody says what to look for: salient tokens, their targets, and a name."""
    from .. import salient_operations

    paths = check_outputs(out)
    if (heads is None) != everything:
        raise UsageError("Say which heads: either --heads L23H4,L23H2 or --all.")
    chosen = None if heads is None else parse_heads(heads)
    with worker_pool(workers, checkpoint) as pool:
        result = salient_operations(
            open_weights(model, checkpoint, device),
            chosen,
            n_tokens=tokens,
            n_targets=targets,
            vocabulary=vocabulary,
            circuit=circuit,
            preset=preset,
            run_dir=run_dir,
            executor=pool,
        )
    show_and_save(result, paths)


def name_heads(
    vocabulary: VocabularyOption = "all",
    circuit: CircuitOption = "ov",
    preset: PresetOption = "folded",
    model: ModelOption = None,
    checkpoint: CheckpointOption = None,
    run_dir: RunDirOption = None,
    workers: WorkersOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Name every head by what explains its salient operations better than chance; print how many have a name."""
    from .. import name_heads as analyse

    paths = check_outputs(out)
    with worker_pool(workers, checkpoint) as pool:
        result = analyse(
            open_weights(model, checkpoint, device),
            vocabulary=vocabulary,
            circuit=circuit,
            preset=preset,
            run_dir=run_dir,
            executor=pool,
        )
    show_and_save(result, paths)
