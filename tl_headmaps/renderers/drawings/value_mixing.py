"""What a head's attention does to associations: the worked example where one is named, else all pairs."""

from ...drawing import draws
from ...results.value_mixing import ValueMixing
from ..figure import Figure
from ..heat import token_grid
from .worked_example import worked_example_figure


@draws(ValueMixing)
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
