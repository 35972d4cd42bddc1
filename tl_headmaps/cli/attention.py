"""Commands about real attention: which tokens heads bind together, and what that does to their values."""

from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import UsageError
from ..core.types import GroupMethod, Measure
from .options import DeviceOption, ModelOption, NoCheckpointOption, OutOption
from .output import check_outputs, comma_parts, parse_heads, show_and_save

BosOption = Annotated[bool, typer.Option("--prepend-bos", help="Put the BOS token in front of the text.")]


def groups(
    text: Annotated[str | None, typer.Option("--text", help="The text whose tokens are grouped.")] = None,
    texts: Annotated[
        Path | None,
        typer.Option("--texts", metavar="FILE", help="Many texts, blank lines between them: each head's profile."),
    ] = None,
    heads: Annotated[str | None, typer.Option("--heads", help="Only these heads: L23H4,L23H2.")] = None,
    layers: Annotated[str | None, typer.Option("--layers", help="Only heads of these layers: 3,4,5.")] = None,
    method: Annotated[GroupMethod, typer.Option("--method", help="How groups are found.")] = "auto",
    n_groups: Annotated[int | None, typer.Option("--n-groups", help="So many groups; default: the eigengap's.")] = None,
    threshold: Annotated[
        float, typer.Option("--threshold", help="Share of a token's strongest edge that counts.")
    ] = 0.1,
    keep_sink: Annotated[bool, typer.Option("--keep-sink", help="Keep the first token, even if it is a sink.")] = False,
    null_draws: Annotated[int | None, typer.Option("--null-draws", help="Shuffled graphs to compare with.")] = None,
    prepend_bos: BosOption = False,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show which tokens of a text the heads bind together, or (--texts) what kind of tokens each head attends to."""
    from .. import attention_groups, grouping_profile, load_model

    paths = check_outputs(out)
    if (text is None) == (texts is None):
        raise UsageError(
            'Give either --text "..." for the groups of one text, or --texts FILE for a profile over many.'
        )
    if texts is not None:
        if not texts.is_file():
            raise UsageError(f"There is no file {texts}. Give a text file with blank lines between texts.")
        show_and_save(grouping_profile(load_model(model, device), texts, prepend_bos=prepend_bos), paths)
        return
    chosen = None if heads is None else parse_heads(heads)
    numbers = None if layers is None else [_layer(part) for part in comma_parts(layers)]
    result = attention_groups(
        load_model(model, device),
        text,
        layers=numbers,
        heads=chosen,
        method=method,
        drop_sink=not keep_sink,
        threshold=threshold,
        n_groups=n_groups,
        null_draws=null_draws,
        prepend_bos=prepend_bos,
    )
    show_and_save(result, paths)


def _layer(text: str) -> int:
    if not text.strip().isdecimal():
        raise UsageError(f"{text.strip()!r} is not the number of a layer. Write --layers 3,4,5.")
    return int(text)


def mixing(
    text: Annotated[str, typer.Option("--text", help="The text.")],
    head: Annotated[
        str | None, typer.Option("--head", help="A head such as L5H3; default: a map of all heads.")
    ] = None,
    query: Annotated[str | None, typer.Option("--query", help="Token whose value changes: walk, walk#2, or 3.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="Token it is compared with, likewise.")] = None,
    measure: Annotated[Measure, typer.Option("--measure", help="What heads are ranked by, without --head.")] = "cosine",
    prepend_bos: BosOption = False,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show what a head's attention does to a text's values; without --head, which heads bring two tokens closer."""
    from .. import HeadIndex, association_heads, load_model, value_mixing

    paths = check_outputs(out)
    if head is not None:
        HeadIndex.parse(head)
        loaded = load_model(model, device)
        show_and_save(value_mixing(loaded, text, head, query, key=key, prepend_bos=prepend_bos), paths)
        return
    if query is None or key is None:
        raise UsageError("Without --head, all heads are compared on two tokens: give --query and --key, or a --head.")
    loaded = load_model(model, device)
    show_and_save(association_heads(loaded, text, query, key, measure=measure, prepend_bos=prepend_bos), paths)
