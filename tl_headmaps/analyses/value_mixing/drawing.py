"""What a head's attention does to associations: the worked example where one is named, else all pairs."""

from ...renderers.figure import Figure
from ...renderers.heat import token_grid
from .result import ValueMixing
from .worked_example_drawing import worked_example_figure


def value_mixing_figure(found: ValueMixing) -> Figure:
    """The worked example of the named query and key, or the change of every pair's dot product."""
    example = found.example
    if example is not None:
        return worked_example_figure(example)
    where = "" if found.head is None else f" of {found.head}"
    return token_grid(
        found.after_dot - found.before_dot,
        [found.tokens[query] for query in found.queries],
        found.tokens,
        title=f"Change of association by attention{where}",
        unit="dot product after minus before",
        rows="query",
        columns="key",
        signed=True,
        details={"before": found.before_dot, "after": found.after_dot},
        note=" ".join(found.notes),
    )
