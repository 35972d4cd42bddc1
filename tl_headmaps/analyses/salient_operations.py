"""What a head does when nobody says what to look for: its salient tokens, their targets, and a name."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..capture.weights import HeadWeights
from ..circuits.extremes import largest_entries, top_and_bottom
from ..circuits.sweep import CircuitMaps
from ..errors import UsageError
from ..results.salient_operations import SalientOperations
from ..scorers.salience import most_salient, salience
from ..scorers.usable import UsableTokens, usable_tokens
from ..types import Circuit, HeadIndex, HeadLike, Preset, check_choice
from ..vocabulary import token_strings
from .heads import head_list, head_names, heads_by_layer
from .namer import NAMING_TARGETS, NAMING_TOKENS, Describe, Namer

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
        progress: Show a progress bar on a terminal.

    Example:
        >>> from tl_headmaps import load_default_model
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
    strings = _Strings(texts)
    n_rows, n_columns = max(n_tokens, NAMING_TOKENS), max(n_targets, NAMING_TARGETS)
    sizes = (min(n_left, n_rows), min(circuits.n_columns, n_columns), largest)
    bar = tqdm(
        [(layer, numbers) for layer, numbers in enumerate(by_layer) if numbers],
        desc="salient operations",
        unit="layer",
        disable=None if progress else True,
    )
    found = _Salient.joined([_layer(circuits, layer, numbers, usable.mask, *sizes) for layer, numbers in bar])
    namer = Namer(strings.usable(usable.mask), describe)
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
        provenance=weights.provenance(
            options={
                "preset": preset,
                "n_tokens": n_tokens,
                "n_targets": n_targets,
                "vocabulary": vocabulary if isinstance(vocabulary, str) else "a function",
                "largest": largest,
                "heads": head_names(heads),
                "predicates": namer.catalogue,
            }
        ),
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
    def joined(cls, parts: Sequence["_Salient"]) -> "_Salient":
        arrays = ("tokens", "salience", "promoted", "promoted_values", "suppressed", "suppressed_values")
        return cls(
            heads=tuple(head for part in parts for head in part.heads),
            largest=tuple(entries for part in parts for entries in part.largest),
            **{name: torch.cat([getattr(part, name) for part in parts]) for name in arrays},
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


def _layer(
    circuits: CircuitMaps, layer: int, heads: list[int], usable: Tensor, n_tokens: int, n_targets: int, n_largest: int
) -> _Salient:
    """Salient tokens and targets of one layer's heads."""
    weights = circuits.weights
    with torch.no_grad():
        maps = circuits.layer(layer, heads)
        vectors = circuits.row_vectors(layer)
        ratio = salience(weights, weights.layer(layer), maps, vectors, circuit=circuits.circuit, preset=circuits.preset)
        tokens, ratios = most_salient(ratio, usable, n_tokens)
        top, bottom = top_and_bottom(maps.with_rows(tokens), n_targets)
        largest = []
        if n_largest:
            rows = usable.nonzero()[:, 0]
            considered = maps.at_rows(rows)
            for number in range(len(heads)):
                entries = largest_entries(considered, number, n_largest)
                columns = zip(
                    rows[entries.rows].tolist(), entries.columns.tolist(), entries.values.tolist(), strict=True
                )
                largest.append(tuple(columns))
    return _Salient(
        heads=maps.heads,
        tokens=tokens.cpu(),
        salience=ratios.cpu(),
        promoted=top.columns.cpu(),
        promoted_values=top.values.cpu(),
        suppressed=bottom.columns.cpu(),
        suppressed_values=bottom.values.cpu(),
        largest=tuple(largest),
    )


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
