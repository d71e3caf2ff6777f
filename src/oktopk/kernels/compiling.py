"""How loops become machine code. Imported only by rooms that can do without: numba may be missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile at the first call, release the interpreter while running, and keep the machine code on disk.

    numba keeps it beside the module, or in the user's cache directory when that is read-only, or in NUMBA_CACHE_DIR.
    """
    try:
        compiled: Callable[..., Any] = njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # nowhere to write: each process then compiles for itself
        compiled = njit(nogil=True, **options)(function)
    return compiled


def jit_reordered(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `jit`; sums may be formed in another order, which lets them use vectors."""
    return jit(function, fastmath={"reassoc", "contract"})


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
