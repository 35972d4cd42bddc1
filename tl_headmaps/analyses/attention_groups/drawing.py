"""Heads and the token groups they serve, beside the block matrix; or the text with its groups coloured."""

from typing import Literal, TypeAlias

from ...core.errors import UsageError
from ...renderers.figure import Figure
from ...renderers.flowchart import flow
from ...renderers.views import token_groups_view
from .result import AttentionGroups

View: TypeAlias = Literal["flow", "tokens"]

_SHOWN_HEADS = 12
"""Heads in the flowchart: those whose groups are sharpest."""


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
    # The sink would take all the colours of the matrix: it is not drawn where it is left out.
    kept = list(found.kept)
    place = {token: number for number, token in enumerate(kept)}
    if found.sink is not None:
        notes.append(f"The attention sink (token {found.sink}, {found.tokens[found.sink]!r}) is left out.")
    if len(found.groups) == 1:
        notes.append("Together the heads bind the tokens into one group, which none serves more than another.")
    if len(found.heads) > len(shown):
        notes.append(f"The {len(shown)} of {len(found.heads)} heads with the sharpest groups of their own are shown.")
    if found.parents is not None:
        notes.append("The mask is a tree: each token sees its ancestors only.")
    return flow(
        [found.tokens[token] for token in kept],
        [[place[token] for token in group] for group in found.groups],
        heads,
        matrix=None if found.combined is None else found.combined[kept][:, kept],
        title="Heads and the token groups they serve",
        unit="attention, mean over heads",
        note=" ".join(notes),
    )
