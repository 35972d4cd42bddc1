"""The README's pictures, made from real results of the default model: ``make gallery`` (needs Chromium).

Before them, the page that sets the five documents' figures beside their descriptions: ``build/gallery.html``.
"""

import tempfile
from pathlib import Path

import documents
import three_models
from browser import Browser
from every_figure import A, V
from PIL import Image

from tl_headmaps import (
    Figure,
    HeadWeights,
    ValueMixing,
    ablate,
    component_map,
    load_default_model,
    relation_scores,
    token_grid,
    validate,
)

FOLDER = Path(__file__).parents[2] / "examples" / "gallery"
PAGE = FOLDER.parents[1] / "build" / "gallery.html"
RELATIONS = (
    "country_to_capital",
    "country_to_language",
    "name_copying",
    "past_tense",
    "comparative",
    "antonym",
)
WORDS = ("Birds", "sometimes", "walk")
MOST_BYTES = 60_000


def pictures() -> dict[str, tuple[Figure, int]]:
    """Name, figure, and width in pixels."""
    model = load_default_model()
    weights = HeadWeights.from_model(model)
    scores = relation_scores(weights, RELATIONS)
    grid = token_grid(weights, "L23H4", ["France", "Germany", "Egypt"], ["Cairo", "Paris", "Berlin"])
    template = "The capital of <X> is"
    curves = ablate(model, "country_to_capital", template=template, preset="maps", prepend_bos=True, progress=False)
    checked = validate(model, "country_to_capital", preset="maps", progress=False)
    return {
        "method": (documents.method(model), 1080),
        "ablation": (curves.figure(), 620),
        "validation": (checked.figure(), 620),
        "component_map": (component_map(model, progress=False).figure(), 620),
        "groups": (documents.groups(), 620),
        "relation_scores": (scores.figure(), 1080),
        "relations_side_by_side": (scores.figure(side_by_side=True), 860),
        "token_grid": (grid.figure(), 620),
        "three_models": (three_models.capitals_figure(three_models.stored()), 620),
        "worked_example": (ValueMixing.from_arrays(A, V, WORDS).explain("walk", "Birds").figure(), 620),
    }  # type: ignore[dict-item]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    print(documents.write(load_default_model(), PAGE))
    drawn = pictures()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        browser = Browser(Path(scratch))
        try:
            for name, (figure, width) in drawn.items():
                browser.open(figure.save(Path(scratch) / "figure.html"), width=width, height=600)
                shot = browser.screenshot(Path(scratch) / "shot.png", selector=".tlhm")
                path = FOLDER / f"{name}.png"
                with Image.open(shot) as image:
                    image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
                        path, optimize=True
                    )
                size = path.stat().st_size
                print(f"{path.name}: {size:,} bytes")
                if size > MOST_BYTES:
                    raise SystemExit(f"{path.name} is larger than {MOST_BYTES:,} bytes.")
        finally:
            browser.close()


if __name__ == "__main__":
    main()
