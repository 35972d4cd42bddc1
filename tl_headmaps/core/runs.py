"""A run folder keeps the finished pieces of long work, so an interrupted run resumes.

A piece has a name and small tensors: a layer of a sweep (``layer-0007``), a result of a reproduction. ::

    RUN_DIR/run.json                    what is computed: kind, provenance, when it was started
    RUN_DIR/layer-0007.safetensors      one finished piece: its tensors; name, provenance and checksum in the header
    RUN_DIR/run.lock                    held while a process works on the run

A piece appears in one rename and its checksum covers tensors and header: a piece that was damaged or altered is made
again. Bytes of a piece depend on the input alone. Nothing here is ever unpickled.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from tqdm.auto import tqdm

from .errors import OutputError, UsageError
from .files import PART_SUFFIX, UnreadableError, home_expanded, parse_json, read_text, replacing
from .provenance import Provenance

RUN_FILE = "run.json"
_LOCK = "run.lock"
_FORMAT = 2
_COMPUTING = ("tl-headmaps", "torch", "numpy")
"""Packages that must have the same version wherever pieces of one run are computed."""


class DamagedPieceError(ValueError):
    """A piece that was changed since it was written, or that belongs to another run."""


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


@dataclass(frozen=True)
class RunRecord:
    """What ``run.json`` says.

    Attributes:
        identity: Everything that decides the numbers; two runs with the same identity have the same pieces.
        layers: The layers of the sweep.
        provenance: Provenance of the result, with the time the run was started.
    """

    identity: dict[str, Any]
    layers: tuple[int, ...]
    provenance: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """The record of an existing run."""
        path = folder / RUN_FILE
        try:
            content = parse_json(read_text(path))
            record = cls(dict(content["identity"]), tuple(map(int, content["layers"])), dict(content["provenance"]))
            current = content["format"] == _FORMAT
        except (UnreadableError, ValueError, KeyError, TypeError) as error:
            if not path.exists():
                raise UsageError(f"{folder} is not a run folder: there is no {RUN_FILE} in it.") from error
            reason = error if isinstance(error, UnreadableError) else f"{type(error).__name__}: {error}"
            raise OutputError(f"{path} is damaged ({reason}). Remove the folder and start over.") from error
        if not current:
            raise OutputError(
                f"{path} was written by another version of this package and cannot be resumed. Give another folder, or "
                "remove this one."
            )
        return record

    def write(self, folder: Path) -> None:
        content = {
            "format": _FORMAT,
            "identity": self.identity,
            "layers": list(self.layers),
            "provenance": self.provenance,
        }
        with replacing(folder / RUN_FILE) as temporary:
            temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class RunFolder:
    """The pieces of one run."""

    def __init__(self, folder: Path, record: RunRecord) -> None:
        self.folder, self.record = folder, record

    @property
    def created(self) -> str:
        """When the run was started."""
        return str(self.record.provenance["created"])

    def path(self, piece: str) -> Path:
        return self.folder / f"{piece}.safetensors"

    def finished(self, piece: str) -> dict[str, Tensor] | None:
        """A finished piece; None if it has to be computed, because it is missing or damaged (which is reported)."""
        try:
            return self.load(piece)
        except DamagedPieceError as error:
            tqdm.write(f"{self.path(piece)} is damaged: {error}. It is computed again.", file=sys.stderr)
            return None

    def load(self, piece: str) -> dict[str, Tensor] | None:
        """A finished piece; None if it is missing. Raises DamagedPieceError."""
        try:
            data = self.path(piece).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DamagedPieceError(f"it cannot be read ({error.strerror or error})") from error
        return unpack(data, piece, self.record.identity)

    def store(self, piece: str, data: bytes) -> None:
        """Write a packed piece."""
        try:
            with replacing(self.path(piece)) as temporary:
                temporary.write_bytes(data)
        except OSError as error:
            # What was raised is a sentence with other advice; its cause is the reason alone.
            cause = error.__cause__ or error
            reason = getattr(cause, "strerror", None) or cause
            raise OutputError(
                f"{self.path(piece)} could not be written ({reason}). Everything finished before is saved: make room "
                "there, and start the same call again for the rest."
            ) from error


@contextmanager
def open_run(folder: Path, record: RunRecord) -> Iterator[RunFolder]:
    """Start a run in an empty folder, or resume the same run; one process at a time."""
    from filelock import FileLock, Timeout

    folder = home_expanded(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = next((entry.name for entry in sorted(folder.iterdir()) if not _is_ours(entry.name)), None)
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
        if (folder / RUN_FILE).exists():
            started = RunRecord.read(folder)
            _require_same(folder, started.identity, record.identity)
            record = started
        else:
            record.write(folder)
        yield RunFolder(folder, record)
    finally:
        lock.release()


def _is_ours(name: str) -> bool:
    return name in (RUN_FILE, _LOCK) or (name.startswith(".") and name.endswith(PART_SUFFIX))


def _require_same(folder: Path, started: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    for field, theirs, ours in _differences(started, json.loads(json.dumps(asked)), ""):
        raise UsageError(
            f"The run in {folder} was started with {field} = {_short(theirs)}, but this call has {_short(ours)}. Give "
            "another folder, or remove this one."
        )


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
