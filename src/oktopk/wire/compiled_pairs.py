"""A block of values of 2 bits in vector registers: what `compiled_narrow` does with most of them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

PAIRS = 128  # values of two bits that vectors work on together: a block of `narrow`

_LANES = 16
_I32, _I64, _FLOAT, _DOUBLE = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
_MAGNITUDE, _SIGN = 0x7FFFFFFF, 0x80000000


@intrinsic
def ends_of_pairs(typing: Any, values: Any, limit: Any) -> Any:
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
def split_sums(typing: Any, values: Any, limit: Any, border: Any) -> Any:
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
def code_pairs(typing: Any, values: Any, border: Any, low: Any, high: Any, seen: Any, codes: Any, at: Any) -> Any:
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
def split_pairs(typing: Any, data: Any, at: Any, low: Any, high: Any, values: Any, start: Any) -> Any:
    """The inverse of `code_pairs`: data[at:] to PAIRS values from `start` on."""

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
