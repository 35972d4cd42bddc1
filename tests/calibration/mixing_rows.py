"""What compare_attention says of phrasings that do not differ, and how often its intervals hold the truth.

Phrasings are drawn, with replacement, from the frames below: real sentences through the real model. Where nothing is to
be found, both words are the same one.
"""

import itertools
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tl_headmaps import compare_attention
from tl_headmaps.scorers.mixing import (
    difference_of,
    largest_difference_p_values,
    separation_p_value,
    word_correlations,
)
from tl_headmaps.scorers.statistics import other_assignments

from .rows import Bench, Measured, row

OPENINGS = (
    *("In the garden", "On the beach", "Near the river", "After the rain", "In winter", "At night", "In the old town"),
    *("As we know,", "Of course", "Perhaps", "She said that", "We saw that", "Nobody thinks that", "It is true that"),
    *("The book says that", "Yesterday", "Most", "Some", "Only young", "A few small", "These grey", "Many wild"),
)
MIDDLES = ("the birds", "birds sometimes", "birds often")
N = 5
"""Phrasings of each word."""


@cache
def _attention(bench: Bench) -> dict[str, Tensor]:
    """Attention of two words to 'birds' in every frame, frame x head, in layers with heads."""
    found = {}
    words = ("walk", "fly")
    frames = list(itertools.product(OPENINGS, MIDDLES))[:: bench.count(1, 4)]
    phrases = {f"{opening} {middle} {word}": word for word in words for opening, middle in frames}
    result = compare_attention(bench.model, phrases, "birds", n_null=1)
    for word in words:
        chosen = [place for place, phrase in enumerate(result.phrases) if phrase.word == word]
        found[word] = result.attention[chosen].flatten(1).double()
    return found


def _drawn(bench: Bench, words: tuple[str, str], generator: np.random.Generator) -> Tensor:
    pools = [_attention(bench)[word] for word in words]
    return torch.cat([pool[generator.integers(0, len(pool), N)] for pool in pools])


OWN = torch.tensor([True] * N + [False] * N)
MEMBERS = [list(range(N)), list(range(N, 2 * N))]


@row("compare_attention", "p_value", null="phrasings of one word dealt to two")
def largest_differences(bench: Bench) -> Measured:
    """Whether any head is found; each draw is one trial."""
    generator, (deals, _) = bench.generator(), other_assignments(OWN, 2000)
    return Measured.of_p_values(
        float(largest_difference_p_values(_drawn(bench, ("walk", "walk"), generator), OWN, deals).min())
        for _ in range(bench.count(1000, 40))
    )


@row("compare_attention", "separation_p", null="phrasings of one word dealt to two")
def separations(bench: Bench) -> Measured:
    """How often one word seems to be two."""
    generator, (deals, _) = bench.generator(), other_assignments(OWN, 2000)
    return Measured.of_p_values(
        separation_p_value(_drawn(bench, ("walk", "walk"), generator), OWN, deals) for _ in range(bench.count(1000, 40))
    )


@row("compare_attention", "interval_low", "interval_high", null="5 of 66 phrasings of each of two words")
def differences(bench: Bench) -> Measured:
    """All heads of each draw; the truth is the mean over all frames."""
    pools, generator = _attention(bench), bench.generator()
    truth = pools["walk"].mean(0) - pools["fly"].mean(0)
    covered = []
    for _ in range(bench.count(400, 20)):
        difference, half = difference_of(_drawn(bench, ("walk", "fly"), generator), *MEMBERS)
        covered.append((difference - truth).abs() <= half)
    return Measured.of_intervals(torch.stack(covered))


@row("compare_attention", "correlation_low", "correlation_high", null="5 of 66 phrasings of each of two words")
def correlations(bench: Bench) -> Measured:
    """The correlation between the two words; the truth is the mean over all pairs of frames."""
    pools, generator = _attention(bench), bench.generator()
    n = len(pools["walk"])
    every = torch.cat([pools["walk"], pools["fly"]])
    centred = every - every.mean(1, keepdim=True)
    unit = centred / centred.norm(dim=1, keepdim=True)
    truth = float((unit @ unit.mT)[:n, n:].mean())
    covered = []
    for _ in range(bench.count(400, 20)):
        values, half = word_correlations(_drawn(bench, ("walk", "fly"), generator), MEMBERS)
        covered.append(abs(float(values[0, 1]) - truth) <= float(half[0, 1]))
    return Measured.of_intervals(covered)
