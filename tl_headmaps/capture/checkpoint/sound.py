"""A checkpoint is looked at before TransformerLens or transformers opens it.

Left alone, the host opens pickles, follows an index to any file, and fills tensors that are missing with random
numbers. So a folder is handed over only if its weights are complete safetensors inside it, and if transformers, asked
to load them without their values, finds every tensor of the model in its shape.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ...core.errors import ModelLoadError, UnsupportedModelError
from .config import PREDICTING, and_more, read_config, require_layers, uncounted
from .hub import fetched
from .reader import local_folder, require_config
from .shards import Shards

_NOT_FOLLOWED = "transformers_weights"
"""A field of config.json that names another file to read."""

_ADAPTER = "adapter_config.json"


def sound_folder(name: str) -> Path:
    """The folder of a checkpoint, fetched if ``name`` is on the hub; refused unless it is safe to open.

    Args:
        name: A folder, or a name on the hub.
    """
    folder = local_folder(name)
    if folder is None:
        folder = fetched(_official(name), None, lambda found: sorted(set(Shards(name, found).files.values())))
    else:
        require_config(name, folder)
    config = read_config(folder / "config.json")
    if (folder / _ADAPTER).exists() or config.get(_NOT_FOLLOWED) is not None:
        found = _ADAPTER if (folder / _ADAPTER).exists() else f"{_NOT_FOLLOWED} in its config.json"
        raise ModelLoadError(
            f"{name!r} has {found}, which names weights outside the checkpoint; a complete model was expected. Merge "
            "them, save the model, and give that folder."
        )
    shards = Shards(name, folder)
    shards.require_all()
    require_layers(folder / "config.json", config, len(shards.files))
    return folder


def _official(name: str) -> str:
    """TransformerLens knows other names of some models."""
    try:
        from transformer_lens.tools.model_registry.registry_io import resolve_model_alias
    except ImportError:  # TransformerLens 3
        from transformer_lens.supported_models import MODEL_ALIASES

        return next((official for official, aliases in MODEL_ALIASES.items() if name in aliases), name)
    return str(resolve_model_alias(name) or name)


def require_weights(name: str, folder: Path) -> None:
    """Refuse weights that lack a tensor of the model, or have it in another shape, or have one that it does not know.

    Args:
        name: What the checkpoint is called in messages.
        folder: Its folder.
    """
    from transformer_lens.model_bridge.sources.transformers import (
        determine_architecture_from_hf_config,
        get_hf_model_class_for_architecture,
    )
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    architecture = determine_architecture_from_hf_config(config)
    model, found = get_hf_model_class_for_architecture(architecture).from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        device_map={"": "meta"},
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    missing, mismatched = sorted(found["missing_keys"]), sorted(found["mismatched_keys"])
    if missing:
        raise UnsupportedModelError(
            f"{name!r} has no tensor {missing[0]!r}, which a {architecture} of its config.json has"
            f"{and_more(missing)}. The checkpoint is incomplete, or the configuration is of another model. Use a "
            "complete checkpoint."
        )
    if mismatched:
        tensor, stored, implied = mismatched[0]
        raise UnsupportedModelError(
            f"{tensor} of {name!r} has shape {list(stored)}, but its config.json implies {list(implied)}"
            f"{and_more(mismatched)}. One of the two belongs to another model: fetch the checkpoint again."
        )
    require_counted(name, model, found["unexpected_keys"])
    holding = {key.rpartition(".")[0] for key, _ in model.named_parameters()}
    unknown = sorted(key for key in found["unexpected_keys"] if key.rpartition(".")[0] in holding)
    if unknown:
        raise UnsupportedModelError(
            f"{name!r} has a tensor {unknown[0]!r}, which a {architecture} of its config.json does not use"
            f"{and_more(unknown)}, so the model would compute something else. Use the configuration that belongs to "
            "these weights."
        )


def require_counted(name: str, model: Any, unexpected: Iterable[str], part: Any = None) -> None:
    """Refuse tensors of layers (or experts) behind those that the configuration counts.

    Args:
        name: What the checkpoint is called in messages.
        model: The transformers model that was made from it.
        unexpected: Names of tensors that it has no place for.
        part: The part of the model whose layers are meant; all of it by default.
    """
    meant = set((model if part is None else part).modules())
    stacks = ((path, stack) for path, stack in model.named_modules() if isinstance(stack, torch.nn.ModuleList))
    counts = {path: len(stack) for path, stack in stacks if stack in meant}
    beyond: dict[tuple[str, int], list[str]] = {}
    for key in unexpected:
        for place in re.finditer(r"\.(\d{1,9})\.", key):
            stack, number = key[: place.start()], int(place[1])
            # A file may leave the prefix of the body out.
            n_counted = counts.get(stack, counts.get(f"{model.base_model_prefix}.{stack}"))
            if n_counted is not None and number >= n_counted:
                beyond.setdefault((stack, n_counted), []).append(key)
    for (stack, n_counted), keys in sorted(beyond.items()):
        predicting = tuple(key.partition(PREDICTING)[0] for key in keys if PREDICTING in key)
        left = sorted(key for key in keys if not key.startswith(predicting))
        if left:
            raise uncounted(name, left, stack, n_counted)
