"""Heads switched off: does the model lose the relation its weights say they implement, and nothing else?"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...capture.running.ablated import mean_outputs
from ...capture.running.activations import encode_prompt
from ...capture.running.last_position import LastPosition
from ...capture.running.prompts import check_templates, filled
from ...capture.weights import HeadWeights
from ...core.ambient import steady
from ...core.errors import UsageError
from ...core.progress import Progress
from ...core.types import MOST_DRAWS, AblationMethod, HeadIndex, HeadLike, Model, Preset, check_choice, check_count
from ...data.relations import (
    Encoded,
    MultiToken,
    Relation,
    RelationLike,
    encode,
    load_relations,
    resolve,
    resolve_relations,
)
from ...scorers.ablation import accuracy, answered, default_max_heads, masks_of, overlap, top_heads
from ...scorers.statistics import MatchedSets, halves_of, matched_sets, pair_clusters, rank_p_value, sets_like
from ..relation_scores import RelationScores, relation_scores
from ..study import Study
from .result import AblationCurves, Control, Curve, Verdict

TESTABLE = 0.1
"""Base accuracy below which there is nothing to lose."""

MOST_OVERLAP = 0.15
"""A control shares less than this part of the ablated heads."""

MOST_DIFFERENCE = 0.2
"""Largest difference between the base accuracy of a control and of the relation."""

MOST_CONTROLS = 3

CONTROL_PAIRS = 20
"""Pairs of a relation that tell whether it shares heads: a large model reads hundreds of tokens a minute."""

CONTROLS_AT_A_TIME = 6
"""Relations tried as controls together: the model runs once for all of them, and not for those after the last."""

CURVES_OF_OTHERS = 5
"""Draws of other heads that are followed step by step, as in the published experiment."""

LEAST_CLUSTERS = 4
"""Clusters of pairs that can be halved."""

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
    n_random: int = 99,
    split: bool = False,
    method: AblationMethod = "zero",
    preset: Preset | None = None,
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

    There is one verdict: with as many heads off as implement the relation (all of them, if you name the heads), which
    is known before anything is switched off. Its p-value is the rank of these heads among other sets with as many heads
    of each layer. The heads were found with the pairs they are tested on, unless ``split=True``.

    Args:
        model: A TransformerBridge or HookedTransformer.
        relation: A bundled name, a file, or a :class:`Relation`.
        heads: ``"top"``: the heads with the highest static scores above 0. Or heads of your own, switched off in the
            order given.
        max_heads: Switch off at most this many heads; by default 30, 50, 100, 150 or 250, by the size of the model.
        template: Prompt whose next word is the target, with ``<X>`` in place of the source; by default the one of the
            relation's eliciting templates that the model answers best.
        controls: Other relations to test while the same heads are off. ``"auto"`` takes the first three bundled ones
            with fewer than 0.15 of the ablated heads scoring above 0 on 20 of its pairs, and an accuracy within 0.2 of
            the relation's.
        n_random: Number of sets the verdict compares with: as many heads of each layer, drawn at random (all of them
            where there are no more). The first five draws without any of the ablated heads are followed step by step.
        split: Choose the heads on one half of the pairs and test them on the other; pairs that share a target or the
            beginning of their sources stay together.
        method: ``"zero"``, or ``"mean"``: what the head writes on average over the same prompts in a clean run.
        preset: Preset of the static scores that rank the heads; default: ``"context"``.
        k: k of the static scores; by default the relation's own.
        multi_token: ``"skip"`` leaves out targets of several tokens, ``"first"`` takes their first token.
        prompts: With ``preset="context"``: prefixes of static scores; by default eight neutral ones.
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
        >>> curves = ablate(model, capitals, heads, controls=None, progress=False)
        >>> [round(accuracy, 2) for accuracy in curves.values.tolist()]  # with 0 to 3 heads switched off
        [0.8, 1.0, 0.6, 0.4]
        >>> len(curves.verdict.sets), curves.verdict.exact  # all other threes of the nine heads of layer 23
        (83, True)
    """
    check_choice(method, AblationMethod, "method")
    check_choice(multi_token, MultiToken, "multi_token")
    check_count("max_heads", max_heads)
    check_count("n_random", n_random, 0, MOST_DRAWS)
    resolved = resolve(relation, data_dir)
    templates = eliciting_templates(resolved, template)
    choose = isinstance(controls, str) and controls == "auto"
    given_controls = None if choose else resolve_relations(controls, data_dir) if controls else []
    study = Study(model, prepend_bos=prepend_bos, by_heads=False, fills_prompts=True, preset=preset, progress=progress)
    weights, preset = study.weights, study.preset
    if method == "zero":
        weights.require_own_values("switching off a head", ", or use method='mean' (command line: --method mean)")
    listed = None if prompts is None else (prompts,) if isinstance(prompts, str) else tuple(prompts)
    settings = AblationSettings(method, preset, k, multi_token, study.prepend_bos, progress, listed)
    experiment = AblationExperiment(model, weights, settings)
    chosen_on, asked = experiment.halves(resolved) if split else (resolved, resolved)
    questions = experiment.questions(asked, templates)
    ranked = None if isinstance(heads, str) and heads == "top" else weights.named_heads(heads)
    if ranked is not None and not ranked:
        raise UsageError("heads= is empty. Name at least one head, or leave it out for the top heads.")
    candidates = load_relations(model=weights, data_dir=data_dir) if given_controls is None else given_controls
    return experiment.curves(
        questions,
        chosen_on=chosen_on,
        heads=ranked,
        max_heads=default_max_heads(weights.n_all_heads) if max_heads is None else max_heads,
        candidates=[other for other in candidates if other.name != resolved.name],
        all_candidates=given_controls is not None,
        n_random=n_random,
    )


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
    """A relation as questions to the model: prompts at their last position, and clusters of their pairs."""

    relation: Relation
    template: str
    prompts: tuple[tuple[int, ...], ...]
    clusters: Tensor
    last: LastPosition

    @property
    def base_accuracy(self) -> float:
        return float(self.last.clean[:, 0].mean())


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
        settings, encoded = self.settings, self._encoded(relation)
        sources = [relation.pairs[place][0] for place in encoded.kept]
        texts = [filled(template, source, self.weights.tokenizer)[0] for source in sources]
        prompts = tuple(tuple(encode_prompt(self.model, text, settings.prepend_bos)) for text in texts)
        targets = torch.tensor(encoded.target_ids)
        different = targets.unique()

        def measure(logits: Tensor, rows: Tensor) -> Tensor:
            return answered(logits, targets[rows].to(logits.device), different.to(logits.device))

        last = LastPosition(self.model, prompts, measure)
        clusters = pair_clusters([str(source) for source in sources], encoded.target_ids)
        self._recent[key] = Questions(relation, template, prompts, clusters, last)
        if len(self._recent) > _MOST_KEPT:
            self._recent.popitem(last=False)
        return self._recent[key]

    def _encoded(self, relation: Relation) -> Encoded:
        """The pairs of a relation that can be asked."""
        n_targets = self.weights.W_U.shape[0]
        encoded = encode(
            relation,
            self.weights.tokenizer,
            n_sources=self.weights.n_vocab,
            n_targets=n_targets,
            multi_token=self.settings.multi_token,
        )
        encoded.top_k(self.settings.k, n_targets)
        return encoded

    def halves(self, relation: Relation) -> tuple[Relation, Relation]:
        """A relation with half of its pairs, to choose heads on, and with the others, to test them on."""
        encoded = self._encoded(relation)
        pairs = [relation.pairs[place] for place in encoded.kept]
        clusters = pair_clusters([str(source) for source, _ in pairs], encoded.target_ids)
        n_clusters = int(clusters.max()) + 1
        if n_clusters < LEAST_CLUSTERS:
            raise UsageError(
                f"split=True needs at least {LEAST_CLUSTERS} clusters of pairs to halve, but {relation.name!r} has "
                f"{n_clusters}: pairs that share a target, or the beginning of their sources, are one. Leave split out."
            )
        first = halves_of(clusters)
        chosen, tested = (
            tuple(pair for pair, inside in zip(pairs, first.tolist(), strict=True) if inside is half)
            for half in (True, False)
        )
        return replace(relation, pairs=chosen), replace(relation, pairs=tested)

    def curves(
        self,
        questions: Questions,
        *,
        chosen_on: Relation,
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
            chosen_on: The relation with the pairs its heads are chosen on.
            heads: Heads in the order of ablation; by static score if None.
            max_heads: Switch off at most this many.
            candidates: Relations to choose controls from.
            all_candidates: Take all candidates as controls.
            n_random: Number of sets of heads to compare with.
            static: Static scores [layer, head] of candidates, where they are known already.
        """
        weights, settings, relation = self.weights, self.settings, questions.relation
        testable = questions.base_accuracy >= TESTABLE
        ablated: list[HeadIndex] = []
        scores: list[float] = []
        n_verdict = 0
        if testable:
            scored = self._scores([chosen_on], heads)
            table = scored.promote[0]
            ablated = top_heads(table, max_heads) if heads is None else list(heads)[:max_heads]
            scores = [float(table[head.layer, head.head]) for head in ablated]
            n_implementing = len(scored.implements()[relation.name])
            n_verdict = min(n_implementing, len(ablated)) if heads is None else len(ablated)
        controls: list[tuple[Questions, float]] = []
        if ablated:
            controls = self._controls(questions, ablated, candidates, all_candidates, static)
        everything = weights.chosen_heads()
        n_curves = min(n_random, CURVES_OF_OTHERS)
        random = matched_sets(ablated, everything, n_curves).sets if ablated and n_random else ()
        rivals = sets_like(ablated[:n_verdict], everything, n_random) if n_verdict and n_random else None
        with Progress(
            total=len(ablated) * (1 + len(random) + len(controls)) + (len(rivals.sets) if rivals else 0),
            desc=f"ablation of {relation.name}",
            unit="set",
            show=settings.progress,
        ) as bar:
            curve, *random_curves = self._curves(questions, [ablated, *random], bar.update)
            control_curves = tuple(
                Control(
                    relation=other.relation.name,
                    template=other.template,
                    n_pairs=len(other.prompts),
                    overlap=shared,
                    curve=self._curves(other, [ablated], bar.update)[0],
                )
                for other, shared in controls
            )
            verdict = self._verdict(questions, curve, n_verdict, rivals, bar.update) if rivals else None
        options = {name: value for name, value in vars(settings).items() if name != "progress"}
        options |= {"max_heads": max_heads, "n_random": n_random, "split": chosen_on is not relation}
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
            n_clusters=int(questions.clusters.max()) + 1,
            n_chosen_on=len(self._encoded(chosen_on).kept),
            n_verdict=n_verdict,
            verdict=verdict,
            curve=curve,
            random_heads=random,
            random_curves=tuple(random_curves),
            controls=control_curves,
            provenance=weights.provenance(runs_model=True, options=options, data=data, seed=0 if random else None),
        )

    def _scores(self, relations: Sequence[Relation], heads: Sequence[HeadIndex] | None) -> RelationScores:
        """Static scores of relations, of all heads or of those given."""
        settings = self.settings
        return relation_scores(
            self.weights,
            relations,
            preset=settings.preset,
            k=settings.k,
            heads=heads,
            multi_token=settings.multi_token,
            prompts=settings.prompts,
            prepend_bos=settings.prepend_bos if settings.preset == "context" else None,
            progress=settings.progress,
        )

    def _overlaps(
        self, others: Sequence[Relation], ablated: Sequence[HeadIndex], known: Mapping[str, Tensor] | None
    ) -> Iterator[tuple[Relation, float]]:
        """Each relation with the share of the ablated heads whose static score on it is above 0."""
        tables = dict(known or {})
        for start in range(0, len(others), CONTROLS_AT_A_TIME):
            some = others[start : start + CONTROLS_AT_A_TIME]
            missing = [self._sample(other) for other in some if other.name not in tables]
            if missing:
                scored = self._scores(missing, ablated)
                tables.update(zip(scored.relations, scored.promote, strict=True))
            for other in some:
                table = tables[other.name]
                yield other, overlap(ablated, {head for head in ablated if table[head.layer, head.head] > 0})

    def _sample(self, relation: Relation) -> Relation:
        """A relation with a few of the pairs that can be asked, from its beginning to its end."""
        kept = self._encoded(relation).kept
        n = min(CONTROL_PAIRS, len(kept))
        return replace(relation, pairs=tuple(relation.pairs[kept[place * len(kept) // n]] for place in range(n)))

    def _controls(
        self,
        questions: Questions,
        ablated: Sequence[HeadIndex],
        candidates: Sequence[Relation],
        all_candidates: bool,
        static: Mapping[str, Tensor] | None,
    ) -> list[tuple[Questions, float]]:
        """Control relations with the share of the ablated heads that are theirs too: all, or the first that fit."""
        chosen: list[tuple[Questions, float]] = []
        usable = [other for other in candidates if all_candidates or other.eliciting_templates]
        for other, shared in self._overlaps(usable, ablated, static):
            if not all_candidates and shared >= MOST_OVERLAP:
                continue
            asked = self.questions(other, eliciting_templates(other))
            if all_candidates or abs(asked.base_accuracy - questions.base_accuracy) <= MOST_DIFFERENCE:
                chosen.append((asked, shared))
            if not all_candidates and len(chosen) == MOST_CONTROLS:
                break
        return chosen

    def _curves(
        self, questions: Questions, orders: Sequence[Sequence[HeadIndex]], progress: Callable[[int], object]
    ) -> list[Curve]:
        """Answers after switching off no head, the first, the first two, ... of each list of heads."""
        steps = [heads[:n] for heads in orders for n in range(1, len(heads) + 1)]
        measured = self._measured(questions, steps, progress)
        curves, done = [], 0
        for heads in orders:
            one = torch.cat([questions.last.clean[None], measured[done : done + len(heads)]])
            done += len(heads)
            share, low, high = accuracy(one[..., 0] > 0, questions.clusters)
            curves.append(Curve(share, low, high, one[..., 1].mean(1).float()))
        return curves

    def _verdict(
        self,
        questions: Questions,
        curve: Curve,
        n_heads: int,
        rivals: MatchedSets,
        progress: Callable[[int], object],
    ) -> Verdict:
        """Where the first heads stand among other sets, by the accuracy each leaves."""
        measured = self._measured(questions, rivals.sets, progress).mean(1).float()
        own = float(curve.accuracy[n_heads])
        return Verdict(
            n_heads=n_heads,
            p_value=rank_p_value(own, measured[:, 0], "less"),
            accuracy=own,
            logit_difference=float(curve.logit_difference[n_heads]),
            sets=rivals.sets,
            set_accuracy=measured[:, 0],
            set_logit_difference=measured[:, 1],
            exact=rivals.exact,
            pooled=rivals.moved,
        )

    def _measured(
        self, questions: Questions, sets: Sequence[Sequence[HeadIndex]], progress: Callable[[int], object]
    ) -> Tensor:
        """Answers [set, pair, 2] with each set of heads switched off."""
        if not sets:
            return torch.empty(0, *questions.last.clean.shape, dtype=torch.float64)
        off = masks_of(sets, self.weights.n_layers, self.weights.n_heads)
        layers = off.any(0).any(-1).nonzero()[:, 0].tolist()
        means = mean_outputs(self.model, questions.prompts, layers, last=1) if self.settings.method == "mean" else None
        return questions.last.switched_off(off, means, progress)
