"""The metrics channel: what the loop saw and what the reducer recorded meet here, once, when they are drained.

The reducer hands its records to a `MemorySink` on its own thread, before what was reduced goes back to the loop. Once
nothing travels any more all records are there: draining waits for nothing and finds nothing half-written.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from time import perf_counter
from typing import Any

from oktopk.metrics import MemorySink, StepRecord, merge
from oktopk.training.devices import GpuMemory
from oktopk.training.world import World

LOOP_PHASES = ("turn", "data", "forward", "backward", "wait", "optimizer")


@dataclass(frozen=True)
class StepEntry:
    """One optimizer step: the loop's own numbers, and the reducer's."""

    step: int
    epoch: int
    loss: float  # mean over ranks once drained
    lr: float
    wall_seconds: float  # since the start of the run, over all its resumptions
    memory_bytes: int  # peak resident memory of rank 0
    seconds: Mapping[str, float]
    reduce: StepRecord | None  # None: nothing was sent, as between synchronisations of updates
    gpu: GpuMemory = field(default_factory=GpuMemory)  # of rank 0

    def to_json(self) -> dict[str, Any]:
        seconds = {name: self.seconds.get(name, 0.0) for name in LOOP_PHASES}
        row = {
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss,
            "lr": self.lr,
            "wall_seconds": self.wall_seconds,
            "memory_bytes": self.memory_bytes,
            **self.gpu.known(),
            "seconds": seconds,
        }
        if self.reduce is None:
            return row
        return row | {"seconds": seconds | dict(self.reduce.seconds), "reduce": self.reduce.to_json()}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> StepEntry:
        # A loss that was not finite is absent from the file.
        reduce = StepRecord.from_json(row["reduce"]) if "reduce" in row else None
        names = {f.name for f in fields(GpuMemory)}
        gpu = GpuMemory(**{name: row[name] for name in names & row.keys()})
        rest = {name: value for name, value in row.items() if name not in names}
        return StepEntry(**{"loss": float("nan"), **rest, "reduce": reduce, "gpu": gpu})


@dataclass(frozen=True)
class EpochEntry:
    """One epoch. What has no data is None here and absent in the file."""

    epoch: int
    steps: int
    dense_steps: int
    sparse_steps: int
    skipped_steps: int
    seconds: float
    wall_seconds: float
    local_steps: int | None = None  # in which nothing was sent, if there were any
    train_loss: float | None = None
    sparsity: float | None = None  # over the sparse steps
    compression_ratio: float | None = None  # over the sparse steps
    bytes_per_step: float | None = None  # sent by rank 0, over all steps
    sparse_bytes_per_step: float | None = None
    dense_bytes_per_step: float | None = None  # what a dense all-reduce sends
    gpu_allocated_bytes: int | None = None  # these three: of rank 0, at the end; see `GpuMemory`
    gpu_peak_bytes: int | None = None
    gpu_reserved_bytes: int | None = None
    validation: Mapping[str, float] | None = None

    @property
    def sent_per_dense_step(self) -> float | None:
        """By rank 0; with several ranks per host that is less than a dense all-reduce of all ranks sends."""
        if self.bytes_per_step is None or not self.dense_steps:
            return None
        of_sparse = (self.sparse_bytes_per_step or 0.0) * self.sparse_steps
        return (self.bytes_per_step * self.steps - of_sparse) / self.dense_steps

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class Stopwatch:
    """Seconds per phase of the loop."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(LOOP_PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += perf_counter() - start

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken, self._seconds = self._seconds, dict.fromkeys(LOOP_PHASES, 0.0)
        return taken


class Journal:
    """Collects the steps of this rank until they are drained."""

    def __init__(self, gpu_memory: Callable[[], GpuMemory] = GpuMemory) -> None:
        self.sink = MemorySink()
        self._gpu_memory = gpu_memory
        self._noted: list[dict[str, Any]] = []

    def note(self, **values: Any) -> None:
        """The loop's numbers of one step."""
        self._noted.append(values | {"memory_bytes": peak_memory(), "gpu": self._gpu_memory()})

    def drain(self, world: World) -> list[StepEntry]:
        """All steps since the last call, with the loss averaged over ranks. Every rank calls this together."""
        noted, self._noted = self._noted, []
        records = _by_step(self.sink.drain())
        entries = [StepEntry(**values, reduce=records.get(values["step"])) for values in noted]
        totals = world.total([entry.loss for entry in entries]) if entries else []
        return [replace(e, loss=total / world.world_size) for e, total in zip(entries, totals, strict=True)]


def summarize_epoch(epoch: int, entries: Sequence[StepEntry], seconds: float, wall_seconds: float) -> EpochEntry:
    """The epoch's numbers from those of its steps; dense steps count with everything they sent."""
    records = [entry.reduce for entry in entries if entry.reduce is not None]
    sparse = [record for record in records if record.phase == "sparse"]
    gpu = entries[-1].gpu if entries else GpuMemory()
    return EpochEntry(
        epoch=epoch,
        steps=len(entries),
        dense_steps=len(records) - len(sparse),
        sparse_steps=len(sparse),
        skipped_steps=sum(record.skipped for record in records),
        local_steps=len(entries) - len(records) or None,
        seconds=seconds,
        wall_seconds=wall_seconds,
        train_loss=mean([entry.loss for entry in entries if entry.loss == entry.loss]),
        sparsity=mean([record.sparsity for record in sparse]),
        compression_ratio=mean([record.compression_ratio for record in sparse]),
        bytes_per_step=sum(record.bytes_sent for record in records) / len(entries) if entries else None,
        sparse_bytes_per_step=mean([record.bytes_sent for record in sparse]),
        dense_bytes_per_step=mean([record.dense_bytes for record in records]),
        gpu_allocated_bytes=gpu.gpu_allocated_bytes,
        gpu_peak_bytes=gpu.gpu_peak_bytes,
        gpu_reserved_bytes=gpu.gpu_reserved_bytes,
    )


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None when there is nothing to average."""
    return sum(values) / len(values) if values else None


def peak_memory() -> int:
    """Bytes of resident memory this process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _by_step(records: Sequence[StepRecord]) -> dict[int, StepRecord]:
    """All buckets of each step as one record."""
    buckets: dict[int, dict[str, StepRecord]] = {}
    for record in records:
        known = buckets.setdefault(record.step, {})
        known[record.bucket] = _also_sent(known[record.bucket], record) if record.bucket in known else record
    return {step: merge(list(parts.values())) for step, parts in buckets.items()}


def _also_sent(first: StepRecord, more: StepRecord) -> StepRecord:
    """A bucket that was reduced twice in one step: the final mean of updates follows their last synchronisation."""
    names = ("bytes_sent", "bytes_received", "messages")
    sums = {name: getattr(first, name) + getattr(more, name) for name in names}
    return replace(first, **sums, final_bytes=first.final_bytes + more.bytes_sent)
