"""How far the weights' story holds in running text: how much of what a head writes is told by token identities.

Relation scores and salient operations say what a head writes about a token by itself. In running text a head attends to
positions, whose vectors hold more than their token. ``head_trust`` puts the two side by side on held-out documents:
with the head's real attention, how much of what it writes is explained when every position is replaced by its token's
own vector (see :mod:`..scorers.trust`). Near 1, its maps tell what it does; near 0, they are the wrong place to look.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..capture.running.activations import Activation, LayerActivations, run
from ..capture.running.context import ContextVectors, context_vectors
from ..capture.running.prompts import encode_prefixes
from ..capture.weights import HeadWeights
from ..circuits.ov import constant_values
from ..circuits.vectors import token_vectors
from ..core.errors import UsageError
from ..core.options import Between, Seed, public
from ..core.provenance import Provenance
from ..core.types import HeadIndex, HeadLike, Model, Preset, by_layer
from ..data.texts import neutral_prompts
from ..renderers.text import number
from ..results import cells
from ..results.table import HeadTable, frozen_result, measured
from ..scorers.ablation import masks_of
from ..scorers.statistics import LEAST_UNITS
from ..scorers.trust import Fit, WriteSums, permuted_within_deciles, share_with_interval, sinks, unexplained
from .study import Study

VECTORS: tuple[str, ...] = ("folded", "context")
"""Which vectors of a token predict what is written: without context, or as read behind neutral prompts."""

_N_PROMPTS = 2
"""Prompts behind which tokens are read: there are thousands of tokens in a text."""


@frozen_result
class HeadTrust(HeadTable):
    """Share of what each head writes in running text that its tokens' own vectors explain, on held-out documents.

    Maps are by kind of vector: ``folded``, the token without context; ``context``, as the layer reads it behind neutral
    prompts. All are NaN for layers without heads.

    Example:
        >>> from tl_headmaps import head_trust, load_default_model
        >>> texts = [f"There were {n} cups on table {n + 1}." for n in range(9)]
        >>> trust = head_trust(load_default_model(), texts, n_null=1, cache_dir="context", progress=False)
        >>> trust.n_documents, trust.n_fit_documents
        (3, 6)
        >>> trust.token_share["context"].shape
        torch.Size([30, 9])
    """

    kind: ClassVar[str] = "head_trust"
    methods: ClassVar[tuple[str, ...]] = ("elhage2021framework",)
    json_axes: ClassVar[Mapping[str, str | None]] = {"layer": None, "head": None}
    labelled: ClassVar[str] = "token_share"
    paper_columns: ClassVar[tuple[str, ...]] = (
        *("vectors", "head", "token_share"),
        *("interval_low", "interval_high", "null"),
    )
    signed: ClassVar[bool] = False
    limits: ClassVar[tuple[float, float]] = (0.0, 1.0)
    title: ClassVar[str] = (
        "What token identities explain of what heads write: the share on {self.n_documents} held-out documents "
        "({self.n_tokens:,} positions), with the heads' real attention; sinks left out."
    )

    token_share: dict[str, Float[Tensor, "layer head"]] = measured(
        "value", "share", "1: the tokens say everything; 0: nothing", unit="share that tokens explain"
    )
    interval_low: dict[str, Float[Tensor, "layer head"]] = measured("low", "95%", "held-out documents resampled")
    interval_high: dict[str, Float[Tensor, "layer head"]] = measured("high", "95%", "upper end")
    null: dict[str, Float[Tensor, "layer head"]] = measured(
        "null", "null", "with the vectors of tokens dealt out anew within deciles of frequency, mean over draws"
    )
    sink_share: Float[Tensor, " layer"] = measured(
        "detail", "sinks", "share of positions left out of the layer as sinks, found by the length of their stream"
    )
    n_documents: int = measured("fact", "held-out documents")
    n_fit_documents: int = measured("fact", "documents that means and scales were fitted on")
    n_tokens: int = measured("fact", "held-out positions")
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "layer head"]:  # type: ignore[override]
        """The token shares of context vectors."""
        return self.head_map()

    @property
    def _axis(self) -> str:
        return "vectors"

    def head_map(self, vectors: str | None = None) -> Float[Tensor, "layer head"]:
        """The token shares of one kind of vector, ``"context"`` by default."""
        if vectors is not None and vectors not in self.token_share:
            raise UsageError(f"There are no shares of {vectors!r}; there are those of {', '.join(self.token_share)}.")
        return self.token_share[vectors or list(self.token_share)[-1]]

    def _cells(self) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
        return cells(self._row_axes, torch.stack(list(self.token_share.values())))

    def notes(self) -> list[str]:
        notes = []
        for name, shares in self.token_share.items():
            low, null = self.interval_low[name], self.null[name]
            note = f"{name}: a mean of {number(float(shares.nanmean()))} (null: {number(float(null.nanmean()))})"
            known = not bool(low.isnan().all())
            above = f"; the interval of {int((low > null).sum())} heads is above their null" if known else ""
            notes.append(f"{note}{above or '; too few documents for intervals'}.")
        return notes

    @classmethod
    def given(cls, trust: "HeadTrust | str | Path") -> "HeadTrust":
        """What a caller gave as trust: a result, or its file."""
        return trust if isinstance(trust, HeadTrust) else cls.load(trust)

    def shares_for(self, weights: HeadWeights, preset: Preset) -> Float[Tensor, "layer head"]:
        """Token shares to show beside scores of a preset; refuses weights of another model."""
        if self.provenance.fingerprint != weights.fingerprint:
            raise UsageError(
                f"trust= belongs to another model than {weights.model_name!r}: the fingerprints of their weights "
                "differ. Run head_trust with this model."
            )
        return self.head_map("context" if preset == "context" else "folded")


@public
def head_trust(
    model: Model,
    texts: Any = None,
    *,
    heads: HeadLike | Iterable[HeadLike] | None = None,
    max_tokens: int | None = None,
    prompts: Sequence[str] | None = None,
    n_null: Annotated[int, Between(1, 1000)] = 3,
    prepend_bos: bool | None = None,
    seed: Seed = 0,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> HeadTrust:
    """How much of what each head writes in running text is told by which tokens it attends to.

    Means and scales are fitted on two thirds of the documents; shares, intervals and nulls are those of the others.

    Args:
        model: A TransformerBridge or HookedTransformer with a tokenizer.
        max_tokens: Cut documents to this many tokens; by default to what the model holds.
        prompts: Prefixes behind which tokens are read; by default the first two of the bundled ones.
        n_null: How often vectors are dealt out anew among tokens of similar frequency.
        prepend_bos: Begin documents and prefixes with BOS; by default as the model does.
        seed: Of these draws and of the resampling behind intervals.
        cache_dir: Where context vectors are kept; default: the cache folder.

    Example:
        >>> from tl_headmaps import head_trust, load_default_model
        >>> texts = ["Birds sometimes walk to the river and drink.", "The cat sat on the mat all day.",
        ...          "It rained on Monday and again on Tuesday."] * 2
        >>> texts += [f"There were {n} cups on table {n + 1}." for n in range(6)]
        >>> trust = head_trust(load_default_model(), texts, n_null=1, cache_dir="context", progress=False)
        >>> round(float(trust.token_share["context"][0].min()), 2)  # in layer 0 the tokens say everything
        1.0
    """
    study = Study(model, heads=heads, prepend_bos=prepend_bos, progress=progress)
    weights = study.weights
    weights.require_plain_mixing("Shares of a running head's outputs")
    fit, held_out = study.documents(texts, max_tokens=max_tokens, least_fit=2)
    documents = fit + held_out
    counts = sorted(Counter(token for ids in documents for token in ids).items())
    prefixes = encode_prefixes(model, neutral_prompts()[:_N_PROMPTS] if prompts is None else prompts, study.prepend_bos)
    context = context_vectors(
        model, [(token,) for token, _ in counts], prefixes, weights=weights, cache_dir=cache_dir, progress=progress
    )
    tables = _value_tables(weights, list(by_layer(study.heads)), [token for token, _ in counts], context)
    # Draw 0 is the truth; in the others every token has the vector of another of its decile of frequency.
    generator = torch.Generator().manual_seed(seed)
    dealt = [permuted_within_deciles([n for _, n in counts], generator) for _ in range(n_null)]
    draws = [torch.tensor(draw) for draw in (list(range(len(counts))), *dealt)]
    place_of = {token: place for place, (token, _) in enumerate(counts)}
    tokens = [torch.tensor([place_of[token] for token in ids]) for ids in documents]
    sums = _Sums(weights, study.heads, tokens, len(fit), tables, draws)
    with study.bar("head trust", "document", len(documents)) as bar:
        read: tuple[Activation, ...] = ("resid_pre", "v", "pattern")
        run(model, documents, read=read, reduce=sums.take, layers=list(sums.grams), progress=bar.update)
    study.options["max_tokens"] = max_tokens
    study.data["texts"] = hashlib.sha256(json.dumps(documents).encode()).hexdigest()
    return sums.result(seed, study.provenance(prompts=[list(prefix) for prefix in prefixes], n_null=n_null, seed=seed))


_Tables: TypeAlias = dict[str, dict[int, Float[Tensor, "token kv_head d_head"]]]
"""Values of every token by kind of vector and layer, without their constant part."""


def _value_tables(
    weights: HeadWeights, layers: Sequence[int], tokens: Sequence[int], context: ContextVectors
) -> _Tables:
    ids = torch.tensor(tokens, device=weights.device)
    tables: _Tables = {name: {} for name in VECTORS}
    plain, in_layer = None, -1
    for place in layers:
        layer = weights.layer(place)
        # They are the same for all layers above 0.
        if plain is None or in_layer == 0:
            plain, in_layer = token_vectors(weights, ids, place, "folded"), place
        inputs = {
            "folded": plain if layer.ln1 is None else layer.ln1.normalised(plain),
            "context": context.layer(place),
        }
        for name, x in inputs.items():
            read = x if layer.ln1 is None else x * layer.ln1.weight
            tables[name][place] = torch.einsum("td,gdh->tgh", read, layer.W_V)
    return tables


def _centred(vectors: Tensor) -> Tensor:
    return vectors - vectors.mean(-1, keepdim=True)


class _Sums:
    """Sums over documents, filled layer by layer while the model runs."""

    def __init__(
        self,
        weights: HeadWeights,
        heads: Sequence[HeadIndex],
        tokens: Sequence[Tensor],
        n_fit: int,
        tables: _Tables,
        draws: Sequence[Tensor],
    ) -> None:
        """``tokens`` has a row of the tables for each position of each document, and each draw a row for each row."""
        self.weights, self.tokens, self.n_fit, self.tables, self.draws = weights, tokens, n_fit, tables, draws
        self.chosen: Bool[Tensor, "layer head"] = masks_of([heads], weights.n_layers, weights.n_heads)[0]
        layers = {number: weights.layer(number) for number in by_layer(heads)}
        self.constants = {number: constant_values(layer) for number, layer in layers.items()}
        # A model that centres never sees the mean over d_model; processing takes it off, so it must not count.
        self.centres = weights.ln_final is not None and weights.ln_final.centres
        writing = {number: _centred(layer.W_O) if self.centres else layer.W_O for number, layer in layers.items()}
        self.grams = {number: W_O @ W_O.mT for number, W_O in writing.items()}
        self.n_positions = 0
        self.n_sinks, self.n_seen = torch.zeros(weights.n_layers), torch.zeros(weights.n_layers)
        self.fitted: dict[tuple[int, str, int], list[WriteSums]] = {}
        self.tested: dict[tuple[int, str, int], list[WriteSums]] = {}

    def take(self, seen: LayerActivations) -> None:
        """Add the documents of a batch in one layer."""
        layer = seen.layer
        for place, row in enumerate(seen.batch.rows):
            held_out = row >= self.n_fit
            stream = seen["resid_pre"][place].float()
            sink = sinks(_centred(stream) if self.centres else stream)
            self.n_sinks[layer] += int(sink.sum())
            self.n_seen[layer] += len(sink)
            if layer == next(iter(self.grams)) and held_out:
                self.n_positions += len(sink)
            # Sinks are left out as keys (of both sides) and as queries.
            pattern = seen["pattern"][place].float().masked_fill(sink, 0.0)[:, ~sink]
            written = self._mixed(layer, pattern, seen["v"][place].float() - self.constants[layer])
            kept = self.tested if held_out else self.fitted
            for name in VECTORS:
                for draw, dealt in enumerate(self.draws):
                    predicted = self._mixed(layer, pattern, self.tables[name][layer][dealt[self.tokens[row]]])
                    entry = kept.setdefault((layer, name, draw), [])
                    entry.append(WriteSums.of(written, predicted, self.grams[layer]))
                    # Only the truth on held-out documents needs one sum for each.
                    if draw or not held_out:
                        entry[:] = [WriteSums.total(entry)]

    def _mixed(self, layer: int, pattern: Tensor, values: Tensor) -> Float[Tensor, "pos head d_head"]:
        groups = [self.weights.group_of(head, layer) for head in range(len(pattern))]
        return torch.einsum("hqk,khd->qhd", pattern, values[:, groups])

    def result(self, seed: int, provenance: Provenance) -> HeadTrust:
        maps = {
            part: {name: torch.full(self.chosen.shape, torch.nan) for name in VECTORS}
            for part in ("share", "low", "high", "null")
        }
        for layer in self.grams:
            for name in VECTORS:
                (share, low, high), *dealt = (self._share(layer, name, draw, seed) for draw in range(len(self.draws)))
                null = torch.stack([part[0] for part in dealt]).mean(0)
                for part, row in zip(maps.values(), (share, low, high, null), strict=True):
                    part[name][layer, : len(row)] = row.float()
        for part in maps.values():
            for name in VECTORS:
                part[name].masked_fill_(~self.chosen, torch.nan)
        return HeadTrust(
            token_share=maps["share"],
            interval_low=maps["low"],
            interval_high=maps["high"],
            null=maps["null"],
            sink_share=self.n_sinks / self.n_seen,
            n_documents=len(self.tokens) - self.n_fit,
            n_fit_documents=self.n_fit,
            n_tokens=self.n_positions,
            provenance=provenance,
        )

    def _share(self, layer: int, name: str, draw: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Share of each head with its interval."""
        gram = self.grams[layer]
        fit = Fit.of(WriteSums.total(self.fitted[layer, name, draw]), gram)
        documents = [unexplained(sums, fit, gram) for sums in self.tested[layer, name, draw]]
        left, total = (torch.stack(column) for column in zip(*documents, strict=True))
        share, low, high = share_with_interval(left, total, seed=seed)
        if len(documents) < LEAST_UNITS:
            # Too few to resample: the share stands, its interval does not.
            low, high = torch.full_like(low, torch.nan), torch.full_like(high, torch.nan)
        return share, low, high
