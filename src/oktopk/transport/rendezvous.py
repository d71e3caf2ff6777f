"""How ranks meet in a store: everyone's word once all have come, or the names of those who have not."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic

from oktopk.errors import CommunicationError, PeerError
from oktopk.transport.bounded_store import BoundedStore

log = logging.getLogger("oktopk")

HINT_SECONDS = 10.0  # of waiting, until the log says for whom
_ANSWER_SECONDS = 60.0  # for a store that is alive, on a machine that may be very busy while ranks start
_LEAST_SECONDS = 0.01  # torch takes 0 and less for ever
_GAVE_UP = "gave up after "  # instead of a word, for those who come later


class Rendezvous:
    """One meeting of `ranks` (of the world, by their rank in the group) in a part of the store of its own.

    The n-th time that a rank opens something with the same ranks, it meets the n-th time of the others. The count is in
    the store, and so a restarted world begins anew with its store. torch's names cannot serve: it uses the name of a
    group again when the group has been destroyed, and Gloo then finds the dead group's addresses.
    """

    def __init__(self, store: BoundedStore, ranks: Sequence[int], rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        place = "oktopk/" + hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
        number = store.ask(lambda it: it.add(f"{place}/opened by {rank}", 1), _ANSWER_SECONDS)
        self.store = store.part(f"{place}/{number}")

    def meet(self, word: str, timeout: timedelta, duty: str) -> list[str]:
        """Every rank's word, by rank. A `PeerError` after `timeout` names who is missing, and what its `duty` is."""
        keys = [f"word/{rank}" for rank in range(len(self._ranks))]
        self.store.ask(lambda it: it.set(keys[self._rank], word), _ANSWER_SECONDS)
        absent = self._await(keys, timeout.total_seconds(), duty)
        if absent:
            raise self._give_up(keys[self._rank], absent, f"{timeout.total_seconds():g} s", duty)
        words = self.store.ask(lambda it: [it.get(key).decode() for key in keys], _ANSWER_SECONDS)
        for rank, found in enumerate(words):
            if found.startswith(_GAVE_UP):
                raise PeerError(
                    f"rank {self._name(self._rank)} came too late: rank {self._name(rank)} gave up after "
                    f"{found.removeprefix(_GAVE_UP)} (timeout=). At about the same time {duty}"
                )
        return words

    def _give_up(self, key: str, absent: Sequence[int], waited: str, duty: str) -> PeerError:
        """Say so to those who come later, and return what to raise here."""
        self.store.ask(lambda it: it.set(key, _GAVE_UP + waited), _ANSWER_SECONDS)
        return PeerError(
            f"rank {self._name(self._rank)} waited {waited} for {self._names(absent)}: {duty} If they should have, "
            "look at their logs: they may have ended, or wait for something else."
        )

    def _await(self, keys: Sequence[str], seconds: float, duty: str) -> list[int]:
        """Wait for all keys; the ranks whose key did not come."""
        deadline = monotonic() + seconds
        if not self._has_come(keys, min(HINT_SECONDS, seconds)) and seconds > HINT_SECONDS:
            absent = self._names(self._absent(keys))
            log.warning("rank %d waits for %s, for %g s at most: %s", self._rank, absent, seconds, duty)
            self._has_come(keys, deadline - monotonic())
        return self._absent(keys)

    def _has_come(self, keys: Sequence[str], seconds: float) -> bool:
        seconds = max(seconds, _LEAST_SECONDS)
        try:
            self.store.ask(lambda it: it.wait(list(keys), timedelta(seconds=seconds)), seconds + _ANSWER_SECONDS)
        except RuntimeError:
            return False
        return True

    def _absent(self, keys: Sequence[str]) -> list[int]:
        try:
            return self.store.ask(
                lambda it: [rank for rank, key in enumerate(keys) if not it.check([key])], _ANSWER_SECONDS
            )
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._name(self._rank)} lost the store of the process group while it waited for the others: "
                f"the rank or the launcher that holds it has ended, or the network has ({error})."
            ) from error

    def _names(self, ranks: Sequence[int]) -> str:
        return f"rank{'s' * (len(ranks) > 1)} " + ", ".join(map(self._name, ranks))

    def _name(self, rank: int) -> str:
        return str(rank) if self._ranks[rank] == rank else f"{rank} (rank {self._ranks[rank]} of the world)"
