"""The table of both published experiments."""

from ...drawing import draws
from ...results.reproduction import Reproduction
from ..figure import Figure
from ..listing import table_figure


@draws(Reproduction)
def reproduction_figure(found: Reproduction) -> Figure:
    """One row per relation."""
    rows = [dict(row) for row in found.to_rows()]
    columns = list(rows[0]) if rows else []
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    return table_figure(
        [column.replace("_", " ") for column in columns],
        cells,
        title=f"Published experiments ({found.experiment}) on {found.provenance.model}",
        text=str(found),
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
