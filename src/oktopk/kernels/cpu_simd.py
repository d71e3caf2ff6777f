"""Words of vector code that numba cannot be talked into: emitted as LLVM vectors, so any processor runs them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from oktopk.kernels.cpu_sizes import LINE_BYTES, WORD

_I8, _I16, _I32, _I64 = (ir.IntType(width) for width in (8, 16, 32, 64))
_DOUBLE = ir.DoubleType()
_ANY_ORDER = ("reassoc", "contract")
_LANES = {16: 32, 32: 16, 64: 8}  # bits of an entry -> entries in 512 bits; narrower processors split them


@intrinsic
def mask_at_least(typing: Any, bits: Any, start: Any, key: Any) -> Any:
    """uint64: bit i says whether bits[start + i], its sign removed, is at least `key`. Reads 64 entries."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.get_value_type(signature.args[0].dtype)
        lanes = _LANES[element.width]
        vector = ir.VectorType(element, lanes)
        magnitude = ir.Constant(vector, [2 ** (element.width - 1) - 1] * lanes)
        threshold = _splat(builder, args[2], vector)
        base = builder.gep(_data(context, builder, signature, args), [args[1]])
        word = ir.Constant(_I64, 0)
        for part in range(WORD // lanes):
            at = builder.gep(base, [ir.Constant(_I64, part * lanes)])
            entries = builder.load(builder.bitcast(at, vector.as_pointer()), align=element.width // 8)
            above = builder.icmp_unsigned(">=", builder.and_(entries, magnitude), threshold)
            few = builder.zext(builder.bitcast(above, ir.IntType(lanes)), _I64)
            word = builder.or_(word, builder.shl(few, ir.Constant(_I64, part * lanes)))
        return word

    return types.uint64(bits, types.intp, bits.dtype), generate


@intrinsic
def prefetch(typing: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of array[at]; never faults, even out of bounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.bitcast(builder.gep(_data(context, builder, signature, args), [args[1]]), _I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [address, ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def stream_line(typing: Any, to: Any, at: Any, source: Any, start: Any) -> Any:
    """Copy a cache line from source[start:] to to[at:], which must be its beginning, without reading it first.

    Other threads see it after `publish`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.get_value_type(signature.args[0].dtype)
        vector = ir.VectorType(element, 8 * LINE_BYTES // element.width)
        origin = builder.gep(_data(context, builder, signature, args, 2), [args[3]])
        target = builder.gep(_data(context, builder, signature, args), [args[1]])
        line = builder.load(builder.bitcast(origin, vector.as_pointer()), align=element.width // 8)
        store = builder.store(line, builder.bitcast(target, vector.as_pointer()), align=LINE_BYTES)
        _stream(builder, store)
        return context.get_dummy_value()

    return types.void(to, types.intp, source, types.intp), generate


def _combine_word(operation: str, store: str, precise: bool = True) -> Any:
    """An intrinsic that adds or subtracts 64 entries, compares and squares the results while they are in registers.

    Squares are summed in double precision, or in that of the entries, where some may overflow.
    """

    def combine(typing: Any, out: Any, at: Any, residual: Any, grad: Any, grad_at: Any, key: Any) -> Any:
        bits = types.Integer.from_bitwidth(out.dtype.bitwidth, False)
        result = types.Tuple((types.uint64, types.float64))

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            width, element = out.dtype.bitwidth, context.get_value_type(out.dtype)
            lanes = _LANES[width]
            floats, doubles = ir.VectorType(element, lanes), ir.VectorType(_DOUBLE, lanes)
            integers = ir.VectorType(ir.IntType(width), lanes)
            magnitude = ir.Constant(integers, [2 ** (width - 1) - 1] * lanes)
            threshold = _splat(builder, args[5], integers)
            bases = [
                builder.gep(_data(context, builder, signature, args, which), [args[place]])
                for which, place in ((0, 1), (2, 1), (3, 4))
            ]
            wide = doubles if precise else floats
            word, squares = ir.Constant(_I64, 0), ir.Constant(wide, [0.0] * lanes)
            for start in range(0, WORD, lanes):
                target, *sources = (
                    builder.bitcast(builder.gep(base, [ir.Constant(_I64, start)]), floats.as_pointer())
                    for base in bases
                )
                terms = (builder.load(source, align=width // 8) for source in sources)
                total = getattr(builder, operation)(*terms)
                if store == "near":
                    builder.store(total, target, align=width // 8)
                elif store == "past":
                    _stream(builder, builder.store(total, target, align=LINE_BYTES))
                above = builder.icmp_unsigned(
                    ">=", builder.and_(builder.bitcast(total, integers), magnitude), threshold
                )
                few = builder.zext(builder.bitcast(above, ir.IntType(lanes)), _I64)
                word = builder.or_(word, builder.shl(few, ir.Constant(_I64, start)))
                factor = total if wide == floats or width == 64 else builder.fpext(total, doubles)
                squares = builder.fadd(squares, builder.fmul(factor, factor, flags=_ANY_ORDER), flags=_ANY_ORDER)
            kind = ir.FunctionType(wide.element, [wide.element, wide])
            name = f"llvm.vector.reduce.fadd.v{lanes}f{64 if precise else width}"
            add_up = cgutils.get_or_insert_function(builder.module, kind, name)
            energy = builder.call(add_up, [ir.Constant(wide.element, 0.0), squares], fastmath=_ANY_ORDER)
            if wide.element != _DOUBLE:
                energy = builder.fpext(energy, _DOUBLE)
            return context.make_tuple(builder, result, [word, energy])

        return result(out, types.intp, residual, grad, types.intp, bits), generate

    return intrinsic(combine)


# add_word(out, at, residual, grad, grad_at, key): out[at + i] = residual[at + i] + grad[grad_at + i] for 64 entries.
# Returns bit i: whether the sum, its sign removed, is at least `key`; and the sum of squares of the sums.
add_word = _combine_word("fadd", "near")
add_word_past = _combine_word("fadd", "past")  # out[at] begins a cache line; written as by `stream_line`
subtract_word = _combine_word("fsub", "nowhere", precise=False)  # of residual - grad; `out` is not looked at


@intrinsic
def array_at(typing: Any, address: Any, size: Any, like: Any) -> Any:
    """The array of `size` entries that begins at an address, with the dtype of `like`. Its owner must stay alive."""
    kind = types.Array(like.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.get_data_type(like.dtype)
        width = ir.Constant(_I64, context.get_abi_sizeof(element))
        array = context.make_array(kind)(context, builder)
        data = builder.inttoptr(args[0], element.as_pointer())
        populate_array(array, data, [args[1]], [width], width, None)
        return array._getvalue()

    return kind(types.intp, types.intp, like), generate


@intrinsic
def publish(typing: Any) -> Any:
    """Wait until everyone can see what `stream_line` wrote."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _stream(builder: Any, store: Any) -> None:
    """Let a store go past the caches."""
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))


def _data(context: Any, builder: Any, signature: Any, args: Any, which: int = 0) -> Any:
    return context.make_array(signature.args[which])(context, builder, args[which]).data


def _splat(builder: Any, scalar: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count))
