"""Two results of one kind, compared cell by cell.

Cells whose two 95% intervals do not overlap are marked. That is no test: intervals that overlap do not show two values
to be equal, those of two models on the same pairs or texts are not independent, and nothing is corrected for the number
of heads looked at. So no p-value is given.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import HeadIndex
from ...renderers import heat
from ...renderers.figure import Figure
from ...renderers.grids import MapLayer
from ...renderers.text import in_words, number, signed, significant, table_text, visible, wrapped
from ...results import Result, cells, kinds

_MARK = "the two 95% intervals do not overlap"
_CHANGED = 4
"""Cells with the largest differences in the table."""

_NAMED = 8
"""Heads of a set that are listed."""

_ENDS = ("first_low", "first_high", "second_low", "second_high")


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Result):
    """Two results of one kind, compared cell by cell.

    Attributes:
        compared: Kind of the two results.
        names: What the two are called.
        over: What the maps are of: ``relation``, ``score``, ``function``, ``vectors``, ``component`` or ``metric``.
        maps: Names of the maps.
        measure: What a value is.
        columns: Names of the columns: numbers of heads, or components.
        first, second: Values by map, layer and column; NaN where there is none.
        first_low, first_high, second_low, second_high: Their 95% intervals, where both results have them.
        correlation: Rank correlation of the two results over the cells of each map; NaN where one is constant.
        chosen_as: What heads are singled out for: they ``implement`` a relation, ``stand out for`` a function, ``are
            named``; empty if they are not.
        gained: Heads that only the second result singles out, by relation, function or name.
        lost: Those that only the first does.
        kept: Those that both do.
        left_out: What one result has and the other has not, if ``common`` was asked for.
        differing: What else differs between the two: options, data and versions, with both values.
        first_provenance, second_provenance: How the two were made.

    Example:
        >>> from tl_headmaps import compare, component_map, load_default_model
        >>> norms = component_map(load_default_model(), "frobenius", progress=False)
        >>> same = compare(norms, norms, names=("base", "tuned"))
        >>> same.correlation.tolist(), same.top(1)[0][1]
        ([1.0], 0.0)
    """

    kind: ClassVar[str] = "comparison"
    json_axes: ClassVar[Mapping[str, str | None]] = {"map": "maps", "layer": None, "column": "columns"}
    json_extra: ClassVar[tuple[str, ...]] = ("difference", "apart")
    nullable: ClassVar[tuple[str, ...]] = (
        "first",
        "second",
        "first_low",
        "first_high",
        "second_low",
        "second_high",
        "difference",
        "correlation",
    )
    compared: str
    names: tuple[str, str]
    over: str
    maps: tuple[str, ...]
    measure: str
    columns: tuple[str, ...]
    first: Float[Tensor, "map layer column"]
    second: Float[Tensor, "map layer column"]
    correlation: Float[Tensor, " map"]
    chosen_as: str
    gained: dict[str, tuple[HeadIndex, ...]]
    lost: dict[str, tuple[HeadIndex, ...]]
    kept: dict[str, tuple[HeadIndex, ...]]
    left_out: tuple[str, ...]
    differing: tuple[str, ...]
    first_provenance: Provenance
    second_provenance: Provenance
    provenance: Provenance
    first_low: Float[Tensor, "map layer column"] | None = None
    first_high: Float[Tensor, "map layer column"] | None = None
    second_low: Float[Tensor, "map layer column"] | None = None
    second_high: Float[Tensor, "map layer column"] | None = None

    @property
    def references(self) -> tuple[str, ...]:
        """Those of the two results."""
        return kinds()[self.compared].methods

    @property
    def difference(self) -> Float[Tensor, "map layer column"]:
        """The second result minus the first."""
        return self.second - self.first

    @property
    def values(self) -> Float[Tensor, "map layer column"]:
        """The differences."""
        return self.difference

    @property
    def apart(self) -> Bool[Tensor, "map layer column"]:
        """Where the two 95% intervals do not overlap; nowhere without intervals."""
        if self.first_low is None or self.first_high is None or self.second_low is None or self.second_high is None:
            return torch.zeros_like(self.first, dtype=torch.bool)
        # A comparison with NaN is false: without an interval a cell is not marked.
        return (self.first_high < self.second_low) | (self.second_high < self.first_low)

    def index_of(self, name: str) -> int:
        """Position of a map."""
        if name not in self.maps:
            raise UsageError(f"This comparison has no {self.over} {name!r}; it has {', '.join(self.maps)}.")
        return self.maps.index(name)

    def top(self, n: int = 5, name: str | None = None) -> list[tuple[tuple[str, Any], float]]:
        """What changed most: ``n`` cells as ((map, head), difference), largest first, of one map or all.

        In a map of components, (layer, component) takes the place of the head.
        """
        only = None if name is None else self.index_of(name)
        differences = self.difference
        defined = [
            ((self.maps[at[0]], self._where(*at[1:])), float(differences[at]))
            for at, _ in cells(self.axes, differences)
            if only in (None, at[0])
        ]
        return sorted(defined, key=lambda cell: -abs(cell[1]))[:n]

    def _where(self, layer: int, column: int) -> Any:
        return HeadIndex(layer, column) if self._has_heads else (layer, self.columns[column])

    @property
    def _has_heads(self) -> bool:
        return self.compared != "component_map"

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per map and cell."""
        shown = {"difference": self.difference, "first": self.first, "second": self.second}
        shown |= {name: part for name in _ENDS if (part := getattr(self, name)) is not None}
        apart = self.apart
        for at, labels in cells(self.axes, self.difference):
            column = {"head": at[2]} if self._has_heads else {"component": labels["column"]}
            record = {self.over: labels["map"], "layer": at[1], **column}
            yield record | {name: float(part[at]) for name, part in shown.items()} | {"apart": bool(apart[at])}

    def figure(self) -> Figure:
        """Differences by layer and head (or component), blue where the first is larger and red where the second is."""
        layers = [
            MapLayer(
                name,
                self.difference[place],
                details={self.names[0]: self.first[place], self.names[1]: self.second[place]},
                marked=self.apart[place],
            )
            for place, name in enumerate(self.maps)
        ]
        shown: dict[str, Any] = {
            "title": f"{in_words(self.compared).capitalize()}: {self._one_minus_other}",
            "unit": f"difference in {self.measure}",
            "signed": True,
            "mark": _MARK,
            "note": " ".join(self._notes),
        }
        if not self._has_heads:
            return heat.component_map(layers, self.columns, **shown)
        return heat.head_map(layers, switches=(self.over, "measure"), empty=self.first_provenance.short_rows, **shown)

    @property
    def _one_minus_other(self) -> str:
        return " minus ".join(map(visible, reversed(self.names)))

    @property
    def _notes(self) -> list[str]:
        """What to know when reading the differences."""
        notes = []
        if self.first_low is not None:
            notes.append(
                f"Cells whose two 95% intervals do not overlap: {int(self.apart.sum()):,} of "
                f"{int((~self.difference.isnan()).sum()):,}. This is no test: the two results are not independent, and "
                "nothing is corrected for the number of cells."
            )
        else:
            notes.append("Without intervals there is no telling which differences are more than noise.")
        if self.first_provenance.fingerprint == self.second_provenance.fingerprint:
            notes.append("Both are of the same weights.")
        if self.left_out:
            notes.append(f"Left out: {'; '.join(self.left_out)}.")
        if self.differing:
            notes.append(f"The two also differ in {'; '.join(self.differing)}.")
        return [*notes, *self.provenance.notes]

    def __str__(self) -> str:
        rows = []
        for place, name in enumerate(self.maps):
            different = self.difference[place]
            defined = different[~different.isnan()]
            changed = [f"{_shown(where)} {signed(value)}" for (_, where), value in self.top(_CHANGED, name) if value]
            mean = float(defined.abs().mean()) if len(defined) else math.nan
            row = [name, len(defined), number(float(self.correlation[place])), significant(mean)]
            row += [int(self.apart[place].sum())] * (self.first_low is not None)
            rows.append([*row, ", ".join(changed) or "nothing"])
        columns = [(self.over, "left"), ("cells", "right"), ("correlation", "right"), ("mean change", "right")]
        columns += [("apart", "right")] * (self.first_low is not None) + [("changed most", "left")]
        title = f"{in_words(self.compared).capitalize()} compared: {self._one_minus_other}"
        parts = [title, table_text(columns, rows)]
        if self.chosen_as:
            parts.append(self._chosen_table())
        note = (
            f"changes are of the {self.measure}; correlation: of ranks, over cells; mean change: "
            "mean absolute difference"
        )
        note += "; apart: cells whose 95% intervals do not overlap." if self.first_low is not None else "."
        return "\n\n".join([*parts, "\n".join(map(wrapped, [note, *self._notes]))])

    def _chosen_table(self) -> str:
        """Which heads are singled out by one of the two and by both."""
        rows = [
            [name, *(_heads(getattr(self, column)[name]) for column in ("lost", "kept", "gained"))]
            for name in self.gained
        ]
        titles = [f"heads that {self.chosen_as}", f"only {self.names[0]}", "both", f"only {self.names[1]}"]
        return table_text([(title, "left") for title in titles], rows)


def _shown(where: Any) -> str:
    return str(where) if isinstance(where, HeadIndex) else f"layer {where[0]} {where[1]}"


def _heads(heads: Sequence[HeadIndex]) -> str:
    listed = " ".join(map(str, heads[:_NAMED]))
    return f"{listed} and {len(heads) - _NAMED} more" if len(heads) > _NAMED else listed or "-"
