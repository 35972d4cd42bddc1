"""Commands that ask about tokens you choose: a grid of a few, and the pairs of relations."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import UsageError
from .options import (
    BosOption,
    CheckpointOption,
    CircuitOption,
    DeviceOption,
    HeadArgument,
    HeadOption,
    HeadsOption,
    LayersOption,
    ModelOption,
    MultiTokenOption,
    OutOption,
    PresetOption,
    PromptsOption,
    RunDirOption,
    TopKOption,
    VectorsOption,
    WorkersOption,
    context_options,
    first_given,
    given,
    open_weights,
    worker_pool,
)
from .output import check_outputs, comma_parts, parse_head, parse_heads, parse_layers, say, show_and_save

if TYPE_CHECKING:
    from ..data.relations import Relation


def grid(
    sources: Annotated[
        list[str],
        typer.Option("--sources", metavar="WORDS", help="Row words, separated by commas; #123 is a token id."),
    ],
    targets: Annotated[list[str], typer.Option("--targets", metavar="WORDS", help="Column words, likewise.")],
    named_head: HeadArgument = None,
    head: HeadOption = None,
    relation: Annotated[
        str | None, typer.Option("--relation", help="Relation the grid is an example of: its name and score are shown.")
    ] = None,
    multi_token: MultiTokenOption = None,
    circuit: CircuitOption = None,
    preset: PresetOption = None,
    prompts: PromptsOption = None,
    vectors: VectorsOption = None,
    prepend_bos: BosOption = None,
    model: ModelOption = None,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Show what one head does with a few chosen tokens."""
    from .. import token_grid

    paths = check_outputs(out)
    one = parse_head(head, named_head)
    rows, columns = split_tokens(sources), split_tokens(targets)
    chosen = given(relation=relation, multi_token=multi_token, circuit=circuit, preset=preset)
    options = chosen | context_options(prompts, prepend_bos, vectors)
    show_and_save(token_grid(open_weights(model, checkpoint, device), one, rows, columns, **options), paths)


def split_tokens(option: list[str]) -> list[str | int]:
    """``France,Germany,#4649``: words, or token ids after a hash."""
    return [int(word[1:]) if word.startswith("#") and word[1:].isdecimal() else word for word in comma_parts(option)]


def relations(
    relations: Annotated[
        list[str] | None, typer.Argument(metavar="NAME|FILE", help="Bundled names or files; default: all bundled.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the bundled relations and exit.")] = False,
    category: Annotated[str | None, typer.Option("--category", help="Bundled relations of one category.")] = None,
    k: TopKOption = None,
    heads: HeadsOption = None,
    layers: LayersOption = None,
    multi_token: MultiTokenOption = None,
    side_by_side: Annotated[
        bool, typer.Option("--side-by-side", help="In figures of --out, draw the maps of all relations side by side.")
    ] = False,
    ranks: Annotated[bool, typer.Option("--ranks", help="Also save the exact rank of every pair (slower).")] = False,
    trust: Annotated[
        Path | None, typer.Option("--trust", help="JSON of `tl-headmaps trust`, to be shown beside the scores.")
    ] = None,
    circuit: CircuitOption = None,
    preset: PresetOption = None,
    prompts: PromptsOption = None,
    vectors: VectorsOption = None,
    prepend_bos: BosOption = None,
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
    if relations and (category is not None or show_list):
        option = "--category" if category is not None else "--list"
        raise UsageError(
            f"{option} is about the bundled relations, and {relations[0]} was named. Leave out {option}, or the name."
        )
    if show_list:
        unused = first_given(
            k=k,
            heads=heads or None,
            layers=layers or None,
            multi_token=multi_token,
            side_by_side=side_by_side or None,
            ranks=ranks or None,
            trust=trust,
            circuit=circuit,
            preset=preset,
            prompts=prompts,
            vectors=vectors,
            prepend_bos=prepend_bos,
            run_dir=run_dir,
            workers=workers,
            out=out or None,
        )
        if unused is not None:
            raise UsageError(
                f"--list only lists, with --category, --model, --checkpoint or --device, and has no use for {unused}. "
                f"Leave out --list, or {unused}."
            )
        say(_relation_list(load_relations(category), open_weights(model, checkpoint, device)))
        return
    options = given(
        k=k,
        heads=parse_heads(heads),
        layers=parse_layers(layers),
        multi_token=multi_token,
        ranks=ranks,
        trust=trust,
        circuit=circuit,
        preset=preset,
        run_dir=run_dir,
        **context_options(prompts, prepend_bos, vectors),
    )
    named = [resolve(name) for name in relations or []]
    with worker_pool(workers, checkpoint) as pool:
        weights = open_weights(model, checkpoint, device)
        chosen = named or load_relations(category, model=weights)
        result = relation_scores(weights, chosen, executor=pool, **options)
    show_and_save(result, paths, side_by_side=side_by_side)


def _relation_list(listed: "list[Relation]", model: Any) -> str:
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
