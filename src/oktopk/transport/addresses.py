"""Where a rank can be reached, and which ranks can be reached still."""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import selectors
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic

from oktopk.errors import ConfigError

Address = tuple[str, int]  # numeric host and port

_LOOPBACK = "127.0.0.1"
_GET_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR of netdevice(7)
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_LINK_LOCAL = "fe80"
_WORD_BYTES = 1 << 16  # of which the rest of a longer word is not read


def own_host() -> str:
    """The address of this host that Gloo uses: where Gloo connects ranks, others can reach this one.

    It is that of the (first) interface in GLOO_SOCKET_IFNAME, else what the host's name resolves to, else loopback.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(interfaces) > 1:  # torch takes a single letter for unset
        return _host_of_interface(interfaces.split(",")[0])
    return next(filter(_can_bind, _resolve(socket.gethostname())), _LOOPBACK)


def listen(host: str, backlog: int) -> socket.socket:
    """A port of `host` that is open as long as this process lives."""
    return socket.create_server((host, 0), family=_family(host), backlog=backlog)


class Answer(enum.Enum):
    """What became of a call to a rank's port."""

    ALIVE = "accepted"
    DEAD = "refused, or accepted and cut off"  # the kernel of its host says that no process has this port
    UNKNOWN = "none in time"  # a lost packet, a full queue, a machine or a network that is gone


def call_all(addresses: Mapping[int, Address], seconds: float) -> dict[int, Answer]:
    """Call all ranks' ports at once: what each says within `seconds`."""
    return _Calls(addresses).answers(seconds, watch=False)


def watch_all(addresses: Mapping[int, Address], seconds: float) -> dict[int, Answer]:
    """As `call_all`, but stay on the line until one is dead: a kernel also accepts a call for a process that dies."""
    return _Calls(addresses).answers(seconds, watch=True)


def tell_all(addresses: Mapping[int, Address], word: bytes, seconds: float) -> None:
    """Leave a word at all ranks' ports, where it lies until they take their calls, also when this process has ended."""
    _Calls(addresses, word).answers(seconds, watch=False)


def take_calls(listener: socket.socket) -> list[socket.socket]:
    """Those that wait at a port. They must stay open: who is still on the line would take this rank for dead."""
    listener.setblocking(False)
    calls = []
    with suppress(OSError):
        while True:
            calls.append(listener.accept()[0])
    return calls


def word_of(call: socket.socket) -> bytes:
    """What the caller said, if it said something; a word is heard once."""
    call.setblocking(False)
    word = b""
    with suppress(OSError):
        while len(word) < _WORD_BYTES and (more := call.recv(_WORD_BYTES)):
            word += more
    return word


class _Calls:
    """Connections to many ports, made at the same time."""

    def __init__(self, addresses: Mapping[int, Address], word: bytes = b"") -> None:
        self._addresses, self._word = addresses, word
        self._answers = dict.fromkeys(addresses, Answer.UNKNOWN)

    def answers(self, seconds: float, watch: bool) -> dict[int, Answer]:
        deadline = monotonic() + seconds
        with ExitStack() as sockets, selectors.PollSelector() as selector:
            for rank, address in self._addresses.items():
                self._start(rank, address, selector, sockets)
            while selector.get_map() and not (watch and Answer.DEAD in self._answers.values()):
                ready = selector.select(max(0.0, deadline - monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    self._hear(key, selector, watch)
        return self._answers

    def _start(self, rank: int, address: Address, selector: selectors.BaseSelector, sockets: ExitStack) -> None:
        try:
            call = sockets.enter_context(socket.socket(_family(address[0]), socket.SOCK_STREAM))
        except OSError:  # too many open files: the rest stays unknown
            return
        call.setblocking(False)
        error = call.connect_ex(address)
        if error in (0, errno.EINPROGRESS):
            selector.register(call, selectors.EVENT_WRITE, rank)
        else:
            self._answers[rank] = _meaning(error)

    def _hear(self, key: selectors.SelectorKey, selector: selectors.BaseSelector, watch: bool) -> None:
        call = key.fileobj
        assert isinstance(call, socket.socket)
        if key.events == selectors.EVENT_READ:  # nobody ever sends: the line was cut
            answer = Answer.DEAD
        else:
            answer = _meaning(call.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        self._answers[key.data] = answer
        if self._word and answer is Answer.ALIVE:
            with suppress(OSError):
                call.send(self._word)
        if watch and answer is Answer.ALIVE:
            selector.modify(call, selectors.EVENT_READ, key.data)
        else:
            selector.unregister(call)


def _meaning(error: int) -> Answer:
    if error in (errno.ECONNREFUSED, errno.ECONNRESET):
        return Answer.DEAD
    return Answer.UNKNOWN if error else Answer.ALIVE


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _resolve(name: str) -> list[str]:
    """The addresses of a host name in the system's order of preference; none when it does not resolve."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []


def _can_bind(host: str) -> bool:
    """Whether `host` is an address of this machine."""
    try:
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def _host_of_interface(name: str) -> str:
    """Its IPv4 address if it has one, else its IPv6 address, as Gloo chooses."""
    request = struct.pack("256s", os.fsencode(name)[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            return socket.inet_ntoa(fcntl.ioctl(any_socket, _GET_INTERFACE_ADDRESS, request)[20:24])
        except OSError:
            pass
    found = next(_ipv6_hosts_of(name), None)
    if found is None:
        known = ", ".join(interface for _, interface in socket.if_nameindex())
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME names {name!r}, which is no network interface with an address on this host: "
            f"choose one of {known}, or unset the variable."
        )
    return found


def _ipv6_hosts_of(interface: str) -> Iterator[str]:
    """Addresses that are valid everywhere first; one of the link alone needs to say which link."""
    lines = [line.split() for line in _IPV6_ADDRESSES.read_text().splitlines()] if _IPV6_ADDRESSES.exists() else []
    for digits, *_, name in sorted(lines, key=lambda line: line[0].startswith(_LINK_LOCAL)):
        if name == interface:
            host = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            yield f"{host}%{name}" if digits.startswith(_LINK_LOCAL) else host
