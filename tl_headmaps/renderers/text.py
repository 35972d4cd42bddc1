"""Results as aligned text for a terminal."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..results.head_names import HeadNames
    from ..results.relation_scores import RelationScores
    from ..results.salient_operations import HeadName, SalientOperations
    from ..results.task_maps import TaskMaps
    from ..results.task_verification import TaskVerification
    from ..results.token_grid import TokenGrid

_WIDTH = 100_000
"""Tables take their natural width: nothing is cut."""


def visible(text: str) -> str:
    """Text on one line with control characters spelled out, so that every token can be seen."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def table_text(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Any]]) -> str:
    """An aligned table as wide as it needs; columns are (title, "left" or "right"). Wide characters count as two."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title, justify in columns:
        table.add_column(Text(title), justify="right" if justify == "right" else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(visible(str(cell))) for cell in row))
    stream = io.StringIO()
    Console(file=stream, width=_WIDTH, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip("\n").splitlines())


def grid_text(grid: "TokenGrid") -> str:
    """A token grid: value and rank of each cell, the largest of each row marked."""
    best = grid.values.argmax(1).tolist()
    rows = []
    for i, source in enumerate(grid.sources):
        cells = [
            f"{'*' if j == best[i] else ''}{grid.values[i, j]:.2f} #{int(grid.ranks[i, j]):,}"
            for j in range(len(grid.targets))
        ]
        rows.append([source, *cells])
    does = "writes when it attends to" if grid.circuit == "ov" else "attends to from"
    title = (
        f"{grid.head} {grid.circuit.upper()} map, preset {grid.provenance.options['preset']}: what it {does} each row"
    )
    columns = [("", "left"), *((visible(target), "right") for target in grid.targets)]
    note = f"value #rank among {grid.n_vocab:,} tokens (0 is best); * largest of the row"
    return f"{title}\n\n{table_text(columns, rows)}\n\n{note}"


def relation_scores_text(scores: "RelationScores", top: int = 3) -> str:
    """The best heads of each relation, the null beside the score; a star where the head implements it."""
    implementing = scores.implements()
    rows = []
    for number, name in enumerate(scores.relations):
        kept = f"{scores.n_kept[number]}/{scores.n_pairs[number]}"
        for place, (head, score) in enumerate(scores.top(top, name)):
            at = (number, head.layer, head.head)
            interval = f"{scores.interval_low[at]:.2f}-{scores.interval_high[at]:.2f}"
            rows.append(
                [
                    *([name, kept, scores.k[number]] if place == 0 else ["", "", ""]),
                    f"{head}{'*' if head in implementing[name] else ' '}",
                    f"{score:.2f}",
                    interval,
                    f"{scores.null_mean[at]:.2f}",
                    f"{scores.q_value[at]:.1g}" if scores.q_value[at] > 1e-9 else "<1e-9",
                    f"{scores.suppress[at]:.2f}",
                ]
            )
    titles = ["relation", "pairs", "k", "head", "score", "95%", "null", "q", "suppress"]
    columns = [(title, "left" if title in ("relation", "head") else "right") for title in titles]
    title = f"{scores.circuit.upper()} relation scores, preset {scores.provenance.options['preset']}"
    note = (
        "score: share of pairs whose target is among the k strongest tokens; null: the same with shuffled targets;\n"
        "q: false discovery rate over all heads and relations; * implements the relation (score >= 0.15 and q < 0.05)"
    )
    return f"{title}\n\n{table_text(columns, rows)}\n\n{note}"


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


def quoted(token: str) -> str:
    """A token between quotes, so that its spaces can be seen."""
    return f"'{visible(token)}'"


def salient_operations_text(found: "SalientOperations") -> str:
    """Each head's name, then its salient tokens with what they promote and suppress."""
    options = found.provenance.options
    parts = [f"Salient operations of {found.circuit.upper()} circuits, preset {options['preset']}"]
    if found.left_out:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in found.left_out.items())
        parts.append(f"Tokens left out: {counts}")
    for number, head in enumerate(found.heads):
        rows = []
        for place, token in enumerate(found.token_ids[number].tolist()):
            targets = [
                " ".join(quoted(found.strings[target]) for target in ids[number, place].tolist())
                for ids in (found.promoted_ids, found.suppressed_ids)
            ]
            rows.append([quoted(found.strings[token]), f"{found.salience[number, place]:.3g}", *targets])
        does = ("token", "promotes", "suppresses") if found.circuit == "ov" else ("query", "attends to", "avoids")
        columns = [(does[0], "left"), ("salience", "right"), (does[1], "left"), (does[2], "left")]
        parts.append(f"{head}: {_name_line(found.names[number])}\n\n{table_text(columns, rows)}")
    parts += _failures(found.failed_predicates)
    return "\n\n".join(parts)


def _name_line(entry: "HeadName") -> str:
    share = f"score {entry.score:.2f}, null {entry.null_mean:.2f}, p {_small(entry.p_value)}, q {_small(entry.q_value)}"
    named = entry.name if entry.best in (None, entry.name) else f"{entry.name} (best: {entry.best})"
    line = f"{named}; {share}" if entry.best is not None else named
    line += f"; tokens: {entry.input_class}"
    if entry.runner_up is not None:
        line += f"; runner-up: {entry.runner_up} {entry.runner_up_score:.2f}"
    if entry.description is not None:
        line += f"\n  described as: {visible(entry.description)}"
    if entry.description_error is not None:
        line += f"\n  not described: {visible(entry.description_error)}"
    return line


def _small(value: float) -> str:
    return f"{value:.1g}" if value > 1e-9 else "<1e-9"


def _failures(failed: "dict[str, str]") -> list[str]:
    return [f"Predicate {name!r} raised and was left out: {visible(error)}" for name, error in failed.items()]


def head_names_text(names: "HeadNames") -> str:
    """How many heads have a name, which names, and the heads of each with the clearest first."""
    from ..results.head_names import PUBLISHED_COVERAGE

    coverage = names.coverage()
    shares = [[part, f"{share:.0%}", PUBLISHED_COVERAGE.get(part, "")] for part, share in coverage.items()]
    rows = []
    for name, heads in names.named().items():
        ranked = sorted(heads, key=lambda head: (names.name(head).p_value, head))
        shown = " ".join(f"{head} {names.name(head).score:.2f}" for head in ranked[:6])
        rows.append([name, len(heads), shown + (" ..." if len(heads) > 6 else "")])
    title = f"Names of heads by their {names.circuit.upper()} circuits, preset {names.provenance.options['preset']}"
    parts = [
        title,
        table_text([("layers", "left"), ("named", "right"), ("published", "right")], shares),
        table_text([("name", "left"), ("heads", "right"), ("clearest, with the share explained", "left")], rows),
        "named: heads whose best predicate explains 15% of their salient mappings or more and beats its null\n"
        "(false discovery rate 5% over all heads and predicates); published: heads of larger models that a person or\n"
        "a large language model could describe, without a null (MAPS paper)",
        *_failures(names.failed_predicates),
    ]
    return "\n\n".join(parts)
