"""The compiled scans of a difference of two vectors, which is not written anywhere. Keys are those of `cpu_loops`."""

from __future__ import annotations

from typing import Any

import numpy as np

from oktopk.kernels.compiling import jit
from oktopk.kernels.cpu_loops import append_places, keep_largest, tail_mask
from oktopk.kernels.cpu_simd import array_at, compare_stripes, subtract_word
from oktopk.kernels.cpu_sizes import STRIPE, STRIPES, WORD

_ONE = np.uint64(1)


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
            count = append_places(tail_mask(values, count, count + end - at, key), at, indices, count)
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
