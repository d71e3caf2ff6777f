"""Hosts that exist only on this machine: one network namespace each, joined by a switch of a given rate.

with open_cluster(hosts=4, network=Network.parse("1gbit")) as cluster:
    results = run_ranks(cluster, "oktopk.bench.step:measure", {...})

    host 0 [eth0] ---- [p0] switch [p1] ---- [eth0] host 1        a token-bucket filter on both ends of each pair

The switch is a bridge in a namespace of its own, so not one link appears outside, and whatever runs inside can reach
nothing but its peers. The names carry the process that owns them: a later run removes what a killed one left behind.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from oktopk.bench.network import Network
from oktopk.bench.signals import signals_ignored, signals_raise
from oktopk.errors import ClusterError, ConfigError

PREFIX = "oktopk"
INTERFACE = "eth0"
MOST_HOSTS = 254  # addresses in 10.77.0.0/24
QUEUE_SECONDS = 0.05  # how long a packet may wait at the filter before it is dropped
LEAST_QUEUE = 512 * 1024  # bytes that wait whatever the rate: less, and a segment of TCP loses its own end
BURST_SECONDS = 0.0005  # what passes at full speed after a pause; a link has no such thing, the filter's timer needs it
LEAST_BURST = 2 * 1514  # frames; the kernel cuts longer segments
_CAPABILITIES = (12, 21)  # CAP_NET_ADMIN, CAP_SYS_ADMIN
REMEDY = "Run as root with iproute2 installed (apt-get install iproute2) to emulate a network."

_serial = count()


@dataclass(frozen=True)
class Cluster:
    """Where ranks run. This one is loopback: all on this machine, over an interface that nothing shapes."""

    hosts: int
    network: Network = field(default_factory=lambda: Network(None))
    per_host: int = 1
    notes: tuple[str, ...] = ()  # what a reader of the numbers must know

    emulated = False
    interface = "lo"
    master = "127.0.0.1"  # address of rank 0's host

    @property
    def world_size(self) -> int:
        return self.hosts * self.per_host

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """How to start `argv` on the host of a rank."""
        return list(argv)


@dataclass(frozen=True)
class EmulatedCluster(Cluster):
    """An emulated cluster that stands."""

    prefix: str = PREFIX

    emulated = True
    interface = INTERFACE
    master = "10.77.0.1"

    def namespace(self, host: int) -> str:
        return f"{self.prefix}-h{host}"

    @property
    def switch(self) -> str:
        return f"{self.prefix}-switch"

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        return [_tool("ip"), "netns", "exec", self.namespace(rank // self.per_host), *argv]


@contextmanager
def open_cluster(hosts: int, network: Network, per_host: int = 1) -> Iterator[Cluster]:
    """An emulated cluster, or loopback with the reason in its notes where none can be made."""
    require_sizes(hosts, per_host)
    missing = missing_for_emulation()
    if missing is None:
        with emulated_cluster(hosts, network, per_host) as cluster:
            yield cluster
        return
    note = f"no emulated network: {missing}. All ranks share loopback, unshaped. {REMEDY}"
    yield Cluster(hosts, per_host=per_host, notes=(note,))


@contextmanager
def emulated_cluster(hosts: int, network: Network, per_host: int = 1) -> Iterator[EmulatedCluster]:
    """Build the hosts, hand them over, and remove them whatever happens, Ctrl-C and SIGTERM included."""
    require_sizes(hosts, per_host)
    missing = missing_for_emulation()
    if missing is not None:
        raise ClusterError(f"cannot emulate a network: {missing}. {REMEDY}")
    remove_leftovers()
    prefix = f"{_owner_prefix(os.getpid())}-{next(_serial)}"
    with signals_raise():
        try:
            yield _build(EmulatedCluster(hosts, network, per_host, prefix=prefix))
        finally:
            with signals_ignored():
                _remove([name for name in namespaces() if name.startswith(f"{prefix}-")])


def missing_for_emulation() -> str | None:
    """What this machine lacks to emulate a network; None if nothing."""
    for tool in ("ip", "tc"):
        if shutil.which(tool, path=_search_path()) is None:
            return f"the command {tool!r} is missing"
    if os.geteuid() != 0:
        return "that needs root"
    if not _may_administer():
        return "root may not make networks here (CAP_NET_ADMIN and CAP_SYS_ADMIN are missing)"
    return None


def _may_administer() -> bool:
    """In an ordinary container root may not."""
    status = Path("/proc/self/status").read_text()
    allowed = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), -1)
    return all(allowed >> capability & 1 for capability in _CAPABILITIES)


def remove_leftovers() -> list[str]:
    """Remove the namespaces of owners that no longer live, and return their names. No others are touched."""
    dead = [name for name in namespaces() if (owner := _owner(name)) is not None and not _lives(*owner)]
    _remove(dead)
    return dead


def namespaces() -> list[str]:
    """Every named network namespace of this machine."""
    listed = _ip("-j", "netns", "list")
    return [entry["name"] for entry in json.loads(listed)] if listed.strip() else []


def interface_bytes(interface: str) -> tuple[int, int]:
    """Bytes sent and received as the kernel counts them, in the namespace of the caller."""
    counters = Path("/sys/class/net") / interface / "statistics"
    sent, received = ((counters / name).read_text() for name in ("tx_bytes", "rx_bytes"))
    return int(sent), int(received)


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def require_sizes(hosts: int, per_host: int) -> None:
    if not 1 <= hosts <= MOST_HOSTS:
        raise ConfigError(f"hosts must be 1 to {MOST_HOSTS} (the addresses of one network), got {hosts}.")
    if per_host < 1:
        raise ConfigError(f"per_host must be 1 or more ranks, got {per_host}.")


def _build(cluster: EmulatedCluster) -> EmulatedCluster:
    """Namespaces, the bridge, a shaped pair of interfaces per host."""
    _ip("netns", "add", cluster.switch)
    _ip("-n", cluster.switch, "link", "add", "br0", "type", "bridge")
    _ip("-n", cluster.switch, "link", "set", "br0", "up")
    for host in range(cluster.hosts):
        _add_host(cluster, host)
    delayed = [_shape(cluster, host) for host in range(cluster.hosts)]
    if cluster.network.latency and not all(delayed):
        note = "this kernel has no netem: only the bandwidth is shaped, not the latency"
        return replace(cluster, network=Network(cluster.network.bits_per_second), notes=(note,))
    return cluster


def _add_host(cluster: EmulatedCluster, host: int) -> None:
    name, port = cluster.namespace(host), f"p{host}"
    _ip("netns", "add", name)
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", cluster.switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _ip("-n", cluster.switch, "link", "set", port, "master", "br0", "up")
    _ip("-n", name, "addr", "add", f"{address(host)}/24", "dev", INTERFACE)
    _ip("-n", name, "link", "set", INTERFACE, "up")


def _shape(cluster: EmulatedCluster, host: int) -> bool:
    """Limit the rate at both ends, delay at the host's end; False if the kernel cannot delay."""
    delayed = bool(cluster.network.latency) and _delay(cluster, host)
    rate = cluster.network.bits_per_second
    if rate is not None:
        under = ["parent", "1:1", "handle", "10:"] if delayed else ["root"]
        _tc("-n", cluster.namespace(host), "qdisc", "add", "dev", INTERFACE, *under, *_bucket(rate))
        _tc("-n", cluster.switch, "qdisc", "add", "dev", f"p{host}", "root", *_bucket(rate))
    return delayed


def _delay(cluster: EmulatedCluster, host: int) -> bool:
    packets = str(max(1000, int((cluster.network.bits_per_second or 1e10) * (cluster.network.latency + 0.1) / 8000)))
    delay = ["netem", "delay", f"{cluster.network.latency * 1e6:.0f}us", "limit", packets]
    with suppress(ClusterError):
        _tc("-n", cluster.namespace(host), "qdisc", "add", "dev", INTERFACE, "root", "handle", "1:", *delay)
        return True
    return False


def _bucket(rate: float) -> list[str]:
    burst = max(LEAST_BURST, int(rate / 8 * BURST_SECONDS))
    queue = max(LEAST_QUEUE, int(rate / 8 * QUEUE_SECONDS))
    return ["tbf", "rate", f"{rate:.0f}bit", "burst", str(burst), "limit", str(burst + queue)]


def _remove(names: Sequence[str]) -> None:
    """End what still runs in these namespaces, then delete them; links inside go with them."""
    for name in names:
        with suppress(ClusterError):  # another run may have removed it meanwhile
            for pid in _ip("netns", "pids", name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "del", name)
    left = sorted(set(names) & set(namespaces()))
    if left:
        raise ClusterError(f"could not remove the namespaces {', '.join(left)}: try `ip netns del NAME`.")


def _owner_prefix(pid: int) -> str:
    """The start time makes the name survive re-use of process numbers."""
    return f"{PREFIX}-{pid}-{_started(pid)}"


def _owner(name: str) -> tuple[int, int] | None:
    found = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-\d+-(?:h\d+|switch)", name)
    return (int(found[1]), int(found[2])) if found else None


def _lives(pid: int, started: int) -> bool:
    return _started(pid) == started


def _started(pid: int) -> int | None:
    """When a process started, in ticks since boot; None when there is no such process."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(after_name[19])


def _ip(*arguments: str) -> str:
    return _call(_tool("ip"), *arguments)


def _tc(*arguments: str) -> str:
    return _call(_tool("tc"), *arguments)


def _call(*command: str) -> str:
    # A session of its own: Ctrl-C in the terminal must not kill a clean-up half way.
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, start_new_session=True)
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}.")
    return done.stdout


def _tool(name: str) -> str:
    found = shutil.which(name, path=_search_path())
    if found is None:
        raise ClusterError(f"the command {name!r} is missing. {REMEDY}")
    return found


def _search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
