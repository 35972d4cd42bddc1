"""What kind of tokens each head attends to, over many texts: previous, repeated, first, induced, nearby."""

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ...capture.running.activations import LayerActivations, encode_prompt, run
from ...capture.running.text import check_runs
from ...capture.weights import HeadWeights
from ...core.errors import UsageError
from ...core.vocabulary import token_string
from ...data.texts import read_texts
from ...scorers.profile import (
    PROFILE_SCORES,
    RunningRatio,
    even_pair_shares,
    profile_pairs,
    queries_with_pairs,
    text_shares,
)
from .result import GroupingProfile

_LONGEST = 512
_AT_ONCE = 32
"""Texts read ahead, so that those of equal length run together."""


def grouping_profile(
    model: Any,
    texts: Any,
    *,
    column: str = "text",
    max_texts: int | None = None,
    max_tokens: int = _LONGEST,
    prepend_bos: bool = False,
    progress: bool = True,
) -> GroupingProfile:
    """Scores of every head for six kinds of attention, means over texts with intervals.

    Memory does not grow with the number of texts: a streamed dataset works.

    Args:
        model: A TransformerBridge or HookedTransformer.
        texts: A list of strings, a text file with blank lines between texts, or a ``datasets`` dataset.
        column: The column of a dataset that holds the text.
        max_texts: Stop after so many texts.
        max_tokens: Cut longer texts to their first tokens (and to what the model holds).
        prepend_bos: Put BOS in front of every text.
        progress: Show a progress bar on a terminal.

    Example:
        >>> from tl_headmaps import grouping_profile, load_default_model
        >>> texts = ["The cat sat. The cat slept.", "A bird sang. A bird flew."]
        >>> profile = grouping_profile(load_default_model(), texts, progress=False)
        >>> [(str(head), round(share, 2)) for head, share in profile.top("induction", 2)]
        [('L17H5', 0.18), ('L17H4', 0.1)]
    """
    if max_tokens < 2:
        raise UsageError(f"max_tokens={max_tokens} is too short; a text needs at least 2 tokens.")
    if max_texts is not None and max_texts < 1:
        raise UsageError(f"max_texts={max_texts} leaves no text; give 1 or more.")
    check_runs(model)
    weights = HeadWeights.of(model)
    source = islice(read_texts(texts, column), max_texts)
    tally = _Tally(model, weights, min(max_tokens, int(model.cfg.n_ctx)), prepend_bos)
    with tqdm(desc="profile", unit="text", total=max_texts, disable=None if progress else True) as bar:
        while some := list(islice(source, _AT_ONCE)):
            tally.add(some)
            bar.update(len(some))
    if not tally.n_texts:
        raise UsageError("There is no text of at least two tokens. Give texts, a file, or another dataset column.")
    options = {"max_texts": max_texts, "max_tokens": max_tokens, "prepend_bos": prepend_bos}
    return tally.result(weights.provenance(runs_model=True, options=options, data={"texts": tally.digest.hexdigest()}))


class _Tally:
    """Sums over texts: of constant size, whatever their number."""

    def __init__(self, model: Any, weights: HeadWeights, longest: int, prepend_bos: bool) -> None:
        self.model, self.tokenizer = model, weights.tokenizer
        self.longest, self.prepend_bos = longest, prepend_bos
        shape = (weights.n_layers, weights.n_heads, len(PROFILE_SCORES))
        self.shares, self.possible = RunningRatio(*shape), RunningRatio(*shape)
        self.even = torch.zeros(len(PROFILE_SCORES), dtype=torch.float64)
        self.queries = torch.zeros(len(PROFILE_SCORES), dtype=torch.float64)
        self.n_texts = self.n_tokens = self.n_cut = self.n_skipped = 0
        self.digest = hashlib.sha256()

    def add(self, texts: list[str]) -> None:
        prompts = list(self._prompts(texts))
        if not prompts:
            return
        pairs = [profile_pairs(ids, self._texts_of(ids)) for ids in prompts]
        for found in pairs:
            self.even += even_pair_shares(found)
            self.queries += queries_with_pairs(found)
            self.shares.next_text()
            self.possible.next_text()
        self.n_texts += len(prompts)
        self.n_tokens += sum(map(len, prompts))

        def reduce(seen: LayerActivations) -> None:
            for pattern, row in zip(seen["pattern"], seen.batch.rows, strict=True):
                found = text_shares(pattern.to("cpu", torch.float32), pairs[row])
                self.shares.add(seen.layer, found.shares, 1.0)
                self.possible.add(seen.layer, found.on_pairs, queries_with_pairs(pairs[row]).double())

        run(self.model, prompts, read=("pattern",), reduce=reduce)

    def _texts_of(self, ids: list[int]) -> list[str]:
        """Texts of tokens; BOS and its like have none, so that they are no word."""
        special = set(self.tokenizer.all_special_ids)
        return ["" if token in special else token_string(self.tokenizer, token) for token in ids]

    def _prompts(self, texts: list[str]) -> Iterator[list[int]]:
        for text in texts:
            ids = encode_prompt(self.model, text, self.prepend_bos)
            self.digest.update(f"{len(text)}:".encode() + text.encode("utf-8", "surrogatepass"))
            if len(ids) < 2:
                self.n_skipped += 1
                continue
            self.n_cut += len(ids) > self.longest
            yield ids[: self.longest]

    def result(self, provenance: Any) -> GroupingProfile:
        def maps(running: RunningRatio) -> list[Tensor]:
            ratio, half = running.ratio(), running.half_width()
            return [
                part.permute(2, 0, 1).float()
                for part in (ratio, (ratio - half).clamp(0, 1), (ratio + half).clamp(0, 1))
            ]

        values, low, high = maps(self.shares)
        where, where_low, where_high = maps(self.possible)
        return GroupingProfile(
            scores=PROFILE_SCORES,
            values=values,
            interval_low=low,
            interval_high=high,
            where_possible=where,
            where_possible_low=where_low,
            where_possible_high=where_high,
            even=(self.even / self.n_texts).float(),
            possible=(self.queries / self.n_tokens).float(),
            n_texts=self.n_texts,
            n_tokens=self.n_tokens,
            n_cut=self.n_cut,
            n_skipped=self.n_skipped,
            provenance=provenance,
        )
