"""What kind of tokens each head attends to, over many texts: previous, repeated, first, induced, nearby."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.running.activations import LayerActivations, encode_prompt, run
from ..core.errors import UsageError
from ..core.options import AtLeast, Count, public
from ..core.provenance import Provenance
from ..core.types import HeadLike, Model, by_layer
from ..core.vocabulary import Text, token_string
from ..data.texts import describe_source, read_texts, repeated_tokens, text_bytes
from ..results.table import HeadTable, frozen_result, measured
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
from .study import Study

_AT_ONCE = 32
"""Texts read ahead, so that those of equal length run together."""
_MANY = 100
"""Texts from which on intervals hold for scores of which few texts say anything."""
_UNIT = "share of attention"


@frozen_result
class GroupingProfile(HeadTable):
    """Head maps of six scores, averaged over texts, with 95% intervals.

    Attributes:
        scores: Names of the scores: previous_token, duplicate_token, first_token, induction, syntactic_neighbour,
            sentence_block.

    Example:
        >>> from tl_headmaps import grouping_profile, load_default_model
        >>> profile = grouping_profile(load_default_model(), ["Birds walk.", "Cats walk too."], progress=False)
        >>> profile.scores
        ('previous_token', 'duplicate_token', 'first_token', 'induction', 'syntactic_neighbour', 'sentence_block')
        >>> profile.n_texts, tuple(profile.head_map("previous_token").shape)
        (2, (30, 9))
    """

    kind: ClassVar[str] = "grouping_profile"
    title: ClassVar[str] = "What heads attend to: {self.texts_read}"
    methods: ClassVar[tuple[str, ...]] = ("olsson2022induction",)
    json_axes: ClassVar[dict[str, str | None]] = {"score": "scores", "layer": None, "head": None}
    labelled: ClassVar[str] = "scores"
    ranked_by: ClassVar[str] = "where_possible"
    also: ClassVar[tuple[str, ...]] = ("values", "q_value")
    paper_columns: ClassVar[tuple[str, ...]] = (
        *("score", "head", "values", "interval_low", "interval_high", "null", "q_value", "where_possible"),
    )
    signed: ClassVar[bool] = False

    scores: tuple[str, ...]
    values: Float[Tensor, "score layer head"] = measured(
        "value", "all queries", "mean share of a head's attention on the pairs a score is about", unit=_UNIT
    )
    interval_low: Float[Tensor, "score layer head"] = measured("low", "95% of all", "over the texts scored (Student's)")
    interval_high: Float[Tensor, "score layer head"] = measured("high", "95% of all", "upper end")
    where_possible: Float[Tensor, "score layer head"] = measured(
        "value", "where possible", "mean attention on such pairs from the queries that have one", unit=_UNIT
    )
    where_possible_low: Float[Tensor, "score layer head"] = measured("low", "95%", "over texts (Student's)")
    where_possible_high: Float[Tensor, "score layer head"] = measured("high", "95%", "upper end")
    null: Float[Tensor, "score layer head"] = measured(
        "null", "null of all", "the share of all attention if it depended on distance alone", of="values"
    )
    p_value: Float[Tensor, "score layer head"] = measured(
        "p",
        "p",
        f"share of all queries above its null, over texts (one-sided); none for fewer than {LEAST_UNITS} texts",
        of="values",
    )
    q_value: Float[Tensor, "score layer head"] = measured(
        "q", "q", "of the share of all queries above its null, over all scores and heads", of="values"
    )
    even: Float[Tensor, " score"] = measured("fact", "even", "what even attention would score")
    possible: Float[Tensor, " score"] = measured("fact", "queries", "share of queries that have such a pair")
    n_texts: int = measured("fact", "texts scored")
    n_tokens: int = measured("fact", "tokens of the texts scored")
    n_cut: int = measured("fact", "texts that were cut")
    n_skipped: int = measured("fact", "texts of fewer than two tokens, which were left out")
    provenance: Provenance
    where_possible_null: Float[Tensor, "score layer head"] | None = measured(
        "null",
        "null",
        "if attention depended on distance alone, with sinks as they are (previous and first token: if it were even)",
        of="where_possible",
        default=None,
    )
    n_repeated: int | None = measured("fact", "texts of repeated random tokens", default=None)

    @property
    def texts_read(self) -> str:
        """The texts in words."""
        parts = [
            f"{self.n_texts:,} texts, {self.n_tokens:,} tokens",
            f" ({self.n_repeated} of repeated random tokens)" if self.n_repeated else "",
            f", {self.n_cut} cut" if self.n_cut else "",
            f", {self.n_skipped} too short" if self.n_skipped else "",
        ]
        return "".join(parts)

    def notes(self) -> list[str]:
        notes = []
        if self.n_repeated:
            notes.append(
                "duplicate_token and induction are about the random tokens, which come again in chunks of eight in "
                "another order; syntactic_neighbour and sentence_block are about the other texts."
            )
        elif self.n_texts < _MANY:
            notes.append(
                f"Few texts repeat a token: below {_MANY} texts, intervals of duplicate_token and induction are too "
                "narrow (about 85% with 20)."
            )
        if self.n_texts < LEAST_UNITS:
            notes.append(f"There are fewer than {LEAST_UNITS} texts, so there is no p.")
        return notes


@public
def grouping_profile(
    model: Model,
    texts: Any = None,
    *,
    column: str = "text",
    heads: HeadLike | Iterable[HeadLike] | None = None,
    max_texts: Count | None = None,
    max_tokens: Annotated[int, AtLeast(2)] = 512,
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> GroupingProfile:
    """Score every head on six kinds of attention, averaged over texts, with intervals.

    Memory does not grow with the number of texts, so a streamed dataset works.

    Args:
        texts: A list of strings or token ids, a text file with blank lines between texts, or a ``datasets`` dataset. By
            default 24 sequences of random tokens that come twice (the usual test of induction heads; the second time in
            chunks of eight tokens whose order changes, so that distance explains nothing), and the whole bundled prose
            (nothing is fitted here, so that nothing need be held out). duplicate_token and induction are then about the
            random tokens, syntactic_neighbour and sentence_block about the prose, the others about both.
        heads: Only these heads; all by default. q-values are over the heads scored.
        max_texts: Stop after this many texts (the random sequences not counted).

    Example:
        >>> from tl_headmaps import grouping_profile, load_default_model
        >>> texts = ["The cat sat. The cat slept.", "A bird sang. A bird flew."]
        >>> profile = grouping_profile(load_default_model(), texts, progress=False)  # without texts: the usual test
        >>> [(str(head), round(share, 2)) for head, share in profile.top(2, "induction")]
        [('L17H5', 0.69), ('L17H4', 0.42)]
    """
    study = Study(model, heads=heads, prepend_bos=prepend_bos, progress=progress)
    source: Iterator[Text] = islice(read_texts(texts, column), max_texts)
    n_texts = max_texts
    if texts is None or isinstance(texts, list | tuple):
        # Whatever else there is may be a stream, whose length nobody knows.
        listed = list(source)
        source, n_texts = iter(listed), len(listed)
    sums = _RunningSums(study, min(max_tokens, int(model.cfg.n_ctx)))
    n_repeated = None
    with study.bar("profile", "text", n_texts) as bar:
        if texts is None:
            repeated = _repeated_sequences(study, sums.longest)
            n_repeated = len(repeated)
            study.data["source"] = f"{n_repeated} sequences of random tokens said twice, {describe_source(None)}"
            sums.add(repeated, leave_out=SENTENCE_SCORES)
        while some := list(islice(source, _AT_ONCE)):
            sums.add(some, leave_out=REPETITION_SCORES if n_repeated else ())
            bar.update(len(some))
    if not sums.n_texts:
        raise UsageError("There is no text of at least two tokens. Give other texts, a file, or a dataset column.")
    study.data = {"texts": sums.digest.hexdigest(), **study.data}
    values, low, high = sums.maps(sums.shares)
    where, where_low, where_high = sums.maps(sums.possible)
    p_value = sums.by_score(sums.excess.p_value())
    return GroupingProfile(
        scores=PROFILE_SCORES,
        values=values,
        interval_low=low,
        interval_high=high,
        where_possible=where,
        where_possible_low=where_low,
        where_possible_high=where_high,
        null=sums.by_score(sums.null.ratio()).float(),
        p_value=p_value.float(),
        q_value=q_values(p_value.contiguous()).float(),
        where_possible_null=sums.by_score(sums.possible_null.ratio()).float(),
        even=(sums.even / sums.texts).float(),
        possible=(sums.queries / sums.tokens).float(),
        n_texts=sums.n_texts,
        n_tokens=sums.n_tokens,
        n_cut=sums.n_cut,
        n_skipped=sums.n_skipped,
        n_repeated=n_repeated,
        provenance=study.provenance(
            runs_model=True, seed=0 if n_repeated else None, max_texts=max_texts, max_tokens=max_tokens
        ),
    )


def _repeated_sequences(study: Study, longest: int) -> list[Text]:
    """Random tokens that come twice; special tokens are not among them."""
    weights = study.weights
    n_vocab = weights.n_vocab if weights.tokenizer is None else min(weights.n_vocab, len(weights.tokenizer))
    special = set() if weights.tokenizer is None else set(weights.tokenizer.all_special_ids)
    usable = [token for token in range(n_vocab) if token not in special]
    start = (int(weights.tokenizer.bos_token_id),) if study.prepend_bos else ()
    return [(*start, *ids) for ids in repeated_tokens(usable, longest - study.prepend_bos)]


class _RunningSums:
    """Sums over texts; their size does not depend on how many texts there are."""

    def __init__(self, study: Study, longest: int) -> None:
        self.study, self.longest = study, longest
        self.heads = by_layer(study.heads)
        self.left_out = study.as_map(torch.zeros(len(study.heads))).isnan()
        shape = (*self.left_out.shape, len(PROFILE_SCORES))
        self.shares, self.possible, self.null, self.excess, self.possible_null = (
            RunningRatio(*shape) for _ in range(5)
        )
        self.even, self.queries, self.texts, self.tokens = torch.zeros(4, len(PROFILE_SCORES), dtype=torch.float64)
        self.n_texts = self.n_tokens = self.n_cut = self.n_skipped = 0
        self.digest = hashlib.sha256()

    def add(self, texts: Sequence[Text], leave_out: Sequence[str] = ()) -> None:
        """Score some texts, some scores left out."""
        prompts = list(self._prompts(texts))
        if not prompts:
            return
        pairs = [profile_pairs(ids, self._texts_of(ids)) for ids in prompts]
        counted = torch.ones(len(PROFILE_SCORES), dtype=torch.float64)
        without_words = SENTENCE_SCORES if self.study.weights.tokenizer is None else ()
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

        run(self.study.model, prompts, read=("pattern", "resid_pre"), reduce=reduce, layers=list(self.heads))

    def _texts_of(self, ids: list[int]) -> list[str]:
        """Texts of tokens; special tokens such as BOS have none, so they are not taken for words."""
        tokenizer = self.study.weights.tokenizer
        if tokenizer is None:
            return [""] * len(ids)
        special = set(tokenizer.all_special_ids)
        return ["" if token in special else token_string(tokenizer, token) for token in ids]

    def _prompts(self, texts: Sequence[Text]) -> Iterator[list[int]]:
        for text in texts:
            ids = encode_prompt(self.study.model, text, self.study.prepend_bos)
            self.digest.update(f"{len(text)}:".encode() + text_bytes(text))
            if len(ids) - (self.study.prepend_bos and isinstance(text, str)) < 2:
                self.n_skipped += 1
                continue
            self.n_cut += len(ids) > self.longest
            yield ids[: self.longest]

    def by_score(self, part: Float[Tensor, "layer head score"]) -> Float[Tensor, "score layer head"]:
        """Heads that were left out are NaN."""
        return part.masked_fill(self.left_out[..., None], torch.nan).permute(2, 0, 1)

    def maps(self, running: RunningRatio) -> list[Float[Tensor, "score layer head"]]:
        """A ratio and the ends of its interval."""
        ratio, half = running.ratio(), running.half_width()
        ends = (ratio, (ratio - half).clamp(0, 1), (ratio + half).clamp(0, 1))
        return [self.by_score(part).float() for part in ends]
