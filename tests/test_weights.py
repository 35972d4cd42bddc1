"""Reading models: every architecture, raw and processed, against the parameters of the transformers model itself."""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from planted import (
    DECODERS,
    GROUPED,
    Anatomy,
    hosted,
    needs_hooked,
    random_model,
    save_checkpoint,
    shared_model,
    source_model,
)
from torch import Tensor

from tl_headmaps import (
    HeadWeights,
    Relation,
    attention_groups,
    component_map,
    describe_model,
    grouping_profile,
    relation_scores,
    salient_operations,
    token_grid,
    value_mixing,
)
from tl_headmaps.capture.anatomy import parameters_digest
from tl_headmaps.capture.components.matrices import component_source
from tl_headmaps.capture.host import _READINGS
from tl_headmaps.capture.tensors import joint_digest, tensor_digests
from tl_headmaps.circuits.extremes import entries
from tl_headmaps.circuits.ov import ov_maps
from tl_headmaps.circuits.qk import qk_maps
from tl_headmaps.circuits.vectors import token_vectors, vocabulary_vectors
from tl_headmaps.core.errors import HeadMapsError, UnsupportedModelError, UsageError, WeightBasisError

pytestmark = pytest.mark.usefixtures("one_thread")

PROCESSING = 1e-4
"""Relative difference allowed between a raw model and the same model after folding: both are float32, folding
multiplies and centres once more."""

HOSTS = 1e-5
"""Relative difference allowed between two hosts of the same raw weights: the same numbers, added in another order."""


@pytest.fixture(scope="module", params=DECODERS)
def kind(request: Any) -> str:
    return str(request.param)


def read(kind: str, **options: Any) -> HeadWeights:
    return HeadWeights.from_model(shared_model(kind, **options))


def whole_maps(weights: HeadWeights, layer: int, preset: Any) -> tuple[Tensor, Tensor]:
    """OV and QK maps of all heads of a layer, all rows and columns (the vocabulary has 61 tokens)."""
    vectors = vocabulary_vectors(weights, layer, preset)
    heads, part = list(range(weights.n_heads)), weights.layer(layer)
    everything = torch.arange(weights.n_vocab)
    ov = entries(ov_maps(weights, part, vectors, heads, preset), everything)
    return ov, entries(qk_maps(weights, part, vectors, vectors, heads, preset), everything)


def relative(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max() / other.abs().max())


def assert_same_maps(one: HeadWeights, other: HeadWeights, preset: str, tolerance: float) -> None:
    for layer in range(one.n_layers):
        for name, mine, theirs in zip(
            ("OV", "QK"), whole_maps(one, layer, preset), whole_maps(other, layer, preset), strict=True
        ):
            difference = relative(mine, theirs)
            assert difference < tolerance, f"{name} of layer {layer}, {preset}: {difference:.1e}"


class TestEveryArchitecture:
    def test_sizes_and_basis(self, kind: str) -> None:
        weights = read(kind)
        grouped = kind in GROUPED
        assert (weights.n_layers, weights.n_heads, weights.n_kv_heads) == (3, 4, 2 if grouped else 4)
        assert (weights.d_model, weights.d_head, weights.n_vocab) == (32, 8, 61)
        assert weights.basis == "raw"
        assert weights.model_name == f"tiny-{kind}"
        assert weights.architecture == type(source_model(kind)).__name__
        assert weights.mlp_refusal is None
        assert [weights.group_of(h) for h in range(4)] == ([0, 0, 1, 1] if grouped else [0, 1, 2, 3])

    def test_processed_models_are_folded(self, kind: str) -> None:
        weights = read(kind, processed=True)
        assert weights.basis == "folded"
        assert weights.ln_final is None or weights.ln_final.is_unit

    def test_matrices_are_the_parameters(self, kind: str) -> None:
        weights, parts = read(kind), Anatomy(source_model(kind), kind)
        assert torch.equal(weights.W_E, parts.W_E)
        assert torch.equal(weights.W_U, parts.W_U)
        for layer in range(3):
            mine, theirs = weights.layer(layer), parts.heads(layer)
            for name in ("W_Q", "W_K", "W_V", "W_O"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
            for name in ("b_Q", "b_K"):
                bias, expected = getattr(mine, name), getattr(theirs, name)
                # A model without biases may be read as having none or zeros.
                assert not bias.any() if expected is None and bias is not None else True
                assert expected is None or torch.equal(bias, expected), name

    def test_raw_and_processed_models_have_the_same_folded_maps(self, kind: str) -> None:
        assert_same_maps(read(kind, processed=True), read(kind), "folded", PROCESSING)

    @needs_hooked
    @pytest.mark.parametrize("preset", ["folded", "maps"])
    def test_hosts_agree(self, kind: str, preset: str) -> None:
        hooked, bridge = read(kind, host="hooked"), read(kind)
        assert hooked.basis == "raw"
        assert (hooked.n_kv_heads, hooked.embed_scale) == (bridge.n_kv_heads, 1.0)
        if preset == "maps" and kind.startswith("gemma"):
            pytest.skip("HookedTransformer keeps sqrt(d_model) in W_E, so e_t itself differs between the hosts")
        assert_same_maps(hooked, bridge, preset, HOSTS)

    @needs_hooked
    def test_processed_hooked_transformer_has_the_same_folded_maps(self, kind: str) -> None:
        hooked = read(kind, host="hooked", processed=True)
        assert hooked.basis == "folded"
        assert_same_maps(hooked, read(kind), "folded", PROCESSING)


class TestUnusualShapes:
    @pytest.mark.parametrize(
        ("kind", "sizes"),
        [
            ("gpt2", {"d_model": 33, "n_heads": 3}),
            ("neox", {"d_model": 30, "n_heads": 3}),
            ("gemma3", {"d_model": 33, "n_heads": 3, "n_kv_heads": 1, "d_head": 10}),
            ("qwen3", {"d_model": 35, "n_heads": 5, "n_kv_heads": 5, "d_head": 6}),
        ],
    )
    def test_odd_widths_and_group_sizes(self, kind: str, sizes: dict[str, int]) -> None:
        weights, parts = read(kind, **sizes), Anatomy(source_model(kind, **sizes), kind)
        assert weights.d_model == sizes["d_model"]
        assert weights.layer(1).W_V.shape[0] == weights.n_kv_heads == sizes.get("n_kv_heads", sizes["n_heads"])
        for layer in range(3):
            norm = weights.layer(layer).ln1
            assert norm is not None
            torch.testing.assert_close(norm.weight, parts.factor(parts.part(layer, "ln1")))
        torch.testing.assert_close(weights.ln_final.weight, parts.factor(parts.ln_final))
        assert_same_maps(read(kind, processed=True, **sizes), weights, "folded", PROCESSING)

    def test_vocabulary_larger_than_one_block_is_the_same_token_by_token(self) -> None:
        weights = read("llama", n_vocab=4100)
        some = torch.tensor([0, 4095, 4096, 4099])
        assert relative(vocabulary_vectors(weights, 1, "folded")[some], token_vectors(weights, some, 1, "folded")) < (
            HOSTS
        )


class TestBasis:
    @pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3"])
    def test_untrained_norms_are_not_folded_norms(self, kind: str) -> None:
        for processed, expected in ((False, "raw"), (True, "folded")):
            source = source_model(kind)
            for name, parameter in source.named_parameters():
                if "norm" in name or ".ln_" in name:
                    unit = name.endswith("weight") and kind != "gemma3"
                    parameter.fill_(float(unit))
            assert HeadWeights.from_model(hosted(source, kind, processed=processed)).basis == expected

    def test_a_centred_unembedding_alone_is_centred(self) -> None:
        source = source_model("llama")
        source.lm_head.weight.sub_(source.lm_head.weight.mean(0))
        weights = HeadWeights.from_model(hosted(source, "llama"))
        assert weights.basis == "centred"
        with pytest.raises(WeightBasisError, match="are centred"):
            weights.require("maps", needs_mlp=False)

    def test_maps_on_folded_weights_names_the_call_that_fixes_it(self) -> None:
        weights = read("llama", processed=True)
        with pytest.raises(WeightBasisError) as caught:
            token_vectors(weights, torch.tensor([1]), 0, "maps")
        message = str(caught.value)
        assert "The weights of 'tiny-llama' are folded" in message
        assert "preset='maps' reproduces published scores and needs raw weights" in message
        assert "without enable_compatibility_mode()" in message
        assert "HookedTransformer.from_pretrained_no_processing(...)" in message
        assert message.endswith("or use preset='folded'.")


class TestReducedPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3"])
    def test_read_and_computed_in_float32(self, kind: str, dtype: torch.dtype) -> None:
        weights = HeadWeights.from_model(random_model(kind, dtype=dtype))
        rounded = HeadWeights.from_model(hosted(source_model(kind).to(dtype).float(), kind))
        assert weights.W_E.dtype == weights.W_U.dtype == dtype
        assert weights.basis == "raw"
        layer = weights.layer(1)
        for value in vars(layer).values():
            assert not isinstance(value, Tensor) or value.dtype == torch.float32
        assert weights.provenance().dtype == f"{str(dtype)[6:]} stored, float32 computed"
        # Gemma's factor is stored in the reduced type, which bfloat16 knows to 1 in 256.
        tolerance = 5e-3 if kind == "gemma3" else HOSTS
        assert_same_maps(weights, rounded, "folded", tolerance)
        assert whole_maps(weights, 1, "folded")[0].dtype == torch.float32


class TestTheModelIsLeftAlone:
    NAMES = ("hook_embed", "blocks.0.hook_resid_pre", "blocks.2.attn.hook_v", "blocks.1.ln1.hook_normalized")

    @pytest.fixture(params=["bridge", pytest.param("hooked", marks=needs_hooked)])
    def model(self, request: Any) -> Any:
        return random_model("llama", host=request.param)

    def test_hooks_do_not_fire_and_stay(self, model: Any) -> None:
        fired: list[str] = []
        for name in self.NAMES:
            model.add_hook(name, lambda value, hook, name=name: fired.append(name))
        tokens = torch.tensor([[3, 4, 5]])
        model(tokens)
        assert sorted(set(fired)) == sorted(self.NAMES)
        fired.clear()
        weights = HeadWeights.from_model(model)
        for layer in range(3):
            weights.layer(layer)
        assert fired == []
        model(tokens)
        assert sorted(set(fired)) == sorted(self.NAMES)
        fired.clear()
        model.reset_hooks()
        model(tokens)
        assert fired == []

    def test_a_hook_that_changes_values_changes_nothing_here(self, model: Any) -> None:
        before = HeadWeights.from_model(model)
        for name in self.NAMES:
            model.add_hook(name, lambda value, hook: value * 3 + 1)
        after = HeadWeights.from_model(model)
        assert after.fingerprint == before.fingerprint
        assert after.embed_scale == before.embed_scale
        model.reset_hooks()

    def test_logits_and_training_mode(self, model: Any) -> None:
        tokens = torch.tensor([[3, 4, 5]])
        before = model(tokens)
        model.train()
        training = [module.training for module in model.modules()]
        weights = HeadWeights.from_model(model)
        weights.layer(1)
        assert [module.training for module in model.modules()] == training
        assert model.training
        model.eval()
        assert torch.equal(model(tokens), before)

    def test_left_alone_after_a_refusal(self) -> None:
        model = random_model("llama")
        fired: list[int] = []
        model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: fired.append(1))
        model.train()
        parameter(model, "model.layers.2.self_attn.v_proj.weight").view(-1)[0] = float("nan")
        with pytest.raises(UnsupportedModelError):
            HeadWeights.from_model(model)
        assert model.training
        assert fired == []
        model(torch.tensor([[3, 4, 5]]))
        assert fired == [1]


def named_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a bridge under the names transformers gives them (a bridge may add some of its own)."""
    config = model.original_model.config
    own = {name for name, _ in source_model("llama", n_layers=config.num_hidden_layers).named_parameters()}
    for name, value in model.original_model.named_parameters():
        plain = name.replace("_original_component.", "").replace("original_component.", "")
        if plain in own:
            yield plain, value


def parameter(model: Any, name: str) -> Tensor:
    return dict(named_parameters(model))[name].data


NAN_SENTENCE = (
    r"contains 1 NaN or infinite value; scores need finite weights. Reload the checkpoint, or repair that tensor"
)


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "called"),
        [
            ("model.embed_tokens.weight", "The embedding W_E"),
            ("lm_head.weight", "The unembedding W_U"),
            ("model.layers.0.self_attn.q_proj.weight", "W_Q of layer 0"),
            ("model.layers.2.self_attn.o_proj.weight", "W_O of layer 2"),
            ("model.norm.weight", ""),
            ("model.layers.1.input_layernorm.weight", ""),
            ("model.layers.0.post_attention_layernorm.weight", ""),
            ("model.layers.0.mlp.up_proj.weight", ""),
        ],
    )
    def test_nan_and_infinity(self, name: str, called: str) -> None:
        for bad in (float("nan"), float("inf")):
            model = random_model("llama")
            parameter(model, name).view(-1)[3] = bad
            with pytest.raises(UnsupportedModelError, match=f"{called} {NAN_SENTENCE}"):
                HeadWeights.from_model(model).layer(1)

    def test_nan_in_a_middle_layer_is_found_when_it_is_read(self) -> None:
        model = random_model("llama")
        parameter(model, "model.layers.1.self_attn.k_proj.weight").view(-1)[3] = float("nan")
        weights = HeadWeights.from_model(model)
        weights.layer(0)
        with pytest.raises(UnsupportedModelError, match=f"W_K of layer 1 {NAN_SENTENCE}"):
            weights.layer(1)

    def test_an_encoder(self) -> None:
        sentence = "BertForMaskedLM is an encoder.*need a causal language model such as GPT-2, Llama or Gemma"
        with pytest.raises(UnsupportedModelError, match=sentence):
            HeadWeights.from_model(random_model("bert"))

    def test_a_model_without_attention(self) -> None:
        sentence = "MambaForCausalLM has no attention heads that TransformerLens shows: its layer 0 is Mamba. Head maps"
        with pytest.raises(UnsupportedModelError, match=sentence):
            HeadWeights.from_model(random_model("mamba"))

    @pytest.mark.parametrize("thing", [None, 3, torch.nn.Linear(2, 2)])
    def test_not_a_model(self, thing: Any) -> None:
        sentence = r"is not a TransformerLens model. Pass a TransformerBridge \(TransformerLens 4\) or a Hooked"
        with pytest.raises(UsageError, match=f"{type(thing).__name__} {sentence}"):
            HeadWeights.of(thing)

    def test_a_layer_that_is_not_there(self) -> None:
        with pytest.raises(UsageError, match="the model has layers 0 to 2 with heads 0 to 3"):
            read("llama").layer(3)

    def test_errors_are_of_one_family(self) -> None:
        for error in (UsageError, UnsupportedModelError, WeightBasisError):
            assert issubclass(error, HeadMapsError)
            assert issubclass(error, ValueError)


def is_read(name: str) -> bool:
    """Whether weight-only analyses look at a parameter: of the MLPs and their norms, only layer 0."""
    later_layer = not name.startswith("model.layers.0.")
    return not ((".mlp." in name or "post_attention_layernorm" in name) and later_layer)


@pytest.fixture(scope="module")
def changes() -> dict[str, bool]:
    """For each parameter of a small model, whether changing its last entry changes the fingerprint."""
    model = random_model("llama", n_layers=2)
    before = HeadWeights.from_model(model).fingerprint
    found = {}
    for name, value in named_parameters(model):
        last = value.data.view(-1)[-1:]
        kept = last.clone()
        # One step of float32 of that entry, the smallest change there is.
        last.copy_(torch.nextafter(last, last + 1))
        found[name] = HeadWeights.from_model(model).fingerprint != before
        last.copy_(kept)
    assert HeadWeights.from_model(model).fingerprint == before
    return found


class TestFingerprint:
    @pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3"])
    def test_equal_models_have_equal_fingerprints(self, kind: str) -> None:
        one, other = HeadWeights.from_model(random_model(kind)), read(kind)
        assert one.fingerprint == other.fingerprint
        assert len(one.fingerprint) == 64
        assert one.fingerprint != read(kind, seed=1).fingerprint

    def test_any_weight_that_is_read_changes_it(self, changes: dict[str, bool]) -> None:
        read_here = {name: changed for name, changed in changes.items() if is_read(name)}
        # Embedding, unembedding, final norm, attention and ln1 of two layers, ln2 and the MLP of the first.
        assert len(read_here) == 3 + 2 * 5 + 4
        assert all(read_here.values()), [name for name, changed in read_here.items() if not changed]

    def test_field_order_does_not_matter_but_names_do(self) -> None:
        one, other = torch.arange(6.0).view(2, 3), torch.zeros(2, 3)
        digest = joint_digest(tensor_digests({"W_E": one, "W_U": other}))
        assert digest == joint_digest(tensor_digests({"W_U": other.clone(), "W_E": one}))
        renamed = {"W_E": other, "W_U": one}, {"W_E": one, "W_O": other}, {"W_E": one.view(3, 2), "W_U": other}
        stored = {"W_E": one.half(), "W_U": other}
        others = {joint_digest(tensor_digests(tensors)) for tensors in (*renamed, stored)}
        assert len(others) == 4 and digest not in others

    @pytest.mark.parametrize("kind", ["llama", "gpt2"])
    def test_every_result_of_a_model_and_of_its_checkpoint_has_the_same(self, kind: str, tmp_path: Path) -> None:
        folder = save_checkpoint(source_model(kind), tmp_path)
        model, weights = shared_model(kind), HeadWeights.from_checkpoint(folder)
        text = " word3 word4 word5 word3 word4"
        pairs = Relation.from_pairs("own", [(3, 4), (5, 6)])
        read = [describe_model(source) for source in (model, weights)]
        read += [relation_scores(source, pairs, progress=False, preset="folded") for source in (model, weights)]
        read += [token_grid(source, "L1H0", [3], [4], preset="folded") for source in (model, weights)]
        read += [salient_operations(source, "L1H0", n_tokens=4, progress=False) for source in (model, weights)]
        matrices = [component_map(source, "frobenius") for source in (model, weights)]
        ran = [attention_groups(model, text), value_mixing(model, text, "L1H0"), grouping_profile(model, [text])]
        ran.append(component_map(model, "contribution", [text]))
        assert {result.provenance.fingerprint for result in (*read, *matrices, *ran)} == {weights.fingerprint}
        assert not any({"parameters", "mlp_weights"} & set(result.provenance.data) for result in read)
        heads = [component_source(source, attention_only=True).provenance() for source in (model, weights)]
        assert {(made.fingerprint, len(made.data)) for made in heads} == {(weights.fingerprint, 0)}
        assert len({result.provenance.data["mlp_weights"] for result in matrices}) == 1
        assert {result.provenance.data["parameters"] for result in ran} == {parameters_digest(model)}

    def test_edits_in_place_are_seen_by_the_next_call(self) -> None:
        model, text = random_model("llama"), " word3 word4 word5"

        def digests() -> tuple[str, str, str]:
            ran, read = value_mixing(model, text, "L1H0").provenance, component_map(model, "frobenius").provenance
            assert ran.fingerprint == read.fingerprint
            return ran.fingerprint, ran.data["parameters"], read.data["mlp_weights"]

        before = digests()
        # No counter of torch's sees an edit of .data, so nothing may be kept from call to call.
        model.blocks[2].mlp.W_out.data[3, 5] += 1e-3
        after = digests()
        assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False]
        with torch.no_grad():
            model.blocks[2].attn.W_O[1, 2, 3] += 1e-3
        assert [old == new for old, new in zip(after, digests(), strict=True)] == [False, False, True]

    def test_processing_changes_it(self) -> None:
        assert read("llama").fingerprint != read("llama", processed=True).fingerprint


def grid_of(model: Any) -> Any:
    return token_grid(model, "L1H0", [3, 4], [5, 6], preset="folded", progress=False)


def same(one: Any, other: Any) -> tuple[bool, bool]:
    """Whether two results have the same numbers, and the same fingerprint."""
    return torch.equal(one.values, other.values), one.provenance.fingerprint == other.provenance.fingerprint


class TestRemembered:
    """What was read of a model is remembered, and never for a model that has changed since."""

    def test_an_unchanged_model_is_run_and_hashed_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = random_model("llama")
        first = grid_of(model)

        def refused(*arguments: Any) -> Any:
            raise AssertionError("read anew")

        for place in ("host.forward_pass", "weights.self_check", "weights.tensor_digests"):
            monkeypatch.setattr(f"tl_headmaps.capture.{place}", refused)
        again = grid_of(model)
        assert same(first, again) == (True, True)
        assert again.provenance.seams == first.provenance.seams != {}
        with pytest.raises(UnsupportedModelError, match="read anew"):
            grid_of(random_model("llama"))

    @pytest.mark.parametrize("edit", ["scaled", "negated", "rows swapped", "replaced"])
    def test_an_edit_through_data_is_seen(self, edit: str) -> None:
        model = random_model("llama")
        before, matrix = grid_of(model), model.original_model.lm_head.weight
        assert matrix.data_ptr() == model.unembed.W_U.data_ptr()
        kept = matrix.data.clone()
        if edit == "scaled":
            matrix.data[5, 7] *= 1.5
        elif edit == "negated":
            matrix.data[4:6].neg_()
        elif edit == "rows swapped":
            matrix.data[4:6] = kept[[5, 4]]
        else:
            matrix.data = kept * 2
        assert same(before, grid_of(model)) == (False, False)
        matrix.data = kept
        assert same(before, grid_of(model)) == (True, True)

    @pytest.mark.parametrize("module_too", [False, True])
    def test_an_edit_of_eps_is_seen(self, module_too: bool) -> None:
        model = random_model("llama")
        before, run = grid_of(model), HeadWeights.of(model)
        settings, parameters = run.settings_digest, run.parameters_digest
        run.provenance()
        model.original_model.config.rms_norm_eps = 0.5
        if module_too:
            model.blocks[1].ln1.original_component.variance_epsilon = 0.5
        after = HeadWeights.of(model)
        assert after.settings_digest != settings
        assert after.parameters_digest == parameters
        assert (after.layer(1).ln1.eps == 0.5) == module_too
        assert torch.equal(grid_of(model).values, before.values) == (not module_too)

    def test_weights_from_before_an_edit_do_not_take_what_was_remembered(self) -> None:
        model = random_model("llama")
        remembered = grid_of(model).provenance.fingerprint
        one, other = HeadWeights.from_model(model), HeadWeights.from_model(model)
        assert one.fingerprint == remembered
        dict(named_parameters(model))["model.layers.1.self_attn.q_proj.weight"].data[0, 0] += 1
        assert other.fingerprint == grid_of(model).provenance.fingerprint != remembered

    def test_another_device_mode_or_hook_does_not_mix(self) -> None:
        model = random_model("gpt2")
        before = grid_of(model)
        model.train()
        model.add_hook("blocks.1.attn.hook_v", lambda value, hook: value * 0)
        assert same(before, grid_of(model)) == (True, True)
        # A hook of torch's own is part of what the model computes.
        handle = model.blocks[1].attn.register_forward_hook(lambda *seen: None)
        hooked = HeadWeights.of(model)
        handle.remove()
        assert hooked.cache_owner is not HeadWeights.of(model).cache_owner
        on_device = HeadWeights.from_model(model, device="cpu")
        assert on_device.fingerprint == before.provenance.fingerprint

    def test_a_deleted_model_is_freed_and_few_are_remembered(self) -> None:
        models = [random_model("llama", n_layers=2, seed=seed) for seed in range(4)]
        for model in models:
            grid_of(model)
        assert list(_READINGS) == models[-2:]
        gone, matrix = ref(models[-1]), ref(HeadWeights.of(models[-1]).W_E)
        del model, models
        gc.collect()
        assert gone() is None and matrix() is None
        assert not _READINGS

    def test_threads_share_what_is_read(self) -> None:
        model = random_model("llama")
        expected = grid_of(random_model("llama"))
        with ThreadPoolExecutor(4) as pool:
            grids = list(pool.map(grid_of, [model] * 8))
        assert [same(expected, grid) for grid in grids] == [(True, True)] * 8
