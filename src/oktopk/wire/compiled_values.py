"""Values, compiled by numba. `values` and `narrow` say the same in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from oktopk.kernels.compiling import jit

PAIRS = 128  # values of two bits that vectors work on together: a block of `narrow`
_LANES = 16

_WHOLE = np.float32(1.5 * 2**23)  # float32 of this size have no fraction


@jit
def encode_bfloat16(values: Any, limit: Any, out: Any, seen: Any) -> Any:
    """float32 values, none above `limit`, to nearest and even: to `out` (uint16), and as they come back to `seen`."""
    bits, back = values.view(np.uint32), seen.view(np.uint32)
    for i in range(values.size):
        own = bits[i] & np.uint32(0x7FFFFFFF)
        own = min(own, limit) if own <= np.uint32(0x7F800000) else np.uint32(0x7FC00000)  # which is NaN
        own |= bits[i] & np.uint32(0x80000000)
        half = (own + np.uint32(0x7FFF) + ((own >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        out[i] = half
        back[i] = half << np.uint32(16)


@jit
def decode_bfloat16(data: Any, values: Any) -> Any:
    """Bytes, which need not be aligned, to float32."""
    bits = values.view(np.uint32)
    for i in range(values.size):
        bits[i] = (np.uint32(data[2 * i]) << np.uint32(16)) | (np.uint32(data[2 * i + 1]) << np.uint32(24))


@jit
def encode_int8(values: Any, block: int, limit: Any, scales: Any, codes: Any, seen: Any) -> Any:
    """float32 values by blocks that share a scale of at most `limit`; and as they come back to `seen`."""
    for i in range(scales.size):
        own = values[i * block : (i + 1) * block]
        scale = min(_largest(own) / np.float32(127), limit)
        scales[i] = scale
        _round_block(own, scale, codes[i * block : (i + 1) * block], seen[i * block : (i + 1) * block])


@jit
def _round_block(values: Any, scale: Any, codes: Any, seen: Any) -> Any:
    divisor, most = scale if scale > 0 else np.float32(1), np.float32(127)
    for i in range(values.size):
        exact = min(max(values[i] / divisor, -most), most)
        code = (exact + _WHOLE) - _WHOLE  # to nearest and even, as every sum is
        codes[i] = np.int8(code)
        seen[i] = code * scale


@jit
def _largest(values: Any) -> Any:
    bits, largest = values.view(np.uint32), np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & np.uint32(0x7FFFFFFF))
    return _as_float(largest)


@intrinsic
def _as_float(typing: Any, bits: Any) -> Any:
    """The float32 of a pattern."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@jit
def decode_int8(data: Any, block: int, values: Any) -> Any:
    """Bytes, which need not be aligned, to float32."""
    blocks = (values.size + block - 1) // block
    codes = data[4 * blocks :].view(np.int8)
    for number in range(blocks):
        start, at, bits = number * block, 4 * number, np.uint32(0)
        for byte in range(4):
            bits |= np.uint32(data[at + byte]) << np.uint32(8 * byte)
        scale, own = _as_float(bits), values[start : start + block]
        for i in range(own.size):
            own[i] = np.float32(codes[start + i]) * scale


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
            _code_pairs(own, borders[0], own_levels[0], own_levels[1], back, codes, i * block * bits // 8)
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
        exact[i] = _as_float(own)
    exact[bits.size :] = 0.0
    return np.float64(_as_float(low)), np.float64(_as_float(high))


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
    first, last = _ends_of_pairs(values, limit)
    low, high = np.float64(_as_float(first)), np.float64(_as_float(last))
    border = low + (high - low) * 0.25
    for _ in range(moves + 1):
        small, large, above = _split_sums(values, limit, border)
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
    start = _as_float(np.uint32(low) << np.uint32(16))
    way = _as_float(np.uint32(high) << np.uint32(16)) - start
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
            _split_pairs(data, 4 * blocks + start // per_byte, own[0], own[1], values, start)
        else:
            _split(data[4 * blocks + start // per_byte :], bits, table, values[start : start + block])


@jit
def _split(data: Any, bits: int, table: Any, values: Any) -> Any:
    per_byte, mask = 8 // bits, np.uint32((1 << bits) - 1)
    for at in range((values.size + per_byte - 1) // per_byte):
        byte = np.uint32(data[at])
        for i in range(min(per_byte, values.size - at * per_byte)):
            values[at * per_byte + i] = table[(byte >> np.uint32(bits * i)) & mask]


# -- blocks of two bits, as vectors ------------------------------------------------------------------------------

_I32, _I64, _FLOAT, _DOUBLE = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
_MAGNITUDE, _SIGN = 0x7FFFFFFF, 0x80000000


@intrinsic
def _ends_of_pairs(typing: Any, values: Any, limit: Any) -> Any:
    """The patterns of the smallest and the largest magnitude, none above `limit`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts = _magnitudes(context, builder, signature, args, _LANES)
        ends = []
        for name, sign in (("umin", "<"), ("umax", ">")):
            end = parts[0]
            for part in parts[1:]:
                end = builder.select(builder.icmp_unsigned(sign, part, end), part, end)
            kind = ir.FunctionType(_I32, [end.type])
            function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.{name}.v{_LANES}i32")
            ends.append(builder.call(function, [end]))
        return context.make_tuple(builder, signature.return_type, ends)

    return types.UniTuple(types.uint32, 2)(values, types.uint32), generate


@intrinsic
def _split_sums(typing: Any, values: Any, limit: Any, border: Any) -> Any:
    """The sums of magnitudes up to a border and above it, as `_total` adds; and how many are above."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        doubles, lanes = ir.VectorType(_DOUBLE, 8), 8
        threshold, zeros = _splat(builder, args[2], doubles), ir.Constant(doubles, [0.0] * lanes)
        small, large, above = [], [], ir.Constant(ir.VectorType(_I64, lanes), [0] * lanes)
        for part in _magnitudes(context, builder, signature, args, lanes):
            exact = builder.fpext(builder.bitcast(part, ir.VectorType(_FLOAT, lanes)), doubles)
            is_above = builder.fcmp_ordered(">", exact, threshold)
            large.append(builder.select(is_above, exact, zeros))
            small.append(builder.fsub(exact, large[-1]))
            above = builder.sub(above, builder.sext(is_above, above.type))
        kind = ir.FunctionType(_I64, [above.type])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.add.v8i64")
        found = [_added_in_halves(builder, small), _added_in_halves(builder, large), builder.call(function, [above])]
        return context.make_tuple(builder, signature.return_type, found)

    return types.Tuple((types.float64, types.float64, types.int64))(values, types.uint32, types.float64), generate


@intrinsic
def _code_pairs(typing: Any, values: Any, border: Any, low: Any, high: Any, seen: Any, codes: Any, at: Any) -> Any:
    """PAIRS values: a bit that says whether the magnitude is above `border`, and the sign, to codes[at:].

    And `low` or `high`, with the sign, to `seen`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integers, floats = ir.VectorType(_I32, _LANES), ir.VectorType(_FLOAT, _LANES)
        border, low, high = (_splat(builder, args[place], floats) for place in (1, 2, 3))
        sources, targets, out = (_data(context, builder, signature, args, which) for which in (0, 4, 5))
        out = builder.gep(out, [args[6]])
        for start in range(0, PAIRS, _LANES):
            place = ir.Constant(_I64, start)
            pattern = builder.load(builder.bitcast(builder.gep(sources, [place]), integers.as_pointer()), align=4)
            magnitude = builder.bitcast(builder.and_(pattern, ir.Constant(integers, [_MAGNITUDE] * _LANES)), floats)
            is_above = builder.fcmp_ordered(">", magnitude, border)
            is_negative = builder.icmp_signed("<", pattern, ir.Constant(integers, [0] * _LANES))
            sign = builder.and_(pattern, ir.Constant(integers, [_SIGN] * _LANES))
            level = builder.bitcast(builder.select(is_above, high, low), integers)
            target = builder.bitcast(builder.gep(targets, [place]), integers.as_pointer())
            builder.store(builder.or_(level, sign), target, align=4)
            bits = [_spread(builder, builder.bitcast(mask, ir.IntType(_LANES))) for mask in (is_above, is_negative)]
            code = builder.or_(bits[0], builder.shl(bits[1], ir.Constant(_I32, 1)))
            to = builder.gep(out, [ir.Constant(_I64, start // 4)])
            builder.store(code, builder.bitcast(to, _I32.as_pointer()), align=1)
        return context.get_dummy_value()

    kinds = (values, types.float32, types.float32, types.float32, seen, codes, types.intp)
    return types.void(*kinds), generate


@intrinsic
def _split_pairs(typing: Any, data: Any, at: Any, low: Any, high: Any, values: Any, start: Any) -> Any:
    """The inverse of `_code_pairs`: data[at:] to PAIRS values from `start` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integers, floats = ir.VectorType(_I32, _LANES), ir.VectorType(_FLOAT, _LANES)
        low, high = (_splat(builder, args[place], floats) for place in (2, 3))
        source = builder.gep(_data(context, builder, signature, args, 0), [args[1]])
        target = builder.gep(_data(context, builder, signature, args, 4), [args[5]])
        shifts = ir.Constant(integers, list(range(0, 2 * _LANES, 2)))
        one, sign = (ir.Constant(integers, [bit] * _LANES) for bit in (1, _SIGN))
        for begin in range(0, PAIRS, _LANES):
            here = builder.gep(source, [ir.Constant(_I64, begin // 4)])
            word = builder.load(builder.bitcast(here, _I32.as_pointer()), align=1)
            codes = builder.lshr(_splat(builder, word, integers), shifts)
            is_above = builder.icmp_unsigned("!=", builder.and_(codes, one), ir.Constant(integers, [0] * _LANES))
            level = builder.bitcast(builder.select(is_above, high, low), integers)
            signs = builder.and_(builder.shl(codes, ir.Constant(integers, [30] * _LANES)), sign)
            to = builder.gep(target, [ir.Constant(_I64, begin)])
            builder.store(builder.or_(level, signs), builder.bitcast(to, integers.as_pointer()), align=4)
        return context.get_dummy_value()

    kinds = (data, types.intp, types.float32, types.float32, values, types.intp)
    return types.void(*kinds), generate


def _magnitudes(context: Any, builder: Any, signature: Any, args: Any, lanes: int) -> list[Any]:
    """Patterns of PAIRS values without their sign, none above args[1], in vectors of `lanes`."""
    vector = ir.VectorType(_I32, lanes)
    base, limit = _data(context, builder, signature, args, 0), _splat(builder, args[1], vector)
    parts = []
    for start in range(0, PAIRS, lanes):
        at = builder.bitcast(builder.gep(base, [ir.Constant(_I64, start)]), vector.as_pointer())
        part = builder.and_(builder.load(at, align=4), ir.Constant(vector, [_MAGNITUDE] * lanes))
        parts.append(builder.select(builder.icmp_unsigned("<", part, limit), part, limit))
    return parts


def _added_in_halves(builder: Any, parts: Any) -> Any:
    """The sum of vectors, in the order of `_total`."""
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [builder.fadd(one, other) for one, other in zip(parts[:half], parts[half:], strict=True)]
    (total,) = parts
    half = total.type.count // 2
    while half:
        places = ir.VectorType(_I32, half)
        low, high = (
            builder.shuffle_vector(total, total, ir.Constant(places, list(range(start, start + half))))
            for start in (0, half)
        )
        total, half = builder.fadd(low, high), half // 2
    return builder.extract_element(total, ir.Constant(_I32, 0))


def _spread(builder: Any, bits: Any) -> Any:
    """16 bits, each followed by a clear one."""
    word = builder.zext(bits, _I32)
    for shift, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        moved = builder.or_(word, builder.shl(word, ir.Constant(_I32, shift)))
        word = builder.and_(moved, ir.Constant(_I32, mask))
    return word


def _data(context: Any, builder: Any, signature: Any, args: Any, which: int) -> Any:
    return context.make_array(signature.args[which])(context, builder, args[which]).data


def _splat(builder: Any, scalar: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count))
