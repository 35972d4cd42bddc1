"""The blocked engine against whole maps formed in the test.

Integer-valued factors make every product exact in float32, so ties are real and answers must agree to the letter.
With float factors, two ways of adding differ in the last bit; there an answer may differ only where the reference
itself has a neighbour within rounding, and the tests count those.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tl_headmaps.circuits.blocks import count_true
from tl_headmaps.circuits.extremes import entries, row_norms, top_k
from tl_headmaps.circuits.factored import FactorColumns, LayerMaps, ProductColumns
from tl_headmaps.circuits.ranking import ranks
from tl_headmaps.core.errors import UsageError
from tl_headmaps.core.types import HeadIndex

pytestmark = pytest.mark.usefixtures("one_thread")

TINY_BUDGET = 1 << 9
"""Forces blocks of eight columns and a row or two."""

ROUNDING = 1e-5
"""Float32 products of these sizes agree to a few 1e-7 of the largest entry; this is far above, and far below the
typical gap between two neighbours in a row."""

BUDGETS = st.sampled_from([1, TINY_BUDGET, 1 << 14, 64 << 20])


def numbers(generator: torch.Generator, *shape: int, exact: bool) -> Tensor:
    if exact:
        # At most 40 products of 40 * 3 * 3, far below 2**24.
        return torch.randint(-3, 4, shape, generator=generator).float()
    return torch.randn(*shape, generator=generator)


def make_maps(
    seed: int,
    *,
    columns: str,
    n_rows: int,
    n_columns: int,
    rank: int = 3,
    d_model: int = 5,
    n_heads: int = 2,
    grouped: bool = False,
    offset: bool = False,
    exact: bool = True,
    decay: float = 0.0,
) -> LayerMaps:
    """Maps with integer (``exact``) or normal factors; ``decay`` makes the norms of rows and columns fall."""
    generator = torch.Generator().manual_seed(seed)
    n_groups = 1 if grouped else n_heads
    group = tuple(h * n_groups // n_heads for h in range(n_heads))
    fall_rows = torch.exp(-decay * torch.randperm(n_rows, generator=generator) / n_rows)
    fall_columns = torch.exp(-decay * torch.randperm(n_columns, generator=generator) / n_columns)
    if columns == "product":
        tokens = numbers(generator, n_columns, d_model, exact=exact) * fall_columns[:, None]
        middle = numbers(generator, n_heads, rank, d_model, exact=exact)
        large_first = tokens.norm(dim=-1).argsort(descending=True, stable=True)
        right: Any = ProductColumns(tokens, middle, large_first)
        left = numbers(generator, n_groups, n_rows, rank, exact=exact)
        left_group = group
    else:
        factors = numbers(generator, n_groups, n_columns, rank, exact=exact) * fall_columns[:, None]
        right = FactorColumns(factors, group)
        left = numbers(generator, n_heads, n_rows, rank, exact=exact)
        left_group = tuple(range(n_heads))
    shift = numbers(generator, n_heads, n_rows, exact=exact)
    return LayerMaps(
        heads=tuple(HeadIndex(4, 2 * h) for h in range(n_heads)),
        left=left * fall_rows[:, None],
        group=left_group,
        columns=right,
        offset=shift if offset else torch.zeros(n_heads, n_rows),
    )


def dense(maps: LayerMaps) -> Tensor:
    """The whole map of every head in float64."""
    whole = []
    for h in range(len(maps.heads)):
        if isinstance(maps.columns, ProductColumns):
            right = maps.columns.tokens.double() @ maps.columns.middle[h].double().T
        else:
            right = maps.columns.factors[maps.columns.group[h]].double()
        left = maps.left[maps.group[h]].double()
        whole.append(left @ right.T - maps.offset[h].double()[:, None])
    return torch.stack(whole)


def dense_ranks(whole: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    own = whole[:, rows, columns][..., None]
    return (whole[:, rows] > own).sum(-1), (whole[:, rows] < own).sum(-1)


def near_ties(whole: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """For each pair, how many other columns lie within rounding of the target."""
    own = whole[:, rows, columns][..., None]
    return ((whole[:, rows] - own).abs() <= ROUNDING * whole.abs().max()).sum(-1) - 1


def some_pairs(seed: int, n_rows: int, n_columns: int, n_pairs: int) -> tuple[Tensor, Tensor]:
    """Pairs with repeated rows and, when there are more pairs than cells, repeated pairs."""
    generator = torch.Generator().manual_seed(seed + 1)
    rows = torch.randint(0, n_rows, (n_pairs,), generator=generator)
    return rows, torch.randint(0, n_columns, (n_pairs,), generator=generator)


cases = given(
    seed=st.integers(0, 2**31),
    columns=st.sampled_from(["product", "factor"]),
    n_rows=st.integers(1, 40),
    n_columns=st.integers(1, 90),
    rank=st.integers(1, 4),
    n_heads=st.integers(1, 3),
    grouped=st.booleans(),
    offset=st.booleans(),
    budget=BUDGETS,
    data=st.data(),
)


class TestRanks:
    @cases
    def test_integer_factors_agree_to_the_letter(
        self, seed: int, n_rows: int, n_columns: int, budget: int, data: Any, **shape: Any
    ) -> None:
        maps = make_maps(seed, n_rows=n_rows, n_columns=n_columns, **shape)
        rows, columns = some_pairs(seed, n_rows, n_columns, data.draw(st.integers(1, 60)))
        greater, less = dense_ranks(dense(maps), rows, columns)
        found = ranks(maps, rows, columns, budget=budget)
        assert torch.equal(found.greater, greater)
        assert torch.equal(found.less, less)

        limit = data.draw(st.integers(1, n_columns + 2))
        early = ranks(maps, rows, columns, limit=limit, budget=budget)
        assert torch.equal(early.greater, greater.clamp(max=limit))
        assert torch.equal(early.less, less.clamp(max=limit))

    @cases
    def test_float_factors_differ_only_at_near_ties(
        self, seed: int, n_rows: int, n_columns: int, budget: int, data: Any, **shape: Any
    ) -> None:
        maps = make_maps(seed, n_rows=n_rows, n_columns=n_columns, exact=False, **shape)
        rows, columns = some_pairs(seed, n_rows, n_columns, data.draw(st.integers(1, 30)))
        whole = dense(maps)
        greater, less = dense_ranks(whole, rows, columns)
        doubtful = near_ties(whole, rows, columns)
        for one in (ranks(maps, rows, columns), ranks(maps, rows, columns, budget=budget)):
            assert bool(((one.greater - greater).abs() <= doubtful).all())
            assert bool(((one.less - less).abs() <= doubtful).all())

    @pytest.mark.parametrize("columns", ["product", "factor"])
    def test_budget_and_limit_change_no_rank_of_a_large_float_map(self, columns: str) -> None:
        shape = {"n_rows": 60, "n_columns": 5003, "rank": 16, "d_model": 48}
        maps = make_maps(0, columns=columns, exact=False, **shape)
        rows, targets = some_pairs(0, 60, 5003, 120)
        whole = dense(maps)
        greater, less = dense_ranks(whole, rows, targets)
        certain = near_ties(whole, rows, targets) == 0
        # The comparison below means something only if most pairs are beyond doubt.
        assert certain.float().mean() > 0.75
        for budget in (1 << 17, 1 << 20, 64 << 20):
            for limit in (None, 10):
                found = ranks(maps, rows, targets, limit=limit, budget=budget)
                top = 10 if limit else 5003
                assert torch.equal(found.greater[certain], greater.clamp(max=top)[certain])
                assert torch.equal(found.less[certain], less.clamp(max=top)[certain])

    @pytest.mark.parametrize("columns", ["product", "factor"])
    @pytest.mark.parametrize("n_columns", [4099, 4104, 6200, 13001])
    def test_leaving_early_gives_clamped_ranks(
        self, columns: str, n_columns: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tl_headmaps.circuits import ranking

        living = []
        plain_phase = ranking._Scan.phase

        def phase(self: Any, span: slice, order: Tensor | None) -> None:
            living.append(sum(len(alive) for alive in self.alive))
            plain_phase(self, span, order)

        monkeypatch.setattr(ranking._Scan, "phase", phase)
        maps = make_maps(3, columns=columns, n_rows=30, n_columns=n_columns, rank=4, d_model=12, grouped=True)
        rows, targets = some_pairs(3, 30, n_columns, 45)
        # Extreme targets cannot leave: the best and the worst column of two rows.
        whole = dense(maps)
        rows[:2], targets[:2] = torch.tensor([0, 1]), torch.stack([whole[0, 0].argmax(), whole[0, 1].argmin()])
        greater, less = dense_ranks(whole, rows, targets)
        found = ranks(maps, rows, targets, limit=20)
        assert torch.equal(found.greater, greater.clamp(max=20))
        assert torch.equal(found.less, less.clamp(max=20))
        assert len(living) > 1, "one phase only: the map is too small for this test"
        assert living[0] > living[-1] > 0, "some rows should leave and some should stay"

    @pytest.mark.parametrize("columns", ["product", "factor"])
    @pytest.mark.parametrize("side", ["both", "greater", "less"])
    def test_a_glance_at_favoured_columns_changes_no_rank(self, columns: str, side: Any) -> None:
        """Rows with a mean that all share: what it favours decides nearly all of them, the rest start anew."""
        maps = make_maps(5, columns=columns, n_rows=48, n_columns=5000, rank=8, d_model=12, n_heads=3)
        maps = replace(maps, left=maps.left + 4)
        rows, targets = some_pairs(5, 48, 5000, 90)
        rows = torch.cat([torch.arange(48), rows])
        # Targets among the favoured columns as well: they must not count themselves.
        targets = torch.cat([maps.favoured[0][1, :24], maps.favoured[1][2, :24], targets])
        greater, less = dense_ranks(dense(maps), rows, targets)
        decided = torch.minimum(greater, less) if side == "both" else greater if side == "greater" else less
        assert (decided < 10).any() and (decided >= 10).float().mean() > 0.5
        found = ranks(maps, rows, targets, limit=10, side=side)
        rough = ranks(maps, rows, targets, limit=10, side=side, roughly=True)
        for name, exact in (("greater", greater), ("less", less)):
            if side in ("both", name):
                assert torch.equal(getattr(found, name), exact.clamp(max=10))
                assert bool((getattr(rough, name) <= getattr(found, name)).all())

    @pytest.mark.parametrize("columns", ["product", "factor"])
    def test_favoured_columns_are_the_ends_of_the_mean_row(self, columns: str) -> None:
        maps = make_maps(6, columns=columns, n_rows=20, n_columns=700, n_heads=2, exact=False)
        mean = dense(maps).mean(1)
        for found, sign in zip(maps.favoured, (1, -1), strict=True):
            wanted = (sign * mean).topk(found.shape[1]).indices
            assert torch.equal(found.sort().values, wanted.sort().values)

    def test_three_tokens_by_hand(self) -> None:
        # Row 0 is [2, 5, 5], row 1 is [-1, -1, 0]; rank counts strictly greater entries.
        left = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        factors = torch.tensor([[[2.0, -1.0], [5.0, -1.0], [5.0, 0.0]]])
        maps = LayerMaps((HeadIndex(0, 0),), left, (0,), FactorColumns(factors, (0,)), torch.zeros(1, 2))
        rows, columns = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 0, 1, 2])
        found = ranks(maps, rows, columns)
        assert found.greater.tolist() == [[2, 0, 0, 1, 1, 0]]
        assert found.less.tolist() == [[0, 1, 1, 0, 0, 2]]

    def test_no_pairs(self) -> None:
        maps = make_maps(0, columns="factor", n_rows=3, n_columns=9)
        nothing = torch.zeros(0, dtype=torch.int64)
        found = ranks(maps, nothing, nothing)
        assert found.greater.shape == found.less.shape == (2, 0)

    def test_the_offset_changes_no_rank(self) -> None:
        maps = make_maps(5, columns="product", n_rows=20, n_columns=77)
        rows, columns = some_pairs(5, 20, 77, 50)
        moved = replace(maps, offset=torch.full_like(maps.offset, 12.0))
        assert torch.equal(ranks(maps, rows, columns).greater, ranks(moved, rows, columns).greater)

    def test_a_pair_does_not_depend_on_its_company(self) -> None:
        maps = make_maps(6, columns="product", n_rows=25, n_columns=61)
        rows, columns = some_pairs(6, 25, 61, 70)
        together = ranks(maps, rows, columns)
        for i in range(0, 70, 9):
            alone = ranks(maps, rows[i : i + 1], columns[i : i + 1])
            assert torch.equal(alone.greater[:, 0], together.greater[:, i])
            assert torch.equal(alone.less[:, 0], together.less[:, i])


class TestTwins:
    """Tokens with equal unembeddings must tie: neither outranks the other, and neither outranks itself."""

    @staticmethod
    def twins(columns: str, n_rows: int, exact: bool) -> LayerMaps:
        """Token ``i + 101`` is a copy of token ``i``."""
        maps = make_maps(8, columns=columns, n_rows=n_rows, n_columns=202, rank=32, d_model=128, n_heads=2, exact=exact)
        return TestTwins.doubled(maps, 101)

    @staticmethod
    def doubled(maps: LayerMaps, half: int) -> LayerMaps:
        """The first tokens, every one twice."""
        right = maps.columns
        if isinstance(right, ProductColumns):
            tokens = right.tokens[:half].repeat(2, 1)
            order = tokens.norm(dim=-1).argsort(descending=True, stable=True)
            return replace(maps, columns=replace(right, tokens=tokens, large_first=order))
        assert isinstance(right, FactorColumns)
        return replace(maps, columns=replace(right, factors=right.factors[:, :half].repeat(1, 2, 1)))

    @staticmethod
    def check(maps: LayerMaps, limit: int | None, budget: int) -> None:
        rows = torch.arange(maps.n_rows)
        columns = rows * 7 % 101
        both = ranks(maps, rows.repeat(2), torch.cat([columns, columns + 101]), limit=limit, budget=budget)
        # Alone as well: a twin that is a target itself has its entry put in place, one that is not is computed.
        alone = ranks(maps, rows, columns, limit=limit, budget=budget)
        for counts, single in ((both.greater, alone.greater), (both.less, alone.less)):
            one, other = counts.chunk(2, dim=1)
            assert torch.equal(one, other)
            assert torch.equal(single, one)
            if limit is None:
                # Everything comes in pairs, the target's own pair being a tie.
                assert not (counts % 2).any()

    @pytest.mark.parametrize("limit", [None, 9])
    @pytest.mark.parametrize("n_rows", [1, 2, 5, 9, 40])
    @pytest.mark.parametrize("columns", ["product", "factor"])
    def test_integer_twins_tie(self, columns: str, n_rows: int, limit: int | None) -> None:
        for budget in (1 << 13, 64 << 20):
            self.check(self.twins(columns, n_rows, exact=True), limit, budget)

    @pytest.mark.parametrize("columns", ["product", "factor"])
    def test_float_twins_tie_in_small_products(self, columns: str) -> None:
        for n_rows in (1, 2, 3, 5, 9):
            for limit in (None, 9):
                for budget in (1 << 13, 64 << 20):
                    self.check(self.twins(columns, n_rows, exact=False), limit, budget)

    @pytest.mark.parametrize("columns", ["product", "factor"])
    def test_float_twins_tie_in_large_products(self, columns: str) -> None:
        self.check(self.twins(columns, 64, exact=False), None, 64 << 20)

    @pytest.mark.parametrize("columns", ["product", "factor"])
    @pytest.mark.parametrize(("n_heads", "rank"), [(3, 2), (3, 8), (2, 16)])
    def test_float_twins_tie_at_a_glance_and_with_few_dimensions(
        self, columns: str, n_heads: int, rank: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every token twice, and heads so narrow that BLAS rounds the factor of one head other than those of several.

        Targets are among the first of their rows and so are the favoured columns, their twins with them: a twin that
        came out above its target by rounding would take the place of the last one that counts.
        """
        from tl_headmaps.circuits import ranking

        glances = []
        plain = ranking._Scan.prefilter
        monkeypatch.setattr(ranking._Scan, "prefilter", lambda scan: (glances.append(1), plain(scan)))
        half, n_rows = 2100, 48
        shape = {"n_rows": n_rows, "n_columns": half, "rank": rank, "d_model": 48, "n_heads": n_heads}
        maps = make_maps(1, columns=columns, exact=False, **shape)
        maps = replace(maps, left=maps.left + 2)
        whole, rows = dense(maps), torch.arange(n_rows)
        for place in range(4):
            targets = whole.mean(0).topk(4, dim=1).indices[:, place]
            greater, _ = dense_ranks(whole, rows, targets)
            certain = near_ties(whole, rows, targets) == 0
            assert certain.float().mean() > 0.5
            for limit in (3, 5, 10):
                for side in ("both", "greater"):
                    found = ranks(self.doubled(maps, half), rows, targets, limit=limit, side=side)
                    assert torch.equal(found.greater[certain], (2 * greater).clamp(max=limit)[certain])
        assert len(glances) == 4 * 3 * 2

    @pytest.mark.parametrize("columns", ["product", "factor"])
    def test_float_twins_tie_after_rows_have_left(self, columns: str) -> None:
        """Targets asked for alone in a map of several phases, against float64 ranks among one of each pair."""
        half = 6500
        shape = {"n_rows": 100, "n_columns": half, "rank": 32, "d_model": 128, "exact": False}
        maps = make_maps(8, columns=columns, **shape)
        rows, targets = torch.arange(100), some_pairs(8, 100, half, 100)[1]
        whole = dense(maps)
        greater, less = dense_ranks(whole, rows, targets)
        certain = near_ties(whole, rows, targets) == 0
        assert certain.float().mean() > 0.5
        for limit in (None, 200, 1000):
            found = ranks(self.doubled(maps, half), rows, targets, limit=limit)
            top = limit or 2 * half
            assert torch.equal(found.greater[certain], (2 * greater).clamp(max=top)[certain]), limit
            assert torch.equal(found.less[certain], (2 * less).clamp(max=top)[certain]), limit


class TestCounting:
    @given(seed=st.integers(0, 2**31), n_rows=st.integers(1, 9), width=st.integers(1, 2060))
    @example(seed=0, n_rows=2, width=2040)
    @example(seed=0, n_rows=2, width=2048)
    @example(seed=0, n_rows=2, width=8)
    def test_counts_booleans(self, seed: int, n_rows: int, width: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        mask = torch.rand(n_rows, width, generator=generator) < 0.5
        assert torch.equal(count_true(mask), mask.sum(1))

    @pytest.mark.parametrize("width", [8, 2032, 2040, 2048, 4096])
    def test_a_byte_never_overflows(self, width: int) -> None:
        mask = torch.ones(3, width, dtype=torch.bool)
        assert count_true(mask).tolist() == [width] * 3

    def test_strided_masks(self) -> None:
        mask = torch.ones(6, 16, dtype=torch.bool)[::2, ::2]
        assert count_true(mask).tolist() == [8, 8, 8]


class TestTopK:
    @cases
    def test_ties_go_to_the_lower_column(
        self, seed: int, n_rows: int, n_columns: int, budget: int, data: Any, **shape: Any
    ) -> None:
        maps = make_maps(seed, n_rows=n_rows, n_columns=n_columns, **shape)
        k = data.draw(st.integers(1, n_columns))
        whole = dense(maps)
        for largest in (True, False):
            order = (whole if largest else -whole).argsort(dim=-1, descending=True, stable=True)[..., :k]
            found = top_k(maps, k, largest=largest, budget=budget)
            assert torch.equal(found.columns, order)
            assert torch.equal(found.values.double(), whole.gather(-1, order))

    @pytest.mark.parametrize("largest", [True, False])
    @pytest.mark.parametrize("columns", ["product", "factor"])
    def test_many_blocks(self, columns: str, largest: bool) -> None:
        maps = make_maps(1, columns=columns, n_rows=20, n_columns=4500, offset=True)
        whole = dense(maps)
        order = (whole if largest else -whole).argsort(dim=-1, descending=True, stable=True)[..., :300]
        found = top_k(maps, 300, largest=largest)
        assert torch.equal(found.columns, order)

    @given(seed=st.integers(0, 2**31), n_columns=st.integers(2, 90), budget=BUDGETS, data=st.data())
    def test_float_values_are_the_largest(self, seed: int, n_columns: int, budget: int, data: Any) -> None:
        maps = make_maps(seed, columns="product", n_rows=12, n_columns=n_columns, exact=False, offset=True)
        k = data.draw(st.integers(1, n_columns))
        whole = dense(maps)
        found = top_k(maps, k, budget=budget)
        tolerance = ROUNDING * float(whole.abs().max())
        assert torch.allclose(found.values.double(), whole.sort(-1, descending=True)[0][..., :k], atol=tolerance)
        assert torch.allclose(found.values.double(), whole.gather(-1, found.columns), atol=tolerance)
        assert all(len(set(row)) == k for head in found.columns.tolist() for row in head)

    @pytest.mark.parametrize("k", [0, -1, 10])
    def test_impossible_k(self, k: int) -> None:
        maps = make_maps(0, columns="factor", n_rows=2, n_columns=9)
        with pytest.raises(UsageError, match=rf"k={k} is impossible: a row has 9 columns, so 1 <= k <= 9"):
            top_k(maps, k)


class TestEntries:
    @cases
    def test_sub_grid(self, seed: int, n_rows: int, n_columns: int, budget: int, data: Any, **shape: Any) -> None:
        maps = make_maps(seed, n_rows=n_rows, n_columns=n_columns, **shape)
        chosen = torch.tensor(data.draw(st.lists(st.integers(0, n_columns - 1), min_size=1, max_size=12)))
        whole = dense(maps)
        assert torch.equal(entries(maps, chosen).double(), whole[:, :, chosen])

    @pytest.mark.parametrize("columns", ["product", "factor"])
    def test_factor_is_the_column_factor(self, columns: str) -> None:
        maps = make_maps(2, columns=columns, n_rows=9, n_columns=8200, offset=True)
        for h in range(2):
            product = maps.left_of(h) @ maps.columns.factor(h).T - maps.offset[h][:, None]
            assert torch.equal(product.double(), dense(maps)[h])

    @pytest.mark.parametrize("columns", ["product", "factor"])
    def test_order_is_a_permutation_by_falling_norm(self, columns: str) -> None:
        maps = make_maps(2, columns=columns, n_rows=1, n_columns=99, grouped=True)
        order = maps.columns.order()
        assert sorted(order.tolist()) == list(range(99))
        right: Any = maps.columns
        norms = (right.tokens if columns == "product" else right.factors[0]).norm(dim=-1)[order]
        assert bool((norms[:-1] >= norms[1:]).all())

    @pytest.mark.parametrize(("n_rows", "by_factor"), [(1, False), (200, True)])
    def test_both_contraction_orders_are_used(self, n_rows: int, by_factor: bool) -> None:
        maps = make_maps(2, columns="product", n_rows=n_rows, n_columns=50, rank=4, d_model=12)
        block: Any = maps.columns.block(slice(0, 50), [n_rows, 0])
        # The second head is not needed, so its factor is never formed.
        assert set(block.factors) == ({0} if by_factor else set())
        assert torch.equal(block.product(0, maps.left_of(0)).double(), dense(maps)[0])


class TestRowNorms:
    @given(seed=st.integers(0, 2**31), n=st.integers(1, 30), m=st.integers(1, 60), rank=st.integers(1, 12))
    def test_equal_the_norms_of_the_whole_map(self, seed: int, n: int, m: int, rank: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        left = torch.randn(n, rank, generator=generator)
        factor = torch.randn(m, rank, generator=generator)
        expected = (left.double() @ factor.double().T).norm(dim=-1)
        # Rounding is relative to what is multiplied, not to the result, which may be a small difference.
        scale = left.double().norm(dim=-1) * factor.double().norm()
        assert bool(((row_norms(left, factor).double() - expected).abs() <= 1e-6 * scale).all())

    def test_several_blocks(self) -> None:
        generator = torch.Generator().manual_seed(0)
        left = torch.randn(5, 8, generator=generator)
        factor = torch.randn(20_000, 8, generator=generator)
        expected = (left.double() @ factor.double().T).norm(dim=-1)
        assert torch.allclose(row_norms(left, factor).double(), expected, rtol=1e-5)


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


class TestMemory:
    @pytest.mark.parametrize("columns", ["product", "factor"])
    def test_the_whole_map_is_never_formed(self, columns: str) -> None:
        n_vocab, rank, d_model, budget = 2501, 4, 8, 1 << 18
        maps = make_maps(
            0,
            columns=columns,
            n_rows=n_vocab,
            n_columns=n_vocab,
            rank=rank,
            d_model=d_model,
            n_heads=1,
            exact=False,
            decay=4.0,
        )
        # A block within the budget, or the factors themselves (a few numbers for each token).
        allowed = max(budget // 4, 8 * n_vocab * 2)
        everyone = torch.arange(n_vocab)
        for call in (
            lambda: ranks(maps, everyone, everyone.flip(0), limit=5, budget=budget),
            lambda: top_k(maps, 3, budget=budget),
            lambda: row_norms(maps.left_of(0), maps.columns.factor(0)),
        ):
            with _Largest() as seen:
                call()
            assert 0 < seen.numel <= allowed
        assert allowed < n_vocab**2 // 50
