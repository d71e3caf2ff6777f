"""How a tensor is scanned."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oktopk.kernels.base import Kernels
from oktopk.kernels.reference import ReferenceKernels

__all__ = ["Choice", "Kernels", "ReferenceKernels", "choose"]


@dataclass(frozen=True)
class Choice:
    """The kernels for a device, and why these."""

    kernels: Kernels
    reason: str


def choose(device: torch.device) -> Choice:
    """The fastest kernels that work on `device`; each call makes an instance with buffers of its own."""
    return Choice(ReferenceKernels(), f"plain torch on {device.type}")
