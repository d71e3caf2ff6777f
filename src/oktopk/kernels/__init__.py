"""How a tensor is scanned."""

from __future__ import annotations

from oktopk.kernels.base import Kernels
from oktopk.kernels.by_device import KernelsByDevice
from oktopk.kernels.choice import Choice, choose
from oktopk.kernels.reference import ReferenceKernels

__all__ = ["Choice", "Kernels", "KernelsByDevice", "ReferenceKernels", "choose"]
