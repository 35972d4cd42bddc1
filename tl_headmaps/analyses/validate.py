"""Static scores checked against the running model: do heads write in prompts what their weights say?"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..capture.running.activations import LayerActivations, check_prompts, run
from ..capture.running.prompts import Prompt, check_templates, fill
from ..capture.weights import HeadWeights
from ..circuits.maps import CircuitMaps, ContextSources
from ..core.errors import UsageError
from ..core.options import Count, Seed, public
from ..core.provenance import Provenance
from ..core.types import HeadIndex, Model, Preset, check_choice
from ..data.relations import Encoded, MultiToken, Relation, RelationLike, resolve_relations
from ..renderers.charts import scatter
from ..renderers.figure import Figure
from ..renderers.text import in_words, interval, number, table_text, visible, wrapped
from ..results import HeadMaps, cells
from ..results.table import frozen_result
from ..scorers.statistics import LEAST_UNITS, pair_clusters
from ..scorers.validation import Agreement, PairHits, agreement, hits, orders_within, output_maps
from .study import Study

if TYPE_CHECKING:
    from typing import Self

Context: TypeAlias = Literal["without", "with"]

_CONTEXTS: tuple[Context, ...] = ("without", "with")
_STATIC = ("static_promote", "static_suppress")
_DYNAMIC = ("promote_without", "promote_with", "suppress_without", "suppress_with")
_BUDGET = 64 << 20
"""Memory for values and outputs of prompts; more prompts are scored in parts."""


@frozen_result
class Validation(HeadMaps):
    """Static and dynamic scores of relations, and how well they agree.

    Attributes:
        relations: Names of the relations.
        templates: The prompts, with ``<X>`` in place of the source.
        k: Top-k of each relation.
        n_static: Pairs behind the static scores of each relation.
        n_dynamic: Pairs behind the dynamic scores of each relation, each in every template.
        dropped: (source, target, reason) of the pairs left out of the dynamic scores, by relation.
        static_promote, static_suppress: Scores from the weights alone.
        promote_without, suppress_without: Scores when the last position attends to the source alone.
        promote_with, suppress_with: Scores of what the head really writes at the last position.
        agreement: Columns with a value per relation, for attention wholly on the source (``_without``) and as it is
            (``_with``), with ``suppress_`` in front for suppression. ``heads``: correlation of static with dynamic
            scores over heads, templates averaged and layer means taken off; ``p``: share of permutations of heads
            within layers that correlate as highly; ``n_active``: heads with a score above 0; ``n_static``: heads with a
            static score of .15 or more; ``n_confirmed`` and ``confirmed``: those that have it in prompts too, and their
            share; ``pearson`` and ``spearman``: correlation over heads x templates, as published. ``_low`` and
            ``_high`` are ends of 95% intervals over clusters of pairs, of which ``n_clusters`` are behind the static
            scores and behind the dynamic ones (the fewer of both, where they differ); ``spearman`` has none, since most
            heads tie at 0 and no resampling of pairs tells how far it would move. NaN where a side does not vary over
            heads, where no head counts, and for intervals of fewer than four clusters or where a side does not vary
            without one of them.

    Example:
        >>> from tl_headmaps import Relation, load_default_model, validate
        >>> capitals = Relation.from_pairs("capitals", [("France", "Paris"), ("Egypt", "Cairo"), ("Japan", "Tokyo")])
        >>> validation = validate(load_default_model(), capitals, "The story of <X> contains", progress=False)
        >>> validation.n_static, validation.n_dynamic, validation.templates
        ((3,), (3,), ('The story of <X> contains',))
        >>> static, dynamic = validation.static_promote[0, 23, 4], validation.promote_without[0, 0, 23, 4]
        >>> round(float(static), 2), round(float(dynamic), 2)
        (1.0, 0.33)
    """

    kind: ClassVar[str] = "validation"
    methods: ClassVar[tuple[str, ...]] = ("elhelo2024maps",)
    json_axes: ClassVar[dict[str, str | None]] = {
        "relation": "relations",
        "template": "templates",
        "layer": None,
        "head": None,
    }
    nullable: ClassVar[tuple[str, ...]] = ("agreement", *_STATIC, *_DYNAMIC)
    labelled: ClassVar[str] = "relations"
    aligned: ClassVar[tuple[str, ...]] = ("k", "n_static", "n_dynamic", "dropped", "agreement")
    relations: tuple[str, ...]
    templates: tuple[str, ...]
    k: tuple[int, ...]
    n_static: tuple[int, ...]
    n_dynamic: tuple[int, ...]
    dropped: tuple[tuple[tuple[str, str, str], ...], ...]
    agreement: dict[str, tuple[float, ...]]
    static_promote: Float[Tensor, "relation layer head"]
    static_suppress: Float[Tensor, "relation layer head"]
    promote_without: Float[Tensor, "relation template layer head"]
    promote_with: Float[Tensor, "relation template layer head"]
    suppress_without: Float[Tensor, "relation template layer head"]
    suppress_with: Float[Tensor, "relation template layer head"]
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "relation template layer head"]:
        """The dynamic promotion scores without context."""
        return self.promote_without

    def head_map(self, relation: str | None = None) -> Float[Tensor, "layer head"]:
        """What heads write on a relation in prompts, attention on the source alone: mean over templates."""
        return self.promote_without[self.index_of(relation)].mean(0)

    def mean(self, column: str) -> float:
        """Mean of a column of the agreement table over the relations that have a value there."""
        if column not in self.agreement:
            raise UsageError(f"There is no column {column!r}; the columns are {', '.join(self.agreement)}.")
        known = [value for value in self.agreement[column] if not math.isnan(value)]
        return sum(known) / len(known) if known else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the agreement table names its rows."""
        values = super().to_dict()
        values["agreement"] = {"relation": list(self.relations), **values["agreement"]}
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        columns = {name: column for name, column in values["agreement"].items() if name != "relation"}
        return super().from_dict({**values, "agreement": columns})

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per relation, template and head."""
        for (place, template, layer, head), labels in cells(self.axes, self.promote_without):
            static = {name: float(getattr(self, name)[place, layer, head]) for name in _STATIC}
            dynamic = {name: float(getattr(self, name)[place, template, layer, head]) for name in _DYNAMIC}
            named = {"relation": labels["relation"], "template": labels["template"]}
            yield {**named, "head": str(HeadIndex(layer, head)), "k": self.k[place], **static, **dynamic}

    def figure(self, *, relation: str | None = None, context: Context | None = None) -> Figure:
        """What heads write in prompts against what their weights say, averaged over templates: a point per head.

        Args:
            relation: One relation; all of them by default.
            context: Attention as it is (``"with"``) or wholly on the source (``"without"``); by default both for one
                relation, and without context for several.
        """
        if context is not None:
            check_choice(context, Context, "context")
        names = self.relations if relation is None else (self.relations[self.index_of(relation)],)
        alone = len(names) == 1
        contexts = [context] if context is not None else _CONTEXTS if alone else ["without"]
        n_layers, n_heads = self.static_promote.shape[1:]
        heads = [str(HeadIndex(layer, head)) for layer in range(n_layers) for head in range(n_heads)]
        x, y, points, groups, agreement = [], [], [], [], []
        for name in names:
            place = self.index_of(name)
            agreement.append(f"{in_words(name)} {', '.join(self._in_prose(place, label) for label in _CONTEXTS)}")
            for label in contexts:
                x.append(self.static_promote[place].flatten())
                y.append(getattr(self, f"promote_{label}")[place].mean(0).flatten())
                points += heads if alone else [f"{head} {name}" for head in heads]
                groups += [f"{label} context" if alone else name] * len(heads)
        preset = self.provenance.options["preset"]
        note = f"Correlation over heads within layers: {'; '.join(agreement)}. A head counts from .15 on."
        return scatter(
            torch.cat(x),
            torch.cat(y),
            names=points,
            groups=groups,
            title=f"Static and dynamic scores, preset {preset}: {in_words(', '.join(names))}",
            x_name=f"static score (preset {preset})",
            y_name="dynamic score (prompts)",
            diagonal=True,
            note=self._noted(note, " "),
        )

    def _row(self, place: int, context: Context) -> dict[str, float]:
        """A relation's agreement with one context, by the names of columns without their endings."""
        return {
            name.removesuffix(f"_{context}").replace(f"_{context}_", "_"): column[place]
            for name, column in self.agreement.items()
        }

    def _in_prose(self, place: int, context: Context) -> str:
        """One agreement in a few words."""
        row = self._row(place, context)
        if math.isnan(row["heads"]):
            return f"undefined {context} context"
        confirmed = f"{row['n_confirmed']:.0f} of {row['n_static']:.0f} heads confirmed"
        return f"{number(row['heads'])} {context} context (p = {number(row['p'], 3)}, {confirmed})"

    def __str__(self) -> str:
        return self.table()

    def table(self, *, full: bool = False) -> str:
        """The agreement of each relation without and with context; the means over relations below.

        Args:
            full: Also numbers of pairs, k, active heads, and the correlations as published.
        """
        rows = [self._texts(place, context) for place in range(len(self.relations)) for context in _CONTEXTS]
        if len(self.relations) > 1:
            means = ("heads", "pearson", "spearman")
            for context in _CONTEXTS:
                mean = {name: number(self.mean(f"{name}_{context}")) for name in means}
                rows.append(dict.fromkeys(rows[0], "") | {"relation": "mean", "context": context, **mean})
        shown = _COLUMNS if full else _SHORT
        columns = [
            (title, "left" if name in ("relation", "context") else "right") for name, (title, _) in shown.items()
        ]
        table = table_text(columns, [[row[name] for name in shown] for row in rows])
        n_templates = f"{len(self.templates)} template{'s' if len(self.templates) > 1 else ''}"
        legend = "; ".join(meaning for _, meaning in shown.values() if meaning)
        units = "Intervals are over clusters of pairs that share a target or the beginning of their sources."
        parts = [
            f"Static against dynamic scores, preset {self.provenance.options['preset']}, {n_templates}",
            table,
            wrapped(f"{legend}. {units}"),
            *map(wrapped, self._missing()),
            "templates:\n" + "\n".join(f"  {visible(template)}" for template in self.templates),
        ]
        return self._noted("\n\n".join(parts))

    def _texts(self, place: int, context: Context) -> dict[str, str]:
        """What is printed of a relation's agreement, by column."""
        row = self._row(place, context)
        texts = {name: number(row[name]) for name in ("heads", "pearson", "spearman")}
        for name in ("heads", "confirmed", "pearson"):
            texts[f"{name}_95"] = interval(row[f"{name}_low"], row[f"{name}_high"])
        return texts | {
            "relation": self.relations[place],
            "pairs": str(self.n_dynamic[place]),
            "k": str(self.k[place]),
            "context": context,
            "p": number(row["p"], 3),
            "active": f"{row['n_active']:.0f}",
            "confirmed": f"{row['n_confirmed']:.0f} of {row['n_static']:.0f}",
        }

    def _missing(self) -> list[str]:
        """Which relations have a correlation without an interval, and why."""
        reasons: dict[str, list[str]] = {}
        for place, (name, n) in enumerate(zip(self.relations, self.agreement["n_clusters"], strict=True)):
            contexts = [self._row(place, context) for context in _CONTEXTS]
            found = [(row[measure], row[f"{measure}_low"]) for row in contexts for measure in ("heads", "pearson")]
            if n < LEAST_UNITS:
                differ = self.n_static[place] != self.n_dynamic[place]
                side = " behind the static or the dynamic scores" if differ else ""
                reasons.setdefault(f"fewer than {LEAST_UNITS} clusters of pairs{side}", []).append(name)
            elif any(math.isnan(low) and not math.isnan(value) for value, low in found):
                reason = "in the rows without one, scores do not vary over heads when a certain cluster is left out"
                reasons.setdefault(reason, []).append(name)
        return [f"no interval for {', '.join(names)}: {reason}" for reason, names in reasons.items()]


_COLUMNS = {
    "relation": ("relation", ""),
    "pairs": ("pairs", ""),
    "k": ("k", ""),
    "context": (
        "context",
        "without context: the last position attends to the source alone; with: what the head really writes there",
    ),
    "heads": ("heads", "heads: correlation of static and dynamic scores over heads, layer means taken off"),
    "heads_95": ("95%", ""),
    "p": ("p", "p: heads permuted within layers"),
    "active": ("active", "active: heads with a score above 0"),
    "confirmed": (
        "confirmed",
        "confirmed: heads with a static score of .15 or more that have it in prompts too",
    ),
    "confirmed_95": ("95%", "and the interval of their share"),
    "pearson": ("published", "published: Pearson over heads x templates"),
    "pearson_95": ("95%", ""),
    "spearman": ("Spearman", ""),
}
"""Title and meaning of each printed column."""
_SHORT = {name: _COLUMNS[name] for name in ("relation", "context", "heads", "heads_95", "p", "confirmed")}


@public
def validate(
    model: Model,
    relations: RelationLike | Sequence[RelationLike],
    templates: str | Sequence[str] | None = None,
    *,
    preset: Preset | None = None,
    k: Count | None = None,
    multi_token: MultiToken = "skip",
    prompts: str | Sequence[str] | None = None,
    prepend_bos: bool | None = None,
    seed: Seed = 0,
    data_dir: str | Path | None = None,
    progress: bool = True,
) -> Validation:
    """Dynamic relation scores with and without context, and their agreement with the static ones.

    Args:
        relations: One or several bundled names, files, or :class:`Relation` objects.
        templates: Prompts with ``<X>`` in place of the source; by default the relations' neutral ones.
        preset: Which static scores are compared. ``"context"`` and ``"folded"``: with a head's contribution to the
            logits; ``"maps"``: with that of the published recipe, z W_O W_U. Default: ``"context"``.
        prompts: With ``preset="context"``: prefixes the static sources are put behind; by default eight neutral ones.
        prepend_bos: Begin each prompt with BOS; by default as the model does (never with ``preset="maps"``).
        seed: Seed of the permutations behind the p-values and of resampled pairs; nothing else is random.

    Example:
        >>> from tl_headmaps import Relation, load_default_model, validate
        >>> pairs = [("France", "Paris"), ("Germany", "Berlin"), ("Egypt", "Cairo")]
        >>> pairs += [("Italy", "Rome"), ("Japan", "Tokyo")]
        >>> capitals = Relation.from_pairs("capitals", pairs)
        >>> validation = validate(load_default_model(), capitals, "The story of <X> contains", progress=False)
        >>> round(validation.mean("pearson_without"), 2), round(validation.mean("pearson_with"), 2)  # as published
        (0.92, 0.69)
    """
    resolved = resolve_relations(relations, data_dir)
    chosen = _common_templates(resolved) if templates is None else check_templates(templates)
    study = Study(model, prepend_bos=prepend_bos, by_heads=False, fills_prompts=True, preset=preset, progress=progress)
    weights = study.weights
    weights.require_plain_mixing("Scores of a running head's outputs")
    weights.require_even_heads("correlations over heads")
    weights.require(study.preset, needs_mlp=max(weights.layers_with_heads) > 0)
    # Everything a user can get wrong is found before the long work starts.
    filled = [PromptedRelation.of(study, relation, chosen, k, multi_token) for relation in resolved]
    context = [relation.context(prompts) for relation in filled]
    name = f"{len(resolved)} relations" if len(resolved) > 1 else resolved[0].name
    with study.bar(f"prompts of {name}", "prompt", sum(len(relation.prompts) for relation in filled)) as bar:
        scored = [
            _scored(relation, vectors, seed, bar.update) for relation, vectors in zip(filled, context, strict=True)
        ]
    if prompts is not None:
        study.options["prompts"] = [prompts] if isinstance(prompts, str) else list(prompts)
    study.data = {relation.name: relation.digest for relation in resolved}
    columns = scored[0][1]
    return Validation(
        relations=tuple(relation.name for relation in resolved),
        templates=chosen,
        k=tuple(relation.k for relation in filled),
        n_static=tuple(len(relation.static.kept) for relation in filled),
        n_dynamic=tuple(relation.n_pairs for relation in filled),
        dropped=tuple(relation.dropped for relation in filled),
        agreement={name: tuple(row[name] for _, row in scored) for name in columns},
        # Files name the kind of sources, of which there is one.
        provenance=study.provenance(
            runs_model=True, seed=seed, preset=study.preset, k=k, sources="single", multi_token=multi_token
        ),
        **{name: weights.over_all_layers(torch.stack([scores[name] for scores, _ in scored])) for name in scored[0][0]},
    )


def _common_templates(relations: Sequence[Relation]) -> tuple[str, ...]:
    """The neutral templates that all relations share."""
    lists = {relation.neutral_templates for relation in relations}
    if len(lists) > 1:
        raise UsageError(
            "The relations have different neutral templates, but a result has one list of templates. Pass templates=, "
            "or validate the relations one at a time."
        )
    return check_templates(lists.pop())


@dataclass(frozen=True)
class PromptedRelation:
    """A relation's pairs for the static scores, and its prompts: template by template, the same pairs in each."""

    study: Study
    static: Encoded
    k: int
    prompts: tuple[Prompt, ...]
    sources: tuple[str, ...]
    targets: tuple[int, ...]
    dropped: tuple[tuple[str, str, str], ...]

    @classmethod
    def of(
        cls,
        study: Study,
        relation: Relation,
        templates: Sequence[str],
        k: int | None = None,
        multi_token: MultiToken = "skip",
    ) -> "PromptedRelation":
        """The pairs of which every template keeps the tokens of the source, so that all templates ask the same."""
        static, k = study.encoded(relation, k, multi_token)
        dropped, rows, kept = list(static.dropped), [], []
        failures = [0] * len(templates)
        for at, (place, source_id) in enumerate(zip(static.kept, static.source_ids, strict=True)):
            source, target = relation.pairs[place]
            filled = [
                _prompt_or_reason(study.model, template, source, source_id, study.prepend_bos) for template in templates
            ]
            reasons = [prompt for prompt in filled if isinstance(prompt, str)]
            failures = [n + isinstance(prompt, str) for n, prompt in zip(failures, filled, strict=True)]
            if reasons:
                dropped.append((str(source), str(target), reasons[0]))
            else:
                rows.append(filled)
                kept.append(at)
        if not rows:
            worst = max(range(len(templates)), key=failures.__getitem__)
            source, _, reason = dropped[-1]
            raise UsageError(
                f"No source of {relation.name!r} keeps its tokens in the template {templates[worst]!r} (for example "
                f"{source!r}: {reason}). Sources are looked up with a leading space: put a word before <X>, and a "
                "space around it."
            )
        prompts = tuple(prompt for template in zip(*rows, strict=True) for prompt in template)
        check_prompts(study.model, [prompt.ids for prompt in prompts])
        sources = tuple(str(relation.pairs[static.kept[at]][0]) for at in kept)
        targets = tuple(static.target_ids[at] for at in kept)
        return cls(study, static, k, prompts, sources, targets, tuple(dropped))

    @property
    def n_pairs(self) -> int:
        """Pairs in prompts."""
        return len(self.targets)

    @cached_property
    def clusters(self) -> tuple[Int[Tensor, " static_pair"], Int[Tensor, " pair"]]:
        """Clusters of the pairs behind the static scores and of those in prompts, numbered together."""
        pairs = self.static.relation.pairs
        static_sources = [str(pairs[place][0]) for place in self.static.kept]
        both = pair_clusters([*static_sources, *self.sources], [*self.static.target_ids, *self.targets])
        return both[: len(static_sources)], both[len(static_sources) :]

    def by_cluster(
        self,
        static: Bool[Tensor, "layer head static_pair"],
        dynamic: Bool[Tensor, "template layer head pair"],
    ) -> tuple[PairHits, PairHits]:
        """Hits from the weights and in prompts, added up by the clusters that either has."""
        n = int(torch.cat(self.clusters).max()) + 1
        left = PairHits.of(static.flatten(0, 1).T[None], self.clusters[0], n)
        return left, PairHits.of(dynamic.flatten(1, 2).transpose(1, 2), self.clusters[1], n)

    def context(self, prompts: str | Sequence[str] | None = None) -> ContextSources | None:
        """Context vectors of the static sources, where the static scores are of that preset."""
        study = self.study
        return ContextSources.of(
            study.weights,
            [(source,) for source in self.static.source_ids],
            "ov",
            study.preset,
            prompts=prompts,
            prepend_bos=study.prepend_bos if study.preset == "context" else None,
            progress=study.progress,
        )

    def hits(
        self, context: ContextSources | None, progress: Callable[[int], object]
    ) -> tuple[Bool[Tensor, "2 layer head static_pair"], Bool[Tensor, "2 2 template layer head pair"]]:
        """Which pairs hit their target, in the layers that have heads: from the weights, and in prompts.

        The first axis is promotion and suppression, the second axis in prompts is without and with context.
        """
        weights, preset, n_prompts = self.study.weights, self.study.preset, len(self.prompts)
        layers = weights.layers_with_heads
        static = torch.zeros(2, len(layers), weights.n_heads, len(self.static.kept), dtype=torch.bool)
        dynamic = torch.zeros(2, 2, len(layers), weights.n_heads, n_prompts, dtype=torch.bool)
        static_ids = None if context is not None else torch.tensor(self.static.source_ids, device=weights.device)
        static_targets = torch.tensor(self.static.target_ids, device=weights.device)
        circuits = CircuitMaps(weights, static_ids, preset=preset, context=context)
        for turn, part in enumerate(_parts(weights, n_prompts)):
            activations = _activations(self.study, self.prompts[part], progress)
            # Prompts are template by template, so the targets repeat; each has two rows, its values and its outputs.
            targets = torch.tensor([self.targets[row % self.n_pairs] for row in range(n_prompts)[part]])
            targets = targets.to(weights.device).repeat(2)
            for place, layer in enumerate(layers):
                maps = output_maps(weights, weights.layer(layer), *activations[layer], preset)
                wanted = targets
                if turn == 0:
                    # The static rows ride along once: one scan of the vocabulary serves both.
                    maps, wanted = maps.with_rows_of(circuits.layer(layer)), torch.cat([targets, static_targets])
                both = hits(maps, wanted, self.k)
                for direction, hit in enumerate((both.promote.cpu(), both.suppress.cpu())):
                    in_prompts = hit[:, : len(targets)].unflatten(1, (2, -1))
                    dynamic[direction, :, place, :, part] = in_prompts.transpose(0, 1)
                    if turn == 0:
                        static[direction, place] = hit[:, len(targets) :]
        return static, dynamic.unflatten(-1, (-1, self.n_pairs)).movedim(-2, 2)


def _prompt_or_reason(model: Any, template: str, source: Any, source_id: int, prepend_bos: bool) -> Prompt | str:
    """The prompt of a source, or why it does not count."""
    prompt = fill(model, template, source, prepend_bos)
    if isinstance(prompt, str):
        return f"source: {prompt}"
    if prompt.source_ids != (source_id,):
        return f"source is written with other tokens in {template!r}"
    return prompt


def _scored(
    relation: PromptedRelation, context: ContextSources | None, seed: int, progress: Callable[[int], object]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """A relation's scores by name, and its row of the agreement table."""
    static, dynamic = relation.hits(context, progress)
    layers = torch.arange(static.shape[1]).repeat_interleave(static.shape[2])
    orders = orders_within(layers, seed)
    scores = {name: hit.float().mean(-1) for name, hit in zip(_STATIC, static, strict=True)}
    # Intervals need clusters behind both scores, so the side that has fewer decides.
    table: dict[str, float] = {"n_clusters": float(min(len(side.unique()) for side in relation.clusters))}
    for direction, (name, prefix) in enumerate((("promote", ""), ("suppress", "suppress_"))):
        for place, label in enumerate(_CONTEXTS):
            hit = dynamic[direction, place]
            scores[f"{name}_{label}"] = hit.float().mean(-1)
            sides = relation.by_cluster(static[direction], hit)
            agreed = agreement(*sides, layers, orders=orders, seed=seed)
            table |= {f"{prefix}{column}": value for column, value in _columns(agreed, label).items()}
    return scores, table


def _columns(agreed: Agreement, label: str) -> dict[str, float]:
    """An agreement as columns of the table."""
    columns: dict[str, float] = {}
    for measure in ("heads", "confirmed", "pearson"):
        one = getattr(agreed, measure)
        column = f"{measure}_{label}"
        columns |= {column: one.value, f"{column}_low": one.low, f"{column}_high": one.high}
    columns |= {f"spearman_{label}": agreed.spearman, f"p_{label}": agreed.p_value}
    for count in ("n_active", "n_static", "n_confirmed"):
        columns[f"{count}_{label}"] = float(getattr(agreed, count))
    return columns


def _parts(weights: HeadWeights, n_prompts: int) -> Iterator[slice]:
    """Ranges of prompts whose values and outputs of all layers fit the budget."""
    bytes_per_prompt = 4 * len(weights.layers_with_heads) * (weights.n_heads + weights.n_kv_heads) * weights.d_head
    size = max(1, _BUDGET // bytes_per_prompt)
    return (slice(start, min(start + size, n_prompts)) for start in range(0, n_prompts, size))


def _activations(
    study: Study, prompts: Sequence[Prompt], progress: Callable[[int], object]
) -> dict[int, tuple[Float[Tensor, "prompt kv_head d_head"], Float[Tensor, "prompt head d_head"]]]:
    """By layer, values at the source and outputs at the last position of some prompts, from one run of the model."""
    weights = study.weights
    kept = {}
    for layer in weights.layers_with_heads:
        n_heads, n_kv_heads, d_head = weights.shape(layer)
        values, outputs = (torch.empty(len(prompts), n, d_head, device=weights.device) for n in (n_kv_heads, n_heads))
        kept[layer] = (values, outputs)
    source = torch.tensor([prompt.source for prompt in prompts])

    def keep(seen: LayerActivations) -> None:
        rows = torch.tensor(seen.batch.rows)
        v, z = seen["v"], seen["z"]
        each = torch.arange(len(rows), device=v.device)
        values, outputs = kept[seen.layer]
        values[rows] = v[each, source[rows].to(v.device)].to(values)
        outputs[rows] = z[:, -1].to(outputs)

    run(study.model, [prompt.ids for prompt in prompts], read=("v", "z"), reduce=keep, progress=progress)
    return kept
