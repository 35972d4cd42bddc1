"""Heads switched off: does the model lose the relation its weights say they implement, and nothing else?"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.running.ablated import mean_outputs
from ..capture.running.activations import encode_prompt
from ..capture.running.last_position import LastPosition
from ..capture.running.prompts import check_templates, filled
from ..core.errors import UsageError
from ..core.options import Between, Count, public
from ..core.provenance import Provenance
from ..core.types import MOST_DRAWS, AblationMethod, HeadIndex, HeadLike, Model, Preset
from ..data.relations import MultiToken, Relation, RelationLike, load_relations, resolve, resolve_relations
from ..renderers.charts import Line
from ..renderers.charts import curve as line_chart
from ..renderers.figure import Figure
from ..renderers.listing import text_figure
from ..renderers.text import in_words, interval, number, percent, table_text, visible, wrapped
from ..results import Result
from ..results.codec import annotations_of, fields_of, plain, tensor_of, typed
from ..results.table import frozen_result
from ..scorers.ablation import accuracy, answered, default_max_heads, masks_of, overlap, top_heads
from ..scorers.statistics import MatchedSets, disjoint_sets, halves_of, matched_sets, pair_clusters, rank_p_value
from .relation_scores import RelationScores, relation_scores
from .study import Study

if TYPE_CHECKING:
    from typing import Self

Status: TypeAlias = Literal["tested", "not testable", "no heads"]

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

_PARTS = {
    "accuracy": "accuracy",
    "accuracy_low": "low",
    "accuracy_high": "high",
    "logit_difference": "logit_difference",
}
"""Names in JSON of what a curve has."""
_OF_CONTROLS = ("template", "n_pairs", "overlap")
"""What JSON says of a control beside its curve."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Answers after switching off 0, 1, 2, ... heads.

    Attributes:
        accuracy: Share of right answers.
        low, high: Its 95% interval at each step, over clusters of pairs.
        logit_difference: Mean over pairs of the right answer's logit minus the mean logit of the relation's other
            answers; NaN if it has no others.
    """

    accuracy: Float[Tensor, " step"]
    low: Float[Tensor, " step"]
    high: Float[Tensor, " step"]
    logit_difference: Float[Tensor, " step"]

    @property
    def drop(self) -> float:
        """Share of the accuracy lost at the end (NaN if there was none to lose)."""
        first, last = float(self.accuracy[0]), float(self.accuracy[-1])
        return (first - last) / first if first > 0 else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Its fields under their names in JSON."""
        return {name: plain(getattr(self, part), nullable=True) for name, part in _PARTS.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], prefix: str = "", key: Any = None) -> "Curve":
        """Inverse of :meth:`to_dict`; behind a prefix, one of several by its key."""
        parts = (values[f"{prefix}{name}"] for name in _PARTS)
        return cls(*(tensor_of(part if key is None else part[key]) for part in parts))


@dataclass(frozen=True, eq=False)
class Verdict:
    """The first heads of an ablation among other sets of as many heads.

    Attributes:
        n_heads: Heads switched off: those that implement the relation.
        p_value: Share of the sets, this one counted, that leave as little accuracy or less.
        accuracy, logit_difference: With these heads switched off.
        sets: The sets it is compared with: as many heads of each layer, and at least one head that is another.
        set_accuracy, set_logit_difference: With each of them switched off.
        exact: Whether these are all such sets.
        pooled: Heads whose layer had too few others, so that heads of neighbouring layers stand in for it.
    """

    n_heads: int
    p_value: float
    accuracy: float
    logit_difference: float
    sets: tuple[tuple[HeadIndex, ...], ...]
    set_accuracy: Float[Tensor, " set"]
    set_logit_difference: Float[Tensor, " set"]
    exact: bool
    pooled: tuple[HeadIndex, ...]

    @property
    def range(self) -> tuple[float, float]:
        """Between which accuracies 95% of the sets leave the model."""
        low, high = self.set_accuracy.quantile(torch.tensor([0.025, 0.975])).tolist()
        return low, high

    @property
    def compared_with(self) -> str:
        """The sets, in words."""
        pooled = sorted({head.layer for head in self.pooled})
        layers = f"; and of layers near {', '.join(map(str, pooled))}, which alone have too few" if pooled else ""
        which = "all there are" if self.exact else "drawn at random"
        return f"{len(self.sets)} other sets of as many heads of the same layers ({which}{layers})"


@dataclass(frozen=True, eq=False)
class Control:
    """Another relation under the same ablation.

    Attributes:
        relation: Its name.
        template: The prompts it was asked with.
        n_pairs: Number of its pairs.
        overlap: Share of the ablated heads that score above 0 on this relation too.
        curve: Its accuracy.
    """

    relation: str
    template: str
    n_pairs: int
    overlap: float
    curve: Curve


@frozen_result
class AblationCurves(Result):
    """Accuracy on a relation while heads are switched off, compared with other heads and with other relations.

    The verdict is the test; the curves describe.

    Attributes:
        relation: Name of the relation.
        template: The prompts, with ``<X>`` in place of the source.
        status: ``"tested"``; ``"not testable"`` when the model knows too little of the relation to lose it (base
            accuracy below 0.1, so nothing was switched off); ``"no heads"`` when no head scores above 0.
        heads: The heads in the order of ablation.
        scores: Their static scores on the relation.
        n_pairs: Number of pairs the model was asked.
        n_clusters: Clusters of those pairs: pairs that share a target, or the beginning of their sources, are one.
        n_chosen_on: Number of pairs the heads were chosen on: the same ones, or with ``split`` none of them.
        n_verdict: Number of heads the verdict is about: those that implement the relation, or all of ``heads`` if they
            were given; 0 if none implements it.
        verdict: The first ``n_verdict`` heads among other sets of as many; None without such heads or sets.
        curve: Answers on the relation.
        random_heads: The heads switched off instead, for each of a few random draws: as many of each layer (of the
            nearest one where a layer has too few), never one of ``heads``.
        random_curves: Answers on the relation with those heads switched off.
        controls: Other relations while ``heads`` are switched off.

    Example:
        >>> from tl_headmaps import Relation, ablate, load_default_model
        >>> pairs = [("France", "Paris"), ("Germany", "Berlin"), ("Japan", "Tokyo")]
        >>> capitals = Relation.from_pairs("capitals", pairs, eliciting_templates=("The capital of <X> is",))
        >>> curves = ablate(load_default_model(), capitals, "L23H4", controls=None, n_random=1, progress=False)
        >>> curves.status, [str(head) for head in curves.heads], round(curves.base_accuracy, 2)
        ('tested', ['L23H4'], 1.0)
        >>> list(curves.to_pandas().columns)[2:]
        ['n_ablated', 'head', 'accuracy', 'accuracy_low', 'accuracy_high', 'logit_difference']
    """

    kind: ClassVar[str] = "ablation_curves"
    methods: ClassVar[tuple[str, ...]] = ("elhelo2024maps", "wilson1927probable")
    relation: str
    template: str
    status: Status
    heads: tuple[HeadIndex, ...]
    scores: tuple[float, ...]
    n_pairs: int
    n_clusters: int
    n_chosen_on: int
    n_verdict: int
    verdict: Verdict | None
    curve: Curve
    random_heads: tuple[tuple[HeadIndex, ...], ...]
    random_curves: tuple[Curve, ...]
    controls: tuple[Control, ...]
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, " step"]:
        """The accuracy on the relation."""
        return self.curve.accuracy

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Steps of the ablation, and draws of random heads."""
        return {"n_ablated": list(range(len(self.heads) + 1)), "seed": list(range(len(self.random_curves)))}

    @property
    def base_accuracy(self) -> float:
        """Accuracy of the unchanged model."""
        return float(self.curve.accuracy[0])

    @property
    def random_drop(self) -> float:
        """Mean share of the accuracy lost with random heads switched off (NaN without any)."""
        return _mean([curve.drop for curve in self.random_curves])

    @property
    def control_drop(self) -> float:
        """Mean share of the accuracy the control relations lose (NaN without any)."""
        return _mean([control.curve.drop for control in self.controls])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: curves part by part, under names of their own."""
        values = {"kind": self.kind} | self._plain("relation", "template", "status")
        values |= {"axes": self.axes} | self._plain("heads", "scores", "n_pairs", "n_clusters", "n_chosen_on")
        values |= {"n_ablated": list(range(len(self.curve.accuracy)))} | self.curve.to_dict()
        values |= self._plain("n_verdict", "verdict", "random_heads")
        controls = {control.relation: control for control in self.controls}
        others = [curve.to_dict() for curve in self.random_curves]
        for name in _PARTS:
            values[f"random_{name}"] = [curve[name] for curve in others]
            values[f"control_{name}"] = {one: control.curve.to_dict()[name] for one, control in controls.items()}
        values["controls"] = {
            name: {part: getattr(control, part) for part in _OF_CONTROLS} for name, control in controls.items()
        }
        return values | {"provenance": self.provenance.to_dict()}

    def _plain(self, *names: str) -> dict[str, Any]:
        return {name: plain(getattr(self, name), nullable=True) for name in names}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        controls = tuple(
            Control(
                name, entry["template"], entry["n_pairs"], entry["overlap"], Curve.from_dict(values, "control_", name)
            )
            for name, entry in values["controls"].items()
        )
        random = tuple(Curve.from_dict(values, "random_", at) for at in range(len(values["random_accuracy"])))
        made: dict[str, Any] = {"curve": Curve.from_dict(values), "random_curves": random, "controls": controls}
        hints, names = annotations_of(cls), (entry.name for entry in fields_of(cls))
        return cls(**made, **{name: typed(values[name], hints[name]) for name in names if name not in made})

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per curve and step; ``curve`` says whose."""
        named = [("relation", self.relation, self.heads, self.curve)]
        named += [
            (f"random {seed}", self.relation, heads, curve)
            for seed, (heads, curve) in enumerate(zip(self.random_heads, self.random_curves, strict=True))
        ]
        named += [("control", control.relation, self.heads, control.curve) for control in self.controls]
        for name, relation, heads, curve in named:
            for step in range(len(curve.accuracy)):
                yield {
                    "curve": name,
                    "relation": relation,
                    "n_ablated": step,
                    "head": str(heads[step - 1]) if step else "",
                    "accuracy": float(curve.accuracy[step]),
                    "accuracy_low": float(curve.low[step]),
                    "accuracy_high": float(curve.high[step]),
                    "logit_difference": float(curve.logit_difference[step]),
                }

    def top(self, n: int = 5) -> list[tuple[HeadIndex, float]]:
        """The first ``n`` heads that were switched off, with their static scores."""
        return list(zip(self.heads, self.scores, strict=True))[:n]

    def figure(self) -> Figure:
        """Accuracy with its 95% interval, a few draws of random heads, control relations, and where the verdict is."""
        title = f"Ablating the heads of {in_words(self.relation)}"
        if not self.heads:
            return text_figure(str(self), title=title)
        lines = [Line("its heads", self.curve.accuracy, self.curve.low, self.curve.high)]
        if self.random_curves:
            drawn = torch.stack([one.accuracy for one in self.random_curves])
            label = f"random heads, {len(drawn)} draws: mean and range" if len(drawn) > 1 else "random heads, one draw"
            lines.append(Line(label, drawn.mean(0), drawn.amin(0), drawn.amax(0)))
        for control in self.controls:
            label = f"control {control.relation}, same heads"
            lines.append(Line(label, control.curve.accuracy, control.curve.low, control.curve.high))
        if self.verdict is not None and self.verdict.sets:
            label = f"{len(self.verdict.sets)} sets of {self.n_verdict}: 95% of them, p = {self.verdict.p_value:.3f}"
            lines.append(Line(label, self.verdict.range, x=[self.n_verdict] * 2))
        order = " ".join(map(str, self.heads[:12])) + (" ..." if len(self.heads) > 12 else "")
        return line_chart(
            list(range(len(self.heads) + 1)),
            lines,
            title=title,
            x_name="heads switched off",
            y_name="accuracy of the next token",
            y_limits=(0.0, 1.0),
            note=f"{' '.join(self._judged())} Prompt: {self.template}. {self._pairs}. Order: {order}. Random heads are "
            "of the same layers and none of these; bands of relations are 95% intervals over clusters of pairs.",
        )

    def __str__(self) -> str:
        return self.table()

    def table(self, *, full: bool = False) -> str:
        """Accuracy step by step, of the relation and with random heads off, and the verdict.

        Args:
            full: Also static scores, logit differences, and the accuracy on control relations.
        """
        options = self.provenance.options
        title = (
            f"{self.relation}: {visible(self.template)!r}, heads by preset {options['preset']}, {options['method']} "
            f"ablation, {self._pairs}"
        )
        base = f"accuracy {self.base_accuracy:.2f} before"
        if self.status == "not testable":
            reason = "below 0.1; the model does not know enough of this relation to lose it"
            return f"{title}\n\nnot testable: {base}, {reason}"
        if self.status == "no heads":
            return f"{title}\n\nno head scores above 0 on this relation, so there is nothing to ablate ({base})"
        rows = [self._texts(step) for step in range(len(self.curve.accuracy))]
        short = ["off", "head", "accuracy", "95%", "random"]
        shown = list(rows[0]) if full else short
        columns = [(name, "left" if name == "head" else "right") for name in shown]
        lost = f"relative drop: relation {percent(self.curve.drop)}, random heads {percent(self.random_drop)}"
        if self.controls:
            lost += f", control relations {percent(self.control_drop)}"
        elif options.get("controls") == "auto":
            lost += "; no relation with other heads has a similar accuracy, so there is no control"
        note = (
            "off: heads switched off so far at the last position; 95%: over clusters of pairs; random: other heads of "
            f"the same layers, range over {len(self.random_curves)} draws; sets of the verdict may share heads with it"
        )
        if full:
            note += "; logits: the right answer's above the relation's other answers, mean"
        table = table_text(columns, [[row[name] for name in shown] for row in rows])
        return "\n\n".join([title, table, "\n".join(self._judged()), lost, wrapped(note)])

    @property
    def _pairs(self) -> str:
        chosen = f", heads chosen on {self.n_chosen_on} others" if self.provenance.options.get("split") else ""
        return f"{self.n_pairs} pairs in {self.n_clusters} clusters{chosen}"

    def _judged(self) -> list[str]:
        """The verdict, or why there is none."""
        verdict = self.verdict
        if verdict is None and not self.n_verdict:
            return ["No verdict: no head implements the relation (a score of 0.15 or more that beats its null)."]
        if verdict is None:
            return ["No verdict: no other heads were switched off to compare with."]
        if not verdict.sets:
            return ["No verdict: these are all heads there are, so there is nothing to compare them with."]
        heads = "its head" if self.n_verdict == 1 else f"its {self.n_verdict} heads"
        own, others = verdict.logit_difference, float(verdict.set_logit_difference.mean())
        return [
            f"Verdict, with {heads} off: accuracy {self.base_accuracy:.2f} → {verdict.accuracy:.2f}, logits "
            f"{number(float(self.curve.logit_difference[0]), 1)} → {number(own, 1)}.",
            f"The {verdict.compared_with}: accuracy {float(verdict.set_accuracy.mean()):.2f} "
            f"(95% of them {interval(*verdict.range)}), logits {number(others, 1)}.",
            f"p = {verdict.p_value:.3f}: rank {round(verdict.p_value * (len(verdict.sets) + 1))} of "
            f"{len(verdict.sets) + 1} by accuracy; the smallest p there could be is {1 / (len(verdict.sets) + 1):.3f}.",
        ]

    def _texts(self, step: int) -> dict[str, object]:
        """What is printed of a step, by column."""
        at = {name: float(getattr(self.curve, name)[step]) for name in _PARTS.values()}
        drawn = [float(curve.accuracy[step]) for curve in self.random_curves]
        controls = {control.relation: number(float(control.curve.accuracy[step])) for control in self.controls}
        return {
            "off": step,
            "head": self.heads[step - 1] if step else "",
            "score": number(self.scores[step - 1]) if step else "",
            "accuracy": number(at["accuracy"]),
            "95%": interval(at["low"], at["high"]),
            "logits": number(at["logit_difference"], 1),
            "random": interval(min(drawn), max(drawn)) if drawn else "-",
            **controls,
        }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


@public
def ablate(
    model: Model,
    relation: RelationLike,
    heads: HeadLike | Iterable[HeadLike] | Literal["top"] = "top",
    *,
    max_heads: Count | None = None,
    template: str | None = None,
    controls: RelationLike | Sequence[RelationLike] | Literal["auto"] | None = "auto",
    n_random: Annotated[int, Between(0, MOST_DRAWS)] = 99,
    split: bool = False,
    method: AblationMethod = "zero",
    preset: Preset | None = None,
    k: Count | None = None,
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
        relation: A bundled name, a file, or a :class:`Relation`.
        heads: ``"top"``: the heads with the highest static scores above 0. Or heads of your own, switched off in the
            order given.
        max_heads: Switch off at most this many heads; by default 30, 50, 100, 150 or 250, by the size of the model.
        template: Prompt whose next word is the target, with ``<X>`` in place of the source; by default the one of the
            relation's eliciting templates that the model answers best.
        controls: Other relations to test while the same heads are off. ``"auto"`` takes the first three bundled ones
            with fewer than 0.15 of the ablated heads scoring above 0 on 20 of its pairs, and an accuracy within 0.2 of
            the relation's; None (``--controls none``) takes no controls.
        n_random: Number of sets the verdict compares with: as many heads of each layer, drawn at random (all of them
            where there are no more). The first five draws without any of the ablated heads are followed step by step.
        split: Choose the heads on one half of the pairs and test them on the other; pairs that share a target or the
            beginning of their sources stay together.
        method: ``"zero"``, or ``"mean"``: what the head writes on average over the same prompts in a clean run.
        preset: Preset of the static scores that rank the heads; default: ``"context"``.
        k: k of the static scores; by default the relation's own.
        prompts: With ``preset="context"``: prefixes of static scores; by default eight neutral ones.
        prepend_bos: Begin each prompt with BOS; by default as the model does (never with ``preset="maps"``).

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
    resolved = resolve(relation, data_dir)
    templates = eliciting_templates(resolved, template)
    choose = isinstance(controls, str) and controls == "auto"
    given_controls = None if choose else resolve_relations(controls, data_dir) if controls else []
    study = Study(model, prepend_bos=prepend_bos, by_heads=False, fills_prompts=True, preset=preset, progress=progress)
    weights = study.weights
    if method == "zero":
        weights.require_own_values("switching off a head", ", or use method='mean' (command line: --method mean)")
    ablation = Ablation(study, method=method, k=k, multi_token=multi_token, prompts=prompts)
    chosen_on, tested_on = ablation.halves(resolved) if split else (resolved, resolved)
    questions = ablation.questions(tested_on, templates)
    ranked = None if isinstance(heads, str) and heads == "top" else weights.named_heads(heads)
    if ranked is not None and not ranked:
        raise UsageError("heads= is empty. Name at least one head, or leave it out for the top heads.")
    candidates = load_relations(model=weights, data_dir=data_dir) if given_controls is None else given_controls
    return ablation.curves(
        questions,
        chosen_on=chosen_on,
        heads=ranked,
        max_heads=max_heads,
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


class Ablation:
    """Ablations of several relations in one model; what they share is computed once."""

    def __init__(
        self,
        study: Study,
        *,
        method: AblationMethod = "zero",
        k: int | None = None,
        multi_token: MultiToken = "skip",
        prompts: str | Sequence[str] | None = None,
    ) -> None:
        self.study, self.method, self.k, self.multi_token = study, method, k, multi_token
        self.prompts = None if prompts is None else [prompts] if isinstance(prompts, str) else list(prompts)
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
        encoded, _ = self.study.encoded(relation, self.k, self.multi_token)
        sources = [relation.pairs[place][0] for place in encoded.kept]
        texts = [filled(template, source, self.study.weights.tokenizer)[0] for source in sources]
        prompts = tuple(tuple(encode_prompt(self.study.model, text, self.study.prepend_bos)) for text in texts)
        targets = torch.tensor(encoded.target_ids)
        different = targets.unique()

        def measure(logits: Tensor, rows: Tensor) -> Tensor:
            return answered(logits, targets[rows].to(logits.device), different.to(logits.device))

        last = LastPosition(self.study.model, prompts, measure)
        clusters = pair_clusters([str(source) for source in sources], encoded.target_ids)
        self._recent[key] = Questions(relation, template, prompts, clusters, last)
        if len(self._recent) > _MOST_KEPT:
            self._recent.popitem(last=False)
        return self._recent[key]

    def halves(self, relation: Relation) -> tuple[Relation, Relation]:
        """A relation with half of its pairs, to choose heads on, and with the others, to test them on."""
        encoded, _ = self.study.encoded(relation, self.k, self.multi_token)
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
        heads: Sequence[HeadIndex] | None = None,
        max_heads: int | None = None,
        candidates: Sequence[Relation] = (),
        all_candidates: bool = False,
        n_random: int,
        static: Mapping[str, Tensor] | None = None,
    ) -> AblationCurves:
        """The ablation of one relation.

        Args:
            questions: The relation's questions.
            chosen_on: The relation with the pairs its heads are chosen on.
            heads: Heads in the order of ablation; by static score if None.
            max_heads: Switch off at most this many; by default by the size of the model.
            candidates: Relations to choose controls from.
            all_candidates: Take all candidates as controls.
            n_random: Number of sets of heads to compare with.
            static: Static scores [layer, head] of candidates, where they are known already.
        """
        study, relation = self.study, questions.relation
        max_heads = default_max_heads(study.weights.n_all_heads) if max_heads is None else max_heads
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
        everything = study.weights.chosen_heads()
        n_curves = min(n_random, CURVES_OF_OTHERS)
        random = disjoint_sets(ablated, everything, n_curves).sets if ablated and n_random else ()
        rivals = matched_sets(ablated[:n_verdict], everything, n_random) if n_verdict and n_random else None
        total = len(ablated) * (1 + len(random) + len(controls)) + (len(rivals.sets) if rivals else 0)
        with study.bar(f"ablation of {relation.name}", "set", total) as bar:
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
        options = {
            "method": self.method,
            "preset": study.preset,
            "k": self.k,
            "multi_token": self.multi_token,
            "prepend_bos": study.prepend_bos,
            "prompts": self.prompts,
            "max_heads": max_heads,
            "n_random": n_random,
            "split": chosen_on is not relation,
            "heads": "top" if heads is None else [str(head) for head in heads],
            "controls": [other.name for other in candidates] if all_candidates else "auto",
        }
        data = {other.name: other.digest for other in (relation, *(control.relation for control, _ in controls))}
        seed = 0 if random else None
        return AblationCurves(
            relation=relation.name,
            template=questions.template,
            status="tested" if ablated else ("no heads" if testable else "not testable"),
            heads=tuple(ablated),
            scores=tuple(scores),
            n_pairs=len(questions.prompts),
            n_clusters=int(questions.clusters.max()) + 1,
            n_chosen_on=len(self.study.encoded(chosen_on, self.k, self.multi_token)[0].kept),
            n_verdict=n_verdict,
            verdict=verdict,
            curve=curve,
            random_heads=random,
            random_curves=tuple(random_curves),
            controls=control_curves,
            provenance=study.weights.provenance(runs_model=True, options=options, data=data, seed=seed),
        )

    def _scores(self, relations: Sequence[Relation], heads: Sequence[HeadIndex] | None) -> RelationScores:
        """Static scores of relations, of all heads or of those given."""
        study = self.study
        return relation_scores(
            study.weights,
            relations,
            preset=study.preset,
            k=self.k,
            heads=heads,
            multi_token=self.multi_token,
            prompts=self.prompts,
            prepend_bos=study.prepend_bos if study.preset == "context" else None,
            progress=study.progress,
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
        kept = self.study.encoded(relation, self.k, self.multi_token)[0].kept
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
            known = self.questions(other, eliciting_templates(other))
            if all_candidates or abs(known.base_accuracy - questions.base_accuracy) <= MOST_DIFFERENCE:
                chosen.append((known, shared))
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
        off = masks_of(sets, self.study.weights.n_layers, self.study.weights.n_heads)
        layers = off.any(0).any(-1).nonzero()[:, 0].tolist()
        means = mean_outputs(self.study.model, questions.prompts, layers, last=1) if self.method == "mean" else None
        return questions.last.switched_off(off, means, progress)
