"""The one contract every algorithm fulfils."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from oktopk.primitives.collectives import Tools
from oktopk.types import Difference, Reduced, SparseVector

# What an algorithm asks of the vector it reduces: only its k largest entries (`Tools.largest`), only some at indices of
# its own (`Tools.pick`), or both: then the vector may be a `Difference`. Else it must be a tensor.
Asks = Literal["largest", "some", "both", "everything"]


@dataclass(frozen=True)
class Choice:
    """What a rank chose before ranks agreed, and what they told each other of it while they did."""

    chosen: SparseVector
    threshold: float
    words: list[int]  # what this rank tells, at most `told_words`
    told: Sequence[Sequence[int]] = ()  # what each rank told; nothing yet, if ranks have not agreed


class Algorithm(Protocol):
    """One paper, one class, one method. Made once per bucket, so that state it keeps belongs to that bucket."""

    asks: Asks
    knows_senders: bool  # every rank learns how many ranks sent an entry: the mean may be over them

    def choose(self, acc: Any, k: int) -> Choice | None:
        """Do the first step of `reduce` while ranks still compare notes; None: there is nothing to tell beforehand.

        Changes no state: the reduction may be refused.
        """
        ...

    def reduce(self, acc: Any, k: int, choice: Choice | None = None) -> Reduced:
        """The mean over ranks of the flat, finite `acc`, of which each rank should send about k entries.

        An algorithm that sends everything may overwrite `acc`; any other leaves it as it is. `choice` is what `choose`
        returned for the same `acc`, with what all ranks told.
        """
        ...

    def ask_ahead(self, acc: Difference, k: int) -> None:
        """Let `acc` keep what the next `reduce` is going to ask of it: its weights may change until then."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Stateless:
    """For algorithms that remember nothing between steps."""

    asks: Asks = "everything"
    knows_senders: bool = False

    def choose(self, acc: Any, k: int) -> Choice | None:
        return None

    def ask_ahead(self, acc: Difference, k: int) -> None:
        raise AssertionError("who asks for everything takes a copy")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None


class Selecting(Stateless):
    """For those that also ask for nothing but the largest entries."""

    asks: Asks = "largest"
    _tools: Tools

    def ask_ahead(self, acc: Difference, k: int) -> None:
        acc.largest = self._tools.kernels.select_topk(acc, k)


def less(sent: SparseVector, *owed: SparseVector) -> SparseVector:
    """What was sent, minus what this rank took back: parts that it dropped, and rounding errors."""
    return plus(sent, *(part.with_values(-part.values) for part in owed if part.nnz))


def plus(sent: SparseVector, *more: SparseVector) -> SparseVector:
    """All that was sent, one after the other."""
    indices = torch.cat([sent.indices, *(part.indices.to(sent.indices.dtype) for part in more)])
    return SparseVector(indices, torch.cat([sent.values, *(part.values for part in more)]), sent.numel)


def mean_of(total: SparseVector, ranks: Tensor | int) -> SparseVector:
    return total.with_values(total.values / ranks)
