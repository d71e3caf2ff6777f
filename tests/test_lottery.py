"""Coordinates that all ranks draw alike, and what random-k and Ok-Topk's turns promise beyond the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inputs import gradient
from oktopk import ALGORITHMS, Reducer
from oktopk.kernels import ReferenceKernels, choose
from oktopk.primitives.collectives import Tools
from oktopk.primitives.lottery import Lottery
from oktopk.primitives.partition import told_words
from oktopk.reduction.agreement import agreement_words
from oktopk.transport import run_world
from oktopk.types import Difference
from oktopk.wire import Wire

CPU = torch.device("cpu")


def draw(lottery: Lottery, numel: int, k: int, step: int) -> Tensor:
    return lottery.draw(numel, k, step)


@settings(max_examples=300, deadline=None)
@given(
    numel=st.integers(1, 2000), k=st.integers(1, 2500), step=st.integers(0, 10**9),
    in_turn=st.booleans(), block=st.integers(1, 40), seed=st.integers(-5, 2**40),
)  # fmt: skip
def test_close_to_k_coordinates_ascend_within_the_vector(
    numel: int, k: int, step: int, in_turn: bool, block: int, seed: int
) -> None:
    indices = draw(Lottery(in_turn, block, seed), numel, k, step)
    assert indices.dtype == torch.int32 and int(indices[0]) >= 0 and int(indices[-1]) < numel
    assert (indices[1:] > indices[:-1]).all()
    k = min(k, numel)
    assert k * 31 / 32 - block <= indices.numel() <= k  # a block at the end may be short


@settings(max_examples=60, deadline=None)
@given(numel=st.integers(1, 500), k=st.integers(1, 500), block=st.integers(1, 20), start=st.integers(0, 1000))
def test_in_turn_nothing_waits_longer_than_it_says(numel: int, k: int, block: int, start: int) -> None:
    lottery = Lottery(True, block)
    wait = lottery.longest_wait(numel, k)
    drawn = torch.cat([draw(lottery, numel, k, step) for step in range(start, start + wait)])
    assert drawn.unique().numel() == numel
    assert wait <= -(-numel // k) * 1.1 + 2  # close to 1 / density


@pytest.mark.parametrize(("numel", "k", "block"), [(37, 7, 1), (100, 9, 4), (50, 24, 8)])
def test_by_chance_every_coordinate_has_the_same(numel: int, k: int, block: int) -> None:
    steps, lottery = 2000, Lottery(False, block)
    counts = torch.zeros(numel)
    for step in range(steps):
        counts[draw(lottery, numel, k, step).long()] += 1
    chance = counts.sum() / (steps * numel)
    # Five standard deviations of a count.
    assert (counts - steps * chance).abs().max() < 5 * (steps * chance * (1 - chance)).sqrt()


def test_every_part_of_the_vector_has_its_share_of_every_step() -> None:
    """Layers follow each other: a step that left some out would be uneven over the model."""
    for in_turn in (True, False):
        parts = draw(Lottery(in_turn, 16), 1_000_000, 10_000, 3).long() // 10_000
        assert (torch.bincount(parts, minlength=100) - 100).abs().max() <= 32


@pytest.mark.parametrize("in_turn", [True, False])
def test_steps_and_seeds_draw_different_coordinates(in_turn: bool) -> None:
    drawn = [set(draw(Lottery(in_turn, 1, seed), 10_000, 500, step).tolist()) for seed in (0, 1) for step in (0, 1)]
    for i, one in enumerate(drawn):
        assert all(len(one & other) < 100 for other in drawn[:i])  # 25 by chance


def test_vectors_beyond_32_bits_do_not_overflow() -> None:
    numel = 2**40
    indices = draw(Lottery(False, 16), numel, 200_000, 7)
    assert indices.dtype == torch.int64 and (indices.diff() > 0).all() and int(indices[-1]) < numel
    assert int(indices[-1]) > 0.9999 * numel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("indices", [[], [0], [999], [3, 4, 5, 400, 999]])
def test_kernels_pick_what_torch_indexes(dtype: torch.dtype, indices: list[int]) -> None:
    x = torch.randn(1000).to(dtype)
    for kernels in (choose(CPU).kernels, ReferenceKernels()):
        for index in (torch.int32, torch.int64):
            picked = kernels.pick(x, torch.tensor(indices, dtype=index))
            assert picked.numel == 1000 and picked.indices.tolist() == indices
            assert picked.values.dtype == dtype and torch.equal(picked.values, x[torch.tensor(indices).long()])
    for wrong in ([1000], [-1]):
        with pytest.raises(IndexError):
            choose(CPU).kernels.pick(x, torch.tensor(wrong, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_pick_from_a_difference_that_nobody_forms(dtype: torch.dtype) -> None:
    shared, own = torch.randn(1000, dtype=dtype), torch.randn(1000, dtype=dtype)
    difference = Difference(shared, tuple(piece.clone() for piece in own.split([3, 0, 500, 497])))
    indices = torch.tensor([0, 2, 3, 4, 502, 503, 999], dtype=torch.int32)
    for kernels in (choose(CPU).kernels, ReferenceKernels()):
        assert torch.equal(kernels.pick(difference, indices).values, (shared - own)[indices.long()])
    with pytest.raises(IndexError):
        choose(CPU).kernels.pick(difference, torch.tensor([1000], dtype=torch.int32))


@pytest.mark.parametrize(("wire", "value_bytes"), [("float32", 4.0), ("int8", 1 + 4 / 256), ("int4", 0.5 + 4 / 128)])
def test_random_k_sends_values_and_no_indices(wire: str, value_bytes: float) -> None:
    def work(transport: Any) -> Any:
        with Reducer("randomk", 0.02, group=transport, wire=wire) as reducer:
            reducer.reduce("w", gradient("normal", 100_000, transport.rank, 0))
            return reducer.last_step

    for record in run_world(4, work):
        assert record.selected_local == record.selected_global == record.k == 2000
        agreement = 8 * agreement_words(told_words(4))
        overhead = 3 * (2 * (44 + 8 + 4) + agreement)  # headers and padding of messages, the agreement; of three peers
        assert record.bytes_received <= 2 * 2000 * value_bytes * 3 / 4 + overhead


def test_random_k_in_turn_pays_everything_within_one_round() -> None:
    """After a gradient and 1 / density steps of none, nothing is owed."""

    def work(transport: Any) -> list[float]:
        with Reducer("randomk", 0.05, group=transport, order="turn") as reducer:
            received = reducer.reduce("w", gradient("heavy", 4000, transport.rank, 0))
            for _ in range(20):
                received = received + reducer.reduce("w", torch.zeros(4000))
            owed = float(reducer.residuals()["w"].abs().max())
        mean = sum(gradient("heavy", 4000, rank, 0) for rank in range(3)) / 3
        return [owed, float((received - mean).abs().max() / mean.abs().max())]

    for owed, error in run_world(3, work):
        assert owed == 0.0 and error < 1e-6


def test_entries_that_are_never_large_come_in_turn_too() -> None:
    """Without a share in turn the small half would wait for ever."""

    def work(transport: Any) -> list[float]:
        small = torch.arange(8000) % 2 == 0
        left = []
        for in_turn in (0.0, 0.25):
            with Reducer("oktopk", 0.02, group=transport, in_turn=in_turn) as reducer:
                received = torch.zeros(8000)
                for step in range(210):  # 1 / (0.02 * 0.25) is 200; blocks that do not fit cost a few more
                    grad = gradient("normal", 8000, transport.rank, step)
                    received += reducer.reduce("w", torch.where(small, 1e-6 * grad, grad))
                left.append(float((received[small] == 0).float().mean()))
        return left

    for without, with_turns in run_world(2, work):
        assert without > 0.9 and with_turns == 0.0


def test_what_goes_in_turn_is_not_sent_a_second_time() -> None:
    """The largest entries are those whose turn it is: they must arrive once."""

    def work(transport: Any) -> Any:
        with Reducer("oktopk", 0.1, group=transport, in_turn=0.5) as reducer:
            turn = draw(Lottery(True, 16), 4000, 200, 0).long()
            grad = torch.ones(4000)
            grad[turn] = 100.0
            mean = reducer.reduce("w", grad)
            assert (mean[turn] == 100.0).all() and set(mean.tolist()) == {0.0, 1.0, 100.0}
            assert torch.equal(reducer.residuals()["w"], grad - mean)
            return reducer.last_step

    for record in run_world(3, work):
        # Of those chosen, as many fell away as went in turn.
        assert (
            record.selected_local == record.selected_global == record.k - draw(Lottery(True, 16), 4000, 200, 0).numel()
        )
        assert record.bytes_received <= 4 * 6 * record.k * 2 / 3 + 32 * 1024


@pytest.mark.parametrize(
    ("algorithm", "options"), [("randomk", {}), ("oktopk", {}), ("oktopk", {"in_turn": 0.4}), ("gtopk", {})]
)
def test_what_was_asked_ahead_is_reduced_though_weights_move_on(algorithm: str, options: dict[str, Any]) -> None:
    config, make = ALGORITHMS[algorithm]

    def work(transport: Any) -> None:
        tools = Tools(transport, Wire("int8"), Wire(), choose(CPU).kernels)
        shared, own = torch.zeros(3000), tuple(gradient("heavy", 3000, transport.rank, 0).split([1000, 2000]))
        difference = Difference(shared, own)
        expected = make(config(**options), tools).reduce(difference.to_dense(), 100)
        moving = make(config(**options), tools)
        moving.ask_ahead(difference, 100)
        for piece in own:
            piece.add_(1.0)
        reduced = moving.reduce(difference, 100)
        for ours, theirs in ((reduced.mean, expected.mean), (reduced.sent, expected.sent)):
            assert torch.equal(ours.indices, theirs.indices) and torch.equal(ours.values, theirs.values)

    run_world(2, work)
