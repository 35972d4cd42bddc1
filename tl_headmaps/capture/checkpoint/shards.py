"""The safetensors of a checkpoint: which file contains which tensor, and each tensor mapped on its own.

A tensor is mapped on request and unmapped after its last use, so only what is in use counts as resident. Pickled
checkpoints (``.bin``, ``.pt``) are never opened: unpickling can run any code.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...core.errors import ModelLoadError, UnsupportedModelError
from ...core.files import UnreadableError, parse_json, read_text
from ..mapped import map_tensor

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
        self._existing(SINGLE)
        try:
            with safe_open(path, framework="pt") as stream:
                return dict.fromkeys(stream.keys(), SINGLE)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error

    def __contains__(self, tensor: str) -> bool:
        return tensor in self.files

    def holding(self, tensors: Iterable[str]) -> list[str]:
        """The files that contain these tensors."""
        return sorted({self.files[tensor] for tensor in tensors})

    def require_all(self) -> None:
        """Refuse a folder in which a file is missing, cut off, or lacks a tensor that the index says it has."""
        for file in self.holding(self.files):
            path = self._existing(file)
            try:
                with safe_open(path, framework="pt") as stream:
                    stored = set(stream.keys())
            except (SafetensorError, OSError) as error:
                raise _unreadable(path, error) from error
            absent = [tensor for tensor, where in self.files.items() if where == file and tensor not in stored]
            if absent:
                raise ModelLoadError(
                    f"{path} has no tensor {absent[0]!r}, but {INDEX} says that it does. Fetch both files again."
                )

    def require(self, tensors: Iterable[str]) -> None:
        """Refuse a folder in which a file with one of these tensors is missing or cut off."""
        for file in self.holding(tensors):
            path = self._existing(file)
            try:
                with safe_open(path, framework="pt"):
                    pass
            except (SafetensorError, OSError) as error:
                raise _unreadable(path, error) from error

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
        path = self._existing(self.files[tensor])
        try:
            # Opened by its library first, which checks the header against the size of the file.
            with safe_open(path, framework="pt") as stream:
                stored_as = stream.get_slice(tensor).get_dtype()
            if stored_as in _TYPES:
                offset, shape = _place(path, tensor)
                return map_tensor(path, offset, _TYPES[stored_as], shape)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
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


def _unreadable(path: Path, error: Exception) -> ModelLoadError:
    return ModelLoadError(
        f"{path} cannot be read as safetensors ({error}): it is damaged or incomplete. Fetch that file again."
    )
