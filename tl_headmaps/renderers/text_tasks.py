"""Task maps and their verification as text for a terminal."""

from typing import TYPE_CHECKING, Any

from .text import table_text

if TYPE_CHECKING:
    from ..results.task_maps import TaskMaps
    from ..results.task_verification import TaskVerification


def task_maps_text(maps: "TaskMaps", top: int = 4) -> str:
    """A row per function: what the probe and the words know, and the heads above the elbow."""
    from ..results.task_maps import STABLE

    rows = []
    for number, function in enumerate(maps.functions):
        heads = maps.above_elbow[number]
        named = [f"{head} {maps.importance_normalised[number, head.layer, head.head]:.3f}" for head in heads[:top]]
        rows.append(
            [
                function,
                maps.n_items[number],
                f"{maps.probe_accuracy[number]:.2f}",
                f"{maps.probe_low[number]:.2f}-{maps.probe_high[number]:.2f}",
                f"{maps.baseline_accuracy['words'][number]:.2f}",
                f"{maps.stability[number]:.2f}{'' if maps.stability[number] >= STABLE else ' unstable'}",
                len(heads),
                ", ".join(named) or "none",
            ]
        )
    overall = maps.overall_accuracy
    titles = ["function", "items", "probe", "95%", "words", "stability", "heads", "most important"]
    columns = [(title, "left" if title in ("function", "most important") else "right") for title in titles]
    others = ", ".join(f"{name.replace('_', ' ')} {overall[name]:.2f}" for name in maps.baseline_accuracy)
    notes = (
        f"all items: probe {overall['probe']:.2f}, words and heads {overall['combined']:.2f}; without heads: {others}\n"
        "probe: held-out items recognised from all heads; words: from the items' words; stability: rank correlation\n"
        "with a second seed; heads: above the elbow and above every head with shuffled labels, with their share of\n"
        "the importance that goes beyond words"
    )
    if not maps.stable:
        notes += f"\nUNSTABLE: with another seed a map changes (rank correlation below {STABLE}); give more items."
    title = f"Task maps, {maps.probe} probe on z at {'the answer' if maps.positions == 'answer' else 'the last token'}"
    return f"{title}\n\n{table_text(columns, rows)}\n\n{notes}"


def task_verification_text(found: "TaskVerification") -> str:
    """The matrix of accuracies, with all heads and with random ones taken away above and below."""
    names = [function.split("_")[0] for function in found.functions]

    def cells(title: str, count: object, values: Any, low: Any, high: Any) -> list[Any]:
        spans = zip(values.tolist(), low.tolist(), high.tolist(), strict=True)
        return [title, count, *(f"{value:.2f} ({a:.2f}-{b:.2f})" for value, a, b in spans)]

    rows = [cells("none", "", found.clean, found.clean_low, found.clean_high)]
    for number, function in enumerate(found.functions):
        rows.append(
            cells(
                function,
                found.n_ablated[number],
                found.accuracy[number],
                found.accuracy_low[number],
                found.accuracy_high[number],
            )
        )
    rows.append(cells("random others", "", found.random, found.random_low, found.random_high))
    rows.append(["chance", "", *(f"{value:.2f}" for value in found.chance.tolist())])
    columns = [("ablated", "left"), ("heads", "right"), *((name, "right") for name in names)]
    note = (
        "columns: share of a function's held-out items whose right answer is likelier than the alternatives (95%);\n"
        "random others: as many heads as the column's function has, none of them its own"
    )
    return f"Task maps verified by ablation\n\n{table_text(columns, rows)}\n\n{note}"
