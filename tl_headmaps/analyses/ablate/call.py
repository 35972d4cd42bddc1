"""Heads switched off: does the model lose the relation its weights say they implement, and nothing else?"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ...capture.running.activations import LayerActivations, encode_prompt, run
from ...capture.running.last_position import Change, LastPosition
from ...capture.running.prompts import check_templates, filled
from ...capture.weights import HeadWeights
from ...core.errors import UsageError
from ...core.types import AblationMethod, HeadIndex, HeadLike, Preset, check_choice, head_list
from ...data.relations import MultiToken, Relation, RelationLike, encode, load_relations, resolve
from ...scorers.ablation import accuracy, default_m, heads_by_layer, overlap, random_heads, switched_off, top_heads
from ..relation_scores.call import checked_k, relation_scores
from ..validate.call import weights_of
from .result import AblationCurves, Control, Curve

TESTABLE = 0.1
"""Base accuracy below which there is nothing to lose."""

MOST_OVERLAP = 0.15
"""Share of the ablated heads a control relation must stay below."""

MOST_DIFFERENCE = 0.2
"""How far a control's base accuracy may be from the relation's."""

MOST_CONTROLS = 3

_MOST_ASKED = 2 + MOST_CONTROLS
"""Relations whose keys and values are held at a time."""


def ablate(
    model: Any,
    relation: RelationLike,
    heads: HeadLike | Iterable[HeadLike] | Literal["top"] = "top",
    *,
    m: int | None = None,
    template: str | None = None,
    controls: RelationLike | Sequence[RelationLike] | Literal["auto"] | None = "auto",
    seeds: int = 5,
    method: AblationMethod = "zero",
    preset: Preset = "folded",
    k: int | None = None,
    multi_token: MultiToken = "skip",
    prepend_bos: bool = False,
    data_dir: str | Path | None = None,
    progress: bool = True,
) -> AblationCurves:
    """Next-token accuracy on a relation while heads are switched off, one more at each step.

    A head is switched off at the last position of the prompt, before W_O. An answer is right when the likeliest next
    token is the (first) token of the target.

    Args:
        model: A TransformerBridge or HookedTransformer.
        relation: A bundled name, a file, or a :class:`Relation`.
        heads: ``"top"``: the heads with the highest static scores above 0. Or heads of your own, in their order.
        m: How many heads at most; by default 30, 50, 100, 150 or 250 by the size of the model.
        template: Prompt whose next word is the target, ``<X>`` standing for the source; by default the one of the
            relation's eliciting templates that the model answers best.
        controls: Relations to watch under the same ablation. ``"auto"`` takes up to three bundled ones: less than
            0.15 of the ablated heads score above 0 on them, and their accuracy is within 0.2 of the relation's.
        seeds: How many draws of random heads, never the ablated ones, to compare with.
        method: ``"zero"``, or ``"mean"``: what the head writes on average over the same prompts of the clean run.
        preset: Which static scores rank the heads.
        k: Of the static scores; by default the relation's own k.
        multi_token: ``"skip"`` leaves out targets of several tokens, ``"first"`` takes their first token.
        prepend_bos: Put the BOS token in front of each prompt; published figures are without.
        data_dir: Folder of relations instead of the bundled one.
        progress: Show a progress bar on a terminal.

    Example:
        >>> from tl_headmaps import Relation, ablate, load_default_model
        >>> model = load_default_model()
        >>> pairs = [("France", "Paris"), ("Germany", "Berlin"), ("Egypt", "Cairo")]
        >>> pairs += [("Italy", "Rome"), ("Japan", "Tokyo")]
        >>> capitals = Relation.from_pairs("capitals", pairs, eliciting_templates=("The capital of <X> is",))
        >>> curves = ablate(model, capitals, ["L23H4", "L23H5"], controls=None, seeds=1, progress=False)
        >>> [round(accuracy, 2) for accuracy in curves.values.tolist()]  # with 0, 1 and 2 heads switched off
        [0.8, 0.6, 0.0]
    """
    check_choice(preset, Preset, "preset")
    check_choice(method, AblationMethod, "method")
    check_choice(multi_token, MultiToken, "multi_token")
    for name, value, least in (("m", m, 1), ("seeds", seeds, 0)):
        if value is not None and value < least:
            raise UsageError(f"{name}={value} is impossible; it must be at least {least}.")
    resolved = resolve(relation, data_dir)
    templates = eliciting_templates(resolved, template)
    watched = _listed(controls, data_dir)
    weights = weights_of(model)
    settings = AblationSettings(method, preset, k, multi_token, prepend_bos, progress)
    lab = Lab(model, weights, settings)
    asked = lab.asked(resolved, templates)
    ranked = None if _is_top(heads) else [weights.head(head) for head in head_list(heads)]
    if ranked is not None and not ranked:
        raise UsageError("heads= is empty. Name at least one head, or leave it out for the top heads.")
    candidates = load_relations(model=weights, data_dir=data_dir) if watched is None else watched
    return lab.curves(
        asked,
        ranked=ranked,
        m=default_m(weights.n_layers * weights.n_heads) if m is None else m,
        candidates=[other for other in candidates if other.name != resolved.name],
        all_candidates=watched is not None,
        seeds=seeds,
    )


def eliciting_templates(relation: Relation, template: str | None = None) -> tuple[str, ...]:
    """The prompts a relation may be asked with: the given one, or its own."""
    if template is not None:
        return check_templates([template])
    if not relation.eliciting_templates:
        raise UsageError(
            f"The relation {relation.name!r} has no template whose next word is the target. Give one with template= "
            "(command line: --template), such as 'The capital of <X> is'."
        )
    return relation.eliciting_templates


def _is_top(heads: object) -> bool:
    return isinstance(heads, str) and heads == "top"


def _listed(controls: Any, data_dir: str | Path | None) -> list[Relation] | None:
    """Control relations as given, or None for an automatic choice."""
    if isinstance(controls, str) and controls == "auto":
        return None
    if controls is None:
        return []
    listed = [controls] if isinstance(controls, str | Path | Relation) else list(controls)
    return [resolve(relation, data_dir) for relation in listed]


@dataclass(frozen=True)
class AblationSettings:
    """Options of an ablation that all its relations share."""

    method: AblationMethod
    preset: Preset
    k: int | None
    multi_token: MultiToken
    prepend_bos: bool
    progress: bool


@dataclass(frozen=True)
class Asked:
    """A relation as questions to the model: prompts at their last position, and the right answers."""

    relation: Relation
    template: str
    prompts: tuple[tuple[int, ...], ...]
    targets: Tensor
    last: LastPosition
    base: float


class Lab:
    """One model with its weights and settings; what several relations need is computed once."""

    def __init__(self, model: Any, weights: HeadWeights, settings: AblationSettings) -> None:
        self.model, self.weights, self.settings = model, weights, settings
        self._recent: OrderedDict[tuple[str, str], Asked] = OrderedDict()
        self._bases: dict[tuple[str, str], float] = {}

    def base(self, relation: Relation, template: str) -> float:
        """Accuracy of the unchanged model; remembered, unlike the keys and values of the questions."""
        key = (relation.digest, template)
        return self._bases[key] if key in self._bases else self._asked(relation, template).base

    def asked(self, relation: Relation, templates: Sequence[str]) -> Asked:
        """The questions of a relation, with the template the unchanged model answers best (the first of equals)."""
        return self._asked(relation, max(templates, key=lambda template: self.base(relation, template)))

    def _asked(self, relation: Relation, template: str) -> Asked:
        key = (relation.digest, template)
        if key in self._recent:
            self._recent.move_to_end(key)
            return self._recent[key]
        weights, settings = self.weights, self.settings
        n_targets = weights.W_U.shape[0]
        entry = encode(
            relation,
            weights.tokenizer,
            n_sources=weights.n_vocab,
            n_targets=n_targets,
            multi_token=settings.multi_token,
        )
        checked_k(entry, settings.k, n_targets)
        texts = [filled(template, relation.pairs[number][0], weights.tokenizer)[0] for number in entry.kept]
        prompts = tuple(tuple(encode_prompt(self.model, text, settings.prepend_bos)) for text in texts)
        last = LastPosition(self.model, prompts)
        targets = torch.tensor(entry.target_ids)
        base = float((last.next_tokens() == targets).float().mean())
        self._bases[key] = base
        self._recent[key] = Asked(relation, template, prompts, targets, last, base)
        if len(self._recent) > _MOST_ASKED:
            self._recent.popitem(last=False)
        return self._recent[key]

    def curves(
        self,
        asked: Asked,
        *,
        ranked: Sequence[HeadIndex] | None,
        m: int,
        candidates: Sequence[Relation],
        all_candidates: bool,
        seeds: int,
        static: Mapping[str, Tensor] | None = None,
    ) -> AblationCurves:
        """The ablation of one relation.

        Args:
            asked: The relation's questions.
            ranked: Heads in the order of ablation; by static score if None.
            m: How many heads at most.
            candidates: Relations among which controls are chosen.
            all_candidates: Take them all instead.
            seeds: Number of draws of random heads.
            static: Scores [layer, head] on relations by name, where they are known already.
        """
        weights, settings, relation = self.weights, self.settings, asked.relation
        testable = asked.base >= TESTABLE
        heads: list[HeadIndex] = []
        scores: list[float] = []
        if testable:
            table = self._static([relation], ranked, static)[relation.name]
            heads = top_heads(table, m) if ranked is None else list(ranked)[:m]
            scores = [float(table[head.layer, head.head]) for head in heads]
        controls: list[tuple[Asked, float]] = []
        if heads:
            controls = self._controls(asked, heads, candidates, all_candidates, static)
        draws = range(seeds if heads else 0)
        random = [random_heads(weights.n_layers, weights.n_heads, set(heads), len(heads), seed) for seed in draws]
        if any(len(drawn) < len(heads) for drawn in random):
            raise UsageError(
                f"{len(heads)} heads are ablated, but the model has only {len(random[0])} others to draw at random. "
                "Choose a smaller m=, or seeds=0."
            )
        with tqdm(
            total=len(heads) * (1 + len(random) + len(controls)),
            desc=relation.name,
            unit="step",
            disable=None if settings.progress else True,
        ) as bar:
            curve = self._curve(asked, heads, bar.update)
            random_curves = tuple(self._curve(asked, drawn, bar.update) for drawn in random)
            watched = tuple(
                Control(
                    relation=other.relation.name,
                    template=other.template,
                    n_pairs=len(other.prompts),
                    overlap=shared,
                    curve=self._curve(other, heads, bar.update),
                )
                for other, shared in controls
            )
        options = {name: value for name, value in vars(settings).items() if name != "progress"}
        options |= {"m": m, "seeds": seeds, "heads": "top" if ranked is None else [str(head) for head in ranked]}
        options["controls"] = [other.name for other in candidates] if all_candidates else "auto"
        data = {other.name: other.digest for other in (relation, *(control.relation for control, _ in controls))}
        return AblationCurves(
            relation=relation.name,
            template=asked.template,
            status="tested" if heads else ("no heads" if testable else "not testable"),
            heads=tuple(heads),
            scores=tuple(scores),
            n_pairs=len(asked.prompts),
            curve=curve,
            random_heads=tuple(tuple(drawn) for drawn in random),
            random_curves=random_curves,
            controls=watched,
            provenance=weights.provenance(runs_model=True, options=options, data=data, seed=0 if random else None),
        )

    def _static(
        self,
        relations: Sequence[Relation],
        heads: Sequence[HeadIndex] | None,
        known: Mapping[str, Tensor] | None,
    ) -> dict[str, Tensor]:
        """Static promotion scores [layer, head] of relations, NaN for heads not asked for."""
        found = {relation.name: known[relation.name] for relation in relations if known and relation.name in known}
        missing = [relation for relation in relations if relation.name not in found]
        if missing:
            settings = self.settings
            scored = relation_scores(
                self.weights,
                missing,
                preset=settings.preset,
                k=settings.k,
                heads=heads,
                multi_token=settings.multi_token,
                progress=settings.progress,
            )
            found.update(zip(scored.relations, scored.promote, strict=True))
        return found

    def _controls(
        self,
        asked: Asked,
        heads: Sequence[HeadIndex],
        candidates: Sequence[Relation],
        take_all: bool,
        static: Mapping[str, Tensor] | None,
    ) -> list[tuple[Asked, float]]:
        """Control relations with their overlap, those with the least of it first."""
        usable = [other for other in candidates if take_all or other.eliciting_templates]
        tables = self._static(usable, heads, static)
        shared = {
            name: overlap(heads, {head for head in heads if table[head.layer, head.head] > 0})
            for name, table in tables.items()
        }
        if not take_all:
            usable = [other for other in usable if shared[other.name] < MOST_OVERLAP]
            usable.sort(key=lambda other: shared[other.name])
        chosen: list[tuple[Asked, float]] = []
        for other in usable:
            if not take_all and len(chosen) == MOST_CONTROLS:
                break
            theirs = self.asked(other, eliciting_templates(other))
            if take_all or abs(theirs.base - asked.base) <= MOST_DIFFERENCE:
                chosen.append((theirs, shared[other.name]))
        return chosen

    def _curve(self, asked: Asked, heads: Sequence[HeadIndex], progress: Callable[[int], object]) -> Curve:
        """Accuracy after switching off no head, the first, the first two, ..."""
        means = self._means(asked, heads) if self.settings.method == "mean" else {}
        right = [asked.last.next_tokens() == asked.targets]
        for n in range(1, len(heads) + 1):
            change: dict[int, Change] = {
                layer: _off(numbers, means.get(layer)) for layer, numbers in heads_by_layer(heads[:n]).items()
            }
            right.append(asked.last.next_tokens(change) == asked.targets)
            progress(1)
        found = accuracy(torch.stack(right))
        return Curve(found.value, found.low, found.high)

    def _means(self, asked: Asked, heads: Sequence[HeadIndex]) -> dict[int, Tensor]:
        """What each head of some layers writes at the last position on average, [head, d_head] by layer."""
        layers = sorted({head.layer for head in heads})
        totals = {layer: torch.zeros(self.weights.n_heads, self.weights.d_head) for layer in layers}

        def add(seen: LayerActivations) -> None:
            totals[seen.layer] += seen["z"][:, -1].float().sum(0).cpu()

        if layers:
            run(self.model, asked.prompts, read=("z",), layers=layers, reduce=add)
        return {layer: total / len(asked.prompts) for layer, total in totals.items()}


def _off(numbers: list[int], instead: Tensor | None) -> Change:
    def change(outputs: Tensor, rows: tuple[int, ...]) -> Tensor:
        return switched_off(outputs, numbers, instead)

    return change
