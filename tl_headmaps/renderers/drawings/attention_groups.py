"""Heads and the token groups they serve, beside the block matrix; or the text with its groups coloured."""

from typing import Literal, TypeAlias

from ...drawing import draws
from ...errors import UsageError
from ...results.attention_groups import AttentionGroups
from ..figure import Figure
from ..flowchart import flow
from ..views import token_groups_view

View: TypeAlias = Literal["flow", "tokens"]

_SHOWN_HEADS = 12
"""Heads in the flowchart: those whose groups are sharpest."""


@draws(AttentionGroups)
def attention_groups_figure(found: AttentionGroups, *, view: View = "flow") -> Figure:
    """The groups of the combined attention.

    Args:
        found: The result.
        view: ``"flow"``: heads to groups beside the matrix. ``"tokens"``: the text coloured by group (circuitsvis).
    """
    if view == "tokens":
        return token_groups_view(found.tokens, found.labels, title="Token groups")
    if view != "flow":
        raise UsageError(f"view={view!r} is not known. Choose one of: 'flow', 'tokens'.")
    shown = [head for head, _ in found.top(_SHOWN_HEADS)]
    heads = {}
    for head in sorted(shown):
        group = found.head_to_group[found.heads.index(head)]
        heads[str(head)] = [] if group is None else [group]
    notes = []
    if found.sink is not None:
        notes.append(f"Attention to the sink (token {found.sink}, {found.tokens[found.sink]!r}) is left out.")
    if len(found.heads) > len(shown):
        notes.append(f"The {len(shown)} of {len(found.heads)} heads with the sharpest groups are shown.")
    if found.parents is not None:
        notes.append("The mask is a tree: each token sees its ancestors only.")
    return flow(
        found.tokens,
        [list(group) for group in found.groups],
        heads,
        matrix=found.combined,
        title="Heads and the token groups they serve",
        unit="attention over what even attention gives" if found.causal else "attention",
        note=" ".join(notes),
    )
