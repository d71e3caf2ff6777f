"""Copies between a device and the host. All that the host must wait for is here."""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk.types import SparseVector


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Copies in the memory of the host, after one wait for all of them. Those that are there come back as they are.

    Pinned memory is torch's to keep: it is handed out again when nobody holds it and no copy is under way.
    """
    if not tensors[0].is_cuda:
        return [tensor.cpu() for tensor in tensors]
    copies = [_pinned(tensor) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    _wait_for(tensors[0].device)
    return copies


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copies in the memory of a device, in the order of its stream: nobody waits."""
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    copies = [_pinned(tensor).copy_(tensor) for tensor in tensors]
    return [copy.to(device, non_blocking=True) for copy in copies]


def vector_to_host(vector: SparseVector) -> SparseVector:
    indices, values = to_host(vector.indices, vector.values)
    return SparseVector(indices, values, vector.numel)


def vector_to_device(vector: SparseVector, device: torch.device) -> SparseVector:
    indices, values = to_device(device, vector.indices, vector.values)
    return SparseVector(indices, values, vector.numel)


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def _wait_for(device: torch.device) -> None:
    """For all that this thread's stream was told."""
    # An event that blocks leaves the processor to others; the default would spin.
    done = torch.cuda.Event(blocking=True)
    done.record(torch.cuda.current_stream(device))
    done.synchronize()
