"""Value mixing: seed 002 to the last digit, the invariants, and real heads against the model's own output."""

import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planted import DECODERS, random_model, shared_model

from tl_headmaps import AssociationHeads, ValueMixing, WorkedExample, association_heads, value_mixing
from tl_headmaps.core.errors import HeadMapsError, TokenError, UsageError
from tl_headmaps.core.vocabulary import token_position
from tl_headmaps.renderers.formulas import UNICODE, Product, Rest, Sum
from tl_headmaps.scorers.mixing import cosines, shared_dimensions, shared_when_turned

V = [[0.1, 0.2, 0.3], [-0.8, 0.3, -0.1], [0.5, -0.1, -0.4]]
A = [[1, 0, 0], [0.1, 0.9, 0], [0.6, 0.1, 0.4]]
WORDS = ["Birds", "sometimes", "walk"]
TEXT = "Birds sometimes walk"
EXACT = {"abs": 1e-15}
"""Sums of a few products of float64 numbers below one."""


def numbers(text: str) -> list[str]:
    """The numbers of a formula in any notation, in their order."""
    text = re.sub(r"\(\d+ (others|more)[^)]*\)|[av](?:_hat)?\d+(,\d+)?", " ", text)
    return re.findall(r"(?<![\w.,])\d+\.\d+(?!\w)", text)


def total(term: Any) -> float | None:
    """What a term comes to; None if it has symbols in it."""
    if isinstance(term, Product):
        factors = [total(factor) for factor in term.factors]
        return None if None in factors else math.prod(factors)  # type: ignore[arg-type]
    if isinstance(term, Sum):
        parts = [total(part) for part in term.terms]
        return None if None in parts else math.fsum(parts)  # type: ignore[arg-type]
    if isinstance(term, Rest):
        return term.value
    return term if isinstance(term, float) else None


def value_mixing_of(n: int) -> ValueMixing:
    """Random attention over this many tokens, and values of 64 dimensions."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(n, 64, generator=generator, dtype=torch.float64)
    pattern = torch.rand(n, n, generator=generator, dtype=torch.float64).tril()
    return ValueMixing.from_arrays(pattern / pattern.sum(1, keepdim=True), values)


@pytest.fixture(scope="module")
def seed() -> ValueMixing:
    return ValueMixing.from_arrays(A, V, WORDS)


class TestSeed:
    def test_the_numbers_of_seed_002(self, seed: ValueMixing) -> None:
        example = seed.explain("walk", "Birds")
        assert example.before == pytest.approx(-0.09, **EXACT)
        assert example.mixed.tolist() == pytest.approx([0.18, 0.11, 0.01], **EXACT)
        assert example.after == pytest.approx(0.043, **EXACT)
        assert example.gain == pytest.approx(0.133, **EXACT)
        assert example.split.tolist() == pytest.approx([0.084, -0.005, -0.036], **EXACT)
        assert example.change_split.tolist() == pytest.approx([0.084, -0.005, 0.054], **EXACT)
        assert float(seed.after_dot[2, 2]) == pytest.approx(0.075, **EXACT), "what the seed's v_hat3 . v3 really is"
        assert example.notes == ("row 3 of A ('walk') sums to 1.1, not to 1, and is used as it is",)
        assert seed.notes == example.notes

    def test_views_that_run_backwards(self, seed: ValueMixing) -> None:
        """They were refused as if they were no numbers."""
        backwards = np.asarray(V)[::-1].copy()[::-1]
        assert torch.equal(ValueMixing.from_arrays(A, backwards, WORDS).V_hat, seed.V_hat)

    @pytest.mark.parametrize("array", [np.array, torch.tensor])
    def test_whole_numbers_stay_as_they_are(self, array: Any) -> None:
        """Float32 is exact up to 2 ** 24 alone."""
        values = [[2**24 + 1, 1], [3, 2**31 - 1]]
        assert ValueMixing.from_arrays(array([[1, 0], [0, 1]]), array(values)).V.tolist() == values

    def test_normalised(self) -> None:
        found = ValueMixing.from_arrays(A, V, WORDS, normalise=True)
        assert found.V_hat[2].tolist() == pytest.approx([0.18 / 1.1, 0.1, 0.01 / 1.1], **EXACT)
        assert found.explain("walk", "Birds").after == pytest.approx(0.043 / 1.1, **EXACT)
        assert round(found.explain("walk", "Birds").after, 5) == 0.03909
        assert found.notes == ("row 3 of A ('walk') sums to 1.1, and was divided by its sum",)
        torch.testing.assert_close(found.A.sum(1), torch.ones(3, dtype=torch.float64))

    def test_the_worked_example_line_by_line(self, seed: ValueMixing) -> None:
        lines = str(seed.explain("walk", "Birds")).splitlines()
        assert repr(seed.explain("walk", "Birds")).splitlines() == lines, "a terminal shows no tensors"
        for line in (
            "v2 (sometimes)    -0.8     0.3    -0.1",
            "walk          0.6         0.1    0.4",
            "sometimes     0.1         0.9      0",
            "  v3 · v1 = 0.1 × 0.5 + 0.2 × (-0.1) + 0.3 × (-0.4)",
            "          = 0.05 - 0.02 - 0.12",
            "          = -0.09",
            "  v_hat3 = a3,1 × v1 + a3,2 × v2 + a3,3 × v3",
            "  v_hat3,1 = 0.6 × 0.1 + 0.1 × (-0.8) + 0.4 × 0.5",
            "           = 0.06 - 0.08 + 0.2",
            "           = 0.18",
            "  v_hat3,2 = 0.6 × 0.2 + 0.1 × 0.3 + 0.4 × (-0.1)",
            "           = 0.12 + 0.03 - 0.04",
            "  v_hat3,3 = 0.6 × 0.3 + 0.1 × (-0.1) + 0.4 × (-0.4)",
            "           = 0.18 - 0.01 - 0.16",
            "walk    0.18    0.11    0.01",
            "  v_hat3 · v1 = 0.18 × 0.1 + 0.11 × 0.2 + 0.01 × 0.3",
            "              = 0.018 + 0.022 + 0.003",
            "              = 0.043",
            "  v_hat3 · v1 = 0.6 × (v1 · v1) + 0.1 × (v2 · v1) + 0.4 × (v3 · v1)",
            "              = 0.084 - 0.005 - 0.036",
            "after, by source: Birds +0.084, sometimes -0.005, walk -0.036",
            "note: row 3 of A ('walk') sums to 1.1, not to 1, and is used as it is",
        ):
            assert line in lines
        assert "three significant digits" not in str(seed.explain("walk", "Birds")), "nothing was rounded"
        assert "three significant digits" in str(value_mixing_of(3).explain(2, 0))

    def test_the_slip_of_the_document_is_named_rightly(self, seed: ValueMixing) -> None:
        """It writes 0.043 as the product of the mixed value with v3; that one is 0.075."""
        lines = str(seed.explain("walk", "walk")).splitlines()
        assert "  v_hat3 · v3 = 0.18 × 0.5 + 0.11 × (-0.1) + 0.01 × (-0.4)" in lines
        assert "              = 0.09 - 0.011 - 0.004" in lines and "              = 0.075" in lines

    def test_every_form_is_of_one_list_of_steps(self, seed: ValueMixing) -> None:
        """The numbers of all lines, in their order, are the same in text, Markdown, LaTeX, on the page and in print."""
        for example in (seed.explain("walk", "Birds"), value_mixing_of(20).explain(19, 3)):
            data = example.figure().data
            page = "\n".join(re.findall("<text[^>]*>([^<]*)</text>", example.figure().body))
            printed = "\n".join(
                "".join(line)
                for step in data.steps
                for line in [
                    *((UNICODE.number(float(x)),) for matrix in step.matrices for x in matrix.values.flatten()),
                    *(line for equation in step.equations for line in UNICODE.lines(equation, 40)),
                ]
            )
            expected = numbers(printed)
            assert len(expected) > 60
            in_text = numbers("\n".join(line for line in str(example).splitlines() if "=" in line))
            for text in (example.markdown(), example.to_latex(), page):
                found = numbers(text)
                for part in (expected, in_text):
                    places = iter(found)
                    assert all(number in places for number in part), "in this order"

    def test_latex_and_markdown(self, seed: ValueMixing) -> None:
        example = seed.explain("walk", "Birds")
        for text in (example.markdown(), example.to_latex()):
            assert r"\hat{v}_{3} \cdot v_{1} &= 0.18 \times 0.1 + 0.11 \times 0.2 + 0.01 \times 0.3" in text
            assert r"\text{v2 (sometimes)} & -0.8 & 0.3 & -0.1 \\" in text
            assert text.count(r"\begin{aligned}") == text.count(r"\end{aligned}") == 4
            assert text.count(r"\begin{array}") == text.count(r"\end{array}") == 3
        assert example.markdown().count("$$") == 14 and "$" not in example.to_latex()
        assert "gain $+0.133$" in example.markdown() and r"gain \(+0.133\)" in example.to_latex()

    def test_each_matrix_has_a_scale_and_a_used_row_is_marked(self, seed: ValueMixing) -> None:
        figure = seed.explain("walk", "Birds").figure()
        values, attention, _ = [matrix.scale for step in figure.data.steps for matrix in step.matrices]
        assert (values.low, values.high) == pytest.approx((-0.8, 0.8)) and values.signed
        assert (attention.low, attention.high, attention.signed) == (0, 1, False)
        assert re.search(r'font-weight="bold">walk</text>', figure.body), "the row that is used"

    def test_tokens_are_untrusted_text(self) -> None:
        words = ["<script>$x$</script>", r"a\b_{c}%&#", "*two*\nlines"]
        example = ValueMixing.from_arrays(A, V, words).explain(2, 0)
        assert "<script>" not in example.markdown() and r"\$x\$" in example.markdown()
        assert r"\textbackslash{}b\_\{c\}\%\&\#" in example.to_latex()
        assert r"*two*\nlines" in str(example) and "*two*\nlines" not in str(example)

    def test_long_texts_and_vectors_are_shortened_and_every_line_adds_up(self) -> None:
        mixing = value_mixing_of(20)
        example, pattern, values = mixing.explain(19, 3), mixing.A, mixing.V
        text = str(example)
        assert "58 more dimensions, 14 more tokens" in text and "(14 others)" in text and "(58 more)" in text
        assert max(map(len, text.splitlines())) < 150
        assert example.after == pytest.approx(float((pattern[19] @ values) @ values[3]))
        assert example.notes == ()
        shapes = [matrix.values.shape for step in example.figure().data.steps for matrix in step.matrices]
        assert shapes == [(6, 6), (1, 6), (1, 6)]
        for step in example.figure().data.steps:
            for equation in step.equations:
                sums = [total(form) for form in equation.right if not isinstance(form, str)]
                known = [each for each in sums if each is not None]
                assert known == pytest.approx([known[0]] * len(known) if known else [])

    def test_the_strongest_dimensions_are_written_out(self) -> None:
        values = torch.full((2, 64), 0.01, dtype=torch.float64)
        values[:, [3, 9, 17, 30, 31, 63]] = 1.0
        example = ValueMixing.from_arrays([[1.0, 0.0], [0.5, 0.5]], values).explain(1, 0)
        assert example.figure().data.steps[0].matrices[0].columns == (
            "dim 4",
            "dim 10",
            "dim 18",
            "dim 31",
            "dim 32",
            "dim 64",
        )

    def test_no_exponents_of_programmers(self) -> None:
        example = ValueMixing.from_arrays([[1, 0], [1.17e-5, 1 - 1.17e-5]], [[1.0, 2e7], [3e-8, 1.0]]).explain(1, 0)
        for text in (
            str(example),
            example.markdown(),
            example.to_latex(),
            str(example.figure()),
            example.figure().body,
        ):
            assert not re.search(r"\de[-+]?\d", text)
        assert "(1.17 × 10^-5) × 1" in str(example)

    def test_digits_and_small_terms_are_chosen(self) -> None:
        row = [0.9, 2e-5, 3e-5, 0.09995]
        mixing = ValueMixing.from_arrays(
            [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], row], [[1.0, 0.5], [1.0, 0.25], [2.0, 3.0], [1.0, 1.17e-5]]
        )
        short, whole = mixing.explain(3, 0, digits=2), mixing.explain(3, 0, digits=2, least=0)
        # Of a dimension's four terms, two are below a thousandth of the largest; they add up to 8e-5.
        assert r"\hat{v}_{4,1} &= 0.9 \times 1 + 0.1 \times 1 + 8 \times 10^{-5}\ \text{(2 others)}" in short.to_latex()
        assert "others" not in whole.to_latex() and r"(2 \times 10^{-5}) \times 1" in whole.to_latex()
        assert r"1.2 \times 10^{-5}" in short.to_latex() and r"1.17 \times 10^{-5}" in mixing.explain(3, 0).to_latex()
        assert "two significant digits" in str(short) and "1.17" not in short.markdown() + short.figure().body
        for example in (short, whole):
            for step in example.figure().data.steps:
                for equation in step.equations:
                    known = [each for form in equation.right if (each := total(form)) is not None]
                    assert known == pytest.approx([known[0]] * len(known) if known else [])
        for wrong, sentence in (
            ({"digits": 0}, "digits=0 cannot be written. Give 1 to 12"),
            ({"least": 1}, "least=1 is impossible; it must be at least 0"),
        ):
            with pytest.raises(UsageError, match=sentence):
                mixing.explain(3, 0, **wrong)  # type: ignore[arg-type]

    def test_the_whole_attention_is_shown_also_of_one_query(self) -> None:
        model, ids = shared_model("llama"), [3, 9, 4, 7]
        one = value_mixing(model, ids, "L1H2", 3, 0)
        drawn = one.figure().data.steps[1].matrices[0]
        np.testing.assert_allclose(drawn.values, value_mixing(model, ids, "L1H2").A, atol=1e-6)
        assert drawn.marked == 3
        long = value_mixing(model, list(range(3, 21)), "L1H2", 17, 0)
        assert long.attention is None and "row of" in long.figure().data.steps[1].matrices[0].note


class TestInvariants:
    @given(st.integers(0, 10_000), st.integers(1, 7), st.integers(1, 5))
    def test_parts_add_up(self, number: int, n: int, width: int) -> None:
        rng = np.random.default_rng(number)
        found = ValueMixing.from_arrays(rng.normal(size=(n, n)), rng.normal(size=(n, width)))
        for query in range(n):
            for key in range(n):
                assert float(found.split(query, key).sum()) == pytest.approx(float(found.after_dot[query, key]))
                assert float(found.change_split(query, key).sum()) == pytest.approx(float(found.values[query, key]))

    @given(st.integers(0, 10_000), st.floats(0.01, 100))
    def test_scaling_values_scales_associations(self, number: int, factor: float) -> None:
        rng = np.random.default_rng(number)
        pattern, values = rng.dirichlet(np.ones(4), size=4), rng.normal(size=(4, 3))
        plain, scaled = ValueMixing.from_arrays(pattern, values), ValueMixing.from_arrays(pattern, factor * values)
        for name in ("before_dot", "after_dot", "values"):
            torch.testing.assert_close(getattr(scaled, name), factor**2 * getattr(plain, name))
        torch.testing.assert_close(scaled.before_cosine, plain.before_cosine)
        torch.testing.assert_close(scaled.after_cosine, plain.after_cosine)

    @given(st.integers(0, 10_000))
    def test_against_loops(self, number: int) -> None:
        rng = np.random.default_rng(number)
        pattern, values = rng.dirichlet(np.ones(4), size=4), rng.normal(size=(4, 3))
        found = ValueMixing.from_arrays(pattern, values)
        for q in range(4):
            hat = sum(pattern[q, s] * values[s] for s in range(4))
            np.testing.assert_allclose(found.V_hat[q].numpy(), hat)
            for k in range(4):
                assert float(found.before_dot[q, k]) == pytest.approx(values[q] @ values[k])
                assert float(found.after_dot[q, k]) == pytest.approx(hat @ values[k])
                cosine = hat @ values[k] / np.linalg.norm(hat) / np.linalg.norm(values[k])
                assert float(found.after_cosine[q, k]) == pytest.approx(cosine)

    def test_attention_on_oneself_changes_nothing(self) -> None:
        found = ValueMixing.from_arrays(torch.eye(3), V)
        assert not bool(found.values.any()) and found.notes == ()

    def test_a_zero_vector_has_cosine_zero(self) -> None:
        assert cosines(torch.zeros(1, 3), torch.ones(2, 3)).tolist() == [[0.0, 0.0]]


class TestModels:
    @pytest.mark.parametrize("name", DECODERS)
    def test_mixed_values_are_the_heads_own_output(self, name: str) -> None:
        model, ids = shared_model(name), [3, 9, 4, 9, 5]
        _, cache = model.run_with_cache(torch.tensor([ids]))
        for layer, head in ((0, 1), (2, 3)):
            found = value_mixing(model, ids, (layer, head))
            z = cache[f"blocks.{layer}.attn.hook_z"][0, :, head]
            torch.testing.assert_close(found.V_hat, z, atol=1e-5, rtol=1e-5)
            assert found.reconstruction_error is not None and found.reconstruction_error < 1e-5
            assert str(found.head) == f"L{layer}H{head}" and found.notes == ()

    @pytest.mark.parametrize("name", ["gpt2", "llama"])
    def test_the_head_map_is_value_mixing_of_every_head(self, name: str) -> None:
        model, ids = shared_model(name), [3, 9, 4, 7, 5]
        for measure in ("cosine", "dot"):
            found = association_heads(model, ids, 4, 1, measure=measure)
            for layer in range(3):
                for head in range(4):
                    mixing = value_mixing(model, ids, (layer, head))
                    before, after = getattr(mixing, f"before_{measure}"), getattr(mixing, f"after_{measure}")
                    change = (after - before)[4]
                    assert float(found.values[layer, head]) == pytest.approx(float(change[1]), abs=1e-5)
                    others = float(change[[0, 2, 3]].mean())
                    assert float(getattr(found, f"others_{measure}")[layer, head]) == pytest.approx(others, abs=1e-5)
                    assert float(found.specific(measure)[layer, head]) == pytest.approx(
                        float(change[1]) - others, abs=1e-5
                    )
                    assert float(found.attention[layer, head]) == pytest.approx(float(mixing.A[4, 1]), abs=1e-6)
            best = found.top(3)
            assert [gain for _, gain in best] == sorted(found.values.flatten().tolist(), reverse=True)[:3]

    def test_one_query_is_one_row_of_all(self) -> None:
        model, ids = shared_model("llama"), [3, 9, 4, 7]
        whole, one = value_mixing(model, ids, "L1H2"), value_mixing(model, ids, "L1H2", 3, 0)
        assert one.queries == (3,) and whole.queries == (0, 1, 2, 3)
        torch.testing.assert_close(one.after_dot[0], whole.after_dot[3])
        assert isinstance(one.example, WorkedExample) and str(one.example) in str(one)
        assert str(one.example) == str(whole.explain(3, 0))
        with pytest.raises(UsageError, match=r"holds the query 3 .* and not 1"):
            one.explain(1, 0)

    def test_half_precision_models_work_too(self) -> None:
        model = random_model("llama", dtype=torch.bfloat16)
        found = value_mixing(model, [3, 9, 4], "L1H2")
        assert found.V.dtype == torch.float32 and found.notes == ()

    @pytest.mark.model
    def test_birds_sometimes_walk(self, default_model: Any) -> None:
        found = value_mixing(default_model, TEXT, "L5H3", "walk", "Birds", prepend_bos=False)
        assert found.tokens == ("Birds", " sometimes", " walk") and found.queries == (2,)
        assert found.reconstruction_error is not None and found.reconstruction_error < 1e-5
        heads = association_heads(default_model, TEXT, "walk", "Birds", prepend_bos=False)
        assert heads.values.shape == (30, 9)
        gain = float((found.after_cosine - found.before_cosine)[0, 0])
        assert float(heads.values[5, 3]) == pytest.approx(gain, abs=1e-5)
        assert "first token" in heads.notes[0] and "note: the key is the first token" in str(heads)
        behind = association_heads(default_model, TEXT, "walk", "Birds")
        assert behind.key == 1 and behind.notes == ()


class TestResults:
    def test_json_holds_every_number(self, seed: ValueMixing) -> None:
        values = json.loads(seed.to_json())
        assert values["V"] == V
        assert values["V_hat"][2] == pytest.approx([0.18, 0.11, 0.01])
        assert values["before"]["dot"][2][0] == pytest.approx(-0.09)
        assert values["after"]["dot"][2][0] == pytest.approx(0.043)
        assert values["split"][2][0] == pytest.approx([0.084, -0.005, -0.036])
        assert values["row_sums"][2] == pytest.approx(1.1) and len(values["notes"]) == 1

    def test_rows(self, seed: ValueMixing) -> None:
        rows = list(seed.to_rows())
        assert len(rows) == 9 and rows[6]["query_token"] == "walk" and rows[6]["dot_after"] == pytest.approx(0.043)
        heads = association_heads(shared_model("llama"), [3, 9, 4], 2, 1)
        assert isinstance(heads, AssociationHeads) and len(list(heads.to_rows())) == 12


class TestTokens:
    TOKENS = ("Birds", " walk", " and", " walk", " C#2", " 7", "\n", " Birds")

    @pytest.mark.parametrize(
        ("token", "place"),
        [
            ("and", 2),
            ("walk#1", 1),
            ("walk#2", 3),
            (3, 3),
            ("3", 3),
            ("7", 5),
            ("C#2", 4),
            ("\n", 6),
            (" Birds", 7),
            ("Birds#1", 0),
        ],
    )
    def test_are_addressed_by_text_number_or_index(self, token: Any, place: int) -> None:
        assert token_position(self.TOKENS, token) == place

    @pytest.mark.parametrize(
        ("token", "sentence"),
        [
            ("fly", r"'fly' is not a token of the text. Its tokens are 0 'Birds', 1 ' walk'"),
            ("walk", r"2 times \(positions 1, 3\). Write 'walk#2'"),
            ("Birds", r"2 times \(positions 0, 7\)"),
            ("walk#3", r"has 'walk' 2 times \(positions 1, 3\)"),
            ("and#0", r"has 'and' 1 time \(position 2\), counted from #1"),
            ("fly#1", "not a token"),
            ("walk and", r"'walk and' is 2 tokens of the text \(1 ' walk', 2 ' and'\), and one is needed"),
            (8, "has tokens 0 to 7"),
            (-9, "has tokens 0 to 7"),
            ("8", "has tokens 0 to 7"),
            ("", "not a token"),
        ],
    )
    def test_that_cannot_be_meant_are_refused_with_their_places(self, token: Any, sentence: str) -> None:
        with pytest.raises(TokenError, match=sentence):
            token_position(self.TOKENS, token)


class TestDimensions:
    def test_strongest_parts_are_counted(self) -> None:
        mixing = value_mixing_of(5)
        places = [4, 3, 2, 1]
        parts = mixing.V_hat[places] * mixing.V[0]
        torch.testing.assert_close(parts.sum(1), mixing.after_dot[places, 0])
        sets = [set(np.argsort(-np.abs(row.numpy()), kind="stable")[:8]) for row in parts]
        expected = [len(sets[0] & each) for each in sets]
        assert shared_dimensions(parts, 8).tolist() == expected
        found = mixing.dimensions(4, 0, against=3, control=[2, 1])
        assert re.findall(r"share (\d) of", found) == [str(count) for count in expected[1:]]
        assert "two random choices would share 1" in found
        cosine = cosines(mixing.V_hat, mixing.V_hat)[4, places[1:]].tolist()
        assert [float(value) for value in re.findall(r"cosine (-?[\d.]+)\)", found.replace("−", "-"))] == pytest.approx(
            cosine, abs=0.01
        )

    def test_a_turned_basis_changes_the_count_but_not_what_stands_beside_it(self) -> None:
        mixing = value_mixing_of(4)
        vectors, keys = mixing.V_hat[[3, 2, 1]], mixing.V[[0, 0, 0]]
        generator = torch.Generator().manual_seed(3)
        basis = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64)).Q
        one = shared_when_turned(vectors, keys, 8, 200).double()
        two = shared_when_turned(vectors @ basis, keys @ basis, 8, 200).double()
        # Means over 200 turned bases each: the same up to a few tenths.
        torch.testing.assert_close(one.mean(0), two.mean(0), atol=0.4, rtol=0)
        assert bool((one[:, 0] == 8).all())

    def test_a_planted_partition(self) -> None:
        """Two words in different dimensions, a third in those of the first."""
        values = torch.full((4, 16), 1e-3, dtype=torch.float64)
        values[0] = 1.0  # the key
        values[1, :4], values[2, 4:8], values[3, :4] = 1.0, 1.0, 2.0
        mixing = ValueMixing.from_arrays(torch.eye(4), values, ["birds", "walk", "flying", "math"])
        found = mixing.dimensions("walk", "birds", against="flying", control="math", n=4)
        assert "'walk' and 'flying' share 0 of their 4" in found and "the control 'math' share 4 of" in found
        assert "'flying' shares no more of them than a control word does" in found
        assert "arbitrary up to rotation" in found
        back = mixing.dimensions("walk", "birds", against="math", control="flying", n=4)
        assert "'math' shares 4 more than any control word does" in back
        assert "Without a control word this says little" in mixing.dimensions("walk", "birds", against="math")

    def test_words_of_other_texts(self) -> None:
        model = shared_model("llama")
        one, other = (value_mixing(model, text, "L1H2") for text in (" word9 word3 word7", " word4 word9 word8"))
        parts = torch.stack([one.V_hat[3] * one.V[1], other.V_hat[3] * other.V[2]])
        expected = shared_dimensions(parts, 3).tolist()[1]
        assert f"share {expected} of their 3" in one.dimensions("word7", "word9", against=(other, "word8"), n=3)
        elsewhere = value_mixing(model, " word9 word8", "L1H3")
        for call, sentence in (
            (
                lambda: one.dimensions("word7", "word9", against=(elsewhere, "word8")),
                "is of L1H3 of .* Give a mixing of L1H2",
            ),
            (lambda: one.dimensions("word7", "word3", against=(other, "word8")), "'word3' is not in the text"),
            (lambda: one.dimensions("word7", "word9", against="word8"), "'word8' is not a token of the text"),
            (lambda: one.dimensions("word7", "word9", against="word3", n=99), "n=99 dimensions cannot be compared"),
            (lambda: one.dimensions("word7", "word9", against=17), "There is no token 17"),
        ):
            with pytest.raises(HeadMapsError, match=sentence):
                call()


class TestBadInput:
    @pytest.mark.parametrize(
        ("pattern", "values", "sentence"),
        [
            (torch.ones(2, 3), torch.ones(3, 1), "must be a square matrix"),
            (torch.ones(0, 0), torch.ones(0, 1), "must be a square matrix"),
            (torch.ones(3), torch.ones(3, 1), "must be a square matrix"),
            (torch.ones(2, 2), torch.ones(3, 1), "must have 2 rows"),
            (torch.ones(2, 2), torch.ones(2), "must have 2 rows"),
            (torch.full((1, 1), math.nan), torch.ones(1, 1), "A holds NaN"),
            (torch.ones(1, 1), torch.full((1, 1), math.inf), "V holds NaN"),
            ("rubbish", torch.ones(1, 1), "A is not an array"),
            ([[1.0]], [["x"]], "V is not an array"),
        ],
    )
    def test_arrays_are_refused_with_a_sentence(self, pattern: Any, values: Any, sentence: str) -> None:
        with pytest.raises(UsageError, match=sentence):
            ValueMixing.from_arrays(pattern, values)

    def test_odd_rows_are_reported_and_normalised_only_where_possible(self) -> None:
        odd = ValueMixing.from_arrays([[1.5, -0.5], [0.0, 0.0]], torch.eye(2))
        assert odd.notes == (
            "row 1 of A ('1') has negative weights, which a softmax never gives; it is used as it is",
            "row 2 of A ('2') sums to 0, not to 1, and is used as it is",
        )
        assert odd.V_hat.tolist() == [[1.5, -0.5], [0, 0]]
        with pytest.raises(UsageError, match="Row 2 of A sums to 0 and cannot be normalised"):
            ValueMixing.from_arrays([[1.5, -0.5], [0.0, 0.0]], torch.eye(2), normalise=True)

    def test_calls_are_refused_with_a_sentence(self) -> None:
        model, ids = shared_model("llama"), [3, 9, 4]
        for call, sentence in (
            (lambda: ValueMixing.from_arrays(A, V, ["a"]), "There are 1 tokens"),
            (lambda: value_mixing(model, "", "L0H0"), "is empty"),
            (lambda: value_mixing(model, ids, "L7H0"), "no head L7H0"),
            (lambda: value_mixing(model, ids, "L0H0", key=1), "without a query"),
            (lambda: value_mixing(model, " word7 word8", "L0H0", "word9"), "'word9' is not a token of the text"),
            (lambda: value_mixing(model, " word7 word7", "L0H0", "word7"), "positions 1, 2"),
            (
                lambda: value_mixing(model, " word7- word8", "L0H0", "word7-"),
                r"is 2 tokens of the text \(1 ' word7', 2 '-'",
            ),
            (lambda: value_mixing(model, ids, "L0H0", 3), "There is no token 3: the text has tokens 0 to 2"),
            (lambda: association_heads(model, ids, 1, 1), "the same token"),
            (lambda: value_mixing(model, ids), "Give a head, or query and key"),
            (lambda: value_mixing(model, ids, "L0H0", measure="dot"), "Leave measure out, or the head"),
            (lambda: association_heads(model, [3], 0, 0), "an association needs two"),
        ):
            with pytest.raises(HeadMapsError, match=sentence):
                call()

    def test_one_token_mixes_with_itself(self) -> None:
        found = value_mixing(shared_model("llama"), [3], "L0H0")
        assert found.A.tolist() == [[1.0]] and not bool(found.values.any())

    def test_a_key_behind_the_query_is_pointed_out(self) -> None:
        found = value_mixing(shared_model("llama"), [3, 9, 4], query=0, key=2)
        other = association_heads(shared_model("llama"), [3, 9, 4], 0, 2)
        assert torch.equal(found.values, other.values)
        assert "comes after the query" in found.notes[0] and found.to_json()
