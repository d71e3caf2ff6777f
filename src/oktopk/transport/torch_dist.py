"""A `torch.distributed` process group as a transport: Gloo on CPU, NCCL on device tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from oktopk.errors import CommunicationError, ConfigError, OkTopkError
from oktopk.transport.base import DIRECT_BYTES, SIZE_BYTES, Fault, Op, require_within
from oktopk.transport.witness import Witness

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class TorchTransport:
    """One rank of a process group that nobody else uses.

    A group of its own keeps our messages apart from the user's, whose collectives may run on another thread.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> None:
        """Make a new group over the ranks of `group` (default: all). Every one of them must call this."""
        parent = group if group is not None else dist.group.WORLD
        if parent is None:
            raise ConfigError("torch.distributed is not initialised: call init_process_group first.")
        ranks = dist.get_process_group_ranks(parent)
        backend = dist.get_backend(parent)
        self.timeout = timeout or _default_timeout(parent)
        self._group: dist.ProcessGroup | None = dist.new_group(
            ranks, timeout=self.timeout, backend=backend, use_local_synchronization=len(ranks) < dist.get_world_size()
        )
        self._ranks = ranks
        self.rank, self.world_size = dist.get_rank(self._group), len(ranks)
        self.device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
        self._witness = Witness(self._group, self.rank, self.world_size, holds_store=dist.get_rank() == 0)

    def all_reduce_(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        if self.world_size == 1:
            return tensor
        with _speaking():
            return self._all_reduce_(tensor, op)

    def _all_reduce_(self, tensor: Tensor, op: Op) -> Tensor:
        if self.device.type == "cpu" and self.world_size <= tensor.numel() <= DIRECT_BYTES // tensor.element_size():
            return self._all_reduce_directly_(tensor, op)
        dist.all_reduce(tensor, _OPS[op], group=self._group)
        return tensor

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
        if limits is None or self.device.type != "cpu":  # NCCL wants to know the exact length
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
                with _speaking():
                    for work in works:
                        work.wait()
                yield from incoming

    def exchange(self, message: Tensor | None, to: int | None, source: int | None) -> Tensor | None:
        outgoing, incoming = torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
        outgoing, incoming = outgoing.to(self.device), incoming.to(self.device)
        if message is not None:
            outgoing[0] = message.numel()
        self._swap(outgoing if to is not None else None, to, incoming if source is not None else None, source)
        received = None
        if source is not None:
            received = torch.empty(int(incoming), dtype=torch.uint8, device=self.device)
        self._swap(message, to, received, source)
        return received

    def agree(self, words: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(words, dtype=torch.int64, device=self.device)
        if self.world_size == 1:
            return [mine.tolist()]
        outgoing = mine.repeat(self.world_size)
        answers = torch.empty_like(outgoing)
        with _speaking():
            dist.all_to_all_single(answers, outgoing, group=self._group)
        return [row.tolist() for row in answers.view(self.world_size, -1)]

    def close(self) -> None:
        self._leave()
        self._witness.close()

    def abort(self, fault: Fault) -> None:
        self._witness.note(fault)
        self._leave()  # its sockets close with the group, and peers notice
        self._witness.linger(fault)

    def _leave(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def find_fault(self) -> Fault | None:
        fault = self._witness.find()
        if fault is None:
            self._leave()  # wakes those who wait for us, so that they report too
            fault = self._witness.find_late()
        return fault

    def _exchange_sizes(self, sizes: Sequence[int]) -> list[int]:
        if self.world_size == 1:
            return list(sizes)
        outgoing = torch.tensor(sizes, dtype=torch.int64, device=self.device)
        incoming = torch.empty_like(outgoing)
        with _speaking():
            dist.all_to_all_single(incoming, outgoing, group=self._group)
        return [int(size) for size in incoming.tolist()]

    def _post(
        self, messages: Sequence[Tensor], sizes: Sequence[int], distances: range
    ) -> tuple[list[dist.Work], list[tuple[int, Tensor]]]:
        """Start sending to rank + d and receiving from rank - d for each distance d."""
        outgoing: list[tuple[int, Tensor]] = []
        incoming: list[tuple[int, Tensor]] = []
        for distance in distances:
            to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            outgoing.append((to, messages[to]))
            incoming.append((source, torch.empty(sizes[source], dtype=torch.uint8, device=self.device)))
        return self._start(outgoing, incoming), incoming

    def _start(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> list[dist.Work]:
        """Start to send and to receive what is not empty, from and to ranks of the group."""
        sends = [dist.P2POp(dist.isend, m, self._ranks[to], self._group) for to, m in outgoing if m.numel()]
        receives = [dist.P2POp(dist.irecv, m, self._ranks[source], self._group) for source, m in incoming if m.numel()]
        with _speaking():
            return dist.batch_isend_irecv(sends + receives) if sends or receives else []

    def _swap(self, outgoing: Tensor | None, to: int | None, incoming: Tensor | None, source: int | None) -> None:
        sends = [(to, outgoing)] if outgoing is not None and to is not None else []
        receives = [(source, incoming)] if incoming is not None and source is not None else []
        works = self._start(sends, receives)
        with _speaking():
            for work in works:
                work.wait()

    def _all_reduce_directly_(self, tensor: Tensor, op: Op) -> Tensor:
        """Each rank reduces one slice and hands it to all: two rounds, where a ring takes 2(P-1)."""
        share = -(-tensor.numel() // self.world_size)
        padded = tensor.new_zeros(share * self.world_size)
        padded[: tensor.numel()] = tensor.flatten()
        slices = torch.empty_like(padded)
        dist.all_to_all_single(slices, padded, group=self._group)
        rows = slices.view(self.world_size, share)
        mine = rows.sum(0, dtype=tensor.dtype) if op == "sum" else rows.amax(0)
        dist.all_to_all_single(padded, mine.repeat(self.world_size), group=self._group)
        return tensor.copy_(padded[: tensor.numel()].view_as(tensor))


@contextmanager
def _speaking() -> Iterator[None]:
    """Whatever the backend raises is an error of communication."""
    try:
        yield
    except OkTopkError:
        raise
    except RuntimeError as error:
        raise CommunicationError(str(error)) from error


def _framed(message: Tensor) -> Tensor:
    size = torch.tensor([message.numel()], dtype=torch.int64).view(torch.uint8)
    return torch.cat([size, message])


def _windows(world_size: int, in_flight: int) -> Iterator[range]:
    for start in range(1, world_size, in_flight):
        yield range(start, min(start + in_flight, world_size))


def _default_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout the user gave to `init_process_group`, so that ours is no other."""
    options = getattr(group, "options", None) or getattr(
        group._get_backend(torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")), "options", None
    )
    found = getattr(options, "_timeout", None)
    return found if isinstance(found, timedelta) else dist.default_pg_timeout
