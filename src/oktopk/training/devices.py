"""Where a rank computes, and in which precision."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.amp import GradScaler

from oktopk.errors import UnsupportedError
from oktopk.kernels.staging import to_device

T = TypeVar("T")
DeviceName = Literal["auto", "cpu", "cuda"]
Precision = Literal["float32", "bfloat16", "float16"]
_NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class GpuMemory:
    """What a process has of its GPU. On the CPU there is nothing to say, and all of it is absent."""

    gpu_allocated_bytes: int | None = None  # by tensors, now
    gpu_peak_bytes: int | None = None  # the most that tensors took at a time, so far
    gpu_reserved_bytes: int | None = None  # by torch, which hands it out again

    def known(self) -> dict[str, int]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Place:
    """The device of a rank, and the precision in which it computes; weights and gradients are float32 in any."""

    device: torch.device
    precision: Precision = "float32"

    @property
    def name(self) -> str:
        return str(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else self.device.type

    def take(self, batch: T) -> T:
        """A batch with its tensors on the device, by way of pinned memory: nobody waits for the copy."""
        return batch if self.device.type == "cpu" else cast(T, _moved(batch, self.device))

    def autocast(self) -> AbstractContextManager[Any]:
        """A context for forward passes."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, _NARROW[self.precision])

    def make_scaler(self) -> GradScaler | None:
        """What keeps gradients inside the range of float16; wider formats need none."""
        return GradScaler(self.device.type) if self.precision == "float16" else None

    def memory(self) -> GpuMemory:
        if self.device.type != "cuda":
            return GpuMemory()
        return GpuMemory(
            torch.cuda.memory_allocated(self.device),
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.memory_reserved(self.device),
        )

    def finish(self) -> None:
        """Wait until the device has done all that it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


HOST = Place(torch.device("cpu"))


def find_place(wanted: DeviceName, rank: int, precision: Precision = "float32") -> Place:
    """A GPU for each rank of a host, by its number there; with fewer GPUs than ranks they share them.

    `auto` takes GPUs where there are any.
    """
    if kind_of(wanted) == "cpu":
        return Place(torch.device("cpu"), precision)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return Place(device, precision)


def kind_of(wanted: DeviceName) -> Literal["cpu", "cuda"]:
    """What a wish comes to on this host; a GPU that is not there is an error."""
    has_gpu = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if wanted == "cuda" and not has_gpu:
        raise UnsupportedError(
            f"--device cuda wants a GPU, and torch {torch.__version__} sees none here: {_why_none()} "
            "Or compute on the processor, with --device cpu."
        )
    return "cuda" if has_gpu and wanted != "cpu" else "cpu"


def allow_determinism() -> None:
    """Let cuBLAS work under `torch.use_deterministic_algorithms`: it looks here when it is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _why_none() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return "it was built without CUDA. Install one for CUDA or ROCm (pytorch.org)."
    return "does nvidia-smi list one, and does CUDA_VISIBLE_DEVICES not hide it?"


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return to_device(device, value)[0]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: _moved(getattr(value, field.name), device) for field in fields(value)})
    if isinstance(value, Mapping):
        return {name: _moved(part, device) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
