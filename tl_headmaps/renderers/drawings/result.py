"""The picture of a result that has no picture of its own: its printed form."""

from ...drawing import draws
from ...results.base import Result
from ..figure import Figure
from ..listing import text_figure


@draws(Result)
def result_figure(result: Result) -> Figure:
    """The printed form of any result."""
    return text_figure(str(result), title=result.kind.replace("_", " ").capitalize())
