"""The five documents' figures on one page, each beside its description, point by point.

Twice each: from the document's own numbers, and from the default model with the options that are the default. What a
figure has (title, axes, ticks, colours, legend, notes) is read from what was drawn, not written down here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from every_figure import BLOCKS, COMPONENTS, FUNCTIONS, TOKENS, A, V

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
from tl_headmaps.analyses.tour.opening import method_figure
from tl_headmaps.renderers import component_map as components_of
from tl_headmaps.renderers import panels  # fmt: skip
from tl_headmaps.renderers import token_grid as grid_of
from tl_headmaps.renderers.colours import Scale
from tl_headmaps.renderers.example import Example
from tl_headmaps.renderers.flowchart import OFF, ON, Flow
from tl_headmaps.renderers.formulas import TEXT
from tl_headmaps.renderers.grids import Axis, Heat
from tl_headmaps.renderers.listing import Beside, table_figure
from tl_headmaps.renderers.story import Chapter, Lead, Part, save_story

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
class Document:
    """One document: what it describes, and how its figure is made twice.

    Attributes:
        name: What it shows.
        points: What the document says of title, axes, ticks, legend, colours and scores.
        own: The figures of its own numbers.
        real: The same of the default model.
    """

    name: str
    points: tuple[tuple[str, str], ...]
    own: Callable[[], dict[str, Figure]]
    real: Callable[[Any], dict[str, Figure]]


def grids() -> dict[str, Figure]:
    capitals = np.full((3, 3), 0.2)
    capitals[[0, 1, 2], [1, 2, 0]] = 0.9
    names = np.array([[0.9, 0.2, 0.2], [0.2, 0.9, 0.2]])
    countries, cities = ["France", "Germany", "Egypt"], ["Cairo", "Paris", "Berlin"]
    return {
        "A": grid_of(capitals, countries, cities, title="Country to capital", score=0.7),
        "B": grid_of(names, ["Tomas", "Donna"], ["tommi", "Don", "Tom"], title="Name variations", score=0.9),
    }


def real_grids(model: Any) -> dict[str, Figure]:
    words = (["France", "Germany", "Egypt"], ["Cairo", "Paris", "Berlin"])
    return {
        "A": token_grid(model, "L23H4", *words, relation="country_to_capital").figure(),
        "B": salient_operations(model, "L23H2", vocabulary="words", n_tokens=6).figure(),
    }


def groups() -> dict[str, Figure]:
    blocks = np.array(BLOCKS, dtype=float)
    first, second = np.zeros((5, 5)), np.zeros((5, 5))
    first[:2, :2], second[2:, 2:] = blocks[:2, :2], blocks[2:, 2:]
    heads = [first.tolist(), second.tolist(), second.tolist()]
    found = AttentionGroups.from_pattern(heads, list(TOKENS), drop_sink=False, combine="max")
    return {"": found.figure(names=["Head 0", "Head 1", "Head 2"], labels="top")}


def contributions() -> dict[str, Figure]:
    title = "Attention and MLP layer contributions"
    return {
        "": components_of(
            CONTRIBUTIONS,
            COMPONENTS,
            title=title,
            unit="contribution",
            limits=(0.12, 0.18),
            palette="oranges",
            row_labels=LAYERS,
        )
    }


def functions() -> dict[str, Figure]:
    """A diagonal band of 31 layers by 31 heads, as wide and as sharp as the document says of each function."""
    width = (4, 6, 2, 6, 3, 1.5, 6, 3)
    peak = (0.0035, 0.0038, 0.0045, 0.0035, 0.0038, 0.0045, 0.0035, 0.0038)
    across, down = np.meshgrid(np.arange(31), np.arange(31))
    maps = {
        name: 0.001 + (high - 0.001) * np.exp(-(((across - down) / wide) ** 2))
        for name, wide, high in zip(FUNCTIONS, width, peak, strict=True)
    }
    title = "Layer-wise attention analysis"
    return {"": panels(maps, title=title, unit="share of all importance", limits=(0, 0.004), origin="lower")}


DOCUMENTS = (
    Document(
        "Token grids: a predefined operation (A) and a salient one (B)",
        (
            ("title", "A: Country to capital; B: Name variations"),
            ("rows", "A: France, Germany, Egypt; B: Tomas, Donna"),
            ("columns", "A: Cairo, Paris, Berlin; B: tommi, Don, Tom"),
            ("colours", "one colour, light where weak and dark where strong"),
            ("below", "0.7 below A, 0.9 below B"),
        ),
        grids,
        real_grids,
    ),
    Document(
        "Heads and the token groups they serve",
        (
            ("heads", "Head 0 to It, I; Head 1 and Head 2 to is, am, the"),
            ("rows", "5 x 5 matrix, rows and columns It, I, is, am, the; column labels on top"),
            ("colours", "blue: attention of about 1; dark grey: about 0"),
            ("below", "two blocks, and no attention between them"),
        ),
        groups,
        lambda model: {"": attention_groups(model, SENTENCE).figure()},
    ),
    Document(
        "Attention with a worked-out example",
        (
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
        lambda: {"": ValueMixing.from_arrays(A, V, ["Birds", "sometimes", "walk"]).explain("walk", "Birds").figure()},
        lambda model: {"": value_mixing(model, "But birds sometimes walk", "L13H8", "walk", "birds").figure()},
    ),
    Document(
        "Attention and MLP layer contributions",
        (
            ("title", "Attention and MLP Layer Contributions"),
            ("columns", "attn.q, attn.k, attn.v, attn.o, mlp.up, mlp.down, mlp.gate"),
            ("rows", "layers 0 to 27, marked 0, 4, 8, ..., 24, 27"),
            ("colours", "light blue at 0.12 to dark orange at 0.18, bar on the right"),
        ),
        contributions,
        lambda model: {"": component_map(model, normalise="layer", max_tokens=2000, progress=False).figure()},
    ),
    Document(
        "Head importance for eight functions",
        (
            ("maps", "2 x 4: " + ", ".join(FUNCTIONS)),
            ("rows", "Head and Layer, each 0 to 30"),
            ("colours", "one bar, dark purple at 0.0000 to yellow at 0.0040+"),
        ),
        functions,
        lambda model: {"": task_maps(model, load_tasks().sample(30), progress=False).figure(origin="lower")},
    ),
)


def seen(figure: Figure) -> list[tuple[str, str]]:
    """What was drawn, in words."""
    data = figure.data
    told = [("title", figure.title)]
    if isinstance(data, Flow):
        told += [
            ("heads", f"{head} to {', '.join(data.tokens[row] for tokens, _ in links for row in tokens)}")
            for head, links in data.heads
        ]
        told += [("rows", ", ".join(data.tokens)), ("columns", f"labels at the {data.labels}")]
        two = f"{ON} at 1, {OFF} at 0"
        told += [("colours", two if data.is_binary else "" if data.scale is None else _colours(data.scale))]
    if isinstance(data, Beside):
        data = data.parts[0]
    if isinstance(data, Heat):
        scales = list(dict.fromkeys(layer.scale for layer in data.layers))
        told += [("maps", ", ".join(layer.name for layer in data.layers if layer.name))]
        told += [("rows", _axis(data.rows)), ("columns", _axis(data.columns))]
        told += [("colours", _colours(scale)) for scale in scales]
    if isinstance(data, Example):
        shown = [
            f"{TEXT.term(matrix.name)}, {' x '.join(map(str, matrix.values.shape))}"
            for step in data.steps
            for matrix in step.matrices
        ]
        told += [("given", "; ".join(shown))]
        told += [
            (step.text, "; ".join(" ".join(TEXT.equation(each).split()) for each in step.equations)[:400])
            for step in data.steps
            if step.equations
        ]
    told.append(("below", getattr(data, "note", "")))
    return [(what, text) for what, text in told if text]


def _colours(scale: Scale) -> str:
    low, _, high = (text for _, text in scale.ticks)
    return f"#{scale.colours[0]} at {low} to #{scale.colours[-1]} at {high}, {scale.unit}"


def _axis(axis: Axis) -> str:
    labels = axis.labels or tuple(map(str, range(axis.n)))
    shown = ", ".join(labels) if len(labels) <= 12 else f"{labels[0]} to {labels[-1]}"
    return f"{axis.name}: {shown}"


def compared(points: tuple[tuple[str, str], ...], figure: Figure) -> Figure:
    """The document and the figure, point by point."""
    here = seen(figure)
    names = dict.fromkeys([name for name, _ in points] + [name for name, _ in here])
    rows = [
        [name, *("; ".join(text for own, text in told if own == name) for told in (points, here))] for name in names
    ]
    return table_figure(["", "the document", "here"], rows, title="Point by point")


def chapters(model: Any) -> list[Chapter]:
    """A chapter for each document."""
    made = []
    for document in DOCUMENTS:
        parts = []
        for whose, figures in (("its own numbers", document.own()), ("the default model", document.real(model))):
            for name, figure in figures.items():
                parts.append(Part(f"From {whose}" + (f", {name}" if name else ""), figure))
                parts.append(Part("Beside it", compared(document.points, figure)))
        made.append(Chapter(document.name, "", parts, columns=True))
    return made


def write(model: Any, path: Path) -> Path:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    opening = "Each figure twice, beside what its document says of it, point by point."
    invites = "The method that the first of them draws. The page is made by"
    lead = Lead((), invites, "make gallery", method(model))
    return save_story(path, "The five documents and their figures", opening, chapters(model), lead=lead)


def method(model: Any) -> Figure:
    """The method as one picture, from the head of the README."""
    words = (["France", "Germany", "Egypt"], ["Cairo", "Paris", "Berlin"])
    table = token_grid(model, "L23H4", *words, relation="country_to_capital", preset="folded")
    salient = salient_operations(model, "L23H4", vocabulary="words", preset="folded", progress=False)
    return method_figure(table, salient, HeadWeights.of(model).n_heads)
