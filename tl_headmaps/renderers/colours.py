"""Colours of all figures, on the page and in print: tables for amounts, one for signed values, one for names.

Tables change evenly in lightness, so equal steps look equal, also in grey and to colour-blind readers. ``AMOUNTS`` is
viridis, ``BLUES`` runs from light to dark, ``ORANGES`` from light blue to dark orange; ``SIGNED`` runs from blue over
near-white to red with lightness (CIELAB) falling evenly on both sides of zero.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from ..core.errors import UsageError
from ..core.types import check_choice
from .text import true_minus

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
BLUES = (
    "ecf5f9 e4eff6 dbe9f3 d2e3f0 cadded c1d8ea b8d2e7 afcce3 a6c6e0 9dc1dd 94bbda 8ab5d7 81b0d4 77aad1 6da5ce 629fcb "
    "579ac8 5294c2 4d8ebc 4988b7 4482b1 3f7cab 3a76a6 3671a0 316b9b 2b6595 266090 215a8a 1b5585 144f80 0d4a7a 044575 "
    "003f70"
)
ORANGES = (
    "b8eaff bae4fa bcdff1 bedae7 bfd4de c1cfd5 c1cacb c2c4c2 c3bfb9 c3bab0 c4b4a5 c8ae9a caa88e cda283 cf9b78 d0956d "
    "d18f61 d28856 d3824b d37c3f d37533 d26f28 ce6a24 ca6621 c6611d c25c19 be5816 ba5312 b64e0e b24a09 ae4505 aa4001 "
    "a63b00"
)
Palette: TypeAlias = Literal["amounts", "blues", "oranges"]
"""Tables for amounts; signed values have their own."""

_PALETTES = {"amounts": AMOUNTS, "blues": BLUES, "oranges": ORANGES}
Limits: TypeAlias = tuple[float | int, float | int]
"""Two ends of a scale or an axis."""

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9")
"""Lines and groups (after Okabe and Ito), distinguishable for colour-blind readers; used in this order."""

NAMES = (*SERIES, "#882255", "#44aa99", "#999933", "#332288", "#aa4499", "#7a7a7a")
"""Names in a map, in this order; the last is for all further ones."""

UNCLEAR = "#dfe2e6"
"""Cells of a map of names that have none."""

_NEAR_ZERO = 0.2
"""Amounts whose smallest is below this share of the largest are drawn from zero."""

_SMALLEST_DECIMAL = 1e-4
"""Smaller numbers are written with an exponent."""


@dataclass(frozen=True)
class Scale:
    """How a value becomes a colour.

    Attributes:
        low, high: Values at the two ends of the colour bar.
        signed: Zero in the middle, two colours.
        unit: What the numbers are, written at the colour bar.
        below, above: Whether values exceed an end and take its colour; the bar then shows it.
        palette: Table of amounts.
        names: What the values 0, 1, ... mean, each with its colour: a legend takes the place of the bar.
    """

    low: float
    high: float
    signed: bool = False
    unit: str = ""
    below: bool = False
    above: bool = False
    palette: Palette = "amounts"
    names: tuple[tuple[str, str], ...] = ()

    @property
    def colours(self) -> tuple[str, ...]:
        """The table, as hexadecimal colours without the hash."""
        if self.names:
            return tuple(colour.lstrip("#") for _, colour in self.names)
        return tuple((SIGNED if self.signed else _PALETTES[self.palette]).split())

    @property
    def ticks(self) -> tuple[tuple[float, str], ...]:
        """Both ends of the bar and its middle with their labels: ``0.0040+`` at an end that values exceed."""
        if self.high <= self.low:
            return ((self.low, true_minus(f"{self.low + 0.0:.3g}")),)  # 0 for -0
        values = (self.low, (self.low + self.high) / 2, self.high)
        low, middle, high = map(true_minus, _alike(values))
        labels = ("≤ " * self.below + low, middle, high + "+" * self.above)
        return tuple(zip(values, labels, strict=True))

    def position(self, value: float) -> float:
        """Place on the bar from 0 to 1; the middle if all values are equal."""
        if self.high <= self.low:
            return 0.5
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def colour(self, value: float) -> str:
        """``#rrggbb`` of a finite value, by straight lines between the table's entries."""
        if self.names:
            return self.names[int(value)][1]
        return "#" + bytes(self.pixels(np.array([[value]]))[0, 0, :3].tolist()).hex()

    def pixels(self, values: np.ndarray) -> np.ndarray:
        """Red, green, blue and opacity of values by row and column, as bytes; clear where a value is missing."""
        table = np.array([_channels(colour) for colour in self.colours], dtype=float)
        known = np.isfinite(values)
        if self.names:
            places = np.where(known, values, 0.0)
        elif self.high <= self.low:
            places = np.full(values.shape, (len(table) - 1) / 2)
        else:
            shares = (np.where(known, values, self.low) - self.low) / (self.high - self.low)
            places = np.clip(shares, 0, 1) * (len(table) - 1)
        index = np.clip(places.astype(int), 0, max(0, len(table) - 2))
        after = np.minimum(index + 1, len(table) - 1)
        share = (places - index)[..., None]
        mixed = np.floor(table[index] + (table[after] - table[index]) * share + 0.5)
        return np.concatenate([mixed, np.where(known, 255.0, 0.0)[..., None]], axis=-1).astype(np.uint8)

    @classmethod
    def over(
        cls,
        arrays: Iterable[np.ndarray],
        *,
        signed: bool | None = None,
        limits: Limits | None = None,
        percentile: float | int | None = None,
        palette: Palette = "amounts",
        unit: str = "",
    ) -> "Scale":
        """One scale for several arrays: symmetric around zero if signed (by default: if any value is negative).

        With ``percentile``, a few extreme values do not take all colours: the bar ends at this percentile (of absolute
        values, if signed), rounded to two digits, and says that there are values beyond.
        """
        check_choice(palette, Palette, "palette")
        finite = np.concatenate([np.asarray(array, float).ravel() for array in arrays] or [np.zeros(0)])
        finite = finite[np.isfinite(finite)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        negative = low < 0 if signed is None else signed
        if limits is not None and not (np.isfinite(limits).all() and limits[0] < limits[1]):
            raise UsageError(f"limits={limits} is not a range; give two finite numbers, the smaller one first.")
        if limits is not None and percentile is not None:
            raise UsageError(f"limits={limits} and percentile={percentile} both end the colour bar; give one of them.")
        ends = _ends(finite, negative, percentile) if limits is None else (float(limits[0]), float(limits[1]))
        # Maps hold 32-bit floats: 0.1 among them is a little more than a limit of 0.1.
        below, above = np.float32(low) < np.float32(ends[0]), np.float32(high) > np.float32(ends[1])
        return cls(*ends, negative, unit, bool(finite.size and below), bool(finite.size and above), palette)


def _ends(values: np.ndarray, signed: bool, percentile: float | int | None) -> tuple[float, float]:
    """Ends of the colour bar, both of them values unless a percentile is asked for."""
    if not values.size:
        return 0.0, 0.0
    if percentile is not None and not 50 < percentile < 100:
        raise UsageError(f"percentile={percentile} cannot end a colour bar; give a number between 50 and 100.")
    if signed:
        reach = float(np.percentile(np.abs(values), 100 if percentile is None else percentile))
        reach = reach or float(np.abs(values).max())
        low, high = -reach, reach
    else:
        smallest, largest = float(values.min()), float(values.max())
        low, high = smallest, largest
        if percentile is not None:
            low, high = (float(end) for end in np.percentile(values, [100 - percentile, percentile]))
            # Where nearly all values are equal, the few others are what there is to see.
            low, high = (low, high) if low < high else (smallest, largest)
        if 0 <= smallest < _NEAR_ZERO * high:
            low = 0.0
    if percentile is None or low >= high:
        return low, high
    digits = 1 - math.floor(math.log10(high if signed else high - low))
    return round(low, digits), round(high, digits)


def _alike(values: Sequence[float]) -> list[str]:
    """Numbers of one bar with the same number of decimals: as many as their three first digits need, at least two."""
    spread = max(values) - min(values)
    if max(map(abs, values)) < _SMALLEST_DECIMAL:
        return [f"{value:.3g}" for value in values]
    first = -math.floor(math.log10(spread))
    for decimals in (max(0, first + 1), max(0, first + 2)):
        texts = [f"{value:,.{decimals}f}" for value in values]
        if all(abs(round(value, decimals) - value) < 1e-3 * spread for value in values):
            break
    return texts


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (0, 2, 4))


def text_on(colour: str) -> str:
    """Black or white, whichever reads better on ``#rrggbb``."""
    red, green, blue = (channel / 255 for channel in _channels(colour.lstrip("#")))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "#ffffff"
