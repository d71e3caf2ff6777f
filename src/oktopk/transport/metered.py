"""A transport that counts what passes through another one, and which phase of the step it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oktopk.metrics import Clock
from oktopk.transport.base import SIZE_BYTES, Fault, Op, Roomy, Transport, all_reduce_bytes, all_reduce_rounds


@dataclass
class Tally:
    """What has been sent and received."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    rounds: int = 0  # what must have arrived before the next can begin; lengths that travel ahead of messages are one
    message_sizes: dict[str, dict[int, int]] = field(default_factory=dict)  # operation -> bytes -> messages sent

    def restart(self) -> None:
        """Count from zero."""
        self.bytes_sent = self.bytes_received = self.messages = self.rounds = 0
        self.message_sizes = {}

    def count(self, operation: str, sent: Sequence[int], received: int, rounds: int) -> None:
        self.rounds += rounds if sent or received else 0
        sizes = self.message_sizes.setdefault(operation, {})
        for size in sent:
            sizes[size] = sizes.get(size, 0) + 1
        self.messages += len(sent)
        self.bytes_sent += sum(sent)
        self.bytes_received += received


class MeteredTransport:
    """Counts messages, rounds and bytes in both directions, per verb, and runs each verb inside its phase."""

    def __init__(self, inner: Transport, clock: Clock | None = None, tally: Tally | None = None) -> None:
        """Count into `tally`, which several may share."""
        self.inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.tally = tally or Tally()
        self._clock = clock or Clock()

    def all_reduce_(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        size = all_reduce_bytes(tensor.numel() * tensor.element_size(), self.world_size)
        others = self.world_size - 1
        rounds = all_reduce_rounds(tensor, self.world_size)
        self.tally.count("all_reduce", [size // others + (i < size % others) for i in range(others)], size, rounds)
        with self._clock.phase("exchange"):
            return self.inner.all_reduce_(tensor, op)

    def all_gather(
        self, message: Tensor, sizes: Sequence[int] | None = None, limits: Sequence[int] | None = None
    ) -> list[Tensor]:
        with self._clock.phase("gather"):
            gathered = self.inner.all_gather(message, sizes, limits)
        extra = 0 if sizes is not None else SIZE_BYTES
        received = sum(other.numel() + extra for rank, other in enumerate(gathered) if rank != self.rank)
        rounds = 2 if sizes is None and limits is None else 1
        self.tally.count("all_gather", [message.numel() + extra] * (self.world_size - 1), received, rounds)
        return gathered

    def all_to_all(
        self, messages: Sequence[Tensor], in_flight: int = 4, limits: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        others = [m.numel() + SIZE_BYTES for r, m in enumerate(messages) if r != self.rank]
        self.tally.count("all_to_all", others, 0, 2 if limits is None else 1)
        arriving = self.inner.all_to_all(messages, in_flight, limits)
        while True:
            with self._clock.phase("exchange"):
                pair = next(arriving, None)
            if pair is None:
                return
            if pair[0] != self.rank:
                self.tally.bytes_received += pair[1].numel() + SIZE_BYTES
            yield pair

    def exchange(self, message: Tensor | None, to: int | None, source: int | None) -> Tensor | None:
        with self._clock.phase("exchange"):
            received = self.inner.exchange(message, to, source)
        sent = [message.numel() + SIZE_BYTES] if message is not None else []
        self.tally.count("exchange", sent, 0 if received is None else received.numel() + SIZE_BYTES, 2)
        return received

    def room(self, sizes: Sequence[int]) -> list[Tensor]:
        """Memory for messages of these sizes: the one from which the transport need not copy them, if it has any."""
        if isinstance(self.inner, Roomy):
            return self.inner.room(sizes)
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]

    def agree(self, words: Sequence[int]) -> list[list[int]]:
        with self._clock.phase("exchange"):
            answers = self.inner.agree(words)
        size = 8 * len(words)
        self.tally.count("agree", [size] * (self.world_size - 1), size * (self.world_size - 1), 1)
        return answers

    def elsewhere(self, operation: str, nbytes: int) -> AbstractContextManager[None]:
        """Count a collective that goes another way, in which each rank sends so many bytes to every other."""
        others = self.world_size - 1
        self.tally.count(operation, [nbytes] * others, nbytes * others, 1)
        return self._clock.phase("exchange")

    def close(self) -> None:
        self.inner.close()

    def abort(self, fault: Fault) -> None:
        self.inner.abort(fault)

    def find_fault(self) -> Fault | None:
        return self.inner.find_fault()
