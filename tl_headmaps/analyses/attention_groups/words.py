"""What is said about groups of tokens: under their figure, and in a terminal."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.types import HeadLike
from ...renderers.text import number, table_text, visible, word, wrapped
from ...scorers.groups import Groups

if TYPE_CHECKING:
    from .result import AttentionGroups

PER_HEAD = (
    "within_share",
    "distance_within",
    "modularity",
    "null_modularity",
    "z_score",
    "p_value",
    "q_value",
    "sink_share",
    "self_share",
)
"""Fields of a result with one value per head."""

ALPHA = 0.05
_MOST_TOKENS = 40
_MOST_HEADS = 12
"""Tokens of a group and heads that are listed."""

_UNTESTED = "No draws were made, so nothing is said about chance."
_TITLES = (
    *("head", "serves", "within", "by distance", "modularity", "null", "z", "p", "q", "sink", "self"),
    "its own groups",
)
_NOTE = (
    "serves: group whose share of the head's attention exceeds even attention most; within: share of the attention\n"
    "between different tokens that stays in the head's own groups, and if it depended on distance alone; null, z, p:\n"
    "the same steps on draws that keep the head's distance profile and sinks; q: over the heads of this result; sink,\n"
    "self: share of attention on the first token and on the token itself"
)


@dataclass(frozen=True)
class GroupWords:
    """Sentences and tables about one result."""

    found: "AttentionGroups"

    def note(self, shown: list[int], called: list[str], head: HeadLike | None) -> str:
        """The figure in words: who forms groups, is their separation complete, and who is specialised for which."""
        notes = []
        if self.found.sinks:
            tokens = ", ".join(f"{visible(self.found.tokens[token])!r}" for token in self.found.sinks)
            notes.append(f"Left out as attention sink{'s' if len(self.found.sinks) > 1 else ''}: {tokens}.")
        if head is not None:
            notes.append(self._tested(shown[0], called))
        elif len(self.found.heads) > 1:
            notes.append(self._formed(shown))
        if head is None and len(self.found.groups) == 1 and len(self.found.heads) > 1:
            notes.append(f"All heads together ({self.found.combine}) bind the tokens into one group.")
        else:
            notes.append(self._separation(None if head is None else shown[0]))
        if head is None and len(self.found.groups) > 1:
            notes.append(self._specialised(called))
        if self.found.parents is not None:
            notes.append("The mask is a tree: each token sees its ancestors only.")
        return " ".join(filter(None, notes))

    def _tested(self, place: int, called: list[str]) -> str:
        p = float(self.found.p_value[place])
        if not self.found._bound(place):
            return f"{called[place]} binds nothing: its tokens are in one group, or alone."
        if math.isnan(p):
            return _UNTESTED
        verdict = "is not explained" if p <= ALPHA else "may be explained"
        return (
            f"Modularity {number(float(self.found.modularity[place]))}, which {verdict} by distance between tokens "
            f"alone (mean of draws {number(float(self.found.null_modularity[place]))}, p = {p:.2g})."
        )

    def _formed(self, shown: list[int]) -> str:
        n = len(self.found.heads)
        if bool(self.found.p_value.isnan().all()):
            drawn = f"Drawn: {len(shown)} of {n} heads. " if len(shown) < n else ""
            return f"{drawn}{_UNTESTED}"
        passing, formers = int((self.found.p_value <= ALPHA).sum()), len(self.found.formers())
        found = (
            f"{formers or 'None'} of {n} heads form{'s' * (formers < 2)} groups that distance between tokens does not "
            f"explain (false discovery rate {ALPHA:.0%}; {passing} at p ≤ {ALPHA}, where chance gives up to "
            f"{math.ceil(ALPHA * n)})."
        )
        if passing > len(shown):
            return f"{found} Drawn: the {len(shown)} with the lowest p."
        return found if passing else f"{found} Drawn: the {len(shown)} that come closest."

    def _separation(self, place: int | None) -> str:
        inside, by_distance = (
            (self.found.combination["within_share"], self.found.combination["distance_within"])
            if place is None
            else (float(self.found.within_share[place]), float(self.found.distance_within[place]))
        )
        if len(self.found.groups if place is None else self.found.head_groups[place]) < 2:
            return ""
        null = "" if math.isnan(by_distance) else f" ({1 - by_distance:.0%} if it depended on distance alone)"
        if inside >= 1 - 1e-6:
            return f"The separation is complete: no attention crosses the groups{null}."
        return f"The separation is not complete: {1 - inside:.0%} of the attention between tokens crosses groups{null}."

    def _specialised(self, called: list[str]) -> str:
        parts = []
        for number_, group in enumerate(self.found.groups[:6]):
            serving = self._serving(number_)
            if serving and len(group) > 1:
                more = f" and {len(serving) - 4} more" if len(serving) > 4 else ""
                words = " ".join(word(self.found.tokens[token]) for token in group[:6]) + (
                    " ..." if len(group) > 6 else ""
                )
                parts.append(f"{{{words}}}: {', '.join(called[place] for place in serving[:4])}{more}")
        return f"Specialised for {'; '.join(parts)}." if parts else ""

    def _serving(self, group: int) -> list[int]:
        """Heads that serve a group, the most specialised first."""
        serving = [place for place, served in enumerate(self.found.head_to_group) if served == group]
        return sorted(
            serving, key=lambda place: -float(self.found.weights[place, group] - self.found.even_weights[group])
        )

    def text(self) -> str:
        """The result for a terminal."""
        columns = [("group", "right"), ("tokens", "left"), ("served by", "left")]
        rows = [[place, self._words(group), self._served_by(place)] for place, group in enumerate(self.found.groups)]
        parts = [self._title(), table_text(columns, rows)]
        if self.found.parents is not None:
            parts.append(self._tree(self.found.parents))
        words = " ".join(
            filter(None, [self._formed(self.found._drawn()).partition(" Drawn")[0], self._separation(None)])
        )
        return "\n\n".join([*parts, self._sharpest(), wrapped(words, 120), _NOTE])

    def _title(self) -> str:
        n_heads, n_groups = len(self.found.heads), len(self.found.groups)
        title = (
            f"{n_groups} group{'' if n_groups == 1 else 's'} of {len(self.found.kept)} tokens, "
            f"{n_heads} head{'' if n_heads == 1 else 's'} ({self.found.method})"
        )
        if self.found.found_sink is not None:
            share = self.found.combination["sink_share"]
            fate = "left out" if self.found.sink is not None else "kept"
            token = visible(self.found.tokens[self.found.found_sink])
            title += f"; attention sink {token!r} takes {share:.2f} of the attention and is {fate}"
        if others := [visible(self.found.tokens[token]) for token in self.found.sinks if token]:
            title += f"; left out as well: {', '.join(map(repr, others))}"
        return title

    def _words(self, group: tuple[int, ...]) -> str:
        shown = " | ".join(word(self.found.tokens[token]) for token in group[:_MOST_TOKENS])
        return shown if len(group) <= _MOST_TOKENS else f"{shown} | ... ({len(group)} tokens)"

    def _served_by(self, group: int) -> str:
        serving = self._serving(group)
        shown = ", ".join(
            f"{self.found.heads[place]} {number(float(self.found.weights[place, group]))}" for place in serving[:6]
        )
        return shown + (f", {len(serving) - 6} more" if len(serving) > 6 else "") or "no head"

    def _tree(self, parents: tuple[int | None, ...]) -> str:
        rows = [
            [
                token,
                visible(text),
                "root" if parent is None else f"{parent} {visible(self.found.tokens[parent]).strip()}",
            ]
            for token, (text, parent) in enumerate(zip(self.found.tokens, parents, strict=True))
        ]
        table = table_text([("token", "right"), ("", "left"), ("parent", "left")], rows)
        return f"The pattern is a tree: every token sees itself and its ancestors only.\n\n{table}"

    def _sharpest(self) -> str:
        """The heads whose groups are least like chance, and these groups."""
        columns = [(title, "left" if title in ("head", "its own groups") else "right") for title in _TITLES]
        rows = []
        for place in self.found._ranked()[:_MOST_HEADS]:
            group = self.found.head_to_group[place]
            numbers = [
                number(float(getattr(self.found, name)[place]), 3 if name[1:] == "_value" else 2) for name in PER_HEAD
            ]
            own = self._own(self.found.head_groups[place])
            rows.append([str(self.found.heads[place]), "-" if group is None else group, *numbers, own])
        left_out = len(self.found.heads) - len(rows)
        more = f"\n({left_out} heads whose groups are more like chance are not shown)" if left_out else ""
        return f"{table_text(columns, rows)}{more}"

    def _own(self, groups: Groups) -> str:
        bound = [group for group in groups if len(group) > 1]
        single = sum(len(group) == 1 for group in groups)
        shown = "  ".join(
            "{" + self._words(group[:8]) + (" ..." if len(group) > 8 else "") + "}" for group in bound[:4]
        )
        more = f"  and {len(bound) - 4} more" if len(bound) > 4 else ""
        return f"{shown}{more}" + (f"  +{single} alone" if single else "")
