"""Which tokens of a text the heads bind together, how sharply, and which head serves which group."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.running.activations import LayerActivations, run_or_read
from ..capture.running.text import EncodedText
from ..capture.tensors import arrays_digest, given_tensor
from ..capture.weights import HeadWeights
from ..core.errors import UsageError
from ..core.options import public
from ..core.provenance import Provenance
from ..core.types import Combine, GroupMethod, HeadIndex, HeadLike, LayerLike, Model, check_choice
from ..renderers.figure import Figure
from ..renderers.flowchart import LabelSide, flow
from ..renderers.tables import Table
from ..renderers.text import few, number, table_text, visible, word, wrapped
from ..renderers.views import token_groups_view
from ..results import Result, cells
from ..results.table import frozen_result
from ..scorers.groups import THRESHOLD, Grouping, GroupOptions, Groups
from ..scorers.statistics import q_values

if TYPE_CHECKING:
    from typing import Self

View: TypeAlias = Literal["flow", "tokens"]

_PER_HEAD = (
    *("within_share", "distance_within", "modularity", "null_modularity", "z_score", "p_value", "q_value"),
    *("sink_share", "self_share"),
)
"""Fields with one value per head."""

_PRINTED = {
    "within_share": "within",
    "distance_within": "by distance",
    "modularity": "modularity",
    "null_modularity": "null",
    "q_value": "q",
}
"""Those that a printed table has."""

_BY_HEAD = ("head_to_group", "head_groups", "head_shares", "head_sinks")
"""Fields that JSON has by the names of heads."""

_ALPHA = 0.05
_MOST_COMBINED = 1024
"""Tokens up to which the mean attention is kept."""

_MOST_DRAWN = 4
"""Heads that are drawn: those whose groups are least like chance."""

_LEAST_SHARE = 0.02
"""Share of a head's attention from which on a group of its own is drawn."""

_ROUNDING = 1e-9
_MOST_TOKENS, _BRACED = 40, 8
_MOST_HEADS = 12
"""Tokens of a group (in a table, in braces) and heads that are listed."""

_UNTESTED = "No draws were made, so nothing is said about chance."
_NOTE = (
    "serves: group whose share of the head's attention exceeds even attention most; within: share of the attention "
    "between different tokens that stays in the head's own groups, and if it depended on distance alone; null: the "
    "same steps on draws that keep the head's distance profile and sinks; q: over the heads of this result"
)


@frozen_result
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
    nullable: ClassVar[tuple[str, ...]] = ("distance_weights", *_PER_HEAD, "combination")
    tokens: tuple[str, ...]
    heads: tuple[HeadIndex, ...]
    groups: Groups
    head_to_group: tuple[int | None, ...]
    head_groups: tuple[Groups, ...]
    head_shares: tuple[tuple[float, ...], ...]
    head_sinks: tuple[tuple[int, ...], ...]
    causal: bool
    method: str
    combine: str
    sink: int | None
    found_sink: int | None
    sinks: tuple[int, ...]
    parents: tuple[int | None, ...] | None
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
            method: As in :func:`~tl_headmaps.attention_groups`, like the options behind it.
            drop_sink, threshold, n_groups, n_null, combine: Likewise.

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
        same = (
            *("causal", "method", "sinks", "groups", "head_to_group", "combination", "patterns"),
            *("weights", "even_weights", "distance_weights"),
        )
        given: dict[str, Any] = {name: getattr(grouping, name) for name in same}
        given |= {name: tuple(getattr(grouping, name)) for name in ("head_groups", "head_shares", "head_sinks")}
        given |= {name: torch.tensor(values, dtype=torch.float32) for name, values in grouping.per_head.items()}
        return cls(
            **given,
            tokens=tokens,
            heads=tuple(heads),
            combine=grouping.options["combine"],
            sink=0 if 0 in grouping.sinks else None,
            found_sink=0 if 0 in grouping.found_sinks else None,
            combined=grouping.combined.float() if len(tokens) <= _MOST_COMBINED else None,
            parents=None if grouping.parents is None else tuple(grouping.parents),
            provenance=provenance,
            q_value=q_values(torch.tensor(grouping.per_head["p_value"], dtype=torch.float64)).float(),
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

    def formers(self, q: float = _ALPHA) -> list[tuple[HeadIndex, float]]:
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
        heads = list(map(str, self.heads))
        values: dict[str, Any] = {}
        for name, value in super().to_dict().items():
            values[name] = dict(zip(heads, value, strict=True)) if name in _BY_HEAD else value
            if name == "parents":
                values["order"] = list(self.order)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        by_head = {name: [values[name][head] for head in values["axes"]["head"]] for name in _BY_HEAD}
        return super().from_dict({**values, **by_head})

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
                **{name: _finite(float(getattr(self, name)[place])) for name in _PER_HEAD},
            }

    def head_rows(self, head: HeadLike, *, full: bool = False, n: int | None = None) -> Table:
        """What the result says about one head: the pairs of tokens with most attention between them."""
        place, pairs = self._index(head), []
        if self.patterns is not None:
            pattern, kept = self.patterns[place].tolist(), self.kept
            pairs = [(-pattern[query][key], query, key) for query in kept for key in kept if query != key]
        tokens = list(map(word, self.tokens))
        rows = [[tokens[query], tokens[key], number(-share)] for share, query, key in sorted(pairs)[:n]]
        text = visible("".join(self.tokens)).strip()
        note = (
            f"In '{text}': to the first token {self.sink_share[place]:.0%}, to the token itself "
            f"{self.self_share[place]:.0%}; above, most between others."
        )
        return Table([("from", "left"), ("to", "left"), ("attention", "right")], rows, note)

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
            note=self._in_words(shown, called, head),
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
        passing = [place for place in binding if float(self.p_value[place]) <= _ALPHA]
        return (passing or binding)[:_MOST_DRAWN]

    def _in_words(self, shown: list[int], called: list[str], head: HeadLike | None) -> str:
        """The figure in words: who forms groups, is their separation complete, and who is specialised for which."""
        notes = []
        if self.sinks:
            tokens = ", ".join(f"{visible(self.tokens[token])!r}" for token in self.sinks)
            notes.append(f"Left out as attention sink{'s' if len(self.sinks) > 1 else ''}: {tokens}.")
        if head is not None:
            notes.append(self._tested(shown[0], called))
        elif len(self.heads) > 1:
            notes.append(self._formed(shown))
        if head is None and len(self.groups) == 1 and len(self.heads) > 1:
            notes.append(f"All heads together ({self.combine}) bind the tokens into one group.")
        else:
            notes.append(self._separation(None if head is None else shown[0]))
        if head is None and len(self.groups) > 1:
            notes.append(self._specialised(called))
        if self.parents is not None:
            notes.append("The mask is a tree: each token sees its ancestors only.")
        return " ".join(filter(None, notes))

    def _tested(self, place: int, called: list[str]) -> str:
        p = float(self.p_value[place])
        if not self._bound(place):
            return f"{called[place]} binds nothing: its tokens are in one group, or alone."
        if math.isnan(p):
            return _UNTESTED
        verdict = "is not explained" if p <= _ALPHA else "may be explained"
        return (
            f"Modularity {number(float(self.modularity[place]))}, which {verdict} by distance between tokens "
            f"alone (mean of draws {number(float(self.null_modularity[place]))}, p = {p:.2g})."
        )

    def _formed(self, shown: list[int]) -> str:
        n = len(self.heads)
        if bool(self.p_value.isnan().all()):
            drawn = f"Drawn: {len(shown)} of {n} heads. " if len(shown) < n else ""
            return f"{drawn}{_UNTESTED}"
        passing, formers = int((self.p_value <= _ALPHA).sum()), len(self.formers())
        found = (
            f"{formers or 'None'} of {n} heads form{'s' * (formers < 2)} groups that distance between tokens does not "
            f"explain (false discovery rate {_ALPHA:.0%}; {passing} at p ≤ {_ALPHA}, where chance gives up to "
            f"{math.ceil(_ALPHA * n)})."
        )
        if passing > len(shown):
            return f"{found} Drawn: the {len(shown)} with the lowest p."
        return found if passing else f"{found} Drawn: the {len(shown)} that come closest."

    def _separation(self, place: int | None) -> str:
        inside, by_distance = (
            (self.combination["within_share"], self.combination["distance_within"])
            if place is None
            else (float(self.within_share[place]), float(self.distance_within[place]))
        )
        if len(self.groups if place is None else self.head_groups[place]) < 2:
            return ""
        null = "" if math.isnan(by_distance) else f" ({1 - by_distance:.0%} if it depended on distance alone)"
        if inside >= 1 - 1e-6:
            return f"The separation is complete: no attention crosses the groups{null}."
        return f"The separation is not complete: {1 - inside:.0%} of the attention between tokens crosses groups{null}."

    def _specialised(self, called: list[str]) -> str:
        serving = {group: self._serving(place) for place, group in enumerate(self.groups[:6]) if len(group) > 1}
        parts = [
            f"{self._braced(group)}: {few([called[place] for place in heads], 4)}"
            for group, heads in serving.items()
            if heads
        ]
        return f"Specialised for {'; '.join(parts)}." if parts else ""

    def _braced(self, group: Sequence[int]) -> str:
        words = " ".join(word(self.tokens[token]) for token in group[:_BRACED])
        return f"{{{words}{' ...' * (len(group) > _BRACED)}}}"

    def _serving(self, group: int) -> list[int]:
        """Heads that serve a group, the most specialised first."""
        serving = [place for place, served in enumerate(self.head_to_group) if served == group]
        return sorted(serving, key=lambda place: -float(self.weights[place, group] - self.even_weights[group]))

    def __str__(self) -> str:
        """The groups, the heads whose groups are least like chance, and what that means."""
        rows = []
        for place, group in enumerate(self.groups):
            serving = [f"{self.heads[i]} {number(float(self.weights[i, place]))}" for i in self._serving(place)]
            tokens = few([word(self.tokens[token]) for token in group], _MOST_TOKENS, " | ")
            rows.append([place, tokens, few(serving, 6) or "no head"])
        parts = [self._title(), table_text([("group", "right"), ("tokens", "left"), ("served by", "left")], rows)]
        if self.parents is not None:
            tree = [
                [token, visible(text), "root" if parent is None else f"{parent} {word(self.tokens[parent])}"]
                for token, (text, parent) in enumerate(zip(self.tokens, self.parents, strict=True))
            ]
            parts.append("The pattern is a tree: every token sees itself and its ancestors only.")
            parts.append(table_text([("token", "right"), ("", "left"), ("parent", "left")], tree))
        said = [self._formed(self._drawn()).partition(" Drawn")[0], self._separation(None)]
        return "\n\n".join([*parts, self._sharpest(), wrapped(" ".join(filter(None, said))), wrapped(_NOTE)])

    def _title(self) -> str:
        n_heads, n_groups = len(self.heads), len(self.groups)
        title = (
            f"{n_groups} group{'s' * (n_groups != 1)} of {len(self.kept)} tokens, "
            f"{n_heads} head{'s' * (n_heads != 1)} ({self.method})"
        )
        if self.found_sink is not None:
            share, fate = self.combination["sink_share"], "kept" if self.sink is None else "left out"
            token = visible(self.tokens[self.found_sink])
            title += f"; attention sink {token!r} takes {share:.2f} of the attention and is {fate}"
        if others := [visible(self.tokens[token]) for token in self.sinks if token]:
            title += f"; left out as well: {', '.join(map(repr, others))}"
        return title

    def _sharpest(self) -> str:
        """The heads whose groups are least like chance, and these groups."""
        titles, rows = ["head", "serves", *_PRINTED.values(), "its own groups"], []
        for place in self._ranked()[:_MOST_HEADS]:
            served, groups = self.head_to_group[place], self.head_groups[place]
            values = {name: float(getattr(self, name)[place]) for name in _PRINTED}
            # Rounding alone tells some values from zero.
            numbers = [
                number(0.0 if abs(value) < _ROUNDING else value, 3 if name == "q_value" else 2)
                for name, value in values.items()
            ]
            bound = [self._braced(group) for group in groups if len(group) > 1]
            alone = f"  +{len(groups) - len(bound)} alone" if len(groups) > len(bound) else ""
            own = f"{few(bound, 4, '  ')}{alone}"
            rows.append([str(self.heads[place]), "-" if served is None else served, *numbers, own])
        left_out = len(self.heads) - len(rows)
        more = f"\n({left_out} heads whose groups are more like chance are not shown)" if left_out else ""
        return (
            table_text([(title, "left" if title in (titles[0], titles[-1]) else "right") for title in titles], rows)
            + more
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


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else value


@public
def attention_groups(
    model: Model,
    text: Any,
    *,
    layers: LayerLike | Iterable[LayerLike] | None = None,
    heads: HeadLike | Iterable[HeadLike] | None = None,
    method: GroupMethod = "auto",
    drop_sink: bool = True,
    threshold: float = THRESHOLD,
    n_groups: int | None = None,
    n_null: int | None = None,
    combine: Combine = "mean",
    prepend_bos: bool | None = None,
    cache: Any = None,
) -> AttentionGroups:
    """Groups of tokens that the heads of a model bind together in one text.

    Args:
        method: ``"spectral"`` (number of groups by the largest eigengap), ``"components"`` (connected by strong edges),
            or ``"auto"``: components where the matrix is sharp.
        drop_sink: Leave attention sinks out: the first token, and others on which attention is parked.
        threshold: Strong edges are at least this share of the strongest edge of one of their tokens.
        n_groups: Make this many groups instead of letting the eigengap decide (spectral).
        n_null: Most draws to compare each head's modularity with. They keep its distance profile and its sinks, and end
            once ten are as modular. By default up to 3,999 for 8 to 32 tokens, 199 up to 64, else none.
        combine: What the groups of all heads together are found in: the mean over heads, or the maximum.

    Example:
        >>> from tl_headmaps import attention_groups, load_default_model
        >>> groups = attention_groups(load_default_model(), "The cat sat on the mat. It was happy.", heads="L13H2")
        >>> groups.words()
        (('The', ' cat'), (' sat', ' on', ' the', ' mat'), ('.', ' It', ' was', ' happy', '.'))
        >>> groups.tokens[groups.sink]  # where attention is parked; left out
        '<|im_start|>'
    """
    chosen_options = GroupOptions(method, drop_sink, threshold, n_groups, n_null, combine)
    prompt = EncodedText.of(model, text, prepend_bos=prepend_bos, least=2, what="a group needs at least two")
    weights = HeadWeights.of(model)
    named = None if heads is None else weights.named_heads(heads)
    chosen = weights.chosen_heads(named, layers)
    chosen_layers = sorted({head.layer for head in chosen})
    index_of = {head: index for index, head in enumerate(chosen)}

    def visit(see: Callable[[int, Tensor], None]) -> None:
        def reduce(seen: LayerActivations) -> None:
            for head, pattern in enumerate(seen["pattern"][0]):
                if (index := index_of.get(HeadIndex(seen.layer, head))) is not None:
                    see(index, pattern)

        run_or_read(model, prompt.ids, cache, read=("pattern",), reduce=reduce, layers=chosen_layers)

    grouping = Grouping(visit, chosen, len(prompt.tokens), chosen_options)
    options = {
        "layers": None if layers is None else chosen_layers,
        "heads": None if named is None else sorted(map(str, named)),
        "prepend_bos": prompt.prepend_bos,
        "from_cache": cache is not None,
        **grouping.options,
    }
    return AttentionGroups.from_grouping(
        grouping, prompt.tokens, chosen, weights.provenance(runs_model=True, options=options, seed=0)
    )
