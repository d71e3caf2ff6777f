"""The four verbs, over threads and over real Gloo processes; and the meter around them."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oktopk.errors import CommunicationError, ConfigError
from oktopk.transport import (
    MeteredTransport,
    ThreadWorld,
    TorchTransport,
    Transport,
    open_transport,
    run_world,
    shared_memory,
)
from oktopk.transport.base import DIRECT_BYTES, all_reduce_bytes
from oktopk.transport.shared_memory import SharedMemoryTransport, share_memory
from worlds import run_processes, start


def _message(source: int, to: int) -> torch.Tensor:
    return torch.full((source * 3 + to,), 10 * source + to, dtype=torch.uint8)


def exercise(transport: Transport) -> None:
    """Every verb, with messages of unequal and zero length."""
    rank, world_size = transport.rank, transport.world_size
    for numel in (1, world_size, 1000, DIRECT_BYTES):  # the last goes through the backend's own all-reduce
        total = transport.all_reduce_(torch.arange(numel) + rank)
        assert torch.equal(total, torch.arange(numel) * world_size + sum(range(world_size)))
        assert transport.all_reduce_(torch.full((numel,), rank), "max").eq(world_size - 1).all()
    for sizes in (None, [source * 3 for source in range(world_size)]):
        gathered = transport.all_gather(_message(rank, 0), sizes)
        assert all(torch.equal(m, _message(source, 0)) for source, m in enumerate(gathered))
    limits = [source * 3 + world_size + 7 for source in range(world_size)]  # more than they will need
    gathered = transport.all_gather(_message(rank, 0), limits=limits)
    assert all(torch.equal(m, _message(source, 0)) for source, m in enumerate(gathered))
    for in_flight, limit in itertools.product((1, 2, 10), (None, limits)):
        arrived = list(transport.all_to_all([_message(rank, to) for to in range(world_size)], in_flight, limit))
        assert [source for source, _ in arrived] == [(rank - d) % world_size for d in range(world_size)]
        assert all(torch.equal(message, _message(source, rank)) for source, message in arrived)
    assert transport.agree([rank, -rank]) == [[r, -r] for r in range(world_size)]
    if world_size > 1:
        ring = transport.exchange(_message(rank, 1), (rank + 1) % world_size, (rank - 1) % world_size)
        assert ring is not None and torch.equal(ring, _message((rank - 1) % world_size, 1))
    assert transport.exchange(None, None, None) is None


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_verbs_over_threads(world_size: int) -> None:
    run_world(world_size, lambda transport: exercise(MeteredTransport(transport)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_verbs_through_shared_memory(world_size: int) -> None:
    def work(transport: Transport) -> None:
        shared = share_memory(transport)
        assert isinstance(shared, SharedMemoryTransport)
        exercise(MeteredTransport(shared))

    run_world(world_size, work)


def test_a_rank_may_leave_as_soon_as_its_message_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is slow to open its memory has it all the same."""
    left, map_now = threading.Event(), shared_memory._map

    def map_late(path: str, size: int) -> torch.Tensor:
        if threading.current_thread() in late:
            left.wait(0.3)  # long enough for the other to leave, if nothing held it
        return map_now(path, size)

    def work(transport: Transport) -> int:
        shared = share_memory(transport)
        if transport.rank == 1:
            late.append(threading.current_thread())
        gathered = shared.all_gather(torch.full((5000,), transport.rank, dtype=torch.uint8))
        total = int(torch.stack(gathered).sum())
        shared.close()
        left.set()
        return total

    late: list[threading.Thread] = []
    monkeypatch.setattr(shared_memory, "_map", map_late)
    assert run_world(2, work) == [5000, 5000]


def test_messages_in_shared_memory_are_not_copied_and_grow_with_what_is_sent() -> None:
    def work(transport: Transport) -> None:
        shared = MeteredTransport(share_memory(transport))
        for size in (0, 10, 100_000, 50, 3_000_000):
            messages = shared.room([size + to for to in range(3)])
            for to, message in enumerate(messages):
                message.fill_(10 * shared.rank + to)
            arrived = dict(shared.all_to_all(messages))
            for source, message in arrived.items():
                expected = torch.full((size + shared.rank,), 10 * source + shared.rank, dtype=torch.uint8)
                assert torch.equal(message, expected)
            if size:
                assert arrived[shared.rank].data_ptr() == messages[shared.rank].data_ptr()

    run_world(3, work)


def test_ranks_that_cannot_see_each_other_talk_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oktopk.transport.shared_memory._can_read", lambda pid, descriptor, token: False)
    run_world(2, lambda transport: exercise(_same(share_memory(transport), transport)))
    monkeypatch.delattr(os, "memfd_create")  # as on systems that are not Linux
    run_world(2, lambda transport: exercise(_same(share_memory(transport), transport)))


def _same(found: Transport, expected: Transport) -> Transport:
    assert found is expected
    return found


def _exercise_gloo() -> list[int]:
    whole = TorchTransport()
    metered = MeteredTransport(whole)
    exercise(metered)
    exercise(share_memory(whole.among(range(whole.world_size))))
    metered.close()
    return [metered.tally.bytes_sent, metered.tally.bytes_received]


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_verbs_over_gloo(world_size: int) -> None:
    counts = run_processes(world_size, _exercise_gloo)
    assert sum(sent for sent, _ in counts) == sum(received for _, received in counts)


def _subgroup() -> list[int]:
    seen = []
    if dist.get_rank() > 0:
        transport = TorchTransport(dist.new_group([1, 2], use_local_synchronization=True))
        exercise(transport)
        seen = [transport.rank, transport.world_size]
        transport.close()
    dist.barrier()  # the store lives on rank 0
    return seen


@pytest.mark.processes
def test_a_group_of_some_ranks_works_without_the_others() -> None:
    assert run_processes(3, _subgroup) == [[], [0, 2], [1, 2]]


def test_the_meter_counts_what_each_verb_moves() -> None:
    def work(transport: Any) -> MeteredTransport:
        metered = MeteredTransport(transport)
        metered.all_reduce_(torch.zeros(300))
        metered.all_gather(torch.zeros(10 + metered.rank, dtype=torch.uint8))
        list(metered.all_to_all([torch.zeros(5, dtype=torch.uint8)] * 3))
        metered.agree([1, 2])
        return metered

    for metered in run_world(3, work):
        others = [10 + rank for rank in range(3) if rank != metered.rank]
        assert metered.tally.bytes_received == 1600 + sum(others) + 16 + 2 * (5 + 8) + 2 * 16
        assert metered.tally.bytes_sent == 1600 + 2 * (10 + metered.rank + 8) + 2 * (5 + 8) + 2 * 16
        assert metered.tally.messages == 8
        assert metered.tally.message_sizes["all_gather"] == {18 + metered.rank: 2}
        metered.tally.restart()
        assert metered.tally.messages == metered.tally.bytes_sent == 0


def test_all_reduce_volume_is_that_of_a_ring() -> None:
    assert all_reduce_bytes(400, 4) == 600
    assert all_reduce_bytes(400, 1) == 0


def test_a_rank_that_leaves_ends_the_others() -> None:
    def work(transport: Any) -> None:
        if transport.rank == 1:
            raise KeyError("gone")
        transport.agree([1])

    with pytest.raises(KeyError, match="gone"):
        run_world(3, work, timeout=10)


def test_waiting_for_a_message_nobody_sends_is_an_error() -> None:
    def work(transport: Any) -> None:
        transport.exchange(None, None, 1 - transport.rank)

    with pytest.raises(CommunicationError, match="sent none"):
        run_world(2, work, timeout=10)


def test_without_torch_distributed_a_process_is_alone_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="oktopk"):
        assert open_transport().world_size == 1
    assert "alone" in caplog.text
    transport = ThreadWorld(1).transports()[0]
    assert open_transport(transport) is transport
    with pytest.raises(ConfigError, match="ProcessGroup"):
        open_transport(group=42)
    with pytest.raises(ConfigError, match="init_process_group"):
        TorchTransport()


def _silent_peer() -> None:
    transport = open_transport(timeout=3.0)
    if dist.get_rank() == 0:
        transport.agree([1])
    else:
        import time

        time.sleep(5)


@pytest.mark.processes
def test_a_silent_peer_is_given_up_after_the_timeout() -> None:
    first, _ = start(2, _silent_peer, timeout=40)
    assert first.code == 1
    assert "imed out" in first.output or "imeout" in first.output


def test_a_message_beyond_its_limit_is_refused_by_its_sender() -> None:
    def rank(transport: Transport) -> None:
        list(transport.all_to_all([torch.zeros(9, dtype=torch.uint8)] * 2, limits=[8, 8]))

    with pytest.raises(AssertionError, match="9 bytes exceeds the 8"):
        run_world(2, rank)
