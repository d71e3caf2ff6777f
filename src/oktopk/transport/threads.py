"""A whole world in one process: each rank is a thread. For tests."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from oktopk.errors import CommunicationError, PeerError
from oktopk.transport.base import Fault, Op, require_within

T = TypeVar("T")


class ThreadWorld:
    """What the ranks of one world share: a slot each, and a barrier that breaks when one of them fails."""

    def __init__(self, world_size: int, timeout: float = 90.0) -> None:
        self.world_size = world_size
        self.slots: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=timeout)
        self.fault: Fault | None = None
        self._parts: dict[tuple[int, ...], ThreadWorld] = {}
        self._timeout, self._lock = timeout, threading.Lock()

    def part(self, ranks: Sequence[int]) -> ThreadWorld:
        """The world of some of its ranks."""
        with self._lock:
            return self._parts.setdefault(tuple(ranks), ThreadWorld(len(ranks), self._timeout))

    def break_up(self) -> None:
        """Let nobody wait any longer, in the parts neither."""
        self.barrier.abort()
        for part in self._parts.values():
            part.break_up()

    def transports(self) -> list[ThreadTransport]:
        return [ThreadTransport(self, rank) for rank in range(self.world_size)]


class ThreadTransport:
    """One rank of a `ThreadWorld`."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self.rank, self.world_size = rank, world.world_size

    def all_reduce_(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        parts = self._share(tensor.clone())
        total = parts[0].clone()
        for part in parts[1:]:  # in the order of ranks, so that all get the same bits
            total = total + part if op == "sum" else torch.maximum(total, part)
        return tensor.copy_(total)

    def all_gather(
        self, message: Tensor, sizes: Sequence[int] | None = None, limits: Sequence[int] | None = None
    ) -> list[Tensor]:
        require_within(limits, self.rank, [message])
        return [part.clone() for part in self._share(message.clone())]

    def all_to_all(
        self, messages: Sequence[Tensor], in_flight: int = 4, limits: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        require_within(limits, self.rank, messages)
        offered = self._share([message.clone() for message in messages])
        for distance in range(self.world_size):
            source = (self.rank - distance) % self.world_size
            yield source, offered[source][self.rank]

    def exchange(self, message: Tensor | None, to: int | None, source: int | None) -> Tensor | None:
        offered = self._share(None if message is None else (to, message.clone()))
        if source is None:
            return None
        if offered[source] is None or offered[source][0] != self.rank:
            raise CommunicationError(f"rank {self.rank} waits for a message from rank {source}, which sent none.")
        received: Tensor = offered[source][1]
        return received

    def agree(self, words: Sequence[int]) -> list[list[int]]:
        return self._share(list(words))

    def close(self) -> None:
        return None

    def abort(self, fault: Fault) -> None:
        self._world.fault = self._world.fault or fault
        self._world.break_up()

    def among(self, ranks: Sequence[int]) -> ThreadTransport:
        return ThreadTransport(self._world.part(ranks), list(ranks).index(self.rank))

    def find_fault(self) -> Fault | None:
        return self._world.fault

    def _share(self, item: Any) -> list[Any]:
        """Everyone's item, by rank."""
        try:
            self._world.slots[self.rank] = item
            self._world.barrier.wait()
            shared = list(self._world.slots)
            self._world.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerError(f"rank {self.rank}: another rank of this world has failed or left.") from None
        return shared


def run_world(world_size: int, work: Callable[[ThreadTransport], T], timeout: float = 90.0) -> list[T]:
    """Run `work(transport)` once per rank, each in its own thread; results by rank, or the first real error."""
    transports = ThreadWorld(world_size, timeout).transports()
    core = _core()

    def guarded(transport: ThreadTransport) -> T:
        try:
            if core is not None:
                os.sched_setaffinity(0, {core})  # of this thread and those that it starts
            return work(transport)
        except BaseException as error:
            transport.abort(Fault(transport.rank, f"{type(error).__name__}: {error}"))
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(guarded, transport) for transport in transports]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerError)), errors[0])
    return [future.result() for future in futures]


def _core() -> int | None:
    """The core this thread runs on, where that can be asked.

    Ranks that share it are several times faster than ranks on several: the interpreter runs one of them at a time
    anyway, and every torch operation would hand its lock to a thread that sleeps on another core.
    """
    ask = getattr(ctypes.CDLL(None), "sched_getcpu", None)
    return None if ask is None else int(ask())
