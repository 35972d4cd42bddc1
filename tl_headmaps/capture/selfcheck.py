"""A model is not trusted, it is run: what was read of it must give what it computes, seam by seam.

A seam is a place where the model shows a value and the weights that were read predict it from the value before: each
is compared by itself, so a wrong factor is found where it is, and analyses that do not depend on it go on.

=====================  ===================================================================================
seam                   what must agree
=====================  ===================================================================================
embedding              factor and norm of the embedding with what enters layer 0 (up to learned positions)
norm before attention  ln1 of the stream with what attention reads
scores                 queries times keys, after their norms, with the logarithm of the attention pattern
values                 W_V and b_V with the values
mixing                 attention pattern times values with the heads' outputs z
attention output       z times W_O, the norm after it and the model's factor, with what attention gives back
stream                 the stream plus what attention and MLP give back with the stream after the block
first MLP              norm, MLP and norm after it with what the MLP of layer 0 gives back
logits                 final norm and unembedding with the logits
=====================  ===================================================================================
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..core.errors import UnsupportedModelError
from ..core.types import Model
from .forward import ForwardPass, forward_pass
from .parts import MLP, Beside, LayerWeights, Norm
from .seams import (
    TOLERANCE,
    Difference,
    attention_output,
    compared,
    embedding_difference,
    logit_cap,
    logit_columns,
    mixing_difference,
    mlp_difference,
    normed,
    output_bias,
    sampled_logits,
    scaled,
    score_difference,
    stream_scale,
    values,
)

SEAMS = (
    "embedding",
    "norm before attention",
    "scores",
    "values",
    "mixing",
    "attention output",
    "stream",
    "first MLP",
    "logits",
)


@runtime_checkable
class ReadModel(Protocol):
    """What was read of a model, as far as it is compared here (:class:`.weights.HeadWeights`)."""

    @property
    def n_layers(self) -> int: ...
    @property
    def layers_with_heads(self) -> list[int]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def W_E(self) -> Tensor: ...
    @property
    def W_U(self) -> Tensor: ...
    @property
    def ln_final(self) -> Norm | None: ...
    @property
    def ln2(self) -> Norm | None: ...
    @property
    def mlp(self) -> MLP | None: ...
    @property
    def ln2_post(self) -> Norm | None: ...
    @property
    def residual_scale(self) -> float: ...
    @property
    def mlp_scale(self) -> float: ...
    @property
    def beside(self) -> Beside | None: ...
    @property
    def logit_scale(self) -> float: ...
    @property
    def read_layer(self) -> Callable[[int], LayerWeights]: ...

    def embedded(self, ids: Tensor) -> Tensor:
        """Embeddings as they enter layer 0."""


@dataclass(frozen=True)
class Seam:
    """One comparison.

    Attributes:
        name: Which seam.
        fits: Whether largest difference and factor are within the tolerance of the stored type.
        difference: Largest difference over all layers, relative to the largest value; infinite if the host does not
            show the value, or shows NaN.
        layer: Where that is; None for a seam outside the layers.
        note: What stands between the values, if they fit only with it.
        factor: What values must be multiplied by in that layer, where only this tells that they do not fit.
    """

    name: str
    fits: bool
    difference: float
    layer: int | None = None
    note: str = ""
    factor: float = 1.0

    def __str__(self) -> str:
        """One line, as ``tl-headmaps model`` prints it."""
        where = "" if self.layer is None else f" in layer {self.layer}"
        if math.isinf(self.difference):
            return f"cannot be seen, or is not finite{where}"
        if self.factor != 1:
            return f"differs by a factor of {self.factor:.3f}{where}"
        if not self.fits:
            return f"differs by {self.difference:.2g} of the largest value{where}"
        return "fits" + (f" {self.note}" if self.note else "")


@dataclass(frozen=True)
class SelfCheck:
    """All seams of a model."""

    seams: tuple[Seam, ...]

    def __getitem__(self, name: str) -> Seam:
        return next(seam for seam in self.seams if seam.name == name)

    def require(self, model_name: str, what: str, *names: str, plain: bool = False) -> None:
        """Refuse an analysis that depends on a seam that does not fit.

        Args:
            model_name: The model, for the message.
            what: The analysis, for the message.
            *names: The seams it depends on.
            plain: It also needs them to fit without anything in between.
        """
        for seam in self.seams:
            if seam.name in names and (not seam.fits or (plain and seam.note)):
                how = str(seam) if not seam.fits else f"{seam}, not by itself"
                raise UnsupportedModelError(
                    f"{model_name!r} was run on a few tokens, and the seam {seam.name!r} is not what its weights say: "
                    f"it {how}. {what} could be wrong. Use an analysis that does not depend on it (tl-headmaps model "
                    "shows what fits), or another model."
                )

    def record(self) -> dict[str, str]:
        """For provenance: every seam and how it fits."""
        return {seam.name: str(seam) for seam in self.seams}


def self_check(weights: ReadModel, model: Model) -> SelfCheck:
    """Run the model on a few tokens and compare every seam; the caller isolates it from its user's hooks."""
    seen = forward_pass(model, range(weights.n_layers))
    dtype = weights.W_E.dtype
    seams: dict[str, Seam] = {}
    notes: dict[str, str] = {}
    for name, layer, difference, note in _differences(weights, model, seen):
        largest = difference.largest if math.isfinite(difference.largest) else math.inf
        notes[name] = notes.get(name) or note
        fits = difference.fits(dtype)
        by_factor = not fits and largest <= TOLERANCE.get(dtype, 1e-3)
        seam = Seam(name, fits, largest, layer, factor=difference.factor if by_factor else 1.0)
        if name not in seams or _worse(seam, seams[name]):
            seams[name] = seam
    return SelfCheck(tuple(replace(seams[name], note=notes[name]) for name in SEAMS if name in seams))


def _worse(seam: Seam, other: Seam) -> bool:
    """What does not fit before what does; an entry before a factor; then the larger one."""
    return _badness(seam) > _badness(other)


def _badness(seam: Seam) -> tuple[bool, bool, float]:
    by_factor = seam.factor != 1
    return not seam.fits, not by_factor, abs(seam.factor - 1) if by_factor else seam.difference


def _differences(
    weights: ReadModel, model: Model, seen: ForwardPass
) -> Iterator[tuple[str, int | None, Difference, str]]:
    """Seam, layer, difference and note of every comparison."""
    first = _on(weights.device, seen.layers[0])
    yield "embedding", None, embedding_difference(model, seen, weights.embedded(seen.tokens.to(weights.device))), ""
    for number in weights.layers_with_heads:
        layer, here = weights.read_layer(number), _on(weights.device, seen.layers[number])
        block = model.blocks[number]
        read = normed(layer.ln1, here.get("resid_pre"))
        yield "norm before attention", number, compared(read, here.get("attn_in")), ""
        if "attn_in" in here:
            difference, _ = score_difference(model, block, layer, here, seen.at_zero)
            yield "scores", number, difference, ""
            yield "values", number, compared(values(layer, here["attn_in"]), here.get("v")), ""
        yield "mixing", number, *mixing_difference(layer, here)
        written = None if "z" not in here else attention_output(layer, here["z"], output_bias(block))
        given = here.get("attn_out")
        if given is not None and weights.beside is not None:
            given = given * weights.beside.attention_scale
        yield "attention output", number, compared(scaled(written, weights.residual_scale), given), ""
        beside = "" if weights.beside is None else f"with what {weights.beside.name} adds beside the heads"
        added = scaled(_added(here, weights.beside), stream_scale(block))
        yield "stream", number, compared(added, here.get("resid_post")), beside
    if weights.mlp is not None:
        output = mlp_difference(weights.mlp, weights.ln2, weights.ln2_post, weights.mlp_scale, first)
        yield "first MLP", 0, output, ""
    last = _on(weights.device, seen.layers[weights.n_layers - 1])
    yield "logits", None, _logit_difference(weights, model, seen, last.get("resid_post")), ""


def _on(device: torch.device, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(device, torch.float32) for name, value in values.items()}


def _added(here: Mapping[str, Tensor], beside: Beside | None) -> Tensor | None:
    if not {"resid_pre", "attn_out"} <= set(here) or (beside is not None and "mixer_out" not in here):
        return None
    together, given = here["resid_pre"], here["attn_out"].reshape(here["resid_pre"].shape)
    if beside is not None:
        given = given * beside.attention_scale + here["mixer_out"] * beside.scale
    together = together + given
    # Gemma 4's small models add an embedding of the token in every layer.
    for name in ("mlp_out", "token_out"):
        if name in here:
            together = together + here[name].reshape(together.shape)
    return together


def _logit_difference(weights: ReadModel, model: Model, seen: ForwardPass, x: Tensor | None) -> Difference:
    n_vocab = weights.W_U.shape[0]
    if x is None or seen.logits.shape[-1] != n_vocab or x.shape[-1] != weights.W_U.shape[1]:
        return Difference(math.inf)
    columns = logit_columns(n_vocab, weights.device)
    ours, bias = sampled_logits(weights.W_U, weights.ln_final, model, x, columns)
    ours = ours * weights.logit_scale
    ours = ours if bias is None else ours + bias
    theirs = seen.logits.to(weights.device, torch.float32)[..., columns]
    cap = logit_cap(model)
    # A host may cap outside the pass that is seen here.
    capped = ours if cap is None else cap * torch.tanh(ours / cap)
    return min(compared(ours, theirs), compared(capped, theirs))
