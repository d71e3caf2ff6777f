"""A gradient in pieces is reduced as the same gradient in one piece is, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from inputs import gradient
from oktopk import Reducer
from oktopk.algorithms import ALGORITHMS
from oktopk.errors import NonFiniteError, UnsupportedError
from oktopk.kernels import ReferenceKernels
from oktopk.reduction.feedback import Feedback
from oktopk.reduction.gradient import Gradient
from oktopk.transport import run_world

SIZES = {"a": 3000, "b": 1, "c": 777, "d": 0, "e": 64}
LAYOUT = list(SIZES.items())
TOTAL = sum(SIZES.values())


def pieces_of(flat: Tensor) -> list[Tensor]:
    return [part.clone() for part in flat.split(list(SIZES.values()))]


def assert_same_residuals(one: Reducer, other: Reducer) -> None:
    ours, theirs = one.residuals(), other.residuals()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


CASES = [
    *(({}, algorithm, wire) for algorithm in ALGORITHMS for wire in ("float32", "bfloat16", "int8")),
    ({"momentum_correction": 0.9, "factor_masking": True}, "oktopk", "float32"),
    ({"threshold": "reused", "reestimate_every": 3}, "oktopk", "float32"),
    ({"warmup_steps": 2}, "oktopk", "float32"),
    ({"on_nonfinite": "skip"}, "oktopk", "float32"),
]


@pytest.mark.parametrize(("options", "algorithm", "wire"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pieces_and_whole_agree(options: dict[str, Any], algorithm: str, wire: str, dtype: torch.dtype) -> None:
    def work(transport: Any) -> None:
        with (
            Reducer(algorithm, 0.05, group=transport, wire=wire, min_numel=0, **options) as whole,
            Reducer(algorithm, 0.05, group=transport, wire=wire, min_numel=0, **options) as scattered,
        ):
            for step in range(6):
                flat = gradient("layers", TOTAL, transport.rank, step).to(dtype)
                pieces = pieces_of(flat)
                unused = ["c"] if step == 4 else []
                whole.submit(LAYOUT, flat, unused).wait()
                scattered.submit(LAYOUT, pieces, unused).wait()
                assert torch.equal(torch.cat(pieces), flat)
                assert_same_residuals(whole, scattered)
                assert scattered.last_step.numel == TOTAL
                assert scattered.last_step.residual_norm == pytest.approx(whole.last_step.residual_norm, rel=1e-6)
                assert scattered.last_step.bytes_sent == whole.last_step.bytes_sent

    run_world(3, work)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_piece_that_is_not_finite_leaves_residuals_as_they_were(policy: str) -> None:
    def work(transport: Any) -> None:
        with Reducer("oktopk", 0.05, group=transport, min_numel=0, on_nonfinite=policy) as reducer:
            reducer.submit(LAYOUT, pieces_of(gradient("normal", TOTAL, transport.rank, 0))).wait()
            before = reducer.residuals()
            bad = pieces_of(gradient("normal", TOTAL, transport.rank, 1))
            if transport.rank == 1:
                bad[2][5] = float("inf")
            if policy == "raise":
                with pytest.raises(NonFiniteError, match="rank 1 holds NaN or Inf"):
                    reducer.submit(LAYOUT, bad).wait()
            else:
                reducer.submit(LAYOUT, bad).wait()
                assert torch.cat(bad).isnan().all()
            after = reducer.residuals()
            assert all(torch.equal(before[name], after[name]) for name in before)
            good = pieces_of(gradient("normal", TOTAL, transport.rank, 2))
            reducer.submit(LAYOUT, good).wait()
            assert torch.cat(good).isfinite().all() and torch.cat(good).count_nonzero() > 0

    run_world(2, work)


@pytest.mark.parametrize("scattered", [True, False])
def test_sums_that_overflow_are_refused(scattered: bool) -> None:
    def bucket() -> Any:
        return [torch.full((2,), 3e38), torch.full((3,), 3e38)] if scattered else torch.full((5,), 3e38)

    with Reducer("oktopk", 0.4, min_numel=0) as reducer:
        reducer.submit([("a", 2), ("b", 3)], bucket()).wait()
        with pytest.raises(NonFiniteError, match="overflows"):
            reducer.submit([("a", 2), ("b", 3)], bucket()).wait()


def test_a_bad_bucket_undoes_the_good_one_of_its_step_and_conserves_what_follows() -> None:
    def work(transport: Any) -> Tensor:
        total = torch.zeros(2 * TOTAL)
        with Reducer("oktopk", 0.05, group=transport, min_numel=0, on_nonfinite="skip") as reducer:
            for step in range(6):
                first, second = (gradient("normal", TOTAL, transport.rank, 2 * step + part) for part in (0, 1))
                before = reducer.residuals()
                given = torch.cat([first, second])
                if step == 3 and transport.rank == 1:
                    second[7] = math.nan
                first = reducer.reduce("first", first)
                second = reducer.reduce("second", second)
                if step == 3:
                    after = reducer.residuals()
                    assert all(torch.equal(before[name], after[name]) for name in before)
                    continue
                total += given - torch.cat([first, second])
            owed = reducer.residuals()
        return total - torch.cat([owed["first"], owed["second"]])

    torch.testing.assert_close(sum(run_world(2, work)), torch.zeros(2 * TOTAL), rtol=0, atol=1e-4)


def test_what_is_prepared_beside_a_residual_saves_the_copy_of_it() -> None:
    feedback = Feedback(ReferenceKernels())
    ones = Gradient.of([("a", 3)], [torch.ones(3)])
    feedback.compensate(ones, 1, with_feedback=True)
    places = []
    for _ in range(4):
        feedback.forget()
        residual = feedback._residuals.flat(ones.layout)
        assert feedback.prepare(ones, 1)
        feedback.remember(ones, unused=())
        assert feedback.compensate(ones, 1, with_feedback=True)[0] == residual[0] + 1
        places += [residual.data_ptr()]
    assert places[0] == places[2] and places[1] == places[3]  # the two change places
    feedback.undo()
    assert torch.equal(feedback.state_dict()["a"], torch.full((3,), 4.0))


def test_a_copy_for_undo_lies_where_the_last_one_lay() -> None:
    feedback = Feedback(ReferenceKernels(), momentum=0.9)
    ones = Gradient.of([("a", 3)], [torch.ones(3)])
    places = set()
    for _ in range(3):
        feedback.forget()
        assert feedback.prepare(ones, 1) is None  # not with momentum
        feedback.remember(ones, unused=())
        places.add(feedback._residuals.remembered[ones.layout].data_ptr())
        feedback.compensate(ones, 1, with_feedback=True)
    assert len(places) == 1


def test_what_was_prepared_for_a_refused_step_is_not_used_later() -> None:
    feedback = Feedback(ReferenceKernels())
    bad, good = (Gradient.of([("a", 2), ("b", 1)], [torch.full((2,), x), torch.full((1,), x)]) for x in (math.nan, 1.0))
    assert feedback.prepare(good, 1) is None  # it might be refused, and has no residual yet
    feedback.compensate(good, 1, with_feedback=True)
    assert feedback.prepare(bad, 1) is False
    assert feedback.prepare(good, 0) is None  # a dense step: nothing is selected
    assert torch.equal(feedback.compensate(good, 0, with_feedback=True), torch.full((3,), 2.0))


def test_dense_steps_join_pieces_in_the_same_memory() -> None:
    feedback = Feedback(ReferenceKernels())
    first, second = (Gradient.of([("a", 2), ("b", 1)], [torch.full((2,), x), torch.full((1,), x)]) for x in (1.0, 2.0))
    joined = feedback.joined(first)
    assert torch.equal(joined, torch.ones(3))
    assert feedback.joined(second).data_ptr() == joined.data_ptr()


def test_buckets_of_any_length_share_one_more_vector() -> None:
    """What is made beside the residual takes the memory of one bucket, the longest, not of all of them."""
    feedback = Feedback(ReferenceKernels())
    buckets = {name: Gradient.of([(name, size)], torch.ones(size)) for name, size in (("a", 40), ("b", 100), ("c", 7))}
    places: list[set[int]] = []
    for step in range(1, 9):  # in the first few the memory of each bucket grows to the longest
        used = set()
        for gradient_of in buckets.values():
            assert feedback.prepare(gradient_of, 1) is (True if step > 1 else None)
            total = feedback.compensate(gradient_of, 1, with_feedback=True)
            assert torch.equal(total, torch.full((gradient_of.numel,), float(step)))
            used.add(total.untyped_storage().data_ptr())
        places.append(used)
    assert len(places[-1] | places[-2] | places[-3]) == len(buckets) + 1


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([torch.ones(2), torch.ones(3, dtype=torch.float64)], "several dtypes"),
        ([torch.ones(3), torch.ones(2)], "one for each parameter"),
        ([torch.ones(2), torch.ones(2)], "names 5 entries"),
        ([torch.ones(2), torch.ones(2), torch.ones(1)], "one for each parameter"),
        ([torch.ones(2), torch.ones(3, dtype=torch.int32)], "only float32"),
    ],
)
def test_pieces_that_do_not_fit_the_layout_are_refused(pieces: list[Tensor], message: str) -> None:
    with Reducer("oktopk", 0.5, min_numel=0) as reducer, pytest.raises(UnsupportedError, match=message):
        reducer.submit([("a", 2), ("b", 3)], pieces).wait()
