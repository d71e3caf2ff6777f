"""A store whose calls end in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from copy import copy
from queue import SimpleQueue
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from oktopk.errors import CommunicationError

T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]


class BoundedStore:
    """torch's store waits without limit for the answer of a process that is stopped, or of a machine that is gone.

    So a thread of its own asks, and the caller goes on without it when the time is over. After that the store is lost:
    the thread never comes back. It is there from the start, because Python 3.12 starts no thread while it exits.
    """

    def __init__(self, open_store: Callable[[], Store], seconds: float) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name="oktopk-store", daemon=True).start()
        try:
            self.inner = self._call(open_store, seconds)
        except BaseException:
            self.close()
            raise

    def part(self, prefix: str) -> BoundedStore:
        """The keys that begin with `prefix`."""
        part = copy(self)
        part.inner = PrefixStore(prefix, self.inner)
        return part

    def ask(self, question: Callable[[Store], T], seconds: float) -> T:
        """What `question(store)` returns; a `CommunicationError` when that takes longer than `seconds`."""
        return self._call(lambda: question(self.inner), seconds)

    def close(self) -> None:
        """End the thread, of all parts, after the last question."""
        self._jobs.put(None)

    def _call(self, call: Callable[[], T], seconds: float) -> T:
        outcome: Future[T] = Future()
        self._jobs.put((outcome, call))
        try:
            return outcome.result(seconds)
        except FutureTimeoutError:
            if outcome.done():  # the call itself raised it
                raise
            raise CommunicationError(f"the store did not answer in {seconds:g} s") from None


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        answer(*job)
        del job  # it may hold whoever asked


def answer(outcome: Future[Any], call: Callable[[], Any]) -> None:
    """Let a future have what a call returns, or raises."""
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(error)
