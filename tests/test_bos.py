"""Where a text begins with BOS: by default where the model puts one, never twice, never with the published recipe."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planted import hosted, needs_hooked, random_model, shared_model, source_model, word, word_tokenizer

import tl_headmaps
from tl_headmaps import (
    Relation,
    TaskItem,
    Tasks,
    ablate,
    association_heads,
    attention_groups,
    compare_attention,
    component_map,
    grouping_profile,
    reproduce,
    task_maps,
    validate,
    value_mixing,
)
from tl_headmaps.capture.running.activations import encode_prompt, prepends_bos
from tl_headmaps.capture.running.text import token_batches

BOS = 2
TEXT = " word7 word8 word9 word8"
IDS = [7, 8, 9, 8]
RELATION = Relation.from_pairs(
    "next",
    [(word(i), word(i + 1)) for i in range(20, 30)],
    neutral_templates=(" word3 <X> word4",),
    eliciting_templates=(" word3 <X>",),
)
TASKS = Tasks(
    tuple(
        TaskItem(f" word{i}", "word9", function, content=str(i))
        for i, function in zip(range(20, 40), ("retrieval", "inference") * 10, strict=True)
    )
)
CALLS: dict[str, Callable[..., Any]] = {
    "ablate": lambda model, **options: ablate(
        model, RELATION, "L0H0", **{"controls": None, "n_random": 0, "preset": "folded"} | options
    ),
    "association_heads": lambda model, **options: association_heads(model, TEXT, "word9", "word7", **options),
    "attention_groups": lambda model, **options: attention_groups(model, TEXT, n_null=0, **options),
    "compare_attention": lambda model, **options: compare_attention(
        model, {" word7 word8": "word8", " word7 word5 word9": "word9"}, "word7", **options
    ),
    "component_map": lambda model, **options: component_map(model, "gradient_ratio", TEXT, **options),
    "grouping_profile": lambda model, **options: grouping_profile(model, [TEXT], **options),
    "validate": lambda model, **options: validate(model, RELATION, **{"preset": "folded"} | options),
    "value_mixing": lambda model, **options: value_mixing(model, TEXT, "L0H0", **options),
}


def without_bos() -> Any:
    """A model that puts no BOS in front of a text."""
    model = random_model("llama")
    model.cfg.default_prepend_bos = False
    return model


def comparable(result: Any) -> dict[str, Any]:
    """A result but for when it was made."""
    values = result.to_dict()
    values["provenance"] = {name: value for name, value in values["provenance"].items() if name != "created"}
    return values


@pytest.mark.parametrize("kind", ["llama", "gpt2", pytest.param("hooked", marks=needs_hooked)])
def test_texts_are_encoded_as_the_model_encodes_them(kind: str) -> None:
    model = random_model("gpt2", host="hooked") if kind == "hooked" else shared_model(kind)
    assert encode_prompt(model, TEXT, prepends_bos(model, None)) == model.to_tokens(TEXT)[0].tolist() == [BOS, *IDS]


@pytest.mark.model
def test_texts_are_encoded_as_the_default_model_encodes_them(default_model: Any) -> None:
    text = "Birds sometimes walk"
    assert prepends_bos(default_model, None) is True
    assert encode_prompt(default_model, text, True) == default_model.to_tokens(text)[0].tolist()
    mixing = value_mixing(default_model, text, "L5H3")
    assert mixing.tokens == tuple(default_model.to_str_tokens(text))


def test_a_model_that_puts_none_gets_none() -> None:
    model = without_bos()
    assert model.to_tokens(TEXT)[0].tolist() == IDS
    assert prepends_bos(model, None) is False and prepends_bos(model, True) is True
    assert prepends_bos(random_model("llama", tokenizer=False), None) is False


@pytest.mark.parametrize("call", CALLS)
def test_the_default_is_the_models_own_and_recorded_as_what_it_was(call: str) -> None:
    for model, own in ((shared_model("llama"), True), (without_bos(), False)):
        by_default = CALLS[call](model)
        assert by_default.provenance.options["prepend_bos"] is own
        assert comparable(by_default) == comparable(CALLS[call](model, prepend_bos=own))
        assert comparable(by_default) != comparable(CALLS[call](model, prepend_bos=not own))


def test_task_maps_follow_the_model(tmp_path: Path) -> None:
    options: dict[str, Any] = {"n_folds": 3, "n_null": 1, "cache_dir": tmp_path, "progress": False}
    by_default = task_maps(shared_model("llama"), TASKS, **options)
    assert by_default.provenance.options["prepend_bos"] is True
    for flag in (True, False):
        same = torch.equal(
            task_maps(shared_model("llama"), TASKS, prepend_bos=flag, **options).importance, by_default.importance
        )
        assert same is flag


@pytest.mark.parametrize("call", ["validate", "ablate"])
def test_the_published_recipe_has_none(call: str) -> None:
    model = shared_model("llama")
    recorded = [
        CALLS[call](model, preset=preset, **options).provenance.options["prepend_bos"]
        for preset in ("maps", "folded")
        for options in ({}, {"prepend_bos": True}, {"prepend_bos": False})
    ]
    assert recorded == [False, True, False, True, True, False]


def test_the_published_experiments_have_none(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    found = reproduce(
        shared_model("llama"), tmp_path / "out", relations=RELATION, n_random=0, data_dir=tmp_path / "data"
    )
    assert found.provenance.options["prepend_bos"] is False


@pytest.mark.parametrize("call", [attention_groups, value_mixing, association_heads])
def test_token_ids_stay_as_they_are(call: Callable[..., Any]) -> None:
    more = {"value_mixing": ("L0H0",), "association_heads": (2, 0)}.get(call.__name__, ())
    found = call(shared_model("llama"), IDS, *more)
    assert len(found.tokens) == len(IDS) and found.provenance.options["prepend_bos"] is False


def self_prefixing() -> Any:
    """A tokenizer that adds BOS by itself, as Llama's does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = word_tokenizer(64)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    assert tokenizer.encode(TEXT) == [BOS, *IDS]
    return tokenizer


def test_a_tokenizer_that_adds_its_own_never_gives_two() -> None:
    model = hosted(source_model("llama", n_vocab=64), "llama", words=self_prefixing())
    assert prepends_bos(model, None) is True and model.to_tokens(TEXT)[0].tolist() == [BOS, *IDS]
    assert encode_prompt(model, TEXT, True) == [BOS, *IDS] and encode_prompt(model, TEXT, False) == IDS
    assert attention_groups(model, TEXT, n_null=0).tokens.count("<bos>") == 1


def test_a_text_that_brings_its_own_never_gets_two() -> None:
    model, text = shared_model("llama"), f"<bos>{TEXT}"
    assert encode_prompt(model, text) == encode_prompt(model, text, True) == [BOS, *IDS]
    batches = token_batches([text], model.tokenizer, length=3, max_tokens=100, prepend_bos=True)
    rows = [row[:n].tolist() for item in batches.items for row, n in zip(item.tokens, item.lengths, strict=True)]
    assert rows == [[BOS, 7, 8], [BOS, 9, 8]]


def test_every_analysis_with_the_option_is_here() -> None:
    public = {name for name in tl_headmaps.__all__ if inspect.isfunction(getattr(tl_headmaps, name))}
    having = {name for name in public if "prepend_bos" in inspect.signature(getattr(tl_headmaps, name)).parameters}
    context = {"head_trust", "name_heads", "relation_scores", "salient_operations", "token_grid"}
    assert having == {*CALLS, *context, "ablated", "head_worth", "task_maps", "verify_tasks", "reproduce"}


def test_a_host_that_strips_a_token_that_is_not_there_prepends_nothing() -> None:
    """TransformerLens may take a BOS off that its tokenizer did not put there; nothing is left of a short text."""
    tokenizer = SimpleNamespace(bos_token_id=2)
    model = SimpleNamespace(tokenizer=tokenizer, to_tokens=lambda text: torch.empty(1, 0, dtype=torch.int64))
    assert not prepends_bos(model, None)
