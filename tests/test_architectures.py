"""Every decoder architecture that TransformerLens boots: equal to the model's own account of itself, or refused.

``python tests/test_architectures.py`` writes what was found into ``tests/architectures.md``; the tests compare with it.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, HOOKED, N_VOCAB, Architecture, Dense, Running, booted
from planted import TL_MAJOR, needs_hooked, word
from torch import Tensor

from tl_headmaps import (
    ContextVectors,
    HeadIndex,
    HeadWeights,
    Relation,
    ablate,
    component_map,
    relation_scores,
    salient_operations,
    token_grid,
    value_mixing,
)
from tl_headmaps.capture.checkpoint.architectures import ARCHITECTURES as CHECKPOINTS
from tl_headmaps.capture.running.ablated import run_replacing_each
from tl_headmaps.capture.running.activations import Edit, PromptBatch, run
from tl_headmaps.core.errors import HeadMapsError, UnsupportedModelError

pytestmark = pytest.mark.usefixtures("one_thread")

needs_bridge = pytest.mark.skipif(TL_MAJOR < 4, reason="the table is of TransformerLens 4; run make test")

TABLE = Path(__file__).parent / "architectures.md"

SAME = 1e-3
"""Relative difference that is rounding: maps of a processed model are folded and centred once more."""

SOME, OTHERS = list(range(3, 12)), list(range(20, 40))
TEXT = [5, 3, 7, 9, 4, 3, 11]
PROMPT = [12, 3, 8]


class WrongError(AssertionError):
    """Numbers that differ from the model's own."""


def assert_same(name: str, one: Tensor, other: Tensor) -> None:
    difference = float((one - other).abs().max() / other.abs().max().clamp_min(1e-12))
    if not difference < SAME:
        raise WrongError(f"{name}: differs by {difference:.2g}")


@lru_cache(maxsize=1)
def dense_of(name: str) -> Dense:
    return Dense(next(row for row in ARCHITECTURES if row.name == name))


@lru_cache(maxsize=1)
def running_of(name: str) -> Running:
    return Running(next(row for row in ARCHITECTURES if row.name == name))


def mapped(weights: HeadWeights) -> list[int]:
    """Layers with heads that can be mapped from the weights alone."""
    return [layer for layer in weights.layers_with_heads if layer == 0 or weights.mlp_refusal is None]


def check_ov(model: Any, weights: HeadWeights, row: Architecture, dense: Dense) -> None:
    for layer in mapped(weights):
        heads = range(weights.shape(layer).n_heads)
        grids = [token_grid(weights, (layer, head), SOME, OTHERS, preset="folded") for head in heads]
        expected = dense.ov(layer)[:, SOME][..., OTHERS]
        ours = torch.stack([grid.values for grid in grids])
        if row.free_scale:
            ours, expected = (x / x.norm(dim=(0, 2), keepdim=True) for x in (ours, expected))
        assert_same(f"OV of layer {layer}", ours, expected)


def check_qk(model: Any, weights: HeadWeights, row: Architecture, dense: Dense) -> None:
    tokens = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 3, 10, 4], [5, 7, 9, 11, 10]])
    for layer in mapped(weights):
        token_grid(weights, (layer, 0), SOME, SOME, circuit="qk", preset="folded")
        expected = dense.preferences(layer, tokens)
        for head in range(weights.shape(layer).n_heads):
            grid = token_grid(weights, (layer, head), SOME, SOME, circuit="qk", preset="folded").values
            ours = torch.stack([grid[sequence][:, sequence] for sequence in tokens - SOME[0]])
            if dense.score_cap is not None:
                ours = dense.score_cap * torch.tanh(ours / dense.score_cap)
            ours = ours - ours.diagonal(dim1=-2, dim2=-1)[..., None]
            ours, theirs = (x.tril()[:, 1:] for x in (ours, expected[:, head]))
            # What a position alone adds (ALiBi) is the same in all sequences.
            assert_same(f"QK of layer {layer}", ours - ours.mean(0), theirs - theirs.mean(0))


def check_scores(model: Any, weights: HeadWeights, row: Architecture, dense: Dense) -> None:
    """Relation scores are ranks of the same map, salience is the size of what is written."""
    layers = mapped(weights)
    pairs = [(token, (token * 7) % 50 + 3) for token in SOME]
    heads = [(layer, head) for layer in layers for head in range(weights.shape(layer).n_heads)]
    own = Relation.from_pairs("own", pairs)
    found = relation_scores(weights, own, heads=heads, k=10, progress=False, preset="folded")
    operations = salient_operations(weights, heads, n_tokens=6, n_targets=1, progress=False)
    sources, targets = torch.tensor(pairs).T
    for layer in layers:
        maps, written = dense.ov(layer), dense.written(layer)
        entry = maps[:, sources, targets][..., None]
        expected = ((maps[:, sources] > entry).sum(-1) < 10).float().mean(-1)
        assert_same(f"relation scores of layer {layer}", found.promote[0, layer, : len(expected)], expected)
        assert bool(found.promote[0, layer, len(expected) :].isnan().all())
        sizes = dense.sizes(written) / dense.read_size(layer)
        if not row.free_scale:
            own = [number for number, head in enumerate(operations.heads) if head.layer == layer]
            ids, salience = operations.token_ids[own], operations.salience[own]
            assert_same(f"salience of layer {layer}", salience, sizes.gather(1, ids))
            assert_same(f"order of layer {layer}", salience, sizes.topk(6).values)


def check_mixing(model: Any, weights: HeadWeights, row: Architecture, dense: Dense) -> None:
    running = running_of(row.name)
    heads = {n: weights.shape(n).n_heads - 1 - n for n in weights.layers_with_heads}
    found = {n: value_mixing(model, TEXT, (n, head)) for n, head in heads.items()}
    patterns, outputs = running.heads(TEXT)
    for layer, mixing in found.items():
        head = heads[layer]
        assert_same(f"pattern of layer {layer}", mixing.pattern, patterns[layer][head])
        mixed = mixing.pattern @ mixing.value_vectors
        if row.mixer and row.gate != 1:
            mixed = mixed * running.gates(TEXT)[layer][head]
        assert_same(f"mixed values of layer {layer}", mixed, outputs[layer][head])


def check_ablation(model: Any, weights: HeadWeights, row: Architecture, dense: Dense) -> None:
    running = running_of(row.name)
    prompts = torch.tensor([[12, token] for token in range(3, N_VOCAB)])
    answers = running.next_tokens(prompts, ())
    usable = (answers > 2) & (answers != prompts[:, 1])
    prompts, answers = prompts[usable], answers[usable]
    pairs = [(word(token), word(answer)) for (_, token), answer in zip(prompts.tolist(), answers.tolist(), strict=True)]
    relation = Relation.from_pairs("own", pairs, k=1, eliciting_templates=(" word12 <X>",))
    # Heads are listed with their scores from the weights, which some models have in layer 0 only.
    first, last = (mapped(weights) or weights.layers_with_heads)[0], (mapped(weights) or weights.layers_with_heads)[-1]
    heads = [(first, 1), (last, 2), (last, 0)]
    curves = ablate(
        model,
        relation,
        heads,
        controls=None,
        n_random=0,
        method="zero",
        prepend_bos=False,
        progress=False,
        preset="folded",
    )
    expected = [(running.next_tokens(prompts, heads[:n]) == answers).float().mean() for n in range(4)]
    assert_same("ablation", curves.values.float(), torch.stack(expected))
    check_without_each(model, weights, [HeadIndex(*head) for head in heads])


def check_without_each(model: Any, weights: HeadWeights, heads: list[HeadIndex]) -> None:
    """Runs that begin at the layer of a head, against whole passes."""
    shapes = {head.layer: weights.shape(head.layer) for head in heads}
    zero = {layer: torch.zeros(shape.n_heads, shape.d_head) for layer, shape in shapes.items()}
    found: list[Tensor] = []
    run_replacing_each(model, [TEXT], heads, zero, lambda number, logits, batch: found.append(logits))
    for head, logits in zip([None, *heads], found, strict=True):

        def edit(z: Tensor, batch: PromptBatch, head: HeadIndex | None = head) -> Tensor:
            z = z.clone()
            if head is not None:
                z[:, :, head.head] = 0
            return z

        edits: dict[Any, Edit] = {(layer, "z"): edit for layer in ([] if head is None else [head.layer])}
        run(
            model,
            [TEXT],
            edit=edits,
            logits=lambda whole, batch, logits=logits: assert_same("runs from a layer on", logits, whole),
        )


UNCENTRED = ("xglm", "modernbert-decoder", "nemotron")
"""Models whose output matrices TransformerLens does not centre, though their final norm does."""


def check_components(model: Any, weights: HeadWeights, row: Architecture, dense: Dense) -> None:
    found = component_map(model, "frobenius")
    place = list(found.components).index("attn.o")
    centred = weights.basis != "raw" and row.name not in UNCENTRED
    outputs = [dense.output_matrix(layer, centred) for layer in dense.with_heads]
    expected = torch.stack([output.norm() for output in outputs])
    assert_same("attn.o", found.values[dense.with_heads, place].float(), expected)
    others = [layer for layer in range(weights.n_layers) if layer not in dense.with_heads]
    assert bool(found.values[others, place].isnan().all())


CHECKS: dict[str, Callable[[Any, HeadWeights, Architecture, Dense], None]] = {
    "OV maps": check_ov,
    "QK maps": check_qk,
    "scores, salience": check_scores,
    "value mixing": check_mixing,
    "ablation": check_ablation,
    "components": check_components,
}


def outcomes(row: Architecture, processed: bool, host: str = "bridge") -> dict[str, str]:
    """For each analysis ``""`` if it is right, or the sentence it is refused with; anything else raises."""
    try:
        model = booted(row, processed=processed, host=host)
        weights = HeadWeights.from_model(model)
    except HeadMapsError as error:
        return dict.fromkeys(CHECKS, str(error))
    except RuntimeError as error:
        if not processed or not any(words in str(error) for words in _NO_SUCH_MODEL):
            raise
        # The row says what the raw one gives.
        return outcomes(row, processed=False)
    dense = dense_of(row.name)
    found = {}
    for name, check in CHECKS.items():
        try:
            check(model, weights, row, dense)
            whole = weights.mlp_refusal is None or name in _OF_THE_RUN
            found[name] = "" if whole else weights.mlp_refusal
        except HeadMapsError as error:
            found[name] = str(error)
    return found


_NO_SUCH_MODEL = ("does not support compatibility mode", "must match the size of tensor")
"""What TransformerLens says where it cannot process weights: it refuses to, or (Falcon-H1) breaks off."""

_OF_THE_RUN = ("value mixing", "ablation", "components")


def line(row: Architecture) -> str:
    """The row of the table, from running everything."""
    raw, processed = outcomes(row, processed=False), outcomes(row, processed=True)
    cells, reasons = [], []
    for name in CHECKS:
        shown = [_cell(found[name]) for found in (raw, processed)]
        cells.append(shown[0] if shown[0] == shown[1] else f"{shown[0]} (processed: {shown[1]})")
        reasons += [_reason(found[name]) for found in (raw, processed) if found[name]]
    read = "yes" if row.model_type in CHECKPOINTS else "no"
    return f"| {row.name} | {' | '.join(cells)} | {read} | {'; '.join(dict.fromkeys(reasons))} |"


def _cell(sentence: str) -> str:
    if "by_head=True" in sentence:
        return "by head"
    if sentence.startswith("its "):
        return "layer 0"
    return "refused" if sentence else "yes"


REASONS = {
    r"biases of its values were added up": "processed: value biases were moved into the output bias",
    r"processed, and it has (.*?): processing then": "processed, with {}: no longer the same model",
    r"the seam '([^']+)' .*: it (?:cannot be seen|differs)": "seam '{}' does not fit",
    r"is not its pattern times its values": "what heads mix is gated or normed before W_O",
    r"first MLP is a MoEBridge|The MLP of layer \d is a MoEBridge": "mixture of experts",
    r"add an embedding of the token beside": "layers add an embedding of the token beside their MLP",
    r"has latent attention": "latent attention",
    r"after each MLP \(post-norm\)": "norms of the whole stream after attention and MLP (post-norm)",
    r"between its stream and its unembedding": "an activation function between stream and unembedding",
    r"in TransformerLens differs from that": "TransformerLens computes other attention than transformers",
    r"keys without a scale": "TransformerLens computes other attention than transformers",
    r"has no attention heads that TransformerLens shows": "no attention heads of the known kind",
    r"write into an MLP, not into the stream": "heads write into an MLP, not into the stream",
    r"it fits up to a gate": "what heads mix is gated or normed before W_O",
    r"is not a decoder-only language model": "no single stack of blocks",
    r"first MLP does not compute act": "first MLP is not act(x W_in) W_out",
    r"its activation function '(\w+)' is not known": "activation function {}",
}
"""What the table says for a sentence; a new sentence must be added here."""


def _reason(sentence: str) -> str:
    for pattern, words in REASONS.items():
        found = re.search(pattern, sentence)
        if found:
            return words.format(*found.groups())
    raise AssertionError(f"Say in REASONS what the table calls this refusal: {sentence}")


HEADER = f"""# Architectures

What is right, checked against the transformers model's own forward pass, for small random models of every decoder that
TransformerLens 4 boots, opened as `load_model` opens them; raw weights and, where they differ, weights in compatibility
mode ("processed"). "layer 0" is for models whose first MLP cannot be computed for a token alone (a mixture of experts,
for example): maps from the weights alone stop at layer 0, and `preset="context"` goes on. "by head" is for maps of
attention components alone, "checkpoint" for families that `HeadWeights.from_checkpoint` reads without building the
model. Heads that differ between layers, and hybrids, with attention in some layers only, are at the end. Not in this
table, but tested on other small models: `preset="maps"` and `"context"`, `validate`, `head_trust`. Written by
`python tests/test_architectures.py`.

| architecture | {" | ".join(CHECKS)} | checkpoint | why not |
|{"---|" * (len(CHECKS) + 3)}
"""


@needs_bridge
@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
def test_equal_to_the_model_itself_or_refused(row: Architecture) -> None:
    assert line(row) in TABLE.read_text(encoding="utf-8").splitlines(), "run python tests/test_architectures.py"


def test_the_table_has_these_rows() -> None:
    rows = TABLE.read_text(encoding="utf-8").removeprefix(HEADER).splitlines()
    assert [text.split(" | ")[0].removeprefix("| ") for text in rows] == [row.name for row in ARCHITECTURES]
    assert len(rows) >= 60


@needs_bridge
@pytest.mark.parametrize("name", ["afmoe", "laguna"])
def test_a_gate_is_said_in_the_result(name: str) -> None:
    model = booted(next(row for row in ARCHITECTURES if row.name == name))
    grid = token_grid(model, "L0H1", [3, 4], [5, 6], preset="folded")
    assert grid.provenance.seams["mixing"] == "fits up to a gate that depends on the query"
    line = "OV maps, their scores and the values shown here are right only up to it."
    assert str(grid).endswith(line)
    operations = salient_operations(model, "L0H1", n_tokens=3, n_targets=2, progress=False)
    scores = relation_scores(model, Relation.from_pairs("own", [(3, 4)]), heads="L0H1", progress=False, preset="folded")
    assert line in str(operations) and str(scores).endswith(line)
    assert line not in str(token_grid(model, "L0H1", [3, 4], [5, 6], circuit="qk", preset="folded"))


@needs_bridge
def test_a_model_that_keeps_no_keys_is_refused_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-1 gives back no cache to run many sources behind one prompt; the sources still meet it, in whole passes."""
    monkeypatch.setenv("TL_HEADMAPS_CACHE", str(tmp_path))
    model = booted(next(row for row in ARCHITECTURES if row.name == "openai-gpt"))
    relation = Relation.from_pairs("own", [(word(3), word(4))])
    with pytest.raises(
        UnsupportedModelError, match=r"post-norm.*: OV maps are not defined for it. Analyses of the run"
    ):
        relation_scores(model, relation, prompts=[" word5"], prepend_bos=False, progress=False)


@needs_bridge
def test_scores_behind_one_prompt_are_of_clipped_values(tmp_path: Path) -> None:
    """In layer 0 of a rotary model every prompt gives the same vectors, so the same score as their mean."""
    read = HeadWeights.from_model(booted(next(row for row in ARCHITECTURES if row.name == "olmo with clipping")))
    sources = [(20 + n,) for n in range(15)]
    vectors = ContextVectors.of(read.model, sources, [" word5", " word6 word7"], cache_dir=tmp_path)
    # So low a limit that most values are cut off; there is no model that computes this to be compared with.
    weights = replace(read, model=None, read_layer=lambda layer: replace(read.layer(layer), clip=0.02))
    weights.__dict__["fingerprint"] = read.fingerprint
    relation = Relation.from_pairs("own", [(word(20 + n), word(40 + n)) for n in range(15)])
    scores = relation_scores(
        weights, relation, preset="context", vectors=vectors, k=12, heads=[(0, n) for n in range(4)]
    )
    assert scores.prompt_low is not None and scores.prompt_high is not None
    low, high, score = (x[0, 0] for x in (scores.prompt_low, scores.prompt_high, scores.promote))
    compared = ~low.isnan()
    assert bool(compared.any())
    assert low[compared].equal(score[compared]) and high[compared].equal(score[compared])


@needs_hooked
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("row", [row for row in ARCHITECTURES if row.name in HOOKED], ids=lambda row: row.name)
def test_a_hooked_transformer_is_equal_too(row: Architecture, processed: bool) -> None:
    found = outcomes(row, processed, host="hooked")
    refused = {name: _reason(sentence) for name, sentence in found.items() if sentence}
    moved = dict.fromkeys(("value mixing", "ablation"), "processed: value biases were moved into the output bias")
    has_biases = row.name.startswith(("gpt", "phi", "qwen2"))
    assert refused == (moved if processed and has_biases else {})


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        lines = [line(row) for row in ARCHITECTURES]
    TABLE.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    sys.stdout.write(f"{TABLE}\n")
