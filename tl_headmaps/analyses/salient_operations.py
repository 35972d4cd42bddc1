"""What a head does when nobody says what to look for: its salient tokens, their targets, and a name.

The tokens a head does most about are those with the largest ratio of what it writes to what it reads. A head earns a
name if a predicate explains the targets of these tokens better than chance.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..capture.running.activations import prepends_bos
from ..capture.running.context import VOCABULARY_PROMPTS, context_parts, context_vectors, print_estimate, runnable
from ..capture.running.prompts import encode_prefixes
from ..capture.weights import HeadWeights
from ..circuits.extremes import entries, top_and_bottom
from ..circuits.maps import CircuitMaps, ContextSources
from ..circuits.ov import ov_maps
from ..core.errors import UsageError
from ..core.options import Count, public
from ..core.provenance import Provenance
from ..core.types import Circuit, HeadIndex, HeadLike, LayerLike, Model, Preset, by_layer, check_choice, head_list
from ..core.vocabulary import token_strings
from ..data.texts import neutral_prompts
from ..naming.namer import NAMING_TARGETS, NAMING_TOKENS, HeadName, Namer
from ..renderers.figure import Figure
from ..renderers.grids import MapLayer
from ..renderers.heat import head_map, token_grid
from ..renderers.listing import beside, table_figure
from ..renderers.tables import Table
from ..renderers.text import as_words, chance, quoted, table_text, visible
from ..renderers.text import number as decimal
from ..renderers.views import top_tokens_view
from ..results import Result
from ..results.table import frozen_result
from ..scorers.salience import UsableTokens, most_salient, salience, usable_tokens
from .sweep import LayerStep, ids_digest, sweep_layers

if TYPE_CHECKING:
    from typing import Self

Vocabulary: TypeAlias = Literal["all", "words"] | Callable[[str], bool]
"""Which tokens are considered as sources."""

View: TypeAlias = Literal["auto", "map", "table", "top_tokens"]

_ARRAYS = ("token_ids", "salience", "promoted_ids", "promoted_values", "suppressed_ids", "suppressed_values")
"""Fields with the heads as their first axis and the salient tokens as their second."""

_GRID_TOKENS, _GRID_TARGETS, _LEAST_COLUMNS = 6, 5, 3
"""Salient tokens of a head that its picture shows, how many targets of each it may choose from, and its columns."""

_FEW_HEADS = 12
_PRINTED_TARGETS = 3
_LISTED_TOKENS, _LISTED_TARGETS = 10, 3
"""What a pinned head lists in a map of all heads: more would make the page heavy."""

_MOST_ROWS, _TOKENS_OF_EACH = 60, 5
"""A text with more rows than a screen or two shows this many tokens of each head."""


@dataclass(frozen=True)
class OperationGrid:
    """What a head does, as a picture: a few of its salient tokens (rows) by targets of theirs (columns).

    Attributes:
        token_ids: The most salient tokens.
        target_ids: A target of each: the strongest one that the best predicate explains, or else the strongest.
        values: Entries of the map.
        explained: Whether the best predicate explains the target as one of the token's strongest.
    """

    token_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    explained: tuple[tuple[bool, ...], ...]

    def __post_init__(self) -> None:
        shape = [len(self.target_ids)] * len(self.token_ids)
        if any([len(row) for row in table] != shape for table in (self.values, self.explained)):
            raise ValueError("a grid whose rows are not as long as its columns are many")


@frozen_result
class SalientOperations(Result):
    """The most salient tokens of each head, with the targets they promote and suppress most, and names.

    Attributes:
        circuit: ``"ov"`` or ``"qk"``.
        heads: The heads, the first axis of every array.
        token_ids: Salient source tokens (for QK: query tokens), most salient first.
        salience: Their salience ratios.
        promoted_ids, promoted_values: Strongest targets of each, strongest first.
        suppressed_ids, suppressed_values: Most suppressed targets, most negative first.
        strings: Text of every token above, by id.
        names: What each head does, in one name.
        grids: The same as a picture of a few tokens.
        left_out: How many tokens of the vocabulary were not considered, by reason.
        failed_predicates: Predicates that raised, with their errors; they were left out.

    Example:
        >>> from tl_headmaps import load_default_model, salient_operations
        >>> operations = salient_operations(load_default_model(), "L0H5", n_tokens=10, n_targets=3, progress=False)
        >>> tuple(operations.salience.shape), tuple(operations.promoted_ids.shape)
        ((1, 10), (1, 10, 3))
        >>> operations.mappings("L0H5")[0], operations.name("L0H5").name
        (('.', [' ', ',', ' and']), 'unclear')
    """

    kind: ClassVar[str] = "salient_operations"
    methods: ClassVar[tuple[str, ...]] = ("elhelo2024maps", "elhage2021framework", "benjamini1995controlling")
    circuit: Circuit
    heads: tuple[HeadIndex, ...]
    token_ids: Int[Tensor, "head token"]
    salience: Float[Tensor, "head token"]
    promoted_ids: Int[Tensor, "head token target"]
    promoted_values: Float[Tensor, "head token target"]
    suppressed_ids: Int[Tensor, "head token target"]
    suppressed_values: Float[Tensor, "head token target"]
    strings: dict[int, str]
    names: tuple[HeadName, ...]
    grids: tuple[OperationGrid, ...]
    left_out: dict[str, int]
    failed_predicates: dict[str, str]
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "head token"]:
        """The salience ratios."""
        return self.salience

    def index_of(self, head: HeadLike) -> int:
        """Position of a head on the first axis."""
        index = HeadIndex.of(head)
        if index not in self.heads:
            listed = ", ".join(map(str, self.heads[:10])) + (", ..." if len(self.heads) > 10 else "")
            raise UsageError(f"This result has no head {index}; it has {listed}.")
        return self.heads.index(index)

    def name(self, head: HeadLike) -> HeadName:
        """The name of one head, with its evidence."""
        return self.names[self.index_of(head)]

    def mappings(self, head: HeadLike) -> list[tuple[str, list[str]]]:
        """Salient tokens of one head, each with the targets it promotes."""
        number = self.index_of(head)
        return [
            (self.strings[token], [self.strings[target] for target, _ in self._targets("promoted", number, place)])
            for place, token in enumerate(self.token_ids[number].tolist())
        ]

    def _targets(self, side: str, number: int, place: int) -> list[tuple[int, float]]:
        """Promoted or suppressed targets of a token, with their values."""
        ids, values = (getattr(self, f"{side}_{part}")[number, place].tolist() for part in ("ids", "values"))
        return list(zip(ids, values, strict=True))

    def top(self, n: int = 5) -> list[tuple[HeadIndex, float]]:
        """The ``n`` heads of which the best name explains most (ties: the first)."""
        scores = zip(self.heads, (name.score for name in self.names), strict=True)
        return sorted(scores, key=lambda entry: -entry[1])[:n]

    def select(self, heads: HeadLike | Iterable[HeadLike]) -> "SalientOperations":
        """The same result for some heads, in the order given."""
        numbers = [self.index_of(head) for head in head_list(heads, self.heads)]
        arrays = {name: getattr(self, name)[numbers] for name in _ARRAYS}
        used = _token_ids_in(arrays)
        return replace(
            self,
            heads=tuple(self.heads[i] for i in numbers),
            names=tuple(self.names[i] for i in numbers),
            grids=tuple(self.grids[i] for i in numbers),
            strings={token: text for token, text in self.strings.items() if token in used},
            **arrays,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: one operation per head."""
        return {
            "kind": self.kind,
            "circuit": self.circuit,
            "operations": [self._operation(number) for number in range(len(self.heads))],
            "left_out": self.left_out,
            "failed_predicates": self.failed_predicates,
            "provenance": self.provenance.to_dict(),
        }

    def _operation(self, number: int) -> dict[str, Any]:
        grid = self.grids[number]

        def token(token_id: int, **more: Any) -> dict[str, Any]:
            return {"token": self.strings[token_id], "id": token_id, **more}

        def targets(side: str, place: int) -> list[dict[str, Any]]:
            return [token(target, value=value) for target, value in self._targets(side, number, place)]

        return {
            "head": str(self.heads[number]),
            **self.names[number].to_dict(),
            "tokens": [
                token(
                    token_id,
                    salience=float(self.salience[number, place]),
                    promotes=targets("promoted", place),
                    suppresses=targets("suppressed", place),
                )
                for place, token_id in enumerate(self.token_ids[number].tolist())
            ],
            "grid": {
                "tokens": list(map(token, grid.token_ids)),
                "targets": list(map(token, grid.target_ids)),
                "values": grid.values,
                "explained": grid.explained,
            },
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        operations, strings = values["operations"], {}

        def ids(entries: list[dict[str, Any]]) -> list[int]:
            strings.update({entry["id"]: entry["token"] for entry in entries})
            return [entry["id"] for entry in entries]

        def targets(name: str, read: Callable[[list[dict[str, Any]]], list[Any]]) -> list[list[list[Any]]]:
            return [[read(token[name]) for token in operation["tokens"]] for operation in operations]

        def numbers(entries: list[dict[str, Any]]) -> list[float]:
            return [entry["value"] for entry in entries]

        grids = [operation["grid"] for operation in operations]
        fields: dict[str, Any] = {
            "heads": [operation["head"] for operation in operations],
            "token_ids": [ids(operation["tokens"]) for operation in operations],
            "salience": [[token["salience"] for token in operation["tokens"]] for operation in operations],
            "promoted_ids": targets("promotes", ids),
            "promoted_values": targets("promotes", numbers),
            "suppressed_ids": targets("suppresses", ids),
            "suppressed_values": targets("suppresses", numbers),
            "grids": [{**each, "token_ids": ids(each["tokens"]), "target_ids": ids(each["targets"])} for each in grids],
            "names": operations,
        }
        return super().from_dict({**values, **fields, "strings": strings})

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per head, salient token and target."""
        for number, head in enumerate(self.heads):
            for place, token in enumerate(self.token_ids[number].tolist()):
                for direction in ("promoted", "suppressed"):
                    for rank, (target, value) in enumerate(self._targets(direction, number, place)):
                        yield {
                            "head": str(head),
                            "name": self.names[number].name,
                            "token": self.strings[token],
                            "token_id": token,
                            "salience": float(self.salience[number, place]),
                            "direction": direction,
                            "rank": rank,
                            "target": self.strings[target],
                            "target_id": target,
                            "value": value,
                        }

    @property
    def _caption(self) -> str:
        return f"Salient operations, {self.circuit.upper()} circuits, preset {self.provenance.options['preset']}"

    @property
    def verbs(self) -> tuple[str, str]:
        """What a head does to the targets of a token: the strongest, and the weakest."""
        return ("promotes", "suppresses") if self.circuit == "ov" else ("attends to", "avoids")

    def token_rows(self, number: int, n_targets: int | None = None) -> list[list[str]]:
        """Salient tokens of one head for a table: token, salience, promoted and suppressed targets."""
        return [
            [
                quoted(self.strings[token]),
                f"{self.salience[number, place]:.3g}",
                *(
                    " ".join(
                        quoted(self.strings[target]) for target, _ in self._targets(side, number, place)[:n_targets]
                    )
                    for side in ("promoted", "suppressed")
                ),
            ]
            for place, token in enumerate(self.token_ids[number].tolist())
        ]

    def head_rows(self, head: HeadLike, *, full: bool = False, n: int | None = None) -> Table:
        """What the result says about one head: its first tokens with their targets, and the name these earn."""
        columns = [("token", "left"), ("salience", "right"), *((verb, "left") for verb in self.verbs)]
        return Table(columns, self.token_rows(self.index_of(head))[:n], _named(self.name(head)))

    def figure(self, *, view: View = "auto") -> Figure:
        """The salient tokens of each head with their targets.

        Args:
            view: ``"table"`` (the default up to a dozen heads) beside a small grid of each head, ``"map"`` of the
                names' scores with the tokens of a pinned head, or ``"top_tokens"``: the most promoted targets, drawn by
                circuitsvis.
        """
        check_choice(view, View, "view")
        if view == "top_tokens":
            tops = {head: self._strongest(number) for number, head in enumerate(self.heads)}
            return top_tokens_view(tops, title=self._caption)
        if view == "map" or (view == "auto" and len(self.heads) > _FEW_HEADS):
            return self._map()
        several = len(self.heads) > 1  # the grid of an only head says which it is
        rows, printed = [], []
        for number, (head, entry) in enumerate(zip(self.heads, self.names, strict=True)):
            named = [str(head), entry.name] if several else []
            shown = enumerate(self.token_rows(number))
            rows += [[*(named if place == 0 else [""] * len(named)), *row] for place, row in shown]
            # What a column of print has room for.
            few = [row[:3] for row in self.token_rows(number, _PRINTED_TARGETS)]
            titles = [("token", "left"), ("salience", "right"), (self.verbs[0], "left")]
            printed.append(f"{head}: {entry.name}\n{table_text(titles, few)}")
        columns = [*(("head", "name") if several else ()), "token", "salience", *self.verbs]
        table = Table([(column, "left") for column in columns], rows)
        listed = table_figure(table, title="Salient tokens", text="\n\n".join(printed))
        return beside([*map(self._grid, range(len(self.heads))), listed], title=self._caption, text=str(self))

    def _grid(self, number: int) -> Figure:
        """A few salient tokens by their targets, with the operation's name and score below."""
        grid, entry = self.grids[number], self.names[number]
        rows, columns = (as_words([self.strings[token] for token in ids]) for ids in (grid.token_ids, grid.target_ids))
        return token_grid(
            MapLayer("", torch.tensor(grid.values), marked=torch.tensor(grid.explained).float()),
            rows,
            columns,
            title=f"{self.heads[number]}: {entry.name}",
            unit="entry of the map",
            rows="source" if self.circuit == "ov" else "query",
            columns="target" if self.circuit == "ov" else "key",
            mark=f"{entry.best} explains this target",
            note=_named(entry),
        )

    def _map(self) -> Figure:
        values = torch.full(
            (1 + max(head.layer for head in self.heads), 1 + max(head.head for head in self.heads)), torch.nan
        )
        drill = {}
        for number, (head, entry) in enumerate(zip(self.heads, self.names, strict=True)):
            values[head.layer, head.head] = entry.score
            rows = [[row[0], row[2]] for row in self.token_rows(number, _LISTED_TARGETS)[:_LISTED_TOKENS]]
            drill[str(head)] = {"what it does": entry.evidence(), f"token, {self.verbs[0]}": rows}
        note = "Pin a head to see its name, its salient tokens and their strongest targets; search finds a token."
        return head_map(
            values,
            title=self._caption,
            unit="share of mappings the best predicate explains",
            signed=False,
            drill=drill,
            empty=self.provenance.short_rows,
            note=self._noted(note, " "),
        )

    def _strongest(self, number: int) -> list[tuple[str, float]]:
        """The largest values among a head's targets, each target once."""
        best: dict[int, float] = {}
        for place in range(self.token_ids.shape[1]):
            for target, value in self._targets("promoted", number, place):
                best[target] = max(value, best.get(target, value))
        ranked = sorted(best.items(), key=lambda item: (-item[1], item[0]))[:_LISTED_TOKENS]
        return [(self.strings[target], value) for target, value in ranked]

    def __str__(self) -> str:
        """Each head's name, then its salient tokens with what they promote and suppress."""
        parts = [self._caption]
        if self.left_out:
            counts = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
            parts.append(f"Tokens left out: {counts}")
        token = "token" if self.circuit == "ov" else "query"
        columns = [(token, "left"), ("salience", "right"), *((verb, "left") for verb in self.verbs)]
        n_tokens = self.salience.shape[1]
        shown = n_tokens if n_tokens * len(self.heads) <= _MOST_ROWS else min(n_tokens, _TOKENS_OF_EACH)
        for number, (head, entry) in enumerate(zip(self.heads, self.names, strict=True)):
            second = (
                "" if entry.runner_up is None else f"; runner-up: {entry.runner_up} {decimal(entry.runner_up_score)}"
            )
            table = table_text(columns, self.token_rows(number)[:shown])
            parts.append(f"{head}: {_named(entry)}{second}\n\n{table}")
        if shown < n_tokens:
            first = self.heads[0]
            parts.append(f"Of each head the {shown} most salient of {n_tokens} tokens; select('{first}') prints all.")
        return self._noted("\n\n".join([*parts, *failure_lines(self.failed_predicates)]))


def _token_ids_in(arrays: Mapping[str, Tensor]) -> set[int]:
    """Every token that occurs in the arrays of a result."""
    return {token for name in _ARRAYS if name.endswith("_ids") for token in arrays[name].unique().tolist()}


def _named(entry: HeadName) -> str:
    """A name with how well it explains what a head does, and how sure that is."""
    if entry.best is None:
        return entry.name
    named = entry.name if entry.best == entry.name else f"{entry.name}; best: {entry.best}"
    return f"{named} {decimal(entry.score)} · null {decimal(entry.null_mean)} · q {chance(entry.q_value)}"


def failure_lines(failed: Mapping[str, str]) -> list[str]:
    """A line for each predicate that raised."""
    return [f"Predicate {name!r} raised and was left out: {visible(error)}" for name, error in failed.items()]


@public
def salient_operations(
    model: Model | HeadWeights,
    heads: HeadLike | Iterable[HeadLike] | None = None,
    *,
    layers: LayerLike | Iterable[LayerLike] | None = None,
    n_tokens: Count = 30,
    n_targets: Count = 5,
    preset: Preset = "folded",
    circuit: Circuit = "ov",
    vocabulary: Vocabulary = "all",
    prompts: str | Sequence[str] | None = None,
    prepend_bos: bool | None = None,
    run_dir: str | Path | None = None,
    executor: Any = None,
    progress: bool = True,
) -> SalientOperations:
    """The tokens each head acts on most, what it writes for them, and the best name for that.

    Args:
        model: A TransformerBridge, a HookedTransformer, or HeadWeights (which reuse what earlier calls computed).
        n_tokens: Salient tokens of each head.
        n_targets: Promoted and suppressed targets of each.
        preset: ``"context"``: what each layer reads at the token behind neutral prompts (the whole
            vocabulary is read, which takes minutes). ``"folded"``: what the model computes for a token without context.
            ``"maps"``: the published recipe.
        vocabulary: ``"all"`` tokens; ``"words"`` leaves out byte fragments, control tokens and untrained tokens. In
            Python also a function of a token's text that says whether to consider it as a source.
        prompts: With ``"context"``: prefixes the tokens are put behind; by default the first two of the bundled ones.
        prepend_bos: With ``"context"``: begin each prefix with BOS; by default as the model does.

    Example:
        >>> from tl_headmaps import load_default_model, salient_operations
        >>> operations = salient_operations(load_default_model(), "L23H4", preset="maps", progress=False)
        >>> operations.mappings("L23H4")[0]
        (' Italian', [' Italian', ' Italians', 'Italy', ' Italy', 'Italian'])
    """
    weights = HeadWeights.of(model)
    named = None if heads is None else weights.named_heads(heads)
    chosen = weights.chosen_heads(named, layers)
    by_number = by_layer(chosen)
    weights.require(preset, needs_mlp=max(by_number) > 0)
    n_columns = weights.W_U.shape[0] if circuit == "ov" else weights.n_vocab
    texts = None if weights.tokenizer is None else token_strings(weights.tokenizer, weights.n_vocab)
    usable = _usable(weights, vocabulary, texts)
    n_left = int(usable.mask.sum())
    if n_tokens > n_left:
        raise UsageError(f"n_tokens={n_tokens} is impossible: the vocabulary filter leaves {n_left} tokens.")
    if n_targets > n_columns:
        raise UsageError(f"n_targets={n_targets} is impossible: there are {n_columns} target tokens.")
    strings = _Strings(enumerate(texts or []))
    namer = Namer()
    options: dict[str, Any] = {
        "preset": preset,
        "n_tokens": n_tokens,
        "n_targets": n_targets,
        "vocabulary": vocabulary if isinstance(vocabulary, str) else "a function",
        "heads": None if heads is None and layers is None else sorted(map(str, chosen)),
        "predicates": namer.catalogue,
    }
    task = _SalientLayers(
        weights,
        by_number,
        usable.mask.cpu(),
        circuit,
        preset,
        n_tokens=min(n_left, max(n_tokens, NAMING_TOKENS)),
        n_targets=min(n_columns, max(n_targets, NAMING_TARGETS)),
    )
    if preset == "context":
        task = task.in_context(prompts, prepend_bos, progress)
    elif prompts is not None or prepend_bos is not None:
        name = "prepend_bos" if prompts is None else "prompts"
        raise UsageError(f"{name}= goes with preset='context'; preset={preset!r} puts tokens behind nothing.")
    swept = sweep_layers(
        task,
        list(by_number),
        kind=SalientOperations.kind,
        provenance=weights.provenance(
            options=options | ({} if task.context is None else task.context.options),
            data={} if task.context is None else task.context.data,
        ),
        details={"circuit": circuit, "token_ids": ids_digest(usable.mask.nonzero()[:, 0])},
        run_dir=run_dir,
        executor=executor,
        description="salient operations",
        progress=progress,
    )
    arrays = {name: torch.cat([swept.layers[layer][name] for layer in by_number]) for name in _ARRAYS}
    of_names = _cut(arrays, NAMING_TOKENS, NAMING_TARGETS)
    names = namer.names(*(strings.mappings(of_names, side) for side in ("promoted", "suppressed")))
    shown = _cut(arrays, n_tokens, n_targets)
    crossed = torch.cat([swept.layers[layer]["crossed"] for layer in by_number])
    result = SalientOperations(
        circuit=circuit,
        heads=tuple(chosen),
        strings={token: strings[token] for token in sorted(_token_ids_in(shown))},
        names=names,
        grids=tuple(_grid(namer, strings, *each) for each in zip(names, _by_head(shown), crossed, strict=True)),
        left_out=usable.left_out,
        failed_predicates=namer.failed,
        provenance=swept.provenance,
        **shown,
    )
    # In the order in which the heads were named.
    return result if named is None else result.select([head for head in named if head in set(chosen)])


def _cut(arrays: Mapping[str, Tensor], n_tokens: int, n_targets: int) -> dict[str, Tensor]:
    """The first tokens of each head, and the first targets of each token."""
    return {
        name: values[:, :n_tokens, :n_targets] if values.ndim == 3 else values[:, :n_tokens]
        for name, values in arrays.items()
    }


def _by_head(arrays: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: values[number] for name, values in arrays.items()} for number in range(len(arrays["token_ids"]))]


def _grid(
    namer: Namer,
    strings: "_Strings",
    entry: HeadName,
    shown: Mapping[str, Tensor],
    crossed: Float[Tensor, "token side own target"],
) -> OperationGrid:
    """A head's first tokens by a target of each: the strongest that its best predicate explains, or else the strongest.

    Columns are added where the tokens share their targets.
    """
    side = int(namer.suppresses(entry))
    tokens = shown["token_ids"][:_GRID_TOKENS].tolist()
    targets = shown["suppressed_ids" if side else "promoted_ids"][:_GRID_TOKENS, :_GRID_TARGETS].tolist()
    explained = [
        dict(zip(row, namer.explained(entry, strings[token], [strings[each] for each in row]), strict=True))
        for token, row in zip(tokens, targets, strict=True)
    ]
    place: dict[int, tuple[int, int]] = {}
    for own, row in enumerate(targets):
        best = next((number for number, target in enumerate(row) if explained[own][target]), 0)
        place.setdefault(row[best], (own, best))
    for number, own in ((number, own) for number in range(len(targets[0])) for own in range(len(targets))):
        if len(place) < _LEAST_COLUMNS:
            place.setdefault(targets[own][number], (own, number))
    return OperationGrid(
        tuple(tokens),
        tuple(place),
        tuple(tuple(float(crossed[row, side, own, at]) for own, at in place.values()) for row in range(len(tokens))),
        tuple(tuple(holds.get(target, False) for target in place) for holds in explained),
    )


@dataclass(frozen=True)
class _SalientLayers:
    """Salient tokens and targets of the chosen heads of a layer.

    In context, the tokens are known before (with their salience, by layer), and their vectors are the rows of maps.
    """

    weights: HeadWeights
    heads: dict[int, list[int]]
    usable: Bool[Tensor, " token"]
    circuit: Circuit
    preset: Preset
    n_tokens: int
    n_targets: int
    context: ContextSources | None = None
    known: Mapping[int, tuple[Int[Tensor, "head n"], Float[Tensor, "head n"]]] | None = None

    def prepare(self) -> LayerStep:
        circuits = CircuitMaps(self.weights, circuit=self.circuit, preset=self.preset, context=self.context)
        usable = self.usable.to(self.weights.device)
        return lambda layer: self._layer(circuits, usable, layer)

    def _layer(self, circuits: CircuitMaps, usable: Tensor, layer: int) -> dict[str, Tensor]:
        with torch.no_grad():
            maps = circuits.layer(layer, self.heads[layer])
            if self.context is None or self.known is None:
                ratio = self._salience(layer, maps, circuits.row_vectors(layer))
                tokens, ratios = most_salient(ratio, usable, self.n_tokens)
                rows = tokens
            else:
                tokens, ratios = self.known[layer]
                rows = torch.searchsorted(torch.tensor([source[0] for source in self.context.rows.sources]), tokens)
            top, bottom = top_and_bottom(maps.with_own_rows(rows), self.n_targets)
            # What the first tokens have at each other's targets, promoted and suppressed ones.
            first = torch.stack([each.columns[:, :_GRID_TOKENS, :_GRID_TARGETS] for each in (top, bottom)], dim=1)
            columns, place = first.unique(return_inverse=True)
            chosen = entries(maps.with_own_rows(rows[:, :_GRID_TOKENS]), columns)
            crossed = chosen.gather(2, place.flatten(1)[:, None].expand(-1, chosen.shape[1], -1))
        return {
            "crossed": crossed.view(*chosen.shape[:2], *first.shape[1:]),
            "token_ids": tokens,
            "salience": ratios,
            "promoted_ids": top.columns,
            "promoted_values": top.values,
            "suppressed_ids": bottom.columns,
            "suppressed_values": bottom.values,
        }

    def _salience(self, layer: int, maps: Any, vectors: Tensor) -> Float[Tensor, "head token"]:
        read = self.weights.layer(layer)
        return salience(self.weights, read, maps, vectors, circuit=self.circuit, preset=self.preset)

    def in_context(
        self, prompts: str | Sequence[str] | None, prepend_bos: bool | None, progress: bool
    ) -> "_SalientLayers":
        """The same for tokens behind prompts.

        The vocabulary is read part by part and only salience is kept; the few tokens that turn out salient are read
        again.
        """
        if self.circuit != "ov":
            raise UsageError(
                "preset='context' knows salient operations of OV circuits alone. Use preset='folded' with circuit='qk'."
            )
        weights, model = self.weights, runnable(self.weights)
        chosen = neutral_prompts()[:VOCABULARY_PROMPTS] if prompts is None else prompts
        listed = (chosen,) if isinstance(chosen, str) else tuple(chosen)
        prefixes = encode_prefixes(model, listed, prepends_bos(model, prepend_bos))
        ids = self.usable.nonzero()[:, 0]
        print_estimate(weights, len(ids) * len(prefixes))
        ratio = {layer: torch.zeros(len(numbers), len(ids)) for layer, numbers in self.heads.items()}
        everything = [(token,) for token in ids.tolist()]
        for part, means in context_parts(model, everything, prefixes, weights=weights, progress=progress):
            for layer, numbers in self.heads.items():
                vectors = means[layer].to(weights.device)
                with torch.no_grad():
                    maps = ov_maps(weights, weights.layer(layer), vectors, numbers, "context")
                    ratio[layer][:, part] = self._salience(layer, maps, vectors).cpu()
        known = {}
        for layer, values in ratio.items():
            rows, ratios = most_salient(values, torch.ones(len(ids), dtype=torch.bool), self.n_tokens)
            known[layer] = (ids[rows], ratios)
        sources = sorted({(token,) for tokens, _ in known.values() for token in tokens.flatten().tolist()})
        vectors_read = context_vectors(model, sources, prefixes, weights=weights, keep=("mean",), progress=progress)
        return replace(self, context=ContextSources(vectors_read), known=known)


def _usable(weights: HeadWeights, vocabulary: Any, texts: list[str] | None) -> UsableTokens:
    everything = torch.ones(weights.n_vocab, dtype=torch.bool, device=weights.device)
    if vocabulary == "all":
        return UsableTokens(everything, {})
    if vocabulary != "words" and not callable(vocabulary):
        raise UsageError(
            f"vocabulary={vocabulary!r} is not known. Choose 'all', 'words', or a function of a token's text."
        )
    if texts is None:
        raise UsageError(
            "The model has no tokenizer, so its tokens cannot be told apart by their text. "
            "Load the model with its tokenizer, or use vocabulary='all'."
        )
    if vocabulary == "words":
        special = {*weights.tokenizer.all_special_ids, *weights.tokenizer.get_added_vocab().values()}
        usable = usable_tokens(texts, special, weights.W_E)
    else:
        mask = everything.clone()
        mask[: len(texts)] = torch.tensor([bool(vocabulary(text)) for text in texts], device=weights.device)
        mask[len(texts) :] = False
        usable = UsableTokens(mask, {"vocabulary function": int((~mask).sum())})
    if not bool(usable.mask.any()):
        raise UsageError("The vocabulary filter leaves no token; it must accept at least one.")
    return usable


class _Strings(dict[int, str]):
    """Texts of tokens by their ids; the ids where the model has no tokenizer."""

    def __missing__(self, token: int) -> str:
        return f"#{token}"

    def mappings(self, arrays: Mapping[str, Tensor], side: str) -> list[list[Any]]:
        """Sources with their targets on one side, by head."""
        return [
            [(self[source], tuple(self[target] for target in row)) for source, row in zip(*pair, strict=True)]
            for pair in zip(arrays["token_ids"].tolist(), arrays[f"{side}_ids"].tolist(), strict=True)
        ]
