"""How the tour begins: what was found in three sentences, and the method as one picture of the head it found.

Every sentence is made from results, for whatever they say.
"""

from collections.abc import Iterator

from ...renderers.figure import Figure
from ...renderers.heat import token_grid as grid_figure
from ...renderers.listing import beside
from ...renderers.sketch import sketch
from ...renderers.text import as_words
from ..ablate.result import AblationCurves
from ..salient_operations.result import SalientOperations
from ..token_grid import TokenGrid
from .sections import LEAD, ablation, grid, operations, relations
from .tour import Tour

_CONTEXT = "context"
"""The preset that runs the model; the others read weights alone."""

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_HARDLY = 0.1
"""A loss below this share of what there was is hardly one."""

_SURE = 0.05
_WINDOW = 3


def opening(tour: Tour) -> list[str]:
    """What the tour found about the relation it follows."""
    return list(_sentences(tour))


def _sentences(tour: Tour) -> Iterator[str]:
    scores, curves = tour.found(relations), tour.found(ablation)
    if scores is None or LEAD not in scores.relations:
        yield "Which heads know the capitals of countries could not be read from this model; the sections say why."
        return
    n = len(scores.implements()[LEAD]) if curves is None else curves.n_verdict
    total = int((~scores.promote[0].isnan()).sum())
    yield _pointed_out(n, total, scores.provenance.options["preset"])
    if not n:
        return
    if curves is None:
        yield "Whether the model needs them could not be tested here; the first section says why."
    elif curves.status != "tested":
        yield (
            f"Whether the model needs them could not be tested: it gets {curves.base_accuracy:.0%} of the capitals "
            "right, too few to lose."
        )
    else:
        yield _loss(curves, n)


def _pointed_out(n: int, total: int, preset: str) -> str:
    heads = f"{n or 'none'} of {'its ' * (preset == _CONTEXT)}{total} heads"
    if preset == _CONTEXT:
        # What they attend to in a question is another matter, hence "would".
        return f"When the model merely reads the name of a country, {heads} would already write the capital."
    were = "was" if n < 2 else "were"
    return f"From the weights alone, {heads} {were} pointed out as knowing the capitals of countries."


def _loss(curves: AblationCurves, n: int) -> str:
    """What is lost without the heads, and without as many others."""
    base, left = curves.base_accuracy, float(curves.curve.accuracy[n])
    them = "it" if n == 1 else "them"
    needed = base - left > _HARDLY * base
    p = curves.verdict.p_value if curves.verdict is not None and curves.verdict.sets else None
    if needed:
        said = f"Without {them} the capitals that the model gets right fall from {base:.0%} to {left:.0%}"
        said += f" (p = {p:.3f})" if p is not None and p <= _SURE else ""
    else:
        said = f"The model can do without {them}: it gets {left:.0%} of the capitals right instead of {base:.0%}"
    if curves.random_curves:
        others = sum(float(curve.accuracy[n]) for curve in curves.random_curves) / len(curves.random_curves)
        lost = base - others
        if not needed or lost > _HARDLY * base:
            fall = f"{others:.0%} are left"
        else:
            fall = f"they {'hardly fall, to' if round(100 * lost) > 0 else 'stay at'} {others:.0%}"
        count = _NUMBERS[n] if n < len(_NUMBERS) else str(n)
        said += f"; without {count} random {'head' if n == 1 else 'heads'} of the same layers {fall}"
    if p is not None and p > _SURE:
        said += f"; chance could do as much (p = {p:.2f})"
    return f"{said}."


def method_of(tour: Tour) -> Figure | None:
    """The method, drawn from the tour's own head; None where its results could not be made."""
    table, salient = tour.found(grid), tour.found(operations)
    if table is None or salient is None:
        return None
    return method_figure(table, salient, tour.weights.n_heads)


def method_figure(table: TokenGrid, salient: SalientOperations, n_heads: int) -> Figure:
    """From a multi-head layer over its map of the vocabulary to A, a predefined relation, and B, a salient operation.

    Args:
        table: A grid of the head, made with ``relation=``.
        salient: The salient operations of the same head.
        n_heads: Heads of its layer.
    """
    head = table.head
    entry, own = salient.name(head), salient.grids[salient.index_of(head)]
    values = [row[:_WINDOW] for row in own.values[:_WINDOW]]
    rows, columns = (
        as_words([salient.strings[token] for token in ids[:_WINDOW]]) for ids in (own.token_ids, own.target_ids)
    )
    presets = [result.provenance.options["preset"] for result in (table, salient)]
    named = (table.relation or "chosen tokens").replace("_", " ")
    a = grid_figure(
        table.values,
        table.sources,
        table.targets,
        title=f"A: a predefined relation, {named}",
        unit="entry of M",
        score=table.score,
        note=f"preset {presets[0]}",
    )
    b = grid_figure(
        values,
        rows,
        columns,
        title=f"B: its salient operation, {entry.name}",
        unit="entry of M",
        score=entry.score,
        note=f"null {entry.null_mean:.2g} · preset {presets[1]}",
    )
    drawing = sketch(
        layer=head.layer,
        head=head.head,
        n_heads=n_heads,
        n_vocab=table.n_vocab,
        windows=[("A", table.values), ("B", values)],
        title=f"{head}, projected to the vocabulary",
    )
    text = "\n".join(map(str, (drawing, a, b)))
    return beside([drawing, a, b], title="What a head does is read from its map of all tokens by all tokens", text=text)
