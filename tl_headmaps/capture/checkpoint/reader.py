"""Reading a Hugging Face checkpoint without building the model: memory-mapped safetensors, one layer at a time.

One layer in float32 is resident. Embedding, unembedding and first MLP stay in their file in the stored type; only the
pages being read count (:mod:`..tensors`).

:mod:`.architectures` says what a checkpoint means. Names, shapes and configuration come from a file and are checked: a
tensor that is missing, of another shape, or unknown to the table is refused, not guessed.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.errors import ModelLoadError, UnsupportedModelError, UsageError
from ..parts import ACTIVATIONS, MLP, LayerWeights, Norm, basis_of
from ..tensors import check_finite
from .config import PREDICTING, Config, require_layers, uncounted
from .shards import DigestFile, Shards, fetched, local_folder, require_config

_COMPONENTS = {
    "attn.q": "q",
    "attn.k": "k",
    "attn.v": "v",
    "attn.o": "o",
    "mlp.up": "mlp_in",
    "mlp.down": "mlp_out",
    "mlp.gate": "mlp_gate",
}
_FUSED = {"qkv": ("q", "k", "v"), "q_gate": ("q", "gate"), "mlp_gate_in": ("mlp_gate", "mlp_in")}
"""Parts that several matrices share, in the order in which they follow each other."""


def open_checkpoint(name: str, device: torch.device, revision: str | None = None) -> "CheckpointOrigin":
    """The checkpoint in a folder, or in a repository on the hub (the files that are needed are fetched)."""
    folder = local_folder(name)
    if folder is None:
        folder = fetched(name, revision, lambda fetched_to: _Checkpoint(name, fetched_to, device).needed_files())
    else:
        require_config(name, folder)
    return CheckpointOrigin(name, str(folder.absolute()), str(device))


@dataclass(frozen=True)
class CheckpointOrigin:
    """Name, folder and device: all that is sent to a worker, which opens the files itself, once per process."""

    name: str
    folder: str
    device: str

    def fields(self, with_tokenizer: bool = True) -> dict[str, Any]:
        """Fields of HeadWeights for this checkpoint."""
        return {**self._checkpoint.fields(with_tokenizer), "origin": self}

    @cached_property
    def _checkpoint(self) -> "_Checkpoint":
        return _Checkpoint(self.name, Path(self.folder), torch.device(self.device))

    @cached_property
    def digests(self) -> DigestFile:
        folder = Path(self.folder)
        files = self._checkpoint.needed_files()
        return DigestFile([folder / "config.json", *(folder / file for file in files)])

    @property
    def components(self) -> tuple[str, ...]:
        """The weight matrices every layer has, as ``attn.q`` or ``mlp.up``; mixtures of experts are refused."""
        for layer in sorted(self._checkpoint.mixtures):
            raise UnsupportedModelError(
                f"The MLP of layer {layer} of {self.name!r} is a mixture of experts without one up and one down "
                "matrix, so a map of components is not defined. Use by_head=True (--by-head), which needs the "
                "attention alone."
            )
        return tuple(name for name, part in _COMPONENTS.items() if self._checkpoint.has(part))

    def component(self, layer: int, name: str) -> Tensor:
        """One weight matrix of any layer in its stored type, rows inputs and columns outputs, heads side by side."""
        if name not in self.components or not 0 <= layer < self._checkpoint.n_layers:
            raise UsageError(f"There is no {name} in layer {layer}; there are {', '.join(self.components)}.")
        return self._checkpoint.component(layer, _COMPONENTS[name])

    def __getstate__(self) -> dict[str, str]:
        # A worker reads its own files instead of trusting what is known about the sender's.
        return {"name": self.name, "folder": self.folder, "device": self.device}


class _Checkpoint:
    """One folder: its configuration, its table, and its tensors."""

    def __init__(self, name: str, folder: Path, device: torch.device) -> None:
        self.name, self.folder, self.device = name, folder, device
        self.shards = Shards(name, folder)
        self.config = Config(name, folder)
        require_layers(self.config.path, self.config.raw, len(self.shards.files))
        self.architecture, self.class_name = self.config.architecture, self.config.class_name
        self.n_layers, self.n_heads = self.config.n_layers, self.config.n_heads
        self.n_kv_heads, self.d_head, self.d_model = self.config.n_kv_heads, self.config.d_head, self.config.d_model

    @cached_property
    def body(self) -> str:
        """Prefix of the tensors of the model's body."""
        embed = self.architecture.shared["embed"]
        for prefix in self.architecture.bodies:
            if f"{prefix}{embed}.weight" in self.shards:
                return prefix
        raise self._missing(f"{self.architecture.bodies[0]}{embed}.weight")

    def _missing(self, name: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.name!r} has no tensor {name!r}, which a {self.class_name} has. The checkpoint is incomplete, "
            "quantised, or not of the architecture that its config.json names. Use a complete checkpoint in float32, "
            "bfloat16 or float16."
        )

    def full_name(self, part: str, layer: int | None = None) -> str | None:
        """Name of a part without its ``.weight``; None if this family has no such part."""
        table = self.architecture.shared if layer is None else self.architecture.parts
        if part not in table:
            return None
        return f"{self.body}{table[part]}" if layer is None else self._in_layer(layer, table[part])

    def within_layer(self, part: str) -> list[str]:
        """Names within a layer of the tensors of a part; more than one if each head has its own."""
        name = self.architecture.parts[part]
        n_heads = self.n_heads if part == "q_norm" else self.n_kv_heads
        return [name.format(head=head) for head in range(n_heads)] if "{head}" in name else [name]

    @cached_property
    def unembed(self) -> str:
        """Name of the unembedding; that of the embedding where the two are tied."""
        for name in self.architecture.unembed:
            if f"{name}.weight" in self.shards:
                return name
        if not self.config.setting("tie_word_embeddings"):
            raise self._missing(f"{self.architecture.unembed[0]}.weight")
        embed = self.full_name("embed")
        assert embed is not None
        return embed

    @cached_property
    def mixtures(self) -> set[int]:
        """Layers whose MLP is a mixture of experts."""
        return {layer for layer, name in self._layer_tensors() if name.startswith(self.architecture.experts)}

    @cached_property
    def mixers(self) -> dict[int, str]:
        """Layers without heads, and what mixes their tokens."""
        found = {
            layer: mixer
            for layer, name in self._layer_tensors()
            for start, mixer in self.architecture.mixers.items()
            if name.startswith(start)
        }
        if len(found) == self.n_layers:
            raise UnsupportedModelError(
                f"{self.name!r} has no attention heads: its layers are {', '.join(sorted(set(found.values())))}. Head "
                "maps need a model with attention in at least one layer."
            )
        return dict(sorted(found.items()))

    def _layer_tensors(self) -> Iterator[tuple[int, str]]:
        """Layer and name within it of every tensor of a layer that the configuration counts."""
        return ((layer, name) for layer, name in self._stored_layers() if layer < self.n_layers)

    def _stored_layers(self) -> Iterator[tuple[int, str]]:
        """Layer and name within it of every tensor of a layer."""
        pattern = re.escape(self.body) + re.escape(self.architecture.layer).replace(r"\{layer\}", r"(\d{1,9})") + "(.*)"
        for name in self.shards.files:
            match = re.fullmatch(pattern, name)
            if match:
                yield int(match[1]), match[2]

    def _in_layer(self, layer: int, name: str) -> str:
        """Full name of something within a layer."""
        return f"{self.body}{self.architecture.layer.format(layer=layer)}{name}"

    def _require_counted(self) -> None:
        """Refuse layers that the configuration does not count, but for those that predict several tokens at once."""
        beyond = [(layer, name) for layer, name in self._stored_layers() if layer >= self.n_layers]
        predicting = {layer for layer, name in beyond if name.startswith(PREDICTING)}
        left = sorted(self._in_layer(*tensor) for tensor in beyond if tensor[0] not in predicting)
        if left:
            stack = f"{self.body}{self.architecture.layer.partition('.')[0]}"
            raise uncounted(self.name, left, stack, self.n_layers)

    def needed_tensors(self) -> Iterator[str]:
        """Names of all tensors that weight-only analyses read."""
        shared = [self.full_name("embed"), self.full_name("ln_final"), self.unembed]
        parts = self.architecture.parts
        mlp = {part for part in parts if part.startswith("mlp_")}
        first = {"ln2", "ln2_post", *mlp}
        for layer in range(self.n_layers):
            left_out = first if layer else mlp if 0 in self.mixtures else set()
            if layer in self.mixers:
                left_out = left_out | (parts.keys() - first - {"ln1"})
            names = (name for part in parts if part not in left_out for name in self.within_layer(part))
            shared += [self._in_layer(layer, name) for name in names]
        for name in dict.fromkeys(shared):
            if f"{name}.weight" not in self.shards:
                raise self._missing(f"{name}.weight")
            yield from (tensor for tensor in (f"{name}.weight", f"{name}.bias") if tensor in self.shards)

    def needed_files(self) -> list[str]:
        """The shards that contain those tensors."""
        return self.shards.holding(self.needed_tensors())

    def _require_known(self) -> None:
        """Refuse tensors of a layer that the table does not know: they would change what it computes."""
        parts = (name for part in self.architecture.parts for name in self.within_layer(part))
        known = {*self.architecture.ignored, *(f"{name}.{kind}" for name in parts for kind in ("weight", "bias"))}
        for layer, name in self._layer_tensors():
            if name not in known and not name.startswith((*self.architecture.experts, *self.architecture.mixers)):
                raise UnsupportedModelError(
                    f"{self.name!r} has a tensor {self._in_layer(layer, name)!r}, which is unknown for a "
                    f"{self.class_name}, so the layer computes something else. Load the model with TransformerLens "
                    "and pass the model itself."
                )

    def _require_biases(self) -> None:
        """Refuse a bias that the configuration promises and a layer lacks, and one that it leaves out.

        Transformers would fill the one with zeros and drop the other.
        """
        parts = self.architecture.parts
        promised = {name: self.config.has_bias(part) for part in parts for name in self.within_layer(part)}
        for layer, name in self._layer_tensors():
            owner, _, kind = name.rpartition(".")
            bias = self._in_layer(layer, f"{owner}.bias")
            if kind == "weight" and promised.get(owner) and bias not in self.shards:
                raise self._missing(bias)
            if kind == "bias" and not promised.get(owner, True):
                raise UnsupportedModelError(
                    f"{self.name!r} has a tensor {bias!r}, which a {self.class_name} of its config.json does not use, "
                    "so the model would compute something else. Use the configuration that belongs to these weights."
                )
        bias = f"{self.full_name('ln_final')}.bias"
        if self.config.has_bias("ln_final") and bias not in self.shards:
            raise self._missing(bias)

    def has(self, part: str) -> bool:
        """Whether this family has a matrix, on its own or within another."""
        return self._stored_as(part)[0] in self.architecture.parts

    def _stored_as(self, part: str) -> tuple[str, tuple[str, ...]]:
        """The part that is stored, and the matrices in it."""
        for joint, shares in _FUSED.items():
            if joint in self.architecture.parts and part in shares:
                return joint, shares
        return part, (part,)

    def outputs(self, part: str, layer: int) -> int:
        """Number of outputs of a matrix."""
        if part in ("o", "mlp_out"):
            return self.d_model
        if part in ("k", "v"):
            return self.n_kv_heads * self.d_head
        if part in ("q", "gate"):
            return self.n_heads * self.d_head
        joint, shares = self._stored_as(part)
        stored = self.shards.stored(f"{self.full_name(joint, layer)}.weight")
        return stored.shape[1 if self.architecture.inputs_first else 0] // len(shares)

    def inputs(self, part: str, layer: int) -> int:
        """Number of inputs of a matrix."""
        if part == "o":
            return self.n_heads * self.d_head
        return self.outputs("mlp_in", layer) if part == "mlp_out" else self.d_model

    def matrix(self, part: str, layer: int) -> Tensor:
        """A matrix [out, in] in its stored type."""
        return self._share(part, layer, "weight", self.inputs(part, layer))

    def bias(self, part: str, layer: int) -> Tensor | None:
        if f"{self.full_name(self._stored_as(part)[0], layer)}.bias" not in self.shards:
            return None
        return self.float32(self._share(part, layer, "bias"))

    def _share(self, part: str, layer: int, kind: str, *n_in: int) -> Tensor:
        """Weight or bias of a part, outputs first, out of the tensor that contains it."""
        joint, shares = self._stored_as(part)
        sizes = [self.outputs(share, layer) for share in shares]
        name = f"{self.full_name(joint, layer)}.{kind}"
        if n_in and self.architecture.inputs_first:
            stored = self.shards.sized(name, *n_in, sum(sizes)).T
        else:
            stored = self.shards.sized(name, sum(sizes), *n_in)
        n_groups = 1
        if joint == "q_gate":
            n_groups = self.n_heads
        elif joint == "qkv" and self.architecture.fused == "by group":
            n_groups = self.n_kv_heads
        if n_groups > 1:
            by_group = stored.reshape(n_groups, sum(sizes) // n_groups, *n_in)
            parts: tuple[Tensor, ...] = by_group.split([size // n_groups for size in sizes], dim=1)
            return parts[shares.index(part)].reshape(-1, *n_in)
        parts = stored.split(sizes)
        return parts[shares.index(part)]

    def component(self, layer: int, part: str) -> Tensor:
        """Any matrix of a layer [in, out], stored type."""
        matrix = self.matrix(part, layer)
        check_finite(matrix, f"{self.full_name(part, layer) or part} of layer {layer}")
        return matrix.T.to(self.device)

    def float32(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=torch.float32)

    def norm(self, part: str, layer: int | None = None, *shape: int) -> Norm | None:
        name = self.full_name(part, layer)
        if name is None:
            return None
        shape = shape or (self.d_model,)
        kind = self.architecture.norm
        weight = self._norm_tensor(f"{name}.weight", shape)
        if kind.endswith("+ 1"):
            weight = 1.0 + weight
        if f"{name}.bias".format(head=0) in self.shards:
            bias = self._norm_tensor(f"{name}.bias", shape)
        else:
            bias = torch.zeros_like(weight)
        for value in (weight, bias):
            check_finite(value, f"The norm {name}")
        return Norm(kind.startswith("layer"), weight, bias, self.config.eps)

    def _norm_tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if "{head}" not in name:
            return self.float32(self.shards.sized(name, *shape))
        return torch.stack([self.float32(self.shards.sized(name.format(head=h), *shape[1:])) for h in range(shape[0])])

    def head_norm(self, part: str, layer: int) -> Norm | None:
        """Norm of queries or keys."""
        n_heads = self.n_heads if part == "q_norm" else self.n_kv_heads
        shapes = {"alike": (self.d_head,), "by head": (n_heads, self.d_head), "joint": (n_heads * self.d_head,)}
        return self.norm(part, layer, *shapes[self.architecture.head_norms])

    def layer(self, layer: int) -> LayerWeights:
        """Attention of one layer."""
        stored = (self.float32(self.matrix(part, layer)) for part in ("q", "k", "v"))
        W_Q, W_K, W_V = (weight.view(-1, self.d_head, self.d_model).mT for weight in stored)
        biases = (self.bias(part, layer) for part in ("q", "k", "v"))
        b_Q, b_K, b_V = (None if bias is None else bias.reshape(-1, self.d_head) for bias in biases)
        W_O = self.float32(self.matrix("o", layer))
        return LayerWeights(
            layer=layer,
            W_Q=W_Q,
            W_K=W_K,
            W_V=W_V,
            W_O=W_O.view(self.d_model, self.n_heads, self.d_head).permute(1, 2, 0),
            score_scale=self.config.score_scale(layer),
            b_Q=b_Q,
            b_K=b_K,
            b_V=b_V,
            ln1=self.norm("ln1", layer),
            ln1_post=self.norm("ln1_post", layer),
            q_norm=self.head_norm("q_norm", layer),
            k_norm=self.head_norm("k_norm", layer),
        )

    def first_mlp(self) -> tuple[MLP | None, str | None]:
        """MLP of layer 0 in its stored type, and the reason if it cannot be used."""
        if 0 in self.mixtures:
            return None, "its first MLP is a mixture of experts"
        activation = self.config.activation
        if activation not in ACTIVATIONS:
            return None, f"its activation function {activation!r} is not known here"
        gated = self.has("mlp_gate")
        mlp = MLP(
            W_in=self.matrix("mlp_in", 0).T.to(self.device),
            W_out=self.matrix("mlp_out", 0).T.to(self.device),
            activation=activation,
            W_gate=self.matrix("mlp_gate", 0).T.to(self.device) if gated else None,
            b_in=self.bias("mlp_in", 0),
            b_gate=self.bias("mlp_gate", 0) if gated else None,
            b_out=self.bias("mlp_out", 0),
        )
        return mlp, None

    def vocabulary_matrix(self, name: str | None, called: str) -> Tensor:
        """Embedding or unembedding, mapped (a copy only if the device is not the CPU)."""
        tensor = self.shards.stored(f"{name}.weight")
        if tensor.ndim != 2 or tensor.shape[1] != self.d_model:
            raise UnsupportedModelError(
                f"{name}.weight of {self.name!r} has shape {list(tensor.shape)}, but its config.json implies rows of "
                f"{self.d_model}. One of the two belongs to another model: fetch the checkpoint again."
            )
        tensor = tensor.to(self.device)
        check_finite(tensor, called)
        return tensor

    def fields(self, with_tokenizer: bool) -> dict[str, Any]:
        self.shards.require(self.needed_tensors())
        self._require_counted()
        self._require_known()
        self._require_biases()
        W_E = self.vocabulary_matrix(self.full_name("embed"), "The embedding W_E")
        tied = self.unembed == self.full_name("embed")
        W_U = W_E if tied else self.vocabulary_matrix(self.unembed, "The unembedding W_U")
        ln_final = self.norm("ln_final")
        mlp, refusal = self.first_mlp()
        scale = self.config.factor("embed_scale") or 1.0
        if self.architecture.embeds_scaled:
            # In the precision of the stored type, like the model itself.
            scale = float(torch.tensor(self.d_model**0.5, dtype=W_E.dtype, device="cpu"))
        return {
            "model_name": self.name,
            "architecture": self.class_name,
            "n_layers": self.n_layers,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "d_model": self.d_model,
            "d_head": self.d_head,
            "basis": basis_of([ln_final, *(self.norm("ln1", layer) for layer in range(self.n_layers))], W_U, False),
            "W_E": W_E,
            "W_U": W_U,
            "embed_scale": scale,
            "residual_scale": self.config.factor("residual_scale") or 1.0,
            "mlp_scale": self.config.factor("residual_scale") or 1.0,
            "logit_scale": self.config.factor("logit_scale") or 1.0,
            "ln_final": ln_final,
            "ln2": self.norm("ln2", 0),
            "mlp": mlp,
            "ln2_post": self.norm("ln2_post", 0),
            "mlp_refusal": refusal,
            "read_layer": self.layer,
            "mixers": self.mixers,
            "gated": "q_gate" in self.architecture.parts,
            "tokenizer": open_tokenizer(self.name, self.folder, self.config.raw) if with_tokenizer else None,
        }


_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_OWN_CONFIG = "tokenizer_config.json"


def open_tokenizer(name: str, folder: Path, config: Mapping[str, Any]) -> Any:
    """The tokenizer of a folder, the same as that of the loaded model; None if there is none.

    Args:
        name: What the checkpoint is called in messages.
        folder: Its folder.
        config: The content of its config.json.
    """
    if not any((folder / file).is_file() for file in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **_hints(folder, config))
    except Exception as error:
        # A damaged tokenizer can make its library raise anything.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(
            f"The tokenizer of {name!r} cannot be opened: {reason} Fetch it again, or remove its files and use token "
            "ids."
        ) from error


def _hints(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the model's configuration that the choice of the tokenizer's class needs, if it names its class.

    By default the library loads the configuration class of the model and with it torch's compiler: 80 MB and seconds,
    for two fields.
    """
    from transformers import PreTrainedConfig

    path = folder / _OWN_CONFIG
    own = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not own.get("tokenizer_class") or "auto_map" in own:
        return {}
    fields = ("model_type", "tokenizer_class")
    return {"config": PreTrainedConfig.from_dict({field: config[field] for field in fields if config.get(field)})}
