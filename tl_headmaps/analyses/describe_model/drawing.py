"""What was detected in a model, as a table."""

from ...renderers.figure import Figure
from ...renderers.listing import table_figure
from .result import ModelDescription


def model_figure(description: ModelDescription) -> Figure:
    """Facts about a model."""
    return table_figure(
        ["", ""], description.facts, title=f"Model {description.provenance.model}", text=str(description)
    )
