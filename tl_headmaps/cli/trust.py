"""How far what weights tell of a head holds in running text."""

from typing import Annotated

import typer

from .options import (
    BosOption,
    DeviceOption,
    HeadsArgument,
    HeadsOption,
    ModelOption,
    NoCheckpointOption,
    OutOption,
    PromptsOption,
    TextsOption,
    context_options,
    given,
)
from .output import check_outputs, parse_heads, show_and_save


def trust(
    named_heads: HeadsArgument = None,
    texts: TextsOption = None,
    heads: HeadsOption = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Cut texts to this many tokens.")] = None,
    n_null: Annotated[int | None, typer.Option("--n-null", help="Draws of the null; default: 3.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the draws and the intervals; default: 0.")] = None,
    prompts: PromptsOption = None,
    prepend_bos: BosOption = None,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show how much of what each head writes in running text is told by which tokens it attends to."""
    from .. import head_trust, load_model

    paths = check_outputs(out)
    options = given(
        texts=texts,
        heads=parse_heads(heads, named_heads),
        max_tokens=max_tokens,
        n_null=n_null,
        seed=seed,
        **context_options(prompts, prepend_bos),
    )
    show_and_save(head_trust(load_model(model, device), **options), paths)
