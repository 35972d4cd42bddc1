"""The five documents' figures on one page, each below its description, point by point.

Twice each: from the document's own numbers, and from the default model with the options that are the default.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from every_figure import BLOCKS, COMPONENTS, TOKENS, A, V

from tl_headmaps import (
    AttentionGroups,
    Figure,
    HeadWeights,
    ValueMixing,
    attention_groups,
    component_map,
    load_tasks,
    salient_operations,
    task_maps,
    token_grid,
    value_mixing,
)
from tl_headmaps.cli.demo import method_figure
from tl_headmaps.data.tasks import FUNCTIONS
from tl_headmaps.renderers import component_map as components_of
from tl_headmaps.renderers import panels, save_page  # fmt: skip
from tl_headmaps.renderers import token_grid as grid_of
from tl_headmaps.renderers.listing import table_figure
from tl_headmaps.renderers.tables import Table

LAYERS = (0, 4, 8, 12, 16, 20, 24, 27)
CONTRIBUTIONS = (
    (0.14, 0.18, 0.17, 0.12, 0.14, 0.14, 0.12),
    (0.15, 0.17, 0.16, 0.13, 0.15, 0.15, 0.13),
    (0.16, 0.16, 0.15, 0.14, 0.15, 0.15, 0.14),
    (0.15, 0.14, 0.13, 0.15, 0.15, 0.15, 0.15),
    (0.16, 0.13, 0.12, 0.16, 0.16, 0.16, 0.16),
    (0.17, 0.13, 0.13, 0.17, 0.16, 0.16, 0.17),
    (0.17, 0.13, 0.13, 0.17, 0.16, 0.16, 0.17),
    (0.17, 0.14, 0.14, 0.18, 0.16, 0.16, 0.18),
)
"""Layers by components, as the document lists them."""

SENTENCE = "When Mary and John went to the store, John gave the bread to Mary"


@dataclass(frozen=True)
class Described:
    """One figure of a document: what is said of it, and how it is made twice.

    Attributes:
        name: Which of the document's figures, if there are several.
        points: What the document says of title, axes, ticks, legend, colours and scores.
        own: The figure of its own numbers.
        real: The same of the default model.
    """

    name: str
    points: tuple[tuple[str, str], ...]
    own: Callable[[], Figure]
    real: Callable[[Any], Figure]


@dataclass(frozen=True)
class Document:
    """One document and its figures."""

    name: str
    figures: tuple[Described, ...]


CAPITALS = (["France", "Germany", "Egypt"], ["Cairo", "Paris", "Berlin"])


def capitals() -> Figure:
    values = np.full((3, 3), 0.2)
    values[[0, 1, 2], [1, 2, 0]] = 0.9
    return grid_of(values, *CAPITALS, title="Country to capital", score=0.7)


def names() -> Figure:
    values = np.array([[0.9, 0.2, 0.2], [0.2, 0.9, 0.2]])
    return grid_of(values, ["Tomas", "Donna"], ["tommi", "Don", "Tom"], title="Name variations", score=0.9)


def salient(model: Any) -> Figure:
    """The default model has no head for variations of names; one for those of words is nearest."""
    found = salient_operations(
        model, "L23H8", vocabulary=lambda text: text.strip().isalpha(), n_tokens=6, progress=False
    )
    return found.figure()


def groups() -> Figure:
    blocks = np.array(BLOCKS, dtype=float)
    first, second = np.zeros((5, 5)), np.zeros((5, 5))
    first[:2, :2], second[2:, 2:] = blocks[:2, :2], blocks[2:, 2:]
    heads = [first.tolist(), second.tolist(), second.tolist()]
    found = AttentionGroups.from_pattern(heads, list(TOKENS), drop_sink=False, combine="max")
    return found.figure(names=["Head 0", "Head 1", "Head 2"], labels="top")


def contributions() -> Figure:
    """All 28 layers; those between the ones that the document lists are interpolated."""
    listed = np.array(CONTRIBUTIONS)
    values = np.stack([np.interp(np.arange(28), LAYERS, column) for column in listed.T], axis=1)
    title = "Attention and MLP Layer Contributions"
    limits = (0.12, 0.18)
    return components_of(values, COMPONENTS, title=title, unit="contribution", limits=limits, palette="oranges")


BANDS = {
    "knowledge_recall": (4, 0.0035, 10, 25),
    "retrieval": (6, 0.0038, 0, 30),
    "logical_reasoning": (2, 0.0045, 6, 28),
    "decision_making": (6, 0.0035, 0, 30),
    "semantic_understanding": (3, 0.0038, 0, 30),
    "syntactic_understanding": (1.5, 0.0045, 0, 30),
    "inference": (6, 0.0035, 8, 30),
    "math_calculation": (3, 0.0038, 0, 30),
}
"""Width, peak, first and last layer of the diagonal band that the document sees for each function."""


def functions() -> Figure:
    """Bands of 31 layers by 31 heads, as wide and as sharp as the document says, on a ground of 0.001."""
    across, down = np.meshgrid(np.arange(31), np.arange(31))
    maps = {}
    for name, (wide, high, first, last) in BANDS.items():
        along = (across + down) / 2
        inside = np.clip(np.minimum(along - first, last - along) + 2, 0, 2) / 2
        maps[FUNCTIONS[name]] = 0.001 + (high - 0.001) * inside * np.exp(-(((across - down) / wide) ** 2))
    title = "Layer-wise Attention Analysis"
    return panels(maps, title=title, unit="attention weight", limits=(0, 0.004), origin="lower")


DOCUMENTS = (
    Document(
        "Token grids: a predefined operation (A) and a salient one (B)",
        (
            Described(
                "A",
                (
                    ("title", "Country to capital"),
                    ("rows", "France, Germany, Egypt"),
                    ("columns", "Cairo, Paris, Berlin"),
                    ("colours", "one colour: light where weak, dark where strong"),
                    ("below", "0.7"),
                ),
                capitals,
                lambda model: token_grid(model, "L23H4", *CAPITALS, relation="country_to_capital").figure(),
            ),
            Described(
                "B",
                (
                    ("title", "Name variations"),
                    ("rows", "Tomas, Donna"),
                    ("columns", "tommi, Don, Tom"),
                    ("colours", "one colour: light where weak, dark where strong"),
                    ("below", "0.9"),
                ),
                names,
                salient,
            ),
        ),
    ),
    Document(
        "Heads and the token groups they serve",
        (
            Described(
                "",
                (
                    ("heads", "Head 0 to It, I; Head 1 and Head 2 to is, am, the"),
                    ("rows", "It, I, is, am, the, in the order of the token boxes"),
                    ("columns", "the same, on top"),
                    ("colours", "blue: attention of about 1; dark grey: about 0"),
                    ("below", "two blocks, and no attention between them"),
                ),
                groups,
                lambda model: attention_groups(model, SENTENCE).figure(),
            ),
        ),
    ),
    Document(
        "Attention with a worked-out example",
        (
            Described(
                "",
                (
                    ("title", "Attention with a worked out example"),
                    ("given", "V of Birds, sometimes, walk; A, 3 x 3"),
                    ("Before: the dot product of the two values", "v3 . v1 = 0.05 - 0.02 - 0.12 = -0.09"),
                    (
                        "Attention mixes the values, dimension by dimension",
                        "0.6 * 0.1 + 0.1 * -0.8 + 0.4 * 0.5 = 0.06 - 0.08 + 0.2 = 0.18, and two more dimensions",
                    ),
                    (
                        "After: the dot product with the mixed value",
                        "[0.18, 0.11, 0.01]; 0.018 + 0.022 + 0.003 = 0.043 (there called v3; it is v1; v3 gives 0.075)",
                    ),
                ),
                lambda: ValueMixing.from_arrays(A, V, ["Birds", "sometimes", "walk"]).explain("walk", "Birds").figure(),
                lambda model: value_mixing(model, "But birds sometimes walk", "L13H8", "walk", "birds").figure(),
            ),
        ),
    ),
    Document(
        "Attention and MLP layer contributions",
        (
            Described(
                "",
                (
                    ("title", "Attention and MLP Layer Contributions"),
                    ("columns", "attn.q, attn.k, attn.v, attn.o, mlp.up, mlp.down, mlp.gate"),
                    ("rows", "layers 0 to 27, marked 0, 4, 8, 12, 16, 20, 24, 27"),
                    ("colours", "light blue at 0.12 to dark orange at 0.18, bar on the right"),
                ),
                contributions,
                lambda model: component_map(model, normalise="layer", max_tokens=2000, progress=False).figure(),
            ),
        ),
    ),
    Document(
        "Head importance for eight functions",
        (
            Described(
                "",
                (
                    ("title", "Layer-wise Attention Analysis"),
                    ("maps", "2 x 4: " + ", ".join(FUNCTIONS.values())),
                    ("rows", "Layer, 0 to 30, upwards"),
                    ("columns", "Head, 0 to 30"),
                    ("colours", "dark purple at 0.0000 to yellow at 0.0040+, one bar on the right"),
                ),
                functions,
                lambda model: task_maps(model, load_tasks(), progress=False).figure(origin="lower"),
            ),
        ),
    ),
)


def described_points(points: tuple[tuple[str, str], ...]) -> Figure:
    """What the document says of a figure, as a table beside it."""
    return table_figure(Table([("", "left"), ("the document", "left")], points), title="Point by point", unbroken=False)


def chapters(model: Any) -> dict[str, list[Figure | str]]:
    """Figures of each document, by its name."""
    made: dict[str, list[Figure | str]] = {}
    for document in DOCUMENTS:
        parts = made[document.name] = []
        for described in document.figures:
            parts.append(described_points(described.points))
            for whose, figure in (("its own numbers", described.own()), ("the default model", described.real(model))):
                which = f"{described.name}, from" if described.name else "From"
                parts += [f"{which} {whose}:", figure]
    return made


def write(model: Any, path: Path) -> Path:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    opening = "Each figure twice, below what its document says of it, point by point."
    shown = {"The method that the first of them draws": [opening, method(model)], **chapters(model)}
    return save_page(path, shown, title="The five documents and their figures")


def method(model: Any) -> Figure:
    """The method as one picture, from the head of the README."""
    table = token_grid(model, "L23H4", *CAPITALS, relation="country_to_capital", preset="folded")
    own = salient_operations(model, "L23H4", vocabulary="words", preset="folded", progress=False)
    return method_figure(table, own, HeadWeights.of(model).n_heads)
