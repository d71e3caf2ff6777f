"""Threads for the scans: as many as torch may use here, none when it may use one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import torch

from oktopk.kernels.cpu_sizes import WORD

GRAIN = 1 << 20  # entries that are worth a thread; starting one costs about 50 microseconds

T = TypeVar("T")


class Team:
    """Threads that compiled loops, which release the interpreter, can really share. They start when first needed."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._size = 1

    def stretches(self, numel: int) -> list[tuple[int, int]]:
        """Contiguous (start, stop), one per thread; only one when torch has one thread or there is little to do."""
        parts = max(1, min(torch.get_num_threads(), numel // GRAIN))
        borders = [numel * part // parts // WORD * WORD for part in range(parts)] + [numel]
        return list(pairwise(borders))

    def run(self, numel: int, work: Callable[[int, int], T]) -> list[T]:
        """work(start, stop) of every stretch, in order."""
        return self.each(self.stretches(numel), work)

    def each(self, stretches: list[tuple[int, int]], work: Callable[[int, int], T]) -> list[T]:
        if len(stretches) == 1:
            return [work(*stretches[0])]
        pool = self._threads(len(stretches))
        # Submitting all but the first keeps this thread working instead of waiting.
        others = [pool.submit(work, *stretch) for stretch in stretches[1:]]
        first = work(*stretches[0])
        return [first, *(other.result() for other in others)]

    def _threads(self, count: int) -> ThreadPoolExecutor:
        if self._pool is None or self._size < count:
            self._pool, self._size = ThreadPoolExecutor(count - 1, thread_name_prefix="oktopk-kernels"), count
        return self._pool
