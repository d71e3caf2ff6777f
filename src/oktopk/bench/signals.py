"""Signals that end a benchmark: when they may, and that nothing they interrupt stays behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that `finally` runs."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    with _handlers({signal.SIGTERM: leave, signal.SIGHUP: leave}):
        yield


@contextmanager
def signals_ignored() -> Iterator[None]:
    """A second Ctrl-C must not interrupt the clean-up."""
    with _handlers(dict.fromkeys(ENDING, signal.SIG_IGN)):
        yield


@contextmanager
def signals_held() -> Iterator[None]:
    """What comes meanwhile is heard when the block is left."""
    # Handlers, not a mask: a mask holds for one thread, and the kernel would hand the signal to another.
    held: list[int] = []
    with _handlers(dict.fromkeys(ENDING, lambda number, frame: held.append(number))):
        yield
    for number in held:
        signal.raise_signal(number)


@contextmanager
def _handlers(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    previous = {}
    try:
        for number, handler in handlers.items():
            previous[number] = signal.signal(number, handler)
    except ValueError:  # only the main thread may set handlers; elsewhere signals are not ours to handle
        previous = {}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
