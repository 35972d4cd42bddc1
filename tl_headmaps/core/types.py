"""Small shared vocabulary: how a head is named, which presets and circuits exist.

A head is written ``L23H4`` everywhere: in results, JSON, tables, figures and on the command line.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from .errors import UsageError

Circuit: TypeAlias = Literal["ov", "qk"]
"""Which bilinear map of a head: what it writes (``ov``) or where it looks (``qk``)."""

Preset: TypeAlias = Literal["met", "folded", "maps"]
"""Which vectors of a token a circuit reads: what the layer reads when the model meets the token behind neutral prompts
(``met``), what it computes for the token without context (``folded``), or those of the published recipe (``maps``)."""

Basis: TypeAlias = Literal["raw", "folded", "centred"]
"""State of the loaded weights; ``centred`` means processed without folding the norms."""

PromptSources: TypeAlias = Literal["single", "multi"]
"""Whether prompts are made from sources of one token, or from those of several."""

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


class _NeverRefuses(type(Protocol)):  # type: ignore[misc]
    """Runtime type checkers let anything pass for a model, so that what is not one meets our own sentence."""

    def __instancecheck__(cls, instance: object) -> bool:
        return True


@runtime_checkable
class Model(Protocol, metaclass=_NeverRefuses):
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


_HEAD_NAME = re.compile(r"[Ll](\d+)[Hh](\d+)")


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
        pair = tuple(head)
        if len(pair) != 2 or not all(isinstance(part, int) for part in pair):
            raise UsageError(f"{head!r} is not a head. Write 'L23H4' or (23, 4).")
        return cls(*pair)

    def check(self, n_layers: int, n_heads: int) -> "HeadIndex":
        """Return the head itself if a model of this size has it, else raise."""
        if not (0 <= self.layer < n_layers and 0 <= self.head < n_heads):
            raise UsageError(
                f"There is no head {self}: the model has layers 0 to {n_layers - 1} "
                f"with heads 0 to {n_heads - 1}, so the last head is "
                f"{HeadIndex(n_layers - 1, n_heads - 1)}."
            )
        return self


HeadLike: TypeAlias = HeadIndex | str | Iterable[int]


def head_list(heads: Any) -> list[HeadLike]:
    """One head or several: a name, a HeadIndex, a (layer, head) pair, or a list of these."""
    if isinstance(heads, str | HeadIndex):
        return [heads]
    listed = list(heads)
    return [(listed[0], listed[1])] if len(listed) == 2 and all(type(part) is int for part in listed) else listed


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


def head_names(heads: Any) -> list[str] | None:
    """Sorted names for provenance; None for all heads."""
    return None if heads is None else sorted(str(HeadIndex.of(head)) for head in head_list(heads))


def check_seed(seed: Any) -> None:
    """Raise a UsageError for a seed that not all generators take."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
        shown = seed if not isinstance(seed, int) or abs(seed) < 10**30 else "a number of more than 30 digits"
        raise UsageError(f"seed={shown!r:.40} is not a seed. Give a whole number from 0 to {2**63 - 1}.")


def check_choice(value: str, choices: object, name: str) -> None:
    """Raise a UsageError unless ``value`` is one of the choices of a Literal."""
    allowed = get_args(choices)
    if value not in allowed:
        raise UsageError(f"{name}={value!r} is not known. Choose one of: {', '.join(map(repr, allowed))}.")
