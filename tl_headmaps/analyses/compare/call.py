"""What is different between two results of one kind: a base model and its fine-tuned form, say.

Both results must ask the same question: one kind, the same relations (or scores, functions, components), the same
options that decide what a number means (preset, circuit, k, metric). Then they are compared cell by cell.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.ambient import steady
from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import HeadIndex
from ...results import Result
from ...scorers.tasks import rank_correlations
from ..component_map.result import ComponentMap, HeadComponentMap
from ..grouping_profile import GroupingProfile
from ..head_trust import HeadTrust
from ..head_worth import HeadWorth
from ..name_heads import HeadNames
from ..relation_scores.result import RelationScores
from ..task_maps import TaskMaps
from .result import Comparison


@dataclass(frozen=True)
class _Maps:
    """A result as maps of one kind of number.

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


def _of_relations(result: RelationScores) -> _Maps:
    k = {f"k of {name}": k for name, k in zip(result.relations, result.k, strict=True)}
    return _Maps(
        over="relation",
        measure="share of pairs",
        names=result.relations,
        values=result.promote,
        ends=(result.interval_low, result.interval_high),
        chosen=result.implements(),
        chosen_as="implement",
        fixed={"circuit": result.circuit, **k},
    )


def _of_trust(result: HeadTrust) -> _Maps:
    names = tuple(result.token_share)
    values, low, high = (
        torch.stack([maps[name] for name in names])
        for maps in (result.token_share, result.interval_low, result.interval_high)
    )
    return _Maps("vectors", "share that tokens explain", names, values, (low, high))


def _of_profile(result: GroupingProfile) -> _Maps:
    ends = (result.interval_low, result.interval_high)
    return _Maps("score", "share of attention", result.scores, result.values, ends)


def _of_worth(result: HeadWorth) -> _Maps:
    ends = (result.interval_low[None], result.interval_high[None])
    return _Maps("map", "nats per token", ("rise of the loss",), result.worth[None], ends)


def _of_tasks(result: TaskMaps) -> _Maps:
    return _Maps(
        over="function",
        measure="importance",
        names=result.functions,
        values=result.importance,
        ends=(result.interval_low, result.interval_high),
        chosen=dict(zip(result.functions, result.standing_out, strict=True)),
        chosen_as="stand out for",
        fixed={"positions": result.positions},
    )


def _of_names(result: HeadNames) -> _Maps:
    return _Maps(
        over="map",
        measure="share of mappings explained",
        names=("best predicate",),
        values=result.values[None],
        chosen=result.named(),
        chosen_as="are named",
        fixed={"circuit": result.circuit},
    )


def _of_components(result: ComponentMap | HeadComponentMap) -> _Maps:
    fixed = {"metric": result.metric, "relative": result.relative}
    low, high = result.interval_low, result.interval_high
    if isinstance(result, HeadComponentMap):
        return _Maps("component", result.unit, result.components, result.values, (low, high), fixed=fixed)
    ends = (None if low is None else low[None], None if high is None else high[None])
    return _Maps("metric", result.unit, (result.metric,), result.values[None], ends, result.components, fixed=fixed)


_KINDS: dict[type[Result], Callable[[Any], _Maps]] = {
    RelationScores: _of_relations,
    HeadTrust: _of_trust,
    HeadWorth: _of_worth,
    GroupingProfile: _of_profile,
    TaskMaps: _of_tasks,
    HeadNames: _of_names,
    ComponentMap: _of_components,
    HeadComponentMap: _of_components,
}
"""Results that can be compared: those that are maps of layers by heads, or by components."""


@steady
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
    read, provenances = [_read(result) for result in results], [result.provenance for result in results]
    _require_one_question(read, provenances)
    shared, left_out = _common_maps(read, common)
    picked = [[one.names.index(name) for name in shared] for one in read]
    maps = [one.values[at].float() for one, at in zip(read, picked, strict=True)]
    alone = [(~maps[i].isnan() & maps[1 - i].isnan()).any(0).sum().item() for i in (0, 1)]
    for n, which, other in zip(alone, ("first", "second"), ("second", "first"), strict=True):
        if n and not common:
            raise UsageError(
                f"{n:,} cells have a value in the {which} result and none in the {other}. Compute both for the same "
                "heads, or pass common=True to compare those that both have."
            )
        left_out += [f"{n:,} cells of the {which}"] * bool(n)
    ends = _ends(read, picked)
    both = maps[0].isnan() | maps[1].isnan()
    maps = [values.masked_fill(both, torch.nan) for values in maps]
    columns = read[0].columns or tuple(map(str, range(maps[0].shape[2])))
    labels = _labels(names, provenances)
    return Comparison(
        compared=results[0].kind,
        names=labels,
        over=read[0].over,
        maps=shared,
        measure=read[0].measure,
        columns=columns,
        first=maps[0],
        second=maps[1],
        correlation=torch.tensor([_correlation(one, two) for one, two in zip(*maps, strict=True)]),
        chosen_as=read[0].chosen_as,
        **_chosen(read, shared),
        left_out=tuple(left_out),
        differing=tuple(_differing(*provenances)),
        first_provenance=provenances[0],
        second_provenance=provenances[1],
        provenance=_provenance(
            provenances, {"names": list(labels), "common": common}, getattr(results[0], "circuit", "ov")
        ),
        **ends,
    )


def _read(result: Result) -> _Maps:
    for kind, maps in _KINDS.items():
        if type(result) is kind:
            return maps(result)
    known = ", ".join(kind.kind for kind in _KINDS)
    raise UsageError(f"A result of kind {result.kind!r} cannot be compared. These can: {known}.")


def _require_one_question(read: Sequence[_Maps], provenances: Sequence[Provenance]) -> None:
    """Refuse two results whose numbers do not mean the same, or whose heads do not correspond."""
    fixed = [{**one.fixed, **_meaning(made)} for one, made in zip(read, provenances, strict=True)]
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


def _meaning(made: Provenance) -> dict[str, Any]:
    """Options that decide what a number is."""
    return {name: made.options[name] for name in ("preset", "vocabulary", "normalise") if name in made.options}


def _common_maps(read: Sequence[_Maps], common: bool) -> tuple[tuple[str, ...], list[str]]:
    over = read[0].over
    shared = tuple(name for name in read[0].names if name in read[1].names)
    alone = [[name for name in read[i].names if name not in shared] for i in (0, 1)]
    told = [
        f"{over} {name} of the {which}" for which, own in zip(("first", "second"), alone, strict=True) for name in own
    ]
    if not shared:
        raise UsageError(
            f"The two results have no {over} in common: {', '.join(read[0].names)} in the first, "
            f"{', '.join(read[1].names)} in the second. Compute both for the same."
        )
    if told and not common:
        raise UsageError(f"Not in both: {'; '.join(told)}. Pass common=True to compare what both have.")
    return shared, told


def _ends(read: Sequence[_Maps], picked: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Ends of intervals, where both results have them."""
    ends: dict[str, Any] = {}
    for which, one, at in zip(("first", "second"), read, picked, strict=True):
        low, high = one.ends
        if low is None or high is None or bool(low.isnan().all()):
            return {}
        ends |= {f"{which}_low": low[at].float(), f"{which}_high": high[at].float()}
    return ends


def _chosen(read: Sequence[_Maps], shared: Sequence[str]) -> dict[str, Any]:
    """Heads singled out by the second alone, the first alone and both, by name."""
    one, two = (part.chosen for part in read)
    # Names of heads are no maps: those that either result gives count.
    listed = [name for name in dict.fromkeys([*one, *two]) if name in shared or read[0].over == "map"]
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


_OF_THE_MODEL = ("parameters", "mlp_weights")
"""Digests of the models themselves, which are meant to differ."""


def _provenance(made: Sequence[Provenance], options: dict[str, Any], circuit: str) -> Provenance:
    digest = sha256(" ".join(one.fingerprint for one in made).encode()).hexdigest()
    both: dict[str, Any] = {
        name: _joined(getattr(one, name) for one in made)
        for name in ("model", "architecture", "basis", "dtype", "device")
    }
    # What weights leave out of values does not concern where heads look.
    notes = [] if circuit == "qk" else list(dict.fromkeys(note for one in made for note in one.notes))
    return Provenance(fingerprint=digest, options=options, mixers=made[0].mixers, notes=notes, **both)


def _joined(values: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(values))
