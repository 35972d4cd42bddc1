"""``tl-headmaps doctor``: is everything here that the commands need?"""

import importlib.util
import math
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click

from ..core.errors import HeadMapsError
from .build import DEVICE, MODEL, NO_CHECKPOINT
from .output import say

_OPTIONAL = {
    "matplotlib": ("figures as .png, .pdf and .svg", ""),
    "gguf": ("making the default model", "demo"),
    "accelerate": ("making the default model", "demo"),
    "pyarrow": ("results as .parquet", ""),
    "ipywidgets": ("progress bars in notebooks", "notebook"),
    "distributed": ("layers on a Dask cluster", "cluster"),
}
"""Packages that some things need: what for, and the extra that brings them, unless they come along anyway."""

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")

_Line = tuple[str, str, str]
"""Whether something is ``ok``, ``missing`` (and can be done without) or ``broken``; what; and a few words."""


@click.command(params=[MODEL, NO_CHECKPOINT, DEVICE])
def doctor(model: str | None, device: str | None) -> None:
    """Check versions, caches, a model, a browser and optional packages; fails if something is broken."""
    broken = False
    for state, what, words in _lines(model, device):
        say(f"{state:<9}{what:<12}{words}")
        broken |= state == "broken"
    if broken:
        raise click.exceptions.Exit(1)


def _lines(model: str | None, device: str | None) -> Iterator[_Line]:
    yield _versions()
    yield _cache()
    yield _hub()
    yield _model(model, device)
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    yield ("ok", "browser", browser) if browser else ("missing", "browser", "only tests and the gallery need Chromium")
    for name, (use, extra) in _OPTIONAL.items():
        there = importlib.util.find_spec(name) is not None
        wanted = f"'tl-headmaps[{extra}]'" if extra else name
        yield ("ok" if there else "missing"), name, use if there else f"{use}: pip install {wanted}"


def _versions() -> _Line:
    from ..core.provenance import package_versions

    versions = package_versions()
    whole = "not installed" not in [version for name, version in versions.items() if name != "tl-headmaps"]
    return "ok" if whole else "broken", "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


def _cache() -> _Line:
    """Our own cache, with the size of each part and the limit of those that have one."""
    from ..core.files import cache_folder
    from ..core.store import LIMIT_VARIABLE, PARTS, cache_limit

    try:
        folder, limit = cache_folder(), cache_limit()
        existing = next(part for part in (folder.absolute(), *folder.absolute().parents) if part.exists())
        there = sorted(folder.iterdir()) if folder.exists() else []
    except (HeadMapsError, OSError) as error:
        return "broken", "cache", str(error)
    parts = ", ".join(f"{part.name} {_size(part)}" for part in there if not part.name.startswith("."))
    state = "ok" if existing.is_dir() and os.access(existing, os.W_OK) else "broken"
    unwritable = "" if state == "ok" else "; it cannot be written to: set TL_HEADMAPS_CACHE to another folder"
    size = _size(folder) if there else "empty"
    most = "without a limit" if math.isinf(limit) else f"up to {limit / 1e9:g} GB"
    kept = f"; {' and '.join(PARTS)} are kept {most} ({LIMIT_VARIABLE})"
    return state, "cache", f"{folder}, {size}{f' ({parts})' if parts else ''}{kept}{unwritable}"


def _hub() -> _Line:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    return "ok", "hub cache", f"{folder}, {_size(folder) if folder.exists() else 'empty'}"


def _size(path: Path) -> str:
    size = 0.0
    for folder, _, names in os.walk(path) if path.is_dir() else [(path.parent, (), (path.name,))]:
        for name in names:
            with suppress(OSError):  # gone by now, or not ours to look at
                found = Path(folder, name).lstat()
                size += found.st_size if stat.S_ISREG(found.st_mode) else 0
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _model(name: str | None, device: str | None) -> _Line:
    """The self-check of the model asked for, or of the default model if it is here."""
    from .. import HeadWeights, load_model
    from ..capture.bundled import NAME, is_fetched

    try:
        if name is None and not is_fetched():
            return "missing", "model", f"{NAME} is not fetched yet (93 MB): tl-headmaps model"
        weights = HeadWeights.from_model(load_model(name, device))
        seams = () if weights.check is None else weights.check.seams
    except HeadMapsError as error:
        return "broken", "model", str(error)
    wrong = [seam.name for seam in seams if not seam.fits]
    fitting = f"{len(seams) - len(wrong)} of {len(seams)} seams fit"
    quantised = f", weights {weights.quantisation}" if weights.quantisation else ""
    words = f"{weights.shown_name}, {fitting}{quantised}"
    return ("broken", "model", f"{words}; not {', '.join(wrong)}") if wrong else ("ok", "model", words)
