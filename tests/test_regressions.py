"""One test for each mistake that public implementations of these algorithms made."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest
import torch

from contract import Case, check_all, observe
from inputs import gradient
from oktopk import ALGORITHMS, Reducer
from oktopk.config import OkTopkConfig
from oktopk.errors import MismatchError
from oktopk.kernels import ReferenceKernels, choose
from oktopk.primitives.partition import Choices, balanced_regions, equal_bounds, tell
from oktopk.primitives.selection import winners
from oktopk.transport import run_world
from oktopk.types import SparseVector
from oktopk.wire import Wire
from worlds import start

SPARSE = [name for name in ALGORITHMS if name != "dense"]


def test_indices_beyond_2_to_24_are_exact_at_n_4e7() -> None:
    """Sent as float32, indices above 2**24 came out even: 28-34% of the update went to the wrong weights."""
    numel = 40_000_000
    odd = torch.tensor([2**24 + 1, 2**24 + 3, 33_333_333, numel - 1])

    def work(transport: Any) -> torch.Tensor:
        grad = torch.zeros(numel)
        grad[odd] = torch.tensor([4.0, 3.0, 2.0, 1.0])
        with Reducer("oktopk", 4 / numel, group=transport) as reducer:
            return reducer.reduce("w", grad).nonzero().flatten()

    for found in run_world(2, work, timeout=100):
        assert torch.equal(found, odd)


@pytest.mark.parametrize("algorithm", SPARSE)
def test_what_was_applied_is_cleared_so_that_nothing_applies_twice(algorithm: str) -> None:
    """Intersecting with an unsorted index list left the residual of the k largest in place."""

    def work(transport: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros(3000)
        with Reducer(algorithm, 0.02, group=transport) as reducer:
            total += reducer.reduce("w", gradient("layers", 3000, 0, 0))
            for _ in range(200):
                total += reducer.reduce("w", torch.zeros(3000))
            return total, reducer.residuals()["w"]

    for total, owed in run_world(3, work):
        # The same gradient everywhere, then nothing: it must arrive once, whole.
        torch.testing.assert_close(total, gradient("layers", 3000, 0, 0), rtol=1e-5, atol=1e-6)
        assert owed.abs().max() <= 1e-6 * total.abs().max()


def test_region_borders_do_not_overflow_when_n_times_p_passes_2_to_31() -> None:
    numel = 2**31 - 10

    chosen = SparseVector(torch.arange(numel - 1000, numel, dtype=torch.int64), torch.ones(1000), numel)
    bounds = balanced_regions(Choices.of([tell(chosen, 1.0, 4)] * 4), numel).bounds
    assert bounds[0] == 0 and bounds[-1] == numel
    assert all(numel - 1001 <= border <= numel for border in bounds[1:-1])
    assert bounds == sorted(bounds)


@pytest.mark.parametrize("kernels", [ReferenceKernels(), choose(torch.device("cpu")).kernels])
def test_the_kth_entry_and_its_ties_are_kept(kernels: Any) -> None:
    """A strict > at the exact threshold chose k - 1, and dropped all ties for good."""
    chosen, threshold = kernels.select_topk(torch.tensor([1.0, -3.0, 3.0, 2.0, -2.0, 2.0]), 3)
    assert chosen.indices.tolist() == [1, 2, 3] and threshold == 2.0
    assert kernels.select_above(torch.tensor([1.0, -3.0, 2.0]), 2.0).indices.tolist() == [1, 2]
    tied, threshold = kernels.select_topk(torch.ones(10), 4)
    assert tied.indices.tolist() == [0, 1, 2, 3] and threshold == 1.0


@pytest.mark.parametrize(("numel", "world_size"), [(3, 8), (7, 8), (15, 8), (23, 8), (100, 7), (1, 5), (0, 3)])
def test_regions_cover_everything_when_n_is_no_multiple_of_p(numel: int, world_size: int) -> None:
    bounds = equal_bounds(numel, world_size)
    assert len(bounds) == world_size + 1 and bounds[0] == 0 and bounds[-1] == numel
    assert all(0 <= high - low <= numel // world_size + 1 for low, high in pairwise(bounds))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_empty_selections_work(algorithm: str, world_size: int) -> None:
    for case in (Case("zero", 100, 0.1, steps=2), Case("zero", 1, 1.0), Case("normal", 0, 0.1, steps=1)):
        check_all(run_world(world_size, lambda t, c=case: observe(t, t.rank, algorithm, c)), algorithm)


def test_an_empty_global_selection_works() -> None:
    """Sums that cancel to zero leave no winner anywhere."""

    def work(transport: Any) -> int:
        region = SparseVector(torch.tensor([1, 2], dtype=torch.int32), torch.zeros(2), 10)
        return winners(region, 1, 127, 20, transport, ReferenceKernels()).kept.nnz

    assert run_world(2, work) == [0, 0]


@pytest.mark.parametrize("algorithm", SPARSE)
def test_a_nan_never_lives_in_a_residual(algorithm: str) -> None:
    def work(transport: Any) -> None:
        with Reducer(algorithm, 0.01, group=transport, on_nonfinite="skip") as reducer:
            for step in range(4):
                grad = gradient("normal", 2000, transport.rank, step)
                if step == 1 and transport.rank == 0:
                    grad[1234] = float("nan")
                reducer.reduce("w", grad)
                assert torch.isfinite(reducer.residuals().get("w", torch.zeros(1))).all()

    run_world(2, work)


class _BrokenKernels(ReferenceKernels):
    def sum_sparse(self, vectors: Any) -> Any:
        raise ZeroDivisionError("deliberate")


def test_an_exception_in_the_communication_thread_ends_every_rank() -> None:
    def work(transport: Any) -> str:
        with Reducer("oktopk", 0.1, group=transport) as reducer:
            if transport.rank == 1:
                object.__setattr__(reducer._pipeline.tools, "kernels", _BrokenKernels())
            try:
                reducer.reduce("w", gradient("normal", 2000, transport.rank, 0))
            except Exception as error:
                return f"{type(error).__name__}: {error} | {error.__cause__!r}"
            return "no error"

    first, second, third = run_world(3, work, timeout=20)
    assert "deliberate" in second
    assert "rank 0" in first and "rank 2" in third
    assert threading.active_count() < 20


def _different_step_counts() -> str:
    import torch.distributed as dist

    with Reducer("oktopk", 0.1) as reducer:
        reducer.reduce("w", torch.ones(2000))
        state = reducer.state_dict()
        state["steps"] = {"w": 5 + dist.get_rank()}
        reducer.load_state_dict(state)
        try:
            reducer.reduce("w", torch.ones(2000))
        except MismatchError as error:
            return str(error)
    return "no error"


@pytest.mark.processes
def test_a_step_counter_that_differs_after_a_resume_is_an_error_not_a_deadlock() -> None:
    outcomes = start(2, _different_step_counts, timeout=30)
    assert all(outcome.ok for outcome in outcomes), [outcome.output for outcome in outcomes]
    assert all(b"step" in outcome.payload for outcome in outcomes)


@pytest.mark.parametrize("algorithm", ["topkdsa", "oktopk"])
def test_residuals_are_cleared_outside_the_own_region_too(algorithm: str) -> None:
    """Each rank's largest entry lies in a region that another rank owns."""

    def work(transport: Any) -> float:
        grad = torch.full((4000,), 1e-6)
        place = 100 if transport.rank == 1 else 3900
        grad[place] = 5.0
        with Reducer(algorithm, 0.01, group=transport) as reducer:
            reducer.reduce("w", grad)
            return float(reducer.residuals()["w"][place])

    assert run_world(2, work) == [0.0, 0.0]


def test_storage_follows_a_density_that_grows() -> None:
    """Buffers sized by the first k broke when k changed."""
    case = Case("heavy", 5000, {0: 0.001, 1: 0.5, 2: 1.0, 3: 0.01}, steps=5)
    check_all(run_world(3, lambda t: observe(t, t.rank, "oktopk", case)), "oktopk")


def test_phases_mean_the_same_for_all_algorithms() -> None:
    """Timers counted compression as communication for one method and not for another."""

    def work(transport: Any) -> dict[str, set[str]]:
        spent = {}
        for algorithm in SPARSE:
            with Reducer(algorithm, 0.1, group=transport, wire="bfloat16") as reducer:
                reducer.reduce("w", gradient("normal", 20_000, transport.rank, 0))
                spent[algorithm] = {phase for phase, s in reducer.last_step.seconds.items() if s > 0}
        return spent

    for spent in run_world(2, work):
        for algorithm, phases in spent.items():
            assert {"select", "pack", "exchange", "sum", "unpack"} - {"sum"} <= phases, algorithm
        assert all("gather" in spent[name] for name in ("topka", "topkdsa", "gaussiank", "oktopk"))


def test_gtopk_keeps_what_an_inner_node_drops() -> None:
    """The published residual rule loses a partial sum when its index survives elsewhere: 8-17% of the update."""
    case = Case("heavy", 2000, 0.01, steps=10)
    check_all(run_world(8, lambda t: observe(t, t.rank, "gtopk", case)), "gtopk")


def test_rounding_on_the_wire_is_not_lost() -> None:
    """Tiny gradients that a 16-bit float cannot hold arrive once they have added up."""

    def work(transport: Any) -> torch.Tensor:
        total = torch.zeros(2000)
        with Reducer("oktopk", 0.5, group=transport, wire="bfloat16") as reducer:
            for _ in range(50):
                total += reducer.reduce("w", torch.full((2000,), 1.001e-3))
            return total + reducer.residuals()["w"]

    for total in run_world(2, work):
        torch.testing.assert_close(total, torch.full((2000,), 50 * 1.001e-3), rtol=1e-4, atol=0)


def test_defaults_are_the_documented_ones() -> None:
    config = OkTopkConfig()
    assert (config.threshold, config.reestimate_every, config.cap) == ("fresh", 32, 1.5)
    assert Wire().values == "float32"
