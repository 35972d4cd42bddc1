"""One query and one key worked out: the row of attention, the values it mixes, the association before and after."""

from ...renderers.example import Matrix, Step, worked_example
from ...renderers.figure import Figure
from .worked_example import WorkedExample

_SHOWN_DIMENSIONS = 12
"""Vectors up to this length are written out; longer ones are read from the numbers made of them."""


def worked_example_figure(example: WorkedExample) -> Figure:
    """The steps of the computation, line by line."""
    tokens = [token.strip() or repr(token) for token in example.tokens]
    query, key = tokens[example.query], tokens[example.key]
    steps = []
    short = example.values.shape[1] <= _SHOWN_DIMENSIONS
    if short:
        steps.append(Step("The values of all tokens", [Matrix("V", example.values, rows=tokens)]))
    steps.append(
        Step(
            f"How '{query}' attends", [Matrix(f"A, row of '{query}'", example.row[None], rows=[query], columns=tokens)]
        )
    )
    if short:
        steps.append(
            Step(
                f"The mixed value of '{query}' is the sum of all values, weighted by that row",
                [Matrix(f"v̂ of '{query}'", example.mixed[None], rows=[query])],
                "v̂ = A V",
            )
        )
    steps.append(
        Step(
            f"Association of '{query}' with '{key}' before and after",
            [
                Matrix(
                    "dot product, cosine",
                    [[example.before, example.cosine_before], [example.after, example.cosine_after]],
                    rows=["before", "after"],
                    columns=["dot product", "cosine"],
                )
            ],
            f"v · v({key}) = {example.before:.3g}   becomes   v̂ · v({key}) = {example.after:.3g}",
        )
    )
    steps.append(
        Step(
            "What each source token brings",
            [
                Matrix(
                    "part of the association after attention",
                    example.split[None],
                    rows=["after"],
                    columns=tokens,
                )
            ],
        )
    )
    return worked_example(
        steps,
        title=f"What attention does to '{query}' as seen by '{key}'",
        note=" ".join(example.notes),
    )
