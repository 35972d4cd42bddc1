"""What kind of tokens each head attends to, over many texts: previous, repeated, first, induced, nearby."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from ..capture.running.activations import LayerActivations, encode_prompt, prepends_bos, run
from ..capture.running.text import check_runs
from ..capture.weights import HeadWeights
from ..core.ambient import steady
from ..core.errors import UsageError
from ..core.provenance import Provenance
from ..core.types import HeadIndex, HeadLike, Model, by_layer, head_list, head_names
from ..core.vocabulary import token_string
from ..data.texts import read_texts
from ..renderers.figure import Figure
from ..renderers.grids import MapLayer
from ..renderers.heat import head_map
from ..renderers.text import interval, number, table_text
from ..results import Result, cells, largest_heads
from ..scorers.ablation import masks_of
from ..scorers.profile import (
    PROFILE_SCORES,
    even_pair_shares,
    null_shares,
    profile_pairs,
    queries_with_pairs,
    text_shares,
)
from ..scorers.statistics import LEAST_UNITS, RunningRatio, q_values
from ..scorers.trust import sinks

_LONGEST = 512
_AT_ONCE = 32
"""Texts read ahead, so that those of equal length run together."""

_MAPS = (
    "values",
    "interval_low",
    "interval_high",
    "where_possible",
    "where_possible_low",
    "where_possible_high",
    "null",
    "p_value",
    "q_value",
)
"""Fields with one value per score, layer and head."""


@dataclass(frozen=True, eq=False, repr=False)
class GroupingProfile(Result):
    """Head maps of six scores, averaged over texts, with 95% intervals.

    Attributes:
        scores: Names of the scores: previous_token, duplicate_token, first_token, induction, syntactic_neighbour,
            sentence_block.
        values: Mean share of a head's attention on the pairs each score is about.
        interval_low, interval_high: 95% interval of that mean over texts (Student's); NaN for a single text. Few texts
            repeat a token, so those of duplicate_token and induction are too narrow (85% with 20 texts, above 90% with
            100).
        where_possible: Mean attention on such pairs of the queries that have one (NaN if there is none in any text).
        where_possible_low, where_possible_high: Its interval.
        null: What ``values`` would be if the head's attention depended on distance alone: its own distance profile,
            text by text, with sinks as they are. The previous and the first token are positions themselves; their null
            is even attention.
        p_value: Of a share above its null, over texts (Student's, one-sided); NaN for fewer than four texts.
        q_value: False discovery rate over all scores and heads of this result (Benjamini-Hochberg).
        even: What even attention would score, a baseline.
        possible: Share of queries that have such a pair.
        n_texts, n_tokens: Texts scored and their tokens.
        n_cut, n_skipped: Texts that were cut, and texts of fewer than two tokens, which were left out.

    Example:
        >>> from tl_headmaps import grouping_profile, load_default_model
        >>> profile = grouping_profile(load_default_model(), ["Birds walk.", "Cats walk too."], progress=False)
        >>> profile.scores
        ('previous_token', 'duplicate_token', 'first_token', 'induction', 'syntactic_neighbour', 'sentence_block')
        >>> profile.n_texts, tuple(profile.head_map("previous_token").shape)
        (2, (30, 9))
    """

    kind: ClassVar[str] = "grouping_profile"
    methods: ClassVar[tuple[str, ...]] = ("olsson2022induction",)
    json_axes: ClassVar[dict[str, str | None]] = {"score": "scores", "layer": None, "head": None}
    nullable: ClassVar[tuple[str, ...]] = _MAPS
    scores: tuple[str, ...]
    values: Float[Tensor, "score layer head"]
    interval_low: Float[Tensor, "score layer head"]
    interval_high: Float[Tensor, "score layer head"]
    where_possible: Float[Tensor, "score layer head"]
    where_possible_low: Float[Tensor, "score layer head"]
    where_possible_high: Float[Tensor, "score layer head"]
    null: Float[Tensor, "score layer head"]
    p_value: Float[Tensor, "score layer head"]
    q_value: Float[Tensor, "score layer head"]
    even: Float[Tensor, " score"]
    possible: Float[Tensor, " score"]
    n_texts: int
    n_tokens: int
    n_cut: int
    n_skipped: int
    provenance: Provenance

    def index_of(self, score: str) -> int:
        """Index of a score."""
        if score not in self.scores:
            raise UsageError(f"There is no score {score!r}; choose one of {', '.join(self.scores)}.")
        return self.scores.index(score)

    def head_map(self, score: str) -> Float[Tensor, "layer head"]:
        """Map of one score."""
        return self.values[self.index_of(score)]

    def top(self, n: int, score: str) -> list[tuple[HeadIndex, float]]:
        """The ``n`` heads with the highest score (ties: lower layer, then lower head)."""
        return largest_heads(self.head_map(score), n)

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per score and head."""
        for at, labels in cells(self.axes, self.values):
            maps = {name: float(getattr(self, name)[at]) for name in _MAPS}
            yield {**labels, **maps, "even": float(self.even[at[0]])}

    def figure(self) -> Figure:
        """Each score by layer and head, over all queries and over those where it is possible."""
        layers = []
        for index, name in enumerate(self.scores):
            layers.append(
                MapLayer(
                    name.replace("_", " "),
                    self.values[index],
                    group="all queries",
                    null=self.null[index],
                    interval=(self.interval_low[index], self.interval_high[index]),
                    details={"p": self.p_value[index], "q over all scores and heads": self.q_value[index]},
                )
            )
            layers.append(
                MapLayer(
                    name.replace("_", " "),
                    self.where_possible[index],
                    group="queries where it is possible",
                    interval=(self.where_possible_low[index], self.where_possible_high[index]),
                )
            )
        return head_map(
            layers,
            title=f"What heads attend to, over {self.n_texts} texts ({self.n_tokens:,} tokens)",
            unit="share of attention",
            signed=False,
            switches=("attention to", "over"),
            empty=self.provenance.mixers,
            note=f"{_NULL}{'' if self.n_texts >= LEAST_UNITS else _TOO_FEW}",
        )

    def __str__(self) -> str:
        rows = []
        for index, score in enumerate(self.scores):
            for place, (head, value) in enumerate(self.top(3, score)):
                at = (index, head.layer, head.head)
                rows.append(
                    [
                        score if place == 0 else "",
                        str(head),
                        f"{value:.2f}",
                        interval(float(self.interval_low[at]), float(self.interval_high[at])),
                        number(float(self.null[at])),
                        number(float(self.p_value[at]), 3),
                        number(float(self.q_value[at]), 3),
                        f"{self.even[index]:.2f}" if place == 0 else "",
                        number(float(self.where_possible[at])),
                        f"{self.possible[index]:.2f}" if place == 0 else "",
                    ]
                )
        titles = ["score", "head", "share", "95%", "null", "p", "q", "even", "where possible", "queries"]
        columns = [(title, "left" if title in ("score", "head") else "right") for title in titles]
        left_out = f", {self.n_cut} cut" if self.n_cut else ""
        left_out += f", {self.n_skipped} too short" if self.n_skipped else ""
        title = f"Grouping profile over {self.n_texts:,} texts, {self.n_tokens:,} tokens{left_out}"
        note = (
            "share: mean share of the head's attention on such pairs; null: the same if it depended on distance alone\n"
            "(previous and first token, which are positions: if it were even); p: share above null, over texts"
            f"{'' if self.n_texts >= LEAST_UNITS else _TOO_FEW};\n"
            "q: over all scores and heads; even: the share of even attention;\n"
            f"{_NARROW if self.n_texts < _MANY else ''}"
            "where possible: mean attention on such pairs from the queries that have one; queries: share of those "
            "queries"
        )
        return f"{title}\n\n{table_text(columns, rows)}\n\n{note}"


_NULL = (
    "Null: what the head's own distance profile would give (for the previous and the first token: even attention). p: "
    "share above its null, over texts; q over all scores and heads."
)
_MANY = 100
_NARROW = f"95%: too narrow for duplicate_token and induction below {_MANY} texts (about 85% with 20);\n"
_TOO_FEW = f" (fewer than {LEAST_UNITS} texts, so there is no p)"


@steady
def grouping_profile(
    model: Model,
    texts: Any,
    *,
    column: str = "text",
    heads: HeadLike | Iterable[HeadLike] | None = None,
    max_texts: int | None = None,
    max_tokens: int = _LONGEST,
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> GroupingProfile:
    """Score every head on six kinds of attention, averaged over texts, with intervals.

    Memory does not grow with the number of texts, so a streamed dataset works.

    Args:
        model: A TransformerBridge or HookedTransformer.
        texts: A list of strings, a text file with blank lines between texts, or a ``datasets`` dataset.
        column: The column of a dataset that holds the text.
        heads: Only these heads; all by default. q-values are over the heads scored.
        max_texts: Stop after this many texts.
        max_tokens: Cut longer texts to this many tokens, or to the context length of the model if that is shorter.
        prepend_bos: Begin each text with BOS; by default as the model does.
        progress: Show a progress bar on a terminal.

    Example:
        >>> from tl_headmaps import grouping_profile, load_default_model
        >>> texts = ["The cat sat. The cat slept.", "A bird sang. A bird flew."]
        >>> profile = grouping_profile(load_default_model(), texts, progress=False)
        >>> [(str(head), round(share, 2)) for head, share in profile.top(2, "induction")]
        [('L17H5', 0.15), ('L17H4', 0.09)]
    """
    if max_tokens < 2:
        raise UsageError(f"max_tokens={max_tokens} is too short. A text needs at least 2 tokens.")
    if max_texts is not None and max_texts < 1:
        raise UsageError(f"max_texts={max_texts} leaves no text; give 1 or more.")
    check_runs(model)
    prepend_bos = prepends_bos(model, prepend_bos)
    weights = HeadWeights.of(model)
    source = islice(read_texts(texts, column), max_texts)
    named = None if heads is None else head_list(heads)
    tally = _Tally(model, weights, weights.chosen_heads(named), min(max_tokens, int(model.cfg.n_ctx)), prepend_bos)
    with tqdm(desc="profile", unit="text", total=max_texts, disable=None if progress else True) as bar:
        while some := list(islice(source, _AT_ONCE)):
            tally.add(some)
            bar.update(len(some))
    if not tally.n_texts:
        raise UsageError("There is no text of at least two tokens. Give other texts, a file, or a dataset column.")
    options = {"max_texts": max_texts, "max_tokens": max_tokens, "prepend_bos": prepend_bos, "heads": head_names(named)}
    return tally.result(weights.provenance(runs_model=True, options=options, data={"texts": tally.digest.hexdigest()}))


class _Tally:
    """Sums over texts; their size does not depend on how many texts there are."""

    def __init__(
        self, model: Any, weights: HeadWeights, heads: Sequence[HeadIndex], longest: int, prepend_bos: bool
    ) -> None:
        self.model, self.tokenizer = model, weights.tokenizer
        self.longest, self.prepend_bos = longest, prepend_bos
        self.heads = by_layer(heads)
        self.left_out = ~masks_of([heads], weights.n_layers, weights.n_heads)[0]
        shape = (weights.n_layers, weights.n_heads, len(PROFILE_SCORES))
        self.shares, self.possible, self.null, self.excess = (RunningRatio(*shape) for _ in range(4))
        self.even = torch.zeros(len(PROFILE_SCORES), dtype=torch.float64)
        self.queries = torch.zeros(len(PROFILE_SCORES), dtype=torch.float64)
        self.n_texts = self.n_tokens = self.n_cut = self.n_skipped = 0
        self.digest = hashlib.sha256()

    def add(self, texts: list[str]) -> None:
        prompts = list(self._prompts(texts))
        if not prompts:
            return
        pairs = [profile_pairs(ids, self._texts_of(ids)) for ids in prompts]
        for pairs_of_text in pairs:
            self.even += even_pair_shares(pairs_of_text)
            self.queries += queries_with_pairs(pairs_of_text)
            for running in (self.shares, self.possible, self.null, self.excess):
                running.next_unit()
        self.n_texts += len(prompts)
        self.n_tokens += sum(map(len, prompts))

        def reduce(seen: LayerActivations) -> None:
            for pattern, stream, row in zip(seen["pattern"], seen["resid_pre"], seen.batch.rows, strict=True):
                pattern = pattern.to("cpu", torch.float32)
                attention = text_shares(pattern, pairs[row])
                null = null_shares(pattern, pairs[row], sinks(stream).cpu())
                self.null.add(null, at=seen.layer)
                self.excess.add(attention.shares - null, at=seen.layer)
                self.shares.add(attention.shares, at=seen.layer)
                self.possible.add(attention.on_pairs, queries_with_pairs(pairs[row]), at=seen.layer)

        run(self.model, prompts, read=("pattern", "resid_pre"), reduce=reduce, layers=list(self.heads))

    def _texts_of(self, ids: list[int]) -> list[str]:
        """Texts of tokens; special tokens such as BOS have none, so they are not taken for words."""
        special = set(self.tokenizer.all_special_ids)
        return ["" if token in special else token_string(self.tokenizer, token) for token in ids]

    def _prompts(self, texts: list[str]) -> Iterator[list[int]]:
        for text in texts:
            ids = encode_prompt(self.model, text, self.prepend_bos)
            self.digest.update(f"{len(text)}:".encode() + text.encode("utf-8", "surrogatepass"))
            if len(ids) - self.prepend_bos < 2:
                self.n_skipped += 1
                continue
            self.n_cut += len(ids) > self.longest
            yield ids[: self.longest]

    def result(self, provenance: Any) -> GroupingProfile:
        def by_score(part: Tensor) -> Tensor:
            return part.masked_fill(self.left_out[..., None], torch.nan).permute(2, 0, 1)

        def maps(running: RunningRatio) -> list[Tensor]:
            ratio, half = running.ratio(), running.half_width()
            return [by_score(part).float() for part in (ratio, (ratio - half).clamp(0, 1), (ratio + half).clamp(0, 1))]

        values, low, high = maps(self.shares)
        where, where_low, where_high = maps(self.possible)
        null, p_value = by_score(self.null.ratio()), by_score(self.excess.p_value())
        return GroupingProfile(
            scores=PROFILE_SCORES,
            values=values,
            interval_low=low,
            interval_high=high,
            where_possible=where,
            where_possible_low=where_low,
            where_possible_high=where_high,
            null=null.float(),
            p_value=p_value.float(),
            q_value=q_values(p_value.contiguous()).float(),
            even=(self.even / self.n_texts).float(),
            possible=(self.queries / self.n_tokens).float(),
            n_texts=self.n_texts,
            n_tokens=self.n_tokens,
            n_cut=self.n_cut,
            n_skipped=self.n_skipped,
            provenance=provenance,
        )
