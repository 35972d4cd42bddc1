"""What goes wrong with files and texts: small changes of something valid, each from a seeded generator."""

import json
import random
from collections.abc import Iterator
from typing import Any

HOSTILE = (
    "</script><script>window.sprung=1</script>",
    "<img src=x onerror=window.sprung=1>",
    "<svg onload=window.sprung=1>",
    "\"'><b onmouseover=window.sprung=1>",
    "javascript:window.sprung=1",
    "{{constructor.constructor('window.sprung=1')()}}",
    "${window.sprung=1}",
    "<!--<script>",
    "]]>",
    "<link rel=stylesheet href=http://127.0.0.1:9/x.css>",
    "<iframe src=http://127.0.0.1:9/>",
    "url(http://127.0.0.1:9/x.png)",
    "\u202eabc\u2028\u2029\u0000\ufeff",
    "=cmd|' /C calc'!A0",
    "%s%n{0}{x!r}$x",
    r"\input{/etc/passwd}\write18{touch sprung}",
    r"}\end{tabular}^^5cinput{x}%",
    "x" * 3000,
    "👩‍👩‍👧 é\u0301 ﷽",
    "\\", "'", '"', "&lt;", "\n\r\t", " ",
)  # fmt: skip

RUBBISH = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "3", "L0H0",
    "\ud800", [], [[]], [None], {}, {"x": 1}, *HOSTILE,
)  # fmt: skip

BYTES = (
    b"",
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"{",
    b"[" * 5000,
    b'"',
    b"1" * 5000,
    b"NaN",
    b"\xe2\x80\xa8",
    b"\r\n",
    b",",
    b"\\ud800",
)


def mutated_json(value: Any, generator: random.Random, times: int = 1) -> Any:
    """A copy with some things in it removed, repeated, exchanged, or replaced by something of another kind."""
    value = json.loads(json.dumps(value))
    for _ in range(times):
        places = list(_places(value))
        if not places:
            return generator.choice(RUBBISH)
        container, key = generator.choice(places)
        kind = generator.randrange(5)
        if kind == 0:
            container.pop(key)
        elif kind == 1 and isinstance(container, list):
            container.insert(key, container[key])
        elif kind == 2:
            other, there = generator.choice(places)
            try:
                container[key] = other[there]
            except LookupError:
                continue
        else:
            container[key] = generator.choice(RUBBISH)
        try:
            json.dumps(value)
        except ValueError:  # a list inside itself
            return None
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in list(items):
        yield value, key
        yield from _places(inside)


def mutated_bytes(data: bytes, generator: random.Random) -> bytes:
    """Cut off, a flipped bit, or something put in."""
    place = generator.randrange(len(data) + 1)
    kind = generator.randrange(4)
    if kind == 0:
        return data[:place]
    if kind == 1 and place < len(data):
        return data[:place] + bytes([data[place] ^ 1 << generator.randrange(8)]) + data[place + 1 :]
    if kind == 2:
        return data[:place] + generator.choice(BYTES) + data[place:]
    end = generator.randrange(place, len(data) + 1)
    return data[:place] + data[end:]
