"""The configuration of a checkpoint, and whether its files are what it says.

``config.json`` comes from elsewhere, so every field is checked. Fields that a file leaves out have the default of their
family (:mod:`.architectures`); the numbers of heads and layers have none.

A checkpoint is looked at before TransformerLens or transformers opens it. Left alone, the host opens pickles, follows
an index to any file, and fills tensors that are missing with random numbers. So a folder is handed over only if its
weights are complete safetensors inside it, and if transformers, asked to load them without their values, finds every
tensor of the model in its shape.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...core.errors import ModelLoadError, UnsupportedModelError
from ...core.files import UnreadableError, parse_json, read_text
from .architectures import Architecture, architecture_of
from .shards import Shards, fetched, local_folder, require_config

_LARGEST_EPS = 0.1
"""Models have 1e-12 to 1e-3; beyond this, it is too large to be the epsilon of a norm."""

_LARGEST_FACTOR = 1e6
"""Factors of embeddings, scores and logits are between its inverse and this."""


_EPS = re.compile(r"(?:^|_)eps(?:ilon)?$")
_BASES = ("rope_theta", "rotary_emb_base", "rope_local_base_freq")
"""What configurations call the base of rotary positions."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
"""What configurations call the number of layers."""

PREDICTING = "eh_proj."
"""A part that only layers for predicting several tokens at once have (DeepSeek, GLM). They come behind those that the
configuration counts, and transformers leaves them out."""


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a config.json: an object, every number in it finite and of a sensible size."""
    try:
        raw = parse_json(read_text(path))
    except UnreadableError as error:
        raise ModelLoadError(f"Cannot read {path}: {error}. Fetch the checkpoint again.") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(
            f"{path} contains a {type(raw).__name__}, not the configuration of a model. Fetch the checkpoint again."
        )
    for field, value in _numbers(raw):
        if abs(value) > 2**63 if isinstance(value, int) else not math.isfinite(value):
            raise UnsupportedModelError(
                f"{path}: {field} is {value}, but a finite number was expected. Use a checkpoint with a complete "
                "configuration."
            )
        name = field.rpartition(".")[2]
        if _EPS.search(name) and not 0 <= value <= _LARGEST_EPS:
            raise _out_of_range(path, field, value, f"a positive number up to {_LARGEST_EPS:g}")
        if name in _BASES and value <= 0:
            raise _out_of_range(path, field, value, "a positive number")
    return raw


def _out_of_range(path: Path, field: str, value: Any, expected: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path}: {field} is {value!r}, but {expected} was expected. Use a checkpoint with a complete configuration."
    )


def require_layers(path: Path, config: dict[str, Any], n_tensors: int) -> None:
    """Refuse a number of layers that cannot be, before something is made for each of them.

    Args:
        path: The file of the configuration, for the message.
        config: Its fields.
        n_tensors: How many tensors the files of the checkpoint have.
    """
    for part in (part for part in (config, config.get("text_config")) if isinstance(part, dict)):
        for field in _LAYERS:
            n_layers = part.get(field)
            if n_layers is None:
                continue
            if isinstance(n_layers, bool) or not isinstance(n_layers, int) or not 1 <= n_layers <= n_tensors:
                raise UnsupportedModelError(
                    f"{path}: {field} is {n_layers!r:.40}, but a number from 1 to {n_tensors} was expected: the files "
                    f"have {n_tensors} tensors. Use a checkpoint with its own configuration."
                )


def uncounted(name: str, tensors: Sequence[str], stack: str, n_counted: int) -> UnsupportedModelError:
    """What a user is told about layers that the configuration does not count, which would be left out in silence.

    Args:
        name: What the checkpoint is called.
        tensors: The tensors of these layers.
        stack: What the layers are called in their names.
        n_counted: How many the configuration counts.
    """
    return UnsupportedModelError(
        f"{name!r} has a tensor {tensors[0]!r}{and_more(tensors)}, but its config.json counts {n_counted} of "
        f"{stack!r}: the others would be left out, and the rest is another model. Use the configuration that belongs "
        "to these weights."
    )


def and_more(tensors: Sequence[Any]) -> str:
    """How many there are beside the first, for a message that names only that."""
    return f" (and {len(tensors) - 1} more)" if len(tensors) > 1 else ""


def _numbers(value: Any, field: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, inside in value.items():
            yield from _numbers(inside, f"{field}.{name}" if field else name)
    elif isinstance(value, list):
        for inside in value:
            yield from _numbers(inside, field)
    elif isinstance(value, int | float):
        yield field, value


class Config:
    """Sizes and settings of one checkpoint."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.path = name, folder / "config.json"
        self.raw = read_config(self.path)
        self.architecture = architecture_of(self.raw.get("model_type"), repr(name))
        self.architecture = self._as_configured()
        named = self.raw.get("architectures")
        self.class_name = str(named[0] if isinstance(named, list) and named else self.raw["model_type"])
        self._require_plain()
        self.n_layers = self._count("num_hidden_layers")
        self.n_heads = self._count("num_attention_heads")
        self.d_model = self._count("hidden_size")
        self.n_kv_heads = self._count("num_key_value_heads", self.n_heads)
        self.d_head = self._count("head_dim", self.d_model // self.n_heads)
        if self.n_heads % self.n_kv_heads:
            raise UnsupportedModelError(
                f"{name!r}: {self.n_heads} heads cannot share {self.n_kv_heads} key/value heads evenly. Check "
                "num_attention_heads and num_key_value_heads in its config.json."
            )

    def _as_configured(self) -> Architecture:
        """The family with those variants that this configuration chooses."""
        known = self.architecture
        for variant in known.variants:
            if all(self.setting(field) in values for field, values in variant.when.items()):
                parts, fixed = {**known.parts, **variant.parts}, {**known.fixed, **variant.fixed}
                known = replace(known, parts=parts, fixed=fixed)
        return known

    def setting(self, field: str) -> Any:
        """A field of the configuration (of its text half, in a model with vision), or the family's default."""
        if field in self.architecture.fixed:
            return self.architecture.fixed[field]
        name = self.architecture.aliases.get(field, field)
        for source in (self.raw.get("text_config"), self.raw):
            if isinstance(source, dict) and source.get(name) is not None:
                return source[name]
        return self.architecture.defaults.get(field)

    def _require_plain(self) -> None:
        if self.raw.get("quantization_config"):
            raise UnsupportedModelError(
                f"{self.name!r} is a quantised checkpoint (its config.json has a quantization_config). Use the "
                "checkpoint in float32, bfloat16 or float16."
            )
        for name, effect in self.architecture.refused.items():
            if self.setting(name):
                raise UnsupportedModelError(
                    f"{self.name!r} sets {name}, which {effect}; such checkpoints cannot be read as head maps."
                )

    def _count(self, field: str, default: int | None = None) -> int:
        value = self.setting(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            name = self.architecture.aliases.get(field, field)
            problem = "is missing" if value is None else f"is {value!r}"
            raise UnsupportedModelError(
                f"{self.path}: {name} {problem}, but a positive number was expected: without it the weights cannot be "
                "split into heads. Use a checkpoint with a complete configuration."
            )
        return value

    def _number(self, field: str, value: Any, most: float, least: float = 0.0) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least < value <= most:
            raise _out_of_range(self.path, field, value, f"a positive number up to {most:g}")
        return float(value)

    @property
    def eps(self) -> float:
        """Epsilon of all norms."""
        return self._number(self.architecture.eps, self.setting(self.architecture.eps), _LARGEST_EPS)

    @property
    def activation(self) -> str:
        """Name of the MLP's activation function."""
        named = (self.setting(field) for field in self.architecture.activation)
        name = str(next((name for name in named if name), None))
        return self.architecture.activations.get(name, name)

    def has_bias(self, part: str) -> bool:
        """Whether a part of the family has a bias under this configuration."""
        stated = self.architecture.biases.get(part, False)
        return stated if isinstance(stated, bool) else bool(self.setting(stated))

    def factor(self, name: str) -> float | None:
        """One of the model's factors, if the family has it."""
        if name not in self.architecture.factors:
            return None
        field, power = self.architecture.factors[name]
        value = self._number(field, self.setting(field), _LARGEST_FACTOR, least=1 / _LARGEST_FACTOR)
        return float(value**power)

    def score_scale(self, layer: int) -> float:
        """The factor of attention scores."""
        scale = self.factor("score_scale") or self.d_head**-0.5
        if self.setting("scale_attn_weights") is False:
            scale = 1.0
        return scale / (layer + 1) if self.setting("scale_attn_by_inverse_layer_idx") else scale


_NOT_FOLLOWED = "transformers_weights"
"""A field of config.json that names another file to read."""

_ADAPTER = "adapter_config.json"


def validate_checkpoint(name: str) -> Path:
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
    shards.require()
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
