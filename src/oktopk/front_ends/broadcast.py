"""Replicas that begin with the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from oktopk.kernels.staging import to_host
from oktopk.transport.base import Transport

CHUNK_BYTES = 2**26


def broadcast_(tensors: Sequence[Tensor], transport: Transport) -> None:
    """Replace tensors, of any dtype, by those of rank 0."""
    if transport.world_size == 1:
        return
    for chunk in _chunks([tensor.detach() for tensor in tensors if tensor.numel()]):
        (message,) = to_host(torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in chunk]))
        own = message if transport.rank == 0 else message[:0]
        sizes = [message.numel() if rank == 0 else 0 for rank in range(transport.world_size)]
        received = transport.all_gather(own, sizes)[0]
        parts = received.split([tensor.numel() * tensor.element_size() for tensor in chunk])
        for tensor, part in zip(chunk, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # cloned: a view must be aligned


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    for tensor in tensors:
        if chunk and sum(t.numel() * t.element_size() for t in [*chunk, tensor]) > CHUNK_BYTES:
            yield chunk
            chunk = []
        chunk.append(tensor)
    if chunk:
        yield chunk
