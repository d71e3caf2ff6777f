"""How a tensor is scanned."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch

from oktopk.errors import ConfigError, UnsupportedError, nearest
from oktopk.kernels.base import Kernels
from oktopk.kernels.reference import ReferenceKernels

__all__ = ["Choice", "Kernels", "ReferenceKernels", "choose"]

VARIABLE = "OKTOPK_KERNELS"  # set to one of BACKENDS to force it
BACKENDS = ("cpu", "reference")


@dataclass(frozen=True)
class Choice:
    """The kernels for a device, and why these."""

    kernels: Kernels
    reason: str


def choose(device: torch.device) -> Choice:
    """The fastest kernels that work on `device`; each call makes an instance with buffers of its own."""
    forced = os.environ.get(VARIABLE, "")
    if forced and forced not in BACKENDS:
        raise ConfigError(f"{VARIABLE}={forced!r} names no kernels. {nearest(forced, BACKENDS)}")
    obstacle = _obstacle(device)
    if forced == "cpu" and obstacle:
        raise UnsupportedError(f"{VARIABLE}=cpu asks for compiled kernels, but {obstacle}.")
    if forced == "reference":
        return Choice(ReferenceKernels(), f"{VARIABLE}=reference asks for plain torch")
    if obstacle:
        return Choice(ReferenceKernels(), f"plain torch: {obstacle}")
    from oktopk.kernels.cpu import CpuKernels

    return Choice(CpuKernels(), "compiled by numba for this processor")


def _obstacle(device: torch.device) -> str:
    """Why compiled kernels cannot serve `device`; empty when they can."""
    return f"tensors are on {device.type}" if device.type != "cpu" else _compiled_obstacle()


@cache
def _compiled_obstacle() -> str:
    try:
        from oktopk.kernels.cpu import CpuKernels
    except ImportError as error:
        return f"numba is missing or broken ({error})"
    try:
        agree = _same_choice(CpuKernels())
    except Exception as error:  # a compiler can fail in any way, and the reference still works
        return f"numba failed on this processor ({type(error).__name__}: {error})"
    return "" if agree else "the compiled kernels disagree with the reference on this processor"


def _same_choice(kernels: Kernels) -> bool:
    """One small selection against the specification: it exercises the vector code and the radix search."""
    x = torch.sin(torch.arange(1000.0) ** 2)
    ours, _ = kernels.select_topk(x, 37)
    theirs, _ = ReferenceKernels().select_topk(x, 37)
    return torch.equal(ours.indices, theirs.indices) and torch.equal(ours.values, theirs.values)
