"""Two results of one kind side by side: planted changes are found, and what cannot be compared is refused."""

import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted import planted_model, random_model, shared_model
from scipy.stats import spearmanr
from test_renderers import scores

from tl_headmaps import (
    GroupingProfile,
    HeadIndex,
    HeadNames,
    Relation,
    RelationScores,
    Result,
    compare,
    component_map,
    grouping_profile,
    head_worth,
    relation_scores,
    token_grid,
)
from tl_headmaps.core.errors import UsageError
from tl_headmaps.naming.namer import HeadName

CAPITALS = {3: 4, 5: 6, 7: 8, 9: 10, 11: 12, 13: 14}
NEXT = {3: 15, 5: 16, 7: 17, 9: 18, 11: 19, 13: 20}
TEXTS = [f" word{n} word{n + 1} word{n + 2} word{n} word{n + 1} word{n + 3}" for n in range(3, 9)]


@cache
def scored(*planted: tuple[int, int], relations: tuple[str, ...] = ("capitals", "next")) -> RelationScores:
    """Scores of a model in which these heads implement capitals, and L2H3 next."""
    model = planted_model({**{head: CAPITALS for head in planted}, (2, 3): NEXT})
    pairs = {"capitals": CAPITALS, "next": NEXT}
    asked = [Relation.from_pairs(name, list(pairs[name].items()), k=1) for name in relations]
    return relation_scores(model, asked, preset="folded", progress=False)


@cache
def profiled(seed: int = 0) -> GroupingProfile:
    return grouping_profile(random_model("llama", seed=seed), TEXTS, progress=False)


def test_a_planted_change_is_found() -> None:
    found = compare(scored((0, 1)), scored((0, 1), (1, 2)), names=("base", "tuned"))
    assert found.maps == ("capitals", "next") and found.over == "relation"
    (name, head), difference = found.top(1)[0]
    assert (name, head) == ("capitals", HeadIndex(1, 2)) and difference > 0.5
    assert found.gained["capitals"] == (HeadIndex(1, 2),) and found.lost["capitals"] == ()
    assert found.kept == {"capitals": (HeadIndex(0, 1),), "next": (HeadIndex(2, 3),)}
    assert bool(found.apart[0, 1, 2]) and not bool(found.apart[0, 0, 1])
    back = compare(scored((0, 1), (1, 2)), scored((0, 1)))
    assert torch.equal(back.difference, -found.difference) and back.lost == found.gained
    assert torch.equal(back.apart, found.apart)
    text = str(found)
    assert text.startswith("Relation scores compared: tuned minus base\n") and "This is no test" in text
    assert ["heads that implement", "only base", "both", "only tuned"] in [
        re.split(r"\s{2,}", row) for row in text.splitlines()
    ]
    row = next(line for line in text.splitlines() if line.startswith("capitals"))
    assert "L1H2 +" in row


def test_every_cell_against_the_two_results() -> None:
    one, two = profiled(), profiled(1)
    found = compare(one, two)
    np.testing.assert_array_equal(found.difference, two.values - one.values)
    np.testing.assert_array_equal(
        found.apart, (one.interval_high < two.interval_low) | (two.interval_high < one.interval_low)
    )
    for place in range(4):  # without sentences the others are constant
        expected = spearmanr(one.values[place].flatten(), two.values[place].flatten()).statistic
        assert float(found.correlation[place]) == pytest.approx(expected, abs=1e-6)
    rows = list(found.to_rows())
    assert len(rows) == found.difference.numel() and list(rows[0])[:3] == ["score", "layer", "head"]
    at = (found.index_of(rows[7]["score"]), rows[7]["layer"], rows[7]["head"])
    assert rows[7]["difference"] == float(two.values[at] - one.values[at]) and rows[7]["first"] == float(one.values[at])
    ordered = [abs(value) for _, value in found.top(10)]
    assert ordered == sorted(ordered, reverse=True) and ordered[0] == float(found.difference.abs().max())
    assert {name for (name, _), _ in found.top(3, "induction")} == {"induction"}
    assert not found.gained and "heads that" not in str(found)


def test_a_result_compared_with_itself_has_not_changed() -> None:
    found = compare(profiled(), profiled())
    assert found.names == ("first", "second") and "Both are of the same weights." in str(found)
    assert float(found.difference.abs().max()) == 0 and not bool(found.apart.any()) and found.differing == ()
    assert found.correlation.tolist() == pytest.approx([1.0] * 4 + [math.nan] * 2, nan_ok=True)


def test_maps_of_components() -> None:
    one, two = (component_map(random_model("llama", seed=seed), "frobenius", progress=False) for seed in (0, 1))
    found = compare(one, two)
    np.testing.assert_array_equal(found.difference[0], two.values - one.values)
    (metric, (layer, component)), value = found.top(1)[0]
    assert metric == "frobenius" and value == pytest.approx(two.at(layer, component) - one.at(layer, component))
    assert "component" in next(iter(found.to_rows())) and "no telling which differences are more than noise" in str(
        found
    )
    assert found.figure().data.columns.labels == one.components
    by_head = [
        component_map(random_model("llama", seed=seed), "frobenius", by_head=True, progress=False) for seed in (0, 1)
    ]
    heads = compare(*by_head)
    assert heads.over == "component" and isinstance(heads.top(1)[0][0][1], HeadIndex)
    assert bool(heads.difference[1, :, 2:].isnan().all()), "key heads that there are not stay missing"


def test_what_heads_are_worth_in_two_models() -> None:
    one, two = (head_worth(random_model("llama", seed=seed), ["L0H1", "L2"], TEXTS, progress=False) for seed in (0, 1))
    found = compare(one, two)
    assert found.measure == "nats per token" and found.difference.shape == (1, *one.worth.shape)
    np.testing.assert_array_equal(found.difference[0], two.worth - one.worth)
    np.testing.assert_array_equal(found.first_low[0], one.interval_low)


def names_of(*given: str) -> HeadNames:
    entries = [HeadName(name, 0.1 * place, 0.01, 1.0, 0.01, 0.01) for place, name in enumerate(given)]
    return HeadNames(circuit="ov", names=(tuple(entries),), left_out={}, failed_predicates={}, provenance=MADE)


MADE = scores().provenance


def test_names_that_heads_gain_and_lose() -> None:
    found = compare(names_of("copy", "unclear", "plural"), names_of("copy", "copy", "unclear"))
    assert found.gained == {"copy": (HeadIndex(0, 1),), "plural": ()}
    assert found.lost == {"copy": (), "plural": (HeadIndex(0, 2),)}
    assert found.kept["copy"] == (HeadIndex(0, 0),) and "heads that are named" in str(found)


def test_forms() -> None:
    found = compare(scored((0, 1)), scored((0, 1), (1, 2)))
    values = json.loads(found.to_json())
    assert values["gained"]["capitals"] == ["L1H2"]
    assert np.array(values["difference"]).shape == tuple(found.difference.shape)
    figure = found.figure()
    assert figure.data.layers[0].scale.signed and figure.data.mark and "no test" in figure.data.note
    assert r"capitals & L1H2 &" in found.to_latex(n=1)


def test_what_only_one_has_is_compared_on_request() -> None:
    both, one = scored((0, 1)), scored((0, 1), relations=("capitals",))
    with pytest.raises(UsageError, match=r"Not in both: relation next of the first\. Pass common=True"):
        compare(both, one)
    found = compare(both, one, common=True)
    assert found.maps == ("capitals",) and found.left_out == ("relation next of the first",)
    assert set(found.kept) == {"capitals"} and "Left out: relation next of the first." in str(found)
    some = both.select(heads=["L0H1", "L1H2"])
    with pytest.raises(UsageError, match="10 cells have a value in the first result and none in the second"):
        compare(both, some)
    few = compare(both, some, common=True)
    assert int((~few.difference.isnan()).sum()) == 2 * 2 and few.left_out == ("10 cells of the first",)
    assert "heads that implement" in str(few)


def changed(result: RelationScores, **options: Any) -> RelationScores:
    return replace(result, provenance=replace(result.provenance, options={**result.provenance.options, **options}))


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (lambda: scored((0, 1)), profiled, "'relation_scores' and the second 'grouping_profile'"),
        (
            lambda: scored((0, 1)),
            lambda: changed(scored((0, 1)), preset="context"),
            "preset is 'folded' in the first result",
        ),
        (lambda: scores(), lambda: replace(scores(), k=(10, 5)), "k of copying is 10 in the first result and 5"),
        (lambda: scores(), lambda: replace(scores(), circuit="qk"), "circuit is 'ov' in the first"),
        (lambda: scores(), lambda: scores(n_heads=2), "3 x 4 layers and heads and the second 3 x 2"),
        (
            lambda: scores(),
            lambda: scores(names=("plural", "past")),
            "have no relation in common: capitals, copying in",
        ),
        (
            lambda: token_grid(shared_model("llama"), "L1H0", [3], [5], preset="folded"),
            lambda: token_grid(shared_model("llama"), "L1H0", [3], [5], preset="folded"),
            "'token_grid' cannot be compared. These can: .*grouping_profile",
        ),
    ],
    ids=["kind", "preset", "k", "circuit", "shape", "relations", "grid"],
)
def test_what_does_not_mean_the_same_is_refused(first: Any, second: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        compare(first(), second())


def test_names_must_tell_two_results_apart() -> None:
    for names in (("a",), ("a", "a")):
        with pytest.raises(UsageError, match="does not tell two results apart"):
            compare(profiled(), profiled(1), names=names)


def test_what_else_differs_is_said() -> None:
    found = compare(scores(), changed(scores(), n_null=3))
    assert found.differing == ("n_null (None and 3)",) and "The two also differ in n_null (None and 3)." in str(found)


def test_the_command(run: Any, tmp_path: Path) -> None:
    paths = [profiled(seed).save(tmp_path / f"{seed}.json") for seed in (0, 1)]
    out = tmp_path / "found.json"
    done = run("compare", *map(str, paths), "--names", "base,tuned", "--out", str(out))
    assert done.code == 0 and "tuned minus base" in done.out
    assert Result.load(out) == replace(compare(*paths, names=("base", "tuned")), provenance=Result.load(out).provenance)
    run("compare", str(paths[0]), str(tmp_path / "none.json")).assert_refused(1, "Check the path")
    other = scored((0, 1)).save(tmp_path / "scores.json")
    run("compare", str(paths[0]), str(other)).assert_refused(2, "Two results of one kind are compared")
