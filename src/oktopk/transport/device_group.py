"""Sums in the memory of GPUs: NCCL among the ranks of one host, beside the transport over which they agree.

NCCL waits for a rank that died, and names none. So ranks agree over their transport before they sum, wait for a
collective no longer than for any other message, and leave by aborting, which asks nobody.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from oktopk.errors import CommunicationError
from oktopk.transport.base import Transport
from oktopk.transport.bounded_store import answer
from oktopk.transport.links import Link, communication_errors
from oktopk.transport.sharing import attempt, share, share_error

log = logging.getLogger("oktopk")

_changing = threading.Lock()

VARIABLE = "OKTOPK_NCCL"  # set to "off": whatever ranks of a host exchange goes through its memory
MAKING_SECONDS = 60.0  # at most, for all ranks of a host to come together; then they do without


class DeviceGroup:
    """Ranks with a device each. All must call the same verbs in the same order, and must have agreed to.

    When a verb returns, the device is done with it: its memory belongs to no other stream any more.
    """

    def __init__(self, backend: Any, world_size: int, timeout: timedelta) -> None:
        """Over a backend of torch's, whose verbs are given so much time each."""
        self._backend, self._world_size, self._timeout = backend, world_size, timeout

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """The sum over ranks of the row of this rank, one of as many as there are ranks."""
        total = rows.new_empty(rows.shape[1])
        self._do("_reduce_scatter_base", total, rows.view(-1))
        return total

    def all_gather(self, row: Tensor) -> Tensor:
        """Every rank's row, by rank."""
        rows = row.new_empty(self._world_size * row.numel())
        self._do("_allgather_base", rows, row)
        return rows.view(self._world_size, -1)

    def abort(self) -> None:
        """Leave without the others: what is under way ends, and its results are worth nothing."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()

    def _do(self, verb: str, out: Tensor, given: Tensor) -> None:
        if self._backend is None:
            raise CommunicationError("this rank has left the group of its host's devices.")
        with communication_errors("the devices of a host"):
            # With a limit the host waits, and not only the stream: a kernel whose peer is dead would never end.
            getattr(self._backend, verb)(out, given).wait(self._timeout)


class DeviceBackend(Protocol):
    """What can make a group of a host's devices."""

    device_type: str
    timeout: timedelta

    def obstacle(self) -> str | None:
        """Why this rank cannot take part, if so."""
        ...

    def card(self, device: torch.device) -> str:
        """What no other device of the host is called."""
        ...

    def make(self, device: torch.device) -> DeviceGroup:
        """Every rank of the host must do it."""
        ...


class Nccl:
    """NCCL, where the user's group has it."""

    device_type = "cuda"

    def __init__(self, link: Link) -> None:
        """`link` of the ranks of a host."""
        self._link, self.timeout = link, link.timeout

    def obstacle(self) -> str | None:
        if os.environ.get(VARIABLE) == "off":
            return f"{VARIABLE}=off"
        if not dist.is_nccl_available():
            return "this torch has no NCCL"
        if "nccl" not in self._link.backends:
            return f"the process group is {self._link.backends}, without NCCL"
        return None

    def card(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)

    def make(self, device: torch.device) -> DeviceGroup:
        # Not by `dist.new_group`, which may split the user's communicator, while other threads use it.
        group = DeviceGroup(self._backend(), len(self._link.ranks), self.timeout)
        try:
            group.all_gather(torch.zeros(1, device=device))  # not before this does NCCL connect, or refuse
        except BaseException:
            group.abort()
            raise
        return group

    def _backend(self) -> Any:
        nccl: Any = vars(dist)["ProcessGroupNCCL"]
        options = nccl.Options()
        options._timeout = 2 * self.timeout  # of torch's watchdog: `DeviceGroup` is to be first
        options.global_ranks_in_group, options.group_name = list(self._link.ranks), "oktopk"
        store = self._link.another_store("devices")
        # By default that watchdog ends the process when a collective fails; we want an error that says who died.
        with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
            return nccl(store, self._link.rank, len(self._link.ranks), options)


class DeviceGroups:
    """The group of a host's devices, made when its ranks first bring something on one; or why there is none."""

    def __init__(self, backend: DeviceBackend | None = None) -> None:
        """None: there never is one."""
        self._backend = backend
        self._device: torch.device | None = None  # the first of its type that this rank brought
        self._group: DeviceGroup | None = None
        self._is_decided = False

    def kind(self, device: torch.device) -> str:
        """What ranks must have in common to ask for the group of their devices."""
        is_settled = self._is_decided and self._group is None
        if self._backend is None or is_settled or device.type != self._backend.device_type:
            return device.type
        self._device = self._device or device
        return device.type if device == self._device else f"another {device.type}"

    def among(self, device: torch.device, transport: Transport) -> DeviceGroup | None:
        """The group, or None: go through the host. All ranks of `transport` must ask, for devices of one `kind`."""
        if self._backend is None or self.kind(device) != self._backend.device_type:
            return None
        if not self._is_decided:
            self._is_decided = True
            self._decide(self._backend, device, transport)
        return self._group

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()

    def _decide(self, backend: DeviceBackend, device: torch.device, transport: Transport) -> None:
        """All ranks have a group, or none has."""
        obstacle = backend.obstacle()
        reason = _obstacle(share([obstacle, backend.card(device) if obstacle is None else ""], transport))
        if reason is None:
            seconds = min(MAKING_SECONDS, backend.timeout.total_seconds() / 2)  # the others wait until all have tried
            group, error = attempt(lambda: _in_time(lambda: backend.make(device), seconds))
            reason = next(filter(None, share_error(error, transport)), None)
            if reason is None:
                self._group = group
            elif group is not None:
                group.abort()
        if reason is not None and transport.rank == 0:
            log.warning("gradients on %s go through the memory of the host to be summed there: %s.", device, reason)


@runtime_checkable
class OnDevices(Protocol):
    """A transport whose ranks may also have a group of devices. It ends with the transport."""

    devices: DeviceGroups


def _obstacle(told: Sequence[tuple[str | None, str]]) -> str | None:
    """What keeps ranks that told their obstacles and cards from having a group."""
    obstacles, cards = ([row[position] for row in told] for position in range(2))
    is_shared = len(set(cards)) < len(cards)
    return next(filter(None, obstacles), "ranks share a GPU, and NCCL wants one for each" if is_shared else None)


def _in_time(make: Callable[[], DeviceGroup], seconds: float) -> DeviceGroup:
    """What it makes. In a thread that nobody waits for longer: where a rank dies, NCCL may wait forever to connect."""
    made: Future[DeviceGroup] = Future()
    threading.Thread(target=answer, args=(made, make), name="oktopk-devices", daemon=True).start()
    try:
        return made.result(seconds)
    except FutureTimeoutError:
        made.add_done_callback(_leave)
        raise CommunicationError(f"the devices of a host did not come together in {seconds:g} s") from None


def _leave(made: Future[DeviceGroup]) -> None:
    """A group that came too late: its ranks do without."""
    if made.exception() is None:
        made.result().abort()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable for this moment; one thread at a time, or one would restore what another has set."""
    with _changing:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            os.environ.pop(name, None)
            if before is not None:
                os.environ[name] = before
