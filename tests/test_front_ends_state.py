"""What front ends rely on in the reducer: grouping, unused parameters, scale, momentum, skipped steps. In threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk.errors import ConfigError
from oktopk.front_ends.broadcast import broadcast_
from oktopk.reduction.grouping import Grouping
from oktopk.transport import ThreadTransport, run_world

A, B, C = ("a", 60), ("b", 50), ("c", 40)


def reducer_on(transport: ThreadTransport, **options: Any) -> oktopk.Reducer:
    return oktopk.Reducer(group=transport, **{"density": 0.1, "min_numel": 0, **options})


def noise(rank: int, *names: tuple[str, int], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(sum(numel for _, numel in names), generator=generator)


def test_buckets_are_groups_until_a_resumed_run_says_otherwise() -> None:
    grouping = Grouping()
    assert grouping.split((A, B, C)) == [(A, B, C)]
    assert grouping.split((C, B)) == [(C, B)]
    assert grouping.current == [(A, B, C), (C, B)]


def test_a_resumed_run_keeps_its_groups_while_they_fit() -> None:
    grouping = Grouping()
    grouping.resume([[C, B], [A]])
    assert grouping.split((A, B, C)) == [(C, B), (A,)], "one bucket holds all of them"
    assert grouping.split((C, B)) == [(C, B)]
    assert grouping.split((A, B)) == [(A, B)], "they no longer fit"
    assert grouping.resumed == []


def test_regrouped_buckets_reduce_as_the_groups_would() -> None:
    def work(transport: ThreadTransport) -> tuple[Tensor, Tensor]:
        flat = noise(transport.rank, A, B, C)
        with reducer_on(transport) as one, reducer_on(transport) as other:
            one._pipeline.grouping.resume([[C, A], [B]])
            whole = one.submit([A, B, C], flat.clone()).wait()
            a, b, c = flat.split([60, 50, 40])
            parts = [other.submit([C, A], torch.cat([c, a])).wait(), other.submit([B], b.clone()).wait()]
            c, a = parts[0].split([40, 60])
            return whole, torch.cat([a, parts[1], c])

    for whole, parts in run_world(3, work):
        assert torch.equal(whole, parts)


def test_a_parameter_unused_everywhere_sits_out_and_keeps_what_it_owes() -> None:
    def work(transport: ThreadTransport) -> None:
        with reducer_on(transport, momentum_correction=0.5) as reducer:
            reducer.submit([A, B], noise(transport.rank, A, B)).wait()
            before, velocity = reducer.residuals()["a"], reducer._pipeline.feedback.velocities()["a"]
            mean = reducer.submit([A, B], noise(transport.rank, A, B, seed=1), unused={"a"}).wait()
            assert reducer._pipeline.unused == {"a"}
            assert not mean[:60].any() and mean[60:].any()
            assert torch.equal(reducer.residuals()["a"], before)
            assert torch.equal(reducer._pipeline.feedback.velocities()["a"], velocity)
            total = sum(float(r.double().square().sum()) for r in reducer.residuals().values())
            assert reducer.last_step.residual_norm == pytest.approx(total**0.5, rel=1e-4)

    run_world(2, work)


def test_a_parameter_unused_on_one_rank_takes_part() -> None:
    def work(transport: ThreadTransport) -> Tensor:
        with reducer_on(transport, algorithm="dense") as reducer:
            names = [(f"p{i}", 2) for i in range(70)]  # more than fit into one word
            flat = torch.full((140,), float(transport.rank))
            unused = {"p1", "p69"} if transport.rank == 0 else {"p69"}
            mean = reducer.submit(names, flat, unused).wait()
            assert reducer._pipeline.unused == {"p69"}
            return mean

    mean = run_world(2, work)[0]
    assert mean[:138].eq(0.5).all() and mean[138:].eq(0.0).all()


def test_residuals_follow_the_gradient_scale() -> None:
    with oktopk.Reducer(density=0.1, min_numel=0, momentum_correction=0.5) as reducer:
        reducer.submit([A], noise(0, A)).wait()
        before, velocity = reducer.residuals()["a"], reducer._pipeline.feedback.velocities()["a"]
        reducer.set_gradient_scale(1024.0)
        assert torch.equal(reducer.residuals()["a"], before * 1024)
        assert torch.equal(reducer._pipeline.feedback.velocities()["a"], velocity * 1024)
        reducer.set_gradient_scale(1024.0)
        assert torch.equal(reducer.residuals()["a"], before * 1024)
        with pytest.raises(ConfigError, match="scale must be above 0"):
            reducer.set_gradient_scale(0.0)
        assert reducer.state_dict()["gradient_scale"] == 1024.0


def test_a_skipped_step_is_undone_whole() -> None:
    def work(transport: ThreadTransport) -> None:
        with reducer_on(transport, on_nonfinite="skip", momentum_correction=0.5) as reducer:
            for pair in (A, B, C):
                reducer.submit([pair], noise(transport.rank, pair)).wait()
            before, velocities = reducer.residuals(), reducer._pipeline.feedback.velocities()
            bad = noise(transport.rank, B)
            bad[3] = float("inf") if transport.rank else bad[3]
            assert reducer.submit([A], noise(transport.rank, A, seed=1)).wait().isfinite().all()
            assert reducer.submit([B], bad).wait().isnan().all()
            assert reducer.submit([C], noise(transport.rank, C, seed=1)).wait().isnan().all()
            for name, residual in reducer.residuals().items():
                assert torch.equal(residual, before[name])
                assert torch.equal(reducer._pipeline.feedback.velocities()[name], velocities[name])
            assert reducer.submit([A], noise(transport.rank, A, seed=2)).wait().isfinite().all()

    run_world(2, work)


def test_momentum_correction_is_momentum_sgd_when_everything_is_sent() -> None:
    with oktopk.Reducer("dense", momentum_correction=0.9) as reducer:
        velocity = torch.zeros(60)
        for step in range(5):
            grad = noise(0, A, seed=step)
            velocity = 0.9 * velocity + grad
            torch.testing.assert_close(reducer.reduce("a", grad), velocity)


def test_masking_stops_the_momentum_of_what_was_sent_and_of_nothing_else() -> None:
    with oktopk.Reducer(density=0.1, min_numel=0, momentum_correction=0.9, factor_masking=True) as reducer:
        sent = reducer.reduce("a", noise(0, A)) != 0
        velocity = reducer._pipeline.feedback.velocities()["a"]
        assert sent.any() and not velocity[sent].any() and velocity[~sent].ne(0).all()


@pytest.mark.parametrize("options", [{"momentum_correction": 1.0}, {"factor_masking": True}])
def test_momentum_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        oktopk.Reducer(**options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_the_mean_to_a_short_dtype_loses_nothing(dtype: torch.dtype) -> None:
    def work(transport: ThreadTransport) -> tuple[Tensor, Tensor, Tensor]:
        with reducer_on(transport, density=0.5) as reducer:
            grad = (noise(transport.rank, A) * 1000).to(dtype)
            mean = reducer.reduce("a", grad)
            return grad.double(), mean.double(), reducer.residuals()["a"].double()

    world = run_world(3, work)
    given = sum(grad for grad, _, _ in world)
    got = 3 * world[0][1] + sum(residual for _, _, residual in world)
    # Residuals are float32, of a size of 1000 with three additions.
    torch.testing.assert_close(got, given, rtol=1e-6, atol=1e-3)


def test_a_mean_beyond_the_range_of_float16_saturates_and_the_rest_stays_owed() -> None:
    with oktopk.Reducer(density=1.0, min_numel=0) as reducer:
        grad = torch.full((8,), 60000.0, dtype=torch.float16)
        reducer._pipeline.feedback.load_state_dict({"a": torch.full((8,), 60000.0)})
        mean = reducer.reduce("a", grad)
        assert mean.isfinite().all()
        assert torch.equal(mean.double() + reducer.residuals()["a"].double(), torch.full((8,), 120000.0).double())


def test_broadcast_copies_rank_0_whatever_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oktopk.front_ends.broadcast.CHUNK_BYTES", 64)

    def work(transport: ThreadTransport) -> list[Tensor]:
        value = 1 + transport.rank
        tensors = [
            torch.full((3,), value, dtype=torch.uint8),
            torch.full((5, 2), float(value)),
            torch.tensor(value),
            torch.full((4,), value, dtype=torch.bfloat16),
            torch.empty(0),
            torch.full((30,), value, dtype=torch.float64),
        ]
        broadcast_(tensors, transport)
        return tensors

    for tensors in run_world(3, work):
        assert all(bool(tensor.eq(1).all()) for tensor in tensors)
