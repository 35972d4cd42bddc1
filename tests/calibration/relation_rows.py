"""Relation scores on heads that know nothing (W_O turned inside d_head or outside, Gaussian), and of drawn clusters."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from calibration.rows import Bench, Measured, row
from tl_headmaps import ContextVectors, HeadWeights, Relation, RelationScores, load_relations, relation_scores
from tl_headmaps.capture.running.context import collect_inputs
from tl_headmaps.core.types import Preset
from tl_headmaps.data.relations import encode
from tl_headmaps.scorers.likeness import alike_pairs
from tl_headmaps.scorers.statistics import clustered_interval

Change: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]
"""What is done to the W_O of a layer."""

MEN = "John James Robert Michael William David Richard Joseph Thomas Charles Daniel Matthew Anthony Mark Paul Andrew"
WOMEN = "Mary Patricia Jennifer Linda Elizabeth Barbara Susan Jessica Sarah Karen Lisa Nancy Margaret Emily Laura Anna"
HE_SHE = Relation.from_pairs(
    "he_she", [(name, "he") for name in MEN.split()] + [(name, "she") for name in WOMEN.split()]
)


def _rotation(size: int, generator: torch.Generator) -> Tensor:
    turned: Tensor = torch.linalg.qr(torch.randn(size, size, generator=generator))[0]
    return turned


def inner_rotation(W_O: Tensor, generator: torch.Generator) -> Tensor:
    """Spectra and subspaces stay; which direction is written for which is drawn."""
    return torch.stack([_rotation(len(head), generator) @ head for head in W_O])


def _outer(W_O: Tensor, generator: torch.Generator) -> Tensor:
    return W_O @ _rotation(W_O.shape[-1], generator)


def gaussian_outputs(W_O: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(W_O.shape, generator=generator) * W_O.std()


def null_weights(bench: Bench, change: Change) -> Any:
    """The model with every W_O changed."""

    @lru_cache(maxsize=1)
    def read(layer: int) -> Any:
        own = bench.weights.layer(layer)
        return replace(own, W_O=change(own.W_O, torch.Generator().manual_seed(bench.seed * 1000 + layer)))

    return replace(bench.weights, read_layer=read, model=None)


_SCORED: dict[tuple[Any, ...], RelationScores] = {}


def null_scores(
    bench: Bench, change: Change, *, few: bool = False, k: int = 10, preset: Preset = "folded"
) -> RelationScores:
    """Scores of null heads on relations with few targets, or on all; several rows ask for the same."""
    key = (bench.quick, bench.seed, change, few, k, preset)
    if key not in _SCORED:
        _SCORED[key] = _null_scores(bench, change, few, k, preset)
    return _SCORED[key]


def _null_scores(bench: Bench, change: Change, few: bool, k: int, preset: Preset) -> RelationScores:
    weights = null_weights(bench, change)
    bundled = load_relations(model=bench.model)
    chosen = [relation for relation in bundled if len({target for _, target in relation.pairs}) < 10]
    # In a quick look all rows share the sources that the model has to meet.
    chosen = [*chosen, HE_SHE] if few or bench.quick else bundled
    layers = torch.linspace(1, 29, bench.count(10 if few else 3, 1)).int().tolist()
    heads = [(layer, head) for layer in layers for head in range(weights.n_heads)]
    vectors = _met_by_the_real_model(bench, chosen) if preset == "context" else None
    return relation_scores(weights, chosen, k=k, heads=heads, preset=preset, vectors=vectors, progress=False)


class _RealStream(ContextVectors):
    """What the unchanged model reads: null heads are put into its stream."""

    def check(self, weights: HeadWeights) -> "ContextVectors":
        return self


def _met_by_the_real_model(bench: Bench, relations: list[Relation]) -> ContextVectors:
    weights, sources = bench.weights, set()
    for relation in relations:
        entry = encode(
            relation, weights.tokenizer, n_sources=weights.n_vocab, n_targets=weights.n_vocab, multi_token_sources=True
        )
        sources |= {(source,) for source in entry.source_ids} | {source for source, _ in entry.multi_token_sources}
    vectors = collect_inputs(weights, sorted(sources, key=lambda source: (len(source), source)), progress=False)
    return _RealStream(vectors.folder, vectors.identity, vectors.sources, vectors.parts)


def _all_p_values(scores: RelationScores) -> Tensor:
    return torch.cat([scores.p_value.flatten(), scores.suppress_p_value.flatten()])


@row("relation_scores", "p_value", "q_value", "suppress_p_value", "suppress_q_value", null="W_O turned inside d_head")
def inner(bench: Bench) -> Measured:
    return Measured.of_p_values(_all_p_values(null_scores(bench, inner_rotation)))


@row("relation_scores", "p_value", null="W_O turned inside d_head, relations with fewer than 10 targets, k = 100")
def inner_few(bench: Bench) -> Measured:
    return Measured.of_p_values(_all_p_values(null_scores(bench, inner_rotation, few=True, k=100)))


@row("relation_scores", "p_value", null="output turned in d_model, relations with fewer than 10 targets, k = 100")
def outer_few(bench: Bench) -> Measured:
    return Measured.of_p_values(_all_p_values(null_scores(bench, _outer, few=True, k=100)))


@row("relation_scores", "p_value", null="Gaussian W_O, relations with fewer than 10 targets, k = 100")
def gaussian_few(bench: Bench) -> Measured:
    return Measured.of_p_values(_all_p_values(null_scores(bench, gaussian_outputs, few=True, k=100)))


@row("relation_scores", "neighbour_p_value", null="W_O turned inside d_head, heads with a hit, few targets, k = 100")
def neighbours(bench: Bench) -> Measured:
    return Measured.of_p_values(null_scores(bench, inner_rotation, few=True, k=100).neighbour_p_value)


@row("relation_scores", "implements", null="W_O turned inside d_head, relations with fewer than 10 targets, k = 100")
def implements(bench: Bench) -> Measured:
    return _said(null_scores(bench, inner_rotation, few=True, k=100))


def _said(scores: RelationScores) -> Measured:
    n_said = sum(len(heads) for heads in scores.implements().values())
    n_asked = int((~scores.promote.isnan()).sum())
    return Measured.of_verdicts([True] * n_said + [False] * (n_asked - n_said))


MET = "context vectors, W_O turned inside d_head"


@row("relation_scores", "p_value", "q_value", "suppress_p_value", "suppress_q_value", null=MET)
def met_inner(bench: Bench) -> Measured:
    return Measured.of_p_values(_all_p_values(null_scores(bench, inner_rotation, preset="context")))


@row("relation_scores", "p_value", null=f"{MET}, relations with fewer than 10 targets, k = 100")
def met_inner_few(bench: Bench) -> Measured:
    return Measured.of_p_values(_all_p_values(null_scores(bench, inner_rotation, few=True, k=100, preset="context")))


@row("relation_scores", "neighbour_p_value", null=f"{MET}, heads with a hit, few targets, k = 100")
def met_neighbours(bench: Bench) -> Measured:
    scores = null_scores(bench, inner_rotation, few=True, k=100, preset="context")
    return Measured.of_p_values(scores.neighbour_p_value)


@row("relation_scores", "implements", null=f"{MET}, relations with fewer than 10 targets, k = 100")
def met_implements(bench: Bench) -> Measured:
    return _said(null_scores(bench, inner_rotation, few=True, k=100, preset="context"))


@row("relation_scores", "implements", null=MET)
def met_implements_all(bench: Bench) -> Measured:
    return _said(null_scores(bench, inner_rotation, preset="context"))


REAL = ("country_to_capital", "country_to_language", "element_to_symbol", "male_to_female", "city_to_country", "plural")


@row("relation_scores", "interval_low", "interval_high", null="clusters of pairs resampled, layer 23")
def intervals(bench: Bench) -> Measured:
    """The pairs are the population: clusters are drawn from it, and the interval must hold the score of all pairs."""
    weights = bench.weights
    relations = [relation for relation in load_relations(model=bench.model) if relation.name in REAL]
    scores = relation_scores(
        weights, relations, heads=[(23, head) for head in range(9)], ranks=True, preset="folded", progress=False
    )
    assert scores.promote_ranks is not None
    generator, covered = bench.generator(), []
    for number, relation in enumerate(relations):
        entry = encode(relation, weights.tokenizer, n_sources=weights.n_vocab, n_targets=weights.n_vocab)
        cluster = alike_pairs(weights, [entry]).cluster
        members = [(cluster == one).nonzero()[:, 0] for one in range(int(cluster.max()) + 1)]
        hit = scores.k[number] > scores.promote_ranks[number][:, 23].T
        hit = hit[(hit.double().mean(1) >= 0.1) & (hit.double().mean(1) < 1)]
        for _ in range(bench.count(300, 20)):
            drawn = generator.integers(0, len(members), len(members)).tolist()
            pairs = torch.cat([members[one] for one in drawn])
            label = torch.cat([torch.full_like(members[one], place) for place, one in enumerate(drawn)])
            low, high = clustered_interval(hit[:, pairs], label)
            truth = hit.float().mean(1)
            covered.append((low <= truth + 1e-6) & (high >= truth - 1e-6))
    return Measured.of_intervals(torch.cat(covered))
