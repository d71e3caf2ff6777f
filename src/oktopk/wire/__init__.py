"""Bytes: how indices and values become a message and come back.

wire = Wire("bfloat16")
packed = wire.pack(vector)       # packed.message: uint8; packed.values: what the receiver will see
vector = wire.unpack(packed.message)

A message describes itself, so any Wire unpacks what any other packed. docs/wire-format.md has the bytes.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oktopk.errors import ConfigError, UnsupportedError, WireError, nearest
from oktopk.types import SparseVector, index_dtype
from oktopk.wire import indices as index_codecs
from oktopk.wire import values as value_codecs
from oktopk.wire.header import HEADER_BYTES, VERSION, Header

__all__ = ["HEADER_BYTES", "VERSION", "Header", "Packed", "Wire"]


class Packed(NamedTuple):
    """A message and the values its receiver will see: the difference stays in the sender's residual."""

    message: Tensor  # uint8
    values: Tensor  # float64 if the vector's are, else float32


class Wire:
    """Turns sparse vectors into messages and back."""

    def __init__(self, values: str = "float32", indices: str = "auto") -> None:
        if sys.byteorder != "little":
            raise UnsupportedError("messages are little-endian, and this processor is not.")
        self.values = values
        self._value_codec = _named(values, value_codecs.NAMES, "value")
        self._index_codec = None if indices == "auto" else _named(indices, index_codecs.NAMES, "index")

    def pack(self, vector: SparseVector) -> Packed:
        """One message that describes itself, on the device of the vector."""
        encoded = value_codecs.encode(vector.values, self._value_codec)
        if vector.values.device.type == "cpu":
            message = self._pack_compact(vector, encoded)
        else:
            message = _pack_raw(vector, encoded)
        return Packed(message, encoded.seen)

    def limit(self, nnz: int, numel: int, dtype: torch.dtype) -> int:
        """The most bytes that a message of so many entries can have."""
        raw = 8 if numel > 2**31 - 1 else 4  # of an index: any other coding is chosen only if it is shorter
        exact = value_codecs.FLOAT64 if dtype == torch.float64 else value_codecs.FLOAT32
        codec = exact if self._value_codec == value_codecs.FLOAT32 else self._value_codec
        return HEADER_BYTES + raw * nnz + value_codecs.nbytes(codec, nnz)

    def unpack(self, message: Tensor) -> SparseVector:
        """The vector that a message holds; float64 if it was packed from float64, else float32."""
        header = Header.from_bytes(_head(message))
        value_codecs.check(header.value_codec, header.value_parameter)
        start = HEADER_BYTES + header.index_bytes
        expected = start + value_codecs.nbytes(header.value_codec, header.nnz)
        if message.numel() != expected:
            raise WireError(f"expected a message of {expected} bytes, got {message.numel()}: truncated or damaged.")
        values = value_codecs.decode(message[start:], header.value_codec, header.value_parameter, header.nnz)
        return SparseVector(_unpack_indices(message[HEADER_BYTES:start], header), values, header.numel)

    def _pack_compact(self, vector: SparseVector, encoded: value_codecs.Encoded) -> Tensor:
        indices = vector.indices.contiguous().numpy()
        plan = index_codecs.plan(indices, vector.numel, self._index_codec)
        message = torch.empty(HEADER_BYTES + plan.nbytes + encoded.data.numel(), dtype=torch.uint8)
        start = HEADER_BYTES + plan.nbytes
        out = message.numpy()
        first = int(indices[0]) if indices.size else 0
        out[:HEADER_BYTES] = _bytes(_header(vector, plan, encoded, first))
        index_codecs.encode(indices, plan, out[HEADER_BYTES:start])
        message[start:] = encoded.data
        return message


def _header(vector: SparseVector, plan: index_codecs.Plan, encoded: value_codecs.Encoded, first: int) -> Header:
    return Header(
        plan.codec, encoded.codec, plan.parameter, encoded.parameter, vector.numel, vector.nnz, first, plan.nbytes
    )


def _pack_raw(vector: SparseVector, encoded: value_codecs.Encoded) -> Tensor:
    """Off the CPU indices travel raw: coding them there would need a round trip to the host."""
    wide = vector.numel > 2**31 - 1
    raw = vector.indices.to(torch.int64 if wide else torch.int32).view(torch.uint8)
    codec = (index_codecs.RAW64 if wide else index_codecs.RAW32) if vector.nnz else index_codecs.RUN
    plan = index_codecs.Plan(codec, 0, raw.numel())
    first = int(vector.indices[0]) if vector.nnz else 0
    header = torch.from_numpy(_bytes(_header(vector, plan, encoded, first)).copy())
    return torch.cat([header.to(raw.device), raw, encoded.data])


def _unpack_indices(data: Tensor, header: Header) -> Tensor:
    raw = header.index_codec in (index_codecs.RAW32, index_codecs.RAW64) and header.nnz > 0
    if data.device.type != "cpu" and raw:
        return _unpack_raw(data, header)
    return torch.from_numpy(index_codecs.decode(data.cpu().numpy(), header)).to(data.device)


def _unpack_raw(data: Tensor, header: Header) -> Tensor:
    index_codecs.check_raw(data.numel(), header)
    wide = header.index_codec == index_codecs.RAW64
    signed = data.clone().view(torch.int64 if wide else torch.int32).long()
    indices = signed if wide else signed & 0xFFFFFFFF
    ends = int(indices[0]) == header.first and int(indices[-1]) < header.numel
    index_codecs.require(ends and bool((indices[1:] > indices[:-1]).all()), "they do not ascend within their vector")
    return indices.to(index_dtype(header.numel))


def _head(message: Tensor) -> bytes:
    if message.dtype != torch.uint8 or message.dim() != 1:
        raise WireError(f"expected a message of uint8 in one dimension, got {message.dtype}, {tuple(message.shape)}.")
    return bytes(message[:HEADER_BYTES].cpu().numpy())


def _bytes(header: Header) -> np.ndarray:
    return np.frombuffer(header.to_bytes(), np.uint8)


def _named(name: str, codecs: dict[str, int], kind: str) -> int:
    if name not in codecs:
        raise ConfigError(f"unknown {kind} codec {name!r}. {nearest(str(name), codecs)}")
    return codecs[name]
