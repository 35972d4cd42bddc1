"""Which tokens of a text the heads bind together, how sharply, and which head serves which group."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ...capture.tensors import arrays_digest, given_tensor
from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import Combine, GroupMethod, HeadIndex, HeadLike, check_choice
from ...renderers.figure import Figure
from ...renderers.flowchart import LabelSide, flow
from ...renderers.text import word
from ...renderers.views import token_groups_view
from ...results import Result, cells, nested, tensor_of
from ...scorers.groups import THRESHOLD, Grouping, GroupOptions, Groups
from ...scorers.statistics import q_values
from .words import ALPHA, PER_HEAD, GroupWords

if TYPE_CHECKING:
    from typing import Self

View: TypeAlias = Literal["flow", "tokens"]
_MOST_COMBINED = 1024
"""Tokens up to which the mean attention is kept."""

_MOST_DRAWN = 4
"""Heads that are drawn: those whose groups are least like chance."""

_LEAST_SHARE = 0.02
"""Share of a head's attention from which on a group of its own is drawn."""


@dataclass(frozen=True, eq=False, repr=False)
class AttentionGroups(Result):
    """Token groups of each head and of all heads together; the groups partition the kept tokens.

    Attributes:
        tokens: Tokens of the text.
        heads: The heads, in the order of every per-head field. Heads of a bare pattern are those of layer 0.
        causal: Whether no token attends to a later one; affinities are then corrected for the causal triangle.
        method: How the groups of the combination were found: ``"components"`` or ``"spectral"``.
        combine: How the heads were combined: ``"mean"`` or ``"max"``.
        sink: Index of the first token if it is an attention sink and was left out, or None.
        found_sink: The same, whether it was left out or not.
        sinks: All tokens that were left out, since the heads together park attention on them.
        groups: Groups of the combination of all heads.
        head_groups: Groups of each head alone.
        head_shares: Share of each head's attention between different kept tokens that stays inside each of its groups.
        head_sinks: Further tokens that the heads of the same layer park attention on; they stay alone in its groups.
        head_to_group: Number of the group each head serves: where the share of its attention exceeds that of even
            attention most; None if it serves none.
        weights: Share of each head's attention between different kept tokens that stays inside each group.
        even_weights: The same for even attention.
        distance_weights: The same if each head's attention depended on distance alone (its own distance profile); NaN
            above 512 tokens.
        within_share: Share of that attention that stays inside the head's own groups.
        distance_within: The same if it depended on distance alone.
        modularity: Modularity of the head's own groups (affinities, degree-product null).
        null_modularity, z_score, p_value: The same for groups found, in the same way, in draws that keep the head's
            distance profile and sinks (mean of the draws), how far the head is above them, and how many of them are as
            modular; NaN where none were drawn (or, for ``z_score``, all are alike). Draws end once ten are as modular:
            p is then ten in as many as it took.
        q_value: False discovery rate over the heads of this result (Benjamini-Hochberg).
        sink_share: Share of attention that later tokens give to the first token.
        self_share: Share of attention that tokens give to themselves.
        combination: The same measurements for the combination, by name.
        combined: Attention of all heads together; None for more than 1,024 tokens.
        patterns: Attention of each head, for its figure; None where that would be more than 262,144 numbers.
        parents: Parent of each token if the pattern is a tree mask (None: a root), else None.

    Example:
        >>> from tl_headmaps import AttentionGroups
        >>> first = [[1, 0, 0, 0], [0.9, 0.1, 0, 0], [0, 0, 1, 0], [0, 0, 0.1, 0.9]]
        >>> second = [[1, 0, 0, 0], [0.1, 0.9, 0, 0], [0, 0, 1, 0], [0, 0, 0.9, 0.1]]
        >>> groups = AttentionGroups.from_pattern([first, second], ["It", "I", "is", "am"])
        >>> groups.labels, groups.head_to_group
        ((0, 0, 1, 1), (0, 1))
        >>> groups.groups_of("L0H1")
        ((0, 1), (2, 3))
    """

    kind: ClassVar[str] = "attention_groups"
    methods: ClassVar[tuple[str, ...]] = ("newman2006modularity", "vonluxburg2007tutorial")
    json_axes: ClassVar[dict[str, str | None]] = {"token": "tokens", "head": "heads", "group": None}
    tokens: tuple[str, ...]
    heads: tuple[HeadIndex, ...]
    causal: bool
    method: str
    combine: str
    sink: int | None
    found_sink: int | None
    sinks: tuple[int, ...]
    groups: Groups
    head_groups: tuple[Groups, ...]
    head_shares: tuple[tuple[float, ...], ...]
    head_sinks: tuple[tuple[int, ...], ...]
    head_to_group: tuple[int | None, ...]
    weights: Float[Tensor, "head group"]
    even_weights: Float[Tensor, " group"]
    distance_weights: Float[Tensor, "head group"]
    within_share: Float[Tensor, " head"]
    distance_within: Float[Tensor, " head"]
    modularity: Float[Tensor, " head"]
    null_modularity: Float[Tensor, " head"]
    z_score: Float[Tensor, " head"]
    p_value: Float[Tensor, " head"]
    q_value: Float[Tensor, " head"]
    sink_share: Float[Tensor, " head"]
    self_share: Float[Tensor, " head"]
    combination: dict[str, float]
    combined: Float[Tensor, "query key"] | None
    patterns: Float[Tensor, "head query key"] | None
    parents: tuple[int | None, ...] | None
    provenance: Provenance

    @classmethod
    def from_pattern(
        cls,
        pattern: Any,
        tokens: Sequence[str] | None = None,
        *,
        method: GroupMethod = "auto",
        drop_sink: bool = True,
        threshold: float = THRESHOLD,
        n_groups: int | None = None,
        n_null: int | None = None,
        combine: Combine = "mean",
    ) -> "Self":
        """Groups of bare attention patterns: head x query x key, or one query x key matrix.

        Args:
            pattern: Array, tensor or nested lists of non-negative attention; rows need not sum to one.
            tokens: Texts of the tokens; numbers by default.
            method: As in :func:`~tl_headmaps.attention_groups`, like the other options.
            drop_sink: Leave attention sinks out.
            threshold: Share of a token's strongest edge from which on an edge is strong.
            n_groups: Make this many groups instead of letting the eigengap decide (spectral).
            n_null: Most draws to compare with.
            combine: Mean or maximum over heads.

        Example:
            >>> from tl_headmaps import AttentionGroups
            >>> pattern = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [0, 0, 0.5, 0.5]]
            >>> AttentionGroups.from_pattern(pattern, ["It", "I", "is", "am"]).words()
            (('It', 'I'), ('is', 'am'))
        """
        options = GroupOptions(method, drop_sink, threshold, n_groups, n_null, combine)
        patterns = _as_patterns(pattern)
        n = patterns.shape[-1]
        names = tuple(str(token) for token in (range(n) if tokens is None else tokens))
        if len(names) != n:
            raise UsageError(
                f"There are {len(names)} tokens, but the pattern is {n} x {n}. Give one token for each row."
            )

        def visit(see: Callable[[int, Tensor], None]) -> None:
            for index, matrix in enumerate(patterns):
                see(index, matrix)

        heads = [HeadIndex(0, head) for head in range(len(patterns))]
        grouping = Grouping(visit, heads, n, options)
        provenance = Provenance.of_arrays(arrays_digest(patterns), patterns.dtype, options=grouping.options, seed=0)
        return cls.from_grouping(grouping, names, heads, provenance)

    @classmethod
    def from_grouping(
        cls, grouping: Grouping, tokens: tuple[str, ...], heads: Sequence[HeadIndex], provenance: Provenance
    ) -> "Self":
        """The result of a finished :class:`~tl_headmaps.scorers.groups.Grouping`."""
        return cls(
            tokens=tokens,
            heads=tuple(heads),
            causal=grouping.causal,
            method=grouping.method,
            combine=grouping.options["combine"],
            sink=0 if 0 in grouping.sinks else None,
            found_sink=0 if 0 in grouping.found_sinks else None,
            sinks=grouping.sinks,
            groups=grouping.groups,
            head_groups=tuple(grouping.head_groups),
            head_shares=tuple(grouping.head_shares),
            head_sinks=tuple(grouping.head_sinks),
            head_to_group=grouping.head_to_group,
            weights=grouping.weights,
            even_weights=grouping.even_weights,
            distance_weights=grouping.distance_weights,
            combination=grouping.combination,
            combined=grouping.combined.float() if len(tokens) <= _MOST_COMBINED else None,
            patterns=grouping.patterns,
            parents=None if grouping.parents is None else tuple(grouping.parents),
            provenance=provenance,
            q_value=q_values(torch.tensor(grouping.per_head["p_value"], dtype=torch.float64)).float(),
            **{name: torch.tensor(values, dtype=torch.float32) for name, values in grouping.per_head.items()},
        )

    @property
    def values(self) -> Float[Tensor, "head group"]:
        """Which heads serve which group."""
        return self.weights

    @property
    def kept(self) -> tuple[int, ...]:
        """Indices of the tokens that were grouped."""
        return tuple(token for token in range(len(self.tokens)) if token not in self.sinks)

    @property
    def order(self) -> tuple[int, ...]:
        """All tokens, sinks that were left out first, then group by group: the order in which blocks are visible."""
        return (*self.sinks, *(token for group in self.groups for token in group))

    @property
    def labels(self) -> tuple[int | None, ...]:
        """Number of the group of each token; None for a sink that was left out."""
        group_of = {token: number for number, group in enumerate(self.groups) for token in group}
        return tuple(group_of.get(token) for token in range(len(self.tokens)))

    def words(self) -> tuple[tuple[str, ...], ...]:
        """The groups as token texts."""
        return tuple(tuple(self.tokens[token] for token in group) for group in self.groups)

    def groups_of(self, head: HeadLike) -> Groups:
        """Groups of one head."""
        return self.head_groups[self._index(head)]

    def top(self, n: int = 5) -> list[tuple[HeadIndex, float]]:
        """The ``n`` heads with the most modular groups (ties: lower layer, then lower head)."""
        order = self.modularity.argsort(descending=True, stable=True)[:n].tolist()
        return [(self.heads[i], float(self.modularity[i])) for i in order]

    def formers(self, q: float = ALPHA) -> list[tuple[HeadIndex, float]]:
        """Heads that form groups which their distance profile does not explain, and their q-values, lowest first.

        Among heads found at ``q``, about this share is expected to be there by chance; the family is the heads of this
        result. Ties go to the more modular groups.

        Raises:
            UsageError: No draws were made.

        Example:
            >>> from tl_headmaps import AttentionGroups
            >>> group = torch.tensor([0, 1, 2, 0, 0, 1, 2, 2, 1, 0, 1, 2])
            >>> pattern = torch.where(group[:, None] == group[None, :], 1.0, 0.05)
            >>> [(str(head), round(q, 3)) for head, q in AttentionGroups.from_pattern(pattern, n_null=199).formers()]
            [('L0H0', 0.005)]
        """
        if bool(self.p_value.isnan().all()) and any(len(groups) > 1 for groups in self.head_groups):
            raise UsageError(
                f"No draws were made for these {len(self.tokens)} tokens, so no head has a p-value. Ask for them with "
                "n_null=199, or take a text of 8 to 64 tokens."
            )
        return [(self.heads[i], float(self.q_value[i])) for i in self._ranked() if float(self.q_value[i]) <= q]

    def _ranked(self) -> list[int]:
        """Heads by p-value, then by modularity; those without a p-value last."""
        p = self.p_value.nan_to_num(nan=2.0).tolist()
        return sorted(range(len(self.heads)), key=lambda i: (p[i], -float(self.modularity[i]), i))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = [str(head) for head in self.heads]
        return {
            "kind": self.kind,
            "axes": self.axes,
            "groups": [list(group) for group in self.groups],
            "head_to_group": dict(zip(names, self.head_to_group, strict=True)),
            "head_groups": {
                name: [list(group) for group in groups] for name, groups in zip(names, self.head_groups, strict=True)
            },
            "head_shares": dict(zip(names, map(list, self.head_shares), strict=True)),
            "head_sinks": dict(zip(names, map(list, self.head_sinks), strict=True)),
            "causal": self.causal,
            "method": self.method,
            "combine": self.combine,
            "sink": self.sink,
            "found_sink": self.found_sink,
            "sinks": list(self.sinks),
            "parents": None if self.parents is None else list(self.parents),
            "order": list(self.order),
            "weights": self.weights.tolist(),
            "even_weights": self.even_weights.tolist(),
            "distance_weights": nested(self.distance_weights),
            **{name: nested(getattr(self, name)) for name in PER_HEAD},
            "combination": {name: _finite(value) for name, value in self.combination.items()},
            "combined": None if self.combined is None else self.combined.tolist(),
            "patterns": None if self.patterns is None else self.patterns.tolist(),
            "provenance": self.provenance.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        heads = tuple(HeadIndex.parse(name) for name in values["axes"]["head"])
        combined, patterns, parents = values["combined"], values["patterns"], values["parents"]
        n_groups = len(values["groups"])
        return cls(
            tokens=tuple(values["axes"]["token"]),
            heads=heads,
            causal=values["causal"],
            method=values["method"],
            combine=values["combine"],
            sink=values["sink"],
            found_sink=values["found_sink"],
            sinks=tuple(values["sinks"]),
            head_shares=tuple(tuple(values["head_shares"][str(head)]) for head in heads),
            head_sinks=tuple(tuple(values["head_sinks"][str(head)]) for head in heads),
            groups=_groups(values["groups"]),
            head_groups=tuple(_groups(values["head_groups"][str(head)]) for head in heads),
            head_to_group=tuple(values["head_to_group"][str(head)] for head in heads),
            weights=torch.tensor(values["weights"], dtype=torch.float32).view(len(heads), n_groups),
            even_weights=torch.tensor(values["even_weights"], dtype=torch.float32),
            distance_weights=tensor_of(values["distance_weights"]).view(len(heads), n_groups),
            combination={name: _number(value) for name, value in values["combination"].items()},
            combined=None if combined is None else torch.tensor(combined, dtype=torch.float32),
            patterns=None if patterns is None else torch.tensor(patterns, dtype=torch.float32),
            parents=None if parents is None else tuple(parents),
            provenance=Provenance.from_dict(values["provenance"]),
            **{name: tensor_of(values[name]) for name in PER_HEAD},
        )

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per head and group of the combination."""
        axes = {name: self.axes[name] for name in ("head", "group")}
        for (place, group), labels in cells(axes, self.weights):
            yield {
                **labels,
                "tokens": " ".join(map(str, self.groups[group])),
                "weight": float(self.weights[place, group]),
                "even_weight": float(self.even_weights[group]),
                "distance_weight": _finite(float(self.distance_weights[place, group])),
                "serves": self.head_to_group[place] == group,
                **{name: _finite(float(getattr(self, name)[place])) for name in PER_HEAD},
            }

    def figure(
        self,
        *,
        view: View = "flow",
        head: HeadLike | None = None,
        names: Sequence[str] | None = None,
        labels: LabelSide = "bottom",
    ) -> Figure:
        """Heads and the tokens they bind together, beside the attention between the tokens.

        A line leads from a head to each token of a group of its own, as wide as the share of the head's attention
        inside the group; heads that bind the same tokens have the same colour. Heads that bind nothing are not drawn.

        Args:
            view: ``"flow"``, or ``"tokens"``: the text coloured by group (circuitsvis).
            head: Draw this head alone, with its own attention; by default the heads whose groups are least like
                chance, with the attention of all heads.
            names: What the heads are called, in the order of ``heads``; by default L23H4 and so on.
            labels: Names of the matrix' columns under it, or on top.
        """
        if view == "tokens":
            if head is not None or names is not None:
                raise UsageError(
                    "view='tokens' colours the text by the groups of all heads together, so head= and names= have no "
                    "say in it. Leave them out, or use view='flow'."
                )
            return token_groups_view(self.tokens, self.labels, title="Token groups")
        check_choice(view, View, "view")
        if names is not None and len(names) != len(self.heads):
            raise UsageError(f"{len(names)} names were given for {len(self.heads)} heads; name each.")
        called = [str(one) for one in (self.heads if names is None else names)]
        if head is None:
            shown, groups, matrix = sorted(self._drawn()), self.groups, self.combined
            unit = "attention" if len(self.heads) == 1 else f"attention, {self.combine} over heads"
        else:
            place = self._index(head)
            if self.patterns is None:
                raise UsageError(
                    f"The attention of {self.heads[place]} was not kept: {len(self.heads)} heads of {len(self.tokens)} "
                    f"tokens are too much. Ask for heads={str(self.heads[place])!r} alone."
                )
            shown, groups, matrix = [place], self.head_groups[place], self.patterns[place]
            unit = f"attention of {called[place]}"
        # Sinks that were left out are not drawn either: they would take up the whole colour scale.
        kept = list(self.kept)
        row_of = {token: row for row, token in enumerate(kept)}
        return flow(
            [word(self.tokens[token]) for token in kept],
            {
                called[place]: [([row_of[token] for token in group], share) for group, share in self._bound(place)]
                for place in shown
            },
            matrix=None if matrix is None else matrix[kept][:, kept],
            order=[row_of[token] for group in groups for token in group],
            labels=labels,
            title="Heads and the tokens they bind together",
            unit=unit,
            note=GroupWords(self).note(shown, called, head),
        )

    def _index(self, head: HeadLike) -> int:
        wanted = HeadIndex.of(head)
        if wanted not in self.heads:
            raise UsageError(f"{wanted} is not among the {len(self.heads)} heads of this result.")
        return self.heads.index(wanted)

    def _bound(self, place: int) -> list[tuple[tuple[int, ...], float]]:
        """Groups of two or more tokens of a head with the share of its attention inside; none if all are in one."""
        groups = self.head_groups[place]
        if len(groups) < 2:
            return []
        shares = (min(1.0, share) for share in self.head_shares[place])
        return [
            (group, share)
            for group, share in zip(groups, shares, strict=True)
            if len(group) > 1 and share > _LEAST_SHARE
        ]

    def _drawn(self) -> list[int]:
        """Heads that are drawn: those that pass their null, or else those that come closest to it."""
        binding = [place for place in self._ranked() if self._bound(place)]
        passing = [place for place in binding if float(self.p_value[place]) <= ALPHA]
        return (passing or binding)[:_MOST_DRAWN]

    def __str__(self) -> str:
        """The groups, the heads whose groups are least like chance, and what that means."""
        return GroupWords(self).text()


def _as_patterns(pattern: Any) -> Tensor:
    """A head x query x key tensor, checked as far as its shape goes; values are checked head by head."""
    patterns = given_tensor(pattern, "The pattern", "head x query x key, or one square matrix")
    if patterns.ndim == 2:
        patterns = patterns[None]
    shape = tuple(patterns.shape)
    if len(shape) != 3 or shape[1] != shape[2]:
        raise UsageError(
            f"The pattern has shape {shape}; it must be head x query x key with as many queries as keys, or one square "
            "matrix."
        )
    if not shape[0] or shape[1] < 2:
        raise UsageError(f"The pattern has shape {shape}; it needs a head and at least two tokens.")
    return patterns


def _groups(values: list[list[int]]) -> Groups:
    return tuple(tuple(group) for group in values)


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else value


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
