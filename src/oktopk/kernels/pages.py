"""Long vectors on large pages: a scan then crosses fewer borders at which the processor stops reading ahead."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = 1 << 21  # bytes of a large page on x86-64 and, with small pages of 4 KB, on ARM
_MADV_HUGEPAGE = 14  # as <sys/mman.h> of Linux numbers it


def cat_on_large_pages(pieces: Sequence[Tensor]) -> Tensor:
    """They as one flat tensor. Linux is asked for large pages; whether it has any changes speed alone."""
    if pieces[0].device.type != "cpu":
        return torch.cat(list(pieces))
    vector = torch.empty(sum(piece.numel() for piece in pieces), dtype=pieces[0].dtype)
    first, last = -(-vector.data_ptr() // PAGE) * PAGE, (vector.data_ptr() + vector.nbytes) // PAGE * PAGE
    if sys.platform == "linux" and first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_HUGEPAGE)
    return torch.cat(list(pieces), out=vector)
