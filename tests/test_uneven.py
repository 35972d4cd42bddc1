"""Models whose heads differ in number (Laguna) or width (Gemma 4) between layers: no number without its head.

That maps, mixing and ablation are right is in the matrix of architectures; here is what users see.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, booted
from planted import TL_MAJOR, word

from tl_headmaps import (
    HeadIndex,
    HeadWeights,
    Relation,
    Result,
    TaskItem,
    Tasks,
    ablate,
    ablated,
    association_heads,
    attention_groups,
    compare_attention,
    component_map,
    describe_model,
    grouping_profile,
    head_worth,
    name_heads,
    relation_scores,
    task_maps,
)
from tl_headmaps.core.errors import UnsupportedModelError, UsageError

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(TL_MAJOR < 4, reason="such models are tried with TransformerLens 4; run make test"),
]

PAIRS = [(word(5 + i), word(25 + i)) for i in range(12)]
TOY = Relation.from_pairs("toy", PAIRS, neutral_templates=("some <X> and",), eliciting_templates=("some <X> and",))
TEXT = " " + " ".join(word(i) for i in (7, 12, 7, 30, 12, 9))
PROMPT = " " + word(40)
EIGHT = [HeadIndex(1, head) for head in range(8)]


ORDERS = {"math_calculation": " {0} word50 word51", "retrieval": " word51 word50 {0}"}
TASKS = Tasks(
    tuple(
        TaskItem(order.format(word(5 + n)), word(20 + n), function, "", (word(40),), "", str(n))
        for function, order in ORDERS.items()
        for n in range(10)
    )
)


@cache
def model_of(name: str) -> Any:
    return booted(next(row for row in ARCHITECTURES if row.name == name))


@pytest.fixture
def laguna() -> Any:
    """Four heads in layer 0, eight in layer 1."""
    return model_of("laguna by layer")


@pytest.fixture
def gemma() -> Any:
    """Four heads in each layer; in layer 1 wider ones that share one key, which is the value too."""
    return model_of("gemma4 31B")


def is_short(maps: Any) -> bool:
    """Whether a map [..., 2, 8] has values for the heads that exist and for no other."""
    return bool(maps[..., 0, 4:].isnan().all()) and not bool(
        maps[..., 0, :4].isnan().any() | maps[..., 1, :].isnan().any()
    )


def test_heads_that_exist(laguna: Any) -> None:
    weights = HeadWeights.from_model(laguna)
    assert (weights.n_heads, weights.n_all_heads) == (8, 12)
    assert [head for head in weights.chosen_heads() if head.layer == 1] == EIGHT
    assert [str(head) for head in weights.named_heads("L0")] == ["L0H0", "L0H1", "L0H2", "L0H3"]
    assert (weights.group_of(3, 0), weights.group_of(3, 1)) == (1, 0)
    with pytest.raises(UsageError, match=r"There is no head L0H5: layer 0 of .* has 4 heads, fewer than others"):
        weights.head("L0H5")


def test_scores_have_short_rows(laguna: Any, tmp_path: Path) -> None:
    for options in ({"preset": "folded"}, {"preset": "context", "prompts": PROMPT}):
        scores = relation_scores(laguna, TOY, progress=False, **options)
        assert is_short(scores.promote) and is_short(scores.p_value)
        assert len(scores.top(100)) == len(list(scores.to_rows())) == 12
        assert Result.load(scores.save(tmp_path / "scores.json")) == scores
        assert scores.figure().data.lengths == (4, 8)
    assert json.loads((tmp_path / "scores.json").read_text())["provenance"]["heads"] == {"0": 4, "1": 8}
    page = scores.save(tmp_path / "scores.html").read_text()
    assert '"lengths":[4,8]' in page and "missing" not in str(scores.figure())


def test_names_groups_and_profiles(laguna: Any) -> None:
    names = name_heads(laguna, progress=False)
    assert [len(row) for row in names.names] == [4, 8] and is_short(names.values)
    assert len(attention_groups(laguna, TEXT).heads) == 12
    profile = grouping_profile(laguna, [TEXT, TEXT + TEXT], progress=False)
    assert is_short(profile.head_map("previous_token")) and profile.figure().data.lengths == (4, 8)
    description = describe_model(laguna)
    assert description.facts["heads"] == "4 to 8 per layer, 12 in all"
    assert description.facts["parameters of a head"].endswith("shared by 2 heads (in layer 0; layers differ)")
    assert is_short(description.qk_rank) and is_short(description.ov_rank)


def test_switching_heads_off(laguna: Any) -> None:
    curves = ablate(laguna, TOY, ["L1H7", "L0H1"], controls=None, n_random=3, progress=False, preset="folded")
    assert all(head.head < 4 for heads in curves.random_heads for head in heads if head.layer == 0)
    tokens = torch.tensor([[7, 12, 30]])
    _, cache_of_run = laguna.run_with_cache(tokens)
    with ablated(laguna, ["L0H1", "L1H6"]) as vectors:
        _, off = laguna.run_with_cache(tokens)
    assert {head: len(vector) for head, vector in vectors.items()} == {HeadIndex(0, 1): 8, HeadIndex(1, 6): 8}
    assert not bool(off["blocks.1.attn.hook_z"][:, :, 6].any()) and bool(off["blocks.1.attn.hook_z"][:, :, 5].any())
    assert torch.equal(off["blocks.0.attn.hook_z"][:, :, 0], cache_of_run["blocks.0.attn.hook_z"][:, :, 0])
    worth = head_worth(laguna, texts=[TEXT * (1 + n % 3) for n in range(8)], progress=False)
    assert is_short(worth.values)


@pytest.mark.parametrize("metric", ["frobenius", "sensitivity"])
def test_components_by_head(metric: str, laguna: Any, gemma: Any) -> None:
    options: dict[str, Any] = {} if metric == "frobenius" else {"texts": [TEXT, TEXT]}
    heads = component_map(laguna, metric, by_head=True, progress=False, **options)
    assert is_short(heads.of("attn.o")) and is_short(heads.of("attn.q"))
    wide = component_map(gemma, metric, by_head=True, progress=False, **options)
    assert not bool(wide.of("attn.q").isnan().any())
    assert [int((~row.isnan()).sum()) for row in wide.of("attn.v")] == [2, 1]


def test_a_table_of_all_heads_is_refused(laguna: Any) -> None:
    phrases = {f"{TEXT} {word(20 + n)}": word(20 + n) for n in range(2)}
    for call in (
        lambda: task_maps(laguna, TASKS, n_folds=3, n_null=1, progress=False),
        lambda: compare_attention(laguna, phrases, word(30)),
    ):
        with pytest.raises(UnsupportedModelError, match=r"has 4 to 8 heads in a layer: .* need as many in every layer"):
            call()


def test_wide_heads(gemma: Any, tmp_path: Path) -> None:
    weights = HeadWeights.from_model(gemma)
    assert weights.shapes == {0: (4, 2, 8), 1: (4, 1, 16)} and weights.n_all_heads == 8
    layer = weights.layer(1)
    assert torch.equal(layer.W_V, layer.W_K)
    scores = relation_scores(gemma, TOY, prompts=PROMPT, progress=False)
    assert not bool(scores.promote.isnan().any()) and scores.provenance.heads == {}
    with ablated(gemma, ["L1H2"]) as vectors:
        assert len(vectors[HeadIndex(1, 2)]) == 16
    maps = task_maps(gemma, TASKS, n_folds=3, n_null=1, cache_dir=str(tmp_path), progress=False)
    assert maps.importance.shape == (2, 2, 4) and not bool(maps.importance.isnan().any())


def test_layers_that_read_keys_of_another_layer_say_so() -> None:
    weights = HeadWeights.from_model(model_of("gemma4 E2B"))
    assert weights.mixers == {2: "heads that read keys and values of another layer"}
    assert weights.layers_with_heads == [0, 1]
    with pytest.raises(UsageError, match=r"Layer 2 of .* has no heads"):
        weights.head("L2H0")


def test_associations_of_values_after_their_norm(gemma: Any) -> None:
    ids = [7, 12, 9, 30]
    maps = association_heads(gemma, ids, 3, 1)
    _, run = gemma.run_with_cache(torch.tensor([ids]))
    # In layer 1 keys serve as values; the norm of values has no weight.
    for layer, head, shown in (
        (0, 2, run["blocks.0.attn.hook_v"][0, :, 1]),
        (1, 2, run["blocks.1.attn.hook_k"][0, :, 0]),
    ):
        values = shown * torch.rsqrt(shown.square().mean(-1, keepdim=True) + 1e-6)
        moved = run[f"blocks.{layer}.attn.hook_z"][0, 3, head]
        before, after = (torch.cosine_similarity(vector, values[1], dim=0) for vector in (values[3], moved))
        assert float(maps.before_cosine[layer, head]) == pytest.approx(float(before), abs=1e-5)
        assert float(maps.after_cosine[layer, head]) == pytest.approx(float(after), abs=1e-5)
