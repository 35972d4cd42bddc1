"""The tables of both published experiments, the published figures below ours."""

from ...renderers.figure import Figure
from ...renderers.listing import tables_figure
from ..validate.text import agreement_table, drops_table
from .result import Reproduction


def reproduction_figure(found: Reproduction) -> Figure:
    """Agreement, then what is lost without the heads; one row per relation."""
    title = f"Published experiments ({found.experiment}) on {found.provenance.model}"
    return tables_figure([agreement_table(found), drops_table(found)], title=title, text=str(found))
