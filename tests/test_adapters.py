"""Architectures that TransformerLens opens without showing their heads, or takes apart wrongly; load_model mends it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, N_VOCAB, Architecture, booted, source
from planted import TL_MAJOR, hosted, save_checkpoint, word

from tl_headmaps import HeadWeights, Relation, load_model, relation_scores, value_mixing
from tl_headmaps.capture.adapters import EXTENDED, own_adapters
from tl_headmaps.core.errors import UnsupportedModelError, WeightBasisError

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(TL_MAJOR < 4, reason="the adapters are tried with TransformerLens 4; run make test"),
]

NAMES = ["nemotron_h", "recurrent_gemma", "falcon new"]


def row_of(name: str) -> Architecture:
    return next(row for row in ARCHITECTURES if row.name == name)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_opens_with_heads_and_its_own_numbers(name: str, tmp_path: Path) -> None:
    model = load_model(str(save_checkpoint(source(row_of(name)), tmp_path / "model")), "cpu")
    tokens = torch.tensor([[3, 4, 5, 9, 4]])
    assert torch.allclose(model(tokens), source(row_of(name))(tokens).logits, atol=1e-4)
    weights = HeadWeights.from_model(model)
    assert weights.check is not None and set(weights.check.record().values()) == {"fits"}
    relation = Relation.from_pairs("own", [(word(5 + n), word(25 + n)) for n in range(10)])
    layer = weights.layers_with_heads[-1]
    scores = relation_scores(model, relation, prompts=" " + word(40), progress=False)
    assert scores.provenance.options["preset"] == "context" and not bool(scores.promote[:, layer].isnan().any())
    assert value_mixing(model, [3, 4, 5, 9], (layer, 1)).reconstruction_error < 1e-5


def test_the_host_is_left_as_it_was() -> None:
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory as Factory

    before = dict(Factory._adapters)
    with pytest.raises(KeyError), own_adapters():
        assert all(Factory._adapters[name] is not before[name] for name in EXTENDED)
        raise KeyError
    assert Factory._adapters == before


@pytest.mark.parametrize("name", ["nemotron_h", "recurrent_gemma"])
def test_a_host_that_shows_no_heads_is_refused_with_what_to_do(name: str) -> None:
    model = hosted(source(row_of(name)), name)
    with pytest.raises(UnsupportedModelError, match=r"has attention heads, but .* Open it with tl_headmaps.load_model"):
        HeadWeights.from_model(model)


@pytest.mark.parametrize(
    ("processed", "error", "words"),
    [
        (False, UnsupportedModelError, "in TransformerLens differs from that of the transformers model inside it"),
        (True, WeightBasisError, "queries, keys and values in one matrix, group by group"),
    ],
)
def test_a_host_that_takes_falcon_apart_wrongly(processed: bool, error: type[Exception], words: str) -> None:
    model = hosted(source(row_of("falcon new")), "falcon", processed=processed)
    with pytest.raises(error, match=rf"{words}.* Open it with tl_headmaps.load_model\(...\)"):
        HeadWeights.from_model(model)


def test_one_norm_for_attention_and_mlp() -> None:
    """As in Falcon 2."""
    row = row_of("falcon new")
    weights = HeadWeights.from_model(booted(replace(row, changes={**row.changes, "num_ln_in_parallel_attn": 1})))
    assert weights.check is not None and set(weights.check.record().values()) == {"fits"}
    assert weights.mlp is not None


def test_layers_that_mix_nothing_say_so() -> None:
    model: Any = booted(row_of("nemotron_h"))
    weights = HeadWeights.from_model(model)
    assert weights.mixers == {0: "Mamba", 2: "nothing (an MLP)"} and weights.n_vocab == N_VOCAB
