"""Task maps: planted heads come out on top beyond words, parts add up, nulls are flat, ablations ablate."""

import itertools
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planted import SLOT, needs_hooked, random_model, shared_model, slot_model, word
from sklearn.linear_model import Ridge

from tl_headmaps import (
    HeadIndex,
    TaskItem,
    TaskMaps,
    Tasks,
    TaskVerification,
    load_tasks,
    task_maps,
    verify_tasks,
)
from tl_headmaps.analyses.task_maps import _Design, _probed
from tl_headmaps.analyses.verify_tasks import _matched
from tl_headmaps.capture import tensors
from tl_headmaps.capture.anatomy import parameters_digest
from tl_headmaps.capture.running.answers import _runs, answer_likelihoods, encode_question
from tl_headmaps.capture.running.head_features import capture_head_features
from tl_headmaps.core.errors import TaskDataError, UsageError
from tl_headmaps.data.tasks import FUNCTIONS, with_alternatives
from tl_headmaps.scorers.probe import (
    BeyondWords,
    fit_dual,
    majority_predictions,
    majority_share,
    one_hot,
    recognised,
    word_counts,
    word_products,
)
from tl_headmaps.scorers.statistics import rank_p_value
from tl_headmaps.scorers.tasks import (
    Features,
    cells_of,
    content_folds,
    exchange_groups,
    fit_probes,
    head_importance,
    rank_correlations,
    wording_folds,
)

MARKERS = (5, 6, 7, 8)
ANSWERS = (30, 31, 32, 33)
NAMES = ("retrieval", "inference", "decision_making", "math_calculation")


def slot_tasks(n: int = 30, seed: int = 0, by_function: bool = False) -> Tasks:
    """Every prompt holds all markers and two other words; the marker at SLOT is the function's."""
    draw = random.Random(seed)
    items = []
    for number, (label, function) in itertools.product(range(n), enumerate(NAMES)):
        others = [marker for marker in MARKERS if marker != MARKERS[label]] + draw.sample(range(10, 25), 2)
        draw.shuffle(others)
        words = [*others[:SLOT], MARKERS[label], *others[SLOT:]]
        answer = ANSWERS[label] if by_function else draw.choice(ANSWERS)
        items.append(
            TaskItem(
                "".join(f" {word(token)}" for token in words),
                word(answer),
                function,
                alternatives=tuple(word(other) for other in ANSWERS if other != answer),
                content=f"c{number % 10}",
            )
        )
    return Tasks(tuple(items), name="slots")


@pytest.fixture(scope="module")
def planted() -> Any:
    return slot_model(MARKERS)


@pytest.fixture(scope="module")
def planted_maps(planted: Any, tmp_path_factory: pytest.TempPathFactory) -> TaskMaps:
    with torch.no_grad():
        return task_maps(planted, slot_tasks(), cache_dir=tmp_path_factory.mktemp("kept"), progress=False)


# What is found


def test_planted_heads_come_out_on_top_for_their_function(planted_maps: TaskMaps) -> None:
    assert planted_maps.functions == ("retrieval", "decision_making", "inference", "math_calculation")
    for function, head in zip(NAMES, range(4), strict=True):
        assert planted_maps.top(1, function)[0][0] == HeadIndex(0, head)
        assert planted_maps.standing_out[planted_maps.index_of(function)][0] == HeadIndex(0, head)
        # The bag-of-words heads know nothing beyond words.
        own = planted_maps.importance[planted_maps.index_of(function)]
        assert float(own[0, 4:].max()) < 0.1 * float(own[0, head])


def test_the_probe_knows_what_words_do_not(planted_maps: TaskMaps) -> None:
    assert planted_maps.probe_accuracy.tolist() == [1.0] * 4
    assert planted_maps.overall_accuracy["combined"] == 1.0
    for name in ("majority", "format", "question", "words", "word_pairs"):
        assert planted_maps.overall_accuracy[name] < 0.5, name
    assert planted_maps.overall_accuracy["majority"] == 0.25
    assert planted_maps.baseline_accuracy["majority"] == (0.25,) * 4
    assert not planted_maps.wording_held_out and planted_maps.exchanged == ("contents",)


def test_the_null_is_flat_and_maps_are_scaled(planted_maps: TaskMaps) -> None:
    strongest = planted_maps.importance.amax((1, 2))
    assert bool((planted_maps.null_mean.abs().amax((1, 2)) < 0.1 * strongest).all())
    assert bool((planted_maps.null_max < 0.2 * strongest).all())
    torch.testing.assert_close(planted_maps.importance_normalised.sum((1, 2)), torch.ones(4))
    assert bool((planted_maps.interval_low <= planted_maps.importance).all())
    assert bool((planted_maps.importance <= planted_maps.interval_high).all())
    assert planted_maps.overlap.diagonal().tolist() == [1.0] * 4


@pytest.mark.once
def test_labels_without_a_trace_in_the_heads_give_no_heads(planted: Any, tmp_path: Path) -> None:
    draw = random.Random(5)
    tasks = slot_tasks()
    items = tuple(TaskItem(**{**vars(item), "function": draw.choice(NAMES)}) for item in tasks.items)
    found = task_maps(planted, Tasks(items), cache_dir=tmp_path, progress=False)
    assert found.overall_accuracy["probe"] < 0.4
    assert sum(len(heads) for heads in found.standing_out) == 0
    assert not found.stable and "Unstable: maps from two halves of the contents" in " ".join(found.notes())


@pytest.mark.once
def test_words_that_give_the_label_away_leave_nothing_to_the_heads(tmp_path: Path) -> None:
    """Head 0 sees the marker at the slot; if only that marker is in the prompt, words know as much."""
    draw = random.Random(3)
    items = []
    for number, (label, function) in itertools.product(range(30), enumerate(NAMES[:2])):
        words = [*draw.sample(range(10, 25), SLOT), MARKERS[label], *draw.sample(range(10, 25), 2)]
        text = "".join(f" {word(token)}" for token in words)
        items.append(TaskItem(text, word(draw.choice(ANSWERS)), function, content=f"c{number % 10}"))
    found = task_maps(slot_model(MARKERS), Tasks(tuple(items)), cache_dir=tmp_path, progress=False)
    assert found.overall_accuracy["words"] == found.overall_accuracy["probe"] == 1.0
    assert float(found.importance_plain.max()) > 4 * float(found.importance.max())


def test_stability_is_told_from_two_halves_of_the_contents(planted_maps: TaskMaps) -> None:
    """Disjoint contents, so other items; the number is SciPy's, and the text says what it is not."""
    from scipy.stats import spearmanr

    tasks = slot_tasks()
    first, second = (folds >= 0 for folds in _Design.of(tasks, 5, 0).halves)
    assert torch.equal(first, ~second) and 40 <= int(first.sum()) <= 80
    contents = [
        {item.content for item, own in zip(tasks.items, half.tolist(), strict=True) if own} for half in (first, second)
    ]
    assert not contents[0] & contents[1]
    one, other = planted_maps.importance_halves
    expected = [spearmanr(a.flatten(), b.flatten()).statistic for a, b in zip(one, other, strict=True)]
    np.testing.assert_allclose(planted_maps.stability, expected, atol=1e-6)
    assert planted_maps.stable == (min(expected) >= 0.8)
    text = " ".join(str(planted_maps).split())
    assert "stability: rank correlation of the maps from two disjoint halves of the contents, not of two seeds" in text
    for function, value in zip(planted_maps.functions, expected, strict=True):
        row = next(line for line in str(planted_maps).splitlines() if line.startswith(function))
        assert f" {value:.2f} " in row, "the table shows it"


@pytest.mark.once
def test_maps_of_heads_that_know_one_half_of_the_contents_are_unstable_though_seeds_agree() -> None:
    """Head 0 tells functions apart in one half of the contents, head 1 in the other: reseeding would not show it."""
    tasks = slot_tasks()
    design = _Design.of(tasks, 5, 0)
    noise = 0.1 * torch.randn(len(tasks), 8, generator=torch.Generator().manual_seed(0))
    known = torch.stack([(folds >= 0).float() for folds in design.halves], 1).repeat_interleave(4, 1)
    values = noise + known * one_hot(design.labels, 4).float().repeat(1, 2)

    def probed(seed: int) -> Any:
        with_seed = replace(_Design.of(tasks, 5, seed), halves=design.halves)
        return _probed(Features(lambda layer: values, 1, 2), with_seed, n_null=1, seed=seed, progress=lambda n: None)

    found, again = probed(0), probed(1)
    for half in (0, 1):
        own, other = found.halves[half, :, 0, half], found.halves[half, :, 0, 1 - half]
        assert bool((own > 4 * other.abs()).all())
    assert rank_correlations(*found.halves).tolist() == [-1.0] * 4
    torch.testing.assert_close(found.importance, again.importance, rtol=0.2, atol=0.0)


def test_the_last_position_finds_them_too(planted: Any, tmp_path: Path) -> None:
    found = task_maps(planted, slot_tasks(), positions="last", n_null=1, cache_dir=tmp_path, progress=False)
    assert float(found.probe_accuracy.min()) > 0.9
    for function, head in zip(NAMES, range(4), strict=True):
        assert found.top(1, function)[0][0] == HeadIndex(0, head)


@needs_hooked
def test_a_hooked_transformer_gives_the_same_maps(planted_maps: TaskMaps, tmp_path: Path) -> None:
    found = task_maps(slot_model(MARKERS, host="hooked"), slot_tasks(), cache_dir=tmp_path, progress=False)
    torch.testing.assert_close(found.importance, planted_maps.importance, atol=1e-3, rtol=1e-3)


# The probe


@pytest.mark.parametrize("dim", [12, 150])
@pytest.mark.once
def test_ridge_fits_equal_scikit_learn(dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    # Directions of very different variance, one twice and one not at all.
    features = torch.randn(60, dim, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, dim)
    features[:, 5], features[:, 6] = features[:, 4], 0.0
    targets = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    penalty = 0.03
    weights, bias = fit_dual(features @ features.T, targets, penalty)
    theirs = Ridge(alpha=penalty * 60, solver="svd").fit(features, targets)
    np.testing.assert_allclose((features.T @ weights).T, theirs.coef_, atol=1e-9)
    np.testing.assert_allclose(bias, theirs.intercept_, atol=1e-9)


def test_products_that_say_nothing_leave_the_frequencies() -> None:
    labels = torch.tensor([0] * 30 + [1] * 10)
    weights, bias = fit_dual(torch.zeros(40, 40), one_hot(labels, 2), 0.1)
    np.testing.assert_allclose(bias, [0.75, 0.25])
    np.testing.assert_allclose(weights.sum(0), 0, atol=1e-12)


def features_of_heads(n_items: int = 80, seed: int = 0) -> torch.Tensor:
    """[layer, item, head * d_head]: 3 layers, 2 heads of 5; the scale differs by layer, one feature is constant."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(3, n_items, 10, generator=generator) * torch.tensor([0.01, 1.0, 100.0])[:, None, None] + 3
    values[1, :, 4] = 7
    return values


@pytest.mark.once
def test_importance_is_the_part_of_the_logit_that_a_dense_probe_reads_from_a_head() -> None:
    """Every fit of every cell again, in feature space with scikit-learn; and the parts of all heads add up."""
    values = features_of_heads()
    generator = torch.Generator().manual_seed(1)
    labels = torch.stack([torch.arange(80) % 4, (torch.arange(80) * 7 // 3) % 4])
    folds, wordings = torch.arange(80) // 4 % 3, torch.arange(80) // 12 % 2
    targets = torch.randn(2, 80, 4, generator=generator, dtype=torch.float64)
    features = Features(lambda layer: values[layer], 3, 2)
    cells = cells_of(folds, wordings)
    assert len(cells) == 6
    probes = [fit_probes(features.products, targets, labels, cell, penalty=0.01) for cell in cells]
    found = head_importance(features, probes, 2, 4)
    flat = values.transpose(0, 1).flatten(1).double()
    dense = (flat - flat.mean(0)) / flat.std(0, correction=0).clamp_min(1e-5)
    dense[:, 14] = 0
    dense = dense / dense.square().sum(1).mean().sqrt()
    np.testing.assert_allclose(features.products, dense @ dense.T, atol=1e-5)
    for fit in range(2):
        expected = torch.zeros(4, 3, 2, dtype=torch.float64)
        for tested, seen in cells:
            assert not set(tested.tolist()) & set(seen.tolist())
            ridge = Ridge(alpha=0.01 * len(seen), solver="svd").fit(dense[seen], targets[fit, seen])
            for item in tested.tolist():
                own = int(labels[fit, item])
                parts = torch.from_numpy(ridge.coef_[own]) * dense[item]
                expected[own] += parts.view(3, 2, 5).sum(-1) / int((labels[fit] == own).sum())
                logit = ridge.predict(dense[item : item + 1])[0, own]
                assert float(parts.sum()) == pytest.approx(logit - ridge.intercept_[own])
        np.testing.assert_allclose(found[fit], expected, atol=2e-5)


def test_the_scale_of_a_head_does_not_matter() -> None:
    values = features_of_heads()
    labels, cells = (torch.arange(80) % 4)[None], cells_of(torch.arange(80) // 4 % 3, torch.zeros(80, dtype=torch.long))
    louder = values * torch.tensor([1e3, 1e-3, 1.0])[:, None, None]
    maps = []
    for x in (values, louder):
        features = Features(lambda layer, x=x: x[layer], 3, 2)
        probes = [fit_probes(features.products, one_hot(labels, 4), labels, cell) for cell in cells]
        maps.append(head_importance(features, probes, 1, 4))
    torch.testing.assert_close(*maps, atol=2e-3, rtol=2e-3)


def test_wordings_are_held_out_where_every_function_stays_in_training() -> None:
    labels, folds = torch.arange(60) % 2, torch.arange(60) // 2 % 3
    formats = ["a" if number // 6 % 2 else "b" for number in range(60)]
    groups = wording_folds(formats, labels, folds, 2)
    assert len(groups.unique()) == 2
    for tested, seen in cells_of(folds, groups):
        assert not set(folds[tested].tolist()) & set(folds[seen].tolist())
        assert not {formats[i] for i in tested.tolist()} & {formats[i] for i in seen.tolist()}
    assert sorted(torch.cat([tested for tested, _ in cells_of(folds, groups)]).tolist()) == list(range(60))
    # A format that is a function, and one format for all: nothing to hold out.
    assert wording_folds([str(label) for label in labels.tolist()], labels, folds, 2).tolist() == [0] * 60
    assert wording_folds([""] * 60, labels, folds, 2).tolist() == [0] * 60
    # Many formats are put together: no more groups than folds.
    assert int(wording_folds([f"f{number // 2 % 10}" for number in range(60)], labels, folds, 2).max()) == 2


def test_labels_are_exchanged_among_items_that_differ_in_nothing_else() -> None:
    zeros = torch.zeros(6, dtype=torch.long)
    labels, folds = torch.tensor([0, 1, 0, 1, 0, 0]), torch.tensor([0, 0, 0, 0, 1, 1])
    groups, kinds = exchange_groups(["s", "s", "", "", "", ""], ["a", "a", "b", "b", "c", "d"], labels, folds, zeros)
    assert groups.tolist() == [0, 0, 1, 1, 2, 2] and kinds == ("contents", "folds", "matched sets")


def test_labels_are_exchanged_where_every_function_has_formats_of_its_own() -> None:
    """Formats a0 and a1 of one function, b0 and b1 of the other: within a format all labels are equal."""
    labels = torch.arange(40) % 2
    items = [
        TaskItem(f"{word(5 + n)}", word(4), NAMES[n % 2], content=f"c{n}", format=f"{'ab'[n % 2]}{n // 2 % 2}")
        for n in range(40)
    ]
    design = _Design.of(Tasks(tuple(items)), 5, 0)
    assert int(design.wordings.max()) == 3 and design.exchanged == ("folds",)
    for group in design.groups.unique():
        own = design.groups == group
        assert len(labels[own].unique()) == 2 and len(design.folds[own].unique()) == 1


def test_shuffled_labels_stay_inside_matched_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every null has, in every set, the functions that the set has; and it is not always the same null."""
    tasks = load_tasks().sample(12)
    design = _Design.of(tasks, 5, 0)
    assert design.exchanged == ("matched sets",) and int(design.wordings.max()) == 4
    seen: list[torch.Tensor] = []
    fitted = fit_probes

    def watched(products: Any, targets: Any, labels: torch.Tensor, *rest: Any) -> Any:
        seen.append(labels)
        return fitted(products, targets, labels, *rest)

    monkeypatch.setattr("tl_headmaps.analyses.task_maps.fit_probes", watched)
    values = torch.randn(1, len(tasks), 6, generator=torch.Generator().manual_seed(0))
    found = _probed(Features(lambda layer: values[layer], 1, 2), design, n_null=5, seed=0, progress=lambda n: None)
    assert found.nulls.shape == (5, 8, 1, 2) and found.without.shape == (5, 8, 1, 2)
    shuffled = seen[0][2:]
    assert len({tuple(row.tolist()) for row in shuffled}) == 5
    for row in shuffled:
        for name in {item.matched for item in tasks.items}:
            own = [place for place, item in enumerate(tasks.items) if item.matched == name]
            assert sorted(row[own].tolist()) == sorted(design.labels[own].tolist())


# Splits, words, curves


@given(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 2)), min_size=30, max_size=120), st.integers(0, 3))
@pytest.mark.once
def test_folds_keep_contents_whole_and_need_every_function(pairs: list[tuple[int, int]], seed: int) -> None:
    contents, labels = [f"c{content}" for content, _ in pairs], torch.tensor([label for _, label in pairs])
    try:
        folds = content_folds(contents, labels, 4, seed, ("a", "b", "c"))
    except UsageError as error:
        assert "contents" in str(error)
        return
    assert all(len({int(f) for f, c in zip(folds, contents, strict=True) if c == content}) == 1 for content in contents)
    for first, second in itertools.combinations(range(4), 2):
        assert len(labels[(folds != first) & (folds != second)].unique()) == 3
    assert torch.equal(folds, content_folds(contents, labels, 4, seed, ("a", "b", "c")))


@pytest.mark.once
def test_folds_of_the_bundled_items_are_even_and_differ_by_seed() -> None:
    tasks = load_tasks()
    labels = torch.tensor([tasks.functions.index(item.function) for item in tasks.items])
    contents = [item.content for item in tasks.items]
    folds = content_folds(contents, labels, 5, 0, tasks.functions)
    for fold in range(5):
        assert labels[folds == fold].bincount().tolist() == [30] * 8
    assert not torch.equal(folds, content_folds(contents, labels, 5, 1, tasks.functions))


def test_impossible_splits_are_refused() -> None:
    labels = torch.tensor([0, 1] * 10)
    with pytest.raises(UsageError, match=r"folds=2 is too few"):
        content_folds(["a"] * 20, labels, 2, 0, ("x", "y"))
    with pytest.raises(UsageError, match=r"have 2 contents, which cannot be split into 3 folds"):
        content_folds(["a", "b"] * 10, labels, 3, 0, ("x", "y"))
    contents = [f"c{i % 2}" if label else f"c{i}" for i, label in enumerate(labels.tolist())]
    with pytest.raises(UsageError, match=r"The function 'y' has items in [12] of 3 folds; it needs three"):
        content_folds(contents, labels, 3, 0, ("x", "y"))


def test_words_are_counted() -> None:
    assert torch.equal(word_counts(["a b a", "A, b", "c d"]), torch.tensor([[2.0, 1.0], [1.0, 1.0], [0.0, 0.0]]))
    assert word_counts(["a b", "a b"], 2).shape == (2, 3)
    assert word_counts(["x", "y"]).abs().sum() == 0
    assert float(word_products(["a b a", "A, b", "c d"]).diagonal().mean()) == pytest.approx(1)
    assert float(word_products(["x", "y"]).abs().sum()) == 0


def test_targets_beyond_words_know_neither_the_items_own_fold_nor_the_excluded_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(40, 6, generator=generator, dtype=torch.float64), torch.arange(40) % 2
    folds = torch.arange(40) // 2 % 4
    products = features @ features.T
    left = BeyondWords(products, labels, folds, 2).without(1)
    for item in (3, 9, 2, 25):
        changed = labels.clone()
        unseen = (folds == 1) | (folds == folds[item])
        changed[unseen] = 1 - changed[unseen]
        again = BeyondWords(products, changed, folds, 2).without(1)
        said, said_again = one_hot(labels, 2)[item] - left[item], one_hot(changed, 2)[item] - again[item]
        torch.testing.assert_close(said, said_again)
        torch.testing.assert_close(float(said.sum()), 1.0)
    held_out = recognised(products, labels, cells_of(folds, torch.zeros_like(folds)), 2, 1e-2)
    own = folds == 1
    assert torch.equal((one_hot(labels, 2) - left).argmax(1)[own], held_out[own])
    # Without anything to learn from, words say nothing.
    few = BeyondWords(products, labels, folds % 2, 2).without(0, 1)
    assert torch.equal(few, one_hot(labels, 2) - 0.5)


def test_a_tie_of_most_frequent_functions_is_shared() -> None:
    assert majority_share(torch.tensor([0, 1, 2, 3] * 3), 4).tolist() == [0.25] * 4
    assert majority_share(torch.tensor([0, 1, 1]), 2).tolist() == [0.0, 1.0]


def test_the_majority_is_taken_from_the_other_folds() -> None:
    labels, folds = torch.tensor([0, 0, 1, 1, 1, 0]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert majority_predictions([""] * 6, labels, folds, 2).tolist() == [1, 1, 0, 0, 0, 0]
    assert majority_predictions(["a", "b", "a", "b", "a", "c"], labels, folds, 2).tolist() == [1, 1, 0, 0, 0, 0]


def test_rank_correlations_equal_scipy() -> None:
    from scipy.stats import spearmanr

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(0, 9, (3, 4, 5), generator=generator).float() for _ in range(2))
    expected = [spearmanr(x.flatten(), y.flatten()).statistic for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(rank_correlations(a, b), expected, atol=1e-6)
    assert rank_correlations(a, torch.ones_like(a)).tolist() == [0.0] * 3


# Activations on disk


def questions_of(model: Any, tasks: Tasks) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    asked = [encode_question(model, item.prompt, [item.answer]) for item in tasks.items]
    return [q.answered for q in asked], [(len(q.prompt), len(q.answered)) for q in asked]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_features_are_the_mean_z_over_the_span(kind: str, tmp_path: Path) -> None:
    model = shared_model(kind)
    prompts = [[3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14, 15]]
    spans = [(2, 5), (1, 2), (0, 5)]
    found = capture_head_features(model, prompts, spans, parameters="", cache_dir=tmp_path)
    assert (found.n_items, found.n_layers, found.n_captured) == (3, 3, 1)
    for item, (prompt, (first, end)) in enumerate(zip(prompts, spans, strict=True)):
        _, cache = model.run_with_cache(torch.tensor([prompt]))
        for layer in range(3):
            expected = cache[f"blocks.{layer}.attn.hook_z"][0, first:end].mean(0).flatten()
            torch.testing.assert_close(found.layer(layer)[item], expected)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C is an exception here, also in a test process that ignores it so that its leader can end all at once."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_kept_features_are_not_captured_again(
    planted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruptible: None
) -> None:
    prompts, spans = questions_of(planted, slot_tasks())
    monkeypatch.setattr("tl_headmaps.capture.running.head_features._CHUNK", 32)
    done: list[int] = []

    def stop(n: int) -> None:
        done.append(n)
        if sum(done) > 64:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        capture_head_features(planted, prompts, spans, parameters="", cache_dir=tmp_path, progress=stop)
    kept = sorted(tmp_path.iterdir())
    assert len(kept) == 2 and all(path.suffix == ".safetensors" for path in kept)
    rest = capture_head_features(planted, prompts, spans, parameters="", cache_dir=tmp_path)
    assert rest.n_captured == 2 and len(rest.chunks) == 4
    again = capture_head_features(planted, prompts, spans, parameters="", cache_dir=tmp_path)
    assert again.n_captured == 0
    fresh = capture_head_features(planted, prompts, spans, parameters="", cache_dir=tmp_path / "other")
    assert torch.equal(again.layer(0), fresh.layer(0))


def test_activations_are_kept_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TL_HEADMAPS_CACHE", str(tmp_path))
    monkeypatch.setenv("TL_HEADMAPS_CACHE_GB", "0")
    model, spans = shared_model("gpt2"), [(1, 3)]
    first, second = (capture_head_features(model, [[3, 4, n]], spans, parameters="") for n in (5, 6))
    paths = [found.chunks[0][0] for found in (first, second)]
    assert all(path.is_file() for path in paths), "both were used just now"
    for path in paths:
        os.utime(path, (1.0, 1.0))
    second.layer(0)
    capture_head_features(model, [[3, 4, 7]], spans, parameters="")
    assert [path.is_file() for path in paths] == [False, True], "what is read is in use"


def test_other_positions_prompts_models_and_damaged_files_are_captured_anew(tmp_path: Path) -> None:
    model = random_model("gpt2")
    prompts, spans = [[3, 4, 5], [6, 7, 8]], [(1, 3), (1, 3)]

    def captured(model: Any, *arguments: Any) -> int:
        parameters = parameters_digest(model)
        return capture_head_features(model, *arguments, parameters=parameters, cache_dir=tmp_path).n_captured

    assert captured(model, prompts, spans) == 1
    assert captured(model, prompts, spans) == 0
    assert captured(model, prompts, [(1, 3), (2, 3)]) == 1
    assert captured(model, [[3, 4, 5], [6, 7, 9]], spans) == 1
    with torch.no_grad():
        next(iter(model.blocks[2].mlp.parameters()))[0] += 1e-3
    assert captured(model, prompts, spans) == 1
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert captured(model, prompts, spans) == 1
    assert captured(model, prompts, spans) == 0
    # The same parameters under other settings.
    assert captured(random_model("gpt2"), prompts, spans) == 1
    assert captured(random_model("gpt2", layer_norm_epsilon=0.05), prompts, spans) == 1
    assert captured(random_model("gpt2"), prompts, spans) == 0


# Answers and ablation


def test_likelihoods_equal_one_pass_per_option() -> None:
    model = shared_model("llama")
    asked = [
        encode_question(model, f" {word(5)} {word(6)}", [word(7), word(8), f"{word(9)}-"]),
        encode_question(model, f" {word(5)}", [f"{word(7)}--", f"{word(8)}--", f"{word(7)}-"]),
    ]
    assert [len(option) for option in asked[1].options] == [3, 3, 2]
    ablated = torch.zeros(2, 3, 4, dtype=torch.bool)
    ablated[0, 1, 2] = ablated[1, 0, 3] = ablated[1, 2, 0] = True
    for mask in (None, ablated):
        found = answer_likelihoods(model, asked, ablated=mask)
        for number, question in enumerate(asked):
            for option, value in zip(question.options, found[number], strict=True):
                hooks = []
                for layer, head in [] if mask is None else mask[number].nonzero().tolist():

                    def zero(z: torch.Tensor, hook: Any, head: int = head) -> torch.Tensor:
                        z = z.clone()
                        z[:, :, head] = 0
                        return z

                    hooks.append((f"blocks.{layer}.attn.hook_z", zero))
                ids = torch.tensor([[*question.prompt, *option]])
                logits = model.run_with_hooks(ids, return_type="logits", fwd_hooks=hooks).log_softmax(-1)
                start = len(question.prompt) - 1
                expected = sum(float(logits[0, start + i, token]) for i, token in enumerate(option))
                assert value == pytest.approx(expected, abs=1e-4)


def test_options_share_passes_and_questions_are_counted_once() -> None:
    model = shared_model("llama")
    asked = [
        encode_question(model, f" {word(5)} {word(6)}", [word(7), f"{word(8)}-", f"{word(8)}--"]),
        encode_question(model, f" {word(5)}", [f"{word(7)}-", f"{word(8)}-"]),
    ]
    assert [len(passes) for passes in map(_runs, (question.options for question in asked))] == [1, 2]
    done: list[int] = []
    alone = [answer_likelihoods(model, [question], budget=1) for question in asked]
    together = answer_likelihoods(model, asked * 3, budget=1, progress=done.append)
    assert sum(done) == 6
    for number, values in enumerate(together):
        assert values == pytest.approx(alone[number % 2][0], abs=1e-4)


def test_an_answer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    items = [TaskItem(f" {word(3 + i)}" * 32, word(5), NAMES[i % 2], content=f"c{i}") for i in range(20)]
    with pytest.raises(UsageError, match=r"does not fit after its prompt \(33 tokens: .*context is 32 tokens\."):
        task_maps(shared_model("gpt2"), Tasks(tuple(items)), cache_dir=tmp_path, progress=False)


def test_ablating_the_heads_of_a_function_breaks_that_function_alone(planted_maps: TaskMaps) -> None:
    """Head i alone writes the answer of function i; its heads are given by hand, in the order of NAMES."""
    model = slot_model(MARKERS, ANSWERS)
    tasks = slot_tasks(by_function=True)
    labels = torch.tensor([planted_maps.functions.index(item.function) for item in tasks.items])
    folds = content_folds([item.content for item in tasks.items], labels, 5, 0, planted_maps.functions)
    importance = torch.zeros(5, 4, 1, 8)
    for number, function in enumerate(planted_maps.functions):
        importance[:, number, 0, NAMES.index(function)] = 1
    data = {tasks.name: tasks.digest, "parameters": parameters_digest(model)}
    provenance = replace(planted_maps.provenance, data=data)
    maps = replace(planted_maps, folds=folds, fold_importance=importance, provenance=provenance)
    options = {"max_heads": 1, "progress": False}
    found = verify_tasks(model, maps, tasks, n_items=10, **options)
    assert found.clean.tolist() == [1.0] * 4
    assert torch.equal(found.accuracy, 1 - torch.eye(4))
    assert found.n_items == (10,) * 4 and found.n_ablated == (1,) * 4
    assert found.provenance.options.items() >= {"n_items": 10, "n_random": 39, "max_heads": 1}.items()
    # Eight heads in one layer, one of them the own: seven other sets of one, which are all there are.
    assert found.n_random == (7,) * 4 and found.n_moved == (0,) * 4
    assert found.p_value.tolist() == [0.125] * 4 and found.q_value.tolist() == [0.125] * 4
    assert bool((found.random == 1).all()) and bool((found.margin_own < found.margin_random).all())
    assert found.verdicts == ("no difference",) * 4 and "p is 0.12 at least" in str(found)
    assert "so one function alone of 4 cannot get the verdict worse" in " ".join(str(found).split())
    torch.testing.assert_close(found.chance, torch.full((4,), 0.25))
    assert bool((found.accuracy_low <= found.accuracy + 1e-6).all())
    assert bool((found.accuracy <= found.accuracy_high + 1e-6).all())
    everything = verify_tasks(model, maps, tasks, n_items=None, n_random=1, **options)
    assert everything.n_items == (30,) * 4
    assert found.testable == (True,) * 4
    assert "4 of 4 functions are testable: the model answers them above chance." in str(found)
    sure = replace(found, q_value=torch.full((4,), 0.04))
    assert sure.verdicts == ("worse",) * 4 and "Worse without own heads than without others" in sure.figure().data.note


def test_a_model_at_chance_is_not_testable(planted: Any, planted_maps: TaskMaps) -> None:
    """Answers of these items are drawn at random, so nobody can know them."""
    found = verify_tasks(planted, planted_maps, slot_tasks(), n_items=None, n_random=2, max_heads=1, progress=False)
    assert bool((found.clean_low < found.chance).all())
    assert found.testable == (False,) * 4 and found.verdicts == ("not testable",) * 4
    assert str(found).count("  not testable") == 4
    assert "0 of 4 functions are testable: the model answers them above chance; of the others nothing" in " ".join(
        str(found).split()
    )
    figure = found.figure()
    assert [figure.data.columns.label(column) for column in range(4)][2] == "† Inference"
    assert "† Not testable, the interval with all heads reaches chance: Retrieval, Decision-making" in str(
        figure.data.note
    )
    values = found.to_dict()
    assert values["testable"] == [False] * 4 and values["verdicts"] == ["not testable"] * 4
    assert np.shape(values["p_value"]) == np.shape(values["q_value"]) == (4,)


def test_verification_needs_the_items_and_the_model_of_the_maps(planted: Any, planted_maps: TaskMaps) -> None:
    with pytest.raises(UsageError, match=r"made from slots \(120 items\), but bundled tasks \(1200 items\) is not"):
        verify_tasks(planted, planted_maps)
    shuffled = Tasks(slot_tasks().items[::-1], name="slots")
    with pytest.raises(UsageError, match=r"not the same list of items in the same order. Pass the items of the maps"):
        verify_tasks(planted, planted_maps, shuffled)
    with pytest.raises(UsageError, match=r"has other weights. Pass the model of the maps"):
        verify_tasks(slot_model(MARKERS, ANSWERS), planted_maps, slot_tasks())


def test_more_heads_than_half_of_the_model_are_refused(planted: Any, planted_maps: TaskMaps) -> None:
    every = tuple(HeadIndex(0, head) for head in range(8))
    maps = replace(planted_maps, standing_out=(every,) * 4)
    with pytest.raises(UsageError, match=r"8 heads are to be ablated, but the model has 8.*Use max_heads=4 or less"):
        verify_tasks(planted, maps, slot_tasks())


def test_heads_are_chosen_without_the_item_they_are_ablated_for(planted: Any, planted_maps: TaskMaps) -> None:
    """The importance of an item's own fold decides; a map that points elsewhere in that fold alone is followed."""
    turned = planted_maps.fold_importance.clone()
    turned[0] = turned[0].flip(-1)
    options = {"n_items": None, "n_random": 3, "max_heads": 1, "progress": False}
    model, tasks = slot_model(MARKERS, ANSWERS), slot_tasks(by_function=True)
    data = {tasks.name: tasks.digest, "parameters": parameters_digest(model)}
    provenance = replace(planted_maps.provenance, data=data)
    plain, other = (
        verify_tasks(model, replace(planted_maps, fold_importance=values, provenance=provenance), tasks, **options)
        for values in (planted_maps.fold_importance, turned)
    )
    held_out = torch.tensor([float((planted_maps.folds[n::4] == 0).float().mean()) for n in range(4)])
    in_order = held_out[[NAMES.index(name) for name in planted_maps.functions]]
    torch.testing.assert_close(other.own - plain.own, in_order)


def test_draws_are_sets_like_the_own_heads_fold_by_fold() -> None:
    own = torch.zeros(3, 4, 5, dtype=torch.bool)
    own[0, 1, 2] = own[0, 3, 0] = own[1, 1, 2] = own[1, 1, 3] = own[2, 0, 0] = own[2, 2, 4] = True
    everything = [HeadIndex(layer, head) for layer in range(4) for head in range(5)]
    draws = _matched(own, everything, 12, 0)
    assert draws.masks.shape == (12, 3, 4, 5) and draws.n_moved == 0
    assert len(draws.masks.unique(dim=0)) == 12 and not bool((draws.masks == own).all((-1, -2, -3)).any())
    assert torch.equal(draws.masks.sum(-1), own.sum(-1).expand(12, -1, -1)), "as many of each layer, in each fold"
    shared = draws.masks.flatten(2).double() @ draws.masks.flatten(2).double().mT
    assert torch.equal(shared[0], own.flatten(1).double() @ own.flatten(1).double().T), "folds share as many heads"
    assert torch.equal(shared, shared[:1].expand(12, -1, -1))
    assert bool((draws.masks[:, 0] & own[0]).any()), "they may share heads with the own set, which is one like them"
    # Two heads of a layer of five have nine other pairs, too few: a neighbour is pooled with it, the farthest is not.
    pooled = _matched(own[1:2], everything, 12, 0)
    assert pooled.n_moved == 2 and len(pooled.masks) == 12 and not bool(pooled.masks[:, 0, 3].any())
    alone = _matched(own[:1, :, :1] | torch.tensor([[[False], [True], [False], [False]]]), everything[::5], 12, 0)
    assert alone.n_moved == 2 and len(alone.masks) == 5, "all other pairs of four heads"


def test_random_heads_that_are_the_same_in_all_folds_get_no_small_p_values() -> None:
    """What heads are worth is drawn at random, their margin is the mean over folds.

    With draws of their own in each fold, other sets would average out what the own set does not: .14 of these p-values
    would be at most .05.
    """
    generator = np.random.default_rng(0)
    everything = [HeadIndex(layer, head) for layer in range(3) for head in range(9)]
    p_values = []
    for seed in range(400):
        worth = torch.from_numpy(generator.normal(size=(3, 9)))
        own = torch.zeros(5, 3, 9, dtype=torch.bool)
        own[:, torch.arange(3), torch.from_numpy(generator.integers(9, size=3))] = True
        # In one fold another head was chosen.
        own[4] = own[4].roll(1, -1)
        masks = _matched(own, everything, 39, seed).masks
        lost, others = ((mask * worth).sum((-1, -2)).mean(-1) for mask in (own, masks))
        p_values.append(rank_p_value(float(lost), others, "less"))
    assert np.mean(np.array(p_values) <= 0.05) < 0.08


def test_the_p_value_is_the_rank_of_the_own_heads_not_of_the_items(planted: Any, planted_maps: TaskMaps) -> None:
    """A random set called own must not get small p-values: over all sets of one head p is uniform on its ranks."""
    model, tasks = slot_model(MARKERS, ANSWERS), slot_tasks(by_function=True)
    provenance = replace(
        planted_maps.provenance, data={tasks.name: tasks.digest, "parameters": parameters_digest(model)}
    )
    p_values = []
    for head in range(8):
        importance = torch.zeros(5, 4, 1, 8)
        importance[..., head] = 1
        maps = replace(planted_maps, fold_importance=importance, provenance=provenance)
        found = verify_tasks(model, maps, tasks, n_items=5, max_heads=1, progress=False)
        p_values.append(found.p_value.tolist())
    ranks = 8 * torch.tensor(p_values)
    for function in range(4):
        assert all(int((ranks[:, function] <= rank + 0.01).sum()) <= rank for rank in range(1, 9))


def test_missing_alternatives_are_answers_of_like_items() -> None:
    items = [
        TaskItem(f"q {f} {i}", f"{f[0]}{'x' * (i % 4)}{i}", f, content=f"c{i}") for f in NAMES[:2] for i in range(12)
    ]
    tasks = Tasks(tuple(items))
    for before, item in zip(items, with_alternatives(tasks).items, strict=True):
        assert len(item.alternatives) == 3
        assert item.answer not in item.alternatives
        assert all(other[0] == item.function[0] for other in item.alternatives)
        assert max(abs(len(other) - len(item.answer)) for other in item.alternatives) <= 2
        assert with_alternatives(tasks).items[items.index(before)] == item
    same = Tasks(tuple(TaskItem(f"q {f} {i}", "same", f, content=f"c{i}") for f in NAMES[:2] for i in range(12)))
    with pytest.raises(TaskDataError, match=r"has no alternatives, and all items of retrieval"):
        with_alternatives(same)


# Results


def test_maps_from_a_file_are_verified_alike(planted: Any, planted_maps: TaskMaps, tmp_path: Path) -> None:
    options = {"n_items": 2, "n_random": 3, "max_heads": 1, "progress": False}
    verified = verify_tasks(planted, planted_maps, slot_tasks(), **options)
    maps = TaskMaps.load(planted_maps.save(tmp_path / "maps.safetensors"))
    again = verify_tasks(planted, maps, slot_tasks(), **options)
    assert replace(again, provenance=verified.provenance) == verified
    assert replace(again.provenance, created="") == replace(verified.provenance, created="")


def test_selected_functions_are_verified_alone(planted: Any, planted_maps: TaskMaps) -> None:
    options = {"n_items": None, "n_random": 3, "max_heads": 1, "progress": False}
    every = verify_tasks(planted, planted_maps, slot_tasks(), **options)
    names = ["inference", "retrieval"]
    some = verify_tasks(planted, planted_maps.select(names), slot_tasks(), **options)
    numbers = [every.functions.index(name) for name in names]
    assert torch.equal(some.accuracy, every.accuracy[numbers][:, numbers])
    assert torch.equal(some.clean, every.clean[numbers])
    alone = verify_tasks(planted, planted_maps.select("inference"), slot_tasks(), **options)
    assert alone.accuracy.shape == (1, 1) and bool(alone.others.isnan().all())
    assert " nan " not in str(alone)


def test_json_has_the_agreed_names(planted_maps: TaskMaps) -> None:
    values = planted_maps.to_dict()
    assert list(values["axes"]) == ["function", "layer", "head"]
    for name in ("importance", "importance_normalised", "null_mean"):
        assert np.shape(values[name]) == (4, 1, 8)
    assert np.shape(values["probe_accuracy"]) == (4,)
    assert all(np.shape(found) == (4,) for found in values["baseline_accuracy"].values())
    assert values["provenance"]["seed"] == 0 and values["provenance"]["data"]["slots"] == slot_tasks().digest


def test_tables_selections_and_text(planted: Any, planted_maps: TaskMaps) -> None:
    rows = list(planted_maps.to_rows())
    assert len(rows) == 4 * 8
    assert rows[0]["function"] == "retrieval" and isinstance(rows[0]["stands_out"], bool)
    chosen = planted_maps.select("inference")
    assert chosen.functions == ("inference",) and chosen.overlap.shape == (1, 1)
    assert torch.equal(chosen.importance[0], planted_maps.importance[planted_maps.index_of("inference")])
    with pytest.raises(UsageError, match="no function 'chess'; it has retrieval"):
        planted_maps.select("chess")
    text = str(planted_maps)
    assert "L0H0" in text and ("Unstable" in text) == (not planted_maps.stable)
    assert "smallest p possible 0.002" in text and "labels were shuffled within contents" in text
    assert "largest by chance" in planted_maps.table(full=True) and "importance" not in text.splitlines()[2]
    assert planted_maps.top(2)[0][1] == float(planted_maps.importance.max())
    said = planted_maps.shape(n_null=99)
    assert "over 8 tests" in said and "of 8 heads counted alike, around layer 0.0." in said
    page = planted_maps.figure().html
    names = [layer.name for layer in planted_maps.figure().data.layers]
    assert names == [
        f"{FUNCTIONS[name]}: {len(heads) or 'none'}"
        for name, heads in zip(planted_maps.functions, planted_maps.standing_out, strict=True)
    ]
    assert "Math Calculation" in page and "Decision-making" in page
    assert "rank correlation" in planted_maps.figure(stability=True).html
    assert {layer.name for layer in planted_maps.figure(side_by_side=False).data.layers} == {
        name.replace("_", " ") for name in planted_maps.functions
    }
    verified = verify_tasks(planted, planted_maps, slot_tasks(), n_items=2, n_random=1, progress=False)
    assert "random others" in verified.figure().html


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_folds": 2}, "n_folds=2 is too few"),
        ({"n_folds": 11}, "have 10 contents, which cannot be split into 11 folds"),
    ],
)
def test_bad_options_are_refused_before_the_model_runs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        task_maps(None, slot_tasks(), **options)


# The default model


@pytest.mark.model
@pytest.mark.once
def test_two_contents_of_the_default_model(default_model: Any, tmp_path: Path) -> None:
    """A short pass: forty-eight items. The figures for all of them are in the benchmarks."""
    tasks = load_tasks()
    chosen = tuple(item for item in tasks.items if item.format == "place_sentence" and item.content in ("g0", "g1"))
    asked = [encode_question(default_model, item.prompt, (item.answer, *item.alternatives)) for item in chosen]
    likelihoods = answer_likelihoods(default_model, asked)
    right = [values[0] > max(values[1:]) for values in likelihoods]
    assert sum(right) / len(right) > 0.45


# The command


@pytest.fixture
def command(planted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``tl-headmaps tasks`` on the planted model, with its own cache."""
    from click.testing import CliRunner

    from tl_headmaps.cli.app import app

    monkeypatch.setattr("tl_headmaps.load_model", lambda name, device: planted)
    monkeypatch.setenv("TL_HEADMAPS_CACHE", str(tmp_path / "cache"))
    return lambda *arguments: CliRunner().invoke(app, ["tasks", *map(str, arguments)])


def test_the_command_reads_maps_verifies_and_writes(command: Any, tmp_path: Path) -> None:
    records = [
        {"question": item.question, "answer": item.answer, "function": item.function, "content": item.content}
        for item in slot_tasks(20).items
    ]
    records += [{"question": "x", "answer": "y", "function": "chess"}]
    data = tmp_path / "mine.jsonl"
    data.write_text("\n".join(json.dumps(record) for record in records))
    outs = ("--out", tmp_path / "t.json", "--out", tmp_path / "t.html")
    chosen = ("--functions", "retrieval,inference", "--sample", 15)
    done = command("--data", data, *chosen, "--verify", "--n-items", 2, *outs)
    assert done.exit_code == 0, done.output
    assert TaskMaps.load(tmp_path / "t.json").n_items == (15, 15)
    assert "Task maps, linear probe" in done.stdout and "Task maps verified" in done.stdout
    assert "Left out 1 items labelled 'chess'" in done.stderr
    told = [line for line in done.stderr.splitlines() if not line.startswith(("Left out", "Wrote"))]
    assert not told, "how long it takes is measured, and said where that is long"
    assert TaskMaps.load(tmp_path / "t.json").functions == ("retrieval", "inference")
    assert TaskVerification.load(tmp_path / "t.verified.json").n_items == (2, 2)
    assert (tmp_path / "t.html").stat().st_size > 1000 and (tmp_path / "t.verified.html").exists()
    assert list((tmp_path / "cache" / "activations").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--drop-duplicates",), "--drop-duplicates is about the file of --data; give the file too"),
        (("--max-heads", "3"), "--max-heads is an option of the verification; add --verify"),
        (("--data", "none.json"), "Cannot read the task file none.json"),
        (("--out", "t.xyz"), "the suffix chooses what is written"),
    ],
)
def test_wrong_usage_of_the_command_is_a_usage_error(command: Any, arguments: tuple[str, ...], message: str) -> None:
    done = command(*arguments)
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)


def test_all_parameters_are_hashed_once_per_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = slot_model(MARKERS)  # not one that was hashed before
    hashed: list[int] = []
    of_bytes = tensors._bytes_digest
    monkeypatch.setattr(
        tensors, "_bytes_digest", lambda tensor, *more: (hashed.append(tensor.data_ptr()), of_bytes(tensor, *more))[1]
    )
    task_maps(model, slot_tasks(), cache_dir=tmp_path, n_null=1, progress=False)
    assert hashed.count(model.blocks[-1].mlp.W_out.data_ptr()) == 1
