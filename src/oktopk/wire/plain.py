"""Rice-coded gaps in numpy: the specification of `compiled`, and its stand-in without numba."""

from __future__ import annotations

import numpy as np


def quotient_sums(indices: np.ndarray, remainder: int) -> list[int]:
    """What the quotients add up to with `remainder`, + 1 and + 2 bits of remainder; -1 if indices do not ascend."""
    gaps = _gaps(indices)
    if (gaps < 0).any():
        return [-1, -1, -1]
    return [int((gaps >> (remainder + more)).sum()) for more in range(3)]


def rice_encode(indices: np.ndarray, remainder: int, out: np.ndarray) -> None:
    """First the remainders, `remainder` bits each; then each quotient q as q clear bits and a set one."""
    gaps = _gaps(indices)
    low = (gaps[:, None] >> np.arange(remainder)) & 1
    head = np.packbits(low.astype(np.uint8).ravel(), bitorder="little")
    ends = np.cumsum((gaps >> remainder) + 1) - 1
    bits = np.zeros(8 * (out.size - head.size), np.uint8)
    bits[ends] = 1
    out[: head.size] = head
    out[head.size :] = np.packbits(bits, bitorder="little")


def rice_decode(data: np.ndarray, remainder: int, first: int, numel: int, indices: np.ndarray) -> bool:
    """Undo rice_encode into `indices`; False, with `indices` undefined, unless all is in order."""
    gaps = indices.size - 1
    head = -(-gaps * remainder // 8)
    bits = np.unpackbits(data[:head], bitorder="little")
    ends = np.flatnonzero(np.unpackbits(data[head:], bitorder="little"))
    if bits[gaps * remainder :].any() or ends.size != gaps or (data.size > head and data[-1] == 0):
        return False
    low = (bits[: gaps * remainder].reshape(gaps, remainder).astype(np.int64) << np.arange(remainder)).sum(1)
    high = np.diff(ends, prepend=-1) - 1
    if gaps and int(high.max()) > numel >> remainder:
        return False
    places = first + np.cumsum((high << remainder) + low + 1)
    if gaps and not 0 < places[-1] < numel:
        return False
    indices[0], indices[1:] = first, places
    return True


def _gaps(indices: np.ndarray) -> np.ndarray:
    gaps: np.ndarray = np.diff(indices.astype(np.int64)) - 1
    return gaps
