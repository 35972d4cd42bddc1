"""The tour: a real head of a real model doing a real thing, in about a minute."""

from pathlib import Path
from typing import Annotated

import typer

from .options import CheckpointOption, DeviceOption, ModelOption, open_weights

_RELATIONS = ("country_to_capital", "country_to_language", "name_copying", "past_tense", "comparative", "antonym")
_SOURCES = ("France", "Germany", "Egypt")
_TARGETS = ("Cairo", "Paris", "Berlin")


def demo(
    model: ModelOption = None,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = None,
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where to write the results.")] = Path("demo"),
) -> None:
    """Take the tour: what was found in the model, which heads know capitals, and one of them at work."""
    from .. import HeadWeights, describe_model, relation_scores, token_grid

    weights = HeadWeights.of(open_weights(model, checkpoint, device))
    description = describe_model(weights)
    _section("The model", str(description))

    scores = relation_scores(weights, _RELATIONS)
    _section("Which heads implement which relation? (from the weights alone)", str(scores))

    head, score = scores.top(1, "country_to_capital")[0]
    grid = token_grid(weights, head, _SOURCES, _TARGETS)
    _section(f"{head} scores {score:.2f} on country to capital: look at it", str(grid))
    found = ", ".join(f"{source} -> {target}" for source, target in grid.best())
    typer.echo(f"\nFinding: {head} of {weights.model_name} maps {found}.")

    results = {"model": description, "relation_scores": scores, "token_grid": grid}
    for name, result in results.items():
        result.save(folder / f"{name}.json")
        result.save(folder / f"{name}.html")
    typer.echo(f"Wrote {', '.join(f'{name}.json and .html' for name in results)} to {folder.resolve()}")


def _section(title: str, text: str) -> None:
    typer.echo(f"\n== {title} ==\n\n{text}")
