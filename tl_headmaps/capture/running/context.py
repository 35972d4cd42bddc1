"""What a layer reads at a token in a text: its own normalised input there, behind neutral prompts.

A source (one token, or several) is put behind each of a few prefixes. At the source's last token every layer reads the
residual stream through its norm; that input, without the norm's weight and bias, is averaged over the prefixes. So the
vectors do not depend on whether the norms were folded into the weights.

Each prefix runs once. The sources then run as a batch of single positions behind its keys and values: what that gives
is compared with a whole pass for one source of each prefix, and whole passes are made where it differs.

Vectors are kept on disk, one file for each layer and part of the sources, and read one layer at a time. A file has a
checksum and says which model, prefixes and sources it belongs to; a damaged one is reported and made again. In the
cache folder they are kept up to a limit (:mod:`tl_headmaps.core.store`).
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from ...core.errors import UnsupportedModelError, UsageError
from ...core.files import UnreadableError, home_expanded, parse_json, read_text, replacing
from ...core.options import public
from ...core.progress import Progress
from ...core.store import Cache, DamagedPieceError, Store, mark_used
from ...core.vocabulary import as_text, word_ids
from ...data.texts import neutral_prompts
from ..parts import LayerWeights
from ..weights import HeadWeights
from .activations import check_prompts, encode_prompt, model_device, prepends_bos, state_restored
from .last_position import PrefixRunner, Source
from .prompts import encode_prefixes, problems_of

_FORMAT = 1
_DESCRIPTION = "vectors.json"
_PART_BYTES = 256 << 20
"""Memory the vectors of one part of the sources may take while the model runs."""

VOCABULARY_PROMPTS = 2
"""Prefixes used where every token of a vocabulary is read."""

_OPERATIONS_PER_SECOND = 5e10
"""For estimates alone: what two cores do, roughly."""


Kept: TypeAlias = Literal["mean", "values", "keys"]
"""What is kept of each source: its averaged input, its values behind each prefix, or its averaged keys before any norm
and bias (all that a QK map reads of the thousands of tokens of a vocabulary)."""


@dataclass(frozen=True)
class ContextVectors:
    """What every layer reads at some sources behind neutral prompts; on disk, read a layer at a time.

    Made by analyses with ``preset="context"``, or before with :meth:`of`: an analysis of a checkpoint that is never
    built takes vectors that were made where the model can run (``vectors=``).

    Attributes:
        folder: Where they are.
        identity: Which model, prefixes and sources they belong to.
        sources: Token ids of each source.
        parts: How many sources each part holds.
        rows: Which of the sources are read, and in which order; None for all.

    Example:
        >>> from tl_headmaps import ContextVectors, load_default_model
        >>> model = load_default_model()
        >>> vectors = ContextVectors.of(model, [" France", " Egypt"], ["We talked about", "A list:"], cache_dir="kept")
        >>> vectors.layer(23).shape  # the input of layer 23, without the weight of its norm
        torch.Size([2, 576])
        >>> ContextVectors.load(vectors.folder).layer(23).equal(vectors.layer(23))
        True
    """

    folder: Path
    identity: dict[str, Any]
    sources: tuple[Source, ...]
    parts: tuple[int, ...]
    rows: tuple[int, ...] | None = None

    @classmethod
    @public
    def of(
        cls,
        model: Any,
        sources: Iterable[Any],
        prompts: str | Sequence[str],
        *,
        prepend_bos: bool | None = None,
        cache_dir: str | Path | None = None,
        progress: bool = True,
    ) -> "ContextVectors":
        """Vectors of some sources behind some prompts, from disk where they are there.

        Args:
            sources: Words with their leading space, or token ids of each; several tokens are read at the last. One
                word need not be in a list.
            prompts: Prefixes the sources are put behind.
            prepend_bos: Begin each prefix with BOS; by default as the model does.
            cache_dir: Where to keep them for good; default: ``context`` in the cache folder, where those that were not
                used for longest are removed when all take more than 5 GB (``TL_HEADMAPS_CACHE_GB``).
        """
        ids = [_source_ids(model, source) for source in ([sources] if isinstance(sources, str) else sources)]
        prefixes = encode_prefixes(model, prompts, prepends_bos(model, prepend_bos))
        for problem in problems_of(model, (prompts,) if isinstance(prompts, str) else prompts, ids):
            if problem is not None:
                raise UsageError(problem)
        return context_vectors(model, ids, prefixes, cache_dir=cache_dir, progress=progress)

    @classmethod
    def load(cls, folder: str | Path) -> "ContextVectors":
        """Vectors that were made before."""
        folder = home_expanded(folder)
        path = folder / _DESCRIPTION
        try:
            stated = parse_json(read_text(path))
            sources = tuple(tuple(map(int, source)) for source in stated["sources"])
            made = cls(folder, dict(stated["identity"]), sources, tuple(map(int, stated["parts"])))
            made._require_whole()
            return made
        except UnreadableError as error:
            raise UsageError(
                f"{folder} is not a folder of context vectors: cannot read {path.name}: {error}. Give a folder made by "
                "ContextVectors.of()."
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is damaged ({type(error).__name__}: {error}). Make the vectors again.") from error

    def _require_whole(self) -> None:
        """Raise unless a description is what was once written: pieces say nothing about single sources."""
        if self.identity["sources"] != _sources_digest(self.sources) or sum(self.parts) != len(self.sources):
            raise ValueError("its sources are not those that were read")
        known = all(isinstance(self.identity[name], str) for name in ("weights", "parameters"))
        if not (known and [list(map(int, prefix)) for prefix in self.identity["prefixes"]]):
            raise ValueError("it does not say which model read them, and behind what")

    @property
    def n_prompts(self) -> int:
        """How many prefixes were averaged over."""
        return len(self.identity["prefixes"])

    def layer(self, layer: int) -> Float[Tensor, "source d_model"]:
        """The averaged input of one layer, without the weight and bias of its norm."""
        return self._chosen(torch.cat([piece["mean"] for piece in self._pieces(layer)]), 0)

    def values(self, layer: int) -> Float[Tensor, "prompt kv_head source d_head"]:
        """Value vectors behind each prefix alone, without their constant part."""
        return self._chosen(torch.cat([piece["values"] for piece in self._pieces(layer)], dim=2), 2)

    def keys(self, layer: int) -> Float[Tensor, "kv_head source d_head"]:
        """Averaged keys, before any norm and bias."""
        return self._chosen(torch.cat([piece["keys"] for piece in self._pieces(layer)], dim=1), 1)

    def _chosen(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor if self.rows is None else tensor.index_select(axis, torch.tensor(self.rows, device="cpu"))

    def select(self, sources: Sequence[Source]) -> "ContextVectors":
        """The vectors of some of the sources, in their order; refuses sources that are not there."""
        known = {source: row for row, source in enumerate(self.sources)}
        missing = [source for source in sources if source not in known]
        if missing:
            raise UsageError(
                f"The vectors in {self.folder} lack a source with token ids {list(missing[0])} ({len(missing)} of "
                f"{len(sources)} are missing). Make vectors of all sources of the relations."
            )
        return replace(self, rows=tuple(known[source] for source in sources))

    def check(self, weights: HeadWeights) -> "ContextVectors":
        """Refuse vectors of another model."""
        if self.identity.get("weights") != weights.fingerprint:
            raise UsageError(
                f"The context vectors in {self.folder} were made with another model than {weights.model_name!r}: the "
                "fingerprints of their weights differ. Make them again with this model."
            )
        return self

    def _pieces(self, layer: int) -> Iterator[dict[str, Tensor]]:
        mark_used(self.folder)
        store = Store(self.folder, self.identity)
        for part in range(len(self.parts)):
            path = store.path(_piece(part, layer))
            try:
                piece = store.load(_piece(part, layer))
            except DamagedPieceError as error:
                raise UsageError(
                    f"The context vectors in {path} cannot be used: {error}. Repeat the same call: it makes damaged "
                    "files again."
                ) from error
            if not all(bool(tensor.isfinite().all()) for tensor in piece.values()):
                raise UsageError(
                    f"The context vectors in {path} hold NaN or infinity. Delete the file and make them again."
                )
            yield piece


def _source_ids(model: Any, source: Any) -> Source:
    """Token ids of a source: a word with its leading space, any other text, or token ids."""
    text = as_text(source)
    ids = encode_prompt(model, text)
    return tuple(word_ids(model.tokenizer, text) if isinstance(text, str) and text[:1].isspace() else ids)


MetVectors = ContextVectors
"""What :class:`ContextVectors` was called until version 0.2."""


def _piece(part: int, layer: int) -> str:
    return f"part-{part:03d}-layer-{layer:04d}"


def _sources_digest(sources: Sequence[Source]) -> str:
    return hashlib.sha256(json.dumps(list(map(list, sources))).encode()).hexdigest()


def collect_inputs(
    weights: HeadWeights,
    sources: Sequence[Source],
    *,
    prompts: str | Sequence[str] | None = None,
    vectors: "ContextVectors | str | Path | None" = None,
    prepend_bos: bool | None = None,
    layers: Sequence[int] | None = None,
    progress: bool = True,
) -> ContextVectors:
    """Context vectors of an analysis' sources: given ones, or those of the model the weights were read from.

    Args:
        weights: The model's weights.
        sources: Token ids of each source.
        prompts: Prefixes; the bundled ones by default.
        vectors: Vectors made before, or their folder.
        prepend_bos: Begin each prefix with BOS; by default as the model does.
        layers: The layers that will be read; all by default.
        progress: Show a progress bar on a terminal.
    """
    if vectors is not None:
        if prompts is not None or prepend_bos is not None:
            raise UsageError(
                "vectors= were read behind prompts of their own, so prompts= and prepend_bos= do not fit. Give "
                "either the vectors or the prompts."
            )
        made = vectors if isinstance(vectors, ContextVectors) else ContextVectors.load(vectors)
        return made.check(weights).select(sources)
    model = runnable(weights)
    chosen = neutral_prompts() if prompts is None else (prompts,) if isinstance(prompts, str) else tuple(prompts)
    prefixes = encode_prefixes(model, chosen, prepends_bos(model, prepend_bos))
    problems = problems_of(model, chosen, sources)
    if prompts is None and None in problems:
        # Of the bundled prompts, those that do not suit these sources are left out.
        prefixes = [prefix for prefix, problem in zip(prefixes, problems, strict=True) if problem is None]
    elif refused := [problem for problem in problems if problem is not None]:
        raise UsageError(refused[0])
    return context_vectors(model, sources, prefixes, weights=weights, layers=layers, progress=progress)


def vocabulary_keys(weights: HeadWeights, rows: ContextVectors, *, progress: bool = True) -> ContextVectors:
    """Keys of every token of the vocabulary behind the first two prefixes that rows were read behind.

    They are what QK maps rank a row's targets among: thousands of tokens, so an estimate is printed first.
    """
    model = runnable(weights)
    prefixes = rows.identity["prefixes"][:VOCABULARY_PROMPTS]
    size = 4 * len(weights.layers_with_heads) * weights.n_vocab * weights.n_kv_heads * weights.d_head
    print_estimate(weights, weights.n_vocab * len(prefixes), f"{size / 2**30:.1f} GiB on disk, ")
    everything = [(token,) for token in range(weights.n_vocab)]
    return context_vectors(model, everything, prefixes, weights=weights, keep=("keys",), progress=progress)


def print_estimate(weights: HeadWeights, n_tokens: int, also: str = "") -> None:
    """Say on stderr how long reading many tokens may take: two operations per parameter and token."""
    n_parameters = sum(parameter.numel() for parameter in runnable(weights).parameters())
    seconds = 2 * n_parameters * n_tokens / _OPERATIONS_PER_SECOND
    if seconds > 10:
        tqdm.write(
            f"Meeting {n_tokens:,} tokens: {also}about {seconds / 60:.0f} minutes on two cores.",
            file=sys.stderr,
        )


def runnable(weights: HeadWeights) -> Any:
    """The model that weights were read from; refuses those of a checkpoint that was never built."""
    if weights.model is None:
        raise UsageError(
            f"preset='context' runs the model, and the weights of {weights.model_name!r} were read from a checkpoint "
            "without building it. Load the model (load_model(folder), or --model FOLDER), give vectors made where it "
            "can run (vectors=), or use preset='folded'."
        )
    return weights.model


def context_vectors(
    model: Any,
    sources: Sequence[Source],
    prefixes: Sequence[Sequence[int]],
    *,
    weights: HeadWeights | None = None,
    keep: Sequence[Kept] = ("mean", "values"),
    layers: Sequence[int] | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> ContextVectors:
    """What every layer reads at each source behind each prefix, from disk where it is there.

    Args:
        model: TransformerBridge or HookedTransformer.
        sources: Token ids of each source; inputs are read at the last.
        prefixes: Token ids of each prefix, BOS included where it is wanted.
        weights: The model's weights, if they were read already.
        keep: What to keep of each source.
        layers: The layers that will be read: only their files are looked at; all are made where one is missing.
        cache_dir: Where to keep it; default: ``context`` in the cache folder.
        progress: Show a progress bar on a terminal.
    """
    if not sources:
        raise UsageError("There is no source to read; give at least one.")
    weights = HeadWeights.from_model(model) if weights is None else weights
    _check_lengths(model, sources, prefixes)
    identity = {
        "format": _FORMAT,
        "weights": weights.fingerprint,
        "parameters": weights.parameters_digest,
        "settings": weights.settings_digest,
        "prefixes": [list(prefix) for prefix in prefixes],
        "sources": _sources_digest(sources),
        "kept": list(keep),
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    cache = Cache("context", cache_dir)
    folder = cache.entry(key[:32])
    store = Store(folder, identity)
    size = _part_size(weights, len(prefixes), keep)
    parts = tuple(min(size, len(sources) - start) for start in range(0, len(sources), size))
    vectors = ContextVectors(folder, identity, tuple(map(tuple, sources)), parts)
    asked = weights.layers_with_heads if layers is None else layers
    again = "These vectors are computed again."
    left = [
        part for part in range(len(parts)) if any(store.finished(_piece(part, layer), again) is None for layer in asked)
    ]
    with _bar(sum(parts[part] for part in left) * len(prefixes), progress) as bar:
        for part in left:
            start = sum(parts[:part])
            tensors = _capture(model, weights, vectors.sources[start : start + parts[part]], prefixes, keep, bar.update)
            for layer in weights.layers_with_heads:
                piece: dict[str, Tensor] = {name: tensors[name][layer] for name in keep}
                store.write(_piece(part, layer), piece)
    stated = json.dumps({"identity": identity, "sources": list(map(list, sources)), "parts": list(parts)}) + "\n"
    if left or not _says(folder / _DESCRIPTION, stated):
        with replacing(folder / _DESCRIPTION) as temporary:
            temporary.write_text(stated, encoding="utf-8")
    if left:
        cache.trim()
    return vectors


def _says(path: Path, text: str) -> bool:
    """Whether a file is there and has this text."""
    try:
        return read_text(path) == text
    except UnreadableError:
        return False


def context_parts(
    model: Any,
    sources: Sequence[Source],
    prefixes: Sequence[Sequence[int]],
    *,
    weights: HeadWeights,
    progress: bool = True,
) -> Iterator[tuple[slice, dict[int, Float[Tensor, "source d_model"]]]]:
    """The averaged inputs of all layers with heads for one part of the sources after the other; nothing is kept."""
    _check_lengths(model, sources, prefixes)
    size = _part_size(weights, len(prefixes), ("mean",))
    with _bar(len(sources) * len(prefixes), progress) as bar:
        for start in range(0, len(sources), size):
            part = slice(start, min(start + size, len(sources)))
            yield part, _capture(model, weights, sources[part], prefixes, ("mean",), bar.update)["mean"]


def _bar(n_runs: int, progress: bool) -> Any:
    return Progress(total=n_runs, desc="context vectors", unit="token", show=progress and n_runs > 0)


def _part_size(weights: HeadWeights, n_prefixes: int, keep: Sequence[Kept]) -> int:
    width = weights.n_kv_heads * weights.d_head
    floats = {"mean": weights.d_model, "values": n_prefixes * width, "keys": width}
    return max(1, _PART_BYTES // (4 * weights.n_layers * sum(floats[name] for name in keep)))


def _check_lengths(model: Any, sources: Sequence[Source], prefixes: Sequence[Sequence[int]]) -> None:
    """Refuse what the model cannot hold, and ids it does not have."""
    longest_source, longest_prefix = max(map(len, sources)), max(map(len, prefixes))
    if longest_source + longest_prefix > int(model.cfg.n_ctx):
        raise UsageError(
            f"A prompt of {longest_prefix} tokens and a source of {longest_source} are longer than the model's context "
            f"of {int(model.cfg.n_ctx)} tokens. Give shorter prompts or sources."
        )
    check_prompts(model, [list(source) for source in sources])


def _capture(
    model: Any,
    weights: HeadWeights,
    sources: Sequence[Source],
    prefixes: Sequence[Sequence[int]],
    keep: Sequence[Kept],
    done: Callable[[int], object],
) -> dict[str, dict[int, Tensor]]:
    """What is to be kept of some sources, by its name, for every layer that has heads."""
    layers = {number: weights.layer(number) for number in weights.layers_with_heads}
    norms = {number: layer.ln1 for number, layer in layers.items()}
    W_V, W_K = ({n: _weighted(layer, getattr(layer, w)) for n, layer in layers.items()} for w in ("W_V", "W_K"))

    def empty(name: Kept, number: int) -> Tensor:
        _, groups, d_head = weights.shape(number)
        shape = {
            "mean": (len(sources), weights.d_model),
            "values": (len(prefixes), groups, len(sources), d_head),
            "keys": (groups, len(sources), d_head),
        }
        return torch.zeros(shape[name], device="cpu")

    kept: dict[str, dict[int, Tensor]] = {name: {number: empty(name, number) for number in layers} for name in keep}
    with state_restored(model):
        for number, prefix in enumerate(prefixes):
            behind = PrefixRunner(model, prefix, weights)
            for rows in behind.batches(sources):
                ids = torch.tensor([sources[row] for row in rows], device=model_device(model))

                def take(layer: int, x: Tensor, rows: list[int] = rows, number: int = number) -> None:
                    norm = norms[layer]
                    x = x.to(device=weights.device, dtype=torch.float32)
                    x = x if norm is None else norm.normalised(x)
                    if "mean" in kept:
                        _add(kept["mean"][layer], rows, x, number)
                    if "values" in kept:
                        kept["values"][layer][number][:, rows] = (x @ W_V[layer]).cpu()
                    if "keys" in kept:
                        for group, keys in enumerate(x @ W_K[layer]):
                            _add(kept["keys"][layer][group], rows, keys, number)

                behind.run(ids, take)
                done(len(rows))
    for tensors in kept.values():
        for layer, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                raise UnsupportedModelError(
                    f"The model's stream before layer {layer} holds NaN or infinity behind a neutral prompt, so "
                    "there are no context vectors. Load the model in float32 or bfloat16, or use preset='folded'."
                )
    return kept


def _weighted(layer: LayerWeights, matrix: Tensor) -> Tensor:
    """A matrix with the weight of the norm before it."""
    return matrix if layer.ln1 is None else layer.ln1.weight[None, :, None] * matrix


def _add(mean: Tensor, rows: list[int], x: Tensor, n_before: int) -> None:
    """Take one more into a running mean; of equal vectors it is that very vector (in layer 0 all prefixes give one)."""
    mean[rows] = mean[rows] + (x.cpu() - mean[rows]) / (n_before + 1)
