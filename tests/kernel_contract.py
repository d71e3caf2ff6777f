"""What every set of kernels must do, on inputs that break selection code: see `DenseContract` and `SparseContract`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oktopk.algorithms.base import less
from oktopk.kernels import Kernels, ReferenceKernels
from oktopk.types import Difference, SparseVector, to_dense

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SPEC = ReferenceKernels()

cases = st.tuples(
    st.integers(0, 400),  # numel
    st.integers(0, 2**31),  # seed
    st.sampled_from(["normal", "ties", "zeros", "subnormal", "wide", "ascending"]),
    st.sampled_from(DTYPES),
)


def example(numel: int, seed: int, kind: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator, dtype=torch.float64)
    if kind == "ties":
        x = x.round()
    elif kind == "zeros":
        x = x * (torch.rand(numel, generator=generator) < 0.05)
    elif kind == "subnormal":
        x = x * torch.finfo(dtype).tiny
    elif kind == "wide":
        x = x.sign() * torch.exp(3 * x).clamp(max=6e4)
    elif kind == "ascending":
        x = x.sort().values.abs().sort().values
    return x.to(dtype)


def grad_and_residual(case: tuple, wide: bool) -> tuple[Tensor, Tensor]:
    """A residual in float64 (wide) or float32, and a gradient that is not wider."""
    grad = example(*case)
    residual = example(case[0], case[1] + 1, "normal", torch.float64 if wide else torch.float32)
    return grad.float() if grad.dtype == torch.float64 and not wide else grad, residual


def assert_same(ours: SparseVector, theirs: SparseVector) -> None:
    assert ours.numel == theirs.numel
    assert ours.indices.dtype == theirs.indices.dtype and ours.values.dtype == theirs.values.dtype
    assert torch.equal(ours.indices, theirs.indices)
    assert torch.equal(ours.values, theirs.values)


def cut(x: Tensor, seed: int, parts: int = 7) -> list[Tensor]:
    """Pieces of x in memory of their own, at addresses of any kind; some are empty."""
    generator = torch.Generator().manual_seed(seed)
    borders = sorted(torch.randint(0, x.numel() + 1, (parts - 1,), generator=generator).tolist())
    return [
        torch.cat([x.new_zeros(seed % 5), part])[seed % 5 :] for part in torch.tensor_split(x, borders)
    ]  # fmt: skip


def pieces(count: int, numel: int, seed: int, dtype: torch.dtype = torch.float32) -> list[SparseVector]:
    vectors = []
    for source in range(count):
        generator = torch.Generator().manual_seed(seed * 100 + source)
        nnz = int(torch.randint(0, min(numel, 300) + 1, (), generator=generator))
        # A multiplier spreads few entries over a huge index space without a permutation of it.
        indices = (torch.rand(nnz, generator=generator, dtype=torch.float64) * numel).long().unique()
        values = torch.randn(indices.numel(), generator=generator, dtype=dtype)
        vectors.append(SparseVector(indices.to(torch.int32 if numel < 2**31 else torch.int64), values, numel))
    return vectors


def differing(sizes: list[int], dtype: torch.dtype = torch.float32) -> Difference:
    generator = torch.Generator().manual_seed(sum(sizes))
    shared = torch.randn(sum(sizes), generator=generator, dtype=dtype)
    own = [part + 0.01 * torch.randn(part.numel(), generator=generator, dtype=dtype) for part in shared.split(sizes)]
    return Difference(shared, tuple(own))


class Contract:
    """A subclass has a fixture `kernels`."""

    thrift = 1  # one of so many random examples is tried
    large = 300_001  # entries of a vector that is sampled
    glance_error = 0.5  # some have a sample of 128 entries
    densities: tuple[float, ...] = (0.001, 0.02, 0.3)

    def examples(self, count: int) -> int:
        return max(2, count // self.thrift)


class DenseContract(Contract):
    """Of vectors."""

    def test_select_topk_keeps_exactly_the_k_largest(self, kernels: Kernels) -> None:
        @settings(max_examples=self.examples(150), deadline=None)
        @given(case=cases, fraction=st.floats(0, 1.1))
        def check(case: tuple, fraction: float) -> None:
            x = example(*case)
            k = int(fraction * x.numel())
            ours, threshold = kernels.select_topk(x, k)
            theirs, expected = SPEC.select_topk(x, k)
            assert_same(ours, theirs)
            assert threshold == expected

        check()

    def test_select_above_and_count_above_agree_with_the_specification(self, kernels: Kernels) -> None:
        @settings(max_examples=self.examples(100), deadline=None)
        @given(case=cases, threshold=st.floats(0, 3) | st.sampled_from([-1.0, math.inf]))
        def check(case: tuple, threshold: float) -> None:
            x = example(*case)
            assert_same(kernels.select_above(x, threshold), SPEC.select_above(x, threshold))
            assert kernels.count_above(x, threshold) == SPEC.count_above(x, threshold)

        check()

    def test_accumulate_adds_exactly_and_measures_the_sum(self, kernels: Kernels) -> None:
        @settings(max_examples=self.examples(100), deadline=None)
        @given(case=cases, k=st.integers(0, 500), wide=st.booleans())
        def check(case: tuple, k: int, wide: bool) -> None:
            grad, residual = grad_and_residual(case, wide)
            expected = residual.clone()
            energy = SPEC.accumulate_(expected, grad)
            assert kernels.accumulate_(residual, grad, k) == pytest.approx(energy, rel=1e-9)
            assert torch.equal(residual, expected)
            assert_same(kernels.select_topk(residual, k)[0], SPEC.select_topk(expected, k)[0])

        check()

    def test_add_leaves_the_residual_and_gathers_from_pieces(self, kernels: Kernels) -> None:
        @settings(max_examples=self.examples(100), deadline=None)
        @given(case=cases, k=st.integers(0, 500), wide=st.booleans())
        def check(case: tuple, k: int, wide: bool) -> None:
            grad, residual = grad_and_residual(case, wide)
            before, out, expected = residual.clone(), torch.full_like(residual, 7.0), torch.empty_like(residual)
            energy = SPEC.add(expected, residual, [grad])
            assert kernels.add(out, residual, cut(grad, case[1]), k) == pytest.approx(energy, rel=1e-9)
            assert torch.equal(out, expected) and torch.equal(residual, before)
            assert torch.equal(expected, residual + grad)
            assert_same(kernels.select_topk(out, k)[0], SPEC.select_topk(expected, k)[0])

        check()

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_the_sum_of_squares_tells_that_a_piece_is_not_finite(self, kernels: Kernels, bad: float) -> None:
        numel = self.large // 3
        residual, out = example(numel, 2, "normal", torch.float32), torch.empty(numel)
        assert math.isfinite(kernels.add(out, residual, cut(example(numel, 1, "normal", torch.float32), 3), 1000))
        for place in (0, 63, numel // 2, numel - 1):
            grad = example(numel, 1, "normal", torch.float32)
            grad[place] = bad
            assert not math.isfinite(kernels.add(out, residual, cut(grad, 3), 1000))

    def test_pieces_that_do_not_fit_are_refused(self, kernels: Kernels) -> None:
        with pytest.raises(IndexError, match="9 entries do not make up a vector of 10"):
            kernels.add(torch.zeros(10), torch.zeros(10), [torch.zeros(4), torch.zeros(5)], 2)

    def test_a_write_between_accumulate_and_select_is_seen(self, kernels: Kernels) -> None:
        residual, grad = example(300, 1, "normal", torch.float32), example(300, 2, "normal", torch.float32)
        kernels.accumulate_(residual, grad, 30)
        residual[7] = 100.0
        assert 7 in kernels.select_topk(residual, 30)[0].indices
        kernels.accumulate_(residual, grad, 30)
        kernels.retain_(residual, SparseVector(torch.tensor([7]), residual[7:8].clone(), 300))
        assert_same(kernels.select_topk(residual, 30)[0], SPEC.select_topk(residual, 30)[0])

    def test_results_survive_later_calls(self, kernels: Kernels) -> None:
        x, y = example(1000, 1, "normal", torch.float32), example(1000, 2, "normal", torch.float32)
        first = kernels.select_topk(x, 100)[0], kernels.select_above(x, 1.0), kernels.sum_sparse(pieces(3, 5000, 1))
        again = [SparseVector(v.indices.clone(), v.values.clone(), v.numel) for v in first]
        kernels.select_topk(y, 120), kernels.select_above(y, 0.5), kernels.sum_sparse(pieces(3, 5000, 2))
        for before, after in zip(again, first, strict=True):
            assert_same(after, before)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("place", [0, 63, 64, 5000, 9999])
    def test_all_below_finds_one_bad_entry_anywhere(
        self, kernels: Kernels, dtype: torch.dtype, bad: float, place: int
    ) -> None:
        x = torch.full((10_000,), torch.finfo(dtype).max, dtype=dtype)
        assert kernels.all_below([x], math.inf)
        x[place] = bad
        assert not kernels.all_below([x], math.inf)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_retain_subtracts_also_repeated_indices(self, kernels: Kernels, dtype: torch.dtype) -> None:
        ours = example(200, 3, "normal", dtype)
        theirs = ours.clone()
        sent = SparseVector(torch.tensor([5, 9, 9, 150]), torch.tensor([1.0, 2.0, 0.5, -1.0], dtype=dtype), 200)
        change = kernels.retain_(ours, sent)
        assert change == pytest.approx(SPEC.retain_(theirs, sent), rel=1e-6)
        assert torch.equal(ours, theirs)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("numel", [0, 1, 5000, "large"])
    def test_fill_writes_every_entry(self, kernels: Kernels, dtype: torch.dtype, numel: int | str) -> None:
        numel = self.large if isinstance(numel, str) else numel
        vector, _ = SPEC.select_topk(example(numel, 4, "normal", torch.float32), numel // 10)
        ours, theirs = torch.full((numel,), 7.0, dtype=dtype), torch.full((numel,), 7.0, dtype=dtype)
        kernels.fill_([ours], vector)
        SPEC.fill_([theirs], vector)
        assert torch.equal(ours, theirs)
        scattered = cut(ours.fill_(7.0), numel + 3)
        kernels.fill_(scattered, vector)
        assert torch.equal(torch.cat(scattered), theirs)

    def test_indices_out_of_bounds_are_refused(self, kernels: Kernels) -> None:
        for index in (-1, 200):
            stray = SparseVector(torch.tensor([index]), torch.tensor([1.0]), 200)
            with pytest.raises(IndexError):
                kernels.retain_(torch.zeros(200), stray)
            with pytest.raises(IndexError):
                kernels.fill_([torch.zeros(200)], stray)

    def test_tensors_with_gaps_work_too(self, kernels: Kernels) -> None:
        wide = example(400, 5, "normal", torch.float32).view(200, 2)
        ours, theirs = wide.clone()[:, 0], wide.clone()[:, 0]
        assert_same(kernels.select_topk(ours, 20)[0], SPEC.select_topk(theirs, 20)[0])
        sent, _ = SPEC.select_topk(theirs, 20)
        for backend, x in ((kernels, ours), (SPEC, theirs)):
            backend.accumulate_(x, wide[:, 1], 20)
            backend.retain_(x, sent)
        assert torch.equal(ours, theirs)
        kernels.fill_([ours], sent)
        assert torch.equal(ours, sent.to_dense())

    @pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "wide", "ascending", "blocks"])
    def test_large_vectors_take_the_sampled_path(self, kernels: Kernels, kind: str) -> None:
        numel = self.large
        x = example(numel, 6, "normal" if kind == "blocks" else kind, torch.float32)
        if kind == "blocks":  # everything of interest where a sample hardly looks
            x[: numel - numel // 150] *= 1e-6
        grad = x / 3
        for k in (round(density * numel) for density in self.densities):
            ours, threshold = kernels.select_topk(x, k)
            theirs, expected = SPEC.select_topk(x, k)
            assert_same(ours, theirs)
            assert threshold == expected
            total = x.clone()
            kernels.accumulate_(total, grad, k)
            assert_same(kernels.select_topk(total, k)[0], SPEC.select_topk(x + grad, k)[0])

    @pytest.mark.parametrize("sizes", [[1], [64], [7, 130, 1, 64], ["large"], ["large", 3, 64, 17, "large"]], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("announced", [False, True])
    def test_a_difference_in_pieces_is_selected_from_as_if_it_were_formed(
        self, kernels: Kernels, sizes: list[int | str], dtype: torch.dtype, announced: bool
    ) -> None:
        sizes = [self.large // 3 if isinstance(size, str) else size for size in sizes]
        difference = differing(sizes, dtype)
        formed = difference.shared - torch.cat(difference.own)
        for k in {1, max(1, sum(sizes) // 100), sum(sizes)}:
            if announced:
                assert kernels.scan(difference, k) == pytest.approx(float(formed.double().square().sum()))
            chosen, threshold = kernels.select_topk(difference, k)
            expected, least = ReferenceKernels().select_topk(formed, k)
            assert torch.equal(chosen.indices, expected.indices) and torch.equal(chosen.values, expected.values)
            assert threshold == least

    def test_a_difference_that_changed_since_it_was_scanned_is_scanned_again(self, kernels: Kernels) -> None:
        half = self.large // 6
        difference = differing([half, half])
        kernels.scan(difference, 1)
        difference.own[1][17] += 100.0
        chosen, _ = kernels.select_topk(difference, 1)
        assert chosen.indices.tolist() == [half + 17]

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_the_scan_of_a_difference_tells_bad_entries(self, kernels: Kernels, bad: float) -> None:
        for piece, place in ((0, 0), (0, 99), (1, 2)):
            difference = differing([self.large // 6, 3])
            assert math.isfinite(kernels.scan(difference, 5))
            difference.own[piece][place] = bad
            assert not math.isfinite(kernels.scan(difference, 5))
            assert not math.isfinite(kernels.glance(difference))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_glance_tells_nearly_how_much_a_difference_holds(self, kernels: Kernels, dtype: torch.dtype) -> None:
        short, long = differing([7, 130, 64], dtype), differing([2 * self.large, 3, 2 * self.large], dtype)
        for difference, tolerance in ((short, 1e-6), (long, self.glance_error)):
            squares = float((difference.shared - torch.cat(difference.own)).double().square().sum())
            assert kernels.glance(difference) == pytest.approx(squares, rel=tolerance)

    def test_a_glance_tells_a_difference_that_overflows(self, kernels: Kernels) -> None:
        difference = differing([4 * self.large, 3])
        difference.shared[5], difference.own[0][5] = 3e38, -3e38
        assert not math.isfinite(kernels.glance(difference))
        difference.shared[5], difference.own[0][5] = 3e38, 3e38
        assert math.isfinite(kernels.glance(difference))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_moving_takes_what_was_sent_from_the_difference_and_the_mean_from_both(
        self, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        difference = differing([7, 130, 1, 64], dtype)
        shared, own = difference.shared.clone(), torch.cat(difference.own)
        mean = SparseVector(
            torch.tensor([0, 6, 7, 136, 201], dtype=torch.int32), torch.arange(1.0, 6.0, dtype=dtype), 202
        )
        # What was sent may name an index twice, in any order.
        sent = SparseVector(
            torch.tensor([136, 7, 136], dtype=torch.int32), torch.tensor([3.0, 1.0, -0.5], dtype=dtype), 202
        )
        before = (shared - own).double().square().sum()
        change = kernels.move_(difference, mean, sent)
        torch.testing.assert_close(difference.shared, shared - mean.to_dense())
        torch.testing.assert_close(torch.cat(difference.own), own - mean.to_dense() + sent.to_dense())
        after = (difference.shared - torch.cat(difference.own)).double().square().sum()
        assert change == pytest.approx(float(after - before), rel=1e-4)

    def test_own_weights_stay_to_the_last_bit_where_the_mean_is_what_was_sent(self, kernels: Kernels) -> None:
        difference = differing([7, 130, 1, 64])
        own = torch.cat(difference.own)
        sent, _ = SPEC.select_topk(difference, 20)
        kernels.move_(difference, sent, sent)
        assert torch.equal(torch.cat(difference.own), own)

    @pytest.mark.parametrize("sizes", [[3000], [7, 1000, 1, 1992], [500] * 6], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_neighbours_are_picked_and_moved_as_if_each_came_alone(
        self, kernels: Kernels, sizes: list[int], dtype: torch.dtype
    ) -> None:
        kept = torch.rand(3000 // 20, generator=torch.Generator().manual_seed(1)) < 0.5
        indices = kept.repeat_interleave(20).nonzero().flatten().int()[3:]  # runs that begin anywhere
        ours, theirs = differing(sizes, dtype), differing(sizes, dtype)
        picked = kernels.pick(ours, indices)
        assert torch.equal(picked.values, to_dense(theirs)[indices.long()])
        assert torch.equal(kernels.pick(ours.shared, indices).values, ours.shared[indices.long()])
        mean = picked.with_values(picked.values / 3)
        lost = picked.at(torch.arange(5, picked.nnz, 7))
        some = picked.at(torch.arange(0, picked.nnz, 2))
        for sent in (picked, some, SparseVector.empty(3000, ours.shared), less(picked, lost), less(some, lost)):
            change = kernels.move_(ours, mean, sent)
            assert change == pytest.approx(SPEC.move_(theirs, mean, sent), rel=1e-4, abs=1e-4)
            assert torch.equal(ours.shared, theirs.shared)
            torch.testing.assert_close(torch.cat(ours.own), torch.cat(theirs.own))
            for own, expected in zip(ours.own, theirs.own, strict=True):
                own.copy_(expected)  # of an index that is sent twice the order of sums is anyone's

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_entries_at_indices_are_picked_from_vectors_and_differences(
        self, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        x, difference = example(202, 1, "normal", dtype), differing([7, 130, 1, 64], dtype)
        for index in (torch.int32, torch.int64):
            indices = torch.tensor([0, 6, 7, 136, 137, 201], dtype=index)
            for source in (x, difference):
                picked = kernels.pick(source, indices)
                assert picked.numel == 202 and torch.equal(picked.indices, indices)
                assert picked.values.dtype == dtype
                assert torch.equal(picked.values, to_dense(source)[indices.long()])
        with pytest.raises(IndexError):
            kernels.pick(difference, torch.tensor([202], dtype=torch.int32))
        assert kernels.pick(x, torch.tensor([], dtype=torch.int32)).nnz == 0


class SparseContract(Contract):
    """Of sparse vectors."""

    def test_histogram_agrees_with_the_specification(self, kernels: Kernels) -> None:
        @settings(max_examples=self.examples(60), deadline=None)
        @given(case=cases, shift=st.integers(8, 24), first=st.integers(0, 4000), bins=st.integers(1, 3000))
        def check(case: tuple, shift: int, first: int, bins: int) -> None:
            x = example(*case)
            ours = kernels.magnitude_histogram(x, shift, first, bins)
            assert torch.equal(ours, SPEC.magnitude_histogram(x, shift, first, bins))

        check()

    def test_sum_sparse_adds_in_the_given_order(self, kernels: Kernels) -> None:
        @settings(max_examples=self.examples(100), deadline=None)
        @given(
            count=st.integers(1, 9),
            numel=st.sampled_from([1, 70, 1000, 40_000, 2**20, 2**33]),
            seed=st.integers(0, 2**20),
            dtype=st.sampled_from([torch.float32, torch.float64, torch.float16]),
        )
        def check(count: int, numel: int, seed: int, dtype: torch.dtype) -> None:
            vectors = pieces(count, numel, seed, dtype)
            assert_same(kernels.sum_sparse(vectors), SPEC.sum_sparse(vectors))

        check()

    def test_common_entries_agree_with_the_specification(self, kernels: Kernels) -> None:
        @settings(max_examples=self.examples(100), deadline=None)
        @given(
            numel=st.sampled_from([1, 50, 400, 2**33]),
            seed=st.integers(0, 2**20),
            dtype=st.sampled_from([torch.float32, torch.float64]),
        )
        def check(numel: int, seed: int, dtype: torch.dtype) -> None:
            a, b = pieces(2, numel, seed, dtype)
            assert_same(kernels.common(a, b.indices), SPEC.common(a, b.indices))

        check()

    def test_entries_above_a_threshold_agree_with_the_specification(self, kernels: Kernels) -> None:
        @settings(max_examples=self.examples(100), deadline=None)
        @given(
            numel=st.sampled_from([1, 50, 400, 2**33]),
            seed=st.integers(0, 2**20),
            dtype=st.sampled_from([torch.float32, torch.float64]),
            rank=st.floats(0, 1),
            lower=st.floats(0, 1),
            ties=st.integers(0, 30),
        )
        def check(numel: int, seed: int, dtype: torch.dtype, rank: float, lower: float, ties: int) -> None:
            (vector,) = pieces(1, numel, seed, dtype)
            magnitudes = sorted([0.0, *vector.values.abs().float().tolist()])
            threshold = magnitudes[int(rank * (len(magnitudes) - 1))]
            low = magnitudes[int(rank * lower * (len(magnitudes) - 1))]
            assert_same(kernels.above(vector, threshold), SPEC.above(vector, threshold))
            assert_same(kernels.above(vector, threshold, low, ties), SPEC.above(vector, threshold, low, ties))
            most = kernels.above(vector, threshold).nnz + ties
            assert kernels.above(vector, threshold, low, ties).nnz == min(most, kernels.above(vector, low).nnz)

        check()

    def test_the_largest_of_a_sparse_vector_agree_with_the_specification(self, kernels: Kernels) -> None:
        @settings(max_examples=self.examples(100), deadline=None)
        @given(
            numel=st.sampled_from([1, 50, 400, 2**33]),
            seed=st.integers(0, 2**20),
            dtype=st.sampled_from([torch.float32, torch.float64]),
            k=st.integers(0, 200),
            zeros=st.booleans(),
        )
        def check(numel: int, seed: int, dtype: torch.dtype, k: int, zeros: bool) -> None:
            (vector,) = pieces(1, numel, seed, dtype)
            vector = vector.with_values(vector.values.round() if zeros else vector.values)
            (kept, smallest), (expected, threshold) = kernels.largest(vector, k), SPEC.largest(vector, k)
            assert_same(kept, expected)
            assert smallest == threshold

        check()

    def test_lists_that_do_not_ascend_are_refused_and_do_no_harm(self, kernels: Kernels) -> None:
        good = pieces(3, 40_000, 1)
        for indices in ([5, 5], [700, 3], [-4, 9]):
            bad = SparseVector(torch.tensor(indices, dtype=torch.int32), torch.ones(2), 40_000)
            with pytest.raises(IndexError, match="ascend"):
                kernels.sum_sparse([good[0], bad])
        assert_same(kernels.sum_sparse(good), SPEC.sum_sparse(good))
        with pytest.raises(IndexError, match="one size"):
            kernels.accumulate_(torch.zeros(10), torch.zeros(9))
