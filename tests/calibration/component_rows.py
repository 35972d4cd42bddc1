"""Component maps: do the intervals over documents cover what all documents together say?

The documents of the bundled text are the population; as many are drawn from it with replacement, again and again, and a
map is made of each draw. What the model says of each document is computed once.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from calibration.rows import Bench, Measured, row
from tl_headmaps.capture.components.gradients import component_gradients
from tl_headmaps.capture.components.matrices import ModelComponents
from tl_headmaps.capture.running.text import token_batches
from tl_headmaps.core.types import ATTENTION_COMPONENTS
from tl_headmaps.data.texts import read_texts
from tl_headmaps.scorers.components import METRICS, Estimate, attention_share, over_documents, trend_over_layers
from tl_headmaps.scorers.statistics import jackknife_half_width

LETTERS = 300
"""Of each document: coverage is a matter of how documents differ, and of how many there are."""


@cache
def _population(bench: Bench, name: str, n: int) -> tuple[Tensor, Tensor]:
    """What each document says, [document, component, layer, part], and its weight."""
    source = ModelComponents(bench.model)
    texts = [text[: bench.count(LETTERS, 100)] for text in read_texts()][:n]
    batches = token_batches(texts, source.weights.tokenizer, length=256, max_tokens=10**6)
    assert len(batches.items) == len(texts) == n, "a document is one sequence"
    found = component_gradients(source, batches, METRICS[name].measure, progress=False)
    weights = [float(batch.n_targets) for batch in batches.items]
    return torch.stack([found[component] for component in source.components], 1), torch.tensor(weights)


def _draws(bench: Bench, name: str, share: Any) -> tuple[Estimate, list[Estimate]]:
    """The map of the population, and maps of draws from it."""
    n = bench.count(24, 6)
    values, weights = _population(bench, name, n)
    generator, documents = bench.generator(), torch.arange(n)
    drawn = [torch.from_numpy(generator.integers(0, n, n)) for _ in range(bench.count(300, 20))]
    maps = [over_documents(values[chosen], weights[chosen], documents, share) for chosen in drawn]
    return over_documents(values, weights, documents, share), maps


def _covered(bench: Bench, name: str, share: Any) -> Measured:
    truth, maps = _draws(bench, name, share)
    covered = []
    for found in maps:
        assert found.low is not None and found.high is not None
        covered.append((found.low <= truth.values) & (truth.values <= found.high))
    return Measured.of_intervals(torch.stack(covered))


@row("component_map", "interval_low", "interval_high", null="contribution, documents drawn again")
def contribution_intervals(bench: Bench) -> Measured:
    return _covered(bench, "contribution", "map")


@row("component_map", "interval_low", "interval_high", null="sensitivity, documents drawn again")
def sensitivity_intervals(bench: Bench) -> Measured:
    return _covered(bench, "sensitivity", "map")


@row("component_map", "shift", null="sensitivity, documents drawn again")
def shift_intervals(bench: Bench) -> Measured:
    attention = torch.tensor([name in ATTENTION_COMPONENTS for name in ModelComponents(bench.model).components])

    def trend(cells: Tensor) -> Tensor:
        thirds, slope = trend_over_layers(attention_share(cells, attention))
        return torch.cat([thirds, slope[..., None]], -1)

    population, maps = _draws(bench, "sensitivity", "map")
    truth, covered = trend(population.values), []
    for found in maps:
        assert found.without_each is not None
        covered.append((trend(found.values) - truth).abs() <= jackknife_half_width(trend(found.without_each)))
    return Measured.of_intervals(torch.stack(covered))
