"""Agreement with prompts, and ablation: heads shuffled within layers, random sets of heads, resampled clusters.

All on the default model and its capitals: the relation on which three heads decide nearly everything, so that whoever
holds one of them by chance looks special.
"""

import itertools
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tl_headmaps import HeadIndex
from tl_headmaps.analyses.ablate import Ablation, Questions
from tl_headmaps.analyses.study import Study
from tl_headmaps.analyses.validate import PromptedRelation
from tl_headmaps.data.relations import resolve
from tl_headmaps.scorers.ablation import accuracy, masks_of
from tl_headmaps.scorers.statistics import halves_of, matched_sets, rank_p_value
from tl_headmaps.scorers.validation import Agreement, PairHits, agreement, orders_within

from .rows import Bench, Measured, row

RELATION = "country_to_capital"
SIZE = 3


@cache
def _asked(model: Any) -> Questions:
    study = Study(model, prepend_bos=True, fills_prompts=True, preset="folded", progress=False)
    return Ablation(study).questions(resolve(RELATION), ["The capital of <X> is"])


@cache
def _right(model: Any, weights: Any, layer: int) -> tuple[list[tuple[HeadIndex, ...]], Tensor]:
    """All sets of three heads of a layer, and which pairs are right without each [set, pair]."""
    sets = list(itertools.combinations([HeadIndex(layer, head) for head in range(weights.n_heads)], SIZE))
    off = masks_of(sets, weights.n_layers, weights.n_heads)
    return sets, _asked(model).last.switched_off(off)[..., 0]


def _ranked(bench: Bench, pairs: Tensor) -> list[float]:
    """The verdict's p-value for every set of three heads of some layers, called own, on some of the pairs."""
    weights, generator, p_values = bench.weights, bench.generator(), []
    everything = [HeadIndex(layer, head) for layer in range(weights.n_layers) for head in range(weights.n_heads)]
    for layer in (23,) if bench.quick else (15, 20, 23, 27):
        sets, right = _right(bench.model, weights, layer)
        share = dict(zip(map(frozenset, sets), right[:, pairs].mean(1).tolist(), strict=True))
        for own in sets:
            # Draws of its own: with the same ones for all, the least of them would decide about the whole layer.
            rivals = matched_sets(own, everything, 39, seed=int(generator.integers(1 << 30))).sets
            p_values.append(rank_p_value(share[frozenset(own)], [share[frozenset(heads)] for heads in rivals], "less"))
    return p_values


@row("ablate", "verdict.p_value", null="random heads called own, 39 sets")
def random_heads(bench: Bench) -> Measured:
    n_pairs = len(_asked(bench.model).prompts)
    return Measured.of_p_values(_ranked(bench, torch.ones(n_pairs, dtype=torch.bool)))


@row("ablate", "verdict.p_value with split", null="random heads called own, on one half of the clusters of pairs")
def random_heads_on_half(bench: Bench) -> Measured:
    return Measured.of_p_values(_ranked(bench, ~halves_of(_asked(bench.model).clusters)))


@row("ablate", "accuracy_low, accuracy_high", null="resampled clusters of pairs")
def accuracies(bench: Bench) -> Measured:
    """Sets of heads of layer 23 leave accuracies between 0.1 and 0.9; whole clusters are drawn again."""
    clusters = _asked(bench.model).clusters
    _, right = _right(bench.model, bench.weights, 23)
    truth, generator = right.mean(1), bench.generator()
    n_clusters, covered = int(clusters.max()) + 1, []
    for _ in range(bench.count(300, 60)):
        drawn = generator.integers(0, n_clusters, n_clusters)
        places = [torch.nonzero(clusters == cluster)[:, 0] for cluster in drawn]
        again = torch.cat([torch.full((len(own),), number) for number, own in enumerate(places)])
        _, low, high = accuracy(right[:, torch.cat(places)] > 0, again)
        covered.append((low - 1e-6 <= truth) & (truth <= high + 1e-6))
    return Measured.of_intervals(torch.stack(covered))


@cache
def _hits(model: Any, n_templates: int) -> tuple[PairHits, PairHits, Tensor]:
    """Hits from the weights and in prompts with attention as it is, and the layers of heads."""
    relation = resolve(RELATION)
    study = Study(model, prepend_bos=True, fills_prompts=True, preset="folded", progress=False)
    prompted = PromptedRelation.of(study, relation, relation.neutral_templates[:n_templates])
    static, dynamic = prompted.hits(None, lambda n: None)
    layers = torch.arange(static.shape[1]).repeat_interleave(static.shape[2])
    return *prompted.by_cluster(static[0], dynamic[0, 1]), layers


def _of(bench: Bench) -> tuple[PairHits, PairHits, Tensor]:
    return _hits(bench.model, bench.count(2, 1))


@row("validate", "p_without, p_with", null="heads shuffled within layers")
def shuffled_heads(bench: Bench) -> Measured:
    static, dynamic, layers = _of(bench)
    orders, p_values = orders_within(layers, bench.seed), []
    for shuffle in orders_within(layers, bench.seed + 1)[: bench.count(400, 100)]:
        shuffled = PairHits(static.hits[:, :, shuffle.numpy()], static.sizes)
        p_values.append(agreement(shuffled, dynamic, layers, orders=orders).p_value)
    return Measured.of_p_values(p_values)


@cache
def _redrawn(model: Any, n_templates: int, n_samples: int) -> list[Agreement]:
    """The agreement in samples of clusters of pairs."""
    static, dynamic, layers = _hits(model, n_templates)
    generator, n = np.random.default_rng(1), len(static.sizes)
    orders = torch.arange(len(layers))[None]
    samples = [generator.integers(0, n, n) for _ in range(n_samples)]
    return [
        agreement(
            PairHits(static.hits[own], static.sizes[own]), PairHits(dynamic.hits[own], dynamic.sizes[own]), layers,
            orders=orders, seed=number,
        )
        for number, own in enumerate(samples)
    ]  # fmt: skip


def _samples(bench: Bench) -> list[Agreement]:
    return _redrawn(bench.model, bench.count(2, 1), bench.count(250, 40))


def _covered(bench: Bench, *names: str) -> Measured:
    """How often intervals hold the mean over samples of as many clusters: what the text says they are about."""
    found = _samples(bench)
    covered = []
    for name in names:
        estimates = [getattr(one, name) for one in found]
        mean = float(np.mean([one.value for one in estimates]))
        covered += [one.low - 1e-9 <= mean <= one.high + 1e-9 for one in estimates]
    return Measured.of_intervals(covered)


@row("validate", "heads_with_low, heads_with_high", null="resampled clusters of pairs")
def heads(bench: Bench) -> Measured:
    return _covered(bench, "heads")


@row("validate", "pearson_with_low, pearson_with_high", null="resampled clusters of pairs")
def pearson(bench: Bench) -> Measured:
    return _covered(bench, "pearson")


@row("validate", "confirmed_with_low, confirmed_with_high", null="resampled clusters of pairs")
def confirmed(bench: Bench) -> Measured:
    """The share of three heads is 0, 1/3, 2/3 or 1: the interval holds that of all pairs."""
    static, dynamic, layers = _of(bench)
    truth = agreement(static, dynamic, layers, orders=torch.arange(len(layers))[None]).confirmed.value
    found = [one.confirmed for one in _samples(bench)]
    return Measured.of_intervals([one.low - 1e-9 <= truth <= one.high + 1e-9 for one in found])
