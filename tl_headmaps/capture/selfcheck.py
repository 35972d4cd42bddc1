"""A model is not trusted, it is run: what was read of it must give what it computes, seam by seam.

A seam is a place where the model shows a value and the weights that were read predict it from the value before: each
is compared by itself, so a wrong factor is found where it is, and analyses that do not depend on it go on.

Two things are compared: the largest difference of an entry, which finds what is wrong in one place, and the factor
between what was predicted and what was seen. In half precision an entry may be off by a hundredth, but the median
over all entries is good to a thousandth, so a factor of 1.01 is found there, too.

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import UnsupportedModelError
from ..core.types import Model
from .anatomy import config_of, inner_part
from .forward import ForwardPass, forward_pass, weights_loaded
from .parts import MLP, LayerWeights, Norm, ParallelMixer
from .tensors import rows_of

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest accepted difference of an entry from the model's own computation, relative to its largest value."""

FACTOR_TOLERANCE = 5e-3
"""How far from 1 the factor between what was predicted and what was seen may be, beyond three standard errors."""

_N_COLUMNS = 512
"""Tokens whose logits are compared, spread over the vocabulary."""

_LEAST_SHARE = 1e-30
"""Attention below this has no logarithm worth comparing."""

_LEAST_SPREAD = 1e-2
"""Scores that differ by less than this are compared as if they differed by as much."""

GATED = "up to a gate that depends on the query"
MIXED_VALUES = "after a norm or clipping of the values"


class Difference(NamedTuple):
    """How far values that were predicted are from those that the model computes.

    Attributes:
        largest: Largest difference of an entry, relative to the largest value; infinite if there is nothing to compare.
        factor: What predicted values must be multiplied by, beyond what rounding explains, so that half of the entries
            are too large and half too small.
    """

    largest: float
    factor: float = 1.0

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether it is rounding of the type that the model computes in."""
        return self.largest <= TOLERANCE.get(dtype, 1e-3) and abs(self.factor - 1) <= FACTOR_TOLERANCE


def compared(ours: Tensor | None, theirs: Tensor | None) -> Difference:
    """Largest difference relative to the largest value, and the factor; infinite where there is nothing to compare."""
    if ours is None or theirs is None or ours.numel() != theirs.numel():
        return Difference(math.inf)
    ours = ours.reshape(theirs.shape)
    return Difference(
        float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12)), _median_factor(ours, theirs)
    )


def _median_factor(ours: Tensor, theirs: Tensor) -> float:
    """Median of the ratios of the larger half of all entries, drawn towards 1 by three standard errors.

    Not least squares: a stream may consist of a few entries a thousand times larger than all others, and the rounding
    of these alone would decide.
    """
    # What is not finite is found by the largest difference.
    chosen = (ours != 0) & ours.isfinite() & theirs.isfinite()
    sizes = ours[chosen].abs()
    if sizes.numel() == 0:
        return 1.0
    large = sizes >= sizes.median()
    ratios = theirs[chosen][large] / ours[chosen][large]
    median = ratios.median()
    # 1.4826 times the median deviation estimates the standard deviation of normal errors, and a median's standard
    # error is 1.25 times that of a mean.
    error = 1.25 * 1.4826 * float((ratios - median).abs().median()) / ratios.numel() ** 0.5
    distance = float(median) - 1
    return 1.0 + math.copysign(max(abs(distance) - 3 * error, 0.0), distance)


def scaled(x: Tensor | None, factor: float) -> Tensor | None:
    """A value times a factor, where there is one."""
    return x if x is None else x * factor


def normed(norm: Norm | None, x: Tensor | None) -> Tensor | None:
    """A value after a norm, where there is one."""
    return x if x is None or norm is None else norm(x)


def learns_positions(model: Model) -> bool:
    """Whether a model adds a vector for its position to each token."""
    return hasattr(model, "pos_embed") or getattr(model.cfg, "positional_embedding_type", "") == "standard"


def embedding_difference(model: Model, seen: ForwardPass, ours: Tensor) -> Difference:
    """How far embeddings are from what enters layer 0, apart from what positions add."""
    theirs = seen.layers[0].get("resid_pre")
    if theirs is None or theirs.shape != ours.shape:
        return Difference(math.inf)
    theirs = theirs.to(ours)
    return compared(without_positions(model, seen, ours), without_positions(model, seen, theirs))


def without_positions(model: Model, seen: ForwardPass, x: Tensor) -> Tensor:
    """Vectors without what is the same for all tokens of a position, if the model adds something there."""
    if not learns_positions(model):
        return x
    return x - (x.mean((0, 1), keepdim=True) if seen.at_zero else x.mean(0, keepdim=True))


def values(layer: LayerWeights, x: Tensor) -> Tensor:
    """Values [prompt, pos, kv_head, d_head] of what attention reads."""
    projected = torch.einsum("bpd,gdh->bpgh", x, layer.W_V)
    return projected if layer.b_V is None else projected + layer.b_V


def score_difference(
    model: Model, block: Any, layer: LayerWeights, here: Mapping[str, Tensor], at_zero: bool
) -> tuple[Difference, float]:
    """How far scores are from those of the model, and by which factor they would fit best.

    Attention is the exponential of scores up to a factor in each row (and up to sinks). Where positions cannot all be
    0, only the first token's score with itself is free of them: it is compared with the host's score.
    """
    x, per_group = here["attn_in"], len(layer.W_Q) // len(layer.W_K)
    queries = torch.stack(layer.queries(x, range(len(layer.W_Q))), 1)
    keys = torch.stack(layer.keys(x, range(len(layer.W_K))), 1).repeat_interleave(per_group, 1)
    scores = queries @ keys.mT * layer.score_scale
    # A score is a sum of products that may cancel, and in half precision each of them is rounded: differences are
    # measured against the largest score that such queries and keys could have, not against those they happen to have.
    bound = float((queries.norm(dim=-1).amax() * keys.norm(dim=-1).amax()) * layer.score_scale)
    cap = _score_cap(model, block)
    rounded = model.embed.W_E.dtype in (torch.float16, torch.bfloat16)
    positions = str(getattr(model.cfg, "positional_embedding_type", ""))
    if at_zero or positions == "standard" or positions == "alibi":
        if "pattern" not in here:
            return Difference(math.inf), 1.0
        pattern = here["pattern"]
        seen = pattern > _LEAST_SHARE
        theirs = pattern.clamp_min(_LEAST_SHARE).log()
        ours = scores if cap is None else cap * torch.tanh(scores / cap)
        ours, theirs = _preferences(ours, seen), _preferences(theirs, seen)
        if positions == "alibi":
            # What the distance adds is the same for all tokens.
            ours, theirs = ours - ours.mean(0), theirs - theirs.mean(0)
    else:
        if "scores" not in here:
            return Difference(math.inf), 1.0
        ours, theirs = scores[..., 0, 0], here["scores"][..., 0, 0]
        ours = ours if cap is None else cap * torch.tanh(ours / cap)
    size = bound if rounded else float(theirs.abs().max())
    factor = float((ours * theirs).sum() / ours.square().sum().clamp_min(1e-20))
    # Attention that is all but even says little about scores: rounding must not count as a difference.
    largest = float((ours - theirs).abs().max()) / max(size, _LEAST_SPREAD)
    return Difference(
        largest, _median_factor(ours, theirs) if float(theirs.abs().max()) > _LEAST_SPREAD else 1.0
    ), factor


def _preferences(scores: Tensor, seen: Tensor) -> Tensor:
    """Scores without the mean of each row over the keys it sees; 0 elsewhere."""
    mean = (scores * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)
    return (scores - mean) * seen


def _score_cap(model: Model, block: Any) -> float | None:
    stated = inner_part(block.attn, "attn_logit_softcapping")
    for value in (stated, getattr(model.cfg, "attn_scores_soft_cap", None)):
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return None


def mixing_difference(layer: LayerWeights, here: Mapping[str, Tensor]) -> tuple[Difference, str]:
    """How far pattern times values is from z, and what stands between them."""
    if not {"pattern", "v", "z"} <= set(here):
        return Difference(math.inf), ""
    pattern, z = here["pattern"], here["z"]
    shape = (*z.shape[:2], len(layer.W_Q), layer.W_O.shape[1])
    if z.numel() != math.prod(shape):
        return Difference(math.inf), ""
    v = here["v"].reshape(*z.shape[:2], len(layer.W_V), -1)
    plain, believed = (
        torch.einsum("bhqk,bkhd->bqhd", pattern, values.repeat_interleave(len(layer.W_Q) // len(layer.W_V), 2))
        for values in (v, layer.mixed(v))
    )
    candidates = [(compared(plain, z), "")]
    if layer.v_norm is not None or layer.clip is not None:
        candidates.append((compared(believed, z), MIXED_VALUES))
    if layer.z_norm is not None:
        candidates.append((compared(layer.z_norm(believed.flatten(2)), z), "up to the scale of a norm before W_O"))
    gate = here.get("gate", here.get("q_gate"))
    if gate is not None:
        gate = gate.reshape(*shape[:2], len(layer.W_Q), -1)
        for opened in (torch.sigmoid(gate), torch.nn.functional.softplus(gate)):
            candidates.append((compared(believed * opened, z), GATED))
    return min(candidates, key=lambda candidate: candidate[0].largest)


def output_bias(block: Any) -> Tensor | None:
    """The bias of a layer's output projection."""
    with weights_loaded(block.attn):
        bias = getattr(block.attn, "b_O", None)
        return bias.detach().float() if isinstance(bias, Tensor) else None


def stream_scale(block: Any) -> float:
    """A factor of the whole stream after a block (Gemma 4), which the next norm takes off again."""
    factor = inner_part(block, "layer_scalar")
    # A negative one would turn what heads say into its opposite.
    return float(factor) if isinstance(factor, Tensor) and factor.numel() == 1 and float(factor) > 0 else 1.0


def attention_output(layer: LayerWeights, z: Tensor, bias: Tensor | None) -> Tensor:
    """What attention gives back for the heads' outputs, after the norm that follows it."""
    written = z.reshape(*z.shape[:2], -1) @ layer.W_O.flatten(0, 1)
    if bias is not None:
        written = written + bias.to(written)
    return written if layer.ln1_post is None else layer.ln1_post(written)


def mlp_difference(
    mlp: MLP, ln2: Norm | None, ln2_post: Norm | None, factor: float, here: Mapping[str, Tensor]
) -> Difference:
    """How far the first MLP is from what the model's gives back; parallel blocks read the stream before attention."""
    best = Difference(math.inf)
    for name in ("resid_mid", "resid_pre"):
        if name in here and "mlp_out" in here:
            x = here[name].reshape(here["resid_pre"].shape)
            output = normed(ln2_post, mlp(x if ln2 is None else ln2(x)))
            best = min(best, compared(scaled(output, factor), here["mlp_out"]))
    return best


def sampled_logits(
    W_U: Tensor, ln_final: Norm | None, model: Model, x: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Final norm and unembedding of some tokens' columns, and the bias of these columns."""
    normed = x if ln_final is None else ln_final(x)
    with weights_loaded(model.unembed):
        bias = getattr(model.unembed, "b_U", None)
        chosen = bias.detach().to(x)[columns] if isinstance(bias, Tensor) else None
    return normed @ rows_of(W_U, columns).to(torch.float32).T, chosen


def logit_cap(model: Model) -> float | None:
    """The model's own soft cap of logits."""
    stated = getattr(config_of(model), "final_logit_softcapping", None)
    for value in (getattr(model.cfg, "output_logits_soft_cap", None), stated):
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return None


def logit_columns(n_vocab: int, device: torch.device) -> Tensor:
    """Tokens spread over the vocabulary."""
    return torch.arange(0, n_vocab, max(1, n_vocab // _N_COLUMNS), device=device)


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


def self_check(weights: Any, model: Model) -> SelfCheck:
    """Run a model on a few tokens and compare every seam; the caller isolates it from its user's hooks.

    Args:
        weights: What was read of it, as :class:`.weights.HeadWeights`.
        model: The model.
    """
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
        if name not in seams or _badness(seam) > _badness(seams[name]):
            seams[name] = seam
    return SelfCheck(tuple(replace(seams[name], note=notes[name]) for name in SEAMS if name in seams))


def _badness(seam: Seam) -> tuple[bool, bool, float]:
    """What does not fit is worse than what does; an entry worse than a factor; then the larger one."""
    by_factor = seam.factor != 1
    return not seam.fits, not by_factor, abs(seam.factor - 1) if by_factor else seam.difference


def _differences(weights: Any, model: Model, seen: ForwardPass) -> Iterator[tuple[str, int | None, Difference, str]]:
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


def _added(here: Mapping[str, Tensor], beside: ParallelMixer | None) -> Tensor | None:
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


def _logit_difference(weights: Any, model: Model, seen: ForwardPass, x: Tensor | None) -> Difference:
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
