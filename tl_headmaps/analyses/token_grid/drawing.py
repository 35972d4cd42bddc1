"""A token grid as a heat map with its numbers."""

from ...renderers import heat
from ...renderers.figure import Figure
from .result import TokenGrid


def token_grid_figure(grid: TokenGrid) -> Figure:
    """What one head does with a few tokens: values as colours, ranks among the vocabulary beside them."""
    does = "writes when it attends to a row" if grid.circuit == "ov" else "attends to from a row"
    rows, columns = ("source", "target") if grid.circuit == "ov" else ("query", "key")
    best = ", ".join(f"{source} → {target}" for source, target in grid.best()[:8])
    return heat.token_grid(
        grid.values,
        grid.sources,
        grid.targets,
        title=f"{grid.head} {grid.circuit.upper()} map, preset {grid.provenance.options['preset']}: what it {does}",
        unit="entry of the map",
        rows=rows,
        columns=columns,
        details={f"rank among {grid.n_vocab:,} tokens (0 is best)": grid.ranks},
        note=f"largest of each row: {best}" + (", …" if len(grid.sources) > 8 else ""),
    )
