"""Long vectors on large pages: a scan then crosses fewer borders at which the processor stops reading ahead."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

PAGE = 1 << 21  # bytes of a large page on x86-64 and, with small pages of 4 KB, on ARM
_MADV_HUGEPAGE = 14  # as <sys/mman.h> of Linux numbers it


def empty_on_large_pages(numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A flat tensor on the device of `like`. Linux is asked for large pages; whether it has any changes speed alone."""
    vector = torch.empty(numel, dtype=dtype, device=like.device)
    first, last = -(-vector.data_ptr() // PAGE) * PAGE, (vector.data_ptr() + vector.nbytes) // PAGE * PAGE
    if sys.platform == "linux" and vector.device.type == "cpu" and first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_HUGEPAGE)
    return vector
