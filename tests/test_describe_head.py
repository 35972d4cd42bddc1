"""One head, one card: what heads are worth, parts cut down to a head, and a card that says what its results say."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import Anatomy, needs_hooked, random_model, shared_model, source_model, word
from scipy.stats import t as student
from torch import Tensor

import tl_headmaps
from tl_headmaps import (
    HeadCard,
    HeadIndex,
    HeadMapsError,
    HeadWeights,
    Relation,
    Result,
    describe_head,
    describe_model,
    grouping_profile,
    head_trust,
    head_worth,
    name_heads,
    relation_scores,
    salient_operations,
)

PAIRS = [(word(20 + n), word(40 + n)) for n in range(8)]
RELATIONS = [Relation.from_pairs("own", PAIRS), Relation.from_pairs("back", [(b, a) for a, b in PAIRS])]
HEAD = HeadIndex(1, 2)
HOSTS = ["bridge", pytest.param("hooked", marks=needs_hooked)]


def documents(n: int = 12, seed: int = 0) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 14, (n,), generator=generator).tolist()
    ids = [torch.randint(20, 60, (length,), generator=generator).tolist() for length in lengths]
    return [" ".join(word(token) for token in document) for document in ids]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tl_headmaps.core.store.cache_folder", lambda: tmp_path / "cache")


@cache
def card() -> HeadCard:
    return described()


def described(**options: Any) -> HeadCard:
    asked = {"relations": RELATIONS, "preset": "folded", "text": documents()[0], "texts": documents()}
    return describe_head(shared_model("llama"), "L1H2", **{**asked, "progress": False, **options})


class TestWorth:
    @pytest.mark.parametrize("host", HOSTS)
    @pytest.mark.parametrize("kind", ["gpt2", "llama"])
    def test_equals_a_dense_reference(self, kind: str, host: str) -> None:
        model, texts = shared_model(kind, host=host), documents()
        result = head_worth(model, ["L1H2", "L0H3"], texts, max_tokens=9, progress=False)
        ids = [model.to_tokens(text)[0, :9] for text in texts]
        fit, held_out = [x for n, x in enumerate(ids) if n % 3 != 2], [x for n, x in enumerate(ids) if n % 3 == 2]
        d, sizes = Anatomy(source_model(kind), kind).d_head, torch.tensor([len(x) - 1.0 for x in held_out])
        whole = torch.stack([loss(source_model(kind), x) for x in held_out])
        for layer, head in ((1, 2), (0, 3)):
            source, z = source_model(kind), []
            parts = Anatomy(source, kind)
            out = getattr(parts.part(layer, "attn"), parts.names["out"])
            watching = out.register_forward_pre_hook(lambda module, inputs, z=z: z.append(inputs[0][0]))
            for x in fit:
                source(x[None])
            watching.remove()
            own = slice(head * d, (head + 1) * d)
            mean = torch.cat(z)[:, own].mean(0)

            def changed(module: Any, inputs: Any, own: slice = own, mean: Tensor = mean) -> Any:
                z = inputs[0].clone()
                z[..., own] = mean
                return (z,)

            out.register_forward_pre_hook(changed)
            rise = torch.stack([loss(source, x) for x in held_out]) - whole
            expected = float(rise.sum() / sizes.sum())
            assert float(result.worth[layer, head]) == pytest.approx(expected, abs=2e-4)
            n = len(sizes)
            spread = ((rise - expected * sizes).square().sum() / (n - 1) * n).sqrt() / sizes.sum()
            half = student.ppf(0.975, n - 1) * float(spread)
            found = float(result.interval_low[layer, head]), float(result.interval_high[layer, head])
            assert found == pytest.approx((expected - half, expected + half), abs=1e-3)
        assert result.loss == pytest.approx(float(whole.sum() / sizes.sum()), abs=1e-4)
        assert (result.n_texts, result.n_fit_texts, result.n_tokens) == (4, 8, int(sizes.sum()))
        assert int((~result.worth.isnan()).sum()) == 2

    def test_raw_and_processed_weights_give_the_same(self) -> None:
        """Moved value biases are in no mean, and in the output bias instead."""
        raw, processed = (
            head_worth(shared_model("gpt2", processed=flag), [(1, 0), (2, 3)], documents(), progress=False).worth
            for flag in (False, True)
        )
        torch.testing.assert_close(raw, processed, atol=2e-3, rtol=0, equal_nan=True)

    def test_held_out_texts_never_reach_a_mean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module: Any = inspect.getmodule(inspect.unwrap(head_worth))
        means: list[Tensor] = []
        plain = module.mean_outputs

        def watched(*arguments: Any) -> Any:
            found = plain(*arguments)
            means.append(found[1])
            return found

        monkeypatch.setattr(module, "mean_outputs", watched)
        texts, others = documents(), documents(seed=1)
        changed = [others[n] if n % 3 == 2 else text for n, text in enumerate(texts)]
        worth = [head_worth(shared_model("llama"), "L1H2", x, progress=False).worth[1, 2] for x in (texts, changed)]
        assert means[0].equal(means[1]) and worth[0] != worth[1]

    def test_some_texts_are_taken_at_even_distances(self) -> None:
        result = head_worth(shared_model("llama"), "L1H2", documents(30), max_texts=4, progress=False)
        assert (result.n_texts, result.n_fit_texts) == (4, 8)
        taken = [documents(30)[n] for n in (2, 8, 17, 23)]  # of held-out texts 0, 2, 5, 7 of ten
        model = shared_model("llama")
        assert result.n_tokens == sum(model.to_tokens(text).shape[1] - 1 for text in taken)

    def test_shown_and_listed(self) -> None:
        result = head_worth(shared_model("llama"), None, documents(), progress=False)
        assert len(list(result.to_rows())) == 12 and result.top(1)[0][1] == float(result.worth.max())
        assert "4 held-out texts" in str(result) and "4 held-out texts" in result.figure().body
        single = replace(result, interval_low=torch.full((3, 4), 0.1), interval_high=torch.full((3, 4), 0.2))
        assert "above 0 for 12 heads and below 0 for 0" in " ".join(str(single).split())

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"texts": documents(3)}, "3 texts are too few"),
            ({"max_texts": 1}, "max_texts=1 is too few"),
            ({"max_tokens": 2}, "max_tokens=2 is too short"),
            ({"model": HeadWeights.from_model(shared_model("llama"))}, "HeadWeights cannot run"),
        ],
    )
    def test_bad_input(self, options: dict[str, Any], sentence: str) -> None:
        asked = {"model": shared_model("llama"), "heads": "L1H2", "texts": documents(), "progress": False}
        with pytest.raises(HeadMapsError, match=sentence):
            head_worth(**{**asked, **options})


def loss(source: Any, ids: Tensor) -> Tensor:
    log_chances = torch.log_softmax(source(ids[None]).logits[0, :-1].double(), -1)
    return -log_chances.gather(1, ids[1:, None]).sum()


class TestSomeHeads:
    """Profile and trust of some heads are those of all heads, but for the family of q."""

    def test_profile(self) -> None:
        model = shared_model("llama")
        full, some = (grouping_profile(model, documents(), heads=x, progress=False) for x in (None, ["L1H2", "L2H0"]))
        for name in ("values", "interval_low", "null", "p_value", "where_possible"):
            one, other = getattr(full, name), getattr(some, name)
            for layer, head in ((1, 2), (2, 0)):
                torch.testing.assert_close(one[:, layer, head], other[:, layer, head], atol=0, rtol=0, equal_nan=True)
            assert int((~other[0].isnan()).sum()) == 2
        assert float(some.q_value.nan_to_num().sum()) > 0 and not some.q_value[:, 1, 2].equal(full.q_value[:, 1, 2])

    def test_trust(self) -> None:
        model = shared_model("llama")
        options: dict[str, Any] = {"prompts": [" word7"], "n_null": 1, "progress": False}
        full, some = (head_trust(model, documents(), heads=x, **options) for x in (None, ["L1H2", "L2H0"]))
        for name in ("token_share", "interval_low", "null"):
            one, other = getattr(full, name)["context"], getattr(some, name)["context"]
            assert one[1, 2].equal(other[1, 2]) and one[2, 0].equal(other[2, 0])
            assert int((~other.isnan()).sum()) == 2
        assert some.n_tokens == full.n_tokens and bool(some.sink_share[0].isnan())
        cut = head_trust(model, documents(), heads="L1H2", max_tokens=4, **options)
        assert cut.n_tokens == 4 * cut.n_documents
        with pytest.raises(HeadMapsError, match="max_tokens=2 is too short"):
            head_trust(model, documents(), max_tokens=2, **options)


class TestCard:
    def test_every_part_is_that_of_its_analysis(self) -> None:
        model, found = shared_model("llama"), card()
        layer = [(1, head) for head in range(4)]
        scores = relation_scores(model, RELATIONS, preset="folded", heads=layer, progress=False)
        assert found.relations is not None and found.operations is not None
        assert found.profile is not None and found.worth is not None and found.trust is not None
        for name in ("promote", "null_mean", "q_value", "suppress"):
            expected, own = getattr(scores, name), getattr(found.relations, name)
            assert own[:, 1, 2].equal(expected[:, 1, 2]) and int((~own[0].isnan()).sum()) == 1
        operations = salient_operations(model, layer, progress=False)
        assert found.operations.mappings(HEAD) == operations.mappings(HEAD)
        assert found.operations.name(HEAD) == operations.name(HEAD) and found.operations.heads == (HEAD,)
        profile = grouping_profile(model, documents(), heads=layer, progress=False)
        assert torch.equal(found.profile.q_value[:, 1, 2].nan_to_num(), profile.q_value[:, 1, 2].nan_to_num())
        worth = head_worth(model, layer, documents(), progress=False)
        torch.testing.assert_close(found.worth.worth, worth.worth, equal_nan=True)
        assert found.relations.token_share is not None
        assert found.relations.token_share[1, 2] == found.trust.token_share["folded"][1, 2]
        ranks = describe_model(model).qk_rank
        assert found.description.qk_rank is not None and ranks is not None and found.description.qk_rank.equal(ranks)

    def test_loaded_from_a_file_it_shows_the_same(self, tmp_path: Path) -> None:
        assert Result.load(card().save(tmp_path / "card.json")).figure() == card().figure()
        values = card().to_dict()
        assert values["head"] == "L1H2"
        assert values["worth"]["kind"] == "head_worth" and values["operations"]["kind"] == "salient_operations"
        assert set(card().references) >= {"elhelo2024maps", "olsson2022induction", "wang2023interpretability"}

    def test_the_text_says_what_the_results_say(self) -> None:
        text, found = str(card()), card()
        assert found.sentence.startswith("L1H2 implements none of the 2 relations tried; ")
        assert "tested together: 4 heads of layer 1." in " ".join(text.split())
        assert found.worth is not None and all(
            cell in text for cell in found.worth.cell_texts({"layer": HEAD.layer, "head": HEAD.head})
        )
        rank = 1 + [head for head, _ in found.worth.top(4)].index(HEAD)
        assert f"rank {rank} of the 4 heads of its layer" in " ".join(text.split())
        assert found.trust is not None and f"{found.trust.values[1, 2]:.2f}" in text
        page = found.figure()
        assert page.body.count('class="tlhm-title"') == 9 and "What L1H2 of tiny-llama does" in page.title
        assert page.text == text and all(title in page.body for title, _ in found.sections())
        assert {row["section"] for row in found.to_rows()} <= {title for title, _ in found.sections()}

    def test_what_a_planted_head_does_is_said_first(self) -> None:
        """Scores of a head that knows a relation, put into the card, are its first words."""
        found = card()
        assert found.relations is not None and found.profile is not None
        maps = {name: getattr(found.relations, name).clone() for name in ("promote", "q_value", "neighbour_p_value")}
        for values, one in zip(maps.values(), (0.9, 0.001, 0.001), strict=True):
            values[1, 1, 2] = one
        q = found.profile.q_value.clone()
        q[:, 1, 2] = torch.tensor([0.9, 0.9, 0.001, 0.001, 0.9, 0.9])
        knowing = replace(found, relations=replace(found.relations, **maps), profile=replace(found.profile, q_value=q))
        assert knowing.implemented == [("back", pytest.approx(0.9))]
        assert knowing.sentence.startswith("L1H2 implements back (0.90) of 2 relations tried; ")
        # The first token is passed, too, and says less.
        assert "it looks at what followed the same token before (induction)" in knowing.sentence
        assert "back *" in str(knowing)

    def test_given_results_are_not_made_again(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        model = shared_model("llama")
        scores = relation_scores(model, RELATIONS[0], preset="folded", progress=False)
        given = [scores, salient_operations(model, progress=False).save(tmp_path / "all.json")]

        def never(*arguments: Any, **options: Any) -> None:
            raise AssertionError("made again")

        for name in ("relation_scores", "salient_operations"):
            monkeypatch.setattr(inspect.getmodule(HeadCard), name, never)
        found = described(results=given)
        assert found.relations is not None and found.relations.q_value[0, 1, 2] == scores.q_value[0, 1, 2]
        assert "tested together: all heads of the model." in " ".join(str(found).split())
        assert found.provenance.options["given"] == ["operations", "relations"]
        with pytest.raises(AssertionError, match="made again"):
            described()

    @pytest.mark.parametrize(
        ("made", "sentence"),
        [
            (lambda model: name_heads(model, progress=False), "'head_names', which is not a part of a card"),
            (
                lambda model: relation_scores(model, RELATIONS, preset="folded", heads="L0H0", progress=False),
                "says nothing about L1H2",
            ),
            (lambda model: salient_operations(model, "L0H0", progress=False), "says nothing about L1H2"),
            (lambda model: describe_model(random_model("llama", seed=1)), "belongs to another model"),
        ],
    )
    def test_results_that_do_not_belong(self, made: Callable[[Any], Result], sentence: str) -> None:
        with pytest.raises(HeadMapsError, match=sentence):
            described(results=[made(shared_model("llama"))])

    def test_two_results_of_a_kind(self) -> None:
        one = describe_model(shared_model("llama"))
        with pytest.raises(HeadMapsError, match="two of kind 'model_description'"):
            described(results=[one, one])

    def test_what_a_model_cannot_have_is_said(self, tmp_path: Path) -> None:
        """Without a first MLP that can be computed, a layer above 0 has no map from the weights alone."""
        texts, options = documents(), {"relations": RELATIONS, "preset": "folded", "progress": False}
        found = describe_head(shared_model("mixtral"), "L1H2", text=texts[0], texts=texts, **options)
        assert set(found.missing) == {"relations", "operations", "trust"} and found.relations is None
        assert "Not here: 'tiny-mixtral'" in str(found) and found.worth is not None
        assert Result.load(found.save(tmp_path / "card.json")) == found

    def test_bad_input(self) -> None:
        with pytest.raises(HeadMapsError, match="There is no head L9H9"):
            describe_head(shared_model("llama"), "L9H9")
        with pytest.raises(HeadMapsError, match="is empty"):
            described(text=" ")

    def test_commands(self, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(tl_headmaps, "load_model", lambda *_: shared_model("llama"))
        pairs, texts, out = tmp_path / "own.csv", tmp_path / "texts.txt", tmp_path / "worth.json"
        pairs.write_text("source,target\n" + "\n".join(f"{a},{b}" for a, b in PAIRS))
        texts.write_text("\n\n".join(documents()))
        shown = run("worth", "--heads", "L1H1,L1H2", "--texts", str(texts), "--max-tokens", "48", "--out", str(out))
        assert shown.code == 0 and "held-out texts" in shown.out
        options = ["--relations", str(pairs), "--preset", "folded", "--texts", str(texts), "--results", str(out)]
        shown = run("head", "L1H2", *options, "--out", str(tmp_path / "card.html"), "--out", str(tmp_path / "card.png"))
        assert shown.code == 0 and "WHAT IT IS WORTH" in shown.out, shown.err
        assert "What L1H2 of tiny-llama does" in (tmp_path / "card.html").read_text()
        assert run("head", "23.4").code == 2
