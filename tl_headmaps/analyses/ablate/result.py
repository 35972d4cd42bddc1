"""How accurate a model remains while the heads of a relation are switched off one by one."""

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
from ...renderers.text import interval, number, percent, table_text, visible
from ...results import Result

if TYPE_CHECKING:
    from typing import Self

Status: TypeAlias = Literal["tested", "not testable", "no heads"]

_ENDS = ("", "_low", "_high")


@dataclass(frozen=True, eq=False)
class Curve:
    """Accuracy after switching off 0, 1, 2, ... heads, with its 95% Wilson interval at each step."""

    accuracy: Float[Tensor, " step"]
    low: Float[Tensor, " step"]
    high: Float[Tensor, " step"]

    @property
    def drop(self) -> float:
        """Share of the accuracy lost at the end (NaN if there was none to lose)."""
        first, last = float(self.accuracy[0]), float(self.accuracy[-1])
        return (first - last) / first if first > 0 else float("nan")


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
    """Accuracy on a relation while heads are switched off, compared with random heads and with other relations.

    Attributes:
        relation: Name of the relation.
        template: The prompts, with ``<X>`` in place of the source.
        status: ``"tested"``; ``"not testable"`` when the model knows too little of the relation to lose it (base
            accuracy below 0.1, so nothing was switched off); ``"no heads"`` when no head scores above 0.
        heads: The heads in the order of ablation.
        scores: Their static scores on the relation.
        n_pairs: Number of pairs the model was asked.
        curve: Accuracy on the relation.
        random_heads: The heads switched off instead, for each random draw: as many of each layer (of the nearest one
            where a layer has too few), never one of ``heads``.
        random_curves: Accuracy on the relation with those heads switched off.
        controls: Other relations while ``heads`` are switched off.

    Example:
        >>> from tl_headmaps import Relation, ablate, load_default_model
        >>> pairs = [("France", "Paris"), ("Germany", "Berlin"), ("Japan", "Tokyo")]
        >>> capitals = Relation.from_pairs("capitals", pairs, eliciting_templates=("The capital of <X> is",))
        >>> curves = ablate(load_default_model(), capitals, "L23H4", controls=None, n_random=1, progress=False)
        >>> curves.status, [str(head) for head in curves.heads], round(curves.base_accuracy, 2)
        ('tested', ['L23H4'], 1.0)
        >>> list(curves.to_pandas().columns)
        ['curve', 'relation', 'n_ablated', 'head', 'accuracy', 'accuracy_low', 'accuracy_high']
    """

    kind: ClassVar[str] = "ablation_curves"
    methods: ClassVar[tuple[str, ...]] = ("elhelo2024maps", "wilson1927probable")
    relation: str
    template: str
    status: Status
    heads: tuple[HeadIndex, ...]
    scores: tuple[float, ...]
    n_pairs: int
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
            "n_ablated": list(range(len(self.curve.accuracy))),
        }
        parts = ("accuracy", "low", "high")
        for end, part in zip(_ENDS, parts, strict=True):
            result[f"accuracy{end}"] = getattr(self.curve, part).tolist()
        result["random_heads"] = [[str(head) for head in heads] for heads in self.random_heads]
        for end, part in zip(_ENDS, parts, strict=True):
            result[f"random_accuracy{end}"] = [getattr(curve, part).tolist() for curve in self.random_curves]
        for end, part in zip(_ENDS, parts, strict=True):
            values = {control.relation: getattr(control.curve, part).tolist() for control in self.controls}
            result[f"control_accuracy{end}"] = values
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
                curve=_curve(*(values[f"control_accuracy{end}"][name] for end in _ENDS)),
            )
            for name, entry in values["controls"].items()
        )
        random = zip(*(values[f"random_accuracy{end}"] for end in _ENDS), strict=True)
        return cls(
            relation=values["relation"],
            template=values["template"],
            status=values["status"],
            heads=tuple(HeadIndex.parse(head) for head in values["heads"]),
            scores=tuple(values["scores"]),
            n_pairs=values["n_pairs"],
            curve=_curve(*(values[f"accuracy{end}"] for end in _ENDS)),
            random_heads=tuple(tuple(HeadIndex.parse(head) for head in heads) for heads in values["random_heads"]),
            random_curves=tuple(_curve(*parts) for parts in random),
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
                }

    def figure(self) -> Figure:
        """The relation's accuracy with its 95% interval, the range of random heads, and each control relation."""
        title = f"Ablating the heads of {self.relation}"
        if not self.heads:
            return text_figure(str(self), title=title)
        lines = [Line("its heads", self.curve.accuracy, self.curve.low, self.curve.high)]
        if self.random_curves:
            drawn = torch.stack([one.accuracy for one in self.random_curves])
            lines.append(Line("random heads, mean and range", drawn.mean(0), drawn.amin(0), drawn.amax(0)))
        for control in self.controls:
            label = f"control {control.relation}, same heads"
            lines.append(Line(label, control.curve.accuracy, control.curve.low, control.curve.high))
        order = " ".join(map(str, self.heads[:12])) + (" ..." if len(self.heads) > 12 else "")
        return line_chart(
            list(range(len(self.heads) + 1)),
            lines,
            title=title,
            x_name="heads switched off",
            y_name="accuracy of the next token",
            y_limits=(0.0, 1.0),
            note=f"Prompt: {self.template}. {self.n_pairs} pairs. Order: {order}. "
            f"Random heads: {len(self.random_curves)} draws from the same layers; other bands are 95% intervals.",
        )

    def __str__(self) -> str:
        """Accuracy step by step: the relation, random heads, other relations."""
        options = self.provenance.options
        title = (
            f"{self.relation}: {self.n_pairs} pairs, {visible(self.template)!r}, "
            f"heads by preset {options['preset']}, {options['method']} ablation"
        )
        base = f"accuracy {self.base_accuracy:.2f} before"
        if self.status == "not testable":
            reason = "below 0.1; the model does not know enough of this relation to lose it"
            return f"{title}\n\nnot testable: {base}, {reason}"
        if self.status == "no heads":
            return f"{title}\n\nno head scores above 0 on this relation, so there is nothing to ablate ({base})"
        titles = ["off", "head", "score", "accuracy", "95%", f"{len(self.random_curves)} random"]
        titles += [control.relation for control in self.controls]
        columns = [(title, "left" if title == "head" else "right") for title in titles]
        rows = [self._text_row(step) for step in range(len(self.curve.accuracy))]
        lost = f"relative drop: relation {percent(self.curve.drop)}, random heads {percent(self.random_drop)}"
        if self.controls:
            lost += f", control relations {percent(self.control_drop)}"
        elif options.get("controls") == "auto":
            lost += "; no relation with other heads has a similar accuracy, so there is no control"
        note = "off: heads switched off so far at the last position; random: other heads of the same layers, all draws"
        return f"{title}\n\n{table_text(columns, rows)}\n\n{lost}\n{note}"

    def _text_row(self, step: int) -> list[object]:
        row: list[object] = [step, "", ""]
        if step:
            row[1:] = [self.heads[step - 1], number(self.scores[step - 1])]
        at = [float(part[step]) for part in (self.curve.accuracy, self.curve.low, self.curve.high)]
        row += [number(at[0]), interval(at[1], at[2])]
        drawn = [float(curve.accuracy[step]) for curve in self.random_curves]
        row.append(interval(min(drawn), max(drawn)) if drawn else "-")
        return row + [number(float(control.curve.accuracy[step])) for control in self.controls]


def _curve(accuracy: list[float], low: list[float], high: list[float]) -> Curve:
    return Curve(*(torch.tensor(part, dtype=torch.float32) for part in (accuracy, low, high)))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
