"""A name for every head, and how many heads earn one."""

from pathlib import Path
from typing import Any

from ...capture.weights import HeadWeights
from ...core.types import Circuit, Preset
from ..salient_operations.call import salient_operations
from ..salient_operations.namer import Describe
from .result import HeadNames


def name_heads(
    model: Any,
    *,
    preset: Preset = "folded",
    circuit: Circuit = "ov",
    vocabulary: Any = "all",
    describe: Describe | None = None,
    run_dir: str | Path | None = None,
    executor: Any = None,
    progress: bool = True,
) -> HeadNames:
    """The best name for every head of a model, as :func:`salient_operations` gives them, by layer and head.

    Args:
        model: A TransformerBridge, a HookedTransformer, or HeadWeights.
        preset: ``"folded"``: what the model computes for a token without context. ``"maps"``: the published recipe.
        circuit: ``"ov"`` or ``"qk"``.
        vocabulary: As for :func:`salient_operations`.
        describe: As for :func:`salient_operations`.
        run_dir: Keep finished layers in this folder, and go on from there after a kill.
        executor: Where to compute layers: anything with the interface of ``concurrent.futures.Executor``.
        progress: Show a progress bar on a terminal.

    Example:
        >>> from dataclasses import replace
        >>> from tl_headmaps import HeadWeights, load_default_model, name_heads
        >>> weights = HeadWeights.from_model(load_default_model())
        >>> names = name_heads(replace(weights, n_layers=1), progress=False)  # the first layer only: all take a minute
        >>> names.name("L0H5").name, names.name("L0H5").best  # dealt at random, punctuation meets punctuation as often
        ('unclear', 'punctuation to punctuation')
    """
    weights = HeadWeights.of(model)
    # What is shown of each head does not matter here: names are given on the same tokens anyway.
    found = salient_operations(
        weights,
        n_tokens=1,
        n_targets=1,
        preset=preset,
        circuit=circuit,
        vocabulary=vocabulary,
        describe=describe,
        run_dir=run_dir,
        executor=executor,
        progress=progress,
    )
    width = weights.n_heads
    return HeadNames(
        circuit=circuit,
        names=tuple(found.names[start : start + width] for start in range(0, len(found.names), width)),
        left_out=found.left_out,
        failed_predicates=found.failed_predicates,
        provenance=found.provenance,
    )
