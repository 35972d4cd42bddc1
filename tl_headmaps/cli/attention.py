"""Commands about real attention: which tokens heads bind together, and what that does to their values."""

import re
from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import UsageError
from ..core.types import Combine, GroupMethod, Measure
from .options import (
    BosOption,
    DeviceOption,
    HeadArgument,
    HeadOption,
    HeadsArgument,
    HeadsOption,
    LayersOption,
    ModelOption,
    NoCheckpointOption,
    OutOption,
    given,
)
from .output import check_outputs, parse_head, parse_heads, parse_layers, show_and_save

QUERY_HELP = "Token whose value changes: walk, walk#2, 3, or -1 (the last)."
KEY_HELP = "Token it is compared with, likewise."


def groups(
    text: Annotated[str, typer.Option("--text", help="The text whose tokens are grouped.")],
    named_heads: HeadsArgument = None,
    layers: LayersOption = None,
    heads: HeadsOption = None,
    method: Annotated[GroupMethod | None, typer.Option("--method", help="How groups are found; default: auto.")] = None,
    drop_sink: Annotated[
        bool | None,
        typer.Option("--drop-sink/--keep-sink", help="Leave out or keep attention sinks."),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option("--threshold", help="Share of a token's strongest edge that counts.")
    ] = None,
    n_groups: Annotated[
        int | None, typer.Option("--n-groups", help="Make this many groups; default: the eigengap decides.")
    ] = None,
    n_null: Annotated[
        int | None, typer.Option("--n-null", help="Most draws to compare each head with; default: 3999 for a sentence.")
    ] = None,
    combine: Annotated[
        Combine | None, typer.Option("--combine", help="Mean or maximum over heads; default: mean.")
    ] = None,
    prepend_bos: BosOption = None,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show which tokens of a text the heads bind together."""
    from .. import attention_groups, load_model

    paths = check_outputs(out)
    options = given(
        layers=parse_layers(layers),
        heads=parse_heads(heads, named_heads),
        method=method,
        drop_sink=drop_sink,
        threshold=threshold,
        n_groups=n_groups,
        n_null=n_null,
        combine=combine,
        prepend_bos=prepend_bos,
    )
    show_and_save(attention_groups(load_model(model, device), text, **options), paths)


def profile(
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts",
            metavar="FILE",
            help="Texts separated by blank lines; default: random tokens said twice, and the bundled prose.",
        ),
    ] = None,
    named_heads: HeadsArgument = None,
    heads: HeadsOption = None,
    max_texts: Annotated[int | None, typer.Option("--max-texts", help="Stop after this many texts.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Cut texts to this many tokens; default: 512.")
    ] = None,
    prepend_bos: BosOption = None,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show what kind of tokens each head attends to, over many texts."""
    from .. import grouping_profile, load_model

    paths = check_outputs(out)
    if texts is not None and not texts.is_file():
        raise UsageError(f"There is no file {texts}. Give a text file with blank lines between texts.")
    options = given(
        heads=parse_heads(heads, named_heads),
        max_texts=max_texts,
        max_tokens=max_tokens,
        prepend_bos=prepend_bos,
    )
    show_and_save(grouping_profile(load_model(model, device), texts, **options), paths)


def mixing(
    text: Annotated[str, typer.Option("--text", help="The text.")],
    named_head: HeadArgument = None,
    head: HeadOption = None,
    query: Annotated[str | None, typer.Option("--query", help=QUERY_HELP)] = None,
    key: Annotated[str | None, typer.Option("--key", help=KEY_HELP)] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="Compare the dimensions that --query and this token use.")
    ] = None,
    control: Annotated[
        list[str] | None, typer.Option("--control", help="With --against: a token to compare with; several times.")
    ] = None,
    prepend_bos: BosOption = None,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show what a head's attention does to the values of a text; with --query and --key, worked out by hand."""
    from .. import load_model, value_mixing

    paths = check_outputs(out)
    chosen = parse_head(head, named_head)
    if against is None:
        if control:
            raise UsageError("--control is compared with --query beside --against. Give --against, too.")
        options = given(query=query, key=key, prepend_bos=prepend_bos)
        show_and_save(value_mixing(load_model(model, device), text, chosen, **options), paths)
        return
    if query is None or key is None:
        raise UsageError("--against compares two words that are associated with a key. Give --query and --key, too.")
    mixed = value_mixing(load_model(model, device), text, chosen, **given(prepend_bos=prepend_bos))
    show_and_save(mixed.dimensions(query, key, against=against, control=control or []), paths)


def association(
    text: Annotated[str, typer.Option("--text", help="The text.")],
    query: Annotated[str, typer.Option("--query", help=QUERY_HELP)],
    key: Annotated[str, typer.Option("--key", help=KEY_HELP)],
    measure: Annotated[
        Measure | None, typer.Option("--measure", help="What heads are ranked by; default: cosine.")
    ] = None,
    prepend_bos: BosOption = None,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show which heads bring two tokens of a text closer together."""
    from .. import association_heads, load_model

    paths = check_outputs(out)
    options = given(measure=measure, prepend_bos=prepend_bos)
    show_and_save(association_heads(load_model(model, device), text, query, key, **options), paths)


def compare_attention(
    phrases: Annotated[
        list[str], typer.Option("--phrases", help='A phrase and its query, "Birds sometimes walk=walk"; several times.')
    ],
    key: Annotated[str, typer.Option("--key", help="The word that both queries attend to.")],
    control: Annotated[
        list[str] | None, typer.Option("--control", help="A phrase with another query, likewise; several times.")
    ] = None,
    n_null: Annotated[
        int | None, typer.Option("--n-null", help="Ways of dealing phrasings out that are tried; default: 2000.")
    ] = None,
    prepend_bos: BosOption = None,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show whether two words attend to a key alike, head by head, over several phrasings."""
    from .. import compare_attention, load_model

    paths = check_outputs(out)
    asked, controls = _phrases("--phrases", phrases), _phrases("--control", control or [])
    options = given(control=controls or None, n_null=n_null, prepend_bos=prepend_bos)
    show_and_save(compare_attention(load_model(model, device), asked, key, **options), paths)


def _phrases(option: str, texts: list[str]) -> dict[str, str | int]:
    """Queries by their phrases; a phrase that is given twice would lose its first query."""
    found: dict[str, str | int] = {}
    for phrase, query in map(_phrase, texts):
        if phrase in found:
            raise UsageError(
                f"{option} has {phrase!r} twice, with {found[phrase]!r} and {query!r}. A phrase has one query: write "
                "another phrase for the second."
            )
        found[phrase] = query
    return found


def _phrase(text: str) -> tuple[str, str | int]:
    phrase, equals, query = text.rpartition("=")
    if not (equals and phrase.strip() and query.strip()):
        raise UsageError(f'{text!r} has no query. Write the phrase, "=" and its query: "Birds sometimes walk=walk".')
    return phrase, _index(query, phrase)


def _index(token: str, text: str) -> str | int:
    """An index of a token (-1 is the last), unless the text has these digits."""
    return int(token) if re.fullmatch("-?[0-9]{1,9}", token.strip()) and token.strip() not in text else token
