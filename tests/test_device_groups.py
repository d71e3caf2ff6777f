"""Hosts that sum on their devices: what holds for sums in their memory holds there."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import host_cases
import oktopk
from contract import CASES, Seen, check_conservation, check_record, check_same_bits
from device_groups import Devices
from inputs import gradient
from oktopk import Reducer
from oktopk.errors import CommunicationError, MismatchError, NonFiniteError, PeerError
from oktopk.transport import run_world
from oktopk.transport.device_group import DeviceGroup, DeviceGroups, Nccl, _environment, _in_time
from test_faults import GRACE
from test_local_steps import model_of, push, sgd
from test_ranks_per_host import check_volume, observe
from test_ranks_per_host_processes import check_named
from worlds import run_processes, start

CPU = torch.device("cpu")
ROWS: list[tuple[tuple[int, int], str, torch.dtype, dict[str, Any]]] = [
    ((2, 2), "oktopk", torch.float32, {}),
    ((2, 3), "oktopk", torch.bfloat16, {"wire": "int8"}),
    ((2, 3), "oktopk", torch.float64, {"warmup_steps": 1}),
    ((2, 2), "randomk", torch.float16, {"warmup_steps": 1}),
    ((2, 3), "topka", torch.float32, {"momentum_correction": 0.9, "factor_masking": True}),
    ((2, 2), "dense", torch.float32, {"wire": "bfloat16"}),
    ((1, 4), "gtopk", torch.float32, {}),
]


@pytest.mark.parametrize(("shape", "algorithm", "dtype", "options"), ROWS, ids=str)
def test_the_contract_holds_where_hosts_sum_on_devices(
    shape: tuple[int, int], algorithm: str, dtype: torch.dtype, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices()
    devices.use(monkeypatch)
    hosts, per_host = shape
    for number, case in enumerate([CASES[2], *CASES[-3:]]):  # layers, few, one and none
        case = replace(case, dtype=dtype)
        ranks = run_world(
            hosts * per_host, lambda t, c=case, n=number: observe(t, per_host, algorithm, c, n % 2 == 0, **options)
        )
        for step in zip(*ranks, strict=True):
            check_same_bits(step)
            if "momentum_correction" not in options:
                check_conservation(step)
            check_record(step)
            check_volume(step, shape, algorithm, options.get("wire", "float32"))
        _check_inside(ranks, per_host)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    assert {kind for verb, kind in devices.done if verb == "reduce_scatter"} == {exact}, "never summed in 16 bits"


def _check_inside(ranks: list[list[Seen]], per_host: int) -> None:
    """What ranks of a host gave each other is counted, and they owe one part each."""
    for seen in (step for rank in ranks for step in rank if step.record.numel >= per_host):
        width = max(4, seen.grad.element_size())
        assert seen.record.inside_bytes >= width * (seen.record.numel // per_host) * (per_host - 1)


@pytest.mark.parametrize("algorithm", ["oktopk", "dense"])
def test_sums_on_devices_are_those_of_the_host_but_for_rounding(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(transport: Any) -> tuple[list[Tensor], Tensor]:
        with Reducer(algorithm, 0.05, group=transport, hosts=3, warmup_steps=1) as reducer:
            means = [reducer.reduce("w", gradient("heavy", 4000, transport.rank, step)) for step in range(3)]
            return means, reducer.residuals().get("w", torch.zeros(4000))

    staged = run_world(6, work)
    devices = Devices()
    devices.use(monkeypatch)
    summed = run_world(6, work)
    assert devices.done
    for (means, owed), (expected, expected_owed) in zip(summed, staged, strict=True):
        for ours, theirs in zip([*means, owed], [*expected, expected_owed], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # sums of three, in another order


def test_sums_that_16_bits_cannot_hold_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    Devices().use(monkeypatch)

    def work(transport: Any) -> Tensor:
        with Reducer("dense", group=transport, hosts=2) as reducer:
            return reducer.reduce("w", torch.full((5000,), 40_000.0, dtype=torch.float16))

    assert all(torch.equal(mean, torch.full((5000,), 40_000.0, dtype=torch.float16)) for mean in run_world(4, work))


def test_a_nan_in_one_slice_is_everyones_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Devices().use(monkeypatch)

    def work(transport: Any) -> None:
        with Reducer("oktopk", 0.1, group=transport, hosts=2) as reducer:
            reducer.reduce("w", gradient("normal", 4000, transport.rank, 0))
            before, grad = reducer.residuals(), gradient("normal", 4000, transport.rank, 1)
            grad[17] = float("nan") if transport.rank == 3 else grad[17]  # in the slice of ranks 0 and 2
            with pytest.raises(NonFiniteError, match="rank 2 "):
                reducer.reduce("w", grad)
            assert torch.equal(before["w"], reducer.residuals()["w"])
            assert reducer.reduce("w", gradient("normal", 4000, transport.rank, 1)).isfinite().all()

    run_world(4, work)


def test_parameters_that_nobody_used_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    Devices().use(monkeypatch)
    layout = [("a", 2000), ("b", 3000)]

    def work(transport: Any) -> None:
        with Reducer("oktopk", 0.1, group=transport, hosts=2) as reducer:
            reducer.submit(layout, gradient("normal", 5000, transport.rank, 0)).wait()
            owed, bucket = reducer.residuals()["b"], gradient("normal", 5000, transport.rank, 1)
            mean = reducer.submit(layout, bucket, unused=["b"]).wait()
            assert mean[:2000].any() and not mean[2000:].any()
            assert torch.equal(reducer.residuals()["b"], owed)

    run_world(4, work)


@pytest.mark.parametrize("front_end", ["Reducer", "local_steps"])
def test_ranks_of_a_host_with_gradients_on_other_devices_are_refused_everywhere(
    front_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        DeviceGroups, "kind", lambda self, device: "cuda" if self._backend._transport.rank == 1 else "cpu"
    )
    Devices().use(monkeypatch)

    def work(transport: Any) -> None:
        if front_end == "Reducer":
            refused = pytest.raises(MismatchError, match="ranks 1, 3 differ from rank 0 in dtype or device")
            with Reducer("oktopk", 0.1, group=transport, hosts=2) as reducer, refused:
                reducer.reduce("w", torch.ones(4000))
            return
        model = model_of(0)
        optimizer = sgd(model)
        # Its own host says so; the other hears of it, if that was faster: maybe while it still broadcasts the start.
        refused = pytest.raises((MismatchError, PeerError), match="on the same kind of device")
        with refused, oktopk.local_steps(model, optimizer, group=transport, hosts=2):
            push(model, optimizer, transport.rank, 0)

    run_world(4, work)


def test_hosts_average_gradients_of_local_steps_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(transport: Any) -> tuple[Tensor, Tensor]:
        model = model_of(0)
        optimizer = sgd(model)
        with oktopk.local_steps(model, optimizer, group=transport, hosts=2, min_numel=0, density=0.2) as handle:
            for step in range(3):
                push(model, optimizer, transport.rank, step)
            grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            handle.finish()
        return grads, torch.cat([p.detach().flatten() for p in model.parameters()])

    staged = run_world(4, work)
    devices = Devices()
    devices.use(monkeypatch)
    ranks = run_world(4, work)
    assert {verb for verb, _ in devices.done} >= {"reduce_scatter", "all_gather"}
    assert torch.equal(ranks[0][0], ranks[1][0]) and torch.equal(ranks[2][0], ranks[3][0])
    for ours, theirs in zip(ranks, staged, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert torch.equal(ours[1], ranks[0][1])


def _fails(rank: int) -> None:
    if rank == 1:
        raise RuntimeError("NCCL does not like this card")


def _hangs(rank: int) -> None:
    if rank == 1:
        threading.Event().wait(20)


OBSTACLES: dict[str, dict[str, Any]] = {
    "the group is gloo": {"obstacle": lambda rank: "the group is gloo" if rank == 1 else None},
    "ranks share a GPU": {"card": lambda rank: "the only one"},
    "NCCL does not like this card": {"make": _fails},
    "did not come together in 0.5 s": {"make": _hangs, "timeout": timedelta(seconds=1)},
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_where_one_rank_cannot_all_go_through_the_host_and_one_says_why(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    devices = Devices(**OBSTACLES[reason])
    devices.use(monkeypatch)

    def work(transport: Any) -> None:
        with Reducer("oktopk", 0.1, group=transport, hosts=2) as reducer:
            for _ in range(2):
                assert reducer.reduce("w", torch.ones(4000)).count_nonzero() == 400

    with caplog.at_level(logging.WARNING):
        run_world(4, work)
    said = [record.message for record in caplog.records if "go through the memory of the host" in record.message]
    assert len(said) == 2 and all(reason in line for line in said), "once on each host"
    assert not {verb for verb, _ in devices.done} - {"abort"}


def test_a_second_device_of_a_rank_goes_through_the_host() -> None:
    devices = DeviceGroups(Nccl(_Link()))  # type: ignore[arg-type]
    first, second = torch.device("cuda", 1), torch.device("cuda", 0)
    assert [devices.kind(device) for device in (CPU, first, second, first)] == ["cpu", "cuda", "another cuda", "cuda"]
    nobody: Any = None  # is asked
    assert devices.among(CPU, nobody) is None and devices.among(second, nobody) is None


class _Link:
    timeout, backends = timedelta(seconds=5), "cpu:gloo"


def test_what_keeps_nccl_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Nccl(_Link())  # type: ignore[arg-type]
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert nccl.obstacle() == "this torch has no NCCL"
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert nccl.obstacle() == "the process group is cpu:gloo, without NCCL"
    monkeypatch.setattr(_Link, "backends", "cpu:gloo,cuda:nccl")
    assert nccl.obstacle() is None
    monkeypatch.setenv("OKTOPK_NCCL", "off")
    assert nccl.obstacle() == "OKTOPK_NCCL=off"


class _FakeNccl:
    """What is asked of torch's, which is not in a torch for the CPU."""

    class Options:
        pass

    made: ClassVar[list[_FakeNccl]] = []

    def __init__(self, store: str, rank: int, size: int, options: Any) -> None:
        self.asked = (store, rank, size, options._timeout, options.global_ranks_in_group)
        self.handling, self.is_aborted = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"), False
        self.made.append(self)

    def _allgather_base(self, out: Tensor, given: Tensor) -> Any:
        assert out.numel() == 2 * given.numel()
        if len(self.made) > 1:
            raise RuntimeError("Duplicate GPU detected")
        return SimpleNamespace(wait=lambda timeout: None)

    def abort(self) -> None:
        self.is_aborted = True


def test_nccl_is_tried_when_it_is_made_and_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", _FakeNccl, raising=False)
    monkeypatch.setattr(_FakeNccl, "made", [])
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    link: Any = SimpleNamespace(timeout=timedelta(seconds=5), ranks=[4, 5], rank=1, another_store=str)
    nccl = Nccl(link)
    group = nccl.make(CPU)
    with pytest.raises(CommunicationError, match="Duplicate GPU"):
        nccl.make(CPU)
    first, second = _FakeNccl.made
    assert first.asked == ("devices", 1, 2, timedelta(seconds=10), [4, 5]), "torch's watchdog comes after us"
    assert first.handling == "0" and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    assert second.is_aborted and not first.is_aborted
    group.abort()
    assert first.is_aborted


def test_a_group_that_comes_too_late_is_left() -> None:
    may_come, left = threading.Event(), threading.Event()
    group = DeviceGroup(SimpleNamespace(abort=left.set), 2, timedelta(seconds=1))

    def make() -> DeviceGroup:
        assert may_come.wait(20)
        return group

    with pytest.raises(CommunicationError, match="did not come together"):
        _in_time(make, 0.01)
    assert not left.is_set()
    may_come.set()
    assert left.wait(20)


def test_a_group_that_was_left_is_an_error_and_not_a_wait() -> None:
    class Backend:
        aborted = 0

        def abort(self) -> None:
            self.aborted += 1

        def _allgather_base(self, out: Tensor, given: Tensor) -> Any:
            raise RuntimeError("a kernel timed out")

    backend = Backend()
    group = DeviceGroup(backend, 2, timedelta(seconds=1))
    with pytest.raises(CommunicationError, match="the devices of a host: a kernel timed out"):
        group.all_gather(torch.ones(1))
    group.abort()
    group.abort()
    assert backend.aborted == 1
    with pytest.raises(CommunicationError, match="has left"):
        group.all_gather(torch.ones(1))


@pytest.mark.parametrize("before", [None, "3"])
def test_a_variable_is_what_it_was_afterwards(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "OKTOPK_TEST_VARIABLE"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with _environment(name, "0"):
        assert os.environ[name] == "0"
    assert os.environ.get(name) == before


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_processes_sum_over_a_group_of_their_own_and_leave_it() -> None:
    check_sums_of_a_host("cpu")


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_a_rank_that_dies_before_its_device_sums_is_named() -> None:
    check_a_killed_rank_is_named("cpu")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(200)
def test_a_rank_that_dies_before_its_device_sums_is_named_on_every_host(tmp_path: Path) -> None:
    outcomes = start(4, host_cases.killed_between_phases, 1, "before the scatter", tmp_path, True, timeout=120)
    check_named(outcomes, 1, tmp_path)


def check_sums_of_a_host(device_type: str) -> None:
    """Those of two ranks with a device each are those of the memory that they share, but for rounding."""
    ranks, expected = run_processes(2, host_cases.reduced_on, device_type, timeout=100), run_world(2, _reduced)
    for means, has_summed in ranks:
        assert has_summed, "they went through the host"
        assert all(torch.equal(mean, same) for mean, same in zip(means, ranks[0][0], strict=True))
        for mean, theirs in zip(means, expected[0], strict=True):
            torch.testing.assert_close(mean, theirs)  # what is owed is added before the second gradient there


def _reduced(transport: Any) -> list[Tensor]:
    with Reducer("oktopk", 0.05, group=transport, hosts=2, warmup_steps=1, min_numel=0) as reducer:
        return [
            reducer.reduce(str(dtype), gradient("normal", 40_000, transport.rank, step).to(dtype))
            for step, dtype in enumerate(host_cases.CARD_DTYPES)
        ]


def check_a_killed_rank_is_named(device_type: str) -> None:
    survivor, victim = start(2, host_cases.reduced_on, device_type, 1, timeout=100)
    assert victim.code == -signal.SIGKILL
    assert survivor.ok, survivor.output
    kind, message, seconds = pickle.loads(survivor.payload)
    assert kind == "PeerError" and "rank 1 failed" in message and "vanished" in message
    assert seconds < host_cases.CARD_TIMEOUT + GRACE
