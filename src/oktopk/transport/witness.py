"""Who is to blame when a collective fails.

A backend says that a connection broke, not whose. So each rank listens on a port that it never answers: as long as it
lives, the kernel accepts connections there, however busy it is; when it dies, the kernel refuses or resets them. A rank
that fails, or finds out who died, writes that down in the store of the process group before it leaves, and the first
note is what all others report. It also leaves its note at their ports: the store may be gone before they look.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from socket import socket
from time import monotonic
from typing import TypeVar

from torch._C._distributed_c10d import Store

from oktopk.transport.addresses import (
    Address,
    Answer,
    call_all,
    listen,
    own_host,
    take_calls,
    tell_all,
    watch_all,
    word_of,
)
from oktopk.transport.base import Fault
from oktopk.transport.bounded_store import BoundedStore
from oktopk.transport.links import DUTY
from oktopk.transport.rendezvous import Rendezvous

# All waits after a failed collective together stay below the 5 seconds of docs/resuming-and-faults.md.
CALL_SECONDS = 1.0  # for all peers together to answer, and for a dying one to be cut off
TELL_SECONDS = 0.25  # for all peers together to be left a note
STORE_SECONDS = 1.0  # for the store to answer; after that it counts as lost
REPORT_SECONDS = 2.0  # for the others to find out too: more than one round of calls
LINGER_SECONDS = 1.5  # at least, for the others to read the store of a rank that leaves

VANISHED = "it vanished (killed, out of memory, its machine gone) or closed its reducer early"
LATE = "it did not take part in time: it is stuck, or much slower than the others"
SILENT = "it does not answer: its machine or its network is gone, or it is stuck"
HOLDS_SILENT_STORE = "the store of the process group, which it or its launcher holds, does not answer: it is stuck"

T = TypeVar("T")


class Witness:
    """One rank's view of who is alive. Opening it waits until every rank has opened its own."""

    def __init__(
        self, store: BoundedStore, ranks: Sequence[int], rank: int, timeout: timedelta, store_holder: int | None = None
    ) -> None:
        """`ranks` of the world share `store`, which is in the process of the `store_holder`-th of them.

        It closes `store` when it is closed itself.
        """
        self._rank, self._world_size, self._store_holder = rank, len(ranks), store_holder
        self._is_store_lost = False  # with the process that held it
        self._answers: dict[int, Answer] = {}  # to the last calls
        self._asked_at: float | None = None  # when it was first looked for who is to blame
        self._calls: list[socket] = []  # that were taken
        host = own_host()
        # Calls are taken off the queue in the end only: there is room for each peer's first and last one, and its note.
        self._listener = listen(host, backlog=3 * len(ranks) + 8)
        try:
            rendezvous = Rendezvous(store, ranks, rank)
            words = rendezvous.meet(json.dumps([host, self._listener.getsockname()[1]]), timeout, DUTY)
        except BaseException:
            self._listener.close()
            raise
        self.store = rendezvous.store
        self._reachable = self._reach(words)

    def _reach(self, words: Sequence[str]) -> dict[int, Address]:
        """A refusal speaks of death only where calls got through before: 127.0.1.1 of another host is nobody here."""
        addresses: dict[int, Address] = {
            peer: (host, port) for peer, (host, port) in enumerate(map(json.loads, words)) if peer != self._rank
        }
        answers = call_all(addresses, CALL_SECONDS)
        return {peer: address for peer, address in addresses.items() if answers[peer] is Answer.ALIVE}

    def close(self) -> None:
        for call in (self._listener, *self._calls):
            call.close()
        self.store.close()

    def note(self, fault: Fault) -> None:
        """Let peers read it, unless another note was first."""
        text = json.dumps(asdict(fault))
        self._ask_store(lambda it: it.compare_set("fault", "", text))
        others = {peer: address for peer, address in self._reachable.items() if peer != fault.rank}
        tell_all(others, text.encode(), TELL_SECONDS)

    def linger(self, fault: Fault) -> None:
        """After leaving: the rank that holds the store waits until the others have read the note in it.

        It found the dead at once, and leaves others the time that it did not need itself: on a crowded machine they may
        only just begin to ask, and without the store they could not tell who died from who left.
        """
        others = [f"left/{peer}" for peer in range(self._world_size) if peer not in (self._rank, fault.rank)]
        self._ask_store(lambda it: it.set(f"left/{self._rank}", ""))
        if self._store_holder == self._rank and others:
            needed = monotonic() - self._asked_at if self._asked_at is not None else 0.0
            self._wait_for(others, LINGER_SECONDS + max(0.0, CALL_SECONDS + REPORT_SECONDS - needed))

    def find(self) -> Fault | None:
        """Who failed, by its own note or another's, or who is dead."""
        self._asked_at = self._asked_at or monotonic()
        noted = self._read()
        if noted is not None:
            return noted
        self._answers = watch_all(self._reachable, CALL_SECONDS)
        dead = self._peers_that(Answer.DEAD)
        if dead:
            # One of them may have left because it saw the other die; then it has said so before.
            return self._read() or self._heard() or Fault(dead[0], VANISHED)
        return None

    def find_late(self) -> Fault | None:
        """After `find` found nobody: whoever does not report a failed collective as we do."""
        keys = [f"waiting/{peer}" for peer in range(self._world_size)]
        self._ask_store(lambda it: it.set(keys[self._rank], ""))
        self._wait_for(keys, REPORT_SECONDS)
        noted = self._read()
        late = self._ask_store(lambda it: [peer for peer, key in enumerate(keys) if not it.check([key])])
        if late is None:
            return self._suspect_without_store()
        if noted is not None or not late:
            return noted
        alive = self._peers_that(Answer.ALIVE)
        silent = [peer for peer in late if peer not in alive]
        return Fault(silent[0], SILENT) if silent else Fault(late[0], LATE)

    def _suspect_without_store(self) -> Fault | None:
        heard = self._heard()
        if heard is not None:
            return heard
        silent = self._peers_that(Answer.UNKNOWN)
        if silent:
            return Fault(silent[0], SILENT)
        holder = self._store_holder
        return Fault(holder, HOLDS_SILENT_STORE) if holder is not None and holder != self._rank else None

    def _peers_that(self, answer: Answer) -> list[int]:
        return sorted(peer for peer, given in self._answers.items() if given is answer)

    def _read(self) -> Fault | None:
        text = self._ask_store(lambda it: it.get("fault") if it.check(["fault"]) else None)
        return Fault(**json.loads(text)) if text else None

    def _heard(self) -> Fault | None:
        """What a rank that has left since said to this one."""
        self._calls += take_calls(self._listener)
        for word in filter(None, map(word_of, self._calls)):
            with suppress(ValueError, TypeError):  # whoever may call here
                fault = Fault(**json.loads(word))
                if fault.rank in range(self._world_size):
                    return fault
        return None

    def _wait_for(self, keys: Sequence[str], seconds: float) -> None:
        """Until all are there, or `seconds` have passed."""
        limit = timedelta(seconds=seconds)
        with suppress(RuntimeError):
            if not self._is_store_lost:
                self.store.ask(lambda it: it.wait(list(keys), limit), seconds + STORE_SECONDS)

    def _ask_store(self, question: Callable[[Store], T]) -> T | None:
        """Its answer; None when it is lost, with the process that held it, or from now on."""
        try:
            return None if self._is_store_lost else self.store.ask(question, STORE_SECONDS)
        except RuntimeError:
            self._is_store_lost = True
            return None
