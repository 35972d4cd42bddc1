"""Which heads implement a relation, from the weights alone (the MAPS method and a folded variant)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ...capture.weights import HeadWeights
from ...circuits.maps import CircuitMaps
from ...core.errors import RelationDataError, UsageError
from ...core.types import Circuit, HeadLike, Preset, check_choice, head_names
from ...data.relations import Encoded, MultiToken, Relation, RelationLike, encode, resolve
from ...scorers.relation import Pairs, score_layer
from ...scorers.statistics import q_values, wilson_interval
from ..heads import heads_by_layer
from ..sweep import LayerStep, ids_digest, sweep_layers
from .result import RelationScores


def relation_scores(
    model: Any,
    relations: RelationLike | Sequence[RelationLike],
    *,
    preset: Preset = "folded",
    k: int | None = None,
    circuit: Circuit = "ov",
    heads: HeadLike | Iterable[HeadLike] | None = None,
    multi_token: MultiToken = "skip",
    ranks: bool = False,
    data_dir: str | Path | None = None,
    run_dir: str | Path | None = None,
    executor: Any = None,
    progress: bool = True,
) -> RelationScores:
    """How accurately every head maps the sources of a relation to its targets, with nulls and intervals.

    Args:
        model: A TransformerBridge, a HookedTransformer, or HeadWeights.
        relations: One or several bundled names, files, or :class:`Relation` objects.
        preset: ``"folded"``: what the model computes for a token without context. ``"maps"``: the published recipe.
        k: Count targets among the k strongest; by default each relation's own k (larger for large vocabularies).
        circuit: ``"ov"``: what a head writes. ``"qk"``: whether a source, as query, attends to its target as key.
        heads: Only these heads; all by default.
        multi_token: ``"skip"`` leaves out targets of several tokens, ``"first"`` takes their first token.
        ranks: Also keep the exact rank of every pair (slower: nothing can be left early).
        data_dir: Folder of relations instead of the bundled one.
        run_dir: Keep finished layers in this folder; the same call goes on from there after it was killed.
        executor: Compute layers there: a ``concurrent.futures.Executor`` of any make (processes, Dask, MPI, Slurm).
        progress: Show a progress bar on a terminal.

    Example:
        >>> from tl_headmaps import load_default_model, relation_scores
        >>> heads = ["L23H4", "L23H5"]
        >>> scores = relation_scores(load_default_model(), "country_to_capital", heads=heads, progress=False)
        >>> [(str(head), round(score, 2)) for head, score in scores.top(2)]
        [('L23H4', 0.76), ('L23H5', 0.5)]
    """
    check_choice(circuit, Circuit, "circuit")
    check_choice(preset, Preset, "preset")
    check_choice(multi_token, MultiToken, "multi_token")
    # Everything a user can get wrong is found before the long work starts.
    listed = [relations] if isinstance(relations, str | Path | Relation) else list(relations)
    if not listed:
        raise UsageError("No relation was given. Name at least one, for example 'country_to_capital'.")
    resolved = [resolve(relation, data_dir) for relation in listed]
    require_distinct(resolved)
    weights = HeadWeights.of(model)
    by_layer = heads_by_layer(weights, heads)
    weights.require(preset, needs_mlp=any(by_layer[1:]) if weights.n_layers > 1 else False)
    n_targets = weights.W_U.shape[0] if circuit == "ov" else weights.n_vocab
    encoded = [
        encode(relation, weights.tokenizer, n_sources=weights.n_vocab, n_targets=n_targets, multi_token=multi_token)
        for relation in resolved
    ]
    chosen_k = [checked_k(entry, k, n_targets) for entry in encoded]
    ids, pairs = _joined(encoded, chosen_k)
    options = {"preset": preset, "k": k, "multi_token": multi_token, "heads": head_names(heads)}
    swept = sweep_layers(
        _ScoreLayers(weights, ids, pairs, by_layer, circuit, preset, ranks),
        [layer for layer, numbers in enumerate(by_layer) if numbers],
        kind=RelationScores.kind,
        provenance=weights.provenance(
            options=options, data={entry.relation.name: entry.relation.digest for entry in encoded}
        ),
        details={"circuit": circuit, "ranks": ranks, "token_ids": ids_digest(ids, pairs.rows, pairs.columns)},
        run_dir=run_dir,
        executor=executor,
        description=f"{len(encoded)} relations" if len(encoded) > 1 else encoded[0].relation.name,
        progress=progress,
    )
    tables = _Tables(len(encoded), weights.n_layers, weights.n_heads, len(pairs.rows) if ranks else 0)
    for layer, tensors in swept.layers.items():
        tables.put(layer, by_layer[layer], tensors)
    return tables.result(encoded, pairs, circuit=circuit, provenance=swept.provenance)


@dataclass(frozen=True)
class _ScoreLayers:
    """Scores of all relations for the chosen heads of a layer."""

    weights: HeadWeights
    ids: Int[Tensor, " source"]
    pairs: Pairs
    by_layer: list[list[int]]
    circuit: Circuit
    preset: Preset
    ranks: bool

    def prepare(self) -> LayerStep:
        circuits = CircuitMaps(self.weights, self.ids.to(self.weights.device), circuit=self.circuit, preset=self.preset)
        pairs = self.pairs.to(self.weights.device)

        def step(layer: int) -> dict[str, Tensor]:
            scored = score_layer(circuits.layer(layer, self.by_layer[layer]), pairs, exact_ranks=self.ranks)
            names = (*_SCORES, "ranks") if self.ranks else _SCORES
            return {
                f"{side}_{name}": getattr(values, name)
                for side, values in zip(_SIDES, scored, strict=True)
                for name in names
            }

        return step


_SIDES = ("promote", "suppress")
_SCORES = ("score", "null_mean", "p_value")


def require_distinct(relations: Sequence[Relation]) -> None:
    """Refuse two relations of one name."""
    names = [relation.name for relation in relations]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"The relation {repeated[0]!r} was given twice; give each relation its own name.")


def checked_k(entry: Encoded, k: int | None, n_targets: int) -> int:
    """The k of a relation, if it has a pair and a row has so many targets."""
    name = entry.relation.name
    if not entry.kept:
        source, target, reason = entry.dropped[0]
        raise RelationDataError(
            f"No pair of {name!r} can be scored: all {len(entry.dropped)} were left out (for example "
            f"{source!r}, {target!r}: {reason}). Use single-token words of this model, "
            "multi_token='first', or load_relations(model=model), which leaves such relations out."
        )
    chosen = entry.relation.default_k(n_targets) if k is None else k
    if not 1 <= chosen <= n_targets:
        raise UsageError(f"k={chosen} is impossible: it must be from 1 to {n_targets}, the size of the vocabulary.")
    return chosen


def _joined(encoded: list[Encoded], k: list[int]) -> tuple[Tensor, Pairs]:
    """Unique source ids, and all pairs with their rows among them."""
    sources = torch.tensor([i for entry in encoded for i in entry.source_ids], device="cpu")
    targets = torch.tensor([i for entry in encoded for i in entry.target_ids], device="cpu")
    number = torch.tensor([n for n, entry in enumerate(encoded) for _ in entry.source_ids], device="cpu")
    ids, rows = sources.unique(return_inverse=True)
    return ids, Pairs(rows, targets, number, torch.tensor(k, device="cpu"))


class _Tables:
    """Maps over relation, layer and head, filled layer by layer."""

    def __init__(self, n_relations: int, n_layers: int, n_heads: int, n_ranked_pairs: int) -> None:
        shape = (n_relations, n_layers, n_heads)
        self.maps = [{name: torch.full(shape, float("nan"), device="cpu") for name in _SCORES} for _ in _SIDES]
        self.ranks = [torch.full((n_ranked_pairs, n_layers, n_heads), -1, device="cpu") for _ in _SIDES]

    def put(self, layer: int, heads: list[int], tensors: Mapping[str, Tensor]) -> None:
        for side, maps, ranks in zip(_SIDES, self.maps, self.ranks, strict=True):
            for name, values in maps.items():
                values[:, layer, heads] = tensors[f"{side}_{name}"].cpu()
            if len(ranks):
                ranks[:, layer, heads] = tensors[f"{side}_ranks"].T.cpu()

    def result(self, encoded: list[Encoded], pairs: Pairs, **details: Any) -> RelationScores:
        promote, suppress = self.maps
        sizes = pairs.sizes.cpu()
        low, high = wilson_interval(promote["score"], sizes[:, None, None].double())
        split = [ranks.split(sizes.tolist()) if len(ranks) else None for ranks in self.ranks]
        return RelationScores(
            relations=tuple(entry.relation.name for entry in encoded),
            k=tuple(pairs.k.tolist()),
            n_pairs=tuple(len(entry.relation.pairs) for entry in encoded),
            n_kept=tuple(len(entry.kept) for entry in encoded),
            dropped=tuple(entry.dropped for entry in encoded),
            promote=promote["score"],
            suppress=suppress["score"],
            null_mean=promote["null_mean"],
            p_value=promote["p_value"],
            q_value=q_values(promote["p_value"]),
            interval_low=low,
            interval_high=high,
            suppress_null_mean=suppress["null_mean"],
            suppress_p_value=suppress["p_value"],
            suppress_q_value=q_values(suppress["p_value"]),
            promote_ranks=split[0],
            suppress_ranks=split[1],
            **details,
        )
