"""Adapters for TransformerLens: heads that it runs without showing them, or takes apart in the wrong order.

An adapter tells TransformerLens where the parts of an architecture are. These extend the host's own and are registered
while :func:`.loading.load_model` opens a model, and only then: importing this package changes nothing of the host.

==================  ======================================================================================
architecture        what its adapter adds
==================  ======================================================================================
Nemotron-H          attention as heads (the host has one opaque mixer in every layer)
RecurrentGemma      attention as heads, norms and MLP (the host has opaque layers)
Falcon, new kind    queries, keys and values group by group, as they are stored (the host takes them for three blocks);
                    the norm of Falcon 2
==================  ======================================================================================
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch

_REGISTERING = RLock()


@contextmanager
def own_adapters() -> Iterator[None]:
    """Let TransformerLens open models with the adapters of this file, for the length of this block."""
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory as Factory

    with _REGISTERING:
        known = {name: Factory._adapters[name] for name in EXTENDED if name in Factory._adapters}
        try:
            for name, theirs in known.items():
                Factory.register_adapter(name, EXTENDED[name](theirs))
            yield
        finally:
            for name, theirs in known.items():
                Factory.register_adapter(name, theirs)


def _nemotron_h(theirs: type) -> type:
    from transformer_lens.model_bridge.generalized_components import SSMBlockBridge

    class Block(SSMBlockBridge):  # type: ignore[misc]
        def set_original_component(self, original_component: Any) -> None:
            super().set_original_component(original_component)
            if not hasattr(original_component.mixer, "q_proj"):
                return
            del self.submodules["mixer"]
            self.submodules["attn"] = _attention("mixer", original_component.mixer, self.config)
            self.hook_aliases = {
                "hook_resid_pre": "hook_in",
                "hook_resid_post": "hook_out",
                "hook_attn_out": "attn.hook_out",
            }

    class Adapter(theirs):  # type: ignore[misc]
        def __init__(self, cfg: Any) -> None:
            super().__init__(cfg)
            blocks = self.component_mapping["blocks"]
            self.component_mapping["blocks"] = Block(blocks.name, self.cfg, blocks.submodules)

    return Adapter


def _recurrent_gemma(theirs: type) -> type:
    from transformer_lens.model_bridge.generalized_components import BlockBridge, RMSNormalizationBridge
    from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

    class Block(BlockBridge):  # type: ignore[misc]
        def set_original_component(self, original_component: Any) -> None:
            super().set_original_component(original_component)
            mixing = original_component.temporal_block
            if hasattr(mixing, "q_proj"):
                self.submodules["attn"] = _attention("temporal_block", mixing, self.config)
                return
            self.submodules["recurrent"] = GeneralizedComponent("temporal_block")
            self.hook_aliases = {
                name: target for name, target in BlockBridge.hook_aliases.items() if not target.startswith("attn.")
            }

    class Adapter(theirs):  # type: ignore[misc]
        def __init__(self, cfg: Any) -> None:
            super().__init__(cfg)
            parts = {
                "ln1": RMSNormalizationBridge("temporal_pre_norm", config=self.cfg),
                "ln2": RMSNormalizationBridge("channel_pre_norm", config=self.cfg),
                "mlp": self._gated_mlp(name="mlp_block"),
            }
            self.component_mapping["blocks"] = Block("model.layers", self.cfg, parts)

    return Adapter


def _attention(name: str, module: Any, config: Any) -> Any:
    """Attention that runs as it is in transformers, with hooks at its projections."""
    from transformer_lens.model_bridge.generalized_components import AttentionBridge, LinearBridge

    parts = {part: LinearBridge(f"{part}_proj") for part in "qkvo"}
    return AttentionBridge(name, config, parts, maintain_native_attention=True)


def _falcon(theirs: type) -> type:
    class Adapter(theirs):  # type: ignore[misc]
        splits_by_group = True

        def __init__(self, cfg: Any) -> None:
            super().__init__(cfg)
            if self._is_new_arch and getattr(cfg, "num_ln_in_parallel_attn", None) == 1:
                # Falcon 2 has one norm for attention and MLP, under the name of the older models'.
                self.component_mapping["blocks"].submodules["ln1"].name = "input_layernorm"

        def _split_falcon_qkv(self, original_attention_component: Any) -> Any:
            if not self._is_new_arch:
                return super()._split_falcon_qkv(original_attention_component)
            fused, n_groups = original_attention_component.query_key_value, original_attention_component.num_kv_heads
            weight, bias = fused.weight.detach(), None if fused.bias is None else fused.bias.detach()
            d_head = original_attention_component.head_dim
            # Each group has the queries of its heads, then its key, then its value.
            rows = torch.arange(len(weight), device=weight.device).view(n_groups, -1, d_head)
            parts = (rows[:, :-2], rows[:, -2], rows[:, -1])
            return tuple(_linear(weight, bias, part.flatten()) for part in parts)

    return Adapter


def _linear(weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(1, 1, bias=bias is not None, device="meta")
    linear.in_features, linear.out_features = weight.shape[1], len(rows)
    linear.weight = torch.nn.Parameter(weight[rows])
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias[rows])
    return linear


EXTENDED: dict[str, Callable[[type], type]] = {
    "NemotronHForCausalLM": _nemotron_h,
    "RecurrentGemmaForCausalLM": _recurrent_gemma,
    "FalconForCausalLM": _falcon,
}
"""By the name of an architecture, what makes an adapter from the host's own."""
