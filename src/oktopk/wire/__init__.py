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
from oktopk.types import SparseVector
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
        """One message that describes itself, on the host as the vector is."""
        encoded = value_codecs.encode(vector.values, self._value_codec)
        return Packed(self._message(vector, encoded), encoded.seen)

    def pack_all(self, values: Tensor) -> Packed:
        """The message that `pack` makes of a vector with all its entries: its indices are not even looked at."""
        encoded = value_codecs.encode(values, self._value_codec)
        count = values.numel()
        header = Header(index_codecs.RUN, encoded.codec, 0, encoded.parameter, count, count, 0, 0)
        return Packed(torch.cat([torch.from_numpy(_bytes(header).copy()), encoded.data]), encoded.seen)

    def unpack_all(self, message: Tensor) -> Tensor:
        """The values of a message that holds all entries of a vector."""
        header = _checked_header(message)
        if header.nnz != header.numel or header.index_codec != index_codecs.RUN or header.index_bytes:
            raise WireError(f"expected a run of all {header.numel} entries of a vector, got {header.nnz}.")
        return _values(message, header)

    def limit(self, nnz: int, numel: int, dtype: torch.dtype) -> int:
        """The most bytes that a message of so many entries can have."""
        raw = 8 if numel > 2**31 - 1 else 4  # of an index: any other coding is chosen only if it is shorter
        exact = value_codecs.FLOAT64 if dtype == torch.float64 else value_codecs.FLOAT32
        codec = exact if self._value_codec == value_codecs.FLOAT32 else self._value_codec
        return HEADER_BYTES + raw * nnz + value_codecs.nbytes(codec, nnz)

    def unpack(self, message: Tensor) -> SparseVector:
        """The vector that a message holds; float64 if it was packed from float64, else float32."""
        header = _checked_header(message)
        indices = index_codecs.decode(message[HEADER_BYTES : HEADER_BYTES + header.index_bytes].numpy(), header)
        return SparseVector(torch.from_numpy(indices), _values(message, header), header.numel)

    def _message(self, vector: SparseVector, encoded: value_codecs.Encoded) -> Tensor:
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


def _checked_header(message: Tensor) -> Header:
    """The header of a message that is as long as it says."""
    header = Header.from_bytes(_head(message))
    value_codecs.check(header.value_codec, header.value_parameter)
    expected = HEADER_BYTES + header.index_bytes + value_codecs.nbytes(header.value_codec, header.nnz)
    if message.numel() != expected:
        raise WireError(f"expected a message of {expected} bytes, got {message.numel()}: truncated or damaged.")
    return header


def _values(message: Tensor, header: Header) -> Tensor:
    start = HEADER_BYTES + header.index_bytes
    return value_codecs.decode(message[start:], header.value_codec, header.value_parameter, header.nnz)


def _head(message: Tensor) -> bytes:
    if message.dtype != torch.uint8 or message.dim() != 1:
        raise WireError(f"expected a message of uint8 in one dimension, got {message.dtype}, {tuple(message.shape)}.")
    return bytes(message[:HEADER_BYTES].numpy())


def _bytes(header: Header) -> np.ndarray:
    return np.frombuffer(header.to_bytes(), np.uint8)


def _named(name: str, codecs: dict[str, int], kind: str) -> int:
    if name not in codecs:
        raise ConfigError(f"unknown {kind} codec {name!r}. {nearest(str(name), codecs)}")
    return codecs[name]
