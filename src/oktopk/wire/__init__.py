"""Bytes: how indices and values become a message and come back.

wire = Wire("float32")
packed = wire.pack(vector)       # packed.message: uint8; packed.values: what the receiver will see
vector = wire.unpack(packed.message)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oktopk.errors import WireError
from oktopk.types import SparseVector, index_dtype

HEADER_BYTES = 24

_DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


class Packed(NamedTuple):
    """A message and the values its receiver will see: the difference stays in the sender's residual."""

    message: Tensor  # uint8
    values: Tensor


class Wire:
    """Turns sparse vectors into messages and back."""

    def __init__(self, values: str = "float32") -> None:
        self.values = values

    def pack(self, vector: SparseVector) -> Packed:
        """One message that describes itself."""
        dtype = vector.values.dtype if self.values == "float32" else getattr(torch, self.values)
        header = torch.tensor([_DTYPES.index(dtype), vector.nnz, vector.numel], dtype=torch.int64)
        values = vector.values.to(dtype)
        parts = [header.to(values.device), vector.indices.to(index_dtype(vector.numel)), values]
        return Packed(torch.cat([part.view(torch.uint8) for part in parts]), values.to(vector.values.dtype))

    def unpack(self, message: Tensor) -> SparseVector:
        """The vector a message holds; values as float32, or float64 if they were sent so."""
        if message.numel() < HEADER_BYTES:
            raise WireError(f"message of {message.numel()} bytes is shorter than its header ({HEADER_BYTES}).")
        code, nnz, numel = message[:HEADER_BYTES].view(torch.int64).tolist()
        dtype, index = _DTYPES[code], index_dtype(numel)
        end = HEADER_BYTES + nnz * index.itemsize
        values = message[end : end + nnz * dtype.itemsize].clone().view(dtype)
        values = values if dtype == torch.float64 else values.float()
        return SparseVector(message[HEADER_BYTES:end].clone().view(index), values, numel)
