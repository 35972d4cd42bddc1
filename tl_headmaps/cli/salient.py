"""``tl-headmaps salient`` and ``tl-headmaps name-heads``."""

from typing import Annotated

import typer

from ..errors import UsageError
from .options import CircuitOption, DeviceOption, ModelOption, OutOption, PresetOption, VocabularyOption
from .output import check_outputs, parse_heads, show_and_save


def salient(
    heads: Annotated[str | None, typer.Option("--heads", help="Heads to look at: L23H4,L23H2.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All heads of the model.")] = False,
    tokens: Annotated[int, typer.Option("--tokens", help="Salient tokens of each head.")] = 15,
    targets: Annotated[int, typer.Option("--targets", help="Promoted and suppressed targets of each token.")] = 5,
    largest: Annotated[int, typer.Option("--largest", help="Also so many largest entries of the whole map.")] = 0,
    vocabulary: VocabularyOption = "all",
    circuit: CircuitOption = "ov",
    preset: PresetOption = "folded",
    model: ModelOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show what heads do when nobody says what to look for: salient tokens, their targets, and a name."""
    from .. import load_model, salient_operations

    paths = check_outputs(out)
    if (heads is None) != everything:
        raise UsageError("Say which heads: either --heads L23H4,L23H2 or --all.")
    result = salient_operations(
        load_model(model, device),
        None if heads is None else parse_heads(heads),
        n_tokens=tokens,
        n_targets=targets,
        largest=largest,
        vocabulary=vocabulary,
        circuit=circuit,
        preset=preset,
    )
    show_and_save(result, paths)


def name_heads(
    vocabulary: VocabularyOption = "all",
    circuit: CircuitOption = "ov",
    preset: PresetOption = "folded",
    model: ModelOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Name every head by what explains its salient operations better than chance; print how many have a name."""
    from .. import load_model
    from .. import name_heads as analyse

    paths = check_outputs(out)
    show_and_save(analyse(load_model(model, device), vocabulary=vocabulary, circuit=circuit, preset=preset), paths)
