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
        if (self.folder / INDEX).is_file():
            return read_index(self.folder / INDEX)
        path = self.folder / SINGLE
        if not path.is_file():
            raise self._no_safetensors()
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
        content = json.loads(path.read_text(encoding="utf-8"))
        files = dict(content["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
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
