"""Norms, measured by what they do to probe vectors: flags and names of a host are not believed."""

import math
from typing import Any

import torch
from torch import Tensor

from ..core.types import Model
from .anatomy import as_wide_as_the_stream, inner_part
from .forward import weights_loaded
from .parts import Norm
from .tensors import check_finite


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
