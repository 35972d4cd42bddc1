"""``task_maps``: which heads serve which cognitive function.

For prompts labelled with a function, every head's z is averaged over the tokens of the answer, a cross-validated probe
tells the functions apart, and each head gets the part of the probe's logits that is read from it (see
:mod:`..scorers.tasks`). Words can give a label away, so three things are done about it: baselines say what words and
formats tell alone, items are tested in a wording that was not trained on, and the main probe starts from what the
items' words tell: importance is what the heads know beyond that. The null is the same probe with labels exchanged among
items of equal words.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..capture.running.activations import DEFAULT_BUDGET
from ..capture.running.answers import Question, encode_question
from ..capture.running.head_features import capture_head_features
from ..capture.weights import HeadWeights
from ..core.errors import UsageError
from ..core.options import Between, Draws, Seed, public
from ..core.provenance import Provenance
from ..core.types import HeadIndex, Model, Origin, Positions
from ..data.tasks import FUNCTIONS, TaskItem, Tasks, load_tasks
from ..renderers import heat
from ..renderers.charts import scatter
from ..renderers.figure import Figure
from ..renderers.grids import MapLayer
from ..renderers.text import interval, significant, table_text, wrapped
from ..results.table import HeadTable, frozen_result, measured
from ..scorers.probe import (
    WORD_PENALTY,
    BeyondWords,
    Cell,
    majority_predictions,
    majority_share,
    one_hot,
    recognised,
    word_products,
)
from ..scorers.statistics import clustered_interval, clusters_of, jackknife_half_width, permuted_within, q_values
from ..scorers.tasks import (
    PENALTY,
    Features,
    Probes,
    cells_of,
    centre_of_mass,
    content_folds,
    effective_number,
    exchange_groups,
    fit_probes,
    head_importance,
    normalised,
    rank_correlations,
    shape_p_values,
    wording_folds,
)
from .study import Study

STABLE = 0.8
"""Rank correlation between two halves of the contents above which a map counts as stable."""

SIGNIFICANT = 0.05
"""False discovery rate at which a head stands out."""

_NAMED = 4
"""Heads of each function in the table."""

_PLAIN, _BEYOND = 0, 1
"""The first two fits: on heads alone, and beyond words. Shuffled ones follow."""

_LEGEND = (
    "probe: held-out items recognised from all heads, 95% interval over contents; words: from the items' words; asked: "
    "from the words of the sentence that is asked about; stability: rank correlation of the maps from two disjoint "
    "halves of the contents, not of two seeds on the same items; heads: above shuffled labels at a false discovery "
    "rate of 5% over all functions and heads, with their share of the importance beyond the items' words"
)


@frozen_result
class TaskMaps(HeadTable):
    """Importance of every head (last two axes) for every function (first axis); NaN in layers without heads.

    Attributes:
        functions: Names of the functions.
        positions: Where heads were read: ``"answer"`` or ``"last"``.
        baseline_accuracy: The same for what knows no heads: the most frequent function (majority, format), words of
            the question, of everything (words), pairs of neighbouring words, and words of the sentence of the context
            that is asked about (decisive).
        overall_accuracy: All of these over all items, and the plain probe's where it was trained on the same formats
            (known_wording).
        wording_held_out: Whether items were tested in formats that were not trained on; not, if there is only one.
        exchanged: Among which items labels were shuffled: ``matched sets``, ``contents`` or ``folds``.
        standing_out: Heads of each function with ``q_value`` of at most 0.05, most important first.
        overlap: Shared part of those heads between two functions (Jaccard).
        correlation: Rank correlation of two functions' importances.
        folds: Fold of each item, in the order of the items.

    Example:
        >>> from tl_headmaps import TaskItem, Tasks, load_default_model, task_maps
        >>> sums = [TaskItem(f"{n} + 1 =", str(n + 1), "math_calculation", content=str(n)) for n in range(10)]
        >>> cups = [TaskItem(f"{n} is", "red", "retrieval", f"Cup {n} is red.", content=str(n)) for n in range(10)]
        >>> tasks = Tasks((*sums, *cups))
        >>> maps = task_maps(load_default_model(), tasks, n_folds=3, n_null=19, cache_dir="cache", progress=False)
        >>> maps.n_items, maps.overall_accuracy["words"]  # such items give their function away by their words
        ((10, 10), 1.0)
        >>> maps.select("retrieval").functions, tuple(maps.importance.shape)
        (('retrieval',), (2, 30, 9))
    """

    kind: ClassVar[str] = "task_maps"
    title: ClassVar[str] = "Task maps, linear probe on z at {self.read_at}"
    methods: ClassVar[tuple[str, ...]] = ("ma2025cognitive", "wilson1927probable", "benjamini1995controlling")
    json_axes: ClassVar[Mapping[str, str | None]] = {"function": "functions", "layer": None, "head": None}
    json_extra: ClassVar[tuple[str, ...]] = ("stable",)
    labelled: ClassVar[str] = "functions"
    aligned: ClassVar[tuple[str, ...]] = ("n_items", "standing_out", "baseline_accuracy")
    chosen_as: ClassVar[str] = "stand out for"
    fixed: ClassVar[tuple[str, ...]] = ("positions",)

    functions: tuple[str, ...]
    n_items: tuple[int, ...] = measured("fact", "items")
    positions: str
    importance: Float[Tensor, "function layer head"] = measured(
        "value",
        "importance",
        "what the probe reads from a head for the function, beyond what the items' words tell: mean over held-out "
        "items of gradient x activation. The words of the one sentence that is asked about tell the function too "
        '(baseline_accuracy["decisive"]), so a head may have fetched that sentence and done no more',
        unit="importance",
    )
    importance_normalised: Float[Tensor, "function layer head"] = measured(
        "value", "share", "its positive part, scaled to sum to one over the heads", unit="share of all importance"
    )
    interval_low: Float[Tensor, "function layer head"] = measured(
        "low", "95%", "over contents: jackknife over folds, the probe fitted again without each", of="importance"
    )
    interval_high: Float[Tensor, "function layer head"] = measured("high", "95%", "upper end", of="importance")
    importance_plain: Float[Tensor, "function layer head"] = measured(
        "value", "plain probe", "importance for a probe that is not told what the words say, as published"
    )
    importance_halves: Float[Tensor, "half function layer head"] = measured(
        "fact", "halves", "importance from either half of the contents alone; NaN with too few contents"
    )
    null_mean: Float[Tensor, "function layer head"] = measured(
        "null", "null", "mean importance with labels shuffled", of="importance"
    )
    null_max: Float[Tensor, " function"] = measured(
        "fact", "largest by chance", "largest importance of any head with labels shuffled"
    )
    p_value: Float[Tensor, "function layer head"] = measured(
        "p",
        "p",
        "share of shuffles in which the same head's importance reaches it",
        of="importance",
    )
    q_value: Float[Tensor, "function layer head"] = measured("q", "q", "over all functions and heads", of="importance")
    probe_accuracy: Float[Tensor, " function"] = measured(
        "fact", "probe", "share of a function's held-out items that the plain probe on all heads recognises"
    )
    probe_low: Float[Tensor, " function"] = measured(
        "fact",
        "probe from",
        "lower end of its 95% interval over the tested contents, counted as clusters; a probe that was trained on "
        "other contents differs by more",
    )
    probe_high: Float[Tensor, " function"] = measured("fact", "probe to", "upper end")
    combined_accuracy: Float[Tensor, " function"] = measured("fact", "words and heads", "the same for both together")
    baseline_accuracy: Mapping[str, tuple[float, ...]]
    overall_accuracy: Mapping[str, float]
    wording_held_out: bool
    exchanged: tuple[str, ...]
    standing_out: tuple[tuple[HeadIndex, ...], ...]
    overlap: Float[Tensor, "function function"]
    correlation: Float[Tensor, "function function"]
    stability: Float[Tensor, " function"] = measured(
        "fact",
        "stability",
        "rank correlation of the two importance_halves: maps of disjoint halves of the contents, so other items, "
        "and not other seeds on the same ones. NaN without halves",
    )
    folds: Int[Tensor, " item"]
    fold_importance: Float[Tensor, "fold function layer head"] = measured(
        "fact",
        "without a fold",
        "importance without each fold: what verify_tasks chooses heads by, so that no item has a say in the heads that "
        "are ablated for it",
    )
    provenance: Provenance

    @property
    def read_at(self) -> str:
        """Where heads were read, in words."""
        return "the answer" if self.positions == "answer" else "the last token"

    @property
    def stable(self) -> bool:
        """Whether every function's map is nearly the same from other contents (rank correlation of at least 0.8)."""
        return bool((self.stability >= STABLE).all())

    def head_map(self, function: str | None = None) -> Float[Tensor, "layer head"]:
        """The importances for a function; without one, each head's largest for any."""
        return self.importance.amax(0) if function is None else self.importance[self.index_of(function)]

    def chosen(self) -> Mapping[str, Sequence[HeadIndex]]:
        """Heads that stand out from shuffled labels, by function."""
        return dict(zip(self.functions, self.standing_out, strict=True))

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per function and head."""
        chosen = self.chosen()
        for row in super().to_rows():
            yield row | {"stands_out": HeadIndex(row["layer"], row["head"]) in chosen[row["function"]]}

    def figure(self, *, side_by_side: bool = True, stability: bool = False, origin: Origin = "upper") -> Figure:
        """Every function's importance by layer and head, in panels with one colour bar.

        The bar ends at the 99th percentile, so that one head does not take all colours. Each title says how many heads
        stand out from shuffled labels.

        Args:
            side_by_side: If not, one map at a time, with switches between functions and measures.
            stability: Show instead how the least stable map repeats with other contents.
            origin: ``"lower"`` draws the first layer at the bottom.
        """
        if stability:
            return self._stability_figure()
        if not side_by_side:
            return super().figure()
        layers = [
            MapLayer(
                f"{FUNCTIONS.get(function, function)}: {len(self.standing_out[number]) or 'none'}",
                self.importance_normalised[number],
                details={
                    "importance": self.importance[number],
                    "95% from": self.interval_low[number],
                    "95% to": self.interval_high[number],
                    "shuffled labels": self.null_mean[number],
                    "q over all functions and heads": self.q_value[number],
                },
            )
            for number, function in enumerate(self.functions)
        ]
        return heat.panels(
            layers,
            title="Heads by cognitive function",
            unit="share of all importance",
            percentile=99,
            origin=origin,
            empty=self.provenance.short_rows,
            note="Share of what a linear probe reads from each head beyond the items' words. Behind a function's name: "
            f"how many heads stand out from shuffled labels at a false discovery rate of 5%. {' '.join(self.notes())}",
        )

    def notes(self) -> list[str]:
        """What the probe shows, what words alone would have told, and what is left to be said of the heads."""
        overall = self.overall_accuracy
        tested = "contents and formats" if self.wording_held_out else "contents"
        notes = [
            f"Of items in {tested} it was not trained on, the probe recognises {overall['probe']:.0%}; the items' "
            f"words tell {overall['words']:.0%}, the words of the sentence that is asked about "
            f"{overall['decisive']:.0%}, the most frequent function {overall['majority']:.1%}."
        ]
        if overall["decisive"] >= overall["probe"]:
            notes.append(
                "So the heads know which sentence is asked about; that they carry out what it asks for, these maps "
                "cannot show."
            )
        if bool(self.stability.isnan().any()):
            notes.append("Too few contents to say whether the maps are stable.")
        elif not self.stable:
            notes.append(f"Unstable: maps from two halves of the contents have a rank correlation below {STABLE}.")
        return notes

    @public
    def shape(self, *, n_null: Draws = 999, seed: Seed = 0) -> str:
        """Which maps have a diagonal or a full corner beyond chance, and which is the most focused, in words.

        Head numbers are arbitrary: a model with its heads renumbered is the same model, so a diagonal or a corner says
        something about layers only as far as permuted heads show it too.

        Args:
            n_null: How often heads are permuted within their layers.
            seed: Of the permutations.
        """
        shares = self.importance_normalised
        q_value = q_values(shape_p_values(shares, n_null=n_null, seed=seed).flatten())
        beyond = (q_value <= SIGNIFICANT).view(2, -1).tolist()
        n, said = len(self.functions), []
        for what, which in zip(("a diagonal", "a full corner"), beyond, strict=True):
            names = [name for name, has in zip(self.functions, which, strict=True) if has]
            verb = "has" if len(names) == 1 else "have"
            said.append(f"{', '.join(names)} {verb} {what}" if names else f"none of {n} maps has {what}")
        if not any(map(any, beyond)):
            said = [f"none of {n} maps has a diagonal or a full corner"]
        known = shares.nan_to_num(nan=0.0)
        n_effective = effective_number(known)
        most = int(n_effective.argmin())
        return (
            f"Beyond heads permuted within their layers (false discovery rate {SIGNIFICANT:.0%} over {2 * n} tests), "
            f"{' and '.join(said)}. The most focused is {self.functions[most]}, as if {n_effective[most]:.0f} of "
            f"{self.n_measured} heads counted alike, around layer {centre_of_mass(known)[most]:.1f}."
        )

    def _stability_figure(self) -> Figure:
        if bool(self.stability.isnan().any()):
            raise UsageError(
                "These maps have no second half to be compared with: stability needs three contents in either half. "
                "Give items of six contents or more."
            )
        least = int(self.stability.argmin())
        name = FUNCTIONS.get(self.functions[least], self.functions[least])
        return scatter(
            self.importance_halves[0, least],
            self.importance_halves[1, least],
            title=f"{name}, the least stable of {len(self.functions)}: rank correlation {self.stability[least]:.2f}",
            x_name="importance in one half of the contents",
            y_name="importance in the other half",
            diagonal=True,
        )

    def table(self, *, full: bool = False, n: int | None = None) -> str:
        """A row per function: what the probe and the words know, and the heads that stand out.

        Args:
            full: A row per head instead, with all its numbers.
            n: Rows of each function then.
        """
        smallest = 1 / (1 + int(self.provenance.options["n_null"]))
        null = f"labels were shuffled within {' and '.join(self.exchanged)}; smallest p possible {smallest:.2g}"
        if full:
            stars = f"*: one of the heads that {self.chosen_as} the function (q of at most {SIGNIFICANT})"
            return "\n\n".join([super().table(full=True, n=n), wrapped(f"{stars}; {null}")])
        rows = []
        for number, function in enumerate(self.functions):
            heads, stability = self.standing_out[number], float(self.stability[number])
            named = [
                f"{head} {significant(float(self.importance_normalised[number, head.layer, head.head]), 2)}"
                for head in heads[:_NAMED]
            ]
            rows.append(
                [
                    function,
                    self.n_items[number],
                    f"{self.probe_accuracy[number]:.2f}",
                    interval(float(self.probe_low[number]), float(self.probe_high[number])),
                    f"{self.baseline_accuracy['words'][number]:.2f}",
                    f"{self.baseline_accuracy['decisive'][number]:.2f}",
                    "-" if math.isnan(stability) else f"{stability:.2f}",
                    len(heads),
                    ", ".join(named) or "none",
                ]
            )
        overall = self.overall_accuracy
        titles = ["function", "items", "probe", "95%", "words", "asked", "stability", "heads", "most important"]
        columns = [(title, "left" if title in ("function", "most important") else "right") for title in titles]
        others = ", ".join(f"{name.replace('_', ' ')} {overall[name]:.2f}" for name in self.baseline_accuracy)
        known = f"probe {overall['probe']:.2f}, words and heads {overall['combined']:.2f}"
        if self.wording_held_out:
            known += f", in formats it was trained on {overall['known_wording']:.2f}"
        known = f"all items: {known}; without heads: {others}"
        return "\n\n".join(
            [self.caption, table_text(columns, rows), *map(wrapped, (known, _LEGEND, null, " ".join(self.notes())))]
        )


@public
def task_maps(
    model: Model,
    tasks: Tasks | str | Path | None = None,
    *,
    positions: Positions = "answer",
    n_folds: int = 5,
    n_null: Annotated[int, Between(1, 10_000)] = 499,  # of all shuffles the probes are in memory at once: 6 GB
    seed: Seed = 0,
    prepend_bos: bool | None = None,
    budget: int = DEFAULT_BUDGET,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> TaskMaps:
    """Importance of every head for every function of labelled task items.

    Args:
        positions: Where heads are read: ``"answer"``, averaged over its tokens, or ``"last"``, the token before it.
        n_folds: Parts for cross-validation; contents stay whole. Formats are put into as many groups at most, and held
            out too.
        n_null: How often labels are shuffled for the null. A head's p-value is at least ``1 / (1 + n_null)``, so with
            few shuffles no head of many can stand out.
        seed: Decides folds, shuffles and halves.

    Example:
        >>> from tl_headmaps import TaskItem, Tasks, load_default_model, task_maps
        >>> sums = [TaskItem(f"{n} + 1 =", str(n + 1), "math_calculation", content=str(n)) for n in range(10)]
        >>> cups = [TaskItem(f"{n} is", "red", "retrieval", f"Cup {n} is red.", content=str(n)) for n in range(10)]
        >>> tasks = Tasks((*sums, *cups))
        >>> maps = task_maps(load_default_model(), tasks, n_folds=3, n_null=19, cache_dir="cache", progress=False)
        >>> maps.functions, maps.probe_accuracy.tolist()
        (('retrieval', 'math_calculation'), [1.0, 1.0])
    """
    chosen = resolve_tasks(tasks)
    design = _Design.of(chosen, n_folds, seed)
    study = Study(model, prepend_bos=prepend_bos, by_heads=False, progress=progress)
    weights = study.weights
    weights.require_even_heads("task maps")
    questions = [
        encode_question(model, item.prompt, (item.answer, *item.alternatives), study.prepend_bos)
        for item in chosen.items
    ]
    with study.bar("activations", "item", len(questions)) as bar:
        captured = capture_head_features(
            model,
            [question.answered for question in questions],
            [_span(question, positions) for question in questions],
            parameters=weights.parameters_digest,
            cache_dir=cache_dir,
            budget=budget,
            progress=bar.update,
        )
    features = Features(lambda place: captured.layer(captured.layers[place]), len(captured.layers), weights.n_heads)
    with study.bar("probes", "layer", features.n_layers) as bar:
        fits = _probed(features, design, n_null=n_null, seed=seed, progress=bar.update)
    study.data[chosen.name] = chosen.digest
    provenance = study.provenance(runs_model=True, seed=seed, positions=positions, n_folds=n_folds, n_null=n_null)
    return _result(weights, fits, design, chosen, positions=positions, provenance=provenance)


def resolve_tasks(tasks: Tasks | str | Path | None) -> Tasks:
    """Items themselves, those of a file, or the bundled ones."""
    if tasks is None:
        return load_tasks()
    return tasks if isinstance(tasks, Tasks) else Tasks.from_file(tasks)


def _span(question: Question, positions: Positions) -> tuple[int, int]:
    end = len(question.prompt)
    return (end, len(question.answered)) if positions == "answer" else (end - 1, end)


@dataclass(frozen=True)
class _Design:
    """Who is held out with whom, and whose labels may be exchanged.

    Attributes:
        labels: Function of each item.
        n_classes: Number of functions.
        folds: Fold of contents of each item.
        wordings: Group of formats of each item; one group if formats are not held out.
        halves: Folds of two designs that share no content, -1 for the items of the other half; none with too few.
        groups: Items among which labels are exchanged.
        exchanged: What these groups are.
        words: Inner products of the items by their words.
    """

    labels: Int[Tensor, " item"]
    n_classes: int
    folds: Int[Tensor, " item"]
    wordings: Int[Tensor, " item"]
    halves: tuple[Int[Tensor, " item"], ...]
    groups: Int[Tensor, " item"]
    exchanged: tuple[str, ...]
    words: Float[Tensor, "item item"]

    @classmethod
    def of(cls, tasks: Tasks, n_folds: int, seed: int) -> "_Design":
        labels = torch.tensor([tasks.functions.index(item.function) for item in tasks.items])
        contents = [item.content for item in tasks.items]
        folds = content_folds(contents, labels, n_folds, seed, tasks.functions)
        n_classes = len(tasks.functions)
        wordings = wording_folds([item.format for item in tasks.items], labels, folds, n_classes)
        groups, exchanged = exchange_groups([item.matched for item in tasks.items], contents, labels, folds, wordings)
        halves = _halves(contents, labels, n_folds, seed, tasks.functions)
        words = word_products([_text(item) for item in tasks.items])
        return cls(labels, n_classes, folds, wordings, halves, groups, exchanged, words)

    @property
    def cells(self) -> list[Cell]:
        return cells_of(self.folds, self.wordings)


def _halves(
    contents: Sequence[str], labels: Int[Tensor, " item"], n_folds: int, seed: int, functions: Sequence[str]
) -> tuple[Int[Tensor, " item"], ...]:
    """Folds of two designs on disjoint halves of the contents; none where a half cannot be split in three."""
    names = list(dict.fromkeys(contents))
    order = np.random.default_rng(seed).permutation(len(names))
    halves = []
    for part in (order[: len(names) // 2], order[len(names) // 2 :]):
        own = {names[number] for number in part}
        inside = torch.tensor([content in own for content in contents])
        folds = torch.full_like(labels, -1)
        try:
            folds[inside] = content_folds(
                [content for content in contents if content in own],
                labels[inside],
                min(n_folds, len(part)),
                seed,
                functions,
            )
        except UsageError:
            return ()
        halves.append(folds)
    return tuple(halves)


def _text(item: TaskItem) -> str:
    return f"{item.prompt} {item.answer}"


@dataclass(frozen=True)
class _Fits:
    """Importance of the plain probe, beyond words, without each fold, in two halves and with labels shuffled."""

    plain: Float[Tensor, "class layer head"]
    importance: Float[Tensor, "class layer head"]
    without: Float[Tensor, "fold class layer head"]
    halves: Float[Tensor, "half class layer head"]
    nulls: Float[Tensor, "null class layer head"]
    predicted: dict[str, Int[Tensor, " item"]]


def _probed(features: Features, design: _Design, *, n_null: int, seed: int, progress: Callable[[int], object]) -> _Fits:
    """All fits, with one factorisation for each cell and one pass over the layers for all of them."""
    labels, folds, n_classes = design.labels, design.folds, design.n_classes
    generator = np.random.default_rng(seed)
    items = torch.arange(len(labels))
    # A label moves together with what the words say of it: they know which functions are in a set, not whose it is.
    orders = torch.stack([items, *(permuted_within(design.groups, generator) for _ in range(n_null))])
    words = BeyondWords(design.words, labels, folds, n_classes)
    right = one_hot(labels, n_classes)
    shuffled = torch.cat([labels[None], labels[orders]])
    known = cells_of(folds, torch.zeros_like(folds))
    predicted = {"probe": torch.zeros_like(labels), "combined": torch.zeros_like(labels)}
    predicted["known_wording"] = recognised(features.products, labels, known, n_classes, PENALTY)
    probes: list[Probes] = []
    for tested, seen in design.cells:
        left = words.without(int(folds[tested[0]]))
        targets = torch.cat([right[None], left[orders]])
        probes.append(fit_probes(features.products, targets, shuffled, (tested, seen)))
        inner = features.products[tested][:, seen].float()
        plain, beyond = (inner @ probes[-1].weights[fit].T + probes[-1].bias[fit] for fit in (_PLAIN, _BEYOND))
        predicted["probe"][tested] = plain.argmax(1)
        predicted["combined"][tested] = ((right - left)[tested] + beyond).argmax(1)
    place, n_folds = len(shuffled), int(folds.max()) + 1
    for fold in range(n_folds):
        rest = torch.where(folds == fold, -1, folds)
        for tested, seen in cells_of(rest, design.wordings):
            left = words.without(fold, int(folds[tested[0]]))
            probes.append(fit_probes(features.products, left[None], labels[None], (tested, seen), place + fold))
    for half, own in enumerate(design.halves):
        words_of_half = BeyondWords(design.words, labels, own, n_classes)
        for tested, seen in cells_of(own, design.wordings):
            left = words_of_half.without(int(own[tested[0]]))
            at = place + n_folds + half
            probes.append(fit_probes(features.products, left[None], labels[None], (tested, seen), at))
    n_fits = place + n_folds + len(design.halves)
    every = head_importance(features, probes, n_fits, n_classes, progress)
    sizes = [1, 1, n_null, n_folds, len(design.halves)]
    plain, importance, nulls, without, halves = every.split(sizes)
    return _Fits(plain[0], importance[0], without, halves, nulls, predicted)


def _result(weights: HeadWeights, fits: _Fits, design: _Design, tasks: Tasks, **details: Any) -> TaskMaps:
    labels, n_classes = design.labels, design.n_classes
    importance = fits.importance
    p_value = (1 + (fits.nulls >= importance).sum(0)) / (1 + len(fits.nulls))
    q_value = q_values(p_value)
    heads = tuple(_standing_out(weights, *values) for values in zip(importance, q_value, strict=True))
    half_width = jackknife_half_width(fits.without)
    predictions = fits.predicted | _baselines(tasks, design)
    # Not counted in the other folds, which have fewest of a function where this one has most.
    accuracy = {"majority": majority_share(labels, n_classes)}
    accuracy |= {name: _by_function(values == labels, labels, n_classes) for name, values in predictions.items()}
    overall = {"majority": float(labels.bincount().max()) / len(labels)}
    overall |= {name: float((values == labels).float().mean()) for name, values in predictions.items()}
    clusters = clusters_of([[item.content] for item in tasks.items])
    bounds = [
        clustered_interval((fits.predicted["probe"] == labels)[own], clusters[own].unique(return_inverse=True)[1])
        for own in (labels == function for function in range(n_classes))
    ]
    halves = fits.halves if len(fits.halves) else torch.full((2, *importance.shape), torch.nan)
    stability = rank_correlations(*halves) if len(fits.halves) else torch.full((n_classes,), torch.nan)
    maps: dict[str, Any] = {
        "importance": importance,
        "importance_normalised": normalised(importance),
        "interval_low": importance - half_width,
        "interval_high": importance + half_width,
        "importance_plain": fits.plain,
        "importance_halves": halves,
        "null_mean": fits.nulls.mean(0),
        "p_value": p_value,
        "q_value": q_value,
        "fold_importance": fits.without,
    }
    return TaskMaps(
        functions=tasks.functions,
        n_items=tuple(tasks.counts.values()),
        null_max=fits.nulls.amax((0, 2, 3)),
        probe_accuracy=accuracy["probe"],
        probe_low=torch.stack([low for low, _ in bounds]),
        probe_high=torch.stack([high for _, high in bounds]),
        combined_accuracy=accuracy["combined"],
        baseline_accuracy={
            name: tuple(values.tolist()) for name, values in accuracy.items() if name not in fits.predicted
        },
        overall_accuracy=overall,
        wording_held_out=int(design.wordings.max()) > 0,
        exchanged=design.exchanged,
        standing_out=heads,
        overlap=_overlap(heads),
        correlation=torch.stack([rank_correlations(importance, values.expand_as(importance)) for values in importance]),
        stability=stability,
        folds=design.folds,
        **{name: weights.over_all_layers(values) for name, values in maps.items()} | details,
    )


def _standing_out(
    weights: HeadWeights, importance: Float[Tensor, "with_heads head"], q_value: Float[Tensor, "with_heads head"]
) -> tuple[HeadIndex, ...]:
    """Heads that beat shuffled labels at a false discovery rate of 5%, most important first."""
    heads, q = weights.chosen_heads(), q_value.flatten().tolist()
    order = importance.flatten().argsort(descending=True, stable=True).tolist()
    return tuple(heads[place] for place in order if q[place] <= SIGNIFICANT)


def _overlap(heads: Sequence[Sequence[HeadIndex]]) -> Float[Tensor, "function function"]:
    sets = [set(chosen) for chosen in heads]
    return torch.tensor([[len(a & b) / max(1, len(a | b)) for b in sets] for a in sets])


def _by_function(right: Tensor, labels: Int[Tensor, " item"], n_classes: int) -> Float[Tensor, " class"]:
    return torch.stack([right[labels == function].float().mean() for function in range(n_classes)])


def _baselines(tasks: Tasks, design: _Design) -> dict[str, Int[Tensor, " item"]]:
    """What is predicted without heads, on the same cells."""
    labels, n_classes = design.labels, design.n_classes

    def from_words(products: Float[Tensor, "item item"]) -> Int[Tensor, " item"]:
        return recognised(products, labels, design.cells, n_classes, WORD_PENALTY)

    return {
        "format": majority_predictions([item.format for item in tasks.items], labels, design.folds, n_classes),
        "question": from_words(word_products([item.question for item in tasks.items])),
        "words": from_words(design.words),
        "word_pairs": from_words(word_products([_text(item) for item in tasks.items], 2)),
        "decisive": from_words(word_products([item.decisive for item in tasks.items])),
    }
