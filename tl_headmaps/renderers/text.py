"""Results as aligned text for a terminal."""

import io
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..analyses.component_map.result import ComponentMap, HeadComponentMap, MeasuredComponents
    from ..analyses.describe_run.result import RunState
    from ..analyses.relation_scores.result import RelationScores
    from ..analyses.token_grid.result import TokenGrid

_WIDTH = 100_000
"""Tables take their natural width: nothing is cut."""


def visible(text: str) -> str:
    """Text on one line with control characters spelled out, so every token is visible."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def quoted(token: str) -> str:
    """A token in quotes, so its spaces are visible."""
    return f"'{visible(token)}'"


def word(token: str) -> str:
    """A token as a word of a sentence: without the spaces around it, unless it consists of them."""
    return visible(token).strip() or repr(token)


def number(value: float | None, digits: int = 2) -> str:
    """A value with this many decimals, or a dash where there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def significant(value: float, digits: int = 3) -> str:
    """A value with this many significant digits, or a dash where there is none."""
    if math.isnan(value):
        return "-"
    text = f"{value:.{digits}g}"
    return "0" if float(text) == 0 else text


def signed(value: float, digits: int = 3) -> str:
    """The same with a sign in front, plus or minus."""
    text = significant(value, digits)
    return text if text.startswith("-") else f"+{text}"


def true_minus(text: str) -> str:
    """Numbers for a page, with the minus sign instead of the hyphen."""
    return text.replace("-", "−")


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    # Markdown would take these for tags, also between dollar signs.
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
_MARKDOWN = {"&": "&amp;", "<": "&lt;", ">": "&gt;", **{character: f"\\{character}" for character in "\\`*_[]|~$"}}


def latex(text: object) -> str:
    """Text that LaTeX shows as it is."""
    return "".join(_LATEX.get(character, character) for character in visible(str(text)))


def markdown(text: object) -> str:
    """Text inside a line of Markdown that is shown as it is, also where dollar signs mean formulas."""
    return "".join(_MARKDOWN.get(character, character) for character in visible(str(text)))


def wrapped(text: str, width: int = 100) -> str:
    """Prose in lines of at most this many characters."""
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def interval(low: float, high: float) -> str:
    """``0.78 to 0.91``, or a dash."""
    return "-" if math.isnan(low) or math.isnan(high) else f"{low:.2f} to {high:.2f}"


def percent(share: float | None) -> str:
    """A share in per cent, or a dash if there is none."""
    return "-" if share is None or math.isnan(share) else f"{100 * share:.0f}%"


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


def component_map_text(result: "ComponentMap") -> str:
    """The map as a table, the largest cell of each column marked, and its colour bar in words."""
    best = result.values.nan_to_num(nan=float("-inf")).argmax(0).tolist()
    rows = [
        [layer, *(f"{'*' if best[j] == layer else ''}{_number(value)}" for j, value in enumerate(values))]
        for layer, values in enumerate(result.values.tolist())
    ]
    columns = [("layer", "right"), *((name, "right") for name in result.components)]
    return f"{_map_title(result)}\n\n{table_text(columns, rows)}\n\n{_colour_bar(result)}; * largest of the column"


def head_component_map_text(result: "HeadComponentMap", top: int = 5) -> str:
    """The strongest heads of each component, and the colour bar in words."""
    low, high, random = result.interval_low, result.interval_high, result.baseline
    rows = []
    for name in result.components:
        for place, (_, head, value) in enumerate(result.top(top, name)):
            at = (result.components.index(name), head.layer, head.head)
            row: list[object] = [name if place == 0 else "", head, _number(value)]
            if low is not None and high is not None:
                row.append(f"{_number(float(low[at]))}-{_number(float(high[at]))}")
            if random is not None:
                row.append(_number(float(random[at])))
            rows.append(row)
    columns = [("component", "left"), ("head", "left"), ("value", "right")]
    columns += [("95%", "right")] * (low is not None)
    columns += [("divided by" if result.relative else "random", "right")] * (random is not None)
    note = "heads of attn.k and attn.v are key/value heads"
    return f"{_map_title(result)}\n\n{table_text(columns, rows)}\n\n{_colour_bar(result)}; {note}"


def _map_title(result: "MeasuredComponents") -> str:
    what = "Component map" if result.kind == "component_map" else "Component map by head"
    read = f", {result.n_tokens:,} tokens in {result.n_batches} batches" if result.n_batches else ""
    return f"{what} of {visible(result.provenance.model)}: {result.metric}{read}"


def _colour_bar(result: "MeasuredComponents") -> str:
    defined = result.values[~result.values.isnan()]
    parts = [result.unit]
    if len(defined):
        parts.append(f"from {_number(float(defined.min()))} to {_number(float(defined.max()))}")
    if result.baseline is not None:
        ascending = result.baseline[~result.baseline.isnan()].unique().tolist()
        known = list(dict.fromkeys(map(_number, ascending)))
        listed = ", ".join(known) if len(known) <= 6 else f"{known[0]} to {known[-1]}"
        parts.append(f"{'divided by' if result.relative else 'random:'} {listed}")
    return "; ".join(parts)


def _number(value: float) -> str:
    """Three or four digits, however small."""
    return "-" if value != value else f"{value:.4f}" if 0.01 <= abs(value) < 1 else f"{value:.3g}"


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
