"""Which heads bring two tokens of a text closer together: value mixing, for all heads at once."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.running.activations import LayerActivations, run_or_read
from ..capture.running.text import EncodedText
from ..capture.weights import HeadWeights
from ..core.ambient import steady
from ..core.errors import UsageError
from ..core.provenance import Provenance
from ..core.types import Measure, Model, check_choice
from ..core.vocabulary import TokenLike, token_position
from ..renderers.figure import Figure
from ..renderers.grids import MapLayer
from ..renderers.heat import head_map
from ..renderers.text import signed, significant, table_text, word
from ..results import HeadMaps, cells
from ..scorers.mixing import cosines, dots, mixed
from .value_mixing.call import key_values

_MAPS = ("before_dot", "after_dot", "others_dot", "before_cosine", "after_cosine", "others_cosine", "attention")
"""Fields with one value per layer and head."""


@dataclass(frozen=True, eq=False, repr=False)
class AssociationHeads(HeadMaps):
    """Head maps of the association of a query with a key, before and after each head's attention.

    Attributes:
        tokens: Tokens of the text.
        query, key: Indices of the two tokens.
        measure: Which measure :attr:`values` and :meth:`top` use.
        before_dot, after_dot: ``v_q . v_k`` and ``v_hat_q . v_k`` in each head's value space.
        before_cosine, after_cosine: The same as cosines.
        others_dot, others_cosine: The null: mean gain of the query with the other tokens it can see (not itself,
            not the key); NaN where there is none.
        attention: Attention of the query to the key.

    Example:
        >>> from tl_headmaps import association_heads, load_default_model
        >>> heads = association_heads(load_default_model(), "Birds sometimes walk", "walk", "sometimes")
        >>> heads.tokens[heads.query], heads.tokens[heads.key], heads.measure
        (' walk', ' sometimes', 'cosine')
        >>> round(float(heads.attention[16, 0]), 2), round(float(heads.specific("cosine")[16, 0]), 2)
        (0.84, 0.5)
    """

    kind: ClassVar[str] = "association_heads"
    methods: ClassVar[tuple[str, ...]] = ("elhage2021framework",)
    json_axes: ClassVar[dict[str, str | None]] = {"layer": None, "head": None, "token": "tokens"}
    json_extra: ClassVar[tuple[str, ...]] = ("notes",)
    nullable: ClassVar[tuple[str, ...]] = _MAPS
    tokens: tuple[str, ...]
    query: int
    key: int
    measure: Measure
    before_dot: Float[Tensor, "layer head"]
    after_dot: Float[Tensor, "layer head"]
    others_dot: Float[Tensor, "layer head"]
    before_cosine: Float[Tensor, "layer head"]
    after_cosine: Float[Tensor, "layer head"]
    others_cosine: Float[Tensor, "layer head"]
    attention: Float[Tensor, "layer head"]
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "layer head"]:
        """The gain: association after minus before."""
        return self.gain(self.measure)

    def gain(self, measure: Measure) -> Float[Tensor, "layer head"]:
        """The gain in one measure."""
        check_choice(measure, Measure, "measure")
        after: Tensor = getattr(self, f"after_{measure}")
        before: Tensor = getattr(self, f"before_{measure}")
        return after - before

    def specific(self, measure: Measure) -> Float[Tensor, "layer head"]:
        """The gain above the mean gain with the other tokens."""
        gain, others = self.gain(measure), getattr(self, f"others_{measure}")
        specific: Tensor = gain - others.nan_to_num(nan=0.0)
        return specific

    @property
    def notes(self) -> tuple[str, ...]:
        """What to keep in mind when reading the map, as sentences."""
        notes = []
        if self.key > self.query:
            notes.append("the key comes after the query, which a causal head cannot see")
        if self.key == 0:
            notes.append(
                "the key is the first token, where many heads park their attention regardless of its meaning; "
                "put a word or BOS in front of it (prepend_bos) for a map that says more"
            )
        return tuple(notes)

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per head."""
        axes = {name: self.axes[name] for name in ("layer", "head")}
        for at, labels in cells(axes, self.attention):
            yield {**labels, **{name: float(getattr(self, name)[at]) for name in _MAPS}}

    def figure(self) -> Figure:
        """Gain in cosine and in dot product, and the attention behind it."""
        query, key = self.tokens[self.query].strip(), self.tokens[self.key].strip()
        gains = {
            "cosine": (self.gain("cosine"), self.before_cosine, self.after_cosine),
            "dot product": (self.gain("dot"), self.before_dot, self.after_dot),
        }
        layers = [
            MapLayer(f"gain in {name}", gain, details={"before": before, "after": after}, unit=f"gain in {name}")
            for name, (gain, before, after) in gains.items()
        ]
        if self.measure == "dot":
            layers.reverse()
        layers.append(MapLayer("attention", self.attention, unit="attention"))
        return head_map(
            layers,
            title=f"Heads that bring '{query}' and '{key}' together",
            unit="gain",
            switches=("measure", "map"),
            empty=self.provenance.short_rows,
            note=" ".join(self.notes),
        )

    def __str__(self) -> str:
        query, key = (word(self.tokens[token]) for token in (self.query, self.key))
        rows = []
        for head, gain in self.top(10):
            at = (head.layer, head.head)
            before, after, others = (
                getattr(self, f"{when}_{self.measure}")[at] for when in ("before", "after", "others")
            )
            shown = [significant(float(number)) for number in (self.attention[at], before, after)]
            rows.append([str(head), *shown, signed(gain), significant(float(others))])
        titles = ["attention", "before", "after", "gain", "others"]
        columns = [(f"best of {self.n_measured}", "left"), *((title, "right") for title in titles)]
        title = f"Heads that bring {query!r} closer to {key!r} ({self.measure} of value vectors)"
        note = (
            "gain: association after attention minus before; others: mean gain with the other tokens the query can see"
        )
        return "\n\n".join([title, table_text(columns, rows), note, *(f"note: {text}" for text in self.notes)])


@steady
def association_heads(
    model: Model,
    text: Any,
    query: TokenLike,
    key: TokenLike,
    *,
    measure: Measure = "cosine",
    prepend_bos: bool | None = None,
    cache: Any = None,
) -> AssociationHeads:
    """Head map of the gain: association of ``query`` with ``key`` after each head's attention, minus before.

    Args:
        model: A TransformerBridge or HookedTransformer.
        text: A text, or its token ids.
        query: The token whose vector changes: its text, ``walk#2`` for the second of several, or an index
            (-1 is the last).
        key: The token it is compared with.
        measure: What heads are ranked by. Value vectors of different heads differ in length, so cosines are easier to
            compare between heads than dot products. The result holds both.
        prepend_bos: Begin the text with BOS; by default as the model does. Token ids are taken as they are.
        cache: An ``ActivationCache`` of this very text, from ``model.run_with_cache``; the model is then not run.

    Example:
        >>> from tl_headmaps import association_heads, load_default_model
        >>> heads = association_heads(load_default_model(), "Birds sometimes walk", "walk", "sometimes")
        >>> [(str(head), round(gain, 2)) for head, gain in heads.top(2)]
        [('L16H0', 0.79), ('L0H3', 0.78)]
    """
    check_choice(measure, Measure, "measure")
    prompt = EncodedText.of(model, text, prepend_bos=prepend_bos, least=2, what="an association needs two")
    q, k = token_position(prompt.tokens, query), token_position(prompt.tokens, key)
    if q == k:
        raise UsageError(f"Query and key are the same token, {q} {prompt.tokens[q]!r}. Choose two different ones.")
    weights = HeadWeights.of(model)
    weights.require_own_values("value vectors and their associations")
    weights.require_plain_mixing("Associations", up_to_values=True)
    maps = {name: torch.full((weights.n_layers, weights.n_heads), float("nan")) for name in _MAPS}
    others = [token for token in range(q) if token != k]

    def reduce(seen: LayerActivations) -> None:
        layer = weights.layer(seen.layer)
        groups = layer.mixed(key_values(seen, layer.shape.n_kv_heads).float()).cpu()
        rows = seen["pattern"][0, :, q].to("cpu", torch.float32)
        for head, row in enumerate(rows):
            values = groups[layer.shape.group_of(head)]
            own, moved = values[q][None], mixed(row[None], values)
            for name, measured in (("dot", dots), ("cosine", cosines)):
                before, after = measured(own, values)[0], measured(moved, values)[0]
                maps[f"before_{name}"][seen.layer, head] = before[k]
                maps[f"after_{name}"][seen.layer, head] = after[k]
                maps[f"others_{name}"][seen.layer, head] = (after - before)[others].mean() if others else float("nan")
            maps["attention"][seen.layer, head] = row[k]

    run_or_read(model, prompt.ids, cache, read=("pattern", "v"), reduce=reduce)
    options = {
        "query": q,
        "key": k,
        "measure": measure,
        "prepend_bos": prompt.prepend_bos,
        "from_cache": cache is not None,
    }
    return AssociationHeads(
        tokens=prompt.tokens,
        query=q,
        key=k,
        measure=measure,
        provenance=weights.provenance(runs_model=True, options=options),
        **maps,
    )
