"""Digests of a checkpoint's parts, kept in the user's cache.

A fingerprint covers the attention matrices of all layers, even when only one layer is asked about. They are hashed once
per checkpoint, not once per call: digests are kept under the names, sizes and times of the files, and a file that was
touched in any way is hashed again.
"""

import hashlib
import json
import re
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path

from ...core.errors import OutputError
from ...core.files import UnreadableError, cache_folder, parse_json, read_text, replacing

_FORMAT = "2"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class DigestFile(MutableMapping[str, str]):
    """Digests by the name of the part; a cache that cannot be read or written only costs time."""

    def __init__(self, files: list[Path]) -> None:
        key = hashlib.sha256(_FORMAT.encode())
        for file in files:
            state = file.stat()
            times = (state.st_mtime_ns, state.st_ctime_ns)
            key.update(repr((str(file.absolute()), state.st_size, *times, state.st_ino)).encode())
        self.path = cache_folder() / "fingerprints" / f"{key.hexdigest()}.json"
        self._known = self._read()

    def _read(self) -> dict[str, str]:
        try:
            known = parse_json(read_text(self.path))
        except UnreadableError:
            return {}
        if not isinstance(known, dict) or not all(_DIGEST.fullmatch(str(value)) for value in known.values()):
            return {}
        return known

    def __setitem__(self, part: str, digest: str) -> None:
        self._known[part] = digest
        # A read-only home or a full disk is no reason to stop: the digest is then computed again next time.
        with suppress(OutputError), replacing(self.path) as temporary:
            temporary.write_text(json.dumps(self._known), encoding="utf-8")

    def __getitem__(self, part: str) -> str:
        return self._known[part]

    def __delitem__(self, part: str) -> None:
        del self._known[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)
