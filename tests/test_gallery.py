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


def test_each_point_of_a_document_is_drawn(documents: ModuleType) -> None:
    figures = [described for document in documents.DOCUMENTS for described in document.figures]
    assert len(documents.DOCUMENTS) == 5
    for described in figures:
        here = dict(documents.seen(described.own()))
        assert not [name for name, _ in described.points if not here.get(name)], described
    grid, names, groups, mixing, components, panels = (dict(documents.seen(each.own())) for each in figures)
    assert (grid["title"], grid["below"]) == ("Country to capital", "score 0.7")
    assert (names["title"], names["below"]) == ("Name variations", "score 0.9")
    assert groups["colours"] == "blue at 1, dark grey at 0" and "no attention crosses" in groups["below"]
    assert mixing["After: the dot product with the mixed value"].endswith("0.018 + 0.022 + 0.003 = 0.043")
    assert components["colours"].startswith("light blue at 0.120 to dark orange at 0.180")
    assert components["rows"] == "layer: 0 to 27"
    assert panels["colours"].startswith("dark purple at 0.0000 to yellow at 0.0040+")


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
