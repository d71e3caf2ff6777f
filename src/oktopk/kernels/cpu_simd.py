"""Words of vector code that numba cannot be talked into: emitted as LLVM vectors, so any processor runs them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from oktopk.kernels.cpu_sizes import LINE_BYTES, RUN, STRIPES, WORD

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
    """Ask for the cache line of array[at]; never faults, even out of bounds.

    Into the second-level cache: the first has too few places for lines that are still on their way.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.bitcast(builder.gep(_data(context, builder, signature, args), [args[1]]), _I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [address, ir.Constant(_I32, 0), ir.Constant(_I32, 2), ir.Constant(_I32, 1)])
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
            return context.make_tuple(builder, result, [word, _add_up(builder, squares)])

        return result(out, types.intp, residual, grad, types.intp, bits), generate

    return intrinsic(combine)


# add_word(out, at, residual, grad, grad_at, key): out[at + i] = residual[at + i] + grad[grad_at + i] for 64 entries.
# Returns bit i: whether the sum, its sign removed, is at least `key`; and the sum of squares of the sums.
add_word = _combine_word("fadd", "near")
add_word_past = _combine_word("fadd", "past")  # out[at] begins a cache line; written as by `stream_line`
subtract_word = _combine_word("fsub", "nowhere", precise=False)  # of residual - grad; `out` is not looked at


@intrinsic
def is_run(typing: Any, indices: Any, at: Any) -> Any:
    """Whether the RUN integers from indices[at] on follow one another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        entries = _load_run(context, builder, signature, args, 0, args[1])
        first = _splat(builder, builder.extract_element(entries, ir.Constant(_I32, 0)), entries.type)
        return _all_equal(builder, entries, builder.add(first, ir.Constant(entries.type, list(range(RUN)))))

    return types.boolean(indices, types.intp), generate


@intrinsic
def are_same(typing: Any, one: Any, at: Any, other: Any, other_at: Any) -> Any:
    """Whether the RUN integers from one[at] and from other[other_at] on are the same."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = (_load_run(context, builder, signature, args, which, args[which + 1]) for which in (0, 2))
        return _all_equal(builder, *pair)

    return types.boolean(one, types.intp, other, types.intp), generate


@intrinsic
def copy_run(typing: Any, out: Any, at: Any, source: Any, source_at: Any) -> Any:
    """out[at + i] = source[source_at + i] for RUN entries."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        entries = _load_run(context, builder, signature, args, 2, args[3])
        _store_run(context, builder, signature, args, 0, entries, args[1])
        return context.get_dummy_value()

    return types.void(out, types.intp, source, types.intp), generate


@intrinsic
def subtract_run(typing: Any, out: Any, at: Any, one: Any, one_at: Any, other: Any, other_at: Any) -> Any:
    """out[at + i] = one[one_at + i] - other[other_at + i] for RUN entries."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        terms = (_load_run(context, builder, signature, args, which, args[which + 1]) for which in (2, 4))
        _store_run(context, builder, signature, args, 0, builder.fsub(*terms), args[1])
        return context.get_dummy_value()

    return types.void(out, types.intp, one, types.intp, other, types.intp), generate


@intrinsic
def move_run(
    typing: Any, shared: Any, at: Any, own: Any, own_at: Any, mean: Any, mean_at: Any, rest: Any, rest_at: Any
) -> Any:
    """shared -= mean and own -= rest for RUN entries; how the sum of squares of shared - own changed."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        theirs, mine, *changes = (
            _load_run(context, builder, signature, args, which, args[which + 1]) for which in (0, 2, 4, 6)
        )
        after, left = builder.fsub(theirs, changes[0]), builder.fsub(mine, changes[1])
        _store_run(context, builder, signature, args, 0, after, args[1])
        _store_run(context, builder, signature, args, 2, left, args[3])
        doubles = ir.VectorType(_DOUBLE, RUN)
        squares = []
        for pair in ((after, left), (theirs, mine)):
            difference = builder.fsub(*(_widened(builder, vector, doubles) for vector in pair))
            squares.append(builder.fmul(difference, difference, flags=_ANY_ORDER))
        return _add_up(builder, builder.fsub(*squares, flags=_ANY_ORDER))

    result = types.float64(shared, types.intp, own, types.intp, mean, types.intp, rest, types.intp)
    return result, generate


@intrinsic
def compare_stripes(
    typing: Any, shared: Any, at: Any, own: Any, own_at: Any, apart: Any, key: Any, words: Any, word: Any
) -> Any:
    """Compare a word of shared - own in each of STRIPES places, which are `apart` words from one another.

    As `mask_at_least` to words[word + stripe * apart]. Returns the sum of squares, in the precision of the entries:
    some may overflow.
    """
    bits = types.Integer.from_bitwidth(shared.dtype.bitwidth, False)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width, element = shared.dtype.bitwidth, context.get_value_type(shared.dtype)
        lanes = _LANES[width]
        floats, integers = ir.VectorType(element, lanes), ir.VectorType(ir.IntType(width), lanes)
        magnitude = ir.Constant(integers, [2 ** (width - 1) - 1] * lanes)
        threshold, total = _splat(builder, args[5], integers), ir.Constant(floats, [0.0] * lanes)
        bases = [builder.gep(_data(context, builder, signature, args, which), [args[which + 1]]) for which in (0, 2)]
        to = builder.gep(_data(context, builder, signature, args, 6), [args[7]])
        for stripe in range(STRIPES):
            skipped = builder.mul(args[4], ir.Constant(_I64, stripe))
            begin, word_bits = builder.mul(skipped, ir.Constant(_I64, WORD)), ir.Constant(_I64, 0)
            for start in range(0, WORD, lanes):
                place = builder.add(begin, ir.Constant(_I64, start))
                terms = (
                    builder.load(builder.bitcast(builder.gep(base, [place]), floats.as_pointer()), align=width // 8)
                    for base in bases
                )
                difference = builder.fsub(*terms)
                pattern = builder.and_(builder.bitcast(difference, integers), magnitude)
                above = builder.icmp_unsigned(">=", pattern, threshold)
                few = builder.zext(builder.bitcast(above, ir.IntType(lanes)), _I64)
                word_bits = builder.or_(word_bits, builder.shl(few, ir.Constant(_I64, start)))
                square = builder.fmul(difference, difference, flags=_ANY_ORDER)
                total = builder.fadd(total, square, flags=_ANY_ORDER)
            builder.store(word_bits, builder.gep(to, [skipped]))
        return _add_up(builder, total)

    kinds = (shared, types.intp, own, types.intp, types.intp, bits, words, types.intp)
    return types.float64(*kinds), generate


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


def _load_run(context: Any, builder: Any, signature: Any, args: Any, which: int, at: Any) -> Any:
    """RUN entries of the array `which`."""
    address, element = _run_address(context, builder, signature, args, which, at)
    return builder.load(address, align=element)


def _store_run(context: Any, builder: Any, signature: Any, args: Any, which: int, vector: Any, at: Any) -> None:
    address, element = _run_address(context, builder, signature, args, which, at)
    builder.store(vector, address, align=element)


def _run_address(context: Any, builder: Any, signature: Any, args: Any, which: int, at: Any) -> tuple[Any, int]:
    """Where RUN entries lie, and the bytes of one."""
    kind = signature.args[which].dtype
    vector = ir.VectorType(context.get_value_type(kind), RUN)
    address = builder.gep(_data(context, builder, signature, args, which), [at])
    return builder.bitcast(address, vector.as_pointer()), kind.bitwidth // 8


def _add_up(builder: Any, vector: Any) -> Any:
    """The sum of a vector's entries, in any order, as a double."""
    element = vector.type.element
    kind = ir.FunctionType(element, [element, vector.type])
    name = f"llvm.vector.reduce.fadd.v{vector.type.count}f{64 if element == _DOUBLE else 32}"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    total = builder.call(function, [ir.Constant(element, 0.0), vector], fastmath=_ANY_ORDER)
    return total if element == _DOUBLE else builder.fpext(total, _DOUBLE)


def _all_equal(builder: Any, one: Any, other: Any) -> Any:
    equal = builder.bitcast(builder.icmp_signed("==", one, other), ir.IntType(RUN))
    return builder.icmp_unsigned("==", equal, ir.Constant(ir.IntType(RUN), 2**RUN - 1))


def _widened(builder: Any, vector: Any, doubles: Any) -> Any:
    return vector if vector.type.element == _DOUBLE else builder.fpext(vector, doubles)


def _data(context: Any, builder: Any, signature: Any, args: Any, which: int = 0) -> Any:
    return context.make_array(signature.args[which])(context, builder, args[which]).data


def _splat(builder: Any, scalar: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count))
