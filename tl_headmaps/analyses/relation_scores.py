"""Which heads implement a relation, from the weights alone: the MAPS method and a folded variant, with nulls."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..capture.running.met import MetVectors, Source
from ..capture.weights import HeadWeights
from ..circuits.maps import CircuitMaps, MetSources
from ..circuits.ov import stream_map, written_maps
from ..core.errors import RelationDataError, UsageError
from ..core.provenance import Provenance
from ..core.sweep import Step, digest_of_ids, sweep
from ..core.types import Circuit, HeadIndex, HeadLike, Preset, by_layer, check_choice, head_list, head_names
from ..data.relations import Encoded, MultiToken, RelationLike, encode, resolve_relations
from ..renderers import heat
from ..renderers.figure import Figure
from ..renderers.grids import MapLayer
from ..renderers.text import table_text
from ..results import Result, cells, largest_heads
from ..scorers.relation import Pairs, score_layer, shares
from ..scorers.statistics import q_values, wilson_interval

ScoreDirection: TypeAlias = Literal["promote", "suppress"]

IMPLEMENTS_SCORE = 0.15
IMPLEMENTS_Q = 0.05
_MAPS = (
    "promote",
    "suppress",
    "null_mean",
    "p_value",
    "q_value",
    "interval_low",
    "interval_high",
    "suppress_null_mean",
    "suppress_p_value",
    "suppress_q_value",
)
"""Fields with one value per relation, layer and head."""

_MET_MAPS = ("prompt_low", "prompt_high", "several", "together")
"""The same, of met vectors alone."""

_PROMPT_LEAST = 0.05
"""Scores from which on it is looked up how far the prompts agree: of most heads there is nothing to agree on."""


@dataclass(frozen=True, eq=False, repr=False)
class RelationScores(Result):
    """Scores of relations (first axis) by layer and head; cells that were not asked for are NaN.

    Attributes:
        relations: Names of the relations.
        circuit: ``"ov"`` (what heads write) or ``"qk"`` (where they look).
        k: Top-k of each relation.
        n_pairs: Pairs given.
        n_kept: Pairs whose words are single tokens, the ones scored.
        dropped: (source, target, reason) of the others, by relation.
        promote: Share of pairs whose target is among the k strongest tokens the head writes.
        suppress: Share of pairs whose target is among the k it suppresses most.
        null_mean: Mean promotion score with targets shuffled among the relation's sources.
        p_value: Probability that shuffled targets score as well.
        q_value: The same after Benjamini-Hochberg over all heads and relations of this result.
        interval_low, interval_high: 95% Wilson interval of ``promote``.
        suppress_null_mean, suppress_p_value, suppress_q_value: The same for ``suppress``.
        promote_ranks, suppress_ranks: Exact rank of every kept pair's target, by relation, if asked for.
        stream: With ``preset="met"``: the promotion score of the stream itself before each layer (logit lens). A head
            whose score is not above it passes on what is known already.
        prompt_low, prompt_high: With ``"met"``: the smallest and largest promotion score behind one prompt alone, for
            heads that score 0.05 or more; NaN with a single prompt, where agreement cannot be judged.
        n_several, several: With ``"met"``: pairs whose source has several tokens, and their promotion scores.
        together: Promotion scores over pairs with sources of one and of several tokens.

    Example:
        >>> from tl_headmaps import load_default_model, relation_scores
        >>> scores = relation_scores(load_default_model(), "country_to_capital", heads="L23H4", progress=False)
        >>> scores.implements()
        {'country_to_capital': [HeadIndex(layer=23, head=4)]}
        >>> round(float(scores.interval_low[0, 23, 4]), 2), round(float(scores.null_mean[0, 23, 4]), 2)
        (0.61, 0.02)
        >>> scores.n_kept, scores.n_pairs  # pairs of single tokens, of all
        ((42,), (106,))
    """

    kind: ClassVar[str] = "relation_scores"
    methods: ClassVar[tuple[str, ...]] = (
        "elhelo2024maps",
        "elhage2021framework",
        "benjamini1995controlling",
        "wilson1927probable",
    )
    json_axes: ClassVar[Mapping[str, str | None]] = {"relation": "relations", "layer": None, "head": None}
    nullable: ClassVar[tuple[str, ...]] = (*_MAPS, *_MET_MAPS, "stream")
    relations: tuple[str, ...]
    circuit: Circuit
    k: tuple[int, ...]
    n_pairs: tuple[int, ...]
    n_kept: tuple[int, ...]
    dropped: tuple[tuple[tuple[str, str, str], ...], ...]
    promote: Float[Tensor, "relation layer head"]
    suppress: Float[Tensor, "relation layer head"]
    null_mean: Float[Tensor, "relation layer head"]
    p_value: Float[Tensor, "relation layer head"]
    q_value: Float[Tensor, "relation layer head"]
    interval_low: Float[Tensor, "relation layer head"]
    interval_high: Float[Tensor, "relation layer head"]
    suppress_null_mean: Float[Tensor, "relation layer head"]
    suppress_p_value: Float[Tensor, "relation layer head"]
    suppress_q_value: Float[Tensor, "relation layer head"]
    provenance: Provenance
    promote_ranks: tuple[Int[Tensor, "_ layer head"], ...] | None = None
    suppress_ranks: tuple[Int[Tensor, "_ layer head"], ...] | None = None
    stream: Float[Tensor, "relation layer"] | None = None
    prompt_low: Float[Tensor, "relation layer head"] | None = None
    prompt_high: Float[Tensor, "relation layer head"] | None = None
    n_several: tuple[int, ...] | None = None
    several: Float[Tensor, "relation layer head"] | None = None
    together: Float[Tensor, "relation layer head"] | None = None

    @property
    def values(self) -> Float[Tensor, "relation layer head"]:
        """The promotion scores."""
        return self.promote

    def index_of(self, relation: str | None) -> int:
        """Position of a relation on the first axis; None means the only one."""
        if relation is None:
            if len(self.relations) > 1:
                raise UsageError(
                    f"This result holds {len(self.relations)} relations; name one of {', '.join(self.relations)}."
                )
            return 0
        if relation not in self.relations:
            raise UsageError(f"This result has no relation {relation!r}; it has {', '.join(self.relations)}.")
        return self.relations.index(relation)

    def top(
        self, n: int = 5, relation: str | None = None, direction: ScoreDirection = "promote"
    ) -> list[tuple[HeadIndex, float]]:
        """The ``n`` heads that score highest on a relation (ties: lower layer, then lower head)."""
        return largest_heads(getattr(self, direction)[self.index_of(relation)], n)

    def implements(self, score: float = IMPLEMENTS_SCORE, q: float = IMPLEMENTS_Q) -> dict[str, list[HeadIndex]]:
        """Heads that implement each relation, best first: a score of at least 0.15 that beats its null (q < 0.05).

        With ``preset="met"`` the score must also be above that of the stream itself.
        """
        implementing = (self.promote >= score) & (self.q_value < q)
        if self.stream is not None:
            # With QK there is no stream to compare with.
            implementing &= self.stream.isnan()[:, :, None] | (self.promote > self.stream[:, :, None])
        heads_of = {}
        for number, name in enumerate(self.relations):
            heads = [HeadIndex(layer, head) for layer, head in implementing[number].nonzero().tolist()]
            heads_of[name] = sorted(heads, key=lambda head: (-self.promote[number, head.layer, head.head], head))
        return heads_of

    def select(
        self, relations: str | Sequence[str] | None = None, heads: HeadLike | Iterable[HeadLike] | None = None
    ) -> "RelationScores":
        """The same result for some relations, or with all other heads left out (NaN)."""
        names = (relations,) if isinstance(relations, str) else tuple(relations or self.relations)
        numbers = [self.index_of(name) for name in names]
        changes: dict[str, Any] = {
            name: tuple(getattr(self, name)[i] for i in numbers)
            for name in ("relations", "k", "n_pairs", "n_kept", "dropped")
        }
        for name in ("promote_ranks", "suppress_ranks"):
            ranks = getattr(self, name)
            changes[name] = None if ranks is None else tuple(ranks[i] for i in numbers)
        if self.stream is not None and self.n_several is not None:
            changes |= {"stream": self.stream[numbers], "n_several": tuple(self.n_several[i] for i in numbers)}
        maps = {name: getattr(self, name)[numbers].clone() for name in (*_MAPS, *self._met_maps)}
        if heads is not None:
            n_layers, n_heads = self.promote.shape[1:]
            left_out = torch.ones(n_layers, n_heads, dtype=torch.bool)
            for head in head_list(heads):
                index = HeadIndex.of(head).check(n_layers, n_heads)
                left_out[index.layer, index.head] = False
            for values in maps.values():
                values[:, left_out] = float("nan")
        return replace(self, **changes, **maps)

    @property
    def _met_maps(self) -> tuple[str, ...]:
        return tuple(name for name in _MET_MAPS if getattr(self, name) is not None)

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per relation and head."""
        for at, labels in cells(self.axes, self.promote):
            record = labels | {"k": self.k[at[0]], "n_kept": self.n_kept[at[0]]}
            record |= {name: float(getattr(self, name)[at]) for name in (*_MAPS, *self._met_maps)}
            yield record if self.stream is None else record | {"stream": float(self.stream[at[:2]])}

    def figure(self, *, side_by_side: bool = False) -> Figure:
        """A head map of each relation's scores, promotion and suppression, with null, interval and q-value.

        Args:
            side_by_side: Show the promotion maps of all relations side by side instead of one map at a time.
        """
        layers = [layer for number in range(len(self.relations)) for layer in self._map_layers(number)]
        title = f"{self.circuit.upper()} relation scores, preset {self.provenance.options.get('preset', '')}"
        unit, k = "share of pairs", ", ".join(map(str, sorted(set(self.k))))
        note = (
            f"Share of pairs whose target is among the k = {k} strongest tokens. "
            f"A head implements a relation at a score of {IMPLEMENTS_SCORE} or more with q < {IMPLEMENTS_Q}."
        )
        if side_by_side:
            promoting = [layer for layer in layers if layer.group == "promotes"]
            return heat.panels(promoting, title=title, unit=unit, signed=False, note=note)
        return heat.head_map(
            layers, title=title, unit=unit, signed=False, switches=("relation", "direction"), note=note
        )

    def _map_layers(self, number: int) -> tuple[MapLayer, MapLayer]:
        """One relation's promotion and suppression as layers of a head map."""
        name = self.relations[number]
        promotes = MapLayer(
            name,
            self.promote[number],
            group="promotes",
            null=self.null_mean[number],
            interval=(self.interval_low[number], self.interval_high[number]),
            details={"q": self.q_value[number]},
        )
        suppresses = MapLayer(
            name,
            self.suppress[number],
            group="suppresses",
            null=self.suppress_null_mean[number],
            details={"q": self.suppress_q_value[number]},
        )
        return promotes, suppresses

    def __str__(self) -> str:
        """The best heads of each relation with their nulls; a star marks heads that implement it."""
        implementing = self.implements()
        rows = [row for name in self.relations for row in self._text_rows(name, implementing[name])]
        titles = ["relation", "pairs", "k", "head", "score", "95%", "null", "q", "suppress"]
        columns = [(title, "left" if title in ("relation", "head") else "right") for title in titles]
        title = f"{self.circuit.upper()} relation scores, preset {self.provenance.options['preset']}"
        note = (
            "score: share of pairs whose target is among the k strongest tokens; null: the same with shuffled "
            "targets;\nq: false discovery rate over all heads and relations; * implements the relation "
            "(score >= 0.15 and q < 0.05)"
        )
        return f"{title}\n\n{table_text(columns, rows)}\n\n{note}"

    def _text_rows(self, name: str, implementing: list[HeadIndex]) -> list[list[Any]]:
        number = self.index_of(name)
        relation = [name, f"{self.n_kept[number]}/{self.n_pairs[number]}", self.k[number]]
        best = [entry for entry in self.top(3, name) if entry[1] > 0]
        if not best:
            return [[*relation, "none ", "0.00", *[""] * 4]]
        rows = []
        for place, (head, score) in enumerate(best):
            at = (number, head.layer, head.head)
            rows.append(
                [
                    *(relation if place == 0 else ["", "", ""]),
                    f"{head}{'*' if head in implementing else ' '}",
                    f"{score:.2f}",
                    f"{self.interval_low[at]:.2f}-{self.interval_high[at]:.2f}",
                    f"{self.null_mean[at]:.2f}",
                    f"{self.q_value[at]:.1g}" if self.q_value[at] > 1e-9 else "<1e-9",
                    f"{self.suppress[at]:.2f}",
                ]
            )
        return rows


def relation_scores(
    model: Any,
    relations: RelationLike | Sequence[RelationLike],
    *,
    preset: Preset = "folded",
    k: int | None = None,
    circuit: Circuit = "ov",
    heads: HeadLike | Iterable[HeadLike] | None = None,
    multi_token: MultiToken = "skip",
    prompts: str | Sequence[str] | None = None,
    vectors: MetVectors | str | Path | None = None,
    prepend_bos: bool | None = None,
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
        preset: ``"met"``: what each layer reads when the model meets the token behind neutral prompts. ``"folded"``:
            what the model computes for a token without context. ``"maps"``: the published recipe.
        k: Count targets among the k strongest; by default each relation's own k (larger for large vocabularies).
        circuit: ``"ov"``: what a head writes. ``"qk"``: whether a source, as query, attends to its target as key.
        heads: Only these heads; all by default.
        multi_token: ``"skip"`` leaves out targets of several tokens, ``"first"`` takes their first token.
        prompts: With ``"met"``: prefixes the sources are put behind; by default eight neutral ones.
        vectors: With ``"met"``: vectors made before (:class:`MetVectors` or their folder), for weights that cannot run.
        prepend_bos: With ``"met"``: begin each prefix with BOS; by default as the model does.
        ranks: Also keep the exact rank of every pair (slower, because no row can be left early).
        data_dir: Folder of relations to use instead of the bundled one.
        run_dir: Save finished layers in this folder, so that an interrupted run resumes.
        executor: Where to compute layers: any ``concurrent.futures.Executor`` (processes, Dask, MPI, Slurm).
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
    resolved = resolve_relations(relations, data_dir)
    weights = HeadWeights.of(model)
    named = None if heads is None else head_list(heads)
    chosen = by_layer(weights.chosen_heads(named))
    weights.require(preset, needs_mlp=max(chosen) > 0)
    n_targets = weights.W_U.shape[0] if circuit == "ov" else weights.n_vocab
    encoded = [
        encode(
            relation,
            weights.tokenizer,
            n_sources=weights.n_vocab,
            n_targets=n_targets,
            multi_token=multi_token,
            several=preset == "met",
        )
        for relation in resolved
    ]
    chosen_k = [checked_k(entry, k, n_targets) for entry in encoded]
    asked = _Asked.of(encoded, chosen_k)
    met = MetSources.of(
        weights,
        asked.sources,
        circuit,
        preset,
        prompts=prompts,
        vectors=vectors,
        prepend_bos=prepend_bos,
        progress=progress,
    )
    options: dict[str, Any] = {"preset": preset, "k": k, "multi_token": multi_token, "heads": head_names(named)}
    data = {entry.relation.name: entry.relation.digest for entry in encoded}
    if met is not None:
        options, data = options | met.options, data | met.data
    swept = sweep(
        _ScoreLayers(weights, asked, chosen, circuit, preset, met, ranks),
        list(chosen),
        kind=RelationScores.kind,
        provenance=weights.provenance(options=options, data=data),
        details={"circuit": circuit, "ranks": ranks, "token_ids": asked.digest},
        run_dir=run_dir,
        executor=executor,
        description=f"{len(encoded)} relations" if len(encoded) > 1 else encoded[0].relation.name,
        progress=progress,
    )
    tables = _Tables(asked, weights.n_layers, weights.n_heads, met is not None, ranks)
    for layer, tensors in swept.layers.items():
        tables.put(layer, chosen[layer], tensors)
    return tables.result(encoded, circuit=circuit, provenance=swept.provenance)


@dataclass(frozen=True)
class _Asked:
    """The pairs of all relations with their different sources.

    Attributes:
        sources: Token ids of each source; those of several tokens come last.
        pairs: Pairs of sources of one token.
        several: Pairs of sources of several tokens, read at their last; None if there are none.
    """

    sources: tuple[Source, ...]
    pairs: Pairs
    several: Pairs | None

    @classmethod
    def of(cls, encoded: list[Encoded], k: list[int]) -> "_Asked":
        single: list[list[tuple[Source, int]]] = [
            [((i,), t) for i, t in zip(entry.source_ids, entry.target_ids, strict=True)] for entry in encoded
        ]
        several = [list(entry.several) for entry in encoded]
        sources = sorted({source for part in (*single, *several) for source, _ in part}, key=lambda s: (len(s), s))
        row_of = {source: row for row, source in enumerate(sources)}

        def pairs(parts: list[list[tuple[Source, int]]]) -> Pairs:
            rows = [row_of[source] for part in parts for source, _ in part]
            columns = [target for part in parts for _, target in part]
            relation = [number for number, part in enumerate(parts) for _ in part]
            return Pairs(*(torch.tensor(v, dtype=torch.int64, device="cpu") for v in (rows, columns, relation, k)))

        return cls(tuple(sources), pairs(single), pairs(several) if any(several) else None)

    @property
    def digest(self) -> str:
        """Digest of all token ids."""
        parts = [torch.tensor([len(source) for source in self.sources]), self.pairs.rows, self.pairs.columns]
        parts.append(torch.tensor([token for source in self.sources for token in source]))
        if self.several is not None:
            parts += [self.several.rows, self.several.columns]
        return digest_of_ids(*parts)


@dataclass(frozen=True)
class _ScoreLayers:
    """Scores of all relations for the chosen heads of a layer."""

    weights: HeadWeights
    asked: _Asked
    heads: dict[int, list[int]]
    circuit: Circuit
    preset: Preset
    met: MetSources | None
    ranks: bool

    def prepare(self) -> Step:
        device = self.weights.device
        ids = None if self.met is not None else torch.tensor([s[0] for s in self.asked.sources], device=device)
        circuits = CircuitMaps(self.weights, ids, circuit=self.circuit, preset=self.preset, met=self.met)
        pairs = self.asked.pairs.to(device)

        def step(layer: int) -> dict[str, Tensor]:
            maps = circuits.layer(layer, self.heads[layer])
            scored = score_layer(maps, pairs, exact_ranks=self.ranks)
            names = (*_SCORES, "ranks") if self.ranks else _SCORES
            tensors = {
                f"{side}_{name}": getattr(values, name)
                for side, values in zip(_SIDES, scored, strict=True)
                for name in names
            }
            if self.met is None:
                return tensors
            if self.asked.several is not None:
                tensors["several"] = shares(maps, self.asked.several.to(device))
            if self.circuit == "ov":
                tensors["stream"] = shares(stream_map(self.weights, layer, circuits.row_vectors(layer)), pairs)[:, 0]
                tensors["prompt_low"], tensors["prompt_high"] = self._by_prompt(layer, pairs, tensors["promote_score"])
            return tensors

        return step

    def _by_prompt(self, layer: int, pairs: Pairs, score: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest score behind one prompt alone; NaN where the averaged vectors score next to nothing."""
        assert self.met is not None
        low, high = torch.full_like(score, torch.nan), torch.full_like(score, torch.nan)
        places = [place for place in range(score.shape[1]) if bool((score[:, place] >= _PROMPT_LEAST).any())]
        if not places or self.met.rows.n_prompts < 2:
            return low, high
        heads = [self.heads[layer][place] for place in places]
        weights, values = self.weights.layer(layer), self.met.rows.values(layer).to(self.weights.device)
        group = tuple(self.weights.group_of(head) for head in heads)
        n_prompts, _, n_rows, _ = values.shape
        # The prompts' rows below each other, so that one scan of the vocabulary serves them all.
        left = values.transpose(0, 1).flatten(1, 2)
        with torch.no_grad():
            maps = written_maps(self.weights, weights, left, group, heads, "met")
            alone = shares(maps, pairs.repeated(n_prompts, n_rows)).view(n_prompts, len(pairs.k), -1)
        asked = score[:, places] >= _PROMPT_LEAST
        low[:, places] = torch.where(asked, alone.amin(0), torch.nan)
        high[:, places] = torch.where(asked, alone.amax(0), torch.nan)
        return low, high


_SIDES = ("promote", "suppress")
_SCORES = ("score", "null_mean", "p_value")


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


class _Tables:
    """Maps over relation, layer and head, filled layer by layer."""

    def __init__(self, asked: _Asked, n_layers: int, n_heads: int, met: bool, ranks: bool) -> None:
        self.asked, self.met = asked, met
        n_relations, n_ranked = len(asked.pairs.k), len(asked.pairs.rows) if ranks else 0
        shape = (n_relations, n_layers, n_heads)
        self.maps = [{name: torch.full(shape, float("nan"), device="cpu") for name in _SCORES} for _ in _SIDES]
        self.ranks = [torch.full((n_ranked, n_layers, n_heads), -1, device="cpu") for _ in _SIDES]
        self.extra = {name: torch.full(shape, float("nan")) for name in ("several", "prompt_low", "prompt_high")}
        self.stream = torch.full(shape[:2], float("nan"))

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
        low, high = wilson_interval(promote["score"], sizes[:, None, None].double())
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
            interval_low=low,
            interval_high=high,
            suppress_null_mean=suppress["null_mean"],
            suppress_p_value=suppress["p_value"],
            suppress_q_value=q_values(suppress["p_value"]),
            promote_ranks=split[0],
            suppress_ranks=split[1],
            **details,
            **(self._met_fields(promote["score"], sizes) if self.met else {}),
        )

    def _met_fields(self, promote: Tensor, sizes: Tensor) -> dict[str, Any]:
        several = self.asked.several
        n_several = torch.zeros_like(sizes) if several is None else several.sizes
        both = (promote * sizes[:, None, None] + self.extra["several"].nan_to_num() * n_several[:, None, None]) / (
            sizes + n_several
        )[:, None, None]
        return {
            "stream": self.stream,
            "prompt_low": self.extra["prompt_low"],
            "prompt_high": self.extra["prompt_high"],
            "n_several": tuple(n_several.tolist()),
            "several": self.extra["several"],
            "together": both,
        }
