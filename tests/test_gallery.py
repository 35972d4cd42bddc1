"""What ``make gallery`` draws of the documents' own numbers: every point that a document makes is to be seen."""

from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.once


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parent / "benchmarks")
    import documents

    return documents


def test_the_documents_own_numbers_are_drawn(documents: ModuleType) -> None:
    assert len(documents.DOCUMENTS) == 5
    grid, names, groups, mixing, components, panels = (
        figure.own() for document in documents.DOCUMENTS for figure in document.figures
    )
    assert (grid.title, grid.data.note) == ("Country to capital", "score 0.7")
    assert (names.title, names.data.note) == ("Name variations", "score 0.9")
    assert groups.data.is_binary and "no attention crosses" in groups.data.note
    assert "0.018 + 0.022 + 0.003 = 0.043" in " ".join(str(mixing).split())
    for figure, palette, ticks in (
        (components, "oranges", ["0.120", "0.150", "0.180"]),
        (panels, "amounts", ["0.0000", "0.0020", "0.0040+"]),
    ):
        scale = figure.data.layers[0].scale
        assert (scale.palette, [text for _, text in scale.ticks]) == (palette, ticks)


def test_the_pictures_can_be_made(documents: ModuleType) -> None:
    import gallery
    import three_models

    assert callable(gallery.pictures)
    assert three_models.capitals_figure(three_models.stored()).data.series


def test_measuring_fewer_models_does_not_replace_what_is_stored(
    documents: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import three_models

    monkeypatch.setattr("sys.argv", ["three_models.py"])
    monkeypatch.setattr(three_models, "measured", lambda *_: pytest.fail("nothing is measured"))
    with pytest.raises(SystemExit):
        three_models.main()
    assert "holds 3 models" in capsys.readouterr().err
