"""Which heads implement a relation: the MAPS method, a folded variant, and one in context, with nulls."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..capture.running.context import ContextVectors
from ..capture.running.last_position import Source
from ..capture.weights import HeadWeights
from ..circuits.maps import CircuitMaps, ContextSources
from ..circuits.ov import stream_map, written_maps
from ..core.options import Count, public
from ..core.provenance import Provenance
from ..core.types import Circuit, HeadIndex, HeadLike, LayerLike, Model, Preset, by_layer, check_choice
from ..data.relations import Encoded, MultiToken, RelationLike, encode, load_relations, resolve_relations
from ..results import largest_heads
from ..results.table import HeadTable, frozen_result, measured
from ..scorers.likeness import alike_pairs
from ..scorers.relation import EXACT_BELOW, PairGroups, Pairs, score_layer, shares
from ..scorers.statistics import q_values
from .head_trust import HeadTrust
from .study import Study
from .sweep import LayerStep, ids_digest, sweep_layers

ScoreDirection: TypeAlias = Literal["promote", "suppress"]

IMPLEMENTS_SCORE = 0.15
IMPLEMENTS_Q = 0.05
SPECIFIC_P = 0.05

_PROMPT_LEAST = 0.05
"""Scores from which on it is looked up how far the prompts agree: of most heads there is nothing to agree on."""


@frozen_result
class RelationScores(HeadTable):
    """Scores of relations (first axis) by layer and head; cells that were not asked for are NaN.

    Attributes:
        relations: Names of the relations.
        circuit: ``"ov"`` (what heads write) or ``"qk"`` (where they look).
        dropped: (source, target, reason) of pairs that could not be scored, by relation.
        promote_ranks, suppress_ranks: Exact rank of every kept pair's target, by relation, if asked for (0 is best;
            ``ranks_count_from`` in JSON).

    Example:
        >>> from tl_headmaps import load_default_model, relation_scores
        >>> scores = relation_scores(load_default_model(), "country_to_capital", heads="L23H4", progress=False)
        >>> scores.implements()
        {'country_to_capital': [HeadIndex(layer=23, head=4)]}
        >>> round(float(scores.interval_low[0, 23, 4]), 2), round(float(scores.null_mean[0, 23, 4]), 2)
        (0.55, 0.02)
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
    json_extra: ClassVar[tuple[str, ...]] = ("ranks_count_from",)
    labelled: ClassVar[str] = "relations"
    aligned: ClassVar[tuple[str, ...]] = (
        *("k", "n_pairs", "n_kept", "dropped", "test", "n_units", "n_clusters", "n_multi_token"),
        *("promote_ranks", "suppress_ranks"),
    )
    paper_columns: ClassVar[tuple[str, ...]] = (
        *("relation", "head", "promote", "interval_low", "interval_high", "null_mean", "q_value"),
        *("neighbour", "stream"),
    )
    former: ClassVar[Mapping[str, str]] = {"several": "multi_token", "n_several": "n_multi_token"}
    signed: ClassVar[bool] = False
    listed: ClassVar[int] = 5
    chosen_as: ClassVar[str] = "implement"
    fixed: ClassVar[tuple[str, ...]] = ("circuit", "k")
    ranks_count_from: ClassVar[int] = 0

    relations: tuple[str, ...]
    circuit: Circuit
    k: tuple[int, ...] = measured("fact", "k", "how many of the strongest tokens count")
    n_pairs: tuple[int, ...] = measured("fact", "pairs", "pairs given")
    n_kept: tuple[int, ...] = measured("fact", "scored", "pairs whose words are single tokens, the ones scored")
    dropped: tuple[tuple[tuple[str, str, str], ...], ...]
    promote: Float[Tensor, "relation layer head"] = measured(
        "value", "score", "share of pairs whose target is among the k strongest tokens", unit="share of pairs"
    )
    suppress: Float[Tensor, "relation layer head"] = measured(
        "value", "suppression", "share of pairs whose target is among the k weakest", unit="share of pairs"
    )
    null_mean: Float[Tensor, "relation layer head"] = measured(
        "null", "null", "mean score with targets shuffled among the relation's sources", of="promote"
    )
    p_value: Float[Tensor, "relation layer head"] = measured(
        "p", "p", "chance that shuffled targets score as well, by the test of the relation", of="promote"
    )
    q_value: Float[Tensor, "relation layer head"] = measured(
        "q", "q", "false discovery rate (Benjamini-Hochberg) over scores of all heads and relations", of="promote"
    )
    interval_low: Float[Tensor, "relation layer head"] = measured(
        "low", "95%", "Wilson's; pairs that share a target or a stem count together", of="promote"
    )
    interval_high: Float[Tensor, "relation layer head"] = measured("high", "95%", "upper end", of="promote")
    suppress_null_mean: Float[Tensor, "relation layer head"] = measured("null", "null of suppression", of="suppress")
    suppress_p_value: Float[Tensor, "relation layer head"] = measured("p", "p of suppression", of="suppress")
    suppress_q_value: Float[Tensor, "relation layer head"] = measured(
        "q", "q of suppression", "over suppression alone, a family of its own", of="suppress"
    )
    neighbour: Float[Tensor, "relation layer head"] = measured(
        "detail", "neighbour", "score with the target of the most similar source (by embeddings) that has another one"
    )
    neighbour_p_value: Float[Tensor, "relation layer head"] = measured(
        "detail", "p above neighbour", "exact paired sign test that the score is above that of neighbours"
    )
    test: tuple[str, ...] = measured(
        "fact",
        "test",
        "targets are shuffled among pairs, or clusters of pairs with one target and alike sources (forms of one word, "
        "or embeddings with a cosine above 0.2); below ten of them by all orders, exactly",
        shown=False,
    )
    n_units: tuple[int, ...] = measured("fact", "shuffled", "number of these pairs or clusters", shown=False)
    n_clusters: tuple[int, ...] = measured(
        "fact", "clusters", "clusters of pairs that share a target or a stem, by which intervals are made", shown=False
    )
    provenance: Provenance
    promote_ranks: tuple[Int[Tensor, "_ layer head"], ...] | None = None
    suppress_ranks: tuple[Int[Tensor, "_ layer head"], ...] | None = None
    stream: Float[Tensor, "relation layer"] | None = measured(
        "detail",
        "stream",
        "in context, score of the stream itself before the layer (logit lens): a head whose score is not above it "
        "passes on what is known already",
        default=None,
    )
    prompt_low: Float[Tensor, "relation layer head"] | None = measured(
        "detail",
        "least prompt",
        f"smallest score behind one prompt alone (of heads from {_PROMPT_LEAST} on)",
        default=None,
    )
    prompt_high: Float[Tensor, "relation layer head"] | None = measured(
        "detail", "best prompt", "largest score behind one prompt alone", default=None
    )
    n_multi_token: tuple[int, ...] | None = measured(
        "fact", "multi-token pairs", "pairs whose source has several tokens", default=None
    )
    multi_token: Float[Tensor, "relation layer head"] | None = measured(
        "detail", "multi-token", "their score, read at the last token", default=None
    )
    together: Float[Tensor, "relation layer head"] | None = measured(
        "detail", "together", "score over pairs with sources of one and of several tokens", default=None
    )
    token_share: Float[Tensor, "layer head"] | None = measured(
        "detail", "tokens", "share of what the head writes in running text that token identities explain", default=None
    )

    def head_map(
        self, relation: str | None = None, direction: ScoreDirection = "promote"
    ) -> Float[Tensor, "layer head"]:
        """The scores of one relation."""
        check_choice(direction, ScoreDirection, "direction")
        scores: Tensor = getattr(self, direction)
        return scores[self.index_of(relation)]

    def top(
        self, n: int = 5, relation: str | None = None, direction: ScoreDirection = "promote"
    ) -> list[tuple[HeadIndex, float]]:
        """The ``n`` heads that score highest on a relation (ties: lower layer, then lower head)."""
        return largest_heads(self.head_map(relation, direction), n)

    def implements(self, score: float = IMPLEMENTS_SCORE, q: float = IMPLEMENTS_Q) -> dict[str, list[HeadIndex]]:
        """Heads that implement each relation, best first: a score of at least 0.15 that beats its null (q < 0.05).

        It must also be above what the head scores on wrong targets, those of similar sources (p <= 0.05), and with
        ``preset="context"`` above that of the stream itself.
        """
        implementing = (self.promote >= score) & (self.q_value < q) & (self.neighbour_p_value <= SPECIFIC_P)
        if self.stream is not None:
            # With QK there is no stream to compare with.
            implementing &= self.stream.isnan()[:, :, None] | (self.promote > self.stream[:, :, None])
        heads_of = {}
        for number, name in enumerate(self.relations):
            heads = [HeadIndex(layer, head) for layer, head in implementing[number].nonzero().tolist()]
            heads_of[name] = sorted(heads, key=lambda head: (-self.promote[number, head.layer, head.head], head))
        return heads_of

    def chosen(self) -> dict[str, list[HeadIndex]]:
        """Heads that implement each relation."""
        return self.implements()

    @property
    def caption(self) -> str:
        """What was measured, with which preset and k."""
        k = " or ".join(map(str, sorted(set(self.k)))) + " by relation" * (len(set(self.k)) > 1)
        return (
            f"{self.circuit.upper()} relation scores, preset {self.provenance.options.get('preset', '')}: share of "
            f"pairs whose target is among the k strongest tokens (k = {k})."
        )

    def mark(self, head: HeadIndex, place: int) -> str:
        """A star for a head that implements the relation; why another that beats the null does not."""
        at = (place, head.layer, head.head)
        if head in self.implements()[self.relations[place]]:
            return "*"
        if self.stream is not None and bool(self.promote[at] <= self.stream[at[:2]]):
            return "="
        return " " if bool(self.neighbour_p_value[at] <= SPECIFIC_P) else "~"

    def notes(self) -> list[str]:
        stream = "" if self.stream is None or bool(self.stream.isnan().all()) else " and that of the stream"
        notes = [
            f"* implements the relation: a score of {IMPLEMENTS_SCORE} or more with q < {IMPLEMENTS_Q} (q over "
            f"{self.n_measured} heads x {len(self.relations)} relation{'s' * (len(self.relations) > 1)}) that is above "
            f"its score on the targets of similar sources (p ≤ {SPECIFIC_P}){stream}; ~ not shown to be above the "
            f"former{', = not above the latter' if stream else ''}."
        ]
        apart = sum(self.n_multi_token or ())
        left_out = sum(self.n_pairs) - sum(self.n_kept) - apart
        scored = f"{sum(self.n_kept)} of {sum(self.n_pairs)} pairs were scored"
        scored += f"; {apart} more, whose source has several tokens, stand apart" if apart else ""
        notes.append(f"{scored}{f'; {left_out} were left out, each with its reason' if left_out else ''}.")
        if self.prompt_low is not None and len(self.provenance.options.get("prefixes", ())) == 1:
            notes.append("There is one prompt only, so agreement between prompts cannot be judged.")
        return notes


@public
def relation_scores(
    model: Model | HeadWeights,
    relations: RelationLike | Sequence[RelationLike] | None = None,
    *,
    preset: Preset | None = None,
    k: Count | None = None,
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
        circuit: ``"ov"``: what a head writes. ``"qk"``: whether a source, as query, attends to its target as key.
        prepend_bos: With ``"context"``: begin each prefix with BOS; by default as the model does.
        ranks: Also keep the exact rank of every pair (slower, because no row can be left early).
        trust: What :func:`head_trust` gave for this model (or its file): its token shares are shown beside the scores.

    Example:
        >>> from tl_headmaps import load_default_model, relation_scores
        >>> heads = ["L23H4", "L23H5"]
        >>> scores = relation_scores(load_default_model(), "country_to_capital", heads=heads, progress=False)
        >>> [(str(head), round(score, 2)) for head, score in scores.top(2)]
        [('L23H4', 0.74), ('L23H5', 0.38)]
    """
    # Everything a user can get wrong is found before the long work starts.
    resolved = [] if relations is None else resolve_relations(relations, data_dir)
    study = Study(model, heads=heads, layers=layers, runs=False, progress=progress)
    weights, chosen = study.weights, by_layer(study.heads)
    if study.options["heads"] is not None:
        study.options["heads"].sort()  # as text: run folders know them by this order
    if relations is None:
        resolved = load_relations(model=weights, data_dir=data_dir)
    preset = weights.preset(preset, circuit, in_context=prompts is not None or vectors is not None)
    weights.require(preset, needs_mlp=max(chosen) > 0)
    token_share = None if trust is None else HeadTrust.given(trust).shares_for(weights, preset)
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
    scored = _Scored.of(encoded, [entry.top_k(k, n_targets) for entry in encoded], alike_pairs(weights, encoded))
    context = ContextSources.of(
        weights,
        scored.sources,
        circuit,
        preset,
        prompts=prompts,
        vectors=vectors,
        prepend_bos=prepend_bos,
        layers=list(chosen),
        progress=progress,
    )
    study.data |= {entry.relation.name: entry.relation.digest for entry in encoded}
    if context is not None:
        study.options |= context.options
        study.data |= context.data
    swept = sweep_layers(
        _ScoreLayers(weights, scored, chosen, circuit, preset, context, ranks),
        list(chosen),
        kind=RelationScores.kind,
        provenance=study.provenance(preset=preset, k=k, multi_token=multi_token),
        details={"circuit": circuit, "ranks": ranks, "token_ids": scored.digest},
        run_dir=run_dir,
        executor=executor,
        description=f"scores of {f'{len(encoded)} relations' if len(encoded) > 1 else encoded[0].relation.name}",
        progress=progress,
    )

    sizes, shape = scored.pairs.sizes.cpu(), (len(encoded), weights.n_layers, weights.n_heads)
    tables = {name: swept.filled(torch.full(shape, torch.nan), name, chosen) for name in _TABLES}
    n_units = scored.counts(scored.alike.unit)
    more: dict[str, Any] = {}
    if context is not None:
        n_multi_token = torch.zeros_like(sizes) if scored.multi_token is None else scored.multi_token.sizes
        more = {
            "stream": swept.filled(torch.full(shape[:2], torch.nan), "stream"),
            "n_multi_token": tuple(n_multi_token.tolist()),
            "together": _mean_of(tables["promote_score"], sizes, tables["multi_token"], n_multi_token),
            **{name: tables[name] for name in ("prompt_low", "prompt_high", "multi_token")},
        }
    if ranks:
        for name in ("promote_ranks", "suppress_ranks"):
            by_head = torch.full((*shape[1:], int(sizes.sum())), -1)
            for layer, tensors in swept.layers.items():
                by_head[layer, chosen[layer]] = tensors[name].cpu()
            more[name] = by_head.movedim(-1, 0).contiguous().split(sizes.tolist())
    return RelationScores(
        relations=tuple(entry.relation.name for entry in encoded),
        circuit=circuit,
        k=tuple(scored.pairs.k.tolist()),
        n_pairs=tuple(len(entry.relation.pairs) for entry in encoded),
        n_kept=tuple(len(entry.kept) for entry in encoded),
        dropped=tuple(entry.dropped for entry in encoded),
        promote=tables["promote_score"],
        suppress=tables["suppress_score"],
        null_mean=tables["promote_null_mean"],
        p_value=tables["promote_p_value"],
        q_value=q_values(tables["promote_p_value"]),
        interval_low=tables["promote_interval_low"],
        interval_high=tables["promote_interval_high"],
        suppress_null_mean=tables["suppress_null_mean"],
        suppress_p_value=tables["suppress_p_value"],
        suppress_q_value=q_values(tables["suppress_p_value"]),
        neighbour=tables["promote_neighbour"],
        neighbour_p_value=tables["promote_neighbour_p_value"],
        test=tuple(_test(n, len(entry.kept)) for n, entry in zip(n_units, encoded, strict=True)),
        n_units=n_units,
        n_clusters=scored.counts(scored.alike.cluster),
        provenance=swept.provenance,
        token_share=token_share,
        **more,
    )


_SIDES = ("promote", "suppress")
_SCORES = ("score", "interval_low", "interval_high", "null_mean", "p_value", "neighbour", "neighbour_p_value")
_TABLES = (*(f"{side}_{name}" for side in _SIDES for name in _SCORES), "multi_token", "prompt_low", "prompt_high")


def _mean_of(one: Tensor, n_one: Tensor, other: Tensor, n_other: Tensor) -> Float[Tensor, "relation layer head"]:
    """Scores over the pairs of two sets; the second may be empty (NaN)."""
    n_one, n_other = n_one[:, None, None], n_other[:, None, None]
    return (one * n_one + other.nan_to_num() * n_other) / (n_one + n_other)


def _test(n_units: int, n_pairs: int) -> str:
    """How the p-values of a relation come about."""
    what = "pairs" if n_units == n_pairs else "clusters"
    return f"all orders of {what}" if n_units < EXACT_BELOW else f"shuffled {what}"


@dataclass(frozen=True)
class _Scored:
    """The pairs of all relations with their different sources.

    Attributes:
        sources: Token ids of each source; those of several tokens come last.
        pairs: Pairs of sources of one token.
        alike: Which of these belong together.
        multi_token: Pairs of sources of several tokens, read at their last; None if there are none.
    """

    sources: tuple[Source, ...]
    pairs: Pairs
    alike: PairGroups
    multi_token: Pairs | None

    @classmethod
    def of(cls, encoded: list[Encoded], k: list[int], alike: PairGroups) -> "_Scored":
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
    scored: _Scored
    heads: dict[int, list[int]]
    circuit: Circuit
    preset: Preset
    context: ContextSources | None
    ranks: bool

    def prepare(self) -> LayerStep:
        device = self.weights.device
        ids = None if self.context is not None else torch.tensor([s[0] for s in self.scored.sources], device=device)
        circuits = CircuitMaps(self.weights, ids, circuit=self.circuit, preset=self.preset, context=self.context)
        pairs = self.scored.pairs.to(device)

        def step(layer: int) -> dict[str, Tensor]:
            maps = circuits.layer(layer, self.heads[layer])
            sides = score_layer(maps, pairs, self.scored.alike, exact_ranks=self.ranks)
            names = (*_SCORES, "ranks") if self.ranks else _SCORES
            tensors = {
                f"{side}_{name}": getattr(values, name)
                for side, values in zip(_SIDES, sides, strict=True)
                for name in names
            }
            if self.context is None:
                return tensors
            if self.scored.multi_token is not None:
                tensors["multi_token"] = shares(maps, self.scored.multi_token.to(device))
            if self.circuit == "ov":
                tensors["stream"] = shares(stream_map(self.weights, layer, circuits.row_vectors(layer)), pairs)[:, 0]
                tensors["prompt_low"], tensors["prompt_high"] = self._by_prompt(layer, pairs, tensors["promote_score"])
            return tensors

        return step

    def _by_prompt(self, layer: int, pairs: Pairs, score: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest score behind one prompt alone; NaN where the averaged vectors score next to nothing."""
        assert self.context is not None
        low, high = torch.full_like(score, torch.nan), torch.full_like(score, torch.nan)
        scoring = score >= _PROMPT_LEAST
        numbers, places = scoring.any(1).nonzero()[:, 0].tolist(), scoring.any(0).nonzero()[:, 0].tolist()
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
            # Only what each head scores on: most heads know few of the relations that some head knows.
            needed = scoring[numbers][:, places].T[:, pairs.relation.cpu()].repeat(1, n_prompts).to(self.weights.device)
            alone = shares(maps, pairs.repeated(n_prompts, n_rows), active=needed).view(n_prompts, len(pairs.k), -1)
        for ends, extreme in ((low, alone.amin(0)), (high, alone.amax(0))):
            ends[numbers] = ends[numbers].index_copy(1, torch.tensor(places), extreme)
            ends[~scoring] = torch.nan
        return low, high
