"""How values become bytes: seven codecs, in plain torch, so that they run on any device; four of them compiled too.

`encode` also returns the values as `decode` will make them: what rounding takes away stays with the sender.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oktopk.errors import WireError
from oktopk.wire import narrow
from oktopk.wire.backend import Loops, compiled_codecs

FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT8, INT4, CODEBOOK2 = range(7)
NAMES = {
    "float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16, "int8": INT8, "int4": INT4, "codebook2": CODEBOOK2,
}  # fmt: skip
WIDE = 0x80  # added to the codec of rounded float64 values: they come back as float64
BLOCK = 256  # values of int8 that share a scale

_BYTES = {FLOAT32: 4, FLOAT64: 8, FLOAT16: 2, BFLOAT16: 2, INT8: 1}
_BITS = {INT4: 4, CODEBOOK2: 2}  # codecs of `narrow`
_COMPILED = (BFLOAT16, INT8, INT4, CODEBOOK2)
_EXPONENTS = {False: 163, True: 1088}  # largest size of a float16 scale's exponent: subnormal values have it
_INT8_LIMIT = torch.finfo(torch.float32).max / 128  # of a scale, so that no product with a code overflows
_BFLOAT16_BITS = np.uint32(0x7F7F0000)  # the largest bfloat16, as float32
_HALF_EXPONENT = 14  # the largest float16 of a message lies in [2**14, 2**15): room above for rounding, 2**29 below


@dataclass(frozen=True)
class Encoded:
    """Values ready to send."""

    codec: int
    parameter: int
    data: Tensor  # uint8
    seen: Tensor  # float32 or float64: what decode returns


def encode(values: Tensor, codec: int) -> Encoded:
    """Values of any floating dtype as bytes. float64 under FLOAT32 travels as FLOAT64: that codec loses nothing."""
    exact = values if values.dtype == torch.float64 else values.float()
    if not exact.numel():  # an empty selection may have strides that cannot be viewed as bytes
        exact = exact.new_empty(0)
    if codec == FLOAT32 and exact.dtype == torch.float64:
        codec = FLOAT64
    loops = _loops(exact, codec)
    if loops is not None:
        return _encode_compiled(exact, codec, loops)
    wide = WIDE if exact.dtype == torch.float64 and codec != FLOAT64 else 0
    parameter, data = _to_bytes(exact, codec)
    seen = exact if codec in (FLOAT32, FLOAT64) else decode(data, codec | wide, parameter, exact.numel())
    return Encoded(codec | wide, parameter, data, seen)


def decode(data: Tensor, codec: int, parameter: int, nnz: int) -> Tensor:
    """The values in `data`, which has exactly `nbytes(codec, nnz)` bytes."""
    dtype = torch.float64 if codec & WIDE or codec == FLOAT64 else torch.float32
    kind = codec & ~WIDE
    values = torch.empty(nnz, dtype=dtype, device=data.device)
    loops = _loops(values, kind)
    if loops is not None:
        return _decode_compiled(data, kind, values, loops)
    if kind in _BITS:
        return narrow.decode(data, _BITS[kind], nnz, dtype)
    if kind == INT8:
        return _from_int8(data, nnz, dtype)
    if kind == FLOAT16:
        return _scaled(_typed(data, torch.float16).to(dtype), parameter)
    return _typed(data, torch.bfloat16 if kind == BFLOAT16 else dtype).to(dtype)


def _loops(values: Tensor, codec: int) -> Loops | None:
    """The module with compiled loops for this codec, which give the same bits; None if there are none here."""
    on_cpu = values.dtype == torch.float32 and values.device.type == "cpu"
    if not on_cpu or codec not in _COMPILED:
        return None
    return compiled_codecs("narrow" if codec in _BITS else "values")


def _encode_compiled(values: Tensor, codec: int, loops: Loops) -> Encoded:
    exact = values.contiguous().numpy()
    data, seen = np.empty(nbytes(codec, exact.size), np.uint8), np.empty_like(exact)
    if codec in _BITS:
        narrow.encode_compiled(exact, _BITS[codec], loops, data, seen)
    elif codec == BFLOAT16:
        loops.encode_bfloat16(exact, _BFLOAT16_BITS, data.view(np.uint16), seen)
    else:
        head = nbytes(codec, exact.size) - exact.size
        scales, codes = data[:head].view(np.float32), data[head:].view(np.int8)
        loops.encode_int8(exact, BLOCK, np.float32(_INT8_LIMIT), scales, codes, seen)
    return Encoded(codec, 0, torch.from_numpy(data), torch.from_numpy(seen))


def _decode_compiled(data: Tensor, codec: int, values: Tensor, loops: Loops) -> Tensor:
    if codec in _BITS:
        narrow.decode_compiled(data.numpy(), _BITS[codec], loops, values.numpy())
    elif codec == BFLOAT16:
        loops.decode_bfloat16(data.numpy(), values.numpy())
    else:
        loops.decode_int8(data.numpy(), BLOCK, values.numpy())
    return values


def check(codec: int, parameter: int) -> None:
    """Refuse what no sender writes."""
    kind, wide = codec & ~WIDE, codec & WIDE
    known = {*_BYTES, *_BITS}
    if kind not in known or (wide and kind in (FLOAT32, FLOAT64)):
        raise WireError(f"unknown value codec {codec}: expected one of {sorted(known)}, or a rounding one + {WIDE}.")
    if abs(parameter) > (_EXPONENTS[bool(wide)] if kind == FLOAT16 else 0):
        raise WireError(f"value parameter {parameter} is out of range for value codec {codec}.")


def nbytes(codec: int, nnz: int) -> int:
    """Bytes that nnz values take."""
    kind = codec & ~WIDE
    if kind in _BITS:
        return narrow.nbytes(_BITS[kind], nnz)
    return _BYTES[kind] * nnz + (4 * -(-nnz // BLOCK) if kind == INT8 else 0)


def _to_bytes(values: Tensor, codec: int) -> tuple[int, Tensor]:
    if codec in _BITS:
        return 0, narrow.encode(values, _BITS[codec])
    if codec == INT8:
        return 0, _to_int8(values)
    if codec == FLOAT16:
        # Just below the limit of the dtype values would come back as infinity.
        limit = torch.finfo(values.dtype).max * (1 - 2**-11)
        values, exponent = values.clamp(-limit, limit), _exponent(values)
        return exponent, _scaled(values, -exponent).half().view(torch.uint8)
    if codec == BFLOAT16:
        limit = torch.finfo(torch.bfloat16).max
        return 0, values.clamp(-limit, limit).to(torch.bfloat16).view(torch.uint8)
    return 0, values.contiguous().view(torch.uint8)


def _exponent(values: Tensor) -> int:
    largest = float(values.abs().max()) if values.numel() else 0.0
    return math.frexp(largest)[1] - 1 - _HALF_EXPONENT if largest else 0


def _scaled(values: Tensor, exponent: int) -> Tensor:
    """values * 2**exponent; the exponent may exceed that of the dtype."""
    if exponent == 0:
        return values
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)


def _to_int8(values: Tensor) -> Tensor:
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(1) / 127).clamp(max=_INT8_LIMIT).float()
    exact = blocks / torch.where(scales > 0, scales, 1.0)[:, None].to(blocks.dtype)
    data = exact.round().clamp(-127, 127).to(torch.int8).view(-1)[: values.numel()]
    return torch.cat([scales.view(torch.uint8), data.view(torch.uint8)])


def _from_int8(data: Tensor, nnz: int, dtype: torch.dtype) -> Tensor:
    head = 4 * -(-nnz // BLOCK)
    scales = _typed(data[:head], torch.float32).to(dtype)
    codes = data[head:].view(torch.int8).to(dtype)
    return codes * scales.repeat_interleave(BLOCK)[:nnz]


def _typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    # A copy, because bytes inside a message need not be aligned.
    return data.clone().view(dtype)
