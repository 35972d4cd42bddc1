"""The README's pictures, made from real results of the default model: ``make gallery`` (needs Chromium).

Before them, the page that sets the five documents' figures beside their descriptions: ``build/gallery.html``.
"""

import tempfile
from pathlib import Path

import documents
from browser import Browser
from every_figure import A, V
from PIL import Image

from tl_headmaps import (
    AttentionGroups,
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
PIN = """(() => { const box = document.querySelector('.tlhm input'); if (!box) return;
    box.value = 'L23H4'; box.dispatchEvent(new Event('input'));
    box.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'})) })()"""
MOST_BYTES = 60_000


def pictures() -> dict[str, tuple[Figure, int, bool]]:
    """Name, figure, width in pixels, and whether a head is pinned."""
    model = load_default_model()
    weights = HeadWeights.from_model(model)
    scores = relation_scores(weights, RELATIONS)
    grid = token_grid(weights, "L23H4", ["France", "Germany", "Egypt"], ["Cairo", "Paris", "Berlin"])
    template = "The capital of <X> is"
    curves = ablate(model, "country_to_capital", template=template, preset="maps", prepend_bos=True, progress=False)
    checked = validate(model, "country_to_capital", preset="maps", progress=False)
    blocks = [[[0.5 if i < 2 and j < 2 else 0.0 for j in range(5)] for i in range(5)]]
    blocks += [[[1 / 3 if i > 1 and j > 1 else 0.0 for j in range(5)] for i in range(5)]] * 2
    groups = AttentionGroups.from_pattern(blocks, ["It", "I", "is", "am", "the"], drop_sink=False)
    return {
        "ablation": (curves.figure(), 620, False),
        "validation": (checked.figure(), 620, False),
        "component_map": (component_map(model, progress=False).figure(), 620, False),
        "groups": (groups.figure(), 620, False),
        "relation_scores": (scores.figure(), 860, True),
        "relations_side_by_side": (scores.figure(side_by_side=True), 860, False),
        "token_grid": (grid.figure(), 620, False),
        "worked_example": (ValueMixing.from_arrays(A, V, WORDS).explain("walk", "Birds").figure(), 620, False),
    }  # type: ignore[dict-item]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    print(documents.write(load_default_model(), PAGE))
    drawn = pictures()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        browser = Browser(Path(scratch))
        try:
            for name, (figure, width, pinned) in drawn.items():
                browser.open(figure.save(Path(scratch) / "figure.html"), width=width, height=600)
                if pinned:
                    browser.run(PIN)
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
