"""Commands of ``tl-headmaps``.

Results go to stdout and to every ``--out`` file (the suffix chooses the form), progress and errors to stderr.
Exit code 0: done; 1: the analysis could not be done; 2: wrong usage.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import HeadMapsError, UsageError
from ..data.relations import MultiToken
from .attention import groups, mixing
from .checks import ablate, reproduce, validate
from .components import components
from .demo import demo
from .options import (
    CheckpointOption,
    CircuitOption,
    DeviceOption,
    ModelOption,
    OutOption,
    PresetOption,
    RunDirOption,
    WorkersOption,
    open_weights,
    worker_pool,
)
from .output import check_outputs, comma_parts, parse_heads, show_and_save
from .salient import name_heads, salient
from .tasks import tasks

if TYPE_CHECKING:
    from ..data.relations import Relation

app = typer.Typer(
    name="tl-headmaps",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Tell what every attention head of a language model does.",
)


def main() -> None:
    """Entry point: every foreseen failure is one sentence and an exit code, never a traceback."""
    try:
        app()
    except HeadMapsError as error:
        _fail(str(error), 2 if isinstance(error, UsageError) else 1)


def _fail(message: str, code: int) -> None:
    typer.echo(f"tl-headmaps: {message}", err=True)
    sys.exit(code)


def version(value: bool | None) -> None:
    """Print the version and leave."""
    if value:
        from .. import __version__

        typer.echo(f"tl-headmaps {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool | None, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = None,
) -> None:
    """Tell what every attention head of a language model does."""


def split_tokens(text: str) -> list[str | int]:
    """``France,Germany,#4649``: words, or ids behind a hash."""
    tokens: list[str | int] = []
    for word in comma_parts(text):
        tokens.append(int(word[1:]) if word.startswith("#") and word[1:].isdecimal() else word)
    return tokens


@app.command()
def grid(
    head: Annotated[str, typer.Option("--head", help="A head such as L23H4.")],
    sources: Annotated[str, typer.Option("--sources", help="Row words, separated by commas; #123 is a token id.")],
    targets: Annotated[str, typer.Option("--targets", help="Column words, likewise.")],
    circuit: CircuitOption = "ov",
    preset: PresetOption = "folded",
    model: ModelOption = None,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show what one head does with a few chosen tokens."""
    from .. import HeadIndex, token_grid

    paths = check_outputs(out)
    HeadIndex.parse(head)
    words = [split_tokens(text) for text in (sources, targets)]
    weights = open_weights(model, checkpoint, device)
    show_and_save(token_grid(weights, head, words[0], words[1], circuit=circuit, preset=preset), paths)


@app.command()
def relations(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME|FILE]...", help="Bundled names or files; default: all bundled.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the bundled relations and leave.")] = False,
    category: Annotated[str | None, typer.Option("--category", help="Bundled relations of one category.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Top-k; default: each relation's own.")] = None,
    heads: Annotated[str | None, typer.Option("--heads", help="Only these heads: L23H4,L23H2.")] = None,
    multi_token: Annotated[MultiToken, typer.Option("--multi-token", help="Targets of several tokens.")] = "skip",
    circuit: CircuitOption = "ov",
    preset: PresetOption = "folded",
    model: ModelOption = None,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = None,
    run_dir: RunDirOption = None,
    workers: WorkersOption = None,
    out: OutOption = None,
) -> None:
    """Score how accurately each head implements relations such as country to capital."""
    from .. import load_relations, relation_scores
    from ..data.relations import resolve

    paths = check_outputs(out)
    if show_list:
        typer.echo(_relation_list(load_relations(category), open_weights(model, checkpoint, device)))
        return
    chosen = None if heads is None else parse_heads(heads)
    named = [resolve(name) for name in names or []]
    with worker_pool(workers, checkpoint) as pool:
        loaded = open_weights(model, checkpoint, device)
        if not named:
            named = load_relations(category, model=loaded)
        result = relation_scores(
            loaded,
            named,
            preset=preset,
            k=k,
            circuit=circuit,
            heads=chosen,
            multi_token=multi_token,
            run_dir=run_dir,
            executor=pool,
        )
    show_and_save(result, paths)


def _relation_list(listed: list["Relation"], model: Any) -> str:
    from ..data.relations import kept_pairs
    from ..renderers.text import table_text

    rows = [
        [
            relation.category,
            relation.name,
            len(relation.pairs),
            "-" if model.tokenizer is None else kept_pairs(relation, model.tokenizer),
            relation.k,
            relation.title,
        ]
        for relation in listed
    ]
    titles = ["category", "relation", "pairs", "single-token", "k", "title"]
    columns = [(title, "right" if title in ("pairs", "single-token", "k") else "left") for title in titles]
    return table_text(columns, rows)


@app.command("model")
def model_(
    model: ModelOption = None,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show what was found in a model: its size, weight basis, norms, and what can be analysed."""
    from .. import describe_model

    paths = check_outputs(out)
    show_and_save(describe_model(open_weights(model, checkpoint, device)), paths)


@app.command()
def cite(
    result: Annotated[Path | None, typer.Argument(metavar="[RESULT]", help="A saved result (.json).")] = None,
) -> None:
    """Print BibTeX of this tool, and of the methods behind a saved result."""
    from .. import Result
    from .. import cite as print_citations

    print_citations(None if result is None else Result.load(result), file=sys.stdout)


app.command()(salient)
app.command("name-heads")(name_heads)
app.command()(groups)
app.command()(mixing)
app.command()(components)
app.command()(tasks)
app.command()(demo)
for command in (validate, ablate, reproduce):
    app.command()(command)
