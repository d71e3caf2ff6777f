"""Which groups can be reduced over: torch's, parts of the world opened again and again, and other people's."""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.errors import CommunicationError, ConfigError, PeerError, UnsupportedError
from oktopk.transport import MeteredTransport, TorchTransport, open_transport
from test_transport import exercise
from worlds import run_processes, start


class Foreign(dist.ProcessGroup):
    """As torchft's: torch's interface around a Gloo group, in none of torch's books, born as rank 0 of 1."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        super().__init__(0, 1)
        self._inner = dist.ProcessGroupGloo(store, rank, world_size, timeout=timedelta(seconds=30))

    def getBackendName(self) -> str:
        return "foreign-gloo"

    def size(self) -> int:
        return self._inner.size()

    getSize = size  # what torch's C++ calls

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return self._inner.allreduce(tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._inner.allgather(outputs, inputs, opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._inner.broadcast(tensors, opts)

    def alltoall_base(self, output: Any, source: Any, output_sizes: Any, source_sizes: Any, opts: Any) -> Any:
        return self._inner.alltoall_base(output, source, output_sizes, source_sizes, opts)

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        return self._inner.send(tensors, to, tag)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        return self._inner.recv(tensors, source, tag)


def _make_foreign() -> tuple[Foreign, Any]:
    """And the store it needs. torch's own world ends here: nothing of it is left to lean on."""
    store: Any = dist.distributed_c10d._get_default_store()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    made = Foreign(dist.PrefixStore("foreign", store), rank, world_size)
    made._inner.barrier().wait()
    dist.destroy_process_group()
    return made, store


def _exercise_foreign() -> tuple[int, int]:
    rank = dist.get_rank()
    group, _store = _make_foreign()
    transport = MeteredTransport(TorchTransport(group, timedelta(seconds=30)))
    exercise(transport)
    transport.close()
    again = open_transport(group)
    assert again.agree([rank]) == [[0], [1], [2]]
    group._inner.barrier().wait()
    group.size = lambda: 2  # type: ignore[method-assign]
    with pytest.raises(CommunicationError, match="had 3 ranks and has 2 now: close this reducer"):
        again.agree([rank])
    return again.rank - rank, again.world_size


@pytest.mark.processes
def test_a_group_that_torch_does_not_know_serves_as_it_is() -> None:
    assert run_processes(3, _exercise_foreign) == [(0, 3)] * 3


def _train_over_foreign() -> list[float]:
    torch.manual_seed(dist.get_rank())
    x = torch.randn(8, 4)
    store: Any = dist.distributed_c10d._get_default_store()
    group = Foreign(dist.PrefixStore("foreign", store), dist.get_rank(), dist.get_world_size())
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)
    reducer = oktopk.register(ddp, density=0.5, min_numel=0)
    for _ in range(3):
        ddp(x).square().mean().backward()
    reducer.close()
    dist.barrier()
    return ddp.module.weight.grad.flatten().tolist()  # type: ignore[union-attr]


@pytest.mark.processes
def test_ddp_over_such_a_group_trains() -> None:
    first, second = run_processes(2, _train_over_foreign)
    assert first == second and any(first)


def _die_in_foreign() -> str:
    group, _store = _make_foreign()
    reducer = oktopk.Reducer("dense", group=group, timeout=5.0)
    reducer.reduce("weight", torch.ones(4))
    if reducer.rank == 1:
        os._exit(3)
    with pytest.raises(PeerError) as caught:
        reducer.reduce("weight", torch.ones(4))
    return str(caught.value)


@pytest.mark.processes
def test_a_death_in_such_a_group_is_told_by_name() -> None:
    first, second = start(2, _die_in_foreign)
    assert second.code == 3
    assert first.payload, first.output
    assert pickle.loads(first.payload).startswith("rank 1 failed at step 1") and "vanished" in str(first.payload)


def test_what_is_no_group_or_cannot_work_is_refused_with_a_reason() -> None:
    class Nccl(Foreign):
        def __init__(self) -> None:
            dist.ProcessGroup.__init__(self, 0, 1)

        def getBackendName(self) -> str:
            return "foreign-nccl"

    with pytest.raises(UnsupportedError, match=r"torch did not make.*new_group"):
        open_transport(Nccl())
    with pytest.raises(ConfigError, match=r"not in the group.*group's ranks only"):
        TorchTransport(dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ConfigError, match="must be a ProcessGroup"):
        TorchTransport("gloo")


def _open_again() -> list[list[list[int]]]:
    """Ranks 1 and 2, three times; at last rank 2 is in one group more, which torch's own names would trip over."""
    seen = []
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    for time in range(3):
        if time == 2:
            dist.new_group([2])
        if rank > 0:
            transport = TorchTransport(pair, timedelta(seconds=20))
            seen.append(transport.agree([rank, time]))
            transport.close()
            with pytest.raises(CommunicationError, match="has left the group"):
                transport.agree([rank, time])
    dist.barrier()  # the store lives on rank 0
    return seen


@pytest.mark.processes
def test_a_part_of_the_world_can_be_opened_again() -> None:
    nobody, first, second = run_processes(3, _open_again)
    assert nobody == []
    assert first == second == [[[1, time], [2, time]] for time in range(3)]
