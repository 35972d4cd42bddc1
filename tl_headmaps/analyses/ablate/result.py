"""How accurate a model remains while the heads of a relation are switched off one by one."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.provenance import Provenance
from ...core.types import HeadIndex
from ...renderers.charts import Line
from ...renderers.charts import curve as line_chart
from ...renderers.figure import Figure
from ...renderers.listing import text_figure
from ...renderers.text import in_words, interval, number, percent, table_text, visible
from ...results import Result, nested, tensor_of

if TYPE_CHECKING:
    from typing import Self

Status: TypeAlias = Literal["tested", "not testable", "no heads"]

_PARTS = {
    "accuracy": "accuracy",
    "accuracy_low": "low",
    "accuracy_high": "high",
    "logit_difference": "logit_difference",
}
"""Names in JSON of what a curve has."""


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

    def to_dict(self, prefix: str = "") -> dict[str, Any]:
        """Its fields under their names in JSON."""
        return {f"{prefix}{name}": nested(getattr(self, part)) for name, part in _PARTS.items()}

    @classmethod
    def from_parts(cls, parts: Iterable[Any]) -> "Curve":
        """From lists in the order of JSON."""
        return cls(*map(tensor_of, parts))


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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "n_heads": self.n_heads,
            "p_value": _or_none(self.p_value),
            "accuracy": self.accuracy,
            "logit_difference": _or_none(self.logit_difference),
            "sets": [[str(head) for head in heads] for heads in self.sets],
            "set_accuracy": self.set_accuracy.tolist(),
            "set_logit_difference": nested(self.set_logit_difference),
            "exact": self.exact,
            "pooled": [str(head) for head in self.pooled],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Verdict":
        """Inverse of :meth:`to_dict`."""
        return cls(
            n_heads=values["n_heads"],
            p_value=_or_nan(values["p_value"]),
            accuracy=values["accuracy"],
            logit_difference=_or_nan(values["logit_difference"]),
            sets=tuple(tuple(map(HeadIndex.parse, heads)) for heads in values["sets"]),
            set_accuracy=tensor_of(values["set_accuracy"]),
            set_logit_difference=tensor_of(values["set_logit_difference"]),
            exact=values["exact"],
            pooled=tuple(map(HeadIndex.parse, values["pooled"])),
        )

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


@dataclass(frozen=True, eq=False, repr=False)
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
        """Plain values for JSON."""
        result: dict[str, Any] = {
            "kind": self.kind,
            "relation": self.relation,
            "template": self.template,
            "status": self.status,
            "axes": self.axes,
            "heads": [str(head) for head in self.heads],
            "scores": list(self.scores),
            "n_pairs": self.n_pairs,
            "n_clusters": self.n_clusters,
            "n_chosen_on": self.n_chosen_on,
            "n_ablated": list(range(len(self.curve.accuracy))),
            **self.curve.to_dict(),
            "n_verdict": self.n_verdict,
            "verdict": None if self.verdict is None else self.verdict.to_dict(),
            "random_heads": [[str(head) for head in heads] for heads in self.random_heads],
        }
        for name, part in _PARTS.items():
            result[f"random_{name}"] = [nested(getattr(curve, part)) for curve in self.random_curves]
            named = {control.relation: nested(getattr(control.curve, part)) for control in self.controls}
            result[f"control_{name}"] = named
        result["controls"] = {
            control.relation: {
                "template": control.template,
                "n_pairs": control.n_pairs,
                "overlap": control.overlap,
            }
            for control in self.controls
        }
        result["provenance"] = self.provenance.to_dict()
        return result

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        controls = tuple(
            Control(
                relation=name,
                template=entry["template"],
                n_pairs=entry["n_pairs"],
                overlap=entry["overlap"],
                curve=Curve.from_parts(values[f"control_{part}"][name] for part in _PARTS),
            )
            for name, entry in values["controls"].items()
        )
        random = zip(*(values[f"random_{part}"] for part in _PARTS), strict=True)
        return cls(
            relation=values["relation"],
            template=values["template"],
            status=values["status"],
            heads=tuple(HeadIndex.parse(head) for head in values["heads"]),
            scores=tuple(values["scores"]),
            n_pairs=values["n_pairs"],
            n_clusters=values["n_clusters"],
            n_chosen_on=values["n_chosen_on"],
            n_verdict=values["n_verdict"],
            verdict=None if values["verdict"] is None else Verdict.from_dict(values["verdict"]),
            curve=Curve.from_parts(values[part] for part in _PARTS),
            random_heads=tuple(tuple(HeadIndex.parse(head) for head in heads) for heads in values["random_heads"]),
            random_curves=tuple(map(Curve.from_parts, random)),
            controls=controls,
            provenance=Provenance.from_dict(values["provenance"]),
        )

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
        """Accuracy step by step: the relation, random heads, other relations."""
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
        titles = ["off", "head", "score", "accuracy", "95%", "logits", f"{len(self.random_curves)} random"]
        titles += [control.relation for control in self.controls]
        columns = [(title, "left" if title == "head" else "right") for title in titles]
        rows = [self._text_row(step) for step in range(len(self.curve.accuracy))]
        lost = f"relative drop: relation {percent(self.curve.drop)}, random heads {percent(self.random_drop)}"
        if self.controls:
            lost += f", control relations {percent(self.control_drop)}"
        elif options.get("controls") == "auto":
            lost += "; no relation with other heads has a similar accuracy, so there is no control"
        note = (
            "off: heads switched off so far at the last position; 95%: over clusters of pairs; logits: the right\n"
            "answer's above the relation's other answers, mean; random: other heads of the same layers, range over\n"
            "draws; sets of the verdict may share heads with it"
        )
        judged = "\n".join(self._judged())
        return f"{title}\n\n{table_text(columns, rows)}\n\n{judged}\n\n{lost}\n{note}"

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

    def _text_row(self, step: int) -> list[object]:
        row: list[object] = [step, "", ""]
        if step:
            row[1:] = [self.heads[step - 1], number(self.scores[step - 1])]
        at = [float(part[step]) for part in (self.curve.accuracy, self.curve.low, self.curve.high)]
        row += [number(at[0]), interval(at[1], at[2]), number(float(self.curve.logit_difference[step]), 1)]
        drawn = [float(curve.accuracy[step]) for curve in self.random_curves]
        row.append(interval(min(drawn), max(drawn)) if drawn else "-")
        return row + [number(float(control.curve.accuracy[step])) for control in self.controls]


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
