"""Files that are either complete or absent: written under a temporary name and renamed in one step."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

from .errors import OutputError

PAGE_SUFFIX = ".html"
STATIC_SUFFIXES = (".svg", ".png", ".pdf")
FIGURE_SUFFIXES = (PAGE_SUFFIX, *STATIC_SUFFIXES)
SAVED_SUFFIXES = (".json", ".csv", ".safetensors", ".parquet", *FIGURE_SUFFIXES)
"""Formats a result can be saved in, chosen by the suffix."""

_CHUNK = 1 << 20


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it becomes ``path``, otherwise it is removed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise OutputError(
            f"Cannot write {path}: {error.strerror or error}. Choose a folder that you may write to."
        ) from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"Cannot write {path}: {error.strerror or error}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where downloads, digests and activations are kept: ``TL_HEADMAPS_CACHE`` if set, else the user's cache."""
    chosen = os.environ.get("TL_HEADMAPS_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return user_cache_path("tl_headmaps")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
