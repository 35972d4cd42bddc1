"""What the analyses that run a text have in common: its tokens, one text by itself or documents in batches.

No batch mixes documents that an interval has to tell apart. Every document is split into sequences of at most
``length`` tokens, as equal as possible; they are padded on the right, where a causal model cannot see it, and padded
positions count nowhere.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...core.errors import UnsupportedModelError, UsageError
from ...core.types import Model
from ...core.vocabulary import Text, as_text, token_string
from ..requirements import require_host
from ..weights import HeadWeights
from .activations import check_prompts, encode_prompt, prepends_bos


def check_runs(model: Model) -> None:
    """Refuse weights without a model, and what is not a model of TransformerLens."""
    require_host(model)
    if isinstance(model, HeadWeights):
        raise UsageError("This analysis runs the model, and HeadWeights cannot run. Pass the model itself.")


@dataclass(frozen=True)
class EncodedText:
    """A text as token ids, the text of each token, and whether it begins with BOS."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    prepend_bos: bool

    @classmethod
    def of(cls, model: Model, text: Any, *, prepend_bos: bool | None, least: int, what: str) -> "EncodedText":
        """Encode a text (or take token ids); refuse what is too short or cannot run.

        Args:
            model: The model.
            text: A string, or token ids in a list or tensor.
            prepend_bos: Begin a string with BOS; by default as the model does. Token ids stay as they are.
            least: Smallest number of tokens.
            what: The reason for it, for the message.
        """
        check_runs(model)
        text = as_text(text)
        tokenizer = getattr(model, "tokenizer", None)
        if isinstance(text, str):
            if not text.strip():
                raise UsageError(
                    f"The text {text!r} is empty. Give a text of at least {least} token{'s' if least > 1 else ''}."
                )
            prepend_bos = prepends_bos(model, prepend_bos)
        else:
            prepend_bos = False
        ids = encode_prompt(model, text, prepend_bos)
        # BOS is there for the model: it makes no text of a single token longer.
        n_own = len(ids) - prepend_bos
        if n_own < least:
            raise UsageError(f"The text has {n_own} token{'' if n_own == 1 else 's'}, but {what}.")
        check_prompts(model, [ids])
        texts = (f"#{token}" if tokenizer is None else token_string(tokenizer, token) for token in ids)
        return cls(tuple(ids), tuple(texts), prepend_bos)


_MOST_UNITS = 128
"""More documents than this are taken together in groups of about equal size: each costs a pass through the model."""


@dataclass(frozen=True)
class TextBatch:
    """Sequences of token ids, padded on the right."""

    tokens: Int[Tensor, "sequence pos"]
    lengths: Int[Tensor, " sequence"]

    @property
    def real(self) -> Bool[Tensor, "sequence pos"]:
        """Which positions are not padding."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    @property
    def targets(self) -> Int[Tensor, "sequence pos_less_one"]:
        """The next token of every position but the last, -100 where there is none."""
        return self.tokens[:, 1:].masked_fill(~self.real[:, 1:], -100)

    @property
    def n_targets(self) -> int:
        """Tokens that the loss of the batch is a mean over."""
        return int((self.lengths - 1).sum())


@dataclass(frozen=True)
class TextBatches:
    """All batches of a call.

    Attributes:
        units: For each batch, the number of the document it is from (or of the group of documents, where there are very
            many): what could have come out otherwise.
        n_documents: Documents read.
        n_tokens: Tokens in all of them, padding not counted.
        digest: SHA-256 of the token ids, sequence by sequence.
    """

    items: tuple[TextBatch, ...]
    units: tuple[int, ...]
    n_documents: int
    n_tokens: int
    digest: str


def token_batches(
    texts: Iterable[Text],
    tokenizer: Any,
    *,
    length: int,
    max_tokens: int,
    prepend_bos: bool = False,
    device: torch.device | None = None,
) -> TextBatches:
    """Tokenise documents until ``max_tokens`` are read; a batch is a sequence, or several that are short.

    Args:
        texts: Documents; only as many as needed are taken. Token ids stay as they are, without BOS.
        tokenizer: The model's tokenizer, used without special tokens.
        length: Longest sequence, and most tokens of a batch.
        max_tokens: Read at most this many tokens.
        prepend_bos: Start every sequence with the tokenizer's beginning-of-text token.
        device: Where the batches go.
    """
    bos = _bos(tokenizer) if prepend_bos else []
    documents: list[list[list[int]]] = []
    read = longest = 0
    for text in texts:
        if tokenizer is None and isinstance(text, str):
            raise UnsupportedModelError(
                "The model has no tokenizer, so text cannot be read. Load it with its tokenizer, or give token ids."
            )
        start = bos if isinstance(text, str) else []
        encoded = tokenizer(text, add_special_tokens=False, verbose=False) if isinstance(text, str) else {}
        ids = list(encoded.get("input_ids", text))
        if start and ids[:1] == start:
            # Some tokenizers add their own even without special tokens; every sequence gets one below.
            ids = ids[1:]
        ids = ids[: max_tokens - read]
        longest = max(longest, len(ids))
        parts = [[*start, *part] for part in _cut(ids, length - len(start)) if len(part) + len(start) >= 2]
        if parts:
            documents.append(parts)
        read += len(ids)
        if read >= max_tokens:
            break
    if not documents:
        problem = f"the longest text has {longest} token{'' if longest == 1 else 's'}" if read else "there is no text"
        raise UsageError(
            f"The text is too short: {problem}, but a loss needs at least two tokens in a row. Give a longer text."
        )
    sequences = list(chain.from_iterable(documents))
    digest = hashlib.sha256(repr(sequences).encode()).hexdigest()
    batches = [
        (unit, _padded(group, device))
        for unit, together in enumerate(_units(documents))
        for group in _filled(together, length)
    ]
    units, items = zip(*batches, strict=True)
    return TextBatches(items, units, len(documents), sum(map(len, sequences)), digest)


def _bos(tokenizer: Any) -> list[int]:
    if getattr(tokenizer, "bos_token_id", None) is None:
        raise UsageError("prepend_bos=True was given, but this tokenizer has no BOS token. Leave it out.")
    return [int(tokenizer.bos_token_id)]


def _cut(ids: list[int], length: int) -> list[list[int]]:
    """Parts of at most ``length`` tokens whose sizes differ by at most one.

    Example:
        >>> _cut([1, 2, 3, 4, 5], 3)
        [[1, 2, 3], [4, 5]]
    """
    if not ids:
        return []
    parts = math.ceil(len(ids) / length)
    size, longer = divmod(len(ids), parts)
    edges = [number * size + min(number, longer) for number in range(parts + 1)]
    return [ids[first:last] for first, last in pairwise(edges)]


def _units(documents: list[list[list[int]]]) -> list[list[list[int]]]:
    """The sequences of each document, or of groups of neighbouring documents with about equally many tokens."""
    if len(documents) <= _MOST_UNITS:
        return documents
    sizes = [sum(map(len, document)) for document in documents]
    groups: dict[int, list[list[int]]] = {}
    before = 0
    for document, size in zip(documents, sizes, strict=True):
        groups.setdefault(int((before + size / 2) * _MOST_UNITS / sum(sizes)), []).extend(document)
        before += size
    return list(groups.values())


def _filled(sequences: list[list[int]], most: int) -> list[list[list[int]]]:
    """Neighbouring sequences together, as long as they have at most this many tokens."""
    groups: list[list[list[int]]] = []
    for sequence in sequences:
        if groups and sum(map(len, groups[-1])) + len(sequence) <= most:
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    return groups


def _padded(group: list[list[int]], device: torch.device | None) -> TextBatch:
    lengths = torch.tensor([len(sequence) for sequence in group], device=device)
    tokens = torch.zeros(len(group), int(lengths.max()), dtype=torch.int64, device=device)
    for row, sequence in enumerate(group):
        tokens[row, : len(sequence)] = torch.tensor(sequence, device=device)
        # Any token would do; a host cannot mistake the last one, repeated, for a padding token and mask it.
        tokens[row, len(sequence) :] = sequence[-1]
    return TextBatch(tokens, lengths)
