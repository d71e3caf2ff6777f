"""Which ranks share a host, agreed by all of them; and the transports between ranks of a host, and between hosts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from oktopk.errors import CommunicationError, ConfigError, MismatchError, PeerError
from oktopk.transport.base import Divisible, Transport
from oktopk.transport.device_group import DeviceGroups, OnDevices
from oktopk.transport.machines import own_machine
from oktopk.transport.shared_memory import share_memory
from oktopk.transport.sharing import share

log = logging.getLogger("oktopk")

HostsOption = Literal["auto"] | int | None


@dataclass(frozen=True)
class Hosts:
    """The ranks of each host, equally many, ascending; seen from one of them."""

    ranks: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def ranks_per_host(self) -> int:
        return len(self.ranks[0])

    @property
    def is_flat(self) -> bool:
        """Whether there is nothing to do inside a host: every rank is one by itself."""
        return self.ranks_per_host == 1

    @property
    def host(self) -> int:
        return next(host for host, ranks in enumerate(self.ranks) if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        return self.inside.index(self.rank)

    @property
    def inside(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.ranks[self.host]

    @property
    def across(self) -> tuple[int, ...]:
        """The rank of each host that has the same place in it as this one."""
        return tuple(ranks[self.local_rank] for ranks in self.ranks)


@dataclass(frozen=True)
class Ranks:
    """Who talks to whom."""

    hosts: Hosts
    world: Transport  # all ranks
    across: Transport  # one rank of each host, that with the same place in it; the world itself if hosts are flat
    inside: Transport | None  # the ranks of this host; None if hosts are flat
    devices: DeviceGroups = field(default_factory=DeviceGroups)  # on which these can sum


def join_hosts(wanted: HostsOption, world: Transport) -> Ranks:
    """Find out together who shares a host, and connect. Every rank must call this; an error is everyone's."""
    try:
        hosts = agree_on_hosts(wanted, world, log)
        if hosts.is_flat:
            return Ranks(hosts, world, world, None)
        assert isinstance(world, Divisible)
        across, inside = world.among(hosts.across), world.among(hosts.inside)
        devices = inside.devices if isinstance(inside, OnDevices) else DeviceGroups()
        return Ranks(hosts, world, across, share_memory(inside), devices)
    except CommunicationError as error:
        fault = world.find_fault()
        world.close()
        raise PeerError(f"{fault} (while ranks found their hosts: {error})") from error
    except BaseException:
        world.close()
        raise


def agree_on_hosts(wanted: HostsOption, world: Transport, told: logging.Logger | None = None) -> Hosts:
    """The hosts that all ranks want, or an error on all of them. What was found, rank 0 tells the log."""
    answers = _ask_everyone(wanted, world)
    differing = [rank for rank, answer in enumerate(answers) if answer["hosts"] != answers[0]["hosts"]]
    if differing:
        raise MismatchError(
            f"rank {differing[0]} differs from rank 0 in hosts: {answers[differing[0]]['hosts']} there, "
            f"{answers[0]['hosts']} on rank 0. Every rank must pass the same."
        )
    _require_valid(wanted, world.world_size)
    machines = [answer["machine"] for answer in answers]
    can_divide = all(answer["divisible"] for answer in answers)
    if wanted == "auto":
        return _found(machines, world.rank, told if world.rank == 0 else None) if can_divide else _flat(world)
    if wanted is None or wanted == 1:
        return _flat(world)
    if not can_divide:
        raise ConfigError(f"hosts={wanted} needs a group that can be divided, which this one cannot: pass hosts=None.")
    return _in_blocks(wanted, machines, world)


def _ask_everyone(wanted: HostsOption, world: Transport) -> list[dict[str, Any]]:
    mine = {"hosts": repr(wanted), "machine": own_machine(), "divisible": isinstance(world, Divisible)}
    return share(mine, world) if world.world_size > 1 else [mine]


def _require_valid(wanted: HostsOption, world_size: int) -> None:
    is_number = isinstance(wanted, int) and not isinstance(wanted, bool)
    if not is_number and wanted not in ("auto", None):
        raise ConfigError(f"hosts must be 'auto', None or a number of ranks per host, got {wanted!r}.")
    if isinstance(wanted, int) and (wanted < 1 or world_size % wanted):
        raise ConfigError(
            f"hosts={wanted} is a number of ranks per host, and {world_size} ranks do not fill such hosts: give a "
            "divisor of the number of ranks, or 'auto'."
        )


def _flat(world: Transport) -> Hosts:
    return Hosts(tuple((rank,) for rank in range(world.world_size)), world.rank)


def _found(machines: Sequence[str], rank: int, told: logging.Logger | None) -> Hosts:
    """By machine, where there are several machines with several ranks each, equally many."""
    hosts = [tuple(r for r, machine in enumerate(machines) if machine == name) for name in dict.fromkeys(machines)]
    sizes = sorted({len(ranks) for ranks in hosts})
    flat = Hosts(tuple((r,) for r in range(len(machines))), rank)
    if len(hosts) == 1 or sizes == [1]:
        return flat
    if len(sizes) > 1:
        if told is not None:
            told.warning(
                "hosts have between %d and %d ranks: every rank reduces for itself. With equally many on each, hosts "
                "would reduce inside first, and send once for all their ranks.",
                sizes[0],
                sizes[-1],
            )
        return flat
    if told is not None:
        told.info("%d hosts of %d ranks: dense inside a host, sparse between hosts.", len(hosts), sizes[0])
    return Hosts(tuple(hosts), rank)


def _in_blocks(ranks_per_host: int, machines: Sequence[str], world: Transport) -> Hosts:
    """So many consecutive ranks on each host, none of which may be spread over machines."""
    starts = range(0, world.world_size, ranks_per_host)
    hosts = tuple(tuple(range(start, start + ranks_per_host)) for start in starts)
    for ranks in hosts:
        if len({machines[rank] for rank in ranks}) > 1:
            counts = [machines.count(machine) for machine in dict.fromkeys(machines)]
            raise ConfigError(
                f"hosts={ranks_per_host} makes one host of ranks {ranks[0]} to {ranks[-1]}, which are on several "
                f"machines: these have {', '.join(map(str, counts))} ranks. Start equally many consecutive ranks on "
                "each, or pass hosts=None."
            )
    return Hosts(hosts, world.rank)
