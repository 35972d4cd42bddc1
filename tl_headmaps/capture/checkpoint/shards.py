"""The files of a checkpoint: found in a folder or fetched from the hub, each tensor mapped on its own, digests kept.

A tensor is mapped on request and unmapped after its last use, so only what is in use counts as resident. Pickled
checkpoints (``.bin``, ``.pt``) are never opened: unpickling can run any code.

From the hub only those files are fetched that are needed, to the cache of ``huggingface_hub`` and by its settings
(``HF_HUB_OFFLINE``, ``HF_ENDPOINT``, ``HF_HOME``, tokens). The configuration and the index of shards come first; they
say which shards contain tensors that are read.

A fingerprint covers the attention matrices of all layers, even when only one layer is asked about. They are hashed once
per checkpoint, not once per call: digests are kept under the names, sizes and times of the files, and a file that was
touched in any way is hashed again.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...core.errors import ModelLoadError, OutputError, UnsupportedModelError, UsageError
from ...core.files import UnreadableError, cache_folder, home_expanded, parse_json, read_text, replacing, require_file
from ..tensors import map_tensor

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Shards:
    """The weight files of one folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    @cached_property
    def files(self) -> Mapping[str, str]:
        """File of every tensor."""
        path, index = self.folder / SINGLE, self.folder / INDEX
        if index.is_file():
            if path.is_file():
                raise ModelLoadError(
                    f"{self.name!r} has both {SINGLE} and {INDEX}, which need not agree, and programs differ in which "
                    "of them they read. Remove the one that does not belong to this model."
                )
            return read_index(index)
        if not path.is_file():
            raise self._no_safetensors()
        with self._opened(SINGLE) as stream:
            return dict.fromkeys(stream.keys(), SINGLE)

    def __contains__(self, tensor: str) -> bool:
        return tensor in self.files

    def holding(self, tensors: Iterable[str]) -> list[str]:
        """The files that contain these tensors."""
        return sorted({self.files[tensor] for tensor in tensors})

    def require(self, tensors: Iterable[str] | None = None) -> None:
        """Refuse a folder in which a file with some tensors (default: all) is missing or cut off, or lacks one."""
        tensors = list(self.files if tensors is None else tensors)
        for file in self.holding(tensors):
            with self._opened(file) as stream:
                stored = set(stream.keys())
            absent = [tensor for tensor in tensors if self.files[tensor] == file and tensor not in stored]
            if absent:
                raise ModelLoadError(
                    f"{self.folder / file} has no tensor {absent[0]!r}, but {INDEX} says that it does. Fetch both "
                    "files again."
                )

    @contextmanager
    def _opened(self, file: str) -> Iterator[Any]:
        """A file, opened by its library, which checks the header against the size of the file."""
        path = self._existing(file)
        try:
            with safe_open(path, framework="pt") as stream:
                yield stream
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{path} cannot be read as safetensors ({error}): it is damaged or incomplete. Fetch that file again."
            ) from error

    def _existing(self, file: str) -> Path:
        path = self.folder / file
        if not path.is_file():
            raise ModelLoadError(
                f"The shard {file} of {self.name!r}, which contains tensors that are needed, is missing (or a broken "
                f"link). Put it into {self.folder}."
            )
        if not path.resolve().is_relative_to(_home(self.folder)):
            raise ModelLoadError(
                f"{file} of {self.name!r} is a link to {path.resolve()}, outside the folder; such links are not "
                "followed. Put the file itself into the folder, or give the folder that it is in."
            )
        return path

    def stored(self, tensor: str) -> Tensor:
        """A tensor in its stored type, mapped."""
        if tensor not in self.files:
            raise UnsupportedModelError(f"{self.name!r} has no tensor {tensor!r}. Use a complete checkpoint.")
        with self._opened(self.files[tensor]) as stream:
            stored_as = stream.get_slice(tensor).get_dtype()
            if stored_as in _TYPES:
                path = self.folder / self.files[tensor]
                offset, shape = _place(path, tensor)
                return map_tensor(path, offset, _TYPES[stored_as], shape)
        raise UnsupportedModelError(
            f"{tensor} of {self.name!r} is stored as {stored_as}, a quantised type. Use the checkpoint in float32, "
            "bfloat16 or float16."
        )

    def sized(self, tensor: str, *shape: int) -> Tensor:
        """The same, checked to have the shape that the configuration implies."""
        value = self.stored(tensor)
        if tuple(value.shape) != shape:
            raise UnsupportedModelError(
                f"{tensor} of {self.name!r} has shape {list(value.shape)}, but its config.json implies {list(shape)}. "
                "One of the two belongs to another model: fetch the checkpoint again."
            )
        return value

    def _no_safetensors(self) -> ModelLoadError:
        pickles = sorted(path.name for pattern in _PICKLES for path in self.folder.glob(pattern))
        if pickles:
            return ModelLoadError(
                f"{self.name!r} has its weights in {pickles[0]}, a pickle, which can run code when it is opened; only "
                ".safetensors are read. Use a converted copy, or convert a checkpoint you trust: "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)."
            )
        return ModelLoadError(
            f"{self.name!r} has neither {SINGLE} nor {INDEX}. Give a folder with the weights in safetensors."
        )


def read_index(path: Path) -> Mapping[str, str]:
    """File of each tensor, from an index of shards; names that lead out of the folder are refused."""
    try:
        content = parse_json(read_text(path))
        files = dict(content["weight_map"])
    except (UnreadableError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelLoadError(f"{path} is not an index of shards ({reason}). Fetch that file again.") from error
    for file in files.values():
        plain = isinstance(file, str) and Path(file).name == file
        if not plain or not file.endswith(".safetensors"):
            raise ModelLoadError(
                f"{path} lists {file!r} as a shard; a plain file name that ends in .safetensors was expected. Pickled "
                "weights and files outside the folder are not opened."
            )
    return files


def _home(folder: Path) -> Path:
    """Where the files of a folder may be: in it, or for a snapshot in the hub's cache in the same repository."""
    home = folder.resolve()
    return home.parents[1] if home.parent.name == "snapshots" and (home.parents[1] / "blobs").is_dir() else home


def _place(path: Path, tensor: str) -> tuple[int, tuple[int, ...]]:
    """Where in a safetensors file the bytes of a tensor begin, and its shape."""
    with path.open("rb") as stream:
        n_bytes = int.from_bytes(stream.read(8), "little")
        entry = json.loads(stream.read(n_bytes))[tensor]
    return 8 + n_bytes + entry["data_offsets"][0], tuple(entry["shape"])


_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "generation_config.json",
)
_OPTIONAL = (*_TOKENIZER, INDEX)


def fetched(repo: str, revision: str | None, needed: Callable[[Path], list[str]]) -> Path:
    """Folder of a repository's snapshot in the local cache, with all files that are needed.

    Args:
        repo: Name on the hub.
        revision: Branch, tag or commit.
        needed: Lists the weight files that are needed, given the folder with configuration and index.
    """
    config = _download(repo, "config.json", revision)
    if config is None:
        raise ModelLoadError(
            f"{repo!r} on the hub has no config.json: it is not a Hugging Face checkpoint. Check the name."
        )
    folder = config.parent
    # The snapshot's folder is named after its commit: all other files are taken from the same one.
    commit = folder.name
    if _download(repo, INDEX, commit) is None and _download(repo, SINGLE, commit) is None:
        raise ModelLoadError(
            f"{repo!r} on the hub has neither {SINGLE} nor {INDEX}. Only .safetensors are read; pickled weights (.bin) "
            "run code when they are opened. Look for a converted copy of the model."
        )
    for name in needed(folder):
        if _download(repo, name, commit) is None:
            raise ModelLoadError(
                f"{repo!r} on the hub has no {name}, which its index of shards lists. Use another revision or a "
                "complete copy."
            )
    for name in _TOKENIZER:
        _download(repo, name, commit)
    return folder


def _download(repo: str, name: str, revision: str | None) -> Path | None:
    """Path of one file in the cache; None if the repository has no such file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo, name, revision=revision))
    except LocalEntryNotFoundError as error:
        # Offline, a file that was never fetched cannot be told from one that does not exist.
        if name in _OPTIONAL:
            return None
        raise ModelLoadError(
            f"{name} of {repo!r} is not in the local cache and the hub cannot be reached (or HF_HUB_OFFLINE is set). "
            "Fetch it on a machine with network access, or give a folder."
        ) from error
    except EntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ModelLoadError(f"{repo!r} is neither a folder nor a name on the hub: {error}") from error
    except (HfHubHTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(
            f"{name} of {repo!r} could not be fetched from the hub: {reason} Check name, network and access."
        ) from error


_FORMAT = "2"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class DigestFile(dict[str, str]):
    """Digests by the name of the part; a cache that cannot be read or written only costs time."""

    def __init__(self, files: list[Path]) -> None:
        key = hashlib.sha256(_FORMAT.encode())
        for file in files:
            state = file.stat()
            times = (state.st_mtime_ns, state.st_ctime_ns)
            key.update(repr((str(file.absolute()), state.st_size, *times, state.st_ino)).encode())
        self.path = cache_folder() / "fingerprints" / f"{key.hexdigest()}.json"
        super().__init__(self._read())

    def _read(self) -> dict[str, str]:
        try:
            known = parse_json(read_text(self.path))
        except UnreadableError:
            return {}
        if not isinstance(known, dict) or not all(_DIGEST.fullmatch(str(value)) for value in known.values()):
            return {}
        return known

    def __setitem__(self, part: str, digest: str) -> None:
        super().__setitem__(part, digest)
        # A read-only home or a full disk is no reason to stop: the digest is then computed again next time.
        with suppress(OutputError), replacing(self.path) as temporary:
            temporary.write_text(json.dumps(self), encoding="utf-8")


_LONGEST_NAME = 96
"""Of a repository on the hub."""


def local_folder(name: str) -> Path | None:
    """The folder that a name stands for; None if it can only be a name on the hub."""
    return home_expanded(name) if _is_path(name) else None


def shown_name(name: str) -> str:
    """What results call a model: its name; of a folder the last part, not where it lies on this machine."""
    if not _is_path(name):
        return name
    *_, repository, snapshots, last = ("", "", *Path(name).absolute().parts)
    if snapshots == "snapshots":  # the hub's cache: models--owner--name/snapshots/revision
        return repository.removeprefix("models--").replace("--", "/")
    return last


def _is_path(name: str) -> bool:
    looks_like_path = name.startswith((".", "/", "~")) or "\\" in name or "\0" in name or len(name) > _LONGEST_NAME
    return looks_like_path or Path(name).exists()


def require_config(name: str, folder: Path) -> None:
    """Refuse a folder without a config.json."""
    try:
        require_file(folder / "config.json")
    except UnreadableError as error:
        raise UsageError(
            f"{name!r:.200} is not a folder with a checkpoint: there is no config.json in it ({error}). Give the "
            "folder of a Hugging Face checkpoint (config.json and .safetensors), a name on the hub such as "
            "'meta-llama/Llama-3.1-70B', or leave --model out for the default model."
        ) from error
