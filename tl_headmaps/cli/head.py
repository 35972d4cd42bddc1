"""Commands about single heads: all there is to say about one, and what each is worth."""

from pathlib import Path
from typing import Annotated

import typer

from ..core.types import HeadIndex
from .options import (
    BosOption,
    DeviceOption,
    HeadsArgument,
    HeadsOption,
    ModelOption,
    NoCheckpointOption,
    OutOption,
    PresetOption,
    TextsOption,
    given,
)
from .output import check_outputs, comma_parts, parse_heads, show_and_save


def head(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="A head such as L23H4.")],
    relations: Annotated[
        list[str] | None,
        typer.Option(
            "--relations",
            metavar="NAMES",
            help="Relations to try, separated by commas: names or files; default: all bundled.",
        ),
    ] = None,
    preset: PresetOption = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            help="A sentence to show its attention on; default: "
            "When Mary and John went to the store, John gave a drink to Mary.",
        ),
    ] = None,
    texts: TextsOption = None,
    results: Annotated[
        list[Path] | None,
        typer.Option("--results", metavar="FILE", help="A saved result to take instead of making it. May be repeated."),
    ] = None,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show what one head does: relations, salient tokens, a name, where it looks, what it is worth."""
    from .. import describe_head, load_model

    paths = check_outputs(out)
    chosen = HeadIndex.parse(head)
    options = given(
        relations=comma_parts(relations) if relations else None,
        preset=preset,
        text=text,
        texts=texts,
        results=results,
    )
    show_and_save(describe_head(load_model(model, device), chosen, **options), paths)


def worth(
    named_heads: HeadsArgument = None,
    heads: HeadsOption = None,
    texts: TextsOption = None,
    max_texts: Annotated[int | None, typer.Option("--max-texts", help="Held-out texts at most; default: all.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Cut texts to this many tokens; default: 64.")
    ] = None,
    prepend_bos: BosOption = None,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show how much worse the model predicts held-out text when a head is replaced by its mean."""
    from .. import head_worth, load_model

    paths = check_outputs(out)
    options = given(
        heads=parse_heads(heads, named_heads),
        texts=texts,
        max_texts=max_texts,
        max_tokens=max_tokens,
        prepend_bos=prepend_bos,
    )
    show_and_save(head_worth(load_model(model, device), **options), paths)
