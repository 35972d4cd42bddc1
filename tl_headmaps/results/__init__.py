"""What results have in common: files that load back, pictures, tables; see :mod:`tl_headmaps.results.base`."""

from .base import Result as Result
from .base import kinds as kinds
from .codec import cells as cells
from .codec import largest_cells as largest_cells
from .codec import largest_heads as largest_heads
from .codec import nested as nested
from .codec import tensor_of as tensor_of
from .head_maps import HeadMaps as HeadMaps
