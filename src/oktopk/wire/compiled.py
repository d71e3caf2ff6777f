"""Rice-coded gaps, compiled by numba; `plain` says the same in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from oktopk.compiling import jit

_ONE = np.uint64(1)


@intrinsic
def _trailing_zeros(typing: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


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
    out[head:] = 0
    end = np.int64(8 * head - 1)
    for i in range(1, indices.size):
        gap = np.int64(indices[i]) - np.int64(indices[i - 1]) - 1
        end += (gap >> remainder) + 1
        out[end >> 3] |= np.uint8(1 << (end & 7))


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
    head = (gaps * remainder + 7) // 8
    mask, limit = (_ONE << np.uint64(remainder)) - _ONE, numel >> remainder
    place, count, end = np.int64(first), 0, np.int64(-1)
    indices[0] = first
    for at in range(head, data.size, 8):
        word = _word_at(data, at)
        while word:
            here = 8 * (at - head) + _trailing_zeros(word)
            quotient = here - end - 1
            end = here
            low = np.int64((_word_at(data, (count * remainder) >> 3) >> np.uint64((count * remainder) & 7)) & mask)
            if count == gaps or quotient > limit:
                return False
            place += (quotient << remainder) + low + 1
            if place >= numel:
                return False
            count += 1
            indices[count] = place
            word &= word - _ONE
    return count == gaps and _tidy(data, gaps * remainder, head)


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
