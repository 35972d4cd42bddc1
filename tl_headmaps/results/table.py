"""Results whose fields say what they are: a value, its null, the ends of its interval, its tests.

A quantity is described once, where it is declared::

    worth: Float[Tensor, "layer head"] = measured("value", "rise of the loss", "negative: better off with the mean")
    interval_low: Float[Tensor, "layer head"] = measured("low", "95%", "over held-out texts")

From that come the printed table with its legend, the head map with its tooltips, rows for CSV and data frames, the
columns of a paper's table, the ``Attributes`` of the documentation, the comparison of two results and the rows of a
head's card. JSON stays the fields. What a result writes by hand is :meth:`Table.notes`.
"""

import dataclasses
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import dataclass_transform

from ..core.errors import UsageError
from ..core.types import HeadIndex
from ..renderers.figure import Figure
from ..renderers.grids import MapLayer
from ..renderers.heat import head_map, panels
from ..renderers.tables import Table as TextTable
from ..renderers.text import chance, number, sentence, signed, significant, table_text, wrapped
from .base import Result
from .codec import axes_of, cells
from .head_maps import HeadMaps

Role: TypeAlias = Literal["value", "null", "low", "high", "p", "q", "detail", "fact"]
"""What a field is: of a cell its value, the value by chance, the ends of its interval, its p- and q-value, a further
number; or a fact about a label or the whole result."""

_WITH_A_VALUE = ("null", "low", "high", "p", "q")
_SHORT: tuple[Role, ...] = ("value", "low", "null", "q")
"""Roles in a printed table, unless all of it is asked for."""
_IN_PAPERS: tuple[Role, ...] = ("value", "low", "high", "null", "q", "p")


@dataclass(frozen=True)
class Measured:
    """What a field of a result is; see :func:`measured`."""

    role: Role
    title: str
    meaning: str = ""
    unit: str = ""
    of: str = ""
    shown: bool = True


def measured(
    role: Role, title: str, meaning: str = "", *, unit: str = "", of: str = "", shown: bool = True, **field: Any
) -> Any:
    """A field of a result that says what it is.

    Args:
        role: Nulls, ends of intervals and tests belong to the value declared before them.
        title: Heading of its column, its name in tooltips.
        meaning: What it says, for the legend and the documentation.
        unit: What it is measured in.
        of: The value it belongs to, where that is not the one before.
        shown: Whether printed tables have it at all; files always do.
        **field: ``default``, as for :func:`dataclasses.field`.
    """
    return dataclasses.field(metadata={"measured": Measured(role, title, meaning, unit, of, shown)}, **field)


_Class = TypeVar("_Class", bound=type)


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(measured, dataclasses.field))
def frozen_result(cls: _Class) -> _Class:
    """A result class: a frozen dataclass that is compared and printed as results are."""
    return dataclass(frozen=True, eq=False, repr=False)(cls)  # type: ignore[return-value]


def _with_attributes(text: str, columns: Mapping[str, Measured]) -> str:
    """A docstring whose ``Attributes`` also list the measured fields."""
    said = {name: column.meaning or column.title for name, column in columns.items()}
    lines = [f"    {name}: {sentence(meaning[:1].upper() + meaning[1:])}" for name, meaning in said.items()]
    if not lines:
        return text
    before, example, after = text.partition("\nExample:\n")
    if "\nAttributes:\n" not in before:
        before = f"{before.rstrip()}\n\nAttributes:"
    return "\n".join([before.rstrip(), *lines, ""]) + (f"{example}{after}" if example else "")


@dataclass(frozen=True)
class ComparedMaps:
    """A result as maps of one kind of number, for comparing it with another.

    Attributes:
        over: What the maps are of (``relation``), as a column of rows.
        measure: What the numbers are.
        names: Names of the maps.
        values: Numbers by map, layer and column.
        ends: Lower and upper ends of their intervals.
        columns: Names of the columns, if they are not heads.
        chosen: Heads that a result singles out, by name.
        chosen_as: What they are singled out for.
        fixed: What must be the same in both results, by name.
    """

    over: str
    measure: str
    names: tuple[str, ...]
    values: Tensor
    ends: tuple[Tensor | None, Tensor | None] = (None, None)
    columns: tuple[str, ...] | None = None
    chosen: Mapping[str, Sequence[HeadIndex]] = field(default_factory=dict)
    chosen_as: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)


class Table(Result):
    """Values by some axes, with nulls, intervals and tests, of which the printed forms are made.

    A subclass is a frozen dataclass with :func:`measured` fields and at most three overrides, usually :meth:`notes`.

    Attributes:
        title: What it is, and after a colon what was measured; ``{self.n_texts}`` is filled from the result.
        ranked_by: The value that tables are ordered by; the first by default.
        signed: Whether values have a sign (colours centred on zero); by default it is seen from them.
        listed: Rows of a printed table.
        also: Further fields that a short table shows.
        fixed: Fields that must be equal for two results to be compared.
    """

    title: ClassVar[str] = ""
    ranked_by: ClassVar[str] = ""
    signed: ClassVar[bool | None] = None
    listed: ClassVar[int] = 12
    also: ClassVar[tuple[str, ...]] = ()
    aligned: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ()
    _described: ClassVar[Mapping[str, Measured]] = {}
    values: Tensor

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = {name: value for name, value in vars(cls).items() if isinstance(value, dataclasses.Field)}
        new = {name: entry.metadata["measured"] for name, entry in own.items() if "measured" in entry.metadata}
        if new and "values" not in cls.__annotations__ and not isinstance(vars(cls).get("values"), property):
            # Not in the class body: a field of that name could not be set beside a property.
            cls.values = property(lambda self: getattr(self, self.ranked()), doc="The ranked values.")  # type: ignore[assignment]
        cls._described = {**cls._described, **new}
        # Of a cell NaN says that nothing is known; the number of texts, say, is always known.
        known = {
            name for name in new if new[name].role == "fact" and cls.__annotations__[name] in (bool, float, int, str)
        }
        cls.nullable = tuple(dict.fromkeys((*cls.nullable, *(name for name in new if name not in known))))
        if cls._described and "paper_columns" not in vars(cls):
            axes = (name for name in cls.json_axes if name != "layer" or "head" not in cls.json_axes)
            ranked = cls.families()[cls.ranked()]
            roles = (role for role in _IN_PAPERS if role in ranked and not (role == "p" and "q" in ranked))
            cls.paper_columns = (*axes, *(ranked[role] for role in roles))
        cls.__doc__ = _with_attributes(inspect.cleandoc(cls.__doc__ or ""), new)

    @classmethod
    def columns(cls) -> dict[str, Measured]:
        """What each measured field is, by its name."""
        return dict(cls._described)

    @classmethod
    def families(cls) -> dict[str, dict[str, str]]:
        """Each value with the fields that belong to it, by role: ``{"worth": {"value": "worth", "low": ...}}``."""
        families: dict[str, dict[str, str]] = {}
        for name, column in cls._described.items():
            if column.role == "value":
                families[name] = {"value": name}
            elif column.role in _WITH_A_VALUE:
                families[column.of or next(reversed(families))][column.role] = name
        return families

    @classmethod
    def ranked(cls) -> str:
        """Name of the value that heads or cells are ranked by."""
        return cls.ranked_by or next(iter(cls.families()))

    @property
    def caption(self) -> str:
        """What was measured, with the facts of this result filled in."""
        return self.title.format(self=self)

    def notes(self) -> Sequence[str]:
        """Sentences of judgement under table and figure: what only this result can say of its numbers."""
        return ()

    def value_at(self, name: str, place: Mapping[str, int]) -> Any:
        """A field's entry for a cell, given by its index on every axis; None where the field says nothing of one."""
        value, axes = getattr(self, name), axes_of(self, name)
        if isinstance(value, Mapping):
            label = next(iter(place))
            value = value.get(self._names(label)[place[label]])
        elif isinstance(value, tuple):
            return value[next(iter(place.values()))] if name in self.aligned else None
        if not isinstance(value, Tensor) or not set(axes) <= set(place):
            return None
        return value[tuple(place[axis] for axis in axes)].item()

    def _names(self, axis: str) -> Sequence[Any]:
        return self.axes[axis]

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per cell."""
        axes = self._row_axes
        for at, labels in self._cells():
            place = dict(zip(axes, at, strict=True))
            record = ((name, self.value_at(name, place)) for name in self.columns())
            yield labels | {name: value for name, value in record if value is not None}

    @property
    def _row_axes(self) -> dict[str, list[Any]]:
        return self.axes

    def _cells(self) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
        """Index and labels of every cell that has a value."""
        return cells(self._row_axes, self.values)

    def _shown(self, full: bool) -> list[tuple[str, Role]]:
        """Fields of a printed table in their order, each with its role; an interval stands as its lower end."""
        ranked, families = self.ranked(), self.families()
        listed: list[tuple[str, Role]] = [(families[ranked][role], role) for role in _SHORT if role in families[ranked]]
        if "q" not in families[ranked] and "p" in families[ranked]:
            listed.append((families[ranked]["p"], "p"))
        listed += [(name, self._described[name].role) for name in self.also]
        if full:
            rest = [(name, column.role) for name, column in self._described.items() if column.role not in ("high",)]
            listed += [entry for entry in rest if entry not in listed and self._by_cell(entry[0])]
        return [(name, role) for name, role in listed if self._described[name].shown]

    def _by_cell(self, name: str) -> bool:
        """Whether a field has an entry for every cell, or for every label."""
        return self.value_at(name, dict.fromkeys(self._row_axes, 0)) is not None

    def cell_texts(self, place: Mapping[str, int], *, full: bool = False) -> list[str]:
        """What is printed of a cell, column by column as in :meth:`headings`."""
        return [self._text(name, role, place) for name, role in self._shown(full)]

    def headings(self, *, full: bool = False) -> list[tuple[str, str]]:
        """Title and meaning of each column."""
        return [(self._described[name].title, self._described[name].meaning) for name, _ in self._shown(full)]

    def _text(self, name: str, role: Role, place: Mapping[str, int]) -> str:
        value = self.value_at(name, place)
        if role == "low":
            family = next(family for family in self.families().values() if family.get("low") == name)
            high = self.value_at(family["high"], place)
            known = not (math.isnan(value) or math.isnan(high))
            return f"{self._amount(value)} to {self._amount(high)}" if known else "-"
        if value is None or not isinstance(value, float):
            return "-" if value is None else str(value)
        if role in ("p", "q"):
            return "-" if math.isnan(value) else chance(value)
        return self._amount(value) if role == "value" else number(value)

    def _amount(self, value: float) -> str:
        """A value, or an end of its interval: small ones keep two significant digits, so that a value lies inside."""
        if self.signed:
            return signed(value, 2)
        return significant(value, 2) if 0 < abs(value) < 0.1 else number(value)

    def _legend(self, full: bool) -> str:
        columns = [self._described[name] for name, _ in self._shown(full)]
        meanings = {column.title: column.meaning for column in columns if column.meaning}
        return "; ".join(f"{title}: {meaning}" for title, meaning in meanings.items())

    def table(self, *, full: bool = False, n: int | None = None) -> str:
        """The best cells as aligned text, with a legend and the result's notes.

        Args:
            full: All columns; by default value, interval, null and q.
            n: Rows to list; by default :attr:`listed`.
        """
        if n is not None and n < 1:
            raise UsageError(f"n={n} lists no head; give 1 or more.")
        labels, rows = self._listed(full, n)
        titles = [(title, "left") for title in labels] + [(title, "right") for title, _ in self.headings(full=full)]
        parts = [self.caption, table_text(titles, rows), wrapped(self._legend(full)), *map(wrapped, self.notes())]
        return self._noted("\n\n".join(filter(None, parts)))

    def _listed(self, full: bool, n: int | None) -> tuple[list[str], list[list[str]]]:
        """Titles of the columns that name a cell, and the rows of the table."""
        axes = self._row_axes
        best = sorted(self._cells(), key=lambda cell: -float(self.values[cell[0]]))[: n or self.listed]
        rows = [
            [*map(str, labels.values()), *self.cell_texts(dict(zip(axes, at, strict=True)), full=full)]
            for at, labels in best
        ]
        return list(axes), rows

    def __str__(self) -> str:
        return self.table()


class HeadTable(HeadMaps, Table):
    """Values of heads with their nulls, intervals and tests, for one label (a relation, a score) or several.

    Attributes:
        chosen_as: What :meth:`chosen` heads do, as in "heads that ... it".
        limits: Ends of the colour bar, where they are not taken from the values.
        switches: What labels and measures are called where a figure switches between them.
    """

    chosen_as: ClassVar[str] = ""
    limits: ClassVar[tuple[float, float] | None] = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Names on the first axis; one empty name for a single map."""
        return ("",) if self.labelled is None else tuple(getattr(self, self.labelled))

    def chosen(self) -> Mapping[str, Sequence[HeadIndex]]:
        """Heads that the result singles out, by label: tables and maps mark them, comparisons list them."""
        return {}

    def mark(self, head: HeadIndex, place: int) -> str:
        """One character behind a head in a printed table: a star if it is chosen."""
        return "*" if head in self.chosen().get(self.labels[place], ()) else " "

    @property
    def _row_axes(self) -> dict[str, list[Any]]:
        first = {} if self.labelled is None else {self._axis: list(self.labels)}
        return first | {name: self.axes[name] for name in ("layer", "head")}

    def _names(self, axis: str) -> Sequence[Any]:
        return self._row_axes[axis]

    def _place(self, label: int, head: HeadIndex) -> dict[str, int]:
        return ({} if self.labelled is None else {self._axis: label}) | {"layer": head.layer, "head": head.head}

    def head_map(self, label: str | None = None) -> Float[Tensor, "layer head"]:
        """The map that :meth:`top` ranks; where there are several, that of one name."""
        ranked = self.map_of(self.ranked(), 0 if self.labelled is None else self.index_of(label))
        return super().head_map(label) if ranked is None or self.labelled is None else ranked

    def map_of(self, name: str, label: int = 0) -> Float[Tensor, "layer head"] | None:
        """A field's map over layers and heads for a label; None where it has none."""
        value, axes = getattr(self, name), list(axes_of(self, name))
        if isinstance(value, Mapping):
            value = value.get(self.labels[label])
        if not isinstance(value, Tensor) or not axes or not set(axes) <= set(self._row_axes):
            return None
        if self.labelled is not None and self._axis in axes:
            value = value.select(axes.index(self._axis), label)
            axes.remove(self._axis)
        if axes == ["layer"]:
            value = value[:, None].expand(self.values.shape[-2:])
        return value.float() if axes else None

    def compared_maps(self) -> ComparedMaps:
        """The first value by label, with its interval, the chosen heads and what must be alike, for comparisons."""
        first, family = next(iter(self.families().items()))
        one_map = self.labelled is None
        fixed: dict[str, Any] = {}
        for name in self.fixed:
            value = getattr(self, name)
            each = zip(self.labels, value, strict=True) if name in self.aligned else ()
            fixed |= {f"{name} of {label}": entry for label, entry in each} or {name: value}
        return ComparedMaps(
            over="map" if one_map else self._axis,
            measure=self._described[first].unit or self._described[first].title,
            names=(self._described[first].title,) if one_map else tuple(self.labels),
            values=self._stacked(first),
            ends=(self._stacked(family["low"]), self._stacked(family["high"])) if "low" in family else (None, None),
            chosen=self.chosen(),
            chosen_as=self.chosen_as,
            fixed=fixed,
        )

    def _stacked(self, name: str) -> Float[Tensor, "label layer head"]:
        maps = (self.map_of(name, place) for place in range(len(self.labels)))
        return torch.stack([values for values in maps if values is not None])

    def head_rows(self, head: HeadIndex, *, full: bool = False, n: int | None = None) -> TextTable:
        """What the result says about one head: a row for each label, best first, or beside its layer's other heads."""
        chosen = self.chosen()
        titles, note = [(title, "right") for title, _ in self.headings(full=full)], self._legend(full)
        if self.labelled is None:
            rows = [
                [f"{'>' if one == head else ' '} {one}", *self.cell_texts(self._place(0, one), full=full)]
                for one, _ in self.top(self.values.numel())
                if one.layer == head.layer
            ]
            return TextTable([("head", "left"), *titles], rows, note)
        ranked = [self.value_at(self.ranked(), self._place(place, head)) for place in range(len(self.labels))]
        known = [place for place, value in enumerate(ranked) if value is not None and not math.isnan(value)]
        rows = []
        for place in sorted(known, key=lambda place: -ranked[place])[:n]:
            name = f"{self.labels[place]}{' *' * (head in chosen.get(self.labels[place], ()))}"
            rows.append([name, *self.cell_texts(self._place(place, head), full=full)])
        mark = [f"* among the heads that {self.chosen_as} it"] * bool(chosen)
        return TextTable([(self._axis, "left"), *titles], rows, "; ".join([*mark, note]))

    def _listed(self, full: bool, n: int | None) -> tuple[list[str], list[list[str]]]:
        named, chosen, rows = self.labelled is not None, self.chosen(), []
        n = n or (3 if len(self.labels) > 1 else self.listed)
        for place, label in enumerate(self.labels):
            # Of amounts, nothing is not among the best.
            best = [head for head, value in self.top(n, label or None) if value or self.signed is not False]
            if named and not best:
                rows.append([label, "none", *[""] * len(self.headings(full=full))])
            for rank, head in enumerate(best):
                name = f"{head}{self.mark(head, place) if chosen else ''}"
                texts = self.cell_texts(self._place(place, head), full=full)
                rows.append([*[label if rank == 0 else ""] * named, name, *texts])
        return [*[self._axis for _ in range(named)], f"best of {self.n_measured}"], rows

    def figure(self, *, side_by_side: bool = False) -> Figure:
        """Every value by layer and head, with its null, interval and tests in the tooltip; chosen heads are marked.

        Args:
            side_by_side: The ranked maps of all labels side by side, instead of one map at a time.
        """
        families, chosen = self.families(), self.chosen()
        first = self.ranked()
        order = [first, *(name for name in families if name != first and not side_by_side)]
        maps = [
            self._map_layer(place, name, families[name], details=name == first, several=len(families) > 1)
            for place in range(len(self.labels))
            for name in order
            if self.map_of(name, place) is not None
        ]
        title, _, about = self.caption.partition(": ")
        note = [f"{about[:1].upper()}{about[1:]}", self._legend(full=False), *self.notes()]
        options: dict[str, Any] = {
            "title": title,
            "unit": self._described[first].unit,
            "signed": self.signed,
            "limits": self.limits,
            "pinned": next(iter(chosen.get(self.labels[0], ())), None),
            "empty": self.provenance.short_rows,
            "note": self._noted(" ".join(sentence(part) for part in note if part), " "),
        }
        if side_by_side:
            return panels(maps, **options)
        switches = "map" if self.labelled is None else self._axis, "measure"
        mark = f"heads that {self.chosen_as} it" if chosen else ""
        return head_map(maps, switches=switches, mark=mark, **options)

    def _map_layer(self, place: int, name: str, family: Mapping[str, str], details: bool, several: bool) -> MapLayer:
        label, columns = self.labels[place], self._described
        parts = {role: self.map_of(field, place) for role, field in family.items()}
        values = parts["value"]
        assert values is not None
        more = {columns[family[role]].title: parts[role] for role in ("p", "q") if parts.get(role) is not None}
        if details:
            named = (
                (column.title, self.map_of(field, place))
                for field, column in columns.items()
                if column.role == "detail"
            )
            more |= {title: found for title, found in named if found is not None and not bool(found.isnan().all())}
        return MapLayer(
            label.replace("_", " "),
            values,
            group=columns[name].title if several else "",
            null=parts.get("null"),
            interval=(parts["low"], parts["high"]) if parts.get("low") is not None else None,
            details=more,
            marked=self._mask(self.chosen().get(label, ()), values) if details and self.chosen() else None,
            unit=columns[name].unit or None,
        )

    @staticmethod
    def _mask(heads: Iterable[HeadIndex], values: Float[Tensor, "layer head"]) -> Bool[Tensor, "layer head"]:
        mask = torch.zeros(values.shape, dtype=torch.bool)
        for head in heads:
            mask[head.layer, head.head] = True
        return mask
