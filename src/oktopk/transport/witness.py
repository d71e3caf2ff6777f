"""Who is to blame when a collective fails.

A backend says that a connection broke, not whose. So each rank listens on a port that it never answers: as long as it
lives, the kernel accepts connections there, however busy it is; when it dies, the kernel refuses or resets them. A rank
that fails, or finds out who died, writes that down in the store of the process group before it leaves, and the first
note is what all others report.
"""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Iterable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from oktopk.transport.base import Fault

REACH_SECONDS = 1.0  # to connect to a living rank, or to learn that a connection was to a dying one
STORE_SECONDS = 2.0
LINGER_SECONDS = 3.0
VANISHED = "it vanished (killed, out of memory, its machine gone) or closed its reducer early"
LATE = "it did not take part in time: it is stuck, or much slower than the others"


class Witness:
    """One rank's view of who is alive."""

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int, holds_store: bool = False) -> None:
        self._rank, self._world_size, self._holds_store = rank, world_size, holds_store
        self._listener: socket.socket | None = None
        self._is_store_lost = False  # with the rank that held it
        if world_size == 1:
            return
        store: Any = dist.distributed_c10d._get_default_store()
        own_address = _own_address(store)
        # A connection of its own: another thread may be waiting on the shared one.
        self._store = PrefixStore(f"oktopk/{group.group_name}", store.clone() if hasattr(store, "clone") else store)
        self._listener = socket.create_server((own_address, 0), backlog=world_size + 8)
        self._store.set(f"address/{rank}", json.dumps([own_address, self._listener.getsockname()[1]]))
        self._addresses: list[tuple[str, int]] = [
            json.loads(self._store.get(f"address/{peer}")) for peer in range(world_size)
        ]
        if hasattr(store, "clone"):
            self._store.set_timeout(timedelta(seconds=STORE_SECONDS))

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def note(self, fault: Fault) -> None:
        """Let peers read it, unless another note was first."""
        if self._world_size > 1 and not self._is_store_lost:
            try:
                self._store.compare_set("fault", "", json.dumps(asdict(fault)))
            except RuntimeError:
                self._is_store_lost = True  # peers find that out as we did

    def linger(self, fault: Fault) -> None:
        """After leaving: the rank that holds the store waits until the others have read the note in it."""
        if self._world_size == 1 or self._is_store_lost:
            return
        others = [f"left/{peer}" for peer in range(self._world_size) if peer not in (self._rank, fault.rank)]
        try:
            self._store.set(f"left/{self._rank}", "")
            if self._holds_store and others:
                self._store.wait(others, timedelta(seconds=LINGER_SECONDS))
        except RuntimeError:
            return  # it has waited long enough, or the store is gone

    def find(self) -> Fault | None:
        """Who failed, by its own note or another's, or who is dead."""
        if self._world_size == 1:
            return None
        noted = self._read()
        if noted is not None:
            return noted
        dead = self._find_dead()
        if dead:
            # One of them may have left because it saw the other die; then it has said so before.
            return self._read() or Fault(dead[0], VANISHED)
        return None

    def find_late(self) -> Fault | None:
        """When everyone is alive, someone did not come: whoever does not report a failed collective too."""
        if self._world_size == 1:
            return None
        keys = [f"waiting/{peer}" for peer in range(self._world_size)]
        try:
            self._store.set(keys[self._rank], "")
            self._store.wait(keys, timedelta(seconds=STORE_SECONDS))
        except RuntimeError:
            late = self._absent(keys)
            return self._read() or (Fault(late[0], LATE) if late else None)
        return self._read()

    def _read(self) -> Fault | None:
        if self._is_store_lost:
            return None
        try:
            return Fault(**json.loads(self._store.get("fault"))) if self._store.check(["fault"]) else None
        except RuntimeError:
            self._is_store_lost = True
            return None

    def _find_dead(self) -> list[int]:
        """Ranks whose port is closed, or closes while we look."""
        peers = [peer for peer in range(self._world_size) if peer != self._rank]
        calls = {peer: _call(self._addresses[peer]) for peer in peers}
        try:
            refused = [peer for peer, call in calls.items() if call is None]
            return refused or _closing({peer: call for peer, call in calls.items() if call is not None})
        finally:
            for call in calls.values():
                if call is not None:
                    call.close()

    def _absent(self, keys: Iterable[str]) -> list[int]:
        try:
            return [peer for peer, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError:
            return []


def _own_address(store: Store) -> str:
    """The address of this host on the network that leads to the store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return socket.gethostbyname(socket.gethostname())
    family, kind, protocol, _, target = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing: a datagram socket only looks up the route
        return str(probe.getsockname()[0])


def _call(address: tuple[str, int]) -> socket.socket | None:
    try:
        return socket.create_connection((address[0], address[1]), timeout=REACH_SECONDS)
    except OSError:
        return None


def _closing(calls: dict[int, socket.socket]) -> list[int]:
    """Which of these connections end soon: the kernel may have accepted one for a process that was just dying."""
    with selectors.DefaultSelector() as selector:
        for peer, call in calls.items():
            selector.register(call, selectors.EVENT_READ, peer)
        return sorted(key.data for key, _ in selector.select(REACH_SECONDS))
