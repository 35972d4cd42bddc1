"""One of every figure, with awkward but realistic values; shared by the tests that open, print and run them."""

from functools import cache

import numpy as np

from tl_headmaps.renderers import (
    Equation,
    ExampleMatrix,
    ExampleStep,
    Figure,
    Line,
    MapLayer,
    attention_view,
    beside,
    component_map,
    curve,
    flow,
    head_map,
    panels,
    scatter,
    sketch,
    token_grid,
    token_groups_view,
    top_tokens_view,
    worked_example,
)
from tl_headmaps.renderers.formulas import Product, Sum, Symbol

FUNCTIONS = (
    "Knowledge recall",
    "Retrieval",
    "Logical reasoning",
    "Decision-making",
    "Semantic understanding",
    "Syntactic understanding",
    "Inference",
    "Math calculation",
)
COMPONENTS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down", "mlp.gate")
TOKENS = ("It", "I", "is", "am", "the")
BLOCKS = ((1, 1, 0, 0, 0), (1, 1, 0, 0, 0), (0, 0, 1, 1, 1), (0, 0, 1, 1, 1), (0, 0, 1, 1, 1))
V = ((0.1, 0.2, 0.3), (-0.8, 0.3, -0.1), (0.5, -0.1, -0.4))
A = ((1, 0, 0), (0.1, 0.9, 0), (0.6, 0.1, 0.4))


@cache
def every_figure() -> dict[str, Figure]:
    random = np.random.default_rng(0)
    scores = random.beta(0.4, 6, (30, 9))
    scores[3, 4], scores[10:12] = np.nan, np.nan
    return {
        "head_map": head_map(
            [
                MapLayer("country_to_capital", scores, null=scores / 10, interval=(scores * 0.8, scores * 1.2)),
                MapLayer("name_copying", scores[::-1] ** 2),
            ],
            title="Relation scores",
            unit="share of pairs",
            switches=("relation", "direction"),
            drill={"L23H4": {"salient tokens": [["France", "Paris"], ["<s>", "שלום"]]}},
        ),
        "signed_map": head_map(random.normal(size=(12, 12)), title="Change of the logit", unit="logit"),
        "ragged_map": head_map([[0.1, 0.2, 0.3], [0.5], [0.3, 0.4]], title="Layers with different numbers of heads"),
        "panels": panels(
            {name: random.gamma(1, 0.001, (32, 32)) for name in FUNCTIONS},
            title="Head importance for eight cognitive functions",
            unit="share of all importance",
            limits=(0, 0.004),
        ),
        "component_map": component_map(
            {"contribution": random.normal(0.15, 0.01, (28, 7)), "spectral norm": random.gamma(3, 1, (28, 7))},
            COMPONENTS,
            title="Contribution of components",
            unit="share",
        ),
        "token_grid": token_grid(
            [[63.48, 221.11, 34.47], [15.76, 66.98, 191.52], [178.65, -15.15, 4.17]],
            ["France", "Germany", "Egypt"],
            ["Cairo", "Paris", "Berlin"],
            title="L23H4: country to capital",
            unit="entry of the map",
            details={"rank among 49,152 tokens": [[2133, 2, 7928], [15133, 1420, 8], [6, 33776, 22127]]},
            score=0.7,
        ),
        "large_grid": token_grid(
            random.normal(size=(40, 60)),
            [f"source {i}" for i in range(40)],
            [f"a rather long target {i}" for i in range(60)],
            title="Forty sources by sixty targets",
        ),
        "flow": flow(
            TOKENS,
            {"Head 0": [([0, 1], 1.0)], "Head 1": [([2, 3, 4], 1.0)], "Head 2": [([2, 3, 4], 0.6)]},
            matrix=BLOCKS,
            unit="attention",
        ),
        "worked_example": worked_example(
            [
                ExampleStep("Each token has a value vector.", [ExampleMatrix("V", V, ["Birds", "sometimes", "walk"])]),
                ExampleStep("The head attends with", [ExampleMatrix("A", A, ["Birds", "sometimes", "walk"])]),
                ExampleStep(
                    "So walk now holds",
                    [ExampleMatrix("v̂₃", [[0.18, 0.11, 0.01]], ["walk"])],
                    [
                        Equation(Symbol("v", 3, 1, hat=True), Sum(Product(0.6, 0.1), Product(0.1, -0.8)), -0.02),
                        Equation(Product(Symbol("v", 3), Symbol("v", 1), sign="dot"), -0.09, "tiny <b>", 1.17e-5),
                    ],
                ),
            ],
            title="Attention with a worked-out example",
        ),
        "curve": curve(
            np.arange(11),
            [
                Line("relation heads", 0.9 * np.exp(-np.arange(11) / 3)),
                Line("random heads", np.full(11, 0.88), np.full(11, 0.82), np.full(11, 0.92)),
                Line("control relations", np.linspace(0.9, 0.8, 11), np.linspace(0.85, 0.7, 11), np.full(11, 0.91)),
            ],
            title="Accuracy as heads are ablated",
            x_name="heads ablated",
            y_name="accuracy",
        ),
        "scatter": scatter(
            scores,
            np.clip(scores + random.normal(0, 0.04, scores.shape), 0, 1),
            title="Static against dynamic score",
            x_name="static score",
            y_name="dynamic score",
            diagonal=True,
            drill={"L23H4": {"salient tokens": [["France", "Paris"]]}},
        ),
        "attention": attention_view(
            np.tril(random.random((20, 9, 9))),
            ["The", " capital", " of", " France", " is", " Paris", "<s>", ".", "\n"],
            heads=[(layer, head) for layer in (22, 23) for head in range(10)],
        ),
        "token_groups": token_groups_view(TOKENS, [0, 0, 1, 1, 1], names=["It, I", "is, am, the"]),
        "sketch": sketch(layer=23, head=4, n_heads=9, n_vocab=49152, windows=[("A", np.eye(3)), ("B", BLOCKS)]),
        "beside": beside(
            [
                sketch(layer=0, head=0, n_heads=1, n_vocab=61, windows=[("A", [[0.5, np.nan]])]),
                token_grid(np.eye(2), ["a", "b"], ["c", "d"], title="A", score=0.7),
                token_grid(np.eye(2), ["e", "f"], ["g", "h"], title="B", score=0.9),
            ],
            title="The method and two windows",
            text="The method: a layer, its map, and the windows A and B.",
        ),
        "top_tokens": top_tokens_view(
            {
                f"L{layer}H{head}": [(f"token{layer}{head}{i}", 1 - i / 5) for i in range(5)]
                for layer in (22, 23)
                for head in range(9)
            }
        ),
    }
