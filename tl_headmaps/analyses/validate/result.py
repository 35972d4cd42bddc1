"""Whether the running model agrees with scores read from its weights."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import HeadIndex
from ...renderers.charts import scatter
from ...renderers.figure import Figure
from ...renderers.text import interval, number, table_text, visible
from ...results import Result, cells

if TYPE_CHECKING:
    from typing import Self

Context: TypeAlias = Literal["without", "with"]

_STATIC = ("static_promote", "static_suppress")
_DYNAMIC = ("promote_without", "promote_with", "suppress_without", "suppress_with")


@dataclass(frozen=True, eq=False, repr=False)
class Validation(Result):
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
        agreement: Columns such as ``pearson_without`` or ``suppress_spearman_with_low`` (an end of its 95% interval), a
            value per relation: correlation of static with dynamic scores over heads x templates, NaN where one of them
            does not vary over heads.

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

    def index_of(self, relation: str) -> int:
        """Position of a relation."""
        if relation not in self.relations:
            raise UsageError(f"This result has no relation {relation!r}; it has {', '.join(self.relations)}.")
        return self.relations.index(relation)

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
        names = list(self.relations) if relation is None else [self.relations[self.index_of(relation)]]
        contexts = [context] if context is not None else ["without", "with"] if len(names) == 1 else ["without"]
        n_layers, n_heads = self.static_promote.shape[1:]
        heads = [str(HeadIndex(layer, head)) for layer in range(n_layers) for head in range(n_heads)]
        x, y, points, groups = [], [], [], []
        for name in names:
            place = self.index_of(name)
            for label in contexts:
                dynamic = self.promote_with if label == "with" else self.promote_without
                x.append(self.static_promote[place].flatten())
                y.append(dynamic[place].mean(0).flatten())
                points += heads if len(names) == 1 else [f"{head} {name}" for head in heads]
                groups += [f"{label} context" if len(names) == 1 else name] * len(heads)
        without, with_ = self.agreement["pearson_without"], self.agreement["pearson_with"]
        agreement = ", ".join(
            f"{name} {_in_prose(without[place])} without and {_in_prose(with_[place])} with context"
            for place, name in ((self.index_of(name), name) for name in names)
        )
        return scatter(
            torch.cat(x),
            torch.cat(y),
            names=points,
            groups=groups,
            title=f"Static and dynamic scores, preset {self.provenance.options['preset']}: {', '.join(names)}",
            x_name="static score (weights alone)",
            y_name="dynamic score (prompts)",
            diagonal=True,
            note=self._noted(f"Pearson correlation over heads and templates: {agreement}.", " "),
        )

    def __str__(self) -> str:
        """The agreement table, the mean over relations in its last row."""
        table = self.agreement
        shown = ("pearson_without", "spearman_without", "pearson_with", "spearman_with")
        rows = []
        for place, name in enumerate(self.relations):
            row = [name, self.n_dynamic[place], self.k[place]]
            for column in shown:
                row.append(number(table[column][place]))
                if column.startswith("pearson"):
                    row.append(interval(table[f"{column}_low"][place], table[f"{column}_high"][place]))
            rows.append(row)
        if len(self.relations) > 1:
            mean: list[object] = ["mean", "", ""]
            for column in shown:
                mean += [number(self.mean(column)), *([""] if column.startswith("pearson") else [])]
            rows.append(mean)
        titles = ["relation", "pairs", "k", "without", "95%", "Spearman", "with", "95%", "Spearman"]
        columns = [(title, "left" if title == "relation" else "right") for title in titles]
        preset = self.provenance.options["preset"]
        title = f"Static against dynamic scores, preset {preset}, {len(self.templates)} templates"
        note = (
            "agreement of static and dynamic scores over heads x templates (Pearson, interval over pairs; Spearman);\n"
            "without: the last position attends to the source alone; with: what the head really writes there"
        )
        templates = "\n".join(f"  {visible(template)}" for template in self.templates)
        return self._noted(f"{title}\n\n{table_text(columns, rows)}\n\n{note}\ntemplates:\n{templates}")


def _in_prose(correlation: float) -> str:
    return "undefined" if math.isnan(correlation) else number(correlation)
