"""Values of 2 and 4 bits, compiled by numba. `narrow` says the same in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from oktopk.kernels.compiling import jit
from oktopk.wire.compiled_pairs import PAIRS, code_pairs, ends_of_pairs, split_pairs, split_sums
from oktopk.wire.compiled_values import as_float


@jit
def encode_narrow(
    values: Any,
    block: int,
    bits: int,
    limit: Any,
    moves: int,
    levels: Any,
    middles: Any,
    ends: Any,
    codes: Any,
    seen: Any,
    scratch: Any,
    own_codes: Any,
    own_levels: Any,
    borders: Any,
) -> Any:
    """float32 values by blocks that share two bfloat16 magnitudes, `ends`; and as they come back to `seen`.

    The last four are to work with: float64 [3 * block], uint32 [block], and as `levels` and `middles`.
    """
    exact = scratch[:block]
    for i in range(ends.shape[0]):
        own, back = values[i * block : (i + 1) * block], seen[i * block : (i + 1) * block]
        if bits == 2 and own.size == PAIRS:
            low, high = _means_of_pairs(own, limit, moves)
            ends[i, 0], ends[i, 1] = _half(np.float32(low)), _half(np.float32(high))
            _between(ends[i, 0], ends[i, 1], levels, own_levels)
            _between(ends[i, 0], ends[i, 1], middles, borders)
            code_pairs(own, borders[0], own_levels[0], own_levels[1], back, codes, i * block * bits // 8)
            continue
        low, high = _exact_ends(own, limit, exact)
        if bits == 2:
            low, high = _means(exact, own.size, low, high, moves, scratch[block:])
        ends[i, 0], ends[i, 1] = _half(np.float32(low)), _half(np.float32(high))
        _between(ends[i, 0], ends[i, 1], levels, own_levels)
        _between(ends[i, 0], ends[i, 1], middles, borders)
        _round_narrow(own, bits, own_levels, borders, own_codes, back)
        _join(own_codes[: own.size], bits, codes[i * block * bits // 8 :])


@jit
def _exact_ends(values: Any, limit: Any, exact: Any) -> Any:
    """Magnitudes of at most `limit`, as float64 to `exact` and zeros behind them; their smallest and largest."""
    bits, low, high = values.view(np.uint32), limit, np.uint32(0)
    for i in range(bits.size):
        own = min(bits[i] & np.uint32(0x7FFFFFFF), limit)
        low, high = min(low, own), max(high, own)
        exact[i] = as_float(own)
    exact[bits.size :] = 0.0
    return np.float64(as_float(low)), np.float64(as_float(high))


@jit
def _means(exact: Any, count: int, low: Any, high: Any, moves: int, scratch: Any) -> Any:
    """Of the smaller and of the larger magnitudes. `scratch` is twice as long as `exact`."""
    small, large = scratch[: exact.size], scratch[exact.size :]
    border = low + (high - low) * 0.25
    for _ in range(moves + 1):
        above = 0
        for i in range(exact.size):
            large[i] = exact[i] if exact[i] > border else 0.0
            small[i] = exact[i] - large[i]
            above += exact[i] > border
        if count > above:
            low = _total(small) / (count - above)
        if above:
            high = _total(large) / above
        border = (low + high) * 0.5
    return low, high


@jit
def _means_of_pairs(values: Any, limit: Any, moves: int) -> Any:
    """`_means` of a whole block, in registers."""
    first, last = ends_of_pairs(values, limit)
    low, high = np.float64(as_float(first)), np.float64(as_float(last))
    border = low + (high - low) * 0.25
    for _ in range(moves + 1):
        small, large, above = split_sums(values, limit, border)
        if values.size > above:
            low = small / (values.size - above)
        if above:
            high = large / above
        border = (low + high) * 0.5
    return low, high


@jit
def _total(values: Any) -> Any:
    """Their sum, added in halves; they do not survive."""
    half = values.size // 2
    while half:
        for i in range(half):
            values[i] += values[i + half]
        half //= 2
    return values[0]


@jit
def _half(value: Any) -> Any:
    """The bits of the nearest bfloat16 of a finite magnitude, ties to even."""
    bits = _bits_of(value)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@jit
def _between(low: Any, high: Any, shares: Any, out: Any) -> Any:
    """So far on the way from one bfloat16 to another."""
    start = as_float(np.uint32(low) << np.uint32(16))
    way = as_float(np.uint32(high) << np.uint32(16)) - start
    for i in range(shares.size):
        out[i] = start + way * shares[i]


@jit
def _round_narrow(values: Any, bits: int, levels: Any, borders: Any, codes: Any, seen: Any) -> Any:
    patterns, back = values.view(np.uint32), seen.view(np.uint32)
    sign, mask = np.uint32(0x80000000), np.uint32(levels.size - 1)
    for i in range(values.size):
        codes[i] = (patterns[i] & sign) >> np.uint32(32 - bits)
    for border in borders:
        for i in range(values.size):
            codes[i] += abs(values[i]) > border
    for i in range(values.size):
        back[i] = _bits_of(levels[codes[i] & mask]) | (patterns[i] & sign)


@jit
def _join(codes: Any, bits: int, out: Any) -> Any:
    """Codes of `bits` bits to bytes, the first one lowest."""
    per_byte = 8 // bits
    for at in range((codes.size + per_byte - 1) // per_byte):
        byte = np.uint32(0)
        for i in range(min(per_byte, codes.size - at * per_byte)):
            byte |= codes[at * per_byte + i] << np.uint32(bits * i)
        out[at] = byte


@intrinsic
def _bits_of(typing: Any, value: Any) -> Any:
    """The pattern of a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@jit
def decode_narrow(data: Any, block: int, bits: int, levels: Any, values: Any, own: Any, table: Any) -> Any:
    """Bytes, which need not be aligned, to float32. `own` [levels] and `table` [2 * levels] are to work with."""
    blocks, per_byte = (values.size + block - 1) // block, 8 // bits
    for number in range(blocks):
        start, at = number * block, 4 * number
        low = np.uint16(data[at]) | np.uint16(data[at + 1]) << np.uint16(8)
        high = np.uint16(data[at + 2]) | np.uint16(data[at + 3]) << np.uint16(8)
        _between(low, high, levels, own)
        for level in range(own.size):
            table[level], table[own.size + level] = own[level], -own[level]
        if bits == 2 and start + PAIRS <= values.size and block == PAIRS:
            split_pairs(data, 4 * blocks + start // per_byte, own[0], own[1], values, start)
        else:
            _split(data[4 * blocks + start // per_byte :], bits, table, values[start : start + block])


@jit
def _split(data: Any, bits: int, table: Any, values: Any) -> Any:
    per_byte, mask = 8 // bits, np.uint32((1 << bits) - 1)
    for at in range((values.size + per_byte - 1) // per_byte):
        byte = np.uint32(data[at])
        for i in range(min(per_byte, values.size - at * per_byte)):
            values[at * per_byte + i] = table[(byte >> np.uint32(bits * i)) & mask]
