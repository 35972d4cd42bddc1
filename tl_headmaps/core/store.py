"""What is kept on disk between calls: finished pieces of long work, in run folders and in the cache.

A piece has a name and small tensors: a layer of a sweep, a result of a reproduction, vectors read in context,
activations. All pieces of a :class:`Store` have one identity, everything that decides their numbers. A piece is written
in one rename, and its checksum covers tensors, name and identity: one that was damaged or altered, or that belongs to
another run, is made again. Bytes of a piece depend on the input alone. Nothing here is ever unpickled.

A run folder (:func:`open_run`) is a store that says itself what it is, so that an interrupted run resumes::

    RUN_DIR/run.json                    what is computed: kind, provenance, when it was started
    RUN_DIR/layer-0007.safetensors      one finished piece
    RUN_DIR/run.lock                    held while a process works on the run

The cache (:class:`Cache`) has entries, a file or a folder each, directly below ``context`` or ``activations`` in the
cache folder. Whoever uses one marks it (the time of its last change is the time of its last use). When something new
was written and all entries together are larger than the limit, those that were not used for longest are removed, but
never one that was used in the last hour: another process may be reading it, or writing to it.
"""

import hashlib
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from tqdm.auto import tqdm

from .errors import HeadMapsError, OutputError, UsageError
from .files import PART_SUFFIX, UnreadableError, cache_folder, home_expanded, parse_json, read_text, replacing
from .provenance import Provenance

RUN_FILE = "run.json"
_LOCK = "run.lock"
_FORMAT = 2
_COMPUTING = ("tl-headmaps", "torch", "numpy")
"""Packages that must have the same version wherever pieces of one run are computed."""


class DamagedPieceError(ValueError):
    """A piece that is missing, was changed since it was written, or belongs to another run."""


def layer_piece(layer: int) -> str:
    """Name of the piece that holds a layer."""
    return f"layer-{layer:04d}"


def identity_of(kind: str, provenance: Provenance, details: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that decides the numbers of a run; not where the model is stored, nor when it runs."""
    values = provenance.to_dict()
    deciding = ("fingerprint", "architecture", "basis", "dtype", "device", "options", "data", "seed")
    versions = {name: values["versions"][name] for name in _COMPUTING}
    return {"kind": kind, **{name: values[name] for name in deciding}, **details, "versions": versions}


def pack(piece: str, tensors: Mapping[str, Tensor], identity: Mapping[str, Any]) -> bytes:
    """One finished piece as bytes that can be checked."""
    # Clones: the library refuses tensors that share memory.
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    header = {"piece": piece, "provenance": identity, "checksum": _checksum(piece, plain, identity)}
    # One entry: the library does not promise an order among several.
    return save(plain, metadata={"piece": json.dumps(header, sort_keys=True, allow_nan=False)})


def unpack(data: bytes, piece: str, identity: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of a packed piece; raises unless it is whole and of this run."""
    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["piece"])
        stated, origin = header["checksum"], header["provenance"]
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedPieceError(f"it cannot be read ({type(error).__name__}: {error})") from error
    if header.get("piece") != piece or _canonical(origin) != _canonical(identity):
        raise DamagedPieceError("it is of another run")
    if stated != _checksum(piece, tensors, identity):
        raise DamagedPieceError("its checksum is wrong")
    return tensors


def _canonical(values: Any) -> str:
    return json.dumps(values, sort_keys=True)


def _checksum(piece: str, tensors: Mapping[str, Tensor], identity: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(_canonical([piece, identity]).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(_canonical([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Store:
    """Pieces of one identity, in a folder; a store without a folder finds nothing and keeps nothing.

    Attributes:
        created: When the run was started whose folder this is.
    """

    def __init__(self, folder: Path | None, identity: Mapping[str, Any], created: str = "") -> None:
        self.folder, self.identity, self.created = folder, identity, created

    def path(self, piece: str) -> Path:
        """The file of a piece."""
        assert self.folder is not None
        return self.folder / f"{piece}.safetensors"

    def finished(self, piece: str, remedy: str = "It is computed again.") -> dict[str, Tensor] | None:
        """A finished piece; None if it has to be computed, because it is missing or damaged (which is reported)."""
        if self.folder is None or not self.path(piece).exists():
            return None
        try:
            return self.load(piece)
        except DamagedPieceError as error:
            tqdm.write(f"{self.path(piece)} is damaged: {error}. {remedy}", file=sys.stderr)
            return None

    def load(self, piece: str) -> dict[str, Tensor]:
        """A piece that is there. Raises DamagedPieceError."""
        try:
            data = self.path(piece).read_bytes()
        except OSError as error:
            raise DamagedPieceError(f"it cannot be read ({error.strerror or error})") from error
        return unpack(data, piece, self.identity)

    def write(self, piece: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep a finished piece."""
        if self.folder is None:
            return
        try:
            with replacing(self.path(piece)) as temporary:
                temporary.write_bytes(pack(piece, tensors, self.identity))
        except OSError as error:
            # What was raised is a sentence with other advice; its cause is the reason alone.
            cause = error.__cause__ or error
            reason = getattr(cause, "strerror", None) or cause
            raise OutputError(
                f"{self.path(piece)} could not be written ({reason}). Everything finished before is saved: make room "
                "there, and start the same call again for the rest."
            ) from error


@contextmanager
def open_run(
    folder: str | Path | None, identity: Mapping[str, Any], provenance: Provenance, layers: Sequence[int] = ()
) -> Iterator[Store]:
    """Start a run in an empty folder, or resume the same run, one process at a time; without a folder, keep nothing.

    Args:
        folder: The run folder.
        identity: Everything that decides the numbers (:func:`identity_of`).
        provenance: Provenance of the result.
        layers: The layers of a sweep.
    """
    if folder is None:
        yield Store(None, identity, provenance.created)
        return
    from filelock import FileLock, Timeout

    folder = home_expanded(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = next((entry.name for entry in sorted(folder.iterdir()) if not _is_of_run(entry.name)), None)
    except OSError as error:
        raise OutputError(f"Cannot use {folder} as a run folder: {error.strerror or error}.") from error
    if foreign is not None and not (folder / RUN_FILE).exists():
        raise UsageError(f"{folder} is not a run folder: it contains {foreign!r}. Give a new or empty folder.")
    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise UsageError(
            f"Another process is working on the run in {folder}. Wait for it, or give another folder."
        ) from error
    except (NotImplementedError, OSError):
        # File systems without locks: two processes would do the same work and write the same pieces.
        pass
    try:
        for leftover in folder.rglob(f".*{PART_SUFFIX}"):
            with suppress(OSError):  # a folder, or not ours: it does no harm
                leftover.unlink()
        record = {"identity": identity, "layers": list(layers), "provenance": provenance.to_dict()}
        yield Store(folder, identity, _started(folder / RUN_FILE, record))
    finally:
        lock.release()


def _is_of_run(name: str) -> bool:
    return name in (RUN_FILE, _LOCK) or (name.startswith(".") and name.endswith(PART_SUFFIX))


def _started(path: Path, record: Mapping[str, Any]) -> str:
    """When the run of a folder was started: now, or before as the same run."""
    if not path.exists():
        with replacing(path) as temporary:
            content = {"format": _FORMAT, **record}
            temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return str(record["provenance"]["created"])
    try:
        content = parse_json(read_text(path))
        identity, created = dict(content["identity"]), str(content["provenance"]["created"])
        current = content["format"] == _FORMAT
    except (UnreadableError, ValueError, KeyError, TypeError) as error:
        reason = error if isinstance(error, UnreadableError) else f"{type(error).__name__}: {error}"
        raise OutputError(f"{path} is damaged ({reason}). Remove the folder and start over.") from error
    if not current:
        raise OutputError(
            f"{path} was written by another version of this package and cannot be resumed. Give another folder, or "
            "remove this one."
        )
    for field, before, now in _differences(identity, json.loads(json.dumps(record["identity"])), ""):
        raise UsageError(
            f"The run in {path.parent} was started with {field} = {_short(before)}, but this call has {_short(now)}. "
            "Give another folder, or remove this one."
        )
    return created


def _differences(one: Any, other: Any, field: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in [*other, *(name for name in one if name not in other)]:
            inside = f"{field}.{name}" if field else str(name)
            yield from _differences(one.get(name), other.get(name), inside)
    elif one != other:
        yield field, one, other


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


LIMIT_VARIABLE = "TL_HEADMAPS_CACHE_GB"
PARTS = ("context", "activations")
"""The parts of the cache folder that the limit is about; the default model and digests of checkpoints stay."""

_DEFAULT_GB = 5.0
_IN_USE = 3600.0
"""Seconds since its last use for which an entry is never removed."""

_ENTRY = re.compile(r"[0-9a-f]{32,64}(\.safetensors)?")
_REMOVED = ".removed"


class Cache:
    """One part of the cache, which has a limit, or a folder of the caller in its place, which has none."""

    def __init__(self, part: str, folder: str | Path | None = None) -> None:
        self._limit = cache_limit()  # a wrong one is refused now, not after the work
        self._used: list[Path] = []
        self._has_limit = folder is None
        self.folder = cache_folder() / part if folder is None else home_expanded(folder)

    def entry(self, name: str) -> Path:
        """An entry that is used now: marked before it is looked at, so that what is found then stays."""
        self._used.append(self.folder / name)
        mark_used(self._used[-1])
        return self._used[-1]

    def trim(self) -> None:
        """Keep within the limit after something was written; entries used here stay whatever their size."""
        if self._has_limit:
            trim_cache(self.folder.parent, self._limit, keep=self._used)


def cache_limit() -> float:
    """Bytes that context vectors and activations may take: ``TL_HEADMAPS_CACHE_GB`` if set, else 5 GB."""
    stated = os.environ.get(LIMIT_VARIABLE) or str(_DEFAULT_GB)
    try:
        limit = float(stated)
    except ValueError:
        limit = math.nan
    if not limit >= 0:
        raise UsageError(
            f"{LIMIT_VARIABLE}={stated!r} is not a size. Give the gigabytes that vectors and activations may take on "
            "disk, such as 2.5, or inf for no limit."
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
        keep: Entries that stay whatever their size.
    """
    entries = []
    for entry in _entries(folder):
        with suppress(OSError):  # gone by now
            entries.append((entry.lstat().st_mtime, entry, _size(entry)))
    total = sum(size for _, _, size in entries)
    for used, entry, size in sorted(entries):
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
    """Remove an entry in one step, under another name first; False if it was marked meanwhile, or is not ours."""
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
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # it was a folder
        path.unlink()
