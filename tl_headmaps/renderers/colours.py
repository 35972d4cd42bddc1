"""Colours of all figures, on the page and in print: one table for amounts, one for signed values.

Both change evenly in lightness, so equal steps look equal, also in grey and to colour-blind readers. ``AMOUNTS`` is
viridis; ``SIGNED`` runs from blue over near-white to red with lightness (CIELAB) falling evenly on both sides of zero.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..core.errors import UsageError

AMOUNTS = (
    "440154 470d60 48186a 482374 472d7b 453781 424086 3e4989 3b528b 375b8d 33638d 2f6b8e 2c728e 297a8e 26828e 23898e "
    "21918c 1f988b 1fa088 22a785 28ae80 32b67a 3fbc73 4ec36b 5ec962 70cf57 84d44b 98d83e addc30 c2df23 d8e219 ece51b "
    "fde725"
)
SIGNED = (
    "004c8e 1e5595 335f9c 4468a2 5372a9 617cb0 6f86b7 7c91be 899bc4 96a6cb a3b0d2 b0bbd8 bec6de cbd1e4 d8ddea e5e8f0 "
    "f3f3f3 f6e4e2 f4d6d2 f2c8c3 eebab4 eaaca5 e59f97 e09189 da847c d4766e cd6961 c65b55 bf4d48 b73e3c af2d30 a71925 "
    "9e001a"
)
Limits: TypeAlias = tuple[float | int, float | int]
"""Two ends of a scale or an axis."""

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9")
"""Lines and groups (after Okabe and Ito), distinguishable for colour-blind readers; used in this order."""

_NEAR_ZERO = 0.2
"""Amounts whose smallest is below this share of the largest are drawn from zero."""


@dataclass(frozen=True)
class Scale:
    """How a value becomes a colour.

    Attributes:
        low, high: Values at the two ends of the colour bar.
        signed: Zero in the middle, two colours.
        unit: What the numbers are, written at the colour bar.
        below, above: Whether values exceed an end and take its colour; the bar then shows it.
    """

    low: float
    high: float
    signed: bool = False
    unit: str = ""
    below: bool = False
    above: bool = False

    @property
    def colours(self) -> tuple[str, ...]:
        """The table, as hexadecimal colours without the hash."""
        return tuple((SIGNED if self.signed else AMOUNTS).split())

    def position(self, value: float) -> float:
        """Place on the bar from 0 to 1; the middle if all values are equal."""
        if self.high <= self.low:
            return 0.5
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def colour(self, value: float) -> str:
        """``#rrggbb`` of a finite value, by straight lines between the table's entries."""
        place = self.position(value) * (len(self.colours) - 1)
        index = min(int(place), len(self.colours) - 2)
        share = place - index
        first, second = (_channels(self.colours[i]) for i in (index, index + 1))
        mixed = (math.floor(a + (b - a) * share + 0.5) for a, b in zip(first, second, strict=True))
        return "#" + "".join(f"{channel:02x}" for channel in mixed)

    @classmethod
    def over(
        cls,
        arrays: Iterable[np.ndarray],
        *,
        signed: bool | None = None,
        limits: Limits | None = None,
        unit: str = "",
    ) -> "Scale":
        """One scale for several arrays: symmetric around zero if signed (by default: if any value is negative)."""
        finite = np.concatenate([np.asarray(array, float).ravel() for array in arrays] or [np.zeros(0)])
        finite = finite[np.isfinite(finite)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        negative = low < 0 if signed is None else signed
        if limits is not None:
            if not (np.isfinite(limits).all() and limits[0] < limits[1]):
                raise UsageError(f"limits={limits} is not a range; give two finite numbers, the smaller one first.")
            below, above = low < limits[0], high > limits[1]
            return cls(float(limits[0]), float(limits[1]), negative, unit, bool(finite.size and below), above)
        if negative:
            reach = max(abs(low), abs(high))
            low, high = -reach, reach
        elif 0 <= low < _NEAR_ZERO * high:
            low = 0.0
        return cls(low, high, negative, unit)


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (0, 2, 4))


def text_on(colour: str) -> str:
    """Black or white, whichever reads better on ``#rrggbb``."""
    red, green, blue = (channel / 255 for channel in _channels(colour.lstrip("#")))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "#ffffff"
