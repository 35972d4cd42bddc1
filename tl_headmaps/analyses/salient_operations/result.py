"""What heads do most: their salient tokens with the targets of each, and a name where a head earns one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import Circuit, HeadIndex, HeadLike, head_list
from ...naming.namer import HeadName
from ...renderers.figure import Figure
from ...renderers.grids import MapLayer
from ...renderers.heat import head_map, token_grid
from ...renderers.listing import beside, table_figure
from ...renderers.text import as_words, quoted, table_text, visible
from ...renderers.text import number as decimal
from ...renderers.views import top_tokens_view
from ...results import Result

if TYPE_CHECKING:
    from typing import Self

View: TypeAlias = Literal["auto", "map", "table", "top_tokens"]

ARRAYS = ("token_ids", "salience", "promoted_ids", "promoted_values", "suppressed_ids", "suppressed_values")
"""Fields with the heads as their first axis and the salient tokens as their second."""

_FEW_HEADS = 12
_LISTED_TOKENS, _LISTED_TARGETS = 10, 3
"""What a pinned head lists in a map of all heads: more would make the page heavy."""

_MOST_ROWS, _TOKENS_OF_EACH = 60, 5
"""A text with more rows than a screen or two shows this many tokens of each head."""


@dataclass(frozen=True)
class OperationGrid:
    """What a head does, as a picture: a few of its salient tokens (rows) by targets of theirs (columns).

    Attributes:
        token_ids: The most salient tokens.
        target_ids: A target of each: the strongest one that the best predicate explains, or else the strongest.
        values: Entries of the map.
        explained: Whether the best predicate explains the target as one of the token's strongest.
    """

    token_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    explained: tuple[tuple[bool, ...], ...]

    def __post_init__(self) -> None:
        shape = [len(self.target_ids)] * len(self.token_ids)
        if any([len(row) for row in table] != shape for table in (self.values, self.explained)):
            raise ValueError("a grid whose rows are not as long as its columns are many")


@dataclass(frozen=True, eq=False, repr=False)
class SalientOperations(Result):
    """The most salient tokens of each head, with the targets they promote and suppress most, and names.

    Attributes:
        circuit: ``"ov"`` or ``"qk"``.
        heads: The heads, the first axis of every array.
        token_ids: Salient source tokens (for QK: query tokens), most salient first.
        salience: Their salience ratios.
        promoted_ids, promoted_values: Strongest targets of each, strongest first.
        suppressed_ids, suppressed_values: Most suppressed targets, most negative first.
        strings: Text of every token above, by id.
        names: What each head does, in one name.
        grids: The same as a picture of a few tokens.
        left_out: How many tokens of the vocabulary were not considered, by reason.
        failed_predicates: Predicates that raised, with their errors; they were left out.

    Example:
        >>> from tl_headmaps import load_default_model, salient_operations
        >>> operations = salient_operations(load_default_model(), "L0H5", n_tokens=10, n_targets=3, progress=False)
        >>> tuple(operations.salience.shape), tuple(operations.promoted_ids.shape)
        ((1, 10), (1, 10, 3))
        >>> operations.mappings("L0H5")[0], operations.name("L0H5").name
        (('.', [' ', ',', ' and']), 'unclear')
    """

    kind: ClassVar[str] = "salient_operations"
    methods: ClassVar[tuple[str, ...]] = ("elhelo2024maps", "elhage2021framework", "benjamini1995controlling")
    circuit: Circuit
    heads: tuple[HeadIndex, ...]
    token_ids: Int[Tensor, "head token"]
    salience: Float[Tensor, "head token"]
    promoted_ids: Int[Tensor, "head token target"]
    promoted_values: Float[Tensor, "head token target"]
    suppressed_ids: Int[Tensor, "head token target"]
    suppressed_values: Float[Tensor, "head token target"]
    strings: dict[int, str]
    names: tuple[HeadName, ...]
    grids: tuple[OperationGrid, ...]
    left_out: dict[str, int]
    failed_predicates: dict[str, str]
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "head token"]:
        """The salience ratios."""
        return self.salience

    def index_of(self, head: HeadLike) -> int:
        """Position of a head on the first axis."""
        index = HeadIndex.of(head)
        if index not in self.heads:
            listed = ", ".join(map(str, self.heads[:10])) + (", ..." if len(self.heads) > 10 else "")
            raise UsageError(f"This result has no head {index}; it has {listed}.")
        return self.heads.index(index)

    def name(self, head: HeadLike) -> HeadName:
        """The name of one head, with its evidence."""
        return self.names[self.index_of(head)]

    def mappings(self, head: HeadLike) -> list[tuple[str, list[str]]]:
        """Salient tokens of one head, each with the targets it promotes."""
        number = self.index_of(head)
        return [
            (self.strings[token], [self.strings[target] for target in targets])
            for token, targets in zip(self.token_ids[number].tolist(), self.promoted_ids[number].tolist(), strict=True)
        ]

    def top(self, n: int = 5) -> list[tuple[HeadIndex, float]]:
        """The ``n`` heads of which the best name explains most (ties: the first)."""
        scores = zip(self.heads, (name.score for name in self.names), strict=True)
        return sorted(scores, key=lambda entry: -entry[1])[:n]

    def select(self, heads: HeadLike | Iterable[HeadLike]) -> "SalientOperations":
        """The same result for some heads, in the order given."""
        numbers = [self.index_of(head) for head in head_list(heads, self.heads)]
        arrays = {name: getattr(self, name)[numbers] for name in ARRAYS}
        used = token_ids_in(arrays)
        return replace(
            self,
            heads=tuple(self.heads[i] for i in numbers),
            names=tuple(self.names[i] for i in numbers),
            grids=tuple(self.grids[i] for i in numbers),
            strings={token: text for token, text in self.strings.items() if token in used},
            **arrays,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: one operation per head."""
        return {
            "kind": self.kind,
            "circuit": self.circuit,
            "operations": [self._operation(number) for number in range(len(self.heads))],
            "left_out": self.left_out,
            "failed_predicates": self.failed_predicates,
            "provenance": self.provenance.to_dict(),
        }

    def _operation(self, number: int) -> dict[str, Any]:
        operation: dict[str, Any] = {"head": str(self.heads[number]), **self.names[number].to_dict()}
        operation["tokens"] = [
            {
                **self._token(token),
                "salience": float(self.salience[number, place]),
                "promotes": self._targets(self.promoted_ids[number, place], self.promoted_values[number, place]),
                "suppresses": self._targets(self.suppressed_ids[number, place], self.suppressed_values[number, place]),
            }
            for place, token in enumerate(self.token_ids[number].tolist())
        ]
        grid = self.grids[number]
        operation["grid"] = {
            "tokens": [self._token(token) for token in grid.token_ids],
            "targets": [self._token(target) for target in grid.target_ids],
            "values": grid.values,
            "explained": grid.explained,
        }
        return operation

    def _token(self, token_id: int) -> dict[str, Any]:
        return {"token": self.strings[token_id], "id": token_id}

    def _targets(self, ids: Tensor, values: Tensor) -> list[dict[str, Any]]:
        return [
            {**self._token(token), "value": value} for token, value in zip(ids.tolist(), values.tolist(), strict=True)
        ]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        operations = values["operations"]
        tokens = [operation["tokens"] for operation in operations]
        strings: dict[int, str] = {}

        def id_of(entry: dict[str, Any]) -> int:
            strings[entry["id"]] = entry["token"]
            return int(entry["id"])

        def targets(name: str) -> tuple[Tensor, Tensor]:
            ids = [[[id_of(target) for target in token[name]] for token in listed] for listed in tokens]
            entries = [[[target["value"] for target in token[name]] for token in listed] for listed in tokens]
            return torch.tensor(ids), torch.tensor(entries, dtype=torch.float32)

        def grid(entry: dict[str, Any]) -> OperationGrid:
            return OperationGrid(
                token_ids=tuple(map(id_of, entry["tokens"])),
                target_ids=tuple(map(id_of, entry["targets"])),
                values=tuple(map(tuple, entry["values"])),
                explained=tuple(map(tuple, entry["explained"])),
            )

        promoted, suppressed = targets("promotes"), targets("suppresses")
        return cls(
            circuit=values["circuit"],
            heads=tuple(HeadIndex.parse(operation["head"]) for operation in operations),
            token_ids=torch.tensor([[id_of(token) for token in listed] for listed in tokens]),
            salience=torch.tensor([[token["salience"] for token in listed] for listed in tokens], dtype=torch.float32),
            promoted_ids=promoted[0],
            promoted_values=promoted[1],
            suppressed_ids=suppressed[0],
            suppressed_values=suppressed[1],
            names=tuple(HeadName.from_dict(operation) for operation in operations),
            grids=tuple(grid(operation["grid"]) for operation in operations),
            left_out=dict(values["left_out"]),
            failed_predicates=dict(values["failed_predicates"]),
            provenance=Provenance.from_dict(values["provenance"]),
            strings=strings,
        )

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per head, salient token and target."""
        for number, head in enumerate(self.heads):
            for place, token in enumerate(self.token_ids[number].tolist()):
                for direction in ("promoted", "suppressed"):
                    ids = getattr(self, f"{direction}_ids")[number, place].tolist()
                    values = getattr(self, f"{direction}_values")[number, place].tolist()
                    for rank, (target, value) in enumerate(zip(ids, values, strict=True)):
                        yield {
                            "head": str(head),
                            "name": self.names[number].name,
                            "token": self.strings[token],
                            "token_id": token,
                            "salience": float(self.salience[number, place]),
                            "direction": direction,
                            "rank": rank,
                            "target": self.strings[target],
                            "target_id": target,
                            "value": value,
                        }

    def figure(self, *, view: View = "auto") -> Figure:
        """The salient tokens of each head with their targets.

        Args:
            view: ``"table"`` (the default up to a dozen heads) beside a small grid of each head, ``"map"`` of the
                names' scores with the tokens of a pinned head, or ``"top_tokens"``: the most promoted targets, drawn by
                circuitsvis.
        """
        title = f"Salient operations, {self.circuit.upper()} circuits, preset {self.provenance.options['preset']}"
        if view == "auto":
            view = "table" if len(self.heads) <= _FEW_HEADS else "map"
        if view == "table":
            rows = []
            for number, head in enumerate(self.heads):
                for place, row in enumerate(self._token_rows(number)):
                    rows.append([*((str(head), self.names[number].name) if place == 0 else ("", "")), *row])
            titles = ["head", "name", "token", "salience", *self._verbs]
            listed = table_figure(titles, rows, title="Salient tokens", text=str(self), unbroken=True)
            return beside([*map(self._grid, range(len(self.heads))), listed], title=title, text=str(self))
        if view == "map":
            return self._map(title)
        if view == "top_tokens":
            tops = {head: self._strongest(number) for number, head in enumerate(self.heads)}
            return top_tokens_view(tops, title=title)
        raise UsageError(f"view={view!r} is not known. Choose one of: 'auto', 'map', 'table', 'top_tokens'.")

    @property
    def _verbs(self) -> tuple[str, str]:
        return ("promotes", "suppresses") if self.circuit == "ov" else ("attends to", "avoids")

    def _token_rows(self, number: int) -> list[list[str]]:
        """Salient tokens of one head: token, salience, promoted and suppressed targets."""
        rows = []
        for place, token in enumerate(self.token_ids[number].tolist()):
            targets = [
                " ".join(quoted(self.strings[target]) for target in ids[number, place].tolist())
                for ids in (self.promoted_ids, self.suppressed_ids)
            ]
            rows.append([quoted(self.strings[token]), f"{self.salience[number, place]:.3g}", *targets])
        return rows

    def _grid(self, number: int) -> Figure:
        """A few salient tokens by their targets, with the operation's name and score below."""
        grid, entry = self.grids[number], self.names[number]
        values = torch.tensor(grid.values)
        rows, columns = (as_words([self.strings[token] for token in ids]) for ids in (grid.token_ids, grid.target_ids))
        marks = MapLayer("", values, marked=torch.tensor(grid.explained).float())
        return token_grid(
            marks,
            rows,
            columns,
            title=f"{self.heads[number]}: {entry.name}",
            unit="entry of the map",
            rows="source" if self.circuit == "ov" else "query",
            columns="target" if self.circuit == "ov" else "key",
            mark=f"{entry.best} explains this target",
            note=_caption(entry),
        )

    def _map(self, title: str) -> Figure:
        shape = (1 + max(head.layer for head in self.heads), 1 + max(head.head for head in self.heads))
        values = torch.full(shape, float("nan"))
        drill = {}
        for number, head in enumerate(self.heads):
            values[head.layer, head.head] = self.names[number].score
            rows = [
                [quoted(self.strings[token]), " ".join(quoted(self.strings[t]) for t in targets[:_LISTED_TARGETS])]
                for token, targets in zip(
                    self.token_ids[number].tolist()[:_LISTED_TOKENS], self.promoted_ids[number].tolist(), strict=False
                )
            ]
            drill[str(head)] = {"what it does": self.names[number].evidence(), f"token, {self._verbs[0]}": rows}
        return head_map(
            values,
            title=title,
            unit="share of mappings the best predicate explains",
            signed=False,
            drill=drill,
            empty=self.provenance.short_rows,
            note=self._noted(
                "Pin a head to see its name, its salient tokens and their strongest targets; search finds a token.", " "
            ),
        )

    def _strongest(self, number: int) -> list[tuple[str, float]]:
        """The largest values among a head's targets, each target once."""
        best: dict[int, float] = {}
        ids, values = self.promoted_ids[number].flatten().tolist(), self.promoted_values[number].flatten().tolist()
        for target, value in zip(ids, values, strict=True):
            best[target] = max(value, best.get(target, value))
        ranked = sorted(best.items(), key=lambda item: (-item[1], item[0]))[:_LISTED_TOKENS]
        return [(self.strings[target], value) for target, value in ranked]

    def __str__(self) -> str:
        """Each head's name, then its salient tokens with what they promote and suppress."""
        options = self.provenance.options
        parts = [f"Salient operations of {self.circuit.upper()} circuits, preset {options['preset']}"]
        if self.left_out:
            counts = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
            parts.append(f"Tokens left out: {counts}")
        token = "token" if self.circuit == "ov" else "query"
        columns = [(token, "left"), ("salience", "right"), *((verb, "left") for verb in self._verbs)]
        n_tokens = self.salience.shape[1]
        shown = n_tokens if n_tokens * len(self.heads) <= _MOST_ROWS else min(n_tokens, _TOKENS_OF_EACH)
        for number, head in enumerate(self.heads):
            table = table_text(columns, self._token_rows(number)[:shown])
            parts.append(f"{head}: {_name_line(self.names[number])}\n\n{table}")
        if shown < n_tokens:
            first = self.heads[0]
            parts.append(f"Of each head the {shown} most salient of {n_tokens} tokens; select('{first}') prints all.")
        return self._noted("\n\n".join([*parts, *failure_lines(self.failed_predicates)]))


def token_ids_in(arrays: Mapping[str, Tensor]) -> set[int]:
    """Every token that occurs in the arrays of a result."""
    return {token for name in ARRAYS if name.endswith("_ids") for token in arrays[name].unique().tolist()}


def _name_line(entry: HeadName) -> str:
    line = entry.name if entry.best in (None, entry.name) else f"{entry.name} (best: {entry.best})"
    if entry.best is not None:
        line += f"; score {decimal(entry.score)}, null {decimal(entry.null_mean)}, p {_small(entry.p_value)}"
        line += f", q {_small(entry.q_value)}"
    if entry.runner_up is not None:
        line += f"; runner-up: {entry.runner_up} {decimal(entry.runner_up_score)}"
    if entry.description is not None:
        line += f"\n  described as: {visible(entry.description)}"
    if entry.description_error is not None:
        line += f"\n  not described: {visible(entry.description_error)}"
    return line


def _caption(entry: HeadName) -> str:
    """What stands below a grid: ``name variations 0.9``, and how sure that is."""
    if entry.best is None:
        return entry.name
    named = entry.name if entry.best == entry.name else f"{entry.name}; best: {entry.best}"
    return f"{named} {entry.score:.2g} · null {entry.null_mean:.2g} · q {_small(entry.q_value).replace('<', '< ')}"


def _small(value: float) -> str:
    return f"{value:.1g}" if value > 1e-9 else "<1e-9"


def failure_lines(failed: dict[str, str]) -> list[str]:
    """A line for each predicate that raised."""
    return [f"Predicate {name!r} raised and was left out: {visible(error)}" for name, error in failed.items()]
