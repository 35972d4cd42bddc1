"""Which tokens of a text the heads bind together, how sharply, and which head serves which group."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.provenance import Provenance
from ...core.types import HeadIndex, HeadLike
from ...renderers.figure import Figure
from ...results import Result, nested, tensor_of

if TYPE_CHECKING:
    from typing import Self

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Token indices of each group; groups in the order of their first tokens."""

_PER_HEAD = ("within_share", "modularity", "null_modularity", "z_score", "p_value", "sink_share", "self_share")
"""Fields with one value per head."""


@dataclass(frozen=True, eq=False, repr=False)
class AttentionGroups(Result):
    """Token groups of each head and of all heads together; the groups partition the kept tokens.

    Attributes:
        tokens: Tokens of the text.
        heads: The heads, in the order of every per-head field. Heads of a bare pattern are those of layer 0.
        causal: Whether no token attends to a later one; then affinities are corrected for the causal triangle.
        method: How the groups of the combination were found: ``"components"`` or ``"spectral"``.
        sink: Index of the attention sink that was left out, or None.
        found_sink: Index of the sink that was found, left out or not, or None.
        groups: Groups of the combination (the mean of all heads).
        head_groups: Groups of each head alone.
        head_to_group: Number of the group each head serves: where the share of its attention exceeds that of even
            attention most; None if it serves none.
        head_clusters: Heads with similar groups (mean adjusted Rand index of at least 0.5).
        weights: Share of each head's attention between different kept tokens that stays inside each group.
        even_weights: The same for even attention.
        within_share: Share of that attention that stays inside the head's own groups.
        modularity: Modularity of the head's own groups (affinities, degree-product null).
        null_modularity, z_score, p_value: The same for as many groups found in shuffled graphs of the same degrees, and
            how far the head is above them; NaN where none were drawn (or, for ``z_score``, all are alike).
        sink_share: Share of attention that later tokens give to the first token.
        self_share: Share of attention that tokens give to themselves.
        combination: The same values for the combination.
        combined: Mean attention over heads, None for more than 1,024 tokens.
        parents: Parent of each token if the pattern is a tree mask (None: a root), else None.

    Example:
        >>> from tl_headmaps import attention_groups_from_pattern
        >>> first = [[1, 0, 0, 0], [0.9, 0.1, 0, 0], [0, 0, 1, 0], [0, 0, 0.1, 0.9]]
        >>> second = [[1, 0, 0, 0], [0.1, 0.9, 0, 0], [0, 0, 1, 0], [0, 0, 0.9, 0.1]]
        >>> groups = attention_groups_from_pattern([first, second], ["It", "I", "is", "am"])
        >>> groups.labels, groups.head_to_group
        ((0, 0, 1, 1), (0, 1))
        >>> groups.groups_of("L0H1")
        ((0, 1), (2, 3))
    """

    kind: ClassVar[str] = "attention_groups"
    methods: ClassVar[tuple[str, ...]] = ("newman2006modularity", "vonluxburg2007tutorial")
    tokens: tuple[str, ...]
    heads: tuple[HeadIndex, ...]
    causal: bool
    method: str
    sink: int | None
    found_sink: int | None
    groups: Groups
    head_groups: tuple[Groups, ...]
    head_to_group: tuple[int | None, ...]
    head_clusters: tuple[tuple[HeadIndex, ...], ...]
    weights: Float[Tensor, "head group"]
    even_weights: Float[Tensor, " group"]
    within_share: Float[Tensor, " head"]
    modularity: Float[Tensor, " head"]
    null_modularity: Float[Tensor, " head"]
    z_score: Float[Tensor, " head"]
    p_value: Float[Tensor, " head"]
    sink_share: Float[Tensor, " head"]
    self_share: Float[Tensor, " head"]
    combination: dict[str, float]
    combined: Float[Tensor, "query key"] | None
    parents: tuple[int | None, ...] | None
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "head group"]:
        """Which heads serve which group."""
        return self.weights

    @property
    def kept(self) -> tuple[int, ...]:
        """Indices of the tokens that were grouped."""
        return tuple(token for token in range(len(self.tokens)) if token != self.sink)

    @property
    def order(self) -> tuple[int, ...]:
        """All tokens, a sink that was left out first, then group by group: in this order blocks show."""
        first = () if self.sink is None else (self.sink,)
        return (*first, *(token for group in self.groups for token in group))

    @property
    def labels(self) -> tuple[int | None, ...]:
        """Number of the group of each token; None for a sink that was left out."""
        number = {token: place for place, group in enumerate(self.groups) for token in group}
        return tuple(number.get(token) for token in range(len(self.tokens)))

    def words(self) -> tuple[tuple[str, ...], ...]:
        """The groups as token texts."""
        return tuple(tuple(self.tokens[token] for token in group) for group in self.groups)

    def groups_of(self, head: HeadLike) -> Groups:
        """Groups of one head."""
        return self.head_groups[self.heads.index(HeadIndex.of(head))]

    def top(self, n: int = 5) -> list[tuple[HeadIndex, float]]:
        """The heads with the most modular groups (ties: lower layer, then lower head)."""
        order = self.modularity.argsort(descending=True, stable=True)[:n].tolist()
        return [(self.heads[i], float(self.modularity[i])) for i in order]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = [str(head) for head in self.heads]
        return {
            "kind": self.kind,
            "axes": {"token": list(self.tokens), "head": names, "group": list(range(len(self.groups)))},
            "groups": [list(group) for group in self.groups],
            "head_to_group": dict(zip(names, self.head_to_group, strict=True)),
            "head_groups": {
                name: [list(group) for group in groups] for name, groups in zip(names, self.head_groups, strict=True)
            },
            "head_clusters": [[str(head) for head in cluster] for cluster in self.head_clusters],
            "causal": self.causal,
            "method": self.method,
            "sink": self.sink,
            "found_sink": self.found_sink,
            "parents": None if self.parents is None else list(self.parents),
            "order": list(self.order),
            "weights": self.weights.tolist(),
            "even_weights": self.even_weights.tolist(),
            **{name: nested(getattr(self, name)) for name in _PER_HEAD},
            "combination": {name: _finite(value) for name, value in self.combination.items()},
            "combined": None if self.combined is None else self.combined.tolist(),
            "provenance": self.provenance.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        heads = tuple(HeadIndex.parse(name) for name in values["axes"]["head"])
        combined, parents = values["combined"], values["parents"]
        n_groups = len(values["groups"])
        return cls(
            tokens=tuple(values["axes"]["token"]),
            heads=heads,
            causal=values["causal"],
            method=values["method"],
            sink=values["sink"],
            found_sink=values["found_sink"],
            groups=_groups(values["groups"]),
            head_groups=tuple(_groups(values["head_groups"][str(head)]) for head in heads),
            head_to_group=tuple(values["head_to_group"][str(head)] for head in heads),
            head_clusters=tuple(tuple(HeadIndex.parse(name) for name in names) for names in values["head_clusters"]),
            weights=torch.tensor(values["weights"], dtype=torch.float32).view(len(heads), n_groups),
            even_weights=torch.tensor(values["even_weights"], dtype=torch.float32),
            combination={name: _number(value) for name, value in values["combination"].items()},
            combined=None if combined is None else torch.tensor(combined, dtype=torch.float32),
            parents=None if parents is None else tuple(parents),
            provenance=Provenance.from_dict(values["provenance"]),
            **{name: tensor_of(values[name]) for name in _PER_HEAD},
        )

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per head and group of the combination."""
        for place, head in enumerate(self.heads):
            for number, group in enumerate(self.groups):
                record: dict[str, Any] = {"head": str(head), "group": number}
                record["tokens"] = " ".join(map(str, group))
                record["weight"] = float(self.weights[place, number])
                record["even_weight"] = float(self.even_weights[number])
                record["serves"] = self.head_to_group[place] == number
                record.update({name: _finite(float(getattr(self, name)[place])) for name in _PER_HEAD})
                yield record

    def figure(self, **options: Any) -> Figure:
        """The picture of this result."""
        from .drawing import attention_groups_figure

        return attention_groups_figure(self, **options)

    def __str__(self) -> str:
        from .text import attention_groups_text

        return attention_groups_text(self)


def _groups(values: list[list[int]]) -> Groups:
    return tuple(tuple(group) for group in values)


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else value


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
