"""Shapes and their two painters: text is safe, the same values give the same bytes, cells have no gaps."""

import io
import xml.etree.ElementTree as ET
from pathlib import Path as File

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tl_headmaps.core.errors import UsageError
from tl_headmaps.renderers.layout import PrintOptions, framed, lines_of, width_of
from tl_headmaps.renderers.shapes import INKS, Cells, Drawing, Group, Path, Rect, Text, colour_runs, line, png

HOSTILE = ["</svg><script>x</script>", "<!--", "]]>", '" onload="x', "&amp;", "\x00", "\ud800", "$x_1$", "שלום", "🙂"]
COLOURS = [["#440154", "", "#fde725"], ["#21918c", "#21918c", "#440154"]]


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
    texts = [element.text for element in root.iter() if element.tag.endswith("}text")]
    assert texts[:2] == HOSTILE[:2] and texts[5:7] == ["\\x00", "\\ud800"]
    assert root.get("aria-label") == HOSTILE[3] and root.get("class") == "tlhm-drawing tlhm-heat"
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]


@pytest.mark.parametrize("suffix", [".svg", ".pdf", ".png"])
def test_the_same_shapes_give_the_same_bytes(tmp_path: File, suffix: str) -> None:
    names = [tmp_path / f"{number}{suffix}" for number in range(2)]
    for name in names:
        picture().save(name, title="A <title> \ud800", source="made of wood", scale=1.5)
    first, second = (name.read_bytes() for name in names)
    assert first == second
    if suffix == ".pdf":
        assert b"/FontFile2" in first and b"CreationDate" not in first and b"/Subtype /Image" not in first
    if suffix == ".svg":
        assert b"<image" not in first and b"made of wood" in first and b"never" not in first
        assert ET.fromstring(first).get("width") == "210pt"


def test_an_image_of_cells_has_their_colours() -> None:
    from PIL import Image

    with Image.open(io.BytesIO(png(COLOURS))) as image:
        pixels = np.asarray(image)
    for (row, column), colour in np.ndenumerate(np.array(COLOURS)):
        assert pixels[row, column].tolist() == ([*bytes.fromhex(colour[1:]), 255] if colour else [0, 0, 0, 0])


@given(st.lists(st.lists(st.sampled_from(["", "#000000", "#fcfcfc"]), min_size=5, max_size=5), min_size=1))
def test_runs_hold_every_cell_once(colours: list[list[str]]) -> None:
    found = [["" for _ in row] for row in colours]
    for colour, runs in colour_runs(colours).items():
        for row, first, n in runs:
            assert found[row][first : first + n] == [""] * n
            found[row][first : first + n] = [colour] * n
    assert found == colours


def test_cells_are_painted_without_gaps(tmp_path: File) -> None:
    """One colour over and over: a gap, or an edge blended twice, would be another one."""
    from PIL import Image

    shades = [["#440154", "#440158"] * 20, ["#440158", "#440154"] * 20] * 20
    Drawing([Cells(0, 0, (3.37, 2.91), shades)], 134.8, 116.4).save(tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        inside = np.asarray(image.convert("RGB"))[4:-4, 4:-4].reshape(-1, 3).astype(int)
    assert abs(inside - [0x44, 0x01, 0x56]).max() <= 4


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
