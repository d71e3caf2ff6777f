"""Devices that hosts sum on, without any: for worlds of threads on any tensors, for real processes over Gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oktopk.transport import ThreadTransport, torch_dist
from oktopk.transport.device_group import DeviceGroup, DeviceGroups, Nccl


@dataclass
class Devices:
    """What the devices of a world of threads are like, and what was done on them."""

    device_type: str = "cpu"
    obstacle: Callable[[int], str | None] = lambda rank: None  # by rank in the host
    card: Callable[[int], str] = str
    make: Callable[[int], None] = lambda rank: None
    wait: Callable[[], None] = lambda: None
    timeout: timedelta = timedelta(seconds=60)
    done: list[tuple[str, torch.dtype]] = field(default_factory=list)  # verbs, and of what

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Let hosts of threads have them from now on."""
        among = ThreadTransport.among

        def with_devices(transport: ThreadTransport, ranks: Sequence[int]) -> ThreadTransport:
            part: Any = among(transport, ranks)
            part.devices = DeviceGroups(_OfThread(self, part))
            return part

        patch.setattr(ThreadTransport, "among", with_devices)


class _OfThread:
    """One rank's."""

    def __init__(self, devices: Devices, transport: ThreadTransport) -> None:
        self._devices, self._transport = devices, transport
        self.device_type, self.timeout = devices.device_type, devices.timeout

    def obstacle(self) -> str | None:
        return self._devices.obstacle(self._transport.rank)

    def card(self, device: torch.device) -> str:
        return self._devices.card(self._transport.rank)

    def make(self, device: torch.device) -> DeviceGroup:
        self._devices.make(self._transport.rank)
        return DeviceGroup(self, self._transport.world_size, self.timeout)

    # -- a backend, and the work it does -------------------------------------------------------------------------

    def _reduce_scatter_base(self, out: Tensor, given: Tensor) -> _OfThread:
        self._devices.done.append(("reduce_scatter", given.dtype))
        rows = [other.view(self._transport.world_size, -1) for other in self._transport._share(given.clone())]
        total = rows[0][self._transport.rank].clone()
        for other in rows[1:]:
            total += other[self._transport.rank]
        out.copy_(total)
        return self

    def _allgather_base(self, out: Tensor, given: Tensor) -> _OfThread:
        self._devices.done.append(("all_gather", given.dtype))
        out.copy_(torch.cat(self._transport._share(given.clone())))
        return self

    def wait(self, timeout: timedelta) -> None:
        self._devices.wait()

    def abort(self) -> None:
        self._devices.done.append(("abort", torch.uint8))


class GlooDevices(Nccl):
    """The CPU as a device, whose ranks sum over Gloo: all but the name of the backend is as with NCCL."""

    device_type = "cpu"

    def obstacle(self) -> str | None:
        return None

    def card(self, device: torch.device) -> str:
        return str(self._link.rank)

    def _backend(self) -> Any:
        store, ranks = self._link.another_store("devices"), len(self._link.ranks)
        return dist.ProcessGroupGloo(store, self._link.rank, ranks, timeout=self.timeout)


def sum_over_gloo() -> None:
    """On the devices of this process, whose life is one test."""
    torch_dist.Nccl = GlooDevices  # type: ignore[misc]
