"""Rice-coded gaps, compiled by numba. `plain` says the same in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from oktopk.kernels.compiling import jit, leading_zeros, population, trailing_zeros

_ONE = np.uint64(1)


@intrinsic
def _load(typing: Any, data: Any, at: Any) -> Any:
    """Eight bytes from data[at] on, at any alignment, as a little-endian uint64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _swapped(builder, builder.load(_address(context, builder, signature, args), align=1))

    return types.uint64(data, types.intp), generate


@intrinsic
def _store(typing: Any, data: Any, at: Any, word: Any) -> Any:
    """Write a uint64 to the eight bytes from data[at] on, little-endian, at any alignment."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(_swapped(builder, args[2]), _address(context, builder, signature, args), align=1)
        return context.get_dummy_value()

    return types.void(data, types.intp, types.uint64), generate


def _address(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.bitcast(builder.gep(array.data, [args[1]]), ir.IntType(64).as_pointer())


def _swapped(builder: Any, word: Any) -> Any:
    return word if np.little_endian else builder.bswap(word)


@jit
def quotient_sums(indices: Any, remainder: int) -> Any:
    """What the quotients add up to with `remainder`, + 1 and + 2 bits of remainder; -1 if indices do not ascend."""
    low, middle, high, lowest = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    for i in range(1, indices.size):
        gap = np.int64(indices[i]) - np.int64(indices[i - 1]) - 1
        lowest = min(lowest, gap)
        low += gap >> remainder
        middle += gap >> (remainder + 1)
        high += gap >> (remainder + 2)
    return (low, middle, high) if lowest >= 0 else (-1, -1, -1)


@jit
def rice_encode(indices: Any, remainder: int, out: Any) -> Any:
    """First the remainders, `remainder` bits each; then each quotient q as q clear bits and a set one."""
    head = ((indices.size - 1) * remainder + 7) // 8
    _write_remainders(indices, remainder, out)
    _write_quotients(indices, remainder, out, head)


@jit
def _write_quotients(indices: Any, remainder: int, out: Any, head: int) -> Any:
    """Words go out again and again until they are full: to ask whether one is would be a coin toss."""
    out[head:] = 0
    end, at, pending = np.int64(-1), np.int64(0), np.uint64(0)
    whole = out.size - head - 8
    for i in range(1, indices.size):
        gap = np.int64(indices[i]) - np.int64(indices[i - 1]) - 1
        end += (gap >> remainder) + 1
        before, at = at, (end >> 6) << 3
        pending = (pending if at == before else np.uint64(0)) | (_ONE << np.uint64(end & 63))
        if at <= whole:
            _store(out, head + at, pending)
        else:
            _store_bytes(out, head + at, pending)


@jit
def _write_remainders(indices: Any, remainder: int, out: Any) -> Any:
    """May scribble on what follows the remainders: whole words go out, and quotients are written later."""
    mask = (np.int64(1) << remainder) - 1
    pending, filled, at = np.uint64(0), np.uint64(0), np.int64(0)
    for i in range(1, indices.size):
        gap = np.int64(indices[i]) - np.int64(indices[i - 1]) - 1
        pending |= np.uint64(gap & mask) << filled
        filled += np.uint64(remainder)
        if at + 8 <= out.size:
            _store(out, at, pending)
        else:
            _store_bytes(out, at, pending)
        at += np.int64(filled >> np.uint64(3))
        pending >>= filled & np.uint64(56)
        filled &= np.uint64(7)
    if filled:
        out[at] = np.uint8(pending & np.uint64(255))


@jit
def rice_decode(data: Any, remainder: int, first: int, numel: int, indices: Any) -> Any:
    """Undo rice_encode into `indices`; False, with `indices` undefined, unless all is in order."""
    gaps = indices.size - 1
    bits = gaps * remainder
    head = (bits + 7) // 8
    indices[0] = first
    if not (_read_quotients(data[head:], numel >> remainder, indices[1:]) and _tidy(data, bits, head)):
        return False
    return _add_remainders(data, remainder, first, indices[1:]) < numel


@jit
def _read_quotients(data: Any, limit: int, totals: Any) -> Any:
    """totals[i] = the sum of the quotients up to i; False if there are not as many, or the sum exceeds `limit`."""
    count = np.int64(0)
    for at in range(0, data.size, 8):
        word = _word_at(data, at)
        ends = population(word)
        # Before an end, all bits that are no ends belong to quotients.
        if count + ends > totals.size or (ends and 8 * at + 63 - leading_zeros(word) - (count + ends - 1) > limit):
            return False
        for i in range(count, count + ends):
            totals[i] = 8 * at + trailing_zeros(word) - i
            word &= word - _ONE
        count += ends
    return count == totals.size


@jit
def _add_remainders(data: Any, remainder: int, first: int, places: Any) -> Any:
    """Sums of quotients become indices, which ascend since nothing is negative. Returns the last."""
    mask, place, low = (_ONE << np.uint64(remainder)) - _ONE, np.int64(first), np.int64(first)
    for i in range(places.size):
        at, shift = i * remainder >> 3, np.uint64(i * remainder & 7)
        word = _load(data, at) if at + 8 <= data.size else _word_at(data, at)
        low += np.int64((word >> shift) & mask) + 1
        place = (np.int64(places[i]) << remainder) + low
        places[i] = place
    return place


@jit
def _tidy(data: Any, bits: int, head: int) -> Any:
    """Whether the filler after the remainders is clear, and no byte follows that of the last quotient."""
    filler = data[head - 1] >> np.uint8(bits & 7) if bits & 7 else np.uint8(0)
    return filler == 0 and (data.size == head or data[-1] != 0)


@jit
def _word_at(data: Any, at: int) -> Any:
    """Eight bytes from `at` on; what lies behind the end counts as zero."""
    if at + 8 <= data.size:
        return _load(data, at)
    word = np.uint64(0)
    for i in range(at, data.size):
        word |= np.uint64(data[i]) << np.uint64(8 * (i - at))
    return word


@jit
def _store_bytes(out: Any, at: int, word: Any) -> Any:
    """As much of the word as fits."""
    for i in range(at, out.size):
        out[i] = np.uint8((word >> np.uint64(8 * (i - at))) & np.uint64(255))
