"""What the analyses that run a text have in common: its tokens."""

from dataclasses import dataclass
from typing import Any

from ...core.errors import UsageError
from ...core.types import Model
from ...core.vocabulary import as_text, token_string
from ..requirements import require_host
from ..weights import HeadWeights
from .activations import check_prompts, encode_prompt, prepends_bos


def check_runs(model: Model) -> None:
    """Refuse weights without a model, and what is no model of TransformerLens."""
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
