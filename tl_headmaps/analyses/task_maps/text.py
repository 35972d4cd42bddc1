"""Task maps and their verification as text for a terminal."""

from typing import TYPE_CHECKING

from ...renderers.text import table_text

if TYPE_CHECKING:
    from ..verify_tasks.result import TaskVerification
    from .result import TaskMaps


def task_maps_text(maps: "TaskMaps", top: int = 4) -> str:
    """A row per function: what the probe and the words know, and the heads above the elbow."""
    from .result import STABLE

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
    """What each function loses with its own heads and with random ones, and the matrix of all functions."""

    def span(name: str, number: int) -> str:
        low, high = (float(getattr(found, f"{name}_{end}")[number]) for end in ("low", "high"))
        return f"{getattr(found, name)[number]:.2f} ({low:.2f}-{high:.2f})"

    rows = [
        [
            function,
            found.n_items[number],
            f"{found.chance[number]:.2f}",
            span("clean", number),
            found.n_ablated[number],
            f"{found.own[number]:.2f} ({found.accuracy_low[number, number]:.2f}-"
            f"{found.accuracy_high[number, number]:.2f})",
            f"{found.others[number]:.2f}",
            span("random", number),
            f"{found.p_value[number]:.2g}",
            found.verdicts[number],
        ]
        for number, function in enumerate(found.functions)
    ]
    titles = ("function", "items", "chance", "all heads", "heads", "own off", "others", "random off", "p", "verdict")
    columns = [(title, "left" if title in ("function", "verdict") else "right") for title in titles]
    names = [function.split("_")[0] for function in found.functions]
    matrix = [
        [function, *(f"{value:.2f}" for value in found.accuracy[number].tolist())]
        for number, function in enumerate(found.functions)
    ]
    between = [("ablated \\ asked", "left"), *((name, "right") for name in names)]
    n_testable = sum(found.testable)
    summary = f"{n_testable} of {len(found.functions)} functions are testable: the model answers them above chance"
    if n_testable < len(found.functions):
        summary += "; of the others nothing can be said"
    note = (
        f"{summary}\n"
        "share of held-out items whose right answer is likelier than the alternatives (95% interval): with all heads,\n"
        "with the function's own heads ablated, with those of another function (mean), with as many random heads,\n"
        "none of them its own; p: own against random on the same items, exact; verdict: without own heads, compared\n"
        "with random ones, at a false discovery rate of 5%; not testable: the interval with all heads reaches chance"
    )
    return f"Task maps verified by ablation\n\n{table_text(columns, rows)}\n\n{table_text(between, matrix)}\n\n{note}"
