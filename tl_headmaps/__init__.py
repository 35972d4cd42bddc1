"""What every attention head of a TransformerLens model does: from weights, activations and ablation.

The public names are listed once, in ``__init__.pyi``, and load on first use, so ``import tl_headmaps`` costs nothing.
"""

import lazy_loader as _lazy

__version__ = "0.2.0"

__getattr__, _, __all__ = _lazy.attach_stub(__name__, __file__)
__all__ = [*__all__, "__version__"]


def __dir__() -> list[str]:
    return __all__
