"""Small shared vocabulary: how a head is named, which presets and circuits exist.

A head is written ``L23H4`` everywhere: in results, JSON, tables, figures and on the command line.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, get_args, runtime_checkable

from .errors import UsageError

Circuit: TypeAlias = Literal["ov", "qk"]
"""Which bilinear map of a head: what it writes (``ov``) or where it looks (``qk``)."""

Preset: TypeAlias = Literal["context", "folded", "maps"]
"""Which vectors of a token a circuit reads: what the layer reads at the token behind neutral prompts
(``context``), what it computes for the token alone (``folded``), or those of the published recipe (``maps``)."""

Basis: TypeAlias = Literal["raw", "folded", "centred"]
"""State of the loaded weights; ``centred`` means processed without folding the norms."""


AblationMethod: TypeAlias = Literal["zero", "mean"]
"""What an ablated head writes instead: nothing, or what it writes on average."""

ATTENTION_COMPONENTS: tuple[str, ...] = ("attn.q", "attn.k", "attn.v", "attn.o")
"""The matrices of a layer that consist of heads, in the order of the maps."""

MLP_COMPONENTS: tuple[str, ...] = ("mlp.up", "mlp.down", "mlp.gate")
"""The other matrices of a layer; models without a gate have the first two."""

WRITING_COMPONENTS: tuple[str, ...] = ("attn.o", "mlp.down")
"""Matrices that write to the residual stream; the others read from it."""

Positions: TypeAlias = Literal["answer", "last"]
"""Where heads are read: at the answer's tokens, or at the last token before it."""

Origin: TypeAlias = Literal["upper", "lower"]
"""Whether the first row of a picture is drawn at the top or at the bottom."""

GroupMethod: TypeAlias = Literal["auto", "spectral", "components"]
"""How groups of tokens are found in a graph of their affinities."""

Combine: TypeAlias = Literal["mean", "max"]
"""How the attention of several heads becomes one matrix."""

Measure: TypeAlias = Literal["cosine", "dot"]
"""How the association of two vectors is measured."""


class _AcceptsAnything(type(Protocol)):  # type: ignore[misc]
    """Runtime type checkers let anything pass for a model, so that what is not one meets our own sentence."""

    def __instancecheck__(cls, instance: object) -> bool:
        return True


@runtime_checkable
class Model(Protocol, metaclass=_AcceptsAnything):
    """A loaded TransformerLens model: a ``TransformerBridge``, or a ``HookedTransformer`` of TransformerLens 3.

    For static type checkers: both classes satisfy it. Parts of the model (``embed``, ``blocks``, ``unembed``, ...) are
    looked up by name, since a bridge declares none of them.
    """

    cfg: Any
    tokenizer: Any

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run token ids or a text."""

    def __getattr__(self, name: str) -> Any:
        """A part of the model."""


# Python reads no number of thousands of digits.
_HEAD_NAME = re.compile(r"[Ll](\d{1,9})[Hh](\d{1,9})")
_LAYER_NAME = re.compile(r"[Ll]?(\d{1,9})")


@dataclass(frozen=True, order=True)
class HeadIndex:
    """One attention head, printed and parsed as ``L{layer}H{head}``.

    Attributes:
        layer: Layer, counted from 0.
        head: Head within the layer, counted from 0.

    Example:
        >>> from tl_headmaps import HeadIndex
        >>> HeadIndex.parse("L23H4")
        HeadIndex(layer=23, head=4)
        >>> str(HeadIndex(23, 4))
        'L23H4'
    """

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"

    @classmethod
    def parse(cls, name: str) -> "HeadIndex":
        """Read a head name such as ``L23H4`` (case does not matter)."""
        match = _HEAD_NAME.fullmatch(name.strip())
        if match is None and _is_layer(name):
            raise UsageError(f"{name!r} is a layer, and one head is needed. Write for example '{name.strip()}H0'.")
        if match is None:
            raise UsageError(
                f"{name!r} is not the name of a head. Heads are written like 'L23H4': "
                "layer 23, head 4, both counted from 0."
            )
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def of(cls, head: "HeadLike") -> "HeadIndex":
        """Accept a name, a ``(layer, head)`` pair or a HeadIndex."""
        if isinstance(head, HeadIndex):
            return head
        if isinstance(head, str):
            return cls.parse(head)
        pair = tuple(head) if _is_listed(head) else ()
        if len(pair) != 2 or not all(map(is_index, pair)):
            raise UsageError(f"{head!r} is not a head. Write 'L23H4' or (23, 4); 'L23' is all heads of layer 23.")
        return cls(*map(index, pair))

    def check(self, n_layers: int, n_heads: int) -> "HeadIndex":
        """Return the head itself if a model of this size has it, else raise."""
        if not (0 <= self.layer < n_layers and 0 <= self.head < n_heads):
            raise UsageError(
                f"There is no head {self}: the model has layers 0 to {n_layers - 1} "
                f"with heads 0 to {n_heads - 1}, so the last head is "
                f"{HeadIndex(n_layers - 1, n_heads - 1)}."
            )
        return self


HeadLike: TypeAlias = HeadIndex | str | Iterable[SupportsIndex]
LayerLike: TypeAlias = SupportsIndex | str


def is_index(value: object) -> bool:
    """Whether a value counts something: a whole number, also of numpy or torch, but not True or False."""
    if isinstance(value, bool | str) or "bool" in str(getattr(value, "dtype", "")):
        return False
    try:
        index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _is_listed(value: object) -> bool:
    """Whether a value has entries; 0-d arrays are scalars."""
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0


def _is_layer(name: object) -> bool:
    return isinstance(name, str) and name.strip()[:1] in ("L", "l") and bool(_LAYER_NAME.fullmatch(name.strip()))


def head_list(heads: Any, known: Sequence[HeadIndex]) -> list[HeadIndex]:
    """One head or several, in the order given: the one place where heads are read from what users write.

    Args:
        heads: A name, a HeadIndex, a (layer, head) pair, or several of these in a list or with commas between them.
            ``"L12"`` means all heads of layer 12.
        known: All heads there are, from which those of a layer are taken.

    Example:
        >>> known = [HeadIndex(layer, head) for layer in range(3) for head in range(2)]
        >>> [str(head) for head in head_list("L2H1, L0", known)]
        ['L2H1', 'L0H0', 'L0H1']
    """
    chosen: dict[HeadIndex, None] = {}
    for read in _heads_and_layers(heads):
        chosen |= dict.fromkeys([read] if isinstance(read, HeadIndex) else _heads_of(read, known))
    return list(chosen)


def check_head_names(heads: str) -> str:
    """Return names of heads and layers if they are spelled right, else raise: no model is needed for that."""
    _heads_and_layers(heads)
    return heads


def _heads_and_layers(heads: Any) -> list[HeadIndex | int]:
    """Heads, and numbers of layers that stand for all of theirs."""
    one = isinstance(heads, str | HeadIndex) or not _is_listed(heads)
    parts = [heads] if one else list(heads)
    if len(parts) == 2 and all(map(is_index, parts)):
        parts = [parts]
    names = [name for part in parts for name in (_comma_parts(part) if isinstance(part, str) else [part])]
    return [layer_list(name)[0] if _is_layer(name) else HeadIndex.of(name) for name in names]


def _comma_parts(text: str) -> list[str]:
    return [part for part in text.split(",") if part.strip()]


def _heads_of(layer: int, known: Sequence[HeadIndex]) -> list[HeadIndex]:
    heads = [head for head in known if head.layer == layer]
    if not heads:
        listed = sorted({head.layer for head in known})
        layers = f"{listed[0]} to {listed[-1]}" if len(listed) > 8 else ", ".join(map(str, listed))
        raise UsageError(f"There are no heads of layer {layer} here; there are heads of layers {layers}.")
    return heads


def layer_list(layers: Any) -> list[int]:
    """One layer or several: 12, ``"L12"``, ``"3,4"``, or a list of these.

    Example:
        >>> layer_list("L3, 4"), layer_list(12), layer_list(range(2))
        ([3, 4], [12], [0, 1])
    """
    if isinstance(layers, str):
        layers = _comma_parts(layers)
    numbers = []
    for layer in layers if _is_listed(layers) else [layers]:
        match = _LAYER_NAME.fullmatch(layer.strip()) if isinstance(layer, str) else None
        if match is None and not is_index(layer):
            raise UsageError(f"{layer!r} is not the number of a layer. Write 12, or 'L12'.")
        numbers.append(index(layer) if match is None else int(match[1]))
    return numbers


def by_layer(heads: Iterable[HeadIndex]) -> dict[int, list[int]]:
    """Head numbers of each layer that has one of these heads, in the order given.

    Example:
        >>> by_layer([HeadIndex(2, 0), HeadIndex(5, 1), HeadIndex(2, 3)])
        {2: [0, 3], 5: [1]}
    """
    layers: dict[int, list[int]] = {}
    for head in heads:
        layers.setdefault(head.layer, []).append(head.head)
    return layers


MOST_DRAWS = 100_000
"""Draws of a null, at most: p-values down to 1e-5. More would take days, or all memory, before anything is told."""


def check_choice(value: object, choices: object, name: str) -> None:
    """Raise a UsageError unless ``value`` is one of the choices of a Literal."""
    allowed = get_args(choices)
    if not isinstance(value, str) or value not in allowed:
        if name == "preset" and isinstance(value, str) and value == "met":
            raise UsageError("preset='met' is called 'context' now. Give preset='context'.")
        raise UsageError(f"{name}={value!r} is not known. Choose one of: {', '.join(map(repr, allowed))}.")
