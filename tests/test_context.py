"""Context vectors: what a layer reads at a token behind a prompt, equal to a whole forward pass whatever the model."""

import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planted import (
    DECODERS,
    hosted,
    needs_hooked,
    random_model,
    save_checkpoint,
    shared_model,
    source_model,
    word,
)
from test_vocabulary import TOKENIZERS
from torch import Tensor

from tl_headmaps import (
    ContextVectors,
    HeadIndex,
    HeadMapsError,
    HeadWeights,
    Relation,
    Result,
    ablate,
    relation_scores,
    salient_operations,
    token_grid,
    validate,
)
from tl_headmaps.capture.running import context as engine
from tl_headmaps.capture.running import last_position, prompts
from tl_headmaps.capture.running.context import collect_inputs, context_vectors
from tl_headmaps.core import store
from tl_headmaps.core.errors import UsageError
from tl_headmaps.core.store import pack, trim_cache, unpack
from tl_headmaps.core.vocabulary import word_ids

PREFIXES = ([2, 5, 9, 4], [2, 7, 3], [2, 11, 6, 8, 10, 12, 3])
SOURCES = [(13,), (14,), (15,), (20, 21), (22,), (30, 31, 32)]
TOLERANCE = 1e-4
"""Largest difference to a whole pass; normalised vectors are of order one."""

KINDS = [*DECODERS, "mistral"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TL_HEADMAPS_CACHE", str(tmp_path / "cache"))


def expected(model: Any, layer: int) -> Tensor:
    """The same from whole passes and the model's own norm, without weight and bias."""
    norm = HeadWeights.from_model(model).layer(layer).ln1
    rows = []
    for source in SOURCES:
        streams = []
        for prefix in PREFIXES:
            _, cache = model.run_with_cache(torch.tensor([[*prefix, *source]]))
            x = cache[f"blocks.{layer}.hook_resid_pre"][0, -1].float()
            if norm is not None:
                x = x - x.mean() if norm.centres else x
                x = x / torch.sqrt(x.square().mean() + norm.eps)
            streams.append(x)
        rows.append(torch.stack(streams).mean(0))
    return torch.stack(rows)


def check(model: Any, folder: Path) -> None:
    vectors = context_vectors(model, SOURCES, PREFIXES, cache_dir=folder, progress=False)
    for layer in range(len(model.blocks)):
        torch.testing.assert_close(vectors.layer(layer), expected(model, layer), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_whole_passes(kind: str, tmp_path: Path) -> None:
    check(shared_model(kind), tmp_path)


@needs_hooked
@pytest.mark.parametrize("kind", DECODERS)
def test_vectors_of_hooked_transformers(kind: str, tmp_path: Path) -> None:
    check(shared_model(kind, host="hooked"), tmp_path)


def test_sliding_windows_shorter_than_the_prompt(tmp_path: Path) -> None:
    check(
        random_model("gemma3", sliding_window=3, layer_types=["sliding_attention", "full_attention"] * 2, n_layers=4),
        tmp_path,
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_raw_and_processed_weights_give_the_same(kind: str, tmp_path: Path) -> None:
    raw, processed = shared_model(kind), shared_model(kind, processed=True)
    one = context_vectors(raw, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
    other = context_vectors(processed, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
    assert one.folder != other.folder
    for layer in range(len(raw.blocks)):
        # A centring norm leaves nothing of the mean, which processing takes off the stream.
        torch.testing.assert_close(one.layer(layer), other.layer(layer), atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(one.values(layer), other.values(layer), atol=TOLERANCE, rtol=0)


def test_vectors_do_not_depend_on_batches_or_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model("llama")
    whole = context_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path / "a", progress=False)
    monkeypatch.setattr(last_position, "_BATCH_BYTES", 1)
    monkeypatch.setattr(engine, "_PART_BYTES", 1)
    single = context_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path / "b", progress=False)
    assert len(whole.parts) == 1 and len(single.parts) == len(SOURCES)
    for layer in range(len(model.blocks)):
        torch.testing.assert_close(whole.layer(layer), single.layer(layer), atol=1e-5, rtol=0)


def test_a_host_without_a_faithful_cache_runs_whole_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model("llama")
    kept = last_position.KeptPrefix
    monkeypatch.setattr(last_position, "KeptPrefix", lambda model, prefix: kept(model, prefix[:, :1]))
    check(model, tmp_path)


def test_values_of_each_prefix(tmp_path: Path) -> None:
    model = shared_model("llama")
    vectors = context_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
    _, cache = model.run_with_cache(torch.tensor([[*PREFIXES[1], *SOURCES[3]]]))
    torch.testing.assert_close(vectors.values(2)[1, :, 3], cache["blocks.2.attn.hook_v"][0, -1], atol=TOLERANCE, rtol=0)


class TestCache:
    def test_a_second_call_reads_the_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = shared_model("llama")
        first = context_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
        monkeypatch.setattr(engine, "_capture", None)
        again = context_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
        assert torch.equal(first.layer(1), again.layer(1))

    def test_the_same_weights_under_other_settings_are_met_anew(self, tmp_path: Path) -> None:
        """Parameters do not say what eps is: vectors of another model were read from disk."""
        one, other = (random_model("llama", rms_norm_eps=eps) for eps in (1e-6, 0.05))
        found = [context_vectors(m, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False) for m in (one, other, one)]
        assert found[0].folder == found[2].folder != found[1].folder
        assert not torch.allclose(found[0].layer(1), found[1].layer(1), atol=1e-2)

    @pytest.mark.parametrize("harm", ["cut", "flip", "gone"])
    def test_a_damaged_file_is_reported_and_made_again(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
    ) -> None:
        model = shared_model("llama")
        first = context_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
        before, path = first.layer(1), sorted(first.folder.iterdir())[1]
        data = path.read_bytes()
        if harm == "gone":
            path.unlink()
        else:
            path.write_bytes(data[:-9] if harm == "cut" else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        if harm != "gone":
            with pytest.raises(UsageError, match="cannot be used: "):
                first.layer(1)
        again = context_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
        assert torch.equal(again.layer(1), before) and path.read_bytes() == data
        assert ("is damaged" in capsys.readouterr().err) == (harm != "gone")

    def test_only_files_of_the_asked_layers_are_read(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model = shared_model("llama")
        first = context_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
        path = first.folder / "part-000-layer-0001.safetensors"
        path.write_bytes(b"")
        context_vectors(model, SOURCES, PREFIXES, layers=[0, 2], cache_dir=tmp_path, progress=False)
        assert not path.read_bytes() and not capsys.readouterr().err
        context_vectors(model, SOURCES, PREFIXES, layers=[1], cache_dir=tmp_path, progress=False)
        assert path.read_bytes() and "is damaged" in capsys.readouterr().err

    @pytest.mark.parametrize("change", ["swapped", "parts", "parameters", "prefixes", "weights"])
    def test_a_damaged_description_is_refused_and_made_again(self, tmp_path: Path, change: str) -> None:
        """Two sources that changed places would have each other's vectors."""
        model = shared_model("llama")
        first = context_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
        path = first.folder / "vectors.json"
        whole = path.read_text()
        stated = json.loads(whole)
        if change == "swapped":
            stated["sources"][:2] = stated["sources"][1::-1]
        elif change == "parts":
            stated["parts"] = [1]
        else:
            stated["identity"][change] = 3
        path.write_text(json.dumps(stated))
        with pytest.raises(UsageError, match=r"is damaged .* Make the vectors again"):
            ContextVectors.load(first.folder)
        context_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
        assert path.read_text() == whole

    def test_another_weight_is_another_model(self, tmp_path: Path) -> None:
        model = random_model("llama")
        first = context_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
        with torch.no_grad():
            next(model.blocks[1].mlp.parameters()).mul_(1.5)
        second = context_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
        assert first.folder != second.folder
        assert not torch.allclose(first.layer(2), second.layer(2))


DAY = 86_400.0


def kept(cache: Path, name: str, *, days: float, size: int = 1000, part: str = "context") -> Path:
    """An entry of a cache that was last used so long ago."""
    entry = cache / part / (name * 32)
    entry.mkdir(parents=True)
    (entry / "vectors.json").write_bytes(b"0" * size)
    os.utime(entry, (time.time() - days * DAY,) * 2)
    return entry


class TestLimit:
    def test_what_was_not_used_for_longest_goes_first(self, tmp_path: Path) -> None:
        old, older, oldest = (kept(tmp_path, name, days=days) for name, days in (("a", 1), ("b", 2), ("c", 3)))
        file = tmp_path / "activations" / f"{'d' * 64}.safetensors"
        file.parent.mkdir()
        file.write_bytes(b"0" * 1000)
        os.utime(file, (time.time() - 2.5 * DAY,) * 2)
        trim_cache(tmp_path, 4000.0)
        assert all(entry.exists() for entry in (old, older, oldest, file))
        trim_cache(tmp_path, 2500.0)
        assert old.exists() and older.exists() and not oldest.exists() and not file.exists()
        trim_cache(tmp_path, 0.0, keep=[older])
        assert older.exists() and not old.exists() and list((tmp_path / "context").iterdir()) == [older]

    def test_what_may_be_in_use_and_what_is_not_ours_stays(self, tmp_path: Path) -> None:
        recent = kept(tmp_path, "a", days=0.01)
        foreign = [kept(tmp_path, "mine", days=9), kept(tmp_path, "b", days=9, part="models")]
        (tmp_path / "context" / ("c" * 32)).symlink_to(foreign[0], target_is_directory=True)
        trim_cache(tmp_path, 0.0)
        assert all((entry / "vectors.json").exists() for entry in (recent, *foreign))
        trim_cache(tmp_path / "nothing", 0.0)

    def test_an_entry_that_is_marked_while_it_is_removed_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entry = kept(tmp_path, "a", days=9)
        rename = Path.rename

        def marked_before(path: Path, target: Path) -> Path:
            os.utime(path)
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", marked_before)
        trim_cache(tmp_path, 0.0)
        assert (entry / "vectors.json").exists() and list((tmp_path / "context").iterdir()) == [entry]

    def test_what_a_killed_process_began_to_remove_is_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept(tmp_path, "a", days=9)
        with monkeypatch.context() as patched:
            patched.setattr(store, "_delete", lambda path: None)
            trim_cache(tmp_path, 0.0)
        (left,) = (tmp_path / "context").iterdir()
        assert left.name.startswith(".") and left.name.endswith(".removed")
        trim_cache(tmp_path, 10_000.0)
        assert not list((tmp_path / "context").iterdir())

    def test_writing_trims_and_reading_marks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TL_HEADMAPS_CACHE_GB", "0")
        cache, model = tmp_path / "cache", shared_model("llama")
        first = context_vectors(model, SOURCES, PREFIXES, progress=False)
        for use in (
            lambda: first.layer(1),
            lambda: context_vectors(model, SOURCES, PREFIXES, progress=False),
        ):
            os.utime(first.folder, (time.time() - DAY,) * 2)
            use()
            assert time.time() - first.folder.stat().st_mtime < 60
        other = kept(cache, "a", days=1)
        context_vectors(model, SOURCES, PREFIXES, progress=False)
        assert other.exists(), "nothing was written"
        second = context_vectors(model, SOURCES[:2], PREFIXES, progress=False)
        assert not other.exists() and first.layer(1).shape[0] == len(SOURCES) and second.layer(1).shape[0] == 2
        os.utime(first.folder, (time.time() - DAY,) * 2)
        third = context_vectors(model, SOURCES[:3], PREFIXES, progress=False)
        assert not first.folder.exists() and third.folder.exists()
        assert context_vectors(model, SOURCES, PREFIXES, progress=False).layer(1).shape[0] == len(SOURCES), "made again"

    def test_a_folder_of_the_caller_is_left_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TL_HEADMAPS_CACHE_GB", "0")
        model, own = shared_model("llama"), tmp_path / "own" / "context"
        first = context_vectors(model, SOURCES, PREFIXES, cache_dir=own, progress=False)
        os.utime(first.folder, (1.0, 1.0))
        context_vectors(model, SOURCES[:2], PREFIXES, cache_dir=own, progress=False)
        assert first.layer(1).shape[0] == len(SOURCES) and first.folder.stat().st_mtime == 1.0

    @pytest.mark.parametrize("stated", ["much", "-1", "nan"])
    def test_a_limit_that_is_none_is_refused_before_the_work(
        self, monkeypatch: pytest.MonkeyPatch, stated: str
    ) -> None:
        monkeypatch.setenv("TL_HEADMAPS_CACHE_GB", stated)
        monkeypatch.setattr(engine, "_capture", None)
        with pytest.raises(UsageError, match=f"TL_HEADMAPS_CACHE_GB='{stated}' is not a size. Give the gigabytes"):
            context_vectors(shared_model("llama"), SOURCES, PREFIXES, progress=False)


def test_hooks_of_the_user_are_silent_and_stay(tmp_path: Path) -> None:
    model = random_model("llama")
    calls = []
    model.blocks[0].hook_resid_pre.add_hook(lambda value, hook: calls.append(1))
    before = [len(point._forward_hooks) for point in model.modules() if hasattr(point, "_forward_hooks")]
    context_vectors(model, SOURCES, PREFIXES, cache_dir=tmp_path, progress=False)
    assert not calls
    assert before == [len(point._forward_hooks) for point in model.modules() if hasattr(point, "_forward_hooks")]


def lookup_model(*, said_by_the_stream: bool) -> Any:
    """A llama in which layer 1 looks each source up, and head 0 of layer 2 reads what it wrote.

    Tokens have a direction each (0 to 23), read by embedding and unembedding alike; looked-up codes have directions of
    their own (24 to 47). If the stream is to say the answer, layer 1 writes the target itself and the head copies it.
    """
    n_vocab, n_heads, d_head = 24, 4, 16
    d_model = n_heads * d_head
    source = source_model("llama", n_layers=3, n_heads=n_heads, n_kv_heads=n_heads, n_vocab=n_vocab, d_model=d_model)
    with torch.no_grad():
        source.model.embed_tokens.weight.copy_(torch.eye(n_vocab, d_model))
        source.lm_head.weight.copy_(torch.eye(n_vocab, d_model))
        source.model.norm.weight.fill_(1)
        for block in source.model.layers:
            block.input_layernorm.weight.fill_(1)
            block.post_attention_layernorm.weight.fill_(1)
            block.mlp.down_proj.weight.zero_()
            # Queries of zero attend to every token alike.
            block.self_attn.q_proj.weight.zero_()
            block.self_attn.o_proj.weight.zero_()
        lookup, reader = source.model.layers[1].self_attn, source.model.layers[2].self_attn
        lookup.v_proj.weight.zero_()
        reader.v_proj.weight.zero_()
        for place, (token, target) in enumerate(LOOKUPS.items()):
            # What the reader gets from the embedding itself is a little of the next answer: a row is never all ties.
            reader.v_proj.weight[(place + 1) % len(LOOKUPS), token] = 1e-3
            lookup.v_proj.weight[place, token] = 1
            code = target if said_by_the_stream else n_vocab + place
            lookup.o_proj.weight[code, place] = 100
            reader.v_proj.weight[place, code] = 1
            reader.o_proj.weight[target, place] = 1
    return hosted(source, "llama")


LOOKUPS = {3: 10, 4: 11, 5: 12, 6: 13, 7: 14, 8: 15}


@pytest.mark.parametrize("said_by_the_stream", [False, True])
def test_a_lookup_that_weights_alone_do_not_show(said_by_the_stream: bool, tmp_path: Path) -> None:
    model = lookup_model(said_by_the_stream=said_by_the_stream)
    relation = Relation.from_pairs("lookup", [(word(s), word(t)) for s, t in LOOKUPS.items()], k=1)
    prompts = [" word16 word17", " word18 word19 word20"]
    folded = relation_scores(model, relation, preset="folded", progress=False)
    context = relation_scores(model, relation, preset="context", prompts=prompts, heads="L2H0", progress=False)
    assert float(folded.promote[0, 2, 0]) == 0
    assert float(context.promote[0, 2, 0]) == 1
    assert context.stream is not None and context.prompt_low is not None
    # Before layer 2 the code is there, and the answer only if it was written.
    assert float(context.stream[0, 2]) == float(said_by_the_stream)
    assert float(context.prompt_low[0, 2, 0]) == 1
    assert (HeadIndex(2, 0) in context.implements()["lookup"]) is not said_by_the_stream
    assert ("L2H0*" in str(context)) is not said_by_the_stream
    assert "stream" in context.table(full=True) and "stream" not in folded.table(full=True)
    assert Result.load(context.save(tmp_path / "context.json")) == context
    assert Result.load(context.save(tmp_path / "context.safetensors")) == context


def test_met_equals_folded_in_layer_0_of_a_rotary_model() -> None:
    model = shared_model("llama")
    relation = Relation.from_pairs("next", [(word(i), word(i + 1)) for i in range(20, 40)])
    context, folded = (
        relation_scores(model, relation, preset=preset, ranks=True, heads=["L0H0", "L0H1"], progress=False)
        for preset in ("context", "folded")
    )
    assert context.promote_ranks is not None and folded.promote_ranks is not None
    assert torch.equal(context.promote_ranks[0][:, 0], folded.promote_ranks[0][:, 0])


@pytest.mark.parametrize("circuit", ["ov", "qk"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "qwen3"])
def test_entries_equal_a_dense_reference(kind: str, circuit: str) -> None:
    """Values of a grid from whole passes: queries and keys before rotation, values through W_O and the final norm."""
    model = shared_model(kind)
    weights = HeadWeights.from_model(model)
    sources, targets, prompts = [word(20), word(21)], [word(30), word(31), word(32)], [" word5 word6", " word7"]
    grid = token_grid(
        model, "L1H2", sources, targets, preset="context", circuit=circuit, prompts=prompts, progress=False
    )

    def read(ids: list[int]) -> Tensor:
        norm = weights.layer(1).ln1
        assert norm is not None
        prefixes = [model.to_tokens(prompt)[0].tolist() for prompt in prompts]
        caches = [model.run_with_cache(torch.tensor([[*p, *ids]]))[1] for p in prefixes]
        streams = [cache["blocks.1.hook_resid_pre"][0, -1].float() for cache in caches]
        return torch.stack([norm(x) for x in streams]).mean(0)

    layer, group = weights.layer(1), weights.group_of(2)
    rows = torch.stack([read([20]), read([21])])
    if circuit == "ov":
        bias = layer.ln1.bias if layer.ln1 is not None else 0
        written = (rows - bias) @ layer.W_V[group] @ layer.W_O[2]
        for norm in (layer.ln1_post, weights.ln_final):
            written = written if norm is None else norm.folded_into(written)
        W_U = weights.W_U.float()
        expected = written @ (W_U - W_U.mean(0))[[30, 31, 32]].T
    else:
        columns = torch.stack([read([30]), read([31]), read([32])])
        q = rows @ layer.W_Q[2] + (0 if layer.b_Q is None else layer.b_Q[2])
        k = columns @ layer.W_K[group] + (0 if layer.b_K is None else layer.b_K[group])
        q, k = (x if norm is None else norm(x) for x, norm in ((q, layer.q_norm), (k, layer.k_norm)))
        expected = q @ k.T * layer.score_scale
    torch.testing.assert_close(grid.values, expected, atol=1e-3, rtol=1e-3)


def test_sources_of_several_tokens_are_scored_apart_and_together() -> None:
    model = shared_model("llama")
    pairs = [(word(20), word(30)), (word(21), word(31)), (f"{word(22)} {word(23)}", word(32))]
    relation = Relation.from_pairs("some", pairs, k=61)
    scores = relation_scores(model, relation, preset="context", progress=False)
    assert scores.n_kept == (2,) and scores.n_multi_token == (1,) and scores.dropped == ((),)
    assert scores.multi_token is not None and scores.together is not None
    # With k as large as the vocabulary every pair hits.
    assert bool((scores.multi_token == 1).all()) and bool((scores.together == 1).all())
    assert (
        relation_scores(model, relation, preset="folded", progress=False).dropped[0][0][2] == "source is not one token"
    )


def test_stream_and_single_prompts_equal_what_they_are_by_themselves() -> None:
    """The stream by a dense logit lens; a prompt's score by a call with that prompt alone."""
    model = shared_model("llama")
    weights = HeadWeights.from_model(model)
    prompts = [" word5 word6", " word7", " word8 word9"]
    relations = [
        Relation.from_pairs(f"shift{by}", [(word(i), word(i + by)) for i in range(20, 40)], k=k)
        for by, k in ((1, 5), (2, 9), (7, 20))
    ]
    scores = relation_scores(model, relations, preset="context", prompts=prompts, progress=False)
    alone = torch.stack(
        [relation_scores(model, relations, preset="context", prompts=p, progress=False).promote for p in prompts]
    )
    asked = scores.promote >= 0.05
    assert scores.prompt_low is not None and scores.prompt_high is not None and scores.stream is not None
    assert bool(asked.any()) and not bool(asked.all())
    assert torch.equal(scores.prompt_low[asked], alone.amin(0)[asked]) and scores.prompt_low[~asked].isnan().all()
    assert torch.equal(scores.prompt_high[asked], alone.amax(0)[asked])
    assert bool((scores.prompt_low < scores.prompt_high)[asked].any())
    prefixes = [model.to_tokens(prompt)[0].tolist() for prompt in prompts]
    for layer in range(weights.n_layers):
        vectors = context_vectors(model, [(i,) for i in range(20, 40)], prefixes, progress=False).layer(layer)
        logits = weights.ln_final.folded_into(vectors) @ weights.W_U.float().T
        for number, relation in enumerate(relations):
            targets = torch.tensor([int(target.removeprefix("word")) for _, target in relation.pairs])
            rank = (logits > logits.gather(1, targets[:, None])).sum(1)
            assert float(scores.stream[number, layer]) == pytest.approx(float((rank < relation.k).float().mean()))


class TestDefaultPreset:
    """Context vectors wherever they can be made: OV maps of a model that can run."""

    RELATION = Relation.from_pairs(
        "next",
        [(word(i), word(i + 1)) for i in range(20, 24)],
        neutral_templates=("word3 <X> word4",),
        eliciting_templates=("word3 <X>",),
    )

    def test_of_a_model(self) -> None:
        model = shared_model("llama")
        results = [
            relation_scores(model, self.RELATION, heads="L1H0", progress=False),
            relation_scores(HeadWeights.from_model(model), self.RELATION, heads="L1H0", progress=False),
            token_grid(model, "L1H0", [word(20)], [word(21)], progress=False),
            validate(model, self.RELATION, progress=False),
            ablate(model, self.RELATION, "L1H0", controls=None, n_random=0, progress=False),
        ]
        assert [result.provenance.options["preset"] for result in results] == ["context"] * 5

    def test_of_weights_alone_and_of_keys(self, tmp_path: Path) -> None:
        model = shared_model("llama")
        weights = HeadWeights.from_checkpoint(save_checkpoint(source_model("llama"), tmp_path / "model"))
        vectors = ContextVectors.of(model, [f" {word(20)}"], [" word5"], cache_dir=tmp_path / "context")
        by_id = random_model("llama", tokenizer=False)
        results = [
            token_grid(weights, "L1H0", [word(20)], [word(21)], progress=False),
            token_grid(model, "L1H0", [word(20)], [word(21)], circuit="qk", progress=False),
            token_grid(by_id, "L1H0", [20], [21], progress=False),  # no tokenizer for the prompts
            salient_operations(model, "L1H0", progress=False),
            token_grid(weights, "L1H0", [word(20)], [word(21)], vectors=vectors, progress=False),
        ]
        assert [result.provenance.options["preset"] for result in results] == ["folded"] * 4 + ["context"]


class TestBadInput:
    RELATION = Relation.from_pairs("some", [(word(20), word(30)), (word(21), word(31))])

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"prompts": []}, "prompts= is empty"),
            ({"prompts": ["  "]}, "is empty. A prompt is a text"),
            ({"prompts": [" word5", " word5"]}, "given twice"),
            ({"prompts": [" word5 word20 word6"]}, "contains the source ' word20'"),
            ({"prompts": [" word5" * 40]}, "longer than the model's context of 32 tokens"),
            ({"vectors": "nowhere"}, "is not a folder of context vectors"),
            ({"vectors": "nowhere", "prompts": [" word5"]}, "Give either the vectors or the prompts"),
            ({"vectors": "nowhere", "prepend_bos": True}, "Give either the vectors or the prompts"),
            ({"preset": "folded", "prompts": [" word5"]}, "prompts= goes with preset='context'"),
            ({"preset": "folded", "prepend_bos": True}, "prepend_bos= goes with preset='context'"),
        ],
    )
    def test_one_sentence_each(self, options: dict[str, Any], sentence: str) -> None:
        with pytest.raises(UsageError, match=re.escape(sentence)):
            relation_scores(shared_model("llama"), self.RELATION, **{"preset": "context", "progress": False, **options})

    def test_one_prompt_works_and_leaves_agreement_open(self) -> None:
        scores = relation_scores(
            shared_model("llama"), self.RELATION, preset="context", prompts=" word5", k=61, progress=False
        )
        assert scores.prompt_low is not None and bool(scores.prompt_low.isnan().all())
        assert "There is one prompt only, so agreement between prompts cannot be judged" in str(scores)

    def test_a_source_longer_than_the_context(self) -> None:
        long = Relation.from_pairs("long", [(" word20" * 40, word(30)), (word(20), word(30))])
        with pytest.raises(UsageError, match="a source of 40 are longer than the model's context of 32 tokens"):
            relation_scores(shared_model("llama"), long, preset="context", progress=False)

    def test_a_prompt_whose_last_token_merges_with_a_source(self) -> None:
        class Tokenizer:
            def encode(self, text: str, **_: Any) -> list[int]:
                return [1, 2]

            def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
                return {"input_ids": [[1, 2, 7] if "France" in text else [1, 9] for text in texts]}

        assert prompts._merging(Tokenizer(), "near", [" France"]) is None
        sentence = prompts._merging(Tokenizer(), "near", [" France", " Egypt"])
        assert sentence is not None and "merges the source ' Egypt' with the prompt's last token" in sentence

    def test_a_source_is_found_in_a_prompt_whatever_the_tokenizer(self) -> None:
        """Decoders of the SentencePiece kind drop the space that opens a word: no source was looked for."""
        for tokenizer in TOKENIZERS.values():
            model, source = SimpleNamespace(tokenizer=tokenizer), tuple(word_ids(tokenizer, "France"))
            (problem,) = prompts.problems_of(model, ["a France a"], [source])
            assert problem is not None and "contains the source ' France'" in problem

    def test_a_single_source(self, tmp_path: Path) -> None:
        """A string was taken for a list of its letters."""
        model, options = shared_model("llama"), {"cache_dir": tmp_path, "progress": False}
        one = ContextVectors.of(model, " word20", " word5", **options)
        assert one.sources == ((20,),)
        for sources in ([" word20"], [[20]], [torch.tensor([20])], torch.tensor([[20]])):
            assert ContextVectors.of(model, sources, " word5", **options).sources == one.sources
        with pytest.raises(UsageError, match=r"2\.5 is not a token id"):
            ContextVectors.of(model, [[20, 2.5]], " word5", **options)

    def test_nan_in_a_vector(self, tmp_path: Path) -> None:
        vectors = ContextVectors.of(shared_model("llama"), [" word20"], [" word5"], cache_dir=tmp_path, progress=False)
        name = "part-000-layer-0001"
        path = vectors.folder / f"{name}.safetensors"
        tensors = {key: tensor.clone() for key, tensor in unpack(path.read_bytes(), name, vectors.identity).items()}
        tensors["mean"][0, 0] = torch.nan
        path.write_bytes(pack(name, tensors, vectors.identity))
        with pytest.raises(UsageError, match="hold NaN or infinity"):
            vectors.layer(1)

    def test_vectors_made_beforehand_are_looked_at_too(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="contains the source ' word20'"):
            ContextVectors.of(shared_model("llama"), [" word20"], [" word5 word20"], cache_dir=tmp_path)

    def test_a_checkpoint_that_was_never_built_takes_vectors(self, tmp_path: Path) -> None:
        source = source_model("llama")
        model = hosted(source, "llama")
        weights = HeadWeights.from_checkpoint(save_checkpoint(source_model("llama"), tmp_path / "model"))
        with pytest.raises(UsageError, match="give vectors made where it can run"):
            relation_scores(weights, self.RELATION, preset="context", progress=False)
        vectors = ContextVectors.of(
            model, [" word20", " word21"], [" word5", " word6 word7"], cache_dir=tmp_path / "context"
        )
        scores = relation_scores(weights, self.RELATION, preset="context", vectors=vectors.folder, progress=False)
        own = relation_scores(
            model, self.RELATION, preset="context", prompts=[" word5", " word6 word7"], progress=False
        )
        assert torch.equal(scores.promote, own.promote)
        with pytest.raises(UsageError, match="made with another model"):
            relation_scores(
                random_model("llama", seed=5), self.RELATION, preset="context", vectors=vectors, progress=False
            )
        more = Relation.from_pairs("more", [(word(25), word(30))])
        with pytest.raises(UsageError, match="lack a source with token ids"):
            relation_scores(weights, more, preset="context", vectors=vectors, progress=False)

    def test_a_stream_that_is_not_finite(self, tmp_path: Path) -> None:
        model = random_model("llama")
        with torch.no_grad():
            next(model.blocks[1].mlp.parameters()).fill_(float("inf"))
        with pytest.raises(HeadMapsError, match="NaN or infinity"):
            context_vectors(model, [(20,)], PREFIXES, cache_dir=tmp_path, progress=False)


def test_salient_operations_of_met_tokens_equal_a_dense_reference() -> None:
    model = shared_model("llama")
    weights = HeadWeights.from_model(model)
    prompts = [" word5 word6", " word7"]
    operations = salient_operations(
        model, ["L1H1", "L2H3"], preset="context", prompts=prompts, n_tokens=4, n_targets=3, progress=False
    )
    prefixes = [model.to_tokens(prompt)[0].tolist() for prompt in prompts]
    vectors = context_vectors(model, [(i,) for i in range(weights.n_vocab)], prefixes, progress=False)
    for index, head in enumerate((HeadIndex(1, 1), HeadIndex(2, 3))):
        layer, x = weights.layer(head.layer), vectors.layer(head.layer)
        assert layer.ln1 is not None
        written = x * layer.ln1.weight @ layer.W_V[weights.group_of(head.head)] @ layer.W_O[head.head]
        ratio = written.norm(dim=-1) / x.norm(dim=-1)
        best = ratio.topk(4)
        assert operations.token_ids[index].tolist() == best.indices.tolist()
        torch.testing.assert_close(operations.salience[index], best.values, atol=1e-4, rtol=1e-4)
        assert weights.ln_final is not None
        logits = weights.ln_final.folded_into(written[best.indices]) @ weights.W_U.float().T
        assert operations.promoted_ids[index].tolist() == logits.topk(3).indices.tolist()


def test_bundled_prompts_that_do_not_suit_the_sources_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tl_headmaps.capture.running.context.neutral_prompts", lambda: (" word5 word6", " word7 word20")
    )
    weights = HeadWeights.from_model(shared_model("llama"))
    assert collect_inputs(weights, [(20,)], progress=False).n_prompts == 1
    assert collect_inputs(weights, [(21,)], progress=False).n_prompts == 2
    with pytest.raises(HeadMapsError, match="contains the source"):
        collect_inputs(weights, [(20,), (5,)], progress=False)
