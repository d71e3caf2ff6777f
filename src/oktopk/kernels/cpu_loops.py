"""The compiled scans behind `CpuKernels`: adding, comparing, choosing. Arrays are one-dimensional and contiguous.

Selection works on bit patterns (uint16, uint32 or uint64 views): without their sign, floats are ordered as their bits
are, so one loop serves every dtype. A "key" is such a pattern without its sign, as uint64; key 1 is the smallest
magnitude that is not zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oktopk.kernels.compiling import jit, jit_reordered, leading_zeros, population, trailing_zeros
from oktopk.kernels.cpu_simd import add_word, add_word_past, array_at, mask_at_least, prefetch
from oktopk.kernels.cpu_sizes import DIGIT, LINE, TILE, WORD

STREAMS = 8  # places a plain scan reads at the same time
UNASKED = 4  # indices of a word written without looking how many it has
FAR = 1024  # entries that a scan asks for in advance

_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@jit
def any_at_least(bits: Any, key: Any) -> Any:
    """Whether any key reaches `key`. Reads STREAMS places at once, which keeps more of the memory busy."""
    stretch = bits.size // (STREAMS * WORD) * WORD
    for start in range(0, stretch, TILE):
        found = np.uint64(0)
        for at in range(start, min(start + TILE, stretch), WORD):
            for stream in range(STREAMS):
                found |= mask_at_least(bits, at + stream * stretch, key)
        if found:
            return True
    magnitude, found = magnitude_mask(bits), np.uint64(0)
    for at in range(STREAMS * stretch, bits.size):
        found |= np.uint64(bits[at] & magnitude >= key)
    return found > 0


@jit
def count_at_least(bits: Any, key: Any) -> Any:
    """How many keys reach `key`."""
    whole = bits.size - bits.size % WORD
    count = 0
    for at in range(0, whole, WORD):
        count += population(mask_at_least(bits, at, key))
    magnitude = magnitude_mask(bits)
    for at in range(whole, bits.size):
        count += bits[at] & magnitude >= key
    return count


@jit_reordered
def accumulate(residual: Any, grad: Any) -> Any:
    """residual += grad; the sum of squares of the result."""
    total = 0.0
    for i in range(residual.size):
        value = residual[i] + grad[i]
        residual[i] = value
        total += np.float64(value) * np.float64(value)
    return total


@jit
def compact(bits: Any, start: int, stop: int, key: Any, indices: Any, values: Any, count: int) -> Any:
    """Append the entries of bits[start:stop] whose key reaches `key`.

    Returns the new count and where it stopped: before `stop` when another word of entries might not fit.
    """
    room = indices.size - WORD
    at = start
    while at < stop and count <= room:
        first, end = count, min(at + TILE, stop)
        while at < end and count <= room:
            length = min(WORD, end - at)
            for line in range(FAR, FAR + WORD, LINE):
                prefetch(bits, at + line)
            word = mask_at_least(bits, at, key) if length == WORD else tail_mask(bits, at, end, key)
            count = append_places(word, at, indices, count)
            at += length
        for i in range(first, count):
            values[i] = bits[indices[i]]
    return count, at


@jit
def add_compact(
    out: Any, residual: Any, addresses: Any, ends: Any, start: int, stop: int, key: Any, indices: Any, values: Any,
    count: int, past: bool,
) -> Any:  # fmt: skip
    """out = residual + pieces, and `compact` of the result, from start up to stop or to where room runs out.

    Piece p lies at addresses[p] and goes up to ends[p]. `out` may be `residual`; if it is not, and begins on a cache
    line, `past` writes it past the caches. Returns the sum of squares, the new count and where it stopped.
    """
    room, at, total, piece = indices.size - WORD, start, 0.0, 0
    while at < stop and count <= room:
        while ends[piece] <= at:
            piece += 1
        base = ends[piece - 1] if piece else 0
        grad = array_at(addresses[piece], ends[piece] - base, residual)
        more, count, at = _add_piece(
            out, residual, grad, base, at, min(ends[piece], stop), key, indices, values, count, past
        )
        total += more
    return total, count, at


@jit
def _add_piece(
    out: Any, residual: Any, grad: Any, base: int, start: int, stop: int, key: Any, indices: Any, values: Any,
    count: int, past: bool,
) -> Any:  # fmt: skip
    """`add_compact` of a piece. Word by word: while one is compared the next is on its way from memory."""
    room, at, total = indices.size - WORD, start, 0.0
    bits, sums = out.view(values.dtype), values.view(out.dtype)
    while at < stop and count <= room:
        first, end = count, min(at - at % TILE + TILE, stop)
        while at < end and count <= room:
            for line in range(FAR, FAR + WORD, LINE):
                prefetch(residual, at + line)
                prefetch(grad, at - base + line)
            if at % WORD or end - at < WORD:
                # To the border of a word, where a cache line begins too.
                length = min(WORD - at % WORD, end - at)
                more = _add_few(out, residual, grad, base, at, at + length)
                word = tail_mask(bits, at, at + length, key)
            elif past:
                length = WORD
                word, more = add_word_past(out, at, residual, grad, at - base, key)
            else:
                length = WORD
                word, more = add_word(out, at, residual, grad, at - base, key)
            total += more
            count = append_places(word, at, indices, count)
            at += length
        if past:  # what was written is far away
            for i in range(first, count):
                sums[i] = residual[indices[i]] + grad[indices[i] - base]
        else:
            for i in range(first, count):
                sums[i] = out[indices[i]]
    return total, count, at


@jit
def _add_few(out: Any, residual: Any, grad: Any, base: int, start: int, stop: int) -> Any:
    total = 0.0
    for i in range(start, stop):
        value = residual[i] + grad[i - base]
        out[i] = value
        total += np.float64(value) * np.float64(value)
    return total


@jit
def append_places(word: Any, base: int, indices: Any, count: int) -> Any:
    """Write base + i for every set bit i. The first ones go out unasked: a branch on each would be a coin toss."""
    found = population(word)
    for i in range(UNASKED):
        indices[count + i] = base + trailing_zeros(word)
        word &= word - _ONE
    for i in range(UNASKED, found):
        indices[count + i] = base + trailing_zeros(word)
        word &= word - _ONE
    return count + found


@jit
def tail_mask(bits: Any, start: int, stop: int, key: Any) -> Any:
    word, magnitude = np.uint64(0), magnitude_mask(bits)
    for i in range(stop - start):
        word |= np.uint64(bits[start + i] & magnitude >= key) << np.uint64(i)
    return word


@jit
def compact_largest(bits: Any, key: Any, k: int, indices: Any, values: Any, counters: Any) -> Any:
    """As `compact` of all, but when room runs out only the k largest so far are kept. Returns how many there are.

    What comes later must then exceed the smallest of those, since of equal entries the first win: nothing that belongs
    to the k largest is lost.
    """
    count, at = compact(bits, 0, bits.size, key, indices, values, 0)
    while at < bits.size:
        count, kth = keep_largest(indices, values, count, k, counters, indices, values)
        count, at = compact(bits, at, bits.size, kth + _ONE, indices, values, count)
    return count


@jit
def add_compact_largest(
    out: Any, residual: Any, addresses: Any, ends: Any, key: Any, k: int, indices: Any, values: Any, counters: Any,
    past: bool,
) -> Any:  # fmt: skip
    """As `add_compact` of all, with the rule of `compact_largest`. Returns the sum of squares and the count."""
    size = out.size
    total, count, at = add_compact(out, residual, addresses, ends, 0, size, key, indices, values, 0, past)
    while at < size:
        count, kth = keep_largest(indices, values, count, k, counters, indices, values)
        more, count, at = add_compact(
            out, residual, addresses, ends, at, size, kth + _ONE, indices, values, count, past
        )
        total += more
    return total, count


@jit
def keep_largest(indices: Any, values: Any, count: int, k: int, counters: Any, to_indices: Any, to_values: Any) -> Any:
    """Copy the k largest of the first `count` entries to the front of to_indices and to_values, ties in given order.

    Returns how many there are and the key of the smallest. Source and target may be the same.
    """
    if count == 0 or k < 1:
        return 0, np.uint64(0)
    kth, ties = kth_largest(values, count, min(k, count), counters)
    kept, magnitude = 0, magnitude_mask(values)
    for i in range(count):
        key = values[i] & magnitude
        tied = key == kth
        to_indices[kept] = indices[i]
        to_values[kept] = values[i]
        kept += (key > kth) | (tied & (ties > 0))
        ties -= tied
        if kept == k:
            break
    return kept, kth


@jit
def kth_largest(values: Any, count: int, k: int, counters: Any) -> Any:
    """The k-th largest key of values[:count], and how many of the k largest equal it. A radix search, no sort."""
    magnitude = magnitude_mask(values)
    low, high = magnitude, np.uint64(0)
    for i in range(count):
        key = values[i] & magnitude
        low, high = min(low, key), max(high, key)
    shift = 64 - leading_zeros(low ^ high)  # above this bit all keys agree
    prefix = high >> np.uint64(shift)
    while shift > 0:
        width = min(DIGIT, shift)
        shift -= width
        _count_digits(values, count, prefix, shift, width, counters)
        digit = (1 << width) - 1
        while counters[digit] < k:
            k -= counters[digit]
            digit -= 1
        prefix = (prefix << np.uint64(width)) | np.uint64(digit)
    return prefix, k


@jit
def _count_digits(values: Any, count: int, prefix: Any, shift: int, width: int, counters: Any) -> Any:
    magnitude, digits = magnitude_mask(values), np.uint64((1 << width) - 1)
    counters[: 1 << width] = 0
    for i in range(count):
        shifted = (values[i] & magnitude) >> np.uint64(shift)
        if shifted >> np.uint64(width) == prefix:
            counters[shifted & digits] += 1


@jit
def magnitude_mask(bits: Any) -> Any:
    """All bits of an entry but its sign."""
    return _ALL >> np.uint64(65 - 8 * bits.itemsize)
