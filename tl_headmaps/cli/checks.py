"""Commands that run the model: do its activations, and its answers without some heads, agree with the weights?"""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.types import AblationMethod, PromptSources
from .options import (
    DeviceOption,
    ModelOption,
    MultiTokenOption,
    NoCheckpointOption,
    OutOption,
    PresetOption,
    PromptsOption,
    TopKOption,
    context_options,
    given,
)
from .output import check_folder, check_outputs, comma_parts, parse_heads, say, show_and_save

PromptBosOption = Annotated[
    bool | None,
    typer.Option(
        "--prepend-bos/--no-prepend-bos",
        help="Begin each prompt with BOS; default: as the model does, never with --preset maps.",
    ),
]
RandomOption = Annotated[
    int | None, typer.Option("--n-random", help="Other sets of heads to compare with; default: 99.")
]


def validate(
    relations: Annotated[list[str], typer.Argument(metavar="NAME|FILE", help="Relations: bundled names or files.")],
    templates: Annotated[
        Path | None, typer.Option("--templates", metavar="FILE", help="Prompts, one on each line, <X> in each.")
    ] = None,
    sources: Annotated[
        PromptSources | None,
        typer.Option("--sources", help="single: sources of one token; multi: of several, in prompts; default: single."),
    ] = None,
    k: TopKOption = None,
    multi_token: MultiTokenOption = None,
    prompts: PromptsOption = None,
    prepend_bos: PromptBosOption = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of the resampling behind the intervals; default: 0.")
    ] = None,
    preset: PresetOption = None,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Check static scores against what the heads write in prompts."""
    from .. import load_model
    from .. import validate as validate_
    from ..capture.running.prompts import read_templates
    from ..data.relations import resolve_relations

    paths = check_outputs(out)
    resolved = resolve_relations(relations)
    chosen = None if templates is None else read_templates(templates)
    options = given(preset=preset, k=k, sources=sources, multi_token=multi_token, seed=seed)
    options |= context_options(prompts, prepend_bos)
    show_and_save(validate_(load_model(model, device), resolved, chosen, **options), paths)


def ablate(
    relation: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A relation: a bundled name or a file.")],
    template: Annotated[
        str | None, typer.Option("--template", help='Prompt before the target: "The capital of <X> is".')
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(
            "--heads",
            metavar="HEADS",
            help="Heads in their order: L23H4,L12 (L12: all of layer 12); default: top, by their score.",
        ),
    ] = None,
    max_heads: Annotated[
        int | None, typer.Option("--max-heads", help="Heads at most; default: by the size of the model.")
    ] = None,
    controls: Annotated[
        list[str] | None,
        typer.Option(
            "--controls",
            metavar="NAMES",
            help="Relations separated by commas, or none; default: auto, the first three that fit.",
        ),
    ] = None,
    n_random: RandomOption = None,
    split: Annotated[
        bool, typer.Option("--split", help="Choose the heads on one half of the pairs, test them on the other.")
    ] = False,
    method: Annotated[
        AblationMethod | None, typer.Option("--method", help="What a head writes instead; default: zero.")
    ] = None,
    k: TopKOption = None,
    multi_token: MultiTokenOption = None,
    prompts: PromptsOption = None,
    prepend_bos: PromptBosOption = None,
    preset: PresetOption = None,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Switch off the heads of a relation one by one and watch the model's answers."""
    from .. import ablate as ablate_
    from .. import load_model
    from ..analyses.ablate.call import eliciting_templates
    from ..data.relations import resolve, resolve_relations

    paths = check_outputs(out)
    resolved = resolve(relation)
    eliciting_templates(resolved, template)
    options: dict[str, Any] = given(
        heads=None if heads == ["top"] else parse_heads(heads),
        max_heads=max_heads,
        template=template,
        n_random=n_random,
        split=split or None,
        method=method,
        preset=preset,
        k=k,
        multi_token=multi_token,
        **context_options(prompts, prepend_bos),
    )
    if controls and controls != ["auto"]:
        options["controls"] = None if controls == ["none"] else resolve_relations(comma_parts(controls))
    show_and_save(ablate_(load_model(model, device), resolved, **options), paths)


def reproduce(
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where to write; an interrupted run resumes.")],
    relations: Annotated[
        list[str] | None,
        typer.Option("--relations", metavar="NAMES", help="Only these, separated by commas. May be repeated."),
    ] = None,
    n_random: RandomOption = None,
    prepend_bos: Annotated[
        bool | None,
        typer.Option("--prepend-bos/--no-prepend-bos", help="Begin each prompt with BOS; published figures do not."),
    ] = None,
    model: ModelOption = None,
    _checkpoint: NoCheckpointOption = None,
    device: DeviceOption = None,
) -> None:
    """Run the published experiments end to end: tables, figures and a manifest."""
    from .. import load_model
    from .. import reproduce as reproduce_
    from ..data.relations import resolve_relations

    out = check_folder(out)
    options = given(
        relations=resolve_relations(comma_parts(relations)) if relations else None,
        n_random=n_random,
        prepend_bos=prepend_bos,
    )
    result = reproduce_(load_model(model, device), out, **options)
    typer.echo(f"Wrote {out}", err=True)
    say(str(result))
