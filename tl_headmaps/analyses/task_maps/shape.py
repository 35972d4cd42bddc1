"""Is there a diagonal band, a focus, a lower-left corner? Shapes of maps of heads, in numbers and words."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ...core.types import MOST_DRAWS, check_count
from ...renderers.text import table_text, wrapped
from ...scorers.map_shape import (
    CORNERS,
    centre_of_mass,
    corner_shares,
    diagonal_correlation,
    effective_number,
    heads_permuted,
)
from ...scorers.statistics import q_values, rank_p_value

ALPHA = 0.05

_LEGEND = (
    "effective: as many equally important heads would be as concentrated; centre: mean layer, weighted by importance;\n"
    "corner: the quarter of the map with the largest share, which would be 0.25 of an even map; diagonal: correlation\n"
    "of layer and head number, weighted by importance; p: share of maps with heads permuted within their layers that\n"
    "have as strong a diagonal (either way), or as much in one corner\n"
    "Head numbers are arbitrary: a model with its heads renumbered is the same model, so a diagonal or a corner says\n"
    "something about layers only as far as permuted heads show it too."
)


@dataclass(frozen=True, eq=False)
class MapShapes:
    """How focused each function's map is, and what its picture shows beside that.

    Attributes:
        functions: Names of the functions.
        n_heads: Heads of a map, those of layers without heads not counted.
        n_effective: As many equally important heads would be as concentrated.
        centre: Mean layer, weighted by importance.
        corners: Share of each quarter: early layers with low and high head numbers, then late layers.
        corner_p: How often, with heads permuted within their layers, some quarter has as much.
        diagonal: Correlation of layer and head number, weighted by importance.
        diagonal_p: How often, with heads permuted within their layers, it is as far from zero.

    Example:
        >>> from tl_headmaps import MapShapes
        >>> shapes = MapShapes.of(("even", "one"), torch.tensor([[[0.25, 0.25], [0.25, 0.25]], [[0, 0], [0, 1.0]]]))
        >>> shapes.n_effective.tolist(), shapes.centre.tolist()
        ([4.0, 1.0], [0.5, 1.0])
    """

    functions: tuple[str, ...]
    n_heads: int
    n_effective: Float[Tensor, " function"]
    centre: Float[Tensor, " function"]
    corners: Float[Tensor, "function corner"]
    corner_p: Float[Tensor, " function"]
    diagonal: Float[Tensor, " function"]
    diagonal_p: Float[Tensor, " function"]

    @classmethod
    def of(
        cls, functions: Sequence[str], shares: Float[Tensor, "function layer head"], *, n_null: int = 999, seed: int = 0
    ) -> "MapShapes":
        """Shapes of maps whose heads add up to one; rows of NaN are layers without heads."""
        check_count("n_null", n_null, most=MOST_DRAWS)
        # In float64: in float32 a map that no permutation changes differs from itself by rounding, and ties are lost.
        maps = shares.nan_to_num(nan=0.0).double()
        generator = np.random.default_rng(seed)
        corners, diagonal = corner_shares(maps), diagonal_correlation(maps)
        corner_p, diagonal_p = [], []
        for number, own in enumerate(maps):
            drawn = heads_permuted(own, n_null, generator)
            corner_p.append(rank_p_value(float(corners[number].max()), corner_shares(drawn).amax(-1)))
            diagonal_p.append(rank_p_value(abs(float(diagonal[number])), diagonal_correlation(drawn).abs()))
        return cls(
            functions=tuple(functions),
            n_heads=int((~shares[0].isnan()).sum()),
            n_effective=effective_number(maps).float(),
            centre=centre_of_mass(maps).float(),
            corners=corners.float(),
            corner_p=torch.tensor(corner_p),
            diagonal=diagonal.float(),
            diagonal_p=torch.tensor(diagonal_p),
        )

    def verdict(self, q: float = ALPHA) -> str:
        """Which maps have a diagonal or a corner beyond chance, among all that were looked at, and which is focused."""
        found = q_values(torch.cat([self.diagonal_p, self.corner_p]).double()) <= q
        n = len(self.functions)
        parts = []
        for what, those in (("a diagonal", found[:n]), ("a full corner", found[n:])):
            named = [name for name, has in zip(self.functions, those.tolist(), strict=True) if has]
            if named:
                parts.append(f"{', '.join(named)} {'has' if len(named) == 1 else 'have'} {what}")
            else:
                parts.append(f"none of {n} maps has {what}")
        if not bool(found.any()):
            parts = [f"none of {n} maps has a diagonal or a full corner"]
        most = int(self.n_effective.argmin())
        return (
            f"Beyond heads permuted within their layers (false discovery rate {q:.0%} over {2 * n} tests), "
            f"{' and '.join(parts)}. The most focused is {self.functions[most]}, as if "
            f"{self.n_effective[most]:.0f} of {self.n_heads} heads counted alike."
        )

    def __str__(self) -> str:
        """A row per function, what follows, and what the numbers mean."""
        titles = ["function", "effective", "centre", "corner", "", "p", "diagonal", "p"]
        columns = [(title, "left" if place in (0, 3) else "right") for place, title in enumerate(titles)]
        rows = []
        for number, function in enumerate(self.functions):
            corner = int(self.corners[number].argmax())
            rows.append(
                [
                    function,
                    f"{self.n_effective[number]:.0f} of {self.n_heads}",
                    f"{self.centre[number]:.1f}",
                    CORNERS[corner],
                    f"{self.corners[number, corner]:.2f}",
                    f"{self.corner_p[number]:.2g}",
                    f"{self.diagonal[number]:+.2f}",
                    f"{self.diagonal_p[number]:.2g}",
                ]
            )
        return f"Shapes of task maps\n\n{table_text(columns, rows)}\n\n{wrapped(self.verdict(), 110)}\n\n{_LEGEND}"
