"""Which tokens of a text the heads bind together, how sharply, and which head serves which group."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.arrays import arrays_digest, dtype_name, given_tensor
from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import GroupMethod, HeadIndex, HeadLike, check_choice
from ...renderers.figure import Figure
from ...renderers.flowchart import flow
from ...renderers.text import number, table_text, visible, word
from ...renderers.views import token_groups_view
from ...results import Result, cells, nested, tensor_of
from ...scorers.groups import THRESHOLD, Grouping, GroupOptions, Groups

if TYPE_CHECKING:
    from typing import Self

View: TypeAlias = Literal["flow", "tokens"]
_PER_HEAD = ("within_share", "modularity", "null_modularity", "z_score", "p_value", "sink_share", "self_share")
"""Fields with one value per head."""

_MOST_COMBINED = 1024
"""Tokens up to which the mean attention is kept."""

_MOST_TOKENS = 40
_MOST_HEADS = 12
"""Tokens of a group and heads that are shown; heads are those whose groups are sharpest."""


@dataclass(frozen=True, eq=False, repr=False)
class AttentionGroups(Result):
    """Token groups of each head and of all heads together; the groups partition the kept tokens.

    Attributes:
        tokens: Tokens of the text.
        heads: The heads, in the order of every per-head field. Heads of a bare pattern are those of layer 0.
        causal: Whether no token attends to a later one; affinities are then corrected for the causal triangle.
        method: How the groups of the combination were found: ``"components"`` or ``"spectral"``.
        sink: Index of the attention sink that was left out, or None.
        found_sink: Index of the attention sink, whether it was left out or not, or None if there is none.
        groups: Groups of the combination (the mean of all heads).
        head_groups: Groups of each head alone.
        head_to_group: Number of the group each head serves: where the share of its attention exceeds that of even
            attention most; None if it serves none.
        weights: Share of each head's attention between different kept tokens that stays inside each group.
        even_weights: The same for even attention.
        within_share: Share of that attention that stays inside the head's own groups.
        modularity: Modularity of the head's own groups (affinities, degree-product null).
        null_modularity, z_score, p_value: The same for as many groups found in shuffled graphs of the same degrees, and
            how far the head is above them; NaN where none were drawn (or, for ``z_score``, all are alike).
        sink_share: Share of attention that later tokens give to the first token.
        self_share: Share of attention that tokens give to themselves.
        combination: The same measurements for the combination, by name.
        combined: Mean attention over heads; None for more than 1,024 tokens.
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
    sink: int | None
    found_sink: int | None
    groups: Groups
    head_groups: tuple[Groups, ...]
    head_to_group: tuple[int | None, ...]
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
    ) -> "Self":
        """Groups of bare attention patterns: head x query x key, or one query x key matrix.

        Args:
            pattern: Array, tensor or nested lists of non-negative attention; rows need not sum to one.
            tokens: Texts of the tokens; numbers by default.
            method: As in :func:`~tl_headmaps.attention_groups`, like the other options.
            drop_sink: Leave the first token out when it is an attention sink.
            threshold: Share of a token's strongest edge from which on an edge is strong.
            n_groups: Make this many groups instead of letting the eigengap decide (spectral).
            n_null: Shuffled graphs to compare with.

        Example:
            >>> from tl_headmaps import AttentionGroups
            >>> pattern = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [0, 0, 0.5, 0.5]]
            >>> AttentionGroups.from_pattern(pattern, ["It", "I", "is", "am"]).words()
            (('It', 'I'), ('is', 'am'))
        """
        options = GroupOptions(method, drop_sink, threshold, n_groups, n_null)
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
        provenance = Provenance.of_arrays(
            arrays_digest(patterns), dtype_name(patterns), options=grouping.options, seed=0
        )
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
            sink=grouping.sink,
            found_sink=grouping.found_sink,
            groups=grouping.groups,
            head_groups=tuple(grouping.head_groups),
            head_to_group=grouping.head_to_group,
            weights=grouping.weights,
            even_weights=grouping.even_weights,
            combination=grouping.combination,
            combined=grouping.combined.float() if len(tokens) <= _MOST_COMBINED else None,
            parents=None if grouping.parents is None else tuple(grouping.parents),
            provenance=provenance,
            **{name: torch.tensor(values, dtype=torch.float32) for name, values in grouping.per_head.items()},
        )

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
        """All tokens, a sink that was left out first, then group by group: the order in which blocks are visible."""
        first = () if self.sink is None else (self.sink,)
        return (*first, *(token for group in self.groups for token in group))

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
        return self.head_groups[self.heads.index(HeadIndex.of(head))]

    def top(self, n: int = 5) -> list[tuple[HeadIndex, float]]:
        """The ``n`` heads with the most modular groups (ties: lower layer, then lower head)."""
        order = self.modularity.argsort(descending=True, stable=True)[:n].tolist()
        return [(self.heads[i], float(self.modularity[i])) for i in order]

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
        axes = {name: self.axes[name] for name in ("head", "group")}
        for (place, group), labels in cells(axes, self.weights):
            yield {
                **labels,
                "tokens": " ".join(map(str, self.groups[group])),
                "weight": float(self.weights[place, group]),
                "even_weight": float(self.even_weights[group]),
                "serves": self.head_to_group[place] == group,
                **{name: _finite(float(getattr(self, name)[place])) for name in _PER_HEAD},
            }

    def figure(self, *, view: View = "flow") -> Figure:
        """The groups of the combined attention.

        Args:
            view: ``"flow"``: heads joined to groups, next to the matrix. ``"tokens"``: the text coloured by group
                (circuitsvis).
        """
        if view == "tokens":
            return token_groups_view(self.tokens, self.labels, title="Token groups")
        check_choice(view, View, "view")
        shown = [head for head, _ in self.top(_MOST_HEADS)]
        heads = {}
        for head in sorted(shown):
            group = self.head_to_group[self.heads.index(head)]
            heads[str(head)] = [] if group is None else [group]
        notes = []
        # A sink that was left out is not drawn either: it would take up the whole colour scale.
        kept = list(self.kept)
        place = {token: number for number, token in enumerate(kept)}
        if self.sink is not None:
            notes.append(f"The attention sink (token {self.sink}, {self.tokens[self.sink]!r}) is left out.")
        if len(self.groups) == 1:
            notes.append("Together the heads bind the tokens into one group, which none serves more than another.")
        if len(self.heads) > len(shown):
            notes.append(
                f"The {len(shown)} of {len(self.heads)} heads with the sharpest groups of their own are shown."
            )
        if self.parents is not None:
            notes.append("The mask is a tree: each token sees its ancestors only.")
        return flow(
            [self.tokens[token] for token in kept],
            [[place[token] for token in group] for group in self.groups],
            heads,
            matrix=None if self.combined is None else self.combined[kept][:, kept],
            title="Heads and the token groups they serve",
            unit="attention, mean over heads",
            note=" ".join(notes),
        )

    def __str__(self) -> str:
        columns = [("group", "right"), ("tokens", "left"), ("served by", "left")]
        rows = [[place, self._words(group), self._served_by(place)] for place, group in enumerate(self.groups)]
        parts = [self._title(), table_text(columns, rows)]
        if self.parents is not None:
            parts.append(self._tree(self.parents))
        return "\n\n".join([*parts, self._sharpest(), _NOTE])

    def _title(self) -> str:
        n_heads, n_groups = len(self.heads), len(self.groups)
        title = (
            f"{n_groups} group{'' if n_groups == 1 else 's'} of {len(self.kept)} tokens, "
            f"{n_heads} head{'' if n_heads == 1 else 's'} ({self.method})"
        )
        if self.found_sink is not None:
            share = self.combination["sink_share"]
            fate = "left out" if self.sink is not None else "kept"
            token = visible(self.tokens[self.found_sink])
            title += f"; attention sink {token!r} takes {share:.2f} of the attention and is {fate}"
        return title

    def _words(self, group: tuple[int, ...]) -> str:
        shown = " | ".join(word(self.tokens[token]) for token in group[:_MOST_TOKENS])
        return shown if len(group) <= _MOST_TOKENS else f"{shown} | ... ({len(group)} tokens)"

    def _served_by(self, group: int) -> str:
        serving = [place for place, served in enumerate(self.head_to_group) if served == group]
        serving.sort(key=lambda place: -float(self.weights[place, group] - self.even_weights[group]))
        shown = ", ".join(f"{self.heads[place]} {self.weights[place, group]:.2f}" for place in serving[:6])
        return shown + (f", {len(serving) - 6} more" if len(serving) > 6 else "") or "no head"

    def _tree(self, parents: tuple[int | None, ...]) -> str:
        rows = [
            [token, visible(text), "root" if parent is None else f"{parent} {visible(self.tokens[parent]).strip()}"]
            for token, (text, parent) in enumerate(zip(self.tokens, parents, strict=True))
        ]
        table = table_text([("token", "right"), ("", "left"), ("parent", "left")], rows)
        return f"The pattern is a tree: every token sees itself and its ancestors only.\n\n{table}"

    def _sharpest(self) -> str:
        """The heads with the most modular groups, and these groups."""
        titles = ["head", "serves", "within", "modularity", "null", "z", "p", "sink", "self", "its own groups"]
        columns = [(title, "left" if title in ("head", "its own groups") else "right") for title in titles]
        rows = []
        for head, _ in self.top(_MOST_HEADS):
            place = self.heads.index(head)
            group = self.head_to_group[place]
            numbers = (number(float(getattr(self, name)[place])) for name in _PER_HEAD)
            rows.append([str(head), "-" if group is None else group, *numbers, self._own(self.head_groups[place])])
        left_out = len(self.heads) - len(rows)
        more = f"\n({left_out} heads with less modular groups are not shown)" if left_out else ""
        return f"{table_text(columns, rows)}{more}"

    def _own(self, groups: Groups) -> str:
        bound = [group for group in groups if len(group) > 1]
        single = sum(len(group) == 1 for group in groups)
        shown = "  ".join(
            "{" + self._words(group[:8]) + (" ..." if len(group) > 8 else "") + "}" for group in bound[:4]
        )
        more = f"  and {len(bound) - 4} more" if len(bound) > 4 else ""
        return f"{shown}{more}" + (f"  +{single} alone" if single else "")


_NOTE = (
    "serves: group whose share of the head's attention exceeds even attention most; within: share of the attention\n"
    "between different tokens that stays in the head's own groups; null, z, p: the same for shuffled graphs of equal\n"
    "degrees; sink, self: share of attention on the first token and on the token itself"
)


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
