"""What Ok-Topk promises beyond the contract: counts near k, volume below 6k, even blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contract import Case, check_all, observe
from inputs import gradient
from oktopk import PAPER_BERT, PAPER_LSTM, PAPER_VGG, Reducer
from oktopk.config import OkTopkConfig
from oktopk.transport import run_world

CONSTANT_BYTES = 32 * 1024  # histograms, sizes, agreement


def _near(count: int, k: int) -> bool:
    return abs(count - k) <= max(0.05 * k, 32)


@pytest.mark.parametrize("kind", ["normal", "heavy", "layers"])
@pytest.mark.parametrize("world_size", [2, 3, 8, 16])
def test_fresh_thresholds_hit_k_and_the_volume_stays_near_4k_on_every_step(kind: str, world_size: int) -> None:
    """Also on the first step after warm-up (1), and after a density change (3)."""
    case = Case(kind, 100_000, {0: 0.02, 3: 0.004}, steps=5)
    ranks = run_world(world_size, lambda t: observe(t, t.rank, "oktopk", case, warmup_steps=1))
    for step in range(1, case.steps):
        for seen in ranks:
            record = seen[step].record
            assert record.phase == "sparse"
            assert _near(record.selected_local, record.k)
            assert _near(record.selected_global, record.k)
            words = record.k * (world_size - 1) / world_size
            assert record.bytes_received <= 4 * 4.4 * words + CONSTANT_BYTES
            assert record.imbalance <= OkTopkConfig().balance_factor


def test_fresh_thresholds_hit_k_right_after_a_resume() -> None:
    def work(transport: Any) -> list[int]:
        with Reducer("oktopk", 0.01, group=transport) as first:
            first.reduce("w", gradient("layers", 100_000, transport.rank, 0))
            state = first.state_dict()
        with Reducer("oktopk", 0.002, group=transport) as second:  # and with another density
            second.load_state_dict(state)
            second.reduce("w", 100 * gradient("layers", 100_000, transport.rank, 1))
            return [second.last_step.selected_local, second.last_step.selected_global, second.last_step.k]

    for local, winners, k in run_world(4, work):
        assert k == 200 and _near(local, k) and _near(winners, k)


@pytest.mark.parametrize("preset", [PAPER_LSTM, PAPER_VGG, PAPER_BERT])
def test_reused_thresholds_never_pass_the_6k_bound_even_when_the_gradient_changes_scale(preset: dict[str, Any]) -> None:
    """A threshold that was right for one scale lets everything through at another: the cap must catch it."""
    world_size, numel = 4, 50_000

    def work(transport: Any) -> list[Any]:
        records = []
        with Reducer("oktopk", group=transport, **{**preset, "warmup_steps": 2, "density": 0.01}) as reducer:
            for step in range(12):
                scale = 30.0 if step in (5, 9) else 1.0
                kind = "layers" if step < 8 else "normal"
                reducer.reduce("w", scale * gradient(kind, numel, transport.rank, step))
                records.append(reducer.last_step)
        return records

    for records in run_world(world_size, work):
        for record in records[2:]:
            bound = 4 * 6 * record.k * (world_size - 1) / world_size + CONSTANT_BYTES
            assert record.bytes_received <= bound
            assert record.selected_local <= 1.5 * record.k


def test_volume_does_not_grow_with_the_number_of_ranks_while_topka_does() -> None:
    def received(algorithm: str, world_size: int) -> int:
        case = Case("normal", 1_000_000, 0.02, steps=1)
        ranks = run_world(world_size, lambda t: observe(t, t.rank, algorithm, case))
        return max(seen[0].record.bytes_received for seen in ranks)

    assert received("oktopk", 16) <= 2.1 * received("oktopk", 2)
    assert received("topka", 16) >= 14 * received("topka", 2)


def test_ranks_that_choose_disjoint_coordinates_still_share_the_load() -> None:
    """Half of the ranks care about the first tenth of the gradient, the others about the last."""
    world_size, numel = 8, 80_000

    def work(transport: Any) -> Any:
        with Reducer("oktopk", 0.02, group=transport) as reducer:
            grad = 0.001 * gradient("normal", numel, transport.rank, 0)
            part = slice(0, numel // 10) if transport.rank < 4 else slice(9 * numel // 10, numel)
            grad[part] *= 1000
            reducer.reduce("w", grad)
            return reducer.last_step

    for record in run_world(world_size, work):
        assert record.bytes_received <= 4 * 4.4 * record.k * (world_size - 1) / world_size + CONSTANT_BYTES
        assert record.imbalance <= OkTopkConfig().balance_factor


def test_uneven_blocks_are_evened_out_before_the_gather() -> None:
    """Stale regions and a gradient that moved: without evening out one rank would own every survivor."""

    def work(balance_factor: float, transport: Any) -> Any:
        options = {"balance_factor": balance_factor, "repartition_every": 100, "cap": 100.0}
        with Reducer("oktopk", 0.01, group=transport, **options) as reducer:
            for step in range(2):
                grad = 0.001 * gradient("normal", 40_000, transport.rank, step)
                grad[step * 20_000 : step * 20_000 + 5000] *= 1000
                mean = reducer.reduce("w", grad)
            return mean, reducer.last_step.imbalance

    uneven, even = (run_world(4, lambda t, f=factor: work(f, t)) for factor in (1000.0, 1.25))
    assert uneven[0][1] > 3.0
    assert even[0][1] <= 1.25
    torch.testing.assert_close(uneven[0][0], even[0][0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("in_flight", [1, 2, 100])
def test_peers_in_flight_change_nothing_but_time(in_flight: int) -> None:
    case = Case("heavy", 5000, 0.05)
    default = run_world(5, lambda t: observe(t, t.rank, "oktopk", case))
    other = run_world(5, lambda t: observe(t, t.rank, "oktopk", case, in_flight=in_flight))
    check_all(other, "oktopk")
    for a, b in zip(default[0], other[0], strict=True):
        assert torch.equal(a.mean, b.mean)


def test_mass_ties_at_the_global_threshold_are_cut_to_k() -> None:
    """Every rank chooses other coordinates, all equally large: the union is P times k."""

    def work(transport: Any) -> int:
        grad = torch.zeros(10_000)
        grad[transport.rank * 1000 : transport.rank * 1000 + 500] = 2.0
        with Reducer("oktopk", 0.05, group=transport) as reducer:
            reducer.reduce("w", grad)
            return reducer.last_step.selected_global

    assert run_world(4, work) == [500] * 4


@pytest.mark.parametrize(("kind", "wire"), [("layers", "float32"), ("normal", "int8")])
@pytest.mark.parametrize("world_size", [2, 4, 16])
def test_three_rounds_at_any_number_of_ranks(kind: str, wire: str, world_size: int) -> None:
    """Terms and quantiles, pairs, winners; only the first steps have nothing to guess from, and one guess may miss."""
    case = Case(kind, 40_000, 0.02, steps=8)
    ranks = run_world(world_size, lambda t: observe(t, t.rank, "oktopk", case, wire=wire))
    for seen in ranks:
        rounds = sorted(step.record.rounds for step in seen[3:])
        assert rounds[:-1] == [3] * 4 and rounds[-1] <= 9


def test_a_wrong_guess_costs_rounds_but_neither_entries_nor_the_bound() -> None:
    """Ranks that all chose something else suddenly choose the same: sums are four times what was to be expected."""
    world_size, numel = 4, 40_000

    def work(transport: Any) -> list[Any]:
        with Reducer("oktopk", 0.02, group=transport) as reducer:
            seen = []
            for step in range(12):
                own = gradient("normal", numel, transport.rank, step)
                common = gradient("heavy", numel, 99, step)
                before = reducer.residuals().get("w", torch.zeros(numel))
                grad = common if step in (5, 9) else own
                mean = reducer.reduce("w", grad)
                seen.append((before + grad, mean, reducer.residuals()["w"], reducer.last_step))
            return seen

    steps = list(zip(*run_world(world_size, work), strict=True))
    for ranks in steps:
        total = sum(acc.double() for acc, _, _, _ in ranks)
        kept = world_size * ranks[0][1].double() + sum(owed.double() for _, _, owed, _ in ranks)
        assert (total - kept).abs().max() <= 1e-6 * total.abs().max()
        for _, mean, _, record in ranks:
            assert torch.equal(mean, ranks[0][1])
            assert _near(record.selected_global, record.k)
            assert record.bytes_received <= 4 * 6 * record.k * (world_size - 1) / world_size + CONSTANT_BYTES
    rounds = [ranks[0][3].rounds for ranks in steps]
    assert max(rounds[5:]) > 3 and rounds[-1] == 3


def test_the_guess_is_part_of_the_state() -> None:
    """A run that goes on from a saved state takes the same rounds, and has the same bits, as one that was not saved."""

    def work(transport: Any) -> None:
        with Reducer("oktopk", 0.02, group=transport) as first, Reducer("oktopk", 0.02, group=transport) as second:
            for step in range(8):
                if step == 4:
                    second.load_state_dict(first.state_dict())
                grad = gradient("layers", 20_000, transport.rank, step)
                mean = first.reduce("w", grad)
                if step >= 4:
                    assert torch.equal(second.reduce("w", grad), mean)
                    assert second.last_step.rounds == first.last_step.rounds == 3

    run_world(3, work)
