"""Figures for print, drawn by matplotlib from the same plain values with the same colours.

Same values, same bytes: no dates, fixed ids. Letters are embedded (PDF: TrueType; SVG: outlines).
"""

from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from ..files import replacing
from .grids import Heat, Layer
from .listing import Listing

if TYPE_CHECKING:
    from .figure import Figure, Width

INCHES = {"column": 3.4, "page": 7.0}
_PRINT = {
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "axes.titlesize": 8,
    "axes.linewidth": 0.5,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "tl_headmaps",
    "hatch.linewidth": 0.4,
    "savefig.dpi": 200,
    # Tokens are text, never mathematics.
    "text.usetex": False,
    "text.parse_math": False,
}


def require_matplotlib() -> None:
    """Say how to get matplotlib if it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "Figures for print (.svg, .png, .pdf) are drawn by matplotlib, which is not installed. Run "
            "pip install 'tl-headmaps[figures]', or write .html instead."
        ) from error


def save_static(figure: "Figure", path: Path, *, width: "Width") -> None:
    """Write a figure as .svg, .pdf or .png."""
    require_matplotlib()
    import warnings

    import matplotlib as mpl
    from matplotlib.figure import Figure as Sheet

    with mpl.rc_context(_PRINT), warnings.catch_warnings():
        # Letters that no installed font has are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        sheet = Sheet(figsize=(INCHES[width], 1.0), layout="constrained")
        draw(figure.data, sheet)
        suffix = path.suffix.lower()
        metadata = {".pdf": {"CreationDate": None, "Producer": None, "Creator": None}, ".svg": {"Date": None}}
        with replacing(path) as temporary:
            sheet.savefig(
                temporary, format=suffix[1:], metadata=metadata.get(suffix, {"Software": None}), bbox_inches="tight"
            )


@singledispatch
def draw(data: Any, sheet: Any) -> None:
    """Draw plain values on an empty sheet, whose height may be set."""
    raise UsageError(f"{type(data).__name__} has no form for print; save it as .html.")


@draw.register
def _(data: Listing, sheet: Any) -> None:
    lines = data.text.splitlines()
    sheet.set_figheight(0.3 + 0.14 * len(lines))
    sheet.text(0.0, 1.0, data.text, va="top", family="DejaVu Sans Mono", size=7)


def _colour_map(layer: Layer) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("tl_headmaps", [f"#{c}" for c in layer.scale.colours], N=1025)
    colours.set_bad(alpha=0)
    return colours


def _map_axes(axes: Any, heat: Heat, layer: Layer) -> Any:
    """One map on its axes: cells, hatching where values are missing, ticks."""
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    low, high = layer.scale.low, layer.scale.high
    if high <= low:
        low, high = low - 1, high + 1
    image = axes.imshow(
        np.ma.masked_invalid(layer.values),
        cmap=_colour_map(layer),
        vmin=low,
        vmax=high,
        aspect="auto",
        interpolation="nearest",
    )
    for row, column in np.argwhere(np.isnan(layer.values)):
        if not heat.lengths or column < heat.lengths[row]:
            axes.add_patch(
                Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, hatch="//////", edgecolor="0.6", linewidth=0)
            )
    for axis, labels in ((axes.xaxis, heat.columns), (axes.yaxis, heat.rows)):
        if labels.labels is None:
            axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 4, 5, 8, 10]))
        else:
            axis.set_ticks(range(labels.n), labels.labels)
    if heat.columns.labels and max(map(len, heat.columns.labels)) * heat.columns.n > 60:
        axes.tick_params(axis="x", rotation=90)
    if heat.numbers:
        from .colours import text_on

        for (row, column), value in np.ndenumerate(layer.values):
            if np.isfinite(value):
                colour = text_on(layer.scale.colour(float(value)))
                axes.text(column, row, f"{value:.3g}", ha="center", va="center", color=colour)
    return image


@draw.register
def _(data: Heat, sheet: Any) -> None:
    shown = list(data.layers)
    first_group = [layer for layer in shown if layer.group == shown[0].group]
    wide = sheet.get_figwidth()
    across = min(len(first_group), 4 if wide > 5 else 2)
    down = -(-len(first_group) // across)
    ratio = data.rows.n / data.columns.n * (0.35 if data.numbers or data.item == "component" else 1.0)
    height = min(max(ratio * wide / across, 0.6), 1.4 * wide / across)
    sheet.set_figheight(min(down * (height + 0.45) + 0.5, 9.5))
    grid = sheet.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(first_group) :]:
        axes.set_visible(False)
    image = None
    for axes, layer in zip(grid.flat, first_group, strict=False):
        image = _map_axes(axes, data, layer)
        if len(first_group) > 1:
            axes.set_title(layer.name)
        axes.set_xlabel(data.columns.name)
        axes.set_ylabel(data.rows.name)
    used = list(grid.flat[: len(first_group)])
    scale = first_group[0].scale
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get(
        (scale.below, scale.above), "neither"
    )
    bar = sheet.colorbar(image, ax=used, extend=extend, fraction=0.04, pad=0.02)
    bar.outline.set_linewidth(0.4)
    bar.set_label(scale.unit)
    sheet.suptitle(data.title, fontsize=8)
