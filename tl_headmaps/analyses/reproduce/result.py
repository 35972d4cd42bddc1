"""The published experiments on one model, relation by relation, beside the published figures."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...core.provenance import Provenance
from ...renderers.figure import Figure
from ...renderers.listing import tables_figure
from ...renderers.tables import Table
from ...renderers.text import number, percent
from ...results import Result

if TYPE_CHECKING:
    from typing import Self

PUBLISHED_AGREEMENT = {"GPT-2 XL": (0.89, 0.71), "Pythia-6.9B": (0.86, 0.69), "Llama-3.1-8B": (0.78, 0.72)}
"""Mean agreement without and with context (arXiv:2412.11965)."""

PUBLISHED_DROPS = {"Pythia-6.9B": (0.88, -0.01), "GPT-2 XL": (0.65, 0.07)}
"""Mean relative drop of accuracy without the relation's heads, and without random heads (arXiv:2412.11965)."""


@dataclass(frozen=True)
class ReproducedRelation:
    """Both experiments on one relation; None where there is no figure.

    Attributes:
        relation: Its name.
        n_pairs: Pairs behind the agreement.
        pearson_without, pearson_with: Agreement of static and dynamic scores without and with context.
        status: Of the ablation: ``tested``, ``not testable``, ``no heads`` or ``no template``.
        n_heads: Heads switched off.
        base_accuracy, final_accuracy: On the relation, before and after.
        random_accuracy: With as many random heads switched off instead, mean over draws.
        drop, random_drop, control_drop: Share of the accuracy lost.
        controls: Names of the control relations.
    """

    relation: str
    n_pairs: int
    pearson_without: float | None
    pearson_with: float | None
    status: str
    n_heads: int
    base_accuracy: float | None
    final_accuracy: float | None
    random_accuracy: float | None
    drop: float | None
    random_drop: float | None
    control_drop: float | None
    controls: tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Reproduction(Result):
    """Tables of a reproduction; the results behind them are files of their own.

    Attributes:
        rows: Both experiments on each relation: agreement with activations, and ablation.

    Example:
        >>> from tl_headmaps import Relation, Reproduction, load_default_model, reproduce
        >>> pairs = [("France", "Paris"), ("Germany", "Berlin"), ("Japan", "Tokyo")]
        >>> capitals = Relation.from_pairs("capitals", pairs, eliciting_templates=("The capital of <X> is",))
        >>> options = {"relations": capitals, "n_random": 1, "data_dir": "."}  # "." has no controls
        >>> tables = reproduce(load_default_model(), "maps", **options, progress=False)
        >>> round(tables.mean("base_accuracy"), 2)
        1.0
        >>> Reproduction.load("maps/reproduction.json") == tables
        True
    """

    kind: ClassVar[str] = "reproduction"
    methods: ClassVar[tuple[str, ...]] = ("elhelo2024maps",)
    experiment: ClassVar[str] = "maps"
    rows: tuple[ReproducedRelation, ...]
    provenance: Provenance

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Names of the relations."""
        return {"relation": [row.relation for row in self.rows]}

    def mean(self, column: str) -> float:
        """Mean of a column over the relations that have a figure there; drops only where a head was switched off."""
        values = [getattr(row, column) for row in self.rows]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the published figures with them."""
        names = ("pearson_without", "pearson_with", "drop", "random_drop", "control_drop")
        means = {name: self.mean(name) for name in names}
        return {
            "kind": self.kind,
            "experiment": self.experiment,
            "axes": self.axes,
            "rows": [asdict(row) | {"controls": list(row.controls)} for row in self.rows],
            "mean": {name: None if math.isnan(value) else value for name, value in means.items()},
            "published": {
                "agreement": {name: list(pair) for name, pair in PUBLISHED_AGREEMENT.items()},
                "drop": {name: list(pair) for name, pair in PUBLISHED_DROPS.items()},
            },
            "provenance": self.provenance.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        rows = tuple(ReproducedRelation(**row | {"controls": tuple(row["controls"])}) for row in values["rows"])
        return cls(rows, Provenance.from_dict(values["provenance"]))

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per relation."""
        return (asdict(row) | {"controls": " ".join(row.controls)} for row in self.rows)

    def figure(self) -> Figure:
        """Agreement, then what is lost without the heads; one row per relation, the published figures below ours."""
        title = f"Published experiments ({self.experiment}) on {self.provenance.model}"
        return tables_figure([self.agreement_table(), self.drops_table()], title=title, text=str(self))

    def __str__(self) -> str:
        return (
            f"Static scores and the running model: {self.experiment}, {self.provenance.model}\n\n"
            f"{self.agreement_table().text()}\n\n"
            f"Heads switched off\n\n{self.drops_table().text()}"
        )

    def agreement_table(self) -> Table:
        """Agreement of static and dynamic scores by relation, the mean and the published means below."""
        rows: list[list[object]] = [
            [row.relation, row.n_pairs, number(row.pearson_without), number(row.pearson_with)] for row in self.rows
        ]
        means = (self.mean("pearson_without"), self.mean("pearson_with"))
        rows.append([f"mean, {self.provenance.model}", "", *map(number, means)])
        rows += [[f"published mean, {name}", "", *map(number, values)] for name, values in PUBLISHED_AGREEMENT.items()]
        columns = [("relation", "left"), ("pairs", "right"), ("without context", "right"), ("with context", "right")]
        return Table(columns, rows, "Pearson correlation of static and dynamic scores over heads x templates")

    def drops_table(self) -> Table:
        """Accuracy before and after switching off heads by relation, the mean and the published means below."""
        rows: list[list[object]] = []
        for row in self.rows:
            if row.status != "tested":
                rows.append([row.relation, "", number(row.base_accuracy), row.status, "", "", "", ""])
                continue
            values = (row.base_accuracy, row.final_accuracy, row.random_accuracy)
            drops = (percent(share) for share in (row.drop, row.random_drop, row.control_drop))
            rows.append([row.relation, row.n_heads, *map(number, values), *drops])
        drops = (percent(self.mean(name)) for name in ("drop", "random_drop", "control_drop"))
        rows.append([f"mean, {self.provenance.model}", "", "", "", "", *drops])
        rows += [
            [f"published mean, {name}", "", "", "", "", *map(percent, values), "-"]
            for name, values in PUBLISHED_DROPS.items()
        ]
        titles = ("relation", "heads off", "before", "after", "random", "drop", "drop, random", "drop, controls")
        columns = [(title, "left" if title == "relation" else "right") for title in titles]
        return Table(columns, rows, "next-token accuracy; drop: share of the accuracy lost")
