"""Which kernels serve a device, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from oktopk.errors import ConfigError, UnsupportedError, nearest
from oktopk.kernels.base import Kernels
from oktopk.kernels.reference import ReferenceKernels
from oktopk.kernels.staged import StagedKernels
from oktopk.types import SparseVector

VARIABLE = "OKTOPK_KERNELS"  # set to one of BACKENDS to force it
BACKENDS = ("cpu", "triton", "reference")
INTERPRET = "TRITON_INTERPRET"  # Triton's own switch: kernels for GPUs run on the CPU, very slowly

_TRIAL = 70_000  # entries: enough for a sample, and more than one block
_TRIAL_K = 700


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
    if device.type == "cpu" and not (forced == "triton" and _is_interpreted()):
        return _choose_for_cpu(forced)
    return _choose_for_device(device, forced)


def _choose_for_cpu(forced: str) -> Choice:
    if forced == "reference":
        return Choice(ReferenceKernels(), f"{VARIABLE}=reference asks for plain torch")
    obstacle = _compiled_obstacle()
    if forced == "cpu" and obstacle:
        raise UnsupportedError(f"{VARIABLE}=cpu asks for compiled kernels, but {obstacle}.")
    if obstacle:
        return Choice(ReferenceKernels(), f"plain torch: {obstacle}")
    from oktopk.kernels.cpu import CpuKernels

    return Choice(CpuKernels(), "compiled by numba for this processor")


def _choose_for_device(device: torch.device, forced: str) -> Choice:
    """Sparse vectors are on the host, whatever the device: so kernels for it need those of the host."""
    if forced == "cpu":
        raise UnsupportedError(f"{VARIABLE}=cpu asks for the kernels of the CPU, but tensors are on {device.type}.")
    host = _choose_for_cpu("reference" if forced == "reference" else "").kernels
    if forced == "reference":
        return Choice(StagedKernels(device, host), f"{VARIABLE}=reference asks for plain torch")
    obstacle = _triton_obstacle(device)
    if forced == "triton" and obstacle:
        raise UnsupportedError(f"{VARIABLE}=triton asks for kernels compiled by Triton, but {obstacle}.")
    if obstacle:
        return Choice(StagedKernels(device, host), f"plain torch: {obstacle}")
    from oktopk.kernels.triton import TritonKernels

    how = "interpreted, which is very slow" if _is_interpreted() else "compiled by Triton for this device"
    return Choice(TritonKernels(device, host), how)


@cache
def _compiled_obstacle() -> str:
    """Why compiled kernels cannot serve the CPU; empty when they can."""
    try:
        from oktopk.kernels.cpu import CpuKernels
    except ImportError as error:
        return f"numba is missing or broken ({error})"
    try:
        agree = _same_choice(CpuKernels())
    except Exception as error:  # a compiler can fail in any way, and the reference still works
        return f"numba failed on this processor ({type(error).__name__}: {error})"
    return "" if agree else "the compiled kernels disagree with the reference on this processor"


@cache
def _triton_obstacle(device: torch.device) -> str:
    """Why Triton's kernels cannot serve a device; empty when they can."""
    if device.type not in ("cuda", "cpu"):
        return f"tensors are on {device.type}, which has no compiled kernels yet"
    try:
        from oktopk.kernels.triton import TritonKernels
    except ImportError as error:
        return f"triton is missing or broken ({error}): pip install 'oktopk[gpu]'"
    if _is_interpreted():
        return ""  # the tests are about that
    try:
        agree = _same_step(TritonKernels(device, ReferenceKernels()), device)
    except Exception as error:  # as above
        return f"triton failed on this device ({type(error).__name__}: {error})"
    return "" if agree else "Triton's kernels disagree with the reference on this device"


def _is_interpreted() -> bool:
    return os.environ.get(INTERPRET, "0") == "1"


def _same_choice(kernels: Kernels) -> bool:
    """One small selection against the specification: it exercises the vector code and the radix search."""
    x = torch.sin(torch.arange(1000.0) ** 2)
    return _agree(kernels.select_topk(x, 37)[0], ReferenceKernels().select_topk(x, 37)[0])


def _same_step(kernels: Kernels, device: torch.device) -> bool:
    """All that a gradient goes through, against the specification on the host."""
    wave = torch.sin(torch.arange(2.0 * _TRIAL, dtype=torch.float64) ** 2).float()
    chosen, residual, mean = _step(kernels, wave.to(device))
    expected, kept, filled = _step(ReferenceKernels(), wave)
    return _agree(chosen, expected) and torch.equal(residual.cpu(), kept) and torch.equal(mean.cpu(), filled)


def _step(kernels: Kernels, wave: Tensor) -> tuple[SparseVector, Tensor, Tensor]:
    residual, grad = wave[:_TRIAL].clone(), wave[_TRIAL:].clone()
    kernels.accumulate_(residual, grad, _TRIAL_K)
    chosen, _ = kernels.select_topk(residual, _TRIAL_K)
    kernels.retain_(residual, chosen.with_values(chosen.values / 2))
    kernels.fill_([grad], chosen)
    return chosen, residual, grad


def _agree(ours: SparseVector, theirs: SparseVector) -> bool:
    return torch.equal(ours.indices, theirs.indices) and torch.equal(ours.values, theirs.values)
