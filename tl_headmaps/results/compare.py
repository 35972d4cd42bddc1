"""What is different between two results of one kind: a base model and its fine-tuned form, say.

Both results must ask the same question: one kind, the same relations (or scores, functions, components), the same
options that decide what a number means (preset, circuit, k, metric). Then they are compared cell by cell.

Cells whose two 95% intervals do not overlap are marked. That is no test: intervals that overlap do not show two values
to be equal, those of two models on the same pairs or texts are not independent, and nothing is corrected for the number
of heads looked at. So no p-value is given.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..core.errors import UsageError
from ..core.options import public
from ..core.provenance import Provenance
from ..core.types import HeadIndex
from ..renderers import heat
from ..renderers.figure import Figure
from ..renderers.grids import MapLayer
from ..renderers.text import few, in_words, number, signed, significant, table_text, visible, wrapped
from ..scorers.tasks import rank_correlations
from .base import Result, kinds
from .codec import cells
from .table import ComparedMaps

_MARK = "the two 95% intervals do not overlap"
_CHANGED = 4
"""Cells with the largest differences in the table."""

_NAMED = 8
"""Heads of a set that are listed."""

_ENDS = ("first_low", "first_high", "second_low", "second_high")
_WHICH = ("first", "second")
_DECIDE = ("preset", "vocabulary", "normalise")
"""Options that decide what a number is."""

_OF_THE_MODEL = ("parameters", "mlp_weights")
"""Digests of the models themselves, which are meant to differ."""


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
    nullable: ClassVar[tuple[str, ...]] = ("first", "second", *_ENDS, "difference", "correlation")
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

    values = difference

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
            [name, *(few(getattr(self, column)[name], _NAMED, " ") or "-" for column in ("lost", "kept", "gained"))]
            for name in self.gained
        ]
        titles = [f"heads that {self.chosen_as}", f"only {self.names[0]}", "both", f"only {self.names[1]}"]
        return table_text([(title, "left") for title in titles], rows)


def _shown(where: Any) -> str:
    return str(where) if isinstance(where, HeadIndex) else f"layer {where[0]} {where[1]}"


@public
def compare(
    first: Result | str | Path,
    second: Result | str | Path,
    *,
    names: Sequence[str] | None = None,
    common: bool = False,
) -> Comparison:
    """Set two results of one kind side by side: what changed, where, and which heads are singled out by one alone.

    Relation scores, head trust, what heads are worth, grouping profiles, task maps, head names and component maps can
    be compared.

    Args:
        first: A result, or the file of one.
        second: Another of the same kind; differences are second minus first.
        names: What the two are called; by default their models.
        common: Compare what both have, if one has relations, components or cells that the other has not; refused
            otherwise.

    Example:
        >>> from tl_headmaps import compare, load_default_model, relation_scores
        >>> model = load_default_model()
        >>> options = {"preset": "folded", "heads": ["L23H4", "L23H5"], "progress": False}
        >>> one, both = (relation_scores(model, names, **options) for names in (
        ...     "country_to_capital", ["country_to_capital", "name_copying"]))
        >>> found = compare(one, both, common=True)
        >>> found.maps, len(found.kept["country_to_capital"]), found.left_out
        (('country_to_capital',), 2, ('relation name_copying of the second',))
    """
    results = [one if isinstance(one, Result) else Result.load(one) for one in (first, second)]
    if type(results[0]) is not type(results[1]):
        raise UsageError(
            f"The first result is {results[0].kind!r} and the second {results[1].kind!r}. Two results of one kind are "
            "compared; give two of the same call."
        )
    read, made = [_maps(result) for result in results], [result.provenance for result in results]
    _require_one_question(read, made)
    shared, left_out = _common_maps(read, common)
    places = [[one.names.index(name) for name in shared] for one in read]
    maps = [one.values[at].float() for one, at in zip(read, places, strict=True)]
    for i, j in ((0, 1), (1, 0)):
        n = int((~maps[i].isnan() & maps[j].isnan()).any(0).sum())
        if n and not common:
            raise UsageError(
                f"{n:,} cells have a value in the {_WHICH[i]} result and none in the {_WHICH[j]}. Compute both for "
                "the same heads, or pass common=True to compare those that both have."
            )
        left_out += [f"{n:,} cells of the {_WHICH[i]}"] * bool(n)
    either = maps[0].isnan() | maps[1].isnan()
    maps = [values.masked_fill(either, torch.nan) for values in maps]
    labels = _labels(names, made)
    return Comparison(
        compared=results[0].kind,
        names=labels,
        over=read[0].over,
        maps=shared,
        measure=read[0].measure,
        columns=read[0].columns or tuple(map(str, range(maps[0].shape[2]))),
        first=maps[0],
        second=maps[1],
        correlation=torch.tensor([_correlation(one, two) for one, two in zip(*maps, strict=True)]),
        chosen_as=read[0].chosen_as,
        **_chosen(read, shared),
        left_out=tuple(left_out),
        differing=tuple(_differing(*made)),
        first_provenance=made[0],
        second_provenance=made[1],
        provenance=_provenance(made, {"names": list(labels), "common": common}, results[0]),
        **_ends(read, places),
    )


def _maps(result: Result) -> ComparedMaps:
    if not hasattr(result, "compared_maps"):
        known = ", ".join(name for name, kind in kinds().items() if hasattr(kind, "compared_maps"))
        raise UsageError(f"A result of kind {result.kind!r} cannot be compared. These can: {known}.")
    maps: ComparedMaps = result.compared_maps()
    return maps


def _require_one_question(read: Sequence[ComparedMaps], provenances: Sequence[Provenance]) -> None:
    """Refuse two results whose numbers do not mean the same, or whose heads do not correspond."""
    fixed = [
        {**one.fixed, **{name: made.options[name] for name in _DECIDE if name in made.options}}
        for one, made in zip(read, provenances, strict=True)
    ]
    for name in fixed[0]:
        if name in fixed[1] and fixed[0][name] != fixed[1][name]:
            raise UsageError(
                f"{name} is {fixed[0][name]!r} in the first result and {fixed[1][name]!r} in the second, so their "
                "numbers do not mean the same. Compute both with the same."
            )
    shapes = [one.values.shape[1:] if one.columns is None else one.values.shape[1:2] for one in read]
    if shapes[0] != shapes[1]:
        counts = [" x ".join(map(str, shape)) for shape in shapes]
        what = "layers and heads" if len(shapes[0]) == 2 else "layers"
        raise UsageError(
            f"The first result has {counts[0]} {what} and the second {counts[1]}. Heads of models of different shape "
            "do not correspond; compare two of one architecture."
        )
    if read[0].columns != read[1].columns:
        raise UsageError(
            f"The first result has the components {', '.join(read[0].columns or ())} and the second "
            f"{', '.join(read[1].columns or ())}. Compare two models with the same."
        )


def _common_maps(read: Sequence[ComparedMaps], common: bool) -> tuple[tuple[str, ...], list[str]]:
    over = read[0].over
    shared = tuple(name for name in read[0].names if name in read[1].names)
    alone = [[name for name in read[i].names if name not in shared] for i in (0, 1)]
    told = [f"{over} {name} of the {which}" for which, left in zip(_WHICH, alone, strict=True) for name in left]
    if not shared:
        raise UsageError(
            f"The two results have no {over} in common: {', '.join(read[0].names)} in the first, "
            f"{', '.join(read[1].names)} in the second. Compute both for the same."
        )
    if told and not common:
        raise UsageError(f"Not in both: {'; '.join(told)}. Pass common=True to compare what both have.")
    return shared, told


def _ends(read: Sequence[ComparedMaps], places: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Ends of intervals, where both results have them."""
    ends: dict[str, Any] = {}
    for which, one, at in zip(_WHICH, read, places, strict=True):
        low, high = one.ends
        if low is None or high is None or bool(low.isnan().all()):
            return {}
        ends |= {f"{which}_low": low[at].float(), f"{which}_high": high[at].float()}
    return ends


def _chosen(read: Sequence[ComparedMaps], shared: Sequence[str]) -> dict[str, Any]:
    """Heads singled out by the second alone, the first alone and both, by name."""
    one, two = (part.chosen for part in read)
    # Names of heads are not maps: those that either result gives count.
    maps = {*read[0].names, *read[1].names}
    listed = [name for name in dict.fromkeys([*one, *two]) if name in shared or name not in maps]
    sets: dict[str, dict[str, tuple[HeadIndex, ...]]] = {"gained": {}, "lost": {}, "kept": {}}
    for name in listed:
        before, after = one.get(name, ()), two.get(name, ())
        sets["gained"][name] = tuple(head for head in after if head not in before)
        sets["lost"][name] = tuple(head for head in before if head not in after)
        sets["kept"][name] = tuple(head for head in after if head in before)
    return sets


def _correlation(one: Tensor, two: Tensor) -> float:
    """Rank correlation over the cells that both maps have; NaN if one of them is constant."""
    defined = ~one.isnan()
    parts = [values[defined] for values in (one, two)]
    if any(len(part.unique()) < 2 for part in parts):
        return math.nan
    return float(rank_correlations(*(part[None] for part in parts)))


def _labels(names: Sequence[str] | None, provenances: Sequence[Provenance]) -> tuple[str, str]:
    if names is not None:
        if isinstance(names, str) or len(names) != 2 or names[0] == names[1]:
            raise UsageError(f"names={names!r:.120} does not tell two results apart. Give two different names.")
        return names[0], names[1]
    first, second = (made.model for made in provenances)
    return (first, second) if first != second else ("first", "second")


def _differing(first: Provenance, second: Provenance) -> list[str]:
    """Fields of two provenances that differ, with both values; model, time and notes are told elsewhere."""
    found = []
    for name in ("architecture", "basis", "dtype", "device", "seed"):
        values = getattr(first, name), getattr(second, name)
        if values[0] != values[1]:
            found.append(f"{name} ({values[0]} and {values[1]})")
    for group in ("options", "data", "versions"):
        one, two = getattr(first, group), getattr(second, group)
        for name in dict.fromkeys([*one, *two]):
            if name in _OF_THE_MODEL or one.get(name) == two.get(name):
                continue
            plain = all(isinstance(part.get(name), str | int | float | None) for part in (one, two)) and group != "data"
            found.append(f"{name} ({one.get(name)} and {two.get(name)})" if plain else name)
    return found


def _provenance(made: Sequence[Provenance], options: dict[str, Any], result: Result) -> Provenance:
    digest = sha256(" ".join(one.fingerprint for one in made).encode()).hexdigest()
    both: dict[str, Any] = {
        name: " and ".join(dict.fromkeys(getattr(one, name) for one in made))
        for name in ("model", "architecture", "basis", "dtype", "device")
    }
    # What weights leave out of values does not concern where heads look.
    of_values = getattr(result, "circuit", "ov") != "qk"
    notes = list(dict.fromkeys(note for one in made for note in one.notes)) if of_values else []
    return Provenance(fingerprint=digest, options=options, mixers=made[0].mixers, notes=notes, **both)
