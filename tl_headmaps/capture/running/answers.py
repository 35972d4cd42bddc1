"""Prompts with possible answers: their token ids, and the likelihood of each answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...core.errors import UsageError
from ...core.types import Model
from ...core.vocabulary import word_ids
from .ablated import replaced
from .activations import DEFAULT_BUDGET, Activation, Edit, PromptBatch, encode_prompt, run


@dataclass(frozen=True)
class Question:
    """Token ids of a prompt and of its possible answers, the right one first."""

    prompt: tuple[int, ...]
    options: tuple[tuple[int, ...], ...]

    @property
    def answered(self) -> tuple[int, ...]:
        """The prompt followed by the right answer."""
        return self.prompt + self.options[0]


def encode_question(model: Model, prompt: str, options: Sequence[str], prepend_bos: bool = False) -> Question:
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
                f"The answer {_shown(option)} ({len(option_ids)} tokens) does not fit after its prompt ({len(ids)} "
                f"tokens: {_shown(prompt)}): the model's context is {longest} tokens. Shorten or remove the item."
            )
    return Question(ids, encoded)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:59]}…")


def answer_likelihoods(
    model: Model,
    questions: Sequence[Question],
    *,
    ablated: Bool[Tensor, "question layer head"] | None = None,
    budget: int = DEFAULT_BUDGET,
    progress: Callable[[int], object] | None = None,
) -> list[tuple[float, ...]]:
    """Log-likelihood of every option of every question (summed over its tokens).

    Options share a forward pass where all tokens of one but its last begin the other (always, if it is a single token).

    Args:
        model: TransformerBridge or HookedTransformer.
        questions: The prompts and their options.
        ablated: Heads whose z is set to zero at every position, for each question.
        budget: Bytes a batch may take.
        progress: Called with the number of questions answered since the last call.
    """
    sequences: list[tuple[int, ...]] = []
    asked_by: list[int] = []
    # For every sequence: the options whose tokens it predicts from the prompt's last position on.
    wanted: list[list[int]] = []
    left = [0] * len(questions)
    for number, question in enumerate(questions):
        for run_options in _runs(question.options):
            longest = question.options[run_options[0]]
            sequences.append(question.prompt + longest[:-1])
            asked_by.append(number)
            wanted.append(run_options)
            left[number] += 1
    likelihoods = [[0.0] * len(question.options) for question in questions]

    def take(logits: Float[Tensor, "batch pos vocab"], batch: PromptBatch) -> None:
        for place, row in enumerate(batch.rows):
            question = questions[asked_by[row]]
            # The positions that predict the answer are the last ones.
            n_steps = len(sequences[row]) - len(question.prompt) + 1
            log_chances = torch.log_softmax(logits[place, -n_steps:].float(), -1)
            for option in wanted[row]:
                tokens = list(question.options[option])
                likelihoods[asked_by[row]][option] = float(log_chances[range(len(tokens)), tokens].double().sum())
            left[asked_by[row]] -= 1
        if progress is not None:
            progress(sum(left[number] == 0 for number in {asked_by[row] for row in batch.rows}))

    edit = None if ablated is None else _ablations(ablated, asked_by)
    last = max(len(option) for question in questions for option in question.options)
    run(model, sequences, logits=take, last=last, edit=edit, budget=budget)
    return [tuple(values) for values in likelihoods]


def _runs(options: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Options grouped by the forward pass they are read from; the first of each group is the one that is fed.

    Example:
        >>> _runs([(5,), (6, 7), (6, 8), (9, 1, 2)])
        [[3, 0], [1, 2]]
    """
    runs: list[list[int]] = []
    for number in sorted(range(len(options)), key=lambda number: -len(options[number])):
        fed = options[number][:-1]
        for others in runs:
            if options[others[0]][: len(fed)] == fed:
                others.append(number)
                break
        else:
            runs.append([number])
    return runs


def _ablations(
    ablated: Bool[Tensor, "question layer head"], asked_by: Sequence[int]
) -> dict[tuple[int, Activation], Edit]:
    """Edits that set z of ablated heads to zero, prompt by prompt."""

    def edit_of(layer: int) -> Edit:
        def edit(z: Tensor, batch: PromptBatch) -> Tensor:
            return replaced(z, ablated[[asked_by[row] for row in batch.rows], layer])

        return edit

    return {(layer, "z"): edit_of(layer) for layer in ablated.any(2).any(0).nonzero().flatten().tolist()}
