"""The parts of a loaded TransformerLens model: which layers have heads, what the others have, where its MLPs are."""

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from ..core.errors import UnsupportedModelError
from ..core.types import Model
from .forward import all_modules, roots, weights_loaded
from .parts import HeadShape
from .tensors import joint_digest, quick_digest, tensor_digests

_MIXERS = {
    "linear_attn": "linear attention",
    "mamba": "Mamba",
    "conv": "convolution",
    "recurrent": "recurrence",
    "mixer": "Mamba",
    "ssm": "a state space model",
}
"""What TransformerLens calls the part of a block that mixes tokens without heads, and what maps call it."""

_NAMING = ("model_name", "tokenizer_name", "transformers_version", "device", "architectures")
"""Settings that say where a model comes from or where it is."""


def layers_with_heads(model: Model) -> list[int]:
    """Layers whose tokens are mixed by attention heads; in hybrid models others have linear attention, Mamba, ..."""
    return [layer for layer, block in enumerate(model.blocks) if _has_heads(block)]


def _has_heads(block: Any) -> bool:
    attn = getattr(block, "attn", None)
    try:
        # Where keys serve as values (Gemma 4) there is no W_V.
        return hasattr(attn, "W_V") or (hasattr(attn, "k") and hasattr(attn, "o"))
    except (NotImplementedError, ValueError):
        # TransformerLens raises these for weights that exist but are not in memory, or cannot be split into heads.
        return True


def uneven_shapes(model: Model, layers: list[int]) -> dict[int, HeadShape]:
    """Number and width of the heads of each layer, where layers differ and TransformerLens does not split them."""
    stored = [
        [
            list(getattr(getattr(getattr(model.blocks[layer].attn, part, None), "weight", None), "shape", ()))
            for part in "qkv"
        ]
        for layer in layers
    ]
    if all(shapes == stored[0] for shapes in stored):
        return {}
    found = {}
    for layer, (queries, keys, _) in zip(layers, stored, strict=True):
        d_head = inner_part(model.blocks[layer].attn, "head_dim")
        if not (isinstance(d_head, int) and queries and keys):
            raise UnsupportedModelError(
                f"{architecture_of(model)}: the heads of layer {layer} differ from those of other layers, and its "
                "attention does not say how wide they are. Use another model of this family."
            )
        found[layer] = HeadShape(queries[0] // d_head, keys[0] // d_head, d_head)
    return found


def split_view(attn: Any, name: str, shape: HeadShape) -> Tensor | None:
    """A matrix or bias of attention as TransformerLens lays it out (``"W_Q"``, ``"b_V"``), split by these numbers."""
    part = name[-1].lower()
    # Where keys serve as values (Gemma 4), W_V is W_K.
    module = getattr(attn, part, None) or (attn.k if part == "v" else None)
    value = getattr(module, "weight" if name.startswith("W") else "bias", None)
    if not isinstance(value, Tensor):
        return None
    count = shape.n_heads if part in "qo" else shape.n_kv_heads
    if part == "o":
        split: Tensor = value.T.unflatten(0, (count, -1))
        return split
    split = value.unflatten(0, (count, -1))
    return split if name.startswith("b") else split.mT


def mixer_of(block: Any) -> str:
    """What mixes the tokens of a layer without heads."""
    parts = dict(block.named_children())
    if _reads_another_layer(block):
        return "heads that read keys and values of another layer"
    if any(hasattr(inner_part(parts.get("mixer"), name), "weight") for name in ("up_proj", "gate")):
        # Each layer of Nemotron-H is one thing; some are an MLP or a mixture of experts.
        return "nothing (an MLP)"
    return next((name for part, name in _MIXERS.items() if part in parts), type(block).__name__)


def norm_before(block: Any) -> Any:
    """The norm before attention; Nemotron-H calls the only norm of a layer its norm."""
    return getattr(block, "ln1", getattr(block, "norm", None))


def beside_heads(block: Any) -> str | None:
    """What mixes the tokens of a layer beside its heads, if anything does."""
    parts = dict(block.named_children())
    return next((name for part, name in _MIXERS.items() if part in parts), None) if _has_heads(block) else None


def keeps_states(model: Model) -> bool:
    """Whether some layer carries a state from token to token, beside or instead of keys and values."""
    return any(part in dict(block.named_children()) for block in model.blocks for part in _MIXERS)


def shares_keys(model: Model) -> bool:
    """Whether some layer reads keys and values that another layer computed (Gemma 4)."""
    return any(_reads_another_layer(block) for block in model.blocks)


def _reads_another_layer(block: Any) -> bool:
    attn = getattr(block, "attn", None)
    return hasattr(attn, "q") and hasattr(attn, "o") and not _has_heads(block)


def mlp_module(block: Any) -> Any:
    """The MLP of a block, or None: Granite 4 without experts calls it its shared MLP."""
    module = getattr(block, "mlp", None)
    return getattr(block, "shared_mlp", None) if module is None and not hasattr(block, "moe") else module


def unread_mlp(block: Any) -> str | None:
    """Name of a part that looks like an MLP, in a block in which none was found."""
    inner = getattr(block, "original_component", None)
    children = [name for owner in (block, inner) if owner is not None for name, _ in owner.named_children()]
    return next((name for name in children if any(word in name for word in ("mlp", "moe", "ffn", "feed", "fc"))), None)


def as_wide_as_the_stream(model: Model, embeddings: Tensor) -> Tensor:
    """Embeddings as they enter the stream: OPT-350M has narrower ones, and projects them."""
    projection = getattr(model, "project_in", None)
    if projection is None:
        return embeddings
    with weights_loaded(projection):
        widened: Tensor = projection(embeddings)
        return widened


def unembedding_of(model: Model) -> Tensor:
    """Rows by token that the stream is multiplied by, with the projection before it where there is one."""
    rows: Tensor = model.unembed.W_U.T
    projection = getattr(model, "project_out", None)
    if projection is None:
        return rows
    with weights_loaded(projection):
        joined: Tensor = rows @ inner_part(projection, "weight").to(rows)
        return joined


def architecture_of(model: Model) -> str:
    """Name of the model's class, as far as the host knows it."""
    named = getattr(model.cfg, "architecture", None) or getattr(model.cfg, "original_architecture", None)
    return str(named or type(model).__name__)


def config_of(model: Model) -> Any:
    """The configuration of the transformers model inside a bridge."""
    return getattr(getattr(model, "original_model", None), "config", None)


def is_processed(model: Model) -> bool:
    """Whether the host says that it processed the weights."""
    norm_type = str(getattr(model.cfg, "normalization_type", ""))
    return norm_type.endswith("Pre") or bool(getattr(model, "_weights_processed", False))


def inner_part(bridge: Any, name: str) -> Any:
    """A part of the transformers module inside a bridge."""
    return getattr(getattr(bridge, "original_component", None), name, None)


def host_error(model: Model, error: Exception) -> UnsupportedModelError:
    """What a user is told when TransformerLens, or a model in it, fails in its own code."""
    reason = str(error).strip().splitlines()
    return UnsupportedModelError(
        f"{architecture_of(model)} could not be read: {type(error).__name__}"
        f"{': ' + reason[0].rstrip('.') if reason else ''}. Head maps need attention made of W_Q, W_K, W_V and W_O, "
        "and a model that runs on a few tokens. Try model(tokens) by itself, or use another model."
    )


def parameters_digest(model: Model) -> str:
    """SHA-256 over all parameters and buffers of a model, by the names TransformerLens gives them.

    It differs between raw and processed weights, and between a TransformerBridge and a HookedTransformer.
    """
    loaded: dict[str, Tensor] = {}
    digests = {"host": type(model).__name__}
    for prefix, module in [part for root in roots(model) for part in root.named_modules()]:
        if any(tensor.is_meta for tensor in _own_tensors(prefix, module).values()):
            with weights_loaded(module):
                digests |= tensor_digests(_own_tensors(prefix, module))
        else:
            loaded |= _own_tensors(prefix, module)
    return joint_digest(digests | tensor_digests(loaded))


_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
"""What torch keeps in each module: its parts, its hooks, and its mode, which does not matter to a reading."""

_NUMBERS = (bool, int, float, str)
_SETTINGS = (*_NUMBERS, type(None), torch.dtype, torch.device)
_FEW = 64
"""Entries of an array that is a setting, at most; larger ones are weights or caches."""


def state_of(model: Model) -> tuple[Any, ...] | None:
    """All that decides what is read of a model: modules with their settings and hooks, and every entry of the weights.

    To be compared with what it was: no counter of torch's sees an edit of ``.data``, so every byte is read, which takes
    a hundredth of reading the model. None if some weights are not in memory.
    """
    state: list[Any] = []
    tensors: dict[Any, Tensor] = {}
    configurations: dict[int, Any] = {id(settings): settings for settings in (model.cfg, config_of(model))}
    for module in all_modules(model):
        own = vars(module)
        state.append(type(module))
        if "fwd_hooks" in own:
            # Hooks at the host's points are silenced while the model is read.
            continue
        for name in own.keys() - _OF_EVERY_MODULE:
            value = own[name]
            if name in ("cfg", "config"):
                configurations[id(value)] = value
            elif isinstance(value, dict):
                # Mostly registers of hooks and parts; a factor by name (of an adapter, say) is a setting.
                state += (name, *((key, item) for key, item in value.items() if isinstance(item, _NUMBERS)))
            else:
                state += (name, _as_setting(value))
        # Torch gives each hook a number of its own.
        state += (*own["_forward_hooks"], *own["_forward_pre_hooks"])
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            if tensor is not None:
                place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
                state.append(place)
                tensors[place] = tensor
    if any(tensor.is_meta for tensor in tensors.values()):
        return None
    for settings in configurations.values():
        state += _as_setting(dict(getattr(settings, "__dict__", {})))
    return (*state, *map(quick_digest, tensors.values()))


def _as_setting(value: Any) -> Any:
    """A number, a word, or a collection of them; of a function, which one it is, of anything else, what it is."""
    if isinstance(value, _SETTINGS):
        return value
    if hasattr(value, "tolist") and getattr(value, "size", None) is not None:
        n = value.numel() if isinstance(value, Tensor) else value.size
        return _as_setting(value.tolist()) if n <= _FEW and not getattr(value, "is_meta", False) else type(value)
    if isinstance(value, list | tuple):
        return tuple(map(_as_setting, value))
    if isinstance(value, dict):
        return tuple((name, _as_setting(item)) for name, item in value.items())
    if isinstance(value, FunctionType | MethodType | partial):
        # By place and not by name: two closures of one factory share their name.
        return id(getattr(value, "__func__", value))
    return value.__qualname__ if isinstance(value, type) else type(value)


def settings_of(model: Model) -> dict[str, Any]:
    """The configuration of a model, as its host has it."""
    config = config_of(model)
    return dict(vars(model.cfg) if config is None else config.to_dict())


def settings_digest(settings: Mapping[str, Any]) -> str:
    """SHA-256 over the configuration of a model: beside its parameters, eps, factors and functions decide its numbers.

    Where a model comes from does not count.
    """
    deciding = {name: value for name, value in settings.items() if not name.startswith("_") and name not in _NAMING}
    # Twice: only as text can numbers and words among the keys be sorted.
    plain = json.loads(json.dumps(deciding, default=str, skipkeys=True))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _own_tensors(prefix: str, module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module, not of the modules inside it."""
    return dict([*module.named_parameters(prefix, recurse=False), *module.named_buffers(prefix, recurse=False)])
