"""Mean z of every head over a span of each prompt, captured once and saved.

z is a head's mixed values, before W_O; the span is usually the answer's tokens. Prompts are run in chunks of similar
length. A finished chunk is a file, named after the model's parameters and settings, the token ids and the spans: an
interrupted run resumes with the next chunk, a second run reads them all, and another model, text or position has other
names. A file carries its checksum: a damaged one is reported and made again. In the cache folder they are kept up to a
limit (:mod:`tl_headmaps.core.store`).
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.store import Cache, Store, mark_used
from ...core.types import Model
from ..anatomy import layers_with_heads, settings_digest, settings_of
from .activations import DEFAULT_BUDGET, LayerActivations, check_prompts, run

_CHUNK = 128
_VERSION = 2
"""Part of every file's name; raised when the content of files changes its meaning."""

Span = tuple[int, int]


@dataclass(frozen=True)
class HeadFeatures:
    """Features of all prompts on disk, read one layer at a time.

    Attributes:
        layers: The layers that have heads.
        chunks: (file, indices of the prompts whose rows it holds).
        n_captured: Chunks that had to be run; 0 when all were on disk.
    """

    n_items: int
    layers: tuple[int, ...]
    chunks: tuple[tuple[Path, tuple[int, ...]], ...]
    n_captured: int

    @property
    def n_layers(self) -> int:
        """Number of layers that have heads."""
        return len(self.layers)

    def layer(self, layer: int) -> Float[Tensor, "item feature"]:
        """Features of one layer, heads side by side."""
        from safetensors import safe_open

        features: Tensor | None = None
        for path, rows in self.chunks:
            mark_used(path)
            with safe_open(path, framework="pt") as stream:
                some = stream.get_tensor(f"L{layer}")
            features = torch.empty(self.n_items, some.shape[1]) if features is None else features
            features[list(rows)] = some
        assert features is not None
        return features


def capture_head_features(
    model: Model,
    prompts: Sequence[Sequence[int]],
    spans: Sequence[Span],
    *,
    parameters: str,
    cache_dir: str | Path | None = None,
    budget: int = DEFAULT_BUDGET,
    progress: Callable[[int], object] | None = None,
) -> HeadFeatures:
    """Mean z of every head over a span of each prompt, read from disk where it was saved before.

    Args:
        model: TransformerBridge or HookedTransformer.
        prompts: Token ids.
        spans: First position and the one after the last, for each prompt.
        parameters: Digest of all parameters of the model, a part of the files' names.
        cache_dir: Where to save them; ``activations`` in the cache folder by default.
        budget: Bytes a batch may take.
        progress: Called with the number of prompts that were finished.
    """
    check_prompts(model, prompts)
    cache = Cache("activations", cache_dir)
    layers = tuple(layers_with_heads(model))
    identity = {
        "version": _VERSION,
        "parameters": parameters,
        "settings": settings_digest(settings_of(model)),
        "what": "mean z",
        "sizes": [list(layers), int(model.cfg.n_heads), int(model.cfg.d_head)],
    }
    store = Store(cache.folder, identity)
    order = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), row))
    chunks, n_captured = [], 0
    for start in range(0, len(order), _CHUNK):
        rows = tuple(order[start : start + _CHUNK])
        content = [[list(prompts[row]), list(spans[row])] for row in rows]
        key = hashlib.sha256(json.dumps([identity, content]).encode()).hexdigest()
        path = cache.entry(store.path(key).name)
        if store.finished(key, "Its prompts are run again.") is None:
            chosen = [prompts[row] for row in rows]
            store.write(key, _captured(model, chosen, [spans[row] for row in rows], budget, progress))
            n_captured += 1
        elif progress is not None:
            progress(len(rows))
        chunks.append((path, rows))
    if n_captured:
        cache.trim()
    return HeadFeatures(len(prompts), layers, tuple(chunks), n_captured)


def _captured(
    model: Model,
    prompts: Sequence[Sequence[int]],
    spans: Sequence[Span],
    budget: int,
    progress: Callable[[int], object] | None,
) -> dict[str, Tensor]:
    kept: dict[int, Tensor] = {}

    def keep(seen: LayerActivations) -> None:
        z = seen["z"].flatten(2)
        kept.setdefault(seen.layer, torch.empty(len(prompts), z.shape[-1]))
        for place, row in enumerate(seen.batch.rows):
            first, end = spans[row]
            kept[seen.layer][row] = z[place, first:end].float().mean(0).cpu()

    run(model, prompts, read=("z",), reduce=keep, budget=budget, progress=progress)
    return {f"L{layer}": kept[layer] for layer in sorted(kept)}
