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
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..core.errors import UnsupportedModelError
from ..core.types import Model
from .forward import ForwardPass, forward_pass, weights_loaded
from .mapped import rows_of
from .parts import MLP, LayerWeights, Norm

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest accepted difference from the model's own computation, relative to its largest value."""

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

_N_COLUMNS = 512
"""Tokens whose logits are compared, spread over the vocabulary."""

_LEAST_SHARE = 1e-30
"""Attention below this has no logarithm worth comparing."""

_LEAST_SPREAD = 1e-2
"""Scores that differ by less than this are compared as if they differed by as much."""

GATED = "up to a gate that depends on the query"


@runtime_checkable
class ReadModel(Protocol):
    """What was read of a model, as far as it is compared here (:class:`.weights.HeadWeights`)."""

    @property
    def n_layers(self) -> int: ...
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
        fits: Whether the largest difference is within the tolerance of the stored type.
        difference: Largest difference over all layers, relative to the largest value; infinite if the host does not
            show the value, or shows NaN.
        layer: Where that is; None for a seam outside the layers.
        note: What stands between the values, if they fit only with it.
    """

    name: str
    fits: bool
    difference: float
    layer: int | None = None
    note: str = ""

    def __str__(self) -> str:
        """One line, as ``tl-headmaps model`` prints it."""
        where = "" if self.layer is None else f" in layer {self.layer}"
        if math.isinf(self.difference):
            return f"cannot be seen, or is not finite{where}"
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
    found: dict[str, Seam] = {}
    notes: dict[str, str] = {}
    for name, layer, difference, note in _differences(weights, model, seen):
        difference = difference if math.isfinite(difference) else math.inf
        notes.setdefault(name, note)
        notes[name] = notes[name] or note
        if name not in found or difference > found[name].difference:
            fits = difference <= TOLERANCE.get(weights.W_E.dtype, 1e-3)
            found[name] = Seam(name, fits, difference, layer)
    return SelfCheck(tuple(replace(found[name], note=notes[name]) for name in SEAMS if name in found))


def _differences(weights: ReadModel, model: Model, seen: ForwardPass) -> Iterator[tuple[str, int | None, float, str]]:
    """Seam, layer, difference and note of every comparison."""
    first = _on(weights.device, seen.layers[0])
    yield "embedding", None, embedding_difference(model, seen, weights.embedded(seen.tokens.to(weights.device))), ""
    for number in range(weights.n_layers):
        layer, here = weights.read_layer(number), _on(weights.device, seen.layers[number])
        block = model.blocks[number]
        yield (
            "norm before attention",
            number,
            _difference(_normed(layer.ln1, here.get("resid_pre")), here.get("attn_in")),
            "",
        )
        if "attn_in" in here:
            difference, _ = score_difference(model, block, layer, here, seen.at_zero)
            yield "scores", number, difference, ""
            yield "values", number, _difference(values(layer, here["attn_in"]), here.get("v")), ""
        yield "mixing", number, *mixing_difference(layer, here)
        written = None if "z" not in here else attention_output(layer, here["z"], output_bias(block))
        yield (
            "attention output",
            number,
            _difference(_scaled(written, weights.residual_scale), here.get("attn_out")),
            "",
        )
        yield "stream", number, _difference(_added(here), here.get("resid_post")), ""
    if weights.mlp is not None:
        yield (
            "first MLP",
            0,
            mlp_difference(weights.mlp, weights.ln2, weights.ln2_post, weights.residual_scale, first),
            "",
        )
    last = _on(weights.device, seen.layers[weights.n_layers - 1])
    yield "logits", None, _logit_difference(weights, model, seen, last.get("resid_post")), ""


def _on(device: torch.device, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(device, torch.float32) for name, value in values.items()}


def _difference(ours: Tensor | None, theirs: Tensor | None) -> float:
    """Largest difference relative to the largest value; infinite where there is nothing to compare."""
    if ours is None or theirs is None or ours.numel() != theirs.numel():
        return math.inf
    ours = ours.reshape(theirs.shape)
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))


def _scaled(x: Tensor | None, factor: float) -> Tensor | None:
    return x if x is None else x * factor


def _normed(norm: Norm | None, x: Tensor | None) -> Tensor | None:
    return x if x is None or norm is None else norm(x)


def learns_positions(model: Model) -> bool:
    """Whether a model adds a vector for its position to each token."""
    return hasattr(model, "pos_embed") or getattr(model.cfg, "positional_embedding_type", "") == "standard"


def embedding_difference(model: Model, seen: ForwardPass, ours: Tensor) -> float:
    """How far embeddings are from what enters layer 0, apart from what positions add."""
    theirs = seen.layers[0].get("resid_pre")
    if theirs is None or theirs.shape != ours.shape:
        return math.inf
    theirs = theirs.to(ours)
    return _difference(without_positions(model, seen, ours), without_positions(model, seen, theirs))


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
) -> tuple[float, float]:
    """How far scores are from those of the model, and by which factor they would fit best.

    Attention is the exponential of scores up to a factor in each row (and up to sinks). Where positions cannot all be
    0, only the first token's score with itself is free of them: it is compared with the host's score.
    """
    x, per_group = here["attn_in"], len(layer.W_Q) // len(layer.W_K)
    queries = torch.stack(layer.queries(x, range(len(layer.W_Q))), 1)
    keys = torch.stack(layer.keys(x, range(len(layer.W_K))), 1).repeat_interleave(per_group, 1)
    scores = queries @ keys.mT * layer.score_scale
    bound = float((queries.norm(dim=-1).amax() * keys.norm(dim=-1).amax()) * layer.score_scale)
    cap = _score_cap(model, block)
    rounded = model.embed.W_E.dtype in (torch.float16, torch.bfloat16)
    positions = str(getattr(model.cfg, "positional_embedding_type", ""))
    if at_zero or positions == "standard" or positions == "alibi":
        if "pattern" not in here:
            return math.inf, 1.0
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
            return math.inf, 1.0
        ours, theirs = scores[..., 0, 0], here["scores"][..., 0, 0]
        ours = ours if cap is None else cap * torch.tanh(ours / cap)
    size = bound if rounded else float(theirs.abs().max())
    factor = float((ours * theirs).sum() / ours.square().sum().clamp_min(1e-20))
    # Attention that is all but even says little about scores: rounding must not count as a difference.
    return float((ours - theirs).abs().max()) / max(size, _LEAST_SPREAD), factor


def _preferences(scores: Tensor, seen: Tensor) -> Tensor:
    """Scores without the mean of each row over the keys it sees; 0 elsewhere."""
    mean = (scores * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)
    return (scores - mean) * seen


def _score_cap(model: Model, block: Any) -> float | None:
    inner = getattr(block.attn, "original_component", None)
    for value in (getattr(inner, "attn_logit_softcapping", None), getattr(model.cfg, "attn_scores_soft_cap", None)):
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return None


def mixing_difference(layer: LayerWeights, here: Mapping[str, Tensor]) -> tuple[float, str]:
    """How far pattern times values is from z, and what stands between them."""
    if not {"pattern", "v", "z"} <= set(here):
        return math.inf, ""
    pattern, z = here["pattern"], here["z"]
    shape = (*z.shape[:2], len(layer.W_Q), layer.W_O.shape[1])
    if z.numel() != math.prod(shape):
        return math.inf, ""
    v = here["v"].reshape(*z.shape[:2], len(layer.W_V), -1)

    def mixed(values: Tensor) -> Tensor:
        per_group = len(layer.W_Q) // len(layer.W_V)
        return torch.einsum("bhqk,bkhd->bqhd", pattern, values.repeat_interleave(per_group, 2))

    plain = _difference(mixed(v), z)
    candidates = [(plain, "")]
    believed = mixed(layer.mixed(v))
    if layer.v_norm is not None or layer.clip is not None:
        candidates.append((_difference(believed, z), "after a norm or clipping of the values"))
    if layer.z_norm is not None:
        candidates.append((_difference(layer.z_norm(believed.flatten(2)), z), "up to the scale of a norm before W_O"))
    gate = here.get("gate")
    if gate is not None:
        gate = gate.reshape(*shape[:2], len(layer.W_Q), -1)
        for opened in (torch.sigmoid(gate), torch.nn.functional.softplus(gate)):
            candidates.append((_difference(believed * opened, z), GATED))
    return min(candidates, key=lambda candidate: candidate[0])


def output_bias(block: Any) -> Tensor | None:
    """The bias of a layer's output projection."""
    with weights_loaded(block.attn):
        bias = getattr(block.attn, "b_O", None)
        return bias.detach().float() if isinstance(bias, Tensor) else None


def attention_output(layer: LayerWeights, z: Tensor, bias: Tensor | None) -> Tensor:
    """What attention gives back for the heads' outputs, after the norm that follows it."""
    written = z.reshape(*z.shape[:2], -1) @ layer.W_O.flatten(0, 1)
    if bias is not None:
        written = written + bias.to(written)
    return written if layer.ln1_post is None else layer.ln1_post(written)


def _added(here: Mapping[str, Tensor]) -> Tensor | None:
    if not {"resid_pre", "attn_out"} <= set(here):
        return None
    together = here["resid_pre"] + here["attn_out"].reshape(here["resid_pre"].shape)
    return together + here["mlp_out"].reshape(together.shape) if "mlp_out" in here else together


def mlp_difference(
    mlp: MLP, ln2: Norm | None, ln2_post: Norm | None, factor: float, here: Mapping[str, Tensor]
) -> float:
    """How far the first MLP is from what the model's gives back; parallel blocks read the stream before attention."""
    best = math.inf
    for name in ("resid_mid", "resid_pre"):
        if name in here and "mlp_out" in here:
            x = here[name].reshape(here["resid_pre"].shape)
            output = _normed(ln2_post, mlp(x if ln2 is None else ln2(x)))
            best = min(best, _difference(_scaled(output, factor), here["mlp_out"]))
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
    inner = getattr(getattr(model, "original_model", None), "config", None)
    for value in (getattr(model.cfg, "output_logits_soft_cap", None), getattr(inner, "final_logit_softcapping", None)):
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return None


def logit_columns(n_vocab: int, device: torch.device) -> Tensor:
    """Tokens spread over the vocabulary."""
    return torch.arange(0, n_vocab, max(1, n_vocab // _N_COLUMNS), device=device)


def _logit_difference(weights: ReadModel, model: Model, seen: ForwardPass, x: Tensor | None) -> float:
    n_vocab = weights.W_U.shape[0]
    if x is None or seen.logits.shape[-1] != n_vocab or x.shape[-1] != weights.W_U.shape[1]:
        return math.inf
    columns = logit_columns(n_vocab, weights.device)
    ours, bias = sampled_logits(weights.W_U, weights.ln_final, model, x, columns)
    ours = ours * weights.logit_scale
    ours = ours if bias is None else ours + bias
    theirs = seen.logits.to(weights.device, torch.float32)[..., columns]
    cap = logit_cap(model)
    # A host may cap outside the pass that is seen here.
    capped = ours if cap is None else cap * torch.tanh(ours / cap)
    return min(_difference(ours, theirs), _difference(capped, theirs))
