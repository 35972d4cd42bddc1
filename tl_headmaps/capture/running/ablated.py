"""Heads switched off, at all positions or at some, and runs that begin at the layer of what is changed.

``z`` is what W_O reads of a head (behind a gate or a norm, where the model has one), so a head whose z is zero writes
nothing, as if its rows of W_O were zero.

What is changed in a layer changes nothing below it: the blocks below need not run again. They pass on what they get,
and the kept stream is put in above them. A bridge's own ``start_at_layer`` computes the lower blocks and throws away
what they give.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import index
from types import TracebackType
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...core.errors import UsageError
from ...core.options import public
from ...core.types import AblationMethod, HeadIndex, HeadLike, Model, by_layer, check_choice, is_index
from ...data.texts import read_texts
from ..anatomy import shares_keys
from ..forward import allowing_analyses, lock_of, refusing_analyses
from ..requirements import require_decoder
from ..weights import HeadWeights
from .activations import (
    DEFAULT_BUDGET,
    LayerActivations,
    PromptBatch,
    batches,
    check_prompts,
    encode_prompt,
    hook_name,
    model_device,
    prepends_bos,
    run,
    sizes_of,
    state_restored,
)
from .text import check_runs

Vectors: TypeAlias = dict[HeadIndex, Float[Tensor, " d_head"]]
"""What heads hand to W_O instead of what they computed."""


def replaced(
    z: Float[Tensor, "row pos head d_head"],
    off: Bool[Tensor, "*row at_least_head"],
    instead: Float[Tensor, "head d_head"] | None = None,
    positions: Sequence[int] | None = None,
) -> Float[Tensor, "row pos head d_head"]:
    """What the heads of a layer hand to W_O when some of them are off, all rows alike or each row its own.

    Args:
        z: What they computed.
        off: Which heads are off.
        instead: What these hand on; nothing (zero) by default.
        positions: Where; everywhere by default. Negative ones count from the end.
    """
    # Where layers differ in their number of heads, those that are not in this one come last.
    mask = off.to(z.device)[..., None, : z.shape[2], None]
    if positions is not None:
        n = z.shape[1]
        outside = [position for position in positions if not -n <= position < n]
        if outside:
            raise UsageError(
                f"positions= holds {outside[0]}, but this forward pass has {n} token{'' if n == 1 else 's'}. Positions "
                f"count from 0, negative ones from the end; with a cache of keys and values a pass has the new tokens "
                "alone."
            )
        here = torch.zeros(n, dtype=torch.bool, device=z.device)
        here[list(positions)] = True
        mask = mask & here[:, None, None]
    return torch.where(mask, z.new_zeros(()) if instead is None else instead.to(z), z)


def mean_outputs(
    model: Model, prompts: Sequence[Sequence[int]], layers: Sequence[int], last: int | None = None
) -> dict[int, Float[Tensor, "head d_head"]]:
    """What the heads of each layer hand to W_O on average over the positions of some prompts (or their last ones)."""
    totals: dict[int, Tensor] = {}

    def add(seen: LayerActivations) -> None:
        z = seen["z"] if last is None else seen["z"][:, -last:]
        totals[seen.layer] = totals.get(seen.layer, 0) + z.double().sum((0, 1)).cpu()

    run(model, prompts, read=("z",), layers=layers, reduce=add)
    n = sum(len(prompt) if last is None else min(last, len(prompt)) for prompt in prompts)
    return {layer: (total / n).float() for layer, total in totals.items()}


@public
def ablated(
    model: Model,
    heads: HeadLike | Iterable[HeadLike],
    *,
    method: AblationMethod | Mapping[Any, Any] = "zero",
    positions: Iterable[int] | int | None = None,
    texts: Any = None,
    prepend_bos: bool | None = None,
) -> AbstractContextManager[Vectors]:
    """Switch heads off for any code inside a ``with`` block: forward passes, generation, hooks of your own.

    The block gives what each head hands to W_O instead. Blocks nest; what is opened last wins. On leaving, also by an
    exception, the hooks are removed and yours are as they were; ``model.reset_hooks()`` inside does not switch heads on
    again. The object can be used for several blocks, so means are computed once.

    Heads are off for every thread that runs the model. Analyses of this package are refused inside the block, in every
    thread: their results would name a model that they do not describe.

    Args:
        heads: The heads to switch off.
        method: ``"zero"``: they write nothing. ``"mean"``: what they hand to W_O on average over all positions of
            texts. Or a vector of ``d_head`` numbers for each head, by its name.
        positions: Positions of the forward pass where they are off, negative ones counted from the end; everywhere by
            default. While text is generated with a cache, each pass has the new token alone.
        texts: With ``"mean"``: the texts (a list, a file, a dataset) in place of the bundled text without its held-out
            third.
        prepend_bos: With ``"mean"``: begin each text with BOS; by default as the model does.

    Example:
        >>> from tl_headmaps import ablated, load_default_model
        >>> model = load_default_model()
        >>> def answer():
        ...     return model.to_string(model("The capital of France is")[0, -1].argmax())
        >>> with ablated(model, ["L23H1", "L23H4", "L23H5"]):
        ...     answer()
        ' Tokyo'
        >>> answer()
        ' Paris'
    """
    check_runs(model)
    require_decoder(model)
    if not isinstance(method, Mapping):
        check_choice(method, AblationMethod, "method")
    if method != "mean" and not (texts is None and prepend_bos is None):
        raise UsageError(f"texts= and prepend_bos= are about means; they go with method='mean', not {method!r:.60}.")
    where = None if positions is None else _positions(positions)
    # Inside another block, too, heads and means are those of the whole model.
    with allowing_analyses(model):
        weights = HeadWeights.from_model(model)
        chosen = weights.chosen_heads(heads)
        if isinstance(method, Mapping):
            vectors = _given(method, chosen, weights)
        elif method == "mean":
            vectors = _means(model, chosen, texts, prepends_bos(model, prepend_bos))
        else:
            weights.require_own_values("switching off a head", ", or use method='mean'")
            vectors = {head: torch.zeros(weights.shape(head.layer).d_head) for head in chosen}
    return _Ablation(model, vectors, weights, where)


class _Ablation(AbstractContextManager[Vectors]):
    """Heads that are off while a block is open."""

    def __init__(self, model: Model, vectors: Vectors, weights: HeadWeights, positions: list[int] | None) -> None:
        self._model, self._vectors, self._positions = model, vectors, positions
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, numbers in by_layer(vectors).items():
            n_heads = weights.shape(layer).n_heads
            off = torch.zeros(n_heads, dtype=torch.bool)
            off[numbers] = True
            rows = torch.stack([vectors[HeadIndex(layer, number)] for number in numbers])
            instead = rows.new_zeros(n_heads, rows.shape[1])
            instead[numbers] = rows
            self._layers[layer] = off, instead
        self._open: list[ExitStack] = []

    def __enter__(self) -> Vectors:
        with ExitStack() as stack, lock_of(self._model):
            # Not while an analysis of another thread has the hooks put away.
            stack.enter_context(refusing_analyses(self._model))
            points = self._model.hook_dict
            for layer, (off, instead) in self._layers.items():
                stack.callback(self._hook(points[hook_name(layer, "z")], off, instead))
            self._open.append(stack.pop_all())
        return dict(self._vectors)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with lock_of(self._model):
            self._open.pop().close()

    def _hook(self, point: Any, off: Tensor, instead: Tensor) -> Any:
        """Add the hook of a layer; gives what removes it again, and nothing else."""

        def hook_fn(z: Tensor, hook: Any) -> Tensor:
            return replaced(z, off, instead, self._positions)

        # Permanent: reset_hooks() is for the hooks that the block adds itself.
        point.add_hook(hook_fn, is_permanent=True)
        handle = point.fwd_hooks[-1]

        def remove() -> None:
            handle.hook.remove()
            point.fwd_hooks[:] = [other for other in point.fwd_hooks if other is not handle]

        return remove


def _positions(positions: Any) -> list[int]:
    listed = [positions] if is_index(positions) or not isinstance(positions, Iterable) else list(positions)
    if not all(map(is_index, listed)):
        raise UsageError(f"positions={positions!r:.60} are not positions. Give a list such as [0, -1].")
    if not listed:
        raise UsageError("positions= is empty. Name at least one position, or leave it out for all.")
    return list(map(index, listed))


def _given(method: Mapping[Any, Any], chosen: Sequence[HeadIndex], weights: HeadWeights) -> Vectors:
    vectors = {}
    for name, vector in method.items():
        head = weights.head(name)
        d_head = weights.shape(head.layer).d_head
        try:
            value = torch.as_tensor(vector).detach().cpu()
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            raise UsageError(
                f"The vector of {head} is {vector!r:.60}. Give {d_head} numbers, what the head hands to W_O."
            ) from error
        if value.shape != (d_head,) or value.is_complex() or not bool(value.isfinite().all()):
            raise UsageError(
                f"The vector of {head} has shape {tuple(value.shape)}, or a number that is not finite. Give "
                f"{d_head} numbers, what the head hands to W_O."
            )
        vectors[head] = value.float()
    for head in {*chosen} ^ {*vectors}:
        found = "is among heads=, but has no vector" if head in chosen else "has a vector, but is not among heads="
        raise UsageError(f"{head} {found}. Give a vector for each head that is switched off.")
    return {head: vectors[head] for head in chosen}


def _means(model: Model, chosen: Sequence[HeadIndex], texts: Any, prepend_bos: bool) -> Vectors:
    longest = int(model.cfg.n_ctx)
    source = read_texts(part="fit") if texts is None else read_texts(texts)
    prompts = [ids for text in source if (ids := encode_prompt(model, text, prepend_bos)[:longest])]
    if not prompts:
        raise UsageError("There is no text to take means over. Give texts of at least one token.")
    means = mean_outputs(model, prompts, sorted({head.layer for head in chosen}))
    return {head: means[head.layer][head.head] for head in chosen}


Hooks: TypeAlias = list[tuple[str, Callable[..., Any]]]

_SAME = 1e-5
"""Largest difference from a whole pass, relative to its largest logit: the same blocks read the same numbers."""


class Streams:
    """The stream before layers, as one run had it, for runs that begin there."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._kept: dict[int, Tensor] = {}
        self._forms: list[type | None] = []
        """What each block returns: a tensor, or a tuple of one; None for anything else."""

    @property
    def can_begin(self) -> bool:
        """Whether blocks can be left out: all that goes from one to the next is the stream."""
        return None not in self._forms and not shares_keys(self._model)

    @contextmanager
    def seen(self, layers: Collection[int]) -> Iterator[Hooks]:
        """Hooks that keep the stream before these layers, for one run inside the block."""
        self._forms = []
        with ExitStack() as watching:
            for block in self._model.blocks:
                watching.callback(block.register_forward_hook(self._see).remove)
            yield [(hook_name(layer, "resid_pre"), self._taker(layer)) for layer in layers]

    @contextmanager
    def starting_at(self, layer: int, times: int = 1) -> Iterator[Hooks]:
        """Hooks that put the kept stream in before a layer; inside the block those below pass on what they get.

        Args:
            layer: The layer; 0 for a whole run, which needs no hook.
            times: Repeat each prompt this often in a row.
        """
        below = list(self._model.blocks)[:layer]
        # Whoever offloads weights has put a forward of its own on a block.
        own = [vars(block).get("forward") for block in below]
        stream = self._kept[layer].repeat_interleave(times, 0) if layer else None
        try:
            for block, form in zip(below, self._forms, strict=False):
                # A bridge's own __setattr__ would put it on the block it stands for.
                vars(block)["forward"] = _identity_block(form)
            yield [(hook_name(layer, "resid_pre"), lambda value, hook: stream)] if layer else []
        finally:
            for block, forward in zip(below, own, strict=True):
                vars(block).pop("forward", None)
                if forward is not None:
                    vars(block)["forward"] = forward

    def _see(self, block: Any, arguments: Any, output: Any) -> None:
        single = isinstance(output, tuple) and len(output) == 1 and isinstance(output[0], Tensor)
        self._forms.append(tuple if single else Tensor if isinstance(output, Tensor) else None)

    def _taker(self, layer: int) -> Callable[..., None]:
        def take(value: Tensor, hook: Any) -> None:
            self._kept[layer] = value

        return take


def run_replacing_each(
    model: Model,
    prompts: Sequence[Sequence[int]],
    heads: Sequence[HeadIndex],
    instead: Mapping[int, Float[Tensor, "head d_head"]],
    logits: Callable[[int, Float[Tensor, "batch pos vocab"], PromptBatch], None],
    *,
    budget: int = DEFAULT_BUDGET,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Run prompts through the whole model, then once for each head with that head alone replaced.

    Each of these runs begins at the layer of its head. Whether the host does that exactly is first measured on a
    prompt; where it does not, whole passes are made.

    Args:
        model: TransformerBridge or HookedTransformer.
        prompts: Token ids of each prompt.
        heads: The heads.
        instead: What heads hand to W_O in place of what they computed, by layer.
        logits: Receives the number of the run (0: the whole model), its logits, and its batch.
        budget: Bytes a batch may take, which sets its size.
        progress: Called after each run with the number of prompts in it.
    """
    check_prompts(model, prompts)
    sizes, device, layers = sizes_of(model), model_device(model), sorted({head.layer for head in heads})
    kept = 4 * len(layers) * sizes.d_model
    with state_restored(model):
        shortest = min(prompts, key=len)
        begins = _begins(model, torch.tensor([list(shortest)], device=device), layers)
        for batch in batches(prompts, lambda length: sizes.bytes_of(length) + kept * length, budget, device):
            streams = Streams(model)
            with streams.seen(layers) as keeping:
                logits(0, _logits(model, batch.ids, keeping), batch)
            if progress is not None:
                progress(len(batch.rows))
            for number, head in enumerate(heads, 1):
                with streams.starting_at(head.layer if begins else 0) as putting_in:
                    logits(number, _logits(model, batch.ids, [*putting_in, _replacing(head, instead)]), batch)
                if progress is not None:
                    progress(len(batch.rows))


def _begins(model: Model, ids: Int[Tensor, "one pos"], layers: Sequence[int]) -> bool:
    """Whether runs that begin at these layers give what a whole pass gives."""
    streams = Streams(model)
    with streams.seen(layers) as keeping:
        whole = _logits(model, ids, keeping)
    if not streams.can_begin:
        return False
    for layer in layers:
        with streams.starting_at(layer) as putting_in:
            found = _logits(model, ids, putting_in)
        if not bool((found - whole).abs().max() <= _SAME * whole.abs().max()):
            return False
    return True


def _logits(model: Model, ids: Int[Tensor, "batch pos"], hooks: Hooks) -> Float[Tensor, "batch pos vocab"]:
    with model.hooks(fwd_hooks=hooks):
        logits: Tensor = model(ids, return_type="logits")
    return logits


def _replacing(head: HeadIndex, instead: Mapping[int, Tensor]) -> tuple[str, Callable[..., Tensor]]:
    vectors = instead[head.layer]
    off = torch.arange(len(vectors)) == head.head
    return hook_name(head.layer, "z"), lambda z, hook: replaced(z, off, vectors)


def _identity_block(form: type | None) -> Callable[..., Any]:
    def forward(*arguments: Any, **named: Any) -> Any:
        value = arguments[0] if arguments else named["hidden_states"]
        return (value,) if form is tuple else value

    return forward
