"""What kind of tokens each head attends to, over many texts: previous, repeated, first, induced, nearby."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.running.activations import LayerActivations, encode_prompt, prepends_bos, run
from ..capture.running.text import check_runs
from ..capture.weights import HeadWeights
from ..core.ambient import steady
from ..core.errors import UsageError
from ..core.progress import Progress
from ..core.provenance import Provenance
from ..core.types import HeadIndex, HeadLike, Model, by_layer
from ..core.vocabulary import Text, token_string
from ..data.texts import describe_source, read_texts, repeated_tokens, text_bytes
from ..renderers.figure import Figure
from ..renderers.grids import MapLayer
from ..renderers.heat import head_map
from ..renderers.text import chance, interval, significant, table_text
from ..results import HeadMaps, cells
from ..scorers.ablation import masks_of
from ..scorers.profile import (
    PROFILE_SCORES,
    REPETITION_SCORES,
    SENTENCE_SCORES,
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
class GroupingProfile(HeadMaps):
    """Head maps of six scores, averaged over texts, with 95% intervals.

    Attributes:
        scores: Names of the scores: previous_token, duplicate_token, first_token, induction, syntactic_neighbour,
            sentence_block.
        values: Mean share of a head's attention on the pairs each score is about.
        interval_low, interval_high: 95% interval of that mean over the texts scored (Student's); NaN for one. Few texts
            repeat a token, so those of duplicate_token and induction are too narrow (85% with 20 texts, above 90% with
            100).
        where_possible: Mean attention on such pairs of the queries that have one (NaN if there is none in any text).
        where_possible_low, where_possible_high: Its interval.
        null: What ``values`` would be if the head's attention depended on distance alone: its own distance profile,
            text by text, with sinks as they are. The previous and the first token are positions themselves; their null
            is even attention.
        p_value: Of a share above its null, over the texts scored (Student's, one-sided); NaN for fewer than four.
        q_value: False discovery rate over all scores and heads of this result (Benjamini-Hochberg).
        where_possible_null: What ``where_possible`` would be, likewise.
        even: What even attention would score, a baseline.
        possible: Share of queries that have such a pair.
        n_texts, n_tokens: Texts scored and their tokens.
        n_cut, n_skipped: Texts that were cut, and texts of fewer than two tokens, which were left out.
        n_repeated: How many of the texts are random tokens said twice (see :func:`grouping_profile`). They have no
            sentences, so that syntactic_neighbour and sentence_block are about the other texts alone; duplicate_token
            and induction are about them alone.

    Example:
        >>> from tl_headmaps import grouping_profile, load_default_model
        >>> profile = grouping_profile(load_default_model(), ["Birds walk.", "Cats walk too."], progress=False)
        >>> profile.scores
        ('previous_token', 'duplicate_token', 'first_token', 'induction', 'syntactic_neighbour', 'sentence_block')
        >>> profile.n_texts, tuple(profile.head_map("previous_token").shape)
        (2, (30, 9))
    """

    kind: ClassVar[str] = "grouping_profile"
    paper_columns: ClassVar[tuple[str, ...]] = (
        "score",
        "head",
        "values",
        "interval_low",
        "interval_high",
        "null",
        "q_value",
        "where_possible",
    )
    methods: ClassVar[tuple[str, ...]] = ("olsson2022induction",)
    json_axes: ClassVar[dict[str, str | None]] = {"score": "scores", "layer": None, "head": None}
    nullable: ClassVar[tuple[str, ...]] = (*_MAPS, "where_possible_null", "even", "possible")
    labelled: ClassVar[str] = "scores"
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
    where_possible_null: Float[Tensor, "score layer head"] | None = None
    n_repeated: int | None = None

    def head_map(self, score: str | None = None) -> Float[Tensor, "layer head"]:
        """Map of one score, ``where_possible``: the figure one would report."""
        return self.where_possible[self.index_of(score)]

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per score and head."""
        names = _MAPS if self.where_possible_null is None else (*_MAPS, "where_possible_null")
        for at, labels in cells(self.axes, self.values):
            maps = {name: float(getattr(self, name)[at]) for name in names}
            yield {**labels, **maps, "even": float(self.even[at[0]])}

    def figure(self) -> Figure:
        """Each score by layer and head, over all queries and over those where it is possible."""
        layers = []
        for index, name in enumerate(self.scores):
            tested = {"p": self.p_value[index], "q over all scores and heads": self.q_value[index]}
            layers.append(
                MapLayer(
                    name.replace("_", " "),
                    self.where_possible[index],
                    group="queries where it is possible",
                    null=None if self.where_possible_null is None else self.where_possible_null[index],
                    interval=(self.where_possible_low[index], self.where_possible_high[index]),
                    details=tested,
                )
            )
            layers.append(
                MapLayer(
                    name.replace("_", " "),
                    self.values[index],
                    group="all queries",
                    null=self.null[index],
                    interval=(self.interval_low[index], self.interval_high[index]),
                    details=tested,
                )
            )
        return head_map(
            layers,
            title=f"What heads attend to, over {self._read}",
            unit="share of attention",
            signed=False,
            switches=("attention to", "over"),
            empty=self.provenance.short_rows,
            note=f"{_NULL}{'' if self.n_texts >= LEAST_UNITS else _TOO_FEW}",
        )

    @property
    def _read(self) -> str:
        """The texts in words."""
        texts = f"{self.n_texts:,} texts, {self.n_tokens:,} tokens"
        return texts if not self.n_repeated else f"{texts} ({self.n_repeated} of random tokens said twice)"

    def __str__(self) -> str:
        rows = []
        for index, score in enumerate(self.scores):
            for place, (head, value) in enumerate(self.top(3 if len(self.scores) > 1 else 10, score)):
                at = (index, head.layer, head.head)
                null = None if self.where_possible_null is None else float(self.where_possible_null[at])
                rows.append(
                    [
                        score if place == 0 else "",
                        str(head),
                        significant(value),
                        interval(float(self.where_possible_low[at]), float(self.where_possible_high[at])),
                        "-" if null is None else significant(null),
                        chance(float(self.p_value[at])),
                        chance(float(self.q_value[at])),
                        significant(float(self.values[at])),
                        significant(float(self.even[index])) if place == 0 else "",
                        significant(float(self.possible[index])) if place == 0 else "",
                    ]
                )
        best = f"best of {self.n_measured}"
        titles = ["score", best, "where possible", "95%", "null", "p", "q", "share", "even", "queries"]
        columns = [(title, "left" if title in ("score", best) else "right") for title in titles]
        left_out = f", {self.n_cut} cut" if self.n_cut else ""
        left_out += f", {self.n_skipped} too short" if self.n_skipped else ""
        title = f"Grouping profile over {self._read}{left_out}"
        note = (
            "where possible: mean attention on such pairs from the queries that have one; null: the same if attention\n"
            "depended on distance alone (previous and first token, which are positions: if it were even); p: above\n"
            f"null, over texts{'' if self.n_texts >= LEAST_UNITS else _TOO_FEW}; q: over all scores and heads;\n"
            f"{_NARROW if self.n_texts < _MANY and not self.n_repeated else ''}"
            "share: of all attention; even: that of even attention; queries: share of queries that have such a pair"
            f"{_REPEATED if self.n_repeated else ''}"
        )
        return f"{title}\n\n{table_text(columns, rows)}\n\n{note}"


_NULL = (
    "Null: what the head's own distance profile would give (for the previous and the first token: even attention). p: "
    "share above its null, over texts; q over all scores and heads."
)
_REPEATED = (
    "\nduplicate_token and induction: on the random tokens, which come again in chunks of eight in another order;\n"
    "syntactic_neighbour and sentence_block: on the other texts"
)
_MANY = 100
_NARROW = f"95%: too narrow for duplicate_token and induction below {_MANY} texts (about 85% with 20);\n"
_TOO_FEW = f" (fewer than {LEAST_UNITS} texts, so there is no p)"


@steady
def grouping_profile(
    model: Model,
    texts: Any = None,
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
        texts: A list of strings or token ids, a text file with blank lines between texts, or a ``datasets`` dataset. By
            default 24 sequences of random tokens said twice (the usual test of induction heads; the second time in
            chunks of eight tokens whose order changes, so that distance explains nothing), and the whole bundled prose
            (nothing is fitted here, so that nothing need be held out). duplicate_token and induction are then about the
            random tokens, syntactic_neighbour and sentence_block about the prose, the others about both.
        column: The column of a dataset that holds the text.
        heads: Only these heads; all by default. q-values are over the heads scored.
        max_texts: Stop after this many texts (the random sequences not counted).
        max_tokens: Cut longer texts to this many tokens, or to the context length of the model if that is shorter.
        prepend_bos: Begin each text with BOS; by default as the model does.
        progress: Show a progress bar on a terminal.

    Example:
        >>> from tl_headmaps import grouping_profile, load_default_model
        >>> texts = ["The cat sat. The cat slept.", "A bird sang. A bird flew."]
        >>> profile = grouping_profile(load_default_model(), texts, progress=False)  # without texts: the usual test
        >>> [(str(head), round(share, 2)) for head, share in profile.top(2, "induction")]
        [('L17H5', 0.69), ('L17H4', 0.42)]
    """
    if max_tokens < 2:
        raise UsageError(f"max_tokens={max_tokens} is too short. A text needs at least 2 tokens.")
    if max_texts is not None and max_texts < 1:
        raise UsageError(f"max_texts={max_texts} leaves no text; give 1 or more.")
    check_runs(model)
    prepend_bos = prepends_bos(model, prepend_bos)
    weights = HeadWeights.of(model)
    source: Iterator[str | tuple[int, ...]] = islice(read_texts(texts, column), max_texts)
    n_texts = max_texts
    if texts is None or isinstance(texts, list | tuple):
        # Whatever else there is may be a stream, whose length nobody knows.
        listed = list(source)
        source, n_texts = iter(listed), len(listed)
    chosen = weights.chosen_heads(heads)
    tally = _Tally(model, weights, chosen, min(max_tokens, int(model.cfg.n_ctx)), prepend_bos)
    repeated = repeated_tokens(_usable_tokens(weights), tally.longest - prepend_bos) if texts is None else []
    total = None if n_texts is None else n_texts + len(repeated)
    with Progress(desc="profile", unit="text", total=total, show=progress) as bar:
        if repeated:
            start = [int(weights.tokenizer.bos_token_id)] if prepend_bos else []
            tally.add([(*start, *ids) for ids in repeated], leave_out=SENTENCE_SCORES)
            bar.update(len(repeated))
        while some := list(islice(source, _AT_ONCE)):
            tally.add(some, leave_out=REPETITION_SCORES if repeated else ())
            bar.update(len(some))
    if not tally.n_texts:
        raise UsageError("There is no text of at least two tokens. Give other texts, a file, or a dataset column.")
    options: dict[str, Any] = {"max_texts": max_texts, "max_tokens": max_tokens, "prepend_bos": prepend_bos}
    options["heads"] = None if heads is None else [str(head) for head in chosen]
    data = {"texts": tally.digest.hexdigest()}
    if repeated:
        data["source"] = f"{len(repeated)} sequences of random tokens said twice, {describe_source(None)}"
    return tally.result(
        weights.provenance(runs_model=True, options=options, data=data, seed=0 if repeated else None),
        len(repeated) if repeated else None,
    )


def _usable_tokens(weights: HeadWeights) -> list[int]:
    """Tokens that random sequences are drawn from: all but special ones."""
    n_vocab = weights.n_vocab if weights.tokenizer is None else min(weights.n_vocab, len(weights.tokenizer))
    special = set() if weights.tokenizer is None else set(weights.tokenizer.all_special_ids)
    return [token for token in range(n_vocab) if token not in special]


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
        self.shares, self.possible, self.null, self.excess, self.possible_null = (
            RunningRatio(*shape) for _ in range(5)
        )
        self.even, self.queries, self.texts, self.tokens = torch.zeros(4, len(PROFILE_SCORES), dtype=torch.float64)
        self.n_texts = self.n_tokens = self.n_cut = self.n_skipped = 0
        self.digest = hashlib.sha256()

    def add(self, texts: list[Text], leave_out: Sequence[str] = ()) -> None:
        """Score some texts, some scores left out."""
        prompts = list(self._prompts(texts))
        if not prompts:
            return
        pairs = [profile_pairs(ids, self._texts_of(ids)) for ids in prompts]
        counted = torch.ones(len(PROFILE_SCORES), dtype=torch.float64)
        without_words = SENTENCE_SCORES if self.tokenizer is None else ()
        counted[[PROFILE_SCORES.index(score) for score in (*leave_out, *without_words)]] = 0
        pairs = [pairs_of_text & counted.bool()[:, None, None] for pairs_of_text in pairs]
        for pairs_of_text in pairs:
            self.even += even_pair_shares(pairs_of_text)
            self.queries += queries_with_pairs(pairs_of_text)
            self.texts += counted
            self.tokens += counted * pairs_of_text.shape[-1]
            for running in (self.shares, self.possible, self.null, self.excess, self.possible_null):
                # Texts that a score leaves out say nothing about how sure it is.
                running.next_unit(counted)
        self.n_texts += len(prompts)
        self.n_tokens += sum(map(len, prompts))

        def reduce(seen: LayerActivations) -> None:
            here = seen.layer, slice(seen["pattern"].shape[1])
            for pattern, stream, row in zip(seen["pattern"], seen["resid_pre"], seen.batch.rows, strict=True):
                pattern = pattern.to("cpu", torch.float32)
                attention = text_shares(pattern, pairs[row])
                null = null_shares(pattern, pairs[row], sinks(stream).cpu())
                self.null.add(null, counted, at=here)
                self.excess.add(attention.shares - null, counted, at=here)
                self.shares.add(attention.shares, counted, at=here)
                queries = queries_with_pairs(pairs[row])
                self.possible.add(attention.on_pairs, queries, at=here)
                # A query's attention sums to one, so shares times all of it are the attention on the pairs.
                self.possible_null.add(null * pattern.double().sum((1, 2))[:, None], queries, at=here)

        run(self.model, prompts, read=("pattern", "resid_pre"), reduce=reduce, layers=list(self.heads))

    def _texts_of(self, ids: list[int]) -> list[str]:
        """Texts of tokens; special tokens such as BOS have none, so they are not taken for words."""
        if self.tokenizer is None:
            return [""] * len(ids)
        special = set(self.tokenizer.all_special_ids)
        return ["" if token in special else token_string(self.tokenizer, token) for token in ids]

    def _prompts(self, texts: list[Text]) -> Iterator[list[int]]:
        for text in texts:
            ids = encode_prompt(self.model, text, self.prepend_bos)
            self.digest.update(f"{len(text)}:".encode() + text_bytes(text))
            if len(ids) - (self.prepend_bos and isinstance(text, str)) < 2:
                self.n_skipped += 1
                continue
            self.n_cut += len(ids) > self.longest
            yield ids[: self.longest]

    def result(self, provenance: Any, n_repeated: int | None) -> GroupingProfile:
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
            where_possible_null=by_score(self.possible_null.ratio()).float(),
            even=(self.even / self.texts).float(),
            possible=(self.queries / self.tokens).float(),
            n_texts=self.n_texts,
            n_tokens=self.n_tokens,
            n_cut=self.n_cut,
            n_skipped=self.n_skipped,
            n_repeated=n_repeated,
            provenance=provenance,
        )
