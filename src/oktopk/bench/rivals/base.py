"""What a rival is."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from oktopk.transport.base import Transport


class Rival(Protocol):
    """One rank of a way to keep ranks together that step by themselves. Every rank calls the same in the same order."""

    levels: ClassVar[bool]  # a synchronisation leaves all ranks with the same weights

    def synchronize_(self, own: Tensor) -> None:
        """Bring this rank's weights (flat, float32) together with those of the others, after some local steps."""
        ...

    def finish_(self, own: Tensor) -> None:
        """The last step is done: all ranks end with the same weights."""
        ...


def end_(own: Tensor, shared: Tensor, transport: Transport) -> None:
    """Average own weights, if steps have followed the last synchronisation on any rank."""
    if transport.all_reduce_(torch.tensor([not torch.equal(own, shared)], dtype=torch.int32)):
        mean_(own, transport)


def mean_(vector: Tensor, transport: Transport) -> Tensor:
    """Replace a vector by its mean over ranks."""
    return transport.all_reduce_(vector).div_(transport.world_size)
