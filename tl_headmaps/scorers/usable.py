"""Which tokens of a vocabulary are worth looking at: no byte fragments, control tokens, or tokens training never met.

Undertrained embeddings can have any norm, and tops of rankings are where they surface. A token that training never met
keeps the embedding all such tokens share, so it is recognised by its likeness to the special tokens that
are alike among themselves (on the default model ``<empty_output>``, ``<issue_closed>`` and a dozen more).
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..capture.tensors import row_blocks

UNUSED_LIKENESS = 0.95
"""Cosine to the common embedding of unused special tokens above which a token counts as unused."""

_RESERVED = re.compile(r"<\|?(?:reserved|unused|extra|dummy)[\w ]*\|?>|\[unused\d+\]", re.IGNORECASE)
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True)
class UsableTokens:
    """A choice of tokens, and how many were left out for what reason."""

    mask: Bool[Tensor, " token"]
    left_out: dict[str, int]


def usable_tokens(
    strings: Sequence[str], special_ids: Iterable[int], W_E: Float[Tensor, "token d_model"]
) -> UsableTokens:
    """All tokens but byte fragments, control tokens and unused tokens.

    Args:
        strings: Text of each token the tokenizer knows; rows of ``W_E`` beyond them are unused.
        special_ids: Ids of control tokens (``<|endoftext|>``, ...).
        W_E: Embeddings.
    """
    special = {token for token in special_ids if token < len(W_E)}
    alike = _like_unused(W_E, sorted(special)).tolist()
    reasons = [
        _reason(strings[token], token in special, alike[token]) if token < len(strings) else "unused"
        for token in range(len(W_E))
    ]
    mask = torch.tensor([reason is None for reason in reasons], device=W_E.device)
    return UsableTokens(mask, dict(sorted(Counter(reason for reason in reasons if reason is not None).items())))


def _reason(text: str, special: bool, alike: bool) -> str | None:
    if special or _RESERVED.fullmatch(text):
        return "control"
    if "�" in text or _BYTE.fullmatch(text):
        return "byte fragment"
    if alike:
        return "unused"
    if not text or all(unicodedata.category(character) in ("Cc", "Cf", "Cn", "Co", "Cs") for character in text):
        return "control"
    return None


def _like_unused(W_E: Tensor, special: list[int]) -> Tensor:
    """Which embeddings are like the one that several special tokens share."""
    none = torch.zeros(len(W_E), dtype=torch.bool, device=W_E.device)
    if len(special) < 2:
        return none
    known = torch.nn.functional.normalize(W_E[special].float(), dim=-1)
    shared = ((known @ known.T) > UNUSED_LIKENESS).sum(1) > 1
    if not bool(shared.any()):
        return none
    common = torch.nn.functional.normalize(known[shared].mean(0), dim=0)
    cosine = torch.cat([torch.nn.functional.normalize(part.float(), dim=-1) @ common for part in row_blocks(W_E)])
    return cosine > UNUSED_LIKENESS
