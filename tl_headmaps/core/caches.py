"""What is kept on disk between calls, up to a limit: context vectors and activations, which can be made again.

An entry is a folder or a file with a digest for its name, directly below ``context`` or ``activations`` in the cache
folder. Whoever uses one marks it (the time of its last change is the time of its last use). When something new was
written and all entries together are larger than the limit, those that were not used for longest are removed, but never
one that was used in the last hour: another process may be reading it, or writing to it.

An entry is removed in one step: it gets another name first, so that nobody finds half of it. If somebody marked it in
that very moment, it gets its name back.
"""

import math
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from .errors import HeadMapsError, UsageError
from .files import cache_folder

LIMIT_VARIABLE = "TL_HEADMAPS_CACHE_GB"
PARTS = ("context", "activations")
"""The parts of the cache folder that the limit is about; the default model and digests of checkpoints stay."""

_DEFAULT_GB = 5.0
_IN_USE = 3600.0
"""Seconds since its last use for which an entry is never removed."""

_ENTRY = re.compile(r"[0-9a-f]{32,64}(\.safetensors)?")
_REMOVED = ".removed"


def cache_limit() -> float:
    """Bytes that context vectors and activations may take: ``TL_HEADMAPS_CACHE_GB`` if set, else 5 GB."""
    stated = os.environ.get(LIMIT_VARIABLE) or str(_DEFAULT_GB)
    try:
        limit = float(stated)
    except ValueError:
        limit = math.nan
    if not limit >= 0:
        raise UsageError(
            f"{LIMIT_VARIABLE}={stated!r:.80} is not a size. Give the gigabytes that vectors and activations may "
            "take on disk, such as 2.5, or inf for no limit."
        )
    return limit * 1e9


def mark_used(entry: Path) -> None:
    """Say that an entry is in use now; what lies outside the cache folder is left as it is."""
    with suppress(OSError, HeadMapsError):  # not there yet, or not ours to change
        if entry.parent.parent == cache_folder():
            os.utime(entry)


def trim_cache(folder: Path, limit: float, keep: Collection[Path] = ()) -> None:
    """Remove what was not used for longest, until all entries together are within the limit.

    Args:
        folder: The cache folder.
        limit: Bytes.
        keep: Entries that stay whatever their size: those that were just written.
    """
    found = []
    for entry in _entries(folder):
        with suppress(OSError):  # gone by now
            found.append((entry.lstat().st_mtime, entry, _size(entry)))
    total = sum(size for _, _, size in found)
    for used, entry, size in sorted(found):
        if total <= limit or _is_recent(used):
            break
        if entry not in keep and _remove(entry):
            total -= size


def _entries(folder: Path) -> Iterator[Path]:
    """The entries of all parts; what a killed process had begun to remove is removed on the way."""
    listed: list[Path] = []
    for part in PARTS:
        with suppress(OSError):  # nothing was kept there yet
            listed += (folder / part).iterdir()
    for entry in listed:
        if _ENTRY.fullmatch(entry.name) and not entry.is_symlink():
            yield entry
        elif entry.name.startswith(".") and entry.name.endswith(_REMOVED):
            with suppress(OSError):  # gone by now
                if not _is_recent(entry.lstat().st_mtime):
                    _delete(entry)


def _is_recent(used: float) -> bool:
    return time.time() - used < _IN_USE


def _size(entry: Path) -> int:
    if not entry.is_dir():
        return entry.lstat().st_size
    return sum(path.lstat().st_size for path in entry.rglob("*") if path.is_file())


def _remove(entry: Path) -> bool:
    """Whether an entry is gone: not if it cannot be removed, or was marked meanwhile."""
    aside = entry.with_name(f".{entry.name}.{os.getpid()}{_REMOVED}")
    try:
        entry.rename(aside)
    except FileNotFoundError:
        return True
    except OSError:  # not ours, or open on a system that locks open files
        return False
    with suppress(OSError):
        if _is_recent(aside.lstat().st_mtime):
            aside.rename(entry)
            return False
    _delete(aside)
    return True


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
