"""The drawings, each beside the module that holds it; ``__init__.py`` loads a name from here on first use."""

from .charts import Line as Line
from .charts import curve as curve
from .charts import scatter as scatter
from .example import ExampleMatrix as ExampleMatrix
from .example import ExampleStep as ExampleStep
from .example import worked_example as worked_example
from .figure import Figure as Figure
from .figure import save_page as save_page
from .flowchart import flow as flow
from .formulas import Equation as Equation
from .grids import MapLayer as MapLayer
from .grids import name_layer as name_layer
from .heat import component_map as component_map
from .heat import head_map as head_map
from .heat import panels as panels
from .heat import token_grid as token_grid
from .listing import beside as beside
from .sketch import sketch as sketch
from .views import attention_view as attention_view
from .views import token_groups_view as token_groups_view
from .views import top_tokens_view as top_tokens_view
