"""How bytes move between ranks: four verbs over messages of unequal length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

SIZE_BYTES = 8  # each message is announced by its length in one int64
DIRECT_BYTES = 64 * 1024  # all_reduce of less than this goes straight between ranks: two rounds instead of 2(P-1)

Op = Literal["sum", "max"]


@dataclass(frozen=True)
class Fault:
    """Which rank failed, and how."""

    rank: int
    error: str
    step: int | None = None  # None: not known yet
    phase: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} failed at step {self.step}, phase {self.phase}: {self.error}"


class Transport(Protocol):
    """A world of ranks. Every rank calls the same verbs in the same order, with tensors on the host."""

    rank: int
    world_size: int

    def all_reduce_(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        """Replace `tensor` by its sum (or maximum) over ranks, the same bits on all of them."""
        ...

    def all_gather(
        self, message: Tensor, sizes: Sequence[int] | None = None, limits: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Every rank's message (uint8, any length), by rank.

        Saves a round when all know the `sizes` already, or at least that no rank's exceeds its limit.
        """
        ...

    def all_to_all(
        self, messages: Sequence[Tensor], in_flight: int = 4, limits: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Send `messages[r]` to each rank r; yield (source, message): own first, then rank - 1, rank - 2, ...

        At most `in_flight` peers are served at once, and the next ones are under way while the caller works on these.
        The caller must exhaust the iterator. Saves a round when it is known that no message of rank r exceeds
        `limits[r]`.
        """
        ...

    def exchange(self, message: Tensor | None, to: int | None, source: int | None) -> Tensor | None:
        """Send `message` to one rank and/or receive one from another."""
        ...

    def agree(self, words: Sequence[int]) -> list[list[int]]:
        """A few int64 words of every rank, by rank, in one round."""
        ...

    def close(self) -> None:
        """Leave in order, after the last verb."""
        ...

    def abort(self, fault: Fault) -> None:
        """Leave at once and say why: ranks that wait for this one get an error instead of silence."""
        ...

    def find_fault(self) -> Fault | None:
        """After a verb failed here: which rank is to blame, if one is."""
        ...


@runtime_checkable
class Divisible(Protocol):
    """A transport that can be divided into worlds of some of its ranks."""

    def among(self, ranks: Sequence[int]) -> Transport:
        """A world of these ranks, this one included. All of them must ask for it, and it ends with this transport."""
        ...


@runtime_checkable
class Roomy(Protocol):
    """A transport with memory of its own for messages."""

    def room(self, sizes: Sequence[int]) -> list[Tensor]:
        """Memory for messages of these sizes, from which the next verb need not copy them."""
        ...


def require_within(limits: Sequence[int] | None, rank: int, messages: Sequence[Tensor]) -> None:
    """A sender that breaks its word would overrun the buffers of its receivers."""
    longest = max(message.numel() for message in messages)
    if limits is not None and longest > limits[rank]:
        raise AssertionError(f"a message of {longest} bytes exceeds the {limits[rank]} that were announced")


def all_reduce_bytes(nbytes: int, world_size: int) -> int:
    """Bytes each rank sends, and receives, in an all-reduce of `nbytes`."""
    return -(-2 * nbytes * (world_size - 1) // world_size)


def goes_directly(tensor: Tensor, world_size: int) -> bool:
    """Whether an all-reduce goes straight between ranks: each sums one slice and hands it to all."""
    return world_size <= tensor.numel() <= DIRECT_BYTES // tensor.element_size()


def all_reduce_rounds(tensor: Tensor, world_size: int) -> int:
    """Rounds of an all-reduce: two if it goes directly, those of a ring otherwise."""
    return 2 if goes_directly(tensor, world_size) else 2 * (world_size - 1)
