"""Salient operations: tables for a few heads, a head map with drill-down for many, or circuitsvis' top tokens."""

from typing import Literal, TypeAlias

import torch

from ...core.errors import UsageError
from ...renderers.figure import Figure
from ...renderers.heat import head_map
from ...renderers.listing import table_figure
from ...renderers.text import quoted
from ...renderers.views import top_tokens_view
from .result import HeadName, SalientOperations

View: TypeAlias = Literal["auto", "map", "table", "top_tokens"]

_FEW_HEADS = 12
_LISTED_TOKENS, _LISTED_TARGETS = 10, 3
"""What a pinned head lists in a map of all heads: more would make the page heavy."""


def salient_operations_figure(found: SalientOperations, *, view: View = "auto") -> Figure:
    """The salient tokens of each head with their targets.

    Args:
        found: The result.
        view: ``"table"`` (the default up to a dozen heads), ``"map"`` of the names' scores with the tokens of a pinned
            head, or ``"top_tokens"``: the most promoted targets, drawn by circuitsvis.
    """
    title = f"Salient operations, {found.circuit.upper()} circuits, preset {found.provenance.options['preset']}"
    if view == "auto":
        view = "table" if len(found.heads) <= _FEW_HEADS else "map"
    if view == "table":
        return table_figure(
            ["head", "name", "token", "salience", *_verbs(found)],
            _rows(found),
            title=title,
            text=str(found),
            unbroken=True,
        )
    if view == "map":
        return _map(found, title)
    if view == "top_tokens":
        tops = {head: _strongest(found, number) for number, head in enumerate(found.heads)}
        return top_tokens_view(tops, title=title)
    raise UsageError(f"view={view!r} is not known. Choose one of: 'auto', 'map', 'table', 'top_tokens'.")


def evidence(entry: HeadName) -> list[list[str]]:
    """A name with what speaks for it, as rows."""
    rows = [
        ["name", entry.name],
        ["best predicate", entry.best or "none"],
        ["share explained", f"{entry.score:.2f} (null {entry.null_mean:.2f})"],
        ["p, q", f"{entry.p_value:.2g}, {entry.q_value:.2g}"],
        ["tokens", entry.input_class],
    ]
    if entry.runner_up is not None:
        rows.append(["runner-up", f"{entry.runner_up} {entry.runner_up_score:.2f}"])
    if entry.description is not None:
        rows.append(["described as", entry.description])
    return rows


def _verbs(found: SalientOperations) -> tuple[str, str]:
    return ("promotes", "suppresses") if found.circuit == "ov" else ("attends to", "avoids")


def _rows(found: SalientOperations) -> list[list[str]]:
    rows = []
    for number, head in enumerate(found.heads):
        for place, token in enumerate(found.token_ids[number].tolist()):
            opening = [str(head), found.names[number].name] if place == 0 else ["", ""]
            targets = [
                " ".join(quoted(found.strings[target]) for target in ids[number, place].tolist())
                for ids in (found.promoted_ids, found.suppressed_ids)
            ]
            rows.append([*opening, quoted(found.strings[token]), f"{found.salience[number, place]:.3g}", *targets])
    return rows


def _map(found: SalientOperations, title: str) -> Figure:
    shape = (1 + max(head.layer for head in found.heads), 1 + max(head.head for head in found.heads))
    values = torch.full(shape, float("nan"))
    drill = {}
    for number, head in enumerate(found.heads):
        values[head.layer, head.head] = found.names[number].score
        rows = [
            [quoted(found.strings[token]), " ".join(quoted(found.strings[t]) for t in targets[:_LISTED_TARGETS])]
            for token, targets in zip(
                found.token_ids[number].tolist()[:_LISTED_TOKENS], found.promoted_ids[number].tolist(), strict=False
            )
        ]
        drill[str(head)] = {"what it does": evidence(found.names[number]), f"token, {_verbs(found)[0]}": rows}
    return head_map(
        values,
        title=title,
        unit="share of mappings the best predicate explains",
        signed=False,
        drill=drill,
        note="Pin a head to see its name, its salient tokens and their strongest targets; search finds a token.",
    )


def _strongest(found: SalientOperations, number: int) -> list[tuple[str, float]]:
    """The largest values among a head's targets, each target once."""
    best: dict[int, float] = {}
    ids, values = found.promoted_ids[number].flatten().tolist(), found.promoted_values[number].flatten().tolist()
    for target, value in zip(ids, values, strict=True):
        best[target] = max(value, best.get(target, value))
    ranked = sorted(best.items(), key=lambda item: (-item[1], item[0]))[:_LISTED_TOKENS]
    return [(found.strings[target], value) for target, value in ranked]
