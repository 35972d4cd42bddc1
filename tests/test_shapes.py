"""Shapes and their two painters: text is safe, the same values give the same bytes, cells have no gaps."""

import io
import xml.etree.ElementTree as ET
from pathlib import Path as File

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tl_headmaps.core.errors import UsageError
from tl_headmaps.renderers.layout import PrintOptions, framed, lines_of, width_of
from tl_headmaps.renderers.shapes import INKS, Cells, Drawing, Group, Path, Rect, Text, colour_runs, line, png

HOSTILE = ["</svg><script>x</script>", "<!--", "]]>", '" onload="x', "&amp;", "\x00", "\ud800", "$x_1$", "שלום", "🙂"]
COLOURS = np.zeros((2, 3, 4), dtype=np.uint8)
COLOURS[..., 0], COLOURS[0, 1:, 3], COLOURS[1] = 40, 255, (33, 145, 140, 255)


def picture() -> Drawing:
    every = [
        Rect(10, 10, 20, 10, "pane", "line", radius=2, said=HOSTILE[0]),
        Rect(40, 10, 8, 8, "series0", radius=4),
        *(Text(5, 40 + 10 * i, text, 7, fill="soft", bold=i == 1, italic=i == 2) for i, text in enumerate(HOSTILE)),
        Text(90, 90, "upright", anchor="middle", upright=True, mono=True),
        line(0, 5, 100, 5, stroke="mark", dash=(4, 2)),
        Path((((0, 0), (50, 0), (50, 100), (100, 100)),), "series1", 3, curved=True, opacity=0.5),
        Cells(60, 60, (10, 12), COLOURS, key="a"),
    ]
    return Drawing(
        [Group(every, 3, 4, key="all", said=HOSTILE[3]), Group([Text(0, 0, "never")], hidden=True)], 140, 160
    )


def test_svg_is_well_formed_and_hostile_text_is_text() -> None:
    root = ET.fromstring(picture().svg(title=HOSTILE[3], kind="heat", least=90))
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags == {"svg", "g", "title", "rect", "circle", "text", "path", "image"}
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert texts[:2] == HOSTILE[:2] and texts[5:7] == ["\\x00", "\\ud800"]
    assert root.get("aria-label") == HOSTILE[3] and root.get("class") == "tlhm-drawing tlhm-heat"
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]


@pytest.mark.parametrize("suffix", [".svg", ".pdf", ".png"])
def test_the_same_shapes_give_the_same_bytes(tmp_path: File, suffix: str) -> None:
    names = [tmp_path / f"{number}{suffix}" for number in range(2)]
    for name in names:
        picture().save(name, title="A <title> \ud800", source="made of wood")
    first, second = (name.read_bytes() for name in names)
    assert first == second
    if suffix == ".pdf":
        assert b"/FontFile2" in first and b"CreationDate" not in first and b"/Subtype /Image" not in first
    if suffix == ".svg":
        assert b"<image" not in first and b"made of wood" in first and b"never" not in first
        assert ET.fromstring(first).get("width") == "140pt"


def test_an_image_of_cells_has_their_colours() -> None:
    from PIL import Image

    for colours in (COLOURS, COLOURS[1:]):
        with Image.open(io.BytesIO(png(colours))) as image:
            np.testing.assert_array_equal(np.asarray(image.convert("RGBA")), colours)


@given(arrays(np.uint8, st.tuples(st.integers(1, 4), st.integers(1, 6)), elements=st.integers(0, 2)))
def test_runs_hold_every_cell_once(kinds: np.ndarray) -> None:
    colours = np.repeat(kinds[..., None] * 80, 4, axis=-1)
    found = np.zeros_like(colours)
    for colour, runs in colour_runs(colours).items():
        for row, first, end in runs:
            assert not found[row, first:end].any()
            found[row, first:end] = [*bytes.fromhex(colour[1:]), colours[row, first, 3]]
    np.testing.assert_array_equal(found, colours)


def test_cells_are_painted_without_gaps(tmp_path: File) -> None:
    """One colour over and over: a gap, or an edge blended twice, would be another one."""
    from PIL import Image

    shades = np.tile(np.array([[[68, 0, 84, 255], [68, 0, 88, 255]]], dtype=np.uint8), (40, 20, 1))
    shades[::2] = shades[::2, ::-1]
    Drawing([Cells(0, 0, (3.37, 2.91), shades)], 134.8, 116.4).save(tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        inside = np.asarray(image.convert("RGB"))[4:-4, 4:-4].reshape(-1, 3).astype(int)
    assert abs(inside - [68, 0, 86]).max() <= 4


def test_every_ink_has_a_colour_in_the_style_of_pages() -> None:
    from tl_headmaps.renderers.page import assets

    style = assets(())
    for ink, colour in INKS.items():
        assert f"--{ink}:light-dark({colour}," in style.replace("#fff,", "#ffffff,"), ink


def test_a_frame_has_room_for_title_and_caption() -> None:
    sheet = framed(Drawing([], 80, 50), title="a long title " * 9, note="a long note " * 9, width=200)
    texts = [shape for shape in sheet.shapes if isinstance(shape, Text)]
    assert sheet.width == 200 and " ".join(text.text for text in texts).count("a long") == 18
    for text in texts:
        assert width_of(text.text, text.size) <= 200 and 0 < text.y < sheet.height
    assert lines_of("", 10) == [""] and max(map(len, lines_of("W" * 50, 30))) < 6
    options = PrintOptions(height=72.0, rows=1, labels=["a"])
    for name, sentence in (("height", "height=1 was given"), ("columns", "has no maps"), ("labels", "has neither")):
        with pytest.raises(UsageError, match=sentence):
            options.refuse(name)
        PrintOptions().refuse(name)
