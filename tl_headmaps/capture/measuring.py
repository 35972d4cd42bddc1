"""What flags and names of a host say is not believed, but measured.

Norms by what they do to probe vectors; what is outside all modules (factors of embedding, stream, scores and logits) by
a short forward pass.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.types import Model
from .anatomy import as_wide_as_the_stream, beside_heads, config_of, inner_part
from .forward import ForwardPass, weights_loaded
from .parts import LayerWeights, Norm, ParallelMixer
from .selfcheck import (
    attention_output,
    compared,
    embedding_difference,
    logit_cap,
    logit_columns,
    normed,
    output_bias,
    sampled_logits,
    score_difference,
    without_positions,
)
from .tensors import check_finite, in_float64


class NormReader:
    """Measures norms of one model, which it does not keep, onto one device."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.device, self.stated_eps = device, float(model.cfg.eps)
        # A copy: an embedding that is offloaded leaves memory after its own forward pass.
        self.sample = as_wide_as_the_stream(model, model.embed.W_E[:8].detach()).clone()
        self.d_model: int = self.sample.shape[1]

    def norm(self, module: Any, width: int | None = None) -> Norm | None:
        """Measure a norm: two opposite probes separate weight from bias, a shifted one shows centring."""
        if module is None or isinstance(getattr(module, "original_component", None), torch.nn.Identity):
            return None
        with weights_loaded(module):
            return self.measured(module, width)

    def head_norm(self, attn: Any, name: str, weight: Tensor) -> Norm | None:
        """A norm of queries, keys or values: one for all heads, one for each, or one over all of them together."""
        module = getattr(attn, name, None) or inner_part(attn, name)
        if module is None and name != "v_norm":
            # Llama 4 has one without weights for both.
            module = inner_part(attn, "qk_norm")
        if module is None:
            return None
        n_heads, width = weight.shape[0], weight.shape[-1]
        shapes = [tuple(value.shape) for name, value in module.named_parameters() if name.endswith("weight")]
        sizes = {math.prod(shape) for shape in shapes}
        if n_heads > 1 and (shapes == [(n_heads, width)] or shapes == [(width,)] * n_heads):
            return self.measured_by_head(module, n_heads, width)
        return self.norm(module, n_heads * width if sizes == {n_heads * width} else width)

    def measured_by_head(self, module: Any, n_heads: int, width: int) -> Norm:
        """A norm with a weight for each head; it is given all heads of a token at once, in one of two orders."""
        stored = {
            kind: [parameter for name, parameter in module.named_parameters() if name.endswith(kind)]
            for kind in ("weight", "bias")
        }
        weights, biases = (
            torch.stack(every) if len(every) == n_heads else every[0] if every else None for every in stored.values()
        )
        assert weights is not None
        probe = _probe(width, weights.device)
        inner = getattr(module, "original_component", module)
        results = []
        for x in (probe, -probe, probe + 0.5):
            heads = x.to(weights.dtype).expand(1, n_heads, 1, width)
            # Modules that hold one norm for each head expect [batch, head, pos, width], a weight by head the reverse.
            together = any(parameter.ndim == 2 for parameter in module.parameters())
            output = inner(heads.transpose(1, 2)).transpose(1, 2) if together else inner(heads)
            results.append(output.detach()[0, :, 0].float())
        return self._from_outputs(probe, results, self.eps(module), weights, biases)

    def measured(self, module: Any, width: int | None) -> Norm:
        stored = getattr(module, "weight", getattr(module, "w", None))
        for parameter in module.parameters():
            check_finite(parameter.detach(), f"A norm ({getattr(module, 'name', None) or type(module).__name__})")
        like = stored if isinstance(stored, Tensor) else self.sample
        probe = _probe(width or self.d_model, like.device)
        results = [module(x.to(like.dtype)[None, None]).detach()[0, 0].float() for x in (probe, -probe, probe + 0.5)]
        return self._from_outputs(probe, results, self.eps(module), stored, _bias_of(module))

    def _from_outputs(self, probe: Tensor, results: list[Tensor], eps: float, stored: Any, stored_bias: Any) -> Norm:
        """The norm that gave these outputs for a probe, its opposite, and the probe shifted by a constant."""
        up, down, shifted = results
        weight = (up - down) / 2 * torch.sqrt(probe.square().mean() + eps) / probe
        bias = (up + down) / 2
        centres = bool(torch.allclose(shifted, up, rtol=2e-2, atol=1e-3 * float(up.abs().max())))
        weight = _exact(weight, stored)
        bias = torch.zeros_like(bias) if _is_rounding(bias, up) else _exact(bias, stored_bias, up)
        return Norm(centres, weight.to(self.device), bias.to(self.device), eps)

    def eps(self, module: Any) -> float:
        inner = getattr(module, "original_component", None)
        for owner in (inner, module):
            for name in ("eps", "variance_epsilon"):
                value = getattr(owner, name, None)
                if isinstance(value, int | float):
                    return float(value)
        return self.stated_eps


def _probe(width: int, device: torch.device) -> Tensor:
    """A vector without zeros whose mean is zero: 1, -1, 1, -1, ... (odd widths end in 1, 1, -2)."""
    probe = torch.ones(width, device=device)
    probe[1::2] = -1
    if width % 2:
        probe[-3:] = torch.tensor([1.0, 1.0, -2.0], device=device)
    return probe


def _bias_of(module: Any) -> Any:
    inner = getattr(module, "original_component", None)
    return getattr(inner if inner is not None else module, "bias", getattr(module, "b", None))


def _is_rounding(bias: Tensor, output: Tensor) -> bool:
    return float(bias.abs().max()) <= 1e-6 * float(output.abs().max())


def _exact(measured: Tensor, stored: Any, output: Tensor | None = None) -> Tensor:
    """The stored parameter, 1 + it, or ones, whichever was measured; without the rounding of the measurement.

    A bias is measured as a difference of outputs, whose size then decides how much it may have been rounded.
    """
    candidates = [torch.ones_like(measured)]
    if isinstance(stored, Tensor) and stored.shape == measured.shape:
        exact = stored.detach().float()
        candidates += [exact, 1.0 + exact]
    best = min(candidates, key=lambda candidate: float((candidate - measured).abs().max()))
    size = float((measured if output is None else output).abs().max())
    agrees = float((best - measured).abs().max()) <= 2e-2 * size
    return best if agrees else measured


class Measurements:
    """What one forward pass of a model says about its factors."""

    def __init__(self, model: Model, norms: NormReader, seen: ForwardPass) -> None:
        self.model, self.norms, self.seen = model, norms, seen
        self.device, self.sample, self.d_model = norms.device, norms.sample, norms.d_model
        self.dtype = norms.sample.dtype

    def embed_scale(self) -> float:
        token = torch.tensor([[0, 1]], device=self.sample.device)
        embedded = in_float64(as_wide_as_the_stream(self.model, self.model.embed(token))).flatten()
        plain = in_float64(self.sample[:2]).flatten()
        scale = float(embedded @ plain / (plain @ plain).clamp_min(1e-30))
        # A measurement close to a factor that models use is that factor, in the precision of the stored type.
        known = (1.0, float(torch.tensor(self.d_model**0.5, dtype=self.dtype, device="cpu")))
        return next((factor for factor in known if abs(scale / factor - 1) < 1e-3), scale)

    def embedding(self, W_E: Tensor) -> tuple[float, Norm | None]:
        """Factor and norm of the embedding, by what enters layer 0; what does not fit is left to the self-check."""
        plain = W_E[self.seen.tokens.to(self.device)].to(torch.float32)
        scale = self.embed_scale()
        # What the model shows comes first: its embedding module alone, then with the norm that it names (Bloom). Then
        # what no module shows: a factor between embedding and layer 0 (Granite), and a norm without weights (nanochat).
        # The first that fits counts, so nothing is invented for a model that needs nothing.
        candidates: list[tuple[float, Norm | None]] = [(scale, None)]
        norm = self.norms.norm(getattr(self.model, "embed_ln", None))
        if norm is not None:
            candidates.append((scale, norm))
        stream = self.seen.layers[0].get("resid_pre")
        if stream is not None and stream.shape == plain.shape:
            ours, theirs = (without_positions(self.model, self.seen, x.to(plain)) for x in (plain, stream))
            known = (self.d_model**0.5, *self.stated("embedding_multiplier"))
            candidates.append((_factor(ours, theirs, known), None))
        for centres in (False, True):
            ones = torch.ones(self.d_model, device=self.device)
            candidates.append((scale, Norm(centres, ones, torch.zeros_like(ones), float(self.model.cfg.eps))))
        for factor, norm in candidates:
            x = plain * factor
            if embedding_difference(self.model, self.seen, x if norm is None else norm(x)).fits(self.dtype):
                return factor, norm
        return candidates[0]

    def residual_scale(self, layer: LayerWeights) -> float:
        """The factor of what attention adds to the stream."""
        here = self.seen.layers[layer.layer]
        if not {"z", "attn_out"} <= set(here):
            return 1.0
        z, theirs = (here[name].to(self.device, torch.float32) for name in ("z", "attn_out"))
        ours = attention_output(layer, z, output_bias(self.model.blocks[layer.layer]))
        return self.fitting_factor(ours, theirs, "residual_multiplier")

    def read_scale(self, layer: LayerWeights) -> float:
        """The factor of what attention reads, after the norm before it."""
        here = self.here(layer.layer)
        if not {"resid_pre", "attn_in"} <= set(here):
            return 1.0
        ours = here["resid_pre"] if layer.ln1 is None else layer.ln1(here["resid_pre"])
        return self.fitting_factor(ours, here["attn_in"], "attention_in_multiplier")

    def post_norm(self, layer: LayerWeights) -> bool:
        """Whether attention reads the stream as it is, although a norm is called the one before attention."""
        here = self.here(layer.layer)
        stream, read = here.get("resid_pre"), here.get("attn_in")
        # A norm of what was normed before (nanochat) changes nothing, and stands before attention all the same.
        normed_once = compared(normed(layer.ln1, stream), read)
        return layer.ln1 is not None and not normed_once.fits(self.dtype) and compared(stream, read).fits(self.dtype)

    def beside(self, layer: LayerWeights) -> ParallelMixer | None:
        """What mixes tokens beside the heads, with the two factors that make up the stream after the block."""
        here = self.here(layer.layer)
        name = beside_heads(self.model.blocks[layer.layer])
        if name is None or not {"resid_pre", "resid_post", "attn_out", "mixer_out"} <= set(here):
            return None
        added = here["resid_post"] - here["resid_pre"]
        if "mlp_out" in here:
            added = added - here["mlp_out"].reshape(added.shape)
        given = [in_float64(here[part]).flatten() for part in ("attn_out", "mixer_out")]
        fitted = torch.linalg.lstsq(torch.stack(given, 1), in_float64(added).flatten()[:, None]).solution[:, 0].tolist()
        rounding = 1e-3 if self.dtype.itemsize > 2 else 3e-2
        attention, mixer = (
            _known(factor, (1.0, *self.stated(name)), rounding)
            for factor, name in zip(fitted, ("attention_out_multiplier", "ssm_out_multiplier"), strict=True)
        )
        return ParallelMixer(name, mixer, attention)

    def logit_scale(self, W_U: Tensor, ln_final: Norm | None) -> float:
        """The factor of the logits after the unembedding."""
        x = self.seen.layers[len(self.model.blocks) - 1].get("resid_post")
        if x is None or self.seen.logits.shape[-1] != W_U.shape[0]:
            return 1.0
        columns = logit_columns(W_U.shape[0], self.device)
        ours, bias = sampled_logits(W_U, ln_final, self.model, x.to(self.device, torch.float32), columns)
        theirs = self.seen.logits.to(self.device, torch.float32)[..., columns]
        cap = logit_cap(self.model)
        if cap is not None and float(theirs.abs().max()) < cap:
            uncapped = cap * torch.atanh(theirs / cap)
            if not compared(ours, theirs).fits(self.dtype):
                theirs = uncapped
        theirs = theirs if bias is None else theirs - bias
        return self.fitting_factor(ours, theirs, "logit_scale", "logits_scaling")

    def here(self, layer: int) -> dict[str, Tensor]:
        """What a layer computed, as float32 where weights are."""
        return {name: value.to(self.device, torch.float32) for name, value in self.seen.layers[layer].items()}

    def fitting_factor(self, ours: Tensor, theirs: Tensor, name: str, divisor: str = "") -> float:
        """1, or another factor if only that makes two tensors equal; a configured one in its exact value."""
        if compared(ours, theirs).fits(self.dtype):
            return 1.0
        known = (*self.stated(name), *(1 / stated for stated in self.stated(divisor)))
        factor = _factor(ours, theirs, known, 1e-3 if self.dtype.itemsize > 2 else 1e-2)
        return factor if compared(ours * factor, theirs).fits(self.dtype) else 1.0

    def stated(self, name: str) -> tuple[float, ...]:
        """A factor that the model's configuration states, if it does."""
        value = getattr(config_of(self.model), name, None)
        return (float(value),) if isinstance(value, int | float) and value else ()

    def score_factor(self, layer: LayerWeights) -> float:
        """What scores must be multiplied by to be the model's, if nothing stated says so."""
        here = self.here(layer.layer)
        block = self.model.blocks[layer.layer]
        if "attn_in" not in here:
            return 1.0
        difference, factor = score_difference(self.model, block, layer, here, self.seen.at_zero)
        if difference.fits(self.dtype) or factor <= 0:
            return 1.0
        # GPT-Neo does not divide by sqrt(d_head); Falcon-H1 multiplies its keys.
        factor = _known(factor, (layer.W_Q.shape[-1] ** 0.5, *self.stated("key_multiplier")), 1e-2)
        scaled = replace(layer, score_scale=layer.score_scale * factor)
        difference, _ = score_difference(self.model, block, scaled, here, self.seen.at_zero)
        return factor if difference.fits(self.dtype) else 1.0


def _factor(ours: Tensor, theirs: Tensor, known: tuple[float, ...], rounding: float = 1e-3) -> float:
    """The factor that makes one tensor most like another; a known one in its exact value."""
    one, other = in_float64(ours).flatten(), in_float64(theirs).flatten()
    return _known(float(one @ other / (one @ one).clamp_min(1e-30)), known, rounding)


def _known(factor: float, known: tuple[float, ...], rounding: float) -> float:
    return next((exact for exact in known if abs(factor / exact - 1) < rounding), factor)
