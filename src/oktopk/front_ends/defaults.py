"""What `register` chooses where nothing was asked for, and why: the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import inf

from torch import Tensor

from oktopk.config import AUTO, Density, OkTopkConfig, ReducerConfig
from oktopk.front_ends.options import Fuse
from oktopk.front_ends.parameters import Named
from oktopk.schedule import Schedule
from oktopk.transport.base import Transport
from oktopk.transport.machines import own_kernel
from oktopk.transport.sharing import share

LARGE = 1_000_000  # parameters: below, any choice costs the same few rounds
RIVAL = "topka"
FEW_ENTRIES = 100_000  # received by a rank with the rival of Ok-Topk: so much takes as long as one more round
MANY_ENTRIES = 300_000  # from here on nobody needs to try: on no network is the round worth it
FOREVER = 2**62  # steps
NAMES = {"bucket": "bucket by bucket", "step": "one vector per step"}


@dataclass(frozen=True)
class Crowd:
    """Ranks that share processors, where they are most crowded."""

    ranks: int
    cores: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks on {self.cores} cores"


def trained_numel(parameters: Sequence[Named]) -> int:
    return sum(parameter.numel() for _, parameter in parameters if parameter.requires_grad)


def is_large(parameters: Sequence[Named]) -> bool:
    return trained_numel(parameters) >= LARGE


def default_algorithm(numel: int, world_size: int, density: Density, options: Iterable[str] = ()) -> tuple[str, str]:
    """Which algorithm for so many parameters, and why if it is not Ok-Topk. Ranks that ask alike are told alike.

    When everyone's choice goes to everyone (topka), two rounds are enough. Ok-Topk takes three, in which a rank
    receives about 2 k (P-1) / P entries instead of k (P-1): with few of them it is rounds that cost.
    """
    received = _received(numel, world_size, density, options)
    if received >= FEW_ENTRIES:
        return "oktopk", ""
    return RIVAL, f"{received:,.0f} entries for each of {world_size} ranks: two rounds, where oktopk takes three"


def default_rival(numel: int, world_size: int, density: Density, options: Iterable[str] = ()) -> str:
    """Which algorithm may be faster than Ok-Topk, so that both should be tried; none if surely not."""
    return RIVAL if _received(numel, world_size, density, options) < MANY_ENTRIES else ""


def _received(numel: int, world_size: int, density: Density, options: Iterable[str]) -> float:
    """Entries that a rank receives when all go to everyone. Whoever sets an option of Ok-Topk wants Ok-Topk."""
    if world_size == 1 or {field.name for field in fields(OkTopkConfig)} & set(options):
        return inf
    return Schedule(ReducerConfig(density=density).density).k_at(FOREVER, numel) * (world_size - 1)


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
