"""Arrays in, figures out.

>>> from tl_headmaps.renderers import head_map
>>> head_map([[0.1, 0.7]], title="One layer")
Figure('One layer', Heat, 5 KB)
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
