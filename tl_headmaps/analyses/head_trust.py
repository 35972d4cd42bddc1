"""How far the weights' story holds in running text: how much of what a head writes is told by token identities.

Relation scores and salient operations say what a head writes about a token by itself. In running text a head attends to
positions, whose vectors hold more than their token. ``head_trust`` puts the two side by side on held-out documents:
with the head's real attention, how much of what it writes is explained when every position is replaced by its token's
own vector (see :mod:`..scorers.trust`). Near 1, its maps tell what it does; near 0, they are the wrong place to look.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.running.activations import Activation, LayerActivations, encode_prompt, prepends_bos, run
from ..capture.running.context import ContextVectors, context_vectors
from ..capture.running.prompts import encode_prefixes
from ..capture.running.text import check_runs
from ..capture.weights import HeadWeights
from ..circuits.ov import constant_values
from ..circuits.vectors import token_vectors
from ..core.ambient import steady
from ..core.errors import UsageError
from ..core.progress import Progress
from ..core.provenance import Provenance
from ..core.types import HeadIndex, HeadLike, Model, Preset, by_layer, check_count
from ..data.prompts import neutral_prompts
from ..data.texts import Sample, describe_source, split_texts
from ..renderers.figure import Figure
from ..renderers.grids import MapLayer
from ..renderers.heat import head_map
from ..renderers.text import number as decimal
from ..renderers.text import table_text
from ..results import HeadMaps, cells
from ..scorers.ablation import masks_of
from ..scorers.statistics import LEAST_UNITS
from ..scorers.trust import Fit, WriteSums, permuted_within_deciles, share_with_interval, sinks, unexplained

VECTORS: tuple[str, ...] = ("folded", "context")
"""Which vectors of a token predict what is written: without context, or as read behind neutral prompts."""

_MOST_NULL = 1000
"""Draws of the null, at most: only their mean is told, and each is as much work as the shares themselves."""

_N_PROMPTS = 2
"""Prompts behind which tokens are read: there are thousands of tokens in a text."""


@dataclass(frozen=True, eq=False, repr=False)
class HeadTrust(HeadMaps):
    """Share of what each head writes in running text that its tokens' own vectors explain, on held-out documents.

    Attributes:
        token_share: By kind of vector (``folded``: the token without context; ``context``: as the layer reads it behind
            neutral prompts), one value per layer and head. 1: the tokens say everything; 0: nothing.
        interval_low, interval_high: 95% interval, held-out documents resampled.
        null: The same with the vectors of tokens dealt out anew within deciles of frequency, mean over draws.
        sink_share: Share of positions that were left out of each layer as sinks, found by the length of their stream;
            NaN, like all else, for layers without heads.
        n_documents: Held-out documents.
        n_fit_documents: Documents that means and scales were fitted on.
        n_tokens: Held-out positions.

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
    nullable: ClassVar[tuple[str, ...]] = ("token_share", "interval_low", "interval_high", "null", "sink_share")
    token_share: dict[str, Float[Tensor, "layer head"]]
    interval_low: dict[str, Float[Tensor, "layer head"]]
    interval_high: dict[str, Float[Tensor, "layer head"]]
    null: dict[str, Float[Tensor, "layer head"]]
    sink_share: Float[Tensor, " layer"]
    n_documents: int
    n_fit_documents: int
    n_tokens: int
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "layer head"]:
        """The token shares of context vectors."""
        return self.token_share["context"]

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Labels of each axis by its name."""
        n_layers, n_heads = self.values.shape
        return {"layer": list(range(n_layers)), "head": list(range(n_heads))}

    def head_map(self, vectors: str | None = None) -> Float[Tensor, "layer head"]:
        """The token shares of one kind of vector, ``"context"`` by default."""
        if vectors is not None and vectors not in self.token_share:
            raise UsageError(f"There are no shares of {vectors!r}; there are those of {', '.join(self.token_share)}.")
        return self.token_share[vectors or "context"]

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
        return self.token_share["context" if preset == "context" else "folded"]

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per kind of vector and head."""
        for name, shares in self.token_share.items():
            for at, record in cells(self.axes, shares):
                columns = {"token_share": shares, "interval_low": self.interval_low[name]}
                columns |= {"interval_high": self.interval_high[name], "null": self.null[name]}
                yield {"vectors": name, **record, **{column: float(map_[at]) for column, map_ in columns.items()}}

    def __str__(self) -> str:
        columns = [("vectors", "left"), ("mean", "right"), ("null", "right"), ("above null", "right")]
        columns += [(f"heads that tokens explain best, of {self.n_measured}", "left")]
        rows = []
        for name, shares in self.token_share.items():
            known = not bool(self.interval_low[name].isnan().all())
            above = int((self.interval_low[name] > self.null[name]).sum()) if known else "-"
            best = ", ".join(f"{head} {decimal(value)}" for head, value in self.top(4, name))
            rows.append(
                [name, decimal(float(shares.nanmean())), decimal(float(self.null[name].nanmean())), above, best]
            )
        return self._noted(
            f"Share of what heads write that token identities explain, on {self.n_documents} held-out documents "
            f"({self.n_tokens:,} positions)\n\n" + table_text(columns, rows) + "\n\nabove null: heads whose interval "
            "is above the share of vectors dealt out anew within deciles of frequency."
        )

    def figure(self) -> Figure:
        """Token shares by layer and head, one kind of vector at a time, with null and interval."""
        layers = [
            MapLayer(name, shares, null=self.null[name], interval=(self.interval_low[name], self.interval_high[name]))
            for name, shares in self.token_share.items()
        ]
        return head_map(
            layers,
            title="What token identities explain of what heads write",
            unit="share explained",
            signed=False,
            limits=(0.0, 1.0),
            switches=("vectors", ""),
            empty=self.provenance.short_rows,
            note=self._noted(
                f"On {self.n_documents} held-out documents, with the heads' real attention; sinks left out.", " "
            ),
        )


@steady
def head_trust(
    model: Model,
    texts: Any = None,
    *,
    heads: HeadLike | Iterable[HeadLike] | None = None,
    max_tokens: int | None = None,
    prompts: Sequence[str] | None = None,
    n_null: int = 3,
    prepend_bos: bool | None = None,
    seed: int = 0,
    cache_dir: str | None = None,
    progress: bool = True,
) -> HeadTrust:
    """How much of what each head writes in running text is told by which tokens it attends to.

    Means and scales are fitted on two thirds of the documents; shares, intervals and nulls are those of the others.

    Args:
        model: A TransformerBridge or HookedTransformer with a tokenizer.
        texts: Documents (a list, a file, a dataset); the bundled text by default.
        heads: Only these heads; all by default.
        max_tokens: Cut documents to this many tokens; by default to what the model holds.
        prompts: Prefixes behind which tokens are read; by default the first two of the bundled ones.
        n_null: How often vectors are dealt out anew among tokens of similar frequency.
        prepend_bos: Begin documents and prefixes with BOS; by default as the model does.
        seed: Of these draws and of the resampling behind intervals.
        cache_dir: Where context vectors are kept; default: the cache folder.
        progress: Show progress bars on a terminal.

    Example:
        >>> from tl_headmaps import head_trust, load_default_model
        >>> texts = ["Birds sometimes walk to the river and drink.", "The cat sat on the mat all day.",
        ...          "It rained on Monday and again on Tuesday."] * 2
        >>> texts += [f"There were {n} cups on table {n + 1}." for n in range(6)]
        >>> trust = head_trust(load_default_model(), texts, n_null=1, cache_dir="context", progress=False)
        >>> round(float(trust.token_share["context"][0].min()), 2)  # in layer 0 the tokens say everything
        1.0
    """
    check_runs(model)
    check_count("n_null", n_null, most=_MOST_NULL)
    if max_tokens is not None and max_tokens < 3:
        raise UsageError(f"max_tokens={max_tokens} is too short. A document needs at least 3 tokens.")
    weights = HeadWeights.from_model(model)
    weights.require_plain_mixing("Shares of a running head's outputs")
    prepend_bos = prepends_bos(model, prepend_bos)
    chosen = weights.chosen_heads(heads)
    documents, n_fit = _documents(model, texts, prepend_bos, max_tokens)
    held_out = set(range(n_fit, len(documents)))
    if len(held_out) < 2 or n_fit < 2:
        raise UsageError(
            f"{len(documents)} documents are too few: a third of them is held out, and at least two are needed on "
            "either side. Give more texts, or longer ones separated by blank lines."
        )
    tokens = _Tokens.of(documents)
    prefixes = encode_prefixes(model, neutral_prompts()[:_N_PROMPTS] if prompts is None else prompts, prepend_bos)
    context = context_vectors(
        model, [(token,) for token in tokens.ids], prefixes, weights=weights, cache_dir=cache_dir, progress=progress
    )
    tables = _value_tables(weights, list(by_layer(chosen)), tokens, context)
    sums = _Sums(weights, chosen, documents, tokens, tables, held_out, n_null, seed)
    with Progress(total=len(documents), desc="head trust", unit="document", show=progress) as bar:
        read: tuple[Activation, ...] = ("resid_pre", "v", "pattern")
        run(model, documents, read=read, reduce=sums.take, layers=list(sums.grams), progress=bar.update)
    options = {"prompts": [list(p) for p in prefixes], "n_null": n_null, "prepend_bos": prepend_bos}
    return sums.result(
        weights.provenance(
            options=options
            | {"heads": None if heads is None else [str(head) for head in chosen], "max_tokens": max_tokens},
            data={"texts": tokens.digest, "source": describe_source(Sample.WHOLE if texts is None else texts)},
            seed=seed,
        )
    )


def _documents(model: Any, texts: Any, prepend_bos: bool, most: int | None) -> tuple[list[list[int]], int]:
    """Token ids of each document, cut to what the model holds: first those to fit on, and how many these are.

    Documents of fewer than three tokens are left out.
    """
    longest = min(int(model.cfg.n_ctx), most or int(model.cfg.n_ctx))
    parts = split_texts(Sample.WHOLE if texts is None else texts)
    encoded = [[encode_prompt(model, text, prepend_bos)[:longest] for text in part] for part in parts]
    fit, held_out = ([ids for ids in part if len(ids) >= 3] for part in encoded)
    return [*fit, *held_out], len(fit)


@dataclass(frozen=True)
class _Tokens:
    """The different tokens of some documents, with how often each occurs."""

    ids: tuple[int, ...]
    counts: tuple[int, ...]
    digest: str

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]]) -> "_Tokens":
        counts = Counter(token for ids in documents for token in ids)
        ordered = sorted(counts)
        digest = hashlib.sha256(json.dumps([list(ids) for ids in documents]).encode()).hexdigest()
        return cls(tuple(ordered), tuple(counts[token] for token in ordered), digest)


_Tables: TypeAlias = dict[str, dict[int, Float[Tensor, "token kv_head d_head"]]]
"""Values of every token by kind of vector and layer, without their constant part."""


def _value_tables(weights: HeadWeights, layers: Sequence[int], tokens: _Tokens, context: ContextVectors) -> _Tables:
    ids = torch.tensor(tokens.ids, device=weights.device)
    tables: _Tables = {name: {} for name in VECTORS}
    plain, in_layer = None, -1
    for number in layers:
        layer = weights.layer(number)
        # They are the same for all layers above 0.
        if plain is None or in_layer == 0:
            plain, in_layer = token_vectors(weights, ids, number, "folded"), number
        inputs = {
            "folded": plain if layer.ln1 is None else layer.ln1.normalised(plain),
            "context": context.layer(number),
        }
        for name, x in inputs.items():
            read = x if layer.ln1 is None else x * layer.ln1.weight
            tables[name][number] = torch.einsum("td,gdh->tgh", read, layer.W_V)
    return tables


def _centred(vectors: Tensor) -> Tensor:
    return vectors - vectors.mean(-1, keepdim=True)


class _Sums:
    """Sums over documents, filled layer by layer while the model runs."""

    def __init__(
        self,
        weights: HeadWeights,
        heads: Sequence[HeadIndex],
        documents: Sequence[Sequence[int]],
        tokens: _Tokens,
        tables: _Tables,
        held_out: set[int],
        n_null: int,
        seed: int,
    ) -> None:
        self.weights, self.tables, self.held_out, self.seed = weights, tables, held_out, seed
        index_of = {token: index for index, token in enumerate(tokens.ids)}
        self.tokens = [torch.tensor([index_of[token] for token in ids]) for ids in documents]
        generator = torch.Generator().manual_seed(seed)
        own = list(range(len(tokens.ids)))
        # Draw 0 is the truth; in the others every token has the vector of another of its decile of frequency.
        draws = [own, *(permuted_within_deciles(tokens.counts, generator) for _ in range(n_null))]
        self.draws = [torch.tensor(draw) for draw in draws]
        self.asked = masks_of([heads], weights.n_layers, weights.n_heads)[0]
        layers = {number: weights.layer(number) for number in by_layer(heads)}
        self.constants = {number: constant_values(layer) for number, layer in layers.items()}
        # A model that centres never sees the mean over d_model; processing takes it off, so it must not count.
        self.centres = weights.ln_final is not None and weights.ln_final.centres
        writing = {number: _centred(layer.W_O) if self.centres else layer.W_O for number, layer in layers.items()}
        self.grams = {number: W_O @ W_O.mT for number, W_O in writing.items()}
        self.n_documents = len(documents)
        self.n_positions = 0
        self.n_sinks, self.n_seen = torch.zeros(weights.n_layers), torch.zeros(weights.n_layers)
        self.fitted: dict[tuple[int, str, int], list[WriteSums]] = {}
        self.tested: dict[tuple[int, str, int], list[WriteSums]] = {}

    def take(self, seen: LayerActivations) -> None:
        """Add the documents of a batch in one layer."""
        layer = seen.layer
        for place, row in enumerate(seen.batch.rows):
            stream = seen["resid_pre"][place].float()
            sink = sinks(_centred(stream) if self.centres else stream)
            self.n_sinks[layer] += int(sink.sum())
            self.n_seen[layer] += len(sink)
            if layer == next(iter(self.grams)) and row in self.held_out:
                self.n_positions += len(sink)
            # Sinks are left out as keys (of both sides) and as queries.
            pattern = seen["pattern"][place].float().masked_fill(sink, 0.0)[:, ~sink]
            values = seen["v"][place].float() - self.constants[layer]
            written = self._mixed(layer, pattern, values)
            kept = self.tested if row in self.held_out else self.fitted
            for name in VECTORS:
                table = self.tables[name][layer]
                for draw, dealt in enumerate(self.draws):
                    predicted = self._mixed(layer, pattern, table[dealt[self.tokens[row]]])
                    sums = WriteSums.of(written, predicted, self.grams[layer])
                    entry = kept.setdefault((layer, name, draw), [])
                    entry.append(sums)
                    # Only the truth on held-out documents needs one sum for each.
                    if draw or kept is self.fitted:
                        entry[:] = [WriteSums.total(entry)]

    def _mixed(self, layer: int, pattern: Tensor, values: Tensor) -> Float[Tensor, "pos head d_head"]:
        groups = [self.weights.group_of(head, layer) for head in range(len(pattern))]
        return torch.einsum("hqk,khd->qhd", pattern, values[:, groups])

    def result(self, provenance: Provenance) -> HeadTrust:
        maps: dict[str, dict[str, list[Tensor]]] = {}
        for layer, gram in self.grams.items():
            for name in VECTORS:
                columns = maps.setdefault(name, {"share": [], "low": [], "high": [], "null": []})
                shares = [self._share(layer, name, draw, gram) for draw in range(len(self.draws))]
                for column, values in zip(("share", "low", "high"), shares[0], strict=True):
                    columns[column].append(values)
                columns["null"].append(torch.stack([share[0] for share in shares[1:]]).mean(0))
        stacked = {
            column: {name: self._over_all_layers(maps[name][column]) for name in VECTORS}
            for column in ("share", "low", "high", "null")
        }
        return HeadTrust(
            token_share=stacked["share"],
            interval_low=stacked["low"],
            interval_high=stacked["high"],
            null=stacked["null"],
            sink_share=self.n_sinks / self.n_seen,
            n_documents=len(self.held_out),
            n_fit_documents=self.n_documents - len(self.held_out),
            n_tokens=self.n_positions,
            provenance=provenance,
        )

    def _over_all_layers(self, rows: list[Tensor]) -> Float[Tensor, "layer head"]:
        """A map with NaN for heads that were not asked for."""
        values = torch.full(self.asked.shape, torch.nan)
        for layer, row in zip(self.grams, rows, strict=True):
            values[layer, : len(row)] = row.float()
        return values.masked_fill(~self.asked, torch.nan)

    def _share(self, layer: int, name: str, draw: int, gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fit = Fit.of(WriteSums.total(self.fitted[layer, name, draw]), gram)
        documents = [unexplained(sums, fit, gram) for sums in self.tested[layer, name, draw]]
        left, total = (torch.stack(column) for column in zip(*documents, strict=True))
        share, low, high = share_with_interval(left, total, seed=self.seed)
        if len(documents) < LEAST_UNITS:
            # Too few to resample: the share stands, its interval does not.
            low, high = torch.full_like(low, torch.nan), torch.full_like(high, torch.nan)
        return share, low, high
