"""Every kind of result has a picture that says what the result says."""

from typing import Any

import pytest
import torch
from planted import knowing_model, shared_model, word

from tl_headmaps import (
    AttentionGroups,
    Figure,
    Relation,
    ValueMixing,
    ablate,
    association_heads,
    component_map,
    grouping_profile,
    validate,
)
from tl_headmaps.core.errors import UsageError
from tl_headmaps.results import Result, kinds

V = torch.tensor([[0.1, 0.2, 0.3], [-0.8, 0.3, -0.1], [0.5, -0.1, -0.4]])
A = torch.tensor([[1, 0, 0], [0.1, 0.9, 0], [0.6, 0.1, 0.4]])
TEXT = " word5 word6 word7 word5 word6 word9 word10 word5"


@pytest.fixture(scope="module")
def model() -> Any:
    return shared_model("llama")


@pytest.fixture(scope="module")
def relation() -> Relation:
    pairs = [(f"word{i}", f"word{i + 1}") for i in range(3, 20)]
    return Relation.from_pairs(
        "next_word", pairs, neutral_templates=("word3 <X> word4",), eliciting_templates=("word3 <X>",)
    )


def test_every_kind_of_result_has_a_picture_of_its_own() -> None:
    assert [kind for kind, result_class in kinds().items() if result_class.figure is Result.figure] == []


def values_of(figure: Any, name: str) -> torch.Tensor:
    layer = next(layer for layer in figure.data.layers if name in (layer.name, f"{layer.group} {layer.name}"))
    return torch.tensor(layer.values)


def test_validation(model: Any, relation: Relation) -> None:
    found = validate(model, relation, progress=False, preset="folded")
    figure = found.figure()
    assert isinstance(figure, Figure)
    series = {one.name: one for one in figure.data.series}
    assert set(series) == {"without context", "with context"}
    expected = found.promote_with[0].mean(0).flatten()
    torch.testing.assert_close(torch.tensor(series["with context"].y), expected, check_dtype=False)
    assert len(found.figure(context="with", relation="next_word").data.series) == 1


def test_ablation_curves() -> None:
    """Of the heads that know, one is switched off; nothing is lost with others, nor on the other relation."""
    mappings = {"capital": {3: 10, 4: 11, 5: 12, 6: 13}, "follow": {14: 20, 15: 21, 16: 22, 17: 23}}
    capital, follow = (
        Relation.from_pairs(
            name, [(word(s), word(t)) for s, t in pairs.items()], k=1, eliciting_templates=(" word18 <X>",)
        )
        for name, pairs in mappings.items()
    )
    model = knowing_model({1: mappings["capital"], 3: mappings["follow"]})
    curves = ablate(model, capital, ["L0H1", "L0H0"], controls=[follow], n_random=2, progress=False, preset="folded")
    figure = curves.figure()
    own, random, control, sets = figure.data.series
    # Two heads of a layer of few leave one other pair for a curve; sets of the verdict may be of neighbours, too.
    assert [own.name, random.name, control.name, sets.name] == [
        "its heads",
        "random heads, one draw",
        "control follow, same heads",
        "2 sets of 2: 95% of them, p = 0.333",
    ]
    assert list(own.y) == curves.values.tolist() == [1, 0, 0]
    torch.testing.assert_close(torch.tensor(own.low), curves.curve.low, check_dtype=False)
    drawn = torch.stack([curve.accuracy for curve in curves.random_curves])
    torch.testing.assert_close(torch.tensor(random.y), drawn.mean(0), check_dtype=False)
    torch.testing.assert_close(torch.tensor(random.high), drawn.amax(0), check_dtype=False)
    assert list(control.y) == [1, 1, 1]
    assert curves.verdict is not None and list(sets.x) == [2, 2] and tuple(sets.y) == tuple(curves.verdict.range)
    assert "Order: L0H1 L0H0. Random heads are of the same layers and none of these" in figure.html
    unknown = Relation.from_pairs("unknown", [(word(3), word(19))], k=1, eliciting_templates=(" word18 <X>",))
    assert "not testable" in ablate(model, unknown, controls=None, progress=False, preset="folded").figure().html


def test_attention_groups() -> None:
    pattern = torch.zeros(3, 5, 5)
    pattern[0, :2, :2] = 0.5
    pattern[1:, 2:, 2:] = 1 / 3
    pattern[0, 2:] = pattern[1:, :2] = 0
    found = AttentionGroups.from_pattern(pattern, ["It", "I", "is", "am", "the"], drop_sink=False)
    figure = found.figure()
    assert "It" in figure.html and "H0" in figure.html
    assert "ColoredTokens" in found.figure(view="tokens").html
    for ignored in ({"head": "L0H1"}, {"names": ["a", "b", "c"]}):
        with pytest.raises(UsageError, match="head= and names= have no say in it"):
            found.figure(view="tokens", **ignored)


def test_grouping_profile(model: Any) -> None:
    found = grouping_profile(model, [TEXT, TEXT])
    figure = found.figure()
    place = found.index_of("previous_token")
    for group, maps in (("all queries", found.values), ("where possible", found.where_possible)):
        torch.testing.assert_close(values_of(figure, f"{group} previous token"), maps[place], check_dtype=False)


def test_value_mixing_and_its_worked_example() -> None:
    found = ValueMixing.from_arrays(A, V, ["Birds", "sometimes", "walk"])
    grid = found.figure()
    torch.testing.assert_close(
        torch.tensor(grid.data.layers[0].values), found.after_dot - found.before_dot, check_dtype=False
    )
    example = found.explain("walk", "Birds")
    page = example.figure().html
    assert "0.043" in page and "1.1" in page
    assert example._repr_html_() == page


def test_association_heads(model: Any) -> None:
    found = association_heads(model, TEXT, "word9", "word7")
    torch.testing.assert_close(values_of(found.figure(), "gain in cosine"), found.gain("cosine"), check_dtype=False)


def test_component_maps(model: Any) -> None:
    found = component_map(model, "stable_rank", progress=False)
    figure = found.figure()
    torch.testing.assert_close(values_of(figure, "stable_rank"), found.values, check_dtype=False)
    assert figure.data.columns.labels == found.components
    assert found.unit in figure.html
    overlap = component_map(model, "subspace_overlap", against=model, progress=False).figure().data
    assert overlap.note.count("Random matrices or subspaces: 0.5.") == 1  # sqrt(8 / 32)
    relative = component_map(model, "stable_rank", relative=True, progress=False)
    # A value that was divided by its baseline is not compared with it again.
    layer = relative.figure().data.layers[0]
    assert layer.null is None and [name for name, _ in layer.details] == ["divided by"]
    assert "random:" not in layer.scale.unit and "Divided by the values of random" in relative.figure().html
    opened = component_map(model, "frobenius", progress=False, by_head=True)
    assert [layer.name for layer in opened.figure().data.layers] == list(opened.components)
    assert "one column for each key/value head" in opened.figure().html
