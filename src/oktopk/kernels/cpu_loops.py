"""The compiled scans behind `CpuKernels`: adding, comparing, choosing. Arrays are one-dimensional and contiguous.

Selection works on bit patterns (uint16, uint32 or uint64 views): without their sign, floats are ordered as their bits
are, so one loop serves every dtype. A "key" is such a pattern without its sign, as uint64; key 1 is the smallest
magnitude that is not zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oktopk.kernels.compiling import jit, jit_reordered, leading_zeros, population, trailing_zeros
from oktopk.kernels.cpu_simd import (
    add_word,
    add_word_past,
    array_at,
    compare_stripes,
    mask_at_least,
    prefetch,
    subtract_word,
)
from oktopk.kernels.cpu_sizes import DIGIT, STRIPE, STRIPES, TILE, WORD

LINE = 16  # entries a sample takes together: one cache line of float32
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
            word = mask_at_least(bits, at, key) if length == WORD else _tail_mask(bits, at, end, key)
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
                word = _tail_mask(bits, at, at + length, key)
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
def subtract_compact(
    shared: Any, addresses: Any, ends: Any, start: int, stop: int, key: Any, indices: Any, values: Any, count: int,
    words: Any,
) -> Any:  # fmt: skip
    """`compact` of shared - pieces, which is not written anywhere, from start up to stop or to where room runs out.

    Pieces as in `add_compact`. `words` [STRIPES * STRIPE / WORD] is to work with. Returns the sum of squares, the new
    count and where it stopped.
    """
    room, at, total, piece = indices.size - WORD, start, 0.0, 0
    while at < stop and count <= room:
        while ends[piece] <= at:
            piece += 1
        base = ends[piece - 1] if piece else 0
        own = array_at(addresses[piece], ends[piece] - base, shared)
        more, count, at = _subtract_piece(
            shared, own, base, at, min(ends[piece], stop), key, indices, values, count, words
        )
        total += more
    return total, count, at


@jit
def _subtract_piece(
    shared: Any, own: Any, base: int, start: int, stop: int, key: Any, indices: Any, values: Any, count: int,
    words: Any,
) -> Any:  # fmt: skip
    """`subtract_compact` of a piece: as much of it as caches hold is compared, and then looked through in order."""
    room, at, total = indices.size - WORD, start, 0.0
    differences = values.view(shared.dtype)
    while at < stop and count <= room:
        first, end = count, min(at + STRIPES * STRIPE, stop)
        whole = (end - at) // WORD
        if whole:
            total += _compare_words(shared, at, own, at - base, key, words[:whole])
            word = 0
            while word < whole and count <= room:
                count = append_places(words[word], at, indices, count)
                word += 1
                at += WORD
            if word < whole:  # the rest is looked at later
                total -= _compare_words(shared, at, own, at - base, key, words[: whole - word])
        else:
            total += _subtract_few(shared, own, base, at, end, differences, count)
            count = append_places(_tail_mask(values, count, count + end - at, key), at, indices, count)
            at = end
        for i in range(first, count):
            differences[i] = shared[indices[i]] - own[indices[i] - base]
    return total, count, at


@jit
def _compare_words(shared: Any, at: int, own: Any, own_at: int, key: Any, words: Any) -> Any:
    """Which entries of shared - own reach `key`, a word of them at a time; the sum of squares.

    Reads STRIPES places at once, which keeps more of the memory busy.
    """
    total, stripe = 0.0, words.size // STRIPES
    for word in range(stripe):
        total += compare_stripes(shared, at + word * WORD, own, own_at + word * WORD, stripe, key, words, word)
    for word in range(STRIPES * stripe, words.size):
        words[word], more = subtract_word(shared, at + word * WORD, shared, own, own_at + word * WORD, key)
        total += more
    return total


@jit
def _subtract_few(shared: Any, own: Any, base: int, start: int, stop: int, out: Any, to: int) -> Any:
    """Less than a word of shared - own, to out[to:]; the sum of squares."""
    total = 0.0
    for i in range(stop - start):
        value = shared[start + i] - own[start + i - base]
        out[to + i] = value
        total += np.float64(value) * np.float64(value)
    return total


@jit
def subtract_compact_largest(
    shared: Any, addresses: Any, ends: Any, key: Any, k: int, indices: Any, values: Any, counters: Any, words: Any
) -> Any:
    """As `subtract_compact` of all, with the rule of `compact_largest`. Returns the sum of squares and the count."""
    size = shared.size
    total, count, at = subtract_compact(shared, addresses, ends, 0, size, key, indices, values, 0, words)
    while at < size:
        count, kth = keep_largest(indices, values, count, k, counters, indices, values)
        more, count, at = subtract_compact(shared, addresses, ends, at, size, kth + _ONE, indices, values, count, words)
        total += more
    return total, count


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
def _tail_mask(bits: Any, start: int, stop: int, key: Any) -> Any:
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
def sample(bits: Any, seed: int, keys: Any) -> Any:
    """Keys of one cache line of each equal stretch, at a seeded place in it; how many keys that gave."""
    lines = bits.size // LINE
    wanted = min(keys.size // LINE, lines)
    state, magnitude, ratio = np.uint64(seed), magnitude_mask(bits), lines / max(1, wanted)
    for stretch in range(wanted):
        state = _scramble(state)
        at = _line_in(stretch, ratio, lines, state) * LINE
        line, to = bits[at : at + LINE], keys[stretch * LINE : (stretch + 1) * LINE]
        for i in range(LINE):
            to[i] = line[i] & magnitude
    return wanted * LINE


@jit
def sample_sum(residual: Any, addresses: Any, ends: Any, sign: int, seed: int, sums: Any) -> Any:
    """residual + sign * pieces (see `add_compact`) on the lines that `sample` would take."""
    lines = residual.size // LINE
    wanted = min(sums.size // LINE, lines)
    ratio = lines / max(1, wanted)
    _prefetch_sample(residual, addresses, ends, wanted, ratio, seed)
    state, piece = np.uint64(seed), 0
    for stretch in range(wanted):
        state = _scramble(state)
        at = _line_in(stretch, ratio, lines, state) * LINE
        to = sums[stretch * LINE : (stretch + 1) * LINE]
        for i in range(LINE):
            while ends[piece] <= at + i:
                piece += 1
            base = ends[piece - 1] if piece else 0
            to[i] = residual[at + i] + sign * array_at(addresses[piece], ends[piece] - base, residual)[at + i - base]
    return wanted * LINE


@jit
def _prefetch_sample(residual: Any, addresses: Any, ends: Any, wanted: int, ratio: float, seed: int) -> Any:
    """Ask for all that `sample_sum` is going to read."""
    state, piece = np.uint64(seed), 0
    for stretch in range(wanted):
        state = _scramble(state)
        at = _line_in(stretch, ratio, residual.size // LINE, state) * LINE
        while ends[piece] <= at:
            piece += 1
        base = ends[piece - 1] if piece else 0
        prefetch(residual, at)
        prefetch(array_at(addresses[piece], ends[piece] - base, residual), at - base)


@jit
def _scramble(state: Any) -> Any:
    """Marsaglia's xorshift with 64 bits."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    return state ^ (state << np.uint64(17))


@jit
def _line_in(stretch: int, ratio: float, lines: int, state: Any) -> Any:
    """A line between stretch * ratio and the next multiple of ratio."""
    fraction = np.float64(state >> np.uint64(11)) * 2.0**-53
    return min(np.int64((stretch + fraction) * ratio), lines - 1)


@jit
def magnitude_mask(bits: Any) -> Any:
    """All bits of an entry but its sign."""
    return _ALL >> np.uint64(65 - 8 * bits.itemsize)
