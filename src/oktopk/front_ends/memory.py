"""Memory that a training loop frees in every step and wants again in the next."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from functools import cache
from pathlib import Path
from time import perf_counter

log = logging.getLogger("oktopk")

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as <malloc.h> numbers them
_MOST = 2**31 - 1  # bytes free at the end of the heap before any are given back: the largest int
_LARGE = 2**25  # bytes of a request that still comes from the heap, where it can be kept: glibc allows no more
_SMALL = 2**20  # bytes of a request that comes from the heap when memory is scarce

_SECONDS_PER_BYTE = 0.4e-9  # for the system to clear memory that a process touches first
_SHARE = 1 / 50  # of the time may go into that
_WORTH = 2**26  # bytes that are worth the look

# Operations that oneDNN, and torch in front of it, keep compiled; 1,024 each by themselves. VGG-16 needs no more.
_KEPT_COMPILED = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "32"}


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, instead of giving it back to the system; whether it does. For the whole process.

    Gradients that `zero_grad` sets to None are otherwise fresh pages in every step, and the system clears each at its
    first touch: as much time as copying all gradients.
    """
    return _tell_glibc(trim=_MOST, mmap=_LARGE)


@cache
def return_freed_memory() -> bool:
    """Let glibc give back to the system what is freed; whether it does. For the whole process.

    Batches of other lengths want activations of other sizes, and those between them leave gaps in the heap: a network
    of 27 million parameters took 1.06 GB so, and 1.26 GB as glibc does by itself.
    """
    return _tell_glibc(trim=_SMALL, mmap=_SMALL)


def return_gaps() -> bool:
    """Give back to the system, once, what is free between things in use; whether glibc could.

    What a checkpoint or a validation takes for a moment leaves gaps that later steps do not fit into.
    """
    return _is_glibc() and bool(ctypes.CDLL(None).malloc_trim(0))


def keep_fewer_compiled() -> None:
    """Let oneDNN keep fewer operations compiled; before its first use, for the whole process, unless set already.

    It compiles an operation for every shape it meets, and batches of many lengths fill its memory with shapes that do
    not come again: 250 MB after 40 steps of the paper's speech network, and more with every step.
    """
    for name, operations in _KEPT_COMPILED.items():
        os.environ.setdefault(name, operations)


class HeapGaps:
    """Gives gaps in the heap back as soon as that is cheap, so that batches of many lengths do not pile them up.

    Steps want their memory again, and the system clears it at its first touch. So gaps go back when taking anew all
    that was added since the last time would cost less than a fiftieth of the time that passed.
    """

    def __init__(self) -> None:
        self._begin()

    def step(self) -> None:
        """After every step."""
        grown = resident_memory() - self._resident
        if grown > _WORTH and grown * _SECONDS_PER_BYTE < _SHARE * (perf_counter() - self._since):
            self.give_back()

    def give_back(self) -> None:
        """Now, whatever it costs."""
        return_gaps()
        self._begin()

    def _begin(self) -> None:
        self._resident, self._since = resident_memory(), perf_counter()


def resident_memory() -> int:
    """Bytes of memory that this process holds now; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _tell_glibc(trim: int, mmap: int) -> bool:
    if not _is_glibc():
        log.debug("what becomes of freed memory can be told to glibc only, and this is another C library.")
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_TRIM_THRESHOLD, trim) and mallopt(_MMAP_THRESHOLD, mmap))


@cache
def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
