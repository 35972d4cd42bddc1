"""Results as aligned text for a terminal."""

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
