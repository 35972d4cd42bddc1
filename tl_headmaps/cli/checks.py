"""Commands that run the model: do its activations, and its answers without some heads, agree with the weights?"""

from pathlib import Path
from typing import Annotated

import typer

from ..core.types import AblationMethod, Experiment, PromptSources
from ..data.relations import MultiToken
from .options import DeviceOption, ModelOption, NoCheckpointOption, OutOption, PresetOption
from .output import check_outputs, comma_parts, parse_heads, show_and_save

BosOption = Annotated[bool, typer.Option("--prepend-bos", help="Put the BOS token in front of each prompt.")]
TopKOption = Annotated[int | None, typer.Option("--k", help="Top-k; default: each relation's own.")]
MultiTokenOption = Annotated[MultiToken, typer.Option("--multi-token", help="Targets of several tokens.")]


def validate(
    names: Annotated[list[str], typer.Argument(metavar="NAME|FILE...", help="Relations: bundled names or files.")],
    templates: Annotated[
        Path | None, typer.Option("--templates", metavar="FILE", help="Prompts, one on each line, <X> in each.")
    ] = None,
    sources: Annotated[
        PromptSources, typer.Option("--sources", help="single: sources of one token; multi: of several, in prompts.")
    ] = "single",
    k: TopKOption = None,
    multi_token: MultiTokenOption = "skip",
    prepend_bos: BosOption = False,
    seed: Annotated[int, typer.Option("--seed", help="Of the resampling behind the intervals.")] = 0,
    preset: PresetOption = "folded",
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Check static scores against what the heads write in prompts."""
    from .. import load_model
    from .. import validate as validate_
    from ..capture.running.prompts import read_templates
    from ..data.relations import resolve

    paths = check_outputs(out)
    relations = [resolve(name) for name in names]
    chosen = None if templates is None else read_templates(templates)
    result = validate_(
        load_model(model, device),
        relations,
        chosen,
        preset=preset or "folded",
        k=k,
        sources=sources,
        multi_token=multi_token,
        prepend_bos=prepend_bos,
        seed=seed,
    )
    show_and_save(result, paths)


def ablate(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A relation: a bundled name or a file.")],
    template: Annotated[
        str | None, typer.Option("--template", help='Prompt before the target: "The capital of <X> is".')
    ] = None,
    heads: Annotated[str, typer.Option("--heads", help="top, or heads in their order: L23H4,L23H5.")] = "top",
    m: Annotated[int | None, typer.Option("--m", help="Heads at most; default: by the size of the model.")] = None,
    controls: Annotated[str, typer.Option("--controls", help="auto, none, or relations separated by commas.")] = "auto",
    seeds: Annotated[int, typer.Option("--seeds", help="Draws of random heads to compare with.")] = 5,
    method: Annotated[AblationMethod, typer.Option("--method", help="What a head writes instead.")] = "zero",
    k: TopKOption = None,
    multi_token: MultiTokenOption = "skip",
    prepend_bos: BosOption = False,
    preset: PresetOption = "folded",
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Switch off the heads of a relation one by one and watch the model's answers."""
    from .. import ablate as ablate_
    from .. import load_model
    from ..analyses.ablate.call import eliciting_templates
    from ..data.relations import resolve

    paths = check_outputs(out)
    relation = resolve(name)
    eliciting_templates(relation, template)
    chosen = "top" if heads == "top" else parse_heads(heads)
    watched = (
        None if controls == "none" else controls if controls == "auto" else [resolve(c) for c in comma_parts(controls)]
    )
    result = ablate_(
        load_model(model, device),
        relation,
        chosen,
        m=m,
        template=template,
        controls=watched,
        seeds=seeds,
        method=method,
        preset=preset or "folded",
        k=k,
        multi_token=multi_token,
        prepend_bos=prepend_bos,
    )
    show_and_save(result, paths)


def reproduce(
    experiment: Annotated[Experiment, typer.Argument(help="Which experiment.")],
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where to write; goes on if begun.")],
    relations: Annotated[
        list[str] | None,
        typer.Option("--relations", metavar="NAMES", help="Only these, separated by commas. May be repeated."),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Draws of random heads to compare with.")] = 5,
    prepend_bos: BosOption = False,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
) -> None:
    """Run published experiments end to end: tables, figures and a manifest."""
    from .. import load_model
    from .. import reproduce as reproduce_
    from ..data.relations import resolve

    named = [resolve(name) for text in relations or [] for name in comma_parts(text)]
    result = reproduce_(
        load_model(model, device),
        folder,
        experiment=experiment,
        relations=named or None,
        seeds=seeds,
        prepend_bos=prepend_bos,
    )
    typer.echo(str(result))
    typer.echo(f"Wrote {folder}", err=True)
