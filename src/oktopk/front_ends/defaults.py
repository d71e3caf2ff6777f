"""What `register` chooses where nothing was asked for, and why: the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from oktopk.config import AUTO
from oktopk.front_ends.options import Fuse
from oktopk.front_ends.parameters import Named
from oktopk.transport.base import Transport
from oktopk.transport.machines import own_kernel
from oktopk.transport.sharing import share

LARGE = 1_000_000  # parameters: below, any choice costs the same few rounds
NAMES = {"bucket": "bucket by bucket", "step": "one vector per step"}


@dataclass(frozen=True)
class Crowd:
    """Ranks that share processors, where they are most crowded."""

    ranks: int
    cores: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks on {self.cores} cores"


def is_large(parameters: Sequence[Named]) -> bool:
    return sum(parameter.numel() for _, parameter in parameters if parameter.requires_grad) >= LARGE


def default_wire(algorithm: str, parameters: Sequence[Named]) -> str:
    """Found by trying, where that can pay."""
    return AUTO if algorithm not in ("dense", AUTO) and is_large(parameters) else "float32"


def default_fuse(parameters: Sequence[Named], transport: Transport) -> tuple[Fuse, str]:
    """How buckets are fused, and why. Every rank must call this.

    Buckets travel while backward goes on, which pays when processors have time for both: what is computed for a
    message on a core that backward needs comes on top.
    """
    trained: list[Tensor] = [parameter for _, parameter in parameters if parameter.requires_grad]
    if not is_large(parameters):
        return "bucket", "a small model"
    if any(parameter.device.type != "cpu" for parameter in trained):
        return "bucket", "the model is not on the processor"
    crowd = crowded(transport)
    return ("step" if crowd.ranks > crowd.cores else "bucket"), str(crowd)


def crowded(transport: Transport) -> Crowd:
    """The ranks that have the fewest cores each, and these. Every rank must call this."""
    everyone = share([own_kernel(), _cores()], transport)
    crowds = []
    for kernel in sorted({kernel for kernel, _ in everyone}):
        cores = [set(mine) for name, mine in everyone if name == kernel]
        crowds.append(Crowd(len(cores), len(set[int]().union(*cores))))
    return max(crowds, key=lambda crowd: crowd.ranks / crowd.cores)


def _cores() -> list[int]:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
