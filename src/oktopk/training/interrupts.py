"""Signals: those that ask a run to stop are remembered, and one that comes when the launcher dies."""

from __future__ import annotations

import ctypes
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # looked up early: it may be called between fork and exec
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupts:
    """While entered, the first signal is only remembered; a second Ctrl-C raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.received = 0  # signal number, 0 for none
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread handle signals
            self._before = {number: signal.signal(number, self._remember) for number in STOPPING}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number


def die_with_parent(number: signal.Signals) -> None:
    """Ask Linux for a signal when the parent dies, were it by SIGKILL: this process must not outlive it."""
    if _PRCTL is not None:
        _PRCTL(_SET_DEATH_SIGNAL, number)
