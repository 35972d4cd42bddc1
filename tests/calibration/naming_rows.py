"""Names of heads that know nothing: W_O turned inside d_head, or Gaussian."""

from functools import cache

import torch

from calibration.relation_rows import Change, gaussian_outputs, inner_rotation, null_weights
from calibration.rows import Bench, Measured, row
from tl_headmaps import salient_operations
from tl_headmaps.naming.namer import UNCLEAR


@cache
def _named(bench: Bench, change: Change) -> Measured:
    layers = torch.linspace(1, 29, bench.count(10, 1)).int().tolist()
    weights = null_weights(bench, change)
    heads = [(layer, head) for layer in layers for head in range(weights.n_heads)]
    found = salient_operations(
        weights, heads, preset="folded", vocabulary="words", n_tokens=1, n_targets=1, progress=False
    )
    return Measured.of_verdicts([entry.name != UNCLEAR for entry in found.names])


@row("salient_operations", "names", null="W_O turned inside d_head")
@row("name_heads", "names", null="W_O turned inside d_head")
def turned(bench: Bench) -> Measured:
    return _named(bench, inner_rotation)


@row("salient_operations", "names", null="Gaussian W_O")
@row("name_heads", "names", null="Gaussian W_O")
def gaussian(bench: Bench) -> Measured:
    return _named(bench, gaussian_outputs)
