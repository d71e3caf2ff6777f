"""A `torch.distributed` process group as a transport: Gloo, whatever the backend of gradients is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oktopk.transport.base import SIZE_BYTES, Fault, Op, goes_directly, require_within
from oktopk.transport.device_group import DeviceGroups, Nccl
from oktopk.transport.links import Link, open_link
from oktopk.transport.witness import Witness


class LinkTransport:
    """One rank of a process group, without a witness of who is to blame when something fails."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.rank, self.world_size, self.timeout = link.rank, len(link.ranks), link.timeout
        self.devices = DeviceGroups(Nccl(link))

    def all_reduce_(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        if self.world_size == 1:
            return tensor
        if goes_directly(tensor, self.world_size):
            return self._all_reduce_directly_(tensor, op)
        return self._link.all_reduce_(tensor, op)

    def all_gather(
        self, message: Tensor, sizes: Sequence[int] | None = None, limits: Sequence[int] | None = None
    ) -> list[Tensor]:
        messages = [message] * self.world_size
        if sizes is not None:
            arriving = self._rotate(messages, sizes, self.world_size)
        else:
            arriving = self.all_to_all(messages, self.world_size, limits)
        gathered = dict(arriving)
        return [gathered[rank] for rank in range(self.world_size)]

    def all_to_all(
        self, messages: Sequence[Tensor], in_flight: int = 4, limits: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        if limits is None:
            return self._rotate(messages, self._exchange_sizes([message.numel() for message in messages]), in_flight)
        require_within(limits, self.rank, messages)
        return self._rotate_framed(messages, limits, in_flight)

    def _rotate_framed(
        self, messages: Sequence[Tensor], limits: Sequence[int], in_flight: int
    ) -> Iterator[tuple[int, Tensor]]:
        """As `_rotate` of messages that carry their own length: Gloo fills the front of a buffer that is longer."""
        framed = {id(message): _framed(message) for message in messages}
        sizes = [SIZE_BYTES + limit for limit in limits]
        for source, frame in self._rotate([framed[id(message)] for message in messages], sizes, in_flight):
            size = int(frame[:SIZE_BYTES].view(torch.int64))
            yield source, frame[SIZE_BYTES : SIZE_BYTES + size]

    def _rotate(self, messages: Sequence[Tensor], sizes: Sequence[int], in_flight: int) -> Iterator[tuple[int, Tensor]]:
        """Send to rank + 1, + 2, ... and receive from rank - 1, - 2, ...: no rank is everybody's target at once."""
        windows = list(_windows(self.world_size, in_flight))
        under_way = self._post(messages, sizes, windows[0]) if windows else None
        yield self.rank, messages[self.rank]
        for following in [*windows[1:], None]:
            arrived = under_way
            under_way = self._post(messages, sizes, following) if following else None
            if arrived is not None:
                works, incoming = arrived
                self._link.finish(works)
                yield from incoming

    def exchange(self, message: Tensor | None, to: int | None, source: int | None) -> Tensor | None:
        outgoing, incoming = torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
        if message is not None:
            outgoing[0] = message.numel()
        self._swap(outgoing if to is not None else None, to, incoming if source is not None else None, source)
        received = None
        if source is not None:
            received = torch.empty(int(incoming), dtype=torch.uint8)
        self._swap(message, to, received, source)
        return received

    def agree(self, words: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(words, dtype=torch.int64)
        if self.world_size == 1:
            return [mine.tolist()]
        answers = self._link.all_to_all(mine.repeat(self.world_size))
        rows: list[list[int]] = answers.view(self.world_size, -1).tolist()
        return rows

    def close(self) -> None:
        self.devices.abort()
        self._link.leave()

    def abort(self, fault: Fault) -> None:
        self.close()  # its sockets close with the group, and peers notice

    def find_fault(self) -> Fault | None:
        return None

    def _exchange_sizes(self, sizes: Sequence[int]) -> list[int]:
        if self.world_size == 1:
            return list(sizes)
        outgoing = torch.tensor(sizes, dtype=torch.int64)
        return [int(size) for size in self._link.all_to_all(outgoing).tolist()]

    def _post(
        self, messages: Sequence[Tensor], sizes: Sequence[int], distances: range
    ) -> tuple[list[dist.Work], list[tuple[int, Tensor]]]:
        """Start sending to rank + d and receiving from rank - d for each distance d."""
        outgoing: list[tuple[int, Tensor]] = []
        incoming: list[tuple[int, Tensor]] = []
        for distance in distances:
            to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            outgoing.append((to, messages[to]))
            incoming.append((source, torch.empty(sizes[source], dtype=torch.uint8)))
        return self._link.start(outgoing, incoming), incoming

    def _swap(self, outgoing: Tensor | None, to: int | None, incoming: Tensor | None, source: int | None) -> None:
        sends = [(to, outgoing)] if outgoing is not None and to is not None else []
        receives = [(source, incoming)] if incoming is not None and source is not None else []
        self._link.finish(self._link.start(sends, receives))

    def _all_reduce_directly_(self, tensor: Tensor, op: Op) -> Tensor:
        """Each rank reduces one slice and hands it to all: two rounds, where a ring takes 2(P-1)."""
        share = -(-tensor.numel() // self.world_size)
        padded = tensor.new_zeros(share * self.world_size)
        padded[: tensor.numel()] = tensor.flatten()
        rows = self._link.all_to_all(padded).view(self.world_size, share)
        mine = rows.sum(0, dtype=tensor.dtype) if op == "sum" else rows.amax(0)
        reduced = self._link.all_to_all(mine.repeat(self.world_size))
        return tensor.copy_(reduced[: tensor.numel()].view_as(tensor))


class TorchTransport(LinkTransport):
    """One rank of a process group that nobody else uses.

    A group of its own keeps our messages apart from the user's, whose collectives may run on another thread. A group
    that torch did not make cannot be made again, and is used as it is.
    """

    def __init__(self, group: Any = None, timeout: timedelta | None = None) -> None:
        """Make a new group over the ranks of `group` (default: all). Every one of them must call this."""
        super().__init__(open_link(group, timeout))
        self._witness: Witness | None = None  # of a world of one there is nothing to say
        self._parts: list[LinkTransport] = []
        if self._link.store is not None:
            self._connect()

    def _connect(self) -> None:
        link = self._link
        assert link.store is not None
        try:
            self._witness = Witness(link.store, link.ranks, link.rank, link.timeout, link.store_holder)
            link.connect(self._witness.store.inner)
        except BaseException:
            link.store.close()
            self.close()
            raise

    def among(self, ranks: Sequence[int]) -> LinkTransport:
        """Who is to blame when something fails in it, this transport finds out."""
        store = self._witness.store.inner if self._witness is not None else None
        self._parts.append(LinkTransport(self._link.among(ranks, store)))
        return self._parts[-1]

    def close(self) -> None:
        self._leave()
        if self._witness is not None:
            self._witness.close()

    def abort(self, fault: Fault) -> None:
        if self._witness is not None:
            self._witness.note(fault)
        self._leave()
        if self._witness is not None:
            self._witness.linger(fault)

    def find_fault(self) -> Fault | None:
        if self._witness is None:
            return None
        fault = self._witness.find()
        if fault is None:
            self._leave()  # wakes those who wait for us, so that they report too
            fault = self._witness.find_late()
        return fault

    def _leave(self) -> None:
        for part in self._parts:
            part.close()
        self._link.leave()


def _framed(message: Tensor) -> Tensor:
    size = torch.tensor([message.numel()], dtype=torch.int64).view(torch.uint8)
    return torch.cat([size, message])


def _windows(world_size: int, in_flight: int) -> Iterator[range]:
    for start in range(1, world_size, in_flight):
        yield range(start, min(start + in_flight, world_size))
