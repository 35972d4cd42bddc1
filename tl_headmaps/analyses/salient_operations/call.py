"""What a head does when nobody says what to look for: its salient tokens, their targets, and a name."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor

from ...capture.weights import HeadWeights
from ...circuits.extremes import largest_entries, top_and_bottom
from ...circuits.maps import CircuitMaps
from ...core.errors import UsageError
from ...core.types import Circuit, HeadIndex, HeadLike, Preset, check_choice, head_list, head_names
from ...core.vocabulary import token_strings
from ...scorers.salience import most_salient, salience
from ...scorers.usable import UsableTokens, usable_tokens
from ..heads import heads_by_layer
from ..sweep import LayerStep, ids_digest, sweep_layers
from .namer import NAMING_TARGETS, NAMING_TOKENS, Describe, Namer
from .result import SalientOperations

VocabularyFilter: TypeAlias = Literal["all", "words"]


def salient_operations(
    model: Any,
    heads: HeadLike | Iterable[HeadLike] | None = None,
    *,
    n_tokens: int = 30,
    n_targets: int = 5,
    preset: Preset = "folded",
    circuit: Circuit = "ov",
    vocabulary: VocabularyFilter | Callable[[str], bool] = "all",
    largest: int = 0,
    describe: Describe | None = None,
    run_dir: str | Path | None = None,
    executor: Any = None,
    progress: bool = True,
) -> SalientOperations:
    """The tokens each head does most about, what it writes for them, and the best name for that.

    Args:
        model: A TransformerBridge, a HookedTransformer, or HeadWeights (which keep what they computed for later calls).
        heads: Only these heads; all by default.
        n_tokens: Salient tokens of each head.
        n_targets: Promoted and suppressed targets of each.
        preset: ``"folded"``: what the model computes for a token without context. ``"maps"``: the published recipe.
        circuit: ``"ov"``: what is written about a token. ``"qk"``: which keys a query token attends to.
        vocabulary: ``"all"`` tokens; ``"words"`` leaves out byte fragments, control tokens and tokens never trained;
            or a function of a token's text that says whether to consider it as a source.
        largest: Also find this many largest entries of each whole map.
        describe: A function (a language model, say) of the head, its mappings and a prompt that returns a description.
        run_dir: Keep finished layers in this folder, and go on from there after a kill.
        executor: Where to compute layers: anything with the interface of ``concurrent.futures.Executor``.
        progress: Show a progress bar on a terminal.

    Example:
        >>> from tl_headmaps import load_default_model, salient_operations
        >>> found = salient_operations(load_default_model(), "L23H4", preset="maps", progress=False)
        >>> found.mappings("L23H4")[0]
        (' Italian', [' Italian', ' Italians', 'Italy', ' Italy', 'Italian'])
    """
    check_choice(circuit, Circuit, "circuit")
    check_choice(preset, Preset, "preset")
    for name, value, least in (("n_tokens", n_tokens, 1), ("n_targets", n_targets, 1), ("largest", largest, 0)):
        if value < least:
            raise UsageError(f"{name}={value} is impossible; it must be at least {least}.")
    weights = HeadWeights.of(model)
    by_layer = heads_by_layer(weights, heads)
    weights.require(preset, needs_mlp=any(by_layer[1:]))
    circuits = CircuitMaps(weights, circuit=circuit, preset=preset)
    texts = None if weights.tokenizer is None else token_strings(weights.tokenizer, weights.n_vocab)
    usable = _usable(weights, vocabulary, texts)
    n_left = int(usable.mask.sum())
    if n_tokens > n_left:
        raise UsageError(f"n_tokens={n_tokens} is impossible: the vocabulary filter leaves {n_left} tokens.")
    if n_targets > circuits.n_columns:
        raise UsageError(f"n_targets={n_targets} is impossible: there are {circuits.n_columns} target tokens.")
    strings, namer = _Strings(texts), Namer(_Strings(texts).usable(usable.mask), describe)
    n_rows, n_columns = max(n_tokens, NAMING_TOKENS), max(n_targets, NAMING_TARGETS)
    options = {
        "preset": preset,
        "n_tokens": n_tokens,
        "n_targets": n_targets,
        "vocabulary": vocabulary if isinstance(vocabulary, str) else "a function",
        "largest": largest,
        "heads": head_names(heads),
        "predicates": namer.catalogue,
    }
    task = _SalientLayers(
        weights,
        by_layer,
        usable.mask.cpu(),
        circuit,
        preset,
        min(n_left, n_rows),
        min(circuits.n_columns, n_columns),
        largest,
    )
    swept = sweep_layers(
        task,
        [layer for layer, numbers in enumerate(by_layer) if numbers],
        kind=SalientOperations.kind,
        provenance=weights.provenance(options=options),
        details={"circuit": circuit, "token_ids": ids_digest(usable.mask.nonzero()[:, 0])},
        run_dir=run_dir,
        executor=executor,
        description="salient operations",
        progress=progress,
    )
    found = _Salient.of(by_layer, swept.layers)
    names = namer.names(found.heads, *strings.mappings(found.cut(NAMING_TOKENS, NAMING_TARGETS)))
    shown = found.cut(n_tokens, n_targets)
    result = SalientOperations(
        circuit=circuit,
        heads=shown.heads,
        token_ids=shown.tokens,
        salience=shown.salience,
        promoted_ids=shown.promoted,
        promoted_values=shown.promoted_values,
        suppressed_ids=shown.suppressed,
        suppressed_values=shown.suppressed_values,
        strings={token: strings[token] for token in sorted(shown.used())},
        names=names,
        left_out=usable.left_out,
        failed_predicates=namer.failed,
        provenance=swept.provenance,
        largest=shown.largest if largest else None,
    )
    # In the order they were asked for.
    return result if heads is None else result.select(dict.fromkeys(weights.head(head) for head in head_list(heads)))


@dataclass(frozen=True)
class _Salient:
    """Salient tokens and targets of some heads, before anything is cut or named."""

    heads: tuple[HeadIndex, ...]
    tokens: Tensor
    salience: Tensor
    promoted: Tensor
    promoted_values: Tensor
    suppressed: Tensor
    suppressed_values: Tensor
    largest: tuple[tuple[tuple[int, int, float], ...], ...]

    @classmethod
    def of(cls, by_layer: list[list[int]], layers: Mapping[int, Mapping[str, Tensor]]) -> "_Salient":
        arrays = ("tokens", "salience", "promoted", "promoted_values", "suppressed", "suppressed_values")
        order = sorted(layers)
        places = torch.cat([layers[layer]["largest"] for layer in order]).tolist()
        values = torch.cat([layers[layer]["largest_values"] for layer in order]).tolist()
        return cls(
            heads=tuple(HeadIndex(layer, head) for layer in order for head in by_layer[layer]),
            largest=tuple(
                tuple((source, target, value) for (source, target), value in zip(*head, strict=True))
                for head in zip(places, values, strict=True)
            ),
            **{name: torch.cat([layers[layer][name] for layer in order]) for name in arrays},
        )

    def cut(self, n_tokens: int, n_targets: int) -> "_Salient":
        """The first tokens and targets."""
        return _Salient(
            self.heads,
            self.tokens[:, :n_tokens],
            self.salience[:, :n_tokens],
            self.promoted[:, :n_tokens, :n_targets],
            self.promoted_values[:, :n_tokens, :n_targets],
            self.suppressed[:, :n_tokens, :n_targets],
            self.suppressed_values[:, :n_tokens, :n_targets],
            self.largest,
        )

    def used(self) -> set[int]:
        """Ids of all tokens that occur."""
        ids = {token for part in (self.tokens, self.promoted, self.suppressed) for token in part.unique().tolist()}
        return ids | {token for entries in self.largest for entry in entries for token in entry[:2]}


@dataclass(frozen=True)
class _SalientLayers:
    """Salient tokens and targets of the chosen heads of a layer."""

    weights: HeadWeights
    by_layer: list[list[int]]
    usable: Bool[Tensor, " token"]
    circuit: Circuit
    preset: Preset
    n_tokens: int
    n_targets: int
    n_largest: int

    def prepare(self) -> LayerStep:
        circuits = CircuitMaps(self.weights, circuit=self.circuit, preset=self.preset)
        usable = self.usable.to(self.weights.device)
        return lambda layer: self._layer(circuits, usable, layer)

    def _layer(self, circuits: CircuitMaps, usable: Tensor, layer: int) -> dict[str, Tensor]:
        heads, weights = self.by_layer[layer], self.weights
        with torch.no_grad():
            maps = circuits.layer(layer, heads)
            vectors = circuits.row_vectors(layer)
            read = weights.layer(layer)
            ratio = salience(weights, read, maps, vectors, circuit=self.circuit, preset=self.preset)
            tokens, ratios = most_salient(ratio, usable, self.n_tokens)
            top, bottom = top_and_bottom(maps.with_own_rows(tokens), self.n_targets)
            places = torch.zeros(len(heads), self.n_largest, 2, dtype=torch.int64)
            values = torch.zeros(len(heads), self.n_largest)
            if self.n_largest:
                rows = usable.nonzero()[:, 0]
                considered = maps.at_rows(rows)
                for number in range(len(heads)):
                    entries = largest_entries(considered, number, self.n_largest)
                    places[number] = torch.stack([rows[entries.rows], entries.columns], dim=1).cpu()
                    values[number] = entries.values.cpu()
        return {
            "tokens": tokens,
            "salience": ratios,
            "promoted": top.columns,
            "promoted_values": top.values,
            "suppressed": bottom.columns,
            "suppressed_values": bottom.values,
            "largest": places,
            "largest_values": values,
        }


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


class _Strings:
    """Texts of tokens; a model without a tokenizer shows ids."""

    def __init__(self, texts: list[str] | None) -> None:
        self.texts = texts or []

    def __getitem__(self, token: int) -> str:
        return self.texts[token] if token < len(self.texts) else f"#{token}"

    def mappings(self, found: _Salient) -> tuple[list[list[Any]], list[list[Any]]]:
        """Sources with their targets, by head: promoted and suppressed."""
        sides = []
        for targets in (found.promoted, found.suppressed):
            sides.append(
                [
                    [(self[source], tuple(self[target] for target in row)) for source, row in zip(*pair, strict=True)]
                    for pair in zip(found.tokens.tolist(), targets.tolist(), strict=True)
                ]
            )
        return sides[0], sides[1]

    def usable(self, mask: Tensor) -> list[str]:
        return [self[token] for token in mask.nonzero()[:, 0].tolist()]
