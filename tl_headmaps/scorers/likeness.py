"""Which pairs of a relation are alike, so that they are not counted as if each had come out on its own.

Two sources are alike when they may be forms of one word (they share a stem) or when the cosine of their embeddings is
above 0.2, the mean of the relation's sources taken off: without that, all countries are alike. The threshold was chosen
on heads that know nothing (W_O turned inside d_head): at 0.3 relations such as name to he/she still have small p-values
too often, at 0.2 not (``tests/calibration``).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..capture.weights import HeadWeights
from ..core.vocabulary import TokenLike, stems
from ..data.relations import Encoded
from .relation import PairGroups
from .statistics import clusters_of

ALIKE_COSINE = 0.2
"""Cosine of two sources' embeddings, less their mean, above which they are alike."""

_BLOCK = 1024


def alike_pairs(weights: HeadWeights, encoded: Sequence[Encoded]) -> PairGroups:
    """Units, clusters and wrong targets of the pairs of several relations, one after the other."""
    parts = []
    for entry in encoded:
        sources, targets = (torch.tensor(ids, device="cpu") for ids in (entry.source_ids, entry.target_ids))
        embedded = weights.embedded(sources.to(weights.device)).cpu()
        directions = torch.nn.functional.normalize(embedded - embedded.mean(0), dim=-1)
        kin = [_stems(entry.relation.pairs[number][0]) for number in entry.kept]
        keys = [(("target", target), *stem) for target, stem in zip(entry.target_ids, kin, strict=True)]
        same_stem = clusters_of(
            [(("source", source), *stem) for source, stem in zip(entry.source_ids, kin, strict=True)]
        )
        unit = _units(targets, same_stem, directions)
        parts.append((unit, clusters_of(keys), _wrong_targets(sources, targets, directions)))
    units, clusters, neighbours = (torch.cat(part) for part in zip(*parts, strict=True))
    return PairGroups(units, clusters, neighbours)


def _stems(word: TokenLike) -> list[tuple[str, str]]:
    return [("stem", stem) for stem in sorted(stems(word.strip().casefold()))] if isinstance(word, str) else []


def _units(
    targets: Int[Tensor, " pair"], same_stem: Int[Tensor, " pair"], directions: Float[Tensor, "pair d_model"]
) -> Int[Tensor, " pair"]:
    """Number of each pair's unit: the same target and alike sources, or sources linked through others."""
    label = torch.arange(len(targets), device="cpu")
    for target in targets.unique():
        own = (targets == target).nonzero()[:, 0]
        linked = directions[own] @ directions[own].T > ALIKE_COSINE
        linked |= same_stem[own, None] == same_stem[own]
        label[own] = own[_first_linked(linked)]
    numbers: Tensor = label.unique(return_inverse=True)[1]
    return numbers


def _first_linked(linked: Bool[Tensor, "item item"]) -> Int[Tensor, " item"]:
    """The first item of each item's connected component."""
    n = len(linked)
    label = torch.arange(n, device="cpu")
    while True:
        reached = torch.where(linked, label, n).amin(1).minimum(label)
        if torch.equal(reached, label):
            return label
        label = reached


def _wrong_targets(
    sources: Int[Tensor, " pair"], targets: Int[Tensor, " pair"], directions: Float[Tensor, "pair d_model"]
) -> Int[Tensor, " pair"]:
    """Target of the most similar source that has another one; -1 where there is none."""
    _, source = sources.unique(return_inverse=True)
    _, target = targets.unique(return_inverse=True)
    right = torch.zeros(int(source.max()) + 1, int(target.max()) + 1, dtype=torch.bool, device="cpu")
    right[source, target] = True
    neighbours = []
    for rows in torch.arange(len(sources), device="cpu").split(_BLOCK):
        likeness = directions[rows] @ directions.T
        # A target that is right for the source as well is no wrong one.
        likeness[right[source[rows]][:, target]] = -torch.inf
        best, place = likeness.max(1)
        neighbours.append(torch.where(best > -torch.inf, targets[place], -1))
    return torch.cat(neighbours)
