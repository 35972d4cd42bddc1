"""Static scores checked by the running model: do heads write in a prompt what their weights say?"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ...capture.running.activations import LayerActivations, check_prompts, run
from ...capture.running.prompts import Prompt, check_templates, fill
from ...capture.running.text import check_runs
from ...capture.weights import HeadWeights
from ...circuits.maps import CircuitMaps
from ...core.errors import RelationDataError, UsageError
from ...core.types import Preset, PromptSources, check_choice
from ...data.relations import Encoded, MultiToken, Relation, RelationLike, encode, resolve
from ...scorers.agreement import agreement
from ...scorers.dynamic import hits, output_maps
from ..relation_scores.call import checked_k, require_distinct
from .result import Validation

_KEPT_BYTES = 64 << 20
"""Values and outputs of so many prompts are held at a time; more prompts are scored in parts."""


def validate(
    model: Any,
    relations: RelationLike | Sequence[RelationLike],
    templates: str | Sequence[str] | None = None,
    *,
    preset: Preset = "folded",
    k: int | None = None,
    sources: PromptSources = "single",
    multi_token: MultiToken = "skip",
    prepend_bos: bool = False,
    seed: int = 0,
    data_dir: str | Path | None = None,
    progress: bool = True,
) -> Validation:
    """Dynamic relation scores with and without context, and their agreement with the static ones.

    Args:
        model: A TransformerBridge or HookedTransformer.
        relations: One or several bundled names, files, or :class:`Relation` objects.
        templates: Prompts with ``<X>`` in the place of the source; by default the relations' neutral ones.
        preset: ``"folded"``: a head's direct contribution to the logits. ``"maps"``: the published recipe, z W_O W_U.
        k: Count targets among the k strongest; by default each relation's own k (larger for large vocabularies).
        sources: ``"single"``: sources of one token, in prompts as in the maps. ``"multi"``: prompts with sources of
            several tokens (their last token counts), against static scores from those of one token.
        multi_token: ``"skip"`` leaves out targets of several tokens, ``"first"`` takes their first token.
        prepend_bos: Put the BOS token in front of each prompt; published figures are without.
        seed: Of the resampling behind the intervals; nothing else is random.
        data_dir: Folder of relations instead of the bundled one.
        progress: Show a progress bar on a terminal.

    Example:
        >>> from tl_headmaps import Relation, load_default_model, validate
        >>> pairs = [("France", "Paris"), ("Germany", "Berlin"), ("Egypt", "Cairo")]
        >>> pairs += [("Italy", "Rome"), ("Japan", "Tokyo")]
        >>> capitals = Relation.from_pairs("capitals", pairs)
        >>> found = validate(load_default_model(), capitals, "The story of <X> contains", progress=False)
        >>> round(found.mean("pearson_without"), 2), round(found.mean("pearson_with"), 2)
        (0.83, 0.73)
    """
    check_choice(preset, Preset, "preset")
    check_choice(sources, PromptSources, "sources")
    check_choice(multi_token, MultiToken, "multi_token")
    listed = [relations] if isinstance(relations, str | Path | Relation) else list(relations)
    if not listed:
        raise UsageError("No relation was given. Name at least one, for example 'country_to_capital'.")
    resolved = [resolve(relation, data_dir) for relation in listed]
    require_distinct(resolved)
    chosen = common_templates(resolved) if templates is None else check_templates(templates)
    settings = ValidationSettings(preset, k, sources, multi_token, prepend_bos, seed)
    return validated(model, weights_of(model), resolved, chosen, settings, progress)


@dataclass(frozen=True)
class ValidationSettings:
    """Options of :func:`validate` that can change a number."""

    preset: Preset
    k: int | None
    sources: PromptSources
    multi_token: MultiToken
    prepend_bos: bool
    seed: int


def validated(
    model: Any,
    weights: HeadWeights,
    resolved: Sequence[Relation],
    templates: tuple[str, ...],
    settings: ValidationSettings,
    progress: bool,
) -> Validation:
    """:func:`validate` for a model whose weights were read already."""
    weights.require(settings.preset, needs_mlp=weights.n_layers > 1)
    # Everything a user can get wrong is found before the long work starts.
    plans = [_plan(model, weights, relation, templates, settings) for relation in resolved]
    with tqdm(
        total=sum(len(plan.prompts) for plan in plans),
        desc=f"{len(plans)} relations" if len(plans) > 1 else plans[0].static.relation.name,
        unit="prompt",
        disable=None if progress else True,
    ) as bar:
        checked = [_checked(model, weights, plan, settings, bar.update) for plan in plans]
    provenance = weights.provenance(
        runs_model=True,
        options={name: value for name, value in vars(settings).items() if name != "seed"},
        data={relation.name: relation.digest for relation in resolved},
        seed=settings.seed,
    )
    return Validation(
        relations=tuple(relation.name for relation in resolved),
        templates=templates,
        k=tuple(plan.k for plan in plans),
        n_static=tuple(len(plan.static.kept) for plan in plans),
        n_dynamic=tuple(plan.n_pairs for plan in plans),
        dropped=tuple(plan.dropped for plan in plans),
        agreement={name: tuple(one.table[name] for one in checked) for name in checked[0].table},
        provenance=provenance,
        **{name: torch.stack([one.scores[name] for one in checked]) for name in checked[0].scores},
    )


def weights_of(model: Any) -> HeadWeights:
    """Weights of a model that can also be run and has a tokenizer."""
    check_runs(model)
    if getattr(model, "tokenizer", None) is None and hasattr(model, "cfg"):
        raise UsageError(
            "The model has no tokenizer, and prompts are texts. Load the model with its tokenizer, or set "
            "model.tokenizer."
        )
    return HeadWeights.from_model(model)


def common_templates(relations: Sequence[Relation]) -> tuple[str, ...]:
    """The neutral templates all relations share."""
    found = {relation.neutral_templates for relation in relations}
    if len(found) > 1:
        raise UsageError(
            "The relations have different neutral templates, and one result has one list. Pass templates=, or "
            "validate them one at a time."
        )
    return check_templates(found.pop())


@dataclass(frozen=True)
class _Plan:
    """What one relation asks: static pairs, and prompts template by template, pairs in the same order in each."""

    static: Encoded
    k: int
    prompts: tuple[Prompt, ...]
    targets: tuple[int, ...]
    dropped: tuple[tuple[str, str, str], ...]

    @property
    def n_pairs(self) -> int:
        return len(self.targets)


def _plan(
    model: Any,
    weights: HeadWeights,
    relation: Relation,
    templates: tuple[str, ...],
    settings: ValidationSettings,
) -> _Plan:
    sizes = {"n_sources": weights.n_vocab, "n_targets": weights.W_U.shape[0]}
    static = encode(relation, weights.tokenizer, **sizes, multi_token=settings.multi_token)
    chosen_k = checked_k(static, settings.k, weights.W_U.shape[0])
    dropped: list[tuple[str, str, str]] = []
    candidates: list[tuple[Any, Any, int, int | None]]
    if settings.sources == "single":
        dropped += static.dropped
        candidates = [
            (*relation.pairs[number], target, source)
            for number, source, target in zip(static.kept, static.source_ids, static.target_ids, strict=True)
        ]
    else:
        candidates = list(_several_tokens(relation, weights, static, settings.multi_token))
    rows: list[list[Prompt]] = []
    targets = []
    failed = [0] * len(templates)
    for source, target, target_id, source_id in candidates:
        filled = [_filled(model, template, source, source_id, settings.prepend_bos) for template in templates]
        for place, prompt in enumerate(filled):
            failed[place] += isinstance(prompt, str)
        reasons = [prompt for prompt in filled if isinstance(prompt, str)]
        if reasons:
            dropped.append((str(source), str(target), reasons[0]))
        else:
            rows.append([prompt for prompt in filled if isinstance(prompt, Prompt)])
            targets.append(target_id)
    if not rows:
        _refuse(relation, templates, failed, dropped)
    prompts = tuple(row[place] for place in range(len(templates)) for row in rows)
    check_prompts(model, [prompt.ids for prompt in prompts])
    return _Plan(static, chosen_k, prompts, tuple(targets), tuple(dropped))


def _several_tokens(
    relation: Relation, weights: HeadWeights, static: Encoded, multi_token: MultiToken
) -> Iterator[tuple[Any, Any, int, None]]:
    """Pairs left out of the static scores only because their source has several tokens."""
    sizes = {"n_sources": weights.n_vocab, "n_targets": weights.W_U.shape[0]}
    left_out = [pair for number, pair in enumerate(relation.pairs) if number not in set(static.kept)]
    if not left_out:
        return
    # Each target is encoded as its own source: what is kept then has a target that can be ranked.
    asked = Relation(name=relation.name, pairs=tuple((target, target) for _, target in left_out), k=relation.k)
    found = encode(asked, weights.tokenizer, **sizes, multi_token=multi_token)
    for number, target_id in zip(found.kept, found.target_ids, strict=True):
        yield (*left_out[number], target_id, None)


def _filled(model: Any, template: str, source: Any, source_id: int | None, prepend_bos: bool) -> Prompt | str:
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
    failed: list[int],
    dropped: list[tuple[str, str, str]],
) -> NoReturn:
    worst = max(range(len(templates)), key=failed.__getitem__)
    if not failed[worst]:
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
class _Checked:
    """Scores by name, and one row of the agreement table."""

    scores: dict[str, Tensor]
    table: dict[str, float]


def _checked(
    model: Any, weights: HeadWeights, plan: _Plan, settings: ValidationSettings, progress: Callable[[int], object]
) -> _Checked:
    n_static, n_prompts = len(plan.static.kept), len(plan.prompts)
    n_templates = n_prompts // plan.n_pairs
    shape = (weights.n_layers, weights.n_heads)
    static = torch.zeros(2, *shape, n_static, dtype=torch.bool)
    dynamic = torch.zeros(2, 2, *shape, n_prompts, dtype=torch.bool)
    static_ids = torch.tensor(plan.static.source_ids, device=weights.device)
    static_targets = torch.tensor(plan.static.target_ids, device=weights.device)
    circuits = CircuitMaps(weights, static_ids, preset=settings.preset)
    for number, part in enumerate(_parts(weights, n_prompts)):
        kept = _Kept(model, weights, plan.prompts[part], progress)
        targets = torch.tensor([plan.targets[row % plan.n_pairs] for row in range(n_prompts)[part]])
        targets = targets.to(weights.device).repeat(2)
        for layer in range(weights.n_layers):
            maps = output_maps(weights, weights.layer(layer), *kept.of(layer), settings.preset)
            # The static rows ride along once: one scan of the vocabulary for all.
            wanted = targets
            if number == 0:
                maps, wanted = maps.with_rows_of(circuits.layer(layer)), torch.cat([targets, static_targets])
            found = hits(maps, wanted, plan.k)
            for direction, hit in enumerate((found.promote.cpu(), found.suppress.cpu())):
                here = hit[:, : len(targets)].unflatten(1, (2, -1)).transpose(0, 1)
                dynamic[direction, :, layer, :, part] = here
                if number == 0:
                    static[direction, layer] = hit[:, len(targets) :]
    by_template = dynamic.unflatten(-1, (n_templates, plan.n_pairs)).movedim(-2, 2)
    scores = {f"static_{name}": static[i].float().mean(-1) for i, name in enumerate(("promote", "suppress"))}
    table: dict[str, float] = {}
    for direction, (name, prefix) in enumerate((("promote", ""), ("suppress", "suppress_"))):
        for context, label in enumerate(("without", "with")):
            mine = by_template[direction, context]
            scores[f"{name}_{label}"] = mine.float().mean(-1)
            found_agreement = agreement(
                static[direction].flatten(0, 1).T,
                mine.flatten(1, 2).transpose(1, 2),
                same_pairs=settings.sources == "single" and plan.n_pairs == n_static,
                seed=settings.seed,
            )
            for measure in ("pearson", "spearman"):
                value = getattr(found_agreement, measure)
                ends = (("", value.value), ("_low", value.low), ("_high", value.high))
                table.update({f"{prefix}{measure}_{label}{end}": number for end, number in ends})
    return _Checked(scores, table)


def _parts(weights: HeadWeights, n_prompts: int) -> Iterator[slice]:
    """Ranges of prompts whose values and outputs of all layers fit the budget."""
    one = 4 * weights.n_layers * (weights.n_heads + weights.n_kv_heads) * weights.d_head
    size = max(1, _KEPT_BYTES // one)
    return (slice(start, min(start + size, n_prompts)) for start in range(0, n_prompts, size))


class _Kept:
    """Values at the source and outputs at the last position, from one run over some prompts."""

    def __init__(
        self, model: Any, weights: HeadWeights, prompts: Sequence[Prompt], progress: Callable[[int], object]
    ) -> None:
        shape = (weights.n_layers, len(prompts))
        self.values = torch.empty(*shape, weights.n_kv_heads, weights.d_head, device=weights.device)
        self.outputs = torch.empty(*shape, weights.n_heads, weights.d_head, device=weights.device)
        at = torch.tensor([prompt.source for prompt in prompts])

        def keep(seen: LayerActivations) -> None:
            rows = torch.tensor(seen.batch.rows)
            v, z = seen["v"], seen["z"]
            each = torch.arange(len(rows), device=v.device)
            self.values[seen.layer, rows] = v[each, at[rows].to(v.device)].to(self.values)
            self.outputs[seen.layer, rows] = z[:, -1].to(self.outputs)

        run(model, [prompt.ids for prompt in prompts], read=("v", "z"), reduce=keep, progress=progress)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Values [prompt, kv_head, d_head] and outputs [prompt, head, d_head] of a layer."""
        return self.values[layer], self.outputs[layer]
