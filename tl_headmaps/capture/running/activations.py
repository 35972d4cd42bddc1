"""Running a model and passing what its heads compute to a reducer, layer by layer, while it runs.

Prompts of equal length run together, so nothing is ever padded and no mask can leak: a prompt gives the same numbers
alone and in a batch of thousands. Activations of a layer are dropped as soon as the reducer has seen them: memory grows
with the batch, which a budget bounds, and not with the data.

The model runs in evaluation mode and without the caller's own hooks; both are restored afterwards, also after an
exception or Ctrl-C inside a forward pass.

Example:
    >>> from tl_headmaps import load_default_model
    >>> model = load_default_model()
    >>> run(model, [encode_prompt(model, "Birds walk")], read=("pattern",), layers=[3], reduce=lambda seen: print(
    ...     seen.layer, tuple(seen["pattern"].shape)))
    3 (1, 9, 2, 2)
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...core.errors import UsageError
from ...core.files import check_text
from ...core.types import Model, Preset
from ...core.vocabulary import Text
from ..anatomy import layers_with_heads
from ..forward import evaluating

Activation: TypeAlias = Literal["pattern", "q", "k", "v", "z", "gate", "resid_pre", "attn_out", "mlp_out"]

_HOOKS: dict[str, str] = {
    "resid_pre": "hook_resid_pre",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "pattern": "attn.hook_pattern",
    "z": "attn.hook_z",
    "gate": "attn.hook_q_gate",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
}

DEFAULT_BUDGET = 256 << 20
"""Bytes one batch may take in activations and logits, roughly."""


_OF_EVERY_LAYER = {"resid_pre", "mlp_out"}
"""The others exist only in layers with heads."""


def readable_layers(model: Model, read: Iterable[str]) -> list[int]:
    """The layers that have these activations: those with heads, unless only the stream or MLPs are read."""
    return list(range(len(model.blocks))) if _OF_EVERY_LAYER.issuperset(read) else layers_with_heads(model)


def hook_name(layer: int, name: Activation) -> str:
    """The hook name of an activation of a layer, the same in both hosts."""
    return f"blocks.{layer}.{_HOOKS[name]}"


def shown_at(known: Container[str], layer: int, name: Activation) -> str:
    """The hook that shows an activation, out of those a model has.

    Where keys serve as values (Gemma 4), they are all there is to see of them.
    """
    hook = hook_name(layer, name)
    return hook_name(layer, "k") if name == "v" and hook not in known else hook


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one length that run together.

    Attributes:
        ids: Their token ids, on the model's device.
        rows: Position of each prompt in the sequence given to :func:`run`.
    """

    ids: Int[Tensor, "batch pos"]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class LayerActivations:
    """The activations of one layer and batch: ``seen["z"]`` [batch, pos, head, d_head] and so on.

    ``pattern`` is [batch, head, query, key]; ``v`` and ``k`` have key/value heads, as in the model. ``gate`` exists in
    gated models alone, before its sigmoid: [batch, pos, head * d_head].
    """

    layer: int
    batch: PromptBatch
    values: Mapping[str, Tensor]

    def __getitem__(self, name: Activation) -> Tensor:
        return self.values[name]


Edit: TypeAlias = Callable[[Tensor, PromptBatch], Tensor]


def encode_prompt(model: Model, text: Text, prepend_bos: bool = False) -> list[int]:
    """Token ids of a text without special tokens, with BOS in front if ``prepend_bos``; ids stay as they are."""
    if not isinstance(text, str):
        n_vocab = model.embed.W_E.shape[0]
        if text and (min(text) < 0 or max(text) >= n_vocab):
            raise UsageError(f"The text has a token id outside the vocabulary: ids run from 0 to {n_vocab - 1}.")
        return list(text)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise UsageError(
            f"The model has no tokenizer, so the text {text!r} has no tokens. Set model.tokenizer, or give token ids."
        )
    check_text(text, "The text")
    ids = [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    if prepend_bos:
        if tokenizer.bos_token_id is None:
            raise UsageError("prepend_bos=True was given, but this tokenizer has no BOS token. Leave it out.")
        # Some tokenizers add their own even without special tokens.
        if ids[:1] != [tokenizer.bos_token_id]:
            ids.insert(0, int(tokenizer.bos_token_id))
    return ids


def prepends_bos(model: Any, prepend_bos: bool | None, preset: Preset | None = None) -> bool:
    """Whether texts begin with BOS: as asked for, or (None) as the model itself does by default in TransformerLens.

    Measured by letting the model encode a text: flags and tokenizers disagree with each other. The published recipe,
    ``"maps"``, has none.
    """
    if prepend_bos is not None:
        return prepend_bos
    if preset == "maps":
        return False
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None or tokenizer.bos_token_id is None:
        return False
    begins: list[int] = model.to_tokens("a")[0, :1].tolist()
    return begins == [int(tokenizer.bos_token_id)]


def batches(
    prompts: Sequence[Sequence[int]],
    bytes_of: Callable[[int], int],
    budget: int,
    device: torch.device | None = None,
) -> Iterator[PromptBatch]:
    """Batches of equally long prompts, shortest first, none above the budget (but one prompt always runs)."""
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(row)
    for length in sorted(by_length):
        size = max(1, budget // bytes_of(length))
        rows = by_length[length]
        for start in range(0, len(rows), size):
            chosen = rows[start : start + size]
            yield PromptBatch(torch.tensor([list(prompts[row]) for row in chosen], device=device), tuple(chosen))


def run(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    read: Sequence[Activation] = (),
    reduce: Callable[[LayerActivations], None] | None = None,
    layers: Iterable[int] | None = None,
    edit: Mapping[tuple[int, Activation], Edit] | None = None,
    logits: Callable[[Float[Tensor, "batch pos vocab"], PromptBatch], None] | None = None,
    last: int | None = None,
    budget: int = DEFAULT_BUDGET,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Run prompts through a model; reducers take what they need while it runs.

    Args:
        model: TransformerBridge or HookedTransformer.
        prompts: Token ids of each prompt.
        read: Activations for ``reduce``, which is called once for each layer and batch.
        reduce: Receives them; must copy what it keeps.
        layers: Layers to read; by default all that have what is read. Without ``logits`` no later layer is run.
        edit: Replacements by (layer, activation), made before anything later in the model reads them.
        logits: Receives the logits of each batch.
        last: Compute logits of this many last positions only (of all in a shorter prompt), to save time and memory.
        budget: Bytes a batch may take, which sets its size.
        progress: Called after each batch with the number of prompts in it.
    """
    check_prompts(model, prompts)
    sizes = sizes_of(model)
    chosen = None if layers is None else list(layers)
    ending: dict[str, int] = {}
    if logits is None:
        last = 1  # A host may compute logits although none are needed.
        if chosen and read and max(chosen) + 1 < len(model.blocks):
            ending["stop_at_layer"] = max(chosen) + 1
    with state_restored(model):
        for batch in batches(prompts, lambda length: sizes.bytes_of(length, last), budget, model_device(model)):
            hooks = _hooks(model, batch, tuple(read), reduce, chosen, edit or {})
            if last is not None and not ending:
                hooks.append(only_last(model, last))
            with model.hooks(fwd_hooks=hooks):
                output = model(batch.ids, return_type="logits" if logits is not None else None, **ending)
            if logits is not None:
                logits(output, batch)
            if progress is not None:
                progress(len(batch.rows))


def check_prompts(model: Model, prompts: Sequence[Sequence[int]]) -> None:
    """Refuse empty input and prompts longer than the model's context, before anything runs."""
    if not len(prompts):
        raise UsageError("There is no prompt to run; give at least one.")
    longest, n_vocab = int(model.cfg.n_ctx), model.embed.W_E.shape[0]
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise UsageError(f"Prompt {row} is empty; every prompt needs at least one token.")
        if len(prompt) > longest:
            raise UsageError(
                f"Prompt {row} has {len(prompt)} tokens, but the model takes at most {longest}. Shorten or split it."
            )
        if min(prompt) < 0 or max(prompt) >= n_vocab:
            raise UsageError(f"Prompt {row} has a token id outside the vocabulary: ids run from 0 to {n_vocab - 1}.")


def model_device(model: Model) -> torch.device:
    """The device of the model's embedding, where prompts must be."""
    device: torch.device = model.embed.W_E.device
    return device


@contextmanager
def state_restored(model: Model) -> Iterator[None]:
    """Evaluation mode, no gradients, none of the caller's hooks; everything is restored, random state included."""
    device = model_device(model)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), evaluating(model):
        yield


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a model that decide how much memory a prompt takes."""

    n_vocab: int
    n_heads: int
    d_model: int

    def bytes_of(self, length: int, last: int | None = None) -> int:
        """Bytes of a prompt with logits of its last positions (of all by default)."""
        # Logits twice (with their float32 copy), scores and pattern, and about forty vectors of the stream.
        n_logits = 2 * self.n_vocab * (length if last is None else min(last, length))
        return 4 * (n_logits + length * (3 * self.n_heads * length + 40 * self.d_model))


def sizes_of(model: Model) -> _Sizes:
    """The sizes of a model."""
    return _Sizes(int(model.unembed.W_U.shape[-1]), int(model.cfg.n_heads), int(model.cfg.d_model))


def only_last(model: Model, n: int, rows: slice = slice(None)) -> tuple[str, Callable[..., Tensor]]:
    """A hook that lets the last positions alone reach the unembedding (of some rows, where nobody reads the others)."""
    name = "unembed.hook_in"
    if name not in model.hook_dict:
        name = f"blocks.{len(model.blocks) - 1}.hook_resid_post"

    def cut(value: Tensor, hook: Any) -> Tensor:
        return value[rows, -n:]

    return name, cut


def _hooks(
    model: Model,
    batch: PromptBatch,
    read: tuple[Activation, ...],
    reduce: Callable[[LayerActivations], None] | None,
    layers: Iterable[int] | None,
    edit: Mapping[tuple[int, Activation], Edit],
) -> list[tuple[str, Callable[..., Any]]]:
    # Edits come first: a reducer of the same activation then sees what the rest of the model sees.
    hooks: list[tuple[str, Callable[..., Any]]] = []
    for (layer, name), change in edit.items():

        def replace(value: Tensor, hook: Any, change: Edit = change) -> Tensor:
            return change(value, batch)

        hooks.append((hook_name(layer, name), replace))
    if reduce is not None and read:
        known = model.hook_dict if "v" in read else {}
        for layer in readable_layers(model, read) if layers is None else layers:
            values: dict[str, Tensor] = {}

            def take(name: str, value: Tensor, hook: Any, layer: int = layer, values: dict[str, Any] = values) -> None:
                values[name] = value
                if len(values) == len(read):
                    seen = LayerActivations(layer, batch, dict(values))
                    # Dropped here, so that the reducer alone decides what is kept.
                    values.clear()
                    reduce(seen)

            hooks += [(shown_at(known, layer, name), partial(take, name)) for name in read]
    return hooks


HeadActivation: TypeAlias = Literal["pattern", "q", "k", "v", "z", "gate"]
"""Activations of heads; with their batch axis each has four dimensions (``gate``: three)."""


def run_or_read(
    model: Model,
    ids: Sequence[int],
    cache: Any,
    *,
    read: Sequence[HeadActivation],
    reduce: Callable[[LayerActivations], None],
    layers: Iterable[int] | None = None,
) -> None:
    """Pass the activations of one prompt to ``reduce``, layer by layer, as :func:`~.activations.run` does.

    Args:
        model: TransformerBridge or HookedTransformer; runs only without a cache.
        ids: Token ids of the prompt.
        cache: What ``model.run_with_cache`` returned for this prompt, or None.
        read: Activations for ``reduce``.
        reduce: Receives them.
        layers: Layers to read; all that have heads by default.
    """
    if cache is None:
        run(model, [ids], read=read, reduce=reduce, layers=layers)
        return
    batch, known = PromptBatch(torch.tensor([list(ids)]), (0,)), model.hook_dict
    for layer in readable_layers(model, read) if layers is None else layers:
        values: dict[str, Tensor] = {name: _entry(cache, shown_at(known, layer, name), name, len(ids)) for name in read}
        reduce(LayerActivations(layer, batch, values))


def _entry(cache: Any, hook: str, name: HeadActivation, n_tokens: int) -> Tensor:
    """One activation with its batch axis of 1."""
    try:
        value = cache[hook]
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"The cache has no {hook}. Make it with model.run_with_cache(text) without a names_filter, or with one "
            f"that lets {hook} through."
        ) from error
    if not isinstance(value, Tensor):
        raise UsageError(f"{hook} of the cache is a {type(value).__name__}, not a tensor. Pass an ActivationCache.")
    batched = getattr(cache, "has_batch_dim", value.ndim == (3 if name == "gate" else 4))
    value = value.detach() if batched else value.detach()[None]
    if value.shape[0] != 1:
        raise UsageError(
            f"The cache contains {value.shape[0]} prompts, but the analysis is of one text. Run that text alone, or "
            "pass ActivationCache entries of one row."
        )
    cached = value.shape[2 if name == "pattern" else 1]
    if cached != n_tokens:
        raise UsageError(
            f"The cache contains {cached} tokens, but the text has {n_tokens}. Pass the text and the prepend_bos= that "
            "the cache was made with, or the token ids that were run."
        )
    return value
