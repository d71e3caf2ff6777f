"""The fair way to time: in turns, on a fixed number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time

import torch


def race(
    works: dict[str, Callable[[], object]],
    repeats: int,
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = thread_time,
) -> dict[str, float]:
    """The best seconds of each, in turns: a machine that slows down slows all of them. `before` is not timed.

    Seconds of this thread, not of the wall: what other processes do to a shared core is not the cost of a kernel.
    """
    best = dict.fromkeys(works, float("inf"))
    for round_ in range(repeats + 1):
        for name, work in works.items():
            before()
            started = clock()
            work()
            if round_:  # the first one compiles and touches fresh pages
                best[name] = min(best[name], clock() - started)
    return best


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Give torch, and with it the kernels, this many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
