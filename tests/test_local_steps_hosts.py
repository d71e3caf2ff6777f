"""Local steps where a host is one worker: gradients averaged inside, updates reduced between, a part for each rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oktopk
from oktopk.errors import ConfigError, NonFiniteError, OkTopkError, PeerError, UnsupportedError
from oktopk.metrics import StepRecord
from oktopk.transport import ThreadTransport, run_world
from test_local_steps import RATE, _adam, _WithNorm, model_of, push, sgd, weights_of
from test_ranks_per_host import on_machines

SHAPES = [(2, 2), (2, 3), (1, 4), (4, 1)]  # hosts, ranks per host
PAIRS = [("oktopk", "float32"), ("oktopk", "int8"), ("randomk", "codebook2"), ("dense", "int4"), ("topkdsa", "float32"),
         ("gtopk", "bfloat16")]  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What one rank saw."""

    start: Tensor
    shared: Tensor
    own: Tensor
    owed: Tensor
    changes: Tensor  # what steps on its own gradients alone would have changed
    record: StepRecord


def run(transport: ThreadTransport, per_host: int, steps: int = 5, finish: bool = False, **options: Any) -> Seen:
    model = model_of(transport.rank)  # different on every rank: rank 0's are taken
    optimizer = sgd(model)
    options = {"density": 0.1, "min_numel": 0, "wire": "float32", **options}
    with oktopk.local_steps(model, optimizer, group=transport, hosts=per_host, **options) as handle:
        assert handle.workers == transport.world_size // per_host
        start = weights_of(model).double()
        changes = torch.zeros_like(start)
        for step in range(steps):
            changes += RATE * push(model, optimizer, transport.rank, step)
        if finish:
            handle.finish()
        own = weights_of(model)
        with handle.shared():
            shared = weights_of(model).double()
        owed = torch.cat([part.double() for part in handle.owed().values()])
        return Seen(start, shared, own, owed, changes, handle.reducer.last_step)


def hosts_of(world: list[Any], per_host: int) -> list[list[Any]]:
    return [world[first : first + per_host] for first in range(0, len(world), per_host)]


def check_equal_inside(world: list[Seen], per_host: int) -> None:
    assert all(torch.equal(seen.shared, world[0].shared) for seen in world), "shared weights are everyone's"
    for host in hosts_of(world, per_host):
        assert all(torch.equal(seen.own, host[0].own) and torch.equal(seen.owed, host[0].owed) for seen in host)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("algorithm", "wire"), PAIRS)
def test_what_hosts_changed_is_in_the_shared_weights_or_still_owed(
    algorithm: str, wire: str, shape: tuple[int, int]
) -> None:
    count, per_host = shape
    world = run_world(count * per_host, lambda t: run(t, per_host, algorithm=algorithm, wire=wire))
    check_equal_inside(world, per_host)
    leaders = world[::per_host]
    accounted = count * (world[0].start - world[0].shared) + sum(seen.owed for seen in leaders)
    changed = sum(seen.changes for seen in world) / per_host  # a host steps on the mean of its ranks' gradients
    torch.testing.assert_close(accounted, changed, rtol=0, atol=2e-6 * count)  # weights of 0.2, moved five times
    own = torch.stack([seen.own.double() - (seen.shared - seen.owed) for seen in world])
    torch.testing.assert_close(own, torch.zeros_like(own), rtol=0, atol=1e-6)
    assert all((seen.record.inside_bytes > 0) == (per_host > 1) for seen in world)


@pytest.mark.parametrize("shape", SHAPES)
def test_finishing_leaves_everyone_with_the_mean_of_all_changes(shape: tuple[int, int]) -> None:
    count, per_host = shape
    world = run_world(count * per_host, lambda t: run(t, per_host, 7, True, every=3, wire="int8"))
    expected = world[0].start - sum(seen.changes for seen in world) / len(world)
    for seen in world:
        torch.testing.assert_close(seen.shared, expected, rtol=0, atol=2e-6)
        assert torch.equal(seen.own.double(), world[0].shared) and not seen.owed.any()


def test_a_host_sends_to_others_what_one_rank_would_and_counts_gradients_inside() -> None:
    records = [seen.record for seen in run_world(4, lambda t: run(t, 2, 6, every=3, density=0.5))]
    alone = [seen.record for seen in run_world(2, lambda t: run(t, 1, 6, every=3, density=0.5))]
    together = sum(record.bytes_sent for record in records[:2])
    agreed = 8 * 40  # words that a rank tells each of the other three, at most
    assert together <= alone[0].bytes_sent + 2 * 3 * agreed
    # Half of three gradients, the half of each mean, and what was reduced of half the weights.
    assert all(3 * 4 * 1527 <= record.inside_bytes <= 5 * 4 * 1527 for record in records)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_any_precision_stay_equal_inside_a_host(dtype: torch.dtype) -> None:
    def work(transport: ThreadTransport) -> tuple[Tensor, Tensor, Tensor]:
        model = model_of(0, dtype)
        optimizer = sgd(model)
        options: Any = {"density": 0.1, "min_numel": 0, "hosts": 2, "every": 2}
        with oktopk.local_steps(model, optimizer, group=transport, **options) as handle:
            for step in range(5):
                push(model, optimizer, transport.rank, step)
            own, owed = weights_of(model), torch.cat(list(handle.owed().values()))
            handle.finish()
            return own, owed, weights_of(model)

    world = run_world(4, work)
    for mine, neighbour in hosts_of(world, 2):
        assert torch.equal(mine[0], neighbour[0]) and torch.equal(mine[1], neighbour[1])
    assert all(torch.equal(end, world[0][2]) for *_, end in world) and not torch.equal(world[0][0], world[2][0])


def test_buffers_are_averaged_over_all_ranks() -> None:
    def work(transport: ThreadTransport) -> tuple[Tensor, Tensor, Tensor]:
        model = _WithNorm()
        optimizer = sgd(model)
        with oktopk.local_steps(model, optimizer, group=transport, hosts=2, min_numel=0) as handle:
            model(torch.randn(8, 6, generator=torch.Generator().manual_seed(transport.rank))).sum().backward()
            mine = model.layers[1].running_mean.clone()
            optimizer.step()
            handle.finish()
            return mine, model.layers[1].running_mean.clone(), weights_of(model)

    world = run_world(4, work)
    mean = sum(mine for mine, _, _ in world) / 4
    for _, shared, weights in world:
        torch.testing.assert_close(shared, mean)
        assert torch.equal(shared, world[0][1]) and torch.equal(weights, world[0][2])


def test_a_parameter_that_some_ranks_of_a_host_did_not_use_counts_as_zero_there() -> None:
    def work(transport: ThreadTransport) -> tuple[Tensor, list[bool]]:
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
        with oktopk.local_steps(model, optimizer, group=transport, hosts=2, every=2):
            before = weights_of(model)
            for parameter in model[0].parameters():
                parameter.grad = torch.ones_like(parameter)
            if transport.rank == 1:
                model[1].weight.grad = torch.full((3, 3), 2.0).t()
            optimizer.step()
            return before * 0.5 - weights_of(model), [p.grad is not None for p in model.parameters()]

    world = run_world(2, work)
    for moved, present in world:
        assert present == [True, True, True, False, False, False], "none that no rank has"
        torch.testing.assert_close(moved[:21], torch.ones(21))


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_is_its_whole_hosts(policy: str) -> None:
    def work(transport: ThreadTransport) -> tuple[str, Tensor, Tensor]:
        model = model_of()
        optimizer = sgd(model)
        options: Any = {"on_nonfinite": policy, "group": transport, "min_numel": 0, "hosts": 2, "density": 0.2}
        with oktopk.local_steps(model, optimizer, **options) as handle:
            push(model, optimizer, transport.rank, 0)
            before, message = weights_of(model), ""
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, math.nan if transport.rank == 2 else 1.0)
            try:
                optimizer.step()
            except NonFiniteError as error:
                message = str(error)
            rested = torch.cat(list(handle.owed().values()))
            if policy == "skip":
                push(model, optimizer, transport.rank, 1)
                handle.finish()
            return message, rested - before, weights_of(model)

    world = run_world(4, work)
    if policy == "raise":
        assert all("rank 2, 3" in message or "ranks 2, 3" in message for message, *_ in world)
        return
    assert all(torch.equal(end, world[0][2]) and end.isfinite().all() for *_, end in world)
    assert all(torch.equal(mine[1], neighbour[1]) for mine, neighbour in hosts_of(world, 2))


def test_a_scaler_skips_on_all_ranks_of_a_host_or_on_none() -> None:
    def work(transport: ThreadTransport) -> tuple[list[float], int, Tensor, Tensor]:
        model = model_of()
        optimizer, scaler = _adam(model), torch.amp.GradScaler("cpu", init_scale=4.0)
        options: Any = {"scaler": scaler, "min_numel": 0, "hosts": 2, "every": 2}
        scales = []
        with oktopk.local_steps(model, optimizer, group=transport, **options) as handle:
            for step in range(4):
                optimizer.zero_grad()
                loss = model(torch.full((2, 30), 0.1 * (1 + transport.rank))).square().mean()
                scaler.scale(loss).backward()
                if step == 1 and transport.rank == 3:
                    model[0].weight.grad[0, 0] = math.inf  # type: ignore[index]
                if step % 2:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            own = weights_of(model)
            handle.finish()
            return scales, handle.step, own, weights_of(model)

    world = run_world(4, work)
    assert [scales for scales, *_ in world] == [[4.0] * 4] * 2 + [[4.0, 2.0, 2.0, 2.0]] * 2
    assert all(step == 4 and torch.equal(end, world[0][3]) for _, step, _, end in world)
    assert all(torch.equal(mine[2], neighbour[2]) for mine, neighbour in hosts_of(world, 2))


def test_gradients_are_averaged_once_and_can_be_clipped_as_a_mean() -> None:
    def work(transport: ThreadTransport) -> Tensor:
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with oktopk.local_steps(model, optimizer, group=transport, hosts=2, every=9) as handle:
            before = weights_of(model)
            model.weight.grad = torch.tensor([[4.0 * transport.rank, 0.0]])
            handle.average_gradients()
            handle.average_gradients()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            moved = before - weights_of(model)
            before = weights_of(model)
            optimizer.step(_closure(model, 6.0 * transport.rank))
            return torch.stack([moved, before - weights_of(model)])

    expected = torch.tensor([[1.0, 0.0], [3.0, 3.0]])  # (0 + 4) / 2 clipped to 1; (0 + 6) / 2
    for moved in run_world(2, work):
        torch.testing.assert_close(moved, expected, rtol=0, atol=1e-5)


def test_a_step_left_out_and_gradients_that_come_after_the_mean_are_averaged_again() -> None:
    def work(transport: ThreadTransport) -> tuple[Tensor, Tensor]:
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with oktopk.local_steps(model, optimizer, group=transport, hosts=2, every=9) as handle:
            before, slope = weights_of(model), 1.0 + 2.0 * transport.rank
            model(torch.full((1, 2), 100.0)).sum().backward()
            handle.average_gradients()
            optimizer.zero_grad()  # its norm was too large, say
            model(torch.full((1, 2), slope)).sum().backward()
            handle.average_gradients()
            model(torch.full((1, 2), 2 * slope)).sum().backward()
            optimizer.step()
            return before - weights_of(model), weights_of(model)

    world = run_world(2, work)
    for moved, own in world:
        torch.testing.assert_close(moved, torch.tensor([6.0, 6.0]), rtol=0, atol=1e-5)  # (1 + 3) / 2 + (2 + 6) / 2
        assert torch.equal(own, world[0][1])


def _closure(model: nn.Module, value: float) -> Any:
    def closure() -> Tensor:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        return torch.tensor(1.0)

    return closure


def _trained(transport: ThreadTransport, per_host: int, folder: Path, load: bool, steps: int = 9) -> list[Tensor]:
    model = _WithNorm()
    optimizer = _adam(model)
    options: Any = {"density": 0.2, "min_numel": 0, "every": 3, "algorithm": "oktopk", "hosts": per_host}
    with oktopk.local_steps(model, optimizer, group=transport, **options) as handle:
        if load:
            oktopk.load(handle, folder)
        for step in range(handle.step, steps):
            generator = torch.Generator().manual_seed(100 * step + transport.rank)
            optimizer.zero_grad()
            model(torch.randn(8, 6, generator=generator)).square().mean().backward()
            optimizer.step()
            if step + 1 == 5 and not load:  # in the middle of an interval
                oktopk.save(handle, folder)
        own = torch.cat([weights_of(model), model.layers[1].running_mean, model.layers[1].running_var])
        handle.finish()
        return [own, weights_of(model)]


@pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
def test_a_resumed_training_equals_one_that_was_not_interrupted(shape: tuple[int, int], tmp_path: Path) -> None:
    ranks = shape[0] * shape[1]
    straight = run_world(ranks, lambda t: _trained(t, shape[1], tmp_path, False))
    resumed = run_world(ranks, lambda t: _trained(t, shape[1], tmp_path, True))
    for one, other in zip(straight, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_weights_and_optimizer_of_a_host_are_saved_once(tmp_path: Path) -> None:
    run_world(4, lambda t: _trained(t, 2, tmp_path, False, steps=5))
    sizes = {rank: next(tmp_path.glob(f"rank-{rank}-of-4-*")).stat().st_size for rank in range(4)}
    assert sizes[0] > sizes[2] > 1.5 * sizes[1] and abs(sizes[1] - sizes[3]) < 100


CHANGES = [((2, 2), (4, 1)), ((4, 1), (2, 2)), ((2, 2), (3, 2)), ((2, 3), (2, 2)), ((2, 2), (1, 2))]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_other_hosts_owe_what_is_left_to_owe(before: Any, after: Any, tmp_path: Path) -> None:
    """All weights end where they would have: at the shared weights minus the mean of what was owed."""

    def save(transport: ThreadTransport) -> Tensor:
        model = model_of()
        optimizer = _adam(model)
        with oktopk.local_steps(model, optimizer, 0.1, group=transport, hosts=before[1], min_numel=0) as handle:
            for step in range(5):
                push(model, optimizer, transport.rank, step)
            oktopk.save(handle, tmp_path)
            handle.finish()
            return weights_of(model)

    def load(transport: ThreadTransport) -> tuple[Tensor, Tensor, int]:
        model = model_of(7)
        optimizer = _adam(model)
        with oktopk.local_steps(model, optimizer, 0.1, group=transport, hosts=after[1], min_numel=0) as handle:
            oktopk.load(handle, tmp_path)
            own = torch.cat([weights_of(model), *(s["exp_avg"].flatten() for s in optimizer.state.values())])
            handle.finish()
            return own, weights_of(model), len(optimizer.state)

    expected = run_world(before[0] * before[1], save)[0]
    world = run_world(after[0] * after[1], load)
    for _, weights, states in world:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
        assert states == 4
    for host in hosts_of(world, after[1]):
        assert all(torch.equal(own, host[0][0]) for own, *_ in host), "ranks of a host are one worker again"


def test_ranks_of_a_host_that_come_apart_are_noticed() -> None:
    def work(transport: ThreadTransport) -> None:
        model = model_of()
        optimizer = sgd(model)
        with oktopk.local_steps(model, optimizer, group=transport, hosts=2) as handle:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            handle.average_gradients()
            model[0].weight.grad += transport.rank == 3  # type: ignore[operator]
            with pytest.raises(OkTopkError, match=r"ranks 2, 3 are one host .* different weights"):
                optimizer.step()

    run_world(4, work)


def test_a_rank_that_gives_up_is_named_on_every_host() -> None:
    def work(transport: ThreadTransport) -> None:
        model = model_of()
        optimizer = sgd(model)
        gives_up = transport.rank == 3
        expected = (ValueError, "broken batch") if gives_up else (PeerError, r"rank 3 .*broken batch")
        # Others may still be on their way out of `local_steps` when it does.
        with (
            pytest.raises(expected[0], match=expected[1]),
            oktopk.local_steps(model, optimizer, group=transport, hosts=2) as handle,
        ):
            if gives_up:
                handle.reducer.refuse(ValueError("broken batch"))
            push(model, optimizer, transport.rank, 0)

    run_world(4, work)


def test_what_cannot_work_inside_a_host_is_refused_with_what_to_do() -> None:
    def work(transport: ThreadTransport) -> None:
        model = model_of()
        options: Any = {"group": transport, "hosts": 2}
        with pytest.raises(ConfigError, match=r"overlap=True and hosts=2 do not go together.*hosts=None"):
            oktopk.local_steps(model, sgd(model), overlap=True, **options)
        with pytest.raises(UnsupportedError, match=r"LBFGS.*hosts=None"):
            oktopk.local_steps(model, torch.optim.LBFGS(model.parameters()), **options)
        sparse = nn.Embedding(5, 4, sparse=True)
        optimizer = sgd(sparse)
        with oktopk.local_steps(sparse, optimizer, **options):
            sparse(torch.tensor([1, 2])).sum().backward()
            with pytest.raises((UnsupportedError, PeerError), match=r"is sparse.*hosts=None"):
                optimizer.step()

    run_world(2, work)


@pytest.mark.parametrize(("overlap", "expected"), [(False, 2), (True, 4)])
def test_ranks_of_a_machine_are_one_worker_unless_reductions_overlap(
    overlap: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machines("aabb", monkeypatch)

    def work(transport: ThreadTransport) -> int:
        model = model_of()
        with oktopk.local_steps(model, sgd(model), group=transport, overlap=overlap) as handle:
            return handle.workers

    assert run_world(4, work) == [expected] * 4


def test_a_host_that_is_alone_owes_nobody_anything() -> None:
    """As a rank that is alone: no entry is chosen, none waits, whatever was asked for."""

    def work(transport: ThreadTransport) -> Seen:
        return run(transport, 2, algorithm="topka", mean_over="senders", keep_owed=0.25, wire="codebook2")

    for seen in run_world(2, work):
        assert not seen.owed.any()
        torch.testing.assert_close(seen.shared, seen.own.double(), rtol=0, atol=1e-6)
        assert seen.changes.any() and not torch.equal(seen.start, seen.shared)
