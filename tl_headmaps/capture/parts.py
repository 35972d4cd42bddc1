"""The parts of a model that weight-only analyses compute with: norms, the first MLP, the attention of one layer.

Matrices are in memory as checkpoints store them (outputs by inputs) and a bias of zeros is dropped, whoever fills the
classes: products round by memory order, and equal weights must give equal ranks and equal fingerprints.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.types import Basis
from .tensors import check_finite, in_float64, mean_row, release_pages, row_blocks

_MLP_BLOCK = 4096
"""Neurons of the first MLP that are converted to float32 at a time."""

_CENTRED_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-3}
"""How far from zero the mean of a centred unembedding may be, relative to its size (float32: 1e-4)."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "swish": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_new": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "relu2": lambda x: torch.nn.functional.relu(x).square(),
}


@dataclass(frozen=True)
class Norm:
    """A LayerNorm or RMSNorm, as what it computes: ``(x - mean if centres) / rms * weight + bias``.

    A norm of queries or keys may have a weight for each head (Cohere, StableLM); it then normalises each by itself.
    """

    centres: bool
    weight: Float[Tensor, "*head width"]
    bias: Float[Tensor, "*head width"]
    eps: float

    def normalised(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """The norm without its weight and bias."""
        if self.centres:
            x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def scaled(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """The norm without its bias."""
        return self.normalised(x) * self.weight

    def __call__(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """The norm as the model applies it."""
        return self.scaled(x) + self.bias

    def folded_into(self, writer: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """A matrix that writes into this norm, with the norm's linear part (not its scale) applied."""
        if self.centres:
            writer = writer - writer.mean(-1, keepdim=True)
        return writer * self.weight

    def is_joint(self, n_heads: int, d_head: int) -> bool:
        """Whether a norm of queries or keys normalises all heads of a token together."""
        return self.weight.ndim == 1 and n_heads > 1 and self.weight.numel() == n_heads * d_head

    def of_head(self, head: int) -> "Norm":
        """What a norm of queries or keys does to one head, where it normalises each head by itself."""
        if self.weight.ndim == 1:
            return self
        return Norm(self.centres, self.weight[head], self.bias[head], self.eps)

    @property
    def is_unit(self) -> bool:
        """Whether weight and bias do nothing, as after folding."""
        return bool((self.weight == 1).all()) and not bool(self.bias.any())


@dataclass(frozen=True)
class MLP:
    """``act(x W_in + b_in) W_out + b_out``, or with a gate ``(act(x W_gate + b_gate) * (x W_in + b_in)) W_out``.

    What goes through the gate may have a factor, ``gate_scale`` (Falcon-H1).
    """

    W_in: Float[Tensor, "d_model d_mlp"]
    W_out: Float[Tensor, "d_mlp d_model"]
    activation: str
    W_gate: Float[Tensor, "d_model d_mlp"] | None = None
    b_in: Float[Tensor, " d_mlp"] | None = None
    b_gate: Float[Tensor, " d_mlp"] | None = None
    b_out: Float[Tensor, " d_model"] | None = None
    gate_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("W_in", "W_gate", "W_out"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, value.T.contiguous().T)
        _drop_zero_biases(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                check_finite(value, f"{name} of the first MLP")

    def __call__(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Output of the MLP in float32, without the residual."""
        act = ACTIVATIONS[self.activation]
        output: Tensor | None = None
        for start in range(0, self.W_in.shape[1], _MLP_BLOCK):
            neurons = slice(start, start + _MLP_BLOCK)
            hidden = _affine(x, self.W_in, self.b_in, neurons)
            if self.W_gate is None:
                hidden = act(hidden)
            else:
                gate = _affine(x, self.W_gate, self.b_gate, neurons)
                hidden = act(gate if self.gate_scale == 1 else gate * self.gate_scale) * hidden
            part = hidden @ self.W_out[neurons].to(torch.float32)
            output = part if output is None else output.add_(part)
            for weight in (self.W_in, self.W_gate, self.W_out):
                if weight is not None:
                    release_pages(weight)
        assert output is not None
        return output if self.b_out is None else output + self.b_out


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, columns: slice) -> Tensor:
    product = x @ weight[:, columns].to(torch.float32)
    return product if bias is None else product + bias[columns]


def _drop_zero_biases(part: "MLP | LayerWeights") -> None:
    for name, value in vars(part).items():
        if name.startswith("b_") and value is not None and not bool(value.any()):
            object.__setattr__(part, name, None)


@dataclass(frozen=True)
class ParallelMixer:
    """What mixes tokens beside the heads in every layer (Falcon-H1: Mamba), and the factors of what both give back.

    Attributes:
        name: What it is called.
        scale: Factor of what it gives back, before that is added to the stream.
        attention_scale: The same for attention; TransformerLens shows what it gives back without it.
    """

    name: str
    scale: float
    attention_scale: float


class HeadShape(NamedTuple):
    """How many heads a layer has, how many keys and values they share, and how wide they are."""

    n_heads: int
    n_kv_heads: int
    d_head: int

    def group_of(self, head: int) -> int:
        """The key/value head that query head ``head`` reads."""
        return head // (self.n_heads // self.n_kv_heads)


@dataclass(frozen=True)
class LayerWeights:
    """Attention of one layer: its heads, the norms around it, and the scale of its scores.

    Attributes:
        q_norm, k_norm: Norms of queries and keys: of each head by itself, or (OLMo 2) of all heads of a token together.
        v_norm: Norm of each head's values (Gemma 4).
        z_norm: Norm of what all heads computed, before W_O (BitNet).
        clip: Largest absolute value of queries, keys and values (OLMo), after their norms.
    """

    layer: int
    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "kv_head d_model d_head"]
    W_V: Float[Tensor, "kv_head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    score_scale: float
    b_Q: Float[Tensor, "head d_head"] | None = None
    b_K: Float[Tensor, "kv_head d_head"] | None = None
    b_V: Float[Tensor, "kv_head d_head"] | None = None
    ln1: Norm | None = None
    ln1_post: Norm | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    z_norm: Norm | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        for name in ("W_Q", "W_K", "W_V"):
            object.__setattr__(self, name, getattr(self, name).mT.contiguous().mT)
        object.__setattr__(self, "W_O", self.W_O.permute(2, 0, 1).contiguous().permute(1, 2, 0))
        _drop_zero_biases(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                check_finite(value, f"{name} of layer {self.layer}")
            elif isinstance(value, Norm):
                check_finite(value.weight, f"the weight of {name} in layer {self.layer}")

    @property
    def shape(self) -> HeadShape:
        """Number and width of the heads."""
        return HeadShape(len(self.W_Q), len(self.W_V), self.W_V.shape[-1])

    def queries(self, x: Float[Tensor, "*batch d_model"], heads: Sequence[int]) -> list[Float[Tensor, "*batch d_head"]]:
        """Queries of some heads for what the layer reads, after their norm, before any rotation."""
        return self._projected(x, self.W_Q, self.b_Q, self.q_norm, heads)

    def keys(self, x: Float[Tensor, "*batch d_model"], groups: Sequence[int]) -> list[Float[Tensor, "*batch d_head"]]:
        """Keys of some key/value heads for what the layer reads, after their norm, before any rotation."""
        return self._projected(x, self.W_K, self.b_K, self.k_norm, groups)

    def _projected(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None, heads: Sequence[int]
    ) -> list[Tensor]:
        joint = norm is not None and norm.is_joint(len(weight), weight.shape[-1])
        chosen = range(len(weight)) if joint else heads
        plain = [x @ weight[head] if bias is None else x @ weight[head] + bias[head] for head in chosen]
        if norm is None:
            return [self.clipped(projected) for projected in plain]
        if joint:
            return self.normed(plain, norm, heads)
        return [self.clipped(norm.of_head(head)(projected)) for head, projected in zip(heads, plain, strict=True)]

    def normed(self, every: Sequence[Tensor], norm: Norm, heads: Sequence[int]) -> list[Tensor]:
        """Some heads of queries or keys that are normed together."""
        together = norm(torch.cat(list(every), -1)).chunk(len(every), -1)
        return [self.clipped(together[head]) for head in heads]

    def clipped(self, x: Tensor) -> Tensor:
        """Queries, keys or values as far as the model lets them go."""
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def mixed(self, values: Float[Tensor, "*batch d_head"]) -> Float[Tensor, "*batch d_head"]:
        """What attention mixes of the values ``x W_V + b_V``: the same in most models."""
        return self.clipped(values if self.v_norm is None else self.v_norm(values))


def basis_of(norms: Iterable[Norm | None], W_U: Float[Tensor, "vocab_out d_model"], processed: bool) -> Basis:
    """Raw, folded or centred, judged by the weights; the host's claim ``processed`` only decides if all norms are 1."""
    unit = all(norm is None or norm.is_unit for norm in norms)
    square = sum(float(in_float64(rows).square().sum()) for rows in row_blocks(W_U))
    size = (square / W_U.numel()) ** 0.5
    centred = float(mean_row(W_U).abs().max()) <= _CENTRED_TOLERANCE.get(W_U.dtype, 1e-4) * size
    if not unit:
        return "centred" if centred else "raw"
    return "folded" if centred or processed else "raw"
