"""Attention groups and grouping profiles as text."""

import math
from typing import TYPE_CHECKING

from ...renderers.text import table_text, visible

if TYPE_CHECKING:
    from ..grouping_profile.result import GroupingProfile
    from .result import AttentionGroups, Groups

_MOST_TOKENS = 40
_MOST_HEADS = 12


def attention_groups_text(result: "AttentionGroups") -> str:
    """The groups, which heads serve them, and the sharpest heads with their own groups."""
    parts = [_title(result)]
    columns = [("group", "right"), ("tokens", "left"), ("served by", "left")]
    rows = [[number, _words(result, group), _served_by(result, number)] for number, group in enumerate(result.groups)]
    parts.append(table_text(columns, rows))
    if result.parents is not None:
        parts.append(_tree(result))
    sharpest = sorted(range(len(result.heads)), key=lambda i: (-float(result.modularity[i]), result.heads[i]))[
        :_MOST_HEADS
    ]
    titles = ["head", "serves", "within", "modularity", "null", "z", "p", "sink", "self", "its own groups"]
    columns = [(title, "left" if title in ("head", "its own groups") else "right") for title in titles]
    rows = [
        [
            str(result.heads[i]),
            "-" if result.head_to_group[i] is None else result.head_to_group[i],
            *(_number(float(getattr(result, name)[i])) for name in _COLUMNS),
            _own(result, result.head_groups[i]),
        ]
        for i in sharpest
    ]
    left_out = len(result.heads) - len(sharpest)
    more = f"\n({left_out} heads with less modular groups are not shown)" if left_out else ""
    parts.append(f"{table_text(columns, rows)}{more}")
    parts.append(_NOTE)
    return "\n\n".join(parts)


_COLUMNS = ("within_share", "modularity", "null_modularity", "z_score", "p_value", "sink_share", "self_share")
_NOTE = (
    "serves: group whose share of the head's attention exceeds even attention most; within: share of the attention\n"
    "between different tokens that stays in the head's own groups; null, z, p: the same for shuffled graphs of equal\n"
    "degrees; sink, self: share of attention on the first token and on the token itself"
)


def _title(result: "AttentionGroups") -> str:
    n_heads, n_groups = len(result.heads), len(result.groups)
    title = (
        f"{n_groups} group{'' if n_groups == 1 else 's'} of {len(result.kept)} tokens, "
        f"{n_heads} head{'' if n_heads == 1 else 's'} ({result.method})"
    )
    if result.found_sink is not None:
        share = result.combination["sink_share"]
        fate = "left out" if result.sink is not None else "kept"
        token = visible(result.tokens[result.found_sink])
        title += f"; attention sink {token!r} takes {share:.2f} of the attention and is {fate}"
    return title


def _words(result: "AttentionGroups", group: tuple[int, ...]) -> str:
    shown = " | ".join(visible(result.tokens[token]).strip() or repr(result.tokens[token]) for token in group)
    if len(group) <= _MOST_TOKENS:
        return shown
    cut = " | ".join(visible(result.tokens[token]).strip() for token in group[:_MOST_TOKENS])
    return f"{cut} | ... ({len(group)} tokens)"


def _served_by(result: "AttentionGroups", number: int) -> str:
    serving = [place for place, group in enumerate(result.head_to_group) if group == number]
    serving.sort(key=lambda place: -float(result.weights[place, number] - result.even_weights[number]))
    shown = ", ".join(f"{result.heads[place]} {result.weights[place, number]:.2f}" for place in serving[:6])
    return shown + (f", {len(serving) - 6} more" if len(serving) > 6 else "") or "no head"


def _own(result: "AttentionGroups", groups: "Groups") -> str:
    bound = [group for group in groups if len(group) > 1]
    single = sum(len(group) == 1 for group in groups)
    shown = "  ".join("{" + _words(result, group[:8]) + (" ..." if len(group) > 8 else "") + "}" for group in bound[:4])
    more = f"  and {len(bound) - 4} more" if len(bound) > 4 else ""
    return f"{shown}{more}" + (f"  +{single} alone" if single else "")


def _tree(result: "AttentionGroups") -> str:
    assert result.parents is not None
    rows = [
        [token, visible(text), "root" if parent is None else f"{parent} {visible(result.tokens[parent]).strip()}"]
        for token, (text, parent) in enumerate(zip(result.tokens, result.parents, strict=True))
    ]
    table = table_text([("token", "right"), ("", "left"), ("parent", "left")], rows)
    return f"The pattern is a tree: every token sees itself and its ancestors only.\n\n{table}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def grouping_profile_text(profile: "GroupingProfile", top: int = 3) -> str:
    """The best heads of each score, even attention beside them."""
    rows = []
    for number, score in enumerate(profile.scores):
        for place, (head, value) in enumerate(profile.top(score, top)):
            at = (number, head.layer, head.head)
            low, high = float(profile.interval_low[at]), float(profile.interval_high[at])
            rows.append(
                [
                    score if place == 0 else "",
                    str(head),
                    f"{value:.2f}",
                    "-" if math.isnan(low) else f"{low:.2f}-{high:.2f}",
                    f"{profile.even[number]:.2f}" if place == 0 else "",
                    _number(float(profile.where_possible[at])),
                    f"{profile.possible[number]:.2f}" if place == 0 else "",
                ]
            )
    titles = ["score", "head", "share", "95%", "even", "where possible", "queries"]
    columns = [(title, "left" if title in ("score", "head") else "right") for title in titles]
    left_out = f", {profile.n_cut} cut" if profile.n_cut else ""
    left_out += f", {profile.n_skipped} too short" if profile.n_skipped else ""
    title = f"Grouping profile over {profile.n_texts:,} texts, {profile.n_tokens:,} tokens{left_out}"
    note = (
        "share: mean share of the head's attention on such pairs; even: the same for even attention;\n"
        "where possible: mean attention on such pairs from the queries that have one; queries: share of those queries"
    )
    return f"{title}\n\n{table_text(columns, rows)}\n\n{note}"
