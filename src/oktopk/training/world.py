"""The ranks of a run as the trainer sees them: joining, small agreements, failing together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import DistError

from oktopk.errors import CommunicationError, PeerError
from oktopk.front_ends.world import init_process_group
from oktopk.reduction.hosts import HostsOption, agree_on_hosts
from oktopk.training.environment import TORCHRUN, RankInfo, find_rank
from oktopk.transport.base import Fault, Transport
from oktopk.transport.sharing import attempt, explain, raise_any, share, share_error
from oktopk.transport.torch_dist import TorchTransport

T = TypeVar("T")
_TIMEOUT = timedelta(minutes=30)  # the first use of a corpus may have to make it
_MEETING_TIMEOUT = timedelta(minutes=2)  # ranks that were started at once, on a busy host


class World:
    """This rank among its peers. Every rank calls the same methods in the same order."""

    def __init__(self, transport: Transport, local_rank: int = 0) -> None:
        self._transport = transport
        self.rank, self.world_size = transport.rank, transport.world_size
        self.local_rank = local_rank

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over ranks."""
        with self._naming_peers():
            return list(self._transport.all_reduce_(torch.tensor(values, dtype=torch.float64)).tolist())

    def share(self, value: Any) -> list[Any]:
        """Every rank's JSON value, by rank."""
        with self._naming_peers():
            return share(value, self._transport)

    def announce(self, value: T) -> T:
        """Rank 0's JSON value, on every rank."""
        shared: T = self.share(value if self.is_first else None)[0]
        return shared

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their mean over ranks."""
        if tensors and self.world_size > 1:
            flat = torch.cat([tensor.detach().flatten().double() for tensor in tensors]).cpu()
            with self._naming_peers():
                mean = self._transport.all_reduce_(flat).div_(self.world_size)
            for tensor, part in zip(tensors, mean.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def fail_together(self, error: Exception | None) -> None:
        """Raise on every rank when any rank has an error: nobody is left waiting in a collective."""
        with self._naming_peers():
            texts = share_error(error, self._transport)
        raise_any(error, texts)

    def together(self, action: Callable[[], T]) -> T:
        """The result of an action that every rank does, or the first error of any of them on all."""
        result, error = attempt(action)
        self.fail_together(error)
        return result  # type: ignore[return-value]

    def local_first(self, action: Callable[[], T]) -> T:
        """As `together`, the first rank of each host before its others: what it caches they find ready."""
        result, error = attempt(action) if self.local_rank == 0 else (None, None)
        self.fail_together(error)
        if self.local_rank != 0:
            result, error = attempt(action)
        self.fail_together(error)
        return result  # type: ignore[return-value]

    def count_hosts(self, wanted: HostsOption) -> int:
        """How many hosts there are, if ranks are asked for such; every rank by itself is one."""
        with self._naming_peers():
            return len(agree_on_hosts(wanted, self._transport).ranks)

    def abort(self, error: Exception, step: int) -> None:
        """Leave at once: whoever comes to meet this rank reads why it is not there."""
        self._transport.abort(Fault(self.rank, explain(error), step, "training"))

    def close(self) -> None:
        self._transport.close()

    @contextmanager
    def _naming_peers(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            fault = self._transport.find_fault()
            if fault is not None and fault.step is not None:  # it said so itself
                raise PeerError(f"rank {fault.rank}: {fault.error}") from error
            raise PeerError(
                f"rank {self.rank} cannot reach its peers: another rank has ended, or the network has "
                f"({str(error).splitlines()[0][:200]})."
            ) from error


@contextmanager
def joined_world() -> Iterator[World]:
    """The world a launcher made, or a world of one."""
    info = find_rank()
    join(info)
    world = World(TorchTransport(), info.local_rank if info else 0)
    try:
        yield world
    finally:
        world.close()
        dist.destroy_process_group()


def join(info: RankInfo | None) -> None:
    """Initialise torch.distributed as the launcher told this process."""
    if info is None:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
        return
    os.environ.update(_torchrun_variables(info))
    if info.launcher == TORCHRUN:
        init_process_group(timeout=_TIMEOUT)
        return
    dist.init_process_group(
        "gloo", store=_meet(info), rank=info.rank, world_size=info.world_size, timeout=_TIMEOUT
    )  # fmt: skip


def _meet(info: RankInfo) -> TCPStore:
    """The store of ranks that were started without torchrun: all at once, so nobody is long in coming."""
    try:
        return TCPStore(info.address, info.port, info.world_size, info.rank == 0, timeout=_MEETING_TIMEOUT)
    except DistError as error:
        raise CommunicationError(
            f"the {info.world_size} ranks of {info.launcher} did not meet at {info.address}:{info.port} "
            f"({str(error).splitlines()[0][:200]}). Set MASTER_ADDR and MASTER_PORT (a free port) on all of them."
        ) from error


def _torchrun_variables(info: RankInfo) -> Mapping[str, str]:
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.local_world_size),
        "MASTER_ADDR": info.address,
        "MASTER_PORT": str(info.port),
    }
