"""Memory that a training loop frees in every step and wants again in the next."""

from __future__ import annotations

import ctypes
import logging
import platform
from functools import cache

log = logging.getLogger("oktopk")

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as <malloc.h> numbers them
_MOST = 2**31 - 1  # bytes free at the end of the heap before any are given back: the largest int
_LARGE = 2**25  # bytes of a request that still comes from the heap, where it can be kept: glibc allows no more


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, instead of giving it back to the system; whether it does. For the whole process.

    Gradients that `zero_grad` sets to None are otherwise fresh pages in every step, and the system clears each at its
    first touch: as much time as copying all gradients.
    """
    if platform.libc_ver()[0] != "glibc":
        log.debug("freed memory is kept by glibc only, and this is another C library.")
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_TRIM_THRESHOLD, _MOST) and mallopt(_MMAP_THRESHOLD, _LARGE))
