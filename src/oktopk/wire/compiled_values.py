"""Values of 16 and 8 bits, compiled by numba. `values` says the same in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from oktopk.kernels.compiling import jit

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
    return as_float(largest)


@intrinsic
def as_float(typing: Any, bits: Any) -> Any:
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
        scale, own = as_float(bits), values[start : start + block]
        for i in range(own.size):
            own[i] = np.float32(codes[start + i]) * scale
