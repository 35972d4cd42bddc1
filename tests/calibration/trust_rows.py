"""Token shares: intervals over documents, tried on documents drawn again."""

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from calibration.rows import Bench, Measured, row
from tl_headmaps import head_trust
from tl_headmaps.data.texts import Sample, split_texts
from tl_headmaps.scorers.trust import share_with_interval


@lru_cache(maxsize=2)
def _by_document(bench: Bench) -> list[tuple[Tensor, Tensor]]:
    """What is left, and what there was, of every held-out document in every layer, as the analysis hands it on."""
    module: Any = import_module("tl_headmaps.analyses.head_trust")
    seen: list[tuple[Tensor, Tensor]] = []

    def watched(left: Tensor, total: Tensor, **options: Any) -> Any:
        seen.append((left, total))
        return share_with_interval(left, total, **options)

    before, module.share_with_interval = module.share_with_interval, watched
    try:
        texts = [text[:600] for part in split_texts(Sample.WHOLE) for text in part]
        head_trust(bench.model, texts[: bench.count(120, 12)], n_null=1, progress=False)
    finally:
        module.share_with_interval = before
    return seen


@row("head_trust", "interval_low, interval_high", null="held-out documents drawn again")
def intervals(bench: Bench) -> Measured:
    generator = torch.Generator().manual_seed(bench.seed)
    covered = []
    for left, total in _by_document(bench):
        truth = 1 - left.sum(0) / total.sum(0)
        for draw in range(bench.count(20, 2)):
            chosen = torch.randint(len(left), (len(left),), generator=generator)
            _, low, high = share_with_interval(left[chosen], total[chosen], n_draws=400, seed=draw)
            covered.append((low <= truth) & (truth <= high))
    return Measured.of_intervals(torch.cat(covered))
