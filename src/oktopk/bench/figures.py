"""A measured number beside what it must and should reach, and the fair way to time."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import thread_time
from typing import Any

import torch


@dataclass(frozen=True)
class Figure:
    """One number and its targets. Without targets it only informs."""

    key: str
    text: str
    measured: float
    must: float | None = None
    aim: float | None = None
    higher: bool = False  # larger is better

    @property
    def ok(self) -> bool:
        """Whether it reaches what it must."""
        return self._reaches(self.must)

    @property
    def reaches_aim(self) -> bool:
        return self._reaches(self.aim)

    def without_targets(self) -> Figure:
        return replace(self, must=None, aim=None)

    def to_json(self) -> dict[str, Any]:
        record = {"measured": self.measured, "must": self.must, "aim": self.aim}
        return {name: value for name, value in record.items() if value is not None} | {"ok": self.ok}

    def _reaches(self, target: float | None) -> bool:
        return target is None or (self.measured >= target if self.higher else self.measured <= target)


def race(
    works: dict[str, Callable[[], object]], repeats: int, before: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """The best seconds of each, in turns: a machine that slows down slows all of them. `before` is not timed.

    Seconds of this thread, not of the wall: what other processes do to a shared core is not the cost of a kernel.
    """
    best = dict.fromkeys(works, float("inf"))
    for round_ in range(repeats + 1):
        for name, work in works.items():
            before()
            started = thread_time()
            work()
            if round_:  # the first one compiles and touches fresh pages
                best[name] = min(best[name], thread_time() - started)
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


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    return {"processor": _processor(), "torch": torch.__version__, "python": platform.python_version()}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
