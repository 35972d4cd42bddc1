"""Prompts with their possible answers: token ids, and how likely a model finds each answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
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
    ablated: Bool[Tensor, "question layer head"] | None = None,
    budget: int = DEFAULT_BUDGET,
    progress: Callable[[int], object] | None = None,
) -> list[tuple[float, ...]]:
    """Log-likelihood of every option of every question (summed over its tokens).

    Options that differ in their last token only share one forward pass.

    Args:
        model: TransformerBridge or HookedTransformer.
        questions: What to ask.
        ablated: Heads whose z is zero at every position, for each question.
        budget: Bytes a batch may take.
        progress: Called with the number of sequences that were run.
    """
    sequences: list[tuple[int, ...]] = []
    asked_by: list[int] = []
    # For every sequence: which position predicts which token of which option.
    wanted: list[list[tuple[int, int, int]]] = []
    for number, question in enumerate(questions):
        rows: dict[tuple[int, ...], int] = {}
        for place, option in enumerate(question.options):
            sequence = question.prompt + option[:-1]
            if sequence not in rows:
                rows[sequence] = len(sequences)
                sequences.append(sequence)
                asked_by.append(number)
                wanted.append([])
            start = len(question.prompt) - 1
            wanted[rows[sequence]] += [(start + step, token, place) for step, token in enumerate(option)]
    found = [[0.0] * len(question.options) for question in questions]

    def take(logits: Float[Tensor, "batch pos vocab"], batch: Batch) -> None:
        for place, row in enumerate(batch.rows):
            positions = sorted({position for position, _, _ in wanted[row]})
            log_chances = torch.log_softmax(logits[place, positions].float(), -1)
            where = {position: number for number, position in enumerate(positions)}
            for position, token, option in wanted[row]:
                found[asked_by[row]][option] += float(log_chances[where[position], token])

    edit = None if ablated is None else _ablations(ablated, asked_by)
    run(model, sequences, logits=take, edit=edit, budget=budget, progress=progress)
    return [tuple(values) for values in found]


def _ablations(
    ablated: Bool[Tensor, "question layer head"], asked_by: Sequence[int]
) -> dict[tuple[int, Activation], Edit]:
    """Zero z, head by head and prompt by prompt, in the layers where anything is ablated."""

    def edit_of(layer: int) -> Edit:
        def edit(z: Tensor, batch: Batch) -> Tensor:
            dropped = ablated[[asked_by[row] for row in batch.rows], layer].to(z.device)
            return z.masked_fill(dropped[:, None, :, None], 0)

        return edit

    return {(layer, "z"): edit_of(layer) for layer in ablated.any(2).any(0).nonzero().flatten().tolist()}
