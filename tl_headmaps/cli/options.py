"""Options that several commands share, and what they open."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..core.errors import UsageError
from ..core.files import SAVED_SUFFIXES
from ..core.types import Circuit, Preset
from ..data.relations import MultiToken

ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME_OR_FOLDER", help="Hub name or folder; default: SmolLM2-135M-Instruct."),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="FOLDER",
        help="Read weights from this folder's safetensors (or a hub name) without building the model.",
    ),
]


def _refused(checkpoint: str | None) -> None:
    if checkpoint is not None:
        raise UsageError(
            f"This command runs the model, and --checkpoint only reads weights. Use --model {checkpoint}: it takes a "
            "folder or a hub name too, and loads the model."
        )


NoCheckpointOption = Annotated[
    str | None, typer.Option("--checkpoint", metavar="FOLDER", hidden=True, is_eager=True, callback=_refused)
]
"""For commands that run the model: refuses the option that other commands have, and names the one to use instead."""

RunDirOption = Annotated[
    Path | None,
    typer.Option("--run-dir", metavar="DIR", help="Save finished layers here, so an interrupted run resumes."),
]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, help="Compute layers in N processes (needs --checkpoint)."),
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu, cuda, mps; default: the model's own.")]
_PRESETS = "context: what layers read at the token in a text; folded: the token alone; maps: as published"
PresetOption = Annotated[
    Preset | None,
    typer.Option(
        "--preset",
        help=f"{_PRESETS}. Default: context for OV maps of a model that runs, folded for QK and --checkpoint.",
    ),
]
VocabularyPresetOption = Annotated[
    Preset | None,
    typer.Option("--preset", help=f"{_PRESETS} (context takes minutes for a whole vocabulary); default: folded."),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts", metavar="FILE", help="With --preset context: prefixes, one on each line; default: neutral."
    ),
]
VectorsOption = Annotated[
    Path | None,
    typer.Option("--vectors", metavar="FOLDER", help="With --preset context: vectors made before, for weights alone."),
]
BosOption = Annotated[
    bool | None,
    typer.Option("--prepend-bos/--no-prepend-bos", help="Begin each text with BOS; default: as the model does."),
]
MultiTokenOption = Annotated[
    MultiToken | None,
    typer.Option("--multi-token", help="Targets of several tokens: skip, or take the first; default: skip."),
]
TopKOption = Annotated[int | None, typer.Option("--k", help="Top-k; default: each relation's own.")]
TextsOption = Annotated[
    Path | None, typer.Option("--texts", metavar="FILE", help="Texts separated by blank lines; default: bundled.")
]
CircuitOption = Annotated[
    Circuit | None, typer.Option("--circuit", help="ov: what is written; qk: what is attended to; default: ov.")
]
VocabularyOption = Annotated[
    Literal["all", "words"] | None,
    typer.Option(
        "--vocabulary", help="words: without byte fragments, control tokens and untrained tokens; default: all."
    ),
]
# Options that hold a list are lists here, too: one that is given twice adds up, and what came first is not lost.
HeadsOption = Annotated[
    list[str] | None,
    typer.Option("--heads", metavar="HEADS", help="Only these heads: L23H4,L12 (L12: all of layer 12)."),
]
HeadsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="HEAD|LAYER", help="The same as --heads: L23H4 L12.")
]
"""For commands without another argument; :func:`.output.parse_heads` takes both."""
HeadOption = Annotated[list[str] | None, typer.Option("--head", metavar="HEAD", help="A head such as L23H4.")]
HeadArgument = Annotated[str | None, typer.Argument(metavar="HEAD", help="The same as --head.")]
"""Likewise; :func:`.output.parse_head` takes both."""
LayersOption = Annotated[
    list[str] | None, typer.Option("--layers", metavar="LAYERS", help="Only heads of these layers: 3,4,5.")
]
OutOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help=f"Write the result; the suffix chooses the form: {', '.join(SAVED_SUFFIXES)}. May be repeated.",
    ),
]


def given(**options: Any) -> dict[str, Any]:
    """The options that were set on the command line; unset ones keep the defaults of the call they go to."""
    return {name: value for name, value in options.items() if value is not None}


def first_given(**options: Any) -> str | None:
    """The first of these options that was set, as it is written on the command line.

    Example:
        >>> first_given(k=None, n_items=0), first_given(k=None)
        ('--n-items', None)
    """
    return next((f"--{name.replace('_', '-')}" for name in given(**options)), None)


def context_options(prompts: Path | None, prepend_bos: bool | None, vectors: Path | None = None) -> dict[str, Any]:
    """The options of ``--preset context`` that were set, as an analysis takes them."""
    from ..data.prompts import read_prompts

    read = None if prompts is None else read_prompts(prompts)
    return given(prompts=read, prepend_bos=prepend_bos, vectors=vectors)


def open_weights(model: str | None, checkpoint: str | None, device: str | None) -> Any:
    """The model or the checkpoint asked for; by default the default model."""
    from .. import HeadWeights, load_model

    if checkpoint is None:
        return load_model(model, device)
    if model is not None:
        raise UsageError(f"--model {model} and --checkpoint {checkpoint} were both given; give one of them.")
    return HeadWeights.from_checkpoint(checkpoint, device=device or "cpu")


@contextmanager
def worker_pool(n_workers: int | None, checkpoint: str | None) -> Iterator[Any]:
    """A process pool of this size, with the cores shared among its workers; None if none was asked for."""
    if n_workers is None:
        yield None
        return
    if checkpoint is None:
        raise UsageError("--workers needs --checkpoint: worker processes open the weights themselves.")
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    import torch

    threads = max(1, torch.get_num_threads() // n_workers)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n_workers, spawn, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        yield pool
