"""Results as aligned text for a terminal."""

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..analyses.describe_run.result import RunState
    from ..analyses.relation_scores.result import RelationScores
    from ..analyses.token_grid.result import TokenGrid

_WIDTH = 100_000
"""Tables take their natural width: nothing is cut."""


def visible(text: str) -> str:
    """Text on one line with control characters spelled out, so that every token can be seen."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def quoted(token: str) -> str:
    """A token between quotes, so that its spaces can be seen."""
    return f"'{visible(token)}'"


def wrapped(text: str, width: int = 100) -> str:
    """Prose in lines of that many characters."""
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


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
    # In a notebook the console would show the table on its own, and leave the stream empty.
    Console(file=stream, width=_WIDTH, color_system=None, force_jupyter=False).print(table)
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
        best = [entry for entry in scores.top(top, name) if entry[1] > 0]
        if not best:
            rows.append([name, kept, scores.k[number], "none ", "0.00", *[""] * 4])
        for place, (head, score) in enumerate(best):
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


def run_state_text(run: "RunState") -> str:
    """How far a run is: one fact per line."""
    facts = [
        ("run", f"{run.computing} of {run.provenance.model}, started {run.provenance.created}"),
        ("state", run.state),
        ("layers", f"{len(run.finished)} of {len(run.layers)} finished"),
    ]
    missing = sorted(set(run.layers) - set(run.finished))
    if missing:
        facts.append(("missing", _spans(missing)))
    facts += [("damaged", f"layer {layer}: {reason}; it will be made again") for layer, reason in run.damaged]
    if run.seconds_per_layer is not None:
        facts.append(("per layer", duration(run.seconds_per_layer)))
    if missing:
        facts.append(("time left", "unknown" if run.seconds_left is None else duration(run.seconds_left)))
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name:<{width}}  {visible(value)}" for name, value in facts)


def duration(seconds: float) -> str:
    """Seconds in the two largest units that matter: 1 h 05 min, 3 min 20 s, 4.2 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _spans(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs drawn together: 3, 5-9."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)
