"""Views drawn by circuitsvis: attention patterns, tokens by group, top tokens by head.

circuitsvis puts token text into the page as markup. Every ``<`` and ``&`` is therefore followed by a zero-width space:
then neither can begin a tag or an entity, and the text looks the same. Its script is packed into the page (a third of
its 1.3 MB), once for all views of a saved page; nothing is fetched. In a notebook each view carries it, since outputs
may be moved, cleared, or shown in frames of their own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.errors import UsageError
from ..core.types import HeadIndex
from .colours import SERIES
from .figure import Figure
from .grids import MapLayer, as_array, heat_of
from .listing import Listing
from .page import escaped, figure_body, label, packed
from .text import table_text, visible

HEADS_AT_ONCE = 8
"""Patterns drawn at once; the others are drawn when they are chosen."""

MAX_CELLS = 2_000_000
MAX_TOKENS = 512

_MARK = "\u200b"


def safe(token: object) -> str:
    """A token that looks the same whether it is taken for text or for markup."""
    return label(token).replace("<", "<" + _MARK).replace("&", "&" + _MARK)


def attention_view(
    patterns: Any,
    tokens: Sequence[object],
    *,
    heads: Sequence[Any] | None = None,
    title: str = "Attention patterns",
    causal: bool = True,
    note: str = "",
) -> Figure:
    """Attention of chosen heads between the tokens of a text; eight heads at a time, the others on demand.

    Args:
        patterns: Attention by head, query and key.
        tokens: The tokens of the text.
        heads: Names of the heads, in the order of ``patterns``.
        title: What is shown.
        causal: Grey out keys that come after the query.
        note: A sentence under the figure.
    """
    array = as_array(patterns, "patterns")
    n = len(tokens)
    if array.ndim != 3 or array.shape[1:] != (n, n) or not array.size:
        raise UsageError(f"patterns has shape {array.shape}; expected (head, {n}, {n}) for {n} tokens.")
    if not np.isfinite(array).all():
        raise UsageError("patterns holds values that are not finite; attention is between 0 and 1.")
    if array.size > MAX_CELLS or n > MAX_TOKENS:
        raise UsageError(
            f"{array.shape[0]:,} heads by {n:,} tokens are {array.size:,} values; a view takes up to {MAX_CELLS:,} and "
            f"{MAX_TOKENS} tokens. Choose some heads, or a shorter text."
        )
    names = [str(HeadIndex.of(head)) for head in heads] if heads else [f"head {i}" for i in range(len(array))]
    if len(names) != len(array):
        raise UsageError(f"{len(names)} heads were named, but there are {len(array)} patterns; name each.")
    chunks = [names[i : i + HEADS_AT_ONCE] for i in range(0, len(names), HEADS_AT_ONCE)]
    data = {
        "element": "AttentionHeads",
        "tokens": [safe(token) for token in tokens],
        "heads": names,
        "chunk": HEADS_AT_ONCE,
        "names": [chunk[0] if len(chunk) == 1 else f"{chunk[0]} to {chunk[-1]}" for chunk in chunks],
        "causal": causal,
        "patterns": packed(array),
    }
    strongest = [_strongest(names[i], array[i], tokens) for i in range(min(len(names), 40))]
    text = f"{visible(title)}: {len(names)} heads, {n} tokens.\n" + "\n".join(strongest)
    # Keys after the query are left out rather than drawn as zero.
    lengths = range(1, n + 1) if causal else [n] * n
    first = [
        MapLayer(name, [row[:end].tolist() for row, end in zip(array[i], lengths, strict=True)])
        for i, name in enumerate(names[:HEADS_AT_ONCE])
    ]
    labels: dict[str, Any] = {"rows": "query", "columns": "key", "row_labels": tokens, "column_labels": tokens}
    printed = heat_of(first, title=title, unit="attention", item="pair", panels=True, note=note, **labels)
    return _view(data, title, text, printed, note)


def _strongest(name: str, pattern: np.ndarray, tokens: Sequence[object]) -> str:
    query, key = map(int, np.unravel_index(int(pattern.argmax()), pattern.shape))
    return f"{name}: most from {label(tokens[query])} to {label(tokens[key])} ({pattern[query, key]:.4g})"


def token_groups_view(
    tokens: Sequence[object],
    groups: Sequence[int | None],
    *,
    names: Sequence[object] | None = None,
    title: str = "Token groups",
    note: str = "",
) -> Figure:
    """The text with the tokens of each group coloured; ``groups`` has the number of each token's group, or None."""
    if len(groups) != len(tokens) or not len(tokens):
        raise UsageError(f"{len(groups)} groups were given for {len(tokens)} tokens; give one for each token.")
    n_groups = 1 + max((number for number in groups if number is not None), default=-1)
    if n_groups < 1:
        raise UsageError("No token belongs to a group; there is nothing to colour.")
    labels = [label(name) for name in names] if names else [f"group {number}" for number in range(n_groups)]
    if len(labels) != n_groups:
        raise UsageError(f"{len(labels)} names were given for {n_groups} groups; name each.")
    shown = [safe(token) for token in tokens]
    props = [
        {
            "tokens": shown,
            "values": [float(group == number) for group in groups],
            "minValue": 0.0,
            "maxValue": 1.0,
            "positiveColor": SERIES[number % len(SERIES)],
        }
        for number in range(n_groups)
    ]
    lines = [
        f"{name}: " + " ".join(label(token) for token, group in zip(tokens, groups, strict=True) if group == number)
        for number, name in enumerate(labels)
    ]
    text = f"{visible(title)}: {len(tokens)} tokens in {n_groups} groups.\n" + "\n".join(lines)
    data = {"element": "ColoredTokens", "props": props, "titles": labels}
    return _view(data, title, text, _listing(title, text, note), note)


def top_tokens_view(tops: Mapping[Any, Any], *, title: str = "Top tokens", note: str = "") -> Figure:
    """The strongest tokens of each head, layer by layer: ``{"L23H4": [("pasta", 0.9), ...]}``, strongest first."""
    if not tops:
        raise UsageError("There is nothing to draw: give at least one head with its tokens.")
    by_head = {
        HeadIndex.of(head): [(label(token), float(value)) for token, value in rows] for head, rows in tops.items()
    }
    layers = sorted({head.layer for head in by_head})
    n_heads = 1 + max(head.head for head in by_head)
    k = max(map(len, by_head.values()))
    vocabulary = [""]
    numbers: dict[str, int] = {"": 0}
    values = np.zeros((len(layers), 1, k, n_heads))
    indices = np.zeros((len(layers), 1, k, n_heads), dtype=int)
    for head, rows in by_head.items():
        for place, (token, value) in enumerate(rows):
            if token not in numbers:
                numbers[token] = len(vocabulary)
                vocabulary.append(token)
            at = (layers.index(head.layer), 0, place, head.head)
            values[at], indices[at] = value, numbers[token]
    if not np.isfinite(values).all():
        raise UsageError("A token has a value that is not finite; leave it out.")
    nothing: list[Any] = [[[]] for _ in layers]
    props = {
        "tokens": [[safe(token) if token else "" for token in vocabulary]] * len(layers),
        "topkVals": values.tolist(),
        "topkIdxs": indices.tolist(),
        "bottomkVals": nothing,
        "bottomkIdxs": nothing,
        "firstDimensionName": "Measure",
        "thirdDimensionName": "Head",
        "sampleLabels": [f"layer {layer}" for layer in layers],
        "firstDimensionLabels": ["value"],
    }
    listed = [
        [str(head), token, f"{value:.4g}"] for head, entries in sorted(by_head.items()) for token, value in entries
    ]
    columns = [("head", "left"), ("token", "left"), ("value", "right")]
    text = f"{visible(title)}: {len(by_head)} heads.\n{table_text(columns, listed[:200])}"
    return _view({"element": "TopkTokens", "props": [props]}, title, text, _listing(title, text, note), note)


def _listing(title: str, text: str, note: str) -> Listing:
    """The printed form of a view that is read: its text, and the note below."""
    return Listing(visible(title), f"{text}\n\n{visible(note)}" if note else text)


def _view(data: dict[str, Any], title: str, text: str, printed: Any, note: str) -> Figure:
    """The figure of a view: ``data`` is handed to circuitsvis, ``printed`` is drawn in print."""
    first, *others = text.splitlines()
    alternative = f"<p>{escaped(first)}</p><pre>{'<br>'.join(map(escaped, others[:59]))}</pre>"
    body = figure_body("circuits", title, data=data, alternative=alternative, note=note)
    return Figure(title=visible(title), body=body, needs=("circuits",), text=text, data=printed)
