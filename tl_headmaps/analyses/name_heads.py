"""A name for what each head does, and how many heads earn one."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.weights import HeadWeights
from ..core.errors import UsageError
from ..core.options import public
from ..core.provenance import Provenance
from ..core.types import Circuit, HeadIndex, HeadLike, Model, Preset
from ..naming.namer import UNCLEAR, HeadName
from ..renderers.figure import Figure
from ..renderers.grids import MapLayer, name_layer
from ..renderers.heat import head_map
from ..renderers.text import number, table_text, wrapped
from ..results import Result, largest_heads
from ..results.table import ComparedMaps, frozen_result
from ..scorers.components import thirds_of
from .salient_operations import Vocabulary, failure_lines, salient_operations

if TYPE_CHECKING:
    from typing import Self

THIRDS = ("early", "middle", "late")

PUBLISHED_COVERAGE = (
    "Published of other, larger models (MAPS paper): a person or a large language model could describe 20-60% of the "
    "heads of early layers, 60-96% of later ones. There was no null, so these shares cannot be compared with ours."
)


@frozen_result
class HeadNames(Result):
    """Names of all heads, by layer and head.

    Attributes:
        circuit: ``"ov"`` or ``"qk"``.
        names: The name of each head with its evidence, by layer; a layer without heads has none.
        left_out: How many tokens of the vocabulary were not considered, by reason.
        failed_predicates: Predicates that raised, with their errors; they were left out.

    Example:
        >>> from dataclasses import replace
        >>> from tl_headmaps import HeadWeights, load_default_model, name_heads
        >>> weights = HeadWeights.from_model(load_default_model())
        >>> first = replace(weights, n_layers=1, model=None)  # the first layer alone: all of them take a minute
        >>> names = name_heads(first, progress=False)
        >>> names.coverage()  # share of heads with a name, by third of the model
        {'all': 0.0, 'middle': 0.0}
        >>> round(names.name("L0H5").score, 2), names.named()
        (0.7, {})
    """

    kind: ClassVar[str] = "head_names"
    paper_columns: ClassVar[tuple[str, ...]] = ("head", "name", "best", "score", "null_mean", "q_value")
    methods: ClassVar[tuple[str, ...]] = ("elhelo2024maps", "elhage2021framework", "benjamini1995controlling")
    circuit: Circuit
    names: tuple[tuple[HeadName, ...], ...]
    left_out: dict[str, int]
    failed_predicates: dict[str, str]
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "layer head"]:
        """Share of salient mappings the best predicate explains; NaN in layers without heads."""
        return self._map("score")

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Layers, and heads of the layer with most of them."""
        return {"layer": list(range(len(self.names))), "head": list(range(max(map(len, self.names))))}

    def _map(self, column: str) -> Float[Tensor, "layer head"]:
        values = torch.full([len(labels) for labels in self.axes.values()], torch.nan)
        for head, entry in self._entries():
            values[head.layer, head.head] = getattr(entry, column)
        return values

    def _entries(self) -> Iterator[tuple[HeadIndex, HeadName]]:
        for layer, row in enumerate(self.names):
            for head, entry in enumerate(row):
                yield HeadIndex(layer, head), entry

    def name(self, head: HeadLike) -> HeadName:
        """The name of one head, with its evidence."""
        index = HeadIndex.of(head).check(*map(len, self.axes.values()))
        if index.head >= len(self.names[index.layer]):
            mixer = self.provenance.mixers.get(str(index.layer), "something else")
            raise UsageError(
                f"There is no head {index}: the tokens of layer {index.layer} are mixed by {mixer}. Choose another."
            )
        return self.names[index.layer][index.head]

    def head_map(self) -> Float[Tensor, "layer head"]:
        """The same map, under the name that all results have for it."""
        return self.values

    def top(self, n: int = 5) -> list[tuple[HeadIndex, float]]:
        """The ``n`` heads whose names explain most of their salient mappings; ``unclear`` ones left out."""
        values = self.values
        for head, entry in self._entries():
            if entry.name == UNCLEAR:
                values[head.layer, head.head] = torch.nan
        return largest_heads(values, n)

    def named(self) -> dict[str, list[HeadIndex]]:
        """Heads by name, the most frequent name first; ``unclear`` ones left out."""
        heads: dict[str, list[HeadIndex]] = {}
        for head, entry in self._entries():
            if entry.name != UNCLEAR:
                heads.setdefault(entry.name, []).append(head)
        return dict(sorted(heads.items(), key=lambda item: (-len(item[1]), item[0])))

    def coverage(self) -> dict[str, float]:
        """Share of heads with a name: of the whole model, and of the early, middle and late third of its layers."""
        thirds = zip(THIRDS, thirds_of(len(self.names)), strict=True)
        third = {layer: name for name, layers in thirds for layer in range(layers.start, layers.stop)}
        named: dict[str, list[bool]] = {"all": []}
        for head, entry in self._entries():
            for part in ("all", third[head.layer]):
                named.setdefault(part, []).append(entry.name != UNCLEAR)
        return {part: float(torch.tensor(heads).float().mean()) for part, heads in named.items()}

    def compared_maps(self) -> ComparedMaps:
        """How well heads are explained, and which of them have a name, for comparisons."""
        return ComparedMaps(
            over="map",
            measure="share of mappings explained",
            names=("best predicate",),
            values=self.values[None],
            chosen=self.named(),
            chosen_as="are named",
            fixed={"circuit": self.circuit},
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "circuit": self.circuit,
            "axes": self.axes,
            "coverage": self.coverage(),
            "heads": [{"head": str(head), **entry.to_dict()} for head, entry in self._entries()],
            "left_out": self.left_out,
            "failed_predicates": self.failed_predicates,
            "provenance": self.provenance.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        rows: list[list[dict[str, Any]]] = [[] for _ in values["axes"]["layer"]]
        for entry in values["heads"]:
            rows[HeadIndex.parse(entry["head"]).layer].append(entry)
        return super().from_dict({**values, "names": rows})

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per head."""
        for head, entry in self._entries():
            yield {"layer": head.layer, "head": head.head, **entry.to_dict()}

    @property
    def _caption(self) -> str:
        return f"Names of heads, {self.circuit.upper()} circuits, preset {self.provenance.options['preset']}"

    def figure(self) -> Figure:
        """The name of each head, or the share of its salient mappings that its best predicate explains."""
        null, tested = self._map("null_mean"), {"q over all heads and predicates": self._map("q_value")}
        rows: list[list[str | None]] = [[None] * len(self.axes["head"]) for _ in self.names]
        for head, entry in self._entries():
            rows[head.layer][head.head] = entry.name
        details = {"share explained": self.values, "null": null, **tested}
        covered = ", ".join(f"{part} {share:.0%}" for part, share in self.coverage().items())
        return head_map(
            [
                name_layer("", rows, unclear=UNCLEAR, group="names", details=details),
                MapLayer("", self.values, group="share explained", null=null, details=tested),
            ],
            title=self._caption,
            unit="share of mappings explained",
            signed=False,
            switches=("map", "show"),
            drill={str(head): {entry.name: entry.evidence()} for head, entry in self._entries()},
            empty=self.provenance.short_rows,
            note=self._noted(f"Heads with a name: {covered}. Search finds a name, such as copy.", " "),
        )

    def __str__(self) -> str:
        """How many heads have a name, which names, and the heads of each with the clearest first."""
        shares = [[part, f"{share:.0%}"] for part, share in self.coverage().items()]
        rows = []
        for name, heads in self.named().items():
            ranked = sorted(heads, key=lambda head: (self.name(head).p_value, head))
            shown = " ".join(f"{head} {number(self.name(head).score)}" for head in ranked[:6])
            rows.append([name, len(heads), shown + (" ..." if len(heads) > 6 else "")])
        parts = [
            self._caption,
            table_text([("layers", "left"), ("named", "right")], shares),
            table_text([("name", "left"), ("heads", "right"), ("clearest, with the share explained", "left")], rows),
            wrapped(
                "named: heads whose best predicate explains 15% of their salient mappings or more and beats its null "
                "(false discovery rate 5% over all heads and predicates)"
            ),
            wrapped(PUBLISHED_COVERAGE),
            *failure_lines(self.failed_predicates),
        ]
        return self._noted("\n\n".join(parts))


@public
def name_heads(
    model: Model | HeadWeights,
    *,
    preset: Preset = "folded",
    circuit: Circuit = "ov",
    vocabulary: Vocabulary = "all",
    prompts: str | Sequence[str] | None = None,
    prepend_bos: bool | None = None,
    run_dir: str | Path | None = None,
    executor: Any = None,
    progress: bool = True,
) -> HeadNames:
    """The best name for every head of a model, as :func:`salient_operations` gives them, by layer and head.

    Args:
        model: A TransformerBridge, a HookedTransformer, or HeadWeights.
        preset: ``"context"`` (the whole vocabulary is read, which takes minutes), ``"folded"``: what the model computes
            for a token without context, or ``"maps"``: the published recipe.
        vocabulary: ``"all"`` tokens, ``"words"`` among them, or a function of a token's text.

    Example:
        >>> from dataclasses import replace
        >>> from tl_headmaps import HeadWeights, load_default_model, name_heads
        >>> weights = HeadWeights.from_model(load_default_model())
        >>> first = replace(weights, n_layers=1, model=None)  # the first layer alone: all of them take a minute
        >>> names = name_heads(first, progress=False)
        >>> names.name("L0H5").name, names.name("L0H5").best  # dealt at random, punctuation meets punctuation as often
        ('unclear', 'punctuation to punctuation')
    """
    weights = HeadWeights.of(model)
    # One token and target are enough: names always rest on the same number of them, whatever is shown.
    operations = salient_operations(
        weights,
        n_tokens=1,
        n_targets=1,
        preset=preset,
        circuit=circuit,
        vocabulary=vocabulary,
        prompts=prompts,
        prepend_bos=prepend_bos,
        run_dir=run_dir,
        executor=executor,
        progress=progress,
    )
    rows: list[list[HeadName]] = [[] for _ in range(weights.n_layers)]
    for head, entry in zip(operations.heads, operations.names, strict=True):
        rows[head.layer].append(entry)
    return HeadNames(
        circuit=circuit,
        names=tuple(map(tuple, rows)),
        left_out=operations.left_out,
        failed_predicates=operations.failed_predicates,
        provenance=operations.provenance,
    )
