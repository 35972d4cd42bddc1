"""What was detected in a model, as a table."""

from ...drawing import draws
from ...results.model_description import ModelDescription
from ..figure import Figure
from ..listing import table_figure


@draws(ModelDescription)
def model_figure(description: ModelDescription) -> Figure:
    """Facts about a model."""
    return table_figure(
        ["", ""], description.facts, title=f"Model {description.provenance.model}", text=str(description)
    )
