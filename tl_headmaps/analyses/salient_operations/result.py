"""What heads do most: their salient tokens with the targets of each, and a name where one is earned."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import Circuit, HeadIndex, HeadLike
from ...renderers.figure import Figure
from ...results import Result

if TYPE_CHECKING:
    from typing import Self

UNCLEAR = "unclear"
"""The name of a head no predicate explains better than chance."""

MIXED = "mixed"
"""The input class of a head whose salient tokens have no class in common."""


@dataclass(frozen=True)
class HeadName:
    """The best explanation of one head.

    Attributes:
        name: A predicate of the catalogue, ``suppress ...`` where it holds for suppressed targets, or ``unclear``.
        score: Share of the salient mappings that the best predicate explains, also where it is not enough for a name.
        null_mean: The same with target lists dealt to sources at random.
        lift: Score over null.
        p_value: Probability that dealt lists score as well.
        q_value: The same after Benjamini-Hochberg over all heads and predicates of this result.
        best: The best predicate, whether or not it earned the name.
        runner_up: The second-best, with its score and p-value, if there is one.
        input_class: What the salient tokens have in common, or ``mixed``.
        input_share: Share of them in that class.
        description: What the user's ``describe`` said.
        description_error: Why it said nothing usable.
    """

    name: str
    score: float
    null_mean: float
    lift: float
    p_value: float
    q_value: float
    best: str | None = None
    runner_up: str | None = None
    runner_up_score: float = 0.0
    runner_up_p_value: float = 1.0
    input_class: str = MIXED
    input_share: float = 0.0
    description: str | None = None
    description_error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the name first."""
        return dict(vars(self))


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
        left_out: How many tokens of the vocabulary were not considered, by reason.
        failed_predicates: Predicates that raised, with their errors; they were left out.
        largest: (source id, target id, value) of the largest entries of each whole map, if asked for.

    Example:
        >>> from tl_headmaps import load_default_model, salient_operations
        >>> found = salient_operations(load_default_model(), "L0H5", n_tokens=10, n_targets=3, progress=False)
        >>> tuple(found.salience.shape), tuple(found.promoted_ids.shape)
        ((1, 10), (1, 10, 3))
        >>> found.mappings("L0H5")[0], found.name("L0H5").name
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
    left_out: dict[str, int]
    failed_predicates: dict[str, str]
    provenance: Provenance
    largest: tuple[tuple[tuple[int, int, float], ...], ...] | None = None

    @property
    def values(self) -> Float[Tensor, "head token"]:
        """The salience ratios."""
        return self.salience

    def number(self, head: HeadLike) -> int:
        """Position of a head in this result."""
        index = HeadIndex.of(head)
        if index not in self.heads:
            raise UsageError(f"This result has no head {index}; it has {', '.join(map(str, self.heads[:10]))}, ...")
        return self.heads.index(index)

    def name(self, head: HeadLike) -> HeadName:
        """The name of one head, with its evidence."""
        return self.names[self.number(head)]

    def mappings(self, head: HeadLike) -> list[tuple[str, list[str]]]:
        """Salient tokens of one head, each with the targets it promotes."""
        number = self.number(head)
        return [
            (self.strings[token], [self.strings[target] for target in targets])
            for token, targets in zip(self.token_ids[number].tolist(), self.promoted_ids[number].tolist(), strict=True)
        ]

    def select(self, heads: Iterable[HeadLike]) -> "SalientOperations":
        """The same result for some heads."""
        numbers = [self.number(head) for head in heads]
        arrays = ("token_ids", "salience", "promoted_ids", "promoted_values", "suppressed_ids", "suppressed_values")
        return replace(
            self,
            heads=tuple(self.heads[i] for i in numbers),
            names=tuple(self.names[i] for i in numbers),
            largest=None if self.largest is None else tuple(self.largest[i] for i in numbers),
            **{name: getattr(self, name)[numbers] for name in arrays},
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
        if self.largest is not None:
            operation["largest"] = [
                {"source": self._token(source), "target": self._token(target), "value": value}
                for source, target, value in self.largest[number]
            ]
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

        def seen(entry: dict[str, Any]) -> int:
            strings[entry["id"]] = entry["token"]
            return int(entry["id"])

        def targets(name: str) -> tuple[Tensor, Tensor]:
            ids = [[[seen(target) for target in token[name]] for token in listed] for listed in tokens]
            found = [[[target["value"] for target in token[name]] for token in listed] for listed in tokens]
            return torch.tensor(ids), torch.tensor(found, dtype=torch.float32)

        promoted, suppressed = targets("promotes"), targets("suppresses")
        fields = HeadName.__dataclass_fields__
        largest = [operation.get("largest") for operation in operations]
        return cls(
            circuit=values["circuit"],
            heads=tuple(HeadIndex.parse(operation["head"]) for operation in operations),
            token_ids=torch.tensor([[seen(token) for token in listed] for listed in tokens]),
            salience=torch.tensor([[token["salience"] for token in listed] for listed in tokens], dtype=torch.float32),
            promoted_ids=promoted[0],
            promoted_values=promoted[1],
            suppressed_ids=suppressed[0],
            suppressed_values=suppressed[1],
            names=tuple(HeadName(**{name: operation[name] for name in fields}) for operation in operations),
            left_out=dict(values["left_out"]),
            failed_predicates=dict(values["failed_predicates"]),
            provenance=Provenance.from_dict(values["provenance"]),
            largest=None
            if None in largest
            else tuple(
                tuple((seen(entry["source"]), seen(entry["target"]), float(entry["value"])) for entry in entries)
                for entries in largest
            ),
            strings=strings,
        )

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per head, salient token and target."""
        for number, head in enumerate(self.heads):
            for place, token in enumerate(self.token_ids[number].tolist()):
                for direction in ("promoted", "suppressed"):
                    ids = getattr(self, f"{direction}_ids")[number, place].tolist()
                    found = getattr(self, f"{direction}_values")[number, place].tolist()
                    for rank, (target, value) in enumerate(zip(ids, found, strict=True)):
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

    def figure(self, **options: Any) -> Figure:
        """The picture of this result."""
        from .drawing import salient_operations_figure

        return salient_operations_figure(self, **options)

    def __str__(self) -> str:
        from .text import salient_operations_text

        return salient_operations_text(self)
