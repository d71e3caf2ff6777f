"""How loops become machine code that stands alone.

Imported only to make some, by `linking`: numba is slow to load, and may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from oktopk.kernels.calling import callable_loop, type_of
from oktopk.kernels.linking import MadeLoop, addresses, target_machine


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A loop for others to call and for `make` to turn into machine code. It may neither allocate nor raise."""
    standing_alone = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
    compiled: Callable[..., Any] = njit(**standing_alone, **options)(function)
    return compiled


def jit_reordered(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `jit`; sums may be formed in another order, which lets them use vectors."""
    return jit(function, fastmath={"reassoc", "contract"})


def make(module: str, name: str, kinds: Sequence[str], symbol: str) -> MadeLoop:
    """Compile a loop for arguments of these kinds: numpy's, e.g. "f4", and "1f4" for an array of one dimension."""
    loop = getattr(import_module(module), name)
    loop.compile(tuple(type_of(kind) for kind in kinds))
    for known, address in addresses().items():
        llvm.add_symbol(known, address)  # numba links what it compiles
    compiled = cfunc(types.intp(types.intp))(callable_loop(loop, kinds))
    return MadeLoop(symbol, _object(compiled.inspect_llvm(), compiled.native_name, symbol))


def _object(text: str, entry: str, symbol: str) -> bytes:
    """Machine code of one function that needs nothing but itself and Python."""
    module, machine = llvm.parse_assembly(text), target_machine()
    for function in module.functions:
        if function.name == entry:
            function.name = symbol
        elif not function.is_declaration:
            function.linkage = llvm.Linkage.internal  # lets the optimizer see that none of them raises
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    outside = {f.name for f in module.functions if f.is_declaration and not f.name.startswith(("llvm.", "mem"))}
    outside -= addresses().keys()
    if outside:
        raise RuntimeError(f"{symbol} does not stand alone, it calls {outside}: a loop may neither allocate nor raise.")
    return bytes(machine.emit_object(module))


@intrinsic
def trailing_zeros(typing: Any, word: Any) -> Any:
    """Position of the lowest set bit of a uint64; 64 for zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic
def leading_zeros(typing: Any, word: Any) -> Any:
    """How many bits of a uint64 lie above its highest set bit; 64 for zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic
def population(typing: Any, word: Any) -> Any:
    """How many bits of a uint64 are set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate
