"""Turns: where more ranks share a machine than it has cores, as many compute at once as there are cores.

Ranks that a kernel switches between every few milliseconds throw each other's weights out of the caches, and nobody is
done earlier for it: a step ends when the last of them has finished.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_VARIABLE = "OKTOPK_TURNS"  # a folder, and how many take turns in it at once


class Turns:
    """Whose turn it is. A rank must not wait for another one while it has the turn."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path  # None: everyone computes when they like

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the turn, have it, and hand it on; the system takes it from a process that dies."""
        if self._path is None:
            yield
            return
        with open(self._path, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def turn_variables(folder: Path, workers: int, cores: int | None = None) -> dict[str, str]:
    """What workers of one machine are told, in their environment, if they are more than its cores."""
    cores = cores or len(os.sched_getaffinity(0))
    return {_VARIABLE: f"{cores}:{folder}"} if workers > cores else {}


def find_turns(rank: int, environ: Mapping[str, str] = os.environ) -> Turns:
    """The turns that this rank takes part in: ranks are dealt out to cores, and each core serves one at a time."""
    if _VARIABLE not in environ:
        return Turns()
    at_once, _, folder = environ[_VARIABLE].partition(":")
    return Turns(Path(folder) / f"turn-{rank % int(at_once)}")
