"""Ranks of one machine hand messages over in memory that they share; what is small goes through another transport.

Each rank writes its messages into memory of its own, tells where they are, and reads those of the others where they
lie. The memory has no name that could be left behind (memfd): others open it through /proc, and it goes with the last
process that has it, however that ends.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oktopk.transport.base import Fault, Op, Transport
from oktopk.transport.sharing import share

log = logging.getLogger("oktopk")

_TOKEN_BYTES = 16
_ALIGNMENT = 64  # where each message begins: on a cache line


def share_memory(transport: Transport) -> Transport:
    """The same ranks, through memory if they all can see each other's, else as they are. All must call this."""
    pids = _see_each_other(transport)
    if pids is not None:
        return SharedMemoryTransport(transport, pids)
    if transport.rank == 0:
        log.info("ranks of this machine cannot share memory, and talk over its network instead.")
    return transport


class SharedMemoryTransport:
    """Messages through memory. What a verb returns is good until the next one; `room` saves a copy."""

    def __init__(self, inner: Transport, pids: Sequence[int]) -> None:
        """`pids` of the processes, by rank."""
        self.inner, self.rank, self.world_size = inner, inner.rank, inner.world_size
        self._pids = pids
        # Two in turns: when one is written again, all have begun to read the other, and are done with this.
        self._own: list[_Segment | None] = [None, None]
        self._numbers: list[dict[int, int]] = [{}, {}]  # of everyone's segments, by rank, in both turns
        self._theirs: dict[tuple[int, int], Tensor] = {}  # by rank and turn
        self._turn = 0

    def room(self, sizes: Sequence[int]) -> list[Tensor]:
        """Memory for messages of these sizes (uint8): the next verb need not copy them."""
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        memory = self._segment(starts[-1]).memory
        return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def all_to_all(
        self, messages: Sequence[Tensor], in_flight: int = 4, limits: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        told = self._tell(messages)
        for distance in range(self.world_size):
            source = (self.rank - distance) % self.world_size
            yield source, messages[source] if source == self.rank else self._read(source, told[source], self.rank)

    def all_gather(
        self, message: Tensor, sizes: Sequence[int] | None = None, limits: Sequence[int] | None = None
    ) -> list[Tensor]:
        told = self._tell([message])
        return [message if rank == self.rank else self._read(rank, told[rank], 0) for rank in range(self.world_size)]

    def _tell(self, messages: Sequence[Tensor]) -> list[list[int]]:
        """Put messages where all can see them; where everyone's are: its memory, then a start and a length for each."""
        placed = self._placed(messages)
        segment = self._segment(0)
        words = [segment.descriptor, segment.memory.numel(), segment.number]
        for message in placed:
            words += [message.data_ptr() - segment.memory.data_ptr(), message.numel()]
        told = self.inner.agree(words)
        self._open_fresh(told)
        self._turn = 1 - self._turn
        return told

    def _open_fresh(self, told: Sequence[Sequence[int]]) -> None:
        """Open what others have made anew. Nobody goes on before all have: its owner may close it at once."""
        numbers = {rank: number for rank, (_, _, number, *_) in enumerate(told)}
        fresh = [rank for rank, number in numbers.items() if self._numbers[self._turn].get(rank) != number]
        for rank in fresh:
            descriptor, size = told[rank][:2]
            if rank != self.rank:
                self._theirs[rank, self._turn] = _map(f"/proc/{self._pids[rank]}/fd/{descriptor}", size)
        self._numbers[self._turn] = numbers
        if fresh:
            self.inner.agree([0])

    def _placed(self, messages: Sequence[Tensor]) -> Sequence[Tensor]:
        others = [message for rank, message in enumerate(messages) if rank != self.rank or len(messages) == 1]
        if all(self._segment(0).holds(message) for message in others):
            nothing = self._segment(0).memory[:0]
            return [message if self._segment(0).holds(message) else nothing for message in messages]
        places = self.room([message.numel() for message in messages])
        for place, message in zip(places, messages, strict=True):
            place.copy_(message)
        return places

    def _read(self, source: int, told: Sequence[int], message: int) -> Tensor:
        start, length = told[3 + 2 * message : 5 + 2 * message]
        return self._theirs[source, 1 - self._turn][start : start + length]

    def _segment(self, size: int) -> _Segment:
        """What this rank writes into now, with room for `size` bytes."""
        known = self._own[self._turn]
        if known is None or known.memory.numel() < size:
            known = self._own[self._turn] = _Segment.of(max(size, mmap.PAGESIZE))
        return known

    # -- what goes another way -----------------------------------------------------------------------------------

    def all_reduce_(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        return self.inner.all_reduce_(tensor, op)

    def exchange(self, message: Tensor | None, to: int | None, source: int | None) -> Tensor | None:
        return self.inner.exchange(message, to, source)

    def agree(self, words: Sequence[int]) -> list[list[int]]:
        return self.inner.agree(words)

    def close(self) -> None:
        self._own, self._theirs = [None, None], {}
        self.inner.close()

    def abort(self, fault: Fault) -> None:
        self.inner.abort(fault)

    def find_fault(self) -> Fault | None:
        return self.inner.find_fault()


@dataclass(frozen=True)
class _Segment:
    """Memory that other processes can open."""

    memory: Tensor  # uint8
    number: int  # that no other of this process has
    descriptor: int
    _owner: Any  # closes the descriptor when nobody has this any more

    @staticmethod
    def of(size: int) -> _Segment:
        owner = os.fdopen(os.memfd_create(f"oktopk-{os.getpid()}"), "r+b", buffering=0)
        os.ftruncate(owner.fileno(), size)
        memory = torch.frombuffer(mmap.mmap(owner.fileno(), size), dtype=torch.uint8)
        return _Segment(memory, secrets.randbits(62), owner.fileno(), owner)

    def holds(self, message: Tensor) -> bool:
        start = message.data_ptr() - self.memory.data_ptr()
        return message.numel() == 0 or 0 <= start <= self.memory.numel() - message.numel()


def _map(path: str, size: int) -> Tensor:
    with open(path, "r+b", buffering=0) as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)


def _see_each_other(transport: Transport) -> list[int] | None:
    """The processes of all ranks, if each can read what any other has written; None on all of them if not."""
    token, mine = secrets.token_bytes(_TOKEN_BYTES), None
    if hasattr(os, "memfd_create"):
        mine = _Segment.of(mmap.PAGESIZE)
        mine.memory[:_TOKEN_BYTES] = torch.tensor(list(token), dtype=torch.uint8)
    told = share([os.getpid(), mine.descriptor if mine is not None else -1, token.hex()], transport)
    seen = transport.agree([int(all(_can_read(*words) for words in told))])
    return [pid for pid, _, _ in told] if all(row[0] for row in seen) else None


def _can_read(pid: int, descriptor: int, token: str) -> bool:
    """Another machine may have a process of that number, too: the token tells."""
    try:
        found = _map(f"/proc/{pid}/fd/{descriptor}", mmap.PAGESIZE)
    except (OSError, ValueError):
        return False
    return bytes(found[:_TOKEN_BYTES].tolist()).hex() == token
