"""What the trainer tells whoever watches; how it is shown is their business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oktopk.metrics import StepRecord
from oktopk.training.journal import EpochEntry


@dataclass(frozen=True)
class Start:
    """A run is about to begin or to continue."""

    run: Path
    workload: str
    preset: str
    parameters: int
    algorithm: str
    density: float | None  # None: everything is sent
    warmup_steps: int
    world_size: int
    epochs: int
    steps_per_epoch: int
    step: int  # steps already done, when resumed
    epoch: int
    metric: str
    notices: tuple[str, ...]  # of the workload
    computed_on: str = "cpu"  # or the name of the GPU of rank 0
    precision: str = "float32"


@dataclass(frozen=True)
class Step:
    """One step is done."""

    step: int
    epoch: int
    batch: int  # optimizer steps done in this epoch
    loss: float  # of rank 0
    lr: float
    reduce: StepRecord | None  # None: nothing was sent


@dataclass(frozen=True)
class Summary:
    """A run has ended."""

    run: Path
    steps: int
    epochs: int
    dense_steps: int
    sparse_steps: int
    local_steps: int  # in which nothing was sent
    wall_seconds: float
    bytes_sent: int  # by rank 0
    dense_bytes: int  # what dense all-reduces would have sent
    train_loss: float | None  # of the last epoch
    validation: Mapping[str, float] | None  # the latest
    metric: str
    best: float | None
    stopped_by: str | None  # a signal, early stop or the limit of steps; None: it ran to its end
    notice: str | None  # what a reader of the numbers must know
    gpu_allocated_bytes: int | None = None  # these three: of rank 0, at the end; see `GpuMemory`
    gpu_peak_bytes: int | None = None
    gpu_reserved_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if value is not None}
        return values | {"run": str(self.run)}


class Observer:
    """Watches in silence; override what you want to hear of. Called on rank 0 only."""

    def preparing(self, done: int, total: int) -> None:
        """Data are being made or read for the first time."""

    def started(self, start: Start) -> None:
        """The run begins."""

    def step(self, step: Step) -> None:
        """A step is done."""

    def validating(self, epoch: int) -> None:
        """Validation begins."""

    def epoch(self, entry: EpochEntry) -> None:
        """An epoch is over."""

    def saved(self, path: Path) -> None:
        """A checkpoint was written."""

    def finished(self, summary: Summary) -> None:
        """The run is over."""
