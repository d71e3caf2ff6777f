"""Arrays over the memory of CPU tensors, and keys: bit patterns without their sign, ordered as magnitudes are."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import torch
from torch import Tensor

from oktopk.types import Difference, Source, SparseVector

BITS = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32), 8: (torch.int64, np.uint64)}
FLOATS = (torch.float32, torch.float64)  # what the loops calculate in
NEVER = np.uint64(2**64 - 1)  # a key that none reaches

_FLOAT32, _UINT32 = struct.Struct("=f"), struct.Struct("=I")


def as_numpy(x: Tensor) -> np.ndarray:
    return x.detach().contiguous().numpy()


def bits_of(x: Tensor) -> np.ndarray:
    """The bit patterns of x, in the same memory when it is contiguous."""
    signed, unsigned = BITS[x.itemsize]
    return x.detach().contiguous().view(signed).numpy().view(unsigned)


def is_plain(difference: Difference) -> bool:
    """Whether the loops can work on it."""
    vectors = (difference.shared, *difference.own)
    return difference.dtype in FLOATS and all(v.dtype == difference.dtype and v.is_contiguous() for v in vectors)


def vector_of(source: Source | SparseVector, indices: np.ndarray, bits: np.ndarray) -> SparseVector:
    """Entries of `source`, from their indices and bit patterns."""
    if isinstance(source, SparseVector):
        dtype, numel = source.values.dtype, source.numel
    else:
        dtype, numel = source.dtype, source.numel()
    values = torch.from_numpy(bits).view(BITS[dtype.itemsize][0]).view(dtype)
    return SparseVector(torch.from_numpy(indices), values, numel)


def key_of(threshold: float, dtype: torch.dtype) -> np.uint64:
    """The smallest key whose magnitude reaches `threshold`, which is rounded to `dtype` first; never that of zero."""
    if dtype != torch.float32:
        rounded = torch.tensor([threshold], dtype=dtype)
        return np.uint64(1) if bool(rounded[0] <= 0) else np.uint64(bits_of(rounded)[0])
    number = ctypes.c_float(threshold)  # as C rounds, past the largest to infinity, in a tenth of a tensor's time
    return np.uint64(1) if number.value <= 0 else np.uint64(_UINT32.unpack(number)[0])


def magnitude_of(key: int, dtype: torch.dtype) -> float:
    if dtype != torch.float32:
        return float(torch.tensor([key], dtype=BITS[dtype.itemsize][0]).view(dtype)[0])
    number: float = _FLOAT32.unpack(_UINT32.pack(key))[0]
    return number
