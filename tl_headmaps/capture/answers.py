"""Prompts with their possible answers: token ids, and how likely a model finds each answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import UsageError
from ..vocabulary import word_ids
from .activations import DEFAULT_BUDGET, Activation, Batch, Edit, encode_prompt, run


@dataclass(frozen=True)
class Question:
    """Token ids of a prompt and of its possible answers, the right one first."""

    prompt: tuple[int, ...]
    options: tuple[tuple[int, ...], ...]

    @property
    def answered(self) -> tuple[int, ...]:
        """The prompt followed by the right answer."""
        return self.prompt + self.options[0]


def encode_question(model: Any, prompt: str, options: Sequence[str], prepend_bos: bool = False) -> Question:
    """Token ids of a prompt and of answers that follow it after a space.

    Raises:
        UsageError: The prompt with an answer is longer than the model's context.
    """
    ids = tuple(encode_prompt(model, prompt, prepend_bos))
    encoded = tuple(tuple(word_ids(model.tokenizer, option)) for option in options)
    longest = int(model.cfg.n_ctx)
    for option, option_ids in zip(options, encoded, strict=True):
        if len(ids) + len(option_ids) > longest:
            raise UsageError(
                f"The answer {_shown(option)} ({len(option_ids)} tokens) does not fit behind its prompt ({len(ids)} "
                f"tokens: {_shown(prompt)}): the model's context holds {longest}. Shorten or remove the item."
            )
    return Question(ids, encoded)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:59]}…")


def answer_likelihoods(
    model: Any,
    questions: Sequence[Question],
    *,
    edit: Mapping[tuple[int, Activation], Edit] | None = None,
    budget: int = DEFAULT_BUDGET,
    progress: Callable[[int], object] | None = None,
) -> list[tuple[float, ...]]:
    """Log-likelihood of every option of every question (summed over its tokens).

    Options that differ in their last token only share one forward pass.
    """
    sequences: dict[tuple[int, ...], int] = {}
    for question in questions:
        for option in question.options:
            sequences.setdefault(question.prompt + option[:-1], len(sequences))
    # For every sequence: which positions predict which token of which option.
    wanted: list[list[tuple[int, int, int, int]]] = [[] for _ in sequences]
    for number, question in enumerate(questions):
        for place, option in enumerate(question.options):
            row = sequences[question.prompt + option[:-1]]
            start = len(question.prompt) - 1
            wanted[row] += [(start + step, token, number, place) for step, token in enumerate(option)]
    found = [[0.0] * len(question.options) for question in questions]

    def take(logits: Float[Tensor, "batch pos vocab"], batch: Batch) -> None:
        for place, row in enumerate(batch.rows):
            positions = sorted({position for position, *_ in wanted[row]})
            log_chances = torch.log_softmax(logits[place, positions].float(), -1)
            where = {position: number for number, position in enumerate(positions)}
            for position, token, number, option in wanted[row]:
                found[number][option] += float(log_chances[where[position], token])

    run(model, list(sequences), logits=take, edit=edit, budget=budget, progress=progress)
    return [tuple(values) for values in found]
