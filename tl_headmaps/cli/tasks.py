"""``tl-headmaps tasks``."""

from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import UsageError
from ..core.types import Positions
from .options import BosOption, DeviceOption, ModelOption, NoCheckpointOption, OutOption, first_given, given
from .output import check_outputs, comma_parts, say, show_and_save


def tasks(
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", help="Items of your own: .json, .jsonl, .csv, .tsv.")
    ] = None,
    functions: Annotated[
        list[str] | None, typer.Option("--functions", metavar="NAME[,NAME]", help="Only these functions; two or more.")
    ] = None,
    drop_duplicates: Annotated[
        bool, typer.Option("--drop-duplicates", help="Keep the first of equal prompts in --data.")
    ] = False,
    sample: Annotated[
        int | None, typer.Option("--sample", metavar="N", help="About N items of each function, for a quick look.")
    ] = None,
    positions: Annotated[
        Positions | None,
        typer.Option("--positions", help="answer: its tokens; last: the token before it; default: answer."),
    ] = None,
    n_folds: Annotated[int | None, typer.Option("--n-folds", help="Parts for cross-validation; default: 5.")] = None,
    n_null: Annotated[int | None, typer.Option("--n-null", help="How often labels are shuffled; default: 499.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Decides folds, shuffles and draws; default: 0.")] = None,
    prepend_bos: BosOption = None,
    verify: Annotated[bool, typer.Option("--verify", help="Then ablate each function's heads (minutes).")] = False,
    n_items: Annotated[
        int | None, typer.Option("--n-items", help="--verify: items of each function; default: 10.")
    ] = None,
    n_random: Annotated[
        int | None, typer.Option("--n-random", help="--verify: draws of other heads of the same layers; default: 39.")
    ] = None,
    max_heads: Annotated[int | None, typer.Option("--max-heads", help="--verify: most heads to ablate.")] = None,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Map which heads serve which cognitive function, beyond what words tell; --verify takes them away."""
    from .. import Tasks, load_model, load_tasks, task_maps, verify_tasks
    from ..analyses.verify_tasks import check_verification

    paths = check_outputs(out)
    of_verify = given(n_items=n_items, n_random=n_random, max_heads=max_heads)
    if (option := first_given(**of_verify)) and not verify:
        raise UsageError(f"{option} is an option of the verification; add --verify, or leave it out.")
    check_verification(**of_verify)
    names = comma_parts(functions)
    if data is None:
        if drop_duplicates:
            raise UsageError("--drop-duplicates is about the file of --data; give the file too.")
        chosen = load_tasks(names or None)
    else:
        chosen = Tasks.from_file(data, duplicates="drop" if drop_duplicates else "refuse")
        chosen = chosen.select(names) if names else chosen
        for name, count in chosen.unknown_labels.items():
            typer.echo(f"Left out {count} items labelled {name!r}, which is not one of the functions.", err=True)
    if sample is not None:
        chosen = chosen.sample(sample, **given(seed=seed))
    loaded = load_model(model, device)
    maps = task_maps(
        loaded, chosen, **given(positions=positions, n_folds=n_folds, n_null=n_null, seed=seed, prepend_bos=prepend_bos)
    )
    show_and_save(maps, paths)
    if verify:
        say("")
        verified = verify_tasks(loaded, maps, chosen, **of_verify)
        show_and_save(verified, [path.with_suffix(f".verified{path.suffix}") for path in paths])
