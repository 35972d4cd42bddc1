"""Commands about what heads do when nobody says what to look for."""

from typing import Annotated

import typer

from ..core.errors import UsageError
from .options import (
    BosOption,
    CheckpointOption,
    CircuitOption,
    DeviceOption,
    HeadsArgument,
    HeadsOption,
    LayersOption,
    ModelOption,
    OutOption,
    PromptsOption,
    RunDirOption,
    VocabularyOption,
    VocabularyPresetOption,
    WorkersOption,
    context_options,
    given,
    open_weights,
    worker_pool,
)
from .output import check_outputs, parse_heads, parse_layers, show_and_save


def salient(
    named_heads: HeadsArgument = None,
    heads: HeadsOption = None,
    layers: LayersOption = None,
    all_heads: Annotated[bool, typer.Option("--all", help="All heads of the model.")] = False,
    n_tokens: Annotated[
        int | None, typer.Option("--n-tokens", help="Salient tokens of each head; default: 30.")
    ] = None,
    n_targets: Annotated[
        int | None, typer.Option("--n-targets", help="Promoted and suppressed targets of each token; default: 5.")
    ] = None,
    vocabulary: VocabularyOption = None,
    circuit: CircuitOption = None,
    preset: VocabularyPresetOption = None,
    prompts: PromptsOption = None,
    prepend_bos: BosOption = None,
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
    chosen = parse_heads(heads, named_heads)
    if (chosen is None and not layers) != all_heads:
        raise UsageError("Say which heads: L23H4,L23H2 (or --heads L23H4,L23H2), --layers 12, or --all.")
    options = given(
        heads=chosen,
        layers=parse_layers(layers),
        n_tokens=n_tokens,
        n_targets=n_targets,
        vocabulary=vocabulary,
        circuit=circuit,
        preset=preset,
        run_dir=run_dir,
        **context_options(prompts, prepend_bos),
    )
    with worker_pool(workers, checkpoint) as pool:
        result = salient_operations(open_weights(model, checkpoint, device), executor=pool, **options)
    show_and_save(result, paths)


def name_heads(
    vocabulary: VocabularyOption = None,
    circuit: CircuitOption = None,
    preset: VocabularyPresetOption = None,
    prompts: PromptsOption = None,
    prepend_bos: BosOption = None,
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
    options = given(
        vocabulary=vocabulary, circuit=circuit, preset=preset, run_dir=run_dir, **context_options(prompts, prepend_bos)
    )
    with worker_pool(workers, checkpoint) as pool:
        result = analyse(open_weights(model, checkpoint, device), executor=pool, **options)
    show_and_save(result, paths)
