"""From plain values to markup: escaping, packed numbers, and pages that carry all they need.

Nothing is ever fetched: styles and scripts are part of the page, and a saved page forbids connections outright. Numbers
are stored as 32-bit floats (exact for the tensors of our results); nulls and intervals as 16-bit floats, three digits.
"""

import base64
import gzip
import html
import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import UsageError
from .shapes import INKS
from .text import prose, visible

LABEL_LENGTH = 40
"""Longer labels are cut: a token can be hundreds of spaces."""

_ORDER = ("heat", "chart", "circuits")
_NOTHING = 2.0**-34
"""What a 16-bit float cannot tell from zero, as a share of the largest value."""

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def label(text: object) -> str:
    """Any token as one visible line of bounded length."""
    shown = visible(str(text))
    if not shown.strip():
        shown = f"'{shown}'"
    return shown if len(shown) <= LABEL_LENGTH else shown[: LABEL_LENGTH - 1] + "…"


def escaped(text: object) -> str:
    """Untrusted text as markup that shows it."""
    return html.escape(visible(str(text)))


def script_json(values: Any) -> str:
    """JSON that cannot close the script element it is in."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # Half of a surrogate pair, which UTF-8 cannot hold, becomes its JSON escape.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def packed(values: np.ndarray) -> dict[str, str]:
    """An array as base64 of 32-bit floats, or of a table and one byte per value where few values differ."""
    flat = np.ascontiguousarray(values, dtype="<f4").ravel()
    table, index = np.unique(flat, return_inverse=True)
    if len(table) < 256 and flat.size > 64:
        return {"t": _base64(table.tobytes()), "i": _base64(index.astype("u1").tobytes())}
    return {"f": _base64(flat.tobytes())}


def packed_half(values: np.ndarray) -> dict[str, Any]:
    """An array with three significant digits: 16-bit floats of the values over the largest; exact if few differ."""
    flat = np.asarray(values, dtype=float).ravel()
    largest = float(np.nanmax(np.abs(flat), initial=0.0)) or 1.0
    flat = np.where(np.abs(flat) < largest * _NOTHING, 0.0, flat)
    if "t" in (exact := packed(flat)):
        return exact
    return {"h": _base64((flat / largest * 1024).astype("<f2").tobytes()), "m": largest}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


@cache
def _asset(name: str) -> str:
    """A script or style without comments and indentation."""
    text = files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
    lines = (line.strip() for line in re.sub(r"/\*.*?\*/", "", text, flags=re.S).splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


@cache
def _circuitsvis() -> str:
    """The script of circuitsvis (1.3 MB), packed to a third; read from the package without importing it."""
    spec = find_spec("circuitsvis")
    if spec is None or spec.origin is None:
        raise UsageError("circuitsvis is not installed, and this view is drawn by it: pip install circuitsvis.")
    source = (Path(spec.origin).parent / "dist" / "cdn" / "iife.js").read_bytes()
    return _base64(gzip.compress(source, 9, mtime=0))


def assets(needs: Iterable[str]) -> str:
    """Style and scripts of the parts a page uses, each once."""
    wanted = set(needs)
    inks = "".join(f".tlhm-fill-{ink}{{fill:var(--{ink})}}.tlhm-stroke-{ink}{{stroke:var(--{ink})}}" for ink in INKS)
    parts = [f"<style>{_asset('headmaps.css')}\n{inks}</style>"]
    if "circuits" in wanted:
        parts.append(f'<script type="text/plain" class="tlhm-circuitsvis">{_circuitsvis()}</script>')
    if wanted:
        code = "\n".join(_asset(f"{name}.js") for name in ("core", *(part for part in _ORDER if part in wanted)))
        parts.append(f"<script>(()=>{{'use strict';\n{code}\n}})()</script>")
    return "".join(parts)


def whole_page(title: str, bodies: Sequence[str], needs: Iterable[str]) -> str:
    """A complete document that opens offline, from disk, in any current browser."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escaped(title)}</title></head>\n<body class="tlhm-page">\n'
        + "\n".join(bodies)
        + f"\n{assets(needs)}\n</body></html>\n"
    )


def table(columns: Sequence[object], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """A plain table."""
    head = "".join(f'<th scope="col">{escaped(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    title = f"<caption>{escaped(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def figure_body(
    kind: str,
    title: str,
    *,
    data: Any = None,
    drawing: str = "",
    inside: str = "",
    alternative: str = "",
    note: str = "",
) -> str:
    """The frame all figures share: title, place for the picture, its data, and the text alternative.

    The alternative is open until a script has drawn the picture, so a page without scripts is still readable.
    """
    drawn = kind in _ORDER
    place = (
        f'<div class="tlhm-draw">{drawing}</div><script type="application/json">{script_json(data)}</script>'
        if drawn
        else ""
    )
    shown = f'<details class="tlhm-alt"{" open" if drawn else ""}><summary>As text</summary>{alternative}</details>'
    return (
        f'<div class="tlhm" data-kind="{kind}" role="group" aria-label="{escaped(title)}">'
        f'<div class="tlhm-title">{escaped(title)}</div>{inside}{place}'
        + (f'<div class="tlhm-note">{escaped(prose(note))}</div>' if note else "")
        + (shown if alternative else "")
        + "</div>"
    )
