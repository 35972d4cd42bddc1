"""What heads are worth: intervals over held-out texts, tried on texts drawn again."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from calibration.rows import Bench, Measured, row
from tl_headmaps import head_worth
from tl_headmaps.analyses.head_worth import rise_with_interval


@row("head_worth", "interval_low, interval_high", null="24 held-out texts drawn again")
def intervals(bench: Bench) -> Measured:
    """Heads from all over the model; the truth is the rise over all texts that are drawn from."""
    module: Any = import_module("tl_headmaps.analyses.head_worth")
    seen: list[tuple[Tensor, list[int]]] = []

    def watched(losses: Tensor, n_targets: list[int]) -> Any:
        seen.append((losses, n_targets))
        return rise_with_interval(losses, n_targets)

    before, module.rise_with_interval = module.rise_with_interval, watched
    try:
        heads = bench.weights.chosen_heads()[:: bench.count(27, 150)]
        head_worth(bench.model, heads, max_texts=bench.count(45, 8), max_tokens=bench.count(48, 24), progress=False)
    finally:
        module.rise_with_interval = before
    losses, n_targets = seen[0]
    truth = rise_with_interval(losses, n_targets)[0]
    generator = torch.Generator().manual_seed(bench.seed)
    covered = []
    for _ in range(bench.count(400, 20)):
        chosen = torch.randint(len(n_targets), (24,), generator=generator).tolist()
        _, low, high = rise_with_interval(losses[:, chosen], [n_targets[place] for place in chosen])
        covered.append((low <= truth) & (truth <= high))
    return Measured.of_intervals(torch.cat(covered))
