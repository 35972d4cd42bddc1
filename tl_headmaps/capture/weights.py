"""The weights an analysis reads, one layer at a time, in one layout for every host and checkpoint.

Conventions (TransformerLens' names and shapes):

* ``W_Q`` [head, d_model, d_head], ``W_K`` and ``W_V`` [kv_head, d_model, d_head], ``W_O`` [head, d_head,
  d_model]. Grouped key/value heads stay grouped: head ``h`` reads group ``h // (n_heads // n_kv_heads)``.
* ``W_E`` and ``W_U`` are both [vocab, d_model] (rows are tokens), kept in their stored type like the matrices of the
  first MLP; everything else is float32 on ``device``.
* A norm's ``weight`` is the factor it really multiplies by (Gemma's ``1 + w``), whatever the module stores.

:mod:`.host` reads them from a loaded model, :mod:`.checkpoint.reader` from safetensors on disk, both as classes of
:mod:`.parts`; neither knows this file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.errors import HeadMapsError, UnsupportedModelError, UsageError, WeightBasisError
from ..core.options import public, with_torch_defaults
from ..core.provenance import Provenance
from ..core.types import (
    Basis,
    Circuit,
    HeadIndex,
    HeadLike,
    LayerLike,
    Model,
    Preset,
    check_choice,
    head_list,
    layer_list,
)
from .anatomy import config_of, host_error, parameters_digest, settings_digest, settings_of
from .checkpoint.reader import CheckpointOrigin, open_checkpoint
from .checkpoint.shards import shown_name
from .forward import evaluating, weights_loaded
from .host import read_model
from .parts import MLP, HeadShape, LayerWeights, Norm, ParallelMixer
from .selfcheck import MIXED_VALUES, SelfCheck, self_check
from .tensors import check_device, joint_digest, quantisation_of, rows_of, stated_quantisation, tensor_digests

if TYPE_CHECKING:
    from typing import Self


_Value = TypeVar("_Value")


class _remembered(cached_property[_Value]):  # as cached_property is written
    """A cached property that is remembered with what was read of a model.

    Of weights that a caller made, it is taken from there only if the model still is what it was then: it may have been
    edited since. :meth:`HeadWeights.provenance` remembers what was computed.
    """

    def __get__(self, weights: Any, owner: Any = None) -> _Value:  # type: ignore[override]
        if weights is not None and self.attrname not in vars(weights):
            reading = vars(weights).get("_read_as")
            same = reading is not None and reading.holds(weights.model)
            if reading is not None and same and self.attrname in reading.known:
                vars(weights).update(reading.known)
            elif same:
                vars(weights).setdefault("_of_the_reading", set()).add(self.attrname)
        return cast(_Value, super().__get__(weights, owner))


_GATED = (
    "What each head mixes is multiplied, channel by channel, by a gate that depends on the query, before W_O. The "
    "weights alone do not know the gate: OV maps, their scores and the values shown here are right only up to it."
)


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """Everything that weight-only analyses read from a model, layer by layer.

    Build it with :meth:`from_model` or :meth:`from_checkpoint`. Every analysis also takes the model itself and does
    this for you.

    Attributes:
        model_name, architecture: What was read.
        n_layers, n_heads, n_kv_heads, d_model, d_head: Its size; ``n_heads`` are the heads of a layer that has any, or
            the most that one has. Keys, values and widths are those of the first such layer.
        shapes: Number and width of heads of each layer that has any, where layers differ (Gemma 4, Laguna); else empty.
        basis: Whether norms were already folded into the weights when they were read.
        W_E: Token embeddings, in their stored type.
        W_U: Unembedding, transposed so that rows are tokens, in its stored type.
        embed_scale: Factor of the embeddings in the model (Gemma: sqrt(d_model)).
        embed_norm: Norm of the embeddings before layer 0 (Bloom).
        residual_scale: Factor of what attention adds to the stream (Granite).
        mlp_scale: Factor of what the MLP adds.
        beside: What mixes tokens beside the heads in every layer (Falcon-H1), if anything does.
        logit_scale: Factor of the logits after the unembedding (Cohere).
        moved_biases: Whether TransformerLens moved value biases into the output bias, where no head has its own.
        unmapped: Why maps of a circuit are not defined for this model, by circuit; empty for nearly all.
        ln_final: The norm before the unembedding.
        ln2, mlp, ln2_post: Norm and MLP of layer 0, which turn embeddings into the vectors later layers see;
            ``mlp`` is None for attention-only models.
        mlp_refusal: Why the first MLP cannot be computed (mixture of experts, ...), or None.
        read_layer: Reads one layer; called by :meth:`layer`.
        gated: Whether what heads mix is multiplied by a gate of the query before W_O (Qwen3-Next, Qwen3.5).
        mixers: What mixes the tokens in layers that have no heads (``"linear attention"``, ``"Mamba"``, ...), by layer;
            empty for a model with attention in every layer.
        tokenizer: The model's tokenizer; None allows token ids only.
        origin: The checkpoint these weights are read from, which another process can open again; None for weights of a
            model in memory.
        model: The running model these weights were read from, for ``preset="context"``; None for a checkpoint.

    Example:
        >>> from tl_headmaps import HeadWeights, load_default_model
        >>> weights = HeadWeights.from_model(load_default_model())
        >>> weights.n_layers, weights.n_heads, weights.n_kv_heads, weights.basis
        (30, 9, 3, 'raw')
        >>> tuple(weights.layer(23).W_O.shape), weights.group_of(4)  # head 4 reads key/value head 1
        ((9, 64, 576), 1)
    """

    model_name: str
    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    basis: Basis
    W_E: Float[Tensor, "vocab d_model"]
    W_U: Float[Tensor, "vocab_out d_model"]
    embed_scale: float
    ln_final: Norm | None
    read_layer: Callable[[int], LayerWeights] = field(repr=False)
    ln2: Norm | None = None
    mlp: MLP | None = None
    ln2_post: Norm | None = None
    mlp_refusal: str | None = None
    mixers: Mapping[int, str] = field(default_factory=dict)
    gated: bool = False
    tokenizer: Any = field(default=None, repr=False)
    origin: CheckpointOrigin | None = field(default=None, repr=False)
    model: Any = field(default=None, repr=False)
    embed_norm: Norm | None = None
    residual_scale: float = 1.0
    mlp_scale: float = 1.0
    beside: ParallelMixer | None = None
    logit_scale: float = 1.0
    moved_biases: bool = False
    unmapped: Mapping[Circuit, str] = field(default_factory=dict)
    shapes: Mapping[int, HeadShape] = field(default_factory=dict)

    @classmethod
    @public
    def from_model(cls, model: Model, device: str | torch.device | None = None) -> "Self":
        """Read a TransformerBridge or HookedTransformer.

        Args:
            model: A loaded TransformerLens model, raw or processed, in float32, bfloat16 or float16.
            device: Where to compute; the model's own device by default.
        """
        check_device(device)
        reading = read_model(model, device)
        weights = cls(**reading.fields_with(model))
        vars(weights)["_read_as"] = reading
        return weights

    @classmethod
    @public
    def from_checkpoint(
        cls,
        folder_or_repo_id: str | Path,
        *,
        device: str | torch.device = "cpu",
        revision: str | None = None,
    ) -> "Self":
        """Read a Hugging Face checkpoint from its safetensors, memory-mapped; the model is never built.

        Only embedding, unembedding, norms, the first MLP and the attention of one layer at a time are read, so a model
        much larger than memory can be mapped. Numbers are those of the same model loaded in its stored type.

        Args:
            folder_or_repo_id: A folder with config.json and .safetensors, or a name on the hub (only the files that are
                needed are downloaded, to the cache of huggingface_hub).
            device: Where to compute; a layer's tensors are moved there as they are read.
            revision: Branch, tag or commit on the hub.
        """
        check_device(device)
        return cls(**open_checkpoint(str(folder_or_repo_id), torch.device(device), revision).fields())

    def __reduce__(self) -> Any:
        """Pickle as the name of the checkpoint; the receiving process opens it itself."""
        if self.origin is None:
            raise UsageError(
                f"The weights of {self.model_name!r} were read from a model in this process and cannot be sent to "
                "another one. Use HeadWeights.from_checkpoint(folder), which every worker opens itself, or a "
                "ThreadPoolExecutor."
            )
        return _reopened, (self.origin,)

    @classmethod
    def of(cls, model: "Model | HeadWeights") -> "HeadWeights":
        """Weights as they are, or those of a model."""
        if isinstance(model, HeadWeights):
            return model
        weights = cls.from_model(model)
        reading = vars(weights)["_read_as"]
        vars(weights).update(reading.known, shared=reading)
        return weights

    @property
    def cache_owner(self) -> Any:
        """What computations are kept for: these weights, or what calls with the same unchanged model have in common."""
        return vars(self).get("shared", self)

    @with_torch_defaults()
    def layer(self, layer: LayerLike) -> LayerWeights:
        """Attention weights of one layer (3, or ``"L3"``), float32."""
        numbers = layer_list(layer)
        if len(numbers) != 1:
            raise UsageError(f"{layer!r:.80} is not one layer. Write 12, or 'L12'.")
        self.head(HeadIndex(numbers[0], 0))
        return self.read_layer(numbers[0])

    def head(self, head: HeadLike) -> HeadIndex:
        """Parse a head and check that this model has it."""
        index = HeadIndex.of(head).check(self.n_layers, self.n_heads)
        if index.layer in self.mixers:
            raise self._no_heads(index.layer)
        n_heads = self.shape(index.layer).n_heads
        if index.head >= n_heads:
            raise UsageError(
                f"There is no head {index}: layer {index.layer} of {self.model_name!r} has {n_heads} heads, fewer than "
                f"others. Its last head is {HeadIndex(index.layer, n_heads - 1)}."
            )
        return index

    def shape(self, layer: int) -> HeadShape:
        """Number and width of the heads of a layer that has any."""
        return self.shapes.get(layer, HeadShape(self.n_heads, self.n_kv_heads, self.d_head))

    def _no_heads(self, layer: int) -> UsageError:
        return UsageError(
            f"Layer {layer} of {self.model_name!r} has no heads: its tokens are mixed by {self.mixers[layer]}. Choose "
            f"a layer with heads: {', '.join(map(str, self.layers_with_heads))}."
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know when reading maps of this model, as sentences; every result carries them."""
        return (_GATED,) if self.gated else ()

    @property
    def layers_with_heads(self) -> list[int]:
        """Layers that have attention heads; all of them, except in hybrid models."""
        return [layer for layer in range(self.n_layers) if layer not in self.mixers]

    @property
    def n_all_heads(self) -> int:
        """Number of heads of the whole model."""
        return sum(self.shape(layer).n_heads for layer in self.layers_with_heads)

    def named_heads(self, heads: HeadLike | Iterable[HeadLike]) -> list[HeadIndex]:
        """One head or several in the order given, ``"L12"`` being all of layer 12; raises if one does not exist."""
        every = [HeadIndex(n, head) for n in range(self.n_layers) for head in range(self.shape(n).n_heads)]
        return [self.head(head) for head in head_list(heads, every)]

    def chosen_heads(
        self,
        heads: HeadLike | Iterable[HeadLike] | None = None,
        layers: LayerLike | Iterable[LayerLike] | None = None,
    ) -> list[HeadIndex]:
        """The heads chosen by name, by layer, or by both (then their intersection), in ascending order.

        Args:
            heads: One head or several, ``"L12"`` being all of layer 12; all by default.
            layers: Only heads of these layers.
        """
        numbers = range(self.n_layers) if layers is None else layer_list(layers)
        for layer in numbers:
            if not 0 <= layer < self.n_layers:
                raise UsageError(f"There is no layer {layer}: the model has layers 0 to {self.n_layers - 1}.")
        with_heads = set(self.layers_with_heads)
        if numbers and not with_heads.intersection(numbers):
            raise self._no_heads(numbers[0])
        chosen = {HeadIndex(n, head) for n in with_heads.intersection(numbers) for head in range(self.shape(n).n_heads)}
        if heads is not None:
            chosen &= set(self.named_heads(heads))
        if not chosen and layers is None:
            raise UsageError("heads= is empty. Name at least one head, or leave it out for all.")
        if not chosen:
            raise UsageError("No head is left: layers= or heads= is empty, or they exclude each other.")
        return sorted(chosen)

    def over_all_layers(self, values: Float[Tensor, "*rest with_heads head"]) -> Float[Tensor, "*rest layer head"]:
        """A map over the layers that have heads as one over all layers: NaN where there are no heads."""
        if not self.mixers:
            return values
        spread = values.new_full((*values.shape[:-2], self.n_layers, values.shape[-1]), torch.nan)
        spread[..., self.layers_with_heads, :] = values
        return spread

    def group_of(self, head: int, layer: int | None = None) -> int:
        """The key/value head that query head ``head`` reads; where layers differ, in this layer."""
        return self.shape(self.layers_with_heads[0] if layer is None else layer).group_of(head)

    @with_torch_defaults()
    def embedded(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        """Embeddings of some tokens as they enter layer 0, without positions."""
        embedding = rows_of(self.W_E, ids.flatten()).to(torch.float32).view(*ids.shape, -1) * self.embed_scale
        return embedding if self.embed_norm is None else self.embed_norm(embedding)

    @property
    def n_vocab(self) -> int:
        """Number of embedded tokens."""
        return self.W_E.shape[0]

    @property
    def device(self) -> torch.device:
        """Where computations run."""
        return self.W_E.device

    def preset(self, asked: str | None, circuit: Circuit = "ov", *, in_context: bool = False) -> Preset:
        """The preset asked for; where none was, the one that shows more of what heads do.

        On three models, context vectors find the heads that others miss (tests/benchmarks/three_models.py), so
        they are the default wherever they can be made: of OV maps, by a model that can run and has a tokenizer for the
        prompts. QK maps would have to read the whole vocabulary.

        Args:
            asked: What the caller asked for.
            circuit: Which maps.
            in_context: Whether prompts or context vectors were given, which leave no choice.
        """
        if asked is not None:
            check_choice(asked, Preset, "preset")
            return cast(Preset, asked)
        can_run = self.model is not None and self.tokenizer is not None
        return "context" if in_context or (can_run and circuit == "ov") else "folded"

    def require(self, preset: Preset, needs_mlp: bool) -> None:
        """Raise unless the weights suit a preset (and the first MLP can be computed, where it is needed)."""
        if preset == "maps" and self.basis != "raw":
            raise WeightBasisError(
                f"The weights of {self.model_name!r} are {self.basis} (norms folded in or matrices centred), but "
                "preset='maps' reproduces published scores and needs raw weights. Load the model without processing "
                "(TransformerBridge.boot_transformers(...) without enable_compatibility_mode(), or "
                "HookedTransformer.from_pretrained_no_processing(...)), or use preset='folded'."
            )
        if needs_mlp and preset != "context" and self.mlp_refusal is not None:
            which = "no layer that has heads" if 0 in self.mixers else "only layer 0"
            raise UnsupportedModelError(
                f"{self.model_name!r}: {self.mlp_refusal}. Layers above 0 read the output of the first MLP, so {which} "
                "can be mapped from the weights alone. Where the model can run, preset='context' needs no MLP."
            )

    @_remembered
    @with_torch_defaults()
    def check(self) -> SelfCheck | None:
        """How what was read compares with what the model computes, by running it once; None for a checkpoint."""
        if self.model is None:
            return None
        try:
            with evaluating(self.model), weights_loaded(self.model.embed, self.model.unembed):
                return self_check(self, self.model)
        except (HeadMapsError, MemoryError):
            raise
        except Exception as error:
            raise host_error(self.model, error) from error

    def require_circuit(self, circuit: Circuit, preset: Preset) -> None:
        """Raise unless the model computes what maps of a circuit are made of.

        Every analysis of OV or QK maps calls this before it gives a number.
        """
        if circuit in self.unmapped:
            raise UnsupportedModelError(
                f"{self.model_name!r} {self.unmapped[circuit]}: {circuit.upper()} maps are not defined for it. "
                "Analyses of the running model go on (attention_groups, value_mixing, task_maps, component_map)."
            )
        needed = ["norm before attention", "stream"]
        needed += ["scores"] if circuit == "qk" else ["values", "mixing", "attention output", "logits"]
        if preset != "context":
            needed += ["embedding", "first MLP"]
        if self.check is not None:
            self.check.require(self.model_name, f"{circuit.upper()} maps", *needed)

    def require_even_heads(self, what: str) -> None:
        """Raise where layers differ in their number of heads.

        Args:
            what: What needs a table of all heads, for the message.
        """
        if self._is_uneven:
            counts = sorted({shape.n_heads for shape in self.shapes.values()})
            raise UnsupportedModelError(
                f"{self.model_name!r} has {counts[0]} to {counts[-1]} heads in a layer: {what} need as many in every "
                "layer. Use an analysis of single heads (tl-headmaps model lists them), or another model."
            )

    @property
    def _is_uneven(self) -> bool:
        return len({shape.n_heads for shape in self.shapes.values()}) > 1

    def require_plain_mixing(self, what: str, *, up_to_values: bool = False) -> None:
        """Raise unless the heads' outputs are the pattern times the values that the model shows, and nothing else.

        Args:
            what: What would be wrong, for the message.
            up_to_values: A norm or clipping of the values does no harm: they are shown with it.
        """
        if self.check is not None:
            plain = not (up_to_values and self.check["mixing"].note == MIXED_VALUES)
            self.check.require(self.model_name, what, "values", "mixing", "attention output", plain=plain)

    def require_own_values(self, what: str, instead: str = "") -> None:
        """Raise if a head's values lack a bias that TransformerLens moved elsewhere.

        Args:
            what: What would differ from the unprocessed model, for the message.
            instead: What else can be done, for the message.
        """
        if self.moved_biases:
            raise WeightBasisError(
                f"The weights of {self.model_name!r} were processed: the biases of its values were added up over heads "
                f"in the output bias, so {what} would differ from the same model's as it was trained. Load the model "
                "without processing (TransformerBridge.boot_transformers(...) without enable_compatibility_mode(), or "
                f"HookedTransformer.from_pretrained_no_processing(...)){instead}."
            )

    @_remembered
    def quantisation(self) -> str | None:
        """What the weights were before they were numbers (``"Q4_1, dequantised"``), if they were quantised.

        As the configuration states it, or as the values of the first attention layer show; weights that were processed
        show less.
        """
        layer = self.layer(self.layers_with_heads[0])
        stated = stated_quantisation(None if self.model is None else config_of(self.model))
        # As they are stored: rows are outputs, heads beside or below each other.
        written, values = layer.W_O.flatten(0, 1).T, layer.W_V.mT.flatten(0, 1)
        return stated or quantisation_of(written, self.W_E.dtype) or quantisation_of(values, self.W_E.dtype)

    @_remembered
    def fingerprint(self) -> str:
        """SHA-256 that stands for the model in every result: over names, types, shapes and bytes of all tensors here.

        They are embedding and unembedding, the final norm, the first MLP with its norms, and attention and its norms of
        every layer that has heads, so that a checkpoint need not be read as a whole. A loaded model and its checkpoint
        have the same fingerprint. Embeddings and MLP count in their stored type: a bfloat16 checkpoint and the same
        model loaded in float32 differ, as do raw and processed weights.
        """
        layers = {f"layer {layer}": self.layer_digest(layer) for layer in self.layers_with_heads}
        return joint_digest({"shared": self.shared_digest, **layers})

    @_remembered
    def parameters_digest(self) -> str:
        """SHA-256 over all parameters and buffers of the loaded model, which an analysis that runs it depends on."""
        assert self.model is not None
        return parameters_digest(self.model)

    @_remembered
    def settings_digest(self) -> str:
        """SHA-256 over the configuration of a loaded model: with another eps the same parameters are another model."""
        assert self.model is not None
        return settings_digest(settings_of(self.model))

    @_remembered
    def numbers_digest(self) -> str:
        """SHA-256 over the numbers beside the tensors: eps of norms, factors, the activation function.

        With the fingerprint it decides whether layers that were computed before belong to these weights. The first
        and the last layer with heads stand for those between them.
        """
        ends = (self.layers_with_heads[0], self.layers_with_heads[-1])
        numbers = dict(_numbers(self)) | {f"layer {n} {name}": x for n in ends for name, x in _numbers(self.layer(n))}
        return joint_digest(numbers)

    @_remembered
    def shared_digest(self) -> str:
        """SHA-256 over what all layers share: embedding, unembedding, final norm, and the first MLP with its norms."""
        return self._digest("shared", lambda: self)

    def layer_digest(self, layer: int) -> str:
        """SHA-256 over the weights of one layer."""
        return self._digest(f"layer {layer}", lambda: self.layer(layer))

    def _digest(self, name: str, read: "Callable[[], HeadWeights | LayerWeights]") -> str:
        known = None if self.origin is None else self.origin.digests.get(name)
        if known is None:
            known = joint_digest(tensor_digests(dict(_tensors(read()))))
            if self.origin is not None:
                self.origin.digests[name] = known
        return known

    @property
    def shown_name(self) -> str:
        """What results call the model: ``model_name``, of a folder the last part of it."""
        return shown_name(self.model_name)

    def provenance(
        self, *, runs_model: bool = False, data: Mapping[str, str] | None = None, **details: Any
    ) -> Provenance:
        """Provenance of a result computed from these weights.

        Args:
            runs_model: The analysis runs the model, so all its parameters are among the data, as ``parameters``.
            data: Digests of what else was read.
            **details: Other fields of :class:`Provenance`.
        """
        read = dict(data or {})
        if runs_model:
            read["parameters"] = self.parameters_digest
        made = Provenance(
            model=self.shown_name,
            fingerprint=self.fingerprint,
            architecture=self.architecture,
            basis=self.basis,
            dtype=f"{str(self.W_E.dtype).removeprefix('torch.')} stored, float32 computed",
            quantisation=self.quantisation,
            device=str(self.device),
            data=read,
            mixers={str(layer): mixer for layer, mixer in self.mixers.items()},
            heads={str(layer): shape.n_heads for layer, shape in self.shapes.items()} if self._is_uneven else {},
            notes=list(self.notes),
            seams={} if self.check is None else self.check.record(),
            **details,
        )
        self._remember()
        return made

    def _remember(self) -> None:
        """Keep what was computed of these weights for others of the same model, if it is still the same."""
        reading, values = vars(self).get("_read_as"), vars(self)
        if reading is None:
            return
        # Not what was computed while the model was edited, even if the edit was undone.
        new = {name: values[name] for name in values.get("_of_the_reading", ()) if name not in reading.known}
        if new and reading.holds(self.model):
            reading.known.update(new)


_REMEMBERED = [name for name, value in vars(HeadWeights).items() if isinstance(value, _remembered)]


@lru_cache(maxsize=2)
def _reopened(origin: CheckpointOrigin) -> HeadWeights:
    """Weights of a checkpoint in a process they were sent to, opened once."""
    # Without the tokenizer: tasks for workers contain token ids only.
    return HeadWeights(**origin.fields(with_tokenizer=False))


def _numbers(part: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """What a part holds beside tensors, by name."""
    for entry in fields(part):
        value = getattr(part, entry.name)
        if isinstance(value, float):
            # A loaded model and its checkpoint may round a factor differently.
            yield f"{prefix}{entry.name}", f"{value:.6g}"
        elif entry.name in ("centres", "activation"):
            yield f"{prefix}{entry.name}", str(value)
        elif isinstance(value, Norm | MLP | ParallelMixer):
            yield from _numbers(value, f"{entry.name}.")


def _tensors(part: "HeadWeights | LayerWeights | Norm | MLP", prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for entry in fields(part):
        value = getattr(part, entry.name)
        if isinstance(value, Tensor):
            yield f"{prefix}{entry.name}", value
        elif isinstance(value, Norm | MLP):
            yield from _tensors(value, f"{entry.name}.")
