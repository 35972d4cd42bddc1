"""Heads switched off: does the model lose the relation its weights say they implement, and nothing else?"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ...capture.running.activations import LayerActivations, encode_prompt, prepends_bos, run
from ...capture.running.last_position import Change, LastPosition
from ...capture.running.prompts import check_templates, filled
from ...capture.weights import HeadWeights
from ...core.ambient import steady
from ...core.errors import UsageError
from ...core.types import AblationMethod, HeadIndex, HeadLike, Model, Preset, check_choice, head_list
from ...data.relations import MultiToken, Relation, RelationLike, encode, load_relations, resolve, resolve_relations
from ...scorers.ablation import (
    accuracy,
    default_max_heads,
    grouped_by_layer,
    overlap,
    switched_off,
    top_heads,
)
from ...scorers.statistics import matched_sets
from ..relation_scores.call import checked_k, relation_scores
from ..validate.call import runnable_weights
from .result import AblationCurves, Control, Curve

TESTABLE = 0.1
"""Base accuracy below which there is nothing to lose."""

MOST_OVERLAP = 0.15
"""A control shares less than this part of the ablated heads."""

MOST_DIFFERENCE = 0.2
"""Largest difference between the base accuracy of a control and of the relation."""

MOST_CONTROLS = 3

_MOST_KEPT = 2 + MOST_CONTROLS
"""Relations whose keys and values are kept in memory: the relation, its controls and the one being tried."""


@steady
def ablate(
    model: Model,
    relation: RelationLike,
    heads: HeadLike | Iterable[HeadLike] | Literal["top"] = "top",
    *,
    max_heads: int | None = None,
    template: str | None = None,
    controls: RelationLike | Sequence[RelationLike] | Literal["auto"] | None = "auto",
    n_random: int = 5,
    method: AblationMethod = "zero",
    preset: Preset = "folded",
    k: int | None = None,
    multi_token: MultiToken = "skip",
    prompts: str | Sequence[str] | None = None,
    prepend_bos: bool | None = None,
    data_dir: str | Path | None = None,
    progress: bool = True,
) -> AblationCurves:
    """Next-token accuracy on a relation while heads are switched off, one more at each step.

    A head is switched off at the last position of the prompt, before W_O. An answer is right when the likeliest next
    token is the (first) token of the target.

    Args:
        model: A TransformerBridge or HookedTransformer.
        relation: A bundled name, a file, or a :class:`Relation`.
        heads: ``"top"``: the heads with the highest static scores above 0. Or heads of your own, switched off in the
            order given.
        max_heads: Switch off at most this many heads; by default 30, 50, 100, 150 or 250, by the size of the model.
        template: Prompt whose next word is the target, with ``<X>`` in place of the source; by default the one of the
            relation's eliciting templates that the model answers best.
        controls: Other relations to test while the same heads are off. ``"auto"`` chooses up to three bundled ones with
            fewer than 0.15 of the ablated heads scoring above 0, and an accuracy within 0.2 of the relation's.
        n_random: Number of draws of random heads to compare with: of the same layers, never the ablated ones.
        method: ``"zero"``, or ``"mean"``: what the head writes on average over the same prompts in a clean run.
        preset: Preset of the static scores that rank the heads.
        k: k of the static scores; by default the relation's own.
        multi_token: ``"skip"`` leaves out targets of several tokens, ``"first"`` takes their first token.
        prompts: With ``preset="met"``: prefixes behind which static scores are taken; by default eight neutral ones.
        prepend_bos: Begin each prompt with BOS; by default as the model does (never with ``preset="maps"``).
        data_dir: Folder of relations to use instead of the bundled one.
        progress: Show a progress bar on a terminal.

    Example:
        >>> from tl_headmaps import Relation, ablate, load_default_model
        >>> model = load_default_model()
        >>> pairs = [("France", "Paris"), ("Germany", "Berlin"), ("Egypt", "Cairo")]
        >>> pairs += [("Italy", "Rome"), ("Japan", "Tokyo")]
        >>> capitals = Relation.from_pairs("capitals", pairs, eliciting_templates=("The capital of <X> is",))
        >>> heads = ["L23H4", "L23H5", "L23H1"]
        >>> curves = ablate(model, capitals, heads, controls=None, n_random=1, progress=False)
        >>> [round(accuracy, 2) for accuracy in curves.values.tolist()]  # with 0 to 3 heads switched off
        [0.8, 1.0, 0.6, 0.4]
    """
    check_choice(preset, Preset, "preset")
    check_choice(method, AblationMethod, "method")
    check_choice(multi_token, MultiToken, "multi_token")
    check_at_least("max_heads", max_heads, 1)
    check_at_least("n_random", n_random, 0)
    resolved = resolve(relation, data_dir)
    templates = eliciting_templates(resolved, template)
    choose = isinstance(controls, str) and controls == "auto"
    given_controls = None if choose else resolve_relations(controls, data_dir) if controls else []
    weights = runnable_weights(model)
    if method == "zero":
        weights.require_own_values("switching off a head", ", or use method='mean' (command line: --method mean)")
    listed = None if prompts is None else (prompts,) if isinstance(prompts, str) else tuple(prompts)
    prepend_bos = prepends_bos(model, prepend_bos, preset)
    settings = AblationSettings(method, preset, k, multi_token, prepend_bos, progress, listed)
    experiment = AblationExperiment(model, weights, settings)
    questions = experiment.questions(resolved, templates)
    ranked = None if isinstance(heads, str) and heads == "top" else [weights.head(head) for head in head_list(heads)]
    if ranked is not None and not ranked:
        raise UsageError("heads= is empty. Name at least one head, or leave it out for the top heads.")
    candidates = load_relations(model=weights, data_dir=data_dir) if given_controls is None else given_controls
    return experiment.curves(
        questions,
        heads=ranked,
        max_heads=default_max_heads(weights.n_all_heads) if max_heads is None else max_heads,
        candidates=[other for other in candidates if other.name != resolved.name],
        all_candidates=given_controls is not None,
        n_random=n_random,
    )


def check_at_least(name: str, value: int | None, least: int) -> None:
    """Raise a UsageError for a count that is too small."""
    if value is not None and value < least:
        raise UsageError(f"{name}={value} is impossible; it must be at least {least}.")


def eliciting_templates(relation: Relation, template: str | None = None) -> tuple[str, ...]:
    """The prompts a relation can be asked with: the given one, or its own."""
    if template is not None:
        return check_templates([template])
    if not relation.eliciting_templates:
        raise UsageError(
            f"The relation {relation.name!r} has no template whose next word is the target. Give one with template= "
            "(command line: --template), such as 'The capital of <X> is'."
        )
    return relation.eliciting_templates


@dataclass(frozen=True)
class AblationSettings:
    """Options of an ablation that all its relations share."""

    method: AblationMethod
    preset: Preset
    k: int | None
    multi_token: MultiToken
    prepend_bos: bool
    progress: bool
    prompts: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Questions:
    """A relation as questions to the model: prompts at their last position, and the right answers."""

    relation: Relation
    template: str
    prompts: tuple[tuple[int, ...], ...]
    targets: Tensor
    last: LastPosition
    base_accuracy: float


class AblationExperiment:
    """Ablations of several relations in one model; what they share is computed once."""

    def __init__(self, model: Any, weights: HeadWeights, settings: AblationSettings) -> None:
        self.model, self.weights, self.settings = model, weights, settings
        self._recent: OrderedDict[tuple[str, str], Questions] = OrderedDict()
        self._base_accuracies: dict[tuple[str, str], float] = {}

    def questions(self, relation: Relation, templates: Sequence[str]) -> Questions:
        """The questions of a relation, with the template the unchanged model answers best (the first of equals)."""
        return self._questions(relation, max(templates, key=lambda template: self._base_accuracy(relation, template)))

    def _base_accuracy(self, relation: Relation, template: str) -> float:
        """Accuracy of the unchanged model: a number is remembered longer than the keys and values of questions."""
        key = (relation.digest, template)
        if key not in self._base_accuracies:
            self._base_accuracies[key] = self._questions(relation, template).base_accuracy
        return self._base_accuracies[key]

    def _questions(self, relation: Relation, template: str) -> Questions:
        key = (relation.digest, template)
        if key in self._recent:
            self._recent.move_to_end(key)
            return self._recent[key]
        weights, settings = self.weights, self.settings
        n_targets = weights.W_U.shape[0]
        encoded = encode(
            relation,
            weights.tokenizer,
            n_sources=weights.n_vocab,
            n_targets=n_targets,
            multi_token=settings.multi_token,
        )
        checked_k(encoded, settings.k, n_targets)
        texts = [filled(template, relation.pairs[place][0], weights.tokenizer)[0] for place in encoded.kept]
        prompts = tuple(tuple(encode_prompt(self.model, text, settings.prepend_bos)) for text in texts)
        last = LastPosition(self.model, prompts)
        targets = torch.tensor(encoded.target_ids)
        base_accuracy = float((last.next_tokens() == targets).float().mean())
        self._recent[key] = Questions(relation, template, prompts, targets, last, base_accuracy)
        if len(self._recent) > _MOST_KEPT:
            self._recent.popitem(last=False)
        return self._recent[key]

    def curves(
        self,
        questions: Questions,
        *,
        heads: Sequence[HeadIndex] | None,
        max_heads: int,
        candidates: Sequence[Relation],
        all_candidates: bool,
        n_random: int,
        static: Mapping[str, Tensor] | None = None,
    ) -> AblationCurves:
        """The ablation of one relation.

        Args:
            questions: The relation's questions.
            heads: Heads in the order of ablation; by static score if None.
            max_heads: Switch off at most this many.
            candidates: Relations to choose controls from.
            all_candidates: Take all candidates as controls.
            n_random: Number of draws of random heads.
            static: Static scores [layer, head] by relation, where they are known already.
        """
        weights, settings, relation = self.weights, self.settings, questions.relation
        testable = questions.base_accuracy >= TESTABLE
        ablated: list[HeadIndex] = []
        scores: list[float] = []
        if testable:
            table = self._static([relation], heads, static)[relation.name]
            ablated = top_heads(table, max_heads) if heads is None else list(heads)[:max_heads]
            scores = [float(table[head.layer, head.head]) for head in ablated]
        controls: list[tuple[Questions, float]] = []
        if ablated:
            controls = self._controls(questions, ablated, candidates, all_candidates, static)
        layers = weights.layers_with_heads
        everything = [HeadIndex(layer, head) for layer in layers for head in range(weights.n_heads)]
        random = matched_sets(ablated, everything, n_random).sets if ablated and n_random else ()
        with tqdm(
            total=len(ablated) * (1 + len(random) + len(controls)),
            desc=relation.name,
            unit="step",
            disable=None if settings.progress else True,
        ) as bar:
            curve = self._curve(questions, ablated, bar.update)
            random_curves = tuple(self._curve(questions, drawn, bar.update) for drawn in random)
            control_curves = tuple(
                Control(
                    relation=other.relation.name,
                    template=other.template,
                    n_pairs=len(other.prompts),
                    overlap=shared,
                    curve=self._curve(other, ablated, bar.update),
                )
                for other, shared in controls
            )
        options = {name: value for name, value in vars(settings).items() if name != "progress"}
        options |= {"max_heads": max_heads, "n_random": n_random}
        options["heads"] = "top" if heads is None else [str(head) for head in heads]
        options["controls"] = [other.name for other in candidates] if all_candidates else "auto"
        data = {other.name: other.digest for other in (relation, *(control.relation for control, _ in controls))}
        return AblationCurves(
            relation=relation.name,
            template=questions.template,
            status="tested" if ablated else ("no heads" if testable else "not testable"),
            heads=tuple(ablated),
            scores=tuple(scores),
            n_pairs=len(questions.prompts),
            curve=curve,
            random_heads=tuple(tuple(drawn) for drawn in random),
            random_curves=random_curves,
            controls=control_curves,
            provenance=weights.provenance(runs_model=True, options=options, data=data, seed=0 if random else None),
        )

    def _static(
        self,
        relations: Sequence[Relation],
        heads: Sequence[HeadIndex] | None,
        known: Mapping[str, Tensor] | None,
    ) -> dict[str, Tensor]:
        """Static promotion scores [layer, head] of relations; NaN for other heads than those given."""
        tables = {relation.name: known[relation.name] for relation in relations if known and relation.name in known}
        missing = [relation for relation in relations if relation.name not in tables]
        if missing:
            settings = self.settings
            scored = relation_scores(
                self.weights,
                missing,
                preset=settings.preset,
                k=settings.k,
                heads=heads,
                multi_token=settings.multi_token,
                prompts=settings.prompts,
                prepend_bos=settings.prepend_bos if settings.preset == "met" else None,
                progress=settings.progress,
            )
            tables.update(zip(scored.relations, scored.promote, strict=True))
        return tables

    def _controls(
        self,
        questions: Questions,
        ablated: Sequence[HeadIndex],
        candidates: Sequence[Relation],
        all_candidates: bool,
        static: Mapping[str, Tensor] | None,
    ) -> list[tuple[Questions, float]]:
        """Control relations with the share of the ablated heads that are theirs too, smallest share first."""
        usable = [other for other in candidates if all_candidates or other.eliciting_templates]
        shared = {
            name: overlap(ablated, {head for head in ablated if table[head.layer, head.head] > 0})
            for name, table in self._static(usable, ablated, static).items()
        }
        if not all_candidates:
            usable = [other for other in usable if shared[other.name] < MOST_OVERLAP]
            usable.sort(key=lambda other: shared[other.name])
        chosen: list[tuple[Questions, float]] = []
        for other in usable:
            if not all_candidates and len(chosen) == MOST_CONTROLS:
                break
            asked = self.questions(other, eliciting_templates(other))
            if all_candidates or abs(asked.base_accuracy - questions.base_accuracy) <= MOST_DIFFERENCE:
                chosen.append((asked, shared[other.name]))
        return chosen

    def _curve(self, questions: Questions, heads: Sequence[HeadIndex], progress: Callable[[int], object]) -> Curve:
        """Accuracy after switching off no head, the first, the first two, ..."""
        means = self._means(questions, heads) if self.settings.method == "mean" else {}
        right = [questions.last.next_tokens() == questions.targets]
        for n in range(1, len(heads) + 1):
            change: dict[int, Change] = {
                layer: _off(numbers, means.get(layer)) for layer, numbers in grouped_by_layer(heads[:n]).items()
            }
            right.append(questions.last.next_tokens(change) == questions.targets)
            progress(1)
        steps = accuracy(torch.stack(right))
        return Curve(steps.value, steps.low, steps.high)

    def _means(self, questions: Questions, heads: Sequence[HeadIndex]) -> dict[int, Tensor]:
        """What the heads of a layer write at the last position on average, [head, d_head] by layer."""
        layers = sorted({head.layer for head in heads})
        totals = {layer: torch.zeros(self.weights.n_heads, self.weights.d_head) for layer in layers}

        def add(seen: LayerActivations) -> None:
            totals[seen.layer] += seen["z"][:, -1].float().sum(0).cpu()

        if layers:
            run(self.model, questions.prompts, read=("z",), layers=layers, reduce=add)
        return {layer: total / len(questions.prompts) for layer, total in totals.items()}


def _off(numbers: list[int], instead: Tensor | None) -> Change:
    """The change that switches off these heads of a layer."""

    def change(outputs: Tensor, rows: tuple[int, ...]) -> Tensor:
        return switched_off(outputs, numbers, instead)

    return change
