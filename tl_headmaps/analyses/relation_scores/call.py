"""Which heads implement a relation: the MAPS method, a folded variant, and one in context, with nulls."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...capture.running.behind import Source
from ...capture.running.context import ContextVectors
from ...capture.weights import HeadWeights
from ...circuits.maps import CircuitMaps, ContextSources
from ...circuits.ov import stream_map, written_maps
from ...core.ambient import steady
from ...core.errors import RelationDataError, UsageError
from ...core.types import Circuit, HeadLike, LayerLike, Model, Preset, by_layer, check_choice
from ...data.relations import Encoded, MultiToken, RelationLike, encode, load_relations, resolve_relations
from ...scorers.relation import EXACT_BELOW, Alike, Pairs, score_layer, shares
from ...scorers.statistics import q_values
from ..head_trust import HeadTrust, shares_of
from ..sweep import LayerStep, ids_digest, sweep_layers
from .likeness import alike_pairs
from .result import RelationScores

_PROMPT_LEAST = 0.05
"""Scores from which on it is looked up how far the prompts agree: of most heads there is nothing to agree on."""


@steady
def relation_scores(
    model: Model | HeadWeights,
    relations: RelationLike | Sequence[RelationLike] | None = None,
    *,
    preset: Preset | None = None,
    k: int | None = None,
    circuit: Circuit = "ov",
    heads: HeadLike | Iterable[HeadLike] | None = None,
    layers: LayerLike | Iterable[LayerLike] | None = None,
    multi_token: MultiToken = "skip",
    prompts: str | Sequence[str] | None = None,
    vectors: ContextVectors | str | Path | None = None,
    prepend_bos: bool | None = None,
    ranks: bool = False,
    trust: HeadTrust | str | Path | None = None,
    data_dir: str | Path | None = None,
    run_dir: str | Path | None = None,
    executor: Any = None,
    progress: bool = True,
) -> RelationScores:
    """How accurately every head maps the sources of a relation to its targets, with nulls and intervals.

    Args:
        model: A TransformerBridge, a HookedTransformer, or HeadWeights.
        relations: One or several bundled names, files, or :class:`Relation` objects; by default all bundled ones that
            the model's tokenizer can write.
        preset: ``"context"``: what each layer reads at the token behind neutral prompts. ``"folded"``:
            what the model computes for the token alone. ``"maps"``: the published recipe. By default ``"context"``
            for OV maps of a model that can run, ``"folded"`` for QK maps and for weights alone.
        k: Count targets among the k strongest; by default each relation's own k (larger for large vocabularies).
        circuit: ``"ov"``: what a head writes. ``"qk"``: whether a source, as query, attends to its target as key.
        heads: Only these heads (``"L12"``: all of layer 12); all by default.
        layers: Only heads of these layers.
        multi_token: ``"skip"`` leaves out targets of several tokens, ``"first"`` takes their first token.
        prompts: With ``"context"``: prefixes the sources are put behind; by default eight neutral ones.
        vectors: With ``"context"``: :class:`ContextVectors` made before (or their folder), for weights that cannot run.
        prepend_bos: With ``"context"``: begin each prefix with BOS; by default as the model does.
        ranks: Also keep the exact rank of every pair (slower, because no row can be left early).
        trust: What :func:`head_trust` gave for this model (or its file): its token shares are shown beside the scores.
        data_dir: Folder of relations to use instead of the bundled one.
        run_dir: Save finished layers in this folder, so that an interrupted run resumes.
        executor: Where to compute layers: any ``concurrent.futures.Executor`` (processes, Dask, MPI, Slurm).
        progress: Show a progress bar on a terminal.

    Example:
        >>> from tl_headmaps import load_default_model, relation_scores
        >>> heads = ["L23H4", "L23H5"]
        >>> scores = relation_scores(load_default_model(), "country_to_capital", heads=heads, progress=False)
        >>> [(str(head), round(score, 2)) for head, score in scores.top(2)]
        [('L23H4', 0.74), ('L23H5', 0.38)]
    """
    check_choice(circuit, Circuit, "circuit")
    check_choice(multi_token, MultiToken, "multi_token")
    # Everything a user can get wrong is found before the long work starts.
    resolved = [] if relations is None else resolve_relations(relations, data_dir)
    weights = HeadWeights.of(model)
    if relations is None:
        resolved = load_relations(model=weights, data_dir=data_dir)
    preset = weights.preset(preset, circuit, in_context=prompts is not None or vectors is not None)
    chosen_heads = weights.chosen_heads(heads, layers)
    chosen = by_layer(chosen_heads)
    weights.require(preset, needs_mlp=max(chosen) > 0)
    token_share = None if trust is None else shares_of(trust, weights, preset)
    n_targets = weights.W_U.shape[0] if circuit == "ov" else weights.n_vocab
    encoded = [
        encode(
            relation,
            weights.tokenizer,
            n_sources=weights.n_vocab,
            n_targets=n_targets,
            multi_token=multi_token,
            multi_token_sources=preset == "context",
        )
        for relation in resolved
    ]
    chosen_k = [checked_k(entry, k, n_targets) for entry in encoded]
    asked = _Asked.of(encoded, chosen_k, alike_pairs(weights, encoded))
    context = ContextSources.of(
        weights,
        asked.sources,
        circuit,
        preset,
        prompts=prompts,
        vectors=vectors,
        prepend_bos=prepend_bos,
        layers=list(chosen),
        progress=progress,
    )
    options: dict[str, Any] = {"preset": preset, "k": k, "multi_token": multi_token}
    options["heads"] = None if heads is None and layers is None else sorted(map(str, chosen_heads))
    data = {entry.relation.name: entry.relation.digest for entry in encoded}
    if context is not None:
        options, data = options | context.options, data | context.data
    swept = sweep_layers(
        _ScoreLayers(weights, asked, chosen, circuit, preset, context, ranks),
        list(chosen),
        kind=RelationScores.kind,
        provenance=weights.provenance(options=options, data=data),
        details={"circuit": circuit, "ranks": ranks, "token_ids": asked.digest},
        run_dir=run_dir,
        executor=executor,
        description=f"scores of {f'{len(encoded)} relations' if len(encoded) > 1 else encoded[0].relation.name}",
        progress=progress,
    )
    tables = _Tables(asked, weights.n_layers, weights.n_heads, context is not None, ranks)
    for layer, tensors in swept.layers.items():
        tables.put(layer, chosen[layer], tensors)
    return tables.result(encoded, circuit=circuit, provenance=swept.provenance, token_share=token_share)


@dataclass(frozen=True)
class _Asked:
    """The pairs of all relations with their different sources.

    Attributes:
        sources: Token ids of each source; those of several tokens come last.
        pairs: Pairs of sources of one token.
        alike: Which of these belong together.
        multi_token: Pairs of sources of several tokens, read at their last; None if there are none.
    """

    sources: tuple[Source, ...]
    pairs: Pairs
    alike: Alike
    multi_token: Pairs | None

    @classmethod
    def of(cls, encoded: list[Encoded], k: list[int], alike: Alike) -> "_Asked":
        single: list[list[tuple[Source, int]]] = [
            [((i,), t) for i, t in zip(entry.source_ids, entry.target_ids, strict=True)] for entry in encoded
        ]
        multi_token = [list(entry.multi_token_sources) for entry in encoded]
        sources = sorted({source for part in (*single, *multi_token) for source, _ in part}, key=lambda s: (len(s), s))
        row_of = {source: row for row, source in enumerate(sources)}

        def pairs(parts: list[list[tuple[Source, int]]]) -> Pairs:
            rows = [row_of[source] for part in parts for source, _ in part]
            columns = [target for part in parts for _, target in part]
            relation = [number for number, part in enumerate(parts) for _ in part]
            return Pairs(*(torch.tensor(v, dtype=torch.int64, device="cpu") for v in (rows, columns, relation, k)))

        return cls(tuple(sources), pairs(single), alike, pairs(multi_token) if any(multi_token) else None)

    def counts(self, groups: Tensor) -> tuple[int, ...]:
        """How many groups the pairs of each relation are in."""
        return tuple(int(part.max()) + 1 for part in groups.split(self.pairs.sizes.tolist()))

    @property
    def digest(self) -> str:
        """Digest of all token ids."""
        lengths, tokens = (
            [len(source) for source in self.sources],
            [token for source in self.sources for token in source],
        )
        parts = [torch.tensor(lengths, device="cpu"), self.pairs.rows, self.pairs.columns]
        parts.append(torch.tensor(tokens, device="cpu"))
        if self.multi_token is not None:
            parts += [self.multi_token.rows, self.multi_token.columns]
        return ids_digest(*parts)


@dataclass(frozen=True)
class _ScoreLayers:
    """Scores of all relations for the chosen heads of a layer."""

    weights: HeadWeights
    asked: _Asked
    heads: dict[int, list[int]]
    circuit: Circuit
    preset: Preset
    context: ContextSources | None
    ranks: bool

    def prepare(self) -> LayerStep:
        device = self.weights.device
        ids = None if self.context is not None else torch.tensor([s[0] for s in self.asked.sources], device=device)
        circuits = CircuitMaps(self.weights, ids, circuit=self.circuit, preset=self.preset, context=self.context)
        pairs = self.asked.pairs.to(device)

        def step(layer: int) -> dict[str, Tensor]:
            maps = circuits.layer(layer, self.heads[layer])
            scored = score_layer(maps, pairs, self.asked.alike, exact_ranks=self.ranks)
            names = (*_SCORES, "ranks") if self.ranks else _SCORES
            tensors = {
                f"{side}_{name}": getattr(values, name)
                for side, values in zip(_SIDES, scored, strict=True)
                for name in names
            }
            if self.context is None:
                return tensors
            if self.asked.multi_token is not None:
                tensors["multi_token"] = shares(maps, self.asked.multi_token.to(device))
            if self.circuit == "ov":
                tensors["stream"] = shares(stream_map(self.weights, layer, circuits.row_vectors(layer)), pairs)[:, 0]
                tensors["prompt_low"], tensors["prompt_high"] = self._by_prompt(layer, pairs, tensors["promote_score"])
            return tensors

        return step

    def _by_prompt(self, layer: int, pairs: Pairs, score: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest score behind one prompt alone; NaN where the averaged vectors score next to nothing."""
        assert self.context is not None
        low, high = torch.full_like(score, torch.nan), torch.full_like(score, torch.nan)
        asked = score >= _PROMPT_LEAST
        numbers, places = asked.any(1).nonzero()[:, 0].tolist(), asked.any(0).nonzero()[:, 0].tolist()
        if not places or self.context.rows.n_prompts < 2:
            return low, high
        pairs = pairs.of_relations(numbers)
        heads = [self.heads[layer][place] for place in places]
        weights, values = self.weights.layer(layer), self.context.rows.values(layer).to(self.weights.device)
        group = tuple(self.weights.group_of(head, layer) for head in heads)
        n_prompts, _, n_rows, _ = values.shape
        # The prompts' rows below each other, so that one scan of the vocabulary serves them all.
        left = weights.mixed(values.transpose(0, 1).flatten(1, 2))
        with torch.no_grad():
            maps = written_maps(self.weights, weights, left, group, heads, "context")
            # Only what is asked of each head: most heads know few of the relations that some head knows.
            needed = asked[numbers][:, places].T[:, pairs.relation.cpu()].repeat(1, n_prompts).to(self.weights.device)
            alone = shares(maps, pairs.repeated(n_prompts, n_rows), active=needed).view(n_prompts, len(pairs.k), -1)
        for ends, extreme in ((low, alone.amin(0)), (high, alone.amax(0))):
            ends[numbers] = ends[numbers].index_copy(1, torch.tensor(places), extreme)
            ends[~asked] = torch.nan
        return low, high


_SIDES = ("promote", "suppress")
_SCORES = ("score", "interval_low", "interval_high", "null_mean", "p_value", "neighbour", "neighbour_p_value")


def checked_k(entry: Encoded, k: int | None, n_targets: int) -> int:
    """The k of a relation; raises if no pair can be scored, or if there are fewer targets than that."""
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


def _test(n_units: int, n_pairs: int) -> str:
    """How the p-values of a relation come about."""
    what = "pairs" if n_units == n_pairs else "clusters"
    return f"all orders of {what}" if n_units < EXACT_BELOW else f"shuffled {what}"


class _Tables:
    """Maps over relation, layer and head, filled layer by layer."""

    def __init__(self, asked: _Asked, n_layers: int, n_heads: int, context: bool, ranks: bool) -> None:
        self.asked, self.context = asked, context
        n_relations, n_ranked = len(asked.pairs.k), len(asked.pairs.rows) if ranks else 0
        shape = (n_relations, n_layers, n_heads)
        self.maps = [{name: torch.full(shape, float("nan"), device="cpu") for name in _SCORES} for _ in _SIDES]
        self.ranks = [torch.full((n_ranked, n_layers, n_heads), -1, device="cpu") for _ in _SIDES]
        extra = ("multi_token", "prompt_low", "prompt_high")
        self.extra = {name: torch.full(shape, float("nan"), device="cpu") for name in extra}
        self.stream = torch.full(shape[:2], float("nan"), device="cpu")

    def put(self, layer: int, heads: list[int], tensors: Mapping[str, Tensor]) -> None:
        for side, maps, ranks in zip(_SIDES, self.maps, self.ranks, strict=True):
            for name, values in maps.items():
                values[:, layer, heads] = tensors[f"{side}_{name}"].cpu()
            if len(ranks):
                ranks[:, layer, heads] = tensors[f"{side}_ranks"].T.cpu()
        for name, values in self.extra.items():
            if name in tensors:
                values[:, layer, heads] = tensors[name].cpu()
        if "stream" in tensors:
            self.stream[:, layer] = tensors["stream"].cpu()

    def result(self, encoded: list[Encoded], **details: Any) -> RelationScores:
        promote, suppress = self.maps
        sizes = self.asked.pairs.sizes.cpu()
        n_units = self.asked.counts(self.asked.alike.unit)
        split = [ranks.split(sizes.tolist()) if len(ranks) else None for ranks in self.ranks]
        return RelationScores(
            relations=tuple(entry.relation.name for entry in encoded),
            k=tuple(self.asked.pairs.k.tolist()),
            n_pairs=tuple(len(entry.relation.pairs) for entry in encoded),
            n_kept=tuple(len(entry.kept) for entry in encoded),
            dropped=tuple(entry.dropped for entry in encoded),
            promote=promote["score"],
            suppress=suppress["score"],
            null_mean=promote["null_mean"],
            p_value=promote["p_value"],
            q_value=q_values(promote["p_value"]),
            interval_low=promote["interval_low"],
            interval_high=promote["interval_high"],
            suppress_null_mean=suppress["null_mean"],
            suppress_p_value=suppress["p_value"],
            suppress_q_value=q_values(suppress["p_value"]),
            neighbour=promote["neighbour"],
            neighbour_p_value=promote["neighbour_p_value"],
            test=tuple(_test(n, len(entry.kept)) for n, entry in zip(n_units, encoded, strict=True)),
            n_units=n_units,
            n_clusters=self.asked.counts(self.asked.alike.cluster),
            promote_ranks=split[0],
            suppress_ranks=split[1],
            **details,
            **(self._context_fields(promote["score"], sizes) if self.context else {}),
        )

    def _context_fields(self, promote: Tensor, sizes: Tensor) -> dict[str, Any]:
        multi_token = self.asked.multi_token
        n_multi_token = torch.zeros_like(sizes) if multi_token is None else multi_token.sizes
        both = (
            promote * sizes[:, None, None] + self.extra["multi_token"].nan_to_num() * n_multi_token[:, None, None]
        ) / (sizes + n_multi_token)[:, None, None]
        return {
            "stream": self.stream,
            "prompt_low": self.extra["prompt_low"],
            "prompt_high": self.extra["prompt_high"],
            "n_multi_token": tuple(n_multi_token.tolist()),
            "multi_token": self.extra["multi_token"],
            "together": both,
        }
