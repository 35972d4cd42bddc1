"""Salient operations and names of heads as text for a terminal."""

from typing import TYPE_CHECKING

from ...renderers.text import quoted, table_text, visible

if TYPE_CHECKING:
    from ..name_heads.result import HeadNames
    from .result import HeadName, SalientOperations


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
    from ..name_heads.result import PUBLISHED_COVERAGE

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
