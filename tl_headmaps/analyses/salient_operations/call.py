"""What a head does when nobody says what to look for: its salient tokens, their targets, and a name."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...capture.running.activations import prepends_bos
from ...capture.running.context import VOCABULARY_PROMPTS, context_parts, context_vectors, print_estimate, runnable
from ...capture.running.prompts import encode_prefixes
from ...capture.weights import HeadWeights
from ...circuits.extremes import entries, top_and_bottom
from ...circuits.maps import CircuitMaps, ContextSources
from ...circuits.ov import ov_maps
from ...core.ambient import steady
from ...core.errors import UsageError
from ...core.types import Circuit, HeadLike, LayerLike, Model, Preset, by_layer, check_choice, check_count
from ...core.vocabulary import token_strings
from ...data.prompts import neutral_prompts
from ...naming.namer import NAMING_TARGETS, NAMING_TOKENS, Describe, HeadName, Namer
from ...scorers.salience import UsableTokens, most_salient, salience, usable_tokens
from ..sweep import LayerStep, ids_digest, sweep_layers
from .result import ARRAYS, OperationGrid, SalientOperations, token_ids_in

Vocabulary: TypeAlias = Literal["all", "words"] | Callable[[str], bool]
"""Which tokens are considered as sources."""

GRID_TOKENS, GRID_TARGETS = 6, 5
"""Salient tokens of a head that its picture shows, and how many targets of each it may choose from."""

_LEAST_COLUMNS = 3


@steady
def salient_operations(
    model: Model | HeadWeights,
    heads: HeadLike | Iterable[HeadLike] | None = None,
    *,
    layers: LayerLike | Iterable[LayerLike] | None = None,
    n_tokens: int = 30,
    n_targets: int = 5,
    preset: Preset = "folded",
    circuit: Circuit = "ov",
    vocabulary: Vocabulary = "all",
    prompts: str | Sequence[str] | None = None,
    prepend_bos: bool | None = None,
    describe: Describe | None = None,
    run_dir: str | Path | None = None,
    executor: Any = None,
    progress: bool = True,
) -> SalientOperations:
    """The tokens each head acts on most, what it writes for them, and the best name for that.

    Args:
        model: A TransformerBridge, a HookedTransformer, or HeadWeights (which reuse what earlier calls computed).
        heads: Only these heads (``"L12"``: all of layer 12); all by default.
        layers: Only heads of these layers.
        n_tokens: Salient tokens of each head.
        n_targets: Promoted and suppressed targets of each.
        preset: ``"context"``: what each layer reads at the token behind neutral prompts (the whole
            vocabulary is read, which takes minutes). ``"folded"``: what the model computes for a token without context.
            ``"maps"``: the published recipe.
        circuit: ``"ov"``: what is written about a token. ``"qk"``: which keys a query token attends to.
        vocabulary: ``"all"`` tokens; ``"words"`` leaves out byte fragments, control tokens and untrained tokens; or a
            function of a token's text that says whether to consider it as a source.
        prompts: With ``"context"``: prefixes the tokens are put behind; by default the first two of the bundled ones.
        prepend_bos: With ``"context"``: begin each prefix with BOS; by default as the model does.
        describe: A function (a language model, say) of the head, its mappings and a prompt that returns a description.
        run_dir: Save finished layers in this folder, so that an interrupted run resumes.
        executor: Where to compute layers: any ``concurrent.futures.Executor`` (processes, Dask, MPI, Slurm).
        progress: Show a progress bar on a terminal.

    Example:
        >>> from tl_headmaps import load_default_model, salient_operations
        >>> operations = salient_operations(load_default_model(), "L23H4", preset="maps", progress=False)
        >>> operations.mappings("L23H4")[0]
        (' Italian', [' Italian', ' Italians', 'Italy', ' Italy', 'Italian'])
    """
    check_choice(circuit, Circuit, "circuit")
    check_choice(preset, Preset, "preset")
    check_count("n_tokens", n_tokens)
    check_count("n_targets", n_targets)
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
    strings = _Strings(texts)
    namer = Namer(describe)
    options: dict[str, Any] = {
        "preset": preset,
        "n_tokens": n_tokens,
        "n_targets": n_targets,
        "vocabulary": vocabulary if isinstance(vocabulary, str) else "a function",
        "heads": None if heads is None and layers is None else sorted(map(str, chosen)),
        "predicates": namer.catalogue,
    }
    n_named = min(n_left, max(n_tokens, NAMING_TOKENS))
    data: dict[str, str] = {}
    context = None
    if preset == "context":
        context = _ContextSalience.of(
            weights, by_number, usable.mask.cpu(), circuit, n_named, prompts, prepend_bos, progress
        )
        options, data = options | context.sources.options, context.sources.data
    elif prompts is not None or prepend_bos is not None:
        name = "prepend_bos" if prompts is None else "prompts"
        raise UsageError(f"{name}= goes with preset='context'; preset={preset!r} puts tokens behind nothing.")
    task = _SalientLayers(
        weights,
        by_number,
        usable.mask.cpu(),
        circuit,
        preset,
        n_named,
        min(n_columns, max(n_targets, NAMING_TARGETS)),
        context,
    )
    swept = sweep_layers(
        task,
        list(by_number),
        kind=SalientOperations.kind,
        provenance=weights.provenance(options=options, data=data),
        details={"circuit": circuit, "token_ids": ids_digest(usable.mask.nonzero()[:, 0])},
        run_dir=run_dir,
        executor=executor,
        description="salient operations",
        progress=progress,
    )
    arrays = {name: torch.cat([swept.layers[layer][name] for layer in by_number]) for name in ARRAYS}
    names = namer.names(chosen, *strings.mappings(_cut(arrays, NAMING_TOKENS, NAMING_TARGETS)))
    shown = _cut(arrays, n_tokens, n_targets)
    crossed = torch.cat([swept.layers[layer]["crossed"] for layer in by_number])
    result = SalientOperations(
        circuit=circuit,
        heads=tuple(chosen),
        strings={token: strings[token] for token in sorted(token_ids_in(shown))},
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
    tokens = shown["token_ids"][:GRID_TOKENS].tolist()
    targets = shown["suppressed_ids" if side else "promoted_ids"][:GRID_TOKENS, :GRID_TARGETS].tolist()
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
    """Salient tokens and targets of the chosen heads of a layer."""

    weights: HeadWeights
    heads: dict[int, list[int]]
    usable: Bool[Tensor, " token"]
    circuit: Circuit
    preset: Preset
    n_tokens: int
    n_targets: int
    context: "_ContextSalience | None" = None

    def prepare(self) -> LayerStep:
        context = None if self.context is None else self.context.sources
        circuits = CircuitMaps(self.weights, circuit=self.circuit, preset=self.preset, context=context)
        usable = self.usable.to(self.weights.device)
        return lambda layer: self._layer(circuits, usable, layer)

    def _layer(self, circuits: CircuitMaps, usable: Tensor, layer: int) -> dict[str, Tensor]:
        heads, weights = self.heads[layer], self.weights
        with torch.no_grad():
            maps = circuits.layer(layer, heads)
            if self.context is None:
                vectors = circuits.row_vectors(layer)
                ratio = salience(weights, weights.layer(layer), maps, vectors, circuit=self.circuit, preset=self.preset)
                tokens, ratios = most_salient(ratio, usable, self.n_tokens)
                rows = tokens
            else:
                tokens, ratios, rows = self.context.of_layer(layer)
            top, bottom = top_and_bottom(maps.with_own_rows(rows), self.n_targets)
            # What the first tokens have at each other's targets, promoted and suppressed ones.
            first = torch.stack([each.columns[:, :GRID_TOKENS, :GRID_TARGETS] for each in (top, bottom)], dim=1)
            columns, place = first.unique(return_inverse=True)
            chosen = entries(maps.with_own_rows(rows[:, :GRID_TOKENS]), columns)
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


@dataclass(frozen=True)
class _ContextSalience:
    """The salient tokens of every layer's heads among a vocabulary in context, and their vectors.

    The vocabulary is read part by part and only salience is kept; the few tokens that turn out salient are read again.
    """

    sources: ContextSources
    tokens: dict[int, Int[Tensor, "head n"]]
    ratios: dict[int, Float[Tensor, "head n"]]

    @classmethod
    def of(
        cls,
        weights: HeadWeights,
        heads: dict[int, list[int]],
        usable: Bool[Tensor, " token"],
        circuit: Circuit,
        n_tokens: int,
        prompts: str | Sequence[str] | None,
        prepend_bos: bool | None,
        progress: bool,
    ) -> "_ContextSalience":
        if circuit != "ov":
            raise UsageError(
                "preset='context' knows salient operations of OV circuits alone. Use preset='folded' with circuit='qk'."
            )
        model = runnable(weights)
        chosen = neutral_prompts()[:VOCABULARY_PROMPTS] if prompts is None else prompts
        listed = (chosen,) if isinstance(chosen, str) else tuple(chosen)
        prefixes = encode_prefixes(model, listed, prepends_bos(model, prepend_bos))
        ids = usable.nonzero()[:, 0].tolist()
        print_estimate(weights, len(ids) * len(prefixes))
        ratio = {layer: torch.zeros(len(numbers), len(ids)) for layer, numbers in heads.items()}
        everything = [(token,) for token in ids]
        for part, means in context_parts(model, everything, prefixes, weights=weights, progress=progress):
            for layer, numbers in heads.items():
                read, vectors = weights.layer(layer), means[layer].to(weights.device)
                with torch.no_grad():
                    maps = ov_maps(weights, read, vectors, numbers, "context")
                    found = salience(weights, read, maps, vectors, circuit="ov", preset="context")
                ratio[layer][:, part] = found.cpu()
        everything_counts = torch.ones(len(ids), dtype=torch.bool)
        best = {layer: most_salient(values, everything_counts, n_tokens) for layer, values in ratio.items()}
        of_rows = torch.tensor(ids)
        tokens = {layer: of_rows[rows] for layer, (rows, _) in best.items()}
        sources = sorted({(token,) for table in tokens.values() for token in table.flatten().tolist()})
        rows = context_vectors(model, sources, prefixes, weights=weights, keep=("mean",), progress=progress)
        return cls(ContextSources(rows), tokens, {layer: ratios for layer, (_, ratios) in best.items()})

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids and salience of a layer's heads, and where the tokens are among the rows of its maps."""
        known = torch.tensor([source[0] for source in self.sources.rows.sources])
        rows = torch.searchsorted(known, self.tokens[layer])
        return self.tokens[layer], self.ratios[layer], rows


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
    """Texts of tokens; ids where the model has no tokenizer."""

    def __init__(self, texts: list[str] | None) -> None:
        self.texts = texts or []

    def __getitem__(self, token: int) -> str:
        return self.texts[token] if token < len(self.texts) else f"#{token}"

    def mappings(self, arrays: Mapping[str, Tensor]) -> tuple[list[list[Any]], list[list[Any]]]:
        """Sources with their targets, by head: promoted and suppressed."""
        promoted, suppressed = (
            [
                [(self[source], tuple(self[target] for target in row)) for source, row in zip(*pair, strict=True)]
                for pair in zip(arrays["token_ids"].tolist(), arrays[name].tolist(), strict=True)
            ]
            for name in ("promoted_ids", "suppressed_ids")
        )
        return promoted, suppressed
