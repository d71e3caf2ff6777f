"""Calls that end in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from oktopk.errors import CommunicationError

T = TypeVar("T")


def in_time(seconds: float, call: Callable[..., T], *arguments: Any) -> T:
    """The result of a call that may never return, or a `CommunicationError` after `seconds`.

    torch's store waits without limit for the answer of a process that is stopped, or of a machine that is gone.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(call(*arguments))
        except BaseException as error:
            outcome.set_exception(error)

    # A daemon, so that it does not hold up the end of the process either.
    threading.Thread(target=work, name="oktopk-bounded-call", daemon=True).start()
    try:
        return outcome.result(seconds)
    except FutureTimeoutError:
        if outcome.done():  # the call itself raised it
            raise
        raise CommunicationError(f"no answer in {seconds:g} s") from None
