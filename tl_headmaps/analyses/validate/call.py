"""Static scores checked against the running model: do heads write in prompts what their weights say?"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...capture.running.activations import LayerActivations, check_prompts, prepends_bos, run
from ...capture.running.prompts import Prompt, check_templates, fill
from ...capture.running.text import check_runs
from ...capture.weights import HeadWeights
from ...circuits.maps import CircuitMaps, ContextSources
from ...core.ambient import steady
from ...core.errors import RelationDataError, UsageError
from ...core.progress import Progress
from ...core.types import Model, Preset, PromptSources, check_choice
from ...data.relations import Encoded, MultiToken, Relation, RelationLike, encode, resolve_relations
from ...scorers.statistics import pair_clusters
from ...scorers.validation import Agreement, PairHits, agreement, hits, orders_within, output_maps
from .result import Validation

_BUDGET = 64 << 20
"""Memory for values and outputs of prompts; more prompts are scored in parts."""


@steady
def validate(
    model: Model,
    relations: RelationLike | Sequence[RelationLike],
    templates: str | Sequence[str] | None = None,
    *,
    preset: Preset | None = None,
    k: int | None = None,
    sources: PromptSources = "single",
    multi_token: MultiToken = "skip",
    prompts: str | Sequence[str] | None = None,
    prepend_bos: bool | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
    progress: bool = True,
) -> Validation:
    """Dynamic relation scores with and without context, and their agreement with the static ones.

    Args:
        model: A TransformerBridge or HookedTransformer.
        relations: One or several bundled names, files, or :class:`Relation` objects.
        templates: Prompts with ``<X>`` in place of the source; by default the relations' neutral ones.
        preset: Which static scores are compared. ``"context"`` and ``"folded"``: with a head's contribution to the
            logits; ``"maps"``: with that of the published recipe, z W_O W_U. Default: ``"context"``.
        k: Count targets among the k strongest tokens; by default each relation's own k (larger for large vocabularies).
        sources: ``"single"``: prompts with the one-token sources behind the static scores. ``"multi"``: prompts with
            sources of several tokens (the last one is read), compared with static scores of the one-token sources.
        multi_token: ``"skip"`` leaves out targets of several tokens, ``"first"`` takes their first token.
        prompts: With ``preset="context"``: prefixes the static sources are put behind; by default eight neutral ones.
        prepend_bos: Begin each prompt with BOS; by default as the model does (never with ``preset="maps"``).
        seed: Seed of the permutations behind the p-values and of resampled pairs; nothing else is random.
        data_dir: Folder of relations to use instead of the bundled one.
        progress: Show a progress bar on a terminal.

    Example:
        >>> from tl_headmaps import Relation, load_default_model, validate
        >>> pairs = [("France", "Paris"), ("Germany", "Berlin"), ("Egypt", "Cairo")]
        >>> pairs += [("Italy", "Rome"), ("Japan", "Tokyo")]
        >>> capitals = Relation.from_pairs("capitals", pairs)
        >>> validation = validate(load_default_model(), capitals, "The story of <X> contains", progress=False)
        >>> round(validation.mean("pearson_without"), 2), round(validation.mean("pearson_with"), 2)  # as published
        (0.92, 0.69)
    """
    check_choice(sources, PromptSources, "sources")
    check_choice(multi_token, MultiToken, "multi_token")
    resolved = resolve_relations(relations, data_dir)
    chosen = common_templates(resolved) if templates is None else check_templates(templates)
    listed = None if prompts is None else (prompts,) if isinstance(prompts, str) else tuple(prompts)
    weights = runnable_weights(model)
    preset = weights.preset(preset)
    weights.require_plain_mixing("Scores of a running head's outputs")
    prepend_bos = prepends_bos(model, prepend_bos, preset)
    settings = ValidationSettings(preset, k, sources, multi_token, prepend_bos, seed, listed)
    return validate_with_weights(model, weights, resolved, chosen, settings, progress)


@dataclass(frozen=True)
class ValidationSettings:
    """Options of :func:`validate` that can change a number."""

    preset: Preset
    k: int | None
    sources: PromptSources
    multi_token: MultiToken
    prepend_bos: bool
    seed: int
    prompts: tuple[str, ...] | None = None


def validate_with_weights(
    model: Any,
    weights: HeadWeights,
    relations: Sequence[Relation],
    templates: tuple[str, ...],
    settings: ValidationSettings,
    progress: bool,
) -> Validation:
    """:func:`validate` for a model whose weights have been read already."""
    weights.require_even_heads("correlations over heads")
    weights.require(settings.preset, needs_mlp=max(weights.layers_with_heads) > 0)
    # Everything a user can get wrong is found before the long work starts.
    prompted = [_prompted(model, weights, relation, templates, settings) for relation in relations]
    context = [_context(weights, entry, settings, progress) for entry in prompted]
    with Progress(
        total=sum(len(entry.prompts) for entry in prompted),
        desc=f"prompts of {f'{len(relations)} relations' if len(relations) > 1 else relations[0].name}",
        unit="prompt",
        show=progress,
    ) as bar:
        scored = [
            _scored(model, weights, entry, sources, settings, bar.update)
            for entry, sources in zip(prompted, context, strict=True)
        ]
    provenance = weights.provenance(
        runs_model=True,
        options={
            name: value
            for name, value in vars(settings).items()
            if name != "seed" and (name != "prompts" or value is not None)
        },
        data={relation.name: relation.digest for relation in relations},
        seed=settings.seed,
    )
    return Validation(
        relations=tuple(relation.name for relation in relations),
        templates=templates,
        k=tuple(entry.k for entry in prompted),
        n_static=tuple(len(entry.static.kept) for entry in prompted),
        n_dynamic=tuple(entry.n_pairs for entry in prompted),
        dropped=tuple(entry.dropped for entry in prompted),
        agreement={name: tuple(entry.agreement[name] for entry in scored) for name in scored[0].agreement},
        provenance=provenance,
        **{
            name: weights.over_all_layers(torch.stack([entry.scores[name] for entry in scored]))
            for name in scored[0].scores
        },
    )


def runnable_weights(model: Any) -> HeadWeights:
    """Weights of a model that can be run on prompts: not weights alone, and with a tokenizer."""
    check_runs(model)
    if getattr(model, "tokenizer", None) is None and hasattr(model, "cfg"):
        raise UsageError(
            "The model has no tokenizer, which prompts need. Load the model with its tokenizer, or set model.tokenizer."
        )
    return HeadWeights.from_model(model)


def common_templates(relations: Sequence[Relation]) -> tuple[str, ...]:
    """The neutral templates that all relations share."""
    lists = {relation.neutral_templates for relation in relations}
    if len(lists) > 1:
        raise UsageError(
            "The relations have different neutral templates, but a result has one list of templates. Pass templates=, "
            "or validate the relations one at a time."
        )
    return check_templates(lists.pop())


@dataclass(frozen=True)
class _PromptedRelation:
    """A relation's pairs for the static scores, and its prompts: template by template, the same pairs in each."""

    static: Encoded
    k: int
    prompts: tuple[Prompt, ...]
    sources: tuple[str, ...]
    targets: tuple[int, ...]
    static_sources: tuple[str, ...]
    dropped: tuple[tuple[str, str, str], ...]

    @property
    def n_pairs(self) -> int:
        return len(self.targets)

    @cached_property
    def clusters(self) -> tuple[Int[Tensor, " static_pair"], Int[Tensor, " pair"]]:
        """Clusters of the pairs behind the static scores and of those in prompts, numbered together."""
        both = pair_clusters([*self.static_sources, *self.sources], [*self.static.target_ids, *self.targets])
        return both[: len(self.static_sources)], both[len(self.static_sources) :]

    def by_cluster(
        self,
        static: Bool[Tensor, "layer head static_pair"],
        dynamic: Bool[Tensor, "template layer head pair"],
    ) -> tuple[PairHits, PairHits]:
        """Hits from the weights and in prompts, added up by the clusters that either has."""
        n = int(torch.cat(self.clusters).max()) + 1
        left = PairHits.of(static.flatten(0, 1).T[None], self.clusters[0], n)
        return left, PairHits.of(dynamic.flatten(1, 2).transpose(1, 2), self.clusters[1], n)


def _prompted(
    model: Any,
    weights: HeadWeights,
    relation: Relation,
    templates: tuple[str, ...],
    settings: ValidationSettings,
) -> _PromptedRelation:
    sizes: Any = {"n_sources": weights.n_vocab, "n_targets": weights.W_U.shape[0]}
    static = encode(relation, weights.tokenizer, **sizes, multi_token=settings.multi_token)
    k = static.top_k(settings.k, weights.W_U.shape[0])
    dropped: list[tuple[str, str, str]] = []
    candidates: list[tuple[Any, Any, int, int | None]]
    if settings.sources == "single":
        dropped += static.dropped
        candidates = [
            (*relation.pairs[place], target, source)
            for place, source, target in zip(static.kept, static.source_ids, static.target_ids, strict=True)
        ]
    else:
        candidates = list(_several_token_sources(relation, weights, static, settings.multi_token))
    rows: list[list[Prompt]] = []
    sources: list[str] = []
    targets = []
    failures = [0] * len(templates)
    for source, target, target_id, source_id in candidates:
        # A pair counts only if every template keeps the tokens of its source, so that all templates ask the same pairs.
        prompts, reasons = [], []
        for place, template in enumerate(templates):
            prompt = _prompt_or_reason(model, template, source, source_id, settings.prepend_bos)
            if isinstance(prompt, str):
                failures[place] += 1
                reasons.append(prompt)
            else:
                prompts.append(prompt)
        if reasons:
            dropped.append((str(source), str(target), reasons[0]))
        else:
            rows.append(prompts)
            sources.append(str(source))
            targets.append(target_id)
    if not rows:
        _refuse(relation, templates, failures, dropped)
    by_template = tuple(row[place] for place in range(len(templates)) for row in rows)
    check_prompts(model, [prompt.ids for prompt in by_template])
    static_sources = tuple(str(relation.pairs[place][0]) for place in static.kept)
    return _PromptedRelation(static, k, by_template, tuple(sources), tuple(targets), static_sources, tuple(dropped))


def _several_token_sources(
    relation: Relation, weights: HeadWeights, static: Encoded, multi_token: MultiToken
) -> Iterator[tuple[Any, Any, int, None]]:
    """Pairs left out of the static scores only because their source has several tokens."""
    sizes: Any = {"n_sources": weights.n_vocab, "n_targets": weights.W_U.shape[0]}
    left_out = [pair for place, pair in enumerate(relation.pairs) if place not in set(static.kept)]
    if not left_out:
        return
    # Each target is encoded as its own source: pairs that are kept then have a target that can be ranked.
    targets = Relation(name=relation.name, pairs=tuple((target, target) for _, target in left_out), k=relation.k)
    encoded = encode(targets, weights.tokenizer, **sizes, multi_token=multi_token)
    for place, target_id in zip(encoded.kept, encoded.target_ids, strict=True):
        yield (*left_out[place], target_id, None)


def _prompt_or_reason(model: Any, template: str, source: Any, source_id: int | None, prepend_bos: bool) -> Prompt | str:
    """The prompt of a source, or why it does not count."""
    prompt = fill(model, template, source, prepend_bos)
    if isinstance(prompt, str):
        return f"source: {prompt}"
    if source_id is not None and prompt.source_ids != (source_id,):
        return f"source is written with other tokens in {template!r}"
    if source_id is None and len(prompt.source_ids) < 2:
        return f"source is one token in {template!r}"
    return prompt


def _refuse(
    relation: Relation,
    templates: tuple[str, ...],
    failures: list[int],
    dropped: list[tuple[str, str, str]],
) -> NoReturn:
    worst = max(range(len(templates)), key=failures.__getitem__)
    if not failures[worst]:
        raise RelationDataError(
            f"No pair of {relation.name!r} has a source of several tokens and a target that can be ranked. Use "
            "sources='single', multi_token='first', or another relation."
        )
    source, _, reason = dropped[-1]
    raise UsageError(
        f"No source of {relation.name!r} keeps its tokens in the template {templates[worst]!r} (for example "
        f"{source!r}: {reason}). Sources are looked up with a leading space: put a word before <X>, and a space "
        "around it."
    )


@dataclass(frozen=True)
class _ScoredRelation:
    """A relation's scores by name, and its row of the agreement table."""

    scores: dict[str, Tensor]
    agreement: dict[str, float]


def _context(
    weights: HeadWeights, prompted: _PromptedRelation, settings: ValidationSettings, progress: bool
) -> ContextSources | None:
    """Context vectors of a relation's static sources, where the static scores are of that preset."""
    sources = [(source,) for source in prompted.static.source_ids]
    return ContextSources.of(
        weights,
        sources,
        "ov",
        settings.preset,
        prompts=settings.prompts,
        prepend_bos=settings.prepend_bos if settings.preset == "context" else None,
        progress=progress,
    )


def _scored(
    model: Any,
    weights: HeadWeights,
    prompted: _PromptedRelation,
    context: ContextSources | None,
    settings: ValidationSettings,
    progress: Callable[[int], object],
) -> _ScoredRelation:
    static, dynamic = _hits_of(model, weights, prompted, context, settings, progress)
    layers = torch.arange(static.shape[1]).repeat_interleave(static.shape[2])
    orders = orders_within(layers, settings.seed)
    scores = {f"static_{name}": static[i].float().mean(-1) for i, name in enumerate(("promote", "suppress"))}
    # Intervals need clusters behind both scores, so the side that has fewer decides.
    table: dict[str, float] = {"n_clusters": float(min(len(side.unique()) for side in prompted.clusters))}
    for direction, (name, prefix) in enumerate((("promote", ""), ("suppress", "suppress_"))):
        for place, label in enumerate(("without", "with")):
            hit = dynamic[direction, place]
            scores[f"{name}_{label}"] = hit.float().mean(-1)
            sides = prompted.by_cluster(static[direction], hit)
            found = agreement(*sides, layers, orders=orders, seed=settings.seed)
            table |= {f"{prefix}{column}": value for column, value in _columns(found, label).items()}
    return _ScoredRelation(scores, table)


def _columns(found: Agreement, label: str) -> dict[str, float]:
    """An agreement as columns of the table."""
    columns: dict[str, float] = {}
    for measure in ("heads", "confirmed", "pearson"):
        one = getattr(found, measure)
        column = f"{measure}_{label}"
        columns |= {column: one.value, f"{column}_low": one.low, f"{column}_high": one.high}
    columns |= {f"spearman_{label}": found.spearman, f"p_{label}": found.p_value}
    for count in ("n_active", "n_static", "n_confirmed"):
        columns[f"{count}_{label}"] = float(getattr(found, count))
    return columns


def _hits_of(
    model: Any,
    weights: HeadWeights,
    prompted: _PromptedRelation,
    context: ContextSources | None,
    settings: ValidationSettings,
    progress: Callable[[int], object],
) -> tuple[Bool[Tensor, "2 layer head static_pair"], Bool[Tensor, "2 2 template layer head pair"]]:
    """Which pairs hit their target, in the layers that have heads: from the weights, and in prompts.

    The first axis is promotion and suppression, the second axis in prompts is without and with context.
    """
    n_prompts = len(prompted.prompts)
    layers = weights.layers_with_heads
    shape = (len(layers), weights.n_heads)
    static = torch.zeros(2, *shape, len(prompted.static.kept), dtype=torch.bool)
    dynamic = torch.zeros(2, 2, *shape, n_prompts, dtype=torch.bool)
    static_ids = None if context is not None else torch.tensor(prompted.static.source_ids, device=weights.device)
    static_targets = torch.tensor(prompted.static.target_ids, device=weights.device)
    circuits = CircuitMaps(weights, static_ids, preset=settings.preset, context=context)
    for number, part in enumerate(_parts(weights, n_prompts)):
        activations = _HeadActivations(model, weights, prompted.prompts[part], progress)
        # Rows are template by template, so the targets repeat; each prompt has two rows, its values and its outputs.
        targets = torch.tensor([prompted.targets[row % prompted.n_pairs] for row in range(n_prompts)[part]])
        targets = targets.to(weights.device).repeat(2)
        for place, layer in enumerate(layers):
            maps = output_maps(weights, weights.layer(layer), *activations.of(layer), settings.preset)
            wanted = targets
            if number == 0:
                # The static rows ride along once: one scan of the vocabulary serves both.
                maps, wanted = maps.with_rows_of(circuits.layer(layer)), torch.cat([targets, static_targets])
            both = hits(maps, wanted, prompted.k)
            for direction, hit in enumerate((both.promote.cpu(), both.suppress.cpu())):
                in_prompts = hit[:, : len(targets)].unflatten(1, (2, -1))
                dynamic[direction, :, place, :, part] = in_prompts.transpose(0, 1)
                if number == 0:
                    static[direction, place] = hit[:, len(targets) :]
    return static, dynamic.unflatten(-1, (-1, prompted.n_pairs)).movedim(-2, 2)


def _parts(weights: HeadWeights, n_prompts: int) -> Iterator[slice]:
    """Ranges of prompts whose values and outputs of all layers fit the budget."""
    bytes_per_prompt = 4 * len(weights.layers_with_heads) * (weights.n_heads + weights.n_kv_heads) * weights.d_head
    size = max(1, _BUDGET // bytes_per_prompt)
    return (slice(start, min(start + size, n_prompts)) for start in range(0, n_prompts, size))


class _HeadActivations:
    """Values at the source and outputs at the last position of some prompts, from one run of the model."""

    def __init__(
        self, model: Any, weights: HeadWeights, prompts: Sequence[Prompt], progress: Callable[[int], object]
    ) -> None:
        self.values, self.outputs = {}, {}
        for layer in weights.layers_with_heads:
            n_heads, n_kv_heads, d_head = weights.shape(layer)
            self.values[layer] = torch.empty(len(prompts), n_kv_heads, d_head, device=weights.device)
            self.outputs[layer] = torch.empty(len(prompts), n_heads, d_head, device=weights.device)
        source = torch.tensor([prompt.source for prompt in prompts])

        def keep(seen: LayerActivations) -> None:
            rows = torch.tensor(seen.batch.rows)
            v, z = seen["v"], seen["z"]
            each = torch.arange(len(rows), device=v.device)
            values, outputs = self.of(seen.layer)
            values[rows] = v[each, source[rows].to(v.device)].to(values)
            outputs[rows] = z[:, -1].to(outputs)

        run(model, [prompt.ids for prompt in prompts], read=("v", "z"), reduce=keep, progress=progress)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Values [prompt, kv_head, d_head] and outputs [prompt, head, d_head] of a layer."""
        return self.values[layer], self.outputs[layer]
