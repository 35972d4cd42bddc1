"""BibTeX of this tool and of the published methods behind its results.

Entries are in ``references.bib`` beside this file. A result class names its methods by their keys there (``methods``);
:func:`cite` prints them.
"""

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from .errors import UsageError
from .provenance import package_versions

REFERENCES = Path(__file__).with_name("references.bib")
_ENTRY = re.compile(r"^@\w+\{(\w+),\n.*?^\}", re.MULTILINE | re.DOTALL)
_TOOL = "tl_headmaps"
_VERSION = "{VERSION}"

HOSTS = ("nanda2022transformerlens",)
"""Cited with every result."""


@cache
def publications() -> dict[str, str]:
    """The entries of ``references.bib`` by key, without that of this tool."""
    return {key: entry for key, entry in _entries().items() if key != _TOOL}


@cache
def _entries() -> dict[str, str]:
    return {match[1]: match[0] for match in _ENTRY.finditer(REFERENCES.read_text(encoding="utf-8"))}


def bibtex(keys: tuple[str, ...] = ()) -> str:
    """Entries of this tool, of its host and of some publications, each once."""
    entries = [_entries()[_TOOL].replace(_VERSION, f"{{{package_versions()['tl-headmaps']}}}")]
    entries += [publications()[key] for key in dict.fromkeys((*HOSTS, *keys))]
    return "\n\n".join(entries)


def cite(result: Any = None, *, file: Any = None) -> None:
    """Print BibTeX of this tool, of TransformerLens, and of the methods used in a result.

    Args:
        result: A result, whose methods are cited too; without one, the tool and its host alone.
        file: Any text stream to print to; standard output by default.

    Example:
        >>> from tl_headmaps import ValueMixing
        >>> cite(ValueMixing.from_arrays([[1, 0], [0.5, 0.5]], [[1.0], [2.0]]))  # doctest: +ELLIPSIS
        @software{tl_headmaps,
        ...
        @misc{nanda2022transformerlens,
        ...
        @article{elhage2021framework,
        ...
    """
    methods = () if result is None else getattr(result, "references", None)
    if methods is None:
        raise UsageError(
            f"cite() takes a result of an analysis (or nothing), not a {type(result).__name__}. A saved one is read "
            "with Result.load(path)."
        )
    (sys.stdout if file is None else file).write(bibtex(methods) + "\n")
