"""How accurately each head implements each relation, and how sure that is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import Circuit, HeadIndex, HeadLike
from ...renderers.figure import Figure
from ...results import Result, nested, tensor_of

if TYPE_CHECKING:
    from typing import Self

ScoreDirection: TypeAlias = Literal["promote", "suppress"]

IMPLEMENTS_SCORE = 0.15
IMPLEMENTS_Q = 0.05
_MAPS = (
    "promote",
    "suppress",
    "null_mean",
    "p_value",
    "q_value",
    "interval_low",
    "interval_high",
    "suppress_null_mean",
    "suppress_p_value",
    "suppress_q_value",
)
"""Fields with one value per relation, layer and head."""


@dataclass(frozen=True, eq=False, repr=False)
class RelationScores(Result):
    """Scores of relations (first axis) by layer and head; cells that were not asked for are NaN.

    Attributes:
        relations: Names of the relations.
        circuit: ``"ov"`` (what heads write) or ``"qk"`` (where they look).
        k: Top-k of each relation.
        n_pairs: Pairs given.
        n_kept: Pairs whose words are single tokens, the ones scored.
        dropped: (source, target, reason) of the others, by relation.
        promote: Share of pairs whose target is among the k strongest tokens the head writes.
        suppress: Share of pairs whose target is among the k it suppresses most.
        null_mean: Mean promotion score with targets shuffled among the relation's sources.
        p_value: Probability that shuffled targets score as well.
        q_value: The same after Benjamini-Hochberg over all heads and relations of this result.
        interval_low, interval_high: 95% Wilson interval of ``promote``.
        suppress_null_mean, suppress_p_value, suppress_q_value: The same for ``suppress``.
        promote_ranks, suppress_ranks: Exact rank of every kept pair's target, by relation, if asked for.

    Example:
        >>> from tl_headmaps import load_default_model, relation_scores
        >>> scores = relation_scores(load_default_model(), "country_to_capital", heads="L23H4", progress=False)
        >>> scores.implements()
        {'country_to_capital': [HeadIndex(layer=23, head=4)]}
        >>> round(float(scores.interval_low[0, 23, 4]), 2), round(float(scores.null_mean[0, 23, 4]), 2)
        (0.61, 0.02)
        >>> scores.n_kept, scores.n_pairs  # pairs of single tokens, of all
        ((42,), (106,))
    """

    kind: ClassVar[str] = "relation_scores"
    methods: ClassVar[tuple[str, ...]] = (
        "elhelo2024maps",
        "elhage2021framework",
        "benjamini1995controlling",
        "wilson1927probable",
    )
    relations: tuple[str, ...]
    circuit: Circuit
    k: tuple[int, ...]
    n_pairs: tuple[int, ...]
    n_kept: tuple[int, ...]
    dropped: tuple[tuple[tuple[str, str, str], ...], ...]
    promote: Float[Tensor, "relation layer head"]
    suppress: Float[Tensor, "relation layer head"]
    null_mean: Float[Tensor, "relation layer head"]
    p_value: Float[Tensor, "relation layer head"]
    q_value: Float[Tensor, "relation layer head"]
    interval_low: Float[Tensor, "relation layer head"]
    interval_high: Float[Tensor, "relation layer head"]
    suppress_null_mean: Float[Tensor, "relation layer head"]
    suppress_p_value: Float[Tensor, "relation layer head"]
    suppress_q_value: Float[Tensor, "relation layer head"]
    provenance: Provenance
    promote_ranks: tuple[Int[Tensor, "_ layer head"], ...] | None = None
    suppress_ranks: tuple[Int[Tensor, "_ layer head"], ...] | None = None

    @property
    def values(self) -> Float[Tensor, "relation layer head"]:
        """The promotion scores."""
        return self.promote

    def number(self, relation: str | None) -> int:
        """Position of a relation; None stands for the only one."""
        if relation is None:
            if len(self.relations) > 1:
                raise UsageError(
                    f"This result holds {len(self.relations)} relations; name one of {', '.join(self.relations)}."
                )
            return 0
        if relation not in self.relations:
            raise UsageError(f"This result has no relation {relation!r}; it has {', '.join(self.relations)}.")
        return self.relations.index(relation)

    def top(
        self, n: int = 5, relation: str | None = None, direction: ScoreDirection = "promote"
    ) -> list[tuple[HeadIndex, float]]:
        """The ``n`` heads that score highest on a relation (ties: lower layer, then lower head)."""
        scores = getattr(self, direction)[self.number(relation)]
        flat = scores.nan_to_num(nan=-1.0).flatten()
        order = flat.argsort(descending=True, stable=True)[:n].tolist()
        width = scores.shape[1]
        return [(HeadIndex(i // width, i % width), float(flat[i])) for i in order if flat[i] >= 0]

    def implements(self, score: float = IMPLEMENTS_SCORE, q: float = IMPLEMENTS_Q) -> dict[str, list[HeadIndex]]:
        """Heads that implement each relation: a score of at least 0.15 that beats its null (q < 0.05)."""
        found = (self.promote >= score) & (self.q_value < q)
        result = {}
        for number, name in enumerate(self.relations):
            heads = [HeadIndex(layer, head) for layer, head in found[number].nonzero().tolist()]
            result[name] = sorted(heads, key=lambda head: (-self.promote[number, head.layer, head.head], head))
        return result

    def select(
        self, relations: str | Sequence[str] | None = None, heads: Iterable[HeadLike] | None = None
    ) -> "RelationScores":
        """The same result for some relations, or with all other heads left out (NaN)."""
        names = (relations,) if isinstance(relations, str) else tuple(relations or self.relations)
        numbers = [self.number(name) for name in names]
        changes: dict[str, Any] = {
            name: tuple(getattr(self, name)[i] for i in numbers)
            for name in ("relations", "k", "n_pairs", "n_kept", "dropped")
        }
        for name in ("promote_ranks", "suppress_ranks"):
            ranks = getattr(self, name)
            changes[name] = None if ranks is None else tuple(ranks[i] for i in numbers)
        maps = {name: getattr(self, name)[numbers].clone() for name in _MAPS}
        if heads is not None:
            n_layers, n_heads = self.promote.shape[1:]
            left_out = torch.ones(n_layers, n_heads, dtype=torch.bool)
            for head in heads:
                index = HeadIndex.of(head).check(n_layers, n_heads)
                left_out[index.layer, index.head] = False
            for values in maps.values():
                values[:, left_out] = float("nan")
        return replace(self, **changes, **maps)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; cells that were not asked for are null."""
        _, n_layers, n_heads = self.promote.shape
        result: dict[str, Any] = {
            "kind": self.kind,
            "circuit": self.circuit,
            "axes": {
                "relation": list(self.relations),
                "layer": list(range(n_layers)),
                "head": list(range(n_heads)),
            },
            "k": list(self.k),
            "n_pairs": list(self.n_pairs),
            "n_kept": list(self.n_kept),
            "dropped": [[list(entry) for entry in entries] for entries in self.dropped],
        }
        result.update({name: nested(getattr(self, name)) for name in _MAPS})
        for name in ("promote_ranks", "suppress_ranks"):
            ranks = getattr(self, name)
            if ranks is not None:
                result[name] = [values.tolist() for values in ranks]
        result["provenance"] = self.provenance.to_dict()
        return result

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        tensors: dict[str, Any] = {name: tensor_of(values[name]) for name in _MAPS}
        for name in ("promote_ranks", "suppress_ranks"):
            if name in values:
                tensors[name] = tuple(torch.tensor(entry) for entry in values[name])
        return cls(
            relations=tuple(values["axes"]["relation"]),
            circuit=values["circuit"],
            k=tuple(values["k"]),
            n_pairs=tuple(values["n_pairs"]),
            n_kept=tuple(values["n_kept"]),
            dropped=tuple(tuple((s, t, why) for s, t, why in entries) for entries in values["dropped"]),
            provenance=Provenance.from_dict(values["provenance"]),
            **tensors,
        )

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per relation and head."""
        for number, name in enumerate(self.relations):
            for layer, head in (~self.promote[number].isnan()).nonzero().tolist():
                record: dict[str, Any] = {"relation": name, "layer": layer, "head": head}
                record["k"], record["n_kept"] = self.k[number], self.n_kept[number]
                record.update({column: float(getattr(self, column)[number, layer, head]) for column in _MAPS})
                yield record

    def figure(self, **options: Any) -> Figure:
        """The picture of this result."""
        from .drawing import relation_scores_figure

        return relation_scores_figure(self, **options)

    def __str__(self) -> str:
        from ...renderers.text import relation_scores_text

        return relation_scores_text(self)
