"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..types import Circuit, Preset

ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME_OR_FOLDER", help="Hub name or folder; default: SmolLM2-135M-Instruct."),
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu, cuda, mps; default: the model's own.")]
PresetOption = Annotated[
    Preset, typer.Option("--preset", help="folded: what the model computes; maps: the published recipe.")
]
CircuitOption = Annotated[Circuit, typer.Option("--circuit", help="ov: what is written; qk: what is attended to.")]
VocabularyOption = Annotated[
    Literal["all", "words"],
    typer.Option("--vocabulary", help="words: without byte fragments, control tokens and untrained tokens."),
]
OutOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--out", metavar="FILE", help="Write the result; .json, .csv, .html, .svg, .png, .pdf. May be repeated."
    ),
]
