"""``tl-headmaps tasks``."""

from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import UsageError
from ..core.types import Positions
from .options import DeviceOption, ModelOption, NoCheckpointOption, OutOption
from .output import check_outputs, comma_parts, show_and_save


def tasks(
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", help="Items of your own: .json, .jsonl, .csv, .tsv.")
    ] = None,
    functions: Annotated[
        list[str] | None, typer.Option("--functions", metavar="NAME[,NAME]", help="Only these functions; two or more.")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option("--column", metavar="OURS=THEIRS", help="Name of a column in --data.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="THEIRS=OURS", help="Function a label in --data means.")
    ] = None,
    drop_duplicates: Annotated[
        bool, typer.Option("--drop-duplicates", help="Keep the first of equal prompts in --data.")
    ] = False,
    sample: Annotated[
        int | None, typer.Option("--sample", metavar="N", help="About N items of each function, for a quick look.")
    ] = None,
    positions: Annotated[
        Positions, typer.Option("--positions", help="answer: its tokens; last: the token before it.")
    ] = "answer",
    folds: Annotated[int, typer.Option("--folds", help="Parts for cross-validation.")] = 5,
    seed: Annotated[int, typer.Option("--seed", help="Decides folds, shuffles and draws.")] = 0,
    verify: Annotated[bool, typer.Option("--verify", help="Then ablate each function's heads (minutes).")] = False,
    items: Annotated[int, typer.Option("--items", help="Items of each function for --verify.")] = 30,
    prepend_bos: Annotated[bool, typer.Option("--prepend-bos", help="Begin every prompt with BOS.")] = False,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Map which heads serve which cognitive function, beyond what words tell; --verify takes them away."""
    from .. import load_model, load_tasks, read_tasks, task_maps, verify_tasks

    paths = check_outputs(out)
    names = [name for text in functions or [] for name in comma_parts(text)]
    if data is None:
        if column or label or drop_duplicates:
            raise UsageError("--column, --label and --drop-duplicates describe --data; give the file too.")
        chosen = load_tasks(names or None)
    else:
        chosen = read_tasks(
            data,
            columns=_pairs(column, "--column"),
            labels=_pairs(label, "--label"),
            duplicates="drop" if drop_duplicates else "refuse",
        )
        chosen = chosen.select(names) if names else chosen
        for name, count in chosen.unknown_labels.items():
            typer.echo(f"Left out {count} items labelled {name!r}, which is no function; see --label.", err=True)
    chosen = chosen if sample is None else chosen.sample(sample, seed=seed)
    loaded = load_model(model, device)
    found = task_maps(
        loaded,
        chosen,
        positions=positions,
        folds=folds,
        seed=seed,
        prepend_bos=prepend_bos,
    )
    show_and_save(found, paths)
    if verify:
        typer.echo("")
        verified = verify_tasks(loaded, found, chosen, n_items=items)
        show_and_save(verified, [path.with_suffix(f".verified{path.suffix}") for path in paths])


def _pairs(texts: list[str] | None, option: str) -> dict[str, str]:
    """``a=b`` given any number of times."""
    pairs = {}
    for text in texts or []:
        left, sign, right = text.partition("=")
        if not (left.strip() and sign and right.strip()):
            raise UsageError(f"{option} {text!r} is not of the form NAME=NAME.")
        pairs[left.strip()] = right.strip()
    return pairs
