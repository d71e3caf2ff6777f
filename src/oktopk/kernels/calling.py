"""How Python objects reach a compiled loop and its results come back, as machine code.

A loop is called with the tuple of its arguments. Arrays are read where numpy keeps them: the fields of an array object
have had their places since numpy 1.0 and belong to its binary interface. All objects are told by their address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from oktopk.kernels.linking import HEAD, OBJECTS

_LONG, _DOUBLE, _INT = ir.IntType(64), ir.DoubleType(), ir.IntType(32)

# Bytes from the beginning of an object to a field.
_TYPE = HEAD - 8
_DATA, _NDIM, _SHAPE, _DTYPE, _FLAGS = HEAD, HEAD + 8, HEAD + 16, HEAD + 40, HEAD + 48  # of an array
_NUMBER = HEAD + 12  # of a dtype
_CONTIGUOUS = 1  # among the flags


def callable_loop(loop: Any, kinds: Sequence[str]) -> Callable[[Any], Any]:
    """A loop as a function of its arguments' tuple. Returns NotImplemented when they are not of these kinds."""
    arguments_of, to_object = _loader([type_of(kind) for kind in kinds]), _giver()
    arrays = tuple((place, int(kind[0]), *_numbers(kind)) for place, kind in enumerate(kinds) if len(kind) > 2)

    @njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)
    def fits(arguments: Any) -> Any:
        for place, ndim, number, other in arrays:
            array = _item(arguments, place)
            if _field(array, _TYPE) != _ndarray() or _field(array, _NDIM) & 0xFFFFFFFF != ndim:
                return False
            own = _field(_field(array, _DTYPE), _NUMBER) & 0xFFFFFFFF
            if (own != number and own != other) or not _field(array, _FLAGS) & _CONTIGUOUS:
                return False
        return True

    def entry(arguments: Any) -> Any:
        if not fits(arguments):
            return _new(_not_implemented())
        values = arguments_of(arguments)
        if _error():
            return 0
        thread = _release()
        result = loop(*values)
        _acquire(thread)
        return to_object(result)

    return entry


def type_of(kind: str) -> Any:
    """numba's type of an argument of a kind, as `linking` names them."""
    dtype = from_dtype(np.dtype(kind[-2:]))
    return types.Array(dtype, int(kind[0]), "C") if len(kind) > 2 else dtype


def _numbers(kind: str) -> tuple[int, int]:
    """numpy's numbers of a dtype: some widths have two names."""
    dtypes = [np.dtype(code) for code in np.typecodes["All"] if code not in "SUVOMm"]
    numbers = sorted({dtype.num for dtype in dtypes if f"{dtype.kind}{dtype.itemsize}" == kind[-2:]})
    return numbers[0], numbers[-1]


def _loader(kinds: Sequence[Any]) -> Any:
    """What reads all arguments; an error that this sets is looked for afterwards."""

    @intrinsic
    def load(typing: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            items = [_call(builder, "PyTuple_GetItem", args[0], _constant(place)) for place in range(len(kinds))]
            values = [_value(context, builder, *pair) for pair in zip(kinds, items, strict=True)]
            return context.make_tuple(builder, signature.return_type, values)

        return types.Tuple(kinds)(types.intp), generate

    return load


def _value(context: Any, builder: Any, kind: Any, item: Any) -> Any:
    if isinstance(kind, types.Array):
        return _array(context, builder, kind, item)
    if isinstance(kind, types.Float):
        return context.cast(builder, _call(builder, "PyFloat_AsDouble", item, gives=_DOUBLE), types.float64, kind)
    if _is_signed(kind):
        return context.cast(builder, _call(builder, "PyLong_AsLongLong", item), types.int64, kind)
    return context.cast(builder, _call(builder, "PyLong_AsUnsignedLongLongMask", item), types.uint64, kind)


def _array(context: Any, builder: Any, kind: Any, item: Any) -> Any:
    element = context.get_data_type(kind.dtype)
    width = _constant(context.get_abi_sizeof(element))
    shape = [_load(builder, _load(builder, item, _SHAPE), 8 * axis) for axis in range(kind.ndim)]
    strides = [width]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    array = context.make_array(kind)(context, builder)
    data = builder.inttoptr(_load(builder, item, _DATA), element.as_pointer())
    populate_array(array, data, shape, strides, width, None)
    return array._getvalue()


def _giver() -> Any:
    """What makes an object of a result."""

    @intrinsic
    def give(typing: Any, result: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if not isinstance(result, types.BaseTuple):
                return _object(context, builder, result, args[0])
            made = _call(builder, "PyTuple_New", _constant(len(result)))
            for place, (kind, part) in enumerate(zip(result, cgutils.unpack_tuple(builder, args[0]), strict=True)):
                own = _object(context, builder, kind, part)
                _call(builder, "PyTuple_SetItem", made, _constant(place), own, gives=_INT)
            return made

        return types.intp(result), generate

    return give


def _object(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    if kind == types.none:
        none = _address(builder, "None")
        _call(builder, "Py_IncRef", none, gives=ir.VoidType())
        return none
    if isinstance(kind, types.Float):
        return _call(builder, "PyFloat_FromDouble", context.cast(builder, value, kind, types.float64))
    name = "PyLong_FromLongLong" if _is_signed(kind) else "PyLong_FromUnsignedLongLong"
    name = "PyBool_FromLong" if isinstance(kind, types.Boolean) else name
    return _call(builder, name, context.cast(builder, value, kind, types.int64))


def _is_signed(kind: Any) -> bool:
    return bool(getattr(kind, "signed", True))  # that a Boolean fits either way goes without saying


# -- words of it -------------------------------------------------------------------------------------------------


def _word(name: str, *takes: Any, gives: Any = types.intp) -> Any:
    """An intrinsic that calls a function of Python."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = _call(builder, name, *args, gives=ir.VoidType() if gives == types.void else _LONG)
        return context.get_dummy_value() if gives == types.void else made

    if takes:
        return intrinsic(lambda typing, argument: (gives(*takes), generate))
    return intrinsic(lambda typing: (gives(), generate))


def _known(name: str) -> Any:
    """An intrinsic that is the address of an object."""
    return intrinsic(lambda typing: (types.intp(), lambda context, builder, signature, args: _address(builder, name)))


_error, _release = _word("PyErr_Occurred"), _word("PyEval_SaveThread")
_acquire = _word("PyEval_RestoreThread", types.intp, gives=types.void)
_ndarray, _not_implemented = _known("ndarray"), _known("NotImplemented")


@intrinsic
def _new(typing: Any, own: Any) -> Any:
    """A reference more to an object."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "Py_IncRef", args[0], gives=ir.VoidType())
        return args[0]

    return types.intp(types.intp), generate


@intrinsic
def _item(typing: Any, arguments: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "PyTuple_GetItem", *args)

    return types.intp(types.intp, types.intp), generate


@intrinsic
def _field(typing: Any, address: Any, offset: Any) -> Any:
    """Eight bytes of an object."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(builder.add(*args), _LONG.as_pointer()), align=1)

    return types.intp(types.intp, types.intp), generate


def _load(builder: Any, address: Any, offset: int) -> Any:
    return builder.load(builder.inttoptr(builder.add(address, _constant(offset)), _LONG.as_pointer()))


def _call(builder: Any, name: str, *args: Any, gives: Any = _LONG) -> Any:
    kind = ir.FunctionType(gives, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _address(builder: Any, name: str) -> Any:
    symbol = OBJECTS[name]
    place = builder.module.globals.get(symbol) or ir.GlobalVariable(builder.module, ir.IntType(8), symbol)
    return builder.ptrtoint(place, _LONG)


def _constant(number: int) -> Any:
    return ir.Constant(_LONG, number)
