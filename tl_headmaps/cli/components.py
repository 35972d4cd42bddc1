"""``tl-headmaps components``."""

from typing import Annotated

import typer

from .options import (
    BosOption,
    CheckpointOption,
    DeviceOption,
    ModelOption,
    OutOption,
    RunDirOption,
    TextsOption,
    given,
    open_weights,
)
from .output import check_outputs, show_and_save

METRICS = {
    "text": ("contribution", "sensitivity", "gradient_ratio", "output_share"),
    "the weights alone": ("frobenius", "spectral", "stable_rank", "effective_rank", "tail_exponent"),
    "two models": ("relative_change", "changed_share", "subspace_overlap"),
}
"""Those of ``scorers/components.py`` by what they are measured on, for a help page that imports no torch."""

_LISTED = "; ".join(f"from {source}: {', '.join(names)}" for source, names in METRICS.items())


def components(
    metric: Annotated[
        str | None, typer.Option("--metric", help=f"What to measure, {_LISTED}; default: sensitivity.")
    ] = None,
    texts: TextsOption = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="NAME_OR_FOLDER", help="Another model to compare with.")
    ] = None,
    by_head: Annotated[bool, typer.Option("--by-head", help="Open q, k, v and o into their heads.")] = False,
    normalise: Annotated[
        str | None, typer.Option("--normalise", help="What values are shares of: map (default) or layer.")
    ] = None,
    relative: Annotated[
        bool, typer.Option("--relative", help="Relative to random matrices of the same shape.")
    ] = False,
    k: Annotated[int | None, typer.Option("--k", help="Dimensions compared by subspace_overlap.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Read at most this many tokens; default: 8192.")
    ] = None,
    prepend_bos: BosOption = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the random matrices; default: 0.")] = None,
    model: ModelOption = None,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = None,
    run_dir: RunDirOption = None,
    out: OutOption = None,
) -> None:
    """Map what q, k, v, o, up, down and gate contribute in each layer."""
    from .. import component_map
    from ..scorers.components import find_metric

    paths = check_outputs(out)
    if metric is None and against is not None:
        # Comparing is what a second model is for.
        metric = "relative_change"
    if metric is not None:
        find_metric(metric)
    options = given(metric=metric, texts=texts, against=against, normalise=normalise, k=k, seed=seed)
    options |= given(max_tokens=max_tokens, prepend_bos=prepend_bos, run_dir=run_dir)
    loaded = open_weights(model, checkpoint, device)
    show_and_save(component_map(loaded, by_head=by_head, relative=relative, **options), paths)
